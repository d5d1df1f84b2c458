"""Calibrators of the minimum and maximum: of all data, or averaged over batches."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32

from ._calibrator import AbstractCalibrator, find_extremes, Range


class MinMax(AbstractCalibrator):
    """Finds the range from the smallest to the largest value of all data. Clips nothing.

    Updates and merges commute: whatever the order, the result is the same, bit for bit.

    !!! Example

        ```python
        cal = eqq.calibrate.MinMax("int8", (768,), axis=-2)
        for x in batches:
            cal = cal.update(x)
        q = cal.result().quantize(x)
        ```

    **Arguments:**

    - `format`, `shape`, `axis`, `name`: as for [`eqquant.extend.AbstractCalibrator`][].
    """

    def _start(self) -> Range:
        scale_shape = self._blocks.scale_shape
        return jnp.full(scale_shape, jnp.inf, jnp.float32), jnp.full(scale_shape, -jnp.inf, jnp.float32)

    def _add(self, x: Float32[Array, "..."]) -> Range:
        return _widest(self.seen, find_extremes(x, self._blocks))

    def _join(self, other: AbstractCalibrator) -> Range:
        return _widest(self.seen, other.seen)

    def range(self) -> Range:
        return self.seen


class MovingAverage(AbstractCalibrator):
    """Averages the smallest and the largest value of each batch, with exponential decay.

    Rare outliers weigh little. The averages start at the extremes of the first batch. Each later batch multiplies them
    by $1 - m$ and adds $m$ times its own extremes, so the order of batches matters. A merge averages both, weighted by
    their numbers of batches.

    !!! Example

        ```python
        cal = eqq.calibrate.MovingAverage(eqq.Int8(block_size="tensor"), momentum=0.05)
        cal, _ = jax.lax.scan(lambda cal, x: (cal.update(x), None), cal, batches)
        ```

    **Arguments:**

    - `format`, `shape`, `axis`, `name`: as for [`eqquant.extend.AbstractCalibrator`][].
    - `momentum`: $m$, the weight of a new batch, above 0 and at most 1.
    """

    momentum: float | int = eqx.field(static=True, default=0.01, kw_only=True)

    def __check_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise ValueError(
                f"`momentum` must be above 0 and at most 1. Got {self.momentum}. It is the weight of a new batch."
            )

    def _start(self) -> Range:
        zeros = jnp.zeros(self._blocks.scale_shape, jnp.float32)
        return zeros, zeros

    def _add(self, x: Float32[Array, "..."]) -> Range:
        weight = jnp.where(self.batches == 0, jnp.float32(1), jnp.float32(self.momentum))
        return _mean(self.seen, find_extremes(x, self._blocks), weight)

    def _join(self, other: AbstractCalibrator) -> Range:
        mine, theirs = self.batches.astype(jnp.float32), other.batches.astype(jnp.float32)
        return _mean(self.seen, other.seen, theirs / jnp.maximum(mine + theirs, 1))

    def range(self) -> Range:
        return self.seen


def _widest(a: Range, b: Range) -> Range:
    return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])


def _mean(a: Range, b: Range, weight: Float32[Array, ""]) -> Range:
    low, high = ((1 - weight) * old + weight * new for old, new in zip(a, b, strict=True))
    return low, high
