"""The rule of convolutions: of quantized activations, and those that are products.

Codes are multiplied by codes, and sums scaled once. A scale must not change within a window, so each example of `x` has
one scale, as has each output channel of the weight:

    y = s t (conv(a, b) - p conv(1, b))

where `a` are the integers of `x` with the zero point `p`, `b` the integers of the weight, and `s` and `t` the scales of
the example and of the output channel. The correction is a convolution of ones, because a window at the border sees
fewer values.

GPU and TPU convolve int8 in int32. On CPU, XLA convolves int8 far slower than float32. There the same integers are
convolved as floats, in groups of input channels whose sums are below 2^24, and so exact.
"""

import contextlib
import functools as ft
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int8, Int32, Num

from .._array.array import QuantizedArray
from .._array.codes import row_length, spread_tiles
from .._array.dense import allow_dense
from .._array.moves import CannotMove
from .._array.straight_through import value_of
from .._array.value import AbstractArrayValue
from .._formats.layout import make_layout
from .._matmul.dispatch import as_packed_weight, as_quantized
from .._matmul.kernels import xla_codes
from .._native.weight import Layout
from .._numerics.axes import as_axes, logical_order
from .._wrappers.activation import ActivationQuantizedArray
from .._wrappers.low_precision import LowPrecisionArray
from .._wrappers.simulated import FakeQuantizedArray
from .products import convolve_pointwise
from .rules import rule, Value


Params: TypeAlias = dict[str, Any]  # the parameters of the primitive

# Float32 holds every integer up to this one.
_MAX_EXACT = 2**24


@rule(lax.conv_general_dilated_p, any_operand=True)
def _convolve(x: Value, w: Value, **params: Any) -> Array:
    if isinstance(x, AbstractArrayValue) or not isinstance(w, AbstractArrayValue):
        raise CannotMove
    x = jnp.asarray(x)
    if isinstance(w, ActivationQuantizedArray):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return convolve(x, w, params) if floating else lax.conv_general_dilated_p.bind(x, w.dequantize(), **params)
    if isinstance(w, LowPrecisionArray):  # convolves floats
        raise CannotMove
    return convolve_pointwise(x, w, params)


def convolve(x: Float[Array, "..."], w: ActivationQuantizedArray, params: Params) -> Float[Array, "..."]:
    """Computes `conv_general_dilated` after quantizing each example of `x`.

    `params` are the parameters of the primitive. Decoded values are convolved if a format has blocks or no integers.
    """
    batch = params["dimension_numbers"].lhs_spec[0]
    examples = jnp.moveaxis(x, batch, 0)
    q = w.quantize_rows(examples.reshape(examples.shape[0], math.prod(examples.shape[1:]))).quantize()
    restore_shape = lambda values: jnp.moveaxis(values.reshape(examples.shape), 0, batch)
    dense = ft.partial(lax.conv_general_dilated_p.bind, **params)
    weight = spread_tiles(w.array.quantized() if isinstance(w.array, FakeQuantizedArray) else w.array)
    # The dense convolution gives the gradient: it reaches learned scales, and skips clipped values.
    multiplies_codes = _can_multiply_codes(q, weight, params)
    with allow_dense():
        values = restore_shape(q.dequantize()).astype(x.dtype)
    with allow_dense() if multiplies_codes else contextlib.nullcontext():
        expected = dense(values, w.dequantize())
    if not multiplies_codes:
        return expected
    y = _convolve_codes(as_quantized(q), weight, restore_shape, params)
    return value_of(y.astype(expected.dtype), gradient_of=expected)


def _get_layouts(q: QuantizedArray, w: QuantizedArray) -> tuple[Layout, Layout]:
    return make_layout(q.format, q.shape[-1]), make_layout(w.format, row_length(w))


def _can_multiply_codes(q: QuantizedArray, w: Array | AbstractArrayValue, params: Params) -> bool:
    if not isinstance(w, QuantizedArray) or params["batch_group_count"] != 1:
        return False
    inputs = {axis % w.ndim for axis in as_axes(w.axis)}
    whole_channels = inputs == set(range(w.ndim)) - {params["dimension_numbers"].rhs_spec[0]}
    return whole_channels and all(
        layout.per_channel and not (layout.offsets or layout.has_vectors) and xla_codes.is_integer(layout)
        for layout in _get_layouts(q, w)
    )


