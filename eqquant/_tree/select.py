"""Selecting leaves of a model: by patterns, by a function as for `eqx.tree_at`, by default."""

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array.array import is_quantized
from .leaves import Leaf, named_leaves, some
from .weights import default_skip_reason, ineligible_reason


Where = Callable[[PyTree], Any]
Pattern = str | re.Pattern[str]


class Selection(NamedTuple):
    """A leaf, and why it is not selected, or `None` for one that is."""

    leaf: Leaf
    reason: str | None


def select_leaves(
    tree: PyTree,
    where: Where | None = None,
    *,
    ineligible: Callable[[Leaf], str | None] = lambda leaf: ineligible_reason(leaf.value),
    skip: Callable[[Leaf], str | None] = default_skip_reason,
    kind: str = "floating point arrays",
    is_leaf: Callable[[Any], bool] = is_quantized,
) -> list[Selection]:
    """Decides about every leaf of a tree, in order.

    A leaf that `where` selects is taken, and a `TypeError` says that it is none of this `kind` if it is `ineligible`.
    In a node that `where` selects, and in the whole tree without `where`, what is ineligible is passed by, and so is
    what should be left alone by default, for which `skip` gives the reason.
    """
    leaves = list(named_leaves(tree, is_leaf))
    marks = ["node"] * len(leaves) if where is None else _marks(tree, where, is_leaf)
    selections = []
    for leaf, mark in zip(leaves, marks, strict=True):
        reason = ineligible(leaf)
        if mark == "leaf" and reason is not None:
            raise TypeError(f"`where` must select {kind}. Got {leaf.path}: {reason}. Select weights alone.")
        if mark is None:
            reason = reason or "not selected by `where`"
        elif mark == "node":
            reason = reason or skip(leaf)
        selections.append(Selection(leaf, reason))
    return selections


def _marks(tree: PyTree, where: Where, is_leaf: Callable[[Any], bool]) -> list[Literal["leaf", "node"] | None]:
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


def matches(pattern: Pattern, leaf: Leaf) -> bool:
    """Whether a glob matches the name of a leaf, or a regular expression anything in it."""
    if isinstance(pattern, re.Pattern):
        return any(pattern.search(path) is not None for path in leaf.paths)
    return any(fnmatch.fnmatchcase(path, pattern) for path in leaf.paths)


def show_pattern(pattern: Pattern) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def check_patterns(patterns: Iterable[Any], leaves: Sequence[Leaf], argument: str) -> None:
    """Refuses keys that are no patterns, and patterns that match nothing: they are mistakes."""
    for pattern in patterns:
        if not isinstance(pattern, (str, re.Pattern)):
            raise TypeError(
                f"The keys of `{argument}` must be globs or compiled regular expressions, which match paths such as "
                f"{leaves[0].path if leaves else 'layers.0.weight'!r}. Got {pattern!r}. Write it as text: "
                f"'layers.{pattern}.*', for instance."
            )
        if not any(matches(pattern, leaf) for leaf in leaves):
            raise ValueError(
                f"Each pattern of `{argument}` must match a leaf. Got {show_pattern(pattern)!r}, which matches none "
                f"of: {some(leaf.path for leaf in leaves)}.{_near(show_pattern(pattern), leaves)}"
            )


def _near(pattern: str, leaves: Sequence[Leaf]) -> str:
    """A question after the path that was meant, if any is near."""
    dotted = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", pattern).removeprefix(".")
    paths = {path: None for leaf in leaves for path in leaf.paths}
    if any(fnmatch.fnmatchcase(path, dotted) for path in paths):
        return f" Did you mean {dotted!r}? Paths join all keys by dots."
    if any(fnmatch.fnmatchcase(path, f"*{dotted}*") for path in paths):
        return f" Did you mean '*{dotted}*'? A pattern matches whole paths."
    near = difflib.get_close_matches(dotted, paths, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
