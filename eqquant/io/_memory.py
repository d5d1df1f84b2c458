"""Memory for arrays that are read: copied once, by several threads.

JAX takes it over without another copy.
"""

import functools as ft
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike


# XLA on CPU takes over memory that starts at a multiple of this, and copies other memory.
_ALIGNMENT = 64
_PART = 4 * 2**20


@ft.cache
def _threads() -> ThreadPoolExecutor:
    """NumPy computes and copies without the lock of the interpreter."""
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "eqquant.io")


if os.name == "posix":
    os.register_at_fork(after_in_child=_threads.cache_clear)  # the child has no threads of its parent


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Returns memory that JAX on CPU can take over."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def in_threads(function: Callable[[int], None], starts: Iterable[int]) -> None:
    """Calls a function for each start, in several threads. Raises the first error."""
    starts = list(starts)
    for _ in _threads().map(function, starts) if len(starts) > 1 else map(function, starts):
        pass


def copy_in_parallel(view: np.ndarray) -> np.ndarray:
    """Copies a view of a file to memory of our own."""
    out = aligned_empty(view.shape, view.dtype)
    if not view.flags.c_contiguous or view.nbytes <= _PART:
        out[...] = view
        return out
    source, target = view.reshape(-1).view(np.uint8), out.reshape(-1).view(np.uint8)

    def copy(start: int) -> None:
        target[start : start + _PART] = source[start : start + _PART]

    in_threads(copy, range(0, source.size, _PART))
    return out


def to_jax(view: np.ndarray, sharding: NamedSharding | None = None) -> jax.Array | np.ndarray:
    """Copies a view of a file to a device, or each part of it to its device.

    Stays in NumPy if JAX is not set to hold the dtype, such as float64.
    """
    if jax.dtypes.canonicalize_dtype(view.dtype) != view.dtype:
        return np.array(view)
    if sharding is not None:
        return jax.make_array_from_callback(view.shape, sharding, lambda index: np.array(view[index]))
    return jax.device_put(copy_in_parallel(view))  # never the file's own memory, which another program may change
