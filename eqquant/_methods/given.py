"""The method for scales that the caller gives."""

from jaxtyping import Array, Float, Float32, PRNGKeyArray, UInt8

from .._formats.base import AbstractFormat
from .base import AbstractMethod, encode_rows, Encoded


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
