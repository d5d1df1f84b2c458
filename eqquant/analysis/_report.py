"""Helpers that the analyses share."""

from typing import Any

from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._tree.use import as_use, Use


def as_uses(formats: Any, method: AbstractMethod | None) -> tuple[Use, ...]:
    """Converts one or several formats to `Use`s, each with its own method or else the given one."""
    several = (formats,) if isinstance(formats, (AbstractFormat, str, type, Use)) else formats
    uses = [as_use(format) for format in several]
    if any(use.activations is not None for use in uses):
        raise ValueError(
            "`formats` must leave `activations` out: losses are measured with quantized weights alone. Got some. Pass "
            "them to `quantize_tree`."
        )
    return tuple(Use(use.format, method) if use.method is None else use for use in uses)


def show_format(format: AbstractFormat | Use | None) -> str:
    return "float" if format is None else repr(format)
