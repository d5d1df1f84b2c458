"""Reads weights with a scale for each row, group, tile or small block.

Several libraries lay them out alike.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from ..._formats import FP8, Int8, MXFP4, MXFP8, NVFP4
from ..._numerics.blocks import BlockSize
from .._bits import unpack_low_first
from .._repack import Nested, Unpacked
from .._tensors import DTYPES, StoredTensor
from ._item import as_format, expect, FLOATS, Item, unreadable_item, weight


class ScaleGrid(NamedTuple):
    """How scales lie over the last two axes of a weight, `(*batch, out, in)`.

    - `shape`: the shape of the scales, with the batch axes of the weight, or ones: `(*batch, rows, blocks)`.
    - `block`: the values of a row that share a scale.
    - `repeats`: the rows that share a scale.
    """

    shape: tuple[int, ...]
    block: BlockSize
    repeats: int

    def spread(self, x: np.ndarray, batch: tuple[int, ...], out: int) -> np.ndarray:
        """Returns a scale, or a zero point, for each block of each row."""
        rows = np.repeat(x.reshape(self.shape), self.repeats, axis=-2)[..., :out, :]
        return np.ascontiguousarray(np.broadcast_to(rows, (*batch, out, self.shape[-1])))


def find_scale_grid(scale: StoredTensor, shape: tuple[int, ...], tile: tuple[int, int] | None = None) -> ScaleGrid:
    """Returns which values of a weight share a scale: all, a row, a group, or a tile.

    **Arguments:**

    - `scale`, `shape`: the scales, and the shape of the weight.
    - `tile`: the rows and columns of a tile, if the configuration says that there are tiles; 128 x 128 otherwise.
    """
    *batch, out, length = shape
    found = _with_batch(scale.shape, shape)
    rows, blocks = found[-2:]
    height, width = tile or (128, 128)
    tiles = (rows, blocks) == (-(-out // height), -(-length // width))
    if all(n in (1, b) for n, b in zip(found, batch, strict=False)):
        if rows == blocks == 1:
            return ScaleGrid(found, "tensor" if math.prod(found) == 1 < math.prod(shape[:-1]) else None, out)
        if tiles and tile is not None:
            return ScaleGrid(found, None if blocks == 1 else width, height)
        if rows == out:
            return ScaleGrid(found, group_size(scale, blocks, length), 1)
        if tiles:
            return ScaleGrid(found, None if blocks == 1 else width, height)
    each = f"each row, or each {height} x {width} values"
    scale.fail(f"It must have a scale for {each}, of {list(shape)}. Got {list(scale.shape)}.")


def _with_batch(given: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of scales with as many axes as the weight.

    An axis that a library leaves out has length one.
    """
    if math.prod(given) == 1:
        return (1,) * len(shape)
    if len(shape) == 2 and len(given) != 2:
        return (math.prod(given), 1)
    return (*given, *(1,) * (len(shape) - len(given)))


def scaled_item(
    t: StoredTensor,
    scale: StoredTensor,
    zero: StoredTensor | None,
    others: tuple[StoredTensor, ...],
    dtype: str | None = None,
    tile: tuple[int, int] | None = None,
) -> Item:
    """An array of bytes, int8 or fp8. A scale of a tile is stored once for each row of it.

    **Arguments:**

    - `t`, `scale`, `zero`: codes `(*batch, out, in)`, scales, and zero points, if the codes are integers and have them.
    - `others`: tensors that belong to the array besides, for its size in the file.
    - `dtype`: the dtype of the result; by default the dtype of the scales.
    - `tile`: as for `find_scale_grid`.
    """
    tensors = tuple(dict.fromkeys((t, scale, *others)))
    if t.dtype not in ("I8", "F8_E4M3", "F8_E5M2") or len(t.shape) < 2:
        return unreadable_item(t, tensors, t.dtype, f"eqquant does not know scales of {t.dtype}{list(t.shape)}")
    *batch, out, length = t.shape
    layout = find_scale_grid(scale, t.shape, tile)
    signed = t.dtype == "I8"
    zero = zero if signed else None
    if zero is not None and (zero.dtype != "I8" or math.prod(zero.shape) != math.prod(layout.shape)):
        zero.fail(f"It must have the shape of the scale, in I8. Got {zero.dtype} of {list(zero.shape)}.")
    kind = (Int8, layout.block, zero is None) if signed else (FP8, float_kind(t), layout.block)
    to_codes = lambda x: x.view(np.uint8) ^ np.uint8(128) if signed else x.view(np.uint8)

    def load() -> Unpacked:
        spread = lambda x: layout.spread(x, tuple(batch), out)
        zeros = None if zero is None else spread(to_codes(zero.array()))
        codes = lambda start, stop: to_codes(t.array().reshape(-1, length)[start:stop])
        return Unpacked(codes, spread(as_float32(scale)), zeros)

    return Item(weight(as_format(scale, *kind), t.shape, dtype or scale_dtype(scale)), t.dtype, tensors, load)


