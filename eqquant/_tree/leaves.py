"""The leaves of a model, by name."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array.array import is_quantized


class Leaf(NamedTuple):
    """A leaf of a tree, in which a quantized array is one leaf."""

    path: str
    value: Any
    parent: Any  # the module, list or dict that holds it; nothing holds the root


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] = is_quantized) -> Iterator[Leaf]:
    """The leaves in their order, with names such as `layers.0.weight`."""
    flat, _ = jtu.tree_flatten_with_path(tree, is_leaf=is_leaf)
    for path, value in flat:
        name = jtu.keystr(path, simple=True, separator=".") or "the array"
        yield Leaf(name, value, _follow(tree, path[:-1]) if path else None)


def _follow(tree: PyTree, path: Sequence[Any]) -> Any:
    """The node at `path`, or `None` where a custom node has no such thing as a name for its children."""
    for key in path:
        if isinstance(key, jtu.GetAttrKey):
            tree = getattr(tree, key.name, None)
        elif isinstance(key, jtu.SequenceKey):
            tree = tree[key.idx]
        elif isinstance(key, jtu.DictKey):
            tree = tree[key.key]
        else:
            return None
    return tree


def array_nbytes(x: Any) -> int:
    """The bytes of an array of any dtype, keys and sub-byte integers included."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys
        return x.nbytes if isinstance(x, jax.Array) else 0
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else 8 * x.dtype.itemsize
    return math.ceil(math.prod(x.shape) * bits / 8)


def some(items: Iterable[str]) -> str:
    """The first few of a list, for an error message."""
    items = list(items)
    return ", ".join(items[:10]) + (f", and {len(items) - 10} more" if len(items) > 10 else "")
