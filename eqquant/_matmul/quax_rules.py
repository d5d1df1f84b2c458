"""The Quax rule of `jax.lax.dot_general`: under `eqq.quaxify` the quantized matmul.

Rules of other primitives are in `_wrappers`, since they handle wrappers too.
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
def _dot_general(lhs: AbstractArrayValue | ArrayLike, rhs: AbstractArrayValue | ArrayLike, **params: Any) -> Array:
    y = None
    if params.get("out_sharding") is None and not isinstance(params.get("precision"), str):
        options = Options(params.get("precision"))
        y = _contract_pairs(lhs, rhs, params["dimension_numbers"], options, params.get("preferred_element_type"))
    return bind_dense(lax.dot_general_p, lhs, rhs, **params) if y is None else y


def _contract_pairs(
    lhs: AbstractArrayValue | ArrayLike,
    rhs: AbstractArrayValue | ArrayLike,
    dimension_numbers: DotDimensionNumbers,
    options: Options,
    dtype: DTypeLike | None,
) -> Array | None:
    """Returns the product if one operand is quantized and it can stay packed, else `None`."""
    weight_left = not isinstance(rhs, AbstractOperand)
    w, x = (lhs, rhs) if weight_left else (rhs, lhs)
    if not isinstance(w, AbstractOperand):  # Quax may call the rule with two dense operands
        return None
    x = x if isinstance(x, AbstractOperand) else jnp.asarray(x)
    contracted, batch = dimension_numbers
    pairs = [*zip(*batch, strict=True), *zip(*contracted, strict=True)]
    # The two axes of a pair share a name; a free axis is named by its operand and position.
    name_axes = lambda side, ndim: [
        next((pair for pair in pairs if pair[side] == axis), (side, axis, "free")) for axis in range(ndim)
    ]
    w_axes, x_axes = name_axes(1 - weight_left, w.ndim), name_axes(int(weight_left), x.ndim)
    free = sorted(name for name in (*w_axes, *x_axes) if len(name) == 3)
    out_axes = [*pairs[: len(batch[0])], *free]  # free axes of the left operand come first
    return contract_with_dtype(dtype, x, w, x_axes, w_axes, out_axes, options)


def contract_with_dtype(
    dtype: DTypeLike | None,
    x: Operand,
    w: AbstractOperand,
    x_axes: Axes,
    w_axes: Axes,
    out_axes: Axes,
    options: Options,
) -> Array | None:
    """Returns `contract(...)` in a dtype; `None` promotes dtypes, as JAX does."""
    with jax.numpy_dtype_promotion("standard"):  # primitives take operands of two dtypes
        promoted = jnp.promote_types(x.dtype, w.dtype)
        dtype = promoted if dtype is None else dtype
        wide = jnp.promote_types(promoted, dtype)
        if not jnp.issubdtype(wide, jnp.inexact):
            return None
        y = contract(x.astype(wide), w, x_axes, w_axes, out_axes, options)
    return None if y is None else y.astype(dtype)


def bind_dense(primitive: Primitive, *operands: AbstractArrayValue | ArrayLike, **params: Any) -> Any:
    """Binds a primitive to the dequantized operands."""
    dense = (x.materialise() if isinstance(x, AbstractArrayValue) else x for x in operands)
    return primitive.bind(*dense, **params)
