"""Runs a traced program and follows weights through it, to every use of a weight: products, lookups, sums.

A program may multiply by a transposed, reshaped, masked or selected part of a weight, in a loop over layers, or behind
`jax.checkpoint`. The program itself runs as it was traced: no array in it stands for another.
"""

import abc
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array

from .. import _compat
from . import views
from .products import arrange, Product
from .views import Joined, View


class Data:
    """Known of a value that depends on the data."""


class Parameter:
    """Known of a value that depends on parameters of the model alone, and is a view of no weight."""


Fact: TypeAlias = View | Joined | type[Data] | type[Parameter]


class Use(NamedTuple):
    """One use of a weight that is no product of floats.

    - `weight`: the number of the weight.
    - `kind`: the name of the primitive; `"lookup"` for a selection of entries.
    - `with_data`: whether other operands depend on the data.
    - `equation`: the operation.
    - `around`: the calls and loops that it stands in, from the outermost.
    """

    weight: int
    kind: str
    with_data: bool
    equation: JaxprEqn
    around: tuple[JaxprEqn, ...] = ()

    @property
    def line(self) -> str:
        """Where the operation stands in the user's code; "" if unknown. Inside a `jit` JAX knows the call alone."""
        lines = map(_compat.source_line, (self.equation, *reversed(self.around)))
        return next(filter(None, lines), "")


class AbstractFollower(abc.ABC):
    """Gets every use of weights that a program makes, while it runs."""

    @abc.abstractmethod
    def multiply(self, product: Product, equation: JaxprEqn) -> Array:
        """Returns the other operand of a product, `product.x`, before it is multiplied."""

    @abc.abstractmethod
    def use(self, use: Use) -> None:
        """Gets a use that is no product."""


def follow(
    program: ClosedJaxpr,
    inputs: Sequence[Array],
    facts: Sequence[Fact],
    shapes: Sequence[tuple[int, ...]],
    follower: AbstractFollower,
) -> list[Array]:
    """Runs a program and tells `follower` how it uses weights.

    **Arguments:**

    - `program`: as `jax.make_jaxpr` returns it.
    - `inputs`, `facts`: its arguments, and what is known of each.
    - `shapes`: the shapes of the weights.

    **Returns:**

    The results of the program.
    """
    jaxpr, consts = _compat.open_jaxpr(program)
    known = [*[Parameter] * len(consts), *facts]
    return _Run(shapes, follower).run(jaxpr, [*consts, *inputs], known)[0]


class _Run:
    def __init__(self, shapes: Sequence[tuple[int, ...]], follower: AbstractFollower) -> None:
        self.shapes, self.follower = shapes, follower
        self.around: tuple[JaxprEqn, ...] = ()

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Array], facts: Sequence[Fact]) -> tuple[list[Array], list[Fact]]:
        """Returns the results of a program, and what is known of each."""
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values: dict[Var, Array] = dict(zip(variables, inputs, strict=True))
        known: dict[Var, Fact] = dict(zip(variables, facts, strict=True))
        value = lambda atom: jnp.asarray(atom.val) if isinstance(atom, Literal) else values[atom]
        fact = lambda atom: Parameter if isinstance(atom, Literal) else known[atom]
        for equation in jaxpr.eqns:
            given, before = [value(atom) for atom in equation.invars], [fact(atom) for atom in equation.invars]
            if all(isinstance(f, type) for f in before) and equation.primitive.name not in _INNER:
                outputs, after = _bind(equation, given), [_plain(before)] * len(equation.outvars)
            else:
                around, self.around = self.around, (*self.around, equation)
                outputs, after = _RULES.get(equation.primitive.name, _default)(self, equation, given, before)
                self.around = around
            values.update(zip(equation.outvars, outputs, strict=True))
            known.update(zip(equation.outvars, after, strict=True))
        return [value(atom) for atom in jaxpr.outvars], [fact(atom) for atom in jaxpr.outvars]

    def tell(self, view: View, kind: str, with_data: bool, equation: JaxprEqn) -> None:
        """Tells the follower of one use of a weight."""
        self.follower.use(Use(view.weight, kind, with_data, equation, self.around[:-1]))

    def use(self, equation: JaxprEqn, facts: Sequence[Fact], *, besides: View | None = None) -> None:
        """Tells the follower that an operation uses weights in another way than as a product."""
        for n, fact in enumerate(facts):
            others = [f for m, f in enumerate(facts) if m != n]
            with_data = any(f is Data or (isinstance(f, View) and f.looked_up) for f in others)
            for view in _views(fact):
                if view is not besides and not view.looked_up:
                    self.tell(view, equation.primitive.name, with_data, equation)


