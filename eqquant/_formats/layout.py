"""Layouts of formats: the meaning of the bits of a weight, for kernels."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np

from .._native.weight import Codec, Layout, ScaleKind
from .._numerics.blocks import block_length, num_blocks
from .._numerics.constants import compute_now
from .base import AbstractFormat, AbstractVectorFormat, has_offsets, has_zero_points, is_ours
from .floating import FP8


@ft.lru_cache(256)
def make_layout(format: AbstractFormat, length: int, decoded_scales: bool = False) -> Layout:
    """Returns the layout of rows of `length` codes in a format; its scales may be decoded."""
    size = block_length(format.block_size, length)
    kind, nested = None if decoded_scales else nested_scale_kind(format, length), None
    if kind is None and not decoded_scales and has_nested_scales(format):
        nested = make_layout(format.scale_format, num_blocks(length, format.block_size))
    codec = _find_codec(format)
    return Layout(
        length,
        format.bits if codec is None else codec.bits,
        max(min(size, length), 1),
        _decode_table(format),
        kind or ("float32" if format.scale_format is not None else format.scale_dtype),
        has_zero_points(format),
        has_offsets(format),
        nested,
        codec,
    )


def _find_codec(format: AbstractFormat) -> Codec | None:
    """Returns the `codec` of a vector format, unless a user has redefined what it stands for."""
    return format.codec if isinstance(format, AbstractVectorFormat) and is_ours(format, "decode_row") else None


@ft.lru_cache(256)
def _decode_table(format: AbstractFormat) -> tuple[float, ...]:
    """Returns the value of each code; with a codec, of those that it decodes to."""
    if isinstance(format, AbstractVectorFormat):
        codec = _find_codec(format)
        return () if codec is None else tuple(map(float, range(codec.lowest, codec.lowest + 2**codec.bits)))
    # One program compiles sooner than several operations.
    decode = jax.jit(lambda codes: format.decode(jnp.asarray(codes)))
    with compute_now():
        return tuple(np.asarray(decode(np.arange(2**format.bits, dtype=np.uint8)), np.float32).tolist())


def has_nested_scales(format: AbstractFormat) -> bool:
    """Returns whether scales are codes with plain scales of their own.

    `cpu` reads these as they are stored.
    """
    scales = format.scale_format
    return scales is not None and scales.scale_format is None and not (has_zero_points(scales) or has_offsets(scales))


def nested_scale_kind(format: AbstractFormat, length: int) -> ScaleKind | None:
    """Returns the kind of quantized scales that kernels can read, or `None`.

    These are small floats with one scale per row.
    """
    scales = format.scale_format
    if type(scales) is not FP8:  # a subclass may decode differently
        return None
    blocks = num_blocks(length, format.block_size)
    return scales.kind if num_blocks(blocks, scales.block_size) == 1 else None
