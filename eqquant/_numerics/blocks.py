"""Cuts an axis into blocks, and reduces each block to a number."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


BlockSize = int | Literal["tensor"] | None


def num_blocks(length: int, block_size: BlockSize) -> int:
    """How many scales a row of `length` values has."""
    if block_size is None or block_size == "tensor":
        return 1
    return -(-length // block_size)


def split_blocks(x: Float[Array, "*batch length"], block_size: BlockSize) -> list[Float[Array, "... blocks block"]]:
    """Cuts the last axis into blocks: the whole ones, and the shorter last one if the length leaves a remainder.

    A scale rule therefore only ever sees real values, never padding. For `"tensor"` there is one block in all.
    """
    *batch, length = x.shape
    if block_size == "tensor":
        return [x.reshape(*[1] * len(batch), 1, -1)]
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
    """Repeats one value per block into one value per element: `(*batch, blocks)` to `(*batch, length)`."""
    *batch, blocks = per_block.shape
    if block_size is None or block_size == "tensor":
        return jnp.broadcast_to(per_block, (*batch, length))
    repeated = jnp.broadcast_to(per_block[..., None], (*batch, blocks, block_size))
    return repeated.reshape(*batch, blocks * block_size)[..., :length]


def absmax(blocks: Float[Array, "*batch blocks block"]) -> Float[Array, "*batch blocks"]:
    """Returns the largest magnitude of each block: infinite or NaN if a value is."""
    # XLA on CPU drops NaN in a vectorised `max` of floats: https://github.com/openxla/xla/issues/21461. Without their
    # sign, floats are ordered as the integers of the same bits, with NaN above infinity, and integers have no NaN.
    if blocks.dtype.itemsize > 4:
        blocks = blocks.astype(jnp.float32)
    unsigned = {4: jnp.uint32, 2: jnp.uint16}[blocks.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), unsigned)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1, initial=0), blocks.dtype)


def signed_absmax(blocks: Float[Array, "*batch blocks block"]) -> Float[Array, "*batch blocks"]:
    """The value of largest magnitude of each block, with its sign; the first of equals."""
    if blocks.shape[-1] == 0:
        return absmax(blocks)
    index = jnp.argmax(jnp.abs(blocks), axis=-1, keepdims=True)
    return jnp.take_along_axis(blocks, index, axis=-1)[..., 0]


def absmean(blocks: Float[Array, "*batch blocks block"]) -> Float[Array, "*batch blocks"]:
    """The mean magnitude of each block."""
    count = max(blocks.shape[-1], 1)
    # Dividing first keeps a block of huge values from overflowing.
    return jnp.sum(jnp.abs(blocks) / count, axis=-1)


def minmax(blocks: Float[Array, "*batch blocks block"]) -> tuple[Array, Array]:
    """The smallest and the largest value of each block, widened to include zero, so that zero has a code."""
    return jnp.min(blocks, axis=-1, initial=0), jnp.max(blocks, axis=-1, initial=0)


def divide(x: Float[Array, "*shape"], scale: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x / scale`, and 0 where the scale is 0 (a block of zeros, or of values too small for any scale)."""
    usable = scale != 0
    return jnp.where(usable, x / jnp.where(usable, scale, 1), 0)
