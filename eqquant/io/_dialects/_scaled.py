"""Reads weights with a scale for each row, group, tile or small block.

Several libraries lay them out alike.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import numpy as np

from ..._formats import FP8, MXFP4, MXFP8, NVFP4
from ..._numerics.blocks import BlockSize, num_blocks, tile_height
from .._bits import unpack_low_first
from .._repack import act_order, Nested, Unpacked
from .._tensors import DTYPES, FLOATS, StoredTensor
from ._item import as_format, INTEGERS, Item, unreadable_item, weight


class ScaleGrid(NamedTuple):
    """How scales lie over the last two axes of a weight, `(*batch, out, in)`.

    - `shape`: the shape of the scales, with the batch axes of the weight, or ones: `(*batch, rows, blocks)`.
    - `block`: the values of a row that share a scale, or a tile.
    - `repeats`: the rows that share a scale and have it each.
    """

    shape: tuple[int, ...]
    block: BlockSize
    repeats: int

    def by_rows(self) -> "ScaleGrid":
        """Returns the same scales in each row of a tile."""
        return self._replace(block=self.block[1], repeats=self.block[0]) if isinstance(self.block, tuple) else self

    def spread(self, x: np.ndarray, batch: tuple[int, ...], out: int) -> np.ndarray:
        """Returns a scale, or a zero point, for each block of each row, or of each row of tiles."""
        rows = np.repeat(x.reshape(self.shape), self.repeats, axis=-2)[..., :out, :]
        return np.ascontiguousarray(np.broadcast_to(rows, (*batch, *rows.shape[-2:])))


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
        if tiles and tile and len(scale.shape) > 1:
            return ScaleGrid(found, (height, width), 1)
        if rows == blocks == 1:
            return ScaleGrid(found, "tensor" if math.prod(shape[:-1]) > 1 else None, out)
        if rows == out:
            return ScaleGrid(found, group_size(scale, blocks, length), 1)
        if tiles:
            return ScaleGrid(found, (height, width), 1)
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
    dtype: str | None = None,
    tile: tuple[int, int] | None = None,
    groups: StoredTensor | None = None,
    bits: int = 8,
) -> Item:
    """An array of bytes, int8 or fp8.

    **Arguments:**

    - `t`, `scale`, `zero`: codes `(*batch, out, in)`, scales, and zero points, which must be zero beside floats.
    - `dtype`: the dtype of the result; by default the dtype of the scales.
    - `tile`: as for `find_scale_grid`.
    - `groups`: as for `act_order`.
    - `bits`: how many bits the integers have, one in each byte.
    """
    if t.dtype not in ("I8", "F8_E4M3", "F8_E5M2") or len(t.shape) < 2:
        return unreadable_item(t, t.dtype, f"eqquant does not know scales of {t.dtype}{list(t.shape)}")
    *batch, out, length = t.shape
    layout = find_scale_grid(scale, t.shape, tile)
    signed = t.dtype == "I8"
    if zero is not None and not signed:
        if zero.array().any():
            zero.fail(f"It must be zero beside {t.dtype}. Got other values.")
        zero = None
    if zero is not None and (zero.dtype != "I8" or math.prod(zero.shape) != math.prod(layout.shape)):
        zero.fail(f"It must have the shape of the scale, in I8. Got {zero.dtype} of {list(zero.shape)}.")
    kind = (INTEGERS[bits], layout.block, zero is None) if signed else (FP8, float_kind(t), layout.block)
    order = act_order(groups, length, layout.shape[-1])
    to_codes = lambda x: x.view(np.uint8) + np.uint8(2 ** (bits - 1)) if signed else x.view(np.uint8)

    def codes(start: int, stop: int) -> np.ndarray:
        found = to_codes(t.array().reshape(-1, length)[start:stop])
        if bits < 8 and (found >= 2**bits).any():
            t.fail(f"Got a code that is no integer of {bits} bits.")
        return found if order is None else found.take(order, axis=1)

    def load() -> Unpacked:
        spread = lambda x: layout.spread(x, tuple(batch), out)
        zeros = None if zero is None else spread(to_codes(zero.array()))
        return Unpacked(codes, spread(as_float32(scale)), zeros, order=order)

    format, dtype = as_format(scale, *kind), dtype or scale_dtype(scale)
    return Item(weight(format, t.shape, dtype, permuted=order is not None), t.dtype, (t,), load)


def crop(item: Item, size: StoredTensor | None) -> Item:
    """Cuts the padding of rows and columns off a weight of two dimensions.

    `size` holds the shape without them.
    """
    if size is None or item.problem is not None:
        return item
    size.expect("I64", (len(item.entry.shape),))
    entry, shape = item.entry, tuple(int(n) for n in size.array())
    if shape == entry.shape:
        return item
    outside = any(n < 1 or n > most for n, most in zip(shape, entry.shape, strict=True))
    if outside or len(shape) != 2 or entry.order is not None or entry.format is None:
        size.fail(f"It must be the shape of the weight, or of two dimensions without padding. Got {list(shape)}.")
    out, length = shape
    blocks, tiles = num_blocks(length, entry.format.block_size), -(-out // tile_height(entry.format.block_size))

    def load() -> Unpacked:
        found = item.load()
        if not isinstance(found, Unpacked):
            raise TypeError(f"Only parts of a weight can be cut. Got {found!r}.")
        codes, x = lambda start, stop: found.codes(start, stop)[:, :length], found.scale
        scale = Nested(x.codes[:tiles, :blocks], x.scale[:tiles]) if isinstance(x, Nested) else x[:tiles, :blocks]
        zero = None if found.zero_point is None else found.zero_point[:tiles, :blocks]
        return found._replace(codes=codes, scale=scale, zero_point=zero)

    return dataclasses.replace(item, entry=dataclasses.replace(entry, shape=shape), load=load)


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
    format: MXFP4 | MXFP8 | NVFP4,
    dtype: str = "bfloat16",
    tiled: bool = False,
    outer: StoredTensor | None = None,
    divides: bool = False,
) -> Item:
    """An array of small floats in small blocks.

    **Arguments:**

    - `t`: codes `(..., out, in * bits / 8)`, the first in the low bits.
    - `scale`: a byte for each block, `(..., out, blocks)`: E8M0, or e4m3 for NVFP4.
    - `tiled`: whether scales are stored in tiles of 128 x 4.
    - `outer`, `divides`: the scale of the whole tensor, or of each expert, of NVFP4, and whether scales of blocks are
        divided by it, not multiplied.
    """
    *batch, _ = t.shape
    if outer is not None and (outer.dtype != "F32" or outer.nbytes not in (4, 4 * math.prod(batch[:-1]))):
        outer.fail(f"It must be one F32 number, or one for each expert. Got {outer.dtype} of {list(outer.shape)}.")
    rows = math.prod(batch)
    length = t.nbytes * 8 // format.bits // max(rows, 1)
    nested = isinstance(format, NVFP4)
    block, special, dtypes = (16, 127, ("F8_E4M3", "U8")) if nested else (32, 255, ("U8", "F8_E8M0"))
    shape = (*batch, -(-length // block))
    if not tiled:
        scale.expect(dtypes, shape)
    elif scale.dtype not in dtypes or scale.nbytes != -(-rows // 128) * -(-shape[-1] // 4) * 512:
        scale.fail(f"It must hold tiles of 128 x 4 of {list(shape)} scales. Got {scale.dtype} of {list(scale.shape)}.")

    def load() -> Unpacked:
        scales = _untile(scale.bytes(), rows, shape[-1]) if tiled else scale.bytes().reshape(shape)
        if (scales & special == special).any():
            scale.fail("Got a scale that is not a number.")
        codes = lambda start, stop: unpack_low_first(t.bytes().reshape(rows, -1)[start:stop], format.bits)
        return Unpacked(codes, Nested(scales, _read_outer(outer, batch, divides)) if nested else scales)

    return Item(weight(format, (*batch, length), dtype), type(format).__name__.lower(), (t,), load)


def _read_outer(t: StoredTensor | None, batch: list[int], divides: bool) -> np.ndarray:
    """Returns the outer scale of each row, `(*batch, 1)`."""
    if t is None:
        return np.ones((*batch, 1), np.float32)
    scales = t.array().reshape(-1)
    wrong = scales[~np.isfinite(scales) | (divides & (scales == 0))]
    if wrong.size:
        t.fail(f"Got {wrong[0]} as the scale of the tensor.")
    with np.errstate(over="ignore"):
        scales = 1 / scales if divides else scales
    each = scales if scales.size == 1 else scales.reshape(*batch[:-1], 1, 1)
    return np.ascontiguousarray(np.broadcast_to(each, (*batch, 1)))


def _untile(raw: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Returns the bytes of scales row by row.

    Tensor cores take them in tiles of 128 x 4, each as 32 times 16 bytes: row `32 i + j` and column `k` of a tile are
    at `16 j + 4 i + k`. https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout
    """
    tiles = raw.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
    whole = tiles.reshape(-(-rows // 128) * 128, -(-columns // 4) * 4)
    return np.ascontiguousarray(whole[:rows, :columns])
