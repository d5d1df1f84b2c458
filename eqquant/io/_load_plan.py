"""The report of `eqq.io.plan_load`."""

import dataclasses

from rich.console import Group
from rich.markup import escape

from .._formats.base import AbstractFormat
from .._report import Name, Report, report_table
from .._tree.leaves import abbreviate_list


@dataclasses.dataclass(frozen=True)
class LoadRow:
    """A row of a `LoadPlan`: a leaf of the model, and the arrays that it is made of.

    `how` describes their changes, and `problem` says why the leaf cannot be loaded.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: AbstractFormat | None
    sources: tuple[str, ...]
    how: str
    problem: str | None


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LoadPlan(Report):
    """The plan of [`eqquant.io.plan_load`][]: the arrays that become each leaf.

    Prints as a table.

    - `rows`: the leaves, in the order of the model.
    - `left_out`: arrays of the checkpoint that a rule leaves out, with `None`.
    - `unused`: arrays that no rule names: a problem.
    - `kept`: leaves that keep the values of the model.
    - `problems`: why the checkpoint cannot be loaded; empty if it can.
    - `idle`: rules that match no array. Ready names have rules for arrays of some models only, so it is no problem.
    """

    rows: tuple[LoadRow, ...]
    left_out: tuple[str, ...]
    unused: tuple[str, ...]
    kept: tuple[str, ...]
    problems: tuple[str, ...]
    idle: tuple[str, ...] = ()

    def __rich__(self) -> Group:
        table = report_table("leaf", "shape", "becomes", "from", "on the way", text=5)
        for row in self.rows:
            becomes = row.dtype if row.format is None else repr(row.format)
            more = f" and {len(row.sources) - 3} more" if len(row.sources) > 3 else ""
            shape = " x ".join(map(str, row.shape)) or "scalar"
            style = "red" if row.problem else "dim" if row.format is None else None
            sources = Name(", ".join(row.sources[:3]) + more)
            table.add_row(Name(row.path), shape, escape(becomes), sources, escape(row.problem or row.how), style=style)
        used = sum(len(row.sources) for row in self.rows)
        lines = [f"{len(self.rows)} leaves from {used} arrays"]
        notes = {"left out": self.left_out, "kept from the model": self.kept, "unused": self.unused}
        for what, paths in {**notes, "rules that match nothing": self.idle}.items():
            if paths:
                lines.append(escape(f"{len(paths)} {what}: {abbreviate_list(paths)}"))
        lines += [escape(f"Problem: {problem}") for problem in self.problems]
        return Group(*lines, table)
