"""Training with simulated quantization: float masters that are quantized each time they are used."""

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
    r"""The value of `x` after quantization, with the gradient of `x`: the straight-through estimator.

    The value is `dequantize(quantize(x, format))`, bit for bit, and the derivative is taken to be the identity,
    although that of rounding is zero almost everywhere. Forward and reverse mode both work. `straight_through` is the
    same function.

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
    - `clip`: makes the gradient zero where `x` lies outside the range that its block can represent, which is from
        half a step below the lowest level to half a step above the highest, zero point included. Most formats choose
        scales such that no value does. [`eqquant.Ternary`][] and [`eqquant.Binary`][] do not, nor
        [`eqquant.MXFP4`][], whose scales are powers of two. [`eqquant.Q4_0`][] and [`eqquant.Int2`][] have one level
        more on one side of zero, so the largest values on the other side may lie outside.

    **Returns:**

    An array of the shape and dtype of `x`.

    **Raises:**

    As [`eqquant.quantize`][], except that values are not checked to be finite.
    """
    format = as_format(format)
    source, axes = check_quantizable(x, axis)
    q = quantize_array(jax.lax.stop_gradient(source), format, axes, None, key, as_method(method))
    if clip:
        source = jnp.where(_representable(source, q), source, jax.lax.stop_gradient(source))
    return value_of(q.dequantize(), gradient_of=source)


straight_through = fake_quantize


def _representable(x: Array, q: QuantizedArray) -> Bool[Array, "..."]:
    """Where values lie in the range of the levels of their block, to which half a step is added on either side."""
    levels, reached = levels_of(q.format)
    levels = np.unique(levels[reached])
    # A little more, since Dynamic8 scales its largest magnitude to exactly half a step below its lowest level.
    half = 0.5 + 1e-4
    low, high = levels[0] - half * (levels[1] - levels[0]), levels[-1] + half * (levels[-1] - levels[-2])
    zero = 0 if q.zero_point is None else q.zero_point.astype(jnp.float32)
    ends = (low - zero) * q.scale, (high - zero) * q.scale  # in either order: a scale may be negative
    of_values = lambda end: expand(end, q.format.block_size, q._length)
    rows = memory_order(x, q._axes).astype(jnp.float32)
    inside = (rows >= of_values(jnp.minimum(*ends))) & (rows <= of_values(jnp.maximum(*ends)))
    return logical_order(inside, q._axes, q.lengths)


class SimulatedArray(AbstractArrayValue):
    """A float master that is quantized each time it is used, and trained as the float array that it is.

    Made by [`eqquant.quantize_tree`][] with `simulate=True`. Its one leaf is `master`, so any training loop works
    unchanged; products, lookups and everything else see [`quantized`][eqquant.SimulatedArray.quantized], and gradients
    go to the master.

    **Arguments:**

    - `master`: floats, of the logical shape.
    - `format`: what it is quantized to.
    - `axis`: the quantized axis, or axes; negative.
    - `logical_dtype`: what it dequantizes to, which need not be the dtype of the master.
    - `method`: how codes are found.
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
        """The quantized array as it is now. Gradients with respect to it go to the master."""
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        q = quantize_array(jax.lax.stop_gradient(self.master), self.format, axes, self.logical_dtype, None, self.method)
        return dataclasses.replace(q, gradient_of=memory_order(self.master, axes))

    def dequantize(self) -> Float[Array, "..."]:
        """The dense array of `shape` and `dtype`, after quantization."""
        return self.quantized().dequantize()

    def transpose(self, *axes: Any) -> QuantizedArray:
        return self.quantized().transpose(*axes)

    def astype(self, dtype: Any) -> QuantizedArray | Array:
        return self.quantized().astype(dtype)

    def reshape(self, *shape: Any, **kwargs: Any) -> QuantizedArray | Array:
        return self.quantized().reshape(*shape, **kwargs)

    def __getitem__(self, index: Any) -> Array:
        return self.quantized()[index]

    def _matmul(self, other: Any, *, left: bool) -> Array:
        return self.quantized()._matmul(other, left=left)

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.TextDoc(f"SimulatedArray({wl.pformat(self.master)}, {self.format!r}, axis={self.axis})")


def simulate_array(
    x: Array, format: AbstractFormat, axes: tuple[int, ...], dtype: Any, method: AbstractMethod = AbsMax()
) -> SimulatedArray:
    """What `quantize_tree` puts in the place of `x` to simulate its quantization."""
    if jtu.tree_leaves(method) or method.inputs is not None:
        raise ValueError(
            "`simulate=True` needs a method without arrays, which would be trained. Got "
            f"{type(method).__name__}. Make its fields static, or quantize with it after training."
        )
    return SimulatedArray(x, format, as_axis(axes), np.dtype(x.dtype if dtype is None else dtype), method)
