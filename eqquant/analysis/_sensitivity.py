"""Measures the loss of a model with one leaf at a time quantized."""

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Scalar
from rich.markup import escape
from rich.table import Table

from .._array.array import is_quantized, QuantizedArray
from .._array.quantize import quantize
from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._report import Name, Report, report_table
from .._tree.decide import decide, FormatLike
from .._tree.leaves import abbreviate_list
from .._tree.select import Where
from .._tree.use import Use
from .._types import PyTree
from ._comparison import as_uses, show_format
from ._error import measure, to_numpy
from ._plots import Axes, draw_dots


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
        table = report_table("parameter", *(escape(show_format(f)) for f in self.leaves[0].formats))
        table.title = f"increase of the loss, from {self.loss:.6g}"
        for leaf in self.leaves:
            table.add_row(Name(leaf.name), *(f"{loss - self.loss:.3e}" for loss in leaf.losses))
        return table

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plots the increase of the loss as a dot for each leaf and format. Returns Matplotlib's axes.

        The axis is logarithmic, so a leaf that does not increase the loss has no dot.
        """
        names = [leaf.group or leaf.paths[0] for leaf in self.leaves]
        increases = np.array([leaf.losses for leaf in self.leaves]).T - self.loss
        dots = {show_format(f): row.tolist() for f, row in zip(self.leaves[0].formats, increases, strict=True)}
        labels = ("What quantizing each weight alone does to the loss", "increase of the loss")
        return draw_dots(ax, names, dots, labels)


def sensitivity(
    model: PyTree,
    loss: Callable[[PyTree, PyTree], Scalar],
    batch: PyTree,
    formats: Sequence[FormatLike] | FormatLike = ("int2", "nf4", "int8"),
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
    uses = _some_uses(formats, method)
    check_batch(batch)
    weights, compute = _weights(model, where, axis), _loss_with(model, loss, batch)
    base = _as_number(compute({}), "the model as it is")
    changed = False

    def loss_of(name: str, use: Use, alike: Sequence[_Candidate], quantized: Sequence[QuantizedArray]) -> float:
        nonlocal changed
        replaced = {}
        for w, q in zip(alike, quantized, strict=True):
            rounded = q.dequantize()
            replaced.update(dict.fromkeys(w.places, rounded))
            changed = changed or not np.array_equal(rounded, w.value)
        return _as_number(compute(replaced), f"{name} in {use!r}")

    rows = _rows(weights, group, uses, loss_of)
    if changed and all(loss == base for row in rows for loss in row.losses):
        # All losses are equal, either because rounding hardly changes them or because `loss` ignores the weights. Only
        # the latter returns the same for weights of NaN.
        without = {place: jnp.full_like(w.value, jnp.nan) for w in weights for place in w.places}
        with jax.debug_nans(False):
            if float(np.asarray(compute(without))) == base:
                raise ValueError(
                    f"`loss` must use the model that it is given. Got the same value for every one, {base:.6g}, "
                    "although their weights differ. Does it close over another?"
                )
    return SensitivityReport(base, rows)


def weight_sensitivity(
    model: PyTree,
    formats: Sequence[FormatLike] | FormatLike = ("int2", "nf4", "int8"),
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

    def loss_of(name: str, use: Use, alike: Sequence[_Candidate], quantized: Sequence[QuantizedArray]) -> float:
        del name, use
        loss = 0.0
        for w, q in zip(alike, quantized, strict=True):
            values, path = to_numpy(w.value, w.paths[0]), w.paths[0]
            loss += min(measure(values, to_numpy(q, path), (path, path)).relative_l2, 1.0) ** 2 * values.size
        return loss

    uses = _some_uses(formats, method)
    return SensitivityReport(0.0, _rows(_weights(model, where, axis), group, uses, loss_of))


class _Candidate(NamedTuple):
    """An array that `quantize_tree` would quantize: the indices and the paths of its leaves, its value and its axes."""

    places: list[int]
    paths: list[str]
    value: Array | np.ndarray
    axes: tuple[int, ...]


def _weights(model: PyTree, where: Where | None, axis: int | Sequence[int] | None) -> list[_Candidate]:
    found: dict[int, _Candidate] = {}
    for n, decision in enumerate(decide(model, "int8", where, axis)):
        if decision.format is not None:
            x = decision.leaf.value
            w = found.setdefault(id(x), _Candidate([], [], x, decision.axes))
            w.places.append(n)
            w.paths.append(decision.leaf.path)
    return list(found.values())


def _grouped(weights: Sequence[_Candidate], group: str | Sequence[str]) -> list[tuple[str | None, list[_Candidate]]]:
    """Returns the arrays that share a format, with the name of their group, or each array alone."""
    patterns = [group] if isinstance(group, str) else list(group)
    matchers = {p: re.compile(r"[^.]*".join(re.escape(part) for part in p.split("*")) + r"(?=\.|$)") for p in patterns}
    found: dict[Hashable, tuple[str | None, list[_Candidate]]] = {}
    used = set()
    for w in weights:
        path = w.paths[0]
        name, key = None, path
        for pattern, matcher in matchers.items():
            if match := matcher.match(path):
                name = pattern + path[match.end() :]
                key = name, w.value.shape, w.value.dtype
                used.add(pattern)
                break
        found.setdefault(key, (name, []))[1].append(w)
    if unused := [p for p in patterns if p not in used]:
        raise ValueError(
            f"`group` must match the beginning of a path. Got {unused[0]!r}, which matches none of "
            f"{abbreviate_list([w.paths[0] for w in weights])}."
        )
    return [(name if len(alike) > 1 else None, alike) for name, alike in found.values()]


def _rows(
    weights: Sequence[_Candidate],
    group: str | Sequence[str],
    uses: Sequence[Use],
    loss_of: Callable[[str, Use, Sequence[_Candidate], Sequence[QuantizedArray]], float],
) -> tuple[LeafSensitivity, ...]:
    """Returns a row for each array or group: quantizes it to each format, and asks `loss_of` for the loss."""
    formats = tuple(use if use.method is not None else use.format for use in uses)
    rows = []
    for name, alike in _grouped(weights, group):
        losses, nbytes = [], []
        for use in uses:
            quantized = [_quantize_named(w, use) for w in alike]
            losses.append(loss_of(name or alike[0].paths[0], use, alike, quantized))
            nbytes.append(sum(q.nbytes for q in quantized))
        paths, dense = tuple(path for w in alike for path in w.paths), sum(w.value.nbytes for w in alike)
        shape = tuple(alike[0].value.shape)
        rows.append(LeafSensitivity(paths, shape, dense, formats, tuple(nbytes), tuple(losses), len(alike), name))
    return tuple(rows)


def _some_uses(formats: Sequence[FormatLike] | FormatLike, method: AbstractMethod | None) -> tuple[Use, ...]:
    uses = as_uses(formats, method)
    if not uses:
        raise ValueError("`formats` must name at least one format. Got none. For instance `('int2', 'nf4', 'int8')`.")
    return uses


def _loss_with(
    model: PyTree, loss: Callable[[PyTree, PyTree], Scalar], batch: PyTree
) -> Callable[[Mapping[int, Array]], PyTree]:
    """Returns a function that computes the loss with some leaves replaced, and is compiled once."""
    leaves, treedef = jtu.tree_flatten(model, is_leaf=is_quantized)
    compiled = eqx.filter_jit(loss)

    def compute(replaced: Mapping[int, Array]) -> PyTree:
        changed = [replaced.get(place, leaf) for place, leaf in enumerate(leaves)]
        return compiled(jtu.tree_unflatten(treedef, changed), batch)

    return compute


def _as_number(out: PyTree, what: str) -> float:
    """Returns a loss as a number. Raises if it is not one finite number; the message says what was replaced."""
    if not isinstance(out, (jax.Array, np.ndarray, np.generic, float, int)):
        raise ValueError(f"`loss` must return one finite number. Got a {type(out).__name__}. Return a scalar.")
    value = np.asarray(out)
    if value.shape != () or jnp.iscomplexobj(value) or not math.isfinite(value):
        raise ValueError(
            f"`loss` must return one finite number. Got {f'shape {value.shape}' if value.shape else value} with "
            f"{what}. Reduce it to its mean, and look for a division by zero."
        )
    return float(value)


def _quantize_named(w: _Candidate, use: Use) -> QuantizedArray:
    """Calls `quantize`, and names the leaf in its errors."""
    path = w.paths[0]
    try:
        method = None if use.method is None else use.method.for_leaf(path)
        return quantize(w.value, use.format, axis=w.axes, method=method)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def check_batch(batch: PyTree) -> None:
    """Raises for a batch without examples."""
    arrays = [x for x in jtu.tree_leaves(batch) if isinstance(x, (jax.Array, np.ndarray))]
    if not arrays or any(x.size == 0 for x in arrays):
        shapes = [tuple(x.shape) for x in arrays] or "no arrays"
        raise ValueError(f"`batch` must hold at least one example. Got {shapes}. Pass arrays of one example or more.")
