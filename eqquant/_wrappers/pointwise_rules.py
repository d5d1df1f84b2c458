"""The Quax rule of 1 x 1 convolutions, which are products (ConvNeXt, MobileNet)."""

from typing import Any

import jax.numpy as jnp
import quax
from jax import lax
from jaxtyping import Array, ArrayLike

from .._array.contraction import AbstractOperand, Options
from .._array.value import AbstractArrayValue
from .._matmul.quax_rules import bind_dense, contract_with_dtype
from .low_precision import LowPrecisionArray
from .moves import CannotMove, change_axes, move


@quax.register(lax.conv_general_dilated_p)
def _convolve(x: ArrayLike, w: AbstractArrayValue, **params: Any) -> Array:
    x = jnp.asarray(x)
    y = _multiply(x, w, params) if _is_pointwise(w, params) else None
    return bind_dense(lax.conv_general_dilated_p, x, w, **params) if y is None else y


def _is_pointwise(w: AbstractArrayValue, params: dict[str, Any]) -> bool:
    _, _, *window = params["dimension_numbers"].rhs_spec
    in_groups = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    is_shifted = any(map(any, params["padding"])) or any(n != 1 for n in params["lhs_dilation"])
    is_low_precision = isinstance(w, LowPrecisionArray)  # convolves floats
    return all(w.shape[axis] == 1 for axis in window) and not (in_groups or is_shifted or is_low_precision)


def _multiply(x: Array, w: AbstractArrayValue, params: dict[str, Any]) -> Array | None:
    x_spec, w_spec, out_spec = params["dimension_numbers"]
    kept = tuple(sorted(w_spec[:2]))
    try:
        matrix = move(w, change_axes(w.shape, kept, tuple(w.shape[axis] for axis in kept)))
    except CannotMove:
        return None
    if not isinstance(matrix, AbstractOperand):
        return None
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
