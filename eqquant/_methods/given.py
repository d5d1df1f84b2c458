"""Methods for scales that are known before the values are seen."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, PRNGKeyArray, UInt8

from .._formats.base import AbstractFormat
from .base import AbstractMethod
from .choose import Rows
from .grid import encode_by_chunks, encode_rows, EncodedRows, load_grid, store_scale


class GivenScales(AbstractMethod):
    """Takes the scales and zero points that a caller of [`eqquant.quantize`][] gives."""

    scale: Float32[Array, "*batch blocks"]
    zero_point: UInt8[Array, "*batch blocks"] | None

    def quantize_rows(
        self, rows: Rows, format: AbstractFormat, *, key: PRNGKeyArray | None = None, chunk: int | None = None
    ) -> EncodedRows:
        return encode_rows(rows, self.scale, self.zero_point, format, key=key, chunk=chunk)


class FixedAmax(AbstractMethod):
    """Takes the scale of a format for a known largest magnitude (amax), and clips beyond.

    It looks at no value before it encodes them: NaN is clipped too.
    """

    amax: Float32[Array, ""]

    def quantize_rows(
        self, rows: Rows, format: AbstractFormat, *, key: PRNGKeyArray | None = None, chunk: int | None = None
    ) -> EncodedRows:
        scale = jnp.broadcast_to(format.choose_scale(self.amax.reshape(1, 1)), (*rows.shape[:-1], 1))
        clipped = jnp.clip(rows.astype(jnp.float32), -self.amax, self.amax)  # an integer format has a code more
        bits = store_scale(scale, format)
        return encode_by_chunks(clipped, bits, None, load_grid(bits, None, None, format), format, key, chunk)
