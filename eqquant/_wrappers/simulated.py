"""Fake quantization: float masters that are quantized at each use."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Float32, PRNGKeyArray, UInt32

from .._array.array import QuantizedArray
from .._array.checks import check_quantizable
from .._array.contraction import AbstractOperand, Constraints, MatrixAxes, Options
from .._array.dequantize import in_memory_order
from .._array.moves import Move
from .._array.quantize import quantize_array
from .._array.straight_through import value_of
from .._array.value import AbstractArrayValue, Index
from .._formats.base import AbstractFormat, has_offsets, has_zero_points, spans_rows
from .._formats.names import as_format
from .._methods import AbsMax, AbstractMethod
from .._methods.given import GivenScales
from .._methods.names import as_method, MethodLike
from .._numerics.axes import as_axes, as_axis, logical_order, memory_order
from .._numerics.blocks import num_blocks
from .base import check_field
from .learned_scale import decode_learned_scale, ste_source


def fake_quantize(
    x: Float[ArrayLike, "..."],
    format: AbstractFormat | str = "nf4",
    *,
    axis: int | Sequence[int] = -1,
    clip: bool = False,
    key: PRNGKeyArray | None = None,
    method: MethodLike | None = None,
) -> Float[Array, "..."]:
    r"""Quantizes and dequantizes `x`, with a straight-through gradient.

    Returns `dequantize(quantize(x, format))`, bit for bit. Its derivative is the identity, since the derivative of
    rounding is zero almost everywhere. Forward and reverse mode both work.

    !!! Example

        ```python
        def loss(w, x):
            return jnp.mean(jnp.square(eqq.fake_quantize(w, "int4") @ x))

        jax.grad(loss)(w, x)
        ```

    ??? cite

        [Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation](https://arxiv.org/abs/1308.3432)

    **Arguments:**

    - `x`: a floating point array of at least one dimension.
    - `format`, `axis`, `key`, `method`: as for [`eqquant.quantize`][].
    - `clip`: makes the gradient zero where `x` lies outside the range of its block: from half a step below the lowest
        level to half a step above the highest, shifted by the zero point. It matters only for formats whose scale
        clips: [`eqquant.Ternary`][], [`eqquant.Binary`][], and [`eqquant.MXFP4`][], whose scales are powers of two;
        and for [`eqquant.formats.Q4_0`][] and [`eqquant.Int2`][], which have one more level on one side of zero, so
        that the largest values on the other side may lie outside.

    **Returns:**

    An array of the shape and dtype of `x`.

    **Raises:**

    The errors of [`eqquant.quantize`][], except that it does not check that values are finite.
    """
    format = as_format(format)
    source, axes = check_quantizable(x, axis)
    q = quantize_array(jax.lax.stop_gradient(source), format, axes, None, key, as_method(method))
    if clip:
        source = logical_order(ste_source(memory_order(source, axes), q), as_axes(q.axis), q.lengths)
    return value_of(q.dequantize(), gradient_of=source)


class FakeQuantizedArray(AbstractArrayValue):
    """A float master that is quantized at each use, and trains like any float array.

    [`eqquant.quantize_tree`][] makes it with `simulate=True`. Its one leaf is `master`, so any training loop works
    unchanged. Products, lookups and everything else use [`quantized`][eqquant.arrays.FakeQuantizedArray.quantized];
    gradients go to the master.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "int4", simulate=True)
        isinstance(model.layers[0].weight, eqq.arrays.FakeQuantizedArray)
        ```

    **Arguments:**

    - `master`: floats, of the logical shape.
    - `format`: the format to quantize to.
    - `axis`: the quantized axis or axes, as negative numbers.
    - `logical_dtype`: the dtype of the dequantized array, which may differ from the dtype of the master.
    - `method`: the method that chooses scales and codes.
    - `scale_bits`, `log_factor`: for learned scales, the bits of the initial scales, uint32 `(*batch, blocks)`, and the
        logarithms of their factors, float32 of the same shape, which train.
    """

    master: Float[Array, "..."]
    format: AbstractFormat
    axis: int | tuple[int, ...] = eqx.field(static=True)
    logical_dtype: np.dtype = eqx.field(static=True)
    method: AbstractMethod = AbsMax()
    scale_bits: UInt32[Array, "*batch blocks"] | None = None
    log_factor: Float32[Array, "*batch blocks"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.master.shape)

    @property
    def ndim(self) -> int:
        return self.master.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.logical_dtype

    def quantized(self) -> QuantizedArray:
        """Quantizes the master. Gradients with respect to the result go to the master."""
        axes = as_axes(self.axis)
        if self.scale_bits is not None and self.log_factor is not None:
            rows = jax.eval_shape(lambda x: memory_order(x, axes), self.master).shape
            shape = (*rows[:-1], num_blocks(rows[-1], self.format.block_size))
            check_field(self, "scale_bits", self.scale_bits, (shape,), jnp.unsignedinteger)
            check_field(self, "log_factor", self.log_factor, (shape,), jnp.floating)
        learned = None if self.scale_bits is None else decode_learned_scale(self.scale_bits, self.log_factor)
        method = self.method if learned is None else GivenScales(learned, None)
        q = quantize_array(jax.lax.stop_gradient(self.master), self.format, axes, self.logical_dtype, None, method)
        rows = memory_order(self.master, axes)
        return dataclasses.replace(
            q, gradient_of=rows if learned is None else ste_source(rows, in_memory_order(q), self.log_factor)
        )

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the quantized master as a dense array, of `shape` and `dtype`."""
        return self.quantized().dequantize()

    def transpose(self, *axes: int | Sequence[int] | None) -> QuantizedArray:
        return self.quantized().transpose(*axes)

    def astype(self, dtype: DTypeLike) -> QuantizedArray | Array:
        return self.quantized().astype(dtype)

    def reshape(self, *shape: int | Sequence[int], **kwargs: Any) -> QuantizedArray | Array:
        return self.quantized().reshape(*shape, **kwargs)

    def __getitem__(self, index: Index) -> Array:
        return self.quantized()[index]

    @property
    def constraints(self) -> Constraints:
        """For products: the constraints of the quantized array."""
        return Constraints(tuple(axis % self.ndim for axis in as_axes(self.axis)))

    def as_matrices(self, axes: MatrixAxes) -> QuantizedArray:
        """For products: the quantized array as matrices."""
        return self.quantized().as_matrices(axes)

    def linear(self, x: Array | AbstractOperand, options: Options) -> Float[Array, "*batch m n"]:
        """For products: the product of the quantized array."""
        return self.quantized().linear(x, options)

    def move(self, spec: Move, *others: "FakeQuantizedArray") -> AbstractArrayValue:
        return self.quantized().move(spec, *(other.quantized() for other in others))

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        return wl.TextDoc(f"FakeQuantizedArray({wl.pformat(self.master)}, {self.format!r}, axis={self.axis})")


def fake_quantize_array(
    x: Array,
    format: AbstractFormat,
    axes: tuple[int, ...],
    dtype: DTypeLike | None,
    method: AbstractMethod = AbsMax(),
    learn_scales: bool = False,
) -> FakeQuantizedArray:
    """Returns the array that `quantize_tree(..., simulate=True)` puts in place of `x`."""
    if jtu.tree_leaves(method) or method.inputs is not None:
        raise ValueError(
            "`simulate=True` needs a method without arrays, which would be trained. Got "
            f"{type(method).__name__}. Make its fields static, or quantize with it after training."
        )
    dtype = np.dtype(x.dtype if dtype is None else dtype)
    if not learn_scales:
        return FakeQuantizedArray(x, format, as_axis(axes), dtype, method)
    shifted = has_zero_points(format) or has_offsets(format)
    plain = format.scale_format is None and format.scale_dtype in ("float32", "float16", "bfloat16")
    if shifted or not plain or spans_rows(format):
        raise ValueError(
            "`learn_scales=True` needs a format whose scales are floats, without zero points and offsets, and one for "
            f"each row or block. Got {format!r}. Take `Int8()`, `Int4()` or `NF4()`, for instance."
        )
    # A scale of zero could not grow.
    scale = quantize_array(x, format, axes, dtype, None, method).scale
    scale = jnp.where(scale == 0, jnp.float32(1e-8), scale)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    return FakeQuantizedArray(x, format, as_axis(axes), dtype, method, bits, jnp.zeros_like(scale))
