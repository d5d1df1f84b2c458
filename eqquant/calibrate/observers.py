"""What stands in the place of a weight while statistics are collected: the same weight, that watches its inputs."""

import dataclasses
import functools as ft
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32

from .._operators import AbstractArrayValue, as_permutation
from .observe import observe, Record


@dataclasses.dataclass(frozen=True, eq=False)
class Watch:
    """Who watches, and for what. One for each leaf; it is static in what it is part of."""

    path: str
    record: Record
    threshold: float
    gram: bool

    def __call__(self, x: Float[Array, "*stack rows features"], index: Array) -> Array:
        index = jnp.broadcast_to(index, x.shape[:-2]).astype(jnp.float32)
        return observe(x, index, record=self.record, threshold=self.threshold, gram=self.gram)


def layer_index(stack: tuple[int, ...]) -> Float32[Array, "*stack"]:
    """The number of each layer of a stack. It is a leaf, so that it is sliced and mapped with the weight.

    And a float, so that whoever divides a model into weights and the rest takes it for a weight.
    """
    return jnp.arange(math.prod(stack), dtype=jnp.float32).reshape(stack)


class WatchedArray(AbstractArrayValue):
    """A weight whose products with `@` are watched. Everything else is done by the weight itself, unseen.

    - `weight`: the weight, an array or one of ours.
    - `index`: the number of the layer, of the shape of the axes in front of the last two.
    - `swapped`: whether the last two axes were swapped since.
    """

    weight: Any
    index: Float32[Array, "*stack"]
    watch: Watch = eqx.field(static=True)
    swapped: bool = eqx.field(static=True, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.weight.dtype)

    def dequantize(self) -> Float[Array, "..."]:
        return self.weight.dequantize() if isinstance(self.weight, AbstractArrayValue) else jnp.asarray(self.weight)

    def transpose(self, *axes: Any) -> Any:
        order, ndim = as_permutation(axes, self.ndim), self.ndim
        transposed = self.weight.transpose(order)
        if order != [*range(ndim - 2), ndim - 1, ndim - 2]:
            return transposed
        return dataclasses.replace(self, weight=transposed, swapped=not self.swapped)

    def astype(self, dtype: Any) -> Any:
        return dataclasses.replace(self, weight=self.weight.astype(dtype))

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        return self.weight.reshape(*shape, **kwargs)

    def __getitem__(self, index: Any) -> Array:
        return self.weight[index]

    def _matmul(self, other: ArrayLike, *, left: bool) -> Array:
        x = jnp.asarray(other)
        contracted = -1 if left else -2
        fits = x.ndim > 0 and x.shape[-2 if left and x.ndim > 1 else -1] == self.shape[contracted]
        # The inputs are those along the last axis of the weight as it was; products along the other are its transpose's.
        if fits and (contracted == -1) != self.swapped and jnp.issubdtype(x.dtype, jnp.floating):
            x = self._watched(x, left)
        return self.weight @ x if left else x @ self.weight

    def _watched(self, x: Array, left: bool) -> Array:
        if self.index.ndim != self.ndim - 2:
            raise ValueError(
                f"{self.watch.path} must be sliced or mapped as one. Got a weight of shape {self.shape} in a stack of "
                f"shape {self.index.shape}. Slice or map every array of a stacked model, as `eqx.is_array` selects."
            )
        rows = x[None, :] if x.ndim == 1 else jnp.swapaxes(x, -1, -2) if left else x
        batch = rows.shape[:-2]
        if self.index.ndim == 0:
            rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
        else:
            batch = jnp.broadcast_shapes(batch, self.index.shape)
            rows = jnp.broadcast_to(rows, (*batch, *rows.shape[-2:]))
        rows = self.watch(rows, self.index)
        rows = rows.reshape(*batch, -1, rows.shape[-1])
        return rows[0] if x.ndim == 1 and not batch else jnp.swapaxes(rows, -1, -2) if left else rows


#
# Convolutions
#


def watch_convolution(layer: Any, watch: Watch, stack: tuple[int, ...]) -> Any:
    """The same convolution, of a class derived from its own, that watches what its kernel is laid over."""
    watched = object.__new__(_watched_class(type(layer)))
    values = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    for name, value in {**values, "watch": watch, "index": layer_index(stack)}.items():
        object.__setattr__(watched, name, value)
    return watched


@ft.cache
def _watched_class(cls: type) -> type:
    class Watched(cls):
        watch: Any = eqx.field(static=True, default=None)
        index: Any = None

        def __call__(self, x: Array, **kwargs: Any) -> Array:
            self.watch(_patches(self, super().__call__, x), self.index)
            return super().__call__(x, **kwargs)

    Watched.__name__ = Watched.__qualname__ = f"Watched{cls.__name__}"
    return Watched
