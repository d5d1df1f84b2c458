"""Half-Quadratic Quantization."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._formats.base import AbstractFormat, Blocks, Scales
from .base import AbstractScaleMethod
from .choose import ZeroPoints
from .search import Best, Error, fit, keep_better, Search, search_least_squares, start_search


# The exponent of the norm, the first weight of the penalty, its growth, and the number of steps.
_P, _BETA, _KAPPA, _ITERATIONS = 0.7, 10.0, 1.01, 20


class HQQ(AbstractScaleMethod):
    r"""Chooses a scale with a small $\sum |x - \hat x|^{0.7}$ in each block.

    Outliers weigh less than in squares.

    Half-quadratic splitting: shrinks the errors, treats the remainder as outliers, and fits the scale to the rest by
    least squares. Starts at the scale of [`eqquant.MSE`][] and stays near it. (The global minimum gives up every
    outlier, at ten times the squared error.) Works with every format.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "int4", method="hqq")
        ```

    ??? cite

        [Half-Quadratic Quantization of Large Machine Learning Models](https://mobiusml.github.io/hqq_blog/)

    **Arguments:** none.
    """

    def choose_scales(self, blocks: Blocks, format: AbstractFormat) -> tuple[Scales, ZeroPoints]:
        search = start_search(blocks, format)
        robust = lambda factor: jnp.sum(jnp.abs(search.errors(factor)) ** _P, axis=-1)
        one = jnp.ones_like(search.scale)
        squared = search_least_squares(search)
        start = keep_better((one, robust(one)), squared, robust(squared))
        return search.result(_half_quadratic(search, squared, robust, start))


def _half_quadratic(search: Search, factor: Array, error: Error, best: Best[Array]) -> Array:
    # The penalty's weight assumes values of about one.
    size = jnp.mean(jnp.abs(search.units), axis=-1, keepdims=True)
    size = jnp.where(size > 0, size, 1)

    def step(state: tuple[Array, Array, Best[Array]], _: None) -> tuple[tuple[Array, Array, Best[Array]], None]:
        factor, beta, best = state
        levels = search.levels(factor)
        outliers = size * _shrink((search.units - levels * factor[..., None]) / size, beta)
        factor = search.round_factor(fit(search.units - outliers, levels, factor))
        return (factor, beta * _KAPPA, keep_better(best, factor, error(factor))), None

    start = (factor, jnp.asarray(_BETA, jnp.float32), best)
    (_, _, best), _ = jax.lax.scan(step, start, None, length=_ITERATIONS)
    return best[0]


def _shrink(x: Array, beta: Array) -> Array:
    """Returns the proximal step of $|x|^p$: the part of each error to treat as an outlier."""
    magnitude = jnp.abs(x)
    usable = jnp.where(magnitude > 0, magnitude, 1)
    return jnp.sign(x) * jnp.where(magnitude > 0, jnp.maximum(usable - usable ** (_P - 1) / beta, 0), 0)