def as_float32(scale: StoredTensor) -> np.ndarray:
    return scale.array().astype(np.float32)


def scale_dtype(scale: StoredTensor) -> str:
    """Returns the dtype of a weight that has only the dtype of its scales.

    Raises unless they are floats.
    """
    if scale.dtype not in (*FLOATS, "F8_E8M0"):
        scale.fail(f"It must be floating point. Got {scale.dtype}.")
    return str(DTYPES[scale.dtype][1]) if scale.dtype in FLOATS else "float32"


def group_size(scale: StoredTensor, blocks: int, length: int) -> int | None:
    if blocks == 1:
        return None
    if blocks < 1 or length < 1 or length % blocks:
        scale.fail(f"It must divide {length} values into equal groups. Got {blocks} scales.")
    return length // blocks


def float_kind(t: StoredTensor) -> Literal["e4m3", "e5m2"]:
    return "e4m3" if t.dtype == "F8_E4M3" else "e5m2"


def microscaled_item(
    t: StoredTensor,
    scale: StoredTensor,
    tensors: tuple[StoredTensor, ...],
    format: MXFP4 | MXFP8 | NVFP4,
    dtype: str = "bfloat16",
    tiled: bool = False,
    outer: Callable[[], np.float32] = lambda: np.float32(1),
) -> Item:
    """An array of small floats in small blocks.

    **Arguments:**

    - `t`: codes `(..., out, in * bits / 8)`, the first in the low bits.
    - `scale`: a byte for each block, `(..., out, blocks)`: E8M0, or e4m3 for NVFP4.
    - `tiled`: whether scales are stored in tiles of 128 x 4.
    - `outer`: reads the scale of the whole tensor, for NVFP4.
    """
    *batch, _ = t.shape
    rows = math.prod(batch)
    length = t.nbytes * 8 // format.bits // max(rows, 1)
    nested = isinstance(format, NVFP4)
    block, special, dtypes = (16, 127, ("F8_E4M3", "U8")) if nested else (32, 255, ("U8", "F8_E8M0"))
    shape = (*batch, -(-length // block))
    if not tiled:
        expect(scale, dtypes, shape)
    elif scale.dtype not in dtypes or scale.nbytes != -(-rows // 128) * -(-shape[-1] // 4) * 512:
        scale.fail(f"It must hold tiles of 128 x 4 of {list(shape)} scales. Got {scale.dtype} of {list(scale.shape)}.")

    def load() -> Unpacked:
        whole = outer()
        scales = _untile(scale.bytes(), rows, shape[-1]) if tiled else scale.bytes().reshape(shape)
        if (scales & special == special).any():
            scale.fail("Got a scale that is not a number.")
        codes = lambda start, stop: unpack_low_first(t.bytes().reshape(rows, -1)[start:stop], format.bits)
        return Unpacked(codes, Nested(scales, np.full((*batch, 1), whole)) if nested else scales)

    name = type(format).__name__.lower()
    return Item(weight(format, (*batch, length), dtype), name, tuple(dict.fromkeys((t, *tensors))), load)


def read_outer(t: StoredTensor | None, scale: StoredTensor, divides: bool) -> Callable[[], np.float32]:
    """Returns a function that reads the scale of a tensor of NVFP4.

    It multiplies or divides the scales of blocks.
    """
    if t is not None and (t.dtype != "F32" or t.nbytes != 4):
        t.fail(f"It must be one F32 number. Got {t.dtype} of {list(t.shape)}.")

    def read() -> np.float32:
        one = np.float32(1) if t is None else t.array().reshape(-1)[0]
        if not np.isfinite(one) or (divides and one == 0):
            (t or scale).fail(f"Got {one} as the scale of the tensor.")
        with np.errstate(over="ignore"):
            return 1 / one if divides else one

    return read


def _untile(raw: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Returns the bytes of scales row by row.

    Tensor cores take them in tiles of 128 x 4, each as 32 times 16 bytes: row `32 i + j` and column `k` of a tile are
    at `16 j + 4 i + k`. https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout
    """
    tiles = raw.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
    whole = tiles.reshape(-(-rows // 128) * 128, -(-columns // 4) * 4)
    return np.ascontiguousarray(whole[:rows, :columns])
