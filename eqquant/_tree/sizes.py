"""Sizes of leaves in float and quantized."""

import functools as ft
import math

import jax
import numpy as np
from jaxtyping import DTypeLike

from .._array.array import QuantizedArray
from .._array.quantize import quantize_array
from .._formats.base import AbstractFormat
from .leaves import DenseArray


# The fewest values per scale that are worth the bytes and the rounding of the scale.
_MIN_VALUES_PER_SCALE = 8


def as_struct(x: DenseArray) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array, and the dtype that it has in JAX."""
    # As `as_jax_array` converts it.
    dtype = np.dtype(np.float64) if x.dtype == np.longdouble else x.dtype
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(dtype))


def dense_nbytes(x: DenseArray) -> int:
    """Returns the bytes of an array in float, in the dtype that it has in JAX."""
    return math.prod(x.shape) * as_struct(x).dtype.itemsize


def quantize_struct(
    x: DenseArray, format: AbstractFormat, axes: tuple[int, ...], dtype: DTypeLike | None = None
) -> QuantizedArray:
    """Returns the quantized array as shapes, without values."""
    return jax.eval_shape(lambda x: quantize_array(x, format, axes, dtype, None), as_struct(x))


@ft.lru_cache(maxsize=1024)
def _quantized_nbytes(x: jax.ShapeDtypeStruct, format: AbstractFormat, axes: tuple[int, ...]) -> int:
    return quantize_struct(x, format, axes).nbytes


def few_values_reason(x: DenseArray, axes: tuple[int, ...]) -> str | None:
    """Returns why the values along the quantized axes are too few to share a scale, or `None`."""
    length = math.prod(x.shape[a] for a in axes)
    return f"too few values share a scale: {length}" if length < _MIN_VALUES_PER_SCALE else None


def no_smaller_reason(x: DenseArray, format: AbstractFormat, axes: tuple[int, ...]) -> str | None:
    """Returns why a format is not worth it for an array (no smaller, too coarse), or `None`."""
    if format.block_size != "tensor" and (reason := few_values_reason(x, axes)) is not None:
        return reason
    nbytes, dense = _quantized_nbytes(as_struct(x), format, axes), dense_nbytes(x)
    return f"{format!r} would take {nbytes:,} bytes for {dense:,}" if nbytes >= dense else None
