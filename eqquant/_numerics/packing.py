"""Packs codes of 1 to 8 bits into bytes, along the last axis, and unpacks them.

Codes that share a byte stand a *plane* apart, not side by side. For 1, 2, 4 or 8 bits, a segment along the last axis is
`8 // bits` planes of 64 codes, and byte `j` of a segment holds code `j` of every plane, plane 0 in the low bits:

    4 bits, one segment of 128 codes:   byte j = code[j] | code[j + 64] << 4          (j < 64)

A last, shorter segment is split into equally long planes the same way, so padding takes at most `8 // bits - 1` codes.
Unpacking is a shift and a mask of contiguous runs, without interleaving. And a plane is one block of 64 with one scale,
so a kernel multiplies it by a contiguous tile of activations.

Codes of another width are split into *parts* of these widths, the widest in the low bits: 3 = 2 + 1, 5 = 4 + 1,
6 = 4 + 2. A segment is as long as one of the narrowest part, and holds the bytes of one part after another:

    3 bits, one segment of 512 codes:   128 bytes of the low two bits, 64 bytes of the high bit
"""

import functools as ft
import operator
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, UInt8


PLANE = 64


def widths(bits: int) -> tuple[int, ...]:
    """Returns the widths of the parts of a code, the low bits first."""
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def num_planes(bits: int) -> int:
    """Returns the number of planes of a segment.

    That is how many codes of the narrowest part share a byte.
    """
    return 8 // widths(bits)[-1]


def packed_length(length: int, bits: int) -> int:
    """Returns the number of bytes of `length` codes.

    `length * width / 8`, rounded up, for each part of a code.
    """
    return sum(-(-length * width // 8) for width in widths(bits))


def segment_length(bits: int) -> int:
    """Returns how many codes are packed together. A row can be cut only between segments."""
    return 1 if bits == 8 else PLANE * num_planes(bits)


def pack(codes: UInt8[Array, "*batch length"], bits: int) -> UInt8[Array, "*batch bytes"]:
    """Packs codes below `2**bits` into bytes. The inverse of `unpack`."""
    if len(widths(bits)) == 1:
        return _pack_one(codes, bits)
    segment = segment_length(bits)
    return by_segments(lambda codes: _pack_parts(codes, bits), codes, codes.shape[-1] // segment, segment)


def unpack(packed: UInt8[Array, "*batch bytes"], bits: int, length: int) -> UInt8[Array, "*batch length"]:
    """Unpacks the first `length` codes of `bits` bits. The inverse of `pack`."""
    if len(widths(bits)) == 1:
        return _unpack_one(packed, bits, length)
    segment = segment_length(bits)
    count, rest = divmod(length, segment)
    size = packed_length(segment, bits)
    # A last segment with as many bytes as a whole one has its layout too.
    unpack_segment = lambda packed: _unpack_parts(packed, bits, segment if packed.shape[-1] == size else rest)
    return by_segments(unpack_segment, packed, count, size)[..., :length]


def unpack_plane(segments: UInt8[Array, "*batch slabs units unit"], plane: int, bits: int) -> UInt8[Array, "..."]:
    """Unpacks one plane of whole segments: returns one code for each byte of a slab.

    **Arguments:**

    - `segments`: the bytes of segments in slabs of 64, of which codes of one part have one; the axis is the third last.
    - `plane`: which of the `num_planes(bits)` planes.
    """
    slab, done, parts = 0, 0, []
    for width in widths(bits):
        planes = 8 // width  # of a slab
        packed = segments[..., slab + plane // planes, :, :]
        start = width * (plane % planes)
        part = packed >> jnp.uint8(start) if start > 0 else packed
        part = part & jnp.uint8(2**width - 1) if start + width < 8 else part
        parts.append(part << jnp.uint8(done) if done > 0 else part)
        slab, done = slab + num_planes(bits) // planes, done + width
    return ft.reduce(operator.or_, parts)


def by_segments(function: Callable[[Array], Array], x: Array, count: int, size: int) -> Array:
    """Applies a function to whole segments, and to the shorter last one.

    Whole segments are `(*batch, count, size)`.
    """
    *batch, length = x.shape
    done = []
    if count > 0:
        body = function(x[..., : count * size].reshape(*batch, count, size))
        done.append(body.reshape(*batch, count * body.shape[-1]))
    if length > count * size or count == 0:
        done.append(function(x[..., count * size :]))
    return done[0] if len(done) == 1 else jnp.concatenate(done, axis=-1)


def _pack_parts(codes: UInt8[Array, "*batch length"], bits: int) -> UInt8[Array, "*batch bytes"]:
    packed, done = [], 0
    for width in widths(bits):
        packed.append(_pack_one(codes >> jnp.uint8(done) & jnp.uint8(2**width - 1), width))
        done += width
    return jnp.concatenate(packed, axis=-1)


def _unpack_parts(packed: UInt8[Array, "*batch bytes"], bits: int, length: int) -> UInt8[Array, "*batch length"]:
    codes, start, done = jnp.zeros((*packed.shape[:-1], length), jnp.uint8), 0, 0
    for width in widths(bits):
        stop = start + packed_length(length, width)
        codes = codes | _unpack_one(packed[..., start:stop], width, length) << jnp.uint8(done)
        start, done = stop, done + width
    return codes


def _pack_one(codes: UInt8[Array, "*batch length"], bits: int) -> UInt8[Array, "*batch bytes"]:
    if bits == 8:
        return codes
    segment = segment_length(bits)
    return by_segments(lambda codes: _pack_planes(codes, bits), codes, codes.shape[-1] // segment, segment)


def _unpack_one(packed: UInt8[Array, "*batch bytes"], bits: int, length: int) -> UInt8[Array, "*batch length"]:
    if bits == 8:
        return packed
    count = length // segment_length(bits)
    return by_segments(lambda packed: _unpack_planes(packed, bits), packed, count, PLANE)[..., :length]


def _shifts(bits: int, shape: tuple[int, ...]) -> UInt8[Array, "*batch planes plane"]:
    return jnp.broadcast_to(jnp.arange(0, 8, bits, dtype=jnp.uint8)[:, None], shape)


def _pack_planes(codes: UInt8[Array, "*batch codes"], bits: int) -> UInt8[Array, "*batch bytes"]:
    """Packs a segment, which may be shorter than others."""
    *batch, length = codes.shape
    shape = (*batch, 8 // bits, packed_length(length, bits))
    codes = jnp.pad(codes, [(0, 0)] * len(batch) + [(0, shape[-2] * shape[-1] - length)]).reshape(shape)
    return (codes << _shifts(bits, shape)).sum(axis=-2, dtype=jnp.uint8)


def _unpack_planes(packed: UInt8[Array, "*batch bytes"], bits: int) -> UInt8[Array, "*batch codes"]:
    """Unpacks a segment."""
    *batch, plane = packed.shape
    shape = (*batch, 8 // bits, plane)
    codes = jnp.broadcast_to(packed[..., None, :], shape) >> _shifts(bits, shape) & jnp.uint8(2**bits - 1)
    return codes.reshape(*batch, 8 // bits * plane)
