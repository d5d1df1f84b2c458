"""Rules for calls, branches and loops: programs within a program.

In a loop over stacked layers, the view of a weight holds the index of the current layer.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxtyping import Array

from .. import _compat
from .facts import AbstractRun, combine_facts, Data, Fact, is_codes, Parameter, Result, Scales
from .views import Concatenated, Digit, View


def run_call(run: AbstractRun, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    jaxpr, consts = _compat.inner_jaxpr(equation)
    return run.run(jaxpr, [*consts, *values], [*[Parameter] * len(consts), *facts])


def run_implementation(
    run: AbstractRun, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]
) -> Result | None:
    """Runs an operation that is a function of others, such as `custom_linear_solve`.

    Many primitives of Equinox and lineax are. Returns `None` for one that is not: its implementation is itself, or
    cannot be traced.
    """
    operation = lambda *values: equation.primitive.impl(*values, **equation.params)
    try:
        jaxpr, consts = _compat.open_jaxpr(jax.make_jaxpr(operation)(*values))
    except Exception:  # of any kind: an implementation expects concrete arrays
        return None
    inner = jaxpr
    while len(inner.eqns) == 1 and inner.eqns[0].primitive is _compat.jit_p:
        inner, _ = _compat.inner_jaxpr(inner.eqns[0])
    if len(inner.eqns) == 1 and inner.eqns[0].primitive is equation.primitive:
        return None
    return run.run(jaxpr, [*consts, *values], [*[Parameter] * len(consts), *facts])


def run_shard_map(run: AbstractRun, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    """Runs a function of parts of arrays. Which part a device has is not followed."""
    jaxpr, consts = _compat.inner_jaxpr(equation)
    unknown = lambda fact: fact._replace(axes=(None,) * len(fact.axes), fixed=()) if isinstance(fact, View) else fact
    parts = [Data if isinstance(fact, Concatenated) else unknown(fact) for fact in facts]
    after: list[Fact] = []

    def call(*values: Array) -> list[Array]:
        outputs, after[:] = run.run(jaxpr, [*consts, *values], [*[Parameter] * len(consts), *parts])
        return outputs

    run.use(equation, [fact for fact in facts if isinstance(fact, Concatenated)])
    return _compat.call_in_shard_map(call, values, equation.params), after


def run_cond(run: AbstractRun, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    facts_after: list[list[Fact]] = []

    def branch(closed: ClosedJaxpr, *operands: Array) -> list[Array]:
        jaxpr, consts = _compat.open_jaxpr(closed)
        outputs, after = run.run(jaxpr, [*consts, *operands], [*[Parameter] * len(consts), *facts[1:]])
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


def run_while(run: AbstractRun, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    params = equation.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    split = lambda items: (items[:n_cond], items[n_cond : n_cond + n_body], items[n_cond + n_body :])
    (cond_values, body_values, start), (cond_facts, body_facts, carried) = split(list(values)), split(list(facts))
    body, body_consts = _compat.open_jaxpr(params["body_jaxpr"])
    cond, cond_consts = _compat.open_jaxpr(params["cond_jaxpr"])
    kept = _carry_facts(body, n_body, carried)
    after: list[Fact] = []

    def test(carry: list[Array]) -> Array:
        known = [*[Parameter] * len(cond_consts), *cond_facts, *kept]
        return run.run(cond, [*cond_consts, *cond_values, *carry], known)[0][0]

    def step(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        goes_on, carry = state
        known = [*[Parameter] * len(body_consts), *body_facts, *kept]
        outputs, after[:] = run.run(body, [*body_consts, *body_values, *carry], known)
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
    run: AbstractRun, equation: JaxprEqn, before: Sequence[Fact], kept: Sequence[Fact], after: Sequence[Fact]
) -> None:
    """Reports weights that a loop changes or returns, which are not followed further."""
    changed = [now is not fact for fact, now in zip(before, kept, strict=True)]
    results = [fact for n, fact in enumerate(after) if n >= len(kept) or changed[n]]
    run.use(equation, [*(fact for fact, change in zip(before, changed, strict=True) if change), *results])


def run_scan(run: AbstractRun, equation: JaxprEqn, values: Sequence[Array], facts: Sequence[Fact]) -> Result:
    params = equation.params
    consts, start, xs = _compat.scan_operands(values, params)
    const_facts, carried, xs_facts = _compat.scan_operands(facts, params)
    body, body_consts = _compat.open_jaxpr(params["jaxpr"])
    kept = _carry_facts(body, len(consts), carried)
    count = len(start)
    after: list[Fact] = []

    def step(carry: list[Array], indexed: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
        index, slices = indexed
        taken: dict[tuple[Any, ...], Digit] = {}
        known = [
            *[Parameter] * len(body_consts),
            *const_facts,
            *kept,
            *(_take_layer(fact, index, taken) for fact in xs_facts),
        ]
        outputs, after[:] = run.run(body, [*body_consts, *consts, *carry, *slices], known)
        return outputs[:count], outputs[count:]

    run.use(equation, [fact for fact in xs_facts if isinstance(fact, Concatenated)])
    carry, ys = jax.lax.scan(
        step,
        start,
        (jnp.arange(params["length"]), xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
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
