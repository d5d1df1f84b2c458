"""Computes `x(m, k) . w(n, k)^T` where both are codes, in plain `jax.numpy`: small types in, wide sums out.

The value of a code is `(table[code] - zero_point) * scale`. Values of the table are multiplied in the smallest type
that holds them. Sums run along the codes that share both scales; then they are corrected by the zero points, exactly,
and scaled.

    sum (a - p)(b - q) = sum a b - q sum a - p sum b + p q length
"""

import functools as ft
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int8, Int32, Num

from ..._native.layout import Layout
from ..._numerics import packing
from ..._numerics.blocks import expand
from ..._numerics.constants import compute_now
from .packed import decode_scale, look_up, Packed
from .target import TargetDevice


Kind = Literal["int8", "float8", "bfloat16"]

# Products of two codes are below 2^16 in magnitude: of more than these, a sum may not fit 32 bits.
_LONGEST = 2**15
# The bytes of partial sums, of one scale each, to hold at a time; and of weights to convert at a time on CPU.
_PARTIAL_BYTES, _ROWS_BYTES = 2**26, 2**21


def kind_of(x: Layout, w: Layout, target: TargetDevice) -> Kind | None:
    """Returns the type that a product of codes is computed in, or `None` if the platform is no faster at it."""
    if x.offsets or w.offsets:
        return None
    if is_integer(x) and is_integer(w):
        return "int8" if _unit(x, w) >= min(x.length, 16) else None
    if target.platform == "cpu" or x.zero_points or w.zero_points:
        return None
    floats = ("float8_e4m3fn", "float8_e5m2")
    if x.kind in floats and w.kind in floats and x.one_scale and w.one_scale:
        return "float8" if target.platform != "cuda" or target.capability >= 8.9 else None
    return "bfloat16" if _is_exact(x) and _is_exact(w) else None


def matmul(
    x: Packed, w: Packed, x_layout: Layout, w_layout: Layout, kind: Kind, *, looped: bool
) -> Float32[Array, "*batch m n"]:
    """Computes the product of codes, for a `kind` that `kind_of` returned.

    `looped` converts a few rows of the weight at a time, as XLA on CPU should: it never fuses that with a product.
    """
    product = ft.partial(_product, x_layout=x_layout, w_layout=w_layout, kind=kind, looped=looped)
    batch = x.codes.shape[:-2]
    if not batch:
        return product(x, w)
    flat = jax.tree.map(lambda a: a.reshape(math.prod(batch), *a.shape[len(batch) :]), (x, w))
    y = jax.lax.map(lambda xw: product(*xw), flat) if looped else jax.vmap(product)(*flat)
    return y.reshape(*batch, *y.shape[1:])


class Operand(NamedTuple):
    """Values in blocks along the sum, what to subtract from them, and what to multiply sums by."""

    values: Num[Array, "rows blocks unit"]
    zero: Int32[Array, "rows blocks"] | None
    scale: Float32[Array, "rows blocks"] | None


