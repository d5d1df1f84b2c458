"""Concatenates, stacks, splits and gathers arrays, and keeps quantized ones packed."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from .._array.array import is_quantized, QuantizedArray
from .._array.codes import row_length, spread_tiles, spread_tiles_along
from .._array.value import AbstractArrayValue
from .._formats.base import packed_length, segment_length
from .._numerics.axes import as_axes
from .._numerics.packing import pack
from .._types import PyTree
from .mapped import AbstractMappedArray


def concatenate(arrays: Sequence[PyTree], axis: int = 0) -> PyTree:
    """Concatenates dense or quantized arrays along a logical axis.

    **Raises:**

    `ValueError` if some arrays are quantized and others are not, if their formats differ, or if a part ends within a
    block along the quantized axis.
    """
    arrays = list(arrays)
    if len(arrays) == 1:
        return arrays[0]
    if not _all_quantized(arrays):
        return jnp.concatenate(arrays, axis)
    arrays = [_with_row_scales(q, axis) for q in arrays]
    first = arrays[0]
    at = _batch_axis(first, axis)
    if at is None:
        return _concatenate_rows(arrays)
    _check_same(arrays)
    return jtu.tree_map(lambda *leaves: jnp.concatenate(leaves, at), *arrays)


def stack(arrays: Sequence[PyTree]) -> PyTree:
    """Stacks dense or quantized arrays along a new first axis. Raises as `concatenate`."""
    if all(isinstance(x, AbstractMappedArray) for x in arrays):
        _check_same([x.array for x in arrays])
    elif _all_quantized(arrays):
        _check_same(arrays)
    return jtu.tree_map(lambda *leaves: jnp.stack(leaves), *arrays)


def split(x: PyTree, sizes: Sequence[int], axis: int = 0) -> list[PyTree]:
    """Splits an array along a logical axis into parts of these sizes. Raises as `concatenate`."""
    if sum(sizes) != x.shape[axis]:
        raise ValueError(f"{x.shape[axis]} along axis {axis} cannot be divided into {' + '.join(map(str, sizes))}")
    if isinstance(x, AbstractMappedArray):
        if axis % x.ndim == x.axis % x.ndim:
            raise ValueError(f"axis {axis} is stored in another order")
        return [dataclasses.replace(x, array=part) for part in split(x.array, sizes, axis)]
    bounds = [0, *itertools.accumulate(sizes)]
    if is_quantized(x):
        x, at = _without_tiles(x, axis), _batch_axis(x, axis)
        if at is None:
            return [_slice_rows(x, start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        before = (slice(None),) * at
        rows = lambda start, stop: jtu.tree_map(lambda leaf: leaf[(*before, slice(start, stop))], x)
        return [rows(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    return jnp.split(x, bounds[1:-1], axis)


def take(x: PyTree, indices: np.ndarray, axis: int = 0) -> PyTree:
    """Gathers entries along a logical axis. Raises a `ValueError` for a quantized axis."""
    if not is_quantized(x):
        return jnp.take(x, indices, axis)
    x, at = _without_tiles(x, axis), _batch_axis(x, axis)
    if at is None:
        raise ValueError(f"axis {axis} is the quantized one, along which values share scales")
    return jtu.tree_map(lambda leaf: jnp.take(leaf, indices, at), x)


def _all_quantized(arrays: Sequence[PyTree]) -> bool:
    if any(isinstance(x, AbstractArrayValue) and not is_quantized(x) for x in arrays):
        raise ValueError("their inputs are stored in orders of their own")
    quantized = [is_quantized(x) for x in arrays]
    if any(quantized) and not all(quantized):
        raise ValueError("some are quantized and others are not")
    return all(quantized)


def _batch_axis(q: QuantizedArray, axis: int) -> int | None:
    """Returns the position of a logical axis in memory, or `None` for a quantized axis."""
    quantized = {a % q.ndim for a in as_axes(q.axis)}
    return None if axis % q.ndim in quantized else [a for a in range(q.ndim) if a not in quantized].index(axis % q.ndim)


def _with_row_scales(q: QuantizedArray, axis: int) -> QuantizedArray:
    """Turns the scale of a matrix or a tile into scales of rows, which can be concatenated."""
    if q.format.block_size != "tensor":
        return _without_tiles(q, axis)
    return dataclasses.replace(q, format=dataclasses.replace(q.format, block_size=None))


def _without_tiles(q: QuantizedArray, axis: int) -> QuantizedArray:
    """Returns an array whose scales have all entries of a logical axis.

    Tiles become blocks of rows.
    """
    at = _batch_axis(q, axis)
    return spread_tiles(q) if at is None else spread_tiles_along(q, at)


_FIELDS: dict[str, Callable[[QuantizedArray], object]] = {
    "formats": lambda q: q.format,
    "quantized axes": lambda q: q.axis,
    "lengths along the quantized axis": lambda q: q.lengths,
    "dtypes": lambda q: q.dtype,
    "gradients": lambda q: q.gradient_of is not None,
}


def _check_same(arrays: Sequence[QuantizedArray], names: Iterable[str] = _FIELDS) -> None:
    first, *others = arrays
    for name in names:
        get = _FIELDS[name]
        for q in others:
            if get(q) != get(first):
                raise ValueError(f"their {name} differ: {get(first)} and {get(q)}")


def _concatenate_rows(arrays: Sequence[QuantizedArray]) -> QuantizedArray:
    """Concatenates rows end to end. Every part but the last must be whole blocks and segments."""
    first = arrays[0]
    _check_same(arrays, ("formats", "quantized axes", "dtypes", "gradients"))
    block = first.format.block_size
    if len(first.lengths) > 1 or not isinstance(block, int):
        raise ValueError(f"a row of {first.format!r} has one scale, and would have several along axis {first.axis}")
    for q in arrays[:-1]:
        _check_whole(q, row_length(q))

    def concatenate_blocks(parts: Sequence[PyTree]) -> PyTree:
        if parts[0] is None:
            return None
        return _concatenate_rows(parts) if is_quantized(parts[0]) else jnp.concatenate(parts, -1)

    return dataclasses.replace(
        first,
        codes=jnp.concatenate([q.codes for q in arrays], -1),
        scale_bits=concatenate_blocks([q.scale_bits for q in arrays]),
        zero_point_bits=_pack_zero_point(first, concatenate_blocks([q.zero_point for q in arrays])),
        offset_bits=concatenate_blocks([q.offset_bits for q in arrays]),
        gradient_of=concatenate_blocks([q.gradient_of for q in arrays]),
        lengths=(sum(row_length(q) for q in arrays),),
    )


def _slice_rows(q: QuantizedArray, start: int, stop: int) -> QuantizedArray:
    """Slices every row. Neither end may lie inside a block or a segment."""
    block = q.format.block_size
    if len(q.lengths) > 1:
        raise ValueError(f"the axes {q.axis} are quantized as one")
    for at in (start, stop):
        if at != row_length(q):
            _check_whole(q, at)
    one_scale = not isinstance(block, int)  # each part keeps the one scale of the row
    first, last = (0, 1) if one_scale else (start // block, -(-stop // block))
    part = slice(packed_length(q.format, start), packed_length(q.format, stop))

    def slice_blocks(x: PyTree) -> PyTree:
        if x is None or one_scale:
            return x
        return _slice_rows(x, first, last) if is_quantized(x) else x[..., first:last]

    return dataclasses.replace(
        q,
        codes=q.codes[..., part],
        scale_bits=slice_blocks(q.scale_bits),
        zero_point_bits=_pack_zero_point(q, slice_blocks(q.zero_point)),
        offset_bits=slice_blocks(q.offset_bits),
        gradient_of=None if q.gradient_of is None else q.gradient_of[..., start:stop],
        lengths=(stop - start,),
    )


def _pack_zero_point(q: QuantizedArray, zero_point: Array | None) -> Array | None:
    return None if zero_point is None else pack(zero_point, q.format.bits)


def _check_whole(q: QuantizedArray, at: int) -> None:
    block, segment = q.format.block_size, segment_length(q.format)
    if at % segment:
        raise ValueError(f"{q.format!r} packs {segment} codes along axis {q.axis} together, and {at} is no multiple")
    if isinstance(block, int) and at % block:
        raise ValueError(f"{q.format!r} has blocks of {block} along axis {q.axis}, and {at} is no multiple")
