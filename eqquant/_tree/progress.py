"""A progress bar over arrays."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress

from .._numerics.batching import watch_rows


@contextlib.contextmanager
def show_progress(
    description: str, total: int, shown: bool = True, *, console: Console | None = None, transient: bool = False
) -> Iterator[Callable[..., None]]:
    """Shows a bar, and yields a function `advance(arrays=1, description=None)`.

    The bar goes to standard error unless a console is given. Within an array it advances by the share of rows whose
    codes are found.
    """
    if not shown:
        yield lambda arrays=1, description=None: None
        return
    with Progress(console=console or Console(stderr=True), transient=transient) as bar:
        task = bar.add_task(description, total=total)

        def advance(arrays: float | int = 1, description: str | None = None) -> None:
            bar.update(task, completed=int(bar.tasks[0].completed) + arrays, description=description)

        with watch_rows(advance):
            yield advance
