"""Runs a traced program and follows its weights to each use: products, lookups, sums.

A program may multiply by a transposed, reshaped, masked or selected part of a weight, in a loop over layers, or behind
`jax.checkpoint`. The program runs as it was traced: no array is replaced.
"""

from collections.abc import Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import Array

from .. import _compat
from .._compat import bind_equation as bind
from . import views
from .facts import AbstractFollower, combine_facts, Data, Fact, find_views, is_codes, Parameter, Result
from .loops import CONTROL_FLOW, Run
from .products import arrange
from .views import Concatenated, View


def follow(
    program: ClosedJaxpr,
    inputs: Sequence[Array],
    facts: Sequence[Fact],
    shapes: Sequence[tuple[int, ...]],
    follower: AbstractFollower,
) -> list[Array]:
    """Runs a program, and reports each use of a weight to `follower`.

    **Arguments:**

    - `program`: as `jax.make_jaxpr` returns it.
    - `inputs`, `facts`: its arguments, and a fact about each.
    - `shapes`: the shapes of the weights.

    **Returns:**

    The results of the program.
    """
    return Run(shapes, follower, _RULES).run(_compat.open_jaxpr(program), inputs, facts)[0]


# Elementwise operations.


def _elementwise(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """Masks, scales or casts values. The result is a view unless it depends on data.

    Codes stay codes of the weight, also where a loop or an update chooses between two.
    """
    others_are_data = any(fact is Data for fact in facts)
    shape = _compat.result_shape(equation)
    codes = [f for f, x in zip(facts, values, strict=True) if is_codes(f) and jnp.shape(x) == shape]
    if codes:
        outputs = bind(equation, values)
        still_codes = jnp.issubdtype(outputs[0].dtype, jnp.integer)
        return outputs, [codes[0] if still_codes else views.decode(codes[0], len(shape))]
    kept = [
        f for f, x in zip(facts, values, strict=True) if isinstance(f, View | Concatenated) and jnp.shape(x) == shape
    ]
    if equation.primitive.name == "div" and not isinstance(facts[0], View | Concatenated):
        kept = []
    if others_are_data or not kept:
        return run.default(equation, values, facts)
    if equation.primitive.name in _SUMS and _arranged_alike(facts):
        weights = dict.fromkeys(view.weight for fact in facts for view in fact.terms)
        return bind(equation, values), [facts[0]._replace(weight=next(iter(weights)), added=tuple(weights)[1:])]
    if len(facts) > 1:
        run.use(equation, facts, excluding=kept[0] if isinstance(kept[0], View) else None)
    return bind(equation, values), [kept[0]]


_SUMS = ("add", "add_any", "sub", "complex")


def _arranged_alike(facts: Sequence[Fact]) -> TypeGuard[Sequence[View]]:
    """Whether two facts are views that hold the values of their weights in the same places."""
    first, *rest = facts
    return isinstance(first, View) and all(isinstance(f, View) and f.arrangement == first.arrangement for f in rest)


def _compare(_: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """Compares values. A mask computed from a weight does not count as a use of it."""
    return bind(equation, values), [combine_facts(facts)]


def _pass_through(_: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    return bind(equation, values), list(facts)


# Operations that move values: transpose, reshape, slice, gather, concatenate.


def _move(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    first, params, shape = facts[0], equation.params, values[0].shape
    name, new_shape = equation.primitive.name, _compat.result_shape(equation)
    axes = lambda name: [int(axis) for axis in params[name]]
    if isinstance(first, Concatenated) and name == "transpose":
        return bind(equation, values), [views.transpose_concatenated(first, axes("permutation"))]
    if not isinstance(first, View) or (name == "reshape" and params["dimensions"] is not None):
        return run.default(equation, values, facts)
    if name == "transpose":
        view = views.transpose(first, axes("permutation"))
    elif name == "squeeze":
        view = views.squeeze(first, axes("dimensions"))
    elif name == "broadcast_in_dim":
        view = views.broadcast(first, shape, new_shape, axes("broadcast_dimensions"))
    elif name == "rev":
        view = views.take(first, {axis: lambda at: at[::-1] for axis in axes("dimensions")})
    else:
        view = views.reshape(first, shape, new_shape)
    return bind(equation, values), [view]


def _slice(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    first, params = facts[0], equation.params
    if not isinstance(first, View):
        return run.default(equation, values, facts)
    shape = values[0].shape
    steps = params["strides"] or [1] * len(shape)
    bounds = enumerate(zip(params["start_indices"], params["limit_indices"], steps, strict=True))
    chosen = {axis: slice(*b) for axis, b in bounds if b != (0, shape[axis], 1)}
    # A slice of one row is a lookup. A matrix is a layer of a stack, or a part of a weight.
    is_row = bool(chosen) and sum(n > 1 for n in _compat.result_shape(equation)) < 2
    if is_row:
        run.report_lookup(first, equation)
    selected = views.take(first, {axis: lambda at, part=part: at[part] for axis, part in chosen.items()}, is_row)
    return bind(equation, values), [selected]


def _split(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    first, axis = facts[0], equation.params["axis"]
    if not isinstance(first, View):
        return run.default(equation, values, facts)
    parts, start = [], 0
    for size in equation.params["sizes"]:
        parts.append(views.take(first, {axis: lambda at, start=start, size=size: at[start : start + size]}))
        start += size
    return bind(equation, values), parts


def _dynamic_slice(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    first, sizes = facts[0], equation.params["slice_sizes"]
    if not isinstance(first, View):
        return run.default(equation, values, facts)
    shape, starts = values[0].shape, values[1:]
    # The start of a whole axis is clamped to zero.
    chosen = {axis: (starts[axis], size) for axis, size in enumerate(sizes) if size != shape[axis]}
    choose = {
        axis: lambda at, start=start, size=size: jax.lax.dynamic_slice(jnp.asarray(at), (start,), (size,))
        for axis, (start, size) in chosen.items()
    }
    if chosen:
        run.report_lookup(first, equation)
    return bind(equation, values), [views.take(first, choose, bool(chosen))]


def _gather(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """Selects entries along one axis, as an embedding does and a stack of experts."""
    first, params = facts[0], equation.params
    dnums, sizes = params["dimension_numbers"], params["slice_sizes"]
    if first is Parameter and isinstance(facts[1], View):  # a codebook, indexed by codes
        return _decode(run, equation, values, facts[1:])
    if not isinstance(first, View):
        return run.default(equation, values, facts)
    run.report_lookup(first, equation)
    shape, ndim = values[0].shape, len(_compat.result_shape(equation))
    axes: list[views.Digits] = [()] * ndim
    dropped = {*dnums.collapsed_slice_dims, *dnums.operand_batching_dims}
    offsets = [axis for axis in range(len(shape)) if axis not in dropped]
    for axis, to in zip(offsets, dnums.offset_dims, strict=True):
        axes[to] = first.axes[axis] if sizes[axis] == shape[axis] else (() if sizes[axis] == 1 else None)
    selected, rows = first, [axis for axis in range(ndim) if axis not in dnums.offset_dims]
    chosen = [axis for axis in dnums.start_index_map if sizes[axis] != shape[axis]]
    single = len(chosen) == 1 and sizes[chosen[0]] == 1 and not dnums.operand_batching_dims
    if single and len(rows) < 2:
        at = values[1][..., list(dnums.start_index_map).index(chosen[0])].reshape(-1)
        at = jnp.clip(at, 0, shape[chosen[0]] - 1)
        selected = views.take(first, {chosen[0]: lambda values: jnp.asarray(values)[at]})
        if rows:
            axes[rows[0]] = selected.axes[chosen[0]]
        else:
            selected = views.squeeze(selected, chosen)
    else:  # the indices of the entries are not followed
        unknown = [digit._replace(at=None) for axis in (*chosen, *dropped) for digit in first.axes[axis] or ()]
        selected = first._replace(fixed=(*first.fixed, *unknown))
    return bind(equation, values), [selected._replace(axes=tuple(axes), looked_up=True)]


def _concatenate(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    axis = equation.params["dimension"]
    if any(fact is Data or isinstance(fact, Concatenated) for fact in facts):
        return run.default(equation, values, facts)
    parts = [(f if isinstance(f, View) else None, x.shape[axis]) for f, x in zip(facts, values, strict=True)]
    return bind(equation, values), [Concatenated(axis, tuple(parts))]


# Products and quantized arrays. Of a quantized array, the codes are followed.


def _decode(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """Decodes codes. The result is a view of the weight with unknown axes."""
    first = facts[0]
    if not isinstance(first, View):
        return run.default(equation, values, facts)
    return bind(equation, values), [views.decode(first, len(_compat.result_shape(equation)))]


def _multiply_codes(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    weight = facts[equation.params["x_tree"].num_leaves :]
    for view in (view for fact in weight for view in find_views(fact)):
        run.report_use(view, "quantized_matmul", equation)
    return bind(equation, values), [combine_facts(facts)]


def _multiply(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    values, rest = list(values), list(facts)
    # Looked-up rows are inputs where the other operand is a parameter, and a weight where it is data.
    looked_up = lambda fact: all(view.looked_up for view in find_views(fact))
    weights = [
        n
        for n, fact in enumerate(facts[:2])
        if isinstance(fact, View | Concatenated) and not (looked_up(fact) and facts[1 - n] is not Data)
    ]
    for n in weights:
        weight = facts[n]
        products = arrange(equation, values, n, weight, run.shapes) if isinstance(weight, View | Concatenated) else []
        if products:
            rest[n] = Parameter
        for product in products:
            values[1 - n] = run.multiply(product._replace(x=values[1 - n]), equation)
    run.use(equation, rest)
    return bind(equation, values), [combine_facts(facts)]


_RULES = {
    **CONTROL_FLOW,
    **dict.fromkeys(
        (
            "convert_element_type",
            "bitcast_convert_type",
            "reduce_precision",
            "neg",
            "copy",
            "copy_p",
            "name",
            "stop_gradient",
            "sharding_constraint",
            "real",
            "mul",
            "div",
            "add",
            "add_any",
            "sub",
            "complex",
            "select_n",
            "clamp",
            "max",
            "min",
            "pvary",
            "pcast",
            "reshard",
        ),
        _elementwise,
    ),
    **dict.fromkeys(("transpose", "squeeze", "broadcast_in_dim", "reshape", "rev"), _move),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "is_finite"), _compare),
    **dict.fromkeys(("optimization_barrier", "device_put"), _pass_through),
    **dict.fromkeys(("pure_callback", "io_callback", "debug_callback"), Run.default),  # to expand would call them
    "slice": _slice,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "concatenate": _concatenate,
    "dequantize": _decode,
    "quantized_matmul": _multiply_codes,
    **dict.fromkeys(("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"), _multiply),
}
