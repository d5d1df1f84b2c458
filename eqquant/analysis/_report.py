"""What every result of an analysis can do: print itself as a table, and become a dictionary or JSON."""

import abc
import dataclasses
from typing import Any

import numpy as np
from rich.table import Table

from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._report import as_json, as_text
from .._tree.use import as_use, Use


class Report(abc.ABC):
    """A result that prints as a table. Programs read its fields, or `to_dict()`, or `to_json()`."""

    @abc.abstractmethod
    def __rich__(self) -> Table:
        """The table that is printed."""

    def to_dict(self) -> dict[str, Any]:
        """Its fields as plain Python values; a format as what it prints."""
        return _plain(self)

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict()` as JSON. An infinity or a NaN, which JSON has no word for, becomes `null`."""
        return as_json(self.to_dict(), indent)

    def __str__(self) -> str:
        return as_text(self, 1000)  # as wide as the table wants to be: no name is cut

    __repr__ = __str__


def _plain(x: Any) -> Any:
    if isinstance(x, AbstractFormat):
        return repr(x)
    if dataclasses.is_dataclass(x):
        # A field that is not shown holds data for pictures, not results.
        return {field.name: _plain(getattr(x, field.name)) for field in dataclasses.fields(x) if field.repr}
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return [_plain(item) for item in x]
    return x.tolist() if isinstance(x, (np.ndarray, np.generic)) else x


def numbers_table(*headers: str, text: int = 1) -> Table:
    """A table whose first `text` columns are text, and whose others are numbers."""
    table = Table(*headers)
    for column in table.columns[:text]:
        column.overflow = "fold"  # in a narrow terminal a name takes several lines, and a number stays whole
    for column in table.columns[text:]:
        column.justify, column.no_wrap = "right", True
    return table


def as_uses(formats: Any, method: AbstractMethod | None) -> tuple[Use, ...]:
    """Several formats, or the one, each with the method that it names, or else the given one."""
    several = (formats,) if isinstance(formats, (AbstractFormat, str, type, Use)) else formats
    uses = [as_use(format) for format in several]
    return tuple(Use(use.format, method) if use.method is None else use for use in uses)


def show_format(format: AbstractFormat | Use | None) -> str:
    return "float" if format is None else repr(format)
