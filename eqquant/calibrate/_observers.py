"""Stand-ins for weights that observe their inputs while statistics are collected."""

import dataclasses
import functools as ft
import math
import threading
from collections.abc import Sequence
from typing import TypeGuard, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from .._array.contraction import (
    AbstractOperand,
    as_floats,
    as_matrices,
    Constraints,
    constraints_of,
    linear,
    Matrices,
    Options,
)
from .._array.value import AbstractArrayValue, as_permutation
from .._types import PyTree
from ._calibrator import AbstractCalibrator
from ._observe import Moments, observe


T = TypeVar("T")
Weight = Array | AbstractArrayValue
Convolution = eqx.nn.Conv | eqx.nn.ConvTranspose


class Sums:
    """Sums over rows, for each layer of a stack, in float64. It runs in a host callback, so it never raises.

    - `wanted`: `None`, or for each layer the rows that other weights would have given; while it is being `filled`,
        rows go there, and after that their products with the rows that come are summed as `"cross"`.
    - `calibrators`: one for each layer, which observes all values, or `None`. A callback must not call JAX, so rows
        wait in `waiting` for `calibrate`.
    """

    def __init__(self, layers: int, calibrator: AbstractCalibrator | None = None) -> None:
        self.layers = layers
        self.calibrators = None if calibrator is None else [calibrator] * layers
        self.waiting: dict[int, list[np.ndarray]] = {}
        self.wanted: dict[int, list[np.ndarray]] | None = None
        self.filling = False
        self.total: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def __call__(self, index: Array | np.ndarray, moments: Moments) -> np.ndarray:
        index = np.asarray(index)
        numbers = index.astype(int).ravel()
        values = moments.pop("values", None)
        with self._lock:
            if values is not None:
                values = np.asarray(values)
                values = values.reshape(numbers.size, *values.shape[index.ndim :])
                if self.calibrators is not None:
                    for number, rows in zip(numbers, values, strict=True):
                        self.waiting.setdefault(int(number), []).append(rows.ravel().copy())
                if self.wanted is not None:
                    moments = self._compare(numbers, values, moments)
            for name, value in moments.items():
                value = np.asarray(value, np.float64)
                value = value.reshape(numbers.size, *value.shape[index.ndim :])
                combine, start = _COMBINE.get(name, (np.add, 0))
                total = self.total.setdefault(name, np.full((self.layers, *value.shape[1:]), start, np.float64))
                for number, part in zip(numbers, value, strict=True):
                    if number >= 0:
                        total[number] = combine(total[number], part)
        return index

    def calibrate(self) -> None:
        """Lets the calibrators observe the rows that wait."""
        waiting, self.waiting = self.waiting, {}
        for number, rows in waiting.items():
            if self.calibrators is not None:
                self.calibrators[number] = self.calibrators[number].update(np.concatenate(rows))

    def _compare(self, numbers: np.ndarray, values: np.ndarray, moments: Moments) -> Moments:
        """Keeps rows, or adds their products with the rows that were kept to the moments."""
        wanted = {} if self.wanted is None else self.wanted
        if self.filling:
            for number, rows in zip(numbers, values, strict=True):
                wanted.setdefault(int(number), []).append(rows.copy())
            return {}
        zeros = np.zeros((values.shape[-1], values.shape[-1]), np.float32)
        given = [wanted[n].pop(0) if n >= 0 and wanted.get(n) else None for n in map(int, numbers)]
        cross = [zeros if a is None else a.T @ rows for a, rows in zip(given, values, strict=True)]
        return {**moments, "cross": np.stack(cross).reshape(*np.shape(moments["rows"]), *zeros.shape)}


_COMBINE = {"min": (np.minimum, np.inf), "max": (np.maximum, -np.inf)}


