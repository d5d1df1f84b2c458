"""Reductions of blocks, as a JAX primitive.

Scales are chosen from them. XLA's own are slow on CPU: its `argmax` handles one value at a time. So there they are
native code; everywhere else they are operations of XLA.
"""

import functools as ft
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.core
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching
from jaxtyping import Array, Float

from .. import _compat
from .._native import calls
from .._native.lowering import lower_on_cpu
from .primitives import jit_impl, leading_batching_rule


Reduction = Literal["amax", "signed_amax", "low", "high", "not_finite"]

reduce_blocks_p = jax.extend.core.Primitive("reduce_blocks")


def reduce_blocks(blocks: Float[Array, "*batch blocks block"], kind: Reduction) -> Float[Array, "*batch blocks"]:
    """Reduces each block to a value.

    `"amax"` is the largest magnitude, and NaN where a value is NaN or infinite; `"not_finite"` is NaN there and zero
    elsewhere. `"signed_amax"` is the value of largest magnitude, on ties the first; `"low"` and `"high"` are the least
    and the largest of all values and zero; these three mean nothing where a value is not finite.
    """
    return reduce_blocks_p.bind(blocks, kind=kind)[..., 0]


def by_xla(blocks: Array, *, kind: Reduction) -> Array:
    """Reduces blocks by operations of XLA; the last axis stays, of length one."""
    along = {"axis": -1, "keepdims": True}
    if kind == "low":
        return jnp.min(blocks, **along, initial=0)
    if kind == "high":
        return jnp.max(blocks, **along, initial=0)
    if kind == "not_finite":
        return _not_finite(blocks)
    if kind == "amax" or blocks.shape[-1] == 0:
        return jnp.max(jnp.abs(blocks), **along, initial=0) + _not_finite(blocks)
    index = jnp.argmax(jnp.abs(blocks), **along)
    return jnp.take_along_axis(blocks, index, axis=-1)


def _not_finite(blocks: Array) -> Array:
    # XLA on CPU drops NaN in a vectorized `max` (https://github.com/openxla/xla/issues/21461), but not in a product,
    # where infinity times zero is NaN too. Of six ways that keep NaN this costs least: beside encoding nothing that can
    # be measured, where a sum doubles the time.
    length = blocks.shape[-1]
    if length <= 2**16:
        # In the highest precision: the largest floats are infinite in bfloat16.
        return jnp.matmul(blocks, jnp.zeros((length, 1), blocks.dtype), precision="highest")
    # One block for a whole tensor: as many zeros would take as much memory.
    return jnp.where(jnp.isfinite(blocks).all(axis=-1, keepdims=True), 0, jnp.nan).astype(blocks.dtype)


def _native(blocks: Array, *, kind: Reduction) -> Array:
    return calls.reduce(blocks, kind) if calls.why_not_reduce(blocks) is None else by_xla(blocks, kind=kind)


def _abstract(blocks: Any, *, kind: Reduction) -> jax.core.ShapedArray:
    del kind
    return blocks.update(shape=(*blocks.shape[:-1], 1))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (tangent,) = tangents
    if isinstance(tangent, ad.Zero):
        y = reduce_blocks_p.bind(*primals, **params)
        return y, _compat.zero_tangent(y)
    return jax.jvp(ft.partial(by_xla, **params), primals, (tangent,))


reduce_blocks_p.def_abstract_eval(_abstract)
reduce_blocks_p.def_impl(jit_impl(reduce_blocks_p, by_xla, ["kind"]))
ad.primitive_jvps[reduce_blocks_p] = _jvp
batching.primitive_batchers[reduce_blocks_p] = leading_batching_rule(reduce_blocks_p)
lower_on_cpu(reduce_blocks_p, _native, by_xla)
