"""Tables on standard output, a progress bar on standard error, and pictures."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast, TYPE_CHECKING


if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    from eqquant._tree.report import TreeReport
    from eqquant.analysis._error import Values


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], numeric: Collection[int]) -> None:
    """Prints a table, as wide as the terminal, or unlimited without a terminal."""
    from rich.console import Console
    from rich.text import Text

    from eqquant._report import Name, report_table

    table = report_table(*headers, text=len(headers))
    for n in numeric:
        table.columns[n].justify, table.columns[n].no_wrap = "right", True
    for name, *others in rows:
        table.add_row(Name(name), *map(Text, others))
    width = None if sys.stdout.isatty() else Console(width=10_000).measure(table).maximum
    Console(width=width).print(table)


def draw_errors(errors: Mapping[str, float]) -> Figure:
    """Draws a bar for each array: its relative error."""
    from eqquant.analysis._plots import make_axes

    axes = make_axes(None, (8.0, 1 + 0.2 * len(errors)))
    axes.barh(list(errors), list(errors.values()))
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.set_xlabel("relative error (L2)")
    return cast("Figure", axes.figure)


class Progress:
    """A progress bar on standard error, if it is a terminal. Records the array with the worst error."""

    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console

        from eqquant._tree.progress import show_progress

        console = Console(stderr=True)
        self._bar = show_progress(what, total, console.is_terminal, console=console, transient=True)
        self.worst: tuple[float, str] | None = None

    def __enter__(self) -> Progress:
        self._advance = self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def advance(self, *_: object) -> None:
        """Advances the bar, whatever array is done."""
        self._advance()

    def advance_and_measure(self, name: str, before: Values, after: Values) -> None:
        """Advances the bar, and measures the error of a quantized array."""
        import eqquant as eqq

        if eqq.is_quantized(after) and before is not after:
            error = eqq.analysis.analyze_error(before, after)
            self.worst = max(self.worst or (0.0, ""), (error.relative_l2, name))
        self.advance()

    def headline(self, before: int, report: TreeReport) -> str:
        """Returns one line: the sizes, bits per weight, and the array with the worst error."""
        from eqquant._report import show_change

        line = f"{show_change(before, report.nbytes)}, {report.bits:.2f} bits per weight"
        if self.worst is not None:
            line += f"; largest relative error {self.worst[0]:.2%}, in {self.worst[1]}"
        return line
