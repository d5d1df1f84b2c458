"""Quantizes whole models, or plans it."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import jax
import jax.random as jr
from jax.sharding import NamedSharding
from jaxtyping import DTypeLike, PRNGKeyArray

from .._array.array import QuantizedArray
from .._array.checks import as_jax_array, check_dtype, check_finite, check_vectors
from .._array.quantize import quantize_array
from .._array.sharding import leaf_shardings
from .._array.value import AbstractArrayValue
from .._errors import FORMAT_KEYWORDS, suggest_keywords
from .._mesh import full_spec, on_device
from .._methods import AbsMax, AbstractMethod
from .._methods.names import as_method, MethodLike
from .._types import PyTree
from .._wrappers.activation import ActivationQuantizedArray
from .._wrappers.simulated import fake_quantize_array, FakeQuantizedArray
from .config import ActivationsLike
from .decide import decide, decide_activations, Decision, FormatRules
from .leaves import replace_leaves
from .missing import InputsErrors, warn_of_unused
from .placement import current_sharding, move, resolve_shardings, Shardings
from .progress import show_progress
from .report import TreeReport
from .select import Where
from .sizes import dense_nbytes, quantize_struct
from .summary import make_quantized_row, make_rows


_Quantized = TypeVar("_Quantized", bound=QuantizedArray | FakeQuantizedArray)

_REMEDIES = {
    **dict.fromkeys(
        ("act_format", "act_qtype", "activation", "activation_format", "act_dtype"), "It is called `activations`."
    ),
    **dict.fromkeys(
        ("config", "quant_config", "quantization_config", "rules"),
        'Pass it as the format: an `eqq.QuantConfig`, or rules such as `{"*.mlp.*": "int4", "*": "int8"}`.',
    ),
    **dict.fromkeys(
        ("filter_fn", "predicate", "class_predicate"),
        'Pass a function as the format: `lambda path, leaf: "int4" if "mlp" in path else None`.',
    ),
    **dict.fromkeys(
        ("stats", "statistics", "dataset", "calibration_data", "batches"),
        "Statistics go into a method: `stats = eqq.calibrate.collect_stats(model, batches, gram=True)`, then "
        "`method=eqq.GPTQ(stats)`.",
    ),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "The format says that: write 'nf4' or 'int8'."),
    **dict.fromkeys(
        ("skip", "exclude", "ignore", "modules_to_not_convert"),
        'To leave leaves in float, write rules, these first: `{"layers.2.*": None, "*": "nf4"}`.',
    ),
    **FORMAT_KEYWORDS,
}


@suggest_keywords(**_REMEDIES)
def quantize_tree(
    tree: PyTree,
    format: FormatRules = "nf4",
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    key: PRNGKeyArray | None = None,
    progress: bool = False,
    simulate: bool = False,
    shardings: Shardings | None = None,
    method: MethodLike | None = None,
    activations: ActivationsLike | None = None,
    learn_scales: bool = False,
) -> PyTree:
    """Quantizes the weights of a model, and leaves everything else unchanged.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, eqq.NF4())
        model = eqq.quantize_tree(model, {"layers.0.*": None, "*": "int4"})
        model = eqq.quantize_tree(model, "int8", where=lambda m: m.layers[1].weight)
        model = eqq.quantize_tree(model, {"*.down.*": eqq.QuantConfig("int4", "hqq"), "*": "int4"}, method="mse")
        model = eqq.quantize_tree(model, "int8", activations="int8")                   # W8A8
        model = eqq.quantize_tree(model, shardings={"*.up.weight": P("model"), "*.down.weight": P(None, "model")})
        ```

    **Arguments:**

    - `tree`: any pytree: an Equinox model, a dictionary of parameters, one array.
    - `format`: the format to quantize to. One format or its lower-case name for every weight; or a mapping
        `{pattern: format or None}`, where the first pattern that matches the leaf's path wins and `None` leaves the
        leaf in float; or a function `(path, leaf) -> format or None`. A path reads `layers.0.weight`; a pattern is a
        glob (`"*.attention.*"`), which matches the whole path of a leaf, or of a layer that holds it; or a compiled
        regular expression, which may match any part of it. Both match a path with or without the key of a wrapper, such
        as `value` in Flax's `bias.value`. A leaf that no pattern matches stays in float.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`; only these are quantized. A selected leaf is
        always quantized, even a bias. In a selected node, and in the whole tree without `where`, only weights are:
        floating point arrays with two or more dimensions longer than one, except biases and the parameters of
        normalization layers.
    - `axis`: the axis (or axes, quantized as one) along which blocks run, for every selected leaf. By default the input
        axes: all input axes of a convolution, the axes that a haliax layer names as inputs, the input axes of a Flax
        `kernel`, and the last axis of everything else, as in every layer of Equinox. Use `-2` for other weights that
        are used as `x @ w`. If the input axes of a kernel are unknown, the plan says so.
    - `dtype`: the dtype that the leaves dequantize to; by default, their own.
    - `key`: for stochastic rounding.
    - `progress`: whether to show a progress bar.
    - `simulate`: keeps each weight in float, as the master of a [`eqquant.arrays.FakeQuantizedArray`][] that quantizes
        it at every use (fake quantization). Train the model as usual, then call [`eqquant.finalize`][].
    - `shardings`: the shardings of leaves, quantized or not: a mapping from patterns, as in `format`, or a function
        `(path, leaf)`, or a tree that is a prefix of the model; each gives the `NamedSharding` of the logical array, or
        a `PartitionSpec` on the mesh of `jax.set_mesh`, or `None`. All other leaves keep their sharding: each device
        quantizes its shard of a sharded weight, and nothing is gathered.
    - `method`: the method that chooses scales and codes, or the name of one that needs no statistics (`"mse"`);
        [`eqquant.AbsMax`][] by default. A [`eqquant.QuantConfig`][] sets the method of one rule.
    - `activations`: the format of activations, or its lower-case name, for dynamic quantization: one scale per token.
        Or the statistics of inputs that [`eqquant.calibrate.collect_stats`][] returns, for static quantization: one
        scale per tensor. By default quantization is weight-only. A [`eqquant.QuantConfig`][] sets it for one rule.
        Weights that no product uses, such as embeddings, stay weight-only; a rule that reaches no others is an error.
        Convolutions multiply codes under [`eqquant.quaxify`][].
    - `learn_scales`: with `simulate`, whether scales train with the masters, also the scales of static activations
        (learned step sizes, LSQ). They need a format with plain scales: integers, `NF4`, `FP8`.

    **Returns:**

    A tree of the same classes, in which each weight is a [`eqquant.QuantizedArray`][] (or, with `simulate`, a
    [`eqquant.arrays.FakeQuantizedArray`][]; with `activations`, an [`eqquant.arrays.ActivationQuantizedArray`][] around
    it). An array that appears in several places of the tree is quantized once and stays shared. Weights are quantized
    one at a time, and a large weight a chunk of rows at a time. So the peak memory is the result plus one leaf in its
    own dtype, whatever the format and method; up to three leaves in float32 for leaves that are on several devices or
    have one scale for a whole matrix. If any leaf cannot be quantized, an error names it and nothing is quantized.

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
    default_method = as_method(method)
    decisions = decide(tree, format, where, axis, activations, default_method)
    wanted = resolve_shardings(tree, [d.leaf for d in decisions], shardings)
    wanted = [_resolve_sharding(d, sharding, dtype) for d, sharding in zip(decisions, wanted, strict=True)]
    indices = [n for n, d in enumerate(decisions) if d.format is not None]
    methods = _find_methods(decisions, default_method)
    keys = dict(zip(indices, [None] * len(indices) if key is None else jr.split(key, len(indices)), strict=True))
    values = [move(d.leaf.value, None if d.format else s) for d, s in zip(decisions, wanted, strict=True)]
    results: dict[Hashable, QuantizedArray | FakeQuantizedArray] = {}  # a shared array is quantized once
    with show_progress("Quantizing", len(indices), progress) as advance:
        for n in indices:
            decision = decisions[n]
            same = (id(decision.leaf.value), decision.format, decision.axes, wanted[n], id(decision.method))
            if same not in results:
                check_vectors(decision.format, methods[n], keys[n], decision.leaf.path)
                if simulate:
                    encode = ft.partial(fake_quantize_array, learn_scales=learn_scales, method=methods[n])
                else:
                    encode = ft.partial(quantize_array, key=keys[n], method=methods[n])
                results[same] = _quantize_leaf(decision, encode, dtype, wanted[n])
            values[n] = results[same]
            advance()
    return replace_leaves(tree, [add_activations(d, x, learn_scales) for d, x in zip(decisions, values, strict=True)])


