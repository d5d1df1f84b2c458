"""Slices, gathers, reversals and new axes of quantized arrays, which stay packed.

Each class of arrays says here which of its axes a leaf has. A move of a leaf follows from that, so the rule of a
primitive needs to know no class.
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
from .base import AbstractMatmulOverride, AbstractWrapper
from .lora import LoraArray
from .low_precision import LowPrecisionArray
from .mapped import AbstractMappedArray
from .multiplied import MultipliedArray
from .simulated import FakeQuantizedArray


Axes: TypeAlias = tuple[int | None, ...]  # the logical axis of each axis of a leaf, `None` if it has none
MoveResult: TypeAlias = AbstractArrayValue | Array


class Move(NamedTuple):
    """A move of whole entries along logical axes.

    - `move_leaf`: computes a leaf of the result, given the axes of the leaf and that leaf of each operand.
    - `changed_axes`: the logical axes along which entries are gathered, added or reordered.
    - `source_axes`: the source of each axis of the result, `None` for a new axis. Axes of length one may be left out.
    - `move_codes`: moves `QuantizedArray`s as a whole, instead of leaf by leaf.
    """

    move_leaf: Callable[..., Array]
    changed_axes: frozenset[int]
    source_axes: Axes
    move_codes: Callable[..., AbstractArrayValue] | None = None


class CannotMove(Exception):
    """Raised where an array cannot stay packed."""


@ft.singledispatch
def move(x: MoveResult, spec: Move, *others: MoveResult) -> MoveResult:
    """Moves an array, or concatenates several of the same structure if the move does that.

    **Raises:**

    `CannotMove` if the result would not be exact, or not packed.
    """
    if isinstance(x, AbstractArrayValue):
        raise CannotMove
    return spec.move_leaf(tuple(range(jnp.ndim(x))), x, *others)


@move.register
def _(x: QuantizedArray, spec: Move, *others: QuantizedArray) -> AbstractArrayValue:
    if spec.move_codes is not None:
        return spec.move_codes(x, *others)
    quantized = [axis % x.ndim for axis in as_axes(x.axis)]
    kept = [n for n, axis in enumerate(quantized) if axis in spec.source_axes]
    if not kept or not spec.changed_axes.isdisjoint(quantized):
        raise CannotMove
    axes = (*(axis for axis in range(x.ndim) if axis not in quantized), None)
    out = jtu.tree_map(ft.partial(spec.move_leaf, axes), x, *others)
    return dataclasses.replace(
        out,
        axis=as_axis(tuple(spec.source_axes.index(quantized[n]) - len(spec.source_axes) for n in kept)),
        lengths=tuple(x.lengths[n] for n in kept),
        logical_sharding=None,
    )


@move.register
def _(x: FakeQuantizedArray, spec: Move, *others: FakeQuantizedArray) -> MoveResult:
    return move(x.quantized(), spec, *(other.quantized() for other in others))


@move.register
def _(x: SelectedArray, spec: Move, *others: SelectedArray) -> MoveResult:
    return move(x.gather(), spec, *(other.gather() for other in others))


@move.register
def _(x: AbstractMatmulOverride, spec: Move, *others: AbstractMatmulOverride) -> MoveResult:
    # Leaves besides the weight are scalars, or one for each array of a stack.
    return _move_wrapper(x, spec, others, lambda leaf: tuple(range(leaf.ndim)))


@move.register
def _(x: LowPrecisionArray, spec: Move, *others: LowPrecisionArray) -> MoveResult:
    # `amax` holds three values for each array of a stack.
    return _move_wrapper(x, spec, others, lambda leaf: (*range(leaf.ndim - 1), None))


@move.register
def _(x: MultipliedArray, spec: Move, *others: MultipliedArray) -> MoveResult:
    return _move_wrapper(x, spec, others, lambda leaf: (), stacks=False)


@move.register
def _(x: AbstractMappedArray, spec: Move, *others: AbstractMappedArray) -> MoveResult:
    stack = max(x.ndim - 2, 0)
    if x.axis % x.ndim in spec.changed_axes:
        raise CannotMove
    _check_matrices(x.ndim, spec)

    def find_axes(leaf: Array) -> Axes:
        if 1 < leaf.ndim <= stack:
            raise CannotMove  # the leaf has some axes of the stack, but not all
        shared = stack == 0 or leaf.ndim <= stack
        return () if shared else (*range(stack), *[None] * (leaf.ndim - stack))

    return _move_wrapper(x, spec, others, find_axes)


@move.register
def _(x: LoraArray, spec: Move, *others: LoraArray) -> LoraArray:
    stack, loras = x.ndim - 1 - x.in_ndim, (x, *others)
    if any(lora.rank != x.rank for lora in others):
        raise CannotMove
    inputs = tuple(range(stack + 1, x.ndim))
    kept = [axis for axis in inputs if axis in spec.source_axes]
    if not kept:
        raise CannotMove
    _check_last(spec, (stack, *kept))

    def move_factor(axes: Axes, *factors: Array) -> Array:
        unchanged = spec.changed_axes.isdisjoint(axes) and spec.source_axes == tuple(range(x.ndim))
        if unchanged and not _are_same(factors):
            raise CannotMove  # the other factor differs
        return factors[0] if unchanged else spec.move_leaf(axes, *factors)

    return dataclasses.replace(
        x,
        base=move(x.base, spec, *(other.base for other in others)),
        a=move_factor((*range(stack), None, *inputs), *(lora.a for lora in loras)),
        b=move_factor((*range(stack + 1), None), *(lora.b for lora in loras)),
        in_ndim=len(kept),
    )


def _move_wrapper(
    x: AbstractWrapper,
    spec: Move,
    others: tuple[AbstractWrapper, ...],
    find_axes: Callable[[Array], Axes],
    *,
    stacks: bool = True,
) -> AbstractWrapper:
    """Moves the wrapped array, and the other leaves along the axes that they have.

    Where wrappers are concatenated along an axis of a stack and their leaves differ, the leaves get that axis, if
    `stacks` allows it.
    """
    inner = lambda wrapper: wrapper.array
    empty = lambda wrapper: eqx.tree_at(inner, wrapper, None, is_leaf=lambda part: part is wrapper.array)

    def move_leaf(leaf: Array, *rest: Array) -> Array:
        if rest:
            return concatenate_leaves(leaf, *rest)
        axes = find_axes(leaf)
        if not axes or (spec.changed_axes.isdisjoint(axes) and spec.source_axes == tuple(range(x.ndim))):
            return leaf
        _check_matrices(x.ndim, spec)
        first = next(n for n, axis in enumerate(spec.source_axes) if axis is not None)
        if sum(axis is not None for axis in axes) < x.ndim - 2 and None in spec.source_axes[first:]:
            raise CannotMove  # a new axis between two axes of the stack
        return spec.move_leaf(axes, leaf)

    def concatenate_leaves(*leaves: Array) -> Array:
        if not all(spec.changed_axes <= set(find_axes(leaf)) for leaf in leaves):
            if _are_same(leaves):
                return leaves[0]
            if not stacks or not spec.changed_axes <= set(range(x.ndim - 2)):
                raise CannotMove  # one leaf cannot stand for all
            arrays = (x, *others)
            leaves = tuple(
                _broadcast_to_stack(leaf, find_axes(leaf), w.shape) for leaf, w in zip(leaves, arrays, strict=True)
            )
        return spec.move_leaf(find_axes(leaves[0]), *leaves)

    array = move(x.array, spec, *(other.array for other in others))
    rest = jtu.tree_map(move_leaf, empty(x), *map(empty, others))
    return eqx.tree_at(inner, rest, array, is_leaf=lambda part: part is None)


def _are_same(leaves: Sequence[Array]) -> bool:
    return all(leaf is leaves[0] for leaf in leaves)


def _broadcast_to_stack(leaf: Array, axes: Axes, shape: tuple[int, ...]) -> Array:
    """Broadcasts a leaf to the axes of the stack, and keeps its own axes last."""
    stack, present = len(shape) - 2, [axis for axis in axes if axis is not None]
    own = leaf.shape[len(present) :]
    places = [*present, *range(stack, stack + len(own))]
    return jax.lax.broadcast_in_dim(leaf, (*shape[:stack], *own), places)


def _check_matrices(ndim: int, spec: Move) -> None:
    _check_last(spec, (ndim - 2, ndim - 1))


def _check_last(spec: Move, last: tuple[int, ...]) -> None:
    """Raises unless these axes stay last."""
    if spec.source_axes[-len(last) :] != last or min(last) < 0:
        raise CannotMove


def move_along(ndim: int, changed_axes: frozenset[int], move_leaf: Callable[..., Array]) -> Move:
    """Returns a move along some axes, which keeps all axes."""
    return Move(move_leaf, changed_axes, tuple(range(ndim)))


def change_axes(shape: tuple[int, ...], source_axes: Axes, new_shape: tuple[int, ...]) -> Move:
    """Returns a move that inserts axes, and broadcasts or drops axes of length one."""
    repeated = [
        axis for axis, length in zip(source_axes, new_shape, strict=True) if axis is not None and shape[axis] != length
    ]

    def move_leaf(axes: Axes, x: Array) -> Array:
        lengths, places, at = [], [], 0
        keep = [n for n, axis in enumerate(axes) if axis is None or axis in source_axes]
        x = jnp.reshape(x, [x.shape[n] for n in keep])
        axes = tuple(axes[n] for n in keep)

        def pass_until(stop: int) -> None:
            nonlocal at
            while at < stop:
                places.append(len(lengths))
                lengths.append(x.shape[at])
                at += 1

        for axis, length in zip(source_axes, new_shape, strict=True):
            if axis is None:
                lengths.append(length)
            elif axis in axes:
                pass_until(axes.index(axis) + 1)
                lengths[-1] = length
        pass_until(len(axes))
        return jax.lax.broadcast_in_dim(x, lengths, places)

    return Move(move_leaf, frozenset(repeated), source_axes)
