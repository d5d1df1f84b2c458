"""Calibrators that keep the extremes: over all data, or averaged over batches."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32

from ._calibrator import AbstractCalibrator, extremes


_Extremes = tuple[Float32[Array, "*blocks"], Float32[Array, "*blocks"]]


class MinMax(AbstractCalibrator):
    """The smallest and the largest value of all data. Nothing is clipped.

    Updates and merges commute: whatever the order, the result is the same, bit for bit.

    !!! Example

        ```python
        cal = eqq.calibrate.MinMax(bits=8, symmetric=False)
        for x in batches:
            cal = cal.update(x)
        result = cal.result()
        ```

    **Arguments:**

    - `bits`, `symmetric`, `granularity`, `name`: as for [`eqquant.calibrate.AbstractCalibrator`][].
    """

    def _start(self) -> _Extremes:
        blocks = self.granularity.blocks
        return jnp.full(blocks, jnp.inf, jnp.float32), jnp.full(blocks, -jnp.inf, jnp.float32)

    def _add(self, x: Float32[Array, "..."]) -> _Extremes:
        return _widest(self.seen, extremes(x, self.granularity))

    def _join(self, other: Any) -> _Extremes:
        return _widest(self.seen, other.seen)

    def range(self) -> _Extremes:
        return self.seen


class MovingAverage(AbstractCalibrator):
    """The extremes of each batch, averaged over batches with weights that decay. Rare outliers count for little.

    The averages start at the extremes of the first batch; then each becomes $1 - m$ times itself plus $m$ times that of
    the batch. So the order of batches matters. A merge averages the averages, weighted by their numbers of batches.

    !!! Example

        ```python
        cal = eqq.calibrate.MovingAverage(momentum=0.05)
        cal, _ = jax.lax.scan(lambda cal, x: (cal.update(x), None), cal, batches)
        ```

    **Arguments:**

    - `bits`, `symmetric`, `granularity`, `name`: as for [`eqquant.calibrate.AbstractCalibrator`][].
    - `momentum`: $m$, the weight of a new batch, above 0 and at most 1.
    """

    momentum: float | int = eqx.field(static=True, default=0.01)

    def __check_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise ValueError(
                f"`momentum` must be above 0 and at most 1. Got {self.momentum}. It is the weight of a new batch."
            )

    def _start(self) -> _Extremes:
        zeros = jnp.zeros(self.granularity.blocks, jnp.float32)
        return zeros, zeros

    def _add(self, x: Float32[Array, "..."]) -> _Extremes:
        weight = jnp.where(self.batches == 0, jnp.float32(1), jnp.float32(self.momentum))
        return _mean(self.seen, extremes(x, self.granularity), weight)

    def _join(self, other: Any) -> _Extremes:
        mine, theirs = self.batches.astype(jnp.float32), other.batches.astype(jnp.float32)
        return _mean(self.seen, other.seen, theirs / jnp.maximum(mine + theirs, 1))

    def range(self) -> _Extremes:
        return self.seen


def _widest(a: _Extremes, b: _Extremes) -> _Extremes:
    return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])


def _mean(a: _Extremes, b: _Extremes, weight: Float32[Array, ""]) -> _Extremes:
    low, high = ((1 - weight) * old + weight * new for old, new in zip(a, b, strict=True))
    return low, high
