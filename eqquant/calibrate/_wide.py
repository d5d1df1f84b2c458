"""64-bit counts as pairs of uint32: JAX has 64-bit integers only with `jax_enable_x64`, and 32 bits wrap at 2**32."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32


_HALF, _MASK = 16, 2**16 - 1


class Wide(eqx.Module):
    """Whole numbers below 2**64, as their low and high 32 bits. All operations work on the last axis."""

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
        """Returns the cumulative sum along the last axis, which has at most 2**16 entries."""
        # Sums the halves of the low word separately, so that no sum wraps.
        first = jnp.cumsum(self.low & _MASK, axis=-1, dtype=jnp.uint32)
        second = jnp.cumsum(self.low >> _HALF, axis=-1, dtype=jnp.uint32) + (first >> _HALF)
        high = jnp.cumsum(self.high, axis=-1, dtype=jnp.uint32) + (second >> _HALF)
        return Wide((second << _HALF) | (first & _MASK), high)

    def sum(self) -> "Wide":
        """Returns the sum along the last axis, which has at most 2**16 entries and keeps length one."""
        sums = self.cumsum()
        return Wide(sums.low[..., -1:], sums.high[..., -1:])

    def to_float(self) -> Float32[Array, "*shape"]:
        """Converts to float32, to within one unit in the last place."""
        return self.high.astype(jnp.float32) * 2.0**32 + self.low.astype(jnp.float32)
