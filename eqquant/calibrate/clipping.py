"""Calibrators that clip where it pays: in squared error, or in information."""

import abc

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .._scaling import divide
from .result import code_range, parameters
from .sketch import AbstractSketched


# Factors that the extremes are shrunk by. First both at once; then, since zero need not be in the middle, each alone.
_FACTORS = np.geomspace(1, 1 / 64, 97, dtype=np.float32)[1:]
_KEEP = np.full_like(_FACTORS, np.nan)
_BOTH = np.stack([_FACTORS, _FACTORS], axis=-1)
_EACH = np.concatenate([np.stack([_FACTORS, _KEEP], axis=-1), np.stack([_KEEP, _FACTORS], axis=-1)])


class _AbstractClipping(AbstractSketched):
    """Shrinks the extremes to the range of least loss, which is taken from a sketch of all data."""

    @abc.abstractmethod
    def _loss(
        self,
        counts: Float32[Array, " bins"],
        edges: Float32[Array, " edges"],
        scale: Float32[Array, ""],
        zero_point: Float32[Array, ""],
    ) -> Float32[Array, ""]:
        """What a scale and zero point cost one block."""

    def range(self) -> tuple[Float32[Array, "*blocks"], Float32[Array, "*blocks"]]:
        blocks, sketch = self.granularity.blocks, self.seen
        flat = lambda x: x.reshape(-1, *x.shape[len(blocks) :])
        low, high = jnp.minimum(sketch.low, 0), jnp.maximum(sketch.high, 0)
        counts = sketch.counts.astype(jnp.float32)
        factors = jax.vmap(self._search)(*map(flat, (low, high, counts, sketch.edges())))
        return low * factors[:, 0].reshape(blocks), high * factors[:, 1].reshape(blocks)

    def _search(
        self,
        low: Float32[Array, ""],
        high: Float32[Array, ""],
        counts: Float32[Array, " bins"],
        edges: Float32[Array, " edges"],
    ) -> Float32[Array, "2"]:
        loss = lambda f: self._loss(counts, edges, *parameters(low * f[0], high * f[1], self.bits, self.symmetric))

        def step(best: tuple[Array, Array], factors: Array) -> tuple[tuple[Array, Array], None]:
            factors = jnp.where(jnp.isnan(factors), best[0], factors)
            new = loss(factors)
            return (jnp.where(new < best[1], factors, best[0]), jnp.minimum(new, best[1])), None

        moves = _BOTH if self.symmetric else np.concatenate([_BOTH, _EACH, _EACH])
        widest = jnp.ones((2,), jnp.float32)
        (factors, _), _ = jax.lax.scan(step, (widest, loss(widest)), jnp.asarray(moves))
        return factors


class MSE(_AbstractClipping):
    r"""The range of least squared error $\mathbb{E}[(x - \hat x)^2]$: what clipping costs against what fine steps gain.

    Data is kept as counts in logarithmic bins, as by [`eqquant.calibrate.Percentile`][], and taken to be uniform inside
    of each. The error of rounding a uniform density has a closed form, so bins wider than a step are right too.

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

    def _loss(
        self,
        counts: Float32[Array, " bins"],
        edges: Float32[Array, " edges"],
        scale: Float32[Array, ""],
        zero_point: Float32[Array, ""],
    ) -> Float32[Array, ""]:
        bottom, top = (code - zero_point for code in code_range(self.bits, self.symmetric))
        steps = divide(edges, jnp.broadcast_to(scale, edges.shape))
        level = lambda x: jnp.clip(jnp.round(x), bottom, top)
        # The integral of (x - level(x))**2: each level adds the same twelfth, and the ends go on as cubes.
        integral = level(steps) / 12 + (steps - level(steps)) ** 3 / 3
        width, middle = jnp.diff(steps), (steps[1:] + steps[:-1]) / 2
        narrow = width < 1e-3  # where the difference of two integrals would be lost to rounding
        mean = jnp.where(narrow, (middle - level(middle)) ** 2, jnp.diff(integral) / jnp.where(narrow, 1, width))
        # A scale of zero makes every value zero, and has no steps to measure in.
        return jnp.where(scale == 0, jnp.inf, scale**2 * jnp.sum(counts / jnp.sum(counts) * mean))


class Entropy(_AbstractClipping):
    r"""The range of least relative entropy $\mathrm{KL}(P \| Q)$ between the clipped data and what its codes can tell.

    $P$ is the histogram, with what is clipped added to the ends. $Q$ spreads the part of each level that is not clipped
    evenly over those of its bins that hold data. It clips much more than [`eqquant.calibrate.MSE`][] where tails are
    long, and suits activations rather than weights.

    !!! Example

        ```python
        cal = eqq.calibrate.Entropy(bits=8).update(x)
        result = cal.result()
        ```

    ??? cite

        [8-bit Inference with TensorRT](https://www.cse.iitd.ac.in/~rijurekha/course/tensorrt.pdf)

    **Arguments:**

    - `bits`, `symmetric`, `granularity`, `name`: as for [`eqquant.calibrate.AbstractCalibrator`][].
    """

    def _loss(
        self,
        counts: Float32[Array, " bins"],
        edges: Float32[Array, " edges"],
        scale: Float32[Array, ""],
        zero_point: Float32[Array, ""],
    ) -> Float32[Array, ""]:
        bottom, top = code_range(self.bits, self.symmetric)
        middle, width = (edges[1:] + edges[:-1]) / 2, jnp.diff(edges)
        code = jnp.round(divide(middle, jnp.broadcast_to(scale, middle.shape)) + zero_point) - bottom
        inside = (code >= 0) & (code <= top - bottom) & (counts > 0)
        code = jnp.clip(code, 0, top - bottom).astype(jnp.int32)
        by_level = lambda x: jnp.zeros((top - bottom + 1,), jnp.float32).at[code].add(x)
        kept, support = jnp.where(inside, counts, 0), jnp.where(inside, jnp.maximum(width, 1e-30), 0)
        told = by_level(kept)[code] * support / jnp.maximum(by_level(support)[code], 1e-30)
        # What is clipped below and above belongs to the first and the last bin that is not.
        index = jnp.arange(counts.shape[0])
        first, last = jnp.argmax(inside), counts.shape[0] - 1 - jnp.argmax(inside[::-1])
        data = kept.at[first].add(jnp.sum(jnp.where(index < first, counts, 0)))
        data = data.at[last].add(jnp.sum(jnp.where(index > last, counts, 0)))
        data, told = data / jnp.sum(data), told / jnp.maximum(jnp.sum(told), 1e-30)
        terms = jnp.where(inside, data * jnp.log(jnp.maximum(data, 1e-30) / jnp.maximum(told, 1e-30)), 0)
        return jnp.where(inside.any() & (scale > 0), jnp.sum(terms), jnp.inf)
