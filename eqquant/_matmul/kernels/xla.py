"""Computes `x(m, k) . w(n, k)^T` in plain `jax.numpy`, for any `w` that a function can decode. Right everywhere.

`dense` leaves it to XLA whether the decoded weight is ever written to memory: on GPU and TPU it may fuse. XLA on CPU
never fuses a decode into a dot, so there `by_rows` decodes and multiplies a few rows at a time; what is decoded stays
in the cache.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from .packed import decode_columns, Layout, Packed


# The decoded rows in flight at a time. More are no faster on two cores with 1 MiB of L2 each. What is not taken in rows
# may be decoded long before its turn: of eight layers of 4 MiB, XLA decodes all at once, and takes twice as long.
ROWS_BYTES = 2**20

Decode = Callable[[Any], Array]


def dense(
    x: Float[Array, "*batch rows inner"], w: PyTree, decode: Decode, *, transpose: bool, precision: Any
) -> Float[Array, "*batch rows outer"]:
    """One `dot_general` on the whole decoded weight, `decode(w): (*batch, n, k)`."""
    return _dot(x, decode(w).astype(x.dtype), transpose=transpose, precision=precision).astype(x.dtype)


def _dot(
    x: Float[Array, "*batch rows inner"], weight: Float[Array, "*batch n k"], *, transpose: bool, precision: Any
) -> Float[Array, "*batch rows outer"]:
    """The product, in the precision that sums have."""
    batch = tuple(range(x.ndim - 2))
    contract = ((x.ndim - 1,), (x.ndim - 2 if transpose else x.ndim - 1,))
    return jax.lax.dot_general(
        x, weight, (contract, (batch, batch)), precision=precision, preferred_element_type=_accumulator(x.dtype)
    )


def dense_scaled(
    x: Float[Array, "*batch rows inner"],
    w: PyTree,
    decode: Decode,
    scale: Float[Array, "*batch n"],
    *,
    transpose: bool,
    precision: Any,
) -> Float[Array, "*batch rows outer"]:
    """As `dense`, for `scale[:, None] * decode(w)`, but the results are scaled, or with `transpose` the operand."""
    accumulator = _accumulator(x.dtype)
    scale = scale[..., None, :].astype(accumulator)
    if transpose:
        scaled = x.astype(accumulator) * jnp.broadcast_to(scale, x.shape)
        return dense(scaled.astype(x.dtype), w, decode, transpose=True, precision=precision)
    y = _dot(x, decode(w).astype(x.dtype), transpose=False, precision=precision)
    return (y * jnp.broadcast_to(scale, y.shape)).astype(x.dtype)


def add_rest(
    y: Float[Array, "m taken"],
    x: Float[Array, "m inner"],
    weight: Packed,
    layout: Layout,
    start: int,
    *,
    transpose: bool,
    precision: Any,
) -> Float[Array, "m outer"]:
    """Completes `y`, the product of a kernel that took the columns of a weight before `start`.

    The product with the other columns is added; or with `transpose` these are the results that are missing. Both `y`
    and the result have the precision of sums.
    """
    if start == layout.length:
        return y
    rest = decode_columns(weight, layout, start, x.dtype)
    if transpose:
        return jnp.concatenate([y, _dot(x, rest, transpose=True, precision=precision)], axis=1)
    return y + _dot(x[:, start:], rest, transpose=False, precision=precision)


def by_rows(
    x: Float[Array, "*batch rows inner"], w: PyTree, decode: Decode, *, transpose: bool, precision: Any
) -> Float[Array, "*batch rows outer"]:
    """Decodes and multiplies blocks of rows of `w` in a loop, so that the whole decoded weight is never in memory."""
    *batch, n, k = jax.eval_shape(decode, w).shape
    itemsize = _accumulator(x.dtype).itemsize
    if math.prod(batch) * n * k * itemsize <= ROWS_BYTES:
        return dense(x, w, decode, transpose=transpose, precision=precision)
    if batch:
        one = lambda pair: by_rows(pair[0], pair[1], decode, transpose=transpose, precision=precision)
        flat = jtu.tree_map(lambda a: a.reshape(-1, *a.shape[len(batch) :]), (x, w))
        return jtu.tree_map(lambda a: a.reshape(*batch, *a.shape[1:]), jax.lax.map(one, flat))

    rows = min(max(ROWS_BYTES // (k * itemsize), 1), n)
    steps = n // rows
    looped = jtu.tree_map(lambda a: a[: steps * rows].reshape(steps, rows, *a.shape[1:]), w)
    rest = jtu.tree_map(lambda a: a[steps * rows :], w)
    product = lambda x, w: dense(x, w, decode, transpose=transpose, precision=precision)
    if transpose:
        return _sum_over_rows(x, looped, rest, product, rows)
    _, y = jax.lax.scan(lambda _, w: (None, product(x, w)), None, looped)
    y = jnp.moveaxis(y, 0, 1).reshape(x.shape[0], steps * rows)
    return jnp.concatenate([y, product(x, rest)], axis=1) if steps * rows < n else y


def _sum_over_rows(
    x: Float[Array, "m n"], looped: PyTree, rest: PyTree, product: Callable[[Array, PyTree], Array], rows: int
) -> Float[Array, "m k"]:
    """`x(m, n) . w(n, k)`, a block of rows of `w` with its columns of `x` at a time."""
    wide = x.astype(_accumulator(x.dtype))  # partial sums are kept in the accumulator's precision
    steps = jtu.tree_leaves(looped)[0].shape[0]
    columns = jnp.moveaxis(wide[:, : steps * rows].reshape(x.shape[0], steps, rows), 1, 0)
    total = product(wide[:, steps * rows :], rest)  # zero if there is no rest
    total, _ = jax.lax.scan(lambda total, step: (total + product(*step), None), total, (columns, looped))
    return total.astype(x.dtype)


def _accumulator(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)  # `promote_types` may be strict
