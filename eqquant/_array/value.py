"""The base class of arrays that stand in for `jax.Array`, with operators and conversions."""

import abc
import dataclasses
import html
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import quax
from jaxtyping import Array, ArrayLike, DTypeLike

from .. import _compat
from .._errors import name_type
from .._export import register_export
from .contraction import AbstractOperand, matmul_with
from .moves import Move


_P = ParamSpec("_P")
_R = TypeVar("_R")
_Array = TypeVar("_Array", bound="AbstractArrayValue")
_Operand: TypeAlias = ArrayLike | AbstractOperand

Index: TypeAlias = (
    int | slice | EllipsisType | ArrayLike | None | Sequence[int | slice | EllipsisType | ArrayLike | None]
)
# Methods for Equinox and Quax, and aliases, which `dir` leaves out.
_HIDDEN_FROM_DIR = {
    *("aval", "default", "enable_materialise", "materialise", "reshard", "with_mesh_and_axis"),
    *("as_matrices", "constraints", "dense_for_jax", "linear", "lost_in_jax", "move", "products", "quantized_as"),
    *("holds_codes", "is_diagonal", "leaf_axes"),
}


def _dense_method(
    name: str, like: Callable[Concatenate[Array, _P], _R]
) -> Callable[Concatenate["AbstractArrayValue", _P], _R]:
    """Returns a method that calls the method `name` of the dense array, typed as `like`."""

    def call(self: "AbstractArrayValue", *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """As the method of `jax.Array`, on the dequantized array. The result is dense."""
        return getattr(self.dequantize(), name)(*args, **kwargs)

    return call


def _find_lost_effect(w: "AbstractArrayValue") -> str:
    """Returns the effect of a weight that its dense array lacks, or ""."""
    if w.lost_in_jax:
        return w.lost_in_jax
    parts = jax.tree_util.tree_leaves(w, is_leaf=lambda x: x is not w and isinstance(x, AbstractArrayValue))
    lost = (_find_lost_effect(part) for part in parts if isinstance(part, AbstractArrayValue))
    return next(filter(None, lost), "")


class AbstractArrayValue(quax.ArrayValue, AbstractOperand):
    """A pytree that behaves like an array of floats, but stores it differently.

    A subclass defines the abstract members below, and implements products, transposes and reshapes. Everything else
    dequantizes and calls JAX, so the result is dense.
    """

    __array_priority__ = 100  # as `jax.Array`: makes NumPy arrays defer to our binary operators
    # Fields that training freezes, even floats. An array with such fields is an adapter: in a model with adapters, only
    # adapters train by default.
    frozen: ClassVar[tuple[str, ...]] = ()
    quantized_as: ClassVar[str] = ""  # for errors: the attribute or call that gives a `QuantizedArray`

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        register_export(cls)
        _compat.accept_in_jax_lax(cls, lambda x: x.dense_for_jax())

    @abc.abstractmethod
    def transpose(self, *axes: int | Sequence[int] | None) -> "AbstractArrayValue | Array":
        """Permutes the logical axes."""

    @abc.abstractmethod
    def __getitem__(self, index: Index) -> Array:
        """Returns the dense values at an index."""

    @abc.abstractmethod
    def reshape(self, *shape: int | Sequence[int], order: str = "C", **kwargs: object) -> "AbstractArrayValue | Array":
        """Changes the shape."""

    @abc.abstractmethod
    def move(self, spec: Move, *others: Any) -> "AbstractArrayValue | Array":
        """For Quax: moves whole entries; with `others`, of the same structure, concatenates.

        **Raises:**

        `CannotMove` if the result would not be exact, or not packed. It is dense then.
        """

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
        """For Quax: the dense array, for operations without a rule. Warns if an effect is lost."""
        if lost := _find_lost_effect(self):
            line, operation = _compat.current_line(), _compat.find_quax_operation()
            by = "An operation" if operation is None else f"`{operation}`"
            at = "" if line is None else f", at {line.file}:{line.number} in {line.function},"
            warnings.warn(
                f"{by}{at} gets the dense weight of {name_type(self)} of shape {self.shape}, so {lost}. Apply the "
                "operation to activations, or write the product as `w @ x`.",
                stacklevel=2,
            )
        return self.dequantize()

    def dense_for_jax(self) -> Array:
        """For JAX: the dense array, which its functions see. Warns if an effect is lost."""
        if lost := _find_lost_effect(self):
            warnings.warn(
                f"A function of JAX gets the dense weight of {name_type(self)} of shape {self.shape}, so {lost}. Write "
                "`w @ x`, or call the function through `eqq.quaxify`, which multiplies codes in `jnp.matmul`, "
                "`jnp.einsum` and convolutions.",
                stacklevel=2,
            )
        return self.dequantize()

    @property
    def __jax_array__(self) -> Callable[[], Array]:
        if _compat.jax_array_is_hidden():
            raise AttributeError("hidden from this caller; see `_compat.jax_array_is_hidden`")
        return self.dense_for_jax

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

    def __matmul__(self, other: _Operand) -> Array:
        """`q @ x`: the quantized matmul, as [`eqquant.matmul`][] computes it. The result is dense."""
        return matmul_with(self, other)

    def __rmatmul__(self, other: _Operand) -> Array:
        """`x @ q`: the quantized matmul, as [`eqquant.matmul`][] computes it. The result is dense."""
        return matmul_with(other, self)

    def __add__(self, other: _Operand) -> Array:
        return self.dequantize() + _dense(other)

    def __sub__(self, other: _Operand) -> Array:
        return self.dequantize() - _dense(other)

    def __mul__(self, other: _Operand) -> Array:
        return self.dequantize() * _dense(other)

    def __truediv__(self, other: _Operand) -> Array:
        return self.dequantize() / _dense(other)

    def __floordiv__(self, other: _Operand) -> Array:
        return self.dequantize() // _dense(other)

    def __mod__(self, other: _Operand) -> Array:
        return self.dequantize() % _dense(other)

    def __pow__(self, other: _Operand) -> Array:
        return self.dequantize() ** _dense(other)

    def __divmod__(self, other: _Operand) -> tuple[Array, Array]:
        return divmod(self.dequantize(), _dense(other))

    def __radd__(self, other: _Operand) -> Array:
        return jnp.asarray(other) + self.dequantize()

    def __rsub__(self, other: _Operand) -> Array:
        return jnp.asarray(other) - self.dequantize()

    def __rmul__(self, other: _Operand) -> Array:
        return jnp.asarray(other) * self.dequantize()

    def __rtruediv__(self, other: _Operand) -> Array:
        return jnp.asarray(other) / self.dequantize()

    def __rfloordiv__(self, other: _Operand) -> Array:
        return jnp.asarray(other) // self.dequantize()

    def __rmod__(self, other: _Operand) -> Array:
        return jnp.asarray(other) % self.dequantize()

    def __rpow__(self, other: _Operand) -> Array:
        return jnp.asarray(other) ** self.dequantize()

    def __rdivmod__(self, other: _Operand) -> tuple[Array, Array]:
        return divmod(jnp.asarray(other), self.dequantize())

    def __eq__(self, other: _Operand) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize() == _dense(other)

    def __ne__(self, other: _Operand) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantize() != _dense(other)

    def __lt__(self, other: _Operand) -> Array:
        return self.dequantize() < _dense(other)

    def __le__(self, other: _Operand) -> Array:
        return self.dequantize() <= _dense(other)

    def __gt__(self, other: _Operand) -> Array:
        return self.dequantize() > _dense(other)

    def __ge__(self, other: _Operand) -> Array:
        return self.dequantize() >= _dense(other)

    def __neg__(self) -> Array:
        return -self.dequantize()

    def __pos__(self) -> Array:
        return +self.dequantize()

    def __abs__(self) -> Array:
        return abs(self.dequantize())

    all: ClassVar[Callable[..., Array]] = _dense_method("all", jax.Array.all)
    any: ClassVar[Callable[..., Array]] = _dense_method("any", jax.Array.any)
    argmax: ClassVar[Callable[..., Array]] = _dense_method("argmax", jax.Array.argmax)
    argmin: ClassVar[Callable[..., Array]] = _dense_method("argmin", jax.Array.argmin)
    argpartition: ClassVar[Callable[..., Array]] = _dense_method("argpartition", jax.Array.argpartition)
    argsort: ClassVar[Callable[..., Array]] = _dense_method("argsort", jax.Array.argsort)
    choose: ClassVar[Callable[..., Array]] = _dense_method("choose", jax.Array.choose)
    clip: ClassVar[Callable[..., Array]] = _dense_method("clip", jax.Array.clip)
    compress: ClassVar[Callable[..., Array]] = _dense_method("compress", jax.Array.compress)
    cumprod: ClassVar[Callable[..., Array]] = _dense_method("cumprod", jax.Array.cumprod)
    cumsum: ClassVar[Callable[..., Array]] = _dense_method("cumsum", jax.Array.cumsum)
    diagonal: ClassVar[Callable[..., Array]] = _dense_method("diagonal", jax.Array.diagonal)
    dot: ClassVar[Callable[..., Array]] = _dense_method("dot", jax.Array.dot)
    flatten: ClassVar[Callable[..., Array]] = _dense_method("flatten", jax.Array.flatten)
    item: ClassVar[Callable[..., bool | int | float | complex]] = _dense_method("item", jax.Array.item)
    max: ClassVar[Callable[..., Array]] = _dense_method("max", jax.Array.max)
    mean: ClassVar[Callable[..., Array]] = _dense_method("mean", jax.Array.mean)
    min: ClassVar[Callable[..., Array]] = _dense_method("min", jax.Array.min)
    nonzero: ClassVar[Callable[..., tuple[Array, ...]]] = _dense_method("nonzero", jax.Array.nonzero)
    prod: ClassVar[Callable[..., Array]] = _dense_method("prod", jax.Array.prod)
    ptp: ClassVar[Callable[..., Array]] = _dense_method("ptp", jax.Array.ptp)
    ravel: ClassVar[Callable[..., Array]] = _dense_method("ravel", jax.Array.ravel)
    repeat: ClassVar[Callable[..., Array]] = _dense_method("repeat", jax.Array.repeat)
    round: ClassVar[Callable[..., Array]] = _dense_method("round", jax.Array.round)
    searchsorted: ClassVar[Callable[..., Array]] = _dense_method("searchsorted", jax.Array.searchsorted)
    sort: ClassVar[Callable[..., Array]] = _dense_method("sort", jax.Array.sort)
    squeeze: ClassVar[Callable[..., Array]] = _dense_method("squeeze", jax.Array.squeeze)
    std: ClassVar[Callable[..., Array]] = _dense_method("std", jax.Array.std)
    sum: ClassVar[Callable[..., Array]] = _dense_method("sum", jax.Array.sum)
    take: ClassVar[Callable[..., Array]] = _dense_method("take", jax.Array.take)
    trace: ClassVar[Callable[..., Array]] = _dense_method("trace", jax.Array.trace)
    var: ClassVar[Callable[..., Array]] = _dense_method("var", jax.Array.var)
    view: ClassVar[Callable[..., Array]] = _dense_method("view", jax.Array.view)
    __round__: ClassVar[Callable[..., Array]] = _dense_method("__round__", jax.Array.__round__)

    def tobytes(self, order: str = "C") -> bytes:
        """Returns the bytes of the dense values."""
        return self.dequantize().tobytes(order)

    def tolist(self) -> list[object]:
        """Returns the dense values as nested lists."""
        return self.dequantize().tolist()

    def __dlpack__(self, **options: object) -> object:
        return self.dequantize().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.dequantize().__dlpack_device__()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def real(self: _Array) -> _Array:
        """The array itself: values are floats."""
        return self

    @property
    def imag(self) -> Array:
        """Zeros: values are floats."""
        return jnp.zeros(self.shape, self.dtype)

    def conj(self: _Array) -> _Array:
        """The array itself: values are floats."""
        return self

    conjugate = conj

    def copy(self: _Array) -> _Array:
        """Copies the array to new memory. Stays quantized."""
        return jax.tree_util.tree_map(jnp.copy, self)

    @property
    def device(self) -> Any:  # pyright knows no `jax.Device`
        """The device; with several devices, the sharding of the codes, as `jax.Array.device`."""
        return jax.tree_util.tree_leaves(self)[0].device

    def devices(self) -> set[Any]:
        """Returns the devices that hold the array."""
        return set().union(*(leaf.devices() for leaf in jax.tree_util.tree_leaves(self)))

    def is_deleted(self) -> bool:
        """Returns whether any of its memory was freed or donated."""
        return any(leaf.is_deleted() for leaf in jax.tree_util.tree_leaves(self))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy  # dequantizing always makes a new array
        return np.asarray(self.dequantize(), dtype=dtype)

    def block_until_ready(self: _Array) -> _Array:
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
        """Functional updates, as `jax.Array.at`. The result is dense.

        To keep the array quantized, as in a cache, pass the result to [`eqquant.requantize`][].
        """
        return self.dequantize().at

    def __dir__(self) -> list[str]:
        fields = {f.name for f in dataclasses.fields(self)}
        names = {n for n in super().__dir__() if not n.startswith("_") and n not in _HIDDEN_FROM_DIR}
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


def move(x: AbstractArrayValue | Array, spec: Move, *others: AbstractArrayValue | Array) -> AbstractArrayValue | Array:
    """Moves an array of ours, as its class says, or floats."""
    if isinstance(x, AbstractArrayValue):
        return x.move(spec, *others)  # pyright: ignore[reportArgumentType]
    return spec.move_leaf(tuple(range(jnp.ndim(x))), x, *others)


def flatten_arguments(arguments: Sequence[int | Sequence[int] | None]) -> tuple[int, ...]:
    """Flattens arguments, so that `f(1, 2)` and `f((1, 2))` are the same call."""
    nested = len(arguments) == 1 and np.ndim(arguments[0]) > 0  # pyright: ignore[reportArgumentType]
    return tuple(arguments[0] if nested else arguments)  # pyright: ignore[reportArgumentType, reportReturnType]


def as_permutation(axes: Sequence[int | Sequence[int] | None], ndim: int) -> list[int]:
    """Returns the arguments of `transpose` as non-negative axes; none reverse the axes."""
    flat = () if axes and axes[0] is None else flatten_arguments(axes)
    order = [int(a) for a in flat] or list(range(ndim))[::-1]
    if sorted(a % ndim if -ndim <= a < ndim else -1 for a in order) != list(range(ndim)):
        raise ValueError(f"`axes` must be a permutation of the {ndim} axes. Got {tuple(order)}.")
    return [a % ndim for a in order]


def _dense(x: _Operand) -> ArrayLike:
    return x.dequantize() if isinstance(x, AbstractOperand) else x
