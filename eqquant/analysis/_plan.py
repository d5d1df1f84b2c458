"""Plans a format for each leaf: the least loss within a budget of bits."""

import dataclasses
import glob
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Scalar
from rich.markup import escape
from rich.table import Table

from .._formats.base import AbstractFormat
from .._report import Name, Report, report_table, show_bytes
from .._tree.config import as_config, QuantConfig
from .._tree.leaves import abbreviate_list, array_nbytes, named_leaves
from .._tree.weights import ineligible_reason
from .._types import PyTree
from ._comparison import show_format
from ._knapsack import choose_options
from ._plots import Axes, draw_bars
from ._sensitivity import (
    Candidate,
    check_batch,
    check_loss,
    compile_loss,
    LeafSensitivity,
    quantize_candidate,
    SensitivityReport,
)


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """The planned format of a leaf or a group, its bytes, and the expected loss increase."""

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    format: AbstractFormat | QuantConfig | None
    nbytes: int
    increase: float
    arrays: int = 1
    group: str | None = None

    @property
    def size(self) -> int:
        return self.arrays * math.prod(self.shape)

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / max(self.size, 1)


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class BitPlan(Report, Mapping[str, AbstractFormat | QuantConfig | None]):
    """A format for each leaf: rules for [`eqquant.quantize_tree`][].

    It is a mapping `{path: format or None}`. The keys are globs, so `glob.escape` escapes each path with `*`, `?` or
    `[`. `measured` says whether `increase` is of a measured loss, or an estimate from the errors of weights.
    """

    derived: ClassVar[tuple[str, ...]] = ("bits", "increase")

    leaves: tuple[PlannedLeaf, ...]
    target_bits: float
    measured: bool = True

    def __getitem__(self, path: str) -> AbstractFormat | QuantConfig | None:
        return self._formats[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)

    @property
    def _formats(self) -> dict[str, AbstractFormat | QuantConfig | None]:
        return {glob.escape(path): leaf.format for leaf in self.leaves for path in leaf.paths}

    @property
    def nbytes(self) -> int:
        """The bytes of the leaves of the plan, including scales."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def bits(self) -> float:
        """Bits per weight, including scales, over the leaves of the plan."""
        return 8 * self.nbytes / max(sum(leaf.size for leaf in self.leaves), 1)

    @property
    def increase(self) -> float:
        """The sum of the expected increases of the loss, or of the estimated errors."""
        return sum(leaf.increase for leaf in self.leaves)

    def __rich__(self) -> Table:
        what = "loss increase" if self.measured else "error"
        table = report_table("parameter", "stored as", "bits/weight", "size", what, text=2)
        for leaf in self.leaves:
            cells = (f"{leaf.bits:.2f}", show_bytes(leaf.nbytes), f"{leaf.increase:.3e}")
            table.add_row(Name(leaf.group or ", ".join(leaf.paths)), escape(show_format(leaf.format)), *cells)
        table.add_section()
        totals = (f"{self.bits:.3f}", show_bytes(self.nbytes), f"{self.increase:.3e}")
        table.add_row(
            f"{sum(leaf.arrays for leaf in self.leaves)} weights", f"at most {self.target_bits:g} bits", *totals
        )
        table.caption = (
            "A plan, nothing is quantized yet. Bits are per weight of the arrays above; `summary` counts the whole "
            "model too, with biases and whatever else stays in float."
        )
        table.caption_justify = "left"
        return table

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plots the bits per weight of each leaf, colored by format. Returns Matplotlib's axes."""
        names = [leaf.group or leaf.paths[0] for leaf in self.leaves]
        formats = [show_format(leaf.format) for leaf in self.leaves]
        labels = (f"A format for each weight, at most {self.target_bits:g} bits on average", "bits per weight")
        return draw_bars(ax, names, [leaf.bits for leaf in self.leaves], labels, formats)


