"""The manifest of our own files: the entry and the tensors of each leaf.

It is JSON in the metadata of safetensors.

    {"version": 1, "leaves": [
        {"path": "layers.0.weight", "keys": ["layers", "0", "weight"], "kind": "quantized", "dtype": "float32",
         "shape": [512, 784], "axis": [-1], "format": {"name": "NF4", "fields": {"block_size": 64, ...}},
         "tensors": {"codes": "layers.0.weight.codes", "scale_bits": "layers.0.weight.scale_bits"}},
        {"path": "step", "keys": ["step"], "kind": "scalar", "dtype": "int", "value": 100},
        {"path": "head", "keys": ["head"], "tied_to": "embedding"},
        ...]}

A file never causes an import: it names a format by its class, which must be known already.
"""

import dataclasses
import inspect
import json
import math
from collections.abc import Iterable, Mapping
from typing import Generic, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._errors import did_you_mean
from .._formats.base import AbstractFormat
from .._formats.names import known_formats
from .._types import PyTree
from ._entry import DTYPE_NAMES, Entry, named_parts, SCALARS
from ._tensors import MappedFile, NAME_OF, NewTensor, num_bytes, parse_json, StoredTensor, Tensor


VERSION = 1
KEY = "eqquant"  # of the metadata
# Python cannot walk trees that are much deeper.
MAX_KEYS = 500
Formats = Mapping[str, type[AbstractFormat]]
Scalar = bool | int | float | complex | str
T = TypeVar("T", bound=Tensor)
_Kind = TypeVar("_Kind")


@dataclasses.dataclass(frozen=True, eq=False)
class SavedLeaf(Generic[T]):
    """A leaf in a file, or to be saved: its name, its entry, and tensors or a scalar."""

    path: str
    keys: tuple[str, ...]
    entry: Entry
    tensors: Mapping[str, T]
    value: Scalar | None = None
    impl: str | None = None
    tied_to: str | None = None


def stored_as(entry: Entry, keys: PyTree = None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype and the shape in the file of each tensor of a leaf.

    The keys are names within the leaf.

    - `keys`: the PRNG keys, or a `jax.ShapeDtypeStruct` of them, if it is a leaf of these.
    """
    if entry.kind == "scalar":
        return {}
    if entry.kind == "quantized":
        return {name: _as_stored(part.dtype, part.shape) for name, part in named_parts(entry.struct).items()}
    if entry.kind == "key":
        return {"": ("U32", jax.eval_shape(jr.key_data, keys).shape)}
    return {"": _as_stored(jnp.dtype(entry.dtype), entry.shape)}


def _as_stored(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    name = NAME_OF.get(dtype.name)
    if name is None or (name == "F4" and math.prod(shape) % 2 == 1):
        return "U8", (*shape, dtype.itemsize)  # bytes; see `from_stored`
    return name, shape


def to_stored(x: np.ndarray) -> np.ndarray:
    """Returns an array as a file holds it.

    A dtype that safetensors lacks becomes bytes along one more axis.
    """
    name, shape = _as_stored(x.dtype, x.shape)
    return np.ascontiguousarray(x).reshape(*x.shape, 1).view(np.uint8) if shape != x.shape else x


def from_stored(x: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_stored`."""
    return np.ascontiguousarray(x).view(dtype).reshape(shape) if x.dtype != dtype else x


# Writing


def leaf_to_json(leaf: SavedLeaf[NewTensor]) -> dict[str, object]:
    entry, out = leaf.entry, dict[str, object](path=leaf.path, keys=list(leaf.keys))
    if leaf.tied_to is not None:
        out |= {"tied_to": leaf.tied_to}
        return out if entry.within is None else {**out, "within": entry.within}
    out |= {"kind": entry.kind, "dtype": entry.dtype}
    if entry.kind == "scalar":
        return {**out, "value": _scalar_to_json(leaf.value)}
    out |= {"shape": list(entry.shape), "tensors": {part: t.name for part, t in leaf.tensors.items()}}
    if entry.format is not None:
        out |= {"axis": list(entry.axes), "format": _format_to_json(entry.format, leaf.path)}
    order = None if entry.order is None else [entry.order[0], *entry.order[1]]
    more = {"impl": leaf.impl, "order": order, "within": entry.within, "gradient_of": entry.gradient_of}
    return out | {name: value for name, value in more.items() if value is not None}


def _format_to_json(format: AbstractFormat, path: str) -> dict[str, object]:
    fields = {field.name: getattr(format, field.name) for field in dataclasses.fields(format)}
    try:
        text = json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"The fields of a format must be numbers, text, booleans, None or tuples of them, to be saved. Got "
            f"{format!r} of {path}: {e}."
        ) from None
    return {"name": type(format).__name__, "fields": json.loads(text)}


