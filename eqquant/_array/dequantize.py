"""Dequantization as a JAX primitive: `decode(codes) * scale`.

On CPU, native code decodes codes of fewer than eight bits several times faster than XLA, whose loop decodes one code at
a time. XLA decodes on other platforms, in exported programs, and where the compiler partitions the array.
"""

import dataclasses
from typing import TypeAlias, TypeVar

import jax
import jax.core
import jax.extend
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.interpreters import ad, batching
from jaxtyping import Array, Float, Float32, UInt, UInt8

from .. import _compat
from .._formats.base import decode_packed
from .._formats.layout import has_nested_scales, make_layout, nested_scale_kind
from .._native import calls
from .._native.lowering import lower_on_cpu
from .._native.weight import StoredWeight
from .._numerics.blocks import dequantize_blocks
from .._numerics.primitives import jit_impl, leading_batching_rule, zero_tangent_jvp
from .._numerics.scale_bits import clip_finite, scale_to_bits
from .._types import PyTreeDef
from .codes import AbstractCodes, row_length
from .dense import allow_dense


_Codes = TypeVar("_Codes", bound=AbstractCodes)
_Scales: TypeAlias = UInt[Array, "*batch blocks"] | AbstractCodes

dequantize_p = jax.extend.core.Primitive("dequantize")


def bind_dequantize(q: AbstractCodes) -> Float[Array, "*batch length"]:
    """Dequantizes an array in memory order, whose last axis is the only quantized one."""
    leaves, tree = jtu.tree_flatten(_compat.vary_alike(q))
    return dequantize_p.bind(*leaves, tree=tree)


def in_memory_order(q: _Codes) -> _Codes:
    """Returns the array in memory order, without a gradient."""
    return dataclasses.replace(q, axis=-1, lengths=(row_length(q),), logical_sharding=None, gradient_of=None)


def clips(q: AbstractCodes) -> bool:
    """Returns whether dequantizing clips to the finite range of the dtype."""
    shifts = q.zero_point_bits is not None or q.offset_bits is not None
    return shifts or q.format.scale_format is not None or q.dtype == jnp.float16


def dequantize_rows(q: AbstractCodes) -> Float[Array, "*batch length"]:
    """Dequantizes by operations of XLA, with the quantized axis last."""
    values = decode_packed(q.format, q.codes, row_length(q))
    dense = dequantize_blocks(values, q.scale, q.zero_point, q.offset, q.format.block_size)
    if clips(q):
        # A level may lie half a step beyond the range, and rounding may enlarge a scale. Both may overflow.
        dense = clip_finite(dense, q.dtype)
    return dense.astype(q.dtype)


def has_decoded_scales(q: AbstractCodes) -> bool:
    """Returns whether scales are floats although the format quantizes them, as in a shard."""
    return q.format.scale_format is not None and not isinstance(q.scale_bits, AbstractCodes)


def as_stored(q: AbstractCodes) -> StoredWeight:
    """Returns the arrays of a weight for native kernels. Decodes doubly nested scales."""
    (scale, row_scale), nested = split_row_scale(q), has_nested_scales(q.format)

    def bits_and_codes(x: _Scales) -> tuple[UInt[Array, "*batch blocks"], UInt8[Array, "*batch bytes"] | None]:
        if nested and isinstance(x, AbstractCodes) and not isinstance(x.scale_bits, AbstractCodes):
            return x.scale_bits, x.codes
        return as_scale_bits(x), None

    scale_bits, scale_codes = bits_and_codes(scale)
    offset, offset_codes = (None, None) if q.offset_bits is None else bits_and_codes(q.offset_bits)
    return StoredWeight(q.codes, scale_bits, row_scale, q.zero_point_bits, scale_codes, offset, offset_codes)


def as_scale_bits(scale: _Scales) -> UInt[Array, "*batch blocks"]:
    """Returns the bits of scales or offsets; quantized ones are decoded to float32."""
    with allow_dense():
        return scale_to_bits(scale.dequantize(), "float32") if isinstance(scale, AbstractCodes) else scale


def split_row_scale(q: AbstractCodes) -> tuple[_Scales, Float32[Array, "*batch 1"] | None]:
    """Splits scales that are small floats into their codes and a per-channel factor."""
    scale = q.scale_bits
    if isinstance(scale, AbstractCodes) and nested_scale_kind(q.format, row_length(q)) is not None:
        return scale.codes, scale.scale
    return scale, None


def _abstract(*args: jax.core.ShapedArray, tree: PyTreeDef) -> jax.core.ShapedArray:
    q = jtu.tree_unflatten(tree, args)
    return args[0].update(shape=q.shape, dtype=q.dtype)


def _by_xla(*args: Array, tree: PyTreeDef) -> Array:
    return dequantize_rows(jtu.tree_unflatten(tree, args))


def _native(*args: Array, tree: PyTreeDef) -> Array:
    q: AbstractCodes = jtu.tree_unflatten(tree, args)
    layout = make_layout(q.format, row_length(q), has_decoded_scales(q))
    if calls.why_not_decode(layout, q.dtype) is not None or q.size == 0:
        return dequantize_rows(q)
    return calls.decode(as_stored(q), layout, q.dtype, clip=clips(q))


dequantize_p.def_abstract_eval(_abstract)
dequantize_p.def_impl(jit_impl(dequantize_p, _by_xla, ["tree"]))
ad.primitive_jvps[dequantize_p] = zero_tangent_jvp(dequantize_p)
batching.primitive_batchers[dequantize_p] = leading_batching_rule(dequantize_p)
lower_on_cpu(dequantize_p, _native, _by_xla)
