"""GGUF files of llama.cpp: the container of `_gguf.py`, with the tensors of `_dialects/gguf.py`.

The fastest dimension comes first in the header. `_dialects/gguf.py` shows the fields of the blocks of each type.
"""

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import NVFP4
from .._atomic import replacing
from .._dialects.gguf import FORMATS
from .._gguf import ALIGNMENT, ARRAY, ArrayValue, MAGIC, MAX_DIMENSIONS, SCALARS, TEXT, TYPES
from .._safetensors import ToWrite
from .._stored import NAME_OF, to_bytes
from .layout import dense, each_part, Layout, pack_low_first, refuse, rows_of, scales_of


NAME = "gguf"
FITS = (
    "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL or MXFP4 along the last axis, whose length must be a multiple of 32; NVFP4, "
    "of 64, without a scale for the tensor; Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS or TQ2_0, of 256"
)
# Types that hold the arrays of a format besides the one that is called as it is.
OTHER_TYPES = {"TQ1_0": "TQ2_0"}

_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
_SIZES = {name: (block, nbytes) for name, block, nbytes in TYPES.values()}
_DENSE = {dtype: name for dtype, name in NAME_OF.items() if name in _NUMBERS}
_MAX_NAME = 63  # llama.cpp keeps names in 64 bytes, the last of them zero


def layout(name: str, x: Any, kind: str | None = None) -> Layout:
    """Returns the tensor of an array, of the type that its format is called as, or of another one."""
    if len(name.encode()) > _MAX_NAME:
        raise ValueError(f"{name!r} must have at most {_MAX_NAME} bytes, as llama.cpp wants. Got {len(name.encode())}.")
    if x.ndim > MAX_DIMENSIONS or x.size == 0:
        raise ValueError(
            f"{name!r} must have at most {MAX_DIMENSIONS} dimensions, none of them empty. Got the shape {x.shape}."
        )
    if not isinstance(x, QuantizedArray):
        if kind is not None:
            raise ValueError(f"{name!r} must be in {OTHER_TYPES[kind]} for the type {kind}. Got {x.dtype}.")
        return dense(name, x, _DENSE)
    if kind is not None and type(x.format).__name__ != OTHER_TYPES[kind]:
        refuse(name, x, f"only {OTHER_TYPES[kind]} fits the type {kind}")
    kind = kind or type(x.format).__name__
    if x.format != FORMATS.get(kind) or x.axis != -1 or x.shape[-1] % _SIZES[kind][0]:
        refuse(name, x, FITS)
    scales_of(name, x)
    if x.offset is not None and not np.isfinite(np.asarray(x.offset)).all():
        refuse(name, x, "all its offsets must be finite")
    if isinstance(x.format, NVFP4) and isinstance(x.scale_bits, QuantizedArray) and (x.scale_bits.scale != 1).any():
        refuse(name, x, "llama.cpp keeps the scale of a tensor elsewhere, so here it must be one")
    return Layout((ToWrite(name, kind, x.shape, lambda: _blocks(name, x, kind)),))


class _Floats(NamedTuple):
    """The scales or offsets of blocks, each of the last axis: bytes of the one that is stored whole, and codes."""

    whole: np.ndarray
    codes: np.ndarray

    @property
    def negative(self) -> np.ndarray:
        return (-self.whole.view(np.float16)).view(np.uint8)


def _blocks(name: str, q: QuantizedArray, kind: str) -> np.ndarray:
    """Returns the blocks of all rows: bytes."""
    block, nbytes = _SIZES[kind]
    rows, blocks = q.size // q.shape[-1], q.shape[-1] // block
    scale, offset = _floats(q.scale_bits, rows, blocks), _floats(q.offset_bits, rows, blocks)
    out = np.empty((rows, blocks, nbytes), np.uint8)
    done = 0

    def fields(codes: np.ndarray) -> np.ndarray:
        nonlocal done
        part, done = slice(done, done + len(codes)), done + len(codes)
        of_rows = lambda floats: floats and _Floats(floats.whole[part], floats.codes[part])
        codes = codes.reshape(len(codes), blocks, block)
        if kind == "TQ1_0" and codes.max(initial=0) > 2:
            raise ValueError(f"{name!r} must be ternary for the type TQ1_0. Got a code of 3.")
        return np.concatenate(_FIELDS[kind](codes, of_rows(scale), of_rows(offset)), axis=-1)

    each_part(q, fields, out)
    return out


