"""Formats of GGUF files, as ggml defines them.

See https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c.

Formats that ggml quantizes without a search equal its reference bit for bit; all dequantize to the same values.
"""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .._numerics.blocks import absmax, absmean, BlockSize, ends, minmax, signed_absmax
from .._numerics.integers import affine_scale
from .._numerics.rounding import divide_as_c, round_half_away
from .._numerics.scale_bits import round_up_from_zero, ScaleDtype
from .base import AbstractFormat, AbstractOffsetFormat, Blocks, Scales
from .bitwise import AbstractBinary
from .codebook import AbstractCodebook
from .integer import Int6, Int8


class _AbstractPlain(AbstractFormat):
    """One level of scales, in float16. ggml multiplies values by their reciprocals."""

    block_size: BlockSize = eqx.field(static=True, default=32, init=False)
    scale_dtype: ClassVar[ScaleDtype] = "float16"
    multiplies_by_reciprocal = True


class _AbstractCentered(AbstractFormat):
    """All `2**bits` levels about zero, with a sign of the scale.

    The sign turns the longer side to the largest magnitude.
    """

    def choose_scale(self, blocks: Blocks) -> Scales:
        return signed_absmax(blocks) / -(2 ** (self.bits - 1))

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        half = 2 ** (self.bits - 1)
        return jnp.clip(jnp.trunc(values + (half + 0.5)), 0, 2 * half - 1).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32) - 2 ** (self.bits - 1)


class Q4_0(_AbstractCentered, _AbstractPlain):
    r"""GGUF's Q4_0: $s = x_m / {-8}$, codes $-8 \ldots 7$.

    Here $x_m$ is the value of largest magnitude with its sign.

    Stores codes plus 8, as $\lfloor x / s + 8.5 \rfloor$. Blocks of 32; 4.5 bits per weight.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q4_0())
        model = eqq.quantize_tree(model, "q4_0")
        ```

    ??? cite

        [ggml, `quantize_row_q4_0_ref`](https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c)

    **Arguments:** none; the block size is set by definition.
    """

    bits = 4


class Q8_0(_AbstractPlain):
    r"""GGUF's Q8_0: $s = \max|x| / 127$, codes $-127 \ldots 127$.

    Rounds to nearest, ties away from zero.

    Stores codes plus 128. Blocks of 32; 8.5 bits per weight.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q8_0())
        model = eqq.quantize_tree(model, "q8_0")
        ```

    ??? cite

        [ggml, `quantize_row_q8_0_ref`](https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c)

    **Arguments:** none; the block size is set by definition.
    """

    bits = 8

    def choose_scale(self, blocks: Blocks) -> Scales:
        return divide_as_c(absmax(blocks), 127)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return (jnp.clip(round_half_away(values), -128, 127) + 128).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32) - 128


class _AbstractSteps(AbstractOffsetFormat):
    """Codes from zero on, at even steps from the offset."""

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return jnp.clip(jnp.trunc(values + 0.5), 0, 2**self.bits - 1).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32)


class _AbstractOffset(_AbstractSteps):
    """Steps from the least value of a block to the largest."""

    def choose_scale(self, blocks: Blocks) -> Scales:
        (low, high), top = ends(blocks), 2**self.bits - 1
        # Divided first where `high - low` overflows.
        return jnp.where(jnp.isfinite(high - low), divide_as_c(high - low, top), high / top - low / top)

    def choose_offset(self, blocks: Blocks, scale: Scales) -> Scales:
        return ends(blocks)[0]


class Q4_1(_AbstractOffset, _AbstractPlain):
    r"""GGUF's Q4_1: $s = (\max x - \min x) / 15$, codes $0 \ldots 15$, and an offset.

    The offset is $\min x$.

    Blocks of 32; scales and offsets in float16; 5 bits per weight.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q4_1())
        model = eqq.quantize_tree(model, "q4_1")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    bits = 4


class Q5_1(_AbstractOffset, _AbstractPlain):
    r"""GGUF's Q5_1: $s = (\max x - \min x) / 31$, codes $0 \ldots 31$, and an offset.

    The offset is $\min x$.

    Blocks of 32; scales and offsets in float16; 6 bits per weight.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q5_1())
        model = eqq.quantize_tree(model, "q5_1")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    bits = 5


