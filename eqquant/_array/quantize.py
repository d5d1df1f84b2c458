"""`quantize`, `dequantize` and `unpack`: for a single array."""

import dataclasses
import functools as ft
import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Num, PRNGKeyArray, UInt8

from .._errors import FORMAT_KEYWORDS, Message, teach_keywords
from .._formats.base import AbstractFormat, as_format, check_codes, has_offsets, has_zero_points
from .._mesh import explicit_mesh, full_spec, in_auto_mode, on_device
from .._methods import AbsMax, AbstractMethod, Encoded
from .._methods.encode import quantize_packed
from .._methods.given import GivenScales
from .._numerics import packing
from .._numerics.blocks import not_finite, num_blocks
from .array import QuantizedArray
from .axes import as_axis, logical_order, memory_order
from .given import check_suits
from .selected import SelectedArray
from .sharding import leaf_shardings
from .value import AbstractArrayValue


# The number of values to process at a time, when quantizing in chunks of rows.
_CHUNK = 2**19


@teach_keywords(
    **FORMAT_KEYWORDS,
    dim="It is called `axis`.",
)
def quantize(
    x: Float[ArrayLike, "..."],
    format: AbstractFormat | str = "nf4",
    *,
    axis: int | Sequence[int] = -1,
    dtype: DTypeLike | None = None,
    key: PRNGKeyArray | None = None,
    method: AbstractMethod | None = None,
    scale: Float[ArrayLike, "..."] | None = None,
    zero_point: Num[ArrayLike, "..."] | None = None,
) -> QuantizedArray:
    """Quantizes one array. For a model, call [`eqquant.quantize_tree`][].

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.Int4(block_size=32))
        q = eqq.quantize(w, "int8", axis=0)
        q = eqq.quantize(w, "int4", method=eqq.MSE())
        q = eqq.quantize(w, "int8", scale=3 / 127)
        ```

    **Arguments:**

    - `x`: a floating point array of at least one dimension, in float32, float16, bfloat16 or float64. The arithmetic
        is float32. An array in host memory (`pinned_host`) is moved to its device first.
    - `format`: a format, or its lower-case name.
    - `axis`: the axis along which values share scales: the input axis of a weight. Several axes, as for a convolution,
        are merged into one in the given order.
    - `dtype`: the dtype of the dequantized array; by default, the dtype of `x`.
    - `key`: for stochastic rounding. By default, values round to the nearest code.
    - `method`: the method that chooses scales and codes: [`eqquant.AbsMax`][] (the default), [`eqquant.MSE`][],
        [`eqquant.HQQ`][], [`eqquant.GPTQ`][] or your own.
    - `scale`: scales to use instead of the method's: floats that broadcast to the shape of the result's `scale`,
        `(*batch, blocks)`, with the quantized axis last. Values beyond their range are clipped.
    - `zero_point`: the code of zero for each scale, an integer from 0 to `2**bits - 1`. Required with `scale` if the
        format has zero points; otherwise not allowed.

    **Returns:**

    A [`eqquant.QuantizedArray`][] of the shape of `x`.

    **Raises:**

    `TypeError` if `x` is not floating point. `ValueError` if `x` is a scalar, if `axis` is out of range, if `scale` or
    `zero_point` does not fit, or, outside `jit`, if a value is not finite in float32. Inside `jit`, values cannot be
    checked: a NaN or an infinity turns its block into NaN. If the format quantizes its scales, it turns all blocks that
    share a scale of scales into NaN: for [`eqquant.NVFP4`][], the whole array.
    """
    format = as_format(format)
    check_dtype(dtype)
    checked, axes = check_quantizable(x, axis)
    if isinstance(checked, jax.ShapeDtypeStruct):
        raise TypeError(
            f"`x` must have values. Got a ShapeDtypeStruct of shape {checked.shape}. For the structure of the result "
            "without values, call `jax.eval_shape(eqq.quantize, x)`."
        )
    checked = on_device(checked)
    check_finite(checked)
    given = _check_given(checked, format, axes, scale, zero_point)
    if given is not None and method is not None:
        raise ValueError(
            f"`method` chooses scales, and `scale` gives them. Got both, {method!r} too. Pass one of them."
        )
    if method is not None and isinstance(method.inputs, Mapping):
        raise ValueError(
            f"`inputs` of {type(method).__name__} must be the statistics of this array. Got those of many leaves. Pass "
            "`inputs[path]`, or call `quantize_tree`."
        )
    found_by = as_method(method)
    found_by.check("`x`", checked.shape, axes)
    return quantize_array(checked, format, axes, dtype, key, given or found_by)


