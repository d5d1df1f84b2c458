"""Docstrings that share parts."""

import inspect
from collections.abc import Callable
from typing import TypeVar


F = TypeVar("F", bound=Callable)


def fill_doc(**parts: str) -> Callable[[F], F]:
    """Puts shared parts into a docstring: `{name}` stands for the part of that name, on a line of its own.

    Since Python 3.13 a docstring comes without its indentation, and a string does not. So both lose theirs first.
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
