"""Learned scales, and straight-through gradients that respect clipping."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, UInt32

from .._array.array import QuantizedArray
from .._array.codes import row_length
from .._array.dense import allow_dense
from .._formats.base import find_levels
from .._numerics.blocks import expand


def decode_learned_scale(
    bits: UInt32[Array, "*scales"], log_factor: Float32[Array, "*scales"] | None
) -> Float32[Array, "*scales"]:
    """Returns the initial scale times the learned factor, if there is one.

    No gradient passes here: `ste_source` has the gradient of the factor.
    """
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return scale if log_factor is None else scale * jnp.exp(jax.lax.stop_gradient(log_factor))


def in_range(rows: Float[Array, "*batch length"], q: QuantizedArray) -> Bool[Array, "*batch length"]:
    """Returns where values lie within half a step of the range of their block's levels.

    **Arguments:**

    - `rows`: the values that were quantized, in memory order.
    - `q`: the quantized values.
    """
    levels, reached = find_levels(q.format)
    levels = np.unique(levels[reached])
    # Slightly more than half: Dynamic8 scales the amax to exactly half a step below its lowest level.
    half = 0.5 + 1e-4
    low, high = levels[0] - half * (levels[1] - levels[0]), levels[-1] + half * (levels[-1] - levels[-2])
    zero = 0 if q.zero_point is None else q.zero_point.astype(jnp.float32)
    offset = 0 if q.offset is None else q.offset
    # In either order: a scale may be negative.
    ends = (low - zero) * q.scale + offset, (high - zero) * q.scale + offset
    per_value = lambda end: expand(end, q.format.block_size, row_length(q))
    rows = rows.astype(jnp.float32)
    return (rows >= per_value(jnp.minimum(*ends))) & (rows <= per_value(jnp.maximum(*ends)))


def ste_source(
    rows: Float[Array, "*batch length"], q: QuantizedArray, log_factor: Float32[Array, "..."] | None = None
) -> Float[Array, "*batch length"]:
    r"""Returns `rows` for straight-through estimation, with zero gradient where clipped.

    `log_factor`, the logarithm of a learned factor of the scales, receives the gradient of learned step sizes (LSQ).
    With $\hat v = s c$ for a code $c$ near $v / s$, it is $\partial \hat v / \partial \log s = \hat v - v$, or $\hat v$
    where $v$ is clipped. The gradient is divided by $\sqrt{n c_{\max}}$ for blocks of $n$ values, or
    rows shorter than that, so that scales and weights learn at similar speed.

    **Arguments:**

    - `rows`, `q`: as for `in_range`.
    - `log_factor`: for each block, or one for all.
    """
    inside = in_range(rows, q)
    source = jnp.where(inside, rows, jax.lax.stop_gradient(rows))
    if log_factor is None:
        return source
    levels, reached = find_levels(q.format)
    count = rows.shape[-1] if not isinstance(q.block_size, int) else min(q.block_size, rows.shape[-1])
    speed = 1 / math.sqrt(max(count, 1) * float(np.abs(levels[reached]).max()))
    with allow_dense():
        rounded = q.dequantize().astype(jnp.float32)
    slope = jax.lax.stop_gradient(rounded - jnp.where(inside, rows, 0).astype(jnp.float32))
    zero = log_factor - jax.lax.stop_gradient(log_factor)  # zero, with the gradient of `log_factor`
    zero = expand(zero, q.block_size, rows.shape[-1]) if log_factor.ndim else jnp.broadcast_to(zero, rows.shape)
    return source + (speed * slope * zero).astype(rows.dtype)
