"""Checks of arguments and results against their annotations, made when a function is called for the first time."""

import functools as ft
import weakref
from collections.abc import Callable
from typing import Any

from beartype import beartype, BeartypeConf, BeartypeStrategy


# What makes the checks of each function of the package.
CHECKS = weakref.WeakSet[Callable[[], Callable[..., Any]]]()


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype`, which takes a millisecond for each function, but only for functions that are called."""
    checks = ft.cache(lambda: beartype(function, conf=BeartypeConf(strategy=BeartypeStrategy.On)))
    if function.__module__.startswith("eqquant."):
        CHECKS.add(checks)

    def check(*args: Any, **kwargs: Any) -> Any:
        return checks()(*args, **kwargs)

    return check
