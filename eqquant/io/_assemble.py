"""Quantized arrays from their parts: which arrays one consists of, and whether given ones are those."""

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding

from .._array.array import QuantizedArray
from .._formats.base import AbstractFormat, has_offsets, has_zero_points
from .._numerics.axes import as_axis
from .._numerics.blocks import num_blocks
from .._numerics.packing import packed_length


_BITS_OF_SCALE = {"float32": jnp.uint32, "float16": jnp.uint16, "bfloat16": jnp.uint16, "e8m0": jnp.uint8}


@ft.lru_cache(maxsize=1024)
def structure(
    format: AbstractFormat,
    axes: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: np.dtype,
    gradient_of: np.dtype | None = None,
    sharding: NamedSharding | None = None,
) -> QuantizedArray:
    """Returns a quantized array of `shape` whose leaves are `jax.ShapeDtypeStruct`s."""
    batch = tuple(n for i, n in enumerate(shape) if i - len(shape) not in axes)
    lengths = tuple(shape[a] for a in axes)

    def make(format: AbstractFormat, axis: Any, lengths: tuple[int, ...], dtype: np.dtype) -> QuantizedArray:
        length = math.prod(lengths)
        blocks = num_blocks(length, format.block_size)

        def per_block() -> Any:
            if format.scale_format is None:
                return jnp.zeros((*batch, blocks), _BITS_OF_SCALE[format.scale_dtype])
            return make(format.scale_format, -1, (blocks,), np.dtype(np.float32))

        packed = (*batch, packed_length(blocks, format.bits))
        zero_point = jnp.zeros(packed, jnp.uint8) if has_zero_points(format) else None
        codes = jnp.zeros((*batch, packed_length(length, format.bits)), jnp.uint8)
        offset = per_block() if has_offsets(format) else None
        return QuantizedArray(codes, per_block(), zero_point, format, axis, lengths, dtype, offset_bits=offset)

    def whole() -> QuantizedArray:
        q = make(format, as_axis(axes), lengths, dtype)
        floats = None if gradient_of is None else jnp.zeros((*batch, math.prod(lengths)), gradient_of)
        return dataclasses.replace(q, gradient_of=floats, logical_sharding=sharding)

    return jax.eval_shape(whole)


def parts_of(q: Any) -> dict[str, Any]:
    """Returns the leaves by name: `codes`, `scale_bits` (or `scale_bits.codes` and so on), and others alike.

    Those of an `eqquant.PermutedArray` are `order`, and these after `array.`.
    """
    return {jtu.keystr(keys, simple=True, separator="."): leaf for keys, leaf in jtu.tree_flatten_with_path(q)[0]}
