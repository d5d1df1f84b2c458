"""GGUF files of llama.cpp: the container of `_gguf.py`, with the tensors of `_dialects/gguf.py`.

A quantized row is a row of blocks, each with its scale in front. The fastest dimension comes first in the header.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import MXFP4, Q4_0, Q8_0
from .._atomic import replacing
from .._gguf import ALIGNMENT, ARRAY, ArrayValue, MAGIC, MAX_DIMENSIONS, SCALARS, TEXT, TYPES
from .._safetensors import ToWrite
from .._stored import NAME_OF, to_bytes
from .layout import dense, each_part, Layout, refuse, scales_of


NAME = "gguf"
FITS = "Q4_0, Q8_0 or MXFP4 along the last axis, whose length must be a multiple of 32"

_FORMATS = {Q4_0(): "Q4_0", Q8_0(): "Q8_0", MXFP4(): "MXFP4"}
_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
_SIZES = {name: (block, nbytes) for name, block, nbytes in TYPES.values()}
_DENSE = {dtype: name for dtype, name in NAME_OF.items() if name in _NUMBERS}
_MAX_NAME = 63  # llama.cpp keeps names in 64 bytes, the last of them zero


def layout(name: str, x: Any) -> Layout:
    """Returns the tensor of an array."""
    if len(name.encode()) > _MAX_NAME:
        raise ValueError(f"{name!r} must have at most {_MAX_NAME} bytes, as llama.cpp wants. Got {len(name.encode())}.")
    if x.ndim > MAX_DIMENSIONS or x.size == 0:
        raise ValueError(
            f"{name!r} must have at most {MAX_DIMENSIONS} dimensions, none of them empty. Got the shape {x.shape}."
        )
    if not isinstance(x, QuantizedArray):
        return dense(name, x, _DENSE)
    kind = _FORMATS.get(x.format)
    if kind is None or x.axis != -1 or x.shape[-1] % 32:
        refuse(name, x, FITS)
    scales_of(name, x)
    return Layout((ToWrite(name, kind, x.shape, lambda: _blocks(x, kind)),))


def _blocks(q: QuantizedArray, kind: str) -> np.ndarray:
    """Returns the blocks of all rows: bytes."""
    block, nbytes = _SIZES[kind]
    blocks = q.shape[-1] // block
    out = np.empty((q.size // q.shape[-1], blocks, nbytes), np.uint8)
    scale = np.asarray(q.scale_bits).reshape(len(out), blocks, 1).view(np.uint8)
    head = scale.shape[-1]
    out[..., :head] = scale

    def body(codes: np.ndarray) -> np.ndarray:
        codes = codes.reshape(len(codes), blocks, block)
        if kind == "Q8_0":
            return codes ^ 128  # signed bytes
        return codes[..., :16] | codes[..., 16:] << 4

    each_part(q, body, out[..., head:])
    return out


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
        raise TypeError(
            f"`metadata` must give the values of {key!r}. Got {value}, which `eqq.io.open` makes of an array: it reads "
            "the number of items alone."
        )
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