def quantize_activations(tree: PyTree, activations: ActivationsLike = "int8", *, where: Where | None = None) -> PyTree:
    """Returns a quantized model whose products quantize activations too.

    Weights keep their codes. [`eqquant.quantize_tree`][] with `activations=` does the same for a model in float.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "int4", method=eqq.GPTQ(stats))
        model = eqq.quantize_activations(model, "int8")    # dynamic, per token
        model = eqq.quantize_activations(model, stats)     # static, per tensor
        ```

    **Arguments:**

    - `tree`: a pytree with [`eqquant.QuantizedArray`][]s.
    - `activations`: the format of activations, or its lower-case name, for dynamic quantization: each row of the
        activations (a token) gets scales of its own. Or the statistics that [`eqquant.calibrate.collect_stats`][]
        returns, for static quantization with one scale per weight.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`.

    **Returns:**

    The tree, in which each quantized weight of a product is an [`eqquant.arrays.ActivationQuantizedArray`][].
    Embeddings, weights in float, and weights whose activations are quantized already stay as they are.

    **Raises:**

    `ValueError` if no weight can take activations; the message gives the reason for each.
    """
    decisions = decide_activations(tree, where, activations)
    return replace_leaves(tree, [add_activations(d, d.leaf.value) for d in decisions])


