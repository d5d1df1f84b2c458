"""Packs codes of 1, 2, 4 or 8 bits into bytes, along the last axis, and unpacks them.

Codes that share a byte stand a *plane* apart, not side by side. Along the last axis a segment is `8 // bits` planes
of 64 codes, and byte `j` of a segment holds code `j` of every plane, plane 0 in the low bits:

    4 bits, one segment of 128 codes:   byte j = code[j] | code[j + 64] << 4          (j < 64)

A last, shorter segment is split into equally long planes the same way, so padding takes at most `8 // bits - 1` codes.
Unpacking is a shift and a mask of contiguous runs, without interleaving. And a plane is one block of 64 with one scale,
so a kernel multiplies it by a contiguous tile of activations.
"""

import jax.numpy as jnp
from jaxtyping import Array, UInt8


PLANE = 64


def packed_length(length: int, bits: int) -> int:
    """Returns the number of bytes of `length` codes of `bits` bits: `length * bits / 8`, rounded up."""
    return -(-length * bits // 8)


def segment_length(bits: int) -> int:
    """Returns how many codes are packed together. A row can be cut only between segments."""
    return 1 if bits == 8 else PLANE * (8 // bits)


def pack(codes: UInt8[Array, "*batch length"], bits: int) -> UInt8[Array, "*batch bytes"]:
    """Packs codes below `2**bits` into bytes. The inverse of `unpack`."""
    if bits == 8:
        return codes
    body, tail = _segments(codes.shape[-1], bits)
    return jnp.concatenate(
        [
            _pack_planes(codes[..., : body * PLANE * (8 // bits)], PLANE, bits),
            _pack_planes(codes[..., body * PLANE * (8 // bits) :], tail, bits),
        ],
        axis=-1,
    )


def unpack(packed: UInt8[Array, "*batch bytes"], bits: int, length: int) -> UInt8[Array, "*batch length"]:
    """Unpacks the first `length` codes of `bits` bits. The inverse of `pack`."""
    if bits == 8:
        return packed
    body, tail = _segments(length, bits)
    if tail == 0:
        return _unpack_planes(packed, PLANE, bits)
    last = _unpack_planes(packed[..., body * PLANE :], tail, bits)
    if body > 0:
        first = _unpack_planes(packed[..., : body * PLANE], PLANE, bits)
        last = jnp.concatenate([first, last], axis=-1)
    return last[..., :length]


def unpack_plane(packed: UInt8[Array, "*shape"], plane: int, bits: int) -> UInt8[Array, "*shape"]:
    """Unpacks one plane: returns one code of each byte."""
    shifted = packed >> jnp.uint8(bits * plane) if plane > 0 else packed
    return shifted & jnp.uint8(2**bits - 1) if bits * (plane + 1) < 8 else shifted


def _segments(length: int, bits: int) -> tuple[int, int]:
    """Returns the number of whole segments, and the plane length of the shorter last one (0 without one)."""
    body, rest = divmod(length, PLANE * (8 // bits))
    return body, packed_length(rest, bits)


def _shifts(bits: int) -> UInt8[Array, "planes 1"]:
    return jnp.arange(0, 8, bits, dtype=jnp.uint8)[:, None]


def _pack_planes(codes: UInt8[Array, "*batch codes"], plane: int, bits: int) -> UInt8[Array, "*batch bytes"]:
    *batch, length = codes.shape
    planes = 8 // bits
    if plane == 0 or length == 0:
        return codes[..., :0]
    padding = -length % (plane * planes)
    codes = jnp.pad(codes, [(0, 0)] * len(batch) + [(0, padding)])
    segments = codes.shape[-1] // (planes * plane)  # not -1, which is ambiguous if another axis is empty
    codes = codes.reshape(*batch, segments, planes, plane)
    shifted = codes << jnp.broadcast_to(_shifts(bits), codes.shape)
    return shifted.sum(axis=-2, dtype=jnp.uint8).reshape(*batch, segments * plane)


def _unpack_planes(packed: UInt8[Array, "*batch bytes"], plane: int, bits: int) -> UInt8[Array, "*batch codes"]:
    *batch, length = packed.shape
    planes = 8 // bits
    packed = packed.reshape(*batch, length // plane, 1, plane)
    packed = jnp.broadcast_to(packed, (*batch, length // plane, planes, plane))
    codes = (packed >> jnp.broadcast_to(_shifts(bits), packed.shape)) & jnp.uint8(2**bits - 1)
    return codes.reshape(*batch, length * planes)
