"""A weight times a scalar: `w * 2`, `w / 2` and `-w` under `quaxify`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import quax
import wadler_lindig as wl
from jax import lax
from jaxtyping import Array, ArrayLike, DTypeLike, Float

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
from .._array.value import AbstractArrayValue
from .._matmul.quax_rules import bind_dense
from .base import AbstractWrapper


class MultipliedArray(AbstractWrapper):
    """An array times a scalar, or divided by one. Products multiply or divide their results.

    It exists only inside [`eqquant.quaxify`][], which returns a dense array in its place.

    - `array`: the weight.
    - `factor`: the scalar. It gets gradients.
    - `divides`: whether the weight is divided by it.
    """

    array: Any
    factor: Float[Array, ""]
    divides: bool = eqx.field(static=True, default=False)

    deferred = True

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the dense array."""
        return self._apply_factor(self._dequantize_inner())

    def transpose(self, *axes: int | Sequence[int] | None) -> "MultipliedArray | Array":
        """Permutes the logical axes of the weight."""
        return self._rewrap(self.array.transpose(*axes))

    def reshape(self, *shape: int | Sequence[int], **kwargs: Any) -> "MultipliedArray | Array":
        """Reshapes the weight."""
        return self._rewrap(self.array.reshape(*shape, **kwargs))

    def astype(self, dtype: DTypeLike) -> "MultipliedArray | Array":
        """Changes the logical dtype. Returns a dense array if `dtype` is not floating point."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.dequantize().astype(dtype)
        return self._rewrap(self.array.astype(dtype))

    def __getitem__(self, index: Any) -> Array:
        """Returns dense values at an index."""
        return self._apply_factor(self.array[index])

    @property
    def constraints(self) -> Constraints:
        """For products: the constraints of the weight."""
        return get_constraints(self.array)

    def as_matrices(self, axes: MatrixAxes) -> "MultipliedArray | Array":
        """For products: the weight as matrices."""
        return self._rewrap(as_matrices(self.array, axes))

    def linear(self, x: Any, options: Options) -> Float[Array, "*batch m n"]:
        """For products: the product of the weight, times the factor."""
        return self._apply_factor(linear(self.array, x, options))

    def with_dense_weight(self) -> AbstractOperand | None:
        """For products: the same factor, with the weight's own dense weight."""
        dense = self.array.with_dense_weight()
        return None if dense is None else dataclasses.replace(self, array=dense)

    def _rewrap(self, array: AbstractOperand | Array) -> "MultipliedArray | Array":
        if isinstance(array, AbstractArrayValue):
            return dataclasses.replace(self, array=array)
        return self._apply_factor(as_floats(array))

    def _apply_factor(self, x: Array) -> Array:
        # The factor keeps its dtype, since all values would share its rounding error.
        with jax.numpy_dtype_promotion("standard"):
            wide = jnp.promote_types(x.dtype, self.factor.dtype)
        x_wide, factor = x.astype(wide), jnp.broadcast_to(self.factor.astype(wide), x.shape)
        return (x_wide / factor if self.divides else x_wide * factor).astype(x.dtype)

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.TextDoc(f"MultipliedArray({wl.pformat(self.array)}, {'/' if self.divides else '*'} factor)")


@quax.register(lax.mul_p)
def _multiply(w: AbstractArrayValue, factor: ArrayLike, **params: Any) -> AbstractArrayValue | Array:
    return _wrap_factor(w, factor) if _is_factor(w, factor) else bind_dense(lax.mul_p, w, factor, **params)


@quax.register(lax.mul_p)
def _multiply_from_left(factor: ArrayLike, w: AbstractArrayValue, **params: Any) -> AbstractArrayValue | Array:
    return _wrap_factor(w, factor) if _is_factor(w, factor) else bind_dense(lax.mul_p, factor, w, **params)


@quax.register(lax.div_p)
def _divide(w: AbstractArrayValue, factor: ArrayLike, **params: Any) -> AbstractArrayValue | Array:
    if _is_factor(w, factor):
        return _wrap_factor(w, factor, divides=True)
    return bind_dense(lax.div_p, w, factor, **params)


@quax.register(lax.neg_p)
def _negate(w: AbstractArrayValue, **params: Any) -> AbstractArrayValue | Array:
    return _wrap_factor(w, -1.0) if w.ndim > 1 else bind_dense(lax.neg_p, w, **params)


def _is_factor(w: AbstractArrayValue, factor: ArrayLike) -> bool:
    return w.ndim > 1 and jnp.ndim(factor) == 0  # a single row is dequantized


def _wrap_factor(w: AbstractArrayValue, factor: ArrayLike, *, divides: bool = False) -> AbstractArrayValue:
    is_constant = not isinstance(factor, jax.core.Tracer)
    return w if is_constant and factor == 1 else MultipliedArray(w, jnp.asarray(factor, w.dtype), divides)
