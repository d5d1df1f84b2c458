"""Base classes of arrays that wrap another array."""

import abc

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float

from .._array.value import AbstractArrayValue, Index
from .._formats.base import AbstractFormat
from .._types import PyTree


class AbstractWrapper(AbstractArrayValue):
    """A wrapper around an array of the same shape and dtype: floats, or one of our arrays."""

    array: eqx.AbstractVar[PyTree]

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape of the weight."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """The number of logical axes."""
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        """The logical dtype of the weight."""
        return np.dtype(self.array.dtype)

    @property
    def format(self) -> AbstractFormat | None:
        """The format of the weight, `None` for floats."""
        # The `format` of a `jax.Array` is a layout.
        return getattr(self.array, "format", None) if isinstance(self.array, AbstractArrayValue) else None

    def _dequantize_inner(self) -> Float[Array, "..."]:
        """Returns the wrapped array, dense."""
        return self.array.dequantize() if isinstance(self.array, AbstractArrayValue) else jnp.asarray(self.array)


class AbstractMatmulOverride(AbstractWrapper):
    """A wrapper that overrides only the products of a weight.

    Lookups, slices and casts act on the weight. Functions on models look through it: statistics, masks and
    low-rank factors see the wrapped weight, under its path in the float model.
    """

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the dense weight."""
        return self._dequantize_inner()

    def astype(self, dtype: DTypeLike) -> AbstractArrayValue | Array:
        """Changes the logical dtype. Returns a dense array if `dtype` is not floating point."""
        return self._rewrap(self.array.astype(dtype))

    def __getitem__(self, index: Index) -> Array:
        """Returns dense values of the weight."""
        return self.array[index]

    @abc.abstractmethod
    def _rewrap(self, array: PyTree) -> Array | AbstractArrayValue:
        """Wraps another array alike, or returns that array itself if it cannot be wrapped."""
