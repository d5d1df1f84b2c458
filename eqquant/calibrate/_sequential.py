"""Quantizes a model layer by layer, each with statistics of the model whose earlier layers are quantized already."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, DTypeLike
from rich.progress import Progress

from .._array.activation import ActivationQuantizedArray
from .._array.array import is_quantized
from .._array.axes import logical_order, memory_order
from .._array.quantize import as_method, check_dtype
from .._methods import AbstractMethod
from .._tree.decide import decide, Decision, FormatRules
from .._tree.leaves import abbreviate_list, Leaf, named_leaves
from .._tree.quantize import quantize_leaf, with_activations
from .._tree.select import Where
from .._types import PyTree
from ._dataflow import Place, places_of
from ._observers import Watch
from ._stats import default_apply, LeafStats, observe_batches, stats_of, watch_leaves, weight_ndim


# What is added to the diagonal of a Gram matrix, relative to its mean, before a correction is solved for.
_DAMPING = 0.01


class _Step(NamedTuple):
    """Weights to quantize at once, by their numbers among the leaves; of stacked weights, one layer."""

    numbers: Sequence[int]
    layer: int | None = None


def quantize_sequentially(
    model: PyTree,
    batches: Iterable[PyTree],
    format: FormatRules = "nf4",
    method: AbstractMethod | None = None,
    *,
    apply: Callable[[Any, Any], Any] | None = None,
    where: Where | None = None,
    dtype: DTypeLike | None = None,
    correction: float | int = 0.5,
    float_model: PyTree | None = None,
    after_each: Callable[[PyTree], Any] | None = None,
    progress: bool = False,
    activations: Any = None,
) -> PyTree:
    r"""Quantizes the weights of a model in the order in which it uses them.

    [`eqquant.quantize_tree`][] with [`eqquant.GPTQ`][] uses the statistics of the float model. This function collects
    the statistics of each weight after it has quantized all weights before it. And each weight makes up for the errors
    of those before it: where the float model multiplies $W$ by $x$ and this one by $\hat x$, it quantizes a weight near
    the $W'$ for which $W' \hat x$ is nearest to $W x$. Weights that do not depend on each other, such as query, key and
    value of an attention layer, take one step together. Layers that a `scan` runs are quantized one after the other.
    Weights that are looked up come first.

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
    - `method`: the method, without statistics; [`eqquant.GPTQ`][]`()` for instance. An [`eqquant.Use`][] sets the
        method of one rule.
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

    What [`eqquant.quantize_tree`][] and [`eqquant.calibrate.collect_stats`][] raise. `ValueError` if the method needs
    the inputs of a weight that no product used; the message names it, and nothing is quantized.
    """
    check_dtype(dtype)
    default = as_method(method)
    if isinstance(batches, Mapping):
        raise TypeError("`batches` must be an iterable of batches. Got a dict. Pass a list of batches: `[batch]`.")
    data = [batches] if eqx.is_array(batches) else list(batches)
    if not data:
        raise ValueError("`batches` must hold data. Got no batch. A generator can be used only once: make a new one.")
    if not 0 <= correction <= 1:
        raise ValueError(f"`correction` must be between 0 and 1. Got {correction}.")
    model, again_quantizing = _taking_floats(model)
    decisions = decide(model, format, where, None, activations)
    treedef = jtu.tree_structure(model, is_leaf=is_quantized)
    state = _State(decisions, dtype)
    run = eqx.filter_jit(default_apply if apply is None else apply)
    model_of = lambda values: jtu.tree_unflatten(treedef, values)

    def finished() -> PyTree:
        done = [with_activations(d, x) for d, x in zip(decisions, state.leaves, strict=True)]
        return again_quantizing(model_of(done))

    watches = {n: Watch(decisions[n].leaf.path, _stack(decisions[n]), 1.0, True, gated=True) for n in state.owners}
    by_path = {decisions[n].leaf.path: watches[n] for n in state.owners}
    wanted = state.dense.copy() if float_model is None else _dense_like(_taking_floats(float_model)[0], model)

    def watched(values: list[Any]) -> PyTree:
        leaves = [dataclasses.replace(decisions[n].leaf, value=values[n]) for n in state.first]
        return watch_leaves(model_of(values), leaves, lambda leaf, _: by_path[leaf.path])[0]

    places = _places(run, watched(wanted), data[0], watches)
    methods = {n: _prepared(decisions[n], default, watches[n], n in places) for n in state.owners}
    steps = [_Step([n]) for n in state.owners if n not in places] + _steps(places, watches)
    pairs = {n: (decisions[n].leaf, watches[n]) for n in state.owners}

    def observe(step: _Step) -> None:
        for n, watch in watches.items():
            every = range(math.prod(watch.stack))
            watch.observe_next(() if n not in step.numbers else every if step.layer is None else (step.layer,))
        compared = [watches[n] for n in step.numbers if correction and places[n].uses == 1]
        now, before = watched(state.dense), watched(wanted)
        for count, batch in enumerate(data):
            for watch in compared:
                watch.compare(filling=True)
            if compared:
                observe_batches(run, model_of(wanted), before, [batch], list(pairs.values()), count)
            for watch in compared:
                watch.compare(filling=False)
            observe_batches(run, model_of(state.dense), now, [batch], list(pairs.values()), count)

    with Progress(disable=not progress) as bar:
        task = bar.add_task("Quantizing", total=len(steps))
        for step in steps:
            bar.update(task, description=_show(step, decisions))
            if step.numbers[0] in places:
                observe(step)
            for n in step.numbers:
                state.quantize(n, step.layer, _informed(methods[n], pairs[n]), watches[n], correction)
            bar.advance(task)
            if after_each is not None and not state.unfinished:
                after_each(finished())
    return finished()


def _taking_floats(model: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns a model whose products quantize no operand, and a function that makes them do so again."""
    quantizing = lambda x: isinstance(x, ActivationQuantizedArray)
    nodes, treedef = jtu.tree_flatten(model, is_leaf=quantizing)

    around = lambda node, array: node._holding(array) if quantizing(node) else array

    def again(model: PyTree) -> PyTree:
        return jtu.tree_unflatten(treedef, map(around, nodes, treedef.flatten_up_to(model)))

    return jtu.tree_unflatten(treedef, [x.array if quantizing(x) else x for x in nodes]), again


