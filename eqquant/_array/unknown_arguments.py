"""Errors for arguments that go by another name elsewhere."""

import functools as ft
from collections.abc import Callable
from typing import Any, TypeVar


_Function = TypeVar("_Function", bound=Callable[..., Any])


def explain_unknown(**remedies: str) -> Callable[[_Function], _Function]:
    """Has a function say what to write in the place of arguments that it does not have."""

    def decorator(function: _Function) -> _Function:
        @ft.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & remedies.keys():
                raise TypeError(f"`{function.__name__}` has no argument `{name}`: {remedies[name]}.")
            return function(*args, **kwargs)

        return call  # pyright: ignore[reportReturnType]

    return decorator
