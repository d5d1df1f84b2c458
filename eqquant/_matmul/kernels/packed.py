"""A quantized weight as kernels see it: its arrays, and the meaning of their bits. Formats are unknown here.

Any format of at most 256 codes is a table of values, so kernels need no formats: NF4, integers and small floats of four
bits are all tables of 16 values. `kind` marks tables that can be decoded faster than by a lookup.
"""

import functools as ft
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt, UInt8

from ..._numerics import minifloats, packing
from ..._numerics.scale_bits import bits_to_scale


Kind = Literal["integer", "float8_e4m3fn", "float8_e5m2", "table"]
ScaleKind = Literal["float32", "float16", "bfloat16", "e8m0", "e4m3", "e5m2", "ue4m4"]


class Packed(NamedTuple):
    """The arrays of a weight of `n` rows, `(table[codes] - zero_point) * scale * row_scale + offset`."""

    codes: UInt8[Array, "*batch n bytes"]
    scale: UInt[Array, "*batch n blocks"]  # the bits of scales, of the type `Layout.scale`
    row_scale: Float32[Array, "*batch n 1"] | None = None  # multiplies the scales of a row
    zero_point: UInt8[Array, "*batch n blocks"] | None = None
    offset: Float32[Array, "*batch n blocks"] | None = None


class Stored(NamedTuple):
    """The same as stored, for `cpu`: zero points packed as codes are, and offsets stored as scales are.

    With `Layout.nested` scales are `scale_codes`, with scales of their own, and offsets likewise.
    """

    codes: UInt8[Array, "*batch n bytes"]
    scale: UInt[Array, "*batch n blocks"]
    row_scale: Float32[Array, "*batch n 1"] | None = None
    zero_point: UInt8[Array, "*batch n bytes_of_zero_points"] | None = None
    scale_codes: UInt8[Array, "*batch n bytes_of_scales"] | None = None
    offset: UInt[Array, "*batch n blocks"] | None = None
    offset_codes: UInt8[Array, "*batch n bytes_of_scales"] | None = None
    selected: Int32[Array, "*selected"] | None = None  # then the axis in front is a stack, of which these are meant


class Layout(NamedTuple):
    """The meaning of the bits of a `Packed`. Static."""

    length: int  # of a row, in codes
    bits: int  # of a code: 1 to 8
    block_size: int  # codes that share a scale; `length` if a row has one scale
    table: tuple[float, ...]  # the value of each of the `2**bits` codes
    scale: ScaleKind = "float32"
    zero_points: bool = False
    offsets: bool = False
    nested: "Layout | None" = None  # of the codes of scales, which only `cpu` reads; others get float32

    @property
    def planes(self) -> int:
        """The number of planes of a segment: of codes in a byte, if a code lies in one byte."""
        return packing.num_planes(self.bits)

    @property
    def one_scale(self) -> bool:
        """Whether a row has one scale."""
        return self.block_size >= self.length

    @property
    def kind(self) -> Kind:
        return _kind(self.table)

    def stretch(self, dtype: Any) -> float:
        """Returns a factor for the table that makes rounding it to `dtype` lose less. Divide scales by the factor.

        The rounding error of the table is the same in every block. If its mean is not zero, it adds up along a row
        whenever the mean of `x` is not zero.
        """
        return _stretch(self.table, jnp.dtype(dtype).name) if self.kind == "table" else 1.0

    @property
    def offset(self) -> int:
        """The value of code 0, for integers."""
        return int(self.table[0])


@ft.lru_cache
def _kind(table: tuple[float, ...]) -> Kind:
    values = np.asarray(table, np.float32)
    if values[0] == np.trunc(values[0]) and (np.diff(values) == 1).all():
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
    largest = np.abs(values).max(initial=0)
    if jnp.dtype(dtype).itemsize > 2 or largest == 0 or len(values) < 2:
        return 1.0
    # Scale values to about one if they might overflow a 16-bit float, or be subnormal.
    unit = 1.0 if 2.0**-8 <= largest <= 2.0**8 else 2.0 ** -np.floor(np.log2(largest))
    # How often each value occurs, for normally distributed weights in blocks whose maximum is 2.5 standard deviations.
    share = np.exp(-0.5 * (2.5 * values / largest) ** 2) * np.abs(np.gradient(values))
    share /= share.sum()
    factors = unit * (1 + np.arange(4096) / 4096)
    exact = factors[:, None] * values
    error = (exact.astype(jnp.dtype(dtype)).astype(np.float64) - exact) / unit
    # The squared error of a row of 4096 codes: the bias grows with their number, the spread with its square root.
    return float(factors[np.argmin(error**2 @ share + 4096 * (error @ share) ** 2)])


