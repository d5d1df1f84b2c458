"""Base classes of arrays that wrap another array."""

import abc
from collections.abc import Collection, Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, DTypeLike, Float

from .._array.moves import Axes, CannotMove, Move
from .._array.value import AbstractArrayValue, Index, move
from .._errors import name_type
from .._formats.base import AbstractFormat
from .._types import PyTree


_Wrapper = TypeVar("_Wrapper", bound="AbstractWrapper")


class AbstractWrapper(AbstractArrayValue):
    """A wrapper around an array of the same shape and dtype: floats, or one of our arrays."""

    array: eqx.AbstractVar[PyTree]

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape of the weight."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """The number of logical axes."""
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        """The logical dtype of the weight."""
        return np.dtype(self.array.dtype)

    @property
    def format(self) -> AbstractFormat | None:
        """The format of the weight, `None` for floats."""
        # The `format` of a `jax.Array` is a layout.
        return getattr(self.array, "format", None) if isinstance(self.array, AbstractArrayValue) else None

    @abc.abstractmethod
    def leaf_axes(self, leaf: Array) -> Axes:
        """For Quax: the logical axis of each axis of a leaf of its own, not of `array`.

        `None` for an axis that is no axis of the weight. A bias `(*stack, rows)` has `tuple(range(leaf.ndim))`.
        """

    def _move_parts(self, spec: Move, *others: "AbstractWrapper") -> "AbstractWrapper":
        """Moves the wrapped array, and the other leaves along the axes that they have.

        Where wrappers are concatenated along an axis of a stack and their leaves differ, the leaves get that axis.
        """
        empty = lambda wrapper: with_array(wrapper, None)
        array = move(self.array, spec, *(other.array for other in others))
        move_leaf = self._concatenate_leaves if others else self._move_leaf
        rest = jtu.tree_map(lambda *leaves: move_leaf(spec, leaves, (self, *others)), empty(self), *map(empty, others))
        return with_array(rest, array)

    def _move_leaf(self, spec: Move, leaves: Sequence[Array], wrappers: Sequence["AbstractWrapper"]) -> Array:
        del wrappers
        (leaf,) = leaves
        axes = self.leaf_axes(leaf)
        if not axes or spec.keeps(axes, self.ndim):
            return leaf
        spec.check_last(self.ndim - 2, self.ndim - 1)
        first = next(n for n, axis in enumerate(spec.source_axes) if axis is not None)
        if sum(axis is not None for axis in axes) < self.ndim - 2 and None in spec.source_axes[first:]:
            raise CannotMove  # a new axis between two axes of the stack
        return spec.move_leaf(axes, leaf)

    def _concatenate_leaves(self, spec: Move, leaves: Sequence[Array], wrappers: Sequence["AbstractWrapper"]) -> Array:
        if not all(spec.changed_axes <= set(self.leaf_axes(leaf)) for leaf in leaves):
            if all(leaf is leaves[0] for leaf in leaves):
                return leaves[0]
            if not spec.changed_axes <= set(range(self.ndim - 2)):
                raise CannotMove  # one leaf cannot stand for all
            leaves = [
                _broadcast_to_stack(leaf, self.leaf_axes(leaf), w.shape)
                for leaf, w in zip(leaves, wrappers, strict=True)
            ]
        return spec.move_leaf(self.leaf_axes(leaves[0]), *leaves)

    def _dequantize_inner(self) -> Float[Array, "..."]:
        """Returns the wrapped array, dense."""
        return self.array.dequantize() if isinstance(self.array, AbstractArrayValue) else jnp.asarray(self.array)


def with_array(wrapper: _Wrapper, array: PyTree) -> _Wrapper:
    """Returns the wrapper around another array."""
    return eqx.tree_at(lambda w: w.array, wrapper, array, is_leaf=lambda part: part is wrapper.array)


class AbstractMatmulOverride(AbstractWrapper):
    """A wrapper that overrides only the products of a weight.

    Lookups, slices and casts act on the weight. Functions on models look through it: statistics, masks and
    low-rank factors see the wrapped weight, under its path in the float model.
    """

    @property
    @abc.abstractmethod
    def products(self) -> str:
        """What its products do, for reports: "add a bias"."""

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the dense weight."""
        return self._dequantize_inner()

    def astype(self, dtype: DTypeLike) -> AbstractArrayValue | Array:
        """Changes the logical dtype. Returns a dense array if `dtype` is not floating point."""
        return self._rewrap(self.array.astype(dtype))

    def __getitem__(self, index: Index) -> Array:
        """Returns dense values of the weight."""
        return self.array[index]

    def move(self, spec: Move, *others: "AbstractMatmulOverride") -> AbstractWrapper:
        return self._move_parts(spec, *others)

    @abc.abstractmethod
    def _rewrap(self, array: PyTree) -> Array | AbstractArrayValue:
        """Wraps another array the same way, or returns that array itself if it cannot be wrapped."""


_KINDS = {jnp.floating: "floats", jnp.unsignedinteger: "unsigned integers"}


def check_field(
    owner: object, name: str, leaf: Array | AbstractArrayValue, shapes: Collection[tuple[int, ...]], kind: type
) -> None:
    """Raises if a field does not fit the others, as when only some were changed."""
    if tuple(leaf.shape) not in shapes or not jnp.issubdtype(leaf.dtype, kind):
        expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(
            f"`{name}` of {name_type(owner)} must hold {_KINDS[kind]}, of shape {expected}. Got {leaf.dtype} of shape "
            f"{list(leaf.shape)}. Change all fields alike, as `jax.tree.map(lambda leaf: leaf[i], w)` does."
        )


def _broadcast_to_stack(leaf: Array, axes: Axes, shape: tuple[int, ...]) -> Array:
    """Broadcasts a leaf to the axes of the stack, and keeps its own axes last."""
    stack, present = len(shape) - 2, [axis for axis in axes if axis is not None]
    own = leaf.shape[len(present) :]
    places = [*present, *range(stack, stack + len(own))]
    return jax.lax.broadcast_in_dim(leaf, (*shape[:stack], *own), places)
