"""How much smaller a format makes a leaf."""

import functools as ft
import math

import jax
import numpy as np
from jaxtyping import DTypeLike

from .._array.array import QuantizedArray
from .._array.quantize import quantize_array
from .._formats.base import AbstractFormat
from .leaves import DenseArray


# A scale is worth its bytes, and its rounding, if it serves at least as many values.
_FEWEST = 8


def shape_of(x: DenseArray) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array, and the dtype that it has in JAX."""
    # As `as_jax_array` converts it.
    dtype = np.dtype(np.float64) if x.dtype == np.longdouble else x.dtype
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(dtype))


def dense_nbytes(x: DenseArray) -> int:
    """Returns the bytes of an array in float, in the dtype that it has in JAX."""
    return math.prod(x.shape) * shape_of(x).dtype.itemsize


def quantized_struct(
    x: DenseArray, format: AbstractFormat, axes: tuple[int, ...], dtype: DTypeLike | None = None
) -> QuantizedArray:
    """Returns the quantized array without values."""
    return jax.eval_shape(lambda x: quantize_array(x, format, axes, dtype, None), shape_of(x))


@ft.lru_cache(maxsize=1024)
def _quantized_nbytes(x: jax.ShapeDtypeStruct, format: AbstractFormat, axes: tuple[int, ...]) -> int:
    return quantized_struct(x, format, axes).nbytes


def few_values_reason(x: DenseArray, axes: tuple[int, ...]) -> str | None:
    """Returns why the values along the quantized axes are too few to share a scale, or `None`."""
    length = math.prod(x.shape[a] for a in axes)
    return f"too few values share a scale: {length}" if length < _FEWEST else None


def no_smaller_reason(x: DenseArray, format: AbstractFormat, axes: tuple[int, ...]) -> str | None:
    """Returns why an array in this format is no smaller, or too coarse for its size, or `None` if it is worth it."""
    if format.block_size != "tensor" and (reason := few_values_reason(x, axes)) is not None:
        return reason
    nbytes, dense = _quantized_nbytes(shape_of(x), format, axes), dense_nbytes(x)
    return f"{format!r} would take {nbytes:,} bytes for {dense:,}" if nbytes >= dense else None
