"""Activations that a product quantizes per token, with dynamic or static scales."""

import abc
import dataclasses
import math
from typing import TypeAlias

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.interpreters import ad
from jaxtyping import Array, Float, Float32, UInt8

from .._array.array import QuantizedArray
from .._array.dense import allow_dense
from .._array.quantize import quantize_array
from .._formats.base import AbstractFormat, spans_rows
from .._methods import AbsMax, AbstractMethod
from .._methods.given import GivenScales


class AbstractRows(eqx.Module):
    """Float activations `(*batch, rows, length)` that a product quantizes per token (row).

    An operand of the product's primitive. The implementation quantizes the rows, where that is cheapest. Rows do not
    depend on each other, so a `vmap` may add more of them. `gradient_of` is the same as in `QuantizedArray`.
    """

    rows: eqx.AbstractVar[Float[Array, "*batch rows length"]]
    format: eqx.AbstractVar[AbstractFormat]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.rows.dtype)

    @abc.abstractmethod
    def quantize(self) -> QuantizedArray:
        """Quantizes each row."""

    def dequantize(self) -> Float[Array, "*batch rows length"]:
        """Returns the values of the quantized rows."""
        with allow_dense():
            return self.quantize().dequantize()

    def _quantize_by(self, method: AbstractMethod, gradient_of: Array | None) -> QuantizedArray:
        rows = jax.lax.stop_gradient(self.rows)
        quantize = lambda rows, method: quantize_array(rows, self.format, (-1,), None, None, method)
        if spans_rows(self.format):
            flat = lambda leaf: leaf.reshape(math.prod(rows.shape[:-1]), leaf.shape[-1])
            one_by_one = jax.vmap(quantize)(*jtu.tree_map(flat, (rows, method)))
            q = jtu.tree_map(lambda leaf: leaf.reshape(*rows.shape[:-1], leaf.shape[-1]), one_by_one)
        else:
            q = quantize(rows, method)
        return dataclasses.replace(q, logical_sharding=None, gradient_of=gradient_of)


class DynamicRows(AbstractRows):
    """Rows to quantize dynamically (per token). Gradients pass straight through."""

    rows: Float[Array, "*batch rows length"]
    format: AbstractFormat

    @property
    def gradient_of(self) -> "Array | ad.Zero":  # in a tree of tangents, `rows` may be a symbolic zero
        return self.rows

    def quantize(self) -> QuantizedArray:
        return self._quantize_by(AbsMax(), self.rows)


class StaticRows(AbstractRows):
    """Rows to quantize statically, with given scales. A row that is not finite becomes NaN."""

    rows: Float[Array, "*batch rows length"]
    format: AbstractFormat
    scale: Float32[Array, "*batch rows 1"]
    zero_point: UInt8[Array, "*batch rows 1"] | None
    gradient_of: Float[Array, "*batch rows length"] | None

    def quantize(self) -> QuantizedArray:
        return self._quantize_by(GivenScales(self.scale, self.zero_point), self.gradient_of)


Activations: TypeAlias = Array | QuantizedArray | AbstractRows  # floats, codes, or rows that a product quantizes
