"""Quax rules of products: `eqq.quaxify(f)` brings `jax.lax.dot_general` to the quantized matmul.

Rules of structure, and of products that select from a stack, are in `_wrappers`, since they hold for its arrays too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import quax
from jax import lax
from jax.extend.core import Primitive
from jax.lax import DotDimensionNumbers
from jaxtyping import Array, ArrayLike, DTypeLike

from .._array.contraction import AbstractOperand, Axes, contract, Operand, Options
from .._array.value import AbstractArrayValue


@quax.register(lax.dot_general_p)
def _dot_general(first: AbstractArrayValue | ArrayLike, second: AbstractArrayValue | ArrayLike, **params: Any) -> Array:
    y = None
    if params.get("out_sharding") is None and not isinstance(params.get("precision"), str):
        options = Options(params.get("precision"))
        y = _contract_pairs(first, second, params["dimension_numbers"], options, params.get("preferred_element_type"))
    return bind_dense(lax.dot_general_p, first, second, **params) if y is None else y


def _contract_pairs(
    first: AbstractArrayValue | ArrayLike,
    second: AbstractArrayValue | ArrayLike,
    numbers: DotDimensionNumbers,
    options: Options,
    dtype: DTypeLike | None,
) -> Array | None:
    """Returns the product of two operands of which one is ours, or `None` if it must be dense."""
    left = not isinstance(second, AbstractOperand)
    weight, given = (first, second) if left else (second, first)
    if not isinstance(weight, AbstractOperand):  # Quax may pass operands of which neither is ours
        return None
    other = given if isinstance(given, AbstractOperand) else jnp.asarray(given)
    contracted, batch = numbers
    pairs = [*zip(*batch, strict=True), *zip(*contracted, strict=True)]
    # The two axes of a pair share a name; the name of a free axis is its side and place.
    named = lambda side, ndim: [
        next((pair for pair in pairs if pair[side] == axis), (side, axis, "free")) for axis in range(ndim)
    ]
    w_axes, x_axes = named(1 - left, weight.ndim), named(int(left), other.ndim)
    free = sorted(name for name in (*w_axes, *x_axes) if len(name) == 3)
    out_axes = [*pairs[: len(batch[0])], *free]  # free axes of the left operand come first
    return contract_in(dtype, other, weight, x_axes, w_axes, out_axes, options)


def contract_in(
    dtype: DTypeLike | None,
    x: Operand,
    w: AbstractOperand,
    x_axes: Axes,
    w_axes: Axes,
    out_axes: Axes,
    options: Options,
) -> Array | None:
    """As `contract`, with the dtype of the result that a primitive of JAX names; that of both operands for `None`."""
    with jax.numpy_dtype_promotion("standard"):  # primitives take operands of two dtypes
        natural = jnp.promote_types(x.dtype, w.dtype)
        dtype = natural if dtype is None else dtype
        wide = jnp.promote_types(natural, dtype)
        if not jnp.issubdtype(wide, jnp.inexact):
            return None
        y = contract(x.astype(wide), w, x_axes, w_axes, out_axes, options)
    return None if y is None else y.astype(dtype)


def bind_dense(primitive: Primitive, *operands: AbstractArrayValue | ArrayLike, **params: Any) -> Any:
    """Calls a primitive on dense operands, where it has no packed form."""
    dense = (x.materialise() if isinstance(x, AbstractArrayValue) else x for x in operands)
    return primitive.bind(*dense, **params)
