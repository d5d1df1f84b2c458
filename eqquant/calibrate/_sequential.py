"""Quantizes a model layer by layer, each with statistics of the model whose earlier layers are quantized already."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, DTypeLike
from rich.progress import Progress

from .._array.array import is_quantized, QuantizedArray
from .._array.checks import as_method, check_dtype
from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._methods.inputs import InputsError, share_inputs
from .._numerics.axes import logical_order, memory_order
from .._tree.decide import decide, Decision, FormatRules
from .._tree.leaves import abbreviate_list, Leaf, named_leaves
from .._tree.missing import join_errors, warn_of_unused
from .._tree.quantize import quantize_leaf, with_activations
from .._tree.select import Where
from .._types import PyTree
from .._wrappers.activation import ActivationQuantizedArray, with_weight
from ._collect import default_apply, is_weight, observe_batches, stats_of, why_unseen
from ._dataflow import find_places, Place
from ._observers import Apply, Observed, Watch
from ._stats import LeafStats


# What is added to the diagonal of a Gram matrix, relative to its mean, before a correction is solved for.
_DAMPING = 0.01


class _Stage(NamedTuple):
    """Weights to quantize at once, by their numbers among the leaves; of stacked weights, one layer."""

    numbers: Sequence[int]
    layer: int | None = None


def quantize_sequentially(
    model: PyTree,
    batches: Iterable[PyTree],
    format: FormatRules = "nf4",
    method: AbstractMethod | None = None,
    *,
    apply: Apply | None = None,
    where: Where | None = None,
    dtype: DTypeLike | None = None,
    correction: float | int = 0.5,
    float_model: PyTree | None = None,
    after_each: Callable[[PyTree], object] | None = None,
    progress: bool = False,
    activations: AbstractFormat | str | Mapping | None = None,
) -> PyTree:
    r"""Quantizes the weights of a model in the order in which it uses them.

    [`eqquant.quantize_tree`][] with [`eqquant.GPTQ`][] uses the statistics of the float model. This function collects
    the statistics of each weight after it has quantized all weights before it. And each weight makes up for the errors
    of those before it: where the float model multiplies $W$ by $x$ and this one by $\hat x$, it quantizes a weight near
    the $W'$ for which $W' \hat x$ is nearest to $W x$. Weights that do not depend on each other, such as query, key and
    value of an attention layer, take one step together. Layers that a `scan` runs are quantized one after the other.
    Weights that are looked up, or added, come first, without statistics.

    In each step, the quantized model and the float model run once over the data, as one program, compiled once. Only
    the Gram matrices of one step, and its inputs in one batch, are in memory.

    !!! Example

        ```python
        q = eqq.quantize_sequentially(model, batches, "int4", eqq.GPTQ(), apply=apply)
        ```

    To continue after an interruption, save the model after each step, and call this again with what was saved: weights
    that are quantized stay as they are.

    **Arguments:**

    - `model`: an Equinox model, or any pytree of weights. Some may be quantized already.
    - `batches`: a list of batches, each any pytree of arrays. A single array counts as one batch.
    - `format`, `where`, `dtype`: as for [`eqquant.quantize_tree`][].
    - `method`: the method, without statistics; [`eqquant.GPTQ`][]`()` for instance. An [`eqquant.QuantConfig`][] sets
        the method of one rule.
    - `apply`: a function `(model, batch) -> outputs`, as for [`eqquant.calibrate.collect_stats`][].
    - `correction`: how much of the errors of weights before it a weight makes up for: from 0, for nothing, to 1. With
        little data, all of it fits that data too well.
    - `float_model`: the model that `model` was before some of its weights were quantized, which `correction` compares
        with. By default `model` itself.
    - `after_each`: called after each step with the model, as far as it is quantized.
    - `progress`: whether to show a progress bar.
    - `activations`: as for [`eqquant.quantize_tree`][]. Codes are found for inputs in float, also where some weights
        of `model` quantize theirs already.

    **Returns:**

    The quantized model, as [`eqquant.quantize_tree`][] returns it.

    **Raises:**

    What [`eqquant.quantize_tree`][] and [`eqquant.calibrate.collect_stats`][] raise. A weight that no product uses is
    quantized by the method without inputs, and a warning names it.
    """
    check_dtype(dtype)
    default = as_method(method)
    data = _as_data(batches)
    if not 0 <= correction <= 1:
        raise ValueError(f"`correction` must be between 0 and 1. Got {correction}.")
    model, again_quantizing = _taking_floats(model)
    state = _State(model, decide(model, format, where, None, activations), dtype)
    wanted = state.dense.copy() if float_model is None else _dense_like(_taking_floats(float_model)[0], model)
    observer = _Observer(state, wanted, default_apply if apply is None else apply, data, correction)
    state.decisions = [_along_inputs(d, observer.axes.get(n)) for n, d in enumerate(state.decisions)]
    methods = _prepare_methods(state, observer, default)
    lookups = [_Stage([n]) for n in state.owners if n not in observer.places]
    stages = lookups + _stages(observer.places, observer.watches)
    with Progress(disable=not progress) as bar:
        task = bar.add_task("Quantizing", total=len(stages))
        for stage in stages:
            bar.update(task, description=_show(stage, state.decisions))
            if stage.numbers[0] in observer.places:
                observer.observe(stage)
            for n in stage.numbers:
                watch = observer.watches[n]
                informed = _informed(methods[n], state.decisions[n].leaf, watch)
                state.quantize(n, stage.layer, informed, watch, correction)
            bar.advance(task)
            if after_each is not None and not state.unfinished:
                after_each(again_quantizing(state.finished()))
    return again_quantizing(state.finished())


def _as_data(batches: Iterable[PyTree]) -> list[PyTree]:
    if isinstance(batches, Mapping):
        raise TypeError("`batches` must be an iterable of batches. Got a dict. Pass a list of batches: `[batch]`.")
    data = [batches] if eqx.is_array(batches) else list(batches)
    if not data:
        raise ValueError("`batches` must hold data. Got no batch. A generator can be used only once: make a new one.")
    return data


def _taking_floats(model: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns a model whose products quantize no operand, and a function that makes them do so again."""
    quantizing = lambda x: isinstance(x, ActivationQuantizedArray)
    nodes, treedef = jtu.tree_flatten(model, is_leaf=quantizing)
    around = lambda node, array: with_weight(node, array) if quantizing(node) else array

    def again(model: PyTree) -> PyTree:
        return jtu.tree_unflatten(treedef, map(around, nodes, treedef.flatten_up_to(model)))

    return jtu.tree_unflatten(treedef, [x.array if quantizing(x) else x for x in nodes]), again


