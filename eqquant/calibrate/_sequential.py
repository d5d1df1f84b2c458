"""Quantizes a model layer by layer, with statistics after quantizing the layers before."""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, DTypeLike

from .._array.array import is_quantized, QuantizedArray
from .._array.checks import check_dtype
from .._methods import AbstractMethod
from .._methods.names import as_method
from .._methods.statistics import LeafStats, PER_LAYER, share_inputs
from .._numerics.axes import logical_order, memory_order
from .._program.cut import PartCompiler
from .._tree.batches import Apply, as_apply, list_batches
from .._tree.config import ActivationsLike
from .._tree.decide import decide, Decision, FormatRules
from .._tree.kept import Kept
from .._tree.leaves import abbreviate_list, Leaf, named_leaves
from .._tree.missing import InputsErrors, warn_of_unused
from .._tree.progress import show_progress
from .._tree.quantize import add_activations, quantize_leaf
from .._tree.select import Where
from .._types import Model, PyTree
from .._wrappers.activation import ActivationQuantizedArray
from .._wrappers.base import with_array
from ._collect import check_batch, check_observed, check_outputs, explain_unseen, is_weight, make_stats, multiply_mapped
from ._dataflow import find_places, Place
from ._observers import ObservedFunction, WeightObserver
from ._walk import StagedProgram, Values, Weight, WeightStage


# The damping of a Gram matrix, relative to the mean of its diagonal.
_DAMPING = 0.01


def quantize_sequentially(
    model: Model,
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
    activations: ActivationsLike | None = None,
    keep_dtype: DTypeLike | None = None,
    keep_in: str | Path | None = None,
) -> Model:
    r"""Quantizes the weights of a model in the order in which it uses them.

    [`eqquant.quantize_tree`][] with [`eqquant.GPTQ`][] uses the statistics of the float model. This function collects
    the statistics of each weight after it has quantized all weights before it. Each weight also compensates for the
    errors before it: where the float model multiplies $W$ by $x$ and this one by $\hat x$, it quantizes a weight near
    the $W'$ for which $W' \hat x$ is nearest to $W x$. Weights that do not depend on each other, such as query, key and
    value of an attention layer, take one step together. Layers that a `scan` runs are quantized one after the other.
    Weights that are looked up, or added, are quantized first, without statistics.

    The quantized model and the float model run once, side by side: each step goes on from the step before, up to its
    own weights, and nothing after the last weight runs. Layers of equal shape share a compiled program. Memory holds
    the Gram matrices of one step (weights with the same input share one) and, for each batch, what the next step needs
    of both models: about the inputs of a layer.

    !!! Example

        ```python
        q = eqq.quantize_sequentially(model, batches, "int4", eqq.GPTQ(), apply=apply)
        ```

    To continue after an interruption, save the model after each step, and call this again with the saved model:
    quantized weights are left alone.

    **Arguments:**

    - `model`: an Equinox model, or any pytree of weights. Some may be quantized already.
    - `batches`: a list of batches, each any pytree of arrays. A single array counts as one batch.
    - `format`, `where`, `dtype`: as for [`eqquant.quantize_tree`][].
    - `method`: the method, without statistics; [`eqquant.GPTQ`][]`()` for instance. An [`eqquant.QuantConfig`][] sets
        the method of one rule.
    - `apply`: a function `(model, batch) -> outputs`, as for [`eqquant.calibrate.collect_stats`][].
    - `correction`: how much a weight compensates for errors before it, from 0 to 1. With little data, 1 overfits.
    - `float_model`: the float model, as the reference for `correction` if some weights of `model` are quantized
        already. By default `model` itself.
    - `after_each`: a function that is called with the model after each step.
    - `progress`: whether to show a progress bar.
    - `activations`: as for [`eqquant.quantize_tree`][]. Codes are chosen for inputs in float, even if some weights of
        `model` quantize their inputs already.
    - `keep_dtype`: the dtype of floats that are kept for the next step, such as `"bfloat16"`. By default their own.
    - `keep_in`: a folder for files that hold them, and that are deleted in the end. By default they stay in memory.

    **Returns:**

    The quantized model, as [`eqquant.quantize_tree`][] returns it.

    **Raises:**

    The errors of [`eqquant.quantize_tree`][] and [`eqquant.calibrate.collect_stats`][], and `ValueError` if
    `keep_dtype` is not a floating-point dtype, or `keep_in` not a folder. A weight that no product
    uses is quantized by the method without inputs, and a warning names it.
    """
    check_dtype(dtype)
    default = as_method(method)
    data, kept = list_batches(batches), Kept(keep_dtype, keep_in)
    if not 0 <= correction <= 1:
        raise ValueError(f"`correction` must be between 0 and 1. Got {correction}.")
    model, rewrap = _unwrap_activations(model)
    state = _State(model, decide(model, format, where, None, activations), dtype)
    reference_leaves = (
        state.leaves.copy() if float_model is None else _find_leaves(_unwrap_activations(float_model)[0], model)
    )
    runner = _StageRunner(state, reference_leaves, multiply_mapped(as_apply(apply), model), data, correction)
    state.decisions = [_use_observed_axes(d, runner.axes.get(n)) for n, d in enumerate(state.decisions)]
    methods = _prepare_methods(state, runner, default)
    lookups = [WeightStage([n]) for n in state.owners if n not in runner.places]
    observed = _order_stages(runner.places, runner.observers)
    runner.cut(observed, kept)
    with show_progress("Quantizing", sum(len(stage.indices) for stage in lookups + observed), progress) as advance:
        for stage in lookups + observed:
            advance(0, _describe_stage(stage, state.decisions))
            if stage.indices[0] in runner.places:
                runner.observe(stage)
            for n in stage.indices:
                leaf, observer, own = state.select(n, stage.layer), runner.observers[n], methods[n]
                if own.lacks_inputs() and observer.active:
                    own = own.with_inputs(share_inputs(make_stats(leaf, observer)))
                elif stage.layer is not None:
                    own = _select_layer(own, stage.layer)
                value = _correct_weight(leaf.value, state.decisions[n].axes, _compute_means(observer), correction)
                state.quantize(n, stage.layer, dataclasses.replace(leaf, value=value), own)
                advance()
            if after_each is not None and not state.unfinished:
                after_each(rewrap(state.build_model()))
    return rewrap(state.build_model())


