"""The report that `plan_tree` and `summary` return: a row for each array of a tree."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from .._formats.base import AbstractFormat
from .._report import as_plain, Name, Report, report_table, show_bytes, show_change


class LeafReport(NamedTuple):
    """A row of a `TreeReport`: one leaf of a tree.

    `format` is `None` for a leaf that is not quantized, and `reason` says why. `nbytes` are the stored bytes, and
    `dense_nbytes` the bytes of the same leaf in its logical dtype. `bits` are per value, including scales.
    `activations` is the format of activations, `None` for weight-only quantization.
    """

    derived = ("bits",)

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: AbstractFormat | None
    axis: int | tuple[int, ...] | None
    reason: str
    nbytes: int
    dense_nbytes: int
    activations: AbstractFormat | None = None

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / max(math.prod(self.shape), 1)

    @property
    def stored_as(self) -> str:
        """The format, with the format of activations if they are quantized; or the dtype."""
        if self.format is None:
            return self.dtype
        return repr(self.format) if self.activations is None else f"{self.format!r} x {self.activations!r}"

    def to_dict(self) -> dict[str, Any]:
        return as_plain(self)


@dataclasses.dataclass(frozen=True, repr=False)
class TreeReport(Report):
    """A report with a row for each array of a tree. Prints as a table.

    [`eqquant.plan_tree`][] and [`eqquant.summary`][] return it.

    - `leaves`: the rows, each with `path`, `shape`, `dtype`, `format`, `axis`, `reason`, `nbytes`, `dense_nbytes`,
        `activations` and `bits`.
    - `planned`: whether this is a plan, with nothing quantized yet.
    """

    derived: ClassVar[tuple[str, ...]] = ("nbytes", "dense_nbytes", "params", "bits", "quantized_bits")

    leaves: tuple[LeafReport, ...]
    planned: bool = False

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def dense_nbytes(self) -> int:
        return sum(leaf.dense_nbytes for leaf in self.leaves)

    @property
    def params(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in self.leaves)

    @property
    def bits(self) -> float:
        """Bits per value over the whole tree."""
        return _bits(self.leaves)

    @property
    def quantized_bits(self) -> float:
        """Bits per value over the quantized leaves, as in [`eqquant.analysis.plan_bits`][]."""
        return _bits([leaf for leaf in self.leaves if leaf.format is not None])

    def table(self, every_leaf: bool = False) -> Table:
        """Returns the table, for rich.

        **Arguments:**

        - `every_leaf`: whether each array gets its own row. Otherwise repeated layers share rows, such as
            `layers.*.weight (12)`, and so do small arrays that stay in float for the same reason, such as biases.
        """
        table = report_table("parameter", "stored as", "reason", "bits", "size", text=3)
        table.show_footer = True
        # Names matter most, so the other columns wrap first.
        for column, width in zip(table.columns[1:3], (22, 20), strict=True):
            column.max_width = width
        ordered = sorted(self.leaves, key=lambda leaf: leaf.format is None)  # quantized leaves first
        for name, rows in [(leaf.path, [leaf]) for leaf in ordered] if every_leaf else _group_rows(ordered):
            first = rows[0]
            stored = Name(first.stored_as)
            style = "dim" if first.format is None else None
            table.add_row(Name(name), stored, escape(first.reason), *_format_sizes(rows), style=style)
        quantized = sum(leaf.format is not None for leaf in self.leaves)
        footers = (f"{quantized} of {len(self.leaves)} quantized", "", "", *_format_sizes(self.leaves))
        for column, footer in zip(table.columns, footers, strict=True):
            column.footer = footer
        return table

    def __rich__(self) -> Group:
        if all(leaf.format is None for leaf in self.leaves):
            return Group(f"{show_bytes(self.nbytes)}, nothing is quantized", self.table())
        plan = "A plan, nothing is quantized yet:\n" if self.planned else ""
        return Group(
            f"{plan}{show_change(self.dense_nbytes, self.nbytes)}, {self.bits:.2f} bits per weight",
            self.table(),
            f"{self.quantized_bits:.3f} bits per weight in the quantized arrays, {self.bits:.3f} over all "
            f"{self.params:,} values.",
        )


def _format_sizes(leaves: Sequence[LeafReport]) -> tuple[str, str]:
    return f"{_bits(leaves):.2f}", show_bytes(sum(leaf.nbytes for leaf in leaves))


def _bits(leaves: Iterable[LeafReport]) -> float:
    leaves = list(leaves)
    return 8 * sum(leaf.nbytes for leaf in leaves) / max(sum(math.prod(leaf.shape) for leaf in leaves), 1)


def _group_rows(leaves: Sequence[LeafReport]) -> list[tuple[str, list[LeafReport]]]:
    """Returns groups of leaves with a name each: repeated layers, then small float arrays."""
    total = sum(leaf.dense_nbytes for leaf in leaves)
    layers, small = {}, {}
    for leaf in leaves:
        if leaf.format is None and leaf.nbytes <= total / 100:
            small.setdefault((leaf.dtype, leaf.reason), []).append(leaf)
        else:
            key = (_make_glob(leaf.path), leaf.shape, leaf.dtype, leaf.format, leaf.activations, leaf.reason)
            layers.setdefault(key, []).append(leaf)
    name = lambda group, many: group[0].path if len(group) == 1 else many
    return [
        *((name(group, f"{key[0]} ({len(group)})"), group) for key, group in layers.items()),
        *((name(group, f"{len(group)} arrays"), group) for group in small.values()),
    ]


def _make_glob(path: str) -> str:
    """Returns the path with `*` for the index of each layer."""
    return re.sub(r"(?<![^.\[])\d+(?![^.\]])", "*", path)
