"""Describes a quantized matmul for the choice of an implementation: shapes, dtype, layout."""

import functools as ft
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._array.array import QuantizedArray
from .._formats import FP8
from .._formats.base import AbstractFormat, has_offsets, has_zero_points
from .._numerics.blocks import num_blocks
from .kernels.packed import Layout, ScaleKind
from .kernels.target import Target as Target
from .selected import SelectedArray


class MatmulProblem(NamedTuple):
    """A quantized matmul: everything that the choice of an implementation depends on.

    Multiplies `m` rows of activations of type `dtype` by a weight of `n` rows of `k` values in `format`. `transpose`
    contracts `n` instead of `k`. `activations` is the format of the rows of activations, `None` for floats.
    """

    m: int
    n: int
    k: int
    dtype: Any
    format: AbstractFormat
    transpose: bool
    precision: Any = None
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
    x: Any, w: Any, transpose: bool, precision: Any, by_columns: tuple[bool, bool] = (False, False)
) -> MatmulProblem:
    """Returns the problem for the operands of the primitive: arrays, or only their shapes and dtypes."""
    (n, k), dtype, plain = w.shape[-2:], jnp.dtype(x.dtype), has_plain_scales(w)
    found = getattr(x, "format", None)
    activations = found if isinstance(found, AbstractFormat) else None  # that of a `jax.Array` is a layout
    return MatmulProblem(x.shape[-2], n, k, dtype, w.format, transpose, precision, plain, by_columns, activations)


def has_plain_scales(w: Any) -> bool:
    """Returns whether a weight, or a shard of one, holds decoded scales that its format would quantize."""
    w = w.stack if isinstance(w, SelectedArray) else w
    return w.format.scale_format is not None and not isinstance(w.scale_bits, QuantizedArray)


@ft.lru_cache(256)
def layout_of(format: AbstractFormat, length: int, plain_scales: bool = False) -> Layout:
    with jax.ensure_compile_time_eval():
        table = np.asarray(format.decode(jnp.arange(2**format.bits, dtype=jnp.uint8)), np.float32)
    size = length if format.block_size in (None, "tensor") else format.block_size
    kind, nested = None if plain_scales else nested_scale_kind(format, length), None
    if kind is None and not plain_scales and has_nested_scales(format):
        nested = layout_of(format.scale_format, num_blocks(length, format.block_size))  # pyright: ignore[reportArgumentType]
    return Layout(
        length,
        format.bits,
        max(min(size, length), 1),
        tuple(table.tolist()),
        kind or ("float32" if format.scale_format is not None else format.scale_dtype),
        has_zero_points(format),
        has_offsets(format),
        nested,
    )


def has_nested_scales(format: AbstractFormat) -> bool:
    """Returns whether scales are codes with plain scales of their own, which `cpu` reads as they are stored."""
    scales = format.scale_format
    return scales is not None and scales.scale_format is None and not (has_zero_points(scales) or has_offsets(scales))


def nested_scale_kind(format: AbstractFormat, length: int) -> ScaleKind | None:
    """Returns the kind of quantized scales that kernels can read: small floats with one scale per row; else `None`."""
    scales = format.scale_format
    if type(scales) is not FP8:  # a subclass may decode differently
        return None
    blocks = num_blocks(length, format.block_size)
    return scales.kind if num_blocks(blocks, scales.block_size) == 1 else None
