"""Rounding to integers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def round_half_away(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """To the nearest integer, ties away from zero, as C's `roundf`."""
    magnitude = jnp.abs(x)
    below = jnp.floor(magnitude)
    # Not `floor(magnitude + 0.5)`, which is wrong just below a half.
    return jnp.copysign(below + (magnitude - below >= 0.5).astype(x.dtype), x)


def stochastic_round(key: PRNGKeyArray) -> Callable[[Float[Array, "*shape"]], Float[Array, "*shape"]]:
    """A rounding function that goes up with a probability equal to the fractional part, so that it is unbiased."""
    return lambda x: jnp.floor(x + jax.random.uniform(key, x.shape, x.dtype))