class _State:
    """A model as its leaves: quantized so far, and as dense arrays of the same values, for which one program serves.

    - `first`: for each leaf to quantize, the number of the first leaf that is the same array; `owners` are those.
    - `unfinished`: the layers that are quantized of stacks of which some are not.
    """

    def __init__(self, decisions: Sequence[Decision], dtype: DTypeLike | None) -> None:
        self.decisions, self.dtype = decisions, dtype
        self.leaves = [d.leaf.value for d in decisions]
        self.dense = [x.dequantize() if is_quantized(x) else x for x in self.leaves]
        by_array: dict[int, int] = {}
        self.first = {n: by_array.setdefault(id(x), n) for n, x in enumerate(self.leaves) if decisions[n].format}
        self.owners = sorted(set(self.first.values()))
        self.unfinished: dict[int, list[Any]] = {}

    def quantize(
        self, n: int, layer: int | None, method: AbstractMethod, watch: Watch, correction: float | int
    ) -> None:
        decision = self.decisions[n]
        x, leaf = decision.leaf.value, decision.leaf
        if layer is None:
            value = _corrected(x, decision.axes, _sums(watch), correction)
            q = quantize_leaf(decision._replace(leaf=dataclasses.replace(leaf, value=value)), method, self.dtype)
        else:
            value = _corrected(x[layer], decision.axes, {k: v[layer] for k, v in _sums(watch).items()}, correction)
            of_layer = decision._replace(leaf=dataclasses.replace(leaf, value=value))
            done = self.unfinished.setdefault(n, [])
            done.append(quantize_leaf(of_layer, _of_layer(method, layer), self.dtype))
            self.dense[n] = jnp.asarray(self.dense[n]).at[layer].set(done[-1].dequantize().astype(x.dtype))
            if len(done) < len(x):
                return
            q = jax.tree.map(lambda *layers: jnp.stack(layers), *self.unfinished.pop(n))
        for other, owner in self.first.items():
            if owner == n:
                self.leaves[other] = q
                self.dense[other] = q.dequantize().astype(decision.leaf.value.dtype) if other == n else self.dense[n]