def add_activations(decision: Decision, w: PyTree, learn_scales: bool = False) -> PyTree:
    """Returns a quantized weight, wrapped to quantize activations if the decision has them."""
    if not isinstance(w, AbstractArrayValue) or decision.activations is None:
        return w
    try:
        learn = learn_scales and decision.activations.scale is not None
        return ActivationQuantizedArray(w, *decision.activations, learn_scale=learn)
    except ValueError as e:
        raise ValueError(f"{decision.leaf.path}: {e}") from None


def _find_methods(decisions: Sequence[Decision], default_method: AbstractMethod) -> dict[int, AbstractMethod]:
    """Returns the method of each leaf to quantize, by index, with the statistics of the leaf.

    A leaf that no product used gets the method without inputs, with a warning. Raises one error for all leaves whose
    statistics are missing, or belong to another array.
    """
    methods: dict[int, AbstractMethod] = {}
    unused: dict[str, str] = {}
    errors = InputsErrors()
    for n, decision in enumerate(decisions):
        if decision.format is None:
            continue
        leaf, method = decision.leaf, decision.method or default_method
        with errors.collect(leaf.path):
            methods[n] = method.for_leaf(leaf.path)
            methods[n].check(leaf.path, tuple(leaf.value.shape), decision.axes)
            methods[n].check_weight(leaf.path, leaf.value)
        if (seen := method.statistics_for(leaf.path)) is not None and seen.axis is None and not seen.looked_up:
            unused[leaf.path] = seen.note
    quantized = [d.leaf.path for d in decisions if d.format is not None]
    errors.check(quantized)
    warn_of_unused(unused, quantized, stacklevel=4)
    return methods


def _resolve_sharding(
    decision: Decision, wanted: NamedSharding | None, dtype: DTypeLike | None
) -> NamedSharding | None:
    """Returns the requested sharding of a leaf, or its current one.

    Raises if the quantized leaf cannot have it.
    """
    x = decision.leaf.value
    actual = current_sharding(x)
    sharding = wanted or (None if actual is None else full_spec(actual, x.ndim))
    if decision.format is not None and sharding is not None:
        q = quantize_struct(x, decision.format, decision.axes, dtype)
        leaf_shardings(q, sharding, decision.leaf.path)
    return sharding


