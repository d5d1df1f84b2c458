"""Computes `x(m, k) . w(n, k)^T` of codes by codes, in plain `jax.numpy`.

The value of a code is `(table[code] - zero_point) * scale`. Values of the table are multiplied in the smallest type
that holds them, and summed in int32 or float32. A sum runs along the codes that share both scales. Then it is corrected
by the zero points, exactly, and scaled.

    sum (a - p)(b - q) = sum a b - q sum a - p sum b + p q length
"""

import functools as ft
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int8, Int32, Num

from ..._native.weight import Layout
from ..._numerics import packing
from ..._numerics.blocks import expand
from ..._numerics.constants import compute_now
from .packed import decode_scale, look_up, PackedWeight
from .target import TargetDevice


OperandType = Literal["int8", "float8", "bfloat16"]

# Products of two codes are below 2^16 in magnitude. A longer sum might overflow int32.
_MAX_SUM_LENGTH = 2**15
# The bytes of partial sums to hold at a time, and the bytes of weights to convert at a time on CPU.
_PARTIAL_BYTES, _ROWS_BYTES = 2**26, 2**21


def choose_operand_type(x: Layout, w: Layout, target: TargetDevice) -> OperandType | None:
    """Returns the type to multiply codes in, or `None` if decoding them is as fast."""
    if x.offsets or w.offsets:
        return None
    if is_integer(x) and is_integer(w):
        return "int8" if _shared_length(x, w) >= min(x.length, 16) else None
    if target.platform == "cpu" or x.zero_points or w.zero_points:
        return None
    floats = ("float8_e4m3fn", "float8_e5m2")
    if x.kind in floats and w.kind in floats and x.per_channel and w.per_channel:
        return "float8" if target.platform != "cuda" or target.capability >= 8.9 else None
    return "bfloat16" if _is_exact(x) and _is_exact(w) else None


def matmul(
    x: PackedWeight, w: PackedWeight, x_layout: Layout, w_layout: Layout, operand_type: OperandType, *, looped: bool
) -> Float32[Array, "*batch m n"]:
    """Computes the product of codes, in a type that `choose_operand_type` returned.

    `looped` converts a few rows of the weight at a time, for XLA on CPU, which never fuses the conversion.
    """
    product = ft.partial(_product, x_layout=x_layout, w_layout=w_layout, operand_type=operand_type, looped=looped)
    batch = x.codes.shape[:-2]
    if not batch:
        return product(x, w)
    flat = jax.tree.map(lambda a: a.reshape(math.prod(batch), *a.shape[len(batch) :]), (x, w))
    y = jax.lax.map(lambda xw: product(*xw), flat) if looped else jax.vmap(product)(*flat)
    return y.reshape(*batch, *y.shape[1:])


class Operand(NamedTuple):
    """The values of an operand in blocks along the sum, with their zero points and scales."""

    values: Num[Array, "rows blocks unit"]
    zero: Int32[Array, "rows blocks"] | None
    scale: Float32[Array, "rows blocks"] | None


