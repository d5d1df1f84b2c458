"""Decides about each leaf of a model: its format, method and activations, or why it stays as it is."""

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from .._array.array import is_quantized
from .._array.checks import check_not_masked, check_quantizable
from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._types import PyTree
from .._wrappers.activation import ActivationQuantizedArray
from .._wrappers.simulated import SimulatedArray
from .leaves import abbreviate_list, DenseArray, Leaf
from .select import check_order, check_patterns, matches, Pattern, select_leaves, Selection, show_pattern, Where
from .statistics import InputStatistics
from .use import ActivationsLike, as_activations, as_use, Use
from .weights import convolved_axes, ineligible_reason, input_axis, part_reason, use_without_product


FormatLike = AbstractFormat | str | Use
# The key type of `Mapping` is invariant, so the union needs each kind of key.
FormatRules = (
    FormatLike
    | Mapping[str, FormatLike | None]
    | Mapping[re.Pattern[str], FormatLike | None]
    | Mapping[Pattern, FormatLike | None]
    | Callable[[str, DenseArray], FormatLike | None]
)
Axis = int | Sequence[int] | None


class Activations(NamedTuple):
    """The format of activations, quantized dynamically, or with a scale from calibration."""

    format: AbstractFormat
    scale: Array | None = None
    zero_point: Array | None = None


class Decision(NamedTuple):
    """The decision about a leaf: its format and the axes along which blocks run, or `None` and the reason."""

    leaf: Leaf
    format: AbstractFormat | None
    axes: tuple[int, ...]
    reason: str
    method: AbstractMethod | None = None
    activations: Activations | None = None


def decide(
    tree: PyTree, format: FormatRules, where: Where | None, axis: Axis, activations: ActivationsLike | None = None
) -> list[Decision]:
    """Returns one decision per leaf. Raises before anything is quantized."""
    activations = as_activations(activations)
    selections = select_leaves(tree, where, ineligible=_ineligible_reason)
    choose = _chooser(format, selections)
    decisions, by_rule = [], collections.defaultdict(list)
    for leaf, refusal in selections:
        use, reason = choose(leaf) if refusal is None else (None, refusal)
        if use is None:
            decisions.append(Decision(leaf, None, (), reason))
            continue
        wanted, known = input_axis(leaf) if axis is None else (axis, True)
        check_not_masked(leaf.value, leaf.path)
        _, axes = check_quantizable(shape_of(leaf.value), wanted, leaf.path)
        unknown = "" if known else "; its input axis is not known, blocks run along the last: see `axis`"
        chosen, note = _choose_activations(leaf, activations if use.activations is None else use.activations, axes)
        decisions.append(Decision(leaf, use.format, axes, reason + unknown + note, use.method, chosen))
        if use.activations is not None:
            by_rule[reason].append(decisions[-1])
    if not any(d.format is not None for d in decisions):
        raise ValueError(_nothing_message(decisions))
    # Where a rule, or the whole call, reaches no product, activations were left out without a word.
    for taken in by_rule.values():
        _check_products(taken)
    if activations is not None:
        _check_products([d for d in decisions if d.format is not None])
    return decisions


def decide_activations(
    tree: PyTree, where: Where | None, activations: ActivationsLike, **unused: object
) -> list[Decision]:
    """Returns one decision per leaf: arrays that are quantized keep their codes and get activations."""
    for name, value in unused.items():
        if value is not None:
            raise ValueError(
                f"`{name}` is for arrays in float, and with `format=None` those that are quantized get activations "
                f"alone. Got {name}={value!r}. Leave it out, or give a format."
            )
    rule, decisions = as_activations(activations), []
    selections = select_leaves(tree, where, ineligible=_no_codes_reason, kind="quantized arrays")
    for leaf, refusal in selections:
        if refusal is not None:
            decisions.append(Decision(leaf, None, (), refusal))
            continue
        axes = leaf.value.axis if isinstance(leaf.value.axis, tuple) else (leaf.value.axis,)
        chosen, note = _choose_activations(leaf, rule, axes)
        decisions.append(Decision(leaf, None, axes, f"quantized, and keeps its codes{note}", None, chosen))
    if all(refusal is not None for _, refusal in selections):
        wrappers = {type(d.leaf.parent) for d in decisions if part_reason(d.leaf) is not None}
        if ActivationQuantizedArray in wrappers:
            remedy = 'To change activations, wrap each weight: `eqq.ActivationQuantizedArray(w.array, "fp8")`.'
        elif wrappers:
            remedy = "Give weights their activations before they are wrapped, as by `loraify`."
        else:
            remedy = 'Give a format: `quantize_tree(model, "int8", activations="int8")`.'
        reasons = abbreviate_list(f"{d.leaf.path}: {d.reason}" for d in decisions if d.reason != "not an array")
        raise ValueError(
            "`format=None` is for a tree of quantized arrays, which get activations. Got none to take them "
            f"({reasons}). {remedy}"
        )
    _check_products([d for d in decisions if d.axes])
    return decisions


