"""Maps functions over batch axes, and computes chunks of rows one after the other."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._types import PyTree


T = TypeVar("T")
Index = int | Int[Array, ""]


def vmap_leading(function: Callable[..., T], axes: int) -> Callable[..., T]:
    """Maps a function over so many leading axes of all its arguments."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function


def map_chunks(function: Callable[..., T], chunk: int | None, *arrays: PyTree) -> T:
    """Returns `function(0, *arrays)`, computed a chunk of rows at a time.

    A chunk is `function(first_row, *rows_of_arrays)`.

    All arrays share their batch axes; a row is the last axis. The first argument is an array. The last chunk overlaps
    the one before it.
    """
    batch = arrays[0].shape[:-1]
    rows = math.prod(batch)
    if chunk is None or rows <= chunk:
        return function(0, *arrays)
    flat = jax.tree.map(lambda a: a.reshape(rows, a.shape[-1]), arrays)

    def compute(n: Index) -> tuple[Array, T]:
        start = jnp.minimum(n * chunk, rows - chunk)
        return start, function(start, *jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, chunk), flat))

    def write(n: Index, done: T) -> T:
        start, part = compute(n)
        return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, 0), done, part)

    part = jax.eval_shape(lambda: compute(0)[1])
    empty = jax.tree.map(lambda a: jnp.zeros((rows, *a.shape[1:]), a.dtype), part)
    done = jax.lax.fori_loop(0, -(-rows // chunk), write, empty)
    return jax.tree.map(lambda a: a.reshape(*batch, a.shape[-1]), done)


# Progress

_watchers: list[Callable[[float], object]] = []


@contextlib.contextmanager
def watch_rows(report: Callable[[float], object]) -> Iterator[None]:
    """Calls `report` with the share of rows that are done, while an array is quantized."""
    _watchers.append(report)
    try:
        yield
    finally:
        jax.effects_barrier()
        _watchers.remove(report)


def is_watched() -> bool:
    """Returns whether a program that is traced now reports its rows."""
    return bool(_watchers)


def report_row(row: Index, rows: int) -> None:
    """Reports that a loop over rows has come to `row`, when the program runs."""
    if is_watched() and not isinstance(row, int):
        jax.debug.callback(_report, row, rows)


def _report(row: Array, rows: Array) -> None:
    for report in _watchers[-1:]:
        report(int(row) / int(rows))
