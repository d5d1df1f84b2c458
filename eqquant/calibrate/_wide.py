"""Counts of 64 bits: JAX has such integers only where a flag is set, and 32 bits wrap at four billion values."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32


_HALF, _MASK = 16, 2**16 - 1


class Wide(eqx.Module):
    """Whole numbers below 2**64, as their low and high 32 bits. Axes are counted from the end."""

    low: UInt32[Array, "*shape"]
    high: UInt32[Array, "*shape"]

    @staticmethod
    def of(low: UInt32[Array, "*shape"]) -> "Wide":
        return Wide(low, jnp.zeros_like(low))

    def __add__(self, other: "Wide") -> "Wide":
        low = self.low + other.low
        carry = (low < self.low).astype(jnp.uint32)
        return Wide(low, self.high + other.high + carry)

    def cumsum(self) -> "Wide":
        """The sums of all entries up to each, along the last axis of at most 2**16 entries."""
        # Halves of the low word, so that no sum of them wraps.
        first = jnp.cumsum(self.low & _MASK, axis=-1, dtype=jnp.uint32)
        second = jnp.cumsum(self.low >> _HALF, axis=-1, dtype=jnp.uint32) + (first >> _HALF)
        high = jnp.cumsum(self.high, axis=-1, dtype=jnp.uint32) + (second >> _HALF)
        return Wide((second << _HALF) | (first & _MASK), high)

    def sum(self) -> "Wide":
        """The sum along the last axis of at most 2**16 entries, which stays with length one."""
        sums = self.cumsum()
        return Wide(sums.low[..., -1:], sums.high[..., -1:])

    def to_float(self) -> Float32[Array, "*shape"]:
        """The nearest float32, or one beside it."""
        return self.high.astype(jnp.float32) * 2.0**32 + self.low.astype(jnp.float32)
