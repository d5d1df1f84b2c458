"""Calls a function with every weight that is dequantized whole: what `no_dense` refuses."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from .contraction import AbstractOperand


_refuse: ContextVar[Callable[[AbstractOperand], None] | None] = ContextVar("refuse", default=None)


def check_dense(q: AbstractOperand) -> None:
    """Reports an array that is about to be dequantized, unless it is a row, to `refuse_dense`."""
    refuse = _refuse.get()
    if refuse is not None and sum(length != 1 for length in q.shape) > 1:
        refuse(q)


@contextlib.contextmanager
def refuse_dense(refuse: Callable[[AbstractOperand], None] | None) -> Iterator[None]:
    """Calls `refuse` with every array that is dequantized inside; `None` allows all."""
    token = _refuse.set(refuse)
    try:
        yield
    finally:
        _refuse.reset(token)


def allow_dense() -> contextlib.AbstractContextManager[None]:
    """Allows dequantization inside `refuse_dense`.

    For activations, scales, rows of a lookup, and weights in an implementation of the product.
    """
    return refuse_dense(None)
