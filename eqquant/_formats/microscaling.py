"""Small floats in small blocks with small scales: MXFP8, MXFP4 and NVFP4."""

from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp

from .._numerics.blocks import absmax, BlockSize
from .._numerics.minifloats import E2M1, E4M3, E5M2, exp2, floor_log2, Minifloat
from .._numerics.scale_bits import ScaleDtype
from .base import AbstractFormat, Blocks, Scales
from .floating import AbstractMinifloat, FP8


class _AbstractMX(AbstractMinifloat):
    """OCP microscaling: minifloats in blocks of 32, with scales that are powers of two.

    A scale takes one byte.
    """

    block_size: BlockSize = eqx.field(static=True, default=32, init=False)
    scale_dtype: ClassVar[ScaleDtype] = "e8m0"

    def choose_scale(self, blocks: Blocks) -> Scales:
        exponent = floor_log2(absmax(blocks)) - self.element.max_exponent
        # E8M0 goes down to 2**-127, but that is subnormal in float32, which many backends flush to zero.
        return exp2(jnp.maximum(exponent, -126))


class MXFP8(_AbstractMX):
    r"""OCP microscaling with eight-bit elements in blocks of 32.

    $s = 2^{\lfloor \log_2 \max|x| \rfloor - e}$.

    $e$ is the exponent of the largest element value, 8 for e4m3 and 15 for e5m2; larger values saturate.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.MXFP8("e5m2"))
        model = eqq.quantize_tree(model, "mxfp8")
        ```

    ??? cite

        [OCP Microscaling Formats (MX) Specification v1.0](https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)

    **Arguments:**

    - `kind`: the type of an element, `"e4m3"` (the default) or `"e5m2"`.
    """

    kind: Literal["e4m3", "e5m2"] = eqx.field(static=True, default="e4m3")
    bits = 8

    def __check_init__(self) -> None:
        if self.kind not in ("e4m3", "e5m2"):
            raise ValueError(f"`kind` must be e4m3 or e5m2. Got {self.kind!r}.")

    @property
    def element(self) -> Minifloat:
        return {"e4m3": E4M3, "e5m2": E5M2}[self.kind]


class MXFP4(_AbstractMX):
    r"""OCP microscaling with four-bit elements (e2m1) in blocks of 32.

    $s = 2^{\lfloor \log_2 \max|x| \rfloor - 2}$.

    The elements are $\pm\{0, 0.5, 1, 1.5, 2, 3, 4, 6\}$; values above 6 saturate, ties go to the even mantissa.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.MXFP4())
        model = eqq.quantize_tree(model, "mxfp4")
        ```

    ??? cite

        [OCP Microscaling Formats (MX) Specification v1.0](https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)

    **Arguments:** none; the block size is 32 by definition.
    """

    bits = 4

    @property
    def element(self) -> Minifloat:
        return E2M1


class NVFP4(AbstractMinifloat):
    r"""NVIDIA's four-bit float: e2m1 elements in blocks of 16.

    Scales are e4m3, with one float32 scale per matrix.

    $s = \max|x| / 6$ per block. It is quantized to e4m3 with one scale for the whole matrix, $\max s / 448$:
    each layer of a stack and each expert has its own.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.NVFP4())
        model = eqq.quantize_tree(model, "nvfp4")
        ```

    ??? cite

        [Introducing NVFP4 for Efficient and Accurate Low-Precision Inference](https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/)

    **Arguments:**

    - `block_size`: 16 by definition (the default), or `(16, 16)`: tiles, whose transpose has the same codes and scales,
        for [training](../low_precision.md). Files of others hold the scale of a tile in each of its rows.
    """

    block_size: BlockSize = eqx.field(static=True, default=16)
    bits = 4
    scale_format: ClassVar[AbstractFormat | None] = FP8("e4m3", block_size="tensor")

    def __check_init__(self) -> None:
        if self.block_size not in (16, (16, 16)):
            raise ValueError(f"`block_size` of NVFP4 must be 16 or (16, 16). Got {self.block_size!r}.")

    @property
    def element(self) -> Minifloat:
        return E2M1

    def choose_scale(self, blocks: Blocks) -> Scales:
        return absmax(blocks) / E2M1.max
