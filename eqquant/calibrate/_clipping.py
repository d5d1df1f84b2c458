"""The calibrator that clips where it pays in squared error."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .._numerics.blocks import divide
from ._result import code_range, parameters
from ._sketch import AbstractSketched


# Factors that the extremes are shrunk by. First both at once; then, since zero need not be in the middle, each alone.
_FACTORS = np.geomspace(1, 1 / 64, 97, dtype=np.float32)[1:]
_KEEP = np.full_like(_FACTORS, np.nan)
_BOTH = np.stack([_FACTORS, _FACTORS], axis=-1)
_EACH = np.concatenate([np.stack([_FACTORS, _KEEP], axis=-1), np.stack([_KEEP, _FACTORS], axis=-1)])


class MSE(AbstractSketched):
    r"""The range of least squared error $\mathbb{E}[(x - \hat x)^2]$: what clipping costs against what fine steps gain.

    Data is kept as counts in logarithmic bins, as by [`eqquant.calibrate.Percentile`][], and taken to be uniform inside
    of each. The error of rounding a uniform density has a closed form, so bins wider than a step are right too. Updates
    and merges commute: whatever the order, the result is the same, bit for bit.

    !!! Example

        ```python
        cal = eqq.calibrate.MSE(bits=4)
        for x in batches:
            cal = cal.update(x)
        result = cal.result()
        ```

    ??? cite

        [Post training 4-bit quantization of convolutional networks for rapid-deployment](https://arxiv.org/abs/1810.05723)

    **Arguments:**

    - `bits`, `symmetric`, `granularity`, `name`: as for [`eqquant.calibrate.AbstractCalibrator`][].
    """

    def range(self) -> tuple[Float32[Array, "*blocks"], Float32[Array, "*blocks"]]:
        blocks, sketch = self.granularity.blocks, self.seen
        low, high = jnp.minimum(sketch.low, 0), jnp.maximum(sketch.high, 0)
        # In units of the largest magnitude, so that no square overflows or vanishes.
        size = jnp.maximum(-low, high)
        unit = lambda x: divide(x, jnp.broadcast_to(size.reshape(*blocks, *[1] * (x.ndim - len(blocks))), x.shape))
        flat = lambda x: x.reshape(-1, *x.shape[len(blocks) :])
        parts = (unit(low), unit(high), sketch.counts.astype(jnp.float32), unit(sketch.edges()))
        factors = jax.vmap(self._search)(*map(flat, parts))
        return low * factors[:, 0].reshape(blocks), high * factors[:, 1].reshape(blocks)

    def _search(
        self,
        low: Float32[Array, ""],
        high: Float32[Array, ""],
        counts: Float32[Array, " bins"],
        edges: Float32[Array, " edges"],
    ) -> Float32[Array, "2"]:
        """The best factors to shrink the extremes of one block by."""
        loss = lambda f: self._error(counts, edges, *parameters(low * f[0], high * f[1], self.bits, self.symmetric))

        def step(best: tuple[Array, Array], factors: Array) -> tuple[tuple[Array, Array], None]:
            factors = jnp.where(jnp.isnan(factors), best[0], factors)
            new = loss(factors)
            return (jnp.where(new < best[1], factors, best[0]), jnp.minimum(new, best[1])), None

        moves = _BOTH if self.symmetric else np.concatenate([_BOTH, _EACH, _EACH])
        widest = jnp.ones_like(jnp.stack([low, high]))  # of the data, so that it varies over a mesh as they do
        (factors, _), _ = jax.lax.scan(step, (widest, loss(widest)), jnp.asarray(moves))
        return factors

    def _error(
        self,
        counts: Float32[Array, " bins"],
        edges: Float32[Array, " edges"],
        scale: Float32[Array, ""],
        zero_point: Float32[Array, ""],
    ) -> Float32[Array, ""]:
        """The sum of squared errors of one block under a scale and zero point."""
        bottom, top = (code - zero_point for code in code_range(self.bits, self.symmetric))
        steps = divide(edges, jnp.broadcast_to(scale, edges.shape))
        level = lambda x: jnp.clip(jnp.round(x), bottom, top)
        # The integral of (x - level(x))**2: each level adds the same twelfth, and the ends go on as cubes.
        integral = level(steps) / 12 + (steps - level(steps)) ** 3 / 3
        width, middle = jnp.diff(steps), (steps[1:] + steps[:-1]) / 2
        narrow = width < 1e-3  # where the difference of two integrals would be lost to rounding
        mean = jnp.where(narrow, (middle - level(middle)) ** 2, jnp.diff(integral) / jnp.where(narrow, 1, width))
        # A scale of zero makes every value zero, and has no steps to measure in.
        return jnp.where(scale == 0, jnp.inf, scale**2 * jnp.sum(counts * mean))
