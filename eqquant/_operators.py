"""The operators and methods of an array whose answer is dense: each one dequantizes, then asks JAX."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


_BINARY = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
)  # each also reflected: `2 - q`
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs")
_METHODS = (
    *("all", "any", "argmax", "argmin", "argsort", "clip", "cumprod", "cumsum", "diagonal", "dot", "flatten"),
    *("item", "max", "mean", "min", "nonzero", "prod", "ravel", "repeat", "round", "sort", "squeeze", "std", "sum"),
    *("take", "tolist", "trace", "var"),
)


class DenseOperators:
    """A mixin: everything here is defined by `self.dequantize()` alone."""

    __slots__ = ()
    __array_priority__ = 100  # as `jax.Array`: NumPy arrays hand binary operators over to ours

    def dequantize(self) -> Array:
        raise NotImplementedError("a class with `DenseOperators` defines `dequantize`")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # dequantizing always makes a new array
        return np.asarray(self.dequantize(), dtype=dtype)

    def block_until_ready(self) -> "DenseOperators":
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
        """Functional updates, as `jax.Array.at`; the result is dense."""
        return self.dequantize().at

    # Element by element, so there is no hash, as for `jax.Array`.
    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    function.__qualname__ = f"DenseOperators.{name}"
    function.__doc__ = f"As `jax.Array.{name}`, on the dequantized array; the result is dense."
    return function


def _dense(x: Any) -> Any:
    return x.dequantize() if isinstance(x, DenseOperators) else x


def _binary(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: op(self.dequantize(), _dense(other))


def _reflected(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: op(jnp.asarray(other), self.dequantize())


def _unary(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: op(self.dequantize())


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.dequantize(), name)(*args, **kwargs)


for _name in (*_BINARY, *_COMPARISONS):
    setattr(DenseOperators, f"__{_name}__", _named(f"__{_name}__", _binary(getattr(operator, _name))))
for _name in _BINARY:
    setattr(DenseOperators, f"__r{_name}__", _named(f"__r{_name}__", _reflected(getattr(operator, _name))))
for _name in _UNARY:
    setattr(DenseOperators, f"__{_name}__", _named(f"__{_name}__", _unary(getattr(operator, _name))))
for _name in _METHODS:
    setattr(DenseOperators, _name, _named(_name, _method(_name)))
