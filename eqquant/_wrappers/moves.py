"""Moves of whole entries along axes: slices, gathers, reversals and new axes, which leave arrays packed.

A class of arrays says here which leaf has which of its axes. What a move does to a leaf follows from that, so that no
rule of a primitive knows any class.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from .._array.array import QuantizedArray
from .._array.value import AbstractArrayValue
from .._matmul.selected import SelectedArray
from .._numerics.axes import as_axes, as_axis
from .base import AbstractArrayAround, AbstractWrappedArray
from .lora import LoraArray
from .low_precision import LowPrecisionArray
from .mapped import AbstractMappedArray
from .multiplied import MultipliedArray
from .simulated import FakeQuantizedArray


Axes: TypeAlias = tuple[int | None, ...]  # the logical axis of each axis of a leaf; `None` for one of its own
Moved: TypeAlias = AbstractArrayValue | Array


class Move(NamedTuple):
    """A move of entries.

    - `leaf`: makes a leaf of the result, from the axes of a leaf and that leaf of each operand.
    - `touched`: the logical axes along which entries are taken, added or reordered.
    - `result`: for each axis of the result the axis that it was, or `None` for a new one. An axis that is left out has
        length one.
    - `codes`: makes an array of quantized ones, if that is not done leaf by leaf.
    """

    leaf: Callable[..., Array]
    touched: frozenset[int]
    result: Axes
    codes: Callable[..., AbstractArrayValue] | None = None


class CannotMove(Exception):
    """The array cannot stay packed through a move."""


@ft.singledispatch
def move(x: Moved, how: Move, *others: Moved) -> Moved:
    """Applies a move to an array, and to others of the same structure if the move joins several.

    **Raises:**

    `CannotMove` if the result would not be exact, or not packed.
    """
    if isinstance(x, AbstractArrayValue):
        raise CannotMove
    return how.leaf(tuple(range(jnp.ndim(x))), x, *others)


@move.register
def _(x: QuantizedArray, how: Move, *others: QuantizedArray) -> AbstractArrayValue:
    if how.codes is not None:
        return how.codes(x, *others)
    quantized = [axis % x.ndim for axis in as_axes(x.axis)]
    kept = [n for n, axis in enumerate(quantized) if axis in how.result]
    if not kept or not how.touched.isdisjoint(quantized):
        raise CannotMove
    axes = (*(axis for axis in range(x.ndim) if axis not in quantized), None)
    moved = jtu.tree_map(ft.partial(how.leaf, axes), x, *others)
    return dataclasses.replace(
        moved,
        axis=as_axis(tuple(how.result.index(quantized[n]) - len(how.result) for n in kept)),
        lengths=tuple(x.lengths[n] for n in kept),
        logical_sharding=None,
    )


@move.register
def _(x: FakeQuantizedArray, how: Move, *others: FakeQuantizedArray) -> Moved:
    return move(x.quantized(), how, *(other.quantized() for other in others))


@move.register
def _(x: SelectedArray, how: Move, *others: SelectedArray) -> Moved:
    return move(x.taken(), how, *(other.taken() for other in others))


@move.register
def _(x: AbstractWrappedArray, how: Move, *others: AbstractWrappedArray) -> Moved:
    # Leaves besides the weight are scalars, or one for each array of a stack.
    return _around(x, how, others, lambda leaf: tuple(range(leaf.ndim)))


@move.register
def _(x: LowPrecisionArray, how: Move, *others: LowPrecisionArray) -> Moved:
    # The largest magnitudes are three for each array of a stack.
    return _around(x, how, others, lambda leaf: (*range(leaf.ndim - 1), None))


@move.register
def _(x: MultipliedArray, how: Move, *others: MultipliedArray) -> Moved:
    return _around(x, how, others, lambda leaf: (), stacks=False)


@move.register
def _(x: AbstractMappedArray, how: Move, *others: AbstractMappedArray) -> Moved:
    stack = max(x.ndim - 2, 0)
    if x.axis % x.ndim in how.touched:
        raise CannotMove
    _check_matrices(x.ndim, how)

    def axes_of(leaf: Array) -> Axes:
        if 1 < leaf.ndim <= stack:
            raise CannotMove  # it belongs to some axes of the stack
        shared = stack == 0 or leaf.ndim <= stack
        return () if shared else (*range(stack), *[None] * (leaf.ndim - stack))

    return _around(x, how, others, axes_of)


@move.register
def _(x: LoraArray, how: Move, *others: LoraArray) -> LoraArray:
    stack, loras = x.ndim - 1 - x.in_ndim, (x, *others)
    if any(lora.rank != x.rank for lora in others):
        raise CannotMove
    inputs = tuple(range(stack + 1, x.ndim))
    kept = [axis for axis in inputs if axis in how.result]
    if not kept:
        raise CannotMove
    _check_last(how, (stack, *kept))

    def moved(axes: Axes, *factors: Array) -> Array:
        kept = how.touched.isdisjoint(axes) and how.result == tuple(range(x.ndim))
        if kept and not _are_one(factors):
            raise CannotMove  # the other factor differs
        return factors[0] if kept else how.leaf(axes, *factors)

    return dataclasses.replace(
        x,
        base=move(x.base, how, *(other.base for other in others)),
        a=moved((*range(stack), None, *inputs), *(lora.a for lora in loras)),
        b=moved((*range(stack + 1), None), *(lora.b for lora in loras)),
        in_ndim=len(kept),
    )


def _around(
    x: AbstractArrayAround,
    how: Move,
    others: tuple[AbstractArrayAround, ...],
    axes_of: Callable[[Array], Axes],
    *,
    stacks: bool = True,
) -> AbstractArrayAround:
    """Moves the array within, and each other leaf along the axes that it has; one without axes stays as it is.

    If arrays are joined along the axis of a stack, leaves that differ get that axis: `stacks` says whether they can.
    """
    within = lambda around: around.array
    empty = lambda around: eqx.tree_at(within, around, None, is_leaf=lambda part: part is around.array)

    def moved(leaf: Array, *rest: Array) -> Array:
        if rest:
            return joined(leaf, *rest)
        axes = axes_of(leaf)
        if not axes or (how.touched.isdisjoint(axes) and how.result == tuple(range(x.ndim))):
            return leaf
        _check_matrices(x.ndim, how)
        first = next(n for n, axis in enumerate(how.result) if axis is not None)
        if sum(axis is not None for axis in axes) < x.ndim - 2 and None in how.result[first:]:
            raise CannotMove  # a new axis between those of the stack
        return how.leaf(axes, leaf)

    def joined(*leaves: Array) -> Array:
        if not all(how.touched <= set(axes_of(leaf)) for leaf in leaves):
            if _are_one(leaves):
                return leaves[0]
            if not stacks or not how.touched <= set(range(x.ndim - 2)):
                raise CannotMove  # the values of one would stand for those of all
            arrays = (x, *others)
            leaves = tuple(_stacked(leaf, axes_of(leaf), w.shape) for leaf, w in zip(leaves, arrays, strict=True))
        return how.leaf(axes_of(leaves[0]), *leaves)

    array = move(x.array, how, *(other.array for other in others))
    rest = jtu.tree_map(moved, empty(x), *map(empty, others))
    return eqx.tree_at(within, rest, array, is_leaf=lambda part: part is None)


def _are_one(leaves: Sequence[Array]) -> bool:
    return all(leaf is leaves[0] for leaf in leaves)


def _stacked(leaf: Array, axes: Axes, shape: tuple[int, ...]) -> Array:
    """Gives a leaf each axis of the stack. Its own axes stay the last."""
    stack, present = len(shape) - 2, [axis for axis in axes if axis is not None]
    own = leaf.shape[len(present) :]
    places = [*present, *range(stack, stack + len(own))]
    return jax.lax.broadcast_in_dim(leaf, (*shape[:stack], *own), places)


def _check_matrices(ndim: int, how: Move) -> None:
    _check_last(how, (ndim - 2, ndim - 1))


def _check_last(how: Move, last: tuple[int, ...]) -> None:
    """Raises unless these axes stay the last ones."""
    if how.result[-len(last) :] != last or min(last) < 0:
        raise CannotMove


def along_axes(ndim: int, touched: frozenset[int], leaf: Callable[..., Array]) -> Move:
    """Returns a move that keeps all axes."""
    return Move(leaf, touched, tuple(range(ndim)))


def change_axes(shape: tuple[int, ...], result: Axes, new_shape: tuple[int, ...]) -> Move:
    """Returns a move that adds axes, repeats those of length one, and leaves out others of length one."""
    repeated = [
        axis for axis, length in zip(result, new_shape, strict=True) if axis is not None and shape[axis] != length
    ]

    def leaf(axes: Axes, x: Array) -> Array:
        lengths, places, at = [], [], 0
        keep = [n for n, axis in enumerate(axes) if axis is None or axis in result]
        x = jnp.reshape(x, [x.shape[n] for n in keep])
        axes = tuple(axes[n] for n in keep)

        def pass_until(stop: int) -> None:
            nonlocal at
            while at < stop:
                places.append(len(lengths))
                lengths.append(x.shape[at])
                at += 1

        for axis, length in zip(result, new_shape, strict=True):
            if axis is None:
                lengths.append(length)
            elif axis in axes:
                pass_until(axes.index(axis) + 1)
                lengths[-1] = length
        pass_until(len(axes))
        return jax.lax.broadcast_in_dim(x, lengths, places)

    return Move(leaf, frozenset(repeated), result)