def dequantize(q: QuantizedArray | ArrayLike) -> Array:
    """Returns the dense array of a [`eqquant.QuantizedArray`][]; returns any other array as a JAX array.

    **Arguments:**

    - `q`: a quantized array, or any array.

    **Returns:**

    A `jax.Array` of `q.shape` and `q.dtype`.
    """
    return q.dequantize() if isinstance(q, AbstractArrayValue) else _as_one_array(q, "`q`", "eqq.dequantize_tree")


def unpack(q: QuantizedArray) -> UInt8[Array, "..."]:
    """Returns the codes of a quantized array, one per element, in its logical order and shape.

    **Arguments:**

    - `q`: a quantized array.

    **Returns:**

    `uint8` codes of shape `q.shape`. `q.format.decode(codes)` returns their values, before scale and zero point.
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"`q` must be a quantized array. Got {described(q)}. {how_to_get_one(q)}")
    q._check_leaves()
    return logical_order(packing.unpack(q.codes, q.format.bits, q._length), q._axes, q.lengths)


def as_method(method: Any) -> AbstractMethod:
    """Returns a method unchanged, or the default for `None`.

    **Raises:**

    `TypeError` for anything else.
    """
    if method is None:
        return AbsMax()
    if isinstance(method, type) and issubclass(method, AbstractMethod):
        raise TypeError(f"`method` must be an instance. Got the class {method.__name__}. Write `{method.__name__}()`.")
    if not isinstance(method, AbstractMethod):
        raise TypeError(f"`method` must be a method, such as `eqq.MSE()`. Got a {type(method).__name__}.")
    name, is_mapping = type(method).__name__, lambda x: isinstance(x, Mapping)
    for field in dataclasses.fields(method):
        if field.metadata.get("static", False):
            continue
        # A mapping holds statistics by path, of which `for_leaf` picks those of a leaf.
        for leaf in jtu.tree_leaves(getattr(method, field.name), is_leaf=is_mapping):
            if not is_mapping(leaf) and not eqx.is_array_like(leaf):
                raise TypeError(
                    f"A field of a method must hold arrays, or be static. Got `{field.name}` of {name}, a "
                    f"{type(leaf).__name__}. Write `{field.name}: ... = eqx.field(static=True)`."
                )
    return method


def check_quantizable(x: Any, axis: int | Sequence[int], name: str = "`x`") -> tuple[Any, tuple[int, ...]]:
    """Returns `x` as a JAX array (or struct) and `axis` as negative numbers. Errors call the array `name`."""
    if isinstance(x, QuantizedArray):
        raise TypeError(f"{name} is already quantized, to {x.format}. Call `dequantize` first to quantize it again.")
    x = _as_one_array(x, name, "eqq.quantize_tree")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating point array. Got dtype {x.dtype}.")
    if x.ndim == 0:
        raise ValueError(f"{name} must have at least one dimension. Got a scalar. Leave scalars in float.")
    return x, _as_axes(axis, x, name)


def _as_axes(axis: Any, x: Any, name: str) -> tuple[int, ...]:
    given = np.asarray(axis)
    axes = tuple(int(a) for a in given.ravel()) if given.dtype.kind == "i" else ()
    if not axes or any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) != len(axes):
        per_tensor = '. One scale for all is `block_size="tensor"` of the format' if axis is None else ""
        raise (TypeError if given.dtype.kind in "OUS" else ValueError)(
            f"`axis` must name different axes of {name}, from {-x.ndim} to {x.ndim - 1} for shape {tuple(x.shape)}. "
            f"Got `axis={axis!r}`{per_tensor}."
        )
    return tuple(a % x.ndim - x.ndim for a in axes)


def _as_one_array(x: Any, name: str, of_trees: str) -> Any:
    """Returns `x` as a JAX array (or struct). For anything else, raises and suggests `of_trees`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be one array. Got {described(x)}. For a model, call `{of_trees}`.") from None


