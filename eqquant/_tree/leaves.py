"""Names the leaves of a model."""

import collections
import dataclasses
import functools as ft
import math
from collections.abc import Callable, Hashable, Iterable, Iterator

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.tree_util import KeyPath

from .._array.array import is_quantized
from .._types import PyTree
from .._wrappers.base import AbstractMatmulOverride, AbstractWrapper
from .._wrappers.mapped import AbstractMappedArray


# A leaf that is not quantized. In plans, shapes stand for arrays.
DenseArray = jax.Array | np.ndarray | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """A leaf of a tree; a quantized array counts as one leaf.

    - `path`: its name, such as `layers.0.weight`, unique in the tree.
    - `keys`: its key path.
    - `nodes`: the nodes that hold it, from the root to its parent. `keys[n]` is the key in `nodes[n]`.
    """

    path: str
    value: PyTree
    keys: KeyPath
    nodes: tuple[PyTree, ...]

    @property
    def parent(self) -> PyTree:
        """The module, list or dict that holds the leaf; `None` if the leaf is the whole tree."""
        return self.nodes[-1] if self.nodes else None

    @ft.cached_property
    def _depth(self) -> int:
        """The number of keys, without keys of wrappers, such as `value` in Flax's `bias.value`."""
        depth = len(self.keys)
        while depth > 1 and _is_wrapper(self.nodes[depth - 1], self.keys[depth - 1]):
            depth -= 1
        return depth

    @property
    def name(self) -> str:
        """The name of the leaf in its layer, such as `bias` for `layers.0.bias.value`."""
        return key_name(self.keys[self._depth - 1]) if self.keys else ""

    @property
    def layer(self) -> PyTree:
        """The node that holds the leaf as `name`: its parent, or the parent of a wrapper."""
        return self.nodes[self._depth - 1] if self.nodes else None

    @property
    def paths(self) -> tuple[str, ...]:
        """The names that patterns match: `path`, and `path` without the keys of wrappers."""
        inner = jtu.keystr(self.keys[: self._depth], simple=True, separator=".")
        wrapped = self._depth < len(self.keys) and self.path.startswith(inner)
        return (self.path, inner) if wrapped else (self.path,)

    @property
    def float_path(self) -> str | None:
        """The path of the leaf in the float model: without the keys of wrappers of products.

        `None` for a scale or a zero point of such a wrapper, which a float model does not have.
        """
        in_wrapper = [isinstance(node, AbstractMatmulOverride) for node in self.nodes]
        if any(w and key_name(key) != "array" for w, key in zip(in_wrapper, self.keys, strict=True)):
            return None
        if not any(in_wrapper):
            return self.path
        keys = tuple(key for w, key in zip(in_wrapper, self.keys, strict=True) if not w)
        is_simple = self.path == jtu.keystr(self.keys, simple=True, separator=".")
        return (jtu.keystr(keys, simple=True, separator=".") if is_simple else jtu.keystr(keys)) or "the array"

    def ancestors(self) -> Iterator[tuple[str, PyTree]]:
        """Yields the layer and the nodes around it that hold nothing else, each with its name.

        Ends after a list, such as `norms` in `norms.0.scale`, because the list names its items. Otherwise the root
        comes last, with an empty name.
        """
        for n in range(self._depth - 1, 0, -1):
            key = self.keys[n - 1]
            yield key_name(key), self.nodes[n]
            if _is_index(key):
                yield key_name(self.keys[n - 2]) if n > 1 else "", self.nodes[n - 1]
                return
            if len(_children(self.nodes[n - 1])) > 1:
                return
        if self.nodes:
            yield "", self.nodes[0]


def named_leaves(tree: PyTree, is_leaf: Callable[[object], bool] = is_quantized) -> Iterator[Leaf]:
    """Yields the leaves in order, with names such as `layers.0.weight`.

    If two leaves would have the same name, as in `{"a.b": x, "a": {"b": y}}`, their names are their key paths:
    `['a.b']` and `['a']['b']`.
    """
    found = list(_walk(tree, is_leaf))
    names = [jtu.keystr(keys, simple=True, separator=".") or "the array" for keys, *_ in found]
    count = collections.Counter(names)
    for name, (keys, nodes, value) in zip(names, found, strict=True):
        yield Leaf(name if count[name] == 1 else jtu.keystr(keys), value, keys, nodes)


def float_leaves(tree: PyTree, is_leaf: Callable[[object], bool] = is_quantized) -> dict[str, PyTree]:
    """Returns the leaves of the float model, in order, by their paths in it."""
    leaves = named_leaves(tree, is_leaf)
    return {path: leaf.value for leaf in leaves if (path := leaf.float_path) is not None}


def replace_leaves(tree: PyTree, values: Iterable[PyTree], is_leaf: Callable[[object], bool] = is_quantized) -> PyTree:
    """Returns a tree with its leaves replaced, in the order of `named_leaves`."""
    return jtu.tree_unflatten(jtu.tree_structure(tree, is_leaf=is_leaf), values)


def _walk(
    node: PyTree, is_leaf: Callable[[object], bool], keys: KeyPath = (), nodes: tuple[PyTree, ...] = ()
) -> Iterator[tuple[KeyPath, tuple[PyTree, ...], PyTree]]:
    for key, child in [((), node)] if is_leaf(node) else _children(node):
        if key == ():
            yield keys, nodes, child
        else:
            yield from _walk(child, is_leaf, (*keys, *key), (*nodes, node))


def _children(node: PyTree) -> list[tuple[KeyPath, PyTree]]:
    """Returns the children of a node with their keys; for a leaf, the leaf itself with no key."""
    children, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(key, child) for key, child in children if child is not None]


def _is_wrapper(node: object, key: Hashable) -> bool:
    """Whether a node wraps one array: a Flax `Variable`, a haliax `NamedArray`, or our wrapper."""
    if isinstance(node, AbstractWrapper):
        return key_name(key) == "array"
    by_name = key_name(key) in ("value", "array") or isinstance(key, jtu.FlattenedIndexKey)
    return by_name and len(_children(node)) == 1


def _is_index(key: Hashable) -> bool:
    return isinstance(key, jtu.SequenceKey | jtu.FlattenedIndexKey) or key_name(key).isdigit()


def key_name(key: Hashable) -> str:
    return jtu.keystr((key,), simple=True)


def is_mapped(leaf: Leaf) -> bool:
    """Whether a leaf is the stored array of an input transform, and so a weight."""
    return isinstance(leaf.parent, AbstractMappedArray) and key_name(leaf.keys[-1]) == "array"


def identity_key(x: object) -> Hashable:
    """Returns a key that is equal for the same array in two places, quantized or not.

    It is valid while the tree is alive.
    """
    leaves, treedef = jtu.tree_flatten(x)
    return treedef, tuple(map(id, leaves))


def array_nbytes(x: DenseArray) -> int:
    """Returns the bytes of an array of any dtype, including PRNG keys and sub-byte integers."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys
        return x.nbytes if isinstance(x, jax.Array) else 0
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else 8 * x.dtype.itemsize
    return math.ceil(math.prod(x.shape) * bits / 8)


def abbreviate_list(items: Iterable[str], separator: str = ", ") -> str:
    """Joins the first ten items of a list, for an error message."""
    items = list(items)
    return separator.join(items[:10]) + (f"{separator}and {len(items) - 10} more" if len(items) > 10 else "")
