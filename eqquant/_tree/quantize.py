"""Quantizes whole models: decides about each leaf, then quantizes, or plans what it would do."""

import collections
import functools as ft
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import DTypeLike, PRNGKeyArray
from rich.progress import track

from .._array.activation import ActivationQuantizedArray
from .._array.array import is_quantized, QuantizedArray
from .._array.quantize import as_method, check_dtype, check_finite, check_quantizable, quantize_array
from .._array.sharding import leaf_shardings
from .._array.simulated import simulate_array, SimulatedArray
from .._array.value import AbstractArrayValue
from .._errors import FORMAT_KEYWORDS, teach_keywords
from .._formats.base import AbstractFormat
from .._mesh import full_spec, on_device
from .._methods import AbsMax, AbstractMethod
from .._types import PyTree
from .leaves import Leaf, some
from .placement import move, Shardings, wanted_shardings
from .report import TreeReport
from .select import check_order, check_patterns, matches, Pattern, select_leaves, Selection, show_pattern, Where
from .summary import quantized_row, row_of
from .use import as_activations, as_use, Use
from .weights import convolved_axes, ineligible_reason, input_axis, part_reason, use_without_product


FormatLike = AbstractFormat | str | Use
# The key type of `Mapping` is invariant, so the union needs each kind of key.
Rules = (
    FormatLike
    | Mapping[str, FormatLike | None]
    | Mapping[re.Pattern[str], FormatLike | None]
    | Mapping[Pattern, FormatLike | None]
    | Callable[[str, Any], FormatLike | None]
)


class Activations(NamedTuple):
    """The format that products quantize the other operand to, and a scale from calibration."""

    format: AbstractFormat
    scale: Any = None
    zero_point: Any = None


class Decision(NamedTuple):
    """The decision about a leaf: its format and the axes along which blocks run, or `None` and the reason."""

    leaf: Leaf
    format: AbstractFormat | None
    axes: tuple[int, ...]
    reason: str
    method: AbstractMethod | None = None
    activations: Activations | None = None


def decide(tree: PyTree, format: Rules, where: Where | None, axis: Any, activations: Any = None) -> list[Decision]:
    """Returns one decision per leaf. Raises before anything is quantized."""
    activations = as_activations(activations)
    selections = select_leaves(tree, where, ineligible=_ineligible_reason)
    choose = _chooser(format, selections)
    decisions, of_rules = [], collections.defaultdict(list)
    for leaf, refusal in selections:
        picked, reason = choose(leaf) if refusal is None else (None, refusal)
        if picked is None:
            decisions.append(Decision(leaf, None, (), reason))
            continue
        wanted, known = input_axis(leaf) if axis is None else (axis, True)
        _, axes = check_quantizable(_struct(leaf.value), wanted, leaf.path)
        unknown = "" if known else "; its input axis is not known, blocks run along the last: see `axis`"
        of_inputs = activations if picked.activations is None else picked.activations
        of_inputs, note = _activations_of(leaf, of_inputs, axes)
        decisions.append(Decision(leaf, picked.format, axes, reason + unknown + note, picked.method, of_inputs))
        if picked.activations is not None:
            of_rules[reason].append(decisions[-1])
    if not any(d.format is not None for d in decisions):
        raise ValueError(_nothing_message(decisions))
    # Where a rule, or the whole call, reaches no product, activations were left out without a word.
    for taken in of_rules.values():
        _check_products(taken)
    if activations is not None:
        _check_products([d for d in decisions if d.format is not None])
    return decisions


def _decide_all(
    tree: PyTree, format: Rules | None, where: Where | None, axis: Any, activations: Any, **others: Any
) -> list[Decision]:
    """As `decide`. With activations and no format, arrays that are quantized keep their codes and get activations."""
    if format is not None or activations is None:
        return decide(tree, format, where, axis, activations)  # pyright: ignore[reportArgumentType]
    if unused := [name for name, given in {"axis": axis, **others}.items() if given is not None]:
        raise ValueError(
            f"`{unused[0]}` is for arrays in float, and with `format=None` those that are quantized get activations "
            f"alone. Got {unused[0]}={({'axis': axis} | others)[unused[0]]!r}. Leave it out, or give a format."
        )
    activations, decisions = as_activations(activations), []
    selections = select_leaves(tree, where, ineligible=_no_codes_reason, kind="quantized arrays")
    for leaf, refusal in selections:
        if refusal is not None:
            decisions.append(Decision(leaf, None, (), refusal))
            continue
        axes = leaf.value.axis if isinstance(leaf.value.axis, tuple) else (leaf.value.axis,)
        of_inputs, note = _activations_of(leaf, activations, axes)
        decisions.append(Decision(leaf, None, axes, f"quantized, and keeps its codes{note}", None, of_inputs))
    if all(refusal is not None for _, refusal in selections):
        wrappers = {type(d.leaf.parent) for d in decisions if part_reason(d.leaf) is not None}
        if ActivationQuantizedArray in wrappers:
            remedy = 'To change activations, wrap each weight: `eqq.ActivationQuantizedArray(w.array, "fp8")`.'
        elif wrappers:
            remedy = "Give weights their activations before they are wrapped, as by `loraify`."
        else:
            remedy = 'Give a format: `quantize_tree(model, "int8", activations="int8")`.'
        raise ValueError(
            "`format=None` is for a tree of quantized arrays, which get activations. Got none to take them "
            f"({some(f'{d.leaf.path}: {d.reason}' for d in decisions if d.reason != 'not an array')}). {remedy}"
        )
    _check_products([d for d in decisions if d.axes])
    return decisions


