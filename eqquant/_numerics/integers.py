"""Evenly spaced levels of any width: the scale and the zero point of a range, and the codes of whole numbers.

A symmetric code is stored with an offset of `2**(bits - 1)`, so that it is unsigned.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .blocks import divide


def symmetric_scale(largest: Float32[Array, "*shape"], bits: int) -> Float32[Array, "*shape"]:
    """The least scale that clips nothing, for values of at most this magnitude."""
    return largest / (2 ** (bits - 1) - 1)


def affine_scale(low: Float32[Array, "*shape"], high: Float32[Array, "*shape"], bits: int) -> Float32[Array, "*shape"]:
    """The least scale that clips nothing, for values in a range that includes zero."""
    levels = 2**bits - 1
    return high / levels - low / levels  # each divided alone: `high - low` may overflow


def affine_zero_point(
    low: Float32[Array, "*shape"], scale: Float32[Array, "*shape"], bits: int
) -> UInt8[Array, "*shape"]:
    """The code of zero."""
    return jnp.clip(jnp.round(divide(-low, scale)), 0, 2**bits - 1).astype(jnp.uint8)


def code_offset(bits: int, symmetric: bool) -> int:
    """What is added to a whole number to make it a code."""
    return 2 ** (bits - 1) if symmetric else 0


def encode_integer(whole: Float32[Array, "*shape"], bits: int, symmetric: bool) -> UInt8[Array, "*shape"]:
    """The codes of whole numbers; the first and the last for what lies beyond."""
    offset = code_offset(bits, symmetric)
    return (jnp.clip(whole, -offset, 2**bits - 1 - offset) + offset).astype(jnp.uint8)


def decode_integer(codes: UInt8[Array, "*shape"], bits: int, symmetric: bool) -> Float32[Array, "*shape"]:
    """The whole numbers that codes stand for."""
    return codes.astype(jnp.float32) - code_offset(bits, symmetric)
