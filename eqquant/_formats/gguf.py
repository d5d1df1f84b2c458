"""Formats of the GGUF file, whose values equal those of ggml's reference quantizers bit for bit."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .._numerics.blocks import absmax, BlockSize, divide, signed_absmax
from .._numerics.rounding import round_half_away
from .base import AbstractFormat


class _AbstractGGUF(AbstractFormat):
    """Blocks of 32 with a float16 scale. Values are multiplied by the reciprocal of the scale before it is rounded."""

    block_size: BlockSize = eqx.field(static=True, default=32)
    scale_dtype = "float16"

    def normalise(
        self, x: Float32[Array, "*shape"], scale: Float32[Array, "*shape"], stored_scale: Float32[Array, "*shape"]
    ) -> Float32[Array, "*shape"]:
        # Beyond the range of float16 ggml writes an infinite scale or loses the block. There we divide by the scale
        # that is stored: the block saturates, or is zero.
        magnitude = jnp.abs(scale)
        usable = (magnitude <= float(jnp.finfo(jnp.float16).max)) & (stored_scale != 0)
        exact = x * divide(jnp.ones_like(scale), scale)
        return jnp.where(usable, exact, divide(x, stored_scale))


class Q4_0(_AbstractGGUF):
    r"""GGUF's Q4_0: $s = x_m / {-8}$, where $x_m$ is the value of largest magnitude with its sign; codes $-8 \ldots 7$.

    Codes are stored plus 8, and are $\lfloor x / s + 8.5 \rfloor$. Blocks of 32, 4.5 bits per weight.

    ??? cite

        [ggml, `quantize_row_q4_0_ref`](https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c)
    """

    bits = 4

    def __init__(self) -> None:
        """**Arguments:** none; the block size is 32 by definition."""
        self.block_size = 32

    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        return signed_absmax(blocks) / -8

    def encode(
        self, values: Float32[Array, "*shape"], round: Callable[[Array], Array] = jnp.round
    ) -> UInt8[Array, "*shape"]:
        codes = jnp.trunc(values + 8.5) if round is jnp.round else round(values + 8)
        return jnp.clip(codes, 0, 15).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32) - 8


class Q8_0(_AbstractGGUF):
    r"""GGUF's Q8_0: $s = \max|x| / 127$, codes $-127 \ldots 127$, rounded to nearest with ties away from zero.

    Codes are stored plus 128. Blocks of 32, 8.5 bits per weight.

    ??? cite

        [ggml, `quantize_row_q8_0_ref`](https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c)
    """

    bits = 8

    def __init__(self) -> None:
        """**Arguments:** none; the block size is 32 by definition."""
        self.block_size = 32

    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        return absmax(blocks) / 127

    def encode(
        self, values: Float32[Array, "*shape"], round: Callable[[Array], Array] = jnp.round
    ) -> UInt8[Array, "*shape"]:
        round = round_half_away if round is jnp.round else round
        return (jnp.clip(round(values), -128, 127) + 128).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32) - 128
