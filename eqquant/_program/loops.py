"""Runs programs, and programs within a program: calls, branches and loops.

In a loop over stacked layers, the view of a weight holds the index of the current layer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array

from .. import _compat
from .._compat import bind_equation as bind
from .facts import (
    AbstractFollower,
    combine_facts,
    Data,
    Fact,
    find_views,
    is_codes,
    Parameter,
    Result,
    Scales,
    UseSite,
)
from .products import Product
from .views import Concatenated, Digit, View


class Run:
    """An interpreter of a program, by rules for its operations."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], follower: AbstractFollower, rules: Mapping[str, Callable[..., Result]]
    ) -> None:
        self.shapes, self.follower, self.rules = shapes, follower, rules
        self.enclosing: tuple[JaxprEqn, ...] = ()

    def run(self, program: tuple[Jaxpr, list[Array]], inputs: Sequence[Array], facts: Sequence[Fact]) -> Result:
        """Returns the results of a program, given with its constants, and the fact about each."""
        jaxpr, consts = program
        values: dict[Var, Array] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        known: dict[Var, Fact] = dict.fromkeys(jaxpr.constvars, Parameter)
        known.update(zip(jaxpr.invars, facts, strict=True))
        value = lambda atom: jnp.asarray(atom.val) if isinstance(atom, Literal) else values[atom]
        fact = lambda atom: Parameter if isinstance(atom, Literal) else known[atom]
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            operands, known_before = [value(atom) for atom in equation.invars], [fact(atom) for atom in equation.invars]
            if all(isinstance(f, type) for f in known_before) and name not in CONTROL_FLOW:
                outputs, after = bind(equation, operands), [combine_facts(known_before)] * len(equation.outvars)
            else:
                enclosing, self.enclosing = self.enclosing, (*self.enclosing, equation)
                outputs, after = self.rules.get(name, expand)(self, equation, operands, known_before)
                self.enclosing = enclosing
            values.update(zip(equation.outvars, outputs, strict=True))
            known.update(zip(equation.outvars, after, strict=True))
        return [value(atom) for atom in jaxpr.outvars], [fact(atom) for atom in jaxpr.outvars]

    def default(self, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
        """Runs an operation whose results are no views, and reports its weights as used by it."""
        self.use(equation, facts)
        return bind(equation, values), [combine_facts(facts)] * len(equation.outvars)

    def report_use(self, view: View, kind: str, equation: JaxprEqn) -> None:
        """Reports one use of a weight to the follower."""
        for term in view.terms:
            self.follower.use(UseSite(term.weight, kind, equation, self.enclosing[:-1], term.codes))

    def report_lookup(self, view: View, equation: JaxprEqn) -> None:
        """Reports the first selection of entries."""
        if not view.looked_up:
            self.report_use(view, "lookup", equation)

    def multiply(self, product: Product, equation: JaxprEqn) -> Array:
        """Reports a product to the follower, and returns the operand that it returns."""
        use = UseSite(product.view.weight, equation.primitive.name, equation, self.enclosing[:-1])
        return self.follower.multiply(product, use)

    def use(self, equation: JaxprEqn, facts: Sequence[Fact], *, excluding: Fact | None = None) -> None:
        """Reports each weight among the operands to the follower, as a use that is not a product."""
        for view in (view for fact in facts if fact is not excluding for view in find_views(fact)):
            if not view.looked_up:
                self.report_use(view, equation.primitive.name, equation)


def expand(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """Runs an operation that is a function of others, such as `custom_linear_solve`.

    Many primitives of Equinox and lineax are. One that is not has an implementation that is itself, or that cannot be
    traced.
    """
    operation = lambda *values: equation.primitive.impl(*values, **equation.params)
    try:
        program = _compat.open_jaxpr(jax.make_jaxpr(operation)(*values))
    except Exception:  # of any kind: an implementation expects concrete arrays
        return run.default(equation, values, facts)
    inner = program[0]
    while len(inner.eqns) == 1 and inner.eqns[0].primitive is _compat.jit_p:
        inner, _ = _compat.inner_jaxpr(inner.eqns[0])
    if len(inner.eqns) == 1 and inner.eqns[0].primitive is equation.primitive:
        return run.default(equation, values, facts)
    return run.run(program, values, facts)


def _run_call(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    return run.run(_compat.inner_jaxpr(equation), values, facts)


def _run_shard_map(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """Runs a function of parts of arrays. Which part a device has is not followed."""
    unknown = lambda fact: fact._replace(axes=(None,) * len(fact.axes), fixed=()) if isinstance(fact, View) else fact
    parts = [Data if isinstance(fact, Concatenated) else unknown(fact) for fact in facts]
    after: list[Fact] = []

    def call(*values: Array) -> list[Array]:
        outputs, after[:] = run.run(_compat.inner_jaxpr(equation), values, parts)
        return outputs

    run.use(equation, [fact for fact in facts if isinstance(fact, Concatenated)])
    return _compat.call_in_shard_map(call, values, equation.params), after


def _run_cond(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    facts_after: list[list[Fact]] = []

    def branch(closed: ClosedJaxpr, *operands: Array) -> list[Array]:
        outputs, after = run.run(_compat.open_jaxpr(closed), operands, facts[1:])
        facts_after.append(after)
        return outputs

    branches = [lambda *operands, closed=closed: branch(closed, *operands) for closed in equation.params["branches"]]
    outputs = jax.lax.switch(values[0], branches, *values[1:])
    joined = [_join(after) for after in zip(*facts_after, strict=True)]
    # A branch may return one weight or another, so these are not followed further.
    run.use(equation, [fact for after in facts_after for fact, one in zip(after, joined, strict=True) if one is Data])
    return list(outputs), [Data if facts[0] is Data and one is Parameter else one for one in joined]


def _join(facts: Sequence[Fact]) -> Fact:
    """Returns the fact about the result of one branch of several."""
    codes = (fact for fact in facts if is_codes(fact))
    return facts[0] if all(fact is facts[0] for fact in facts) else next(codes, Data)


def _run_while(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    params = equation.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    split = lambda items: (items[:n_cond], items[n_cond : n_cond + n_body], items[n_cond + n_body :])
    (cond_values, body_values, start), (cond_facts, body_facts, carried) = split(list(values)), split(list(facts))
    body, cond = _compat.open_jaxpr(params["body_jaxpr"]), _compat.open_jaxpr(params["cond_jaxpr"])
    kept = _carry_facts(body[0], n_body, carried)
    after: list[Fact] = []

    def test(carry: list[Array]) -> Array:
        return run.run(cond, [*cond_values, *carry], [*cond_facts, *kept])[0][0]

    def step(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        goes_on, carry = state
        outputs, after[:] = run.run(body, [*body_values, *carry], [*body_facts, *kept])
        if goes_on.ndim:  # under `vmap` each entry of the batch goes on by itself
            choose = lambda new, old: jnp.where(goes_on.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            outputs = [choose(new, old) for new, old in zip(outputs, carry, strict=True)]
        return test(outputs), outputs

    _, carry = jax.lax.while_loop(lambda state: jnp.any(state[0]), step, (test(start), start))
    _report_changed_carry(run, equation, carried, kept, after)
    return carry, kept


def _carry_facts(body: Jaxpr, before: int, carried: Sequence[Fact]) -> list[Fact]:
    """Returns the facts about the carry of a loop.

    A value that the body returns unchanged keeps its fact, and codes and scales stay those of the weight. Another
    changed value depends on data.
    """
    inner = body.invars[before : before + len(carried)]
    keeps = lambda fact: is_codes(fact) or fact is Scales
    changes = [out is not var and not keeps(fact) for out, var, fact in zip(body.outvars, inner, carried, strict=False)]
    return [Data if change else fact for fact, change in zip(carried, changes, strict=True)]


def _report_changed_carry(
    run: Run, equation: JaxprEqn, before: Sequence[Fact], kept: Sequence[Fact], after: Sequence[Fact]
) -> None:
    """Reports weights that a loop changes or returns, which are not followed further."""
    changed = [now is not fact for fact, now in zip(before, kept, strict=True)]
    results = [fact for n, fact in enumerate(after) if n >= len(kept) or changed[n]]
    run.use(equation, [*(fact for fact, change in zip(before, changed, strict=True) if change), *results])


def _run_scan(run: Run, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    params = equation.params
    consts, start, xs = _compat.scan_operands(values, params)
    const_facts, carried, xs_facts = _compat.scan_operands(facts, params)
    body = _compat.open_jaxpr(params["jaxpr"])
    kept = _carry_facts(body[0], len(consts), carried)
    count = len(start)
    after: list[Fact] = []

    def step(carry: list[Array], indexed: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
        index, slices = indexed
        taken: dict[tuple[Any, ...], Digit] = {}
        known = [*const_facts, *kept, *(_take_layer(fact, index, taken) for fact in xs_facts)]
        outputs, after[:] = run.run(body, [*consts, *carry, *slices], known)
        return outputs[:count], outputs[count:]

    run.use(equation, [fact for fact in xs_facts if isinstance(fact, Concatenated)])
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, start, (jnp.arange(params["length"]), xs), **options)
    _report_changed_carry(run, equation, carried, kept, after)
    return [*carry, *ys], [*kept, *[combine_facts([*facts, *kept])] * len(ys)]


def _take_layer(fact: Fact, index: Array, taken: dict[tuple[Any, ...], Digit]) -> Fact:
    """Returns the fact about one entry along the first axis.

    Weights with the same layers share the digits in `taken`.
    """
    if not isinstance(fact, View):
        return Parameter if isinstance(fact, Concatenated) else fact
    first = fact.axes[0]
    fixed = [*fact.fixed]
    if first is not None:
        inner = 1
        for digit in reversed(first):
            at = jnp.asarray(digit.values)[index // inner % digit.size]
            fixed.append(taken.setdefault((inner, digit.key), digit._replace(at=at)))
            inner *= digit.size
    return fact._replace(axes=fact.axes[1:], fixed=tuple(fixed))


CONTROL_FLOW = {
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"),
        _run_call,
    ),
    "shard_map": _run_shard_map,
    "cond": _run_cond,
    "while": _run_while,
    "scan": _run_scan,
}
