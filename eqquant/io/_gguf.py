"""The container of GGUF files: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

    "GGUF", version: u32 (2 or 3), number of tensors: u64, number of pairs: u64
    pairs      key: text, type: u32, value; text is its length: u64, and UTF-8
    tensors    name: text, number of dimensions: u32, dimensions: u64 each, the fastest first, type: u32, offset: u64
    data       from the next multiple of `general.alignment` (32 by default); offsets count from there

Text that is not UTF-8 keeps its bytes, as Python's names of files do (`surrogateescape`).

Blocks run along the fastest dimension, which is the last one here.
"""

import bisect
import functools as ft
import struct
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ._tensors import MappedFile, num_bytes, StoredTensor


MAGIC = b"GGUF"
_VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
ALIGNMENT = 32  # of a file that says nothing else

# By the id of a type of tensor: its name, the values of a block and its bytes. Plain types have the names of
# safetensors.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
SIZES = {name: (block, nbytes) for name, block, nbytes in TYPES.values()}
# By the id of a type of value: its format in `struct`. Text is 8, arrays are 9.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9
TEXT_ERRORS = "surrogateescape"
PairItem = str | bool | int | float


class ArrayValue(Sequence[PairItem]):
    """An array among the pairs, such as a vocabulary.

    Its items are read when they are asked for.

    - `kind`: the id of the type of the items.
    - `start`, `nbytes`: where they are in the file.
    """

    def __init__(self, file: MappedFile, kind: int, length: int, start: int, nbytes: int) -> None:
        self._file, self._length = file, length
        self.kind, self.start, self.nbytes = kind, start, nbytes

    def bytes(self) -> bytes:
        """Returns the items as they are stored."""
        return bytes(self._file.buffer[self.start : self.start + self.nbytes])

    @ft.cached_property
    def _items(self) -> list[PairItem]:
        if self.kind in SCALARS:
            return np.frombuffer(self.bytes(), SCALARS[self.kind]).tolist()
        raw, texts, at = self.bytes(), [], 0
        for _ in range(self._length):
            start, at = at + 8, at + 8 + int.from_bytes(raw[at : at + 8], "little")
            texts.append(raw[start:at].decode(errors=TEXT_ERRORS))
        return texts

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:  # an item, or a list for a slice
        return self._items[index]

    def __repr__(self) -> str:
        return f"<{self._length} items>"


