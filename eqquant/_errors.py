"""Errors that teach: names that were meant, and arguments that other libraries have."""

import difflib
import functools as ft
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar


F = TypeVar("F", bound=Callable)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Asks after the nearest known name, to end a message with; says nothing if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def teach_keywords(**remedies: str) -> Callable[[F], F]:
    """Makes a call with a keyword that a function lacks say what to write instead.

    `remedies` has an answer for each keyword that users of other libraries try. For any other, the error names the
    nearest argument, and all of them.
    """

    def decorate(function: F) -> F:
        known = [name for name, p in inspect.signature(function).parameters.items() if p.kind != p.VAR_KEYWORD]

        @ft.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in known:
                    remedy = remedies.get(name) or f"It takes {', '.join(known)}. {did_you_mean(name, known)}".rstrip()
                    raise TypeError(f"`{function.__name__}` has no argument `{name}`. {remedy}")
            return function(*args, **kwargs)

        return wrapper  # pyright: ignore[reportReturnType]

    return decorate
