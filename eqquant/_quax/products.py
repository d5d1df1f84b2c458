"""Rules of products: `dot_general`, and 1 x 1 convolutions, such as ConvNeXt's."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike

from .._array.contraction import AbstractOperand, Axes, contract, Operand, Options
from .._array.moves import CannotMove, change_axes
from .._array.value import AbstractArrayValue, move
from .rules import rule, Value


@rule(lax.dot_general_p, any_operand=True)
def _dot_general(lhs: Value, rhs: Value, **params: Any) -> Array:
    if params.get("out_sharding") is not None or isinstance(params.get("precision"), str):
        raise CannotMove
    weight_left = not isinstance(rhs, AbstractOperand)
    w, x = (lhs, rhs) if weight_left else (rhs, lhs)
    if not isinstance(w, AbstractOperand):
        raise CannotMove
    x = x if isinstance(x, AbstractOperand) else jnp.asarray(x)
    contracted, batch = params["dimension_numbers"]
    pairs = [*zip(*batch, strict=True), *zip(*contracted, strict=True)]
    # The two axes of a pair share a name; a free axis is named by its operand and position.
    name_axes = lambda side, ndim: [
        next((pair for pair in pairs if pair[side] == axis), (side, axis, "free")) for axis in range(ndim)
    ]
    w_axes, x_axes = name_axes(1 - weight_left, w.ndim), name_axes(int(weight_left), x.ndim)
    free = sorted(name for name in (*w_axes, *x_axes) if len(name) == 3)
    out_axes = [*pairs[: len(batch[0])], *free]  # free axes of the left operand come first
    dtype, options = params.get("preferred_element_type"), Options(params.get("precision"))
    return contract_with_dtype(dtype, x, w, x_axes, w_axes, out_axes, options)


def contract_with_dtype(
    dtype: DTypeLike | None,
    x: Operand,
    w: AbstractOperand,
    x_axes: Axes,
    w_axes: Axes,
    out_axes: Axes,
    options: Options,
) -> Array:
    """Returns `contract(...)` in a dtype; `None` promotes dtypes, as JAX does.

    **Raises:**

    `CannotMove` if the product must be dense.
    """
    with jax.numpy_dtype_promotion("standard"):  # primitives take operands of two dtypes
        promoted = jnp.promote_types(x.dtype, w.dtype)
        dtype = promoted if dtype is None else dtype
        wide = jnp.promote_types(promoted, dtype)
        if not jnp.issubdtype(wide, jnp.inexact):
            raise CannotMove
        y = contract(x.astype(wide), w, x_axes, w_axes, out_axes, options)
    if y is None:
        raise CannotMove
    return y.astype(dtype)


def convolve_pointwise(x: Array, w: AbstractArrayValue, params: dict[str, Any]) -> Array:
    """Returns a 1 x 1 convolution, as a product.

    **Raises:**

    `CannotMove` if the convolution is not a product, or must be dense.
    """
    x_spec, w_spec, out_spec = params["dimension_numbers"]
    in_groups = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    is_shifted = any(map(any, params["padding"])) or any(n != 1 for n in params["lhs_dilation"])
    if in_groups or is_shifted or any(w.shape[axis] != 1 for axis in w_spec[2:]):
        raise CannotMove
    kept = tuple(sorted(w_spec[:2]))
    matrix = move(w, change_axes(w.shape, kept, tuple(w.shape[axis] for axis in kept)))
    if not isinstance(matrix, AbstractOperand):
        raise CannotMove
    strides = [1] * x.ndim
    for axis, stride in zip(x_spec[2:], params["window_strides"], strict=True):
        strides[axis] = stride
    x = lax.slice(x, [0] * x.ndim, x.shape, strides)
    places = range(2, x.ndim)
    x_axes = _name_axes(x_spec, ["batch", "in", *places])
    out_axes = _name_axes(out_spec, ["batch", "out", *places])
    w_axes = ["out" if axis == w_spec[0] else "in" for axis in kept]
    options = Options(params["precision"])
    return contract_with_dtype(params["preferred_element_type"], x, matrix, x_axes, w_axes, out_axes, options)


def _name_axes(spec: tuple[int, ...], names: list[str | int]) -> list[str | int]:
    return [names[spec.index(axis)] for axis in range(len(spec))]
