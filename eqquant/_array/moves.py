"""Operations that copy whole entries: slices, gathers, reversals, concatenations, new axes.

Each class of arrays says in its method `move` which logical axis each axis of a leaf is. What happens to the leaf
follows from that, so the rule of a primitive needs to know no class.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array


Axes: TypeAlias = tuple[int | None, ...]  # the logical axis of each axis of a leaf, `None` if it has none


class Move(NamedTuple):
    """An operation that copies whole entries along logical axes.

    - `move_leaf`: computes a leaf of the result, given the axes of the leaf and that leaf of each operand.
    - `changed_axes`: the logical axes along which entries are gathered, added or reordered.
    - `source_axes`: the source of each axis of the result, `None` for a new axis. Axes of length one may be left out.
    - `move_codes`: moves `QuantizedArray`s as a whole, instead of leaf by leaf.
    """

    move_leaf: Callable[..., Array]
    changed_axes: frozenset[int]
    source_axes: Axes
    move_codes: Callable[..., Any] | None = None

    def keeps(self, axes: Axes, ndim: int) -> bool:
        """Returns whether a leaf of these axes stays as it is."""
        return self.changed_axes.isdisjoint(axes) and self.source_axes == tuple(range(ndim))

    def check_last(self, *last: int) -> None:
        """Raises `CannotMove` unless these axes stay last."""
        if self.source_axes[-len(last) :] != last or min(last) < 0:
            raise CannotMove


class CannotMove(Exception):
    """Raised where an array cannot stay packed."""


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
            # An axis without a logical one stays behind its predecessor.
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
                lengths[-1] = length if axis in repeated else lengths[-1]
        pass_until(len(axes))
        return jax.lax.broadcast_in_dim(x, lengths, places)

    return Move(move_leaf, frozenset(repeated), source_axes)
