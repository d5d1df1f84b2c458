"""The base class of reports: printed as a table, or converted to a dictionary or JSON."""

import abc
import dataclasses
import io
import json
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text


WIDTH = 80


def escape_text(text: str) -> str:
    """Returns text with control and unprintable characters escaped, as in its `repr`."""
    return text if text.isprintable() else repr(text)[1:-1]


class Name(Text):
    """A cell of a table with names or formats, which folds if it does not fit."""

    def __init__(self, name: str) -> None:
        super().__init__(escape_text(name), overflow="fold")


class Report(abc.ABC):
    """A result that prints as a table. Programs read its fields, `to_dict()` or `to_json()`."""

    # Properties that `to_dict()` includes besides the fields; `"best.name"` reads an attribute of a property.
    derived: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def __rich__(self) -> RenderableType:
        """Returns the table (or other rich renderable) that the report prints."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain Python values; a format becomes its `repr`."""
        return as_plain(self)

    def to_json(self, indent: int | None = None) -> str:
        """Returns `to_dict()` as JSON, with `null` for infinity and NaN."""
        return json.dumps(_replace_not_finite(self.to_dict()), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        console = _console(self)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Returns the HTML that a notebook displays."""
        console = _console(self, record=True, file=io.StringIO(), force_jupyter=False)
        console.print(self)
        style = "line-height: normal; font-family: monospace; white-space: pre; overflow-x: auto"
        return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def _console(report: Report, **kwargs: Any) -> Console:
    return Console(width=max(WIDTH, _find_min_width(report.__rich__())), **kwargs)


def _find_min_width(renderable: RenderableType) -> int:
    """Returns the smallest width that truncates no number.

    Names fold into at least 16 columns, and text into 12.
    """
    if isinstance(renderable, Group):
        return max(map(_find_min_width, renderable.renderables))
    if not isinstance(renderable, Table):
        return 0

    def cell_width(cell: RenderableType, folds: bool) -> int:
        width = cell.cell_len if isinstance(cell, Text) else Text.from_markup(str(cell)).cell_len
        return min(width, 16) if isinstance(cell, Name) else min(width, 12) if folds else width

    widths = [
        max(cell_width(cell, not c.no_wrap) for cell in (c.header, *c.cells, c.footer)) for c in renderable.columns
    ]
    return sum(widths) + 3 * (len(widths) - 1)


def as_plain(x: Any) -> Any:
    """Returns a value as plain Python: dictionaries, lists, numbers, `repr`s of formats."""
    if dataclasses.is_dataclass(x) and not isinstance(x, eqx.Module):
        # Fields with `repr=False` hold the data of plots, not results.
        return _plain_attributes(x, [f.name for f in dataclasses.fields(x) if f.repr])
    if isinstance(x, tuple) and (names := getattr(type(x), "_fields", None)) is not None:  # a named tuple
        return _plain_attributes(x, names)
    if isinstance(x, np.dtype):
        return x.name
    if isinstance(x, dict):
        return {key: as_plain(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return [as_plain(item) for item in x]
    if isinstance(x, (np.ndarray, np.generic)):
        return x.tolist()
    return x if x is None or isinstance(x, (str, int, float)) else repr(x)


def _plain_attributes(x: Any, names: Sequence[str]) -> dict[str, Any]:
    derived = getattr(type(x), "derived", ())
    return {name.partition(".")[0]: as_plain(operator.attrgetter(name)(x)) for name in (*names, *derived)}


def _replace_not_finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _replace_not_finite(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_replace_not_finite(item) for item in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def show_bytes(nbytes: int) -> str:
    """Returns a size as text: 512 B, 38.40 KB, 2.68 MB. A kilobyte is 1000 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:,.{2 if nbytes < 100 * size else 0}f} {unit}"
    return f"{nbytes:.0f} B"


def show_change(before: int, after: int) -> str:
    """Returns two sizes as text, and their ratio."""
    ratio, word = (before / max(after, 1), "smaller") if after <= before else (after / max(before, 1), "larger")
    share = abs(after - before) / max(before, 1)
    if ratio >= 1.05:
        change = f"{ratio:.1f} times {word}"
    else:
        change = f"{share:.1%} {word}" if share >= 5e-4 else "the same size"
    return f"{show_bytes(before)} -> {show_bytes(after)}, {change}"


def report_table(*headers: str, text: int = 1) -> Table:
    """Returns a table with `text` columns of text, which wraps, and then columns of numbers."""
    table = Table(*headers, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in table.columns[:text]:
        column.overflow = "fold"
    for column in table.columns[text:]:
        column.justify, column.no_wrap = "right", True
    return table
