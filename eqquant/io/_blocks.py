"""The blocks of GGUF's quantized types, as rows of a table.

https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c

A row of values is a sequence of blocks, and a block is a sequence of fields: the codes, the scale and the offset of the
block, and codes of its scales and offsets. Codes may be divided among several fields, which have some bits of each.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from .. import _formats as formats
from .._formats.base import AbstractFormat
from ._bits import flip, join, pack_planes, take_field, unpack_low_first, unpack_planes
from ._vector_blocks import VECTOR_BLOCK_TYPES, VectorBlockType


class Field(NamedTuple):
    """Some bytes of each block: how to read and to write them.

    They hold bytes or codes of one part of the block, or of two.

    - `parts`: `scale` and `offset` are the bytes of floats; `codes`, `scales` and `offsets` codes of values, scales and
        offsets.
    - `low`: the first bit of a code that is here.
    """

    parts: tuple[str, ...]
    nbytes: int
    unpack: Callable[[np.ndarray], np.ndarray]
    pack: Callable[[np.ndarray], np.ndarray]
    low: int = 0


class BlockType(NamedTuple):
    """The blocks of a type of GGUF."""

    format: AbstractFormat
    fields: tuple[Field, ...]

    @property
    def parts(self) -> set[str]:
        return {part for field in self.fields for part in field.parts}

    def read(self, part: str, blocks: np.ndarray) -> np.ndarray:
        """Reads a part of blocks, the bytes along the last axis."""
        found, start = {}, 0
        for field in self.fields:
            stop = start + field.nbytes
            if part in field.parts:
                both = field.unpack(take_field(blocks, start, stop))
                found[field.low] = np.split(both, len(field.parts), axis=-1)[field.parts.index(part)]
            start = stop
        codes = found.pop(0)
        for low, bits in found.items():
            codes = join(codes, bits, low)
        return codes

    def pack(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the bytes of blocks."""
        given = lambda field: np.concatenate([parts[part] for part in field.parts], axis=-1)
        return np.concatenate([field.pack(given(field)) for field in self.fields], axis=-1)


def _whole(part: str, nbytes: int = 2) -> Field:
    return Field((part,), nbytes, lambda raw: raw, lambda x: x)


def _signed_bytes(part: str, nbytes: int) -> Field:
    return Field((part,), nbytes, flip, lambda codes: codes ^ np.uint8(128))


def _planes(part: str, nbytes: int, bits: int, run: int, low: int = 0) -> Field:
    """Some bits of codes, from bit `low` on, in groups of `run` bytes.

    Code `i` of a byte belongs to the value that is `i * run` after the value of code 0.
    """

    unpack = lambda raw: unpack_low_first(raw, bits) if run == 1 else unpack_planes(raw, bits, run)
    return Field((part,), nbytes, unpack, lambda codes: pack_planes(codes >> low & 2**bits - 1, bits, run), low)


def _unpack_six_bits(raw: np.ndarray) -> np.ndarray:
    """Unpacks 8 scales and 8 minima of six bits.

    The first four of each are whole, with two bits of the others above them.
    """
    first, minima, low = (take_field(raw, at, at + 4) for at in (0, 4, 8))
    out = np.empty((*raw.shape[:-1], 4), "V4")
    for n, four in enumerate((first & 63, low & 15 | first >> 2 & 48, minima & 63, low >> 4 | minima >> 2 & 48)):
        out[..., n] = four.view("V4")[..., 0]
    return out.view(np.uint8)


def _pack_six_bits(codes: np.ndarray) -> np.ndarray:
    scales, more_scales, minima, more_minima = np.split(codes, 4, axis=-1)
    low = more_scales & 15 | (more_minima & 15) << 4
    return np.concatenate([scales | more_scales >> 4 << 6, minima | more_minima >> 4 << 6, low], axis=-1)


# The runs of codes of TQ1_0: start, stop, bytes, and codes in a byte.
_TRITS = ((0, 160, 32, 5), (160, 240, 16, 5), (240, 256, 4, 4))


