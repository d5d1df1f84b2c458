"""Tables on standard output, and a progress bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    import eqquant as eqq


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int]) -> None:
    """Prints a table, as wide as the terminal; where there is none, as wide as it is."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers)
    for n, column in enumerate(table.columns):
        column.overflow = "fold"
        if n in numbers:
            column.justify, column.no_wrap = "right", True
    for row in rows:
        table.add_row(*map(Text, row))
    width = None if sys.stdout.isatty() else Console(width=10_000).measure(table).maximum
    Console(width=width).print(table)


class Progress:
    """A bar on standard error, where that is a terminal. Remembers the array of largest error."""

    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        self._shows = console.is_terminal
        self._bar = Bar(console=console, transient=True)
        self._task = self._bar.add_task(what, total=total)
        self.worst: tuple[float, str] | None = None

    def __enter__(self) -> Progress:
        if self._shows:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shows:
            self._bar.stop()

    def counted(self, name: str, before: Any, after: Any) -> None:
        """Advances the bar."""
        del name, before, after
        self._bar.advance(self._task)

    def measured(self, name: str, before: Any, after: Any) -> None:
        """Advances the bar, and measures the error of an array that was quantized."""
        import eqquant as eqq

        if eqq.is_quantized(after) and before is not after:
            error = eqq.analysis.analyze_error(before, after)
            self.worst = max(self.worst or (0.0, ""), (error.relative_l2, name))
        self.counted(name, before, after)

    def headline(self, before: int, report: eqq.TreeReport) -> str:  # pyright: ignore
        """Returns one line: the sizes, bits per weight, and the array of largest error."""
        size = f"{before / 1e6:,.1f} MB -> {report.nbytes / 1e6:,.1f} MB, {before / max(report.nbytes, 1):.1f} times"
        line = f"{size} smaller, {report.bits:.2f} bits per weight"
        if self.worst is not None:
            line += f"; largest relative error {self.worst[0]:.2%}, in {self.worst[1]}"
        return line
