"""Decides the format, method and activations of each leaf, or why it is left alone."""

import collections
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .._array.array import is_quantized
from .._array.checks import check_not_masked, check_quantizable
from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._methods.fingerprint import check_same_weight
from .._methods.statistics import Activations, InputsError, LeafStats
from .._numerics.axes import as_axes
from .._types import PyTree
from .._wrappers.activation import ActivationQuantizedArray
from .._wrappers.simulated import FakeQuantizedArray
from .config import ActivationsLike, as_activations, as_config, Axis, QuantConfig
from .leaves import abbreviate_list, DenseArray, Leaf
from .missing import InputsErrors
from .roles import role_by_name
from .select import check_rules, find_named, find_rule, matches, Pattern, select_leaves, Selection, show_pattern, Where
from .sizes import as_struct, no_smaller_reason
from .weights import convolved_axes, ineligible_reason, input_axis, part_reason, place_reason, use_without_product


FormatLike = AbstractFormat | str | QuantConfig
# The key type of `Mapping` is invariant, so the union needs each kind of key.
FormatRules = (
    FormatLike
    | Mapping[str, FormatLike | None]
    | Mapping[re.Pattern[str], FormatLike | None]
    | Mapping[Pattern, FormatLike | None]
    | Callable[[str, DenseArray], FormatLike | None]
)
ActivationsRule = AbstractFormat | Mapping[str, LeafStats] | None


class Decision(NamedTuple):
    """The decision about a leaf: its format and quantized axes, or `None` and the reason.

    A weight that would not get smaller has axes but no format.

    - `has_explicit_axis`: whether a rule or the call sets the axis.
    """

    leaf: Leaf
    format: AbstractFormat | None
    axes: tuple[int, ...]
    reason: str
    method: AbstractMethod | None = None
    activations: Activations | None = None
    has_explicit_axis: bool = False


class _Choice(NamedTuple):
    """The configuration of a leaf by the rules or the call.

    - `is_final`: whether it is meant for this leaf alone, whatever its name says.
    - `sets_activations`: whether the rule itself sets activations.
    """

    format: AbstractFormat | None
    reason: str
    method: AbstractMethod | None = None
    activations: ActivationsRule = None
    axis: Axis = None
    is_final: bool = False
    sets_activations: bool = False

    def statistics(self, leaf: Leaf) -> LeafStats | None:
        """Returns the statistics of a leaf, from the method or for activations, or `None`."""
        found = [] if self.method is None else [self.method.statistics_for(path) for path in leaf.paths]
        if isinstance(self.activations, Mapping):
            found += [self.activations[path] for path in leaf.paths if path in self.activations]
        return next((stats for stats in found if stats is not None), None)

    def role(self, leaf: Leaf) -> str | None:
        """Returns why a leaf is not a weight by its name, or `None`; `None` if a product uses it."""
        stats = self.statistics(leaf)
        is_multiplied = stats is not None and stats.axis is not None and not stats.looked_up
        return None if is_multiplied else role_by_name(leaf)

    def axes(self, leaf: Leaf) -> tuple[tuple[int, ...], bool]:
        """Returns the quantized axes, and whether they are known: set by the user, or inferred."""
        stats = self.statistics(leaf)
        if self.axis is None and stats is not None and stats.axis is not None:
            axis, known = stats.axis, True
        else:
            axis, known = input_axis(leaf) if self.axis is None else (self.axis, True)
        check_not_masked(leaf.value, leaf.path)
        try:
            return check_quantizable(as_struct(leaf.value), axis, leaf.path)[1], known
        except ValueError as e:
            remedy = 'To give it to some weights alone: `{"*.proj": eqq.QuantConfig("nf4", axis=-2), "*": "nf4"}`.'
            raise ValueError(f"{e} {remedy}") from None


def decide(
    tree: PyTree,
    format: FormatRules,
    where: Where | None,
    axis: Axis,
    activations: ActivationsLike | None = None,
    method: AbstractMethod | None = None,
) -> list[Decision]:
    """Returns one decision per leaf. Raises before anything is quantized."""
    call_choice = _Choice(None, "", method, as_activations(activations), axis)
    selections = select_leaves(tree, where, ineligible=_ineligible_reason, skip=place_reason)
    choose = _make_chooser(format, selections, call_choice)
    decisions, by_rule, errors = [], collections.defaultdict(list), InputsErrors()
    for (leaf, refusal), is_named in zip(selections, find_named(tree, where), strict=True):
        choice = choose(leaf) if refusal is None else _Choice(None, refusal)
        with errors.collect(leaf.path):
            decisions.append(_decide_leaf(leaf, choice, is_named))
            if choice.sets_activations and decisions[-1].format is not None:
                by_rule[choice.reason].append(decisions[-1])
    errors.check([*errors, *(d.leaf.path for d in decisions if d.format is not None)])
    quantized = [d for d in decisions if d.format is not None]
    if not quantized:
        _report_nothing_to_quantize(decisions)
    # A rule, or a call, that sets activations for no product would be ignored silently.
    for matched in by_rule.values():
        _check_products(matched)
    if quantized and call_choice.activations is not None:
        _check_products(quantized)
    return decisions


