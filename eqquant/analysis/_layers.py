"""Measures the error of every leaf of a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from rich.markup import escape
from rich.table import Table

from .._array.array import QuantizedArray
from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._report import Name, Report, report_table
from .._tree.decide import FormatRules
from .._tree.leaves import abbreviate_list, float_leaves
from .._tree.quantize import quantize_tree
from .._tree.select import Where
from .._types import PyTree
from ._error import compute_bits, compute_decibels, ErrorReport, measure_error, Real, to_numpy
from ._plots import Axes, draw_bars


@dataclasses.dataclass(frozen=True, repr=False)
class LeafError(Report):
    """The error of one leaf. `bits` are per value, including scales."""

    path: str
    shape: tuple[int, ...]
    format: AbstractFormat
    bits: float
    error: ErrorReport

    def __rich__(self) -> Table:
        return TreeErrorReport((self,)).__rich__()


@dataclasses.dataclass(frozen=True, repr=False)
class TreeErrorReport(Report):
    """The error of each quantized leaf of a model. Prints as a table."""

    derived: ClassVar[tuple[str, ...]] = ("bits", "mse", "sqnr_db")

    leaves: tuple[LeafError, ...]

    @property
    def bits(self) -> float:
        """Bits per value over all leaves of the report."""
        return sum(leaf.bits * leaf.error.size for leaf in self.leaves) / sum(leaf.error.size for leaf in self.leaves)

    @property
    def mse(self) -> float:
        """The mean squared error over the values of all leaves of the report."""
        return self._noise / sum(leaf.error.size for leaf in self.leaves)

    @property
    def sqnr_db(self) -> float:
        """The signal-to-noise ratio of all leaves of the report together."""
        return compute_decibels(sum(leaf.error.rms**2 * leaf.error.size for leaf in self.leaves), self._noise)

    @property
    def _noise(self) -> float:
        return sum(leaf.error.mse * leaf.error.size for leaf in self.leaves)

    def __rich__(self) -> Table:
        headers = ("bits", "SQNR, dB", "rmse", "max error", "cosine")
        table = report_table("parameter", "stored as", *headers, text=2)
        for leaf in self.leaves:
            e = leaf.error
            errors = (f"{e.sqnr_db:.2f}", f"{e.rmse:.3e}", f"{e.max_error:.3e}", f"{e.cosine:.6f}")
            table.add_row(Name(leaf.path), escape(repr(leaf.format)), f"{leaf.bits:.2f}", *errors)
        table.add_section()
        total = (f"{self.bits:.2f}", f"{self.sqnr_db:.2f}", f"{math.sqrt(self.mse):.3e}", "", "")
        table.add_row(f"{len(self.leaves)} leaves", "", *total)
        return table

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plots the SQNR of each leaf as a bar, colored by format. Returns Matplotlib's axes."""
        names, formats = [leaf.path for leaf in self.leaves], [repr(leaf.format) for leaf in self.leaves]
        labels = ("Signal-to-noise ratio of each weight", "SQNR, dB")
        return draw_bars(ax, names, [leaf.error.sqnr_db for leaf in self.leaves], labels, formats)


def analyze_tree(
    model: PyTree,
    format: FormatRules = "nf4",
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    method: AbstractMethod | None = None,
    threshold: Real | None = None,
) -> TreeErrorReport:
    """Returns the error of each leaf after [`eqquant.quantize_tree`][] with these arguments.

    !!! Example

        ```python
        report = eqq.analysis.analyze_tree(model, "nf4")
        print(report)
        report.plot()       # a bar for each leaf
        ```

    **Arguments:**

    - `model`: any pytree, in float.
    - `format`: a format or its name, a mapping from patterns, or a function, as for [`eqquant.quantize_tree`][].
    - `where`: selects leaves or nodes.
    - `axis`: the axis along which blocks run.
    - `method`: the method that chooses scales and codes, for each rule of `format` that sets none.
    - `threshold`: as in [`eqquant.analysis.analyze_error`][].

    **Returns:**

    A report, which prints as a table. It has

    - `leaves`: for each quantized leaf its `path`, `shape`, `format`, `bits` (per value, including scales) and `error`,
        the report of [`eqquant.analysis.analyze_error`][].
    - `bits`, `mse`, `sqnr_db`: of all these leaves together.
    - `.plot(ax=None)`: draws the SQNR of each leaf as a bar; returns Matplotlib's axes.
    - `.to_dict()`, `.to_json(indent=None)`: the same as plain Python, and as JSON.

    **Raises:**

    As [`eqquant.quantize_tree`][].
    """
    quantized = quantize_tree(model, format, where=where, axis=axis, method=method)
    return compare_trees(model, quantized, threshold=threshold)


def compare_trees(model: PyTree, quantized: PyTree, *, threshold: Real | None = None) -> TreeErrorReport:
    """Returns the error of each quantized leaf of a model, however it was quantized.

    !!! Example

        ```python
        report = eqq.analysis.compare_trees(model, eqq.quantize_tree(model, {"layers.0.*": "int8", "*": "nf4"}))
        ```

    **Arguments:**

    - `model`: the float model.
    - `quantized`: the same model, with [`eqquant.QuantizedArray`][]s in the place of some leaves.
    - `threshold`: as in [`eqquant.analysis.analyze_error`][].

    **Returns:**

    As [`eqquant.analysis.analyze_tree`][].

    **Raises:**

    `ValueError` if the two models have different leaves, if no leaf is quantized, or if values are not finite.
    """
    before, after = float_leaves(model), float_leaves(quantized)
    if list(before) != list(after):
        different = before.keys() ^ after.keys()
        raise ValueError(
            "`quantized` must have the leaves of `model`. Got different ones: "
            f"{abbreviate_list(sorted(different)) or 'order'}. Compare a model with what `quantize_tree` made of it."
        )
    rows = []
    for path, old in before.items():
        # A leaf that is quantized in both has no float original to compare with.
        if isinstance(new := after[path], QuantizedArray) and not isinstance(old, QuantizedArray):
            x, y = to_numpy(old, path), to_numpy(new, path)
            error = measure_error(x, y, (path, f"quantized {path}"), threshold)
            rows.append(LeafError(path, x.shape, new.format, compute_bits(new), error))
    if not rows:
        raise ValueError("`quantized` must hold a quantized array that is dense in `model`. Got none. Swap the two?")
    return TreeErrorReport(tuple(rows))
