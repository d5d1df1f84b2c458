"""Describes a quantized matmul for the choice of an implementation: shapes, dtype, layout."""

from typing import NamedTuple

import jax.core
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike

from .._array.array import QuantizedArray
from .._array.dequantize import has_plain_scales
from .._formats.base import AbstractFormat
from .._formats.layout import layout_of
from .._native.layout import Layout
from .kernels.target import TargetDevice as TargetDevice
from .rows import Activations
from .selected import SelectedArray


class MatmulProblem(NamedTuple):
    """A quantized matmul: everything that the choice of an implementation depends on.

    Multiplies `m` rows of activations of type `dtype` by a weight of `n` rows of `k` values in `format`. `transpose`
    contracts `n` instead of `k`. `activations` is the format of the rows of activations, `None` for floats.
    """

    m: int
    n: int
    k: int
    dtype: np.dtype
    format: AbstractFormat
    transpose: bool
    precision: PrecisionLike = None
    plain_scales: bool = False  # the format quantizes its scales, but a shard holds them decoded
    by_columns: tuple[bool, bool] = (False, False)  # as in `bind_matmul`
    activations: AbstractFormat | None = None

    @property
    def layout(self) -> Layout:
        """The layout of the packed weight."""
        return layout_of(self.format, self.k, self.plain_scales)

    @property
    def layout_of_x(self) -> Layout:
        """The layout of packed activations."""
        return layout_of(self.activations, self.k)  # pyright: ignore[reportArgumentType]


def problem_of(
    x: Activations | jax.core.ShapedArray,
    w: QuantizedArray | SelectedArray,
    transpose: bool,
    precision: PrecisionLike,
    by_columns: tuple[bool, bool] = (False, False),
) -> MatmulProblem:
    """Returns the problem for the operands of the primitive: arrays, or only their shapes and dtypes."""
    (n, k), dtype, plain = (
        w.shape[-2:],
        jnp.dtype(x.dtype),
        has_plain_scales(w.stack if isinstance(w, SelectedArray) else w),
    )
    found = getattr(x, "format", None)
    activations = found if isinstance(found, AbstractFormat) else None  # that of a `jax.Array` is a layout
    return MatmulProblem(x.shape[-2], n, k, dtype, w.format, transpose, precision, plain, by_columns, activations)
