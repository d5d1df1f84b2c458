"""Evenly spaced levels: Int8 to Int2, symmetric and affine."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .._numerics.blocks import absmax, BlockSize, minmax, signed_absmax
from .._numerics.integers import affine_scale, affine_zero_point, decode_integer, encode_integer, symmetric_scale
from .._numerics.scale_bits import round_scale
from .base import AbstractAffineFormat, Blocks, check_stored_float, Scales, StoredFloat


class AbstractInteger(AbstractAffineFormat):
    """A format whose codes are integers.

    Symmetric codes are stored plus `2**(bits - 1)`, so that they are unsigned.
    """

    block_size: BlockSize = eqx.field(static=True, default=64)
    symmetric: bool = eqx.field(static=True, default=True)
    scale_dtype: StoredFloat = eqx.field(static=True, default="float32")  # pyright: ignore
    # Whether symmetric codes use all `2**bits` levels. The sign of the scale then points the longer side at the value
    # of largest magnitude.
    uses_lowest_code: ClassVar[bool] = False

    def __check_init__(self) -> None:
        if not isinstance(self.symmetric, bool):
            raise TypeError(f"`symmetric` of {type(self).__name__} must be True or False. Got {self.symmetric!r}.")
        check_stored_float(self)

    @property
    def has_zero_points(self) -> bool:
        return not self.symmetric

    def choose_scale(self, blocks: Blocks) -> Scales:
        if self.symmetric and self.uses_lowest_code:
            return signed_absmax(blocks) / -(2 ** (self.bits - 1))
        if self.symmetric:
            return symmetric_scale(absmax(blocks), self.bits)
        return affine_scale(*minmax(blocks), self.bits)

    def choose_zero_point(self, blocks: Blocks, scale: Scales) -> UInt8[Array, "*batch blocks"]:
        return affine_zero_point(minmax(blocks)[0], round_scale(scale, self.scale_dtype), self.bits)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        # Rounding comes before the offset, so that ties fall as they do on the values themselves.
        return encode_integer(jnp.round(values), self.bits, self.symmetric)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return decode_integer(codes, self.bits, self.symmetric)


class Int8(AbstractInteger):
    r"""Eight-bit integers, by default with one scale per channel.

    Symmetric: $s = \max|x| / 127$, codes $-127 \ldots 127$; a smaller scale, from calibration or a search, clips to
    $-128 \ldots 127$. Affine: $s = (\max x - \min x) / 255$ over a range that includes zero, codes $0 \ldots 255$; the
    zero point is $z = -\min x / s$, rounded.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Int8(symmetric=False))
        model = eqq.quantize_tree(model, "int8")
        ```

    **Arguments:**

    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    - `symmetric`: whether zero is always the middle code. Otherwise each block also stores a zero point. Use that for
        values that lie mostly on one side of zero.
    - `scale_dtype`: the dtype of stored scales, `"float32"`, `"float16"` or `"bfloat16"`. Scales of 16 bits save 0.25
        bits per weight at block size 64. In float16 a scale below $6 \cdot 10^{-8}$ becomes zero, and its block too.
    """

    block_size: BlockSize = eqx.field(static=True, default=None)
    bits = 8


class Int6(AbstractInteger):
    r"""Six-bit integers in blocks.

    Symmetric: $s = \max|x| / 31$, codes $-31 \ldots 31$. Affine: $s = (\max x - \min x) / 63$ over a range that
    includes zero, codes $0 \ldots 63$ and a zero point per block, of as many bits.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Int6(block_size=128))
        model = eqq.quantize_tree(model, "int6")
        ```

    **Arguments:**

    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    - `symmetric`: whether zero is always the middle code. Otherwise each block also stores a zero point. Use that for
        values that lie mostly on one side of zero.
    - `scale_dtype`: the dtype of stored scales, `"float32"`, `"float16"` or `"bfloat16"`. Scales of 16 bits save 0.25
        bits per weight at block size 64. In float16 a scale below $6 \cdot 10^{-8}$ becomes zero, and its block too.
    """

    bits = 6


class Int5(AbstractInteger):
    r"""Five-bit integers in blocks.

    Symmetric: $s = \max|x| / 15$, codes $-15 \ldots 15$. Affine: $s = (\max x - \min x) / 31$ over a range that
    includes zero, codes $0 \ldots 31$ and a zero point per block, of as many bits.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Int5(scale_dtype="float16"))
        model = eqq.quantize_tree(model, "int5")
        ```

    **Arguments:**

    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    - `symmetric`: whether zero is always the middle code. Otherwise each block also stores a zero point. Use that for
        values that lie mostly on one side of zero.
    - `scale_dtype`: the dtype of stored scales, `"float32"`, `"float16"` or `"bfloat16"`. Scales of 16 bits save 0.25
        bits per weight at block size 64. In float16 a scale below $6 \cdot 10^{-8}$ becomes zero, and its block too.
    """

    bits = 5


class Int4(AbstractInteger):
    r"""Four-bit integers in blocks.

    Symmetric: $s = \max|x| / 7$, codes $-7 \ldots 7$. Affine: $s = (\max x - \min x) / 15$ over a range that includes
    zero, codes $0 \ldots 15$ and a zero point per block, of as many bits.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Int4(block_size=32, symmetric=False))
        model = eqq.quantize_tree(model, "int4")
        ```

    **Arguments:**

    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    - `symmetric`: whether zero is always the middle code. Otherwise each block also stores a zero point. Use that for
        values that lie mostly on one side of zero.
    - `scale_dtype`: the dtype of stored scales, `"float32"`, `"float16"` or `"bfloat16"`. Scales of 16 bits save 0.25
        bits per weight at block size 64. In float16 a scale below $6 \cdot 10^{-8}$ becomes zero, and its block too.
    """

    bits = 4


class Int3(AbstractInteger):
    r"""Three-bit integers in blocks.

    Symmetric: levels $-4 \ldots 3$, with $s = x_m / {-4}$ where $x_m$ is the value of largest magnitude with its sign.
    Affine: $s = (\max x - \min x) / 7$ over a range that includes zero, codes $0 \ldots 7$ and a zero point per block.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Int3(block_size=128))
        model = eqq.quantize_tree(model, "int3")
        ```

    **Arguments:**

    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    - `symmetric`: whether zero is always the middle code. Otherwise each block also stores a zero point. Use that for
        values that lie mostly on one side of zero.
    - `scale_dtype`: the dtype of stored scales, `"float32"`, `"float16"` or `"bfloat16"`. Scales of 16 bits save 0.25
        bits per weight at block size 64. In float16 a scale below $6 \cdot 10^{-8}$ becomes zero, and its block too.
    """

    bits = 3
    uses_lowest_code = True


class Int2(AbstractInteger):
    r"""Two-bit integers in blocks.

    Symmetric: levels $-2 \ldots 1$, with $s = x_m / {-2}$ where $x_m$ is the value of largest magnitude with its sign.
    At two bits, one more level matters: levels $-1 \ldots 1$ alone lose 5 dB on normally distributed weights.
    Affine: $s = (\max x - \min x) / 3$ over a range that includes zero, codes $0 \ldots 3$ and a zero point per block.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Int2(block_size=32, scale_dtype="float16"))
        model = eqq.quantize_tree(model, "int2")
        ```

    **Arguments:**

    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    - `symmetric`: whether zero is always the middle code. Otherwise each block also stores a zero point. Use that for
        values that lie mostly on one side of zero.
    - `scale_dtype`: the dtype of stored scales, `"float32"`, `"float16"` or `"bfloat16"`. Scales of 16 bits save 0.25
        bits per weight at block size 64. In float16 a scale below $6 \cdot 10^{-8}$ becomes zero, and its block too.
    """

    bits = 2
    uses_lowest_code = True
