"""Checks of arguments: arrays, axes, dtypes, scales."""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Float32, PRNGKeyArray

from .._errors import Message
from .._formats.base import AbstractFormat, AbstractVectorFormat, find_levels, has_offsets, has_zero_points
from .._mesh import explicit_mesh
from .._methods import AbstractMethod
from .._methods.given import GivenScales
from .._numerics.axes import memory_order
from .._numerics.blocks import divide, expand, not_finite, num_blocks, tile_height
from .._numerics.constants import compute_now
from .._numerics.scale_bits import round_scale
from .array import QuantizedArray
from .codes import batch_of_scales, repeat_rows
from .value import AbstractArrayValue


# The largest relative error of storing a scale. Float dtypes round by less; a power of two is off by up to a half.
_MAX_STORE_ERROR = 1 / 64
# The largest relative error of clipping. Clipping on purpose loses less; an eight-bit scale in a four-bit format more.
_MAX_CLIP_ERROR = 0.75


def check_quantizable(x: Any, axis: int | Sequence[int], name: str = "`x`") -> tuple[Any, tuple[int, ...]]:
    """Returns `x` as a JAX array (or struct), and `axis` as negative numbers.

    Errors call the array `name`.
    """
    if isinstance(x, QuantizedArray):
        raise TypeError(f"{name} is already quantized, to {x.format}. Call `dequantize` first to quantize it again.")
    x = as_single_array(x, name, "eqq.quantize_tree")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating point array. Got dtype {x.dtype}.")
    if x.ndim == 0:
        raise ValueError(f"{name} must have at least one dimension. Got a scalar. Leave scalars in float.")
    return x, _check_axes(axis, x, name)


def _check_axes(axis: Any, x: Any, name: str) -> tuple[int, ...]:
    given = np.asarray(axis)
    axes = tuple(int(a) for a in given.ravel()) if given.dtype.kind == "i" else ()
    if not axes or any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) != len(axes):
        per_tensor = '. One scale for all is `block_size="tensor"` of the format' if axis is None else ""
        raise (TypeError if given.dtype.kind in "OUS" else ValueError)(
            f"`axis` must name different axes of {name}, from {-x.ndim} to {x.ndim - 1} for shape {tuple(x.shape)}. "
            f"Got `axis={axis!r}`{per_tensor}."
        )
    return tuple(a % x.ndim - x.ndim for a in axes)