class Q5_0(_AbstractCentered, _AbstractPlain):
    r"""GGUF's Q5_0: $s = x_m / {-16}$, codes $-16 \ldots 15$.

    Here $x_m$ is the value of largest magnitude with its sign.

    Stores codes plus 16, as $\lfloor x / s + 16.5 \rfloor$. Blocks of 32; scales in float16; 5.5 bits per weight.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q5_0())
        model = eqq.quantize_tree(model, "q5_0")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    bits = 5


class Q1_0(AbstractBinary, _AbstractPlain):
    r"""GGUF's Q1_0: values $-s$ and $s$ in one bit, where $s$ is the mean of $|x|$.

    Zero becomes $s$.

    Blocks of 128; scales in float16; 1.125 bits per weight.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q1_0())
        model = eqq.quantize_tree(model, "q1_0")
        ```

    ??? cite

        [ggml, `quantize_row_q1_0_ref`](https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c)

    **Arguments:** none; the block size is set by definition.
    """

    block_size: BlockSize = eqx.field(static=True, default=128, init=False)

    def choose_scale(self, blocks: Blocks) -> Scales:
        return absmean(blocks)


class _AbstractTernary(_AbstractPlain):
    """Codes of two bits: -1, 0, 1 or 2 times the largest magnitude of a block."""

    bits = 2

    def choose_scale(self, blocks: Blocks) -> Scales:
        return absmax(blocks)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32) - 1


class Q2_0(_AbstractTernary):
    r"""GGUF's Q2_0: $s = \max|x|$, codes $-1 \ldots 2$.

    For weights that are already ternary: ggml's scale leaves the code 2 unused. [`eqquant.MSE`][] and
    [`eqquant.JointMSE`][] choose scales that use it.

    Blocks of 64; scales in float16; 2.25 bits per weight.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q2_0())
        model = eqq.quantize_tree(model, "q2_0")
        ```

    ??? cite

        [ggml, `quantize_row_q2_0_ref`](https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c)

    **Arguments:** none; the block size is set by definition.
    """

    block_size: BlockSize = eqx.field(static=True, default=64, init=False)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return (jnp.clip(round_half_away(values), -1, 2) + 1).astype(jnp.uint8)


class TQ2_0(_AbstractTernary):
    r"""GGUF's TQ2_0 and TQ1_0, for weights that are ternary already.

    Values $-s, 0, s$ with $s = \max|x|$.

    Blocks of 256; scales in float16; two bits per code, 2.0625 bits per weight. (TQ1_0 packs five codes in a byte.)

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.TQ2_0())
        model = eqq.quantize_tree(model, "tq2_0")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    block_size: BlockSize = eqx.field(static=True, default=256, init=False)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return (jnp.clip(round_half_away(values), -1, 1) + 1).astype(jnp.uint8)


#
# Two levels: scales are codes too, with a scale in float16 for 256 weights.
#


class _Unsigned(AbstractFormat):
    """Scales, or offsets, of one sign: codes from zero to the top, and a scale with their sign."""

    bits: int = eqx.field(static=True)
    block_size: BlockSize = eqx.field(static=True)
    scale_dtype: ClassVar[ScaleDtype] = "float16"

    def choose_scale(self, blocks: Blocks) -> Scales:
        # Not zero: scales would vanish beside offsets.
        return round_up_from_zero(signed_absmax(blocks) / (2**self.bits - 1), self.scale_dtype)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return jnp.clip(jnp.round(values), 0, 2**self.bits - 1).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32)


class _AbstractK(_AbstractSteps):
    """The offset is at most zero, so that it can be a code with a scale, too."""

    block_size: BlockSize = eqx.field(static=True, default=32, init=False)
    scale_format: ClassVar[AbstractFormat | None] = _Unsigned(bits=6, block_size=8)

    def choose_scale(self, blocks: Blocks) -> Scales:
        return affine_scale(*minmax(blocks), self.bits)

    def choose_offset(self, blocks: Blocks, scale: Scales) -> Scales:
        return minmax(blocks)[0]


