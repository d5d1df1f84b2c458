"""`PackedWeight`: the arrays of a weight for the kernels in XLA and Pallas.

Zero points are unpacked, and offsets and nested scales decoded.
"""

import functools as ft
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Float32, UInt, UInt8

from ..._native.weight import Layout, ScaleKind
from ..._numerics import minifloats, packing
from ..._numerics.blocks import dequantize_values
from ..._numerics.scale_bits import bits_to_scale


class PackedWeight(NamedTuple):
    """A weight: `(table[codes] - zero_point) * scale * row_scale + offset`."""

    codes: UInt8[Array, "*batch n bytes"]
    scale: UInt[Array, "*batch n blocks"]  # the bits of scales, of the type `Layout.scale`
    row_scale: Float32[Array, "*batch n 1"] | None = None  # a per-channel factor of the scales
    zero_point: UInt8[Array, "*batch n blocks"] | None = None
    offset: Float32[Array, "*batch n blocks"] | None = None


@ft.lru_cache
def as_integers(layout: Layout) -> tuple[Layout, int]:
    """Returns the layout with doubled values, and 2, if only doubled ones are integers.

    Such are the values of e2m1, in steps of a half. Otherwise returns the layout, and 1. For codes of four bits.
    """
    table, doubled = np.asarray(layout.table), 2 * np.asarray(layout.table)
    if layout.bits != 4 or (table == np.trunc(table)).all() or (doubled != np.trunc(doubled)).any():
        return layout, 1
    return layout._replace(table=tuple(doubled.tolist())), 2


def holds_weights(layout: Layout, dtype: DTypeLike) -> bool:
    """Returns whether `dtype` holds weights times the factor that stretches the table.

    Float16 might not hold a weight times a large or small factor.
    """
    return dtype != jnp.float16 or 1 <= layout.stretch(dtype) < 2


def pallas_refusal(layout: Layout) -> str | None:
    """Returns why the kernels in Pallas cannot read a weight, or `None` if they can."""
    if len(packing.widths(layout.bits)) > 1:
        return f"it reads codes that lie in one byte, and codes of {layout.bits} bits lie in several"
    return "it adds no offsets of blocks" if layout.offsets else None


def alignment_refusal(layout: Layout) -> str | None:
    """Returns why blocks do not line up with packed bytes, or `None` if they do.

    A run of 64 bytes holds a run of 64 codes of each plane (`packing.py`). If a block is whole runs, or a run is whole
    blocks of 16 or 32, a kernel can read bytes whose codes in one plane share a scale.
    """
    size = layout.block_size
    if layout.per_channel or size % packing.PLANE == 0 or size in (16, 32):
        return None
    return f"blocks of {size} do not line up with runs of {packing.PLANE} codes; 16, 32 and multiples of 64 do"


def decode_scale(bits: UInt[Array, "*shape"], kind: ScaleKind) -> Float32[Array, "*shape"]:
    """Decodes scales from their bits. Also runs inside kernels."""
    if kind in ("e4m3", "e5m2", "ue4m4"):
        return getattr(minifloats, kind.upper()).decode(bits)
    return bits_to_scale(bits, kind)


def look_up(codes: UInt8[Array, "*shape"], layout: Layout, *, gather: bool = False) -> Float32[Array, "*shape"]:
    """Looks up the values of codes, without a gather where possible: it is slow on TPUs.

    With `gather`, gathers values from any table of more than four.
    """
    if layout.kind == "integer":
        return codes.astype(jnp.float32) + layout.lowest
    if layout.kind != "table":
        return jax.lax.bitcast_convert_type(codes, jnp.dtype(layout.kind)).astype(jnp.float32)
    values: Sequence[ArrayLike] = [np.float32(value) for value in layout.table]
    if layout.bits == 8 or (gather and layout.bits > 2):
        return jnp.asarray(np.stack(values)).at[codes].get(mode="promise_in_bounds")
    # Each bit of a code halves the table. This takes one comparison per bit, and as many selections as entries.
    for bit in range(layout.bits):
        upper = (codes & jnp.uint8(1 << bit)) != 0
        values = [jnp.where(upper, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return jnp.asarray(values[0])


def decode_bytes(weight: PackedWeight, layout: Layout, dtype: DTypeLike) -> Float[Array, "*batch n k"]:
    """Decodes 8-bit integers and floats without zero points, directly to `dtype`.

    This is exact for the library's formats. A conversion by way of float32 would give the same values, but XLA fuses
    only one conversion into a product. Not for use inside kernels.
    """
    if layout.kind != "integer":
        return jax.lax.bitcast_convert_type(weight.codes, jnp.dtype(layout.kind)).astype(dtype)
    return weight.codes.astype(dtype) + jnp.asarray(layout.lowest, dtype)


def decode_columns(
    weight: PackedWeight,
    layout: Layout,
    start: int,
    dtype: DTypeLike,
    *,
    scaled: bool = True,
    gather: bool = False,
) -> Float[Array, "*batch n columns"]:
    """Decodes the columns from `start` on, where a packed segment must begin.

    `gather` is as in `look_up`.
    """
    columns = np.arange(start, layout.length)
    packed = weight.codes[..., packing.packed_length(start, layout.bits) :]
    codes = packing.unpack(packed, layout.bits, len(columns))
    values = look_up(codes, layout, gather=gather)
    blocks = columns // layout.block_size
    scale = decode_scale(weight.scale, layout.scale)[..., blocks] if scaled else None
    if scale is not None and weight.row_scale is not None:
        scale = scale * jnp.broadcast_to(weight.row_scale, scale.shape)
    zero_point = None if weight.zero_point is None else weight.zero_point[..., blocks].astype(jnp.float32)
    offset = None if weight.offset is None else weight.offset[..., blocks]
    return dequantize_values(values, scale, zero_point, offset).astype(dtype)
