"""Rules of a weight times a scalar: products multiply their results by it instead."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from .._array.moves import CannotMove
from .._array.value import AbstractArrayValue
from .._types import PyTree
from .._wrappers.base import AbstractMatmulOverride, with_array
from .._wrappers.mapped import AbstractMappedArray
from .._wrappers.scaled import ScaledArray
from .rules import rule, Value


@rule(lax.mul_p, any_operand=True)
def _multiply(x: Value, y: Value, **params: object) -> AbstractArrayValue:
    del params
    w, factor = (x, y) if isinstance(x, AbstractArrayValue) else (y, x)
    return _scale(w, factor)


@rule(lax.div_p)
def _divide(w: AbstractArrayValue, factor: ArrayLike, **params: object) -> AbstractArrayValue:
    del params
    return _scale(w, 1 / jnp.asarray(factor, jnp.float64 if w.dtype == jnp.float64 else jnp.float32))


@rule(lax.neg_p)
def _negate(w: AbstractArrayValue, **params: object) -> AbstractArrayValue:
    del params
    return _scale(w, -1.0)


class MultipliedArray(AbstractMappedArray):
    """A weight times a scalar, which [`eqquant.quaxify`][] returns as a dense array."""

    is_diagonal: ClassVar[bool] = True

    array: PyTree
    scale: Float[Array, "*stack rows"]
    axis: int = eqx.field(static=True, default=-2)

    map_inputs = map_back = ScaledArray.map_inputs


def _scale(w: Value, factor: Value) -> AbstractArrayValue:
    if not isinstance(w, AbstractArrayValue) or isinstance(factor, AbstractArrayValue | jax.ShapeDtypeStruct):
        raise CannotMove
    if w.ndim < 2 or jnp.ndim(factor) != 0:
        raise CannotMove
    if not isinstance(factor, jax.core.Tracer) and factor == 1:
        return w
    if isinstance(w, AbstractMatmulOverride):  # the weight alone is multiplied, not what its products add
        return with_array(w, _scale(w.array, factor))
    factor = jnp.asarray(factor, getattr(factor, "dtype", w.dtype))
    return MultipliedArray(array=w, scale=jnp.broadcast_to(factor, w.shape[:-1]))
