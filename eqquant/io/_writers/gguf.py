"""GGUF files of llama.cpp: the container of `_gguf.py`, with the blocks of `_blocks.py`.

The fastest dimension comes first in the header.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import NVFP4
from ..._types import PyTree
from .._blocks import BLOCK_TYPES
from .._entry import AnyArray
from .._gguf import ALIGNMENT, ARRAY, ArrayValue, MAGIC, MAX_DIMENSIONS, SCALARS, SIZES, TEXT, TEXT_ERRORS, TYPES
from .._tensors import NAME_OF, NewTensor, to_bytes
from ._layout import dense, finite_scales, refuse, row_parts, unpack_rows, WrittenArray


NAME = "gguf"
HOLDS_TILES = False
FITS = (
    "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL or MXFP4 along the last axis, whose length must be a multiple of 32; Q2_0 or "
    "NVFP4, of 64, the latter without a scale for the tensor; Q1_0, of 128; Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, TQ2_0 or "
    "another IQ type, of 256"
)
# Types that hold the arrays of a format besides its namesake.
OTHER_TYPES = {"TQ1_0": "TQ2_0"}

_TYPE_IDS = {name: type_id for type_id, (name, _, _) in TYPES.items()}
_DENSE = {dtype: name for dtype, name in NAME_OF.items() if name in _TYPE_IDS}
_MAX_NAME = 63  # llama.cpp keeps names in 64 bytes, the last of them zero


def layout(name: str, x: AnyArray, kind: str | None = None) -> WrittenArray:
    """Returns the tensor of an array, of the type of its format, or of another one."""
    if (length := len(_encode(name))) > _MAX_NAME:
        raise ValueError(f"{name!r} must have at most {_MAX_NAME} bytes, as llama.cpp wants. Got {length}.")
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
    known = kind in BLOCK_TYPES and x.format == BLOCK_TYPES[kind].format
    if not known or x.axis != -1 or x.shape[-1] % SIZES[kind][0]:
        refuse(name, x, FITS)
    finite_scales(name, x)
    if x.offset is not None and not np.isfinite(np.asarray(x.offset)).all():
        refuse(name, x, "all its offsets must be finite")
    if isinstance(x.format, NVFP4) and isinstance(x.scale_bits, QuantizedArray) and (x.scale_bits.scale != 1).any():
        refuse(name, x, "llama.cpp keeps the scale of a tensor elsewhere, so here it must be one")
    return WrittenArray((NewTensor(name, kind, x.shape, lambda: _blocks(name, x, kind)),))


def _blocks(name: str, q: QuantizedArray, kind: str) -> np.ndarray:
    """Returns the blocks of all rows: bytes."""
    block, nbytes = SIZES[kind]
    rows, blocks = q.size // q.shape[-1], q.shape[-1] // block
    parts: dict[str, np.ndarray] = {}
    for whole, codes, floats in (("scale", "scales", q.scale_bits), ("offset", "offsets", q.offset_bits)):
        if isinstance(floats, QuantizedArray):
            parts[codes] = unpack_rows(floats).reshape(rows, blocks, -1)
            floats = floats.scale_bits
        if floats is not None and floats.size == rows * blocks:  # unlike NVFP4, which has one
            parts[whole] = np.asarray(floats).reshape(rows, blocks, 1)
    if "offsets" in parts:
        parts["offset"] = -parts["offset"].view(np.float16)
    for whole in parts.keys() & {"scale", "offset"}:
        parts[whole] = parts[whole].view(np.uint8)
    out = np.empty((rows, blocks, nbytes), np.uint8)
    for part, codes in row_parts(q):
        if kind == "TQ1_0" and codes.max(initial=0) > 2:
            raise ValueError(f"{name!r} must be ternary for the type TQ1_0. Got a code of 3.")
        given = {what: x[part] for what, x in parts.items()} | {"codes": codes.reshape(len(codes), blocks, -1)}
        out[part] = BLOCK_TYPES[kind].pack(given)
    return out


def write(path: Path, tensors: Iterable[NewTensor], metadata: Mapping[str, object]) -> None:
    """Writes a file, one tensor at a time."""
    tensors = list(tensors)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int | np.integer) or alignment not in [2**n for n in range(3, 21)]:
        raise ValueError(f"`metadata` must align to a power of two, from 8 on. Got {alignment!r}.")
    header = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if not isinstance(key, str) or not 0 < len(_encode(key)) < 2**16:
            raise ValueError(f"Keys of `metadata` must be text of at most 65535 bytes. Got {str(key)[:80]!r}.")
        header += [_text(key), _pair(key, value)]
    offset = 0
    for t in tensors:
        dims = t.shape[::-1]
        header.append(_text(t.name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims))
        header.append(struct.pack("<IQ", _TYPE_IDS[t.dtype], offset))
        block, nbytes = SIZES[t.dtype]
        size = math.prod(dims) // block * nbytes
        offset += size + -size % alignment
    with path.open("wb") as f:
        f.write(b"".join(header))
        _align(f, int(alignment))
        for t in tensors:
            for part in to_bytes(t.array()):
                f.write(part)
            _align(f, int(alignment))


def _align(f: BinaryIO, alignment: int) -> None:
    f.write(b"\0" * (-f.tell() % alignment))


# By the NumPy dtype: the id of the type of a value.
_KINDS = {np.dtype(kind).name: type_id for type_id, kind in SCALARS.items()}


def _encode(text: str) -> bytes:
    return text.encode(errors=TEXT_ERRORS)


def _text(text: str) -> bytes:
    raw = _encode(text)
    return struct.pack("<Q", len(raw)) + raw


def _pair(key: str, value: object) -> bytes:
    """Returns the type of a value and the value."""
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, ArrayValue):
        return struct.pack("<IIQ", ARRAY, value.kind, len(value)) + value.bytes()
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) for v in value):
        return struct.pack("<IIQ", ARRAY, TEXT, len(value)) + b"".join(map(_text, value))
    x = _as_numeric(value)
    kind = None if x is None or x.ndim > 1 else _KINDS.get(x.dtype.name)
    if x is None or kind is None:
        raise TypeError(
            f"`metadata` must hold text, numbers, booleans, and lists of one of them. Got {str(value)[:80]!r} for "
            f"{key!r}. (A list without items has no type: leave it out, or give an empty NumPy array.)"
        )
    raw = x.astype(x.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<I", kind) + raw if x.ndim == 0 else struct.pack("<IIQ", ARRAY, kind, len(x)) + raw


def _as_numeric(value: object) -> np.ndarray | None:
    """Returns numbers as an array of the type that llama.cpp expects.

    NumPy's own numbers keep their type.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    items: PyTree = value if isinstance(value, (list, tuple)) else [value]
    types = {type(v) for v in items}
    if types == {bool}:
        return np.asarray(value)
    if types == {int}:
        for dtype in (np.uint32, np.int32, np.uint64, np.int64):
            if np.iinfo(dtype).min <= min(items) and max(items) <= np.iinfo(dtype).max:
                return np.asarray(value, dtype)
    return np.asarray(value, np.float32) if types in ({float}, {int, float}) else None
