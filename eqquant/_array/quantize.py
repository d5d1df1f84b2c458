"""Quantizing one array, and the way back."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Num, PRNGKeyArray, UInt8

from .._formats.base import AbstractFormat, as_format
from .._mesh import explicit_mesh, full_spec, in_auto_mode
from .._numerics import packing
from .._numerics.blocks import expand, num_blocks, split_blocks
from .._numerics.rounding import stochastic_round
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .array import QuantizedArray
from .axes import as_axis, memory_order
from .sharding import leaf_shardings


def quantize(
    x: Float[ArrayLike, "..."],
    format: AbstractFormat | str = "nf4",
    *,
    axis: int | Sequence[int] = -1,
    dtype: DTypeLike | None = None,
    key: PRNGKeyArray | None = None,
    scale: Float[ArrayLike, "..."] | None = None,
    zero_point: Num[ArrayLike, "..."] | None = None,
) -> QuantizedArray:
    """Quantizes one array. For a model, see [`eqquant.quantize_tree`][].

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Int4(block_size=32))
        q = eqq.quantize(w, "int8", axis=0)
        q = eqq.quantize(w, "int8", scale=3 / 127)
        ```

    **Arguments:**

    - `x`: a floating point array of at least one dimension. float32, float16, bfloat16 or float64; the arithmetic is
        float32.
    - `format`: a format, or its lower-case name.
    - `axis`: the axis along which blocks run and scales are shared: for a weight, the input axis. Several axes are
        quantized as one, in the order given (as for a convolution).
    - `dtype`: what it dequantizes to. The dtype of `x` unless given.
    - `key`: rounds stochastically, with this key, where the format rounds at all. Otherwise rounding is to nearest.
    - `scale`: the scales, instead of those that the format would choose: floats that broadcast to the shape of the
        result's `scale`, which is `(*batch, blocks)` with the quantized axis last. Values beyond their range are
        clipped.
    - `zero_point`: the code of zero, one per scale, integers from 0 to `2**bits - 1`. Given with `scale`, for a format
        that has zero points, and only then.

    **Returns:**

    A [`eqquant.QuantizedArray`][] of the shape of `x`.

    **Raises:**

    `TypeError` for an array that is not floating point; `ValueError` for a scalar, an axis out of range, for scales and
    zero points that do not fit, and, outside of `jit`, for values that are not finite in float32. Inside `jit` nothing
    can be checked: a NaN or an infinity then makes its whole block NaN or zero.
    """
    format = as_format(format)
    check_dtype(dtype)
    checked, axes = check_quantizable(x, axis)
    if not isinstance(checked, jax.core.Tracer) and not all_finite(checked):
        raise ValueError(not_finite_message("`x`"))
    return encode_array(checked, format, axes, dtype, key, _check_given(checked, format, axes, scale, zero_point))


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
    codes = packing.unpack(q.codes, q.format.bits, q._length).reshape(*q.codes.shape[:-1], *q.lengths)
    return jnp.moveaxis(codes, range(-len(q.lengths), 0), q._axes)


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


def all_finite(x: Array) -> bool:
    """Whether every value is finite in float32, the dtype that quantizing computes in. `x` is not traced."""
    with jax.ensure_compile_time_eval():  # though it may be a constant of what is
        return bool(_all_finite(x))


@jax.jit
def _all_finite(x: Array) -> Array:
    return jnp.isfinite(x.astype(jnp.float32)).all()


def encode_array(
    x: Array,
    format: AbstractFormat,
    axes: tuple[int, ...],
    dtype: DTypeLike | None,
    key: PRNGKeyArray | None,
    given: tuple[Array, Array | None] | None = None,
    sharding: NamedSharding | PartitionSpec | None = None,
) -> QuantizedArray:
    """`quantize` after its checks, and without the one for finite values. `given` are scales and zero points.

    The result is divided among devices as `sharding` says, or as `x` is: each device quantizes its part.
    """
    if sharding is None and not isinstance(x, jax.core.Tracer):
        sharding = getattr(x, "sharding", None)
    on_mesh = full_spec(sharding, x.ndim) if isinstance(sharding, NamedSharding) else None
    q = _encode_array(x, format, key, given, axes, on_mesh)
    return q if dtype is None else q.astype(dtype)  # pyright: ignore[reportReturnType]


@ft.partial(jax.jit, static_argnums=(4, 5))
def _encode_array(
    x: Array,
    format: AbstractFormat,
    key: PRNGKeyArray | None,
    given: tuple[Array, Array | None] | None,
    axes: tuple[int, ...],
    sharding: NamedSharding | None,
) -> QuantizedArray:
    encode = ft.partial(_encode_here, axes=axes)
    mesh = explicit_mesh(x)
    if mesh is not None:
        typed = NamedSharding(mesh, jax.typeof(x).sharding.spec)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, given))
        leaves = leaf_shardings(jax.eval_shape(encode, shapes[0], format, key, shapes[1]), typed)
        q = in_auto_mode(encode, leaves)(x, format, key, given)
        return q if sharding is None else dataclasses.replace(q, logical_sharding=sharding)
    q = encode(x, format, key, given)
    return q if sharding is None else q.with_sharding(sharding)


def _encode_here(
    x: Array,
    format: AbstractFormat,
    key: PRNGKeyArray | None,
    given: tuple[Array, Array | None] | None,
    *,
    axes: tuple[int, ...],
) -> QuantizedArray:
    lengths = tuple(x.shape[a] for a in axes)
    rows = memory_order(x, axes).astype(jnp.float32)
    length = rows.shape[-1]
    scale, zero_point = _choose(rows, format) if given is None else given

    stored, kept = _store_scale(scale, format)
    values = format.normalise(
        rows,
        expand(scale, format.block_size, length),
        expand(kept, format.block_size, length),
    )
    if zero_point is not None:
        values = values + expand(zero_point.astype(jnp.float32), format.block_size, length)
    round = jnp.round if key is None else stochastic_round(key)
    codes = format.encode(values, round)
    if codes.dtype != jnp.uint8 or codes.shape != values.shape:
        raise TypeError(
            f"`{type(format).__name__}.encode` must return uint8 of the shape of its values, {values.shape}. Got "
            f"{codes.dtype} of shape {codes.shape}. End it with `.astype(jnp.uint8)`."
        )
    codes = packing.pack(codes, format.bits)
    return QuantizedArray(codes, stored, zero_point, format, as_axis(axes), lengths, x.dtype)


def _choose(rows: Float[Array, "*batch length"], format: AbstractFormat) -> tuple[Array, Array | None]:
    """The scales and zero points that a format chooses, `(*batch, blocks)`."""
    *batch, length = rows.shape
    parts = split_blocks(rows, format.block_size)
    scales = [format.choose_scale(part) for part in parts]
    if any(scale.shape != part.shape[:-1] for scale, part in zip(scales, parts, strict=True)):
        raise TypeError(
            f"`{type(format).__name__}.choose_scale` must return one scale per block, {parts[0].shape[:-1]} for blocks "
            f"of shape {parts[0].shape}. Got shape {scales[0].shape}."
        )
    zeros = [format.choose_zero_point(part, scale) for part, scale in zip(parts, scales, strict=True)]
    blocks = (*batch, num_blocks(length, format.block_size))
    scale = jnp.broadcast_to(jnp.concatenate(scales, axis=-1), blocks)
    zero_point = None if zeros[0] is None else jnp.broadcast_to(jnp.concatenate(zeros, axis=-1), blocks)  # pyright: ignore
    return scale, zero_point


def _check_given(
    x: Any, format: AbstractFormat, axes: tuple[int, ...], scale: Any, zero_point: Any
) -> tuple[Array, Array | None] | None:
    """The scales and zero points of a caller, broadcast to `(*batch, blocks)`, or an error."""
    if scale is None:
        if zero_point is not None:
            raise ValueError("`zero_point` must come with `scale`. Got it alone. Pass both, or neither.")
        return None
    chosen, zeros = jax.eval_shape(lambda x: _choose(memory_order(x, axes).astype(jnp.float32), format), x)
    if (zeros is None) != (zero_point is None):
        has, got = ("no", "one") if zeros is None else ("a", "none")
        raise ValueError(
            "`zero_point` must be given with `scale` for a format that has one, and for no other. Got "
            f"{got}, and {format!r} has {has} zero point. An integer format has one with `symmetric=False`."
        )
    given = {"scale": jnp.asarray(scale), "zero_point": zero_point if zero_point is None else jnp.asarray(zero_point)}
    for name, value in given.items():
        if value is not None:
            given[name] = _broadcast_given(name, value, chosen.shape)
    scale, zero_point = given["scale"], given["zero_point"]
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"`scale` must be floating point. Got dtype {scale.dtype}.")
    if not isinstance(scale, jax.core.Tracer) and not all_finite(scale):
        raise ValueError("`scale` must be finite in float32. Got values that are not. Calibrate on data without them.")
    if zero_point is not None and not isinstance(zero_point, jax.core.Tracer):
        codes, top = np.asarray(zero_point), 2**format.bits - 1
        if not ((codes >= 0) & (codes <= top) & (codes == np.round(codes))).all():
            raise ValueError(
                f"`zero_point` must hold whole numbers from 0 to {top}, the codes of {format!r}. Got others. Calibrate "
                f"with `bits={format.bits}`."
            )
    return scale.astype(jnp.float32), None if zero_point is None else zero_point.astype(jnp.uint8)


def _broadcast_given(name: str, value: Array, shape: tuple[int, ...]) -> Array:
    try:
        return jnp.broadcast_to(value, shape)
    except ValueError:
        raise ValueError(
            f"`{name}` must broadcast to {shape}, one value per block, with the quantized axis last. Got shape "
            f"{value.shape}. Calibrate along the same axis and with groups of `block_size`."
        ) from None


def _store_scale(scale: Array, format: AbstractFormat) -> tuple[Any, Array]:
    """The scale as it is stored, and the floats that decoding will make of it."""
    if format.scale_format is not None:
        nested = encode_array(scale, format.scale_format, (-1,), None, None)
        return nested, nested.dequantize()
    bits = scale_to_bits(scale, format.scale_dtype)
    return bits, bits_to_scale(bits, format.scale_dtype)