def _no_codes_reason(leaf: Leaf) -> str | None:
    """Returns why a leaf is no quantized array whose products can change, or `None` if it is one."""
    if not is_quantized(leaf.value):
        return ineligible_reason(leaf.value) or "not quantized"
    return part_reason(leaf)


def _check_products(decisions: Sequence[Decision]) -> None:
    """Raises if activations were asked for, and none of these weights gets them."""
    if not any(d.activations for d in decisions):
        raise ValueError(
            "`activations` must be for weights that products use. Got none among "
            f"{some(f'{d.leaf.path} ({d.reason})' for d in decisions)}. Leave it out. If your code multiplies by one, "
            'wrap it: `eqq.ActivationQuantizedArray(eqq.quantize(w, "int8"), "int8")`.'
        )


def _activations_of(leaf: Leaf, activations: Any, axes: tuple[int, ...]) -> tuple[Activations | None, str]:
    """Returns the activations of a weight and a note, or `None` and the note why its products take floats."""
    if activations is None:
        return None, ""
    if (use := use_without_product(leaf)) is not None:
        return None, f"; {use}, so no activations"
    chosen, note = (
        _calibrated(leaf, activations) if isinstance(activations, Mapping) else (Activations(activations), "")
    )
    convolution = chosen is not None and (len(axes) > 1 or convolved_axes(leaf) is not None)
    return chosen, f"{note}; multiplies codes under `eqq.quaxify`" if convolution else note


def _calibrated(leaf: Leaf, stats: Mapping[str, Any]) -> tuple[Activations | None, str]:
    """Returns the activations that statistics of inputs give."""
    found = next((stats[path] for path in leaf.paths if path in stats), None)
    if found is None:
        raise ValueError(
            f"`activations` must hold the statistics of every weight. Got none of {leaf.path}, only of "
            f"{some(stats)}. Collect them on this model, with the same `where`."
        )
    if tuple(found.shape) != tuple(leaf.value.shape):
        raise ValueError(
            f"`activations` must hold the statistics of this model. Got those of a weight of shape {found.shape} for "
            f"{leaf.path}, of shape {tuple(leaf.value.shape)}. Collect them again."
        )
    if found.axis is None or found.looked_up:
        return None, "; no product was observed, so no activations"
    if not found.rows.all():
        raise ValueError(
            f"`activations` must have observed every layer of {leaf.path}. Got: {found.note}. Collect statistics on "
            'more data, or let each example get its scale: activations="int8".'
        )
    return Activations(*found.activations()), ""


def _ineligible_reason(leaf: Leaf) -> str | None:
    simulated = "simulated: `finalize` first" if isinstance(leaf.parent, SimulatedArray) else None
    return ineligible_reason(leaf.value) or simulated


def _chooser(format: Rules, selections: Sequence[Selection]) -> Callable[[Leaf], tuple[Use | None, str]]:
    """Returns a function from an eligible leaf to its format, or to `None`, and the reason."""
    if isinstance(format, Mapping):
        check_patterns(format, [leaf for leaf, _ in selections], "format")
        check_order(format, [leaf for leaf, refusal in selections if refusal is None], "format")
        rules = [(pattern, None if f is None else as_use(f)) for pattern, f in format.items()]

        def by_pattern(leaf: Leaf) -> tuple[Use | None, str]:
            for pattern, picked in rules:
                if matches(pattern, leaf):
                    return picked, f"rule {show_pattern(pattern)!r}"
            return None, "no rule matches"

        return by_pattern
    if callable(format) and not isinstance(format, (AbstractFormat, str, type, Use)):

        def by_function(leaf: Leaf) -> tuple[Use | None, str]:
            picked = format(leaf.path, leaf.value)
            if picked is None:
                return None, "the format function returned None"
            try:
                return as_use(picked), "the format function"
            except (TypeError, ValueError) as e:
                raise type(e)(f"{leaf.path}: {e}") from None

        return by_function
    one = as_use(format)  # pyright: ignore[reportArgumentType]
    return lambda leaf: (one, "a weight")


