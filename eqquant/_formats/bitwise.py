"""One and two bits: Binary and Ternary."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .._numerics.blocks import absmean, BlockSize
from .base import AbstractFormat, Blocks, Scales


class _AbstractAbsMean(AbstractFormat):
    """The scale of a block is the mean magnitude of its values."""

    block_size: BlockSize = eqx.field(static=True, default=None)

    def choose_scale(self, blocks: Blocks) -> Scales:
        return absmean(blocks)


class Ternary(_AbstractAbsMean):
    r"""Values $-s, 0, s$ in two bits, where $s$ is the mean of $|x|$.

    Rounds $x / s$ and clips it to $\pm 1$.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Ternary(block_size="tensor"))
        model = eqq.quantize_tree(model, "ternary")
        ```

    ??? cite

        [The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits](https://arxiv.org/abs/2402.17764)

    **Arguments:**

    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    """

    bits = 2

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return (jnp.clip(jnp.round(values), -1, 1) + 1).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32) - 1


class AbstractBinary(AbstractFormat):
    """The sign of each value, in one bit."""

    bits = 1

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return (values >= 0).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return 2 * codes.astype(jnp.float32) - 1


class Binary(AbstractBinary, _AbstractAbsMean):
    r"""Values $-s$ and $s$ in one bit, where $s$ is the mean of $|x|$.

    This $s$ has the least squared error. Zero becomes $s$.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Binary())
        model = eqq.quantize_tree(model, "binary")
        ```

    ??? cite

        [XNOR-Net: ImageNet Classification Using Binary Convolutional Neural Networks](https://arxiv.org/abs/1603.05279)

    **Arguments:**

    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    """
