"""Quantizing by native code on CPU: lowers the primitives of `_numerics/reduce.py` and `_methods/encode.py`."""

from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jax.interpreters import mlir
from jaxtyping import Array

from .. import _compat
from .._formats.base import AbstractFormat
from .._formats.steps import steps_of
from .._methods import encode
from .._methods.grid import multiplies
from .._numerics import reduce
from .._numerics.blocks import divide
from . import native
from .kernels import cpu_encode


def _encode(*args: Array, tree: Any, format: AbstractFormat, chunk: int | None) -> Array:
    rows, grid = jtu.tree_unflatten(tree, args)
    # Finding steps takes a moment, so not before something else refuses.
    steps = steps_of(format) if cpu_encode.encodes(rows, format.bits) is None else None
    if steps is None or (steps.rule == "steps" and len(steps.starts) > 31):  # XLA is as fast at more
        return encode.by_xla(*args, tree=tree, format=format, chunk=chunk)
    divisor, factor = grid.stored_scale, None
    if format.multiplies_by_reciprocal:
        usable = multiplies(grid.scale, grid.stored_scale, format)
        divisor = jnp.where(usable, 1, grid.stored_scale)
        factor = jnp.where(usable, divide(jnp.ones_like(grid.scale), grid.scale), 1)
    block_size = rows.shape[-1] if format.block_size in (None, "tensor") else format.block_size
    shift = None if grid.zero_point is None else grid.zero_point.astype(jnp.float32)
    return cpu_encode.encode(rows, steps, format.bits, block_size, divisor, factor, grid.offset, shift)


def _reduce(blocks: Array, *, kind: reduce.Reduction) -> Array:
    if cpu_encode.reduces(blocks) is not None:
        return reduce.by_xla(blocks, kind=kind)
    return cpu_encode.reduce(blocks, kind)


for _primitive, _native, _by_xla in (
    (encode.encode_p, _encode, encode.by_xla),
    (reduce.reduce_blocks_p, _reduce, reduce.by_xla),
):
    _compat.lower_with_devices(_primitive)
    mlir.register_lowering(_primitive, native.lowering(_native, _by_xla), platform="cpu")