def _unwrap_activations(model: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns a model without wrappers for activations, and a function that adds them again."""
    is_wrapped = lambda x: isinstance(x, ActivationQuantizedArray)
    nodes, treedef = jtu.tree_flatten(model, is_leaf=is_wrapped)
    wrap = lambda node, array: with_array(node, array) if is_wrapped(node) else array

    def rewrap_model(model: PyTree) -> PyTree:
        return jtu.tree_unflatten(treedef, map(wrap, nodes, treedef.flatten_up_to(model)))

    return jtu.tree_unflatten(treedef, [x.array if is_wrapped(x) else x for x in nodes]), rewrap_model


class _State:
    """The leaves of a model, quantized so far.

    - `first`: for each leaf to quantize, the index of the first leaf that is the same array, its owner.
    - `owners`: the indices of all owners.
    - `unfinished`: for each incomplete stack, its quantized layers, and the dense stack with their values.
    """

    def __init__(self, model: PyTree, decisions: Sequence[Decision], dtype: DTypeLike | None) -> None:
        self.decisions, self.dtype = decisions, dtype
        self.treedef = jtu.tree_structure(model, is_leaf=is_quantized)
        self.leaves = [d.leaf.value for d in decisions]
        by_array: dict[int, int] = {}
        self.first = {n: by_array.setdefault(id(x), n) for n, x in enumerate(self.leaves) if decisions[n].format}
        self.owners = sorted(set(self.first.values()))
        self.unfinished: dict[int, tuple[list[QuantizedArray], Array]] = {}

    def build_model(self) -> PyTree:
        """Returns the model, quantized so far."""
        leaves = [add_activations(d, x) for d, x in zip(self.decisions, self.leaves, strict=True)]
        return jtu.tree_unflatten(self.treedef, leaves)

    def read(self, n: int) -> Array:
        """Returns a leaf as a dense array of the dtype that it had."""
        owner = self.first.get(n, n)
        return self.unfinished[owner][1] if owner in self.unfinished else self.dequantize(n, self.leaves[n])

    def dequantize(self, n: int, x: Array | QuantizedArray) -> Array:
        """Returns a value of leaf `n` as a dense array of the dtype that the leaf had."""
        dense, dtype = x.dequantize() if isinstance(x, QuantizedArray) else x, self.decisions[n].leaf.value.dtype
        return dense if dense.dtype == dtype else dense.astype(dtype)

    def select(self, n: int, layer: int | None) -> Leaf:
        """Returns a leaf to quantize, or one layer of a stack."""
        leaf = self.decisions[n].leaf
        return leaf if layer is None else dataclasses.replace(leaf, value=leaf.value[layer])

    def quantize(self, n: int, layer: int | None, leaf: Leaf, method: AbstractMethod) -> None:
        """Quantizes leaf `n`, or one layer of it, with the corrected value in `leaf`."""
        q, stack = quantize_leaf(self.decisions[n]._replace(leaf=leaf), method, self.dtype), self.leaves[n]
        if layer is not None:
            layers, dense = self.unfinished.pop(n, ([], jnp.array(stack)))
            layers.append(q)
            if len(layers) < len(stack):
                self.unfinished[n] = layers, _set_layer(dense, layer, q.dequantize())
                return
            q = jax.tree.map(lambda *layers: jnp.stack(layers), *layers)
        for other, owner in self.first.items():
            if owner == n:
                self.leaves[other] = q


@ft.partial(jax.jit, donate_argnums=0)
def _set_layer(stack: Array, layer: int | Array, value: Array) -> Array:
    return stack.at[layer].set(value.astype(stack.dtype))


class _StageRunner:
    """Runs the float model and the quantized one side by side, and observes inputs.

    - `reference_leaves`: the leaves of the float model.
    - `observers`: the `WeightObserver` of each owner.
    - `places`: the place of each observed weight in the traced program; `axes`: the axis of its inputs.
    - `compared`: the weights whose inputs are compared with those in the float model.
    """

    def __init__(
        self, state: _State, reference_leaves: list[PyTree], run: Apply, data: list[PyTree], correction: float | int
    ) -> None:
        self.state, self.reference_leaves, self.data = state, reference_leaves, data
        leaves = {n: state.decisions[n].leaf for n in state.owners}
        self.observers = {
            n: WeightObserver(leaf.path, tuple(leaf.value.shape), 1.0, True, gated=True) for n, leaf in leaves.items()
        }
        shared = [(state.decisions[n].leaf, self.observers[owner]) for n, owner in state.first.items()]
        self.observed = ObservedFunction(run, shared, is_weight)
        for count, batch in enumerate(data):
            check_batch(batch, count)
        self.program = self._trace(data[0])
        found = find_places(self.program)
        self.places: dict[int, Place] = {}
        self.axes: dict[int, tuple[int, ...]] = {}
        for n, observer in self.observers.items():
            if places := {axes: found[sums] for axes, sums in observer.by_axes.items() if sums in found}:
                self.places[n] = min(places.values(), key=lambda place: place.level)
                self.axes[n] = observer.axes if observer.axes in places else next(iter(places))
        once = {n for n, place in self.places.items() if place.uses == 1}
        self.compared = once if correction else set()
        leaves_of = lambda owner: [n for n, first in state.first.items() if first == owner]
        self.weights = {n: Weight(observer, leaves_of(n), n in once) for n, observer in self.observers.items()}

    def _trace(self, batch: PyTree) -> ClosedJaxpr:
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_array(x) else x
        program = self.observed.program(jtu.tree_unflatten(self.state.treedef, map(shape, self.state.leaves)), batch)
        check_outputs(program.jaxpr.outvars)
        return program

    def cut(self, stages: Sequence[WeightStage], kept: Kept) -> None:
        """Cuts the program of each batch into one part for each stage."""
        self.stages, self.kept, self.position = stages, kept, 0
        arrays = [n for n, x in enumerate(self.state.leaves) if _is_array(x)]
        programs: dict[Hashable, StagedProgram] = {}
        compile_part = PartCompiler()
        self.programs: list[StagedProgram] = []
        for batch in self.data:
            leaves, treedef = jtu.tree_flatten(batch)
            key = treedef, tuple(jax.typeof(x) if eqx.is_array(x) else id(x) for x in leaves)
            if key not in programs:
                program, count = self._trace(batch) if programs else self.program, sum(map(eqx.is_array, leaves))
                programs[key] = StagedProgram(program, arrays, count, self.weights, stages, compile_part)
            self.programs.append(programs[key])

    def observe(self, stage: WeightStage) -> None:
        """Collects the statistics of the weights of one stage, compared with the float model."""
        for n, observer in self.observers.items():
            observer.select(n in stage.indices, stage.layer)
        last, compared = self.stages.index(stage), self.compared.intersection(stage.indices)
        pairs = [(self.state.decisions[n].leaf, self.observers[n]) for n in stage.indices]
        read_reference = ft.cache(lambda n: self.state.dequantize(n, self.reference_leaves[n]))
        read_leaf = {True: read_reference, False: ft.cache(self.state.read)}
        for count, (batch, program) in enumerate(zip(self.data, self.programs, strict=True)):
            arrays = list(filter(eqx.is_array, jtu.tree_leaves(batch)))
            for is_reference in (True, False) if self.compared else (False,):
                for n in compared:
                    self.observers[n].compare(is_reference)
                values = self.kept[count, is_reference] if self.position else {}
                for number in range(self.position, last + 1):
                    observed = () if number < last else compared if is_reference else stage.indices
                    values = program.run(number, Values(read_leaf[is_reference], arrays, observed), values)
                self.kept[count, is_reference] = values
            check_observed(pairs, count)
        self.position = 0 if any(program.stale[last] for program in self.programs) else last + 1


def _is_array(x: object) -> bool:
    return eqx.is_array(x) or is_quantized(x)


def _find_leaves(float_model: PyTree, model: PyTree) -> list[PyTree]:
    """Returns the leaves of the float model. Raises if its structure differs."""
    leaves, before = list(named_leaves(model)), list(named_leaves(float_model))
    shapes = lambda leaves: {leaf.path: getattr(leaf.value, "shape", None) for leaf in leaves}
    if shapes(leaves) != shapes(before):
        different = [path for path, shape in shapes(leaves).items() if shapes(before).get(path) != shape]
        raise ValueError(
            "`float_model` must be the model before it was quantized. Got one that differs at "
            f"{abbreviate_list(different or ['other leaves'])}."
        )
    return [leaf.value for leaf in before]


def _compute_means(observer: WeightObserver) -> dict[str, np.ndarray]:
    """Returns mean $x x^T$ of the inputs, and of reference inputs with inputs, if compared."""
    found = next(((axes, sums.total) for axes, sums in observer.by_axes.items() if "cross" in sums.total), None)
    if found is None:
        return {}
    stack, total = observer.observed_stack(found[0]), found[1]
    rows = np.maximum(total["rows"], 1)[:, None, None]
    return {name: (total[name] / rows).reshape(*stack, *total[name].shape[1:]) for name in ("gram", "cross")}


def _correct_weight(x: Array, axes: tuple[int, ...], means: Mapping[str, np.ndarray], correction: float | int) -> Array:
    """Returns `x` changed so that its products come near the products of the float model."""
    if not means:
        return x
    rows = memory_order(jnp.asarray(x), axes)
    rows = _solve_correction(rows, *(jnp.asarray(means[name], jnp.float32) for name in ("gram", "cross")), correction)
    return logical_order(rows, axes, tuple(x.shape[a] for a in axes)).astype(x.dtype)


@jax.jit
def _solve_correction(rows: Array, gram: Array, cross: Array, correction: float | Array) -> Array:
    if gram.ndim > 2:
        return jax.vmap(_solve_correction, in_axes=(0, 0, 0, None))(rows, gram, cross, correction)
    mean = jnp.mean(jnp.diagonal(gram))
    scale = jnp.where(mean > 0, mean, 1)
    damped = gram / scale + _DAMPING * jnp.eye(len(gram))
    change = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(damped), (cross - gram).T / scale).T
    return rows.astype(jnp.float32) @ (jnp.eye(len(gram)) + correction * change)


def _order_stages(places: Mapping[int, Place], observers: Mapping[int, WeightObserver]) -> list[WeightStage]:
    """Returns the stages in order: one per level, and in a loop one per level of each layer."""
    # All layers of a loop are quantized at the level of the first product in it.
    loops = {n: place.loop if len(observers[n].stack) == 1 else None for n, place in places.items()}
    starts = {loop: min(places[n].level for n in places if loops[n] == loop) for loop in loops.values()}
    by_start: dict[tuple[int, int | None, int], list[int]] = {}
    for n, place in places.items():
        loop = loops[n]
        key = (place.level, None, 0) if loop is None else (starts[loop], loop, observers[n].stack[0])
        by_start.setdefault(key, []).append(n)
    stages = []
    for (_, loop, layers), indices in sorted(by_start.items(), key=lambda item: (item[0][0], item[1])):
        if loop is None:
            stages.append(WeightStage(indices))
            continue
        levels = sorted({places[n].level for n in indices})
        for layer in range(layers):
            stages.extend(WeightStage([n for n in indices if places[n].level == level], layer) for level in levels)
    return stages


def _use_observed_axes(decision: Decision, axes: tuple[int, ...] | None) -> Decision:
    """Returns the decision with blocks along the contracted axes of observed products."""
    return decision if axes is None or decision.has_explicit_axis else decision._replace(axes=axes)


def _prepare_methods(state: _State, runner: _StageRunner, default: AbstractMethod) -> dict[int, AbstractMethod]:
    """Returns the method of each leaf, before its statistics are collected.

    A leaf that no product uses gets its method without inputs, with a warning. Raises one error for all leaves whose
    statistics are missing.
    """
    methods: dict[int, AbstractMethod] = {}
    unused: dict[str, str] = {}
    errors = InputsErrors()
    for n, observer in runner.observers.items():
        method, path = state.decisions[n].method or default, state.decisions[n].leaf.path
        if not method.lacks_inputs():
            with errors.collect(path):
                methods[n] = method.for_leaf(path)
        elif n in runner.places:
            methods[n] = method
        else:
            methods[n] = method.without_inputs()
            if observer.used or not observer.looked_up:
                unused[path] = explain_unseen(observer)
    quantized = [state.decisions[n].leaf.path for n in state.owners]
    errors.check(quantized)
    warn_of_unused(unused, quantized, stacklevel=3)
    return methods


def _select_layer(method: AbstractMethod, layer: int) -> AbstractMethod:
    """Returns a method with the statistics of one layer of a stack."""
    stats = method.inputs
    if not isinstance(stats, LeafStats):
        return method
    arrays = {name: np.asarray(value[layer]) for name in PER_LAYER if (value := getattr(stats, name)) is not None}
    return method.with_inputs(dataclasses.replace(stats, shape=stats.shape[1:], **arrays))


def _describe_stage(stage: WeightStage, decisions: Sequence[Decision]) -> str:
    first, last = decisions[stage.indices[0]].leaf.path, decisions[stage.indices[-1]].leaf.path
    layer = "" if stage.layer is None else f", layer {stage.layer}"
    return (first if first == last else f"{first} to {last}") + layer
