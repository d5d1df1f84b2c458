"""Quantizing one array, and the way back."""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, DTypeLike, Float, PRNGKeyArray, UInt8

from . import _packing, _scaling
from ._array import AbstractFormat, as_axis, as_format, QuantizedArray


def quantize(
    x: Float[ArrayLike, "..."],
    format: AbstractFormat | str = "nf4",
    *,
    axis: int | Sequence[int] = -1,
    dtype: DTypeLike | None = None,
    key: PRNGKeyArray | None = None,
) -> QuantizedArray:
    """Quantizes one array. For a model, see [`eqquant.quantize_tree`][].

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Int4(block_size=32))
        q = eqq.quantize(w, "int8", axis=0)
        ```

    **Arguments:**

    - `x`: a floating point array of at least one dimension. float32, float16, bfloat16 or float64; the arithmetic is
        float32.
    - `format`: a format, or its lower-case name.
    - `axis`: the axis along which blocks run and scales are shared: for a weight, the input axis. Several axes are
        quantized as one, in the order given (as for a convolution).
    - `dtype`: what it dequantizes to. The dtype of `x` unless given.
    - `key`: rounds stochastically, with this key, where the format rounds at all. Otherwise rounding is to nearest.

    **Returns:**

    A [`eqquant.QuantizedArray`][] of the shape of `x`.

    **Raises:**

    `TypeError` for an array that is not floating point; `ValueError` for a scalar, an axis out of range, and, outside
    of `jit`, for values that are not finite in float32. Inside `jit` nothing can be checked: a NaN or an infinity then
    makes its whole block NaN or zero.
    """
    format = as_format(format)
    check_dtype(dtype)
    checked, axes = check_quantizable(x, axis)
    if not isinstance(checked, jax.core.Tracer) and not all_finite(checked):
        raise ValueError(not_finite_message("`x`"))
    return encode_array(checked, format, axes, dtype, key)


def dequantize(q: QuantizedArray | ArrayLike) -> Array:
    """The dense array that a [`eqquant.QuantizedArray`][] stands for; any other array is returned as a JAX array.

    **Arguments:**

    - `q`: a quantized array, or any array.

    **Returns:**

    A `jax.Array` of `q.shape` and `q.dtype`.
    """
    return q.dequantize() if isinstance(q, QuantizedArray) else jnp.asarray(q)


def unpack(q: QuantizedArray) -> UInt8[Array, "..."]:
    """The codes of a quantized array, one per element, in its logical order and shape.

    **Arguments:**

    - `q`: a quantized array.

    **Returns:**

    `uint8`, of `q.shape`. What each code stands for, before scale and zero point, is `q.format.decode(codes)`.
    """
    codes = _packing.unpack(q.codes, q.format.bits, q._length).reshape(*q.codes.shape[:-1], *q.lengths)
    return jnp.moveaxis(codes, range(-len(q.lengths), 0), q._axes)


def is_quantized(x: Any) -> bool:
    """Whether `x` is a [`eqquant.QuantizedArray`][]. Made to be used as `is_leaf`.

    **Arguments:**

    - `x`: anything.

    **Returns:**

    A boolean. A tree that holds quantized arrays is not one itself.
    """
    return isinstance(x, QuantizedArray)


def check_quantizable(x: Any, axis: int | Sequence[int], name: str = "`x`") -> tuple[Any, tuple[int, ...]]:
    """`x` as a JAX array (or the struct it was), and `axis` as negative numbers; or an error that names `name`."""
    if isinstance(x, QuantizedArray):
        raise TypeError(f"{name} is already quantized, to {x.format}. Call `dequantize` first to quantize it anew.")
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        x = jnp.asarray(x)
        dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating point array. Got dtype {dtype}.")
    ndim = len(x.shape)
    if ndim == 0:
        raise ValueError(f"{name} must have at least one dimension. Got a scalar. Leave scalars in float.")
    axes = tuple(int(a) for a in np.atleast_1d(np.asarray(axis)))
    if (
        np.asarray(axis).dtype.kind != "i"
        or any(not -ndim <= a < ndim for a in axes)
        or len({a % ndim for a in axes}) != len(axes)
    ):
        raise ValueError(
            f"`axis` must name different axes of {name}, from {-ndim} to {ndim - 1} for shape {tuple(x.shape)}. "
            f"Got `axis={axis}`."
        )
    if not isinstance(x, jax.ShapeDtypeStruct):
        x = jnp.asarray(x)
    return x, tuple(a % ndim - ndim for a in axes)