def quantize_leaf(decision: Decision, method: AbstractMethod, dtype: DTypeLike | None) -> QuantizedArray:
    """Returns one leaf quantized by a method with its statistics. It keeps its sharding."""
    method.check(decision.leaf.path, tuple(decision.leaf.value.shape), decision.axes)
    method.check_weight(decision.leaf.path, decision.leaf.value)
    check_vectors(decision.format, method, None, decision.leaf.path)
    encode = ft.partial(quantize_array, key=None, method=method)
    return _quantize_leaf(decision, encode, dtype, None)


def _quantize_leaf(
    decision: Decision,
    encode: Callable[..., _Quantized],
    dtype: DTypeLike | None,
    sharding: NamedSharding | None,
) -> _Quantized:
    leaf, encode = decision.leaf, ft.partial(encode, format=decision.format, axes=decision.axes, dtype=dtype)
    if isinstance(leaf.value, jax.ShapeDtypeStruct):
        q = jax.eval_shape(encode, leaf.value)
        return move(q, sharding) if isinstance(q, QuantizedArray) else q
    x = on_device(move(as_jax_array(leaf.value), sharding))
    check_finite(x, leaf.path)
    # Wait, so that the temporaries of this leaf are freed before the next one needs memory.
    return jax.block_until_ready(encode(x))


@suggest_keywords(**_REMEDIES)
def plan_tree(
    tree: PyTree,
    format: FormatRules | None = "nf4",
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    method: MethodLike | None = None,
    activations: ActivationsLike | None = None,
) -> TreeReport:
    """Returns what [`eqquant.quantize_tree`][] would do: a dry run that computes nothing.

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
    - `method`: the method that would choose codes. The reason of each leaf names a method that is not the default.
    - `activations`: as for [`eqquant.quantize_tree`][].

    **Returns:**

    A report, which prints as a table. The leaves of `tree` may be `jax.ShapeDtypeStruct`s. It has

    - `leaves`: for each array its `path`, logical `shape` and `dtype`, `format` (`None` if it stays in float), `axis`,
        the `reason`, `nbytes` as stored, `dense_nbytes` in its logical dtype, `bits` per value with scales, and
        `activations`, the format to which its products quantize activations when they run, or `None`.
    - `nbytes`, `dense_nbytes`, `bits`: of the whole tree; `params`, the number of values; `quantized_bits`, per value
        of the quantized arrays alone; `planned`, whether nothing is quantized yet.
    - `.table(every_leaf=True)`: the table with a row for each array; otherwise repeated layers share rows.
    - `.to_dict()`, `.to_json(indent=None)`: the same as plain Python, and as JSON.

    **Raises:**

    As [`eqquant.quantize_tree`][], except that it does not check whether values are finite.
    """
    rows, default_method = [], as_method(method)
    if format is None and activations is not None:
        decisions = decide_activations(tree, where, activations, axis=axis, dtype=dtype, method=method)
    else:
        decisions = decide(tree, format, where, axis, activations, default_method)  # pyright: ignore[reportArgumentType]
    for decision in decisions:
        leaf, reason = decision.leaf, decision.reason
        if decision.format is None:
            planned = make_rows(leaf, reason)
        else:
            reason += _show_method(decision.method or default_method, leaf.path)
            struct = quantize_struct(leaf.value, decision.format, decision.axes, dtype)
            planned = [make_quantized_row(leaf.path, struct, reason, dense_nbytes(leaf.value))]
        chosen = decision.activations
        rows += [row if chosen is None else row._replace(activations=chosen.format) for row in planned]
    return TreeReport(tuple(rows), planned=True)


def _show_method(method: AbstractMethod, path: str) -> str:
    """Returns the end of a reason: a method other than the default, and gaps in its statistics."""
    statistics = method.statistics_for(path)
    if statistics is not None and statistics.axis is None:
        return f"; {statistics.note}, by {type(method.for_leaf(path)).__name__}"
    remark = f" ({statistics.note})" if statistics is not None and statistics.note else ""
    return "" if method == AbsMax() else f", by {type(method).__name__}{remark}"
