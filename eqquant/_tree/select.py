"""Selects leaves of a model by patterns, by a function as for `eqx.tree_at`, or by default."""

import dataclasses
import difflib
import fnmatch
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax.tree_util as jtu

from .._array.array import is_quantized
from .._types import Model, PyTree
from .leaves import abbreviate_list, identity_key, Leaf, named_leaves, replace_leaves
from .weights import default_skip_reason, ineligible_reason


_T = TypeVar("_T")
Where = Callable[[PyTree], PyTree]
Pattern = str | re.Pattern[str]


class Selection(NamedTuple):
    """A leaf, and the reason why it is not selected, or `None` if it is selected."""

    leaf: Leaf
    reason: str | None


def select_leaves(
    tree: PyTree,
    where: Where | None = None,
    *,
    ineligible: Callable[[Leaf], str | None] = lambda leaf: ineligible_reason(leaf.value),
    skip: Callable[[Leaf], str | None] = default_skip_reason,
    kind: str = "floating point arrays",
    is_leaf: Callable[[object], bool] = is_quantized,
) -> list[Selection]:
    """Returns for each leaf of a tree, in order, whether it is selected.

    Selects each leaf that `where` returns; if the leaf is `ineligible`, raises a `TypeError` that asks for leaves of
    this `kind`. In a node that `where` returns, and in the whole tree without `where`, it selects each leaf unless
    `ineligible` or `skip` gives a reason not to.
    """
    leaves = list(named_leaves(tree, is_leaf))
    marks = ["node"] * len(leaves) if where is None else _mark_leaves(tree, where, is_leaf)
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


def find_named(tree: PyTree, where: Where | None) -> list[bool]:
    """Returns for each leaf, in order, whether `where` selects the leaf itself, not a node."""
    if where is None:
        return [False for _ in named_leaves(tree)]
    return [mark == "leaf" for mark in _mark_leaves(tree, where, is_quantized)]


def replace_selected(
    tree: Model,
    selections: Sequence[Selection],
    replace: Callable[[Leaf], PyTree],
    is_leaf: Callable[[object], bool] = is_quantized,
    group_key: Callable[[Leaf], Hashable] = lambda leaf: identity_key(leaf.value),
) -> Model:
    """Returns the tree with the selected leaves replaced. A shared array stays shared."""
    done: dict[Hashable, PyTree] = {}
    values = []
    for leaf, reason in selections:
        if reason is None and group_key(leaf) not in done:
            done[group_key(leaf)] = replace(leaf)
        values.append(leaf.value if reason is not None else done[group_key(leaf)])
    return replace_leaves(tree, values, is_leaf)


def select_nodes(tree: PyTree, is_node: Callable[[object], bool]) -> list[Selection]:
    """Selects the nodes of a tree for which `is_node` holds."""
    return [Selection(leaf, None if is_node(leaf.value) else "another") for leaf in named_leaves(tree, is_node)]


def check_selected(selections: Sequence[Selection], what: str) -> None:
    """Raises if nothing is selected, with the reason for each leaf."""
    if all(reason is not None for _, reason in selections):
        raise ValueError(
            f"The model must hold {what}. Got none among its leaves ({show_refusals(selections)}). `where=` selects "
            "leaves that are left alone by default."
        )


def show_refusals(selections: Sequence[Selection]) -> str:
    """Returns why each leaf is not selected, for an error message."""
    return abbreviate_list(f"{leaf.path}: {reason}" for leaf, reason in selections) or "none"


def _mark_leaves(tree: PyTree, where: Where, is_leaf: Callable[[object], bool]) -> list[Literal["leaf", "node"] | None]:
    """Returns whether `where` selects each leaf itself, a node above it, or neither."""
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
    """Whether a glob matches the whole name of a leaf, or a regular expression any part of it."""
    if isinstance(pattern, re.Pattern):
        return any(pattern.search(path) is not None for path in leaf.paths)
    return any(fnmatch.fnmatchcase(path, pattern) for path in leaf.paths)