def _struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


def _nothing_message(decisions: Sequence[Decision]) -> str:
    if not decisions:
        return "The tree must hold something to quantize. Got an empty tree. Pass a model, or a tree of its parameters."
    arrays = [d for d in decisions if d.reason != "not an array"]
    if not arrays:
        return "The tree must hold something to quantize. Got none with arrays. Pass the tree first, then the format."
    quantized = [d for d in arrays if is_quantized(d.leaf.value)]
    reasons = some(f"{d.leaf.path}: {d.reason}" for d in arrays)
    if quantized:
        return (
            "The tree must hold something to quantize. Got one that is already quantized, with no other weights in "
            f"float ({reasons}). To quantize it again, call `dequantize_tree` first. To quantize activations alone: "
            '`quantize_tree(model, None, activations="int8")`, which keeps the codes.'
        )
    return (
        f"The tree must hold something to quantize. Got none among its {len(arrays)} arrays ({reasons}). "
        "`plan_tree` shows each; `where=` selects leaves that are left alone by default."
    )


_REMEDIES = {
    **dict.fromkeys(
        ("skip", "exclude", "ignore", "modules_to_not_convert"),
        'To leave leaves in float, write rules, these first: `{"layers.2.*": None, "*": "nf4"}`.',
    ),
    **FORMAT_KEYWORDS,
}


