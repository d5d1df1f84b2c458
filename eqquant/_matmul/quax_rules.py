"""Quax rules: how `eqq.quaxify(f)` handles quantized operands of `jax.lax` primitives.

A primitive that only moves axes or rows keeps its operand quantized where that is exact. A product takes the quantized
matmul. A primitive without a rule dequantizes its operands: arithmetic, reductions, convolutions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import quax
from jax import lax
from jaxtyping import Array, ArrayLike

from .._array.array import QuantizedArray
from .._array.codes import is_in_order
from .._array.contraction import dot_general
from .._array.value import AbstractArrayValue


def _dense(primitive: Any, *operands: Any, **params: Any) -> Any:
    dense = (x.dequantize() if isinstance(x, AbstractArrayValue) else x for x in operands)
    return primitive.bind(*dense, **params)


@quax.register(lax.transpose_p)
def _transpose(w: AbstractArrayValue, *, permutation: Sequence[int]) -> AbstractArrayValue | Array:
    return w.transpose(permutation)


@quax.register(lax.convert_element_type_p)
def _convert_element_type(q: QuantizedArray, *, new_dtype: Any, **params: Any) -> QuantizedArray | Array:
    del params
    return q.astype(new_dtype)


@quax.register(lax.reshape_p)
def _reshape(q: QuantizedArray, *args: ArrayLike, **params: Any) -> QuantizedArray | Array:
    if args or params.get("dimensions") is not None:
        return _dense(lax.reshape_p, q, *args, **params)
    return q.reshape(params["new_sizes"])


@quax.register(lax.squeeze_p)
def _squeeze(q: QuantizedArray, *, dimensions: Sequence[int]) -> QuantizedArray | Array:
    return q.reshape([d for i, d in enumerate(q.shape) if i not in dimensions])


@quax.register(lax.broadcast_in_dim_p)
def _broadcast_in_dim(q: QuantizedArray, *args: ArrayLike, **params: Any) -> QuantizedArray | Array:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    batch = q.ndim - len(q.lengths)
    front = len(shape) - len(q.lengths)
    whole = is_in_order(q) and tuple(dims[batch:]) == tuple(range(front, len(shape))) and shape[front:] == q.lengths
    if args or not whole or params.get("sharding") is not None:
        return _dense(lax.broadcast_in_dim_p, q, *args, **params)
    return _on_rows(
        q, lambda leaf: lax.broadcast_in_dim(leaf, (*shape[:front], leaf.shape[-1]), (*dims[:batch], front))
    )


@quax.register(lax.concatenate_p)
def _concatenate(*operands: QuantizedArray | ArrayLike, dimension: int) -> QuantizedArray | Array:
    first = operands[0]
    alike = isinstance(first, QuantizedArray) and is_in_order(first) and dimension < first.ndim - len(first.lengths)
    if not alike or len({jtu.tree_structure(x) for x in operands}) != 1:
        return _dense(lax.concatenate_p, *operands, dimension=dimension)
    joined = jtu.tree_map(lambda *leaves: jnp.concatenate(leaves, axis=dimension), *operands)
    return dataclasses.replace(joined, logical_sharding=None)


@quax.register(lax.slice_p)
def _slice(q: QuantizedArray, **params: Any) -> QuantizedArray | Array:
    batch = q.ndim - len(q.lengths)
    start, limit = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * q.ndim
    whole = all(s == 0 and e == d and t == 1 for s, e, d, t in _last(batch, start, limit, q.shape, strides))
    if not is_in_order(q) or not whole:
        return _dense(lax.slice_p, q, **params)
    index = tuple(slice(*bounds) for bounds in zip(start[:batch], limit[:batch], strides[:batch], strict=True))
    return _on_rows(q, lambda leaf: leaf[index])


@quax.register(lax.dynamic_slice_p)
def _dynamic_slice(q: QuantizedArray, *starts: ArrayLike, slice_sizes: Sequence[int]) -> QuantizedArray | Array:
    batch = q.ndim - len(q.lengths)
    if not is_in_order(q) or len(starts) != q.ndim or tuple(slice_sizes[batch:]) != q.lengths:
        return _dense(lax.dynamic_slice_p, q, *starts, slice_sizes=slice_sizes)
    # The slice of a whole axis starts at zero, since `dynamic_slice` clamps starts.
    zero = jnp.zeros((), jnp.result_type(starts[0]))
    at = (*starts[:batch], zero)
    return _on_rows(q, lambda leaf: lax.dynamic_slice(leaf, at, (*slice_sizes[:batch], leaf.shape[-1])))


@quax.register(lax.gather_p)
def _gather(q: QuantizedArray, indices: ArrayLike, **params: Any) -> Array:
    """Dequantizes only the rows that an embedding lookup takes."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    axis, batch_dims = q.ndim - 1, numbers.operand_batching_dims
    touched = (*numbers.start_index_map, *numbers.collapsed_slice_dims, *batch_dims)
    out_ndim = jnp.ndim(indices) - 1 + len(numbers.offset_dims)
    whole_rows = q.axis == -1 and axis not in touched and sizes[-1] == q.shape[-1]
    if not whole_rows or q.ndim < 2 or numbers.offset_dims[-1] != out_ndim - 1 or params.get("fill_value") is not None:
        return _dense(lax.gather_p, q, indices, **params)
    # The fill mode gives rows out of bounds scales whose bits are all ones: NaN, as for a float operand.
    gather = lambda leaf: lax.gather_p.bind(leaf, indices, **{**params, "slice_sizes": (*sizes[:-1], leaf.shape[-1])})
    return _on_rows(q, gather).dequantize()


@quax.register(lax.select_n_p)
def _select_n(which: ArrayLike, *cases: QuantizedArray | ArrayLike) -> QuantizedArray | Array:
    alike = all(isinstance(c, QuantizedArray) for c in cases) and len({jtu.tree_structure(c) for c in cases}) == 1
    if not alike or jnp.ndim(which) != 0:
        return _dense(lax.select_n_p, which, *cases)
    return jtu.tree_map(lambda *leaves: lax.select_n(which, *leaves), *cases)


def _on_rows(q: QuantizedArray, f: Callable[[Array], Array]) -> QuantizedArray:
    return dataclasses.replace(jtu.tree_map(f, q), logical_sharding=None)


def _last(batch: int, *sequences: Sequence[int]) -> Any:
    return zip(*(s[batch:] for s in sequences), strict=True)


@quax.register(lax.dot_general_p)
def _dot_general(first: AbstractArrayValue | ArrayLike, second: AbstractArrayValue | ArrayLike, **params: Any) -> Array:
    y, precision = None, params.get("precision")
    if params.get("out_sharding") is None and not isinstance(precision, str):
        dtype = params.get("preferred_element_type")
        y = dot_general(first, second, params["dimension_numbers"], precision=precision, dtype=dtype)
    return _dense(lax.dot_general_p, first, second, **params) if y is None else y
