"""MLX's affine mode: integers of any width, with a scale and an offset per block."""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .._numerics.blocks import BlockSize, divide, ends
from .._numerics.scale_bits import ScaleDtype
from .base import AbstractOffsetFormat, Blocks, check_stored_float, Scales, StoredFloat


class MLX(AbstractOffsetFormat):
    r"""MLX's affine mode: $q s + o$, with a scale $s$ and an offset $o$ per block.

    The integers $q$ begin at zero.

    The offset $o$ is the value of a block that is farthest from zero, and $s$ leads from there to the other end. It is
    rounded so that $o / s$ is whole, and zero has a code if the block has values on both sides of it.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.formats.MLX(bits=4, block_size=64))
        model = eqq.quantize_tree(model, "mlx")
        ```

    ??? cite

        [MLX, `quantize`](https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html)

    **Arguments:**

    - `bits`: the width of a code: 2, 3, 4, 5, 6 or 8.
    - `block_size`: how many values along the quantized axis share a scale and an offset; MLX takes 32, 64 and 128.
    - `scale_dtype`: the dtype of stored scales and offsets, `"float16"`, `"bfloat16"` or `"float32"`.
    """

    bits: int = eqx.field(static=True, default=4)
    block_size: BlockSize = eqx.field(static=True, default=64)
    scale_dtype: ScaleDtype = eqx.field(static=True, default="float16")

    def __init__(
        self, bits: Literal[2, 3, 4, 5, 6, 8] = 4, block_size: BlockSize = 64, scale_dtype: StoredFloat = "float16"
    ) -> None:
        self.bits, self.block_size, self.scale_dtype = bits, block_size, scale_dtype  # pyright: ignore[reportIncompatibleVariableOverride]

    def __check_init__(self) -> None:
        check_stored_float(self)
        if self.bits not in (2, 3, 4, 5, 6, 8):
            raise ValueError(f"`bits` of MLX must be 2, 3, 4, 5, 6 or 8. Got {self.bits!r}.")

    def choose_scale(self, blocks: Blocks) -> Scales:
        low, high = ends(blocks)
        top = 2**self.bits - 1
        size = high / top - low / top  # divided first, since `high - low` may overflow
        scale = jnp.where(jnp.abs(low) > jnp.abs(high), size, -size)
        edge = self.choose_offset(blocks, scale)
        return divide(edge, jnp.round(divide(edge, scale)))

    def choose_offset(self, blocks: Blocks, scale: Scales) -> Scales:
        low, high = ends(blocks)
        return jnp.where(jnp.abs(low) > jnp.abs(high), low, high)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return jnp.clip(jnp.round(values), 0, 2**self.bits - 1).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return codes.astype(jnp.float32)
