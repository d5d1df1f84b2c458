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


class OneScale(AbstractMethod):
    """Takes one scale for all values, and looks at none before it encodes them: not even for NaN."""

    scale: Float32[Array, ""]

    def quantize_rows(
        self,
        rows: Float[Array, "*batch length"],
        format: AbstractFormat,
        *,
        key: PRNGKeyArray | None = None,
        chunk: int | None = None,
    ) -> Encoded:
        stored = store_scale(jnp.broadcast_to(self.scale, (*rows.shape[:-1], 1)), format)
        return encode_stored(rows, stored, None, format, key, chunk)
