"""The leaves of a model: their names, which of them are weights, and which of them training changes."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._array.array import is_quantized
from .._array.value import AbstractArrayValue
from .leaves import Leaf, some


Where = Callable[[PyTree], Any]
Pattern = str | re.Pattern[str]


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
