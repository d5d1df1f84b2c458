"""Cuts rows into blocks, and chooses the scale and the zero point of each."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

from .._formats.base import AbstractFormat, has_offsets, has_zero_points, Scales
from .._numerics.batching import Index, map_chunks
from .._numerics.blocks import not_finite, num_blocks, split_blocks


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

    def choose_and_check(blocks: Array, _: int) -> Chosen:
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
    if weights.ndim > 1 and format.block_size != "tensor":
        return jax.vmap(lambda rows, weights: choose_by_weights(choose, rows, weights, format, chunk))(rows, weights)
    if format.block_size == "tensor":
        weights = broadcast_weights(weights, rows)
    parts = split_blocks(weights, format.block_size)

    def choose_weighted(blocks: Array, part: int) -> Chosen:
        own = parts[part].reshape(*[1] * (blocks.ndim - parts[part].ndim), *parts[part].shape)
        scale, zero_point = choose(blocks, jnp.broadcast_to(own, blocks.shape), format)
        return copy_nan(scale, not_finite(blocks)), zero_point

    return choose_by_parts(choose_weighted, rows, format, chunk)


def broadcast_weights(weights: Float32[Array, "*stack length"], rows: Rows) -> Float32[Array, "*batch length"]:
    """Returns the weights of columns for each row. `stack` are the first axes of `batch`."""
    weights = weights.reshape(*weights.shape[:-1], *[1] * (rows.ndim - weights.ndim), rows.shape[-1])
    return jnp.broadcast_to(weights, rows.shape)


def choose_by_parts(
    choose: Callable[[Array, int], Chosen], rows: Rows, format: AbstractFormat, chunk: int | None
) -> tuple[Scales, ZeroPoints]:
    """Calls `choose(blocks, part)` for whole blocks, part 0, and a shorter last one, part 1."""
    *batch, length = rows.shape

    def choose_rows(_: Index, rows: Array) -> Chosen:
        parts = split_blocks(rows.astype(jnp.float32), format.block_size)
        scales, zeros = zip(*(choose(part, n) for n, part in enumerate(parts)), strict=True)
        return jnp.concatenate(scales, axis=-1), None if zeros[0] is None else jnp.concatenate(zeros, axis=-1)

    scale, zero_point = map_chunks(choose_rows, None if format.block_size == "tensor" else chunk, rows)
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