def _product(
    x: PackedWeight, w: PackedWeight, *, x_layout: Layout, w_layout: Layout, operand_type: OperandType, looped: bool
) -> Float32[Array, "m n"]:
    unit = _shared_length(x_layout, w_layout) if operand_type == "int8" else x_layout.length
    m, n = x.codes.shape[-2], w.codes.shape[-2]
    # With a single row, XLA on CPU first widens the whole weight to 32 bits.
    padded = 2 if m == 1 and looped else m
    x = jax.tree.map(lambda a: jnp.pad(a, ((0, padded - m), (0, 0))), x) if padded > m else x
    left = operand(x, x_layout, operand_type, unit)
    columns = ft.partial(
        _multiply_columns, left, w_layout=w_layout, operand_type=operand_type, unit=unit, looped=looped
    )
    rows = max(_ROWS_BYTES // max(w_layout.length, 1), 1)
    if not looped or n <= rows:
        return columns(w)[:m]
    steps = n // rows
    split_steps = jax.tree.map(lambda a: a[: steps * rows].reshape(steps, rows, *a.shape[1:]), w)
    _, y = jax.lax.scan(lambda _, w: (None, columns(w)), None, split_steps)
    y = jnp.moveaxis(y, 0, 1).reshape(padded, steps * rows)
    remainder = jax.tree.map(lambda a: a[steps * rows :], w)
    return (jnp.concatenate([y, columns(remainder)], axis=1) if n % rows else y)[:m]


def _multiply_columns(
    left: Operand, w: PackedWeight, *, w_layout: Layout, operand_type: OperandType, unit: int, looped: bool
) -> Float32[Array, "m n"]:
    """Returns the columns of the product for some rows of the weight."""
    right = operand(w, w_layout, operand_type, unit)
    blocks, length, n = left.values.shape[1], w_layout.length, right.values.shape[0]
    lengths = jnp.asarray(np.minimum(unit, length - unit * np.arange(blocks)), jnp.int32)
    multiply_blocks = ft.partial(_multiply_blocks, looped=looped)
    if blocks == 1:
        return multiply_blocks(left, right, lengths)[..., 0]
    size = 4 * left.values.shape[0] * n
    together = max(min(_PARTIAL_BYTES // max(size, 1), blocks), 1)
    add = lambda left, right, lengths: jnp.sum(multiply_blocks(left, right, lengths), axis=-1)
    if together == blocks:
        return add(left, right, lengths)
    steps = blocks // together
    to_steps = lambda a: a[:, : steps * together].reshape(a.shape[0], steps, together, *a.shape[2:])
    split_steps = lambda a: jnp.moveaxis(to_steps(a), 1, 0)
    parts = (jax.tree.map(split_steps, left), jax.tree.map(split_steps, right), lengths[: steps * together])
    parts = (*parts[:2], parts[2].reshape(steps, together))
    zero = jnp.zeros((left.values.shape[0], n), jnp.float32)
    total, _ = jax.lax.scan(lambda total, part: (total + add(*part), None), zero, parts)
    if blocks % together == 0:
        return total
    last_left, last_right = jax.tree.map(lambda a: a[:, steps * together :], (left, right))
    return total + add(last_left, last_right, lengths[steps * together :])


def _multiply_blocks(
    left: Operand, right: Operand, lengths: Int32[Array, " blocks"], *, looped: bool
) -> Float32[Array, "m n blocks"]:
    y = _dot_blocks(left.values, right.values)
    shape = y.shape
    per_row, per_column = lambda a: jnp.broadcast_to(a[:, None], shape), lambda a: jnp.broadcast_to(a[None], shape)
    if right.zero is not None:
        y = y - per_row(_sum_codes(left.values, looped)) * per_column(right.zero)
    if left.zero is not None:
        y = y - per_row(left.zero) * per_column(_sum_codes(right.values, looped))
    if left.zero is not None and right.zero is not None:
        y = y + per_row(left.zero) * per_column(right.zero) * jnp.broadcast_to(lengths, shape)
    y = y.astype(jnp.float32)
    y = y if left.scale is None else y * per_row(left.scale)
    return y if right.scale is None else y * per_column(right.scale)


def _dot_blocks(left: Num[Array, "m blocks unit"], right: Num[Array, "n blocks unit"]) -> Num[Array, "m n blocks"]:
    wide = jnp.dtype(jnp.int32 if jnp.issubdtype(left.dtype, jnp.integer) else jnp.float32)
    dot = ft.partial(jax.lax.dot_general, preferred_element_type=wide)
    if left.shape[1] == 1:
        return dot(left[:, 0], right[:, 0], (((1,), (1,)), ((), ())))[..., None]
    return jnp.moveaxis(dot(left, right, (((2,), (2,)), ((1,), (1,)))), 0, -1)


def _sum_codes(values: Int8[Array, "rows blocks unit"], looped: bool) -> Int32[Array, "rows blocks"]:
    """Returns the sums of the codes of each block."""
    if looped:  # XLA on CPU would write widened codes to memory; two rows of ones, as in `_product`
        return _dot_blocks(jnp.ones((2, *values.shape[1:]), values.dtype), values)[0]
    return jnp.sum(values, axis=2, dtype=jnp.int32)


def operand(packed: PackedWeight, layout: Layout, operand_type: OperandType, unit: int) -> Operand:
    """Returns the values of an operand, in blocks of `unit` codes along the sum."""
    length, rows = layout.length, packed.codes.shape[0]
    blocks = -(-length // unit)
    codes = packing.unpack(packed.codes, layout.bits, length)
    scale = decode_scale(packed.scale, layout.scale)
    scale_values = operand_type == "bfloat16" and not layout.per_channel  # per-group scales are exact in bfloat16
    scale = scale if packed.row_scale is None or scale_values else scale * packed.row_scale
    # Blocks of the layout are at least as long as the blocks of the sum.
    block = np.minimum(np.arange(blocks) * unit // layout.block_size, scale.shape[1] - 1)
    per_unit = lambda a: jnp.broadcast_to(a, (rows, blocks)) if a.shape[1] == 1 else a[:, block]
    if operand_type == "float8":
        values = jax.lax.bitcast_convert_type(codes, jnp.dtype(layout.kind))
        return Operand(values.reshape(rows, 1, length), None, scale)
    if operand_type == "bfloat16":
        values = look_up(codes, layout)
        if scale_values:
            values, scale = values * expand(scale, layout.block_size, length), packed.row_scale
        return Operand(values.astype(jnp.bfloat16).reshape(rows, 1, length), None, scale)
    if layout.bits == 8 and layout.kind == "integer":
        # Flipping the highest bit subtracts 128, and makes the code signed.
        values = jax.lax.bitcast_convert_type(codes ^ jnp.uint8(128), jnp.int8)
        shift = layout.lowest + 128
    elif layout.kind == "integer":
        values, shift = jax.lax.bitcast_convert_type(codes, jnp.int8) + jnp.int8(layout.lowest), 0
    else:
        values, shift = look_up(codes, layout).astype(jnp.int8), 0
    zero = None if packed.zero_point is None else per_unit(packed.zero_point).astype(jnp.int32) - shift
    if zero is None and shift:
        zero = jnp.full((rows, blocks), -shift, jnp.int32)
    values = jnp.pad(values, ((0, 0), (0, blocks * unit - length))).reshape(rows, blocks, unit)
    return Operand(values, zero, per_unit(scale))


def _shared_length(x: Layout, w: Layout) -> int:
    """Returns the number of codes along the sum that share the scales of both."""
    whole = math.gcd(*(layout.block_size for layout in (x, w) if not layout.per_channel)) or x.length
    if whole <= _MAX_SUM_LENGTH:
        return whole
    return math.gcd(whole, _MAX_SUM_LENGTH) if whole < x.length else _MAX_SUM_LENGTH


@ft.lru_cache
def is_integer(layout: Layout) -> bool:
    """Returns whether the value of every code is an integer that `int8` holds."""
    if layout.bits == 8 or layout.has_vectors:
        return layout.kind == "integer"
    table = np.asarray(layout.table)
    return bool((table == np.trunc(table)).all() and np.abs(table).max() <= 127)


@ft.lru_cache
def _is_exact(layout: Layout) -> bool:
    """Returns whether every value, without its per-channel scale, is exact in bfloat16."""
    table = np.asarray(layout.table, np.float32)
    table = table[np.isfinite(table)]
    scales = np.ones(1, np.float32)
    if not layout.per_channel:
        if layout.scale not in ("e8m0", "e4m3", "e5m2", "ue4m4"):
            return False
        # Powers of two are exact.
        with compute_now():
            bits = jnp.arange(256, dtype=jnp.uint8)
            scales = scales if layout.scale == "e8m0" else np.asarray(decode_scale(bits, layout.scale), np.float32)
        scales = scales[np.isfinite(scales)]
    values = np.outer(table, scales)
    return bool((values.astype(jnp.bfloat16).astype(np.float32) == values).all())
