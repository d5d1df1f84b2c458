"""What the results of an analysis share beside `eqquant/_report.py`."""

from collections.abc import Sequence
from typing import Any

from .._formats.base import AbstractFormat
from .._tree.use import Use


def as_formats(formats: Any) -> Sequence[Any]:
    """Several formats: those given, or the one."""
    return (formats,) if isinstance(formats, (AbstractFormat, str, type, Use)) else formats


def show_format(format: AbstractFormat | Use | None) -> str:
    return "float" if format is None else repr(format)