def read(file: MappedFile) -> tuple[dict[str, StoredTensor], dict[str, object]]:
    """Reads the header of a file.

    Tensors may lie in any order, but not beyond the end, and not over each other.

    **Raises:**

    `ValueError` if the file is no GGUF file, or damaged. The message names the file, and the tensor.
    """
    cursor = Cursor(file)
    if cursor.take(4, "the magic bytes") != MAGIC:
        file.fail("must start with GGUF. Got other bytes.")
    version = cursor.number("<I", "the version")
    if version not in _VERSIONS:
        file.fail(f"must be of version 2 or 3, little-endian. Got {version}.")
    num_tensors, num_pairs = cursor.number("<Q", "the number of tensors"), cursor.number("<Q", "the number of pairs")
    # The smallest size of each, so that a damaged count cannot make this run or allocate for long.
    for what, count, least in (("tensors", num_tensors, 24), ("pairs", num_pairs, 13)):
        if count > (file.size - cursor.at) // least:
            file.fail(f"must hold the {count} {what} that it claims. Got {file.size} bytes.")
    metadata: dict[str, object] = {}
    for _ in range(num_pairs):
        key = cursor.text("a key")
        if key in metadata:
            file.fail(f"must name each key once. Got {key!r} twice.")
        metadata[key] = cursor.value(cursor.number("<I", f"the type of {key!r}"), repr(key))
    infos = [cursor.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        file.fail(f"must align tensors to a power of two. Got {alignment!r}.")
    data = -(-cursor.at // alignment) * alignment
    starts = sorted({*(offset for *_, offset in infos), max(file.size - data, 0)})
    tensors: dict[str, StoredTensor] = {}
    for name, dtype, shape, nbytes, offset in infos:
        if nbytes is None:  # of a type that is newer than this package: up to the next tensor
            nbytes = starts[min(bisect.bisect_right(starts, offset), len(starts) - 1)] - offset
        if name in tensors:
            file.fail(f"must name each tensor once. Got {name!r} twice.")
        if offset % alignment or data + offset + nbytes > file.size:
            file.fail(
                f"must hold {name!r}, {nbytes} bytes, {offset} bytes after the header, aligned to {alignment}. Got "
                f"{max(file.size - data, 0)} bytes there: the file is truncated or damaged."
            )
        tensors[name] = StoredTensor(file, name, dtype, shape, data + offset, nbytes)
    ordered = sorted(tensors.values(), key=lambda t: (t.start, t.start + t.nbytes))
    for first, second in zip(ordered, ordered[1:], strict=False):
        if second.start < first.start + first.nbytes:
            file.fail(
                f"must hold its tensors one after another. Got {first.name!r} and {second.name!r}, which overlap."
            )
    return tensors, metadata


class Cursor:
    """Reads forwards, and raises where the file ends."""

    def __init__(self, file: MappedFile, at: int = 0) -> None:
        self.file, self.at = file, at

    def fail(self, what: str) -> NoReturn:
        self.file.fail(f"must hold {what}. Got {self.file.size} bytes: the file is truncated or damaged.")

    def skip(self, count: int, what: str) -> None:
        if count > self.file.size - self.at:
            self.fail(what)
        self.at += count

    def take(self, count: int, what: str) -> bytes:
        self.skip(count, what)
        return bytes(self.file.buffer[self.at - count : self.at])

    def number(self, kind: str, what: str) -> Any:
        return struct.unpack(kind, self.take(struct.calcsize(kind), what))[0]

    def text(self, what: str) -> str:
        return self.take(self.number("<Q", f"the length of {what}"), what).decode(errors=TEXT_ERRORS)

    def value(self, kind: int, what: str) -> "PairItem | ArrayValue":
        if kind in SCALARS:
            return self.number(SCALARS[kind], what)
        if kind == TEXT:
            return self.text(what)
        if kind != ARRAY:
            self.file.fail(f"must hold a value of a known type for {what}. Got the type {kind}.")
        item_kind, length, start = self.number("<I", what), self.number("<Q", what), self.at
        if item_kind in SCALARS:
            self.skip(length * struct.calcsize(SCALARS[item_kind]), what)
        elif item_kind == TEXT and length <= (self.file.size - self.at) // 8:
            # Not by `skip`, which checks each item: a vocabulary has a hundred thousand.
            buffer, stop = self.file.buffer, self.at
            for _ in range(length):
                if stop > self.file.size:
                    break
                stop += 8 + int.from_bytes(buffer[stop : stop + 8], "little")
            self.skip(stop - self.at, what)
        else:  # no writer nests arrays
            self.file.fail(
                f"must hold an array of numbers or text for {what}. Got {length} items of the type {item_kind}."
            )
        return ArrayValue(self.file, item_kind, length, start, self.at - start)

    def tensor(self) -> tuple[str, str, tuple[int, ...], int | None, int]:
        name = self.text("the name of a tensor")
        what = f"the description of {name!r}"
        rank = self.number("<I", what)
        if rank > MAX_DIMENSIONS:
            self.file.fail(f"must give {name!r} at most {MAX_DIMENSIONS} dimensions. Got {rank}.")
        shape = tuple(self.number("<Q", what) for _ in range(rank))[::-1]
        kind, offset = self.number("<I", what), self.number("<Q", what)
        dtype, block, nbytes = TYPES.get(kind, (f"type {kind}", 1, None))
        count = num_bytes(shape, 8)
        if count is None or (block > 1 and (not shape or shape[-1] % block)):
            self.file.fail(f"must give {name!r} a shape of whole blocks, {block} of {dtype}. Got {shape}.")
        return name, dtype, shape, None if nbytes is None else count // block * nbytes, offset