def _scalar_to_json(x: Scalar | None) -> object:
    if isinstance(x, complex):
        return [x.real.hex(), x.imag.hex()]
    if isinstance(x, float):
        return x.hex()
    return hex(x) if type(x) is int else x


# Reading


def read_manifest(
    text: str, tensors: Mapping[str, StoredTensor], file: MappedFile, formats: Iterable[type[AbstractFormat]]
) -> list[SavedLeaf[StoredTensor]]:
    """Reads a manifest, and checks that it accounts for every tensor of the file.

    **Raises:**

    `ValueError` for anything else. The message names the file, and the leaf.
    """
    manifest = parse_json(text.encode(errors="replace"), file, "the manifest")
    version = manifest.get("version")
    if version != VERSION:
        file.fail(f"must be of version {VERSION}. Got {version!r}: a newer eqquant wrote it. Update eqquant.")
    if not isinstance(leaves := manifest.get("leaves"), list):
        file.fail("must list its leaves in the manifest. Got none.")
    known = known_formats() | {cls.__name__: cls for cls in formats}
    used: set[str] = set()
    saved: dict[str, SavedLeaf[StoredTensor]] = {}
    for fields in leaves:
        leaf = _Fields(fields, file).leaf(tensors, known, saved)
        if leaf.path in saved:
            file.fail(f"must name each leaf once. Got {leaf.path!r} twice.")
        names = [] if leaf.tied_to is not None else [t.name for t in leaf.tensors.values()]
        if twice := used.intersection(names):
            file.fail(f"must use each tensor once. Got {min(twice)!r} for {leaf.path!r} and for another leaf.")
        used.update(names)
        saved[leaf.path] = leaf
    if unused := tensors.keys() - used:
        file.fail(f"must describe all its tensors in the manifest. Got {min(unused)!r}, which it does not mention.")
    return list(saved.values())