def _product(
    x: Packed, w: Packed, *, x_layout: Layout, w_layout: Layout, kind: Kind, looped: bool
) -> Float32[Array, "m n"]:
    unit = _unit(x_layout, w_layout) if kind == "int8" else x_layout.length
    m, n = x.codes.shape[-2], w.codes.shape[-2]
    # XLA on CPU multiplies a single row by a loop that first widens the whole weight to 32 bits.
    padded = 2 if m == 1 and looped else m
    x = jax.tree.map(lambda a: jnp.pad(a, ((0, padded - m), (0, 0))), x) if padded > m else x
    left = operand(x, x_layout, kind, unit)
    columns = ft.partial(_columns, left, w_layout=w_layout, kind=kind, unit=unit, looped=looped)
    rows = max(_ROWS_BYTES // max(w_layout.length, 1), 1)
    if not looped or n <= rows:
        return columns(w)[:m]
    steps = n // rows
    cut = jax.tree.map(lambda a: a[: steps * rows].reshape(steps, rows, *a.shape[1:]), w)
    _, y = jax.lax.scan(lambda _, w: (None, columns(w)), None, cut)
    y = jnp.moveaxis(y, 0, 1).reshape(padded, steps * rows)
    rest = jax.tree.map(lambda a: a[steps * rows :], w)
    return (jnp.concatenate([y, columns(rest)], axis=1) if n % rows else y)[:m]


def _columns(
    left: Operand, w: Packed, *, w_layout: Layout, kind: Kind, unit: int, looped: bool
) -> Float32[Array, "m n"]:
    """Returns the product with some rows of the weight."""
    right = operand(w, w_layout, kind, unit)
    blocks, length, n = left.values.shape[1], w_layout.length, right.values.shape[0]
    lengths = jnp.asarray(np.minimum(unit, length - unit * np.arange(blocks)), jnp.int32)
    scaled_sums = ft.partial(_scaled_sums, looped=looped)
    if blocks == 1:
        return scaled_sums(left, right, lengths)[..., 0]
    size = 4 * left.values.shape[0] * n
    together = max(min(_PARTIAL_BYTES // max(size, 1), blocks), 1)
    add = lambda left, right, lengths: jnp.sum(scaled_sums(left, right, lengths), axis=-1)
    if together == blocks:
        return add(left, right, lengths)
    steps = blocks // together
    cut = lambda a: jnp.moveaxis(a[:, : steps * together].reshape(a.shape[0], steps, together, *a.shape[2:]), 1, 0)
    parts = (jax.tree.map(cut, left), jax.tree.map(cut, right), lengths[: steps * together])
    parts = (*parts[:2], parts[2].reshape(steps, together))
    zero = jnp.zeros((left.values.shape[0], n), jnp.float32)
    total, _ = jax.lax.scan(lambda total, part: (total + add(*part), None), zero, parts)
    if blocks % together == 0:
        return total
    last_left, last_right = jax.tree.map(lambda a: a[:, steps * together :], (left, right))
    return total + add(last_left, last_right, lengths[steps * together :])


def _scaled_sums(
    left: Operand, right: Operand, lengths: Int32[Array, " blocks"], *, looped: bool
) -> Float32[Array, "m n blocks"]:
    y = _dots(left.values, right.values)
    shape = y.shape
    per_row, per_column = lambda a: jnp.broadcast_to(a[:, None], shape), lambda a: jnp.broadcast_to(a[None], shape)
    if right.zero is not None:
        y = y - per_row(_sums(left.values, looped)) * per_column(right.zero)
    if left.zero is not None:
        y = y - per_row(left.zero) * per_column(_sums(right.values, looped))
    if left.zero is not None and right.zero is not None:
        y = y + per_row(left.zero) * per_column(right.zero) * jnp.broadcast_to(lengths, shape)
    y = y.astype(jnp.float32)
    y = y if left.scale is None else y * per_row(left.scale)
    return y if right.scale is None else y * per_column(right.scale)


def _dots(left: Num[Array, "m blocks unit"], right: Num[Array, "n blocks unit"]) -> Num[Array, "m n blocks"]:
    wide = jnp.dtype(jnp.int32 if jnp.issubdtype(left.dtype, jnp.integer) else jnp.float32)
    dot = ft.partial(jax.lax.dot_general, preferred_element_type=wide)
    if left.shape[1] == 1:
        return dot(left[:, 0], right[:, 0], (((1,), (1,)), ((), ())))[..., None]
    return jnp.moveaxis(dot(left, right, (((2,), (2,)), ((1,), (1,)))), 0, -1)


def _sums(values: Int8[Array, "rows blocks unit"], looped: bool) -> Int32[Array, "rows blocks"]:
    """Returns the sums of the codes of each block. XLA on CPU would write codes of 32 bits to memory to add them."""
    if looped:  # two rows of ones, for the reason in `_product`
        return _dots(jnp.ones((2, *values.shape[1:]), values.dtype), values)[0]
    return jnp.sum(values, axis=2, dtype=jnp.int32)


def operand(packed: Packed, layout: Layout, kind: Kind, unit: int) -> Operand:
    """Returns the values of an operand, of `unit` codes along the sum to a block."""
    length, rows = layout.length, packed.codes.shape[0]
    blocks = -(-length // unit)
    codes = packing.unpack(packed.codes, layout.bits, length)
    scale = decode_scale(packed.scale, layout.scale)
    apart = kind == "bfloat16" and not layout.one_scale  # scales of blocks are exact in the type of values
    scale = scale if packed.row_scale is None or apart else scale * packed.row_scale
    # Blocks of the layout are as long as those of the sum, or longer.
    block = np.minimum(np.arange(blocks) * unit // layout.block_size, scale.shape[1] - 1)
    per_unit = lambda a: jnp.broadcast_to(a, (rows, blocks)) if a.shape[1] == 1 else a[:, block]
    if kind == "float8":
        values = jax.lax.bitcast_convert_type(codes, jnp.dtype(layout.kind))
        return Operand(values.reshape(rows, 1, length), None, scale)
    if kind == "bfloat16":
        values = look_up(codes, layout)
        if apart:
            values, scale = values * expand(scale, layout.block_size, length), packed.row_scale
        return Operand(values.astype(jnp.bfloat16).reshape(rows, 1, length), None, scale)
    if layout.bits == 8 and layout.kind == "integer":
        # Flipping the highest bit subtracts 128, and makes the code signed.
        values = jax.lax.bitcast_convert_type(codes ^ jnp.uint8(128), jnp.int8)
        shift = layout.offset + 128
    elif layout.kind == "integer":
        values, shift = jax.lax.bitcast_convert_type(codes, jnp.int8) + jnp.int8(layout.offset), 0
    else:
        values, shift = look_up(codes, layout).astype(jnp.int8), 0
    zero = None if packed.zero_point is None else per_unit(packed.zero_point).astype(jnp.int32) - shift
    if zero is None and shift:
        zero = jnp.full((rows, blocks), -shift, jnp.int32)
    values = jnp.pad(values, ((0, 0), (0, blocks * unit - length))).reshape(rows, blocks, unit)
    return Operand(values, zero, per_unit(scale))


def _unit(x: Layout, w: Layout) -> int:
    """Returns the number of codes along the sum that share the scales of both."""
    whole = math.gcd(*(layout.block_size for layout in (x, w) if not layout.one_scale)) or x.length
    return whole if whole <= _LONGEST else math.gcd(whole, _LONGEST) if whole < x.length else _LONGEST


@ft.lru_cache
def is_integer(layout: Layout) -> bool:
    """Returns whether the value of every code is an integer that `int8` holds."""
    if layout.bits == 8:
        return layout.kind == "integer"
    table = np.asarray(layout.table)
    return bool((table == np.trunc(table)).all() and np.abs(table).max() <= 127)


@ft.lru_cache
def _is_exact(layout: Layout) -> bool:
    """Returns whether every value, without the scale of its row, is exact in bfloat16."""
    table = np.asarray(layout.table, np.float32)
    table = table[np.isfinite(table)]
    scales = np.ones(1, np.float32)
    if not layout.one_scale:
        if layout.scale not in ("e8m0", "e4m3", "e5m2", "ue4m4"):
            return False
        # A power of two loses nothing.
        with compute_now():
            bits = jnp.arange(256, dtype=jnp.uint8)
            scales = scales if layout.scale == "e8m0" else np.asarray(decode_scale(bits, layout.scale), np.float32)
        scales = scales[np.isfinite(scales)]
    values = np.outer(table, scales)
    return bool((values.astype(jnp.bfloat16).astype(np.float32) == values).all())
