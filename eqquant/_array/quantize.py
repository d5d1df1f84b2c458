"""`quantize`, `requantize`, `dequantize` and `unpack`, for a single array."""

import dataclasses
import functools as ft
from collections.abc import Mapping, Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Num, PRNGKeyArray, UInt8

from .._errors import FORMAT_KEYWORDS, suggest_keywords
from .._formats.base import AbstractFormat, AbstractVectorFormat, check_codes
from .._formats.names import as_format
from .._mesh import explicit_mesh, full_spec, in_auto_mode, on_device
from .._methods import AbsMax, AbstractMethod, EncodedRows
from .._methods.encode import quantize_packed
from .._methods.grid import ScaleBits
from .._methods.names import as_method, MethodLike
from .._numerics import packing
from .._numerics.axes import as_axes, as_axis, logical_order, memory_order
from .._numerics.batching import is_watched
from .._numerics.blocks import tile_height
from .array import QuantizedArray
from .checks import (
    as_single_array,
    check_dtype,
    check_finite,
    check_given_scales,
    check_quantizable,
    check_vectors,
    describe_argument,
    suggest_quantized,
)
from .codes import batch_of_scales, check_leaves, row_length
from .sharding import leaf_shardings
from .value import AbstractArrayValue


# The number of values to quantize at a time, in chunks of rows.
_CHUNK_SIZE = 2**19


