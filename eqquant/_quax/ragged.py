"""The rule of `jax.lax.ragged_dot`: mixtures of experts multiply packed experts.

Rows of `x` are sorted by expert. They are split into tiles of equally many rows, each of one expert, and each tile
selects a weight: native kernels read experts in place, and other implementations gather them, one at a time if there
are more tiles than experts.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Integer

from .. import _compat
from .._array.array import QuantizedArray
from .._array.codes import spread_tiles_along
from .._array.contraction import Options
from .._array.moves import Axes, CannotMove, move_along
from .._array.value import AbstractArrayValue, move
from .._matmul.selected import SelectedArray
from .._numerics.axes import as_axes
from .products import contract_with_dtype
from .rules import rule


# Larger tiles gain nothing more from sharing a decoded expert.
_MAX_TILE_ROWS = 256


@rule(_compat.ragged_dot_general_p, any_operand=True)
def _ragged_dot(x: ArrayLike, w: AbstractArrayValue, group_sizes: ArrayLike, **params: Any) -> Array:
    if isinstance(x, AbstractArrayValue) or not isinstance(w, AbstractArrayValue):
        raise CannotMove
    x, sizes = jnp.asarray(x), jnp.asarray(group_sizes)
    dnums = params["ragged_dot_dimension_numbers"]
    (x_contracted, w_contracted), batch = dnums.dot_dimension_numbers
    ragged = dnums.lhs_ragged_dimensions[0]
    plain = not any(batch) and sizes.ndim == 1 and ragged not in x_contracted and 0 not in (*x.shape, *w.shape)
    others = (params.get("group_offset"), params.get("out_sharding"))
    if plain and others == (None, None) and not isinstance(params["precision"], str):
        return ragged_product(x, w, sizes, (x_contracted, w_contracted), ragged, dnums.rhs_group_dimensions[0], params)
    raise CannotMove


def ragged_product(
    x: Array,
    w: AbstractArrayValue,
    sizes: Integer[Array, " groups"],
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    ragged: int,
    group: int,
    params: dict[str, Any],
) -> Array:
    """Multiplies each row of `x` by the weight of its group.

    **Arguments:**

    - `x`: floats. Along the axis `ragged`, entries are sorted by group.
    - `w`: the weights of groups, which are stacked along the axis `group`.
    - `sizes`: the number of entries of each group. Entries beyond their sum belong to no group, and give zeros.
    - `contracted`: the axes of `x` and of `w` that are summed over.
    - `params`: `precision` and `preferred_element_type`, as in `jax.lax.dot_general`.

    **Raises:**

    `CannotMove` if the product must be dense.
    """
    tiles = _make_tiles(x.shape[ragged], sizes)
    pairs = {axis: (0, n) for n, axis in enumerate(contracted[1])}
    w_axes = ["tile" if axis == group else pairs.get(axis, (2, axis)) for axis in range(w.ndim)]
    order = (group, *(axis for axis in range(w.ndim) if axis != group))
    stack = w if group == 0 else w.transpose(order)
    selected = select_entries(stack, tiles.group) if isinstance(stack, AbstractArrayValue) else stack
    if not isinstance(selected, AbstractArrayValue):
        raise CannotMove
    x_axes: list[Any] = [(1, axis) for axis in range(x.ndim)]
    for n, axis in enumerate(contracted[0]):
        x_axes[axis] = (0, n)
    x_axes[ragged : ragged + 1] = ["tile", "row"]
    out_axes = [name for name in x_axes if name[0] != 0] + [name for name in w_axes if name[0] == 2]

    rows = jnp.take(x, tiles.rows.reshape(-1), ragged, mode="fill", fill_value=0)
    rows = rows.reshape(*x.shape[:ragged], *tiles.rows.shape, *x.shape[ragged + 1 :])
    dtype, options = params["preferred_element_type"], Options(params["precision"])
    y = contract_with_dtype(dtype, rows, selected, x_axes, [w_axes[n] for n in order], out_axes, options)
    at = out_axes.index("tile")
    flat = y.reshape(*y.shape[:at], math.prod(tiles.rows.shape), *y.shape[at + 2 :])
    return jnp.take(flat, tiles.places, at, mode="fill", fill_value=0)


def select_entries(w: AbstractArrayValue, index: Integer[Array, " count"]) -> AbstractArrayValue | Array:
    """Returns `w[index]` along the first axis, without copying codes.

    **Raises:**

    `CannotMove` if the array cannot stay packed.
    """

    def move_leaf(axes: Axes, x: Array) -> Array:
        return x[index] if axes and axes[0] == 0 else x

    def select_codes(q: QuantizedArray) -> SelectedArray:
        if 0 in {axis % q.ndim for axis in as_axes(q.axis)}:
            raise CannotMove
        return SelectedArray(spread_tiles_along(q, 0).with_sharding(None), index, q.ndim)

    return move(w, move_along(w.ndim, frozenset({0}), move_leaf)._replace(move_codes=select_codes))


class _Tiles(NamedTuple):
    """The rows of each tile, all of one group."""

    group: Integer[Array, " tiles"]
    rows: Integer[Array, "tiles height"]  # the row at each place, or the number of rows for padding
    places: Integer[Array, " rows"]  # the place of each row, or the number of places


def _make_tiles(num_rows: int, sizes: Integer[Array, " groups"]) -> _Tiles:
    groups = sizes.shape[0]
    height = min(2 ** math.ceil(math.log2(math.ceil(num_rows / groups))), _MAX_TILE_ROWS)
    partial_tiles = min(groups, num_rows)  # tiles that may not be full
    num_tiles = (num_rows - partial_tiles) // height + partial_tiles
    ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), num_rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tile_ends = jnp.cumsum(-((starts - ends) // height))
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends[:-1]])

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right"), groups - 1).astype(jnp.int32)
    first = starts[group] + (tile - tile_starts[group]) * height
    rows = first[:, None] + jnp.arange(height, dtype=jnp.int32)[None]
    rows = jnp.where(rows < ends[group][:, None], rows, num_rows)

    row = jnp.arange(num_rows, dtype=jnp.int32)
    own = jnp.minimum(jnp.searchsorted(ends, row, side="right"), groups - 1)
    within = row - starts[own]
    places = (tile_starts[own] + within // height) * height + within % height
    return _Tiles(group, rows, jnp.where(row < ends[-1], places, num_tiles * height))
