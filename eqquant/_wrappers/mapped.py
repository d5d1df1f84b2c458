"""Input transforms: arrays $W = V F$ that are stored as $V$."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import wadler_lindig as wl
from jaxtyping import Array, DTypeLike, Float

from .._array.contraction import (
    AbstractOperand,
    as_floats,
    as_matrices,
    Constraints,
    get_constraints,
    linear,
    MatrixAxes,
    Options,
)
from .._array.moves import Axes, CannotMove, Move
from .._array.value import as_permutation, Index
from .base import AbstractWrapper, check_field


class AbstractMappedArray(AbstractWrapper):
    r"""An array $W = V F$ with an input transform $F$, stored as $V$: products are $V (F x)$.

    $V$ may be floats, a [`eqquant.QuantizedArray`][], a fake-quantized array, one with low-rank factors, or another
    input transform. So [`eqquant.quantize_tree`][], [`eqquant.calibrate.collect_stats`][] and
    training see $V$, under the path `weight.array`. A rule for `weight` matches it too.

    Subclass it for an input transform of your own. Declare the fields `array` and `axis`, and define $F$ and $F^\top$.

    - `array`: $V$.
    - `axis`: the axis of the inputs, -1 or -2.
    """

    is_diagonal: ClassVar[bool] = False  # whether $F$ scales each input on its own, by leaves `(*stack, inputs)`
    axis: eqx.AbstractVar[int]

    def __check_init__(self) -> None:
        if self.axis not in (-1, -2):
            raise ValueError(f"`axis` must be -1 or -2, the axis of the inputs. Got {self.axis!r}.")

    @abc.abstractmethod
    def map_inputs(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        """Returns $F$ applied along an axis of `x`, -1 or -2.

        **Arguments:**

        - `x`: a dense array. If the transform has axes of a stack, the leading axes of `x` match them.
        - `axis`: the axis of the inputs.

        **Returns:**

        An array of the shape and dtype of `x`.
        """

    @abc.abstractmethod
    def map_back(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        """Returns $F^\top$ applied along an axis of `x`: rows of $V$ become rows of $W$.

        **Arguments:**

        - `x`, `axis`: as for `map_inputs`.

        **Returns:**

        An array of the shape and dtype of `x`.
        """

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the dense array $W$."""
        return self.map_back(self._dequantize_inner(), self.axis)

    def transpose(self, *axes: int | Sequence[int] | None) -> "AbstractMappedArray | Array":
        """Permutes the logical axes. Dense unless that only swaps the last two, or nothing."""
        order = as_permutation(axes, self.ndim)
        same, last = list(range(self.ndim)), self.ndim - 1
        if order == same:
            return self
        if order == [*same[:-2], last, last - 1]:
            return dataclasses.replace(self, array=self.array.swapaxes(-1, -2), axis=-3 - self.axis)  # pyright: ignore[reportCallIssue]
        return self.dequantize().transpose(order)

    def astype(self, dtype: DTypeLike) -> "AbstractMappedArray | Array":
        """Changes the logical dtype. Returns a dense array if `dtype` is not floating point."""
        if jnp.issubdtype(dtype, jnp.floating):
            return dataclasses.replace(self, array=self.array.astype(dtype))  # pyright: ignore[reportCallIssue]
        return self.dequantize().astype(dtype)

    def reshape(self, *shape: int | Sequence[int], **kwargs: Any) -> Array:
        """Reshapes the dense array."""
        return self.dequantize().reshape(*shape, **kwargs)

    def __getitem__(self, index: Index) -> Array:
        """Returns dense values. Dequantizes only the selected rows if the index is one of rows."""
        if self.axis == -1 and self.ndim == 2 and (isinstance(index, slice) or not isinstance(index, tuple)):
            if index is not None and index is not Ellipsis and getattr(index, "dtype", None) != bool:
                return self.map_back(jnp.asarray(self.array[index]), -1)
        return self.dequantize()[index]

    @property
    def constraints(self) -> Constraints:
        """For products: a stack stays a stack, and the input axis is not merged with another."""
        inputs = self.axis % self.ndim
        packed_axes = get_constraints(self.array).packed_axes
        return Constraints((inputs,) if packed_axes is None else packed_axes, max(self.ndim - 2, 0), (inputs,))

    def as_matrices(self, axes: MatrixAxes) -> "AbstractMappedArray":
        """For products: the wrapped array as matrices."""
        stack, front = max(self.ndim - 2, 0), axes.shape(self.shape)[:-2]
        out = dataclasses.replace(self, array=None)  # pyright: ignore[reportCallIssue]
        if len(axes.front) != stack:  # an axis of length one was dropped
            drop = lambda leaf: leaf.reshape(*front, *leaf.shape[stack:]) if leaf.ndim > stack else leaf
            out = jtu.tree_map(drop, out)
        axis = -1 if axes.columns == (self.axis % self.ndim,) else -2
        return dataclasses.replace(out, array=as_matrices(self.array, axes), axis=axis)  # pyright: ignore[reportCallIssue]

    def linear(self, x: Array | AbstractOperand, options: Options) -> Float[Array, "*batch m n"]:
        """For products: transforms the inputs before the product, or the results after it."""
        if self.axis == -1:
            return linear(self.array, self.map_inputs(as_floats(x), -1), options)
        return self.map_back(linear(self.array, as_floats(x), options), -1)

    def move(self, spec: Move, *others: "AbstractMappedArray") -> AbstractWrapper:
        if self.axis % self.ndim in spec.changed_axes and not self.is_diagonal:
            raise CannotMove
        spec.check_last(self.ndim - 2, self.ndim - 1)
        return self._move_parts(spec, *others)

    def leaf_axes(self, leaf: Array) -> Axes:
        stack, inputs = max(self.ndim - 2, 0), self.axis % self.ndim
        if 1 < leaf.ndim <= stack:
            raise CannotMove  # the leaf has some axes of the stack, but not all
        shared = stack == 0 or leaf.ndim <= stack
        if self.is_diagonal:
            return (inputs,) if shared else (*range(stack), inputs)
        return () if shared else (*range(stack), *[None] * (leaf.ndim - stack))

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        return wl.TextDoc(f"{type(self).__name__}({wl.pformat(self.array)}, axis={self.axis})")


def align(owner: AbstractMappedArray, name: str, x: Array, axis: int, kind: type) -> Array:
    """Returns a vector, or a stack of them, in the shape that broadcasts along an axis of `x`."""
    vector = getattr(owner, name)
    check_field(owner, name, vector, ((x.shape[axis],), (*x.shape[:-2], x.shape[axis])), kind)
    return reshape_along_axis(vector, x.ndim, axis)


def reshape_along_axis(vector: Array, ndim: int, axis: int) -> Array:
    """Reshapes a vector, or a stack of them, to broadcast along an axis of `ndim` dimensions."""
    ones = [1] * (ndim - vector.ndim - (axis == -2))
    return vector.reshape(*vector.shape[:-1], *ones, vector.shape[-1], *([1] if axis == -2 else []))
