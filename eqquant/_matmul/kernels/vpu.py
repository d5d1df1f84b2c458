"""Decodes codes in the vector registers of TPUs, for Pallas-Mosaic kernels.

A register is 8 sublanes of 128 lanes of 32 bits. Four bytes share a lane and are decoded together, since TPUs cannot
shift bytes. Values that are linear in the code (integers, signs) become int8: flip the top bit of each code, shift the
code to the top of its byte, and mask the rest. Other tables, of up to sixteen values, are looked up by a gather along
sublanes, of which a register has eight: half a table.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, DTypeLike, Float, Float32, Int8, Int32, UInt, UInt8

from ..._native.weight import Layout


SUBLANES, LANES = 8, 128  # the shape of a vector register


def needs_lookup(layout: Layout) -> bool:
    """Returns whether decoding needs a lookup, because values are not linear in the code."""
    even = np.ptp(np.diff(np.asarray(layout.table, np.float32))) == 0
    return layout.kind == "table" and not even


class Decoder(NamedTuple):
    """Decodes codes to `dtype`; the values are `step * decoded + offset`."""

    layout: Layout
    dtype: DTypeLike

    @property
    def uses_lookup(self) -> bool:
        return needs_lookup(self.layout)

    @property
    def step(self) -> float:
        """The factor of decoded codes.

        Codes with linear values decode to int8, with the code in the top bits. Tables are stretched.
        """
        if self.uses_lookup or self.layout.kind.startswith("float8"):
            return 1 / self.layout.stretch(self.dtype) if self.uses_lookup else 1.0
        return (self.layout.table[1] - self.layout.table[0]) / 2 ** (8 - self.layout.bits)

    @property
    def offset(self) -> float:
        """The value of the code that decodes to zero."""
        if self.uses_lookup or self.layout.kind.startswith("float8") or self.zero_between_codes:
            return 0.0
        return self.layout.table[2 ** (self.layout.bits - 1)]

    @property
    def zero_between_codes(self) -> bool:
        """Whether zero lies between two codes, as for signs. Then every int8 gets half a step more."""
        return not self.uses_lookup and self.layout.bits < 8 and self.layout.table[0] == -self.layout.table[-1]

    def table(self) -> np.ndarray:
        """Returns the tables for `_look_up`: bfloat16 pairs of both halves, then float32."""
        table = np.zeros(2 * SUBLANES)
        table[: len(self.layout.table)] = np.asarray(self.layout.table) / self.step + 0.0  # without -0
        half = table.astype(jnp.bfloat16).view(np.uint16).astype(np.uint32)
        lower, upper = half[:SUBLANES], half[SUBLANES:]
        # A pair is a float32: its first 16 bits hold the lower half of the table, its last 16 bits the upper half. If
        # the last bits begin with a one, rounding the pair to bfloat16 goes up; so subtract one from the first bits.
        # Zero stays as it is: that pair is below all normal numbers.
        pairs = ((lower - ((upper >= 2**15) & (lower != 0))) << 16) | upper
        return np.concatenate([pairs.astype(np.uint32), table.astype(np.float32).view(np.uint32)]).view(np.int32)

    def decode(
        self, codes: UInt8[Array, "rows lanes"], table_ref: jax.Ref | Array | None
    ) -> list[Float[Array, "rows lanes"]]:
        """Decodes every plane. Multiply by `step` and add `offset` to get values."""
        bits, kind, dtype, layout = self.layout.bits, self.layout.kind, self.dtype, self.layout
        if kind in ("float8_e4m3fn", "float8_e5m2"):
            return [jax.lax.bitcast_convert_type(codes, jnp.dtype(kind)).astype(dtype)]
        packed = pltpu.bitcast(codes, jnp.int32)
        if not self.uses_lookup:
            packed ^= _in_every_byte(sum(1 << (bits * p + bits - 1) for p in range(layout.planes)))
            half = 1 << (7 - bits) if self.zero_between_codes else 0
            shift_plane = lambda p: _shift_bits(packed, bits * p, bits, to=8 - bits, plus=half)
            return [shift_plane(p).astype(dtype) for p in range(layout.planes)]
        planes = []
        for p in range(layout.planes):
            index = _shift_bits(packed, bits * p, min(bits, 3), to=0).astype(jnp.int32)
            upper = _shift_bits(packed, bits * p + 3, 1, to=4).astype(jnp.int32) if bits == 4 else jnp.zeros_like(index)
            planes.append(_look_up(index, upper, table_ref, dtype))  # pyright: ignore[reportArgumentType]
        return planes


def _look_up(
    index: Int32[Array, "rows lanes"], upper: Int32[Array, "rows lanes"], table_ref: jax.Ref | Array, dtype: DTypeLike
) -> Float[Array, "rows lanes"]:
    """Looks up `index` in half of a table of 16: the upper half where `upper` is 16.

    A column of a register has 8 sublanes. The gather rotates it until the entry is in place.
    """
    index = index.reshape(-1, SUBLANES, LANES)

    def gather(part: Int32[Array, "sublanes lanes"]) -> Int32[Array, "rows lanes"]:
        part = jnp.broadcast_to(part[None], index.shape)
        gathered = jnp.take_along_axis(part, index, axis=1, mode="promise_in_bounds", wrap_negative_indices=False)
        return gathered.reshape(upper.shape)

    pairs, lower_half, upper_half = (table_ref[SUBLANES * i : SUBLANES * (i + 1)] for i in range(3))
    if dtype == jnp.bfloat16:
        values = gather(pairs) << upper  # one rotation for both halves
    else:
        values = jnp.where(upper != 0, gather(upper_half), gather(lower_half))
    return jax.lax.bitcast_convert_type(values, jnp.float32).astype(dtype)


def _shift_bits(
    packed: Int32[Array, "quarter lanes"], start: int, count: int, to: int, plus: int = 0
) -> Int8[Array, "rows lanes"]:
    """Moves `count` bits of every byte from bit `start` to bit `to`, and sets bits `plus`."""
    shifted = packed << (to - start) if to >= start else packed >> (start - to)
    shifted &= _in_every_byte((2**count - 1) << to)
    return pltpu.bitcast(shifted | _in_every_byte(plus) if plus else shifted, jnp.int8)


def _in_every_byte(byte: int) -> np.int32:
    return np.full(4, byte, np.uint8).view(np.int32)[0]


def decode_float16(bits: UInt[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Decodes float16 from its bits."""
    bits = bits.astype(jnp.int32)
    exponent, mantissa = (bits >> 10) & 31, bits & 1023
    # A float32 has a bias of 127 instead of 15. Subnormal numbers have no leading bit.
    exponent32 = jnp.where(exponent == 31, 255, exponent + 112)  # infinities and NaNs keep the greatest exponent
    normal = jax.lax.bitcast_convert_type((exponent32 << 23) | (mantissa << 13), jnp.float32)
    magnitude = jnp.where(exponent > 0, normal, mantissa.astype(jnp.float32) * 2**-24)
    return jnp.where(bits >= 32768, -magnitude, magnitude)
