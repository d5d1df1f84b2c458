"""Converts scales to the bits that are stored, and back."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float32, UInt

from .minifloats import decode_e8m0, encode_e8m0


ScaleDtype = Literal["float32", "float16", "bfloat16", "e8m0"]


def scale_to_bits(scale: Float32[Array, "*batch blocks"], dtype: ScaleDtype) -> UInt[Array, "*batch blocks"]:
    """Rounds scales to `dtype` and returns their bits as unsigned integers of the same width.

    Scales that are too large saturate, even infinity; NaN stays NaN.
    """
    if dtype == "e8m0":
        return encode_e8m0(scale)
    rounded = clip_finite(scale, dtype).astype(dtype)
    return jax.lax.bitcast_convert_type(rounded, {4: jnp.uint32, 2: jnp.uint16}[rounded.dtype.itemsize])


def bits_to_scale(bits: UInt[Array, "*batch blocks"], dtype: ScaleDtype) -> Float32[Array, "*batch blocks"]:
    """Returns the scales of given bits. The inverse of `scale_to_bits`."""
    if dtype == "e8m0":
        return decode_e8m0(bits)
    return jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype)).astype(jnp.float32)


def round_scale(scale: Float32[Array, "*shape"], dtype: ScaleDtype) -> Float32[Array, "*shape"]:
    """Returns scales as they will be stored."""
    return scale if dtype == "float32" else bits_to_scale(scale_to_bits(scale, dtype), dtype)


def round_up_from_zero(scale: Float32[Array, "*shape"], dtype: ScaleDtype) -> Float32[Array, "*shape"]:
    """Returns scales that do not vanish: too small ones become the least that is stored.

    Zero stays zero.
    """
    if dtype == "e8m0":
        return scale
    # Backends flush subnormal numbers of float32 and bfloat16 to zero.
    info = jnp.finfo(dtype)
    least = jnp.float32(info.smallest_subnormal if dtype == "float16" else info.tiny)
    return jnp.where((scale != 0) & (jnp.abs(scale) < least), jnp.copysign(least, scale), scale)


def clip_finite(x: Float32[Array, "*shape"], dtype: DTypeLike) -> Float32[Array, "*shape"]:
    """Clips to the finite range of `dtype`, and of float32.

    NaN stays NaN, which XLA's clip on CPU drops.
    """
    limit = float(min(jnp.finfo(dtype).max, jnp.finfo(jnp.float32).max))
    return jnp.where(jnp.isnan(x), x, jnp.clip(x, -limit, limit))
