"""Eight-bit floats, and the base of all formats of small floats."""

import abc
from typing import Literal

import equinox as eqx
from jaxtyping import Array, Float32, UInt8

from .._numerics.blocks import absmax, BlockSize
from .._numerics.minifloats import E4M3, E5M2, Minifloat, UE4M4
from .._numerics.rounding import divide_as_c
from .base import AbstractFormat, Blocks, Scales


_KINDS = {"e4m3": E4M3, "e5m2": E5M2, "ue4m4": UE4M4}


class AbstractMinifloat(AbstractFormat):
    """A format whose codes are small floats."""

    @property
    @abc.abstractmethod
    def element(self) -> Minifloat:
        """The float that a code holds."""

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return self.element.encode(values)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return self.element.decode(codes)


class FP8(AbstractMinifloat):
    r"""Eight-bit floats, by default with one scale per channel: $s = \max|x| / \mathrm{max}$.

    The scale maps the largest magnitude onto the largest finite number: 448 for e4m3, 57344 for e5m2. Values saturate
    before the cast, so quantizing never makes a NaN or an infinity.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.FP8("e5m2"))
        model = eqq.quantize_tree(model, "fp8")
        ```

    ??? cite

        [FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433)

    **Arguments:**

    - `kind`: `"e4m3"` (three bits of mantissa, the default), `"e5m2"` (more range, less precision), or `"ue4m4"` (no
        sign, four bits of mantissa: for values that are never negative, such as scales; a negative value becomes its
        magnitude).
    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    """

    kind: Literal["e4m3", "e5m2", "ue4m4"] = eqx.field(static=True, default="e4m3")
    block_size: BlockSize = eqx.field(static=True, default=None)
    bits = 8

    def __init__(self, kind: Literal["e4m3", "e5m2", "ue4m4"] = "e4m3", block_size: BlockSize = None) -> None:
        self.kind, self.block_size = kind, block_size

    def __check_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(_KINDS)}. Got {self.kind!r}.")

    @property
    def element(self) -> Minifloat:
        return _KINDS[self.kind]

    def choose_scale(self, blocks: Blocks) -> Scales:
        return divide_as_c(absmax(blocks), self.element.max)
