"""`xla`: `x(m, k) . w(n, k)^T` in plain `jax.numpy`, which works everywhere.

XLA decides whether to write the decoded weight to memory: on GPU and TPU it may fuse the decode. For CPU, see
`xla_cpu.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jaxtyping import Array, DTypeLike, Float

from ..._native.weight import Layout
from ..._types import PyTree
from .packed import decode_columns, PackedWeight


Decode = Callable[[PyTree], Array]


def multiply_decoded(
    x: Float[Array, "*batch rows inner"], w: PyTree, decode: Decode, *, transpose: bool, precision: PrecisionLike
) -> Float[Array, "*batch rows outer"]:
    """Computes one `dot_general` with the whole decoded weight, `decode(w): (*batch, n, k)`."""
    return _dot(x, decode(w).astype(x.dtype), transpose=transpose, precision=precision).astype(x.dtype)


def _dot(
    x: Float[Array, "*batch rows inner"],
    weight: Float[Array, "*batch n k"],
    *,
    transpose: bool,
    precision: PrecisionLike,
) -> Float[Array, "*batch rows outer"]:
    """Returns the product in the dtype of sums."""
    batch = tuple(range(x.ndim - 2))
    contract = ((x.ndim - 1,), (x.ndim - 2 if transpose else x.ndim - 1,))
    return jax.lax.dot_general(
        x, weight, (contract, (batch, batch)), precision=precision, preferred_element_type=accumulator(x.dtype)
    )


def multiply_scaled(
    x: Float[Array, "*batch rows inner"],
    w: PyTree,
    decode: Decode,
    scale: Float[Array, "*batch n"],
    *,
    transpose: bool,
    precision: PrecisionLike,
) -> Float[Array, "*batch rows outer"]:
    """As `multiply_decoded`, for `scale[:, None] * decode(w)`, without scaling the weight.

    Multiplies the results by the scales, or with `transpose` the operand.
    """
    wide = accumulator(x.dtype)
    scale = scale[..., None, :].astype(wide)
    if transpose:
        scaled = x.astype(wide) * jnp.broadcast_to(scale, x.shape)
        return multiply_decoded(scaled.astype(x.dtype), w, decode, transpose=True, precision=precision)
    y = _dot(x, decode(w).astype(x.dtype), transpose=False, precision=precision)
    return (y * jnp.broadcast_to(scale, y.shape)).astype(x.dtype)


def add_remainder(
    y: Float[Array, "m columns"],
    x: Float[Array, "m inner"],
    weight: PackedWeight,
    layout: Layout,
    start: int,
    *,
    transpose: bool,
    precision: PrecisionLike,
) -> Float[Array, "m outer"]:
    """Completes `y`, the product of a kernel with the columns of a weight before `start`.

    Adds the product with the remaining columns; with `transpose`, appends their results. `y` and the result have the
    dtype of sums.
    """
    if start == layout.length:
        return y
    remainder = decode_columns(weight, layout, start, x.dtype)
    if transpose:
        return jnp.concatenate([y, _dot(x, remainder, transpose=True, precision=precision)], axis=1)
    return y + _dot(x[:, start:], remainder, transpose=False, precision=precision)


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype of sums."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)  # `promote_types` may be strict
