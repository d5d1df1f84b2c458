"""The base class of arrays that stand in for `jax.Array`: its operators, and its conversion to dense."""

import abc
import dataclasses
import html
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import quax
from jaxtyping import Array

from .. import _compat
from .._export import register_export
from .contraction import AbstractOperand, matmul


_BINARY = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "divmod",
)  # each also reflected: `2 - q`
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs")
_METHODS = (
    *("all", "any", "argmax", "argmin", "argpartition", "argsort", "choose", "clip", "compress", "cumprod", "cumsum"),
    *("diagonal", "dot", "flatten", "item", "max", "mean", "min", "nonzero", "prod", "ptp", "ravel", "repeat", "round"),
    *("searchsorted", "sort", "squeeze", "std", "sum", "take", "tobytes", "tolist", "trace", "var", "view"),
    *("__dlpack__", "__dlpack_device__", "__round__"),
)
# `dir` leaves out methods for Equinox and Quax, and aliases.
_NOT_SHOWN = frozenset(
    (
        *("aval", "default", "enable_materialise", "materialise", "reshard", "with_mesh_and_axis"),
        *("as_matrices", "constraints", "holds_codes", "linear", "observes", "quantized_as", "with_dense_weight"),
    )
)


class AbstractArrayValue(quax.ArrayValue, AbstractOperand):
    """A pytree that behaves like an array of floats, but stores it differently.

    A subclass defines the abstract members below; the rest follows from them. Products and changes of structure are its
    own; everything else dequantizes and calls JAX, so the result is dense.
    """

    __array_priority__ = 100  # as `jax.Array`: makes NumPy arrays defer to our binary operators
    # Fields that training leaves untouched, even floats. An array with such fields is an adapter: in a model with
    # adapters, only adapters are trained by default.
    frozen: ClassVar[tuple[str, ...]] = ()
    quantized_as: ClassVar[str] = ""  # what makes a `QuantizedArray` of it, for errors

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_export(cls)
        _compat.accept_in_jax_lax(cls, lambda x: x.dequantize())

    @abc.abstractmethod
    def transpose(self, *axes: Any) -> Any:
        """Permutes the logical axes."""

    @abc.abstractmethod
    def __getitem__(self, index: Any) -> Array:
        """Returns the dense values at an index."""

    @abc.abstractmethod
    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """Changes the shape."""

    @property
    def size(self) -> int:
        """The number of values: the product of `shape`."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of one element of `dtype`. For the stored bytes, see `nbytes`."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The stored bytes."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree_util.tree_leaves(self))

    def aval(self) -> jax.core.ShapedArray:
        """For Quax: the abstract value that JAX sees."""
        return jax.core.ShapedArray(self.shape, self.dtype)

    def materialise(self) -> Array:
        """For Quax: the same as `dequantize`."""
        return self.dequantize()

    @property
    def __jax_array__(self) -> Callable[[], Array]:
        if _compat.jax_array_is_hidden():
            raise AttributeError("hidden from this caller; see `_compat.jax_array_is_hidden`")
        return self.dequantize

    @property
    def T(self) -> Any:
        """The transposed array: `transpose()`. Stays quantized."""
        return self.transpose()

    @property
    def mT(self) -> Any:
        """The array with its last two axes swapped. Stays quantized."""
        return self.swapaxes(-1, -2)

    def swapaxes(self, axis1: int, axis2: int) -> Any:
        """Swaps two logical axes. Stays quantized."""
        order = list(range(self.ndim))
        for name, axis in (("axis1", axis1), ("axis2", axis2)):
            if not -self.ndim <= axis < self.ndim:
                raise ValueError(f"`{name}` must be one of the {self.ndim} axes of {self.shape}. Got {axis}.")
        order[axis1], order[axis2] = order[axis2], order[axis1]
        return self.transpose(order)

    def __matmul__(self, other: Any) -> Array:
        """`q @ x`: the quantized matmul, as [`eqquant.matmul`][] computes it. The result is dense."""
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Array:
        """`x @ q`: the quantized matmul, as [`eqquant.matmul`][] computes it. The result is dense."""
        return matmul(other, self)

    @property
    def real(self) -> Any:
        """The array itself: values are floats."""
        return self

    @property
    def imag(self) -> Array:
        """Zeros: values are floats."""
        return jnp.zeros(self.shape, self.dtype)

    def conj(self) -> Any:
        """The array itself: values are floats."""
        return self

    conjugate = conj

    def copy(self) -> Any:
        """Copies the array to new memory. Stays quantized."""
        return jax.tree_util.tree_map(jnp.copy, self)

    @property
    def device(self) -> Any:
        """The device; with several devices, the sharding of the codes, as `jax.Array.device`."""
        return jax.tree_util.tree_leaves(self)[0].device

    def devices(self) -> set[Any]:
        """Returns the devices that hold the array."""
        return set().union(*(leaf.devices() for leaf in jax.tree_util.tree_leaves(self)))

    def is_deleted(self) -> bool:
        """Returns whether any of its memory was freed or donated."""
        return any(leaf.is_deleted() for leaf in jax.tree_util.tree_leaves(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # dequantizing always makes a new array
        return np.asarray(self.dequantize(), dtype=dtype)

    def block_until_ready(self) -> "AbstractArrayValue":
        """Waits until the codes and scales are computed."""
        return jax.block_until_ready(self)

    def __len__(self) -> int:
        return len(self.dequantize())

    def __iter__(self) -> Iterator[Array]:
        return iter(self.dequantize())

    def __bool__(self) -> bool:
        return bool(self.dequantize())

    def __float__(self) -> float:
        return float(self.dequantize())

    def __int__(self) -> int:
        return int(self.dequantize())

    @property
    def at(self) -> Any:
        """Functional updates, as `jax.Array.at`. The result is dense, since codes cannot be updated exactly.

        To keep the array quantized, as in a cache, pass the result to [`eqquant.requantize`][].
        """
        return self.dequantize().at

    def __dir__(self) -> list[str]:
        fields = {f.name for f in dataclasses.fields(self)}
        names = {n for n in super().__dir__() if not n.startswith("_") and n not in _NOT_SHOWN}
        return sorted(names | fields)

    def _repr_html_(self) -> str:
        """For notebooks: a title, and the first rows."""
        title = f"<code>{html.escape(repr(self))}</code>"
        try:
            rows = np.asarray(self[(slice(3),) * (self.ndim - 1)].astype(jnp.float32))
        except (AttributeError, TypeError, ValueError, jax.errors.JAXTypeError):  # traced, or mid-surgery
            return title
        values = np.array2string(rows, precision=4, threshold=12, edgeitems=3)
        more = "\n..." if rows.shape != self.shape else ""
        size = f"{8 * self.nbytes / max(self.size, 1):.2f} bits per value"
        return f"{title} <small>{size}</small><pre>{html.escape(values)}{more}</pre>"

    # `==` compares element by element, so there is no hash, as for `jax.Array`.
    __hash__ = None  # pyright: ignore[reportAssignmentType]


def flatten_arguments(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Makes `f(1, 2)` and `f((1, 2))` the same call."""
    return tuple(arguments[0]) if len(arguments) == 1 and np.ndim(arguments[0]) > 0 else arguments