def shape_of(x: DenseArray) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array, and the dtype that it has in JAX."""
    # As `as_jax_array` converts it.
    dtype = np.dtype(np.float64) if x.dtype == np.longdouble else x.dtype
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(dtype))


def _ineligible_reason(leaf: Leaf) -> str | None:
    simulated = "simulated: `finalize` first" if isinstance(leaf.parent, SimulatedArray) else None
    return ineligible_reason(leaf.value) or simulated


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
            f"{abbreviate_list(f'{d.leaf.path} ({d.reason})' for d in decisions)}. Leave it out. If your code "
            'multiplies by one, wrap it: `eqq.ActivationQuantizedArray(eqq.quantize(w, "int8"), "int8")`.'
        )


def _choose_activations(
    leaf: Leaf, activations: AbstractFormat | Mapping[str, InputStatistics] | None, axes: tuple[int, ...]
) -> tuple[Activations | None, str]:
    """Returns the activations of a weight and a note, or `None` and the note why its products take floats."""
    if activations is None:
        return None, ""
    if (use := use_without_product(leaf)) is not None:
        return None, f"; {use}, so no activations"
    note = ""
    if isinstance(activations, Mapping):
        chosen = _calibrated_activations(leaf, activations)
        note = "; no product was observed, so no activations" if chosen is None else ""
    else:
        chosen = Activations(activations)
    if chosen is not None and (len(axes) > 1 or convolved_axes(leaf) is not None):
        note = "; multiplies codes under `eqq.quaxify`"
    return chosen, note


def _calibrated_activations(leaf: Leaf, stats: Mapping[str, InputStatistics]) -> Activations | None:
    """Returns the activations that statistics of inputs give; `None` if no product was observed."""
    found = next((stats[path] for path in leaf.paths if path in stats), None)
    if found is None:
        raise ValueError(
            f"`activations` must hold the statistics of every weight. Got none of {leaf.path}, only of "
            f"{abbreviate_list(stats)}. Collect them on this model, with the same `where`."
        )
    if tuple(found.shape) != tuple(leaf.value.shape):
        raise ValueError(
            f"`activations` must hold the statistics of this model. Got those of a weight of shape {found.shape} for "
            f"{leaf.path}, of shape {tuple(leaf.value.shape)}. Collect them again."
        )
    if found.axis is None or found.looked_up:
        return None
    if not found.rows.all():
        raise ValueError(
            f"`activations` must have observed every layer of {leaf.path}. Got: {found.note}. Collect statistics on "
            'more data, or let each example get its scale: activations="int8".'
        )
    return Activations(*found.activations())


def _chooser(format: FormatRules, selections: Sequence[Selection]) -> Callable[[Leaf], tuple[Use | None, str]]:
    """Returns a function from an eligible leaf to its format, or to `None`, and the reason."""
    if isinstance(format, Mapping):
        check_patterns(format, [leaf for leaf, _ in selections], "format")
        check_order(format, [leaf for leaf, refusal in selections if refusal is None], "format")
        rules = [(pattern, None if f is None else as_use(f)) for pattern, f in format.items()]

        def choose_by_pattern(leaf: Leaf) -> tuple[Use | None, str]:
            taken = ((use, f"rule {show_pattern(pattern)!r}") for pattern, use in rules if matches(pattern, leaf))
            return next(taken, (None, "no rule matches"))

        return choose_by_pattern
    if callable(format) and not isinstance(format, (AbstractFormat, str, type, Use)):

        def choose_by_function(leaf: Leaf) -> tuple[Use | None, str]:
            chosen = format(leaf.path, leaf.value)
            if chosen is None:
                return None, "the format function returned None"
            try:
                return as_use(chosen), "the format function"
            except (TypeError, ValueError) as e:
                raise type(e)(f"{leaf.path}: {e}") from None

        return choose_by_function
    one = as_use(format)  # pyright: ignore[reportArgumentType]
    return lambda leaf: (one, "a weight")


def _nothing_message(decisions: Sequence[Decision]) -> str:
    if not decisions:
        return "The tree must hold something to quantize. Got an empty tree. Pass a model, or a tree of its parameters."
    arrays = [d for d in decisions if d.reason != "not an array"]
    if not arrays:
        return "The tree must hold something to quantize. Got none with arrays. Pass the tree first, then the format."
    quantized = [d for d in arrays if is_quantized(d.leaf.value)]
    reasons = abbreviate_list(f"{d.leaf.path}: {d.reason}" for d in arrays)
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