def how_to_get_one(x: Any) -> str:
    """Says where a quantized array is, for errors about `x`, which is not one."""
    if isinstance(x, AbstractArrayValue):
        if isinstance(x, SelectedArray):
            return "Its `.taken()` is one."
        if near := [f.name for f in dataclasses.fields(x) if isinstance(getattr(x, f.name), QuantizedArray)]:
            return f"Its `.{near[0]}` is one."
    return "`eqq.quantize` makes one."


def described(x: Any) -> str:
    """Describes `x` in a few words, since a model prints as a page."""
    if isinstance(x, AbstractArrayValue):
        return f"a {type(x).__name__}"
    arrays = [leaf for leaf in jtu.tree_leaves(x) if isinstance(leaf, (jax.Array, np.ndarray))]
    if isinstance(x, (jax.Array, np.ndarray)):
        return f"a dense array, {x.dtype}{list(x.shape)}"
    return f"a pytree of {len(arrays)} arrays, of type {type(x).__name__}" if arrays else f"a {type(x).__name__}"


def check_dtype(dtype: DTypeLike | None) -> None:
    """Raises if a logical dtype is not floating point."""
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"`dtype` must be floating point. Got {jnp.dtype(dtype)}. It is what the codes dequantize to.")


def check_finite(x: Array, name: str = "`x`") -> None:
    """Raises if an array holds a NaN or an infinity, unless it is traced."""
    if is_known_not_finite(x):
        rule = f"{name} must be finite in float32: one NaN or infinity would spoil its whole block."
        raise ValueError(Message(f"{rule} Got values that are not.", "not finite"))


def is_known_not_finite(x: Array) -> bool:
    """Returns whether an array holds a NaN or an infinity in float32; `False` for a traced array."""
    if isinstance(x, jax.core.Tracer):
        return False
    with jax.ensure_compile_time_eval():  # `x` may be a constant inside a traced function
        here = isinstance(x, jax.Array) and len(x.sharding.device_set) == 1 and explicit_mesh(x) is None
        if here and x.ndim > 0 and x.size > 0 and x.dtype == jnp.float32:
            # A mark for each row: XLA takes longer to compile their reduction to one value than all the rest.
            marks = _marks(x)
            # Inside `shard_map` what is computed from a constant is traced all the same.
            return not isinstance(marks, jax.core.Tracer) and bool(np.asarray(marks).any())
        return not bool(_all_finite(x))


@jax.jit
def _marks(x: Array) -> Array:
    return jnp.isnan(not_finite(x[None]))  # not NaN itself, at which `jax.debug_nans` would stop


@jax.jit
def _all_finite(x: Array) -> Array:
    return jnp.isfinite(x.astype(jnp.float32)).all()


def quantize_array(
    x: Array,
    format: AbstractFormat,
    axes: tuple[int, ...],
    dtype: DTypeLike | None,
    key: PRNGKeyArray | None,
    method: AbstractMethod = AbsMax(),
    sharding: NamedSharding | PartitionSpec | None = None,
) -> QuantizedArray:
    """As `quantize`, without checks.

    The result has the sharding `sharding`, or the sharding of `x`: each device quantizes its part.
    """
    actual = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    sharding = actual if sharding is None else sharding
    on_mesh = full_spec(sharding, x.ndim) if isinstance(sharding, NamedSharding) else None
    # A loop over chunks would gather an array that several devices hold.
    alone = isinstance(x, jax.Array) and actual is not None and len(actual.device_set) == 1 and on_mesh is None
    q = _quantize(x, format, method, key, axes, on_mesh, alone)
    return q if dtype is None else q.astype(dtype)  # pyright: ignore[reportReturnType]


