"""Registers classes with `jax.export`, so that functions that take or return their instances can be serialized."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TypeAlias

import equinox as eqx
import jax
import jax.export
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from ._types import PyTree


# What changes if what is written changes its meaning.
_VERSION = 1

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | dict[str, Json]"
_NAMES: set[str] = set()


def register_export(cls: type[eqx.Module]) -> None:
    """Lets `jax.export` serialize nodes of a class of modules: its name, and its static fields as JSON.

    Classes of the library are called `eqquant.QuantizedArray` in what is written, wherever they are defined, and those
    of users by their module. Of a class that is defined again, as in a notebook, only the first is registered.
    """
    ours = cls.__module__.startswith("eqquant.")
    name = f"eqquant.{cls.__name__}" if ours else f"{cls.__module__}.{cls.__qualname__}"
    if name in _NAMES:
        return
    _NAMES.add(name)
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=name,
        serialize_auxdata=lambda aux: _serialize(cls, aux),
        deserialize_auxdata=lambda data: _deserialize(cls, data),
        from_children=lambda static, children: _build(cls, static, children),  # pyright: ignore[reportArgumentType]
    )


def _names_of_fields(cls: type[eqx.Module], *, static: bool) -> list[str]:
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    return [f.name for f in fields if bool(f.metadata.get("static", False)) == static]


def _serialize(cls: type[eqx.Module], aux: object) -> bytes:
    # What `aux` holds is Equinox's own affair, so it makes a module of it.
    leaves = [jtu.tree_structure(0)] * len(_names_of_fields(cls, static=False))
    treedef = jtu.PyTreeDef.from_node_data_and_children(jtu.default_registry, (cls, aux), leaves)
    module = jtu.tree_unflatten(treedef, [0] * len(leaves))
    fields = {name: _to_json(cls, name, getattr(module, name)) for name in _names_of_fields(cls, static=True)}
    return json.dumps({"version": _VERSION, "fields": fields}).encode()


def _deserialize(cls: type[eqx.Module], data: bytes) -> dict[str, object]:
    written = json.loads(data)
    if written["version"] != _VERSION:
        raise ValueError(
            f"A serialized {cls.__name__} must be of version {_VERSION}. Got {written['version']}. Export the function "
            "again, or install the version of eqquant that wrote it."
        )
    known, fields = _names_of_fields(cls, static=True), written["fields"]
    if set(fields) != set(known):
        raise ValueError(
            f"A serialized {cls.__name__} must have the static fields {known}. Got {sorted(fields)}. Export the "
            "function again, or install the version of eqquant that wrote it."
        )
    return {name: _from_json(value) for name, value in fields.items()}


def _build(cls: type[eqx.Module], static: dict[str, object], children: Sequence[PyTree]) -> eqx.Module:
    module = object.__new__(cls)  # children are placeholders, which no `__init__` takes
    dynamic = dict(zip(_names_of_fields(cls, static=False), children, strict=True))
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        value = (static | dynamic)[field.name]
        # Formats show only fields that are not their default, the same object.
        same = type(value) is type(field.default) and value == field.default
        object.__setattr__(module, field.name, field.default if same else value)
    return module


def _to_json(cls: type[eqx.Module], name: str, value: object) -> Json:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PartitionSpec):
        return {"spec": [_to_json(cls, name, x) for x in value]}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(cls, name, x) for x in value]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    raise TypeError(
        f"`{name}` of {cls.__name__} must be numbers, texts, dtypes or tuples of those, to be serialized by "
        f"`jax.export`. Got a {type(value).__name__}. Export the function for an array without it: "
        f"`dataclasses.replace(q, {name}=None)`."
    )


def _from_json(value: Json) -> object:
    if not isinstance(value, dict):
        return value
    ((kind, written),) = value.items()
    if kind == "dtype":
        return jax.numpy.dtype(written)  # pyright: ignore
    items = tuple(_from_json(x) for x in written)  # pyright: ignore
    return PartitionSpec(*items) if kind == "spec" else items  # pyright: ignore