def _floats(stored: Any, rows: int, blocks: int) -> _Floats | None:
    if stored is None:
        return None
    if isinstance(stored, QuantizedArray):
        codes = rows_of(stored)(0, rows).reshape(rows, blocks, -1)
        whole = np.asarray(stored.scale_bits)
    else:
        codes, whole = np.empty((rows, blocks, 0), np.uint8), np.asarray(stored)
    if whole.size != rows * blocks:  # NVFP4's, which is one
        return _Floats(np.empty((rows, blocks, 0), np.uint8), codes)
    return _Floats(np.ascontiguousarray(whole).reshape(rows, blocks, 1).view(np.uint8), codes)


def _planes(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Packs codes, so that code `i` of a byte is the one `i * run` after code 0. There are groups of `run` bytes."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    grouped = codes.reshape(*codes.shape[:-1], -1, 8 // bits, run) << shifts
    return np.bitwise_or.reduce(grouped, axis=-2).reshape(*codes.shape[:-1], -1)


def _nibbles(codes: np.ndarray, run: int = 16) -> np.ndarray:
    return _planes(codes & 15, 4, run)


def _trits(codes: np.ndarray) -> np.ndarray:
    """Packs up to five codes below 3 in a byte: the digits, the first the highest, of a fraction of 243 = 3**5.

    The byte is that fraction of 256, rounded up, so that multiplying by 3 moves the digits out one by one.
    """
    parts = []
    for start, stop, run in ((0, 160, 32), (160, 240, 16), (240, 256, 4)):
        digits = codes[..., start:stop].reshape(*codes.shape[:-1], -1, run).astype(np.uint16)
        places = 3 ** np.arange(4, 4 - digits.shape[-2], -1, dtype=np.uint16)
        number = (digits * places[:, None]).sum(axis=-2, dtype=np.uint16)
        parts.append(((number * np.uint32(256) + 242) // 243).astype(np.uint8))
    return np.concatenate(parts, axis=-1)


def _high_bits(codes: np.ndarray) -> np.ndarray:
    return pack_low_first(codes >> 4, 1)


def _scales_and_minima(scale: _Floats, offset: _Floats) -> np.ndarray:
    """Packs 8 scales and 8 minima of 6 bits: the first four of each whole, with two bits of the others above them."""
    first = lambda x: x[..., :4] | x[..., 4:] >> 4 << 6
    low = scale.codes[..., 4:] & 15 | (offset.codes[..., 4:] & 15) << 4
    return np.concatenate([first(scale.codes), first(offset.codes), low], axis=-1)


# From the codes, the scales and the offsets of blocks to the fields of each block, in order.
_FIELDS: dict[str, Callable[[np.ndarray, Any, Any], tuple[np.ndarray, ...]]] = {
    "Q4_0": lambda c, s, o: (s.whole, _nibbles(c)),
    "Q4_1": lambda c, s, o: (s.whole, o.whole, _nibbles(c)),
    "Q5_0": lambda c, s, o: (s.whole, _high_bits(c), _nibbles(c)),
    "Q5_1": lambda c, s, o: (s.whole, o.whole, _high_bits(c), _nibbles(c)),
    "Q8_0": lambda c, s, o: (s.whole, c ^ 128),  # signed bytes
    "Q2_K": lambda c, s, o: (s.codes | o.codes << 4, _planes(c, 2, 32), s.whole, o.negative),
    "Q3_K": lambda c, s, o: (
        _planes(c >> 2, 1, 32),
        _planes(c & 3, 2, 32),
        _planes(s.codes & 15, 4, 8),
        _planes(s.codes >> 4, 2, 4),
        s.whole,
    ),
    "Q4_K": lambda c, s, o: (s.whole, o.negative, _scales_and_minima(s, o), _nibbles(c, 32)),
    "Q5_K": lambda c, s, o: (s.whole, o.negative, _scales_and_minima(s, o), _planes(c >> 4, 1, 32), _nibbles(c, 32)),
    "Q6_K": lambda c, s, o: (_planes(c & 15, 4, 64), _planes(c >> 4, 2, 32), s.codes ^ 128, s.whole),
    "IQ4_NL": lambda c, s, o: (s.whole, _nibbles(c)),
    "IQ4_XS": lambda c, s, o: (s.whole, pack_low_first(s.codes >> 4, 2), pack_low_first(s.codes & 15, 4), _nibbles(c)),
    "TQ1_0": lambda c, s, o: (_trits(c), s.whole),
    "TQ2_0": lambda c, s, o: (_planes(c, 2, 32), s.whole),
    "MXFP4": lambda c, s, o: (s.whole, _nibbles(c)),
    "NVFP4": lambda c, s, o: (s.codes, _nibbles(c, 8)),
}


def write(path: Path, tensors: Iterable[ToWrite], metadata: Mapping[str, Any]) -> None:
    """Writes a file, one tensor at a time, and puts it in the place of `path` when it is whole."""
    tensors = list(tensors)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if isinstance(alignment, bool) or alignment not in [2**n for n in range(3, 21)]:
        raise ValueError(f"`metadata` must align to a power of two, from 8 on. Got {alignment!r}.")
    header = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if not isinstance(key, str) or not 0 < len(key.encode()) < 2**16:
            raise ValueError(f"Keys of `metadata` must be text of at most 65535 bytes. Got {str(key)[:80]!r}.")
        header += [_text(key), _pair(key, value)]
    offset = 0
    for t in tensors:
        dims = t.shape[::-1]
        header.append(_text(t.name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims))
        header.append(struct.pack("<IQ", _NUMBERS[t.dtype], offset))
        block, nbytes = _SIZES[t.dtype]
        size = math.prod(dims) // block * nbytes
        offset += size + -size % alignment
    with replacing(path) as f:
        f.write(b"".join(header))
        _align(f, alignment)
        for t in tensors:
            for part in to_bytes(t.read()):
                f.write(part)
            _align(f, alignment)


def _align(f: BinaryIO, alignment: int) -> None:
    f.write(b"\0" * (-f.tell() % alignment))


# The types of NumPy's numbers among the pairs.
_KINDS = {np.dtype(kind).name: number for number, kind in SCALARS.items()}


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pair(key: str, value: Any) -> bytes:
    """Returns the type of a value and the value."""
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, ArrayValue):
        return struct.pack("<IIQ", ARRAY, value.kind, len(value)) + value.bytes()
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) for v in value):
        return struct.pack("<IIQ", ARRAY, TEXT, len(value)) + b"".join(map(_text, value))
    x = _numbers(value)
    kind = None if x is None or x.ndim > 1 else _KINDS.get(x.dtype.name)
    if x is None or kind is None:
        raise TypeError(
            f"`metadata` must hold text, numbers, booleans, and lists of one of them. Got {str(value)[:80]!r} for "
            f"{key!r}. (A list without items has no type: leave it out, or give an empty NumPy array.)"
        )
    raw = x.astype(x.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<I", kind) + raw if x.ndim == 0 else struct.pack("<IIQ", ARRAY, kind, len(x)) + raw


def _numbers(value: Any) -> np.ndarray | None:
    """Returns numbers as an array of the type that llama.cpp expects; of NumPy's own, the type that they have."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    items = value if isinstance(value, (list, tuple)) else [value]
    types = {type(v) for v in items}
    if types == {bool}:
        return np.asarray(value)
    if types == {int}:
        for dtype in (np.uint32, np.int32, np.uint64, np.int64):
            if np.iinfo(dtype).min <= min(items) and max(items) <= np.iinfo(dtype).max:
                return np.asarray(value, dtype)
    return np.asarray(value, np.float32) if types in ({float}, {int, float}) else None
