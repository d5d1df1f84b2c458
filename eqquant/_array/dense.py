"""Which decoding of weights `no_dense` refuses, and which it allows."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from .contraction import AbstractOperand


_refuse: ContextVar[Callable[[AbstractOperand], None] | None] = ContextVar("refuse", default=None)


def check_dense(q: AbstractOperand) -> None:
    """Tells `refuse_dense` of an array that is about to be decoded.

    Inside it, more than a row goes to the function given there.
    """
    refuse = _refuse.get()
    if refuse is not None and sum(length != 1 for length in q.shape) > 1:
        refuse(q)


@contextlib.contextmanager
def refuse_dense(refuse: Callable[[AbstractOperand], None] | None) -> Iterator[None]:
    """Calls a function with every array that is decoded whole, or none."""
    token = _refuse.set(refuse)
    try:
        yield
    finally:
        _refuse.reset(token)


def allow_dense() -> contextlib.AbstractContextManager[None]:
    """Allows decoding inside `refuse_dense`.

    Use it to decode activations, scales, rows of a lookup, and weights in an implementation of the product.
    """
    return refuse_dense(None)
