"""Trellis-coded quantization of one to four bits, where neighboring values share bits."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from .._native.weight import Codec
from .._numerics import trellis
from .._numerics.blocks import absmax, BlockSize, divide
from .._numerics.scale_bits import ScaleDtype
from .base import AbstractSequenceFormat, Blocks, check_stored_float, Scales, SEARCH_LIMIT, StoredFloat


# By the bits: the standard deviation of normally distributed values, in units of the scale of least error.
_DEVIATIONS = {1: 43.0, 2: 37.0, 3: 35.0, 4: 33.0}
# Their mean squared error at that scale, in the same units.
_ERRORS = {1: 512.0, 2: 99.1, 3: 23.3, 4: 5.45}
# Multiples of that scale to try: larger ones clip fewer outliers.
_FACTORS = np.geomspace(1, 16, 13).astype(np.float32)


class Trellis(AbstractSequenceFormat):
    r"""A trellis code: a value is a hash of 12 bits; neighbors share all but `bits`.

    At two bits normally distributed weights have an SQNR of 11.4 dB, where `Int2` has 8.1 dB and no code of two bits
    exceeds 12.04 dB. Values are integers from -123 to 113, times the scale of the block. The Viterbi algorithm finds
    the codes: half a microsecond per value with native kernels, and far longer without. Rotate weights with outliers
    first, by [`eqquant.transforms.rotate`][].

    The trellis of 128 values is tail-biting: their codes form a circle, so rows can be cut after each 128.
    [`eqquant.GPTQ`][] corrects, along each path of the search, the values that follow. Zero has a code, but not next to
    every value.

    Like QTIP's bitshift trellis with its code 1MAD, but with windows of 12 bits instead of 16 and a hash of 16-bit
    products. Files of QTIP are not read.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, eqq.formats.Trellis(2))
        model = eqq.quantize_tree(model, "trellis2", method=eqq.GPTQ(stats))
        ```

    ??? cite

        [QTIP: Quantization with Trellises and Incoherence Processing](https://arxiv.org/abs/2406.11235)

    **Arguments:**

    - `bits`: the bits per value, 1 to 4.
    - `block_size`: how many values along the quantized axis share a scale: a multiple of 128, `None` for one scale per
        channel, `"tensor"` for one for each matrix.
    - `scale_dtype`: the dtype of stored scales, `"bfloat16"`, `"float16"` or `"float32"`.
    """

    bits: int = eqx.field(static=True)
    block_size: BlockSize = eqx.field(static=True, default=None)
    scale_dtype: ScaleDtype = eqx.field(static=True, default="bfloat16")
    segment = trellis.SEGMENT

    def __init__(self, bits: int, block_size: BlockSize = None, scale_dtype: StoredFloat = "bfloat16") -> None:
        self.bits, self.block_size, self.scale_dtype = bits, block_size, scale_dtype  # pyright: ignore[reportIncompatibleVariableOverride]

    def __check_init__(self) -> None:
        check_stored_float(self)
        if type(self.bits) is not int or self.bits not in (1, 2, 3, 4):
            raise ValueError(f"`bits` of Trellis must be 1, 2, 3 or 4. Got {self.bits!r}.")
        if isinstance(self.block_size, int) and self.block_size % self.segment != 0:
            raise ValueError(
                f'`block_size` of Trellis must be None, "tensor" or a multiple of {self.segment}, since so many values '
                f"are encoded together. Got {self.block_size}."
            )

    @property
    def levels(self) -> tuple[float, ...]:
        return tuple(np.unique(trellis.decode_windows()).tolist())

    @property
    def codec(self) -> Codec:
        return Codec("trellis", (self.bits, trellis.MULTIPLIERS), lowest=int(self.levels[0]))

    def choose_scale(self, blocks: Blocks) -> Scales:
        amax, length = absmax(blocks), max(blocks.shape[-1], 1)
        # In units of the amax, squares do not overflow. XLA may divide by multiplying with the reciprocal, which is
        # subnormal, so zero, for a huge amax.
        shrink = jnp.where(amax > 1, 2.0**-8, 1.0)
        units = jnp.abs(divide(blocks * shrink[..., None], jnp.broadcast_to((amax * shrink)[..., None], blocks.shape)))
        smallest = jnp.sqrt(jnp.sum(jnp.square(units), axis=-1) / length) / _DEVIATIONS[self.bits]

        def error(factor: np.float32) -> Scales:
            clipped = jnp.maximum(units - (self.levels[-1] * factor * smallest)[..., None], 0)
            return jnp.sum(jnp.square(clipped), axis=-1) + length * _ERRORS[self.bits] * jnp.square(factor * smallest)

        best = jnp.argmin(jnp.stack([error(factor) for factor in _FACTORS]), axis=0)
        # No level overflows float32, though scales are rounded up.
        largest = float(jnp.finfo(jnp.float32).max) / (-self.levels[0] * (1 + 2**-7))
        return jnp.minimum(amax * smallest * jnp.asarray(_FACTORS)[best], largest)

    def packed_length(self, length: int) -> int:
        return trellis.packed_length(length, self.bits)

    def decode_row(self, packed: UInt8[Array, "*batch bytes"], length: int) -> Float32[Array, "*batch length"]:
        return trellis.decode(packed, self.bits, length).astype(jnp.float32)

    def encode_row(
        self,
        values: Float32[Array, "*batch length"],
        weights: Float32[Array, "*batch length"] | None = None,
        feedback: Float32[Array, "length length"] | None = None,
    ) -> UInt8[Array, "*batch bytes"]:
        values = jnp.where(jnp.isnan(values), 0, jnp.clip(values, -SEARCH_LIMIT, SEARCH_LIMIT))
        return trellis.encode(values, self.bits, weights, feedback)