def as_permutation(axes: tuple[Any, ...], ndim: int) -> list[int]:
    """Returns the arguments of `transpose` as a list of non-negative axes; no argument or `None` reverses the axes."""
    given = () if axes and axes[0] is None else flatten_arguments(axes)
    order = [int(a) for a in given] or list(range(ndim))[::-1]
    if sorted(a % ndim if -ndim <= a < ndim else -1 for a in order) != list(range(ndim)):
        raise ValueError(f"`axes` must be a permutation of the {ndim} axes. Got {tuple(order)}.")
    return [a % ndim for a in order]


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    function.__qualname__ = f"AbstractArrayValue.{name}"
    function.__doc__ = f"As `jax.Array.{name}`, on the dequantized array; the result is dense."
    return function


def _dense(x: Any) -> Any:
    return x.dequantize() if isinstance(x, AbstractArrayValue) else x


def _operator(name: str) -> Callable[[Any, Any], Any]:
    return divmod if name == "divmod" else getattr(operator, name)


def _binary(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: op(self.dequantize(), _dense(other))


def _reflected(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: op(jnp.asarray(other), self.dequantize())


def _unary(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: op(self.dequantize())


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.dequantize(), name)(*args, **kwargs)


for _name in (*_BINARY, *_COMPARISONS):
    setattr(AbstractArrayValue, f"__{_name}__", _named(f"__{_name}__", _binary(_operator(_name))))
for _name in _BINARY:
    setattr(AbstractArrayValue, f"__r{_name}__", _named(f"__r{_name}__", _reflected(_operator(_name))))
for _name in _UNARY:
    setattr(AbstractArrayValue, f"__{_name}__", _named(f"__{_name}__", _unary(getattr(operator, _name))))
for _name in _METHODS:
    setattr(AbstractArrayValue, _name, _named(_name, _method(_name)))
