"""Evenly spaced levels of any width: scales, zero points, and codes of whole numbers.

Symmetric codes are stored plus `2**(bits - 1)`, so that they are unsigned.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .blocks import divide


def symmetric_scale(largest: Float32[Array, "*shape"], bits: int) -> Float32[Array, "*shape"]:
    """Returns the smallest scale that clips no value of at most this magnitude."""
    return largest / (2 ** (bits - 1) - 1)


def affine_scale(low: Float32[Array, "*shape"], high: Float32[Array, "*shape"], bits: int) -> Float32[Array, "*shape"]:
    """Returns the smallest scale that clips no value of a range that includes zero."""
    levels = 2**bits - 1
    return high / levels - low / levels  # divided first, since `high - low` may overflow


def affine_zero_point(
    low: Float32[Array, "*shape"], scale: Float32[Array, "*shape"], bits: int
) -> UInt8[Array, "*shape"]:
    """Returns the code of zero."""
    return jnp.clip(jnp.round(divide(-low, scale)), 0, 2**bits - 1).astype(jnp.uint8)


def code_offset(bits: int, symmetric: bool) -> int:
    """Returns the offset from whole numbers to codes."""
    return 2 ** (bits - 1) if symmetric else 0


def encode_integer(whole: Float32[Array, "*shape"], bits: int, symmetric: bool) -> UInt8[Array, "*shape"]:
    """Returns the codes of whole numbers, clipped to the first and the last code."""
    offset = code_offset(bits, symmetric)
    return (jnp.clip(whole, -offset, 2**bits - 1 - offset) + offset).astype(jnp.uint8)


def decode_integer(codes: UInt8[Array, "*shape"], bits: int, symmetric: bool) -> Float32[Array, "*shape"]:
    """Returns the whole numbers of codes."""
    return codes.astype(jnp.float32) - code_offset(bits, symmetric)
