"""Sums over the inputs of weights, taken while a model runs."""

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

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
from .._program.facts import AbstractFollower, Data, Fact, Parameter, SeenUse
from .._program.follow import follow
from .._program.products import Product
from .._program.trace import trace, Traced
from .._program.views import whole
from .._tree.leaves import Leaf
from .._types import PyTree
from ._calibrator import AbstractCalibrator
from ._observe import Moments, observe


Apply: TypeAlias = Callable[[PyTree, PyTree], PyTree]


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
                        reached = rows[~np.isnan(rows).any(axis=-1)]  # NaN in the inputs raises by their moments
                        self.waiting.setdefault(int(number), []).append(reached.ravel())
                if self.wanted is not None:
                    moments = self._compare(numbers, np.nan_to_num(values), moments)
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
            values = np.concatenate(rows)
            if self.calibrators is not None and values.size:  # an expert may have seen none of this batch
                self.calibrators[number] = self.calibrators[number].update(values)

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
    """Collects the statistics of the inputs of one weight.

    - `path`, `shape`: those of the weight.
    - `along`: the sums for each combination of axes that products contract; axes are negative.
    - `stacks`: for each of these, the axes whose entries see inputs of their own: the layers of a stack.
    - `gated`: whether only the layers in `active` are observed.
    - `looked_up`, `used`: whether rows of the weight were looked up, and whether it was used in another way.
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
        self.looked_up = self.used = False
        self.active: Sequence[int] = ()
        self.along: dict[tuple[int, ...], Sums] = {}
        self.stacks: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def axes(self) -> tuple[int, ...] | None:
        """The axes of the inputs, `None` without products. Of several, the last axis, else the first that is seen."""
        return next((axes for axes in ((-1,), (-2,)) if axes in self.along), next(iter(self.along), None))

    @property
    def stack(self) -> tuple[int, ...]:
        """The shape of the stack of layers that see inputs of their own."""
        return () if self.axes is None else self.stack_shape(self.axes)

    def stack_shape(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stack for products along some axes."""
        return tuple(self.shape[axis] for axis in self.stacks[axes])

    def find(self, product: Product) -> None:
        """Prepares sums for a product."""
        axes, stack = self.negative(product), product.stack(self.shape)
        before = self.stacks.get(axes, ())
        if axes not in self.along or len(stack) > len(before):
            self.stacks[axes] = stack
            self.along[axes] = Sums(math.prod(self.stack_shape(axes)), self.calibrator)

    def negative(self, product: Product) -> tuple[int, ...]:
        """Returns the axes that a product contracts, counted from the end."""
        return tuple(axis - len(self.shape) for axis in product.inputs.axes)

    def observe_next(self, layers: Sequence[int]) -> None:
        """Drops what was collected. Then only these layers are observed."""
        self.active = layers
        for sums in self.along.values():
            sums.total, sums.wanted = {}, None

    def compare(self, filling: bool) -> None:
        """Keeps the rows that come next, or compares those with the kept ones."""
        for sums in self.along.values():
            sums.filling = filling
            sums.wanted = {} if filling or sums.wanted is None else sums.wanted

    def numbers(self) -> dict[tuple[int, ...], Float32[Array, " layers"]]:
        """Returns the number of each layer, for each combination of axes; negative for layers that are not observed."""
        every = {axes: np.arange(sums.layers, dtype=np.float32) for axes, sums in self.along.items()}
        if self.gated:
            every = {axes: np.where(np.isin(n, self.active), n, -1) for axes, n in every.items()}
        return {axes: jnp.asarray(n, jnp.float32) for axes, n in every.items()}


