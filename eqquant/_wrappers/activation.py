"""Weights whose products quantize activations, dynamically or with static scales."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import wadler_lindig as wl
from jaxtyping import Array, ArrayLike, Float, Float32, UInt8, UInt32

from .. import _compat
from .._array.checks import check_parameters
from .._array.contraction import AbstractOperand, as_matrices, Constraints, get_constraints, linear, MatrixAxes, Options
from .._array.moves import Axes
from .._array.value import AbstractArrayValue, as_permutation
from .._errors import name_type
from .._formats.base import AbstractFormat, check_no_tiles, has_one_scale, has_zero_points
from .._formats.names import as_format
from .._matmul.rows import AbstractRows, DynamicRows, StaticRows
from .._types import PyTree
from .base import AbstractMatmulOverride, with_array
from .learned_scale import decode_learned_scale, ste_source


class ActivationQuantizedArray(AbstractMatmulOverride):
    r"""A quantized weight whose products quantize the activations too.

    [`eqquant.quantize_tree`][] makes it with `activations=`. `w @ x` quantizes `x` per token (column) to the format
    `activations`, multiplies codes by codes, and scales the result; of a complex `x`, the real and the imaginary part
    apart. This is dynamic quantization; with `scale` it is static. Gradients pass straight through the rounding of `x`.
    Apart from products it behaves as the weight: a lookup `w[i]` returns its rows.

    !!! Example

        ```python
        w = eqq.arrays.ActivationQuantizedArray(eqq.quantize(w, "int8"), "int8")
        y = w @ x                                  # int8 times int8, summed in int32
        print(eqq.explain_matmul(x, w.T))          # what runs, in which types
        ```

    **Arguments:**

    - `array`: the weight, a [`eqquant.QuantizedArray`][] or another array of this library.
    - `activations`: the format of the activations, or its lower-case name. Scales are per token or per block: tokens
        never share one, even if `block_size="tensor"`.
    - `scale`, `zero_point`: the static scale (and zero point, if the format has one) from calibration. Of shape `()`,
        or one for each layer of a stack, `(layers,)`. They need a format without blocks. Values beyond their range are
        clipped, and get no gradient.
    - `learn_scale`: whether that scale trains. It then holds a factor, stored as its logarithm, a float leaf.
    """

    lost_in_jax = "its products quantize no activations"

    array: PyTree
    activations: AbstractFormat
    scale_bits: UInt32[Array, "*stack"] | None
    zero_point: UInt8[Array, "*stack"] | None
    log_factor: Float32[Array, "*stack"] | None

    def __init__(
        self,
        array: PyTree,
        activations: AbstractFormat | str,
        scale: ArrayLike | None = None,
        zero_point: ArrayLike | None = None,
        *,
        learn_scale: bool = False,
    ) -> None:
        self.array = array
        self.activations = check_no_tiles(as_format(activations, "activations"), "activations")
        if not isinstance(array, AbstractArrayValue):
            raise TypeError(
                f"`array` must be a quantized weight. Got {name_type(array)}. Quantize it: `eqq.quantize(w, 'int8')`."
            )
        if isinstance(array, AbstractMatmulOverride):
            raise TypeError(
                f"`array` must be a weight whose products are not changed yet. Got {name_type(array)}. Quantize "
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
        """The static scale, from calibration or learned; `None` for dynamic quantization."""
        return None if self.scale_bits is None else decode_learned_scale(self.scale_bits, self.log_factor)

    @property
    def products(self) -> str:
        """What its products do, for reports."""
        return f"quantize activations, to {self.activations!r}"

    def with_fixed_scale(self) -> "ActivationQuantizedArray":
        """Fixes a learned scale at the value that it has, so that it no longer trains.

        **Returns:**

        An array with the same values. Without a learned scale, this array itself.
        """
        if self.log_factor is None:
            return self
        return ActivationQuantizedArray(self.array, self.activations, self.scale, self.zero_point)

    def transpose(self, *axes: int | Sequence[int] | None) -> Array | AbstractArrayValue:
        """Permutes the logical axes of the weight."""
        order, batch = as_permutation(axes, self.ndim), self.ndim - 2
        array = self.array.transpose(order)
        moves_stack = self.scale_bits is not None and self.scale_bits.ndim > 0 and order[:batch] != list(range(batch))
        return array if moves_stack else self._rewrap(array)

    def reshape(self, *shape: int | Sequence[int], **kwargs: Any) -> Array | AbstractArrayValue:
        """Reshapes the weight."""
        array = self.array.reshape(*shape, **kwargs)
        stacked = self.scale_bits is not None and self.scale_bits.ndim > 0
        return array if stacked else self._rewrap(array)

    def _rewrap(self, array: PyTree) -> Array | AbstractArrayValue:
        # While training, floats may stand in for the weight.
        stand_in = not isinstance(self.array, AbstractArrayValue) and jnp.issubdtype(array.dtype, jnp.floating)
        if not stand_in and not isinstance(array, AbstractArrayValue):
            return array
        return with_array(self, array)

    @property
    def constraints(self) -> Constraints:
        """For products: the constraints of the weight; layers with own scales stay apart."""
        within = get_constraints(self.array)
        layers = 0 if self.scale_bits is None else self.scale_bits.ndim
        return within._replace(stack=max(within.stack, layers))

    def as_matrices(self, axes: MatrixAxes) -> "ActivationQuantizedArray":
        """For products: the weight as matrices, and scales that broadcast to rows."""
        front = axes.shape(self.shape)[:-2]
        layers = 0 if self.scale_bits is None else self.scale_bits.ndim
        stacked = sum(axis < layers for axis in axes.front)
        arrange = lambda leaf: leaf.reshape(*front[:stacked], *[1] * (len(front) - stacked + 2)) if layers else leaf
        scales = jtu.tree_map(arrange, (self.scale_bits, self.zero_point, self.log_factor))
        parts = lambda w: (w.array, w.scale_bits, w.zero_point, w.log_factor)
        is_part = lambda x: any(x is part for part in parts(self))
        return eqx.tree_at(parts, self, (as_matrices(self.array, axes), *scales), is_leaf=is_part)

    def linear(self, x: Array | AbstractOperand, options: Options) -> Float[Array, "*batch m n"]:
        """For products: the product of the weight, with quantized rows of `x`."""
        return linear(self.array, x, options._replace(quantize_x=self.quantize_rows))

    def leaf_axes(self, leaf: Array) -> Axes:
        return tuple(range(leaf.ndim))  # scales: one, or one for each array of a stack

    def quantize_rows(self, rows: Float[Array, "*batch rows length"]) -> AbstractRows:
        """Returns rows of activations for the product to quantize."""
        if self.scale is None:
            return DynamicRows(rows, self.activations)
        per_row = lambda value: jnp.broadcast_to(value, (*rows.shape[:-1], 1))
        parameters = jtu.tree_map(per_row, (self.scale, self.zero_point))
        rows, scale, zero_point = _compat.vary_alike((rows, *parameters))
        static = StaticRows(rows, self.activations, scale, zero_point, None)
        return dataclasses.replace(static, gradient_of=ste_source(rows, static.quantize(), self.log_factor))

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        learned = "" if self.log_factor is None else ", learned"
        static = "" if self.scale_bits is None else f", scale from calibration{learned}"
        return wl.TextDoc(
            f"ActivationQuantizedArray({wl.pformat(self.array)}, activations={self.activations!r}{static})"
        )
