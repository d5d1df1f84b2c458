"""Evenly spaced levels: Int8, Int4 and Int2, symmetric and affine."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .._methods.search import check_rule, in_units, ScaleRule, search_scale, search_zero_point
from .._numerics.blocks import absmax, BlockSize, divide, minmax, signed_absmax
from .base import AbstractFormat


class AbstractInteger(AbstractFormat):
    """Codes are integers. A symmetric code is stored with an offset of `2**(bits - 1)`, so that it is unsigned."""

    symmetric: eqx.AbstractVar[bool]
    scale_rule: eqx.AbstractVar[ScaleRule]

    def __check_init__(self) -> None:
        check_rule(self)

    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        return search_scale(blocks, self._widest_scale(blocks), self.scale_rule, self._nearest)

    def _widest_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        """The least scale that clips nothing."""
        if self.symmetric:
            return absmax(blocks) / (2 ** (self.bits - 1) - 1)
        low, high = minmax(blocks)
        levels = 2**self.bits - 1
        return high / levels - low / levels  # each divided alone: `high - low` may overflow

    def choose_zero_point(
        self, blocks: Float32[Array, "*batch blocks block"], scale: Float32[Array, "*batch blocks"]
    ) -> UInt8[Array, "*batch blocks"] | None:
        if self.symmetric:
            return None
        if self.scale_rule != "absmax":
            return self._search_zero_point(in_units(blocks, scale)).astype(jnp.uint8)
        low, _ = minmax(blocks)
        return jnp.clip(jnp.round(divide(-low, scale)), 0, 2**self.bits - 1).astype(jnp.uint8)

    def encode(
        self, values: Float32[Array, "*shape"], round: Callable[[Array], Array] = jnp.round
    ) -> UInt8[Array, "*shape"]:
        offset = self._offset
        # Rounding comes before the offset, which is even, so that ties fall as they do on the values themselves.
        return (jnp.clip(round(values), -offset, 2**self.bits - 1 - offset) + offset).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32) - self._offset

    @property
    def _offset(self) -> int:
        return 2 ** (self.bits - 1) if self.symmetric else 0

    def _nearest(self, values: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """What values, divided by their scale, become."""
        if self.symmetric:
            return self.decode(self.encode(values))
        return self._nearest_about(values, self._search_zero_point(values))

    def _nearest_about(
        self, values: Float32[Array, "*blocks block"], zero_point: Float32[Array, "*blocks"]
    ) -> Float32[Array, "*blocks block"]:
        zero = zero_point[..., None]
        return self.decode(self.encode(values + zero)) - zero

    def _search_zero_point(self, values: Float32[Array, "*blocks block"]) -> Float32[Array, "*blocks"]:
        return search_zero_point(values, 2**self.bits - 1, self._nearest_about)


class Int8(AbstractInteger):
    r"""Eight-bit integers, per channel unless `block_size` is given.

    Symmetric: $s = \max|x| / 127$, codes $-127 \ldots 127$. Affine: $s = (\max x - \min x) / 255$ over a range that
    includes zero, codes $0 \ldots 255$, and the code of zero, $z = -\min x / s$ rounded, is kept as a zero point.
    """

    block_size: BlockSize = eqx.field(static=True, default=None)
    symmetric: bool = eqx.field(static=True, default=True)
    scale_rule: ScaleRule = eqx.field(static=True, default="absmax")
    bits = 8


class Int4(AbstractInteger):
    r"""Four-bit integers in blocks.

    Symmetric: $s = \max|x| / 7$, codes $-7 \ldots 7$. Affine: $s = (\max x - \min x) / 15$ over a range that includes
    zero, codes $0 \ldots 15$ and an eight-bit zero point per block.
    """

    block_size: BlockSize = eqx.field(static=True, default=64)
    symmetric: bool = eqx.field(static=True, default=True)
    scale_rule: ScaleRule = eqx.field(static=True, default="absmax")
    bits = 4


class Int2(AbstractInteger):
    r"""Two-bit integers in blocks.

    Symmetric: levels $-2 \ldots 1$, with $s = x_m / {-2}$ where $x_m$ is the value of largest magnitude with its sign.
    At two bits a level more counts: levels $-1 \ldots 1$ alone would cost 5 dB on normally distributed weights.
    Affine: $s = (\max x - \min x) / 3$ over a range that includes zero, codes $0 \ldots 3$ and a zero point per block.
    """

    block_size: BlockSize = eqx.field(static=True, default=64)
    symmetric: bool = eqx.field(static=True, default=True)
    scale_rule: ScaleRule = eqx.field(static=True, default="absmax")
    bits = 2

    def _widest_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        if self.symmetric:
            return signed_absmax(blocks) / -2
        return AbstractInteger._widest_scale(self, blocks)


for _cls in (Int8, Int4, Int2):
    _cls.__init__.__doc__ = r"""**Arguments:**

- `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"` for
    one for the whole array.
- `symmetric`: whether zero is always the middle code. Otherwise each block stores a zero point as well, which suits
    values that lie mostly to one side of zero.
- `scale_rule`: `"absmax"` clips nothing; `"mse"` clips where that makes the squared error of the block least; `"hqq"`
    does so for the sum of $|x - \hat x|^{0.7}$, which cares less for outliers
    ([Half-Quadratic Quantization](https://mobiusml.github.io/hqq_blog/)).
"""
