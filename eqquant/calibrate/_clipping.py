"""Calibrators that clip: at percentiles, or at the range with the least squared error."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from .._formats.base import AbstractFormat, find_levels
from .._numerics.blocks import divide
from .._numerics.constants import compute_now
from ._result import choose_qparams
from ._sketch import AbstractSketchCalibrator


# Factors to shrink the extremes by: first both at once, then each alone, because the range need not be symmetric.
_FACTORS = np.geomspace(1, 1 / 64, 97, dtype=np.float32)[1:]
_KEEP = np.full_like(_FACTORS, np.nan)
_BOTH = np.stack([_FACTORS, _FACTORS], axis=-1)
_EACH = np.concatenate([np.stack([_FACTORS, _KEEP], axis=-1), np.stack([_KEEP, _FACTORS], axis=-1)])


class Percentile(AbstractSketchCalibrator):
    r"""Finds the range between two percentiles of all data.

    Keeps counts of the data in logarithmic bins: 24 KiB per scale, however much data it observes. A percentile is the
    order statistic at rank $p n / 100$, computed in float32, to within 1/64 of its magnitude; 0 and 100 are exact.
    Magnitudes below $2^{-24}$ of the largest count as zero. Updates and merges commute: whatever the order, the result
    is the same, bit for bit.

    !!! Example

        ```python
        cal = eqq.calibrate.Percentile("int8", (768,), axis=-2, lower=0.1, upper=99.9)
        for x in batches:
            cal = cal.update(x)
        q = cal.result().quantize(x)
        ```

    ??? cite

        [DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error Guarantees](https://arxiv.org/abs/1908.10693)

    **Arguments:**

    - `format`, `shape`, `axis`, `name`: as for [`eqquant.extend.AbstractCalibrator`][].
    - `lower`, `upper`: the percentiles, from 0 to 100 (not fractions).
    """

    lower: float | int = eqx.field(static=True, default=0.01, kw_only=True)
    upper: float | int = eqx.field(static=True, default=99.99, kw_only=True)

    def __check_init__(self) -> None:
        if 0 <= self.lower < self.upper <= 1:
            raise ValueError(
                f"`lower` and `upper` must be percentiles, from 0 to 100, not fractions. Got upper={self.upper}. Write "
                f"`upper={100 * self.upper:g}`."
            )
        if not 0 <= self.lower < self.upper <= 100:
            raise ValueError(
                f"`lower` and `upper` must be percentiles, 0 <= lower < upper <= 100. Got lower={self.lower} and "
                f"upper={self.upper}. `lower=0.1, upper=99.9` clips one value in 500."
            )

    def range(self) -> tuple[Float32[Array, "*scales"], Float32[Array, "*scales"]]:
        low = self.seen.low if self.lower == 0 else self.seen.quantile(self.lower / 100)
        high = self.seen.high if self.upper == 100 else self.seen.quantile(self.upper / 100)
        return low, high


class MSERange(AbstractSketchCalibrator):
    r"""Finds the range with the least squared error.

    The error is $\mathbb{E}[(x - \hat x)^2]$: clipping large values increases it, and finer steps reduce it.

    Keeps counts of the data in logarithmic bins, like [`eqquant.calibrate.Percentile`][], and assumes that values are
    uniform inside each bin. The rounding error of a uniform density has a closed form, so it holds even for bins
    wider than a step. Updates and merges commute: whatever the order, the result is the same, bit for bit.

    !!! Example

        ```python
        cal = eqq.calibrate.MSERange(eqq.Int4(block_size="tensor"))
        for x in batches:
            cal = cal.update(x)
        q = cal.result().quantize(x)
        ```

    ??? cite

        [Post training 4-bit quantization of convolutional networks for rapid-deployment](https://arxiv.org/abs/1810.05723)

    **Arguments:**

    - `format`, `shape`, `axis`, `name`: as for [`eqquant.extend.AbstractCalibrator`][]. `format` must be an integer
        format.
    """

    def __check_init__(self) -> None:
        _find_level_bounds(self.format)

    def range(self) -> tuple[Float32[Array, "*scales"], Float32[Array, "*scales"]]:
        shape, sketch = self._blocks.scale_shape, self.seen
        low, high = jnp.minimum(sketch.low, 0), jnp.maximum(sketch.high, 0)
        # Normalize by the amax, so that no square overflows or underflows.
        amax = jnp.maximum(-low, high)
        normalize = lambda x: divide(x, jnp.broadcast_to(amax.reshape(*shape, *[1] * (x.ndim - len(shape))), x.shape))
        flatten = lambda x: x.reshape(-1, *x.shape[len(shape) :])
        parts = (normalize(low), normalize(high), sketch.counts.to_float(), normalize(sketch.edges()))
        factors = jax.vmap(self._search)(*map(flatten, parts))
        return low * factors[:, 0].reshape(shape), high * factors[:, 1].reshape(shape)

    def _search(
        self,
        low: Float32[Array, ""],
        high: Float32[Array, ""],
        counts: Float32[Array, " bins"],
        edges: Float32[Array, " edges"],
    ) -> Float32[Array, "2"]:
        """Returns the factors that shrink the extremes of one block with the least error."""
        loss = lambda f: self._compute_error(counts, edges, *choose_qparams(low * f[0], high * f[1], self.format))
        is_centered = choose_qparams(low, high, self.format)[1] is None

        def step(best: tuple[Array, Array], factors: Array) -> tuple[tuple[Array, Array], None]:
            factors = jnp.where(jnp.isnan(factors), best[0], factors)
            new = loss(factors)
            return (jnp.where(new < best[1], factors, best[0]), jnp.minimum(new, best[1])), None

        candidates = _BOTH if is_centered else np.concatenate([_BOTH, _EACH, _EACH])
        widest = jnp.ones_like(jnp.stack([low, high]))  # from the data, to vary as the data does in `shard_map`
        (factors, _), _ = jax.lax.scan(step, (widest, loss(widest)), jnp.asarray(candidates))
        return factors

    def _compute_error(
        self,
        counts: Float32[Array, " bins"],
        edges: Float32[Array, " edges"],
        scale: Float32[Array, ""],
        zero_point: UInt8[Array, ""] | None,
    ) -> Float32[Array, ""]:
        """Returns the sum of squared errors of one block for a scale and zero point."""
        zero = jnp.float32(0) if zero_point is None else zero_point.astype(jnp.float32)
        bottom, top = (end - zero for end in _find_level_bounds(self.format))
        steps = divide(edges, jnp.broadcast_to(scale, edges.shape))
        level = lambda x: jnp.clip(jnp.round(x), bottom, top)
        # The integral of (x - level(x))**2: each level adds 1/12, and beyond the outermost levels it grows as a cube.
        integral = level(steps) / 12 + (steps - level(steps)) ** 3 / 3
        width, middle = jnp.diff(steps), (steps[1:] + steps[:-1]) / 2
        narrow = jnp.abs(width) < 1e-3  # here the difference of two integrals would cancel
        mean = jnp.where(narrow, (middle - level(middle)) ** 2, jnp.diff(integral) / jnp.where(narrow, 1, width))
        # With a scale of zero every value becomes zero, and there are no steps to measure in.
        return jnp.where(scale == 0, jnp.inf, scale**2 * jnp.sum(counts * mean))


@ft.lru_cache
def _find_level_bounds(format: AbstractFormat) -> tuple[float, float]:
    """Returns the lowest and the highest level of an integer format. Raises for other formats."""
    with compute_now():
        levels, used = find_levels(format)
        bottom, top = float(levels[used].min()), float(levels[used].max())
        values = np.arange(bottom - 2, top + 3, 0.25, dtype=np.float32)
        values = values[values % 1 != 0.5]  # ties may round either way
        nearest = np.asarray(format.decode(format.encode(jnp.asarray(values))))
    if not np.array_equal(nearest, np.clip(np.round(values), bottom, top)):
        raise ValueError(
            f"`format` must be one of integers. Got {format!r}, whose levels are not evenly spaced. For it take "
            "another calibrator, such as `Percentile`."
        )
    return bottom, top
