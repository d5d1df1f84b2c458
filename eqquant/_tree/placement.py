"""Shardings of the leaves of a model: current ones, or by rules, a function or a tree."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.core
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .._array.array import is_quantized
from .._array.sharding import leaf_shardings
from .._mesh import as_named, full_spec, place
from .._types import PyTree
from .leaves import DenseArray, Leaf, named_leaves, replace_leaves
from .select import check_rules, find_rule, Pattern


Spec = NamedSharding | PartitionSpec
# The `PyTree` is a prefix of the model.
Shardings = Mapping[str, Spec | None] | Mapping[Pattern, Spec | None] | Callable[[str, PyTree], Spec | None] | PyTree


def tree_shardings(tree: PyTree, shardings: Shardings | None = None) -> PyTree:
    """Returns the sharding of each leaf, or the one that `shardings` would give it.

    Pass the result to `jax.device_put`, the `in_shardings` and `out_shardings` of `jax.jit`, or a checkpoint library.

    !!! Example

        ```python
        arrays, static = eqx.partition(model, eqx.is_array)
        arrays = jax.device_put(arrays, eqq.tree_shardings(arrays, {"*.up.weight": P("model"), "*": P()}))
        ```

    **Arguments:**

    - `tree`: any pytree. The leaves may be `jax.ShapeDtypeStruct`s.
    - `shardings`: the shardings of the logical arrays, as for [`eqquant.quantize_tree`][]. By default, the current
        shardings.

    **Returns:**

    The tree with a sharding in the place of each array, including the arrays inside a quantized array, and `None` in
    the place of everything else. With `shardings`, also `None` in the place of leaves that no rule matches.

    **Raises:**

    `ValueError` if a spec does not fit its leaf, if a rule matches nothing, or if the shardings have no mesh or more
    than one. The message names the leaf.
    """
    leaves = list(named_leaves(tree))
    wanted = resolve_shardings(tree, leaves, shardings)
    done = [
        _current_shardings(leaf.value) if shardings is None else _planned_sharding(leaf, s)
        for leaf, s in zip(leaves, wanted, strict=True)
    ]
    return replace_leaves(tree, done)


def resolve_shardings(tree: PyTree, leaves: Sequence[Leaf], shardings: Shardings | None) -> list[NamedSharding | None]:
    """Returns the requested sharding of each leaf; `None` for a leaf that keeps its own."""
    if shardings is None:
        return [None] * len(leaves)
    specs = _list_specs(tree, leaves, shardings)
    wanted, meshes = [], {}
    for leaf, spec in zip(leaves, specs, strict=True):
        if spec is None or not _is_array(leaf.value):
            wanted.append(None)
            continue
        if not isinstance(spec, (NamedSharding, PartitionSpec)):
            raise TypeError(f"{leaf.path} must have a NamedSharding, a PartitionSpec or None. Got {spec!r}.")
        named = as_named(spec, getattr(leaf.value, "sharding", None), leaf.path)
        meshes.setdefault(named.mesh, leaf.path)
        if not is_quantized(leaf.value):
            _check(leaf, named)
        wanted.append(named if len(named.spec) > leaf.value.ndim else full_spec(named, leaf.value.ndim))
    if len(meshes) > 1:
        raise ValueError(
            "All leaves must be on one mesh. Got "
            + " and ".join(f"{dict(mesh.shape)} for {path}" for mesh, path in meshes.items())
            + ". A program runs on one."
        )
    return wanted


def move(x: PyTree, sharding: NamedSharding | None) -> PyTree:
    """Returns a leaf with a sharding. Of a `ShapeDtypeStruct`, only records it."""
    if sharding is None or not _is_array(x):
        return x
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jtu.tree_leaves(x)):
        shardings = leaf_shardings(x, sharding) if is_quantized(x) else sharding
        struct = jtu.tree_map(lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), x, shardings)
        return dataclasses.replace(struct, logical_sharding=sharding) if is_quantized(x) else struct
    if is_quantized(x):
        return x if x.sharding == sharding else x.with_sharding(sharding)
    return place(x, sharding)


def _list_specs(tree: PyTree, leaves: Sequence[Leaf], shardings: Shardings) -> list[object]:
    if isinstance(shardings, jax.sharding.Mesh):
        raise TypeError(f"`shardings` must be rules, a function or a tree. Got {shardings!r}. Write {{'*': ...}}.")
    is_spec = lambda x: x is None or isinstance(x, (NamedSharding, PartitionSpec))
    if isinstance(shardings, Mapping) and all(map(is_spec, shardings.values())):
        rules = check_rules(shardings, leaves, leaves, "shardings")
        return [find_rule(rules, leaf)[1] for leaf in leaves]
    if callable(shardings) and jtu.all_leaves([shardings]):  # a model may be callable too
        return [shardings(leaf.path, leaf.value) for leaf in leaves]
    put_in_boxes = lambda spec, node: jtu.tree_map(lambda _: _Box(spec), node, is_leaf=is_quantized)
    try:
        boxes = jtu.tree_map(put_in_boxes, shardings, tree, is_leaf=is_spec)
    except ValueError as e:
        raise ValueError(f"`shardings` must be rules, or a tree that is a prefix of the model. {e}") from None
    return [box.spec for box in jtu.tree_leaves(boxes)]


class _Box:
    """A spec as one leaf. For JAX, `None` is not a leaf, and a `PartitionSpec` may be a tuple."""

    def __init__(self, spec: Spec | None) -> None:
        self.spec = spec


def _check(leaf: Leaf, sharding: NamedSharding) -> None:
    shape = tuple(leaf.value.shape)
    if len(sharding.spec) > len(shape):
        raise ValueError(f"{leaf.path}, of shape {shape}, must not have a spec of more axes. Got {sharding.spec}.")
    try:
        sharding.shard_shape(shape)
    except ValueError as e:
        raise ValueError(f"{leaf.path}, of shape {shape}, cannot be sharded like this. {e}") from None


def _planned_sharding(leaf: Leaf, sharding: NamedSharding | None) -> PyTree:
    if not is_quantized(leaf.value):
        return sharding
    if sharding is None:
        return jtu.tree_map(lambda _: None, leaf.value)
    return leaf_shardings(leaf.value, sharding, leaf.path)


def _current_shardings(x: PyTree) -> PyTree:
    if not is_quantized(x):
        return getattr(x, "sharding", None) if _is_array(x) else None
    # The leaves of a `ShapeDtypeStruct` may have no shardings, only the sharding of the logical array.
    known = [getattr(leaf, "sharding", None) for leaf in jtu.tree_leaves(x)]
    if None in known and isinstance(x.logical_sharding, NamedSharding):
        return leaf_shardings(x, x.sharding)
    return jtu.tree_unflatten(jtu.tree_structure(x), known)


def current_sharding(x: object) -> NamedSharding | None:
    """Returns the sharding of an array on a mesh; `None` for any other array and for a tracer."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def replicated_sharding(sharding: Sharding | None) -> NamedSharding | None:
    """Returns a replicated sharding on the same mesh, such as for the state of an optimizer."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


def _is_array(x: object) -> bool:
    return is_quantized(x) or isinstance(x, DenseArray)