class _Fields:
    """The JSON object of a leaf."""

    def __init__(self, fields: object, file: MappedFile) -> None:
        self.file, self.path = file, "a leaf"
        self.fields: dict[str, object] = fields if isinstance(fields, dict) else {}
        if not isinstance(fields, dict):
            self.fail("Got no object.")
        self.path = repr(self.get("path", str))

    def fail(self, why: str) -> NoReturn:
        self.file.fail(f"must have a manifest that describes {self.path}. {why}")

    def get(self, name: str, kind: type[_Kind]) -> _Kind:
        value = self.fields.get(name)
        if type(value) is not kind:
            self.fail(f"Got {str(value)[:80]!r} for `{name}`, which must be a {kind.__name__}.")
        return value

    def items(self, name: str, kind: type[_Kind]) -> tuple[_Kind, ...]:
        value = self.get(name, list)
        if not all(type(item) is kind for item in value):
            self.fail(f"Got {str(value)[:80]!r} for `{name}`, which must be a list of {kind.__name__}.")
        return tuple(value)

    def leaf(
        self, tensors: Mapping[str, StoredTensor], known: Formats, saved: Mapping[str, SavedLeaf[StoredTensor]]
    ) -> SavedLeaf[StoredTensor]:
        path, keys = self.get("path", str), self.items("keys", str)
        if len(keys) > MAX_KEYS:
            self.fail(f"Got {len(keys)} keys. It must have at most {MAX_KEYS}.")
        within = self.get("within", str) if "within" in self.fields else None
        if "tied_to" in self.fields:
            first = saved.get(self.get("tied_to", str))
            if first is None:
                self.fail(f"Got `tied_to` {self.fields['tied_to']!r}, which no leaf before it is.")
            entry = dataclasses.replace(first.entry, within=within)
            return dataclasses.replace(first, path=path, keys=keys, entry=entry, tied_to=first.path)
        entry = dataclasses.replace(self.entry(known), within=within)
        if entry.kind == "scalar":
            return SavedLeaf(path, keys, entry, {}, value=self.scalar(entry.dtype))
        impl = self.get("impl", str) if entry.kind == "key" else None
        names = self.get("tensors", dict)
        for part, name in names.items():
            if not isinstance(name, str) or name not in tensors:
                self.fail(f"Got {str(name)[:80]!r} for `{part}`, a tensor that the file does not have.")
        found = {part: tensors[name] for part, name in names.items()}
        expected = stored_as(entry, None if impl is None else self.key_struct(entry, impl))
        got = {part: (tensor.dtype, tensor.shape) for part, tensor in found.items()}
        if got != expected:
            self.fail(f"It is {entry}, and its tensors must be {expected}. Got {got}.")
        return SavedLeaf(path, keys, entry, found, impl=impl)

    def entry(self, known: Formats) -> Entry:
        kind, dtype = self.get("kind", str), self.get("dtype", str)
        if kind == "scalar":
            if dtype not in {cls.__name__ for cls in SCALARS}:
                self.fail(f"Got the type {dtype!r}, which no saved scalar has.")
            return Entry("scalar", dtype)
        shape = self.items("shape", int)
        if num_bytes(shape, 8) is None:
            self.fail(f"Got the shape {str(shape[:40])[:80]}, which no array can have.")
        if kind == "key":
            return Entry("key", dtype, shape)
        if dtype not in DTYPE_NAMES:
            self.fail(f"Got the dtype {dtype!r}, which neither NumPy nor JAX has.")
        if kind == "array" or kind == "numpy" or (kind == "generic" and shape == ()):
            return Entry(kind, dtype, shape)  # pyright: ignore[reportArgumentType]
        if kind != "quantized":
            self.fail(f"Got the kind {kind!r}, which no saved leaf has.")
        axes = self.items("axis", int)
        if not axes or len({*axes}) != len(axes) or any(not -len(shape) <= a < 0 for a in axes):
            self.fail(f"Got the axes {str(axes[:40])[:80]} of shape {shape}, which it does not have.")
        gradient_of = self.get("gradient_of", str) if "gradient_of" in self.fields else None
        floating = lambda name: name in DTYPE_NAMES and jnp.issubdtype(jnp.dtype(name), jnp.floating)
        if not floating(dtype) or not floating(gradient_of or dtype):
            self.fail(f"Got {dtype!r} and {gradient_of!r}, and quantized arrays are floating point.")
        order = self.order(shape) if "order" in self.fields else None
        entry = Entry("quantized", dtype, shape, self.format(known), axes, gradient_of, order=order)
        try:
            _ = entry.struct
        except (TypeError, ValueError, OverflowError) as e:
            self.fail(f"{entry} is no array. {e}")
        return entry

    def order(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        axis, *lengths = self.items("order", int) or (0,)
        batch = shape[:-2]
        if axis not in (-1, -2) or len(shape) < 2 or tuple(lengths) not in ((shape[axis],), (*batch, shape[axis])):
            self.fail(f"Got the order {str([axis, *lengths[:40]])[:80]}, which arrays of {shape} do not have.")
        return axis, tuple(lengths)

    def format(self, known: Formats) -> AbstractFormat:
        inner = _Fields({"path": self.get("path", str), **self.get("format", dict)}, self.file)
        name, fields = inner.get("name", str), _tuples(inner.get("fields", dict))
        cls = known.get(name)
        if cls is None:
            self.fail(
                f"Got the format {name!r}, which is not defined. {did_you_mean(name, known)} Import the module that "
                "defines it, or pass its class as `formats=[...]`."
            )
        try:
            parameters = inspect.signature(cls).parameters
            format = cls(**{field: value for field, value in fields.items() if field in parameters})
        except Exception as e:  # whatever the class raises for fields that it does not take
            self.fail(f"Got {name} with fields {_short(fields)}, which it does not take. {_short(e)}")
        actual = {field.name: getattr(format, field.name) for field in dataclasses.fields(format)}
        if actual != fields:
            self.fail(
                f"Got {name} with fields {_short(fields)}, which made {_short(actual)}. Another "
                "version of the class saved it."
            )
        return format

    def scalar(self, kind: str) -> Scalar:
        if kind in ("bool", "str"):
            return self.get("value", {"bool": bool, "str": str}[kind])
        try:
            if kind == "complex":
                return complex(*(float.fromhex(x) for x in self.items("value", str)))
            return {"int": lambda x: int(x, 16), "float": float.fromhex}[kind](self.get("value", str))
        except (TypeError, ValueError, OverflowError) as e:
            self.fail(f"Got a value that is no {kind}. {e}")

    def key_struct(self, entry: Entry, impl: str) -> jax.ShapeDtypeStruct:
        try:
            one = jax.eval_shape(lambda: jr.key(0, impl=impl))
        except Exception as e:  # the error of JAX differs between releases
            self.fail(f"Got keys of {impl!r}, which JAX does not know. {_short(e)}")
        if str(one.dtype) != entry.dtype:
            self.fail(f"Got keys of {impl!r} and {entry.dtype!r}, which differ.")
        return jax.ShapeDtypeStruct(entry.shape, one.dtype)


def _short(x: object) -> str:
    """Returns text from a file at a length that an error can show."""
    text = str(x)
    return text if len(text) <= 400 else f"{text[:400]}..."


def _tuples(x: object) -> PyTree:
    """Returns JSON with tuples for lists, as the static fields of formats are."""
    if isinstance(x, dict):
        return {key: _tuples(value) for key, value in x.items()}
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
