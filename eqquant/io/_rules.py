"""The rules of `eqq.io.load_into`: which array of a checkpoint becomes which leaf."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .._tree.patterns import compile_pattern, GROUP
from .._types import PyTree


@dataclasses.dataclass(frozen=True)
class Target:
    """A place in a model for [`eqquant.io.load_into`][], and the changes of its array.

    !!! Example

        ```python
        names = {
            "wte.weight": "embedding.weight",                                   # text is `Target("embedding.weight")`
            "h.{n}.mlp.c_fc.{p}": Target("layers.{n}.mlp.up.{p}", transpose=True),
        }
        ```

    **Arguments:**

    - `path`: the path of a leaf, such as `"layers.{n}.attention.q.weight"`; or a tuple of paths, among which the array
        is divided, by the sizes of these leaves.
    - `transpose`: whether to swap the last two axes. A vector does not change. A quantized array stays packed.
    - `axis`: the axis along which several arrays are joined, or one is divided, after transposing.
    - `tied`: whether each of the paths gets the whole array, instead of a part of it.
    - `apply`: a function of each array after transposing, such as `lambda w: w.reshape(8, 64, -1)`.
    - `dequantize`: whether the array becomes dense first.
    """

    path: str | tuple[str, ...]
    transpose: bool = False
    axis: int = 0
    tied: bool = False
    apply: Callable[[PyTree], PyTree] | None = None
    dequantize: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)


LeafTarget = str | tuple[str, ...] | Target | None
RuleKey = str | re.Pattern[str] | tuple[str | re.Pattern[str], ...]
NameRules = Mapping[str, LeafTarget] | Mapping[RuleKey, LeafTarget] | Callable[[str], LeafTarget]


class Recipe(NamedTuple):
    """One or more leaves, and the arrays that become them.

    `sources[i][j]` is part `j` of layer `i` of a stack.

    - `paths`: the paths of the leaves.
    - `stacked`: the lengths of the axes that are stacked, if any are.
    """

    paths: tuple[str, ...]
    to: Target
    sources: tuple[tuple[str, ...], ...]
    stacked: tuple[int, ...]


class Matched(NamedTuple):
    """The leaves that rules give to the names of a checkpoint."""

    recipes: tuple[Recipe, ...]
    left_out: tuple[str, ...]
    unknown: tuple[str, ...]
    problems: tuple[str, ...]
    idle: tuple[str, ...]


class _Match(NamedTuple):
    rule: int
    part: int
    groups: Mapping[str, str]


class _Rule(NamedTuple):
    shown: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    to: Target | None


def match_names(names: NameRules, found: Sequence[str]) -> Matched:
    """Applies rules to the names of a checkpoint; the first rule that matches holds."""
    if callable(names):
        rules = [_rule(name, names(name), literal=True) for name in found]
        matches = {name: _Match(index, 0, {}) for index, name in enumerate(found)}
    else:
        if not isinstance(names, Mapping):
            raise TypeError(f"`names` must be rules, as a mapping, or a function of a name. Got {names!r}.")
        rules = [_rule(key, target) for key, target in names.items()]
        matches = {name: match for name in found if (match := _first(rules, name)) is not None}
    # By rule and paths: the arrays of each layer of a stack, and of each part.
    grouped: dict[tuple[int, tuple[str, ...]], dict[tuple[int, ...], dict[int, str]]] = {}
    left_out, problems = [], []
    for name, (index, part, groups) in matches.items():
        to = rules[index].to
        if to is None:
            left_out.append(name)
            continue
        missing = [g for g in groups if not any(f"{{{g}}}" in path for path in to.paths)]
        if bad := [g for g in missing if not _NUMBER.fullmatch(groups[g])]:
            problems.append(
                f"{name}: `{bad[0]}` is {groups[bad[0]]!r}, and {to.path!r} lacks it; along a group that the path "
                "lacks arrays are stacked, by its value"
            )
            continue
        paths = tuple(GROUP.sub(lambda m, groups=groups: groups.get(m[1], m[0]), path) for path in to.paths)
        layer = grouped.setdefault((index, paths), {}).setdefault(tuple(int(groups[g]) for g in missing), {})
        if part in layer:
            problems.append(f"{', '.join(paths)}: both {layer[part]} and {name}")
        layer[part] = name
    recipes = []
    for (index, paths), layers in grouped.items():
        rule, lengths = rules[index], tuple(1 + max(at) for at in zip(*layers, strict=True))
        if wrong := _incomplete(rule, layers, lengths):
            problems.append(f"{', '.join(paths)}: {wrong}")
            continue
        sources = tuple(tuple(layers[at][n] for n in range(len(rule.shown))) for at in sorted(layers))
        recipes.append(Recipe(paths, rule.to or Target(paths), sources, lengths))
    unknown = tuple(name for name in found if name not in matches)
    busy = {match.rule for match in matches.values()}
    idle = tuple(", ".join(rule.shown) for index, rule in enumerate(rules) if index not in busy)
    return Matched(tuple(recipes), tuple(left_out), unknown, tuple(problems), idle)


def _incomplete(rule: _Rule, layers: Mapping[tuple[int, ...], Mapping[int, str]], lengths: tuple[int, ...]) -> str:
    for at, parts in layers.items():
        for n, shown in enumerate(rule.shown):
            if n not in parts:
                return f"{next(iter(parts.values()))} is there, and no array for {shown!r}, which is joined with it"
    if math.prod(lengths) != len(layers):
        return f"a stack of {' x '.join(map(str, lengths))} arrays, of which {len(layers)} are there"
    return ""


def _first(rules: Sequence[_Rule], name: str) -> _Match | None:
    for index, rule in enumerate(rules):
        for part, pattern in enumerate(rule.patterns):
            if (match := pattern.fullmatch(name)) is not None:
                return _Match(index, part, match.groupdict())
    return None


def _rule(key: object, target: object, literal: bool = False) -> _Rule:
    keys: tuple[PyTree, ...] = key if isinstance(key, tuple) else (key,)
    if not keys or not all(isinstance(k, str | re.Pattern) for k in keys):
        raise TypeError(
            "The keys of `names` must be names of a checkpoint, such as 'layers.{n}.mlp.{p}', compiled regular "
            f"expressions, or tuples of them, which are joined. Got {key!r}."
        )
    patterns = () if literal else tuple(k if isinstance(k, re.Pattern) else compile_pattern(k, "names") for k in keys)
    shown = tuple(k.pattern if isinstance(k, re.Pattern) else k for k in keys)
    if isinstance(target, str) or (isinstance(target, tuple) and target):
        target = Target(target)
    if target is not None and not isinstance(target, Target):
        raise TypeError(
            f"`names` must give {shown[0]!r} the path of a leaf, a tuple of paths, an `eqq.io.Target`, or None, which "
            f"leaves it out. Got {target!r}."
        )
    for pattern, text in zip(patterns, shown, strict=False):
        for path in () if target is None else target.paths:
            if "{" in (rest := GROUP.sub("", path)) or "}" in rest:
                raise ValueError(f"The paths of `names` must have groups such as {{n}}. Got {path!r}.")
            if "*" in path and "*" in text:
                raise ValueError(
                    f"The paths of `names` must have groups such as {{n}} for the parts that vary. Got {path!r}. Where "
                    "names are paths already, write `names=lambda name: name`."
                )
            if unknown := sorted(set(GROUP.findall(path)) - pattern.groupindex.keys()):
                raise ValueError(
                    f"`names` must name the groups of {path!r} in {text!r}. Got no `{{{unknown[0]}}}` there."
                )
    return _Rule(shown, patterns, target)


_NUMBER = re.compile(r"[0-9]{1,9}")