class _State:
    """A model as its leaves: quantized so far, and as dense arrays of the same values, for which one program serves.

    - `first`: for each leaf to quantize, the number of the first leaf that is the same array; `owners` are those.
    - `unfinished`: the layers that are quantized of stacks of which some are not.
    """

    def __init__(self, model: PyTree, decisions: Sequence[Decision], dtype: DTypeLike | None) -> None:
        self.decisions, self.dtype = decisions, dtype
        self.treedef = jtu.tree_structure(model, is_leaf=is_quantized)
        self.leaves = [d.leaf.value for d in decisions]
        self.dense = [x.dequantize() if is_quantized(x) else x for x in self.leaves]
        by_array: dict[int, int] = {}
        self.first = {n: by_array.setdefault(id(x), n) for n, x in enumerate(self.leaves) if decisions[n].format}
        self.owners = sorted(set(self.first.values()))
        self.unfinished: dict[int, list[QuantizedArray]] = {}

    def finished(self) -> PyTree:
        """Returns the model as far as it is quantized."""
        done = [with_activations(d, x) for d, x in zip(self.decisions, self.leaves, strict=True)]
        return jtu.tree_unflatten(self.treedef, done)

    def quantize(
        self, n: int, layer: int | None, method: AbstractMethod, watch: Watch, correction: float | int
    ) -> None:
        decision = self.decisions[n]
        stack, sums = decision.leaf.value, _sums(watch)
        x = stack
        if layer is not None:
            x, method = stack[layer], _for_layer(method, layer)
            sums = {name: value[layer] for name, value in sums.items()}
        leaf = dataclasses.replace(decision.leaf, value=_corrected(x, decision.axes, sums, correction))
        q = quantize_leaf(decision._replace(leaf=leaf), method, self.dtype)
        if layer is not None:
            done = self.unfinished.setdefault(n, [])
            done.append(q)
            self.dense[n] = jnp.asarray(self.dense[n]).at[layer].set(q.dequantize().astype(x.dtype))
            if len(done) < len(stack):
                return
            q = jax.tree.map(lambda *layers: jnp.stack(layers), *self.unfinished.pop(n))
        self.dense[n] = q.dequantize().astype(x.dtype)
        for other, owner in self.first.items():
            if owner == n:
                self.leaves[other], self.dense[other] = q, self.dense[n]


