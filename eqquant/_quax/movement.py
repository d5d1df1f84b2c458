"""Rules of reshapes, slices and concatenations, which keep arrays packed.

Without a rule, or where a class of arrays refuses a move, operands are dequantized.
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, DTypeLike

from .. import _compat
from .._array.array import is_quantized, QuantizedArray
from .._array.dense import allow_dense
from .._array.dequantize import in_memory_order
from .._array.moves import Axes, CannotMove, change_axes, move_along
from .._array.value import AbstractArrayValue, move
from .._numerics.axes import as_axes
from .._wrappers.concatenate import concatenate, split
from .rules import rule, Value


MoveResult: TypeAlias = AbstractArrayValue | Array
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _have_same_structure(operands: Sequence[Value]) -> bool:
    """Returns whether all operands are our arrays, of one class and one structure."""
    return all(isinstance(x, AbstractArrayValue) for x in operands) and len(set(map(jtu.tree_structure, operands))) == 1


@rule(lax.transpose_p)
def _transpose(w: AbstractArrayValue, *, permutation: Sequence[int]) -> MoveResult:
    return w.transpose(permutation)


@rule(lax.convert_element_type_p)
def _convert_element_type(w: AbstractArrayValue, *, new_dtype: DTypeLike, **params: Any) -> MoveResult:
    del params
    return w.astype(new_dtype)  # pyright: ignore[reportReturnType]


@rule(lax.reshape_p)
def _reshape(w: AbstractArrayValue, *args: ArrayLike, **params: Any) -> MoveResult:
    if args or params.get("dimensions") is not None:
        raise CannotMove
    return w.reshape(params["new_sizes"])


@rule(lax.squeeze_p)
def _squeeze(w: AbstractArrayValue, *, dimensions: Sequence[int]) -> MoveResult:
    kept = tuple(axis for axis in range(w.ndim) if axis not in dimensions)
    return move(w, change_axes(w.shape, kept, tuple(w.shape[axis] for axis in kept)))


@rule(lax.broadcast_in_dim_p)
def _broadcast_in_dim(w: AbstractArrayValue, *args: ArrayLike, **params: Any) -> MoveResult:
    shape, places = params["shape"], list(params["broadcast_dimensions"])
    result = tuple(places.index(axis) if axis in places else None for axis in range(len(shape)))
    if args or params.get("sharding") is not None:
        raise CannotMove
    return move(w, change_axes(w.shape, result, tuple(shape)))


@rule(lax.concatenate_p, any_operand=True)
def _concatenate(*operands: Value, dimension: int) -> MoveResult:
    return _concatenate_arrays(operands, dimension)


@rule(lax.stack_p, any_operand=True)
def _stack(*operands: Value, axis: int) -> MoveResult:
    return _concatenate_arrays([_expand_dims(x, axis) for x in operands], axis)


@rule(lax.tile_p)
def _tile(w: AbstractArrayValue, *, reps: Sequence[int | np.integer]) -> MoveResult:
    tiled: MoveResult = w
    for axis, times in enumerate(reps):
        tiled = _concatenate_arrays([tiled] * int(times), axis) if times != 1 else tiled
    return tiled


def _concatenate_arrays(operands: Sequence[Value], dimension: int) -> MoveResult:
    """Concatenates arrays. Raises `CannotMove` if the result cannot stay packed."""
    arrays = [x for x in operands if isinstance(x, AbstractArrayValue)]
    if not operands or len(arrays) < len(operands):
        raise CannotMove
    concatenate_codes = lambda *arrays: _call_or_refuse(concatenate, [x.with_sharding(None) for x in arrays], dimension)
    if all(isinstance(x, QuantizedArray) for x in arrays):
        return concatenate_codes(*arrays)
    if not _have_same_structure(arrays):
        raise CannotMove

    def move_leaf(axes: Axes, *leaves: Array) -> Array:
        if dimension not in axes or len({(leaf.ndim, leaf.dtype) for leaf in leaves}) > 1:
            raise CannotMove
        return jnp.concatenate(leaves, axes.index(dimension))

    first, *others = arrays
    spec = move_along(first.ndim, frozenset({dimension}), move_leaf)
    return first.move(spec._replace(move_codes=concatenate_codes), *others)


def _call_or_refuse(f: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Calls `concatenate` or `split`, and raises `CannotMove` where a block would be cut."""
    try:
        return f(*args, **kwargs)
    except ValueError as e:
        raise CannotMove from e


def _expand_dims(x: Value, axis: int) -> MoveResult:
    """Inserts an axis of length one."""
    if not isinstance(x, AbstractArrayValue):
        raise CannotMove
    result = (*range(axis), None, *range(axis, x.ndim))
    return move(x, change_axes(x.shape, result, tuple(1 if n is None else x.shape[n] for n in result)))


@rule(lax.split_p)
def _split(w: AbstractArrayValue, *, sizes: Sequence[int | np.integer], axis: int) -> list[MoveResult]:
    ends = np.cumsum(np.asarray(sizes))
    bounds = [(int(stop - size), int(stop)) for size, stop in zip(sizes, ends, strict=True)]
    return [_slice_axes(w, {axis: (start, stop, 1)}) for start, stop in bounds]


@rule(lax.unstack_p)
def _unstack(w: AbstractArrayValue, *, axis: int) -> list[MoveResult]:
    kept = tuple(n for n in range(w.ndim) if n != axis)
    shape = tuple(w.shape[n] for n in kept)
    parts = [_slice_axes(w, {axis: (n, n + 1, 1)}) for n in range(w.shape[axis])]
    return [move(part, change_axes(jnp.shape(part), kept, shape)) for part in parts]


