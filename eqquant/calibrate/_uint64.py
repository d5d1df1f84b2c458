"""64-bit counts as pairs of uint32, since JAX has 64-bit integers only with x64 enabled."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32


_HALF, _MASK = 16, 2**16 - 1


class UInt64(eqx.Module):
    """Unsigned 64-bit integers, as their low and high 32 bits. Sums run along the last axis."""

    low: UInt32[Array, "*shape"]
    high: UInt32[Array, "*shape"]

    @staticmethod
    def of(low: UInt32[Array, "*shape"]) -> "UInt64":
        return UInt64(low, jnp.zeros_like(low))

    def __add__(self, other: "UInt64") -> "UInt64":
        low = self.low + other.low
        carry = (low < self.low).astype(jnp.uint32)
        return UInt64(low, self.high + other.high + carry)

    def cumsum(self) -> "UInt64":
        """Returns the cumulative sum along the last axis, which has at most 2**16 entries."""
        # Sum the halves of the low word separately, so that no sum wraps.
        first = jnp.cumsum(self.low & _MASK, axis=-1, dtype=jnp.uint32)
        second = jnp.cumsum(self.low >> _HALF, axis=-1, dtype=jnp.uint32) + (first >> _HALF)
        high = jnp.cumsum(self.high, axis=-1, dtype=jnp.uint32) + (second >> _HALF)
        return UInt64((second << _HALF) | (first & _MASK), high)

    def sum(self) -> "UInt64":
        """Returns the sum along the last axis, of at most 2**16 entries, which keeps length one."""
        sums = self.cumsum()
        return UInt64(sums.low[..., -1:], sums.high[..., -1:])

    def to_float(self) -> Float32[Array, "*shape"]:
        """Converts to float32, to within one unit in the last place."""
        return self.high.astype(jnp.float32) * 2.0**32 + self.low.astype(jnp.float32)