def no_pallas_reads(layout: Layout) -> str | None:
    """Returns why the kernels in Pallas cannot read a weight, or `None` if they can."""
    if len(packing.widths(layout.bits)) > 1:
        return f"it reads codes that lie in one byte, and those of {layout.bits} bits lie in several"
    return "it adds no offsets of blocks" if layout.offsets else None


def alignment(layout: Layout) -> str | None:
    """Returns why blocks do not line up with the bytes that a kernel reads at a time, or `None` if they do.

    A run of 64 bytes holds a run of 64 codes for every plane (`packing.py`). If a block consists of whole runs, or a
    run of whole blocks of 16 or 32, a kernel can read bytes whose codes in one plane share a scale.
    """
    size = layout.block_size
    if layout.one_scale or size % packing.PLANE == 0 or size in (16, 32):
        return None
    return f"blocks of {size} do not line up with runs of {packing.PLANE} codes; 16, 32 and multiples of 64 do"


def decode_scale(bits: UInt[Array, "*shape"], kind: ScaleKind) -> Float32[Array, "*shape"]:
    """Decodes scales from their bits. Also runs inside kernels."""
    if kind in ("e4m3", "e5m2", "ue4m4"):
        return getattr(minifloats, kind.upper()).decode(bits)
    return bits_to_scale(bits, kind)


def look_up(codes: UInt8[Array, "*shape"], layout: Layout) -> Float32[Array, "*shape"]:
    """Decodes codes, by operations that XLA fuses where possible: a gather is slow on TPUs."""
    if layout.kind == "integer":
        return codes.astype(jnp.float32) + layout.offset
    if layout.kind != "table":
        return jax.lax.bitcast_convert_type(codes, jnp.dtype(layout.kind)).astype(jnp.float32)
    values: list[Any] = [np.float32(value) for value in layout.table]
    if layout.bits == 8:
        return jnp.asarray(np.stack(values)).at[codes].get(mode="promise_in_bounds")
    # Each bit of a code halves the table: about as many selections as entries, but only one comparison per bit.
    for bit in range(layout.bits):
        upper = (codes & jnp.uint8(1 << bit)) != 0
        values = [jnp.where(upper, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def decode_bytes(weight: Packed, layout: Layout, dtype: Any) -> Float[Array, "*batch n k"]:
    """Decodes 8-bit integers and floats without zero points, directly to `dtype`.

    This is exact for the library's formats. Going by way of float32 gives the same values, but XLA fuses only one
    conversion into a product. Not for kernels.
    """
    if layout.kind != "integer":
        return jax.lax.bitcast_convert_type(weight.codes, jnp.dtype(layout.kind)).astype(dtype)
    return weight.codes.astype(dtype) + jnp.asarray(layout.offset, dtype)


def decode_columns(
    weight: Packed, layout: Layout, start: int, dtype: Any, *, scaled: bool = True
) -> Float[Array, "*batch n columns"]:
    """Decodes the columns from `start` on, where a packed segment must begin. Not for kernels."""
    columns = np.arange(start, layout.length)
    packed = weight.codes[..., packing.packed_length(start, layout.bits) :]
    codes = packing.unpack(packed, layout.bits, len(columns))
    values = look_up(codes, layout)
    blocks = np.minimum(columns // layout.block_size, weight.scale.shape[-1] - 1)
    if weight.zero_point is not None:
        values = values - weight.zero_point[..., blocks].astype(jnp.float32)
    if not scaled:
        return values.astype(dtype)
    scale = decode_scale(weight.scale, layout.scale)[..., blocks]
    if weight.row_scale is not None:
        scale = scale * jnp.broadcast_to(weight.row_scale, scale.shape)
    values = values * scale
    if weight.offset is not None:
        values = values + weight.offset[..., blocks]
    return values.astype(dtype)