def _views(fact: Fact) -> list[View]:
    if isinstance(fact, View):
        return [fact]
    return [part for part, _ in fact.parts if part is not None] if isinstance(fact, Joined) else []


def _plain(facts: Sequence[Fact]) -> type[Data] | type[Parameter]:
    """Returns what is known of a result that is a view of no weight."""
    depends = lambda fact: fact is Data or any(view.looked_up for view in _views(fact))
    return Data if any(map(depends, facts)) else Parameter


def _bind(equation: JaxprEqn, values: Sequence[Array]) -> list[Array]:
    return _compat.bind_equation(equation, values)


Result: TypeAlias = tuple[list[Array], list[Fact]]


def _default(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    run.use(equation, facts)
    return _bind(equation, values), [_plain(facts)] * len(equation.outvars)


# Operations that keep each value where it is.


def _elementwise(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """A mask, a factor, a cast: the result is a view of a weight unless data takes part in it."""
    others_are_data = any(fact is Data for fact in facts)
    shape = _compat.result_shape(equation)
    kept = [f for f, x in zip(facts, values, strict=True) if isinstance(f, View | Joined) and jnp.shape(x) == shape]
    if equation.primitive.name == "div" and not isinstance(facts[0], View | Joined):
        kept = []
    if others_are_data or not kept:
        return _default(run, equation, values, facts)
    if len(facts) > 1:
        run.use(equation, facts, besides=kept[0] if isinstance(kept[0], View) else None)
    return _bind(equation, values), [kept[0]]


def _compare(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """A mask made of a weight, such as where it is finite, is no use of it."""
    del run
    return _bind(equation, values), [_plain(facts)]


def _pass_through(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    del run
    return _bind(equation, values), list(facts)


# Operations that move values.


def _move(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    first, params, shape = facts[0], equation.params, values[0].shape
    name, new_shape = equation.primitive.name, _compat.result_shape(equation)
    axes = lambda name: [int(axis) for axis in params[name]]
    if isinstance(first, Joined) and name == "transpose":
        return _bind(equation, values), [views.transpose_joined(first, axes("permutation"))]
    if not isinstance(first, View) or (name == "reshape" and params["dimensions"] is not None):
        return _default(run, equation, values, facts)
    if name == "transpose":
        moved = views.transpose(first, axes("permutation"))
    elif name == "squeeze":
        moved = views.squeeze(first, axes("dimensions"))
    elif name == "broadcast_in_dim":
        moved = views.broadcast(first, shape, new_shape, axes("broadcast_dimensions"))
    elif name == "rev":
        moved = views.take(first, {axis: lambda at: at[::-1] for axis in axes("dimensions")})
    else:
        moved = views.reshape(first, shape, new_shape)
    return _bind(equation, values), [moved]


def _slice(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    first, params = facts[0], equation.params
    if not isinstance(first, View):
        return _default(run, equation, values, facts)
    shape = values[0].shape
    steps = params["strides"] or [1] * len(shape)
    bounds = enumerate(zip(params["start_indices"], params["limit_indices"], steps, strict=True))
    chosen = {axis: slice(*b) for axis, b in bounds if b != (0, shape[axis], 1)}
    # A single row is looked up; a matrix is a layer of a stack, or a part of a weight.
    is_row = bool(chosen) and sum(n > 1 for n in _compat.result_shape(equation)) < 2
    if is_row:
        run.tell(first, "lookup", False, equation)
    taken = views.take(first, {axis: lambda at, part=part: at[part] for axis, part in chosen.items()}, is_row)
    return _bind(equation, values), [taken]


def _split(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    first, axis = facts[0], equation.params["axis"]
    if not isinstance(first, View):
        return _default(run, equation, values, facts)
    parts, start = [], 0
    for size in equation.params["sizes"]:
        parts.append(views.take(first, {axis: lambda at, start=start, size=size: at[start : start + size]}))
        start += size
    return _bind(equation, values), parts


def _dynamic_slice(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    first, sizes = facts[0], equation.params["slice_sizes"]
    if not isinstance(first, View):
        return _default(run, equation, values, facts)
    shape, starts = values[0].shape, values[1:]
    # The start of a whole axis is clamped to zero.
    chosen = {axis: (starts[axis], size) for axis, size in enumerate(sizes) if size != shape[axis]}
    choose = {
        axis: lambda at, start=start, size=size: jax.lax.dynamic_slice(jnp.asarray(at), (start,), (size,))
        for axis, (start, size) in chosen.items()
    }
    if chosen:
        by_data = any(facts[1 + axis] is Data for axis in chosen)
        run.tell(first, "lookup", by_data, equation)
    return _bind(equation, values), [views.take(first, choose, bool(chosen))]


def _gather(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """Selects entries along one axis, as an embedding does and a stack of experts."""
    first, params = facts[0], equation.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    if first is Parameter and isinstance(facts[1], View):  # a table of the values that codes stand for
        return _decode(run, equation, values, facts[1:])
    if not isinstance(first, View):
        return _default(run, equation, values, facts)
    run.tell(first, "lookup", facts[1] is Data, equation)
    shape, ndim = values[0].shape, len(_compat.result_shape(equation))
    axes: list[views.Digits] = [()] * ndim
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    offsets = [axis for axis in range(len(shape)) if axis not in dropped]
    for axis, to in zip(offsets, numbers.offset_dims, strict=True):
        axes[to] = first.axes[axis] if sizes[axis] == shape[axis] else (() if sizes[axis] == 1 else None)
    taken, rows = first, [axis for axis in range(ndim) if axis not in numbers.offset_dims]
    chosen = [axis for axis in numbers.start_index_map if sizes[axis] != shape[axis]]
    single = len(chosen) == 1 and sizes[chosen[0]] == 1 and not numbers.operand_batching_dims
    if single and len(rows) < 2:
        at = values[1][..., list(numbers.start_index_map).index(chosen[0])].reshape(-1)
        at = jnp.clip(at, 0, shape[chosen[0]] - 1)
        taken = views.take(first, {chosen[0]: lambda values: jnp.asarray(values)[at]})
        if rows:
            axes[rows[0]] = taken.axes[chosen[0]]
        else:
            taken = views.squeeze(taken, chosen)
    else:  # which entries these are is not followed
        unknown = [digit._replace(at=None) for axis in (*chosen, *dropped) for digit in first.axes[axis] or ()]
        taken = first._replace(fixed=(*first.fixed, *unknown))
    return _bind(equation, values), [taken._replace(axes=tuple(axes), looked_up=True)]


def _concatenate(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    axis = equation.params["dimension"]
    if any(fact is Data or isinstance(fact, Joined) for fact in facts):
        return _default(run, equation, values, facts)
    parts = [(f if isinstance(f, View) else None, x.shape[axis]) for f, x in zip(facts, values, strict=True)]
    return _bind(equation, values), [Joined(axis, tuple(parts))]


# Products and quantized arrays, whose codes are followed.


def _decode(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """Decodes codes: the result is of the weight, but which axes are which is not followed."""
    first = facts[0]
    if not isinstance(first, View):
        return _default(run, equation, values, facts)
    unknown = (None,) * len(_compat.result_shape(equation))
    return _bind(equation, values), [first._replace(axes=unknown, fixed=())]


def _multiply_codes(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    weight = facts[equation.params["x_tree"].num_leaves :]
    for view in (view for fact in weight for view in _views(fact)):
        run.tell(view, "quantized_matmul", True, equation)
    return _bind(equation, values), [_plain(facts)]


def _multiply(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    values, rest = list(values), list(facts)
    # Rows that were looked up are the input of a parameter, and a weight for other data.
    looked_up = lambda fact: all(view.looked_up for view in _views(fact))
    weights = [
        n
        for n, fact in enumerate(facts[:2])
        if isinstance(fact, View | Joined) and not (looked_up(fact) and facts[1 - n] is not Data)
    ]
    for n in weights:
        weight = facts[n]
        products = arrange(equation, values, n, weight, run.shapes) if isinstance(weight, View | Joined) else []
        if products:
            rest[n] = Parameter
        for product in products:
            values[1 - n] = run.follower.multiply(product._replace(x=values[1 - n]), equation)
    run.use(equation, rest)
    return _bind(equation, values), [_plain(facts)]


# Programs within a program.


def _call(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    jaxpr, consts = _compat.inner_jaxpr(equation)
    return run.run(jaxpr, [*consts, *values], [*[Parameter] * len(consts), *facts])


def _cond(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    results: list[list[Fact]] = []

    def branch(closed: ClosedJaxpr, *operands: Array) -> list[Array]:
        jaxpr, consts = _compat.open_jaxpr(closed)
        outputs, after = run.run(jaxpr, [*consts, *operands], [*[Parameter] * len(consts), *facts[1:]])
        results.append(after)
        return outputs

    branches = [lambda *operands, closed=closed: branch(closed, *operands) for closed in equation.params["branches"]]
    outputs = jax.lax.switch(values[0], branches, *values[1:])
    same = [all(fact is after[0] for fact in after) for after in zip(*results, strict=True)]
    plain = Data if facts[0] is Data else Parameter
    mixed = [
        after[0] if alike and isinstance(after[0], type) else Data
        for alike, after in zip(same, zip(*results, strict=True), strict=True)
    ]
    return list(outputs), [Data if plain is Data else fact for fact in mixed]


def _while(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    params = equation.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    split = lambda items: (items[:n_cond], items[n_cond : n_cond + n_body], items[n_cond + n_body :])
    (cond_values, body_values, start), (cond_facts, body_facts, carried) = split(list(values)), split(list(facts))
    body, body_consts = _compat.open_jaxpr(params["body_jaxpr"])
    cond, cond_consts = _compat.open_jaxpr(params["cond_jaxpr"])
    kept = _carried(body, n_body, carried)

    def step(carry: list[Array]) -> list[Array]:
        known = [*[Parameter] * len(body_consts), *body_facts, *kept]
        return run.run(body, [*body_consts, *body_values, *carry], known)[0]

    def test(carry: list[Array]) -> Array:
        known = [*[Parameter] * len(cond_consts), *cond_facts, *kept]
        return run.run(cond, [*cond_consts, *cond_values, *carry], known)[0][0]

    _use_carried(run, equation, carried, kept)
    return list(jax.lax.while_loop(test, step, start)), kept


def _carried(body: Jaxpr, before: int, carried: Sequence[Fact]) -> list[Fact]:
    """Returns what is known of the values that a loop carries: those that no pass changes stay what they are."""
    inner = body.invars[before : before + len(carried)]
    changes = [out is not var for out, var in zip(body.outvars, inner, strict=False)]
    return [Data if change else fact for fact, change in zip(carried, changes, strict=True)]


def _use_carried(run: _Run, equation: JaxprEqn, before: Sequence[Fact], kept: Sequence[Fact]) -> None:
    run.use(equation, [fact for fact, now in zip(before, kept, strict=True) if now is not fact])


def _scan(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    params = equation.params
    consts, start, stacked = _compat.scan_operands(values, params)
    const_facts, carried, stacked_facts = _compat.scan_operands(facts, params)
    body, body_consts = _compat.open_jaxpr(params["jaxpr"])
    kept = _carried(body, len(consts), carried)
    count = len(start)

    def step(carry: list[Array], at: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
        number, slices = at
        known = [
            *[Parameter] * len(body_consts),
            *const_facts,
            *kept,
            *(_of_layer(fact, number) for fact in stacked_facts),
        ]
        outputs, _ = run.run(body, [*body_consts, *consts, *carry, *slices], known)
        return outputs[:count], outputs[count:]

    _use_carried(run, equation, carried, kept)
    run.use(equation, [fact for fact in stacked_facts if isinstance(fact, Joined)])
    carry, results = jax.lax.scan(
        step,
        start,
        (jnp.arange(params["length"]), stacked),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *results], [*kept, *[_plain([*facts, *kept])] * len(results)]


def _of_layer(fact: Fact, number: Array) -> Fact:
    """Returns what is known of one entry along the first axis."""
    if not isinstance(fact, View):
        return Parameter if isinstance(fact, Joined) else fact
    first = fact.axes[0]
    fixed = [*fact.fixed]
    if first is not None:
        inner = 1
        for digit in reversed(first):
            values = jnp.asarray(digit.values)
            fixed.append(digit._replace(at=values[number // inner % digit.size]))
            inner *= digit.size
    return fact._replace(axes=fact.axes[1:], fixed=tuple(fixed))


_INNER = {
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"), _call
    ),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
_RULES = {
    **_INNER,
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
    "optimization_barrier": _pass_through,
    "slice": _slice,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "concatenate": _concatenate,
    "dequantize": _decode,
    "quantized_matmul": _multiply_codes,
    **dict.fromkeys(("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"), _multiply),
}