def widen_pattern(pattern: Pattern, leaves: Sequence[Leaf]) -> Pattern:
    """Returns a pattern of leaves. A glob for layers becomes one for all leaves inside."""
    if not isinstance(pattern, str) or any(matches(pattern, leaf) for leaf in leaves):
        return pattern
    inside = f"{pattern}.*"
    return inside if any(matches(inside, leaf) for leaf in leaves) else pattern


def check_rules(
    rules: Mapping[Any, _T], leaves: Sequence[Leaf], eligible: Sequence[Leaf], argument: str
) -> dict[Pattern, _T]:
    """Returns rules with patterns of leaves, as `widen_pattern` does; the first of equal ones.

    Raises for a key that matches no leaf, and warns of rules that take none of the eligible ones.
    """
    widened: dict[Pattern, _T] = {}
    for pattern, value in rules.items():
        widened.setdefault(widen_pattern(pattern, leaves), value)
    check_patterns(widened, leaves, argument)
    _check_order(widened, eligible, argument)
    return widened


def find_rule(rules: Mapping[Pattern, _T], leaf: Leaf) -> tuple[Pattern, _T] | tuple[None, None]:
    """Returns the pattern and value of the first rule for a leaf, or `None` for both."""
    return next(((pattern, value) for pattern, value in rules.items() if matches(pattern, leaf)), (None, None))


def show_pattern(pattern: Pattern) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def check_patterns(patterns: Iterable[object], leaves: Sequence[Leaf], argument: str) -> None:
    """Raises for a key that is not a pattern, and for a pattern that matches no leaf."""
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
                f"of: {abbreviate_list(leaf.path for leaf in leaves)}.{_suggest_pattern(show_pattern(pattern), leaves)}"
            )


def _check_order(rules: Mapping[Pattern, object], leaves: Sequence[Leaf], argument: str) -> None:
    """Warns of patterns that never win, because wider patterns before them match their leaves.

    It is not an error, since users put their rules before rules for many models. A last pattern for the rest, such as
    `"*"`, may match no leaf: no pattern before it is wider.
    """
    winners = [find_rule(rules, leaf)[0] for leaf in leaves]
    shadowed = []
    for pattern in [p for p in rules if p not in {*winners}]:
        matched_winners, other_winners = set(), set()
        for leaf, winner in zip(leaves, winners, strict=True):
            (matched_winners if matches(pattern, leaf) else other_winners).add(winner)
        if wider := [repr(show_pattern(p)) for p in rules if p in matched_winners & other_winners]:
            shadowed.append(f"{show_pattern(pattern)!r} behind {abbreviate_list(wider)}")
    if shadowed:
        warnings.warn(
            f"Each pattern of `{argument}` should stand before wider ones: the first that matches a leaf takes it. "
            f"These take none: {abbreviate_list(shadowed)}. Put the narrower first.",
            stacklevel=7,  # of `quantize_tree`
        )


def _suggest_pattern(pattern: str, leaves: Sequence[Leaf]) -> str:
    """Returns "Did you mean ...?" with the nearest path or pattern, or the first keys of paths."""
    dotted = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", pattern).removeprefix(".")
    paths = {path: None for leaf in leaves for path in leaf.paths}
    if any(fnmatch.fnmatchcase(path, dotted) for path in paths):
        return f" Did you mean {dotted!r}? Paths join all keys by dots."
    if any(fnmatch.fnmatchcase(path, f"*{dotted}*") for path in paths):
        return f" Did you mean '*{dotted}*'? A pattern matches whole paths."
    if any(fnmatch.fnmatchcase(path, dotted.removeprefix("*.")) for path in paths):
        return f" Did you mean {dotted.removeprefix('*.')!r}? Nothing stands before it."
    keys = {key.lower(): key for path in paths for key in path.split(".")}
    near = [difflib.get_close_matches(key.lower(), keys, n=1) for key in dotted.split(".")]
    spelled = ".".join(keys[n[0]] if n else key for n, key in zip(near, dotted.split("."), strict=True))
    if any(fnmatch.fnmatchcase(path, spelled) for path in paths):
        return f" Did you mean {spelled!r}?"
    if near := difflib.get_close_matches(dotted, paths, n=1):
        return f" Did you mean {near[0]!r}?"
    first = abbreviate_list(dict.fromkeys(path.split(".")[0] for path in paths))
    return f" Paths begin with: {first}." if paths else ""