@rule(lax.slice_p)
def _slice(w: AbstractArrayValue, **params: Any) -> MoveResult:
    strides = params["strides"] or (1,) * w.ndim
    parts = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    changed_axes = {axis: (int(a), int(b), int(c)) for axis, (a, b, c) in enumerate(parts)}
    changed_axes = {axis: part for axis, part in changed_axes.items() if part != (0, w.shape[axis], 1)}
    return _slice_axes(w, changed_axes)


def _slice_axes(w: AbstractArrayValue, parts: dict[int, tuple[int, int, int]]) -> MoveResult:
    """Returns a slice, given start, end and stride by axis."""
    if isinstance(w, QuantizedArray) and len(parts) == 1:
        ((axis, (start, stop, stride)),) = parts.items()
        if axis - w.ndim in as_axes(w.axis) and stride == 1 and stop > start:
            sizes = [size for size in (start, stop - start, w.shape[axis] - stop) if size]
            return _call_or_refuse(split, w, sizes, axis)[1 if start else 0]

    def move_leaf(axes: Axes, x: Array) -> Array:
        whole = lambda n: (0, x.shape[n], 1)
        bounds = [parts.get(axis, whole(n)) if axis is not None else whole(n) for n, axis in enumerate(axes)]
        return lax.slice(x, *zip(*bounds, strict=True)) if bounds else x

    return move(w, move_along(w.ndim, frozenset(parts), move_leaf))


@rule(lax.dynamic_slice_p)
def _dynamic_slice(w: AbstractArrayValue, *starts: ArrayLike, slice_sizes: Sequence[int]) -> MoveResult:
    # `dynamic_slice` clamps starts, so the slice of a whole axis starts at zero.
    changed_axes = frozenset(axis for axis in range(w.ndim) if slice_sizes[axis] != w.shape[axis])

    def move_leaf(axes: Axes, x: Array) -> Array:
        zero = jnp.zeros((), jnp.result_type(starts[0]))
        at = [starts[axis] if axis in changed_axes else zero for axis in axes]
        return lax.dynamic_slice(
            x, at, [slice_sizes[a] if a in changed_axes else x.shape[n] for n, a in enumerate(axes)]
        )

    if len(starts) != w.ndim:  # sizes are traced
        raise CannotMove
    return move(w, move_along(w.ndim, changed_axes, move_leaf))


@rule(lax.rev_p)
def _reverse(w: AbstractArrayValue, *, dimensions: Sequence[int]) -> MoveResult:
    move_leaf = lambda axes, x: lax.rev(x, [n for n, axis in enumerate(axes) if axis in dimensions])
    return move(w, move_along(w.ndim, frozenset(dimensions), move_leaf))


@rule(lax.pad_p)
def _pad(
    w: AbstractArrayValue, value: ArrayLike, *, padding_config: Sequence[Sequence[int | np.integer]]
) -> MoveResult:
    changed_axes = frozenset(axis for axis, added in enumerate(padding_config) if any(added))

    def move_leaf(axes: Axes, x: Array) -> Array:
        widths = [tuple(map(int, padding_config[a])) if a in changed_axes else (0, 0, 0) for a in axes]
        return lax.pad(x, jnp.zeros((), x.dtype), widths)  # pyright: ignore[reportArgumentType]

    is_zero = not isinstance(value, jax.core.Tracer) and not np.any(np.asarray(value))
    # Padding a stack would pad its scales and factors with zeros, which are invalid.
    adds_layers = not isinstance(w, QuantizedArray) and not changed_axes <= {w.ndim - 2, w.ndim - 1}
    if not is_zero or adds_layers:
        raise CannotMove
    padded = move(w, move_along(w.ndim, changed_axes, move_leaf))
    if not all(_zeros_decode_to_zero(q) for q in jtu.tree_leaves(padded, is_leaf=is_quantized) if is_quantized(q)):
        raise CannotMove
    return padded


def _zeros_decode_to_zero(w: QuantizedArray) -> bool:
    """Returns whether leaves whose bits are all zero decode to zeros."""
    row = lambda w: jtu.tree_map(lambda leaf: leaf.reshape(-1, leaf.shape[-1])[:1], in_memory_order(w))
    with jax.ensure_compile_time_eval(), allow_dense():
        zeros = jtu.tree_map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(row, w))
        return not bool(jnp.any(zeros.dequantize()))


@rule(lax.select_n_p, any_operand=True)
def _select_n(which: ArrayLike, *cases: Value) -> MoveResult:
    if not _have_same_structure(cases) or jnp.ndim(which) != 0:
        raise CannotMove
    return jtu.tree_map(lambda *leaves: lax.select_n(which, *leaves), *cases)


@rule(lax.copy_p)
def _copy(w: AbstractArrayValue) -> MoveResult:
    return jtu.tree_map(jnp.copy, w)


@rule(_compat.stop_gradient_p)
def _stop_gradient(w: AbstractArrayValue) -> MoveResult:
    return jtu.tree_map(lax.stop_gradient, w)


@rule(lax.optimization_barrier_p, any_operand=True)
def _optimization_barrier(*operands: Value) -> tuple[Value, ...]:
    return lax.optimization_barrier(operands)


@rule(_compat.name_p)
def _name(w: AbstractArrayValue, **params: Any) -> MoveResult:
    return jtu.tree_map(lambda leaf: _compat.name_p.bind(leaf, **params), w)
