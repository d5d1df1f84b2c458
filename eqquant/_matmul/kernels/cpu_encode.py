"""Quantizes on CPU in C++: reduces blocks to what scales are chosen from, and packs the codes of values.

The kernels are in `native/`; they find codes by the floats at which codes change, so one serves every format.
Results have the bits of XLA's operations, but for the sign of zeros; where a scale is NaN, codes mean nothing and may
differ.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8

from ..._native import library
from ..._native.steps import Steps
from ..._numerics.packing import packed_length
from .cpu import DTYPES


_RULES = ("steps", "even", "up")
_KINDS = ("largest", "at_largest", "low", "high")


def encodes(rows: Float[Array, "*batch length"], bits: int) -> str | None:
    """Returns why `encode` cannot take values to codes of so many bits, or `None` if it can."""
    if rows.dtype not in DTYPES or rows.size == 0:
        return "it encodes float32, bfloat16 and float16, and at least one value"
    return "XLA is as fast at eight bits" if bits == 8 else library.refusal()


def encode(
    rows: Float[Array, "*batch length"],
    steps: Steps,
    bits: int,
    block_size: int,
    divisor: Float32[Array, "*batch blocks"],
    factor: Float32[Array, "*batch blocks"] | None,
    offset: Float32[Array, "*batch blocks"] | None,
    shift: Float32[Array, "*batch blocks"] | None,
) -> UInt8[Array, "*batch bytes"]:
    """Returns the packed codes of `(rows - offset) * factor / divisor + shift`, for arguments that `encodes` accepts.

    Where the divisor is zero, values are zero before the shift. Where it is one, and there are factors, nothing is
    divided; elsewhere factors are one.
    """
    *batch, length = rows.shape
    of_blocks = [a for a in (divisor, factor, offset, shift) if a is not None]
    two = lambda a: a.reshape(-1, a.shape[-1])
    out, by_rule = packed_length(length, bits), steps.rule != "steps"
    call = jax.ffi.ffi_call(library.ENCODE, jax.ShapeDtypeStruct((two(rows).shape[0], out), jnp.uint8))
    packed = call(
        *map(two, (rows, *of_blocks)),
        bits=np.int32(bits),
        block_size=np.int64(block_size),
        factor=factor is not None,
        offset=offset is not None,
        shift=shift is not None,
        rule=np.int32(_RULES.index(steps.rule)),
        bias=np.float32(steps.bias),
        nan=np.int32(steps.nan),
        steps=steps.starts[:0] if by_rule else steps.starts,
        codes=steps.codes[:1] if by_rule else steps.codes,
    )
    return packed.reshape(*batch, out)


def reduces(blocks: Array) -> str | None:
    """Returns why `reduce` cannot take blocks, or `None` if it can."""
    if blocks.dtype != jnp.float32 or blocks.size == 0:
        return "it reduces float32, and at least one value"
    return library.refusal()


def reduce(blocks: Float32[Array, "*batch blocks block"], kind: Any) -> Float32[Array, "*batch blocks 1"]:
    """Reduces blocks as `_numerics/reduce.py` says, for arguments that `reduces` accepts."""
    *batch, length = blocks.shape
    if kind == "not_finite":
        return reduce(blocks, "largest") * 0
    count = blocks.size // length
    call = jax.ffi.ffi_call(library.REDUCE, jax.ShapeDtypeStruct((count,), jnp.float32))
    return call(blocks.reshape(count, length), kind=np.int32(_KINDS.index(kind))).reshape(*batch, 1)
