"""Memory-mapped files, and the tensors in them.

Nothing is read until it is asked for.
"""

import dataclasses
import json
import math
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import jax.numpy as jnp
import numpy as np


# The names of dtypes in safetensors files, which GGUF shares: bits, and the NumPy dtype. `None`: no library agrees
# about the order of packed six-bit floats.
DTYPES: dict[str, tuple[int, str | None]] = {
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
    "C64": (64, "complex64"),
    "F32": (32, "float32"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "BOOL": (8, "bool"),
    "I8": (8, "int8"),
    "U8": (8, "uint8"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, "float4_e2m1fn"),
}
FLOATS = ("F16", "BF16", "F32")
FLOAT_NAMES = ("float16", "bfloat16", "float32")
SMALL_FLOATS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4")
NAME_OF = {dtype: name for name, (_, dtype) in DTYPES.items() if dtype is not None}

# NumPy's limit, so that every shape that passes can be the shape of an array.
_MAX_RANK = 32


_HEAD = 64


def _substitute(head: bytes) -> str | None:
    """Describes the placeholder of a file that was not downloaded, from its first bytes."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, of a clone without its large files: run `git lfs pull`"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "a web page (HTML): download the file again, with a token if the model is gated"
    if len(head) == _HEAD and not any(head):
        return "zeros: its download did not finish, so download it again"
    return None


class MappedFile:
    """A file that is read through a memory map.

    The map ends when the last array that shows it is gone. A file that became shorter is an error where it is read
    next; if it becomes shorter during a copy, the system ends the process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A pipe would make opening it wait.
        if path.exists() and not path.is_file():
            self.fail("must be a file. Got a folder, a device or a pipe.")
        with path.open("rb") as f:
            self.size = f.seek(0, 2)
            # An empty file cannot be mapped.
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        if (got := _substitute(self.buffer[:_HEAD])) is not None:
            self.fail(f"must be the file itself. Got {got}.")

    @property
    def buffer(self) -> mmap.mmap | bytes:
        """All bytes of the file."""
        if self._map is None:
            return b""
        if (size := self._map.size()) < self.size:  # of the file as it is now
            self.fail(
                f"must not become shorter while it is open. Got {size} bytes of {self.size}. Open it again once it is "
                "whole."
            )
        return self._map

    def fail(self, rule: str) -> NoReturn:
        """Raises a `ValueError` that names the file."""
        raise ValueError(f"{self.path} {rule}")


@dataclasses.dataclass(frozen=True, eq=False)
class NewTensor:
    """A tensor to write.

    `dtype` is its name in the file, and `array` returns its values when their turn has come.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file.

    - `dtype`: its name in the file, a key of `DTYPES` or a type of GGUF.
    - `start`: where its bytes start, from the beginning of the file.
    """

    file: MappedFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def fail(self, rule: str) -> NoReturn:
        """Raises a `ValueError` that names the file and the tensor."""
        self.file.fail(f"must hold a valid {self.name!r}: {rule}")

    def expect(self, dtypes: str | tuple[str, ...], shape: tuple[int | None, ...]) -> None:
        """Raises unless it is of one of the dtypes, and of the shape. `None` is any length."""
        dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
        fits = len(shape) == len(self.shape) and all(n in (None, own) for n, own in zip(shape, self.shape, strict=True))
        if self.dtype not in dtypes or not fits:
            lengths = ", ".join("any" if n is None else str(n) for n in shape)
            self.fail(f"It must be {' or '.join(dtypes)} of [{lengths}]. Got {self.dtype} of {list(self.shape)}.")

    def bytes(self) -> np.ndarray:
        """Returns the bytes: a view of the file, one-dimensional."""
        return np.frombuffer(self.file.buffer, np.uint8, self.nbytes, self.start)

    def array(self) -> np.ndarray:
        """Returns the values: a view of the file.

        Four-bit floats are no view; they take a byte each.
        """
        dtype = DTYPES.get(self.dtype, (0, None))[1]
        if dtype is None:
            self.fail(f"Got {self.dtype}, which has no NumPy dtype. Of such a tensor only the bytes can be read.")
        raw = self.bytes()
        if self.dtype == "F4":
            # The first value of a byte is in its low bits.
            raw = np.stack([raw & 15, raw >> 4], axis=-1).reshape(-1)
        elif self.dtype == "BOOL" and raw.max(initial=0) > 1:
            self.fail(f"Got a boolean stored as {raw.max()}. It must be 0 or 1.")
        return raw.view(jnp.dtype(dtype)).reshape(self.shape)


Tensor = NewTensor | StoredTensor


def num_bytes(shape: tuple[int, ...], bits: int) -> int | None:
    """Returns the bytes of an array, or `None` if no array can have this shape.

    Nor can a part of a byte be stored.
    """
    if len(shape) > _MAX_RANK or any(n < 0 for n in shape) or math.prod(n for n in shape if n) >= 2**59:
        return None
    total = math.prod(shape) * bits
    return total // 8 if total % 8 == 0 else None


def to_bytes(x: np.ndarray) -> Iterator[memoryview]:
    """Yields the bytes of an array in its dtype's own layout, a part at a time."""
    flat = np.ascontiguousarray(x).reshape(-1)
    if x.dtype == jnp.dtype("float4_e2m1fn"):
        codes = flat.view(np.uint8) & 15
        flat = codes[::2] | codes[1::2] << 4
    yield flat.view(np.uint8).data


# JSON from files that nobody vouches for

# No file that this package reads nests deeper, and code that walks a shallow tree needs no guard against recursion.
_MAX_DEPTH = 16


def parse_json(text: bytes, file: MappedFile, what: str) -> dict[str, object]:
    """Parses a JSON object, or raises a `ValueError` that names the file.

    JSON itself allows an object to repeat a name, and Python allows NaN: here neither can hide a second meaning.
    """
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        deep = _deeper_than(parsed, _MAX_DEPTH)
    except RecursionError:
        deep, parsed = True, {}
    except (ValueError, UnicodeError) as e:
        file.fail(f"must have valid JSON in {what}. Got an error: {e}.")
    if deep:
        file.fail(f"must have valid JSON in {what}. Got one that is nested more than {_MAX_DEPTH} times.")
    if not isinstance(parsed, dict):
        file.fail(f"must have a JSON object in {what}. Got a {type(parsed).__name__}.")
    return parsed


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {twice!r} stands there twice")
    return out


def _deeper_than(x: object, depth: int) -> bool:
    if not isinstance(x, (dict, list)):
        return False
    return depth == 0 or any(_deeper_than(item, depth - 1) for item in (x.values() if isinstance(x, dict) else x))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
