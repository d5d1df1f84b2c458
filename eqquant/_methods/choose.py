"""Cuts rows into blocks, and chooses the scale and the zero point of each."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

from .._formats.base import AbstractFormat, has_offsets, has_zero_points, Scales
from .._numerics.batching import Index, map_chunks
from .._numerics.blocks import BlockSize, not_finite, num_blocks, split_blocks, tile_height


Rows = Float[Array, "*batch length"]
# Zero points; offsets for a format that has offsets; `None` for other formats.
ZeroPoints = UInt8[Array, "*batch blocks"] | Float32[Array, "*batch blocks"] | None
# Scales, and zero points or offsets.
Chosen = tuple[Array, Array | None]


def choose_by_blocks(
    choose: Callable[[Array, AbstractFormat], tuple[Array, Array | None]],
    rows: Float[Array, "*batch length"],
    format: AbstractFormat,
    *,
    chunk: int | None = None,
) -> tuple[Scales, ZeroPoints]:
    """Cuts rows into blocks and chooses the scale and zero point of each.

    For your own [`eqquant.extend.AbstractMethod`][].

    !!! Example

        ```python
        scale, zero_point = eqq.extend.choose_by_blocks(eqq.AbsMax().choose_scales, rows, format)
        ```

    **Arguments:**

    - `choose`: a function of blocks and a format, as [`eqquant.extend.AbstractScaleMethod.choose_scales`][]. It is
        called for whole blocks, and again for a shorter last block.
    - `rows`: floats of shape `(*batch, length)`, with the quantized axis last.
    - `format`: the format to quantize to.
    - `chunk`: as for [`eqquant.extend.AbstractMethod.quantize_rows`][].

    **Returns:**

    The results of `choose` for all blocks: float32 scales of shape `(*batch, blocks)`, and zero points, offsets or
    `None`. The scale of a block that holds a NaN or an infinity is NaN.

    **Raises:**

    `TypeError` if `choose` returns other shapes, or zero points that do not suit the format.
    """

    def choose_and_check(blocks: Array) -> Chosen:
        scale, zero_point = choose(blocks, format)
        check_scales(scale, zero_point, blocks.shape[:-1], format)
        return copy_nan(scale, not_finite(blocks)), zero_point

    return choose_by_parts(choose_and_check, rows, format, chunk)


def choose_by_weights(
    choose: Callable[[Array, Array, AbstractFormat], Chosen],
    rows: Rows,
    weights: Float32[Array, "*stack length"],
    format: AbstractFormat,
    chunk: int | None,
) -> tuple[Scales, ZeroPoints]:
    """As `choose_by_blocks`, where `choose` takes the weights of the values of blocks too.

    `weights` are those of columns; `stack` are the first axes of `batch`.
    """
    if weights.ndim > 1 and not _cuts_matrices(format):
        return jax.vmap(lambda rows, weights: choose_by_weights(choose, rows, weights, format, chunk))(rows, weights)

    def choose_weighted(blocks: Array, weights: Array) -> Chosen:
        scale, zero_point = choose(blocks, weights, format)
        return copy_nan(scale, not_finite(blocks)), zero_point

    return choose_by_parts(choose_weighted, rows, format, chunk, weights)


def broadcast_weights(weights: Float32[Array, "*stack length"], rows: Rows) -> Float32[Array, "*batch length"]:
    """Returns the weights of columns for each row. `stack` are the first axes of `batch`."""
    weights = weights.reshape(*weights.shape[:-1], *[1] * (rows.ndim - weights.ndim), rows.shape[-1])
    return jnp.broadcast_to(weights, rows.shape)


def _cuts_matrices(format: AbstractFormat) -> bool:
    """Returns whether a block spans rows, so that matrices must be whole."""
    return format.block_size == "tensor" or isinstance(format.block_size, tuple)


def choose_by_parts(
    choose: Callable[..., Chosen],
    rows: Rows,
    format: AbstractFormat,
    chunk: int | None,
    weights: Float32[Array, "*stack length"] | None = None,
) -> tuple[Scales, ZeroPoints]:
    """Calls `choose(blocks)` for whole blocks, and for a shorter last one.

    With `weights`, calls `choose(blocks, weights)`, with the weights of their values. The rows of a tile get the same.
    """
    *batch, length = rows.shape

    def choose_whole(*arrays: Array, size: BlockSize) -> Chosen:
        parts = zip(*(split_blocks(x, size) for x in arrays), strict=True)
        scales, zeros = zip(*(choose(*part) for part in parts), strict=True)
        each = lambda x: jnp.repeat(x, tile_height(size), axis=-2) if isinstance(size, tuple) else x
        join = lambda parts: each(jnp.concatenate(parts, axis=-1))
        return join(scales), None if zeros[0] is None else join(zeros)

    def choose_rows(_: Index, rows: Array) -> Chosen:
        arrays = [rows.astype(jnp.float32)]
        arrays += [] if weights is None else [broadcast_weights(weights, rows)]
        size = format.block_size
        if not isinstance(size, tuple) or rows.size == 0:
            return choose_whole(*arrays, size=size)
        count, (height, width) = rows.shape[-2], size
        ends = sorted({0, count // height * height, count})
        found = [
            choose_whole(*(x[..., start:stop, :] for x in arrays), size=(min(height, stop - start), width))
            for start, stop in itertools.pairwise(ends)
        ]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-2), *found)

    scale, zero_point = map_chunks(choose_rows, None if _cuts_matrices(format) else chunk, rows)
    blocks = (*batch, num_blocks(length, format.block_size))
    return jnp.broadcast_to(scale, blocks), None if zero_point is None else jnp.broadcast_to(zero_point, blocks)


def copy_nan(scale: Scales, nans: Scales) -> Scales:
    """Returns scales that are NaN where `nans`, which `not_finite` returns, are NaN."""
    return jnp.where(jnp.isnan(nans), jnp.nan, scale)  # not a sum, which would lose the sign of a zero


def check_scales(scale: Array, zero_point: Array | None, shape: tuple[int, ...], format: AbstractFormat) -> None:
    """Raises unless each block has one scale, and the zero point or offset of the format."""
    if scale.shape != shape:
        raise TypeError(f"There must be one scale per block, {shape} for {format!r}. Got shape {scale.shape}.")
    name, dtype = ("Offsets", jnp.float32) if has_offsets(format) else ("Zero points", jnp.uint8)
    has_any = has_offsets(format) or has_zero_points(format)
    if has_any != (zero_point is not None):
        has, got = ("has", "none") if has_any else ("has no", "some")
        raise TypeError(f"{format!r} {has} {name.lower()}, and scales must come with as many. Got {got}.")
    if zero_point is not None and (zero_point.shape != shape or zero_point.dtype != dtype):
        raise TypeError(
            f"{name} must be {jnp.dtype(dtype)} of the shape of the scales, {shape}. Got {zero_point.dtype} of shape "
            f"{zero_point.shape}."
        )
