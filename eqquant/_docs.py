"""Shares text between docstrings."""

import inspect
from collections.abc import Callable
from typing import TypeVar


F = TypeVar("F", bound=Callable)


def fill_doc(**parts: str) -> Callable[[F], F]:
    """Fills the placeholders of a docstring: each `{name}`, on its own line, becomes the part of that name.

    Python 3.13 strips the indentation of docstrings, but not of other strings, so this strips it from both first.
    """

    def fill(function: F) -> F:
        doc = inspect.cleandoc(function.__doc__ or "")
        for name, part in parts.items():
            if f"{{{name}}}" not in doc:
                raise ValueError(f"The docstring of `{function.__name__}` must have a place for `{name}`. Got none.")
            doc = doc.replace(f"{{{name}}}", inspect.cleandoc(part))
        function.__doc__ = doc
        return function

    return fill