@teach_keywords(**_REMEDIES)
def quantize_tree(
    tree: PyTree,
    format: Rules | None = "nf4",
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    key: PRNGKeyArray | None = None,
    progress: bool = False,
    simulate: bool = False,
    shardings: Shardings | None = None,
    method: AbstractMethod | None = None,
    activations: Any = None,
    learn_scales: bool = False,
) -> PyTree:
    """Quantizes the weights of a model, and leaves everything else unchanged.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, eqq.NF4())
        model = eqq.quantize_tree(model, {"layers.0.*": None, "*": "int4"})
        model = eqq.quantize_tree(model, "int8", where=lambda m: m.layers[1].weight)
        model = eqq.quantize_tree(model, {"*.down.*": eqq.Use("int4", eqq.HQQ()), "*": "int4"}, method=eqq.MSE())
        model = eqq.quantize_tree(model, "int8", activations="int8")                   # W8A8
        model = eqq.quantize_tree(quantized, None, activations="int8")                 # keeps the codes
        model = eqq.quantize_tree(model, shardings={"*.up.weight": P("model"), "*.down.weight": P(None, "model")})
        ```

    **Arguments:**

    - `tree`: any pytree: an Equinox model, a dictionary of parameters, one array.
    - `format`: the format to quantize to. One format or its lower-case name for every weight; or a mapping
        `{pattern: format or None}`, where the first pattern that matches the leaf's path wins and `None` leaves the
        leaf in float; or a function `(path, leaf) -> format or None`. A path reads `layers.0.weight`; a pattern is a
        glob (`"*.attention.*"`), which matches the whole path, or a compiled regular expression, which may match any
        part of it. Both match a path with or without the key of a wrapper, such as `value` in Flax's `bias.value`. A
        leaf that no pattern matches stays in float. `None` with `activations` is for a tree of quantized arrays: these
        keep their codes, and get activations; floats stay floats.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`; only these are quantized. A selected leaf is
        always quantized, even a bias. In a selected node, and in the whole tree without `where`, only weights are:
        floating point arrays with two or more dimensions longer than one, except biases and the parameters of
        normalisation layers.
    - `axis`: the axis (or axes, quantized as one) along which blocks run, for every selected leaf. By default the input
        axes: all input axes of a convolution, the axes that a haliax layer names as inputs, the input axes of a Flax
        `kernel`, and the last axis of everything else, as in every layer of Equinox. Use `-2` for other weights that
        are used as `x @ w`. If the input axes of a kernel are unknown, the plan says so.
    - `dtype`: the dtype that the leaves dequantize to; by default, their own.
    - `key`: for stochastic rounding.
    - `progress`: whether to show a progress bar.
    - `simulate`: keeps each weight in float, as the master of a [`eqquant.SimulatedArray`][] that quantizes it at every
        use. Train the model as usual, then call [`eqquant.finalize`][].
    - `shardings`: the shardings of leaves, quantized or not: a mapping from patterns, as in `format`, or a function
        `(path, leaf)`, or a tree that is a prefix of the model; each gives the `NamedSharding` of the logical array, or
        a `PartitionSpec` on the mesh of `jax.set_mesh`, or `None`. All other leaves keep their sharding: each device
        quantizes its shard of a sharded weight, and nothing is gathered.
    - `method`: the method that chooses scales and codes; [`eqquant.AbsMax`][] by default. A [`eqquant.Use`][] sets the
        method of one rule.
    - `activations`: the format that products quantize the other operand to, or its lower-case name: each example gets
        scales of its own. Or the statistics of inputs that [`eqquant.calibrate.collect_stats`][] returns, which hold
        one scale for each weight. By default products take floats. A [`eqquant.Use`][] sets it for one rule. Weights
        that no product uses, such as embeddings, stay without, and if a rule reaches no others, that is an error;
        convolutions multiply codes under [`eqquant.quaxify`][].
    - `learn_scales`: with `simulate`, whether scales train beside the masters, those of calibrated activations too
        (learned step sizes). They need a format with plain scales: integers, `NF4`, `FP8`.

    **Returns:**

    A tree of the same classes, in which each weight is a [`eqquant.QuantizedArray`][] (or, with `simulate`, a
    [`eqquant.SimulatedArray`][]; with `activations`, an [`eqquant.ActivationQuantizedArray`][] around it). An array
    that appears in several places of the tree is quantized once and stays shared. Weights are quantized one at a time,
    and a large weight a chunk of rows at a time. So the peak memory is the result plus one leaf in its own dtype,
    whatever the format and method; up to three leaves in float32 for leaves that are on several devices or have one
    scale for the whole array.
    If any leaf cannot be quantized, an error names it and nothing is quantized.

    **Raises:**

    `ValueError` if nothing is selected, if a pattern matches nothing, for an unknown format name, an axis out of range,
    values that are not finite, or a sharding that does not fit the quantized leaf; `TypeError` if `where` selects a
    leaf that is not a floating point array.
    """
    check_dtype(dtype)
    if simulate and key is not None:
        raise ValueError("`key` must be None with `simulate=True`, which rounds to nearest at each use. Got a key.")
    if learn_scales and not simulate:
        raise ValueError("`learn_scales=True` must come with `simulate=True`, whose scales can train. Got it alone.")
    default = as_method(method)
    others = {"dtype": dtype, "key": key, "method": method, "simulate": simulate or None}
    decisions = _decide_all(tree, format, where, axis, activations, **others)
    wanted = wanted_shardings(tree, [d.leaf for d in decisions], shardings)
    wanted = [_sharding_of(decision, sharding, dtype) for decision, sharding in zip(decisions, wanted, strict=True)]
    work = [n for n, d in enumerate(decisions) if d.format is not None]
    values = [move(d.leaf.value, None if d.format else s) for d, s in zip(decisions, wanted, strict=True)]
    values = [x if d.format else with_activations(d, x) for d, x in zip(decisions, values, strict=True)]
    methods = {n: _method_of(decisions[n], default) for n in work}
    keys = dict(zip(work, [None] * len(work) if key is None else jr.split(key, max(len(work), 1)), strict=True))
    done: dict[Any, Any] = {}  # an array that appears twice is quantized once
    for n in track(work, "Quantizing") if progress else work:
        leaf, axes = decisions[n].leaf, decisions[n].axes
        same = (id(leaf.value), decisions[n].format, axes, wanted[n], id(decisions[n].method))
        if same not in done:
            done[same] = _quantize_leaf(decisions[n], methods[n], dtype, keys[n], wanted[n], simulate, learn_scales)
        values[n] = with_activations(decisions[n], done[same], learn_scales)
    return jtu.tree_unflatten(jtu.tree_structure(tree, is_leaf=is_quantized), values)


def with_activations(decision: Decision, w: Any, learn_scales: bool = False) -> Any:
    """Returns a quantized weight whose products quantize the other operand, if that is the decision."""
    if not isinstance(w, AbstractArrayValue) or decision.activations is None:
        return w
    try:
        learn = learn_scales and decision.activations.scale is not None
        return ActivationQuantizedArray(w, *decision.activations, learn_scale=learn)
    except ValueError as e:
        raise ValueError(f"{decision.leaf.path}: {e}") from None


def _method_of(decision: Decision, default: AbstractMethod) -> AbstractMethod:
    """Returns the method of a leaf, which has its own statistics. Raises if they are those of another array."""
    method = (decision.method or default).for_leaf(decision.leaf.path)
    method.check(decision.leaf.path, tuple(decision.leaf.value.shape), decision.axes)
    return method


