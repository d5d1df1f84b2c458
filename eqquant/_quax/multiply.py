"""Rules of a weight times a scalar, which products multiply their results by."""

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import ArrayLike

from .._array.moves import CannotMove
from .._array.value import AbstractArrayValue
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


def _scale(w: Value, factor: Value) -> AbstractArrayValue:
    if not isinstance(w, AbstractArrayValue) or isinstance(factor, AbstractArrayValue):
        raise CannotMove
    if w.ndim < 2 or isinstance(factor, jax.ShapeDtypeStruct) or jnp.ndim(factor) != 0:  # a row is dequantized
        raise CannotMove
    if not isinstance(factor, jax.core.Tracer) and factor == 1:
        return w
    factor = jnp.asarray(factor, getattr(factor, "dtype", w.dtype))
    return ScaledArray(array=w, scale=jnp.broadcast_to(factor, w.shape[:-1]), axis=-2)
