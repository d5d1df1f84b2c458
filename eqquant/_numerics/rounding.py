"""Rounding to integers, and as C does."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def round_half_away(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Rounds to the nearest integer, ties away from zero, as C's `roundf`."""
    magnitude = jnp.abs(x)
    below = jnp.floor(magnitude)
    # Not `floor(magnitude + 0.5)`, which is wrong just below a half.
    return jnp.copysign(below + (magnitude - below >= 0.5).astype(x.dtype), x)


def divide_as_c(x: Float32[Array, "*shape"], by: int | float) -> Float32[Array, "*shape"]:
    """Returns the quotient, correctly rounded.

    By a constant, XLA multiplies with the reciprocal instead.
    """
    return x / (jnp.float32(by) + 0 * x)  # not simplified, since `x` may be infinite
