"""Encodes values to floats of eight bits or fewer, stored as `uint8`, and decodes them.

Encoding is integer arithmetic on the bits of a float32, so results are the same on every backend, with or without
hardware support. Only decoding uses JAX's fp8 types, which every backend has.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt8


@dataclasses.dataclass(frozen=True)
class Minifloat:
    """A float of `exponent_bits + mantissa_bits` bits, and a sign bit above them if `signed`."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    signed: bool = True
    native: str | None = None  # the JAX dtype of the same layout, if any

    @property
    def max_exponent(self) -> int:
        """`floor(log2(max))`, which OCP MX calls `emax`."""
        return int(self.max).bit_length() - 1

    def encode(self, values: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        """Returns the code of the nearest value, ties to even. Values beyond `max` saturate."""
        values = values.astype(jnp.float32)
        magnitude = jnp.minimum(jnp.abs(values), jnp.float32(self.max))
        # Subnormal numbers keep the spacing of the smallest exponent.
        exponent = jnp.maximum(floor_log2(magnitude), 1 - self.bias)
        steps = jnp.round(magnitude * exp2(self.mantissa_bits - exponent)).astype(jnp.int32)
        # `steps` runs from 2**m to 2**(m + 1), so its top bit adds one to the exponent field; a carry does too.
        code = steps + ((exponent + (self.bias - 1)) << self.mantissa_bits)
        if self.signed:
            sign = jnp.signbit(values).astype(jnp.int32)
            code = code | (sign << (self.exponent_bits + self.mantissa_bits))
        return code.astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """Returns the value of each code."""
        if self.native is not None:
            return jax.lax.bitcast_convert_type(codes, jnp.dtype(self.native)).astype(jnp.float32)
        code = codes.astype(jnp.int32)
        mantissa = code & (2**self.mantissa_bits - 1)
        exponent = (code >> self.mantissa_bits) & (2**self.exponent_bits - 1)
        normal = (exponent > 0).astype(jnp.int32)
        steps = mantissa + (normal << self.mantissa_bits)
        magnitude = steps.astype(jnp.float32) * exp2(exponent - normal + (1 - self.bias - self.mantissa_bits))
        negative = (code >> (self.exponent_bits + self.mantissa_bits)) > 0
        return jnp.where(negative, -magnitude, magnitude)


E4M3 = Minifloat(4, 3, bias=7, max=448.0, native="float8_e4m3fn")
E5M2 = Minifloat(5, 2, bias=15, max=57344.0, native="float8_e5m2")
E2M1 = Minifloat(2, 1, bias=1, max=6.0)
# For scales, which have no sign: one more bit of mantissa instead. Bias 8 puts 1.0 in the middle of the range.
UE4M4 = Minifloat(4, 4, bias=8, max=248.0, signed=False)


def floor_log2(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Returns `floor(log2(x))` of a positive float32, exactly.

    -127 for zero and subnormal numbers.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return ((bits >> 23) & 255) - 127


def exp2(exponent: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns `2**exponent`, exactly, for exponents from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def encode_e8m0(scale: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Returns the E8M0 code of a power of two: its exponent plus 127.

    OCP MX 1.0, section 5.4.1. Zero gives code 0.
    """
    return (floor_log2(scale) + 127).astype(jnp.uint8)


def decode_e8m0(codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns `2**(code - 127)`; NaN for code 255.

    Many backends flush code 0, the subnormal `2**-127`, to zero.
    """
    is_subnormal_or_nan = (codes == 0) | (codes == 255)
    bits = codes.astype(jnp.int32) << 23 | is_subnormal_or_nan.astype(jnp.int32) << 22
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