def _dense_like(float_model: PyTree, model: PyTree) -> list[Any]:
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
def _correct(rows: Array, gram: Array, cross: Array, correction: Any) -> Array:
    if gram.ndim > 2:
        return jax.vmap(_correct, in_axes=(0, 0, 0, None))(rows, gram, cross, correction)
    mean = jnp.mean(jnp.diagonal(gram))
    scale = jnp.where(mean > 0, mean, 1)
    damped = gram / scale + _DAMPING * jnp.eye(len(gram))
    change = jax.scipy.linalg.solve(damped, (cross - gram).T / scale, assume_a="pos").T
    return rows.astype(jnp.float32) @ (jnp.eye(len(gram)) + correction * change)


def _stack(decision: Decision) -> tuple[int, ...]:
    return tuple(decision.leaf.value.shape[: decision.leaf.value.ndim - weight_ndim(decision.leaf)])


def _places(run: Any, watched: PyTree, batch: PyTree, watches: Mapping[int, Watch]) -> dict[int, Place]:
    """Returns the place of each observed weight in the traced program, by its number."""
    program, _, _ = eqx.filter_make_jaxpr(run)(watched, batch)
    found = places_of(program)
    places = {n: [found[sums] for sums in watch.along.values() if sums in found] for n, watch in watches.items()}
    return {n: min(where, key=lambda place: place.level) for n, where in places.items() if where}


def _steps(places: Mapping[int, Place], watches: Mapping[int, Watch]) -> list[_Step]:
    """Returns the steps in order: one for each level, and in a loop over layers one for each level of each layer."""
    # The layers of a loop stand together, where the first of its products stands.
    loop_of = lambda n: places[n].loop if len(watches[n].stack) == 1 else None
    starts: dict[Any, int] = {}
    for n, place in places.items():
        starts[loop_of(n)] = min(place.level, starts.get(loop_of(n), place.level))
    by_start: dict[tuple[int, Any, int], list[int]] = {}
    for n, place in places.items():
        loop = loop_of(n)
        key = (place.level, None, 0) if loop is None else (starts[loop], loop, watches[n].stack[0])
        by_start.setdefault(key, []).append(n)
    steps = []
    for (_, loop, layers), numbers in sorted(by_start.items(), key=lambda item: (item[0][0], item[1])):
        if loop is None:
            steps.append(_Step(numbers))
            continue
        levels = sorted({places[n].level for n in numbers})
        for layer in range(layers):
            steps.extend(_Step([n for n in numbers if places[n].level == level], layer) for level in levels)
    return steps


def _prepared(decision: Decision, default: AbstractMethod, watch: Watch, seen: bool) -> AbstractMethod:
    """Returns the method of a leaf without its statistics. Raises if it needs some and there will be none."""
    method, path = decision.method or default, decision.leaf.path
    if not _takes_inputs(method):
        return method.for_leaf(path)
    if seen:
        return method
    if watch.looked_up and not watch.used:
        return method.without_inputs()
    raise ValueError(
        f"{type(method).__name__} needs the inputs of {path}, which no product used"
        f"{' by `@`' if watch.used else ''}. Write `weight @ x` or `x @ weight`, or give this leaf another method by a "
        "rule with `eqq.Use`."
    )


def _takes_inputs(method: AbstractMethod) -> bool:
    return any(field.name == "inputs" for field in dataclasses.fields(method)) and method.inputs is None


def _informed(method: AbstractMethod, pair: tuple[Leaf, Watch]) -> AbstractMethod:
    if not _takes_inputs(method) or not pair[1].active:
        return method
    return dataclasses.replace(method, inputs=stats_of(*pair))  # pyright: ignore[reportCallIssue]


def _of_layer(method: AbstractMethod, layer: int) -> AbstractMethod:
    """Returns a method with the statistics of one layer of a stack."""
    stats = method.inputs
    if not isinstance(stats, LeafStats):
        return method
    names = ("rows", "min", "max", "mean", "mean_abs", "second_moment", "gram")
    of_layer = {name: np.asarray(value[layer]) for name in names if (value := getattr(stats, name)) is not None}
    stats = dataclasses.replace(stats, shape=stats.shape[1:], **of_layer)
    return dataclasses.replace(method, inputs=stats)  # pyright: ignore[reportCallIssue]


def _show(step: _Step, decisions: Sequence[Decision]) -> str:
    first, last = decisions[step.numbers[0]].leaf.path, decisions[step.numbers[-1]].leaf.path
    of_layer = "" if step.layer is None else f", layer {step.layer}"
    return (first if first == last else f"{first} to {last}") + of_layer
