"""Evenly spaced integers of any width: the formats of the library where they are the same, else one of our own."""

import math
from numbers import Integral
from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .._array.array import QuantizedArray
from .._formats import Int2, Int4, Int8
from .._formats.base import AbstractAffineFormat, AbstractFormat
from .._numerics.blocks import absmax, BlockSize, divide, minmax
from .._numerics.rounding import round_half_away


Rounding = Literal["half_even", "half_away"]


def integer_format(
    bits: int, *, block_size: BlockSize = "tensor", symmetric: bool = True, rounding: Rounding = "half_even"
) -> AbstractFormat:
    r"""Integers of two to eight bits, to see what each bit is worth.

    Symmetric: $s = \max|x| / (2^{b-1} - 1)$. Affine: $s = (\max x - \min x) / (2^b - 1)$ over a range that includes
    zero. Where [`eqquant.Int8`][], [`eqquant.Int4`][] or [`eqquant.Int2`][] means the same, that is what is returned.
    Other widths are for analysis: in memory each of their codes takes a byte, and reports count the bits it would take
    packed.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.analysis.integer_format(3, block_size=32))
        ```

    **Arguments:**

    - `bits`: the width of a code, from 2 to 8.
    - `block_size`: how many values share a scale; `None` for one scale per channel, `"tensor"` for one in all.
    - `symmetric`: whether zero is always the middle code. Otherwise there is a zero point.
    - `rounding`: where ties go: `"half_even"`, as everywhere in JAX, or `"half_away"` from zero, as in C.

    **Returns:**

    A format.

    **Raises:**

    `ValueError` for another number of bits, or an unknown `rounding`.
    """
    if isinstance(bits, bool) or not isinstance(bits, Integral) or not 2 <= bits <= 8:
        raise ValueError(f"`bits` must be an integer from 2 to 8. Got {bits!r}. One bit has no zero: see `eqq.Binary`.")
    if rounding not in ("half_even", "half_away"):
        raise ValueError(f'`rounding` must be "half_even" or "half_away". Got {rounding!r}.')
    ours = {8: Int8, 4: Int4, 2: Int2}.get(bits)
    # Symmetric Int2 uses all of its four levels, which the rule above does not; and blocks of ours fill whole bytes.
    same = rounding == "half_even" and (bits > 2 or not symmetric)
    if ours is not None and same and (not isinstance(block_size, int) or block_size % (8 // bits) == 0):
        return ours(block_size=block_size, symmetric=symmetric)
    return _Integer(width=bits, block_size=block_size, symmetric=symmetric, rounding=rounding)


class _Integer(AbstractAffineFormat):
    block_size: BlockSize = eqx.field(static=True)
    width: int = eqx.field(static=True)
    symmetric: bool = eqx.field(static=True)
    rounding: Rounding = eqx.field(static=True)
    bits = 8

    @property
    def has_zero_points(self) -> bool:
        return not self.symmetric

    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        if self.symmetric:
            return absmax(blocks) / (2 ** (self.width - 1) - 1)
        low, high = minmax(blocks)
        return high / self._levels - low / self._levels

    def choose_zero_point(
        self, blocks: Float32[Array, "*batch blocks block"], scale: Float32[Array, "*batch blocks"]
    ) -> UInt8[Array, "*batch blocks"]:
        low, _ = minmax(blocks)
        zero = self._round(divide(-low, scale))
        return jnp.clip(zero, 0, self._levels).astype(jnp.uint8)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return (jnp.clip(self._round(values) + self._offset, 0, self._levels)).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32) - self._offset

    @property
    def _levels(self) -> int:
        return 2**self.width - 1

    @property
    def _offset(self) -> int:
        return 2 ** (self.width - 1) if self.symmetric else 0

    def _round(self, values: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return round_half_away(values) if self.rounding == "half_away" else jnp.round(values)

    def __repr__(self) -> str:
        block, rounding = f"block_size={self.block_size!r}", f"rounding={self.rounding!r}"
        return f"integer_format({self.width}, {block}, symmetric={self.symmetric}, {rounding})"


def stored_bits(q: QuantizedArray) -> float:
    """Bits per value, scales included; those of an analysed integer as if it were packed."""
    nbytes = q.nbytes
    if isinstance(q.format, _Integer):
        rows, length = math.prod(q.codes.shape[:-1]), q.codes.shape[-1]
        nbytes -= rows * (length - math.ceil(length * q.format.width / 8))
    return 8 * nbytes / max(q.size, 1)
