"""An array whose columns are stored in another order, so that those that share a scale are neighbours."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, Float, UInt32

from .array import QuantizedArray
from .value import AbstractArrayValue, as_permutation, multiply


class PermutedArray(AbstractArrayValue):
    """A quantized array whose quantized axis is stored in another order.

    GPTQ with `desc_act` quantizes inputs in the order of their importance, so that the inputs of a group, which share a
    scale, are not neighbours. Here they are, and products gather their operand first. [`eqquant.io.open`][] makes it.

    !!! Example

        ```python
        w = eqq.io.open("gptq-act-order")["model.layers.0.mlp.up_proj.weight"]      # a PermutedArray
        y = w @ x                                                                   # w.array @ x[w.order]
        ```

    **Arguments:**

    - `array`: the array in stored order, a [`eqquant.QuantizedArray`][], or one with low-rank factors.
    - `order`: the logical index of each stored one.
    - `axis`: the axis that is permuted, -1 or -2.
    """

    array: Any
    order: UInt32[Array, "*batch length"]
    axis: int = eqx.field(static=True, default=-1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def format(self) -> Any:
        """The format of the stored array, if it is quantized."""
        return getattr(self.array, "format", None)

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the dense array, with all columns where they belong."""
        dense = self.array.dequantize() if isinstance(self.array, AbstractArrayValue) else self.array
        return self._ordered(dense, self.axis)

    def _ordered(self, dense: Array, axis: int) -> Array:
        """Undoes the permutation along an axis of a dense array."""
        back = jnp.argsort(self.order, axis=-1)
        if back.ndim == 1:
            return jnp.take(dense, back, axis)
        # A stack: one order for each array of it.
        ones = [1] * (dense.ndim - back.ndim - 1)
        back = back.reshape(*back.shape[:-1], *ones, *((-1, 1) if axis == -2 else (1, -1)))
        return jnp.take_along_axis(dense, back, axis)

    def transpose(self, *axes: Any) -> "PermutedArray | Array":
        """Permutes the logical axes. Dense unless that only swaps the last two, or nothing."""
        order = as_permutation(axes, self.ndim)
        same, last = list(range(self.ndim)), self.ndim - 1
        if order == same:
            return self
        if order == [*same[:-2], last, last - 1]:
            return dataclasses.replace(self, array=self.array.swapaxes(-1, -2), axis=-3 - self.axis)
        return self.dequantize().transpose(order)

    def astype(self, dtype: Any) -> "PermutedArray | Array":
        """Changes the logical dtype. Returns a dense array if `dtype` is not floating point."""
        array = self.array.astype(dtype)
        return (
            dataclasses.replace(self, array=array)
            if isinstance(array, AbstractArrayValue)
            else self._ordered(array, self.axis)
        )

    def reshape(self, *shape: Any, **kwargs: Any) -> Array:
        """Reshapes the dense array."""
        return self.dequantize().reshape(*shape, **kwargs)

    def __getitem__(self, index: Any) -> Array:
        """Returns dense values. Dequantizes only the selected rows if the index is one of rows."""
        if self.axis == -1 and self.ndim == 2 and (isinstance(index, slice) or not isinstance(index, tuple)):
            if index is not None and index is not Ellipsis and getattr(index, "dtype", None) != bool:
                return self._ordered(self.array[index], -1)
        return self.dequantize()[index]

    def _matmul(self, other: Any, *, left: bool, **options: Any) -> Array:
        x = jnp.asarray(other)
        if self.order.ndim > 1 or x.ndim == 0 or not jnp.isrealobj(x):  # a stack, without `vmap` or `scan`
            return jnp.matmul(self.dequantize(), x) if left else jnp.matmul(x, self.dequantize())
        axis = -1 if x.ndim == 1 or not left else -2  # of `x` and of the result
        if self.axis == (-1 if left else -2):
            x = jnp.take(x, self.order, axis)
            return multiply(self.array, x, left=left, **options)
        return self._ordered(multiply(self.array, x, left=left, **options), axis)

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.TextDoc(f"PermutedArray({wl.pformat(self.array)}, axis={self.axis})")


def permuted(q: QuantizedArray, order: np.ndarray | None) -> "QuantizedArray | PermutedArray":
    """Returns an array whose last axis is stored in this order; `None` is the order of memory."""
    return q if order is None else PermutedArray(q, jnp.asarray(order, jnp.uint32))
