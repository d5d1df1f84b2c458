"""Plans a format for each leaf, with the least loss within a budget of bits."""

import dataclasses
import glob
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
from rich.markup import escape
from rich.table import Table

from .._formats.base import AbstractFormat
from .._report import Name, Report, report_table, show_bytes
from .._tree.leaves import abbreviate_list, array_nbytes, named_leaves
from .._tree.use import Use
from .._tree.weights import ineligible_reason
from .._types import PyTree
from ._comparison import show_format
from ._knapsack import choose
from ._plots import Axes, draw_bars
from ._sensitivity import LeafSensitivity, SensitivityReport


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """The format of one leaf or of a group of leaves, its bytes, and the expected increase of the loss."""

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    format: AbstractFormat | Use | None
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
class BitPlan(Report, Mapping[str, AbstractFormat | Use | None]):
    """A format for each leaf: a mapping `{path: format or None}` that you can pass to [`eqquant.quantize_tree`][].

    The keys of such a mapping are globs, so `glob.escape` escapes each path with `*`, `?` or `[`.
    """

    derived: ClassVar[tuple[str, ...]] = ("bits", "increase")

    leaves: tuple[PlannedLeaf, ...]
    target_bits: float

    def __getitem__(self, path: str) -> AbstractFormat | Use | None:
        return self._formats[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)

    @property
    def _formats(self) -> dict[str, AbstractFormat | Use | None]:
        return {glob.escape(path): leaf.format for leaf in self.leaves for path in leaf.paths}

    @property
    def bits(self) -> float:
        """Bits per weight, including scales, over the leaves of the plan."""
        return 8 * sum(leaf.nbytes for leaf in self.leaves) / max(sum(x.size for x in self.leaves), 1)

    @property
    def increase(self) -> float:
        """The expected increase of the loss: the sum over the leaves."""
        return sum(leaf.increase for leaf in self.leaves)

    def __rich__(self) -> Table:
        table = report_table("parameter", "stored as", "bits/weight", "size", "loss increase", text=2)
        for leaf in self.leaves:
            numbers = (f"{leaf.bits:.2f}", show_bytes(leaf.nbytes), f"{leaf.increase:.3e}")
            table.add_row(Name(leaf.group or ", ".join(leaf.paths)), escape(show_format(leaf.format)), *numbers)
        table.add_section()
        nbytes = sum(leaf.nbytes for leaf in self.leaves)
        totals = (f"{self.bits:.3f}", show_bytes(nbytes), f"{self.increase:.3e}")
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
        """Plots the bits per weight of each leaf as a bar, coloured by format. Returns Matplotlib's axes."""
        names = [leaf.group or leaf.paths[0] for leaf in self.leaves]
        formats = [show_format(leaf.format) for leaf in self.leaves]
        labels = (f"A format for each weight, at most {self.target_bits:g} bits on average", "bits per weight")
        return draw_bars(ax, names, [leaf.bits for leaf in self.leaves], labels, formats)


def plan_bits(model: PyTree, sensitivities: SensitivityReport, target_bits: float | int = 4.5) -> BitPlan:
    """Chooses a format for each leaf that minimises the increase of the loss within a budget of average bits.

    Assumes that the increases of single leaves add up, and finds the mix with the least sum within the budget by
    dynamic programming (the multiple-choice knapsack problem). The result is optimal if 32768 steps can count the
    budget exactly; otherwise it rounds bytes up to steps of 1/32768 of the budget, and spends the rest greedily. Counts
    the stored bytes, including scales and padding. A leaf may also stay in float, without loss.

    !!! Example

        ```python
        report = eqq.analysis.sensitivity(model, loss, batch, ("int2", "nf4", "int8"))
        plan = eqq.analysis.plan_bits(model, report, target_bits=4.5)
        print(plan)
        model = eqq.quantize_tree(model, plan)
        ```

    **Arguments:**

    - `model`: the model that the sensitivities were measured on.
    - `sensitivities`: the report that [`eqquant.analysis.sensitivity`][] returned.
    - `target_bits`: the largest allowed average of bits per weight, including scales, over the measured leaves.

    **Returns:**

    A plan: a mapping from paths to formats, or `None` for float. Pass it to [`eqquant.quantize_tree`][], with the same
    `where` and `axis` as to `sensitivity`. It prints as a table. If the whole model fits the budget in float, the plan
    quantizes nothing, and `quantize_tree` raises.

    **Raises:**

    `TypeError` if `sensitivities` is not such a report; `ValueError` if a leaf is not in the model or has another shape
    or dtype there, if `target_bits` is NaN or infinite, or if no mix fits the budget: the message gives the range.
    """
    if not isinstance(sensitivities, SensitivityReport):
        raise TypeError(
            "`sensitivities` must be what `eqq.analysis.sensitivity` returned. Got "
            f"{sensitivities!r:.60}. Measure first: `sensitivity(model, loss, batch)`."
        )
    if not math.isfinite(target_bits):
        raise ValueError(f"`target_bits` must be finite. Got {target_bits}. With 32, float32 weights stay in float.")
    _check_leaves(model, sensitivities)
    leaves = sensitivities.leaves
    options = [_options(leaf, sensitivities.loss) for leaf in leaves]
    costs, losses = ([np.array([option[n] for option in offered]) for offered in options] for n in (1, 2))
    size = sum(leaf.size for leaf in leaves)
    budget = math.floor(target_bits * size / 8 + 1e-6)
    least, most = (8 * sum(int(pick(cost)) for cost in costs) / size for pick in (np.min, np.max))
    if budget < sum(int(cost.min()) for cost in costs):
        raise ValueError(
            f"`target_bits` must be within reach of the formats that were measured, from {least:.3f} to {most:.3f} "
            f"bits per weight. Got {target_bits}. Raise it, or measure smaller formats, for instance `eqq.Binary()`."
        )
    chosen = choose(costs, losses, budget)
    rows = [
        PlannedLeaf(leaf.paths, leaf.shape, *offered[pick], leaf.arrays, leaf.group)
        for leaf, offered, pick in zip(leaves, options, chosen, strict=True)
    ]
    return BitPlan(tuple(rows), float(target_bits))


def _options(leaf: LeafSensitivity, base: float) -> list[tuple[AbstractFormat | Use | None, int, float]]:
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
