"""Simulated quantization: float masters that are quantized at each use."""

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
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray

from .._formats.base import AbstractFormat, as_format, levels_of
from .._methods import AbsMax, AbstractMethod
from .._numerics.blocks import expand
from .array import QuantizedArray
from .axes import as_axis, logical_order, memory_order
from .quantize import as_method, check_quantizable, quantize_array
from .straight_through import value_of
from .value import AbstractArrayValue


def fake_quantize(
    x: Float[ArrayLike, "..."],
    format: AbstractFormat | str = "nf4",
    *,
    axis: int | Sequence[int] = -1,
    clip: bool = False,
    key: PRNGKeyArray | None = None,
    method: AbstractMethod | None = None,
) -> Float[Array, "..."]:
    r"""Quantizes and dequantizes `x`, and passes gradients straight through: the straight-through estimator.

    Returns `dequantize(quantize(x, format))`, bit for bit. Its derivative is the identity, since the derivative of
    rounding is zero almost everywhere. Forward and reverse mode both work. `straight_through` is the same function.

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
        and for [`eqquant.Q4_0`][] and [`eqquant.Int2`][], which have one more level on one side of zero, so that the
        largest values on the other side may lie outside.

    **Returns:**

    An array of the shape and dtype of `x`.

    **Raises:**

    The errors of [`eqquant.quantize`][], except that it does not check that values are finite.
    """
    format = as_format(format)
    source, axes = check_quantizable(x, axis)
    q = quantize_array(jax.lax.stop_gradient(source), format, axes, None, key, as_method(method))
    if clip:
        source = jnp.where(_representable(source, q), source, jax.lax.stop_gradient(source))
    return value_of(q.dequantize(), gradient_of=source)


straight_through = fake_quantize


def _representable(x: Array, q: QuantizedArray) -> Bool[Array, "..."]:
    """Returns where values lie in the range of their block's levels, extended by half a step on either side."""
    levels, reached = levels_of(q.format)
    levels = np.unique(levels[reached])
    # Slightly more than half: Dynamic8 scales its largest magnitude to exactly half a step below its lowest level.
    half = 0.5 + 1e-4
    low, high = levels[0] - half * (levels[1] - levels[0]), levels[-1] + half * (levels[-1] - levels[-2])
    zero = 0 if q.zero_point is None else q.zero_point.astype(jnp.float32)
    offset = 0 if q.offset is None else q.offset
    # In either order: a scale may be negative.
    ends = (low - zero) * q.scale + offset, (high - zero) * q.scale + offset
    of_values = lambda end: expand(end, q.format.block_size, q._length)
    rows = memory_order(x, q._axes).astype(jnp.float32)
    inside = (rows >= of_values(jnp.minimum(*ends))) & (rows <= of_values(jnp.maximum(*ends)))
    return logical_order(inside, q._axes, q.lengths)


class SimulatedArray(AbstractArrayValue):
    """A float master that is quantized at each use, and trains like any float array.

    [`eqquant.quantize_tree`][] makes it with `simulate=True`. Its one leaf is `master`, so any training loop works
    unchanged. Products, lookups and everything else use [`quantized`][eqquant.SimulatedArray.quantized]; gradients go
    to the master.

    **Arguments:**

    - `master`: floats, of the logical shape.
    - `format`: the format to quantize to.
    - `axis`: the quantized axis or axes, as negative numbers.
    - `logical_dtype`: the dtype of the dequantized array, which may differ from the dtype of the master.
    - `method`: the method that chooses scales and codes.
    """

    master: Float[Array, "..."]
    format: AbstractFormat
    axis: int | tuple[int, ...] = eqx.field(static=True)
    logical_dtype: np.dtype = eqx.field(static=True)
    method: AbstractMethod = AbsMax()

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
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        q = quantize_array(jax.lax.stop_gradient(self.master), self.format, axes, self.logical_dtype, None, self.method)
        return dataclasses.replace(q, gradient_of=memory_order(self.master, axes))

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the quantized master as a dense array, of `shape` and `dtype`."""
        return self.quantized().dequantize()

    def transpose(self, *axes: Any) -> QuantizedArray:
        return self.quantized().transpose(*axes)

    def astype(self, dtype: Any) -> QuantizedArray | Array:
        return self.quantized().astype(dtype)

    def reshape(self, *shape: Any, **kwargs: Any) -> QuantizedArray | Array:
        return self.quantized().reshape(*shape, **kwargs)

    def __getitem__(self, index: Any) -> Array:
        return self.quantized()[index]

    def _matmul(self, other: Any, *, left: bool, **options: Any) -> Array:
        return self.quantized()._matmul(other, left=left, **options)

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.TextDoc(f"SimulatedArray({wl.pformat(self.master)}, {self.format!r}, axis={self.axis})")


def simulate_array(
    x: Array, format: AbstractFormat, axes: tuple[int, ...], dtype: Any, method: AbstractMethod = AbsMax()
) -> SimulatedArray:
    """Returns the array that `quantize_tree(..., simulate=True)` puts in place of `x`."""
    if jtu.tree_leaves(method) or method.inputs is not None:
        raise ValueError(
            "`simulate=True` needs a method without arrays, which would be trained. Got "
            f"{type(method).__name__}. Make its fields static, or quantize with it after training."
        )
    return SimulatedArray(x, format, as_axis(axes), np.dtype(x.dtype if dtype is None else dtype), method)
