"""Stores scales and offsets of blocks, and rounds values to the levels of the stored ones."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray, UInt, UInt8

from .._formats.base import AbstractFormat, AbstractVectorFormat, find_levels, has_offsets, Scales
from .._numerics.batching import Index, map_chunks
from .._numerics.blocks import absmax, dequantize_blocks, divide, ends, expand, not_finite, num_blocks
from .._numerics.scale_bits import bits_to_scale, clip_finite, round_up_from_zero, scale_to_bits
from .choose import check_scales, choose_by_blocks, choose_by_parts, copy_nan, Rows, ZeroPoints
from .stochastic import move_stochastically


class EncodedRows(NamedTuple):
    """The result of a method: a code for each value, with the scales and zero points.

    [`eqquant.extend.encode_rows`][] makes it.

    - `codes`: a code for each value, not packed: uint8 `(*batch, length)`. Codes that stand for several values
        (`IQ1` to `IQ3`, `Trellis`) are packed: `(*batch, bytes)`.
    - `scale`: the bits of the scales as the format stores them: unsigned integers `(*batch, blocks)`, or another
        `EncodedRows` if the format quantizes its scales.
    - `zero_point`: uint8 `(*batch, blocks)`, or `None`.
    - `offset`: as `scale`, `(*batch, blocks)`, for a format with offsets, or `None`.
    """

    codes: UInt8[Array, "*batch length"]
    scale: "UInt[Array, '*batch blocks'] | EncodedRows"
    zero_point: UInt8[Array, "*batch blocks"] | None = None
    offset: "UInt[Array, '*batch blocks'] | EncodedRows | None" = None


# Scales or offsets as a format stores them.
ScaleBits = UInt[Array, "*batch blocks"] | EncodedRows


class Grid(NamedTuple):
    """The quantization grid of each block: the levels to which values are rounded.

    - `scale`, `stored_scale`: the scales as they were chosen, and as they are stored.
    - `offset`, `stored_offset`: floats that are subtracted before dividing, and added after decoding.
    - `weights`: how much the squared error of each value counts, for vector formats; `None` if all count alike.
    """

    scale: Scales
    stored_scale: Scales
    zero_point: UInt8[Array, "*batch blocks"] | None = None
    offset: Scales | None = None
    stored_offset: Scales | None = None
    weights: Float32[Array, "*batch length"] | None = None


# Storing


def store(
    rows: Rows, scale: Scales, zero_point: ZeroPoints, format: AbstractFormat, chunk: int | None = None
) -> tuple[ScaleBits, ScaleBits | None, Grid]:
    """Returns scales and offsets as the format stores them, and the levels that follow."""
    if zero_point is not None and has_offsets(format):
        return _store_with_offset(rows, scale, zero_point, format, chunk)
    if zero_point is not None:
        # Zero points are packed as codes are, so a zero point that is too large would change its neighbors.
        zero_point = jnp.minimum(zero_point, 2**format.bits - 1).astype(jnp.uint8)
    scale_bits = store_scale(scale, format)
    return scale_bits, None, load_grid(scale_bits, zero_point, None, format)._replace(scale=scale)


def _store_with_offset(
    rows: Rows, scale: Scales, offset: Scales, format: AbstractFormat, chunk: int | None
) -> tuple[ScaleBits, ScaleBits, Grid]:
    """Stores scales and offsets.

    A block becomes zeros where the stored levels might be further from it than zeros are.
    """
    # No level overflows float32, though scales are rounded up, and no scale vanishes beside an offset.
    largest = float(jnp.finfo(jnp.float32).max) / (float(np.abs(find_levels(format)[0]).max()) * (1 + 2**-7))
    scale = jnp.where(jnp.isnan(scale), scale, jnp.clip(scale, -largest, largest))
    if format.scale_format is None:
        scale = round_up_from_zero(scale, format.scale_dtype)
    scale_bits, offset_bits = store_scale(scale, format), store_scale(offset, format)
    grid = load_grid(scale_bits, None, offset_bits, format)
    stored_offset = jnp.zeros(()) if grid.stored_offset is None else grid.stored_offset
    near = _is_near(scale, grid.stored_scale) & _is_near(offset, stored_offset) & (grid.stored_scale != 0)
    if format.multiplies_by_reciprocal:
        # ggml subtracts the offset before it is rounded, and multiplies by the scale before it is rounded.
        grid = grid._replace(scale=scale, offset=jnp.where(near, offset, stored_offset))
    keeps = near | ~(_largest_error(rows, grid, format, chunk) > _root_mean_square(rows, format, chunk))
    clear = lambda bits: clear_blocks(bits, keeps, format)
    return clear(scale_bits), clear(offset_bits), jax.tree.map(lambda x: jnp.where(keeps, x, 0), grid)


def clear_blocks(stored: ScaleBits, keeps: Bool[Array, "*batch blocks"], format: AbstractFormat) -> ScaleBits:
    """Returns stored scales or offsets that are zero where a block does not keep them."""
    if isinstance(stored, EncodedRows) and format.scale_format is not None:
        zero = format.scale_format.encode(jnp.zeros(keeps.shape, jnp.float32))
        return stored._replace(codes=jnp.where(keeps, stored.codes, zero))
    return jnp.where(keeps, stored, 0)  # pyright: ignore[reportArgumentType]


def _is_near(wanted: Scales, stored: Scales) -> Bool[Array, "*batch blocks"]:
    """Returns where storage rounds scales or offsets by so little that it hardly matters."""
    return jnp.abs(stored - wanted) <= jnp.abs(wanted) / 16


def _largest_error(rows: Rows, grid: Grid, format: AbstractFormat, chunk: int | None) -> Scales:
    """Returns a bound of the errors of the values of each block."""
    low, high = choose_by_parts(ends, rows, format, chunk)
    levels, used = find_levels(format)
    levels = np.unique(levels[used])
    offset = 0.0 if grid.stored_offset is None else grid.stored_offset
    first, last = (offset + float(level) * grid.stored_scale for level in (levels[0], levels[-1]))
    within = float(np.diff(levels).max(initial=0)) / 2 * jnp.abs(grid.stored_scale)
    below, above = jnp.minimum(first, last) - low, high - jnp.maximum(first, last)  # pyright: ignore[reportOptionalOperand]
    return jnp.maximum(within, jnp.maximum(below, above))


def _root_mean_square(rows: Rows, format: AbstractFormat, chunk: int | None) -> Scales:
    """Returns the root of the mean square of each block."""

    def choose(blocks: Array) -> tuple[Array, None]:
        size = absmax(blocks)  # as a unit, it keeps squares from overflowing
        units = divide(blocks, jnp.broadcast_to(size[..., None], blocks.shape))
        return size * jnp.sqrt(jnp.sum(jnp.square(units), axis=-1) / max(blocks.shape[-1], 1)), None

    return choose_by_parts(choose, rows, format, chunk)[0]


def load_grid(
    scale: ScaleBits,
    zero_point: UInt8[Array, "*batch blocks"] | None,
    offset: ScaleBits | None,
    format: AbstractFormat,
) -> Grid:
    """Returns the levels of each block, from stored scales, zero points and offsets."""
    stored_scale = load_scale(scale, format)
    stored_offset = None if offset is None else load_scale(offset, format)
    return Grid(stored_scale, stored_scale, zero_point, stored_offset, stored_offset)


def store_scale(scale: Scales, format: AbstractFormat) -> ScaleBits:
    """Returns scales or offsets as the format stores them.

    Their bits, or an `EncodedRows` if it quantizes its scales.
    """
    if format.scale_format is None:
        return scale_to_bits(scale, format.scale_dtype)
    nested = format.scale_format
    outer, _ = choose_by_blocks(lambda blocks, f: (f.choose_scale(blocks), None), scale, nested)
    return encode_by_chunks(scale, *store(scale, outer, None, nested), nested)


def load_scale(stored: ScaleBits, format: AbstractFormat) -> Scales:
    """Returns stored scales or offsets as floats."""
    if isinstance(stored, EncodedRows) and format.scale_format is not None:
        return decode_rows(stored, format.scale_format)
    return bits_to_scale(stored, format.scale_dtype)  # pyright: ignore[reportArgumentType]


# Rounding


def decode_by(
    codes: UInt8[Array, "*batch length"], grid: Grid, format: AbstractFormat
) -> Float32[Array, "*batch length"]:
    """Returns the levels that codes stand for.

    As in an array, a level beyond the range is the largest float.
    """
    levels = dequantize_blocks(
        format.decode(codes), grid.stored_scale, grid.zero_point, grid.stored_offset, format.block_size
    )
    return clip_finite(levels, jnp.float32)


def encode_by(
    values: Float32[Array, "*batch length"], grid: Grid, format: AbstractFormat
) -> tuple[UInt8[Array, "*batch codes"], Float32[Array, "*batch length"]]:
    """Returns the nearest codes, and the values that were rounded, in units of their scales.

    The codes of a vector format are packed.
    """
    per_value = lambda x: expand(x.astype(jnp.float32), format.block_size, values.shape[-1])
    units = values if grid.offset is None else values - per_value(grid.offset)
    # By the stored scales, since decoding multiplies by them.
    divided = divide(units, per_value(grid.stored_scale))
    if format.multiplies_by_reciprocal:
        multiplied = units * per_value(divide(jnp.ones_like(grid.scale), grid.scale))
        divided = jnp.where(per_value(multiplies(grid.scale, grid.stored_scale)), multiplied, divided)
    units = divided if grid.zero_point is None else divided + per_value(grid.zero_point)
    if isinstance(format, AbstractVectorFormat):
        return format.encode_row(units, grid.weights), units
    codes = format.encode(units)
    if codes.dtype != jnp.uint8 or codes.shape != units.shape:
        raise TypeError(
            f"`{type(format).__name__}.encode` must return uint8 of the shape of its values, {units.shape}. Got "
            f"{codes.dtype} of shape {codes.shape}. End it with `.astype(jnp.uint8)`."
        )
    return codes, units


def multiplies(scale: Scales, stored_scale: Scales) -> Bool[Array, "*batch blocks"]:
    """Returns which blocks multiply by the reciprocal of their scale, if the format does that."""
    # A scale beyond the range of its dtype, or near the end, is far from itself. Dividing makes the block saturate, or
    # zero.
    return _is_near(scale, stored_scale) & (stored_scale != 0)


def encode_rows(
    rows: Float[Array, "*batch length"],
    scale: Scales,
    zero_point: ZeroPoints,
    format: AbstractFormat,
    *,
    key: PRNGKeyArray | None = None,
    chunk: int | None = None,
) -> EncodedRows:
    """Encodes values with given scales.

    Rounds to the nearest codes, or with `key` stochastically.

    A block that holds a NaN or an infinity gets a scale of NaN, so it decodes to NaN.

    !!! Example

        ```python
        encoded = eqq.extend.encode_rows(rows, scale, zero_point, format)
        ```

    **Arguments:**

    - `rows`: floats of shape `(*batch, length)`, with the quantized axis last.
    - `scale`: float32, of shape `(*batch, blocks)`. Rounded to a scale that `format` can store.
    - `zero_point`: `uint8` of the same shape, below `2**bits`; for a format with offsets these, float32; for any other
        format `None`.
    - `format`: the format to quantize to.
    - `key`, `chunk`: as for [`eqquant.extend.AbstractMethod.quantize_rows`][].

    **Returns:**

    An `EncodedRows`.
    """
    check_scales(scale, zero_point, (*rows.shape[:-1], num_blocks(rows.shape[-1], format.block_size)), format)
    nans, _ = choose_by_parts(lambda blocks: (not_finite(blocks), None), rows, format, chunk)
    return encode_by_chunks(rows, *store(rows, copy_nan(scale, nans), zero_point, format, chunk), format, key, chunk)


def encode_by_chunks(
    rows: Rows,
    scale_bits: ScaleBits,
    offset_bits: ScaleBits | None,
    grid: Grid,
    format: AbstractFormat,
    key: PRNGKeyArray | None = None,
    chunk: int | None = None,
) -> EncodedRows:
    """Encodes values by the results of `store`.

    The scale of every block that is not finite must be NaN.
    """
    if key is not None:  # with the stored scales, so that the mean of the decoded values is right
        grid = grid._replace(scale=grid.stored_scale, offset=grid.stored_offset)

    def encode(first: Index, rows: Array, grid: Grid) -> Array:
        codes, values = encode_by(rows.astype(jnp.float32), grid, format)
        if key is None:
            return codes
        return move_stochastically(codes, values, format, _uniform_by_row(key, first, values.shape))

    return EncodedRows(map_chunks(encode, chunk, rows, grid), scale_bits, grid.zero_point, offset_bits)


def decode_rows(encoded: EncodedRows, format: AbstractFormat) -> Float32[Array, "*batch length"]:
    """Returns the values that codes stand for. For a method that compares candidates.

    !!! Example

        ```python
        error = eqq.extend.decode_rows(encoded, format) - rows
        ```

    **Arguments:**

    - `encoded`: a result of [`eqquant.extend.encode_rows`][].
    - `format`: the format of the codes.

    **Returns:**

    Float32 values of shape `(*batch, length)`.

    **Raises:**

    `ValueError` if codes stand for several values: they are packed, and do not say how long a row is.
    """
    return decode_by(encoded.codes, load_grid(encoded.scale, encoded.zero_point, encoded.offset, format), format)


def _uniform_by_row(key: PRNGKeyArray, first: Index, shape: tuple[int, ...]) -> Float32[Array, "*batch length"]:
    """Returns random numbers from zero to one that depend on the key and the row alone.

    So they do not depend on the chunk.
    """
    *batch, length = shape
    draw = lambda row: jax.random.uniform(jax.random.fold_in(key, row), (length,), jnp.float32)
    return jax.vmap(draw)(first + jnp.arange(math.prod(batch))).reshape(shape)
