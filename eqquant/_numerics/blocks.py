"""Cuts an axis into blocks, and reduces each block to one value."""

import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from .reduce import reduce_blocks


# A pair is a tile, of so many rows and columns.
BlockSize = int | tuple[int, int] | Literal["tensor"] | None


def num_blocks(length: int, block_size: BlockSize) -> int:
    """Returns how many scales a row of `length` values has."""
    return -(-length // block_length(block_size, length)) if has_blocks(block_size) else 1


def block_length(block_size: BlockSize, length: int) -> int:
    """Returns how many values of a row share a scale: without blocks all `length` of them."""
    if isinstance(block_size, tuple):
        return block_size[1]
    return block_size if isinstance(block_size, int) else length


def has_blocks(block_size: BlockSize) -> bool:
    """Returns whether a row is cut into blocks or tiles."""
    return isinstance(block_size, (int, tuple))


def tile_height(block_size: BlockSize) -> int:
    """Returns how many rows share the scales that are stored: one without tiles."""
    return block_size[0] if isinstance(block_size, tuple) else 1


def split_blocks(x: Float[Array, "*batch length"], block_size: BlockSize) -> list[Float[Array, "... blocks block"]]:
    """Cuts the last axis into blocks: the whole ones, and a shorter last one if any.

    So a scale rule only sees real values, never padding. `"tensor"` makes each matrix one block: the last two axes.
    Tiles must divide the rows: `(*stack, rows, length)` becomes `(*stack, tiles, blocks, rows * columns of a tile)`.
    """
    *batch, length = x.shape
    if isinstance(block_size, tuple):
        height, width = block_size
        tiles = x.reshape(*batch[:-1], batch[-1] // height, height, length)
        parts = [jnp.swapaxes(part, -3, -2) for part in split_blocks(tiles, width)]
        return [part.reshape(*part.shape[:-2], height * part.shape[-1]) for part in parts]
    if block_size == "tensor":
        stack, rows = batch[:-1], batch[-1:]
        return [x.reshape(*stack, *[1] * len(rows), 1, math.prod(rows) * length)]
    if block_size is None:
        return [x[..., None, :]]
    whole = length // block_size * block_size
    parts = []
    if whole > 0 or length == 0:
        parts.append(x[..., :whole].reshape(*batch, whole // block_size, block_size))
    if whole < length:
        parts.append(x[..., None, whole:])
    return parts


def expand(per_block: Array, block_size: BlockSize, length: int) -> Array:
    """Repeats one value per block into one per element.

    `(*batch, blocks)` becomes `(*batch, length)`.
    """
    *batch, blocks = per_block.shape
    if not has_blocks(block_size):
        return jnp.broadcast_to(per_block, (*batch, length))
    size = block_length(block_size, length)
    repeated = jnp.broadcast_to(per_block[..., None], (*batch, blocks, size))
    return repeated.reshape(*batch, blocks * size)[..., :length]


def dequantize_blocks(
    values: Float[Array, "*batch length"],
    scale: Float[Array, "*batch blocks"],
    zero_point: UInt8[Array, "*batch blocks"] | None,
    offset: Float[Array, "*batch blocks"] | None,
    block_size: BlockSize,
) -> Float[Array, "*batch length"]:
    """Returns `(values - zero_point) * scale + offset`, where `values` are decoded codes."""
    zero_point = None if zero_point is None else zero_point.astype(jnp.float32)
    each = lambda per_block: None if per_block is None else expand(per_block, block_size, values.shape[-1])
    return dequantize_values(values, each(scale), each(zero_point), each(offset))


def dequantize_values(
    values: Float[Array, "*shape"],
    scale: Float[Array, "*shape"] | None,
    zero_point: Float[Array, "*shape"] | None,
    offset: Float[Array, "*shape"] | None,
) -> Float[Array, "*shape"]:
    """As `dequantize_blocks`, with parameters for each value. `None` changes nothing."""
    values = values if zero_point is None else values - zero_point
    values = values if scale is None else values * scale
    return values if offset is None else values + offset


def absmax(blocks: Float[Array, "*batch blocks block"]) -> Float[Array, "*batch blocks"]:
    """Returns the largest magnitude of each block; NaN where a value is NaN or infinite."""
    return reduce_blocks(blocks, "amax")


def not_finite(blocks: Float[Array, "*batch blocks block"]) -> Float[Array, "*batch blocks"]:
    """Returns NaN for each block that holds a NaN or an infinity, and zero for the others."""
    return reduce_blocks(blocks, "not_finite")


def signed_absmax(blocks: Float[Array, "*batch blocks block"]) -> Float[Array, "*batch blocks"]:
    """Returns the value of largest magnitude of each block, with its sign; on ties, the first."""
    return reduce_blocks(blocks, "signed_amax")


def absmean(blocks: Float[Array, "*batch blocks block"]) -> Float[Array, "*batch blocks"]:
    """Returns the mean magnitude of each block."""
    count = max(blocks.shape[-1], 1)
    # Dividing first keeps a block of huge values from overflowing.
    return jnp.sum(jnp.abs(blocks) / count, axis=-1)


def minmax(blocks: Float[Array, "*batch blocks block"]) -> tuple[Array, Array]:
    """Returns the least and the largest value of each block, widened to include zero.

    So zero has a code.
    """
    return reduce_blocks(blocks, "low"), reduce_blocks(blocks, "high")


def ends(blocks: Float[Array, "*batch blocks block"]) -> tuple[Array, Array]:
    """Returns the least and the largest value of each block; zeros for an empty block."""
    if blocks.shape[-1] == 0:
        zeros = jnp.zeros(blocks.shape[:-1], blocks.dtype)
        return zeros, zeros
    return jnp.min(blocks, axis=-1), jnp.max(blocks, axis=-1)


def divide(x: Float[Array, "*shape"], scale: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `x / scale`, and 0 where the scale is 0.

    Such a block holds zeros, or values too small for any scale.
    """
    usable = scale != 0
    return jnp.where(usable, x / jnp.where(usable, scale, 1), 0)