class _Observer:
    """Runs the float model and the model quantized so far, and observes the inputs of weights to quantize.

    - `wanted`: the leaves of the float model.
    - `watches`: the `Watch` of each owner.
    - `places`: the place of each observed weight in the traced program; `axes`: the axis of its inputs.
    """

    def __init__(
        self, state: _State, wanted: list[PyTree], run: Apply, data: list[PyTree], correction: float | int
    ) -> None:
        self.state, self.wanted, self.data, self.correction = state, wanted, data, correction
        leaves = {n: state.decisions[n].leaf for n in state.owners}
        self.watches = {
            n: Watch(leaf.path, tuple(leaf.value.shape), 1.0, True, gated=True) for n, leaf in leaves.items()
        }
        self.pairs = [(leaf, self.watches[n]) for n, leaf in leaves.items()]
        shared = [(state.decisions[n].leaf, self.watches[owner]) for n, owner in state.first.items()]
        self.observed = Observed(run, shared, is_weight)
        found = find_places(self.observed.program(self._model(wanted), data[0]))
        self.places: dict[int, Place] = {}
        self.axes: dict[int, tuple[int, ...]] = {}
        for n, watch in self:
            if places := {axes: found[sums] for axes, sums in watch.along.items() if sums in found}:
                self.places[n] = min(places.values(), key=lambda place: place.level)
                self.axes[n] = watch.axes if watch.axes in places else next(iter(places))

    def __iter__(self) -> Iterator[tuple[int, Watch]]:
        return iter(self.watches.items())

    def _model(self, values: list[PyTree]) -> PyTree:
        return jtu.tree_unflatten(self.state.treedef, values)

    def observe(self, stage: _Stage) -> None:
        """Collects the statistics of the inputs of the weights of one stage, and compares them with the wanted ones."""
        for n, watch in self:
            every = range(math.prod(watch.stack))
            watch.observe_next(() if n not in stage.numbers else every if stage.layer is None else (stage.layer,))
        compared = [self.watches[n] for n in stage.numbers if self.correction and self.places[n].uses == 1]
        for count, batch in enumerate(self.data):
            for values, filling in ((self.wanted, True), (self.state.dense, False)):
                for watch in compared:
                    watch.compare(filling)
                if compared or not filling:
                    observe_batches(self.observed, self._model(values), [batch], self.pairs, count)


def _dense_like(float_model: PyTree, model: PyTree) -> list[PyTree]:
    """Returns the leaves of the model before it was quantized. Raises if it is another."""
    leaves, before = list(named_leaves(model)), list(named_leaves(float_model))
    shapes = lambda leaves: {leaf.path: getattr(leaf.value, "shape", None) for leaf in leaves}
    if shapes(leaves) != shapes(before):
        different = [path for path, shape in shapes(leaves).items() if shapes(before).get(path) != shape]
        raise ValueError(
            "`float_model` must be the model before it was quantized. Got one that differs at "
            f"{abbreviate_list(different or ['other leaves'])}."
        )
    return [leaf.value.dequantize() if is_quantized(leaf.value) else leaf.value for leaf in before]


def _sums(watch: Watch) -> dict[str, np.ndarray]:
    """Returns the Gram matrices, and the products of the wanted inputs with those that came, if these were compared."""
    total = next((sums.total for sums in watch.along.values() if "cross" in sums.total), {})
    rows = np.maximum(total["rows"], 1)[:, None, None] if total else None
    return {
        name: (total[name] / rows).reshape(*watch.stack, *total[name].shape[1:]) for name in ("gram", "cross") if total
    }


def _corrected(x: Array, axes: tuple[int, ...], sums: Mapping[str, np.ndarray], correction: float | int) -> Array:
    """Returns a weight whose products with the inputs that came are near those of `x` with the wanted ones."""
    if not sums:
        return x
    rows = memory_order(jnp.asarray(x), axes)
    rows = _correct(rows, *(jnp.asarray(sums[name], jnp.float32) for name in ("gram", "cross")), correction)
    return logical_order(rows, axes, tuple(x.shape[a] for a in axes)).astype(x.dtype)