def _unpack_trits(raw: np.ndarray) -> np.ndarray:
    """Unpacks codes below 3: a byte is a fraction of 256, with the codes as ternary digits."""
    parts, start = [], 0
    for _, _, run, digits in _TRITS:
        shifted = raw[..., None, start : start + run] * (3 ** np.arange(digits, dtype=np.uint8))[:, None]  # modulo 256
        parts.append((shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*raw.shape[:-1], -1))
        start += run
    return np.concatenate(parts, axis=-1)


def _pack_trits(codes: np.ndarray) -> np.ndarray:
    """Packs codes below 3, the first as the highest digit of a fraction of 243 = 3**5.

    The byte is that fraction of 256, rounded up, so that multiplying by 3 moves the digits out one by one.
    """
    parts = []
    for start, stop, run, digits in _TRITS:
        places = 3 ** np.arange(4, 4 - digits, -1, dtype=np.uint16)
        each = codes[..., start:stop].reshape(*codes.shape[:-1], digits, run).astype(np.uint16)
        digits_value = (each * places[:, None]).sum(axis=-2, dtype=np.uint16)
        parts.append(((digits_value * np.uint32(256) + 242) // 243).astype(np.uint8))
    return np.concatenate(parts, axis=-1)


_SCALE, _OFFSET, _NIBBLES = _whole("scale"), _whole("offset"), _planes("codes", 16, 4, 16)
_FIFTH_BITS = _planes("codes", 4, 1, 1, low=4)
_TWO_NIBBLES = _planes("scales", 16, 4, 16)._replace(parts=("scales", "offsets"))
_SIX_BITS = Field(("scales", "offsets"), 12, _unpack_six_bits, _pack_six_bits)

# The fields of a block by the name of its type, which is the name of its format too.
_FIELDS = {
    "Q1_0": (_SCALE, _planes("codes", 16, 1, 1)),
    "Q2_0": (_SCALE, _planes("codes", 16, 2, 1)),
    "Q4_0": (_SCALE, _NIBBLES),
    "Q4_1": (_SCALE, _OFFSET, _NIBBLES),
    "Q5_0": (_SCALE, _FIFTH_BITS, _NIBBLES),
    "Q5_1": (_SCALE, _OFFSET, _FIFTH_BITS, _NIBBLES),
    "Q8_0": (_SCALE, _signed_bytes("codes", 32)),
    "Q2_K": (_TWO_NIBBLES, _planes("codes", 64, 2, 32), _SCALE, _OFFSET),
    "Q3_K": (
        *(_planes("codes", 32, 1, 32, low=2), _planes("codes", 64, 2, 32)),
        *(_planes("scales", 8, 4, 8), _planes("scales", 4, 2, 4, low=4), _SCALE),
    ),
    "Q4_K": (_SCALE, _OFFSET, _SIX_BITS, _planes("codes", 128, 4, 32)),
    "Q5_K": (_SCALE, _OFFSET, _SIX_BITS, _planes("codes", 32, 1, 32, low=4), _planes("codes", 128, 4, 32)),
    "Q6_K": (_planes("codes", 128, 4, 64), _planes("codes", 64, 2, 32, low=4), _signed_bytes("scales", 16), _SCALE),
    "IQ4_NL": (_SCALE, _NIBBLES),
    "IQ4_XS": (_SCALE, _planes("scales", 2, 2, 1, low=4), _planes("scales", 4, 4, 1), _planes("codes", 128, 4, 16)),
    "TQ2_0": (_planes("codes", 64, 2, 32), _SCALE),
    "MXFP4": (_whole("scale", 1), _NIBBLES),  # the exponent, E8M0
    "NVFP4": (_whole("scales", 4), _planes("codes", 32, 4, 8)),  # unsigned e4m3
}
# The types that are read and written; every other quantized type is an error that names it.
BLOCK_TYPES: dict[str, BlockType | VectorBlockType] = {
    **{name: BlockType(getattr(formats, name)(), fields) for name, fields in _FIELDS.items()},
    "TQ1_0": BlockType(formats.TQ2_0(), (Field(("codes",), 52, _unpack_trits, _pack_trits), _SCALE)),
    **VECTOR_BLOCK_TYPES,
}
