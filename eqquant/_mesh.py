"""Specs, shardings and meshes: reads, aligns and applies them.

A quantized array has a logical sharding, like any array: the mesh axes that shard each axis. In memory, and so in the
sharding of every leaf, the quantized axis is last. It can be sharded only between blocks and packed segments.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._types import PyTree


# The mesh axes that shard one dimension, the major one first.
Names = tuple[str, ...]
Sharding = NamedSharding | PartitionSpec


def as_names(entry: object) -> Names:
    """Returns an entry of a `PartitionSpec` (`None`, a name or several) as a tuple of names."""
    if entry is None:
        return ()
    names: tuple[Any, ...] = entry if isinstance(entry, tuple) else (entry,)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"The entries of a spec must be names of mesh axes, or None. Got {entry!r}.")
    return names


def names_in(spec: PartitionSpec | Sequence[object], ndim: int) -> tuple[Names, ...]:
    """Returns the mesh axes of each dimension. A spec may leave out trailing dimensions."""
    return tuple(as_names(entry) for entry in (*spec, *[None] * (ndim - len(spec))))


def as_spec(names: Sequence[Names]) -> PartitionSpec:
    """Returns names as a `PartitionSpec`. The inverse of `names_in`."""
    return PartitionSpec(*(entry or None for entry in names))


def fit_spec(sharding: Sharding | None, ndim: int) -> Sharding | None:
    """Returns a sharding for another number of leading axes, aligned with the last axes."""
    if sharding is None:
        return None
    spec = _spec(sharding)
    return _with_entries(sharding, [*[None] * (ndim - len(spec)), *spec[max(len(spec) - ndim, 0) :]])


def permute_spec(sharding: Sharding | None, ndim: int, order: Sequence[int]) -> Sharding | None:
    """Returns the sharding of a transposed array."""
    sharding = fit_spec(sharding, ndim)
    return None if sharding is None else _with_entries(sharding, [_spec(sharding)[a] for a in order])


def full_spec(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Returns a sharding whose spec has an entry for every axis."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *[None] * (ndim - len(sharding.spec))))


def _spec(sharding: Sharding) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def _with_entries(sharding: Sharding, entries: Sequence[object]) -> Sharding:
    spec = PartitionSpec(*entries)
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec


def on_device(x: jax.Array) -> jax.Array:
    """Returns an array in device memory, moved from host memory (`pinned_host`) if needed."""
    is_on_device = jax.typeof(x).memory_space == jax.memory.Space.Device
    return x if is_on_device else jax.device_put(x, jax.memory.Space.Device)


def as_named(sharding: object, current: object, name: str = "the array") -> NamedSharding:
    """Returns a spec on the mesh of the array, or else on the mesh of `jax.set_mesh`."""
    if isinstance(sharding, NamedSharding):
        return sharding
    if not isinstance(sharding, PartitionSpec):
        raise TypeError(f"The sharding of {name} must be a NamedSharding or a PartitionSpec. Got {sharding!r}.")
    mesh = current.mesh if isinstance(current, NamedSharding) else _get_current_mesh()
    if mesh.empty:
        raise ValueError(
            f"The spec {sharding} of {name} needs a mesh. Got an array on none. Pass a `NamedSharding(mesh, spec)`, or "
            "call this inside `jax.set_mesh(mesh)`."
        )
    unknown = sorted({n for entry in sharding for n in as_names(entry)} - set(mesh.axis_names))
    if unknown:
        raise ValueError(
            f"The spec of {name} must name axes of its mesh, which are {', '.join(map(repr, mesh.axis_names))}. Got "
            f"{sharding}, with {', '.join(map(repr, unknown))}."
        )
    return NamedSharding(mesh, sharding)


def _get_current_mesh() -> Mesh | AbstractMesh:
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # inside `jit`, where a mesh has no devices yet
        return jax.sharding.get_abstract_mesh()


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """Returns leaves placed on devices. Constrains the sharding of traced leaves instead."""

    def put(x: jax.typing.ArrayLike, sharding: NamedSharding) -> jax.Array:
        if is_explicit(sharding.mesh) and isinstance(x, jax.core.Tracer):
            return jax.sharding.reshard(x, sharding)
        if isinstance(x, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(x, sharding)
        if isinstance(sharding.mesh, AbstractMesh):
            raise ValueError("The mesh must have devices. Got an abstract mesh. Pass the mesh that it was made from.")
        return jax.device_put(x, sharding)

    return jtu.tree_map(put, tree, shardings)


def move_to_mesh(tree: PyTree, sharding: object) -> PyTree:
    """Returns arrays moved from one device to `sharding`, if it is a `NamedSharding`.

    The state of an optimizer must be on the mesh of its model.
    """

    def move(x: object) -> object:
        is_on_one_device = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and len(x.devices()) == 1
        return place(x, sharding) if is_on_one_device else x

    return jtu.tree_map(move, tree) if isinstance(sharding, NamedSharding) else tree


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether the mesh has explicit axes, so that types of arrays include shardings."""
    return AxisType.Explicit in mesh.axis_types


def explicit_mesh(*trees: PyTree) -> Mesh | AbstractMesh | None:
    """Returns the explicit mesh of the arrays, or `None`."""
    for leaf in jtu.tree_leaves(trees):
        mesh = getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty and is_explicit(mesh):
            return mesh
    return None


def in_auto_mode(function: Callable[..., PyTree], out_shardings: PyTree) -> Callable[..., PyTree]:
    """Returns a function in which the compiler chooses shardings, except of the results."""

    def keep_explicit_axes(sharding: NamedSharding) -> NamedSharding:
        # On a mesh with explicit and auto axes, types of arrays include only explicit axes.
        types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        kept = [tuple(n for n in as_names(entry) if types[n] == AxisType.Explicit) for entry in sharding.spec]
        return NamedSharding(sharding.mesh, as_spec(kept))

    context = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(context.axis_names, context.axis_types, strict=True))
    is_partly_manual = AxisType.Manual in context.axis_types  # a `shard_map` over some axes leaves the others
    axes = tuple(n for n, kind in kinds.items() if kind == AxisType.Explicit) if is_partly_manual else None
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=jtu.tree_map(keep_explicit_axes, out_shardings))