def _sharding_of(decision: Decision, wanted: NamedSharding | None, dtype: DTypeLike | None) -> NamedSharding | None:
    """Returns the wanted sharding of a leaf, or its current one. Raises if the quantized leaf cannot have it."""
    x = decision.leaf.value
    actual = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    sharding = wanted or (full_spec(actual, x.ndim) if isinstance(actual, NamedSharding) else None)
    if decision.format is not None and sharding is not None:
        q = jax.eval_shape(lambda x: quantize_array(x, decision.format, decision.axes, dtype, None), _struct(x))  # pyright: ignore
        leaf_shardings(q, sharding, decision.leaf.path)
    return sharding


def quantize_leaf(decision: Decision, method: AbstractMethod, dtype: DTypeLike | None) -> QuantizedArray:
    """Quantizes one leaf by a method that has its statistics, as `quantize_tree` does. It keeps its sharding."""
    method.check(decision.leaf.path, tuple(decision.leaf.value.shape), decision.axes)
    return _quantize_leaf(decision, method, dtype, None, None, False)  # pyright: ignore[reportReturnType]


def _quantize_leaf(
    decision: Decision,
    method: AbstractMethod,
    dtype: DTypeLike | None,
    key: Any,
    sharding: NamedSharding | None,
    simulate: bool,
    learn_scales: bool = False,
) -> QuantizedArray | SimulatedArray:
    leaf, format, axes = decision.leaf, decision.format, decision.axes
    simulated = ft.partial(simulate_array, learn_scales=learn_scales)
    encode = ft.partial(simulated if simulate else ft.partial(quantize_array, key=key), method=method)
    if isinstance(leaf.value, jax.ShapeDtypeStruct):
        q = jax.eval_shape(lambda x: encode(x, format, axes, dtype), leaf.value)  # pyright: ignore
        return q if sharding is None or simulate else move(q, sharding)
    x = on_device(move(jnp.asarray(leaf.value), sharding))
    check_finite(x, leaf.path)
    q = encode(x, format, axes, dtype)  # pyright: ignore
    # Waits, so that the temporaries of one leaf are freed before the next leaf needs memory.
    return jax.block_until_ready(q)


@teach_keywords(**_REMEDIES)
def plan_tree(
    tree: PyTree,
    format: Rules | None = "nf4",
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    method: AbstractMethod | None = None,
    activations: Any = None,
) -> TreeReport:
    """Plans what [`eqquant.quantize_tree`][] would do with these arguments: a dry run that computes nothing.

    !!! Example

        ```python
        print(eqq.plan_tree(model, "int4"))
        ```

    **Arguments:**

    - `tree`: any pytree: an Equinox model, a dictionary of parameters, one array.
    - `format`: the format to quantize to, or rules `{pattern: format or None}`, or a function
        `(path, leaf) -> format or None`; as for [`eqquant.quantize_tree`][].
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`. By default every weight is quantized.
    - `axis`: the axis (or axes) along which blocks run, for every selected leaf. By default the input axes.
    - `dtype`: the dtype that the leaves dequantize to; by default, their own.
    - `method`: how codes would be found. The reason of each leaf names a method that is not the default.
    - `activations`: as for [`eqquant.quantize_tree`][].

    **Returns:**

    A report with a row for each array of the tree: its format, bytes and bits per value, and the reason for the format
    or for leaving the array in float. It prints as a table and has `.to_dict()`. The leaves of `tree` may be
    `jax.ShapeDtypeStruct`s.

    **Raises:**

    As [`eqquant.quantize_tree`][], except that it does not check whether values are finite.
    """
    rows, default = [], as_method(method)
    decisions = _decide_all(tree, format, where, axis, activations, dtype=dtype, method=method)
    for leaf, picked, axes, reason, found_by, of_inputs in decisions:
        if picked is None:
            kept = row_of(leaf, reason)
            rows.extend(kept if of_inputs is None else [row._replace(activations=of_inputs.format) for row in kept])
            continue
        x = _struct(leaf.value)
        q = jax.eval_shape(lambda x, f=picked, a=axes: quantize_array(x, f, a, dtype, None), x)
        found_by = default if found_by is None else found_by
        reason = reason if found_by == AbsMax() else f"{reason}, by {type(found_by).__name__}"
        row = quantized_row(leaf.path, q, reason, math.prod(x.shape) * x.dtype.itemsize)
        rows.append(row if of_inputs is None else row._replace(activations=of_inputs.format))
    return TreeReport(tuple(rows), planned=True)
