"""Eight-bit integers and floats with a scale for each row, group or tile, which several libraries lay out alike."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._formats import FP8, Int8
from ..._formats.base import AbstractFormat
from ..._numerics.blocks import BlockSize
from .._stored import DTYPES, Stored
from .._transcode import from_codes
from .item import format_of, Item


FLOATS = ("F32", "F16", "BF16")


def scaled(t: Stored, scale: Stored, zero: Stored | None, others: tuple[Stored, ...], dtype: Any = None) -> Item:
    """An array of bytes, int8 or fp8. A scale of a tile is stored once for each row of it.

    **Arguments:**

    - `t`, `scale`, `zero`: codes `(out, in)`, scales, and zero points, if the codes are integers and have them.
    - `others`: tensors that belong to the array besides, for its size in the file.
    - `dtype`: that of the result; by default that of the scales.
    """
    if t.dtype not in ("I8", "F8_E4M3", "F8_E5M2") or len(t.shape) != 2:
        problem = f"eqquant does not know scales of {t.dtype}{list(t.shape)}"
        return Item(t.shape, t.dtype, None, t.dtype, (t, scale, *others), lambda: None, problem)
    out, length = t.shape
    rows, blocks = scale.shape if len(scale.shape) == 2 else (math.prod(scale.shape), 1)
    if rows == out or rows == blocks == 1:
        block: BlockSize = "tensor" if rows == 1 < out else block_of(scale, blocks, length)
        repeats = out // rows if rows else 1
    elif (rows, blocks) == (-(-out // 128), -(-length // 128)):
        block, repeats = (None if blocks == 1 else 128), 128
    else:
        scale.fail(
            f"It must have a scale for each row, or each 128 x 128 values, of {list(t.shape)}. Got {list(scale.shape)}."
        )
    zero = zero if t.dtype == "I8" else None
    if zero is not None and (zero.dtype != "I8" or math.prod(zero.shape) != rows * blocks):
        zero.fail(f"It must have the shape of the scale, in I8. Got {zero.dtype} of {list(zero.shape)}.")
    spread = lambda x: np.repeat(x.reshape(rows, blocks), repeats, axis=0)[:out]
    signed = t.dtype == "I8"
    kind = "e4m3" if t.dtype == "F8_E4M3" else "e5m2"
    format = format_of(scale, Int8, block, zero is None) if signed else format_of(scale, FP8, kind, block)

    def codes(start: int, stop: int) -> np.ndarray:
        raw = t.array()[start:stop].view(np.uint8)
        return raw ^ np.uint8(128) if signed else raw

    zeros = lambda: None if zero is None else spread(zero.array().view(np.uint8) ^ np.uint8(128))
    return grouped(t, scale, others, format, t.shape, lambda: spread(scales_of(scale)), zeros, codes, t.dtype, dtype)


def scales_of(t: Stored) -> np.ndarray:
    return t.array().astype(np.float32)


def block_of(scale: Stored, blocks: int, length: int) -> BlockSize:
    if blocks == 1:
        return None
    if blocks < 1 or length < 1 or length % blocks:
        scale.fail(f"It must divide {length} values into equal groups. Got {blocks} scales.")
    return length // blocks


def grouped(
    t: Stored,
    scale: Stored,
    others: tuple[Stored, ...],
    format: AbstractFormat,
    shape: tuple[int, ...],
    scales: Callable[[], np.ndarray],
    zeros: Callable[[], np.ndarray | None],
    codes: Callable[[int, int], np.ndarray],
    stored_as: str,
    dtype: Any = None,
) -> Item:
    """An array with a scale for each group of a row, given by functions that read it."""
    if scale.dtype not in (*FLOATS, "F8_E8M0"):
        scale.fail(f"It must be floating point. Got {scale.dtype}.")
    if dtype is None:
        dtype = DTYPES[scale.dtype][1] if scale.dtype in FLOATS else "float32"
    tensors = tuple(dict.fromkeys((t, scale, *others)))
    read = lambda: from_codes(codes, scales(), zeros(), format, shape, dtype, t)
    return Item(shape, jnp.dtype(dtype).name, format, stored_as, tensors, read)
