"""Quantized activations: rows that a product quantizes, and weights whose products quantize what they multiply."""

import abc
import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, Float, Float32, UInt8, UInt32

from .. import _compat
from .._errors import a_type
from .._formats.base import AbstractFormat, as_format, has_one_scale, has_zero_points, spans_rows
from .._methods import AbsMax, AbstractMethod
from .._methods.given import GivenScales
from .array import QuantizedArray
from .clipped import clipped
from .quantize import check_parameters, quantize_array
from .value import AbstractArrayValue, as_permutation, multiply
from .wrapped import AbstractWrappedArray


class AbstractRows(eqx.Module):
    """Floats `(*batch, rows, length)`, each row of which a product quantizes on its own.

    An operand of the product's primitive. An implementation quantizes the rows where that is cheapest. Rows do not
    depend on each other, so a `vmap` may add more of them. `gradient_of` is that of a `QuantizedArray`.
    """

    rows: eqx.AbstractVar[Float[Array, "*batch rows length"]]
    format: eqx.AbstractVar[AbstractFormat]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.rows.dtype)

    @abc.abstractmethod
    def quantized(self) -> QuantizedArray:
        """Quantizes each row."""

    def dequantize(self) -> Float[Array, "*batch rows length"]:
        """Returns the values of the quantized rows."""
        return self.quantized().dequantize()

    def _quantized(self, method: AbstractMethod, gradient_of: Array | None) -> QuantizedArray:
        rows = jax.lax.stop_gradient(self.rows)
        quantized = lambda rows, method: quantize_array(rows, self.format, (-1,), None, None, method)
        if spans_rows(self.format):
            flat = lambda leaf: leaf.reshape(math.prod(rows.shape[:-1]), leaf.shape[-1])
            one_by_one = jax.vmap(quantized)(*jtu.tree_map(flat, (rows, method)))
            q = jtu.tree_map(lambda leaf: leaf.reshape(*rows.shape[:-1], leaf.shape[-1]), one_by_one)
        else:
            q = quantized(rows, method)
        return dataclasses.replace(q, logical_sharding=None, gradient_of=gradient_of)


class DynamicRows(AbstractRows):
    """Rows that get scales by their own values, and all of the gradient."""

    rows: Float[Array, "*batch rows length"]
    format: AbstractFormat

    @property
    def gradient_of(self) -> Any:
        return self.rows

    def quantized(self) -> QuantizedArray:
        return self._quantized(AbsMax(), self.gradient_of)


class StaticRows(AbstractRows):
    """Rows with scales, and perhaps zero points, that are known before. A row that is not finite becomes NaN."""

    rows: Float[Array, "*batch rows length"]
    format: AbstractFormat
    scale: Float32[Array, "*batch rows 1"]
    zero_point: UInt8[Array, "*batch rows 1"] | None
    gradient_of: Float[Array, "*batch rows length"] | None

    def quantized(self) -> QuantizedArray:
        return self._quantized(GivenScales(self.scale, self.zero_point), self.gradient_of)


