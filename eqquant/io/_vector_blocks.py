"""The blocks of GGUF's `IQ1` to `IQ3` types: where the bits of our codes and scales are.

https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has the structs.

GGUF's blocks and ours hold the same bits in another order. So a table of places says how to read a block, and how to
write it.
"""

import functools as ft
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .. import _formats as formats
from .._formats.iq import AbstractGridFormat
from .._numerics.packing import packed_length
from ._bits import pack_codes
from ._gguf import SIZES


_VALUES = 256  # of a block


class Run(NamedTuple):
    """Where some bits of codes are in a block: the `bits` from bit `low` of each code on.

    - `part`: the name of a `CodePart` of the format, `"scales"` or `"scale"`.
    - `start`: the place of the first of these bits, counted in bits from the lowest of the first byte.
    - `steps`: pairs of a number of codes, and of the bits from each of them to the next; the innermost pair is last.
    """

    part: str
    start: int
    bits: int
    steps: tuple[tuple[int, int], ...]
    low: int = 0

    def places(self) -> np.ndarray:
        """Returns the place of each bit, `(codes, bits)`."""
        at = np.array([self.start])
        for count, step in self.steps:
            at = (at[:, None] + step * np.arange(count)).reshape(-1)
        return at[:, None] + np.arange(self.bits)


class VectorBlockType(NamedTuple):
    """The blocks of a type of GGUF.

    The parts are `codes`, packed as ours, the codes of `scales`, and the `scale`.
    """

    format: AbstractGridFormat
    nbytes: int
    runs: tuple[Run, ...]

    @property
    def parts(self) -> set[str]:
        return {"codes", "scales", "scale"}

    def read(self, part: str, blocks: np.ndarray) -> np.ndarray:
        """Reads a part of blocks, the bytes along the last axis."""
        return _gather_bits(blocks, _find_places(self.format, self.runs)[part])

    def pack(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the bytes of blocks."""
        places = _find_places(self.format, self.runs)
        given = np.concatenate([parts[part] for part in places], axis=-1)
        order = np.concatenate(list(places.values()))
        inverse = np.full(8 * self.nbytes, -1)
        inverse[order[order >= 0]] = np.flatnonzero(order >= 0)
        return _gather_bits(given, inverse)


@ft.cache
def _find_places(format: AbstractGridFormat, runs: tuple[Run, ...]) -> dict[str, np.ndarray]:
    """Returns for each part the place in a block of each of its bits.

    The place of a bit that is always zero is -1.
    """
    named: dict[str, dict[int, np.ndarray]] = {}
    for run in runs:
        for bit, places in enumerate(run.places().T):
            named.setdefault(run.part, {})[run.low + bit] = places
    scales = np.full((_VALUES // format.block_size, 8), -1)  # a byte for each  # pyright: ignore[reportOperatorIssue]
    for bit, places in named["scales"].items():
        scales[:, bit] = places
    packed = []
    for part in format.parts:
        count = _VALUES // part.values
        # Packs one bit of one code at a time, to see where it goes.
        one = np.zeros((part.bits, count, count), np.uint8)
        one[:, np.arange(count), np.arange(count)] = 1 << np.arange(part.bits)[:, None]
        out = np.zeros((part.bits, count, packed_length(count, part.bits)), np.uint8)
        pack_codes(one, part.bits, out)
        where = np.argmax(np.unpackbits(out, axis=-1, bitorder="little"), axis=-1)
        places = np.empty(part.bits * count, int)
        for bit in range(part.bits):
            places[where[bit]] = named[part.name][part.low + bit]
        packed.append(places)
    # The bits of the float of a block are one code of 16 bits, wherever they are.
    scale = np.array([named["scale"][bit][0] for bit in range(16)])
    return {"codes": np.concatenate(packed), "scales": scales.reshape(-1), "scale": scale}


def _gather_bits(blocks: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns bytes whose bits are at some places of blocks.

    A bit is zero where its place is negative. Neighboring bits of a byte move at once.
    """
    columns = np.ascontiguousarray(np.moveaxis(blocks, -1, 0))
    out = np.zeros((len(places) // 8, *columns.shape[1:]), np.uint8)
    for at, byte, shift, mask in _find_moves(tuple(places.tolist())):
        part = columns[byte] << np.uint8(shift) if shift >= 0 else columns[byte] >> np.uint8(-shift)
        out[at] |= part & np.uint8(mask)
    return np.ascontiguousarray(np.moveaxis(out, 0, -1))


@ft.cache
def _find_moves(places: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Returns moves of bits.

    Each is the byte to write, the byte to read, the shift to the left, and the bits to write.
    """
    masks: dict[tuple[int, int, int], int] = {}
    for bit, place in enumerate(places):
        if place >= 0:
            move = (bit // 8, place // 8, bit % 8 - place % 8)
            masks[move] = masks.get(move, 0) | 1 << bit % 8
    return [(*move, mask) for move, mask in masks.items()]


_SCALE = Run("scale", 0, 16, ())  # the float of a block, in two bytes


def _byte_run(part: str, start: int, count: int) -> Run:
    return Run(part, start, 8, ((count, 8),))


# By name: the bits of a block, whose bytes are in the order of ggml's struct.
_RUNS = {
    "IQ2_XXS": (
        _SCALE,
        Run("index", 16, 8, ((8, 64), (4, 8))),
        Run("signs", 48, 7, ((8, 64), (4, 7))),
        Run("scales", 76, 4, ((8, 64),)),
    ),
    "IQ2_XS": (
        _SCALE,
        Run("index", 16, 9, ((32, 16),)),
        Run("signs", 25, 7, ((32, 16),)),
        Run("scales", 16 + 512, 4, ((16, 4),)),
    ),
    "IQ2_S": (
        _SCALE,
        _byte_run("index", 16, 32),
        _byte_run("signs", 16 + 256, 32),
        Run("index", 16 + 512, 2, ((32, 2),), low=8),
        Run("scales", 16 + 576, 4, ((16, 4),)),
    ),
    "IQ3_XXS": (
        _SCALE,
        _byte_run("index", 16, 64),
        Run("signs", 16 + 512, 7, ((8, 32), (4, 7))),
        Run("scales", 16 + 512 + 28, 4, ((8, 32),)),
    ),
    "IQ3_S": (
        _SCALE,
        _byte_run("index", 16, 64),
        Run("index", 16 + 512, 1, ((64, 1),), low=8),
        _byte_run("signs", 16 + 576, 32),
        Run("scales", 16 + 832, 4, ((8, 4),)),
    ),
    "IQ1_S": (
        _SCALE,
        _byte_run("index", 16, 32),
        Run("index", 16 + 256, 3, ((8, 16), (4, 3)), low=8),
        Run("scales", 16 + 256 + 12, 3, ((8, 16),)),
        Run("down", 16 + 256 + 15, 1, ((8, 16),)),
    ),
    "IQ1_M": (
        _byte_run("index", 0, 32),
        Run("index", 256, 3, ((32, 4),), low=8),
        Run("down", 259, 1, ((32, 4),)),
        Run("scales", 384, 3, ((4, 16), (4, 3))),
        # Four bits of the float are in each of the words of scales.
        *(Run("scale", 384 + 16 * n + 12, 4, (), low=4 * n) for n in range(4)),
    ),
}
VECTOR_BLOCK_TYPES = {
    name: VectorBlockType(getattr(formats, name)(), SIZES[name][1], runs) for name, runs in _RUNS.items()
}
