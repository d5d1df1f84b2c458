"""Rounds values to the nearest codes and packs them, as a JAX primitive.

On CPU it is native code; everywhere else it is operations of XLA.
"""

import math
from typing import Any

import jax
import jax.core
import jax.extend
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.interpreters import ad, batching
from jaxtyping import Array, Float, PRNGKeyArray

from .. import _compat
from .._formats.base import AbstractFormat, pack_codes, packed_length
from .._formats.steps import find_steps
from .._native import calls
from .._native.encoding import Scaling
from .._native.lowering import lower_on_cpu
from .._numerics.batching import Index, map_chunks, report_row
from .._numerics.blocks import block_length, divide
from .._numerics.primitives import jit_impl, leading_batching_rule, zero_tangent_jvp
from .._types import PyTreeDef
from .base import AbstractMethod, AbstractScaleMethod
from .grid import encode_by, EncodedRows, Grid, multiplies


encode_p = jax.extend.core.Primitive("encode")


def quantize_packed(
    method: AbstractMethod,
    rows: Float[Array, "*batch length"],
    format: AbstractFormat,
    *,
    key: PRNGKeyArray | None = None,
    chunk: int | None = None,
) -> EncodedRows:
    """Returns the result of `method.quantize_rows` with packed codes."""
    chooses_scales = isinstance(method, AbstractScaleMethod)
    if key is None and chooses_scales and type(method).quantize_rows is AbstractScaleMethod.quantize_rows:
        stored, stored_offset, grid = method.choose_grid(rows, format, chunk)
        leaves, tree = jtu.tree_flatten(_compat.vary_alike((rows, grid._replace(stored_offset=None))))
        codes = encode_p.bind(*leaves, tree=tree, format=format, chunk=chunk)
        return EncodedRows(codes, stored, grid.zero_point, stored_offset)
    encoded = method.quantize_rows(rows, format, key=key, chunk=chunk)
    return encoded._replace(codes=pack_codes(format, encoded.codes))


def by_xla(*args: Array, tree: PyTreeDef, format: AbstractFormat, chunk: int | None) -> Array:
    """Encodes by operations of XLA."""
    rows, grid = jtu.tree_unflatten(tree, args)
    count = math.prod(rows.shape[:-1])

    def encode(first: Index, rows: Array, grid: Grid) -> Array:
        report_row(first, count)
        return encode_by(rows.astype(jnp.float32), grid, format)[0]

    return pack_codes(format, map_chunks(encode, chunk, rows, grid))


def _native(*args: Array, tree: PyTreeDef, format: AbstractFormat, chunk: int | None) -> Array:
    """Encodes by native code, where that takes the values."""
    rows, grid = jtu.tree_unflatten(tree, args)
    # Finding steps takes a moment, so not before something else refuses.
    steps = find_steps(format) if calls.why_not_encode(rows, format.bits) is None else None
    if steps is None or (steps.rule == "steps" and len(steps.thresholds) > 31):  # XLA is as fast at more
        return by_xla(*args, tree=tree, format=format, chunk=chunk)
    divisor, factor = grid.stored_scale, None
    if format.multiplies_by_reciprocal:
        usable = multiplies(grid.scale, grid.stored_scale)
        divisor = jnp.where(usable, 1, grid.stored_scale)
        factor = jnp.where(usable, divide(jnp.ones_like(grid.scale), grid.scale), 1)
    length = rows.shape[-1]
    block_size = block_length(format.block_size, length)
    shift = None if grid.zero_point is None else grid.zero_point.astype(jnp.float32)
    out = packed_length(format, length)
    return calls.encode(rows, Scaling(divisor, factor, grid.offset, shift), steps, format.bits, block_size, out)


def _abstract(*args: Any, tree: PyTreeDef, format: AbstractFormat, chunk: int | None) -> jax.core.ShapedArray:
    del tree, chunk
    *batch, length = args[0].shape
    shape = (*batch, packed_length(format, length))
    return args[0].update(shape=shape, dtype=jnp.dtype(jnp.uint8), weak_type=False)


encode_p.def_abstract_eval(_abstract)
encode_p.def_impl(jit_impl(encode_p, by_xla, ["tree", "format", "chunk"]))
ad.primitive_jvps[encode_p] = zero_tangent_jvp(encode_p)
batching.primitive_batchers[encode_p] = leading_batching_rule(encode_p)
lower_on_cpu(encode_p, _native, by_xla)
