"""Rounding to integers."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def round_half_away(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Rounds to the nearest integer, ties away from zero, as C's `roundf`."""
    magnitude = jnp.abs(x)
    below = jnp.floor(magnitude)
    # Not `floor(magnitude + 0.5)`, which is wrong just below a half.
    return jnp.copysign(below + (magnitude - below >= 0.5).astype(x.dtype), x)
