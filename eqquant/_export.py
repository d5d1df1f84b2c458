"""Registers classes with `jax.export`, to serialize functions that take or return them."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.export
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from ._types import PyTree


# Increase it if the meaning of the serialized data changes.
_VERSION = 1

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | dict[str, Json]"
_NAMES: set[str] = set()


def register_export(cls: type[eqx.Module]) -> None:
    """Registers a class of modules with `jax.export`: its name, and its static fields as JSON.

    The serialized name of a class of the library is `eqquant.QuantizedArray`, wherever it is defined; of a class of
    users, its module and name. If a class is defined again, as in a notebook, only the first one is registered.
    """
    is_ours = cls.__module__.startswith("eqquant.")
    name = f"eqquant.{cls.__name__}" if is_ours else f"{cls.__module__}.{cls.__qualname__}"
    if name in _NAMES:
        return
    _NAMES.add(name)
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=name,
        serialize_auxdata=lambda aux: _serialize(cls, aux),
        deserialize_auxdata=lambda data: _deserialize(cls, data),
        from_children=lambda aux_data, children: _build(cls, aux_data, children),
    )


def _list_fields(cls: type[eqx.Module], *, static: bool) -> list[str]:
    fields = dataclasses.fields(cls)
    return [f.name for f in fields if bool(f.metadata.get("static", False)) == static]


def _serialize(cls: type[eqx.Module], aux: object) -> bytes:
    # The content of `aux` is an internal of Equinox, so unflatten it to a module.
    leaves = [jtu.tree_structure(0)] * len(_list_fields(cls, static=False))
    treedef = jtu.PyTreeDef.from_node_data_and_children(jtu.default_registry, (cls, aux), leaves)
    module = jtu.tree_unflatten(treedef, [0] * len(leaves))
    fields = {name: _to_json(cls, name, getattr(module, name)) for name in _list_fields(cls, static=True)}
    return json.dumps({"version": _VERSION, "fields": fields}).encode()


def _deserialize(cls: type[eqx.Module], data: bytes) -> dict[str, object]:
    stored = json.loads(data)
    if stored["version"] != _VERSION:
        raise ValueError(
            f"A serialized {cls.__name__} must be of version {_VERSION}. Got {stored['version']}. Export the function "
            "again, or install the version of eqquant that wrote it."
        )
    expected, fields = _list_fields(cls, static=True), stored["fields"]
    if set(fields) != set(expected):
        raise ValueError(
            f"A serialized {cls.__name__} must have the static fields {expected}. Got {sorted(fields)}. Export the "
            "function again, or install the version of eqquant that wrote it."
        )
    return {name: _from_json(value) for name, value in fields.items()}


def _build(cls: type[eqx.Module], static: Any, children: Sequence[PyTree]) -> eqx.Module:
    module = object.__new__(cls)  # children may be placeholders, which `__init__` refuses
    dynamic = dict(zip(_list_fields(cls, static=False), children, strict=True))
    for field in dataclasses.fields(cls):
        value = (static | dynamic)[field.name]
        # The `repr` of formats leaves out fields that are the default object itself.
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
        f"`{name}` of {cls.__name__} must be numbers, texts, dtypes or tuples of them, to be serialized by "
        f"`jax.export`. Got a {type(value).__name__}. Export the function for an array without it: "
        f"`dataclasses.replace(q, {name}=None)`."
    )


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, stored),) = value.items()
    if kind == "dtype":
        return jax.numpy.dtype(stored)
    items = tuple(map(_from_json, stored))
    return PartitionSpec(*items) if kind == "spec" else items