class Q2_K(_AbstractK):
    r"""GGUF's Q2_K: codes $0 \ldots 3$ in blocks of 16; 2.625 bits per weight.

    Scales and offsets have four bits.

    $s = (\max x - \min x) / 3$ over a range that includes zero, and the offset $\min x$, each rounded to a
    multiple of a float16 for 256 weights.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q2_K())
        model = eqq.quantize_tree(model, "q2_k")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    block_size: BlockSize = eqx.field(static=True, default=16, init=False)
    bits = 2
    scale_format: ClassVar[AbstractFormat | None] = _Unsigned(bits=4, block_size=16)


class Q4_K(_AbstractK):
    r"""GGUF's Q4_K: codes $0 \ldots 15$ in blocks of 32; 4.5 bits per weight.

    Scales and offsets have six bits.

    $s = (\max x - \min x) / 15$ over a range that includes zero, and the offset $\min x$, each rounded to a
    multiple of a float16 for 256 weights.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q4_K())
        model = eqq.quantize_tree(model, "q4_k")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    bits = 4


class Q5_K(_AbstractK):
    r"""GGUF's Q5_K: codes $0 \ldots 31$ in blocks of 32; 5.5 bits per weight.

    Scales and offsets have six bits.

    $s = (\max x - \min x) / 31$ over a range that includes zero, and the offset $\min x$, each rounded to a
    multiple of a float16 for 256 weights.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q5_K())
        model = eqq.quantize_tree(model, "q5_k")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    bits = 5


class Q3_K(_AbstractCentered):
    r"""GGUF's Q3_K: codes $-4 \ldots 3$ in blocks of 16; 3.4375 bits per weight.

    Scales have six bits.

    $s = x_m / {-4}$, where $x_m$ is the value of largest magnitude with its sign, rounded to a multiple of a
    float16 for 256 weights.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q3_K())
        model = eqq.quantize_tree(model, "q3_k")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    block_size: BlockSize = eqx.field(static=True, default=16, init=False)
    bits = 3
    scale_format: ClassVar[AbstractFormat | None] = Int6(block_size=16, scale_dtype="float16")


class Q6_K(_AbstractCentered):
    r"""GGUF's Q6_K: codes $-32 \ldots 31$ in blocks of 16; 6.5625 bits per weight.

    Scales have eight bits.

    $s = x_m / {-32}$, where $x_m$ is the value of largest magnitude with its sign, rounded to a multiple of a
    float16 for 256 weights.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.Q6_K())
        model = eqq.quantize_tree(model, "q6_k")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    block_size: BlockSize = eqx.field(static=True, default=16, init=False)
    bits = 6
    scale_format: ClassVar[AbstractFormat | None] = Int8(block_size=16, scale_dtype="float16")


_IQ4 = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))


class _AbstractIQ4(AbstractCodebook):
    """Sixteen integers, dense about zero, of which none is zero."""

    block_size: BlockSize = eqx.field(static=True, default=32, init=False)
    bits = 4
    signed_scale = True

    @property
    def codebook(self) -> tuple[float, ...]:
        return _IQ4


class IQ4_NL(_AbstractIQ4):
    r"""GGUF's IQ4_NL: sixteen levels from -127 to 113, dense about zero; $s = x_m / {-127}$.

    $x_m$ is the value of largest magnitude with its sign. Blocks of 32; scales in float16; 4.5 bits per weight.
    No level is zero: a zero beside other values decodes to $s$, so padded and sparse weights lose their zeros.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.IQ4_NL())
        model = eqq.quantize_tree(model, "iq4_nl")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    scale_dtype: ClassVar[ScaleDtype] = "float16"


class IQ4_XS(_AbstractIQ4):
    r"""GGUF's IQ4_XS: the levels of [`eqquant.formats.IQ4_NL`][], in 4.25 bits per weight.

    Scales have six bits.

    Blocks of 32; scales are multiples of a float16 for 256 weights. No level is zero: a zero beside other values
    decodes to $s$, so padded and sparse weights lose their zeros.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.IQ4_XS())
        model = eqq.quantize_tree(model, "iq4_xs")
        ```

    **Arguments:** none; the block size is set by definition.
    """

    scale_format: ClassVar[AbstractFormat | None] = Int6(block_size=8, scale_dtype="float16")
