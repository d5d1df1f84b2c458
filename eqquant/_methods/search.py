"""Scale rules that search: the scale and zero point of a block by what error they leave, not by its extremes.

Everything here is in units of the scale that clips nothing. So neither huge nor tiny weights overflow, and a candidate
is a factor. `nearest` maps values in units of their scale to the values that codes can stand for.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .._numerics.blocks import divide, minmax


ScaleRule = Literal["absmax", "mse", "hqq"]
Nearest = Callable[[Array], Array]
# A candidate and its error, by block.
_Best = tuple[Array, Array]

_RULES = ("absmax", "mse", "hqq")
# With many codes the error changes fast with the scale, and is least near one; with few it changes slowly, and is least
# far below. Clipping to less than a sixteenth of the range pays in no block of a practical size.
_FACTORS = np.concatenate([np.linspace(1.1, 0.7, 48, endpoint=False), np.geomspace(0.7, 1 / 16, 24)]).astype(np.float32)
_REFITS = 2
_LARGEST = float(jnp.finfo(jnp.float32).max) / 2**9
# Of what a range is too long by, the part that is cut off below; the rest is cut off above.
_CUT_BELOW = np.linspace(0, 1, 5, dtype=np.float32)
# Half-Quadratic Quantization: the exponent of its norm, the first weight of its penalty, that weight's growth.
_P, _BETA, _KAPPA, _ITERATIONS = 0.7, 10.0, 1.01, 20


def check_rule(format: Any) -> None:
    """Refuses an unknown `scale_rule`."""
    if format.scale_rule not in _RULES:
        raise ValueError(
            f"`scale_rule` of {type(format).__name__} must be one of {', '.join(_RULES)}. Got {format.scale_rule!r}."
        )


def search_scale(
    blocks: Float32[Array, "*batch blocks block"],
    scale: Float32[Array, "*batch blocks"],
    rule: ScaleRule,
    nearest: Nearest,
) -> Float32[Array, "*batch blocks"]:
    """The scale of least error, about and below `scale`, which clips nothing. Never worse than it by its own measure.

    - `"mse"`: the least squared error over a grid of factors, then fitted by least squares to the codes it gives.
    - `"hqq"`: a small sum of $|x - \\hat x|^{0.7}$, by half-quadratic splitting: the errors that shrinkage leaves are
        taken for outliers, and the scale fits the rest by least squares. It starts at the least squared error and stays
        near. The least sum of all would be of no use: it gives up every outlier, for ten times the squared error.
    """
    if rule == "absmax":
        return scale
    units, one = in_units(blocks, scale), jnp.ones_like(scale)
    difference = lambda factor: units - nearest(units / factor[..., None]) * factor[..., None]
    squared = lambda factor: jnp.sum(jnp.square(difference(factor)), axis=-1)
    best = _least(squared, one, lambda step: jnp.full_like(scale, step), _FACTORS)
    refit = lambda _, best: _better(best, _fit(units, nearest(units / best[0][..., None]), best[0]), squared)
    best = jax.lax.fori_loop(0, _REFITS, refit, best)
    if rule == "hqq":
        robust = lambda factor: jnp.sum(jnp.abs(difference(factor)) ** _P, axis=-1)
        start = _better((one, robust(one)), best[0], robust)
        best = _half_quadratic(units, best[0], nearest, robust, start)
    # A scale so large that a longer one might decode to infinity stays as it is.
    return jnp.where(jnp.abs(scale) < _LARGEST, scale * best[0], scale)


def search_zero_point(
    units: Float32[Array, "*batch blocks block"], levels: int, nearest: Callable[[Array, Array], Array]
) -> Float32[Array, "*batch blocks"]:
    """The zero point of least squared error, where the levels do not reach from the smallest value to the largest.

    `nearest` takes a zero point as well. The levels are `0 ... levels`, less the zero point.
    """
    low, high = minmax(units)
    excess = jnp.maximum(high - low - levels, 0)
    candidate = lambda cut: jnp.clip(jnp.round(-low - cut * excess), 0, levels)
    error = lambda zero: jnp.sum(jnp.square(units - nearest(units, zero)), axis=-1)
    return _least(error, candidate(0.0), candidate, _CUT_BELOW[1:])[0]


def in_units(
    blocks: Float32[Array, "*batch blocks block"], scale: Float32[Array, "*batch blocks"]
) -> Float32[Array, "*batch blocks block"]:
    """Blocks divided by their scales."""
    return divide(blocks, jnp.broadcast_to(scale[..., None], blocks.shape))


def _least(
    error: Callable[[Array], Array], start: Array, candidate: Callable[[Any], Array], steps: np.ndarray
) -> _Best:
    """The candidate of least error, by block. One after the other, so that memory is that of one."""
    step = lambda best, step: (_better(best, candidate(step), error), None)
    best, _ = jax.lax.scan(step, (start, error(start)), jnp.asarray(steps))
    return best


def _better(best: _Best, candidate: Array, error: Callable[[Array], Array]) -> _Best:
    new = error(candidate)
    better = new < best[1]  # never for a NaN
    return jnp.where(better, candidate, best[0]), jnp.where(better, new, best[1])


def _fit(units: Array, levels: Array, factor: Array) -> Array:
    """The factor of least squared error for given levels; the old one where there is no positive one."""
    power = jnp.sum(jnp.square(levels), axis=-1)
    fitted = jnp.sum(levels * units, axis=-1) / jnp.where(power > 0, power, 1)
    return jnp.where(fitted > 0, fitted, factor)


def _half_quadratic(
    units: Array, factor: Array, nearest: Nearest, error: Callable[[Array], Array], best: _Best
) -> _Best:
    # The penalty's weight is meant for weights of about one.
    size = jnp.mean(jnp.abs(units), axis=-1, keepdims=True)
    size = jnp.where(size > 0, size, 1)

    def step(state: tuple[Array, Array, _Best], _: None) -> tuple[Any, None]:
        factor, beta, best = state
        levels = nearest(units / factor[..., None])
        outliers = size * _shrink((units - levels * factor[..., None]) / size, beta)
        factor = _fit(units - outliers, levels, factor)
        return (factor, beta * _KAPPA, _better(best, factor, error)), None

    start = (factor, jnp.asarray(_BETA, jnp.float32), best)
    (_, _, best), _ = jax.lax.scan(step, start, None, length=_ITERATIONS)
    return best


def _shrink(x: Array, beta: Array) -> Array:
    """The proximal step of $|x|^p$: what of each error is worth keeping as an outlier."""
    magnitude = jnp.abs(x)
    usable = jnp.where(magnitude > 0, magnitude, 1)
    return jnp.sign(x) * jnp.where(magnitude > 0, jnp.maximum(usable - usable ** (_P - 1) / beta, 0), 0)
