"""Safetensors files: https://github.com/huggingface/safetensors#format.

    8 bytes    the length N of the header, little-endian
    N bytes    the header: JSON, {name: {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, ...}, and
               optionally "__metadata__": {name: text}
    the rest   the bytes of the tensors, little-endian and row-major, without holes

The reader is our own because the `safetensors` package gives NumPy no 8-bit and 4-bit floats.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeGuard

from ._tensors import DTYPES, MappedFile, num_bytes, parse_json, StoredTensor, Tensor, to_bytes


MAX_HEADER = 100_000_000  # as the reference implementation


def read(file: MappedFile) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Returns the tensors of a file, in the order of their bytes, and its metadata.

    Checks that the header describes every byte of the rest exactly once.

    **Raises:**

    `ValueError` for anything else. The message names the file, and the tensor.
    """
    if file.size < 8:
        file.fail(f"must start with the length of a header, in 8 bytes. Got {file.size} bytes: the file is truncated.")
    length = int.from_bytes(file.buffer[:8], "little")
    if length > MAX_HEADER:
        file.fail(f"must have a header of at most {MAX_HEADER} bytes. Got {length}: this is no safetensors file.")
    if length > file.size - 8:
        file.fail(f"must hold its header of {length} bytes. Got {file.size - 8} bytes: the file is truncated.")
    text = file.buffer[8 : 8 + length]
    if not text.startswith(b"{"):
        file.fail(f"must have a header that starts with a brace. Got {text[:1]!r}: this is no safetensors file.")
    header = parse_json(text, file, "the header")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        file.fail("must have metadata that maps names to text. Got something else under `__metadata__`.")
    tensors = [_read_entry(file, name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t.start, t.start + t.nbytes))
    end, before = 8 + length, "the header"
    for t in tensors:
        if t.start != end:
            problem = "overlap" if t.start < end else "leave a hole between them"
            file.fail(f"must hold its tensors one after another. Got {before} and {t.name!r}, which {problem}.")
        end, before = t.start + t.nbytes, repr(t.name)
    if end != file.size:
        file.fail(f"must end with its last tensor. Got {file.size - end} bytes after {before}.")
    return {t.name: t for t in tensors}, metadata


def _read_entry(file: MappedFile, name: str, entry: object, data: int) -> StoredTensor:
    def fail(why: str) -> NoReturn:
        file.fail(f"must describe the tensor {name!r} by dtype, shape and data_offsets. Got {why}.")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        fail("other fields")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        fail(f"the dtype {str(dtype)[:40]!r}, which is no text")
    if not _whole_numbers(shape):
        fail("a shape that is no list of numbers from zero on")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        fail("offsets that are not two numbers from zero on")
    begin, end = offsets
    known = dtype in DTYPES  # another one may be newer than this package: that tensor alone cannot be read
    nbytes = num_bytes(tuple(shape), DTYPES[dtype][0] if known else 8)
    if nbytes is None:
        fail(f"{dtype[:40]} of a shape that no array can have")
    if max(offsets) >= 2**63:  # it may have thousands of digits
        fail("offsets that no file can have")
    if end < begin or (known and nbytes != end - begin):
        fail(f"offsets for {end - begin} bytes, where {dtype[:40]}{shape} takes {nbytes}")
    if end > file.size - data:
        fail(f"offsets up to {end}, where the file has {file.size - data} bytes of tensors: it is truncated")
    return StoredTensor(file, name, dtype, tuple(shape), data + begin, end - begin)


def _whole_numbers(x: object) -> TypeGuard[list[int]]:
    return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)


def write(path: Path, tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a file, one tensor at a time."""
    tensors, start = list(tensors), {}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for t in _align(tensors):
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (end, end + t.nbytes)}
        start[t.name], end = end, end + t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(
            f"The header of {path.name} must take at most {MAX_HEADER} bytes. Got {len(text)}. Save in parts."
        )
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little"))
        f.write(text)
        # In the given order, so that tensors that belong together are read once.
        for t in tensors:
            f.seek(8 + len(text) + start[t.name])
            for part in to_bytes(t.array()):
                f.write(part)


def _align(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns tensors in an order that aligns each to its items.

    That is their own order if it does, or else wide types first.
    """
    starts = itertools.accumulate((t.nbytes for t in tensors), initial=0)
    if all(8 * start % width(t) == 0 for start, t in zip(starts, tensors, strict=False)):
        return tensors
    return sorted(tensors, key=lambda t: -width(t))


def width(t: Tensor) -> int:
    """Returns the bits of an item of a tensor."""
    return DTYPES[t.dtype][0]


def split(tensors: Sequence[Tensor], nbytes: int) -> list[list[Tensor]]:
    """Divides tensors, in order, into groups of at most `nbytes`.

    A larger one has a group to itself.
    """
    groups: list[list[Tensor]] = [[]]
    size = 0
    for t in tensors:
        if groups[-1] and size + t.nbytes > nbytes:
            groups.append([])
            size = 0
        groups[-1].append(t)
        size += t.nbytes
    return groups
