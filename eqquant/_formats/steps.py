"""Finds how a format encodes, for kernels, which know no formats."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np

from .._native.encoding import float_order, order_to_float, Steps
from .._numerics.constants import compute_now
from .base import AbstractFormat, AbstractVectorFormat, find_levels, is_ours


@ft.lru_cache
def find_steps(format: AbstractFormat) -> Steps | None:
    """Returns how a format encodes.

    `None` for a format of a user, which may do anything, and for a vector format.
    """
    if not is_ours(format, "encode") or isinstance(format, AbstractVectorFormat):
        return None
    with compute_now(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return _find(format)


def _find(format: AbstractFormat) -> Steps | None:
    encode = jax.jit(format.encode)
    # Every step is between two neighbors of these: of the levels and their midpoints, or of floats 1/128 apart.
    levels = np.sort(find_levels(format)[0])
    levels = levels[np.isfinite(levels)]
    ends = float_order(np.array([-np.inf, np.inf], np.float32))
    known = float_order(np.concatenate([levels, levels[1:] / 2 + levels[:-1] / 2, [0.0]]).astype(np.float32))
    grid = np.arange(int(ends[0]), int(ends[1]), 2**16, dtype=np.int64)
    order = np.unique(np.concatenate([grid, known, ends])).astype(np.int32)
    codes = np.asarray(encode(jnp.asarray(order_to_float(order))))
    at = np.flatnonzero(codes[1:] != codes[:-1])
    if len(at) > 256:
        return None
    low, high, found = order[at].astype(np.int64), order[at + 1].astype(np.int64), codes[at + 1]
    padded = order.copy()  # of one shape, so that `encode` compiles once
    while (high - low > 1).any():
        middle = (low + high) // 2
        padded[: len(at)] = middle
        is_above = np.asarray(encode(jnp.asarray(order_to_float(padded))))[: len(at)] == found
        low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
    nan = int(np.asarray(encode(np.full(order.shape, np.nan, np.float32)))[0])
    steps = Steps(high.astype(np.int32), np.concatenate([codes[:1], found]).astype(np.int32), nan)
    return _find_rule(steps, format.bits)


def _find_rule(steps: Steps, bits: int) -> Steps:
    """Returns steps with a rule that gives the same codes, if there is one."""
    top = 2**bits - 1
    if not np.array_equal(steps.codes, np.arange(steps.codes[0], steps.codes[-1] + 1)) or steps.codes[-1] != top:
        return steps
    at, below = order_to_float(steps.thresholds), order_to_float(steps.thresholds - 1)
    for bias in (0.0, 2.0 ** (bits - 1)):
        even = lambda x, bias=bias: np.clip(np.rint(x), -bias, top - bias) + bias
        up = lambda x, bias=bias: np.clip(np.trunc(x + np.float32(bias + 0.5)), 0, top)
        for rule, found, added in (("even", even, bias), ("up", up, bias + 0.5)):
            same = np.array_equal(found(at), steps.codes[1:]) and np.array_equal(found(below), steps.codes[:-1])
            if same and steps.codes[0] == 0:
                return steps._replace(rule=rule, bias=added)
    return steps
