"""Observers of the inputs of weights, which sum statistics while a model runs."""

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.tree_util import KeyPath
from jaxtyping import Array, Float32

from .._array.checks import as_jax_array
from .._array.value import AbstractArrayValue
from .._program.facts import AbstractFollower, Data, Fact, Parameter, UseSite
from .._program.follow import follow
from .._program.products import Product
from .._program.trace import trace, Traced
from .._program.views import view_weight
from .._tree.batches import Apply
from .._tree.leaves import Leaf
from .._types import PyTree
from ._calibrator import AbstractCalibrator
from ._observe_primitive import Moments, observe


def _is_shaped(x: object) -> bool:
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


class Sums:
    """Sums over rows, for each layer of a stack, in float64.

    It runs in a host callback, so it never raises.

    - `reference_rows`: `None`, or for each layer the inputs in the reference model. While `recording`, rows are
        appended to it. After that, the products of these with the new rows are summed as `"cross"`.
    - `layers`: the layers that are summed, in the order of `total`.
    - `calibrators`: one for each layer, which observes all values, or `None`. A callback must not call JAX, so rows
        wait in `pending` until `calibrate`.
    """

    def __init__(self, num_layers: int, calibrator: AbstractCalibrator | None = None) -> None:
        self.num_layers = num_layers
        self.calibrators = None if calibrator is None else [calibrator] * num_layers
        self.pending: dict[int, list[np.ndarray]] = {}
        self.reference_rows: dict[int, list[np.ndarray]] | None = None
        self.recording = False
        self.total: dict[str, np.ndarray] = {}
        self.layers = range(num_layers)
        self._lock = threading.Lock()

    def __call__(self, index: Array | np.ndarray, moments: Moments) -> np.ndarray:
        index = np.asarray(index)
        layers = index.astype(int).ravel()
        values = moments.pop("values", None)
        with self._lock:
            if values is not None:
                values = np.asarray(values)
                values = values.reshape(layers.size, *values.shape[index.ndim :])
                if self.calibrators is not None:
                    for layer, rows in zip(layers, values, strict=True):
                        valid = rows[~np.isnan(rows).any(axis=-1)]  # NaN in the inputs raises by their moments
                        self.pending.setdefault(int(layer), []).append(valid.ravel())
                if self.reference_rows is not None:
                    moments = self._compare(layers, np.nan_to_num(values), moments)
            for name, value in moments.items():
                value = np.asarray(value)
                value = value.reshape(layers.size, *value.shape[index.ndim :])
                combine, start = _COMBINE.get(name, (np.add, 0))
                if name not in self.total:
                    self.total[name] = np.full((len(self.layers), *value.shape[1:]), start, np.float64)
                for layer, part in zip(layers, value, strict=True):
                    if layer >= 0:
                        total = self.total[name][self.layers.index(layer), ...]
                        combine(total, part, out=total)
        return index

    def calibrate(self) -> None:
        """Updates the calibrators with the pending rows."""
        pending, self.pending = self.pending, {}
        for layer, rows in pending.items():
            values = np.concatenate(rows)
            if self.calibrators is not None and values.size:  # an expert may have seen none of this batch
                self.calibrators[layer] = self.calibrators[layer].update(values)

    def _compare(self, layers: np.ndarray, values: np.ndarray, moments: Moments) -> Moments:
        """Records rows, or adds their products with the recorded rows to the moments."""
        reference_rows = {} if self.reference_rows is None else self.reference_rows
        if self.recording:
            for layer, rows in zip(layers, values, strict=True):
                reference_rows.setdefault(int(layer), []).append(rows)
            return {}
        zeros = np.zeros((values.shape[-1], values.shape[-1]), np.float32)
        references = [reference_rows[n].pop(0) if n >= 0 and reference_rows.get(n) else None for n in map(int, layers)]
        cross = [zeros if a is None else a.T @ rows for a, rows in zip(references, values, strict=True)]
        return {**moments, "cross": np.stack(cross).reshape(*np.shape(moments["rows"]), *zeros.shape)}


_COMBINE = {"min": (np.minimum, np.inf), "max": (np.maximum, -np.inf)}


