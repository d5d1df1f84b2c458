"""Stores the scales and offsets of blocks, and rounds values to the levels that follow from what is stored."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray, UInt, UInt8

from .._formats.base import AbstractFormat, has_offsets, Scales
from .._numerics.batching import by_chunks, Index
from .._numerics.blocks import dequantize_blocks, divide, expand, not_finite, num_blocks
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .choose import check_scales, choose_by_blocks, choose_by_parts, mark, Rows, ZeroPoints
from .stochastic import move_stochastically


class Encoded(NamedTuple):
    """What a method returns: one code for each of `(*batch, length)` values, with the scales and zero points.

    `scale` holds the bits of the scales, or an `Encoded` if the format quantizes its scales; so does `offset`.
    """

    codes: UInt8[Array, "*batch length"]
    scale: "UInt[Array, '*batch blocks'] | Encoded"
    zero_point: UInt8[Array, "*batch blocks"] | None = None
    offset: "UInt[Array, '*batch blocks'] | Encoded | None" = None


# Scales or offsets as a format stores them.
ScaleBits = UInt[Array, "*batch blocks"] | Encoded


class Grid(NamedTuple):
    """The levels of each block, to which values are rounded.

    - `scale`, `stored_scale`: the scales as they were chosen, and as they are stored.
    - `offset`, `stored_offset`: what is subtracted before values are divided, and what is added after decoding.
    """

    scale: Scales
    stored_scale: Scales
    zero_point: UInt8[Array, "*batch blocks"] | None = None
    offset: Scales | None = None
    stored_offset: Scales | None = None


# Storing


def store(scale: Scales, zero_point: ZeroPoints, format: AbstractFormat) -> tuple[ScaleBits, ScaleBits | None, Grid]:
    """Returns scales and offsets as the format stores them, and the levels that follow."""
    scale_bits, offset, offset_bits = store_scale(scale, format), None, None
    if zero_point is not None and has_offsets(format):
        offset, zero_point = zero_point, None
        offset_bits = store_scale(offset, format)
    elif zero_point is not None:
        # They are packed as codes are, so one that is too large would change its neighbours.
        zero_point = jnp.minimum(zero_point, 2**format.bits - 1).astype(jnp.uint8)
    grid = load_grid(scale_bits, zero_point, offset_bits, format)._replace(scale=scale)
    # ggml subtracts the offset as it is before it is rounded, as it multiplies by such a scale.
    return scale_bits, offset_bits, grid._replace(offset=offset) if format.multiplies_by_reciprocal else grid


def load_grid(
    scale: ScaleBits,
    zero_point: UInt8[Array, "*batch blocks"] | None,
    offset: ScaleBits | None,
    format: AbstractFormat,
) -> Grid:
    """Returns the levels of each block, by what is stored."""
    stored_scale = load_scale(scale, format)
    stored_offset = None if offset is None else load_scale(offset, format)
    return Grid(stored_scale, stored_scale, zero_point, stored_offset, stored_offset)


def store_scale(scale: Scales, format: AbstractFormat) -> ScaleBits:
    """Returns scales or offsets as the format stores them: their bits, or an `Encoded` if it quantizes its scales."""
    if format.scale_format is None:
        return scale_to_bits(scale, format.scale_dtype)
    nested = format.scale_format
    outer, _ = choose_by_blocks(lambda blocks, f: (f.choose_scale(blocks), None), scale, nested)
    return encode_by_chunks(scale, *store(outer, None, nested), nested)


def load_scale(stored: ScaleBits, format: AbstractFormat) -> Scales:
    """Returns stored scales or offsets as floats."""
    if isinstance(stored, Encoded) and format.scale_format is not None:
        return decode_rows(stored, format.scale_format)
    return bits_to_scale(stored, format.scale_dtype)  # pyright: ignore[reportArgumentType]


# Rounding


def decode_by(
    codes: UInt8[Array, "*batch length"], grid: Grid, format: AbstractFormat
) -> Float32[Array, "*batch length"]:
    """Returns the levels that codes stand for."""
    return dequantize_blocks(
        format.decode(codes), grid.stored_scale, grid.zero_point, grid.stored_offset, format.block_size
    )


def encode_by(
    values: Float32[Array, "*batch length"], grid: Grid, format: AbstractFormat
) -> tuple[UInt8[Array, "*batch length"], Float32[Array, "*batch length"]]:
    """Returns the nearest codes of values, and the values in units of their scales that were rounded."""
    per_value = lambda x: expand(x.astype(jnp.float32), format.block_size, values.shape[-1])
    units = values if grid.offset is None else values - per_value(grid.offset)
    # By the stored scales, since decoding multiplies by those.
    divided = divide(units, per_value(grid.stored_scale))
    if format.multiplies_by_reciprocal:
        multiplied = units * per_value(divide(jnp.ones_like(grid.scale), grid.scale))
        divided = jnp.where(per_value(multiplies(grid.scale, grid.stored_scale, format)), multiplied, divided)
    units = divided if grid.zero_point is None else divided + per_value(grid.zero_point)
    codes = format.encode(units)
    if codes.dtype != jnp.uint8 or codes.shape != units.shape:
        raise TypeError(
            f"`{type(format).__name__}.encode` must return uint8 of the shape of its values, {units.shape}. Got "
            f"{codes.dtype} of shape {codes.shape}. End it with `.astype(jnp.uint8)`."
        )
    return codes, units


def multiplies(scale: Scales, stored_scale: Scales, format: AbstractFormat) -> Bool[Array, "*batch blocks"]:
    """Returns for which blocks of a format that multiplies by reciprocals values are really multiplied."""
    # A scale beyond the range of its dtype is infinite or zero. Dividing makes the block saturate, or zero.
    return (jnp.abs(scale) <= float(jnp.finfo(jnp.dtype(format.scale_dtype)).max)) & (stored_scale != 0)


def encode_rows(
    rows: Float[Array, "*batch length"],
    scale: Scales,
    zero_point: ZeroPoints,
    format: AbstractFormat,
    *,
    key: PRNGKeyArray | None = None,
    chunk: int | None = None,
) -> Encoded:
    """Encodes values with given scales: to the nearest codes, or with `key` by stochastic rounding.

    A block that holds a NaN or an infinity gets a scale of NaN, so it decodes to NaN.

    **Arguments:**

    - `rows`: floats of shape `(*batch, length)`, with the quantized axis last.
    - `scale`: float32, of shape `(*batch, blocks)`. Rounded to what `format` can store.
    - `zero_point`: `uint8` of the same shape, below `2**bits`; for a format with offsets these, float32; for any other
        format `None`.
    - `format`: the format to quantize to.
    - `key`, `chunk`: as for [`eqquant.AbstractMethod.quantize_rows`][].

    **Returns:**

    An `Encoded`.
    """
    check_scales(scale, zero_point, (*rows.shape[:-1], num_blocks(rows.shape[-1], format.block_size)), format)
    marks, _ = choose_by_parts(lambda blocks, _: (not_finite(blocks), None), rows, format, chunk)
    return encode_by_chunks(rows, *store(mark(scale, marks), zero_point, format), format, key, chunk)


def encode_by_chunks(
    rows: Rows,
    scale_bits: ScaleBits,
    offset_bits: ScaleBits | None,
    grid: Grid,
    format: AbstractFormat,
    key: PRNGKeyArray | None = None,
    chunk: int | None = None,
) -> Encoded:
    """Encodes values by what `store` returned, whose scales are NaN for every block that is not finite."""

    def encode(first: Index, rows: Array, grid: Grid) -> Array:
        codes, values = encode_by(rows.astype(jnp.float32), grid, format)
        if key is None:
            return codes
        return move_stochastically(codes, values, format, _uniform_by_row(key, first, values.shape))

    return Encoded(by_chunks(encode, chunk, rows, grid), scale_bits, grid.zero_point, offset_bits)


def decode_rows(encoded: Encoded, format: AbstractFormat) -> Float32[Array, "*batch length"]:
    """Returns the values that codes stand for. For a method that compares candidates.

    **Arguments:**

    - `encoded`: what [`eqquant.encode_rows`][] returned.
    - `format`: the format of the codes.

    **Returns:**

    Float32 values of shape `(*batch, length)`.
    """
    return decode_by(encoded.codes, load_grid(encoded.scale, encoded.zero_point, encoded.offset, format), format)


def _uniform_by_row(key: PRNGKeyArray, first: Index, shape: tuple[int, ...]) -> Float32[Array, "*batch length"]:
    """Numbers between zero and one that depend on a row and its number alone, not on the chunk that it is in."""
    *batch, length = shape
    draw = lambda row: jax.random.uniform(jax.random.fold_in(key, row), (length,), jnp.float32)
    return jax.vmap(draw)(first + jnp.arange(math.prod(batch))).reshape(shape)
