"""The leaves of a model: their names, which of them are weights, and which of them training changes."""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ._operators import AbstractArrayValue
from ._quantize import is_quantized


Where = Callable[[PyTree], Any]
Pattern = str | re.Pattern[str]


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


def matches(pattern: Pattern, path: str) -> bool:
    """Whether a glob, or a regular expression anywhere, matches the name of a leaf."""
    if isinstance(pattern, re.Pattern):
        return pattern.search(path) is not None
    return fnmatch.fnmatchcase(path, pattern)


def show_pattern(pattern: Pattern) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def check_patterns(patterns: Iterable[Pattern], leaves: Sequence[Leaf], of: str = "") -> None:
    """Refuses patterns that match nothing: they are mistakes. `of` says where they stand."""
    for pattern in patterns:
        if not any(matches(pattern, leaf.path) for leaf in leaves):
            raise ValueError(
                f"Each pattern{of} must match a leaf. Got {show_pattern(pattern)!r}, which matches none of: "
                f"{some(leaf.path for leaf in leaves)}."
            )


def why_never(x: Any) -> str | None:
    """Why a leaf cannot be quantized, whatever the rules say, or `None`."""
    if is_quantized(x):
        return f"already quantized, to {x.format!r}"
    dtype = getattr(x, "dtype", None)
    if not isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) or dtype is None:
        return "not an array"
    if not jnp.issubdtype(dtype, jnp.floating):
        return "not floating point"
    return "a scalar" if x.ndim == 0 else None


def why_not(leaf: Leaf) -> str | None:
    """Why a leaf is left alone by default, or `None` for a weight."""
    if isinstance(leaf.parent, AbstractArrayValue):
        return f"part of a {type(leaf.parent).__name__}"
    if _is_norm(leaf.parent):
        return "a parameter of a normalisation layer"
    if leaf.path.rpartition(".")[2].startswith("bias"):
        return "a bias"  # whatever its shape: those of stacked layers have two dimensions
    if sum(length > 1 for length in leaf.value.shape) < 2:
        return "fewer than two dimensions longer than one"
    return None


def _is_norm(module: Any) -> bool:
    # Equinox's, and anybody's own: but not the wrappers, whose names end the same and which hold real weights.
    if isinstance(module, (eqx.nn.SpectralNorm, eqx.nn.WeightNorm)):
        return False
    return isinstance(module, eqx.Module) and type(module).__name__.endswith("Norm")


def default_axis(leaf: Leaf) -> int | tuple[int, ...]:
    """The input axis of a weight: all but the first axis of a convolution's, the last of any other."""
    if isinstance(leaf.parent, (eqx.nn.Conv, eqx.nn.ConvTranspose)):
        return tuple(range(-leaf.parent.num_spatial_dims - 1, 0))
    return -1


def selected_by(
    tree: PyTree, where: Where, is_leaf: Callable[[Any], bool] = is_quantized
) -> list[Literal["leaf", "node"] | None]:
    """For each leaf, whether `where` selects it, or a node above it, or neither."""
    unmarked = jtu.tree_map(lambda _: _Mark(None), tree, is_leaf=is_leaf)
    mark = lambda node: jtu.tree_map(lambda _: _Mark("leaf" if isinstance(node, _Mark) else "node"), node)
    try:
        marked = eqx.tree_at(where, unmarked, replace_fn=mark)
    except Exception as e:
        raise ValueError(
            "`where` must return leaves or nodes of the tree that it is given, as for `eqx.tree_at`. Got "
            f"{type(e).__name__}: {e}"
        ) from e
    return [mark.kind for mark in jtu.tree_leaves(marked)]


@dataclasses.dataclass
class _Mark:
    kind: Literal["leaf", "node"] | None


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


def trainable_mask(tree: PyTree) -> PyTree[bool]:
    """Which leaves of a model training changes.

    In a model with low-rank factors ([`eqquant.loraify`][]), the factors and nothing else. In any other, every floating
    point array and every quantized array.

    !!! Example

        ```python
        optim = optax.masked(optax.adamw(1e-3), eqq.trainable_mask(model))
        trained, frozen = eqx.partition(model, eqq.trainable_mask(model))
        ```

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    The tree with a boolean for each leaf. A [`eqquant.QuantizedArray`][] is one leaf, so this is a prefix of the tree,
    as `equinox.partition`, `equinox.filter`, `optax.masked` and [`eqquant.filter_grad`][] take it.
    """
    nodes, treedef = jtu.tree_flatten(tree, is_leaf=lambda x: isinstance(x, AbstractArrayValue))
    adapted = any(isinstance(x, AbstractArrayValue) and x.frozen for x in nodes)

    def mask(x: Any) -> PyTree[bool]:
        if is_quantized(x):
            return not adapted
        if not isinstance(x, AbstractArrayValue):
            return eqx.is_inexact_array(x) and not adapted
        if adapted and not x.frozen:
            return False
        of_field = lambda path, leaf: path[0].name not in x.frozen and eqx.is_inexact_array(leaf)
        return jtu.tree_map_with_path(of_field, x, is_leaf=is_quantized)

    return jtu.tree_unflatten(treedef, [mask(x) for x in nodes])
