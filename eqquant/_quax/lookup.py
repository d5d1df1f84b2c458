"""Rules of gathers: lookups decode their rows, and matrices of a stack stay packed."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Integer

from .._array.array import QuantizedArray
from .._array.codes import spread_tiles
from .._array.dense import allow_dense
from .._array.moves import Axes, CannotMove, change_axes, move_along
from .._array.value import AbstractArrayValue, move
from .rules import rule


@rule(lax.gather_p)
def _gather(w: AbstractArrayValue, indices: ArrayLike, **params: Any) -> AbstractArrayValue | Array:
    fill = params.get("fill_value")
    if fill is not None and not np.isnan(fill):
        raise CannotMove
    lookup = _as_lookup(w.shape, jnp.asarray(indices), params)
    if lookup is not None:
        return _gather_entries(w, lookup, params)
    if isinstance(w, QuantizedArray):
        return _gather_rows(w, indices, params)
    raise CannotMove


class _Lookup(NamedTuple):
    """A gather of entries along one axis, as `jnp.take` does it."""

    axis: int
    indices: Integer[Array, " entries"]
    batch: tuple[int, ...]  # the axes of the indices
    places: tuple[int, ...]  # the positions of those axes in the result
    keepdims: bool  # whether the axis remains in the result, with length one


def _as_lookup(shape: tuple[int, ...], indices: Array, params: dict[str, Any]) -> _Lookup | None:
    dnums, sizes = params["dimension_numbers"], params["slice_sizes"]
    moving = [axis for axis, size in enumerate(sizes) if size != shape[axis]]
    # An axis of length one is whole, and may be the indexed one.
    moving = moving or [axis for axis in dnums.start_index_map if sizes[axis] == 1][:1]
    collapsed = set(dnums.collapsed_slice_dims)
    if len(moving) != 1 or sizes[moving[0]] != 1 or dnums.operand_batching_dims or collapsed - set(moving):
        return None
    (axis,) = moving
    if axis not in dnums.start_index_map:
        return None
    column = dnums.start_index_map.index(axis)
    entries = indices[..., column]
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        # Whole axes must start at zero.
        inside = (indices == 0).at[..., column].set(True).all(-1)
        entries = jnp.where(inside, entries, shape[axis])
    batch, out_ndim = entries.shape, entries.ndim + len(dnums.offset_dims)
    places = tuple(n for n in range(out_ndim) if n not in dnums.offset_dims)
    return _Lookup(axis, entries.reshape(math.prod(batch)), batch, places, axis not in collapsed)


def _gather_entries(w: AbstractArrayValue, lookup: _Lookup, params: dict[str, Any]) -> AbstractArrayValue | Array:
    axis, entries, batch, places, keepdims = lookup

    def move_leaf(axes: Axes, x: Array) -> Array:
        if axis not in axes:
            return x
        at = axes.index(axis)
        rest = tuple(n for n in range(x.ndim) if n != at)
        dnums = lax.GatherDimensionNumbers(rest, (at,), (at,))
        sizes = [1 if n == at else length for n, length in enumerate(x.shape)]
        # The fill mode fills scales out of bounds with ones in all bits: NaN, as for a float operand.
        return lax.gather(x, entries[:, None], dnums, sizes, mode=params["mode"])

    gathered = move(w, move_along(w.ndim, frozenset({axis}), move_leaf))
    rest = [length for n, length in enumerate(gathered.shape) if n != axis]
    if sum(length != 1 for length in rest) > 1 and axis == 0 and places in ((), (0,)):
        # Matrices of a stack.
        result = (*[0] * len(batch), *[None] * keepdims, *range(1, w.ndim))
        return move(
            gathered, change_axes(gathered.shape, result, tuple(1 if n is None else gathered.shape[n] for n in result))
        )
    with allow_dense():
        dense = gathered.dequantize() if isinstance(gathered, AbstractArrayValue) else gathered
    dense = jnp.moveaxis(dense, axis, 0).reshape(*batch, *rest)
    if keepdims:
        dense = jnp.expand_dims(dense, len(batch) + axis)
    return jnp.moveaxis(dense, range(len(batch)), places)


def _gather_rows(q: QuantizedArray, indices: ArrayLike, params: dict[str, Any]) -> Array:
    """Gathers whole rows by several indices at once."""
    dnums, sizes = params["dimension_numbers"], params["slice_sizes"]
    axis, out_ndim = q.ndim - 1, jnp.ndim(indices) - 1 + len(dnums.offset_dims)
    whole = q.axis == -1 and sizes[-1] == q.shape[-1]
    if not whole or q.ndim < 2 or axis in (*dnums.collapsed_slice_dims, *dnums.operand_batching_dims):
        raise CannotMove
    if dnums.offset_dims[-1] != out_ndim - 1:
        raise CannotMove
    gather = lambda leaf: lax.gather(leaf, indices, dnums, (*sizes[:-1], leaf.shape[-1]), mode=params["mode"])
    with allow_dense():
        return jtu.tree_map(gather, spread_tiles(q).with_sharding(None)).dequantize()