@suggest_keywords(
    **FORMAT_KEYWORDS,
    dim="It is called `axis`.",
    activations="That is for models: `eqq.quantize_tree(model, 'int8', activations='int8')`.",
)
def quantize(
    x: Float[ArrayLike, "..."],
    format: AbstractFormat | str = "nf4",
    *,
    axis: int | Sequence[int] = -1,
    dtype: DTypeLike | None = None,
    key: PRNGKeyArray | None = None,
    method: MethodLike | None = None,
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
    - `zero_point`: the code of zero for each scale: integers from 0 to `2**bits - 1`, in the shape of `scale`. Required
        with `scale` if the format has zero points; otherwise not allowed.

    **Returns:**

    A [`eqquant.QuantizedArray`][] of the shape of `x`.

    **Raises:**

    `TypeError` if `x` is not floating point. `ValueError` if `x` is a scalar, if `axis` is out of range, if `scale` or
    `zero_point` does not fit, or, outside `jit`, if a value is not finite in float32. Inside `jit`, values cannot be
    checked: a NaN or an infinity turns its block into NaN. If the format quantizes its scales, it turns all blocks that
    share a scale of scales into NaN: for [`eqquant.NVFP4`][], the whole matrix.
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
    given = check_given_scales(checked, format, axes, scale, zero_point)
    if given is not None and method is not None:
        raise ValueError(
            f"`method` chooses scales, and `scale` gives them. Got both, {method!r} too. Pass one of them."
        )
    chosen = as_method(method)
    if isinstance(chosen.inputs, Mapping):
        raise ValueError(
            f"`inputs` of {type(method).__name__} must be the statistics of this array. Got statistics of many leaves. "
            "Pass `inputs[path]`, or call `quantize_tree`."
        )
    chosen.check("`x`", checked.shape, axes)
    chosen.check_weight("`x`", checked)
    check_vectors(format, chosen, key)
    return quantize_array(checked, format, axes, dtype, key, given or chosen)


def dequantize(q: QuantizedArray | ArrayLike) -> Array:
    """Returns the dense array of a [`eqquant.QuantizedArray`][].

    Returns any other array as a JAX array.

    !!! Example

        ```python
        w = eqq.dequantize(eqq.quantize(w, "int8"))  # a `jax.Array`
        ```

    **Arguments:**

    - `q`: a quantized array, or any array, of any shape.

    **Returns:**

    A `jax.Array` of `q.shape` and `q.dtype`.
    """
    return q.dequantize() if isinstance(q, AbstractArrayValue) else as_single_array(q, "`q`", "eqq.dequantize_tree")


def unpack(q: QuantizedArray) -> UInt8[Array, "..."]:
    """Returns the codes of a quantized array, one per element, in its logical order and shape.

    !!! Example

        ```python
        q = eqq.quantize(w, "int4")  # w: (out, in); q.codes: (out, in / 2)
        codes = eqq.unpack(q)  # (out, in), uint8 from 0 to 15
        ```

    **Arguments:**

    - `q`: a quantized array.

    **Returns:**

    `uint8` codes of shape `q.shape`. `q.format.decode(codes)` returns their values, before scale and zero point.
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"`q` must be a quantized array. Got {describe_argument(q)}. {suggest_quantized(q)}")
    check_leaves(q)
    if isinstance(q.format, AbstractVectorFormat):
        raise ValueError(
            f"`q` must have a code for each value. Got {q.format!r}, whose codes stand for several values. Its packed "
            "bytes are `q.codes`."
        )
    return logical_order(packing.unpack(q.codes, q.format.bits, row_length(q)), as_axes(q.axis), q.lengths)


def quantize_array(
    x: Array,
    format: AbstractFormat,
    axes: tuple[int, ...],
    dtype: DTypeLike | None,
    key: PRNGKeyArray | None,
    method: AbstractMethod = AbsMax(),
    sharding: NamedSharding | PartitionSpec | None = None,
) -> QuantizedArray:
    """Quantizes an array without checks of arguments.

    The result has the sharding `sharding`, or the sharding of `x`: each device quantizes its shard.
    """
    actual = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    sharding = actual if sharding is None else sharding
    on_mesh = full_spec(sharding, x.ndim) if isinstance(sharding, NamedSharding) else None
    # A loop over chunks would gather an array that is sharded.
    alone = isinstance(x, jax.Array) and actual is not None and len(actual.device_set) == 1 and on_mesh is None
    q = _quantize(x, format, method, key, axes, on_mesh, alone, is_watched())
    return q if dtype is None else q.astype(dtype)


@ft.partial(jax.jit, static_argnames=("axes", "sharding", "chunked", "watched"))
def _quantize(
    x: Array,
    format: AbstractFormat,
    method: AbstractMethod,
    key: PRNGKeyArray | None,
    axes: tuple[int, ...],
    sharding: NamedSharding | None,
    chunked: bool,
    watched: bool,
) -> QuantizedArray:
    del watched  # programs that report progress are compiled apart
    encode = ft.partial(_encode_array, axes=axes, chunked=chunked)
    mesh = explicit_mesh(x)
    if mesh is not None:
        typed = NamedSharding(mesh, jax.typeof(x).sharding.spec)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, method))
        leaves = leaf_shardings(jax.eval_shape(encode, shapes[0], format, shapes[1], key), typed)
        q = in_auto_mode(encode, leaves)(x, format, method, key)
        return q if sharding is None else dataclasses.replace(q, logical_sharding=sharding)
    q = encode(x, format, method, key)
    return q if sharding is None else q.with_sharding(sharding)


def _encode_array(
    x: Array,
    format: AbstractFormat,
    method: AbstractMethod,
    key: PRNGKeyArray | None,
    *,
    axes: tuple[int, ...],
    chunked: bool,
) -> QuantizedArray:
    check_codes(format)  # once per compilation, not once per call
    rows = memory_order(x, axes)
    batch_of_scales(format, rows.shape[:-1])  # raises if it has no rows for tiles
    chunk = max(_CHUNK_SIZE // max(rows.shape[-1], 1), 1) if chunked else None
    encoded = quantize_packed(method, rows, format, key=key, chunk=chunk)
    if isinstance(format.block_size, tuple):  # its rows have the same
        stored = jax.tree.map(lambda x: x[..., :: tile_height(format.block_size), :], encoded._replace(codes=None))
        encoded = stored._replace(codes=encoded.codes)
    lengths = tuple(x.shape[a] for a in axes)
    return _pack_array(encoded, format, as_axis(axes), lengths, x.dtype)


def _pack_array(
    encoded: EncodedRows, format: AbstractFormat, axis: int | tuple[int, ...], lengths: tuple[int, ...], dtype: np.dtype
) -> QuantizedArray:
    """Returns the `QuantizedArray` of packed codes, and packs the codes of nested scales."""

    def as_leaf(x: ScaleBits) -> Array | QuantizedArray:
        nested = format.scale_format
        if nested is None or not isinstance(x, EncodedRows):
            return x  # pyright: ignore[reportReturnType]
        packed = x._replace(codes=packing.pack(x.codes, nested.bits))
        return _pack_array(packed, nested, -1, x.codes.shape[-1:], jnp.dtype(jnp.float32))

    codes, scale = encoded.codes, as_leaf(encoded.scale)
    offset = None if encoded.offset is None else as_leaf(encoded.offset)
    zero_point = None if encoded.zero_point is None else packing.pack(encoded.zero_point, format.bits)
    return QuantizedArray(codes, scale, zero_point, format, axis, lengths, dtype, offset_bits=offset)


def requantize(
    q: QuantizedArray,
    x: Float[ArrayLike, "..."],
    *,
    key: PRNGKeyArray | None = None,
    method: MethodLike | None = None,
) -> QuantizedArray:
    """Quantizes new values like `q`: with its format, quantized axis, dtype and sharding.

    !!! Example

        ```python
        cache = eqq.requantize(cache, cache.at[3].set(row))  # `.at[].set` returns a dense array
        ```

    **Arguments:**

    - `q`: the quantized array to imitate.
    - `x`: floats, of the shape of `q`.
    - `key`, `method`: as for [`eqquant.quantize`][].

    **Returns:**

    A [`eqquant.QuantizedArray`][] with the tree structure of `q`, so it can be the next carry of a `scan`.

    **Raises:**

    `TypeError` if `q` is not quantized. `ValueError` if the shapes differ, or, outside `jit`, if values are not finite.
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"`q` must be a quantized array. Got {describe_argument(q)}. {suggest_quantized(q)}")
    if isinstance(x, (str, AbstractFormat)):
        raise TypeError(
            f"`x` must be new values for `q`. Got the format {x!r}. To change the format, write "
            f"`eqq.quantize(q.dequantize(), {x!r})`."
        )
    values, _ = check_quantizable(x, as_axes(q.axis))
    if values.shape != q.shape:
        raise ValueError(f"`x` must have the shape of `q`, {q.shape}. Got {values.shape}.")
    check_finite(values)
    return requantize_like(q, values, key, as_method(method))


def requantize_like(
    q: QuantizedArray, x: Float[Array, "..."], key: PRNGKeyArray | None = None, method: AbstractMethod = AbsMax()
) -> QuantizedArray:
    """Quantizes `x` like `q` without checks of arguments."""
    new = quantize_array(x, q.format, as_axes(q.axis), q.logical_dtype, key, method, sharding=q.sharding)
    return dataclasses.replace(new, logical_sharding=q.logical_sharding)