def check_dtype(dtype: DTypeLike | None) -> None:
    """Refuses a logical dtype that is not floating point."""
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"`dtype` must be floating point. Got {jnp.dtype(dtype)}. It is what the codes dequantize to.")


def not_finite_message(name: str) -> str:
    return (
        f"{name} must be finite in float32: one NaN or infinity would spoil its whole block. Got values that are not. "
        "Replace them, for instance with `jnp.nan_to_num`, or leave this array in float."
    )


@jax.jit
def all_finite(x: Array) -> Array:
    """Whether every value is finite in float32, the dtype that quantizing computes in."""
    return jnp.isfinite(x.astype(jnp.float32)).all()


def encode_array(
    x: Array, format: AbstractFormat, axes: tuple[int, ...], dtype: DTypeLike | None, key: PRNGKeyArray | None
) -> QuantizedArray:
    """`quantize` after its checks, and without the one for finite values."""
    q = _encode_array(x, format, key, axes)
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        # A spec that names fewer axes than there are means the first ones.
        spec = PartitionSpec(*sharding.spec, *[None] * (q.ndim - len(sharding.spec)))
        q = dataclasses.replace(q, logical_sharding=NamedSharding(sharding.mesh, spec))
    return q if dtype is None else q.astype(dtype)  # pyright: ignore[reportReturnType]


@ft.partial(jax.jit, static_argnums=3)
def _encode_array(x: Array, format: AbstractFormat, key: PRNGKeyArray | None, axes: tuple[int, ...]) -> QuantizedArray:
    lengths = tuple(x.shape[a] for a in axes)
    rows = memory_order(x, axes).astype(jnp.float32)
    *batch, length = rows.shape

    parts = _scaling.split_blocks(rows, format.block_size)
    scales = [format.choose_scale(part) for part in parts]
    if any(scale.shape != part.shape[:-1] for scale, part in zip(scales, parts, strict=True)):
        raise TypeError(
            f"`{type(format).__name__}.choose_scale` must return one scale per block, {parts[0].shape[:-1]} for blocks "
            f"of shape {parts[0].shape}. Got shape {scales[0].shape}."
        )
    zeros = [format.choose_zero_point(part, scale) for part, scale in zip(parts, scales, strict=True)]
    blocks = (*batch, _scaling.num_blocks(length, format.block_size))
    scale = jnp.broadcast_to(jnp.concatenate(scales, axis=-1), blocks)
    zero_point = None if zeros[0] is None else jnp.broadcast_to(jnp.concatenate(zeros, axis=-1), blocks)  # pyright: ignore

    stored, kept = _store_scale(scale, format)
    values = format.normalise(
        rows,
        _scaling.expand(scale, format.block_size, length),
        _scaling.expand(kept, format.block_size, length),
    )
    if zero_point is not None:
        values = values + _scaling.expand(zero_point.astype(jnp.float32), format.block_size, length)
    round = jnp.round if key is None else _scaling.stochastic_round(key)
    codes = format.encode(values, round)
    if codes.dtype != jnp.uint8 or codes.shape != values.shape:
        raise TypeError(
            f"`{type(format).__name__}.encode` must return uint8 of the shape of its values, {values.shape}. Got "
            f"{codes.dtype} of shape {codes.shape}. End it with `.astype(jnp.uint8)`."
        )
    codes = _packing.pack(codes, format.bits)
    return QuantizedArray(codes, stored, zero_point, format, as_axis(axes), lengths, x.dtype)


def memory_order(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "*batch length"]:
    """A logical array as a quantized one lies in memory: the quantized axes last, as one."""
    rows = jnp.moveaxis(x, axes, range(-len(axes), 0))
    return rows.reshape(*rows.shape[: x.ndim - len(axes)], math.prod(x.shape[a] for a in axes))


def _store_scale(scale: Array, format: AbstractFormat) -> tuple[Any, Array]:
    """The scale as it is stored, and the floats that decoding will make of it."""
    if format.scale_format is not None:
        nested = encode_array(scale, format.scale_format, (-1,), None, None)
        return nested, nested.dequantize()
    bits = _scaling.scale_to_bits(scale, format.scale_dtype)
    return bits, _scaling.bits_to_scale(bits, format.scale_dtype)
