"""A histogram with logarithmic bins, in bounded memory, for percentiles and clipping.

The leading bits of a float32 (the exponent and the first six bits of the mantissa) are the bin index: 64 bins per
octave. The sketch covers the 24 octaves below the largest magnitude, on both sides of zero, and counts smaller values
as zero. The counts depend only on the data, not on the order of updates and merges.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float32, Int32, UInt32

from ._blocks import Blocks
from ._calibrator import AbstractCalibrator, find_extremes
from ._uint64 import UInt64


_MANTISSA = 6
_PER_OCTAVE = 2**_MANTISSA
_OCTAVES = 24
_BINS_PER_SIDE = _PER_OCTAVE * _OCTAVES  # bins on one side of zero
_SHIFT = 23 - _MANTISSA


class Sketch(eqx.Module):
    """Counts by magnitude, exact up to 2**64 values per block.

    - `counts`: the count of each bin, from the most negative to the most positive, with zero in the middle.
    - `top`: the biased float32 exponent of the largest magnitude.
    - `low`, `high`: the exact extremes.
    """

    counts: UInt64
    top: Int32[Array, "*scales"]
    low: Float32[Array, "*scales"]
    high: Float32[Array, "*scales"]

    def __init__(self, scale_shape: tuple[int, ...]) -> None:
        self.counts = UInt64.of(jnp.zeros((*scale_shape, 2 * _BINS_PER_SIDE + 1), jnp.uint32))
        self.top = jnp.zeros(scale_shape, jnp.int32)
        self.low = jnp.full(scale_shape, jnp.inf, jnp.float32)
        self.high = jnp.full(scale_shape, -jnp.inf, jnp.float32)

    def add(self, x: Float32[Array, "..."], blocks: Blocks) -> "Sketch":
        """Returns the sketch after more data."""
        low, high = find_extremes(x, blocks)
        top = jnp.maximum(self.top, _to_bits(jnp.maximum(jnp.abs(low), jnp.abs(high))) >> 23)
        new = UInt64.of(blocks.map(lambda values, top: _count_bins(_find_bins(values, top[..., None])), x, top))
        return self._update(self._rescale_counts(top) + new, top, low, high)

    def merge(self, other: "Sketch") -> "Sketch":
        """Returns one sketch of the data of two."""
        top = jnp.maximum(self.top, other.top)
        return self._update(self._rescale_counts(top) + other._rescale_counts(top), top, other.low, other.high)

    def edges(self) -> Float32[Array, "*scales edges"]:
        """Returns the edges of the bins, clipped to the range of the data."""
        level = _outer_add((self.top + 1) * _PER_OCTAVE - _BINS_PER_SIDE, _BINS_PER_SIDE + 1)
        amax = jnp.maximum(jnp.abs(self.low), jnp.abs(self.high))[..., None]
        # The edge above the largest floats would be infinite, or have the bits of a NaN.
        edges = jax.lax.bitcast_convert_type(jnp.clip(level, 0, 255 * _PER_OCTAVE - 1) << _SHIFT, jnp.float32)
        edges = jnp.where(level < 255 * _PER_OCTAVE, edges, amax)
        edges = jnp.concatenate([-edges[..., ::-1], edges], axis=-1)
        return jnp.clip(edges, self.low[..., None], self.high[..., None])

    def quantile(self, q: float) -> Float32[Array, "*scales"]:
        """Returns the quantile `q` of the data, to within 1/64 of its magnitude."""
        below = self.counts.cumsum().to_float()
        total = below[..., -1]
        rank = jnp.clip(jnp.floor(q * total), 0, jnp.maximum(total - 1, 0))
        index = jnp.sum(below <= rank[..., None], axis=-1, keepdims=True)
        take = lambda x: jnp.take_along_axis(x, jnp.minimum(index, x.shape[-1] - 1), axis=-1)[..., 0]
        count, edges = take(self.counts.to_float()), self.edges()
        inside = rank - (take(below) - count) + 0.5
        left, right = take(edges[..., :-1]), take(edges[..., 1:])
        return left + (right - left) * jnp.clip(inside / jnp.maximum(count, 1), 0, 1)

    def _rescale_counts(self, top: Int32[Array, "*scales"]) -> UInt64:
        """Returns the counts with bins relative to `top`, an exponent not below `self.top`."""
        step = (top - self.top) * _PER_OCTAVE
        source = _outer_add(step, _BINS_PER_SIDE)
        # From zero outwards, on either side. Counts that shift below the lowest bin are added to zero.
        negative = jtu.tree_map(lambda c: c[..., _BINS_PER_SIDE - 1 :: -1], self.counts)
        positive = jtu.tree_map(lambda c: c[..., _BINS_PER_SIDE + 1 :], self.counts)
        zero = jtu.tree_map(lambda c: c[..., _BINS_PER_SIDE : _BINS_PER_SIDE + 1], self.counts)
        lost = _outer_add(jnp.zeros_like(step), _BINS_PER_SIDE) < step[..., None]

        def shift(side: UInt64) -> UInt64:
            take = lambda c: jnp.take_along_axis(c, jnp.minimum(source, _BINS_PER_SIDE - 1), axis=-1)
            return jtu.tree_map(lambda c: jnp.where(source < _BINS_PER_SIDE, take(c), jnp.uint32(0)), side)

        for side in (negative, positive):
            zero = zero + jtu.tree_map(lambda c: jnp.where(lost, c, jnp.uint32(0)), side).sum()
        concatenate = lambda down, zero, up: jnp.concatenate([down[..., ::-1], zero, up], axis=-1)
        return jtu.tree_map(concatenate, shift(negative), zero, shift(positive))

    def _update(self, counts: UInt64, top: Array, low: Array, high: Array) -> "Sketch":
        extremes = jnp.minimum(self.low, low), jnp.maximum(self.high, high)
        return eqx.tree_at(lambda s: (s.counts, s.top, s.low, s.high), self, (counts, top, *extremes))


class AbstractSketchCalibrator(AbstractCalibrator):
    """A calibrator that computes its range from a sketch of all data."""

    def _start(self) -> Sketch:
        return Sketch(self._blocks.scale_shape)

    def _add(self, x: Float32[Array, "..."]) -> Sketch:
        return self.seen.add(x, self._blocks)

    def _join(self, other: AbstractCalibrator) -> Sketch:
        return self.seen.merge(other.seen)


def _to_bits(magnitude: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(magnitude, jnp.int32)


def _outer_add(start: Int32[Array, "*scales"], count: int) -> Int32[Array, "*scales count"]:
    """Returns `start`, `start + 1`, ..., along a new last axis."""
    return start[..., None] + jnp.arange(count, dtype=jnp.int32).reshape(*[1] * start.ndim, count)


def _find_bins(x: Float32[Array, "*scales values"], top: Int32[Array, "*scales 1"]) -> Int32[Array, "*scales values"]:
    """Returns the bin of each value, relative to the bin of zero: negative for negative values."""
    level = (_to_bits(jnp.abs(x)) >> _SHIFT) - ((top + 1) * _PER_OCTAVE - _BINS_PER_SIDE)
    return jnp.where(x < 0, -1, 1) * jnp.clip(level + 1, 0, _BINS_PER_SIDE)


def _count_bins(index: Int32[Array, "*scales values"]) -> UInt32[Array, "*scales bins"]:
    rows = index.reshape(-1, index.shape[-1]) + _BINS_PER_SIDE
    counts = jnp.zeros((rows.shape[0], 2 * _BINS_PER_SIDE + 1), jnp.uint32)
    counts = counts.at[jnp.arange(rows.shape[0])[:, None], rows].add(jnp.uint32(1))
    return counts.reshape(*index.shape[:-1], 2 * _BINS_PER_SIDE + 1)
