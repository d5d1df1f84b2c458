"""Methods for scales that are known before the values are seen."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray, UInt8

from .._formats.base import AbstractFormat
from .base import AbstractMethod, encode_rows, encode_stored, Encoded, store_scale


class GivenScales(AbstractMethod):
    """Takes the scales and zero points that a caller of [`eqquant.quantize`][] gives."""

    scale: Float32[Array, "*batch blocks"]
    zero_point: UInt8[Array, "*batch blocks"] | None

    def quantize_rows(
        self,
        rows: Float[Array, "*batch length"],
        format: AbstractFormat,
        *,
        key: PRNGKeyArray | None = None,
        chunk: int | None = None,
    ) -> Encoded:
        return encode_rows(rows, self.scale, self.zero_point, format, key=key, chunk=chunk)


class UpTo(AbstractMethod):
    """Takes the scale that a format chooses for a largest magnitude, and clips values beyond. It looks at no value
    before it encodes them: NaN is clipped too.
    """

    largest: Float32[Array, ""]

    def quantize_rows(
        self,
        rows: Float[Array, "*batch length"],
        format: AbstractFormat,
        *,
        key: PRNGKeyArray | None = None,
        chunk: int | None = None,
    ) -> Encoded:
        scale = jnp.broadcast_to(format.choose_scale(self.largest.reshape(1, 1)), (*rows.shape[:-1], 1))
        clipped = jnp.clip(rows.astype(jnp.float32), -self.largest, self.largest)  # an integer format has a code more
        return encode_stored(clipped, store_scale(scale, format), None, format, key, chunk)
