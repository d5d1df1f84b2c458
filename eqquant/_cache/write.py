"""Writes tokens to the arrays of a cache: quantized, in place, each at its position."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from .._array.array import QuantizedArray
from .._array.dense import allow_dense
from .._array.quantize import quantize_array
from .._compat import vary_alike
from .._formats.base import AbstractFormat
from .._numerics.batching import vmap_leading
from .._numerics.packing import pack as pack_codes


MaybeQuantized = QuantizedArray | Array


def quantized_zeros(
    shape: tuple[int, ...], dtype: DTypeLike, format: AbstractFormat | None, axis: int
) -> MaybeQuantized:
    """Returns quantized zeros: one quantized row, repeated."""
    if format is None:
        return jnp.zeros(shape, dtype)
    *batch, rows, length = shape if axis == -1 else (*shape[:-2], shape[-1], shape[-2])
    row = quantize_array(jnp.zeros(length, dtype), format, (-1,), None, None)
    repeated = jtu.tree_map(lambda leaf: jnp.broadcast_to(leaf, (*batch, rows, *leaf.shape)), row)
    return dataclasses.replace(repeated, axis=axis)


def _quantize_rows(x: Array, format: AbstractFormat, axis: int | tuple[int, ...]) -> QuantizedArray:
    """Quantizes every row on its own: per token, or with axis -2 per channel."""
    quantize_row = lambda row: quantize_array(row, format, (-1,), None, None)
    rows = x if axis == -1 else x.mT
    return dataclasses.replace(vmap_leading(quantize_row, x.ndim - 1)(rows), axis=axis)


def write_tokens(
    old: MaybeQuantized,
    new: Float[Array, "*batch heads tokens size"],
    at: Int[Array, "*batch tokens"],
    needed: Bool[Array, ""] | bool = True,
    group: int = 1,
) -> MaybeQuantized:
    """Quantizes tokens and writes them to their places; zeros unless `needed`."""
    if not isinstance(old, QuantizedArray):
        return write_rows(old, new.astype(old.dtype), at)
    across = old.axis != -1
    unpack = _unpack_zero_points if across else lambda q: q
    pack = lambda: jtu.tree_leaves(unpack(_quantize_rows(new.astype(old.dtype), old.format, old.axis)))
    if needed is True:
        packed = pack()
    else:
        nothing = lambda: jtu.tree_map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(pack))
        packed = jax.lax.cond(needed, pack, nothing)
    leaves, treedef = jtu.tree_flatten(unpack(old))
    if not across:
        return jtu.tree_unflatten(treedef, [write_rows(leaf, x, at) for leaf, x in zip(leaves, packed, strict=True)])
    groups, count, whole = at[..., ::group] // group, new.shape[-2] // group, old.shape[-2] // group
    written = [
        write_rows(_in_rows(leaf, whole), _in_rows(x, count), groups).reshape(leaf.shape)
        for leaf, x in zip(leaves, packed, strict=True)
    ]
    return _pack_zero_points(jtu.tree_unflatten(treedef, written))


def read_window(
    x: MaybeQuantized, start: Int[Array, "*batch"], length: int
) -> Float[Array, "*batch heads length size"]:
    """Dequantizes the tokens of one window."""
    if not isinstance(x, QuantizedArray):
        return slice_tokens(x, start, length)
    if x.axis == -1:
        q = jtu.tree_map(lambda leaf: slice_tokens(leaf, start, length), x)
    else:
        windows = x.shape[-2] // length
        read = lambda leaf: slice_tokens(_in_rows(leaf, windows), start // length, 1)[..., 0, :]
        q = _pack_zero_points(jtu.tree_map(read, dataclasses.replace(_unpack_zero_points(x), lengths=(length,))))
    with allow_dense():
        return q.dequantize()


def _in_rows(leaf: Array, groups: int) -> Array:
    """Returns a row for each group of tokens, whose codes and scales are contiguous."""
    return leaf.reshape(*leaf.shape[:-1], groups, leaf.shape[-1] // groups)


# Zero points of several groups share bytes.
def _unpack_zero_points(q: QuantizedArray) -> QuantizedArray:
    return dataclasses.replace(q, zero_point_bits=q.zero_point)


def _pack_zero_points(q: QuantizedArray) -> QuantizedArray:
    zero_point = q.zero_point_bits
    return q if zero_point is None else dataclasses.replace(q, zero_point_bits=pack_codes(zero_point, q.format.bits))


def write_rows(old: Array, new: Array, at: Int[Array, "*batch rows"]) -> Array:
    """Writes rows along the second last axis. Drops rows beyond the end."""
    return (_write_floats if jnp.issubdtype(old.dtype, jnp.floating) else _write_in_place)(old, new, at)


def _scatter(old: Array, new: Array, at: Array) -> Array:
    write = lambda old, new, at: old.at[..., at, :].set(new, mode="drop", unique_indices=True)
    return vmap_leading(write, at.ndim - 1)(old, new, at)


def _scatter_in_loop(old: Array, new: Array, at: Array) -> Array:
    # XLA for CPU writes into a new copy for each reader of the result, but it updates the carry of a loop in place. So
    # this is a loop of one iteration, and XLA must not know the count.
    once = jax.lax.optimization_barrier(jnp.int32(1))
    return jax.lax.fori_loop(0, once, lambda _, old: _scatter(old, new, at), old)


@jax.jit
def _write_in_place(old: Array, new: Array, at: Array) -> Array:
    return jax.lax.platform_dependent(*vary_alike((old, new, at)), cpu=_scatter_in_loop, default=_scatter)


_write_floats = jax.custom_jvp(_write_in_place)


@_write_floats.defjvp
def _(primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    # Reverse mode cannot differentiate a loop of unknown length.
    return _write_floats(*primals), _scatter(tangents[0], tangents[1], primals[2])


def append_to_window(recent: Array, new: Array, start: Int[Array, "*batch"], length: int) -> Array:
    """Returns the tokens of the window, then the new ones, then zeros."""
    wide = jnp.pad(recent, [(0, 0)] * (recent.ndim - 2) + [(0, length - recent.shape[-2]), (0, 0)])
    put = lambda wide, new, start: jax.lax.dynamic_update_slice_in_dim(wide, new, start, axis=-2)
    return vmap_leading(put, start.ndim)(wide, new.astype(recent.dtype), start)


def slice_tokens(tokens: Array, start: Int[Array, "*batch"], length: int) -> Array:
    slice_tokens = lambda tokens, start: jax.lax.dynamic_slice_in_dim(tokens, start, length, axis=-2)
    return vmap_leading(slice_tokens, start.ndim)(tokens, start)