class ActivationQuantizedArray(AbstractWrappedArray):
    r"""A quantized weight whose products quantize the other operand too, and multiply codes with codes.

    [`eqquant.quantize_tree`][] makes it with `activations=`. `w @ x` quantizes each column of `x` (each example, or
    token) to the format `activations`, multiplies, and scales the result; of a complex `x`, the real and the imaginary
    part apart. Gradients pass straight through the rounding of `x`. Apart from products it behaves as the weight: a
    lookup `w[i]` returns its rows.

    !!! Example

        ```python
        w = eqq.ActivationQuantizedArray(eqq.quantize(w, "int8"), "int8")
        y = w @ x                                  # int8 times int8, summed in int32
        print(eqq.explain_matmul(x, w.T))          # what runs, in which types
        ```

    **Arguments:**

    - `array`: the weight, a [`eqquant.QuantizedArray`][] or another array of this library.
    - `activations`: the format of the other operand, or its lower-case name. A scale covers a block of one example, or
        all of it: examples never share one, even if `block_size="tensor"`.
    - `scale`, `zero_point`: a scale (and zero point, if the format has one) from calibration, instead of one for each
        example. Scalars, or one for each layer of a stack. They need a format without blocks. Values beyond their
        range are clipped, and get no gradient.
    - `learn_scale`: whether that scale trains. It then holds a factor, stored as its logarithm, a float leaf.
    """

    array: Any
    activations: AbstractFormat
    scale_bits: UInt32[Array, "*stack"] | None
    zero_point: UInt8[Array, "*stack"] | None
    log_factor: Float32[Array, "*stack"] | None

    def __init__(
        self,
        array: Any,
        activations: AbstractFormat | str,
        scale: Any = None,
        zero_point: Any = None,
        *,
        learn_scale: bool = False,
    ) -> None:
        self.array = array
        self.activations = as_format(activations, "activations")
        if not isinstance(array, AbstractArrayValue):
            raise TypeError(
                f"`array` must be a quantized weight. Got {a_type(array)}. Quantize it: `eqq.quantize(w, 'int8')`."
            )
        if isinstance(array, AbstractWrappedArray):
            raise TypeError(
                f"`array` must be a weight whose products are not changed yet. Got {a_type(array)}. Quantize "
                "the weight within: `eqq.quantize(w.dequantize())`."
            )
        static = scale is not None
        self.scale_bits = jax.lax.bitcast_convert_type(jnp.asarray(scale, jnp.float32), jnp.uint32) if static else None
        self.zero_point = None if zero_point is None else jnp.asarray(zero_point).astype(jnp.uint8)
        if static and not has_one_scale(self.activations):
            raise ValueError(
                f"`scale` must come with a format of one scale. Got {self.activations!r}. A scale for each block is "
                "found for each example: leave `scale` out."
            )
        if learn_scale and not static:
            raise ValueError("`learn_scale=True` needs a scale to begin with. Got none. Calibrate, and pass `scale`.")
        self.log_factor = jnp.zeros_like(jnp.asarray(scale), jnp.float32) if learn_scale else None
        stack = () if self.scale_bits is None else self.scale_bits.shape
        if len(stack) > max(array.ndim - 2, 0) or tuple(array.shape[: len(stack)]) != stack:
            raise ValueError(
                f"`scale` must be one number, or one for each layer of a stack. Got shape {stack} for a weight of "
                f"shape {tuple(array.shape)}. Calibrate with one range for all values."
            )
        if (self.zero_point is not None) != (static and has_zero_points(self.activations)):
            raise ValueError(
                "`zero_point` must be given with `scale` for a format that has one, and for no other. Got "
                f"{'none' if zero_point is None else 'one'} for {self.activations!r}."
            )
        if static:
            self._check_values(jnp.asarray(scale), None if zero_point is None else jnp.asarray(zero_point))

    def _check_values(self, scale: Array, zero_point: Array | None) -> None:
        check_parameters(scale, zero_point, self.activations)
        if isinstance(scale, jax.core.Tracer):
            return
        with jax.ensure_compile_time_eval():
            if not bool((scale > 0).all()):
                raise ValueError(
                    "`scale` must be positive. Got one that is not. Calibrate on data whose values are not zero or "
                    "subnormal everywhere."
                )

    @property
    def scale(self) -> Float32[Array, "*stack"] | None:
        """The scale from calibration, perhaps trained since, or `None` if each example gets its own."""
        if self.scale_bits is None:
            return None
        scale = jax.lax.bitcast_convert_type(self.scale_bits, jnp.float32)
        return scale if self.log_factor is None else scale * jnp.exp(jax.lax.stop_gradient(self.log_factor))

    def with_fixed_scale(self) -> "ActivationQuantizedArray":
        """Fixes a learned scale at the value that it has, so that it no longer trains.

        **Returns:**

        An array with the same values. Without a learned scale, this array itself.
        """
        if self.log_factor is None:
            return self
        return ActivationQuantizedArray(self.array, self.activations, self.scale, self.zero_point)

    def transpose(self, *axes: Any) -> Any:
        """Permutes the logical axes of the weight."""
        order, batch = as_permutation(axes, self.ndim), self.ndim - 2
        array = self.array.transpose(order)
        moved = self.scale_bits is not None and self.scale_bits.ndim > 0 and order[:batch] != list(range(batch))
        return array if moved else self._around(array)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """Reshapes the weight."""
        array = self.array.reshape(*shape, **kwargs)
        stacked = self.scale_bits is not None and self.scale_bits.ndim > 0
        return array if stacked else self._around(array)

    def _around(self, array: Any) -> Any:
        # While training, floats may stand in the place of the weight.
        stand_in = not isinstance(self.array, AbstractArrayValue) and jnp.issubdtype(array.dtype, jnp.floating)
        if not stand_in and not isinstance(array, AbstractArrayValue):
            return array
        return self._holding(array)

    def _holding(self, array: Any) -> "ActivationQuantizedArray":
        return eqx.tree_at(lambda w: w.array, self, array, is_leaf=lambda x: x is self.array)

    def _matmul(self, other: Any, *, left: bool, **options: Any) -> Array:
        if not isinstance(other, AbstractArrayValue) and jnp.iscomplexobj(other):
            parts = (jnp.real(other), jnp.imag(other))  # each is quantized as real numbers are
            return jax.lax.complex(*(self._matmul(part, left=left, **options) for part in parts))
        if self.scale_bits is not None and self.scale_bits.ndim > 0:
            # A stack: each layer has its scale, and its part of an operand with as many axes.
            x = jnp.asarray(other)
            ahead = x.ndim - self.ndim  # where `x` has the axis of the layers
            if ahead >= 0 and self.shape[0] == 1:
                return jtu.tree_map(lambda leaf: leaf[0], self)._matmul(x, left=left, **options)
            shared = ahead < 0 or x.shape[ahead] == 1
            x = jnp.squeeze(x, ahead) if shared and ahead >= 0 else x
            product = lambda w, x: w._matmul(x, left=left, **options)
            return jax.vmap(product, (0, None if shared else ahead), max(ahead, 0))(self, x)
        return multiply(self.array, other, left=left, activations=self.quantize_rows, **options)

    def quantize_rows(self, rows: Float[Array, "*batch rows length"]) -> AbstractRows:
        """Returns rows of the other operand, to be quantized by the product."""
        if self.scale is None:
            return DynamicRows(rows, self.activations)
        of_rows = lambda value: jnp.broadcast_to(value, (*rows.shape[:-1], 1))
        given = jtu.tree_map(of_rows, (self.scale, self.zero_point))
        rows, scale, zero_point = _compat.vary_alike((rows, *given))
        static = StaticRows(rows, self.activations, scale, zero_point, None)
        return dataclasses.replace(static, gradient_of=clipped(rows, static.quantized(), self.log_factor))

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        learned = "" if self.log_factor is None else ", learned"
        static = "" if self.scale_bits is None else f", scale from calibration{learned}"
        return wl.TextDoc(
            f"ActivationQuantizedArray({wl.pformat(self.array)}, activations={self.activations!r}{static})"
        )
