"""Error messages that suggest a fix: the nearest known name, or the equivalent of another library's argument."""

import difflib
import functools as ft
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar


F = TypeVar("F", bound=Callable)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "Did you mean ...?" with the nearest known name, or an empty string if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def teach_keywords(**remedies: str) -> Callable[[F], F]:
    """Decorates a function: an unknown keyword raises a `TypeError` that says what to write instead.

    `remedies` maps keywords of other libraries to the advice that the error gives. For any other keyword, the error
    lists all arguments and suggests the nearest.
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