def _convolve_codes(
    q: QuantizedArray, w: QuantizedArray, restore_shape: Callable[[Array], Array], params: Params
) -> Float[Array, "..."]:
    dnums, (x_layout, w_layout) = params["dimension_numbers"], _get_layouts(q, w)
    left = xla_codes.operand(as_packed_weight(q), x_layout, "int8", x_layout.length)
    right = xla_codes.operand(as_packed_weight(w), w_layout, "int8", w_layout.length)
    shape = lambda n, axis: tuple(n if i == axis else 1 for i in range(w.ndim))
    per_example = lambda a, spec: a.reshape(shape(a.shape[0], spec[0]))
    per_channel = lambda a, spec, axis: a.reshape(shape(a.shape[0], spec[axis]))
    a, b = restore_shape(left.values), logical_order(right.values[:, 0], as_axes(w.axis), w.lengths)
    a_zero = None if left.zero is None else per_example(left.zero, dnums.lhs_spec)
    b_zero = None if right.zero is None else per_channel(right.zero, dnums.rhs_spec, 0)
    as_floats = ft.partial(
        _convolve_floats,
        params=params,
        max_product=_find_bound(x_layout, a_zero) * _find_bound(w_layout, b_zero),
    )
    if b_zero is not None:
        y = as_floats(a, b, a_zero, b_zero)
    else:
        as_integers = ft.partial(_convolve_integers, params=params)
        y = lax.platform_dependent(a, b, a_zero, b_zero, cpu=as_floats, default=as_integers)
    scale = per_example(left.scale, dnums.out_spec) * per_channel(right.scale, dnums.out_spec, 1)
    return y.astype(jnp.float32) * jnp.broadcast_to(scale, y.shape)


def _find_bound(layout: Layout, zero: Array | None) -> int:
    """Returns an upper bound of the magnitude of values minus their zero point."""
    return int(max(map(abs, layout.table))) if zero is None else 2**layout.bits


def _convolve_exactly(
    a: Num[Array, "..."], b: Num[Array, "..."], params: Params, dtype: DTypeLike
) -> Num[Array, "..."]:
    exact = {"preferred_element_type": jnp.dtype(dtype), "precision": (lax.Precision.HIGHEST,) * 2}
    return lax.conv_general_dilated_p.bind(a, b, **{**params, **exact})


def _convolve_integers(
    a: Int8[Array, "..."], b: Int8[Array, "..."], a_zero: Array | None, b_zero: None, *, params: Params
) -> Int32[Array, "..."]:
    del b_zero
    y, dnums = _convolve_exactly(a, b, params, jnp.int32), params["dimension_numbers"]
    if a_zero is None:
        return y
    at_border = _convolve_exactly(
        lax.slice_in_dim(jnp.ones_like(a), 0, 1, axis=dnums.lhs_spec[0]), b, params, jnp.int32
    )
    a_zero = jnp.moveaxis(a_zero, dnums.lhs_spec[0], dnums.out_spec[0])
    return y - jnp.broadcast_to(a_zero, y.shape) * jnp.broadcast_to(at_border, y.shape)


def _convolve_floats(
    a: Int8[Array, "..."],
    b: Int8[Array, "..."],
    a_zero: Array | None,
    b_zero: Array | None,
    *,
    params: Params,
    max_product: int,
) -> Int32[Array, "..."]:
    subtract_zero = lambda a, zero: (
        a if zero is None else a.astype(jnp.int32) - jnp.broadcast_to(zero, a.shape)
    ).astype(jnp.float32)
    a, b, dnums = subtract_zero(a, a_zero), subtract_zero(b, b_zero), params["dimension_numbers"]
    a_axis, (_, b_axis, *window) = dnums.lhs_spec[1], dnums.rhs_spec
    groups, channels = params["feature_group_count"], b.shape[b_axis]
    max_channels = max(_MAX_EXACT // (max_product * math.prod(b.shape[axis] for axis in window)), 1)

    def convolve_channels(start: int) -> Int32[Array, "..."]:
        size = min(max_channels, channels - start)
        x = jnp.moveaxis(a, a_axis, -1)
        x = x.reshape(*x.shape[:-1], groups, channels)[..., start : start + size]
        x = jnp.moveaxis(x.reshape(*x.shape[:-2], groups * size), -1, a_axis)
        weight = lax.slice_in_dim(b, start, start + size, axis=b_axis)
        return _convolve_exactly(x, weight, params, jnp.float32).astype(jnp.int32)

    if max_channels >= channels:
        return _convolve_exactly(a, b, params, jnp.float32).astype(jnp.int32)
    starts = range(max_channels, channels, max_channels)
    return sum(map(convolve_channels, starts), convolve_channels(0))