def _decide_leaf(leaf: Leaf, choice: _Choice, is_named: bool) -> Decision:
    """Decides about one leaf.

    A leaf that `where` names is quantized. All others are quantized only if they get smaller.
    """
    if choice.format is None:
        return Decision(leaf, None, (), choice.reason)
    role = choice.role(leaf)
    if role is not None and not is_named and not choice.is_final:
        return Decision(leaf, None, (), role)
    axes, known = choice.axes(leaf)
    if not is_named and (reason := no_smaller_reason(leaf.value, choice.format, axes)) is not None:
        inputs, _ = input_axis(leaf)  # -1 where no layer says so
        differs = inputs != -1 and as_axes(inputs) != axes
        return Decision(leaf, None, axes, f"{reason}; its layer sums along {inputs}: see `axis`" if differs else reason)
    unknown = "" if known else "; its input axis is not known, blocks run along the last: see `axis`"
    activations, note = _choose_activations(leaf, choice.activations, axes, role)
    reason, is_given = choice.reason + unknown + note, choice.axis is not None
    return Decision(leaf, choice.format, axes, reason, choice.method, activations, is_given)


def decide_activations(
    tree: PyTree, where: Where | None, activations: ActivationsLike, **unused: object
) -> list[Decision]:
    """Returns one decision per leaf. Quantized arrays keep their codes and get activations."""
    for name, value in unused.items():
        if value is not None:
            raise ValueError(
                f"`{name}` is for arrays in float. With `format=None`, quantized arrays get activations only. Got "
                f"{name}={value!r}. Leave it out, or give a format."
            )
    rule, decisions, errors = as_activations(activations), [], InputsErrors()
    selections = select_leaves(tree, where, ineligible=_not_quantized_reason, kind="quantized arrays")
    for leaf, refusal in selections:
        if refusal is not None:
            decisions.append(Decision(leaf, None, (), refusal))
            continue
        axes = as_axes(leaf.value.axis)
        with errors.collect(leaf.path):
            chosen, note = _choose_activations(leaf, rule, axes, None)
            decisions.append(Decision(leaf, None, axes, f"quantized, and keeps its codes{note}", None, chosen))
    errors.check([leaf.path for leaf, refusal in selections if refusal is None])
    if all(refusal is not None for _, refusal in selections):
        wrappers = {type(d.leaf.parent) for d in decisions if part_reason(d.leaf) is not None}
        if ActivationQuantizedArray in wrappers:
            remedy = 'To change activations, wrap each weight: `eqq.arrays.ActivationQuantizedArray(w.array, "fp8")`.'
        elif wrappers:
            remedy = "Give weights their activations before they are wrapped, as by `loraify`."
        else:
            remedy = 'Give a format: `quantize_tree(model, "int8", activations="int8")`.'
        reasons = abbreviate_list(f"{d.leaf.path}: {d.reason}" for d in decisions if d.reason != "not an array")
        raise ValueError(
            "`quantize_activations` needs quantized arrays that products use. Got none to take them "
            f"({reasons}). {remedy}"
        )
    _check_products([d for d in decisions if d.axes])
    return decisions


def _ineligible_reason(leaf: Leaf) -> str | None:
    simulated = "simulated: `finalize` first" if isinstance(leaf.parent, FakeQuantizedArray) else None
    return ineligible_reason(leaf.value) or simulated


def _not_quantized_reason(leaf: Leaf) -> str | None:
    """Returns why a leaf cannot get activations, or `None` if it is a quantized array that can."""
    if not is_quantized(leaf.value):
        return ineligible_reason(leaf.value) or "not quantized"
    return part_reason(leaf)


def _check_products(decisions: Sequence[Decision]) -> None:
    """Raises if none of these weights gets activations."""
    if not any(d.activations for d in decisions):
        raise ValueError(
            "`activations` must be for weights that products use. Got none among "
            f"{abbreviate_list(f'{d.leaf.path} ({d.reason})' for d in decisions)}. Leave it out. If your code "
            'multiplies by one, wrap it: `eqq.arrays.ActivationQuantizedArray(eqq.quantize(w, "int8"), "int8")`.'
        )


