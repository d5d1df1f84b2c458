"""Quax rules: how `eqq.quaxify(f)` handles quantized operands of `jax.lax` primitives.

A primitive that only moves axes or rows keeps its operand quantized where that is exact. A product takes the quantized
matmul. A primitive without a rule dequantizes its operands: arithmetic, reductions, convolutions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import quax
from jax import lax
from jaxtyping import Array, ArrayLike

from .._array.activation import ActivationQuantizedArray
from .._array.array import QuantizedArray
from .._array.low_precision import LowPrecisionArray
from .._array.mapped import AbstractMappedArray
from .._array.product import dot_general
from .._array.selected import SelectedArray
from .._array.simulated import SimulatedArray
from .._array.value import AbstractArrayValue, round_rows
from .._array.wrapped import AbstractWrappedArray
from .convolution import convolve


def _dense(primitive: Any, *operands: Any, **params: Any) -> Any:
    dense = (x.dequantize() if isinstance(x, (QuantizedArray, SelectedArray)) else x for x in operands)
    return primitive.bind(*dense, **params)


@quax.register(lax.transpose_p)
def _transpose(q: QuantizedArray, *, permutation: Sequence[int]) -> QuantizedArray:
    return q.transpose(permutation)


@quax.register(lax.transpose_p)
def _transpose_wrapped(w: AbstractWrappedArray, *, permutation: Sequence[int]) -> Any:
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
    whole = q._trailing and tuple(dims[batch:]) == tuple(range(front, len(shape))) and shape[front:] == q.lengths
    if args or not whole or params.get("sharding") is not None:
        return _dense(lax.broadcast_in_dim_p, q, *args, **params)
    return _on_rows(
        q, lambda leaf: lax.broadcast_in_dim(leaf, (*shape[:front], leaf.shape[-1]), (*dims[:batch], front))
    )


@quax.register(lax.concatenate_p)
def _concatenate(*operands: QuantizedArray | ArrayLike, dimension: int) -> QuantizedArray | Array:
    first = operands[0]
    alike = isinstance(first, QuantizedArray) and first._trailing and dimension < first.ndim - len(first.lengths)
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
    if not q._trailing or not whole:
        return _dense(lax.slice_p, q, **params)
    index = tuple(slice(*bounds) for bounds in zip(start[:batch], limit[:batch], strides[:batch], strict=True))
    return _on_rows(q, lambda leaf: leaf[index])


@quax.register(lax.dynamic_slice_p)
def _dynamic_slice(q: QuantizedArray, *starts: ArrayLike, slice_sizes: Sequence[int]) -> QuantizedArray | Array:
    batch = q.ndim - len(q.lengths)
    if not q._trailing or len(starts) != q.ndim or tuple(slice_sizes[batch:]) != q.lengths:
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
def _dot_general_left(q: QuantizedArray | SelectedArray, x: ArrayLike, **params: Any) -> Array:
    return _dot_general(q, x, params, left=True)


@quax.register(lax.dot_general_p)
def _dot_general_right(x: ArrayLike, q: QuantizedArray | SelectedArray, **params: Any) -> Array:
    return _dot_general(q, x, params, left=False)


@quax.register(lax.dot_general_p)
def _dot_general_both(p: QuantizedArray, q: QuantizedArray, **params: Any) -> Array:
    return _dot_general(q, p, params, left=False)


@quax.register(lax.dot_general_p)
def _dot_general_quantizing_right(w: ActivationQuantizedArray, x: ArrayLike, **params: Any) -> Array:
    return _dot_general_quantizing(w, x, params, left=True)


@quax.register(lax.dot_general_p)
def _dot_general_quantizing_left(x: ArrayLike, w: ActivationQuantizedArray, **params: Any) -> Array:
    return _dot_general_quantizing(w, x, params, left=False)


@quax.register(lax.conv_general_dilated_p)
def _convolve_quantizing(x: ArrayLike, w: ActivationQuantizedArray, **params: Any) -> Array:
    x = jnp.asarray(x)
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    return convolve(x, w, params) if floats else _dense(lax.conv_general_dilated_p, x, w.dequantize(), **params)


def _dot_general_quantizing(w: ActivationQuantizedArray, x: Any, params: dict[str, Any], *, left: bool) -> Array:
    if w.scale_bits is not None and w.scale_bits.ndim > 0:
        return _dot_general_by_layers(w, x, params, left=left)
    return _dot_general_of(w.array, x, params, left=left, activations=w.quantize_rows)


@quax.register(lax.dot_general_p)
def _dot_general_mapped_left(w: AbstractMappedArray, x: ArrayLike, **params: Any) -> Array:
    return _dot_general_of(w, x, params, left=True)


@quax.register(lax.dot_general_p)
def _dot_general_mapped_right(x: ArrayLike, w: AbstractMappedArray, **params: Any) -> Array:
    return _dot_general_of(w, x, params, left=False)


def _dot_general_of(w: Any, x: Any, params: dict[str, Any], *, left: bool, activations: Any = None) -> Array:
    """Multiplies by an array with maps around it: they map the other operand, whose rows are quantized after that."""
    while isinstance(w, AbstractMappedArray):
        contract, x = params["dimension_numbers"][0], jnp.asarray(x)
        of_w, of_x = contract if left else contract[::-1]
        if tuple(of_w) != (w.ndim + w.axis,) or w._is_stack() or not jnp.issubdtype(x.dtype, jnp.floating):
            break
        x = jnp.moveaxis(w.map_inputs(jnp.moveaxis(x, of_x[0], -1), -1), -1, of_x[0])
        w = w.array
    w = w.quantized() if isinstance(w, SimulatedArray) else w
    if isinstance(w, (QuantizedArray, SelectedArray)):
        return _dot_general(w, x, params, left=left, activations=activations)
    x = x if activations is None else _rounded(x, params, activations, left=left)
    w = w.dequantize() if isinstance(w, AbstractArrayValue) else w
    return _dense(lax.dot_general_p, *((w, x) if left else (x, w)), **params)


def _dot_general_by_layers(w: ActivationQuantizedArray, x: Any, params: dict[str, Any], *, left: bool) -> Array:
    """Multiplies each layer of a stack, whose operand has a scale of its own."""
    x, of_w, of_x = jnp.asarray(x), 1 - left, int(left)
    contract, batch = ([list(axes) for axes in pair] for pair in params["dimension_numbers"])
    out, axis, is_summed = len(batch[0]) + (0 if left else x.ndim - len(batch[0]) - len(contract[0])), None, False
    for pair in (batch, contract):
        if 0 in pair[of_w]:
            place, is_summed = pair[of_w].index(0), pair is contract
            out, axis = 0 if is_summed else place, pair[of_x][place]
            del pair[0][place], pair[1][place]
    for pair in (batch, contract):
        pair[of_w] = [n - 1 for n in pair[of_w]]
        pair[of_x] = [n - (axis is not None and n > axis) for n in pair[of_x]]
    numbers = tuple(tuple(map(tuple, pair)) for pair in (contract, batch))
    layer = lambda w, x: _dot_general_quantizing(w, x, {**params, "dimension_numbers": numbers}, left=left)
    y = jax.vmap(layer, (0, axis), out)(w, x)
    return jnp.sum(y, axis=0) if is_summed else y


@quax.register(lax.dot_general_p)
def _dot_general_low_precision_left(w: LowPrecisionArray, x: ArrayLike, **params: Any) -> Array:
    return _dot_general_low_precision(w, w.dequantize(), x, params, left=True)


@quax.register(lax.dot_general_p)
def _dot_general_low_precision_right(x: ArrayLike, w: LowPrecisionArray, **params: Any) -> Array:
    return _dot_general_low_precision(w, x, w.dequantize(), params, left=False)


def _dot_general_low_precision(
    w: LowPrecisionArray, first: Any, second: Any, params: dict[str, Any], *, left: bool
) -> Array:
    first, second, contract = jnp.asarray(first), jnp.asarray(second), params["dimension_numbers"][0][0]
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (first, second))
    if not floats or not contract or params.get("out_sharding") is not None:
        return _dense(lax.dot_general_p, first, second, **params)
    y = w.dot_general(first, second, params["dimension_numbers"], left=left, precision=params.get("precision"))
    return y.astype(params.get("preferred_element_type") or y.dtype)


def _rounded(x: Any, params: dict[str, Any], activations: Any, *, left: bool) -> Array:
    """Returns the values of the other operand after its rows were quantized."""
    x, axes = jnp.asarray(x), params["dimension_numbers"][0][int(left)]
    return round_rows(x, axes, activations) if axes and jnp.issubdtype(x.dtype, jnp.floating) else x


def _dot_general(
    q: QuantizedArray | SelectedArray, x: Any, params: dict[str, Any], *, left: bool, activations: Any = None
) -> Array:
    """Computes `dot_general` by the quantized matmul where its dimension numbers allow it, otherwise dense."""
    x = x if isinstance(x, QuantizedArray) else jnp.asarray(x)
    dtype = jnp.dtype(params.get("preferred_element_type") or jnp.result_type(x.dtype, q.dtype))
    with jax.numpy_dtype_promotion("standard"):  # the caller asked for this dtype, so promotion is not implicit
        wide = jnp.promote_types(jnp.result_type(x.dtype, q.dtype), dtype)
    options = {"precision": params.get("precision"), "activations": activations}
    y = None
    plain = params.get("out_sharding") is None and not isinstance(options["precision"], str)
    if plain and jnp.issubdtype(wide, jnp.floating):
        y = dot_general(x.astype(wide), q, params["dimension_numbers"], left=left, **options)
    if y is not None:
        return y.astype(dtype)
    x = x if activations is None else _rounded(x, params, activations, left=left)
    return _dense(lax.dot_general_p, *((q, x) if left else (x, q)), **params)
