"""What is in a tree, or would be: the table that `plan_tree` and `summary` print."""

import math
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from .._formats.base import AbstractFormat
from .._report import as_text


class LeafReport(NamedTuple):
    """What happens, or happened, to one leaf of a tree.

    `format` is `None` for a leaf that stays as it is, and `reason` says why. `nbytes` are the bytes that are stored,
    `dense_nbytes` what the same leaf takes in its logical dtype. `bits` are per value, scales included.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: AbstractFormat | None
    axis: int | tuple[int, ...] | None
    reason: str
    nbytes: int
    dense_nbytes: int

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / max(math.prod(self.shape), 1)

    def to_dict(self) -> dict[str, Any]:
        shown = None if self.format is None else repr(self.format)
        return {**self._asdict(), "format": shown, "bits": self.bits}


class TreeReport(NamedTuple):
    """What [`eqquant.plan_tree`][] would do, or [`eqquant.summary`][] found: a row per array. Prints as a table."""

    leaves: tuple[LeafReport, ...]

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
        """Bits per value, over the whole tree."""
        return 8 * self.nbytes / max(self.params, 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "leaves": [leaf.to_dict() for leaf in self.leaves],
            "nbytes": self.nbytes,
            "dense_nbytes": self.dense_nbytes,
            "params": self.params,
            "bits": self.bits,
        }

    def __rich__(self) -> Table:
        table = Table("leaf", "shape", "stored as", "bits", "bytes", "of", show_footer=True)
        for column in table.columns[3:]:
            column.justify = "right"
        for leaf in self.leaves:
            stored = repr(leaf.format) if leaf.format is not None else f"{leaf.dtype}: {leaf.reason}"
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            share = f"{leaf.nbytes / max(leaf.dense_nbytes, 1):.1%}"
            style = None if leaf.format is not None else "dim"
            table.add_row(
                escape(leaf.path), shape, escape(stored), f"{leaf.bits:.2f}", f"{leaf.nbytes:,}", share, style=style
            )
        quantized = sum(leaf.format is not None for leaf in self.leaves)
        footers = (
            f"{quantized} of {len(self.leaves)} quantized",
            f"{self.params:,} values",
            "",
            f"{self.bits:.2f}",
            f"{self.nbytes:,}",
            f"{self.nbytes / max(self.dense_nbytes, 1):.1%}",
        )
        for column, footer in zip(table.columns, footers, strict=True):
            column.footer = footer
        return table

    def __str__(self) -> str:
        return as_text(self, 140)

    __repr__ = __str__