class Watch:
    """Collects the statistics of the inputs of one weight. A static field of pytrees, compared by identity.

    - `along`: the sums for each contracted axis of the weight.
    - `gated`: whether only the layers in `active` are observed, by the index that they carry.
    - `looked_up`, `used`: whether the weight was indexed, and whether it was used in another way without `@`.
    """

    def __init__(
        self,
        path: str,
        stack: tuple[int, ...],
        threshold: float | int,
        gram: bool,
        gated: bool = False,
        calibrator: AbstractCalibrator | None = None,
    ) -> None:
        self.path, self.stack, self.threshold, self.gram, self.gated = path, stack, threshold, gram, gated
        self.looked_up = self.used = False
        self.active: Sequence[int] = ()
        self.keep = gated or calibrator is not None
        self.along = {axis: Sums(math.prod(stack), calibrator) for axis in (-1, -2)}

    def observe_next(self, layers: Sequence[int]) -> None:
        """Drops what was collected. The next `index()` selects these layers."""
        self.active = layers
        for sums in self.along.values():
            sums.total, sums.wanted = {}, None

    def compare(self, filling: bool) -> None:
        """Keeps the rows that come next, or compares those with the kept ones."""
        for sums in self.along.values():
            sums.filling = filling
            sums.wanted = {} if filling or sums.wanted is None else sums.wanted

    def index(self) -> Float32[Array, "*stack"]:
        """Returns the index of each layer of the stack: a leaf, so that it is sliced and mapped with the weight.

        It is a float, so that filters for float arrays keep it with the weights. Negative for layers not observed.
        """
        numbers = np.arange(math.prod(self.stack), dtype=np.float32)
        if self.gated:
            numbers = np.where(np.isin(numbers, self.active), numbers, -1)
        return jnp.asarray(numbers.reshape(self.stack), jnp.float32)

    def see(self, x: Array, rows: Float[Array, "*stack rows features"], index: Array, axis: int) -> Array:
        """Returns `x`, after the sums have received the moments of `rows`."""
        index = jnp.broadcast_to(index, rows.shape[:-2]).astype(jnp.float32)
        params = {"threshold": self.threshold, "gram": self.gram, "keep": self.keep, "gated": self.gated}
        return observe(x, rows, index, record=self.along[axis], **params)


class UnevenStackError(ValueError):
    """Raised if a weight was sliced or mapped without the indices of its layers."""


class WatchedArray(AbstractArrayValue):
    """A weight whose products with `@` are observed. All other operations run on the weight itself, unobserved.

    - `weight`: the weight: a JAX array, a quantized array or another array of this library.
    - `index`: the index of the layer, with the shape of the axes before the last two.
    - `swapped`: whether the last two axes are swapped.
    """

    weight: Weight
    index: Float32[Array, "*stack"]
    watch: Watch = eqx.field(static=True)
    swapped: bool = eqx.field(static=True, default=False)

    observes = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.weight.dtype)

    def dequantize(self) -> Float[Array, "..."]:
        self.watch.used = True
        return self.weight.dequantize() if isinstance(self.weight, AbstractArrayValue) else jnp.asarray(self.weight)

    def transpose(self, *axes: int | Sequence[int] | None) -> Weight:
        order, ndim = as_permutation(axes, self.ndim), self.ndim
        transposed = self.weight.transpose(order)
        if order == [*range(ndim - 2), ndim - 1, ndim - 2]:
            return dataclasses.replace(self, weight=transposed, swapped=not self.swapped)
        self.watch.used = True
        return transposed

    def astype(self, dtype: DTypeLike) -> "WatchedArray":
        return dataclasses.replace(self, weight=self.weight.astype(dtype))

    def reshape(self, *shape: PyTree, **kwargs: PyTree) -> Weight:
        self.watch.used = True
        return self.weight.reshape(*shape, **kwargs)

    def __getitem__(self, index: PyTree) -> Array:
        self.watch.looked_up = True
        return self.weight[index]

    @property
    def constraints(self) -> Constraints:
        """For products: those of the weight, and the layers of a stack stay apart."""
        if self.index.ndim != max(self.ndim - 2, 0):
            raise UnevenStackError(
                f"{self.watch.path} must be sliced or mapped as one. Got a weight of shape {self.shape} in a stack of "
                f"shape {self.index.shape}. Slice or map every array of a stacked model, as `eqx.is_array` selects."
            )
        within = constraints_of(self.weight)
        return within._replace(stack=max(within.stack, self.index.ndim))

    def as_matrices(self, axes: Matrices) -> "WatchedArray | Weight":
        """For products: the weight as matrices; unobserved if the sum runs over several axes of it."""
        weight: Weight = as_matrices(self.weight, axes)  # pyright: ignore[reportAssignmentType]
        last = (self.ndim - 1, self.ndim - 2)
        if len(axes.columns) != 1 or axes.columns[0] not in last or any(axis in last for axis in axes.front):
            self.watch.used = True
            return weight
        along = axes.columns[0] == last[0]
        index = self.index.reshape(axes.shape(self.shape)[:-2])
        return WatchedArray(weight, index, self.watch, self.swapped if along else not self.swapped)

    def linear(self, x: AbstractOperand | Array, options: Options) -> Float[Array, "*batch m n"]:
        """For products: that of the weight, after the inputs were observed."""
        if math.prod(x.shape) > 0:
            x = as_floats(x)
            rows = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
            x = self.watch.see(x, rows, self.index, -2 if self.swapped else -1)
        return linear(self.weight, x, options)

    def with_dense_weight(self) -> "WatchedArray | None":
        """For products: the same, with a dense weight."""
        if not isinstance(self.weight, AbstractArrayValue):
            return None
        return dataclasses.replace(self, weight=self.weight.with_dense_weight() or self.weight.dequantize())


