"""`StoredWeight` and `Layout`: a quantized weight as kernels see it.

Any format of at most 256 codes is a table of values, so kernels need no formats: NF4, integers and small floats of four
bits are all tables of 16 values. `kind` marks tables that can be decoded faster than by a lookup.
"""

import functools as ft
from typing import Literal, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, DTypeLike, Float32, Int32, UInt, UInt8


Kind = Literal["integer", "float8_e4m3fn", "float8_e5m2", "table"]
ScaleKind = Literal["float32", "float16", "bfloat16", "e8m0", "e4m3", "e5m2", "ue4m4"]


class StoredWeight(NamedTuple):
    """The arrays of a weight as they are stored, for native kernels.

    Zero points are packed as codes are, and offsets are stored as scales are. With `Layout.nested`, `scale_codes` are
    the scales, and `scale` holds the scales of scales; likewise for offsets.
    """

    codes: UInt8[Array, "*batch n bytes"]
    scale: UInt[Array, "*batch n blocks"]
    row_scale: Float32[Array, "*batch n 1"] | None = None
    zero_point: UInt8[Array, "*batch n bytes_of_zero_points"] | None = None
    scale_codes: UInt8[Array, "*batch n bytes_of_scales"] | None = None
    offset: UInt[Array, "*batch n blocks"] | None = None
    offset_codes: UInt8[Array, "*batch n bytes_of_scales"] | None = None
    selected: Int32[Array, "*selected"] | None = None  # indices into the first axis, a stack


class Codec(NamedTuple):
    """How rows are packed whose codes stand for several values, for native kernels.

    They decode a row to a code of `bits` for each value. `Codec` in `native/src/core/problem.h` explains both kinds
    and their `parameters`.
    """

    kind: Literal["trellis", "grid"]
    parameters: tuple[int, ...]
    vectors: bytes = b""  # of a grid: int8, one vector for each index
    bits: int = 8
    lowest: int = -128  # the value of code 0; the others follow, one more each


class Layout(NamedTuple):
    """The static description of a weight: what its bits mean."""

    length: int  # codes in a row
    bits: int  # bits of a code, 1 to 8
    block_size: int  # codes that share a scale; `length` if a row has one scale
    table: tuple[float, ...]  # the value of each of the `2**bits` codes; () if no kernel reads them
    scale: ScaleKind = "float32"
    zero_points: bool = False
    offsets: bool = False
    nested: "Layout | None" = None  # the layout of quantized scales, which only native kernels read
    codec: Codec | None = None  # of codes that stand for several values; `bits` and `table` are of what it decodes to

    @property
    def planes(self) -> int:
        """The number of planes of a segment: how many codes share a byte.

        As `_numerics/packing.py` packs them.
        """
        return 8 // (self.bits & -self.bits)  # the lowest set bit is the width of the narrowest part

    @property
    def has_vectors(self) -> bool:
        """Whether a code stands for several values, so that at most native kernels read it."""
        return self.codec is not None or not self.table

    @property
    def per_channel(self) -> bool:
        """Whether scales are per channel: one for each row."""
        return self.block_size >= self.length

    @property
    def kind(self) -> Kind:
        return _kind(self.table)

    def stretch(self, dtype: DTypeLike) -> float:
        """Returns a factor of the table with which rounding it to `dtype` loses least.

        Divide scales by the factor. The rounding error of the table is the same in every block. If its mean is not
        zero, it adds up along a row whenever the mean of `x` is not zero.
        """
        return _stretch(self.table, jnp.dtype(dtype).name) if self.kind == "table" else 1.0

    @property
    def lowest(self) -> int:
        """The value of code 0, for integers."""
        return int(self.table[0])


@ft.lru_cache
def _kind(table: tuple[float, ...]) -> Kind:
    values = np.asarray(table, np.float32)
    if not table:
        return "table"
    exact = np.abs(values).max() <= 2**8  # in every dtype of activations
    if exact and values[0] == np.trunc(values[0]) and (np.diff(values) == 1).all():
        return "integer"
    codes = np.arange(len(values), dtype=np.uint8)
    for name in ("float8_e4m3fn", "float8_e5m2"):
        native = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
        if len(values) == 256 and np.array_equal(values, native, equal_nan=True):
            return name
    return "table"


@ft.lru_cache
def _stretch(table: tuple[float, ...], dtype: str) -> float:
    values = np.asarray(table)
    values = values[np.isfinite(values)]
    amax = np.abs(values).max(initial=0)
    if jnp.dtype(dtype).itemsize > 2 or amax == 0 or len(values) < 2:
        return 1.0
    # If values might overflow a 16-bit float or be subnormal, scale them to about one.
    unit = 1.0 if 2.0**-8 <= amax <= 2.0**8 else 2.0 ** -np.floor(np.log2(amax))
    # The frequency of each value, for normally distributed weights in blocks whose amax is 2.5 standard deviations.
    frequency = np.exp(-0.5 * (2.5 * values / amax) ** 2) * np.abs(np.gradient(values))
    frequency /= frequency.sum()
    factors = unit * (1 + np.arange(4096) / 4096)
    exact = factors[:, None] * values
    error = (exact.astype(jnp.dtype(dtype)).astype(np.float64) - exact) / unit
    # The squared error of a row of 4096 codes: the bias grows with their number, the deviation with its square root.
    return float(factors[np.argmin(error**2 @ frequency + 4096 * (error @ frequency) ** 2)])
