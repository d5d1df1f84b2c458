"""Arrays around another: those whose products alone differ from its own, and what they share with other ones."""

import abc

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float

from .._array.value import AbstractArrayValue, Index
from .._formats.base import AbstractFormat
from .._types import PyTree


class AbstractArrayAround(AbstractArrayValue):
    """An array of the shape and dtype of another, which it holds: floats, or anything that stands for an array."""

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

    def _dense_within(self) -> Float[Array, "..."]:
        """Returns the array within, dense."""
        return self.array.dequantize() if isinstance(self.array, AbstractArrayValue) else jnp.asarray(self.array)


class AbstractWrappedArray(AbstractArrayAround):
    """A weight with products of another kind. Everything but products is that of the weight within.

    Models are walked through it: to statistics, masks and factors the leaf within is the weight, under the path that
    it has in the float model.
    """

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the dense weight."""
        return self._dense_within()

    def astype(self, dtype: DTypeLike) -> AbstractArrayValue | Array:
        """Changes the logical dtype. Returns a dense array if `dtype` is not floating point."""
        return self._around(self.array.astype(dtype))

    def __getitem__(self, index: Index) -> Array:
        """Returns dense values of the weight."""
        return self.array[index]

    @abc.abstractmethod
    def _around(self, array: PyTree) -> Array | AbstractArrayValue:
        """Returns another array with these products, or that array itself if it cannot have them."""