class _Finder(AbstractFollower):
    """Prepares watches for the products of a program."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self.watches = watches

    def multiply(self, product: Product, use: SeenUse) -> Array:
        self.watches[product.view.weight].find(product)
        return product.x

    def use(self, use: SeenUse) -> None:
        watch = self.watches[use.weight]
        watch.looked_up |= use.kind == "lookup"
        watch.used |= use.kind != "lookup"


class _Observer(AbstractFollower):
    """Lets watches observe the inputs of products."""

    def __init__(self, watches: Sequence[Watch], numbers: Sequence[dict[tuple[int, ...], Array]]) -> None:
        self.watches, self.numbers = watches, numbers

    def multiply(self, product: Product, use: SeenUse) -> Array:
        x, watch = product.x, self.watches[product.view.weight]
        axes = watch.negative(product)
        layered = product.by_layer(watch.stacks[axes], watch.shape) if x.size else None
        if layered is None:
            watch.used |= x.size > 0
            return x
        rows, reached = layered.rows, layered.reached
        if jnp.iscomplexobj(rows):
            rows = jnp.concatenate([jnp.real(rows), jnp.imag(rows)], axis=-2)
            reached = None if reached is None else jnp.concatenate([reached, reached], axis=-1)
        rows = rows if jnp.issubdtype(rows.dtype, jnp.floating) else rows.astype(jnp.float32)
        number = self.numbers[product.view.weight][axes][layered.layer]
        params = {"threshold": watch.threshold, "gram": watch.gram, "keep": watch.keep, "gated": watch.gated}
        return observe(x, rows, number, reached, record=watch.along[axes], **params)

    def use(self, use: SeenUse) -> None:
        pass


class Observed:
    """Runs a function `(model, batch) -> outputs` as it is, and lets watches observe the inputs of weights.

    **Arguments:**

    - `run`: the function.
    - `pairs`: the leaves to watch, each with its `Watch`. Leaves that are the same array share a watch.
    - `is_leaf`: whether a node of the model may be one of these leaves.
    """

    def __init__(self, run: Apply, pairs: Iterable[tuple[Leaf, Watch]], is_leaf: Callable[[object], bool]) -> None:
        pairs = list(pairs)
        self.watches = list({id(watch): watch for _, watch in pairs}.values())
        self.numbers: dict[Hashable, int] = {leaf.keys: self.watches.index(watch) for leaf, watch in pairs}
        self.run, self.is_leaf = run, is_leaf
        self._traced: dict[Hashable, tuple[Traced, list[Fact]]] = {}
        self._call = eqx.filter_jit(self._observe)

    def __call__(self, model: PyTree, batch: PyTree) -> PyTree:
        """Returns the outputs; the watches have observed the inputs once these are ready."""
        model = self._on_jax(model)
        arrays, rest = eqx.partition((model, batch), eqx.is_array)
        traced, _ = self._trace(model, batch)
        return traced.outputs(self._call(arrays, rest, [watch.numbers() for watch in self.watches]))

    def program(self, model: PyTree, batch: PyTree) -> ClosedJaxpr:
        """Returns the program that observes."""
        arrays, rest = eqx.partition((model, batch), eqx.is_array)
        self._trace(model, batch)
        observe_arrays = lambda arrays, numbers: self._observe(arrays, rest, numbers)
        return jax.make_jaxpr(observe_arrays)(arrays, [watch.numbers() for watch in self.watches])

    def _observe(self, arrays: PyTree, rest: PyTree, numbers: Sequence[dict[tuple[int, ...], Array]]) -> list[Array]:
        model, batch = eqx.combine(arrays, rest)
        traced = self._trace(model, batch)
        return self._follow(traced, self._arrays(model, batch), _Observer(self.watches, numbers))

    def _follow(
        self, traced: tuple[Traced, list[Fact]], arrays: Sequence[Array], follower: AbstractFollower
    ) -> list[Array]:
        shapes = [watch.shape for watch in self.watches]
        return follow(traced[0].program, arrays, traced[1], shapes, follower)

    def _on_jax(self, model: PyTree) -> PyTree:
        """Returns the model with watched arrays of NumPy as arrays of JAX, which refuses some of them."""
        convert = lambda keys, x: as_jax_array(x) if keys in self.numbers and isinstance(x, np.ndarray) else x
        return jtu.tree_map_with_path(convert, model, is_leaf=self.is_leaf)

    def _dense(self, model: PyTree) -> PyTree:
        dense = lambda x: x.dequantize() if isinstance(x, AbstractArrayValue) else x
        watched = lambda keys, x: dense(x) if keys in self.numbers else x
        return jtu.tree_map_with_path(watched, model, is_leaf=self.is_leaf)

    def _arrays(self, model: PyTree, batch: PyTree) -> list[Array]:
        return [x for x in jtu.tree_leaves((self._dense(model), batch)) if eqx.is_array(x)]

    def _trace(self, model: PyTree, batch: PyTree) -> tuple[Traced, list[Fact]]:
        """Traces the function once for arguments of these shapes, and prepares the watches for its products."""
        leaves, treedef = jtu.tree_flatten((model, batch))
        key = treedef, tuple(jax.typeof(x) if eqx.is_array(x) else id(x) for x in leaves)
        if key not in self._traced:
            self._traced[key] = self._trace_anew(model, batch)
        return self._traced[key]

    def _trace_anew(self, model: PyTree, batch: PyTree) -> tuple[Traced, list[Fact]]:
        arguments = eqx.filter_eval_shape(lambda model, batch: (self._dense(model), batch), model, batch)
        traced = trace(self.run, arguments)

        def fact(keys: KeyPath, x: jax.ShapeDtypeStruct) -> Fact:
            number = self.numbers.get(keys[1:])
            if keys[0] == jtu.SequenceKey(1):
                return Data
            return Parameter if number is None else whole(number, x.shape)

        facts = [fact(keys, x) for keys, x in traced.arrays]
        arrays = [x for _, x in traced.arrays]
        jax.eval_shape(lambda arrays: self._follow((traced, facts), arrays, _Finder(self.watches)), arrays)
        return traced, facts
