"""Formats of GGUF files. Values match ggml's reference quantizers bit for bit."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .._numerics.blocks import absmax, BlockSize, signed_absmax
from .._numerics.rounding import round_half_away
from .base import AbstractFormat


class Q4_0(AbstractFormat):
    r"""GGUF's Q4_0: $s = x_m / {-8}$, where $x_m$ is the value of largest magnitude with its sign; codes $-8 \ldots 7$.

    Stores codes plus 8, as $\lfloor x / s + 8.5 \rfloor$. Blocks of 32; 4.5 bits per weight.

    ??? cite

        [ggml, `quantize_row_q4_0_ref`](https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c)
    """

    block_size: BlockSize = eqx.field(static=True, default=32)
    bits = 4
    scale_dtype = "float16"
    multiplies_by_reciprocal = True

    def __init__(self) -> None:
        """**Arguments:** none; the block size is 32 by definition."""
        self.block_size = 32

    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        return signed_absmax(blocks) / -8

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return jnp.clip(jnp.trunc(values + 8.5), 0, 15).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32) - 8


class Q8_0(AbstractFormat):
    r"""GGUF's Q8_0: $s = \max|x| / 127$, codes $-127 \ldots 127$, rounded to nearest with ties away from zero.

    Stores codes plus 128. Blocks of 32; 8.5 bits per weight.

    ??? cite

        [ggml, `quantize_row_q8_0_ref`](https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c)
    """

    block_size: BlockSize = eqx.field(static=True, default=32)
    bits = 8
    scale_dtype = "float16"
    multiplies_by_reciprocal = True

    def __init__(self) -> None:
        """**Arguments:** none; the block size is 32 by definition."""
        self.block_size = 32

    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        return absmax(blocks) / 127

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return (jnp.clip(round_half_away(values), -128, 127) + 128).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32) - 128