def _choose_activations(
    leaf: Leaf, activations: ActivationsRule, axes: tuple[int, ...], role: str | None
) -> tuple[Activations | None, str]:
    """Returns the activations of a weight and a note; or `None`, and the note why."""
    if activations is None:
        return None, ""
    if (use := use_without_product(leaf) or role) is not None:
        return None, f"; {use}, so no activations"
    note = ""
    if isinstance(activations, Mapping):
        chosen = _find_calibrated_activations(leaf, activations)
        note = "; no product was observed, so no activations" if chosen is None else ""
    else:
        chosen = Activations(activations)
    if chosen is not None and (len(axes) > 1 or convolved_axes(leaf) is not None):
        note = "; multiplies codes under `eqq.quaxify`"
    return chosen, note


def _find_calibrated_activations(leaf: Leaf, stats: Mapping[str, LeafStats]) -> Activations | None:
    """Returns static activations from statistics of inputs; `None` if no product was observed."""
    found = next((stats[path] for path in leaf.paths if path in stats), None)
    if found is None:
        raise InputsError(
            "`activations` must hold the statistics of every weight",
            f"none of {leaf.path}",
            f"It has statistics of {abbreviate_list(stats)}. Collect them on this model, with the same `where`.",
        )
    if tuple(found.shape) != tuple(leaf.value.shape):
        raise InputsError(
            "`activations` must hold the statistics of this model",
            f"statistics of a weight of shape {found.shape} for {leaf.path}, of shape {tuple(leaf.value.shape)}",
            "Collect them again.",
        )
    if found.axis is None or found.looked_up:
        return None
    check_same_weight(found, "`activations`", leaf.path, leaf.value)
    return found.activations()


def _make_chooser(
    format: FormatRules, selections: Sequence[Selection], call_choice: _Choice
) -> Callable[[Leaf], _Choice]:
    """Returns a function from an eligible leaf to its choice. A rule overrides `call_choice`."""

    def choice(config: QuantConfig, reason: str, is_final: bool = False) -> _Choice:
        return call_choice._replace(
            format=config.format,
            reason=reason,
            method=call_choice.method if config.method is None else config.method,
            activations=call_choice.activations if config.activations is None else config.activations,
            axis=call_choice.axis if config.axis is None else config.axis,
            is_final=is_final,
            sets_activations=config.activations is not None,
        )

    if isinstance(format, Mapping):
        eligible = [leaf for leaf, refusal in selections if refusal is None]
        leaves = [leaf for leaf, _ in selections]
        rules: dict[Pattern, _Choice] = {}
        for pattern, f in check_rules(format, leaves, eligible, "format").items():
            reason = f"rule {show_pattern(pattern)!r}"
            rule = _Choice(None, reason) if f is None else choice(as_config(f), reason)
            # A pattern that matches only leaves that stay in float by name is meant for these.
            named = f is not None and all(rule.role(leaf) for leaf in eligible if matches(pattern, leaf))
            rules[pattern] = rule._replace(is_final=named)
        return lambda leaf: find_rule(rules, leaf)[1] or _Choice(None, "no rule matches")
    if callable(format) and not isinstance(format, (AbstractFormat, str, type, QuantConfig)):

        def choose_by_function(leaf: Leaf) -> _Choice:
            chosen = format(leaf.path, leaf.value)
            if chosen is None:
                return _Choice(None, "the format function returned None")
            try:
                return choice(as_config(chosen), "the format function", is_final=True)
            except (TypeError, ValueError) as e:
                raise type(e)(f"{leaf.path}: {e}") from None

        return choose_by_function
    one = choice(as_config(format), "a weight")  # pyright: ignore[reportArgumentType]
    return lambda leaf: one


def _report_nothing_to_quantize(decisions: Sequence[Decision]) -> None:
    """Raises if a tree has no weights, and warns if all stay in float because of their sizes."""
    small = [f"{d.leaf.path}: {d.reason}" for d in decisions if d.axes]
    if not small:
        raise ValueError(_nothing_message(decisions))
    warnings.warn(
        "Nothing is quantized: a weight must get smaller, with eight values or more for each scale. A leaf that "
        f"`where=` selects is quantized whatever its size, and `axis=` sets the axis. Got {abbreviate_list(small)}.",
        stacklevel=5,  # of `quantize_tree`
    )


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
            "float. To quantize it again, call `dequantize_tree` first. To quantize activations alone: "
            f'`eqq.quantize_activations(model, "int8")`, which keeps the codes. Its arrays are {reasons}.'
        )
    return (
        f"The tree must hold something to quantize. Got none among its {len(arrays)} arrays. `where=` selects leaves "
        f"that are left alone by default, and `plan_tree` shows why each is: {reasons}."
    )