def as_single_array(x: Any, name: str, for_trees: str) -> Any:
    """Returns `x` as a JAX array (or struct), or raises and suggests `for_trees`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, np.ndarray) and (x.dtype.kind in "OSU" or x.dtype.names):
        raise TypeError(
            f"{name} must be a floating point array. Got dtype {x.dtype}. Convert it: `x.astype(np.float32)`."
        )
    check_not_masked(x, name)
    try:
        return as_jax_array(x)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be one array. Got {describe_argument(x)}. For a model, call `{for_trees}`."
        ) from None


def as_jax_array(x: Any) -> Array:
    """Returns `x` as a JAX array.

    Converts dtypes of NumPy that JAX refuses: other byte orders, and extended precision.
    """
    if isinstance(x, np.ndarray):
        x = np.asarray(x)  # a masked array without a mask too
        if x.dtype == np.longdouble:
            x = x.astype(np.float64)
        elif not x.dtype.isnative:
            x = x.astype(x.dtype.newbyteorder("="))
    return jnp.asarray(x)


def check_not_masked(x: Any, name: str) -> None:
    """Raises for an array of NumPy with masked values, which no array of JAX can hold."""
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        raise TypeError(
            f"{name} must have all its values. Got a masked array with {np.ma.count_masked(x)} masked ones. Fill them: "
            "`x.filled(0)`."
        )


def suggest_quantized(x: object) -> str:
    """Suggests where to get a quantized array, for errors about `x`, which is not one."""
    if isinstance(x, AbstractArrayValue):
        if x.quantized_as:
            return f"Its `.{x.quantized_as}` is one."
        if near := [f.name for f in dataclasses.fields(x) if isinstance(getattr(x, f.name), QuantizedArray)]:
            return f"Its `.{near[0]}` is one."
    return "`eqq.quantize` makes one."


def describe_argument(x: object) -> str:
    """Describes `x` in a few words, since the repr of a model fills a page."""
    if isinstance(x, AbstractArrayValue):
        return f"a {type(x).__name__}"
    arrays = [leaf for leaf in jtu.tree_leaves(x) if isinstance(leaf, (jax.Array, np.ndarray))]
    if isinstance(x, (jax.Array, np.ndarray)):
        return f"a dense array, {x.dtype}{list(x.shape)}"
    return f"a pytree of {len(arrays)} arrays, of type {type(x).__name__}" if arrays else f"a {type(x).__name__}"


def check_dtype(dtype: DTypeLike | None) -> None:
    """Raises if a logical dtype is not floating point."""
    if dtype is None:
        return
    try:
        is_float, shown = jnp.issubdtype(jnp.dtype(dtype), jnp.floating), str(jnp.dtype(dtype))
    except TypeError:  # not the name of a dtype, but perhaps of a format
        is_float, shown = False, repr(dtype)
    if not is_float:
        raise TypeError(
            f"`dtype` must be floating point. Got {shown}. It is the dtype that codes dequantize to. The type of codes "
            "is the `format`: `format='int8'`."
        )


# Up to so many values in host memory, NumPy is quicker than XLA compiles a program for their shape.
_FEW = 2**16


def check_finite(x: Array, name: str = "`x`") -> None:
    """Raises if an array holds a NaN or an infinity, unless it is traced."""
    if is_known_not_finite(x):
        rule = f"{name} must be finite in float32: one NaN or infinity would spoil its whole block."
        raise ValueError(Message(f"{rule} Got values that are not.", "not finite"))


def is_known_not_finite(x: Array) -> bool:
    """Returns whether a concrete array holds a NaN or an infinity in float32."""
    if isinstance(x, jax.core.Tracer):
        return False
    with compute_now():  # `x` may be a constant inside a traced function
        devices = x.sharding.device_set if isinstance(x, jax.Array) else ()
        float32_on_one_device = len(devices) == 1 and explicit_mesh(x) is None and x.dtype == jnp.float32
        if float32_on_one_device and x.size <= _FEW and all(device.platform == "cpu" for device in devices):
            return not np.isfinite(np.asarray(x)).all()
        if float32_on_one_device and x.ndim > 0 and x.size > 0:
            # A mark for each row: XLA is slow to compile their reduction to one value.
            marks = _mark_rows(x)
            # Inside `shard_map` values computed from constants are traced too.
            return not isinstance(marks, jax.core.Tracer) and bool(np.asarray(marks).any())
        return not bool(_all_finite(x))


@jax.jit
def _mark_rows(x: Array) -> Array:
    return jnp.isnan(not_finite(x[None]))  # not NaN itself, at which `jax.debug_nans` would stop


@jax.jit
def _all_finite(x: Array) -> Array:
    return jnp.isfinite(x.astype(jnp.float32)).all()


def check_vectors(
    format: AbstractFormat | None, method: AbstractMethod, key: PRNGKeyArray | None, leaf: str = ""
) -> None:
    """Raises if a vector format is to round values one by one. Errors begin with the leaf."""
    if isinstance(format, AbstractVectorFormat) and not (key is None and isinstance(format, method.vector_formats)):
        format.refuse(leaf)


def check_given_scales(
    x: Any, format: AbstractFormat, axes: tuple[int, ...], scale: Any, zero_point: Any
) -> GivenScales | None:
    """Checks given scales and zero points, and broadcasts them to `(*batch, blocks)`."""
    if scale is None:
        if zero_point is not None:
            raise ValueError("`zero_point` must come with `scale`. Got it alone. Pass both, or neither.")
        return None
    if has_offsets(format):
        raise ValueError(
            f"`scale` must be for a format without offsets. Got {format!r}. Let a method choose both, or take a format "
            "with zero points."
        )
    if has_zero_points(format) != (zero_point is not None):
        has, got = ("a", "none") if has_zero_points(format) else ("no", "one")
        raise ValueError(
            "`zero_point` must be given with `scale` for a format that has one, and for no other. Got "
            f"{got}, and {format!r} has {has} zero point. An integer format has one with `symmetric=False`."
        )
    batch = tuple(n for i, n in enumerate(x.shape) if i - x.ndim not in axes)
    blocks = num_blocks(math.prod(x.shape[a] for a in axes), format.block_size)
    shape = (*batch_of_scales(format, batch), blocks)
    scale = _broadcast_given("scale", jnp.asarray(scale), shape)
    zero_point = None if zero_point is None else _broadcast_given("zero_point", jnp.asarray(zero_point), shape)
    if isinstance(format.block_size, tuple):
        rows = lambda x: repeat_rows(x, tile_height(format.block_size), batch[-1])
        scale, zero_point = jax.tree.map(rows, (scale, zero_point))
    check_parameters(scale, zero_point, format)
    given = GivenScales(scale.astype(jnp.float32), None if zero_point is None else zero_point.astype(jnp.uint8))
    if not any(isinstance(a, jax.core.Tracer) for a in (x, scale, zero_point)):
        _check_fit(given, memory_order(x, axes), format)
    return given


def check_parameters(scale: Array, zero_point: Array | None, format: AbstractFormat) -> None:
    """Raises for scales that are not finite floats, and zero points that are not codes.

    Does not check traced values.
    """
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"`scale` must be floating point. Got dtype {scale.dtype}.")
    if is_known_not_finite(scale):
        raise ValueError("`scale` must be finite in float32. Got values that are not. Calibrate on data without them.")
    if zero_point is not None and not isinstance(zero_point, jax.core.Tracer):
        codes, top = np.asarray(zero_point), 2**format.bits - 1
        if not ((codes >= 0) & (codes <= top) & (codes == np.round(codes))).all():
            raise ValueError(
                f"`zero_point` must hold whole numbers from 0 to {top}, the codes of {format!r}. Got others. Calibrate "
                "for this format."
            )


def _broadcast_given(name: str, value: Array, shape: tuple[int, ...]) -> Array:
    try:
        return jnp.broadcast_to(value, shape)
    except ValueError:
        raise ValueError(
            f"`{name}` must broadcast to {shape}, one value per block, with the quantized axis last. Got shape "
            f"{value.shape}. Calibrate along the same axis and with groups of `block_size`."
        ) from None


def _check_fit(given: GivenScales, rows: Float[Array, "*batch length"], format: AbstractFormat) -> None:
    """Raises for scales that the format cannot store, or that fit another format."""
    with compute_now():
        store_error = float(_measure_store_error(given.scale, format))
        clip_error = float(_measure_clip_error(given, rows, format))
    if store_error > _MAX_STORE_ERROR:
        kind = "a power of two" if format.scale_dtype == "e8m0" else f"in the range of {format.scale_dtype}"
        raise ValueError(
            f"`scale` must be {kind}, as {format!r} stores it. Got one that would be off by {store_error:.1%}. "
            "Calibrate for this format, or round the scale first."
        )
    if clip_error > _MAX_CLIP_ERROR:
        raise ValueError(
            f"`scale` must suit the values and {format!r}. Got one whose clipping alone makes a relative error of "
            f"{clip_error:.3f}. Calibrate for this format: a scale for one of more bits is smaller."
        )


@ft.partial(jax.jit, static_argnums=1)
def _measure_store_error(scale: Float32[Array, "*batch blocks"], format: AbstractFormat) -> Float32[Array, ""]:
    """Returns the largest relative error of storing the scales; ignores scales below 1e-30."""
    if format.scale_format is not None:
        return jnp.float32(0)
    stored = round_scale(scale, format.scale_dtype)
    return jnp.max(jnp.abs(stored - scale) / jnp.maximum(jnp.abs(scale), 1e-30), initial=0)


@ft.partial(jax.jit, static_argnums=2)
def _measure_clip_error(
    given: GivenScales, rows: Float[Array, "*batch length"], format: AbstractFormat
) -> Float32[Array, ""]:
    """Returns the relative error (L2) of clipping."""
    rows = rows.astype(jnp.float32)
    amax = jnp.max(jnp.abs(rows), initial=0)
    units = lambda x: divide(x, jnp.broadcast_to(amax, x.shape))  # so that squares do not overflow
    levels, used = find_levels(format)
    zero = jnp.float32(0) if given.zero_point is None else given.zero_point.astype(jnp.float32)
    ends = [(jnp.float32(end) - zero) * units(given.scale) for end in (levels[used].min(), levels[used].max())]
    low, high = (expand(f(*ends), format.block_size, rows.shape[-1]) for f in (jnp.minimum, jnp.maximum))
    power = lambda x: jnp.sum(jnp.square(x))
    return jnp.sqrt(divide(power(units(rows) - jnp.clip(units(rows), low, high)), power(units(rows))))