@ft.partial(jax.jit, static_argnames=("axes", "sharding", "chunked"))
def _quantize(
    x: Array,
    format: AbstractFormat,
    method: AbstractMethod,
    key: PRNGKeyArray | None,
    axes: tuple[int, ...],
    sharding: NamedSharding | None,
    chunked: bool,
) -> QuantizedArray:
    encode = ft.partial(_quantize_here, axes=axes, chunked=chunked)
    mesh = explicit_mesh(x)
    if mesh is not None:
        typed = NamedSharding(mesh, jax.typeof(x).sharding.spec)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, method))
        leaves = leaf_shardings(jax.eval_shape(encode, shapes[0], format, shapes[1], key), typed)
        q = in_auto_mode(encode, leaves)(x, format, method, key)
        return q if sharding is None else dataclasses.replace(q, logical_sharding=sharding)
    q = encode(x, format, method, key)
    return q if sharding is None else q.with_sharding(sharding)


def _quantize_here(
    x: Array,
    format: AbstractFormat,
    method: AbstractMethod,
    key: PRNGKeyArray | None,
    *,
    axes: tuple[int, ...],
    chunked: bool,
) -> QuantizedArray:
    check_codes(format)  # here, once for each compiled program
    rows = memory_order(x, axes)
    chunk = max(_CHUNK // max(rows.shape[-1], 1), 1) if chunked else None
    encoded = quantize_packed(method, rows, format, chunk) if key is None else None
    if encoded is None:
        encoded = method.quantize_rows(rows, format, key=key, chunk=chunk)
        encoded = encoded._replace(codes=packing.pack(encoded.codes, format.bits))
    lengths = tuple(x.shape[a] for a in axes)
    return _as_array(encoded, format, as_axis(axes), lengths, x.dtype)


def _as_array(
    encoded: Encoded, format: AbstractFormat, axis: int | tuple[int, ...], lengths: tuple[int, ...], dtype: Any
) -> QuantizedArray:
    """Makes the array of packed codes; those of nested scales are not packed."""

    def stored(x: Any) -> Any:
        nested = format.scale_format
        if nested is None or x is None:
            return x
        packed = x._replace(codes=packing.pack(x.codes, nested.bits))
        return _as_array(packed, nested, -1, x.codes.shape[-1:], jnp.dtype(jnp.float32))

    codes, scale, offset = encoded.codes, stored(encoded.scale), stored(encoded.offset)
    zero_point = None if encoded.zero_point is None else packing.pack(encoded.zero_point, format.bits)
    return QuantizedArray(codes, scale, zero_point, format, axis, lengths, dtype, offset_bits=offset)


def _check_given(
    x: Any, format: AbstractFormat, axes: tuple[int, ...], scale: Any, zero_point: Any
) -> GivenScales | None:
    """Checks the scales and zero points of a caller, and broadcasts them to `(*batch, blocks)`."""
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
    batch = [n for i, n in enumerate(x.shape) if i - x.ndim not in axes]
    shape = (*batch, num_blocks(math.prod(x.shape[a] for a in axes), format.block_size))
    given = {"scale": jnp.asarray(scale), "zero_point": zero_point if zero_point is None else jnp.asarray(zero_point)}
    for name, value in given.items():
        if value is not None:
            given[name] = _broadcast_given(name, value, shape)
    scale, zero_point = given["scale"], given["zero_point"]
    check_parameters(scale, zero_point, format)
    given = GivenScales(scale.astype(jnp.float32), None if zero_point is None else zero_point.astype(jnp.uint8))
    if not any(isinstance(a, jax.core.Tracer) for a in (x, scale, zero_point)):
        check_suits(given, memory_order(x, axes), format)
    return given


def check_parameters(scale: Array, zero_point: Array | None, format: AbstractFormat) -> None:
    """Raises for scales that are not finite floats, and for zero points that are not codes. Skips traced values."""
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