class WeightObserver:
    """Collects the statistics of the inputs of one weight.

    - `path`, `shape`: the path and the shape of the weight.
    - `by_axes`: the sums for each combination of contracted axes, negative.
    - `stack_axes`: for each combination, the axes of a stack of layers, each with its own inputs.
    - `gated`: whether only the layers in `active` are observed.
    - `layer`: the only layer of a stack to observe, as if it were a weight; `None` for all.
    - `looked_up`, `used`: whether rows of the weight were looked up, and whether it was used in another way.
    - `in_parts`: whether a product sums over a part of the inputs.
    """

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        threshold: float | int,
        gram: bool,
        gated: bool = False,
        calibrator: AbstractCalibrator | None = None,
    ) -> None:
        self.path, self.shape, self.threshold, self.gram, self.gated = path, shape, threshold, gram, gated
        self.calibrator, self.keep = calibrator, gated or calibrator is not None
        self.looked_up = self.used = self.in_parts = False
        self.active: Sequence[int] = ()
        self.layer: int | None = None
        self.by_axes: dict[tuple[int, ...], Sums] = {}
        self.stack_axes: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def axes(self) -> tuple[int, ...] | None:
        """The axes of the inputs: the last axis if it was observed; `None` without products."""
        return next((axes for axes in ((-1,), (-2,)) if axes in self.by_axes), next(iter(self.by_axes), None))

    @property
    def stack(self) -> tuple[int, ...]:
        """The shape of the stack of layers."""
        return () if self.axes is None else self.stack_shape(self.axes)

    def stack_shape(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stack for products along some axes."""
        return tuple(self.shape[axis] for axis in self.stack_axes[axes])

    def prepare(self, product: Product) -> None:
        """Prepares sums for a product."""
        axes, stack = self.negative_axes(product), product.stack_axes(self.shape)
        self.in_parts |= product.inputs.features.size < product.inputs.total
        before = self.stack_axes.get(axes, ())
        if axes not in self.by_axes or len(stack) > len(before):
            self.stack_axes[axes] = stack
            self.by_axes[axes] = Sums(math.prod(self.stack_shape(axes)), self.calibrator)

    def negative_axes(self, product: Product) -> tuple[int, ...]:
        """Returns the axes that a product contracts, counted from the end."""
        return tuple(axis - len(self.shape) for axis in product.inputs.axes)

    def observed_stack(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stack that is observed: `()` for a single layer."""
        return self.stack_shape(axes) if self.layer is None else ()

    def select(self, active: bool, layer: int | None = None) -> None:
        """Drops all sums. From now on observes all layers, one layer, or nothing."""
        every = range(math.prod(self.stack))
        self.layer, self.active = layer, (every if layer is None else every[layer : layer + 1]) if active else ()
        for sums in self.by_axes.values():
            sums.total, sums.reference_rows = {}, None
            sums.layers = range(sums.num_layers) if layer is None else range(layer, layer + 1)

    def compare(self, recording: bool) -> None:
        """Records the next rows, or compares the next rows with the recorded ones."""
        for sums in self.by_axes.values():
            sums.recording = recording
            sums.reference_rows = {} if recording or sums.reference_rows is None else sums.reference_rows

    def layer_indices(self) -> dict[tuple[int, ...], Float32[Array, " layers"]]:
        """Returns the index of each layer, by contracted axes; -1 for layers not observed."""
        every = {axes: np.arange(sums.num_layers, dtype=np.float32) for axes, sums in self.by_axes.items()}
        if self.gated:
            every = {axes: np.where(np.isin(n, self.active), n, -1) for axes, n in every.items()}
        return {axes: jnp.asarray(n, jnp.float32) for axes, n in every.items()}


class _ProductFinder(AbstractFollower):
    """Prepares observers for the products of a program."""

    def __init__(self, observers: Sequence[WeightObserver]) -> None:
        self.observers = observers

    def multiply(self, product: Product, use: UseSite) -> Array:
        self.observers[product.view.weight].prepare(product)
        return product.x

    def use(self, use: UseSite) -> None:
        observer = self.observers[use.weight]
        observer.looked_up |= use.kind == "lookup"
        observer.used |= use.kind != "lookup"


class _ObservingFollower(AbstractFollower):
    """Passes the inputs of products to observers."""

    def __init__(
        self, observers: Sequence[WeightObserver], layer_indices: Sequence[dict[tuple[int, ...], Array]]
    ) -> None:
        self.observers, self.layer_indices = observers, layer_indices

    def multiply(self, product: Product, use: UseSite) -> Array:
        x, observer = product.x, self.observers[product.view.weight]
        axes = observer.negative_axes(product)
        layer_inputs = product.split_by_layer(observer.stack_axes[axes], observer.shape) if x.size else None
        if layer_inputs is None:
            observer.used |= x.size > 0
            return x
        rows, row_mask = layer_inputs.rows, layer_inputs.row_mask
        if jnp.iscomplexobj(rows):
            rows = jnp.concatenate([jnp.real(rows), jnp.imag(rows)], axis=-2)
            row_mask = None if row_mask is None else jnp.concatenate([row_mask, row_mask], axis=-1)
        rows = rows if jnp.issubdtype(rows.dtype, jnp.floating) else rows.astype(jnp.float32)
        index = self.layer_indices[product.view.weight][axes][layer_inputs.layer]
        options = dict(threshold=observer.threshold, gram=observer.gram, keep=observer.keep, gated=observer.gated)
        return observe(x, rows, index, row_mask, record=observer.by_axes[axes], **options)

    def use(self, use: UseSite) -> None:
        pass


class ObservedFunction:
    """A function `(model, batch) -> outputs` whose inputs of weights are observed.

    **Arguments:**

    - `run`: the function.
    - `pairs`: the leaves to watch, each with its `WeightObserver`. Leaves that are the same array share an observer.
    - `is_leaf`: whether a node of the model may be one of these leaves.
    """

    def __init__(
        self, run: Apply, pairs: Iterable[tuple[Leaf, WeightObserver]], is_leaf: Callable[[object], bool]
    ) -> None:
        pairs = list(pairs)
        self.observers = list({id(observer): observer for _, observer in pairs}.values())
        self.observer_indices: dict[Hashable, int] = {
            leaf.keys: self.observers.index(observer) for leaf, observer in pairs
        }
        self.run, self.is_leaf = run, is_leaf
        self._traced: dict[Hashable, tuple[Traced, list[Fact]]] = {}
        self._call = eqx.filter_jit(self._observe)

    def __call__(self, model: PyTree, batch: PyTree) -> PyTree:
        """Returns the outputs. Once they are ready, all statistics are complete."""
        model = self._convert_to_jax(model)
        traced, _ = self._trace(model, batch)
        return traced.outputs(self._call(model, batch, [observer.layer_indices() for observer in self.observers]))

    def program(self, model: PyTree, batch: PyTree) -> ClosedJaxpr:
        """Returns the program with its observing operations. Arrays may be `jax.ShapeDtypeStruct`s."""
        self._trace(model, batch)
        layer_indices = [observer.layer_indices() for observer in self.observers]
        return eqx.filter_make_jaxpr(self._observe)(model, batch, layer_indices)[0]

    def _observe(
        self, model: PyTree, batch: PyTree, layer_indices: Sequence[dict[tuple[int, ...], Array]]
    ) -> list[Array]:
        arrays = [x for x in jtu.tree_leaves((self._dequantize_observed(model), batch)) if eqx.is_array(x)]
        follower = _ObservingFollower(self.observers, layer_indices)
        return self._follow(self._trace(model, batch), arrays, follower)

    def _follow(
        self, traced: tuple[Traced, list[Fact]], arrays: Sequence[Array], follower: AbstractFollower
    ) -> list[Array]:
        shapes = [observer.shape for observer in self.observers]
        return follow(traced[0].program, arrays, traced[1], shapes, follower)

    def _convert_to_jax(self, model: PyTree) -> PyTree:
        """Returns the model with observed NumPy arrays converted to JAX. Raises if one cannot be."""
        convert = lambda keys, x: as_jax_array(x) if keys in self.observer_indices and isinstance(x, np.ndarray) else x
        return jtu.tree_map_with_path(convert, model, is_leaf=self.is_leaf)

    def _dequantize_observed(self, model: PyTree) -> PyTree:
        dense = lambda x: x.dequantize() if isinstance(x, AbstractArrayValue) else x
        dequantize_observed = lambda keys, x: dense(x) if keys in self.observer_indices else x
        return jtu.tree_map_with_path(dequantize_observed, model, is_leaf=self.is_leaf)

    def _trace(self, model: PyTree, batch: PyTree) -> tuple[Traced, list[Fact]]:
        """Traces the function once for each set of shapes, and prepares the observers."""
        leaves, treedef = jtu.tree_flatten((model, batch))
        key = treedef, tuple(jax.typeof(x) if _is_shaped(x) else id(x) for x in leaves)
        if key not in self._traced:
            self._traced[key] = self._trace_uncached(model, batch)
        return self._traced[key]

    def _trace_uncached(self, model: PyTree, batch: PyTree) -> tuple[Traced, list[Fact]]:
        arguments = eqx.filter_eval_shape(lambda model, batch: (self._dequantize_observed(model), batch), model, batch)
        traced = trace(self.run, arguments)

        def fact(keys: KeyPath, x: jax.ShapeDtypeStruct) -> Fact:
            index = self.observer_indices.get(keys[1:])
            if keys[0] == jtu.SequenceKey(1):
                return Data
            return Parameter if index is None else view_weight(index, x.shape)

        facts = [fact(keys, x) for keys, x in traced.arrays]
        arrays = [x for _, x in traced.arrays]
        jax.eval_shape(lambda arrays: self._follow((traced, facts), arrays, _ProductFinder(self.observers)), arrays)
        return traced, facts
