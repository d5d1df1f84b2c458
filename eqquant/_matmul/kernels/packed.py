"""A quantized weight as kernels see it: its arrays, and what their bits mean. No format is known here.

Whatever has at most 256 codes is a table, so a kernel needs no format's name: 4-bit codes are a table of 16 values,
whether they are NF4, integers or small floats. `kind` says where there is something faster than looking them up.
"""

import functools as ft
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Float32, UInt, UInt8

from ..._numerics import minifloats, packing
from ..._numerics.scale_bits import bits_to_scale


Kind = Literal["integer", "float8_e4m3fn", "float8_e5m2", "table"]
ScaleKind = Literal["float32", "float16", "bfloat16", "e8m0", "e4m3", "e5m2", "ue4m4"]


class Packed(NamedTuple):
    """The arrays of a weight of `n` rows, `(table[codes] - zero_point) * scale * row_scale`."""

    codes: UInt8[Array, "*batch n bytes"]
    scale: UInt[Array, "*batch n blocks"]  # the bits of scales, which `Layout.scale` names
    row_scale: Float32[Array, "*batch n 1"] | None = None  # under which scales are scaled in their turn
    zero_point: UInt8[Array, "*batch n blocks"] | None = None


class Layout(NamedTuple):
    """What the bits of a `Packed` mean. Static."""

    length: int  # of a row, in codes
    bits: int  # of a code: 1, 2, 4 or 8
    block_size: int  # codes that share a scale; `length` where a row has one
    table: tuple[float, ...]  # what each code stands for, `2**bits` values
    scale: ScaleKind = "float32"
    zero_points: bool = False

    @property
    def planes(self) -> int:
        """How many codes share a byte."""
        return 8 // self.bits

    @property
    def one_scale(self) -> bool:
        """Whether a row has one scale."""
        return self.block_size >= self.length

    @property
    def kind(self) -> Kind:
        return _kind(self.table)

    def stretch(self, dtype: Any) -> float:
        """A factor for the table, by which scales are divided, so that less is lost when it is rounded to `dtype`.

        The rounding error of a table is the same in every block. If its mean is not zero, it adds up over a row where
        the mean of `x` is not zero either.
        """
        return _stretch(self.table, jnp.dtype(dtype).name) if self.kind == "table" else 1.0

    @property
    def offset(self) -> int:
        """Of integers: what code 0 stands for."""
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
    # Where a 16-bit float might not hold them, or hold them as subnormal numbers, values are brought to about one.
    unit = 1.0 if 2.0**-8 <= largest <= 2.0**8 else 2.0 ** -np.floor(np.log2(largest))
    # How often each is used, of normally distributed weights in blocks whose largest is 2.5 standard deviations.
    share = np.exp(-0.5 * (2.5 * values / largest) ** 2) * np.abs(np.gradient(values))
    share /= share.sum()
    factors = unit * (1 + np.arange(4096) / 4096)
    exact = factors[:, None] * values
    error = (exact.astype(jnp.dtype(dtype)).astype(np.float64) - exact) / unit
    # The error of a row of 4096 codes: its mean grows with their number, its spread with the root of that.
    return float(factors[np.argmin(error**2 @ share + 4096 * (error @ share) ** 2)])


def alignment(layout: Layout) -> str | None:
    """Why blocks do not line up with the bytes that a kernel takes at a time, or `None` if they do.

    A run of 64 bytes holds a run of 64 codes for every plane (`packing.py`). If a block is whole runs, or a run whole
    blocks of 16 or 32, then bytes can be taken so that those of a plane share a scale.
    """
    size = layout.block_size
    if layout.one_scale or size % packing.PLANE == 0 or size in (16, 32):
        return None
    return f"blocks of {size} do not line up with runs of {packing.PLANE} codes; 16, 32 and multiples of 64 do"


def decode_scale(bits: UInt[Array, "*shape"], kind: ScaleKind) -> Float32[Array, "*shape"]:
    """Scales from their bits. Also runs inside of kernels."""
    if kind in ("e4m3", "e5m2", "ue4m4"):
        return getattr(minifloats, kind.upper()).decode(bits)
    return bits_to_scale(bits, kind)


def look_up(codes: UInt8[Array, "*shape"], layout: Layout) -> Float32[Array, "*shape"]:
    """What codes stand for. In operations that XLA fuses, where there are any: a gather is slow on TPUs."""
    if layout.kind == "integer":
        return codes.astype(jnp.float32) + layout.offset
    if layout.kind != "table":
        return jax.lax.bitcast_convert_type(codes, jnp.dtype(layout.kind)).astype(jnp.float32)
    values: list[Any] = [np.float32(value) for value in layout.table]
    if layout.bits == 8:
        return jnp.asarray(np.stack(values)).at[codes].get(mode="promise_in_bounds")
    # Each bit of a code halves the table: as many selections as entries, but few comparisons.
    for bit in range(layout.bits):
        upper = (codes & jnp.uint8(1 << bit)) != 0
        values = [jnp.where(upper, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def decode_bytes(weight: Packed, layout: Layout, dtype: Any) -> Float[Array, "*batch n k"]:
    """The values of 8-bit integers and floats without zero points, in `dtype` at once.

    Of our formats that is exact. By way of float32 it would be the same, but XLA fuses only one conversion with a
    product. Not for kernels.
    """
    if layout.kind != "integer":
        return jax.lax.bitcast_convert_type(weight.codes, jnp.dtype(layout.kind)).astype(dtype)
    return weight.codes.astype(dtype) + jnp.asarray(layout.offset, dtype)


def decode_columns(
    weight: Packed, layout: Layout, start: int, dtype: Any, *, scaled: bool = True
) -> Float[Array, "*batch n columns"]:
    """The dense columns from `start` on, where a segment of the packing begins. Not for kernels."""
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
    return (values * scale).astype(dtype)
