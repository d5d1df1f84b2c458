"""Searches for the best scale of each block.

Everything is in units of the scale that the format chooses, so huge and tiny weights do not overflow. A candidate is a
factor of that scale.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._formats.base import (
    AbstractFormat,
    AbstractOffsetFormat,
    AbstractVectorFormat,
    Blocks,
    find_levels,
    has_zero_points,
    round_to_levels,
    Scales,
)
from .._numerics.batching import Index
from .._numerics.blocks import divide, minmax
from .._numerics.scale_bits import round_scale


# A candidate and its error, by block.
Candidate = TypeVar("Candidate")
Best = tuple[Candidate, Array]
Error = Callable[[Array], Array]

# With many codes the error changes fast with the scale, and its minimum is near one; with few codes it changes slowly,
# and its minimum is far below one. Clipping to less than a sixteenth of the range never helps in blocks of a practical
# size. Factors above one suit formats whose own scale clips: powers of two, mean magnitudes.
_FACTORS = np.concatenate(
    [np.linspace(2.0, 1.2, 5), np.linspace(1.1, 0.7, 48, endpoint=False), np.geomspace(0.7, 1 / 16, 24)]
).astype(np.float32)
_REFITS = 2
# A vector format chooses a scale near the best one, and each of its errors takes a search.
_FACTORS_OF_VECTORS = np.geomspace(0.6, 1.6, 13).astype(np.float32)
# The shares of a range's excess length to cut off below; the rest is cut off above.
_CUT_BELOW = np.linspace(0, 1, 5, dtype=np.float32)


class Search(NamedTuple):
    """Blocks in units of their scale; computes their levels and errors for any factor of it.

    `weights` say how much the squared error of each value counts; `None` if all count alike.
    """

    units: Blocks
    scale: Scales
    format: AbstractFormat
    weights: Blocks | None = None
    offset: Scales | None = None  # stays as the format chooses it

    def weigh(self, x: Array) -> Array:
        return x if self.weights is None else x * self.weights

    def levels(self, factor: Array) -> Array:
        """Returns the quantized values, in units of the scale times `factor`."""
        values = self.units / factor[..., None]
        if not has_zero_points(self.format):
            return round_to_levels(self.format, values, self.weights)
        return self._levels_about(values, self._zero_point(values))

    def errors(self, factor: Array) -> Array:
        return self.units - self.levels(factor) * factor[..., None]

    def round_factor(self, factor: Array) -> Array:
        """Rounds the factor so that its scale can be stored: to a power of two, for instance."""
        if self.format.scale_dtype == "float32" or self.format.scale_format is not None:
            return factor
        stored = round_scale(self.scale * factor, self.format.scale_dtype)
        usable = (self.scale != 0) & (stored != 0)
        return jnp.where(usable, stored / jnp.where(usable, self.scale, 1), factor)

    def result(self, factor: Array) -> tuple[Array, Array | None]:
        """Returns the scales, and their best zero points, or the offsets."""
        # A very large scale is kept: a larger one might decode to infinity.
        levels, used = find_levels(self.format)
        limit = float(jnp.finfo(jnp.float32).max) / max(2**9, 2 * float(np.abs(levels[used]).max()))
        scale = jnp.where(jnp.abs(self.scale) < limit, self.scale * factor, self.scale)
        if not has_zero_points(self.format):
            return scale, self.offset
        ratio = divide(scale, self.scale)
        return scale, self._zero_point(self.units / jnp.where(ratio > 0, ratio, 1)[..., None]).astype(jnp.uint8)

    def _levels_about(self, values: Array, zero_point: Array) -> Array:
        zero = zero_point[..., None]
        return self.format.decode(self.format.encode(values + zero)) - zero

    def _zero_point(self, values: Array) -> Array:
        """Returns the zero point of least squared error, also for values beyond the levels.

        The levels are `0 ... top`, minus the zero point.
        """
        top = 2**self.format.bits - 1
        low, high = minmax(values)
        excess = jnp.maximum(high - low - top, 0)
        candidate = lambda cut: jnp.clip(jnp.round(-low - cut * excess), 0, top)
        error = lambda zero: jnp.sum(self.weigh(jnp.square(values - self._levels_about(values, zero))), axis=-1)
        return _least(error, candidate(0.0), candidate, _CUT_BELOW[1:])[0]


def start_search(blocks: Blocks, format: AbstractFormat, weights: Blocks | None = None) -> Search:
    """Returns blocks in units of the scales that the format chooses."""
    scale, offset = format.choose_scale(blocks), None
    if isinstance(format, AbstractOffsetFormat):
        offset = format.choose_offset(blocks, scale)
        blocks = blocks - offset[..., None]
    return Search(divide(blocks, jnp.broadcast_to(scale[..., None], blocks.shape)), scale, format, weights, offset)


def search_least_squares(search: Search) -> Array:
    """Returns the factor of least squared error of each block.

    The best of a grid, then fitted to its codes.
    """
    squared = lambda factor: jnp.sum(search.weigh(jnp.square(search.errors(factor))), axis=-1)
    one = jnp.ones_like(search.scale)
    factors = _FACTORS_OF_VECTORS if isinstance(search.format, AbstractVectorFormat) else _FACTORS
    best = _least(squared, one, lambda step: search.round_factor(jnp.full_like(one, step)), factors)

    def refit(_: Index, best: Best[Array]) -> Best[Array]:
        levels = search.levels(best[0])
        factor = search.round_factor(fit(search.units, levels, best[0], search.weigh(levels)))
        return keep_better(best, factor, squared(factor))

    return jax.lax.fori_loop(0, _REFITS, refit, best)[0]


def keep_better(best: Best[Candidate], candidate: Candidate, error: Array) -> Best[Candidate]:
    """Returns the candidate and its error where that error is lower, and the best elsewhere.

    Candidates may be trees. All arrays begin with the axes of the errors.
    """
    improved = error < best[1]  # never for a NaN
    where = lambda new, old: jnp.where(improved.reshape(*improved.shape, *[1] * (new.ndim - improved.ndim)), new, old)
    return jax.tree.map(where, candidate, best[0]), where(error, best[1])


def fit(units: Array, levels: Array, factor: Array, weighted: Array | None = None) -> Array:
    """Returns the factor of least squared error for given levels.

    Keeps the old one if the new one is not positive.

    `weighted` are the levels times the weights of their errors, if these have weights.
    """
    weighted = levels if weighted is None else weighted
    power = jnp.sum(levels * weighted, axis=-1)
    fitted = jnp.sum(weighted * units, axis=-1) / jnp.where(power > 0, power, 1)
    return jnp.where(fitted > 0, fitted, factor)


def _least(error: Error, start: Array, candidate: Callable[[Array], Array], steps: np.ndarray) -> Best[Array]:
    """Returns the candidate of least error for each block.

    Tries one at a time, to hold only one in memory.
    """

    def step(best: Best[Array], step: Array) -> tuple[Best[Array], None]:
        new = candidate(step)
        return keep_better(best, new, error(new)), None

    return jax.lax.scan(step, (start, error(start)), jnp.asarray(steps))[0]
