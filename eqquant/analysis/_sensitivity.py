"""Measures the loss of a model with one leaf at a time quantized."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Scalar
from rich.markup import escape
from rich.table import Table

from .._array.array import is_quantized
from .._array.quantize import quantize
from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._report import Name, Report, report_table
from .._tree.decide import decide
from .._tree.leaves import abbreviate_list
from .._tree.select import Where
from .._tree.use import Use
from .._types import PyTree
from ._error import measure, to_numpy
from ._plots import draw_dots
from ._report import as_uses, show_format


@dataclasses.dataclass(frozen=True)
class LeafSensitivity:
    """The loss with one leaf, or a group of leaves, quantized to each of the formats, and its bytes in each format.

    `paths` has one entry, or several for an array that appears in several places, or for a group. A group is `arrays`
    of one shape, and `group` its name.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dense_nbytes: int
    formats: tuple[AbstractFormat | Use, ...]
    nbytes: tuple[int, ...]
    losses: tuple[float, ...]
    arrays: int = 1
    group: str | None = None

    @property
    def name(self) -> str:
        return self.group or ", ".join(self.paths)

    @property
    def size(self) -> int:
        return self.arrays * math.prod(self.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class SensitivityReport(Report):
    """The loss of the float model, and with each leaf quantized to each format. Prints as a table of increases."""

    loss: float
    leaves: tuple[LeafSensitivity, ...]

    def __rich__(self) -> Table:
        formats = list(dict.fromkeys(f for leaf in self.leaves for f in leaf.formats))
        table = report_table("parameter", *(escape(show_format(f)) for f in formats))
        table.title = f"increase of the loss, from {self.loss:.6g}"
        for leaf in self.leaves:
            increase = {f: loss - self.loss for f, loss in zip(leaf.formats, leaf.losses, strict=True)}
            shown = (f"{increase[f]:.3e}" if f in increase else "" for f in formats)
            table.add_row(Name(leaf.name), *shown)
        return table

    def plot(self, ax: Any = None) -> Any:
        """Plots the increase of the loss as a dot for each leaf and format. Returns Matplotlib's axes.

        The axis is logarithmic, so a leaf that does not increase the loss has no dot.
        """
        names = [leaf.group or leaf.paths[0] for leaf in self.leaves]
        kinds = list(dict.fromkeys(f for leaf in self.leaves for f in leaf.formats))
        found = [dict(zip(leaf.formats, leaf.losses, strict=True)) for leaf in self.leaves]
        dots = {show_format(f): [losses.get(f, np.nan) - self.loss for losses in found] for f in kinds}
        return draw_dots(
            ax, names, dots, ("What quantizing each weight alone does to the loss", "increase of the loss")
        )


def sensitivity(
    model: PyTree,
    loss: Callable[[Any, Any], Scalar],
    batch: PyTree,
    formats: Sequence[AbstractFormat | str | Use] | AbstractFormat | str | Use = ("int2", "nf4", "int8"),
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    method: AbstractMethod | None = None,
    group: str | Sequence[str] = (),
) -> SensitivityReport:
    """Measures the loss of a model with one leaf at a time quantized, to each of several formats.

    Evaluates the loss `1 + leaves x formats` times, and compiles it once, because the model that it gets always holds
    dense weights, one of them rounded. A good loss measures the distance to the outputs of the float model: it is zero
    for the float model, so it cannot decrease by accident, and its increases add up better than those of a loss on
    labels.

    !!! Example

        ```python
        def loss(model, batch):
            x, y = batch                                     # y: the outputs of the float model
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        report = eqq.analysis.sensitivity(model, loss, (x, y), ("int2", "nf4", "int8"))
        plan = eqq.analysis.plan_bits(model, report, target_bits=4.5)
        model = eqq.quantize_tree(model, plan)
        ```

    **Arguments:**

    - `model`: any pytree, in float.
    - `loss`: a function `(model, batch) -> scalar`. It runs under `equinox.filter_jit`.
    - `batch`: the second argument of the loss: any pytree of arrays, with examples along the first axis.
    - `formats`: formats, their lower-case names, [`eqquant.Use`][]s with a method, or one of these.
    - `where`: selects leaves or nodes, as for [`eqquant.quantize_tree`][].
    - `axis`: the axis along which blocks run, as for [`eqquant.quantize_tree`][].
    - `method`: the method that chooses scales and codes, for each of `formats` that sets none.
    - `group`: patterns of the beginnings of paths, in which `*` is any one key: with `"layers.*"`, the arrays of one
        shape at `layers.0.up.weight`, `layers.1.up.weight` and so on get one format, and are measured at once.

    **Returns:**

    A report with the loss and the bytes for each leaf and format. It prints as a table.
    [`eqquant.analysis.plan_bits`][] makes a plan from it.

    **Raises:**

    `ValueError` if `formats` or `batch` is empty, if the loss is not one finite number, if it does not depend on the
    weights, and as [`eqquant.quantize_tree`][].
    """
    uses = as_uses(formats, method)
    if not uses:
        raise ValueError("`formats` must name at least one format. Got none. For instance `('int2', 'nf4', 'int8')`.")
    check_batch(batch)
    picked = tuple(use if use.method is not None else use.format for use in uses)
    losses_of, weights = _Losses(model, loss, batch), _weights(model, where, axis)
    base = losses_of({}, "the model as it is")
    rows, changed = [], False
    for name, alike in _grouped(weights, group):
        losses, nbytes = [], []
        for use in uses:
            replaced, bytes_of_all = {}, 0
            for places, paths, w, axes in alike:
                q = quantize_named(w, use, axes, paths[0])
                rounded = q.dequantize()
                replaced.update(dict.fromkeys(places, rounded))
                bytes_of_all += q.nbytes
                changed = changed or not np.array_equal(rounded, w)
            losses.append(losses_of(replaced, f"{name or alike[0][1][0]} in {use!r}"))
            nbytes.append(bytes_of_all)
        rows.append(_row(name, alike, picked, nbytes, losses))
    if changed and all(loss == base for row in rows for loss in row.losses):
        # All losses are equal, either because rounding hardly changes them or because `loss` ignores the weights. Only
        # the latter returns the same for weights of NaN.
        without = {place: jnp.full_like(w, jnp.nan) for places, _, w, _ in weights for place in places}
        with jax.debug_nans(False):
            if float(np.asarray(losses_of.value(without))) == base:
                raise ValueError(
                    f"`loss` must use the model that it is given. Got the same value for every one, {base:.6g}, "
                    "although their weights differ. Does it close over another?"
                )
    return SensitivityReport(base, tuple(rows))


def weight_sensitivity(
    model: PyTree,
    formats: Sequence[AbstractFormat | str | Use] | AbstractFormat | str | Use = ("int2", "nf4", "int8"),
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    method: AbstractMethod | None = None,
    group: str | Sequence[str] = (),
) -> SensitivityReport:
    """Estimates sensitivities from the weights alone, where there are no data to measure a loss on.

    The loss of a leaf is its relative squared error, times its share of the values: as if a relative error were as bad
    in every leaf. [`eqquant.analysis.sensitivity`][] measures what it does instead.

    !!! Example

        ```python
        report = eqq.analysis.weight_sensitivity(model, ("int2", "nf4", "int8"))
        model = eqq.quantize_tree(model, eqq.analysis.plan_bits(model, report, target_bits=4.2))
        ```

    **Arguments:**

    - `model`: any pytree, in float.
    - `formats`: formats, their lower-case names, [`eqquant.Use`][]s with a method, or one of these.
    - `where`: selects leaves or nodes, as for [`eqquant.quantize_tree`][].
    - `axis`: the axis along which blocks run, as for [`eqquant.quantize_tree`][].
    - `method`: the method that chooses scales and codes, for each of `formats` that sets none.
    - `group`: patterns of the beginnings of paths, in which `*` is any one key: with `"layers.*"`, the arrays of one
        shape at `layers.0.up.weight`, `layers.1.up.weight` and so on get one format, and are measured at once.

    **Returns:**

    A report as that of [`eqquant.analysis.sensitivity`][], whose loss is the sum of squared relative errors, each times
    the number of values.

    **Raises:**

    `ValueError` if `formats` is empty, and as [`eqquant.quantize_tree`][].
    """
    uses = as_uses(formats, method)
    if not uses:
        raise ValueError("`formats` must name at least one format. Got none. For instance `('int2', 'nf4', 'int8')`.")
    picked, rows = tuple(use if use.method is not None else use.format for use in uses), []
    for name, alike in _grouped(_weights(model, where, axis), group):
        losses, nbytes = np.zeros(len(uses)), np.zeros(len(uses), np.int64)
        for _, paths, w, axes in alike:
            quantized = [quantize_named(w, use, axes, paths[0]) for use in uses]
            values = to_numpy(w, paths[0])
            errors = [measure(values, to_numpy(q, paths[0]), (paths[0], paths[0])).relative_l2 for q in quantized]
            losses += [min(error, 1.0) ** 2 * w.size for error in errors]
            nbytes += [q.nbytes for q in quantized]
        rows.append(_row(name, alike, picked, nbytes.tolist(), losses.tolist()))
    return SensitivityReport(0.0, tuple(rows))


class _Losses:
    """Computes the loss of a model with some leaves replaced, and compiles it once."""

    def __init__(self, model: PyTree, loss: Callable[[Any, Any], Scalar], batch: PyTree) -> None:
        self._leaves, self._treedef = jtu.tree_flatten(model, is_leaf=is_quantized)
        self._loss, self._batch = eqx.filter_jit(loss), batch

    def value(self, replaced: Mapping[int, Array | None]) -> Any:
        leaves = [replaced.get(place, leaf) for place, leaf in enumerate(self._leaves)]
        return self._loss(jtu.tree_unflatten(self._treedef, leaves), self._batch)

    def __call__(self, replaced: Mapping[int, Array | None], what: str) -> float:
        """Returns the loss as a number. Raises if it is not one finite number; the message says what was replaced."""
        out = self.value(replaced)
        if not isinstance(out, (jax.Array, np.ndarray, np.generic, float, int)):
            raise ValueError(f"`loss` must return one finite number. Got a {type(out).__name__}. Return a scalar.")
        value = np.asarray(out)
        if value.shape != () or jnp.iscomplexobj(value) or not math.isfinite(value):
            raise ValueError(
                f"`loss` must return one finite number. Got {f'shape {value.shape}' if value.shape else value} with "
                f"{what}. Reduce it to its mean, and look for a division by zero."
            )
        return float(value)


# The leaf indices of an array, its paths, its value and its axes.
_Weight = tuple[list[int], tuple[str, ...], Any, Any]


def _grouped(weights: Sequence[_Weight], group: str | Sequence[str]) -> list[tuple[str | None, list[_Weight]]]:
    """Returns the arrays that share a format, with the name of their group, or each array alone."""
    patterns = [group] if isinstance(group, str) else list(group)
    matchers = {p: re.compile(r"[^.]*".join(re.escape(part) for part in p.split("*")) + r"(?=\.|$)") for p in patterns}
    found: dict[Any, list[_Weight]] = {}
    used = set()
    for weight in weights:
        _, (path, *_), w, _ = weight
        key: Any = path
        for pattern, matcher in matchers.items():
            if match := matcher.match(path):
                key = pattern + path[match.end() :], tuple(w.shape), w.dtype
                used.add(pattern)
                break
        found.setdefault(key, []).append(weight)
    if unused := [p for p in patterns if p not in used]:
        raise ValueError(
            f"`group` must match the beginning of a path. Got {unused[0]!r}, which matches none of "
            f"{abbreviate_list([paths[0] for _, paths, *_ in weights])}."
        )
    return [(key[0] if isinstance(key, tuple) and len(alike) > 1 else None, alike) for key, alike in found.items()]


def _row(
    group: str | None, alike: Sequence[_Weight], formats: Any, nbytes: Sequence[int], losses: Sequence[float]
) -> LeafSensitivity:
    paths, w = tuple(path for _, paths, *_ in alike for path in paths), alike[0][2]
    dense = sum(w.nbytes for _, _, w, _ in alike)
    return LeafSensitivity(paths, tuple(w.shape), dense, formats, tuple(nbytes), tuple(losses), len(alike), group)


def _weights(model: PyTree, where: Where | None, axis: Any) -> list[_Weight]:
    """Returns the arrays that `quantize_tree` would quantize: their leaf indices, paths, values and axes."""
    found: dict[int, tuple[list[int], list[str], Any, Any]] = {}
    for n, (leaf, format, axes, *_) in enumerate(decide(model, "int8", where, axis)):
        if format is not None:
            places, paths, *_ = found.setdefault(id(leaf.value), ([], [], leaf.value, axes))
            places.append(n)
            paths.append(leaf.path)
    return [(places, tuple(paths), w, axes) for places, paths, w, axes in found.values()]


def quantize_named(w: Any, use: Use, axes: Any, path: str) -> Any:
    """Calls `quantize`, and names the leaf in its errors."""
    try:
        return quantize(w, use.format, axis=axes, method=None if use.method is None else use.method.for_leaf(path))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def check_batch(batch: PyTree) -> None:
    """Raises for a batch without examples."""
    arrays = [x for x in jtu.tree_leaves(batch) if isinstance(x, (jax.Array, np.ndarray))]
    if not arrays or any(x.size == 0 for x in arrays):
        shapes = [tuple(x.shape) for x in arrays] or "no arrays"
        raise ValueError(f"`batch` must hold at least one example. Got {shapes}. Pass arrays of one example or more.")
