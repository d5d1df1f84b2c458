"""Runs a traced program and follows weights through it, to every use of a weight: products, lookups, sums.

A program may multiply by a transposed, reshaped, masked or selected part of a weight, in a loop over layers, or behind
`jax.checkpoint`. The program itself runs as it was traced: no array in it stands for another.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array

from .. import _compat
from . import views
from .facts import AbstractFollower, AbstractRun, bind, Data, Fact, Parameter, plain_fact, Result, SeenUse, views_of
from .loops import run_call, run_cond, run_implementation, run_scan, run_while
from .products import arrange, Product
from .views import Joined, View


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


class _Run(AbstractRun):
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
                outputs, after = bind(equation, given), [plain_fact(before)] * len(equation.outvars)
            else:
                around, self.around = self.around, (*self.around, equation)
                outputs, after = _RULES.get(equation.primitive.name, _default)(self, equation, given, before)
                self.around = around
            values.update(zip(equation.outvars, outputs, strict=True))
            known.update(zip(equation.outvars, after, strict=True))
        return [value(atom) for atom in jaxpr.outvars], [fact(atom) for atom in jaxpr.outvars]

    def tell(self, view: View, kind: str, with_data: bool, equation: JaxprEqn) -> None:
        """Tells the follower of one use of a weight."""
        self.follower.use(SeenUse(view.weight, kind, with_data, equation, self.around[:-1]))

    def multiply(self, product: Product, with_data: bool, equation: JaxprEqn) -> Array:
        """Returns the other operand of a product, once the follower has seen it."""
        use = SeenUse(product.view.weight, equation.primitive.name, with_data, equation, self.around[:-1])
        return self.follower.multiply(product, use)

    def use(self, equation: JaxprEqn, facts: Sequence[Fact], *, besides: View | None = None) -> None:
        """Tells the follower that an operation uses weights in another way than as a product."""
        for n, fact in enumerate(facts):
            others = [f for m, f in enumerate(facts) if m != n]
            with_data = any(f is Data or (isinstance(f, View) and f.looked_up) for f in others)
            for view in views_of(fact):
                if view is not besides and not view.looked_up:
                    self.tell(view, equation.primitive.name, with_data, equation)


def _default(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    run.use(equation, facts)
    return bind(equation, values), [plain_fact(facts)] * len(equation.outvars)


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
    return bind(equation, values), [kept[0]]


def _compare(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """A mask made of a weight, such as where it is finite, is no use of it."""
    del run
    return bind(equation, values), [plain_fact(facts)]


def _pass_through(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    del run
    return bind(equation, values), list(facts)


# Operations that move values.


def _move(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    first, params, shape = facts[0], equation.params, values[0].shape
    name, new_shape = equation.primitive.name, _compat.result_shape(equation)
    axes = lambda name: [int(axis) for axis in params[name]]
    if isinstance(first, Joined) and name == "transpose":
        return bind(equation, values), [views.transpose_joined(first, axes("permutation"))]
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
    return bind(equation, values), [moved]


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
    return bind(equation, values), [taken]


def _split(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    first, axis = facts[0], equation.params["axis"]
    if not isinstance(first, View):
        return _default(run, equation, values, facts)
    parts, start = [], 0
    for size in equation.params["sizes"]:
        parts.append(views.take(first, {axis: lambda at, start=start, size=size: at[start : start + size]}))
        start += size
    return bind(equation, values), parts


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
    return bind(equation, values), [views.take(first, choose, bool(chosen))]


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
    return bind(equation, values), [taken._replace(axes=tuple(axes), looked_up=True)]


def _concatenate(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    axis = equation.params["dimension"]
    if any(fact is Data or isinstance(fact, Joined) for fact in facts):
        return _default(run, equation, values, facts)
    parts = [(f if isinstance(f, View) else None, x.shape[axis]) for f, x in zip(facts, values, strict=True)]
    return bind(equation, values), [Joined(axis, tuple(parts))]


# Products and quantized arrays, whose codes are followed.


def _decode(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """Decodes codes: the result is of the weight, but which axes are which is not followed."""
    first = facts[0]
    if not isinstance(first, View):
        return _default(run, equation, values, facts)
    unknown = (None,) * len(_compat.result_shape(equation))
    return bind(equation, values), [first._replace(axes=unknown, fixed=())]


def _multiply_codes(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    weight = facts[equation.params["x_tree"].num_leaves :]
    for view in (view for fact in weight for view in views_of(fact)):
        run.tell(view, "quantized_matmul", True, equation)
    return bind(equation, values), [plain_fact(facts)]


def _multiply(run: _Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    values, rest = list(values), list(facts)
    # Rows that were looked up are the input of a parameter, and a weight for other data.
    looked_up = lambda fact: all(view.looked_up for view in views_of(fact))
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
            with_data = facts[1 - n] is Data
            values[1 - n] = run.multiply(product._replace(x=values[1 - n]), with_data, equation)
    run.use(equation, rest)
    return bind(equation, values), [plain_fact(facts)]


_INNER = {
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"),
        run_call,
    ),
    "linear_solve": run_implementation,  # of lineax
    "cond": run_cond,
    "while": run_while,
    "scan": run_scan,
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