@jax.jit
def _correct(rows: Array, gram: Array, cross: Array, correction: float | Array) -> Array:
    if gram.ndim > 2:
        return jax.vmap(_correct, in_axes=(0, 0, 0, None))(rows, gram, cross, correction)
    mean = jnp.mean(jnp.diagonal(gram))
    scale = jnp.where(mean > 0, mean, 1)
    damped = gram / scale + _DAMPING * jnp.eye(len(gram))
    change = jax.scipy.linalg.solve(damped, (cross - gram).T / scale, assume_a="pos").T
    return rows.astype(jnp.float32) @ (jnp.eye(len(gram)) + correction * change)


def _stages(places: Mapping[int, Place], watches: Mapping[int, Watch]) -> list[_Stage]:
    """Returns the steps in order: one for each level, and in a loop over layers one for each level of each layer."""
    # The layers of a loop stand together, where the first of its products stands.
    loops = {n: place.loop if len(watches[n].stack) == 1 else None for n, place in places.items()}
    starts = {loop: min(places[n].level for n in places if loops[n] == loop) for loop in loops.values()}
    by_start: dict[tuple[int, int | None, int], list[int]] = {}
    for n, place in places.items():
        loop = loops[n]
        key = (place.level, None, 0) if loop is None else (starts[loop], loop, watches[n].stack[0])
        by_start.setdefault(key, []).append(n)
    stages = []
    for (_, loop, layers), numbers in sorted(by_start.items(), key=lambda item: (item[0][0], item[1])):
        if loop is None:
            stages.append(_Stage(numbers))
            continue
        levels = sorted({places[n].level for n in numbers})
        for layer in range(layers):
            stages.extend(_Stage([n for n in numbers if places[n].level == level], layer) for level in levels)
    return stages


def _along_inputs(decision: Decision, axes: tuple[int, ...] | None) -> Decision:
    """Returns the decision with blocks along the axes of the inputs that products were seen to contract."""
    return decision if axes is None or decision.has_given_axis else decision._replace(axes=axes)


def _prepare_methods(state: _State, observer: _Observer, default: AbstractMethod) -> dict[int, AbstractMethod]:
    """Returns the methods of leaves without the statistics that are still to come.

    A leaf that no product uses gets its method without inputs, and a warning says so. Raises one error for all leaves
    whose statistics are missing.
    """
    methods: dict[int, AbstractMethod] = {}
    errors: dict[str, InputsError] = {}
    unused: dict[str, str] = {}
    for n, watch in observer:
        method, path = state.decisions[n].method or default, state.decisions[n].leaf.path
        if not _takes_inputs(method):
            try:
                methods[n] = method.for_leaf(path)
            except InputsError as e:
                errors[path] = e
        elif n in observer.places:
            methods[n] = method
        else:
            methods[n] = method.without_inputs()
            if watch.used or not watch.looked_up:
                unused[path] = why_unseen(watch)
    quantized = [state.decisions[n].leaf.path for n in state.owners]
    if errors:
        raise join_errors(errors, quantized)
    warn_of_unused(unused, quantized, stacklevel=3)
    return methods


def _takes_inputs(method: AbstractMethod) -> bool:
    return any(field.name == "inputs" for field in dataclasses.fields(method)) and method.inputs is None


def _informed(method: AbstractMethod, leaf: Leaf, watch: Watch) -> AbstractMethod:
    if not _takes_inputs(method) or not watch.active:
        return method
    return dataclasses.replace(method, inputs=share_inputs(stats_of(leaf, watch)))  # pyright: ignore[reportCallIssue]


def _for_layer(method: AbstractMethod, layer: int) -> AbstractMethod:
    """Returns a method with the statistics of one layer of a stack."""
    stats = method.inputs
    if not isinstance(stats, LeafStats):
        return method
    names = ("rows", "min", "max", "mean", "mean_abs", "second_moment", "gram")
    arrays = {name: np.asarray(value[layer]) for name in names if (value := getattr(stats, name)) is not None}
    stats = dataclasses.replace(stats, shape=stats.shape[1:], **arrays)
    return dataclasses.replace(method, inputs=stats)  # pyright: ignore[reportCallIssue]


def _show(stage: _Stage, decisions: Sequence[Decision]) -> str:
    first, last = decisions[stage.numbers[0]].leaf.path, decisions[stage.numbers[-1]].leaf.path
    layer = "" if stage.layer is None else f", layer {stage.layer}"
    return (first if first == last else f"{first} to {last}") + layer
