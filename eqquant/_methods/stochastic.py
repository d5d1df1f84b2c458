"""Stochastic rounding to the codes of any format."""

import functools as ft
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from .._formats.base import AbstractFormat, find_levels
from .._numerics.constants import compute_now


def move_stochastically(
    nearest: UInt8[Array, "*shape"],
    values: Float32[Array, "*shape"],
    format: AbstractFormat,
    uniform: Float32[Array, "*shape"],
) -> UInt8[Array, "*shape"]:
    """Rounds each value up or down at random, so that the mean decodes to the value.

    Works with every format.

    **Arguments:**

    - `nearest`: the codes that `format.encode` returns for the values. Values beyond the range keep them.
    - `values`: the values, divided by their scales.
    - `format`: the format of the codes.
    - `uniform`: random numbers from zero to one.

    **Returns:**

    `uint8` codes, of the shape of the values.
    """
    step = _even_levels(format)
    if step is not None:
        # On an even grid this takes one addition, and no lookup. A value that is a level keeps it.
        places = (values - step.low) / step.size
        between = (values > step.low) & (values < step.high) & (jnp.round(places) != places)
        dithered = format.encode(values + step.size * (uniform - jnp.float32(0.5)))
        return jnp.where(between, dithered, nearest)
    levels, below, above = (jnp.asarray(table) for table in _neighbors(format))
    near = levels[nearest]
    other = jnp.where(values > near, above[nearest], below[nearest])
    gap = levels[other] - near
    chance = jnp.where(gap != 0, (values - near) / jnp.where(gap != 0, gap, 1), 0)
    return jnp.where(uniform < chance, other, nearest)


class _EvenLevels(NamedTuple):
    size: np.float32
    low: np.float32
    high: np.float32


@ft.lru_cache
def _even_levels(format: AbstractFormat) -> _EvenLevels | None:
    """Returns the distance of neighboring levels and the ends, or `None` if distances differ."""
    levels, _, above = _neighbors(format)
    _, reached = find_levels(format)
    grid, last = np.unique(levels[reached]), np.argmax(np.where(reached, levels, -np.inf))
    gaps = np.diff(grid)
    # Each level but the last has a neighbor above, so values round in every gap.
    joined = np.count_nonzero(reached & (above != np.arange(len(above)))) == len(gaps) and above[last] == last
    even = joined and np.count_nonzero(reached) == len(grid) and (gaps == gaps[0]).all()
    return _EvenLevels(np.float32(gaps[0]), np.float32(grid[0]), np.float32(grid[-1])) if even else None


@ft.lru_cache
def _neighbors(format: AbstractFormat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the level of each code, and the codes of the next levels below and above.

    A code without such a neighbor is its own.

    Two levels are neighbors only if values between them encode to both: some formats never round to zero.
    """
    levels, reached = find_levels(format)
    levels = np.where(reached, levels, 0)
    codes = np.flatnonzero(reached)
    codes = codes[np.argsort(levels[codes], kind="stable")]
    codes = codes[np.append(True, np.diff(levels[codes]) > 0)]  # keep one of two zeros
    low, high = levels[codes[:-1]], levels[codes[1:]]
    with compute_now():
        nearest = lambda values: levels[np.asarray(format.encode(jnp.asarray(values, jnp.float32)))]
        near = (high - low) / 2**6
        both = (nearest(low + near) == low) & (nearest(high - near) == high)
    below = np.arange(len(levels), dtype=np.uint8)
    above = below.copy()
    above[codes[:-1]] = np.where(both, codes[1:], codes[:-1])
    below[codes[1:]] = np.where(both, codes[:-1], codes[1:])
    # Two codes of one level, such as zero and minus zero, have the same neighbors.
    for code in np.flatnonzero(reached):
        twin = codes[np.searchsorted(levels[codes], levels[code])]
        if twin != code:
            above[code], below[code] = above[twin], below[twin]
    return levels, below, above
