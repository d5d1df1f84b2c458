"""Integers of any width: one of `Int8` to `Int2` where they agree, otherwise a format for analysis only."""

from numbers import Integral
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .._numerics.blocks import absmax, BlockSize, minmax
from .._numerics.integers import affine_scale, affine_zero_point, decode_integer, encode_integer, symmetric_scale
from .._numerics.packing import num_planes
from .._numerics.rounding import round_half_away
from .base import AbstractAffineFormat, AbstractFormat
from .integer import Int2, Int3, Int4, Int5, Int6, Int8


Rounding = Literal["half_even", "half_away"]


def integer_format(
    bits: int, *, block_size: BlockSize = "tensor", symmetric: bool = True, rounding: Rounding = "half_even"
) -> AbstractFormat:
    r"""Returns an integer format of two to eight bits, to measure how much accuracy each bit buys.

    Symmetric: $s = \max|x| / (2^{b-1} - 1)$. Affine: $s = (\max x - \min x) / (2^b - 1)$ over a range that includes
    zero. Returns [`eqquant.Int8`][] or a related class where one has these levels. Others are for analysis: if their
    blocks do not fill bytes, each code takes a byte in memory, but reports count the bits of a packed code.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.analysis.integer_format(3, block_size=32))
        ```

    **Arguments:**

    - `bits`: the width of a code, from 2 to 8.
    - `block_size`: how many values share a scale; `None` for one scale per channel, `"tensor"` for one scale for the
        whole array.
    - `symmetric`: whether zero is always the middle code. Otherwise each block has a zero point.
    - `rounding`: how to round ties: `"half_even"`, as everywhere in JAX, or `"half_away"` from zero, as in C.

    **Returns:**

    A format.

    **Raises:**

    `ValueError` if `bits` is not an integer from 2 to 8, if `symmetric` is not a boolean, or if `rounding` is unknown.
    """
    if isinstance(bits, bool) or not isinstance(bits, Integral) or not 2 <= bits <= 8:
        raise ValueError(f"`bits` must be an integer from 2 to 8. Got {bits!r}. One bit has no zero: see `eqq.Binary`.")
    if not isinstance(symmetric, bool):
        raise ValueError(f"`symmetric` must be True or False. Got {symmetric!r}.")
    check_rounding(rounding)
    ours = {8: Int8, 6: Int6, 5: Int5, 4: Int4, 3: Int3, 2: Int2}.get(int(bits))
    # Symmetric Int2 and Int3 use all their levels, unlike the rule above.
    same = rounding == "half_even" and (bits > 3 or not symmetric)
    if ours is not None and same and _fills_bytes(int(bits), block_size):
        return ours(block_size=block_size, symmetric=symmetric)
    return _Integer(width=int(bits), block_size=block_size, symmetric=symmetric, rounding=rounding)


def code_width(format: AbstractFormat) -> int:
    """Returns the width of a code in bits, which may be less than it takes in memory."""
    return format.width if isinstance(format, _Integer) else format.bits


def _fills_bytes(bits: int, block_size: BlockSize) -> bool:
    return not isinstance(block_size, int) or block_size % num_planes(bits) == 0


def check_rounding(rounding: Any) -> None:
    """Raises if `rounding` is not a known name."""
    if rounding not in ("half_even", "half_away"):
        raise ValueError(f'`rounding` must be "half_even" or "half_away". Got {rounding!r}.')


class _Integer(AbstractAffineFormat):
    block_size: BlockSize = eqx.field(static=True)
    width: int = eqx.field(static=True)
    symmetric: bool = eqx.field(static=True)
    rounding: Rounding = eqx.field(static=True)

    @property
    def bits(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.width if _fills_bytes(self.width, self.block_size) else 8

    @property
    def has_zero_points(self) -> bool:
        return not self.symmetric

    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        if self.symmetric:
            return symmetric_scale(absmax(blocks), self.width)
        return affine_scale(*minmax(blocks), self.width)

    def choose_zero_point(
        self, blocks: Float32[Array, "*batch blocks block"], scale: Float32[Array, "*batch blocks"]
    ) -> UInt8[Array, "*batch blocks"]:
        return affine_zero_point(minmax(blocks)[0], scale, self.width)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        round = round_half_away if self.rounding == "half_away" else jnp.round
        return encode_integer(round(values), self.width, self.symmetric)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return decode_integer(codes, self.width, self.symmetric)

    def __repr__(self) -> str:
        block, rounding = f"block_size={self.block_size!r}", f"rounding={self.rounding!r}"
        return f"integer_format({self.width}, {block}, symmetric={self.symmetric}, {rounding})"