def plan_bits(
    model: PyTree,
    sensitivities: SensitivityReport,
    target_bits: float | int = 4.5,
    *,
    loss: Callable[[PyTree, PyTree], Scalar] | None = None,
    batch: PyTree = None,
) -> BitPlan:
    """Returns the mix of formats with the least loss increase within a budget of bits.

    Assumes that the increases of single leaves add up, and finds the mix with the least sum within the budget by
    dynamic programming (the multiple-choice knapsack problem). The result is optimal if 32768 steps can count the
    budget exactly; otherwise it rounds bytes up to steps of 1/32768 of the budget, and spends the rest greedily. Counts
    the stored bytes, including scales and padding. A leaf may also stay in float, without loss.

    With `loss` and `batch` it then measures the mix, and each format that fits the budget for all leaves, and returns
    the best of these. So the plan is not worse than one format for all, on this batch.

    !!! Example

        ```python
        report = eqq.analysis.sensitivity(model, loss, batch)
        plan = eqq.analysis.plan_bits(model, report, target_bits=4.5, loss=loss, batch=batch)
        print(plan)
        model = eqq.quantize_tree(model, plan)
        ```

    **Arguments:**

    - `model`: the model that the sensitivities were measured on.
    - `sensitivities`: the report that [`eqquant.analysis.sensitivity`][] or [`eqquant.analysis.weight_sensitivity`][]
        returned.
    - `target_bits`: the maximal average of bits per weight, including scales, over the measured leaves.
    - `loss`, `batch`: as for [`eqquant.analysis.sensitivity`][], to compare the mix with one format for all.

    **Returns:**

    A plan: a mapping from paths to formats, or `None` for float. Pass it to [`eqquant.quantize_tree`][], with the same
    `where` and `axis` as to `sensitivity`. If the whole model fits the budget in float, the plan quantizes nothing, and
    `quantize_tree` raises. It prints as a table, and has

    - `leaves`: for each array or group its `paths`, `shape`, `format`, `nbytes`, `bits` (per weight, including scales),
        `increase` of the loss, `arrays` and `group`.
    - `bits`, `nbytes`, `increase`: of all these leaves together; `target_bits`.
    - `.plot(ax=None)`: draws the bits of each leaf as a bar; returns Matplotlib's axes.
    - `.to_dict()`, `.to_json(indent=None)`: the same as plain Python, and as JSON.

    **Raises:**

    `TypeError` if `sensitivities` is not such a report; `ValueError` if a leaf is not in the model or has another shape
    or dtype there, if `target_bits` is NaN or infinite, if only one of `loss` and `batch` is given, or if no mix fits
    the budget: the message gives the range.
    """
    if not isinstance(sensitivities, SensitivityReport):
        raise TypeError(
            "`sensitivities` must be what `eqq.analysis.sensitivity` returned. Got "
            f"{sensitivities!r:.60}. Measure first: `sensitivity(model, loss, batch)`."
        )
    if not math.isfinite(target_bits):
        raise ValueError(f"`target_bits` must be finite. Got {target_bits}. With 32, float32 weights stay in float.")
    if (loss is None) != (batch is None):
        passed, missing = ("loss", "batch") if batch is None else ("batch", "loss")
        raise ValueError(f"`loss` and `batch` must be given together. Got `{passed}` alone. Pass `{missing}` too.")
    _check_leaves(model, sensitivities)
    leaves = sensitivities.leaves
    options = [_list_options(leaf, sensitivities.loss) for leaf in leaves]
    costs, losses = ([np.array([option[n] for option in leaf_options]) for leaf_options in options] for n in (1, 2))
    size = sum(leaf.size for leaf in leaves)
    budget = math.floor(target_bits * size / 8 + 1e-6)
    min_bits, max_bits = (8 * sum(int(pick(cost)) for cost in costs) / size for pick in (np.min, np.max))
    if budget < sum(int(cost.min()) for cost in costs):
        raise ValueError(
            f"`target_bits` must be within reach of the measured formats, from {min_bits:.3f} to {max_bits:.3f} "
            f"bits per weight. Got {target_bits}. Raise it, or measure smaller formats, for instance `eqq.Binary()`."
        )

    def make_plan(choice: Sequence[int]) -> BitPlan:
        rows = [
            PlannedLeaf(leaf.paths, leaf.shape, *leaf_options[pick], leaf.arrays, leaf.group)
            for leaf, leaf_options, pick in zip(leaves, options, choice, strict=True)
        ]
        return BitPlan(tuple(rows), float(target_bits), sensitivities.measured)

    single = [make_plan(choice) for choice in _list_single_formats(options)]
    plans = [make_plan(choose_options(costs, losses, budget)), *(plan for plan in single if plan.nbytes <= budget)]
    if loss is None:
        return min(plans, key=lambda plan: plan.increase)
    check_batch(batch)
    return min(plans, key=_compile_plan_loss(model, sensitivities, loss, batch))


_Option = tuple[AbstractFormat | QuantConfig | None, int, float]


def _list_single_formats(options: Sequence[Sequence[_Option]]) -> Iterator[list[int]]:
    """Yields the choice of one format for all leaves, for each format that all have."""
    for format, *_ in options[0] if options else ():
        matches = [[n for n, option in enumerate(leaf_options) if option[0] is format] for leaf_options in options]
        if all(matches):
            yield [found[0] for found in matches]


def _compile_plan_loss(
    model: PyTree, sensitivities: SensitivityReport, loss: Callable[[PyTree, PyTree], Scalar], batch: PyTree
) -> Callable[[BitPlan], float]:
    """Returns a function that measures the loss of the model under a plan."""
    compute = compile_loss(model, loss, batch)
    by_path = {leaf.path: (n, leaf.value) for n, leaf in enumerate(named_leaves(model))}
    axes = {path: leaf.axes for leaf in sensitivities.leaves for path in leaf.paths}

    def measure_plan(plan: BitPlan) -> float:
        replaced = {}
        for leaf in plan.leaves:
            for path in leaf.paths if leaf.format is not None else ():
                place, value = by_path[path]
                w = Candidate([place], [path], value, axes[path])
                replaced[place] = quantize_candidate(w, as_config(leaf.format)).dequantize()
        return check_loss(compute(replaced), "a plan")

    return measure_plan


def _list_options(leaf: LeafSensitivity, base: float) -> list[_Option]:
    """Returns the options of a leaf, the smallest first, so that ties go to the smaller option."""
    increases = [loss - base for loss in leaf.losses]
    options = [*zip(leaf.formats, leaf.nbytes, increases, strict=True), (None, leaf.dense_nbytes, 0.0)]
    return sorted(options, key=lambda option: option[1])


def _check_leaves(model: PyTree, sensitivities: SensitivityReport) -> None:
    found = {leaf.path: leaf.value for leaf in named_leaves(model) if ineligible_reason(leaf.value) is None}
    for leaf in sensitivities.leaves:
        for path in leaf.paths:
            if path not in found:
                raise ValueError(
                    f"`sensitivities` must belong to `model`. Got {path}, which is none of its float arrays: "
                    f"{abbreviate_list(found)}. Measure again."
                )
            shape, nbytes = tuple(found[path].shape), array_nbytes(found[path])
            if shape != leaf.shape or nbytes * leaf.arrays != leaf.dense_nbytes:
                raise ValueError(
                    f"`sensitivities` must belong to `model`. Got {path} of shape {leaf.shape} and "
                    f"{leaf.dense_nbytes // leaf.arrays} bytes; in the model it has shape {shape} and {nbytes} bytes. "
                    "Measure again."
                )
