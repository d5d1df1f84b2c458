"""`MatmulProblem`: the shapes, dtypes and formats that decide which implementation runs."""

from typing import NamedTuple

import jax.core
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike

from .._array.array import QuantizedArray
from .._array.dequantize import has_decoded_scales
from .._formats.base import AbstractFormat
from .._formats.layout import make_layout
from .._native.weight import Layout
from .kernels.target import TargetDevice as TargetDevice
from .rows import Activations
from .selected import SelectedArray


class MatmulProblem(NamedTuple):
    """A quantized matmul as the choice of an implementation sees it.

    The product has `m` rows of activations of type `dtype`, and a weight of `n` rows of `k` values in `format`.
    `transpose` contracts `n` instead of `k`. `activations` is the format of the activations, `None` for floats.
    """

    m: int
    n: int
    k: int
    dtype: np.dtype
    format: AbstractFormat
    transpose: bool
    precision: PrecisionLike = None
    decoded_scales: bool = False  # whether scales are floats although the format quantizes them, as in a shard
    column_major: tuple[bool, bool] = (False, False)  # whether memory holds `x`, and the result, by columns
    activations: AbstractFormat | None = None

    @property
    def layout(self) -> Layout:
        """The layout of the packed weight."""
        return make_layout(self.format, self.k, self.decoded_scales)

    @property
    def x_layout(self) -> Layout:
        """The layout of packed activations."""
        return make_layout(self.activations, self.k)


def describe_matmul(
    x: Activations | jax.core.ShapedArray,
    w: QuantizedArray | SelectedArray,
    transpose: bool,
    precision: PrecisionLike,
    column_major: tuple[bool, bool] = (False, False),
) -> MatmulProblem:
    """Describes the product of two operands: arrays, or only shapes and dtypes."""
    n, k = w.shape[-2:]
    decoded_scales = has_decoded_scales(w.stack if isinstance(w, SelectedArray) else w)
    x_format = getattr(x, "format", None)
    activations = x_format if isinstance(x_format, AbstractFormat) else None  # `jax.Array.format` is a layout
    return MatmulProblem(
        x.shape[-2], n, k, jnp.dtype(x.dtype), w.format, transpose, precision, decoded_scales, column_major, activations
    )