def is_convolution(x: object) -> TypeGuard[Convolution]:
    """Whether `x` is an Equinox convolution. A user's subclass is not, because it may have its own `__call__`."""
    return type(x) in _CONVOLUTIONS


_CONVOLUTIONS = (
    *(eqx.nn.Conv, eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d),
    *(eqx.nn.ConvTranspose, eqx.nn.ConvTranspose1d, eqx.nn.ConvTranspose2d, eqx.nn.ConvTranspose3d),
)


def watch_convolution(layer: Convolution, watch: Watch) -> Convolution:
    """Returns the same convolution, as an instance of a subclass that observes the patches under its kernel.

    `equinox.nn.Conv.__call__` passes its kernel to `jax.lax.conv_general_dilated`, which converts it to an array, so a
    `WatchedArray` would not see the inputs. The layer observes them instead.
    """
    return _copy(_watched_class(type(layer)), layer, watch=watch, index=watch.index())


@ft.cache
def _watched_class(cls: type[Convolution]) -> type[Convolution]:
    class Watched(cls):  # pyright: ignore[reportGeneralTypeIssues]
        watch: Watch = eqx.field(static=True, kw_only=True)
        index: Float32[Array, "*stack"] = eqx.field(kw_only=True)

        def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array:
            plain = _copy(cls, self)
            return plain(self.watch.see(x, _patches(plain, x), self.index, -1), key=key)

    Watched.__name__ = Watched.__qualname__ = f"Watched{cls.__name__}"
    return Watched


def _copy(cls: type[T], layer: eqx.Module, **changes: object) -> T:
    """Copies the fields of a layer into another class, without `__init__`, which would initialise new weights."""
    copy = object.__new__(cls)
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        value = changes[field.name] if field.name in changes else getattr(layer, field.name)
        object.__setattr__(copy, field.name, value)
    return copy


def _patches(layer: Convolution, x: Float[Array, "..."]) -> Float[Array, "rows features"]:
    """Returns the patch under each position of the kernel: a row per position and group, with the kernel's features."""
    inputs = layer.weight.shape[1:]
    features = math.prod(inputs)
    # A one-hot kernel for each input extracts the patches, so the layer applies its own strides, padding and dilation.
    one_hot = jnp.eye(features, dtype=x.dtype).reshape(features, *inputs)
    kernel = jnp.tile(one_hot, (layer.groups, *[1] * len(inputs)))
    with jax.default_matmul_precision("highest"):
        picked = _copy(type(layer), layer, weight=kernel, bias=None, use_bias=False)(x)
    return jnp.swapaxes(picked.reshape(layer.groups, features, -1), -1, -2).reshape(-1, features)
