"""Finds out, from a traced program, which weights see what others computed."""

from typing import Any, NamedTuple

import jax.extend.core
import jax.tree_util as jtu

from ._observe import observe_p


class Place(NamedTuple):
    """Where an observed product stands in a program.

    - `level`: how many observed products its input depends on, one after the other.
    - `loop`: the loop that runs it, or `None`.
    - `uses`: in how many places the weight is used.
    """

    level: int
    loop: int | None
    uses: int = 1


def places_of(program: Any) -> dict[Any, Place]:
    """Returns the place of each `record` of a program traced with observed weights; in a loop, of its first pass."""
    found: dict[Any, Place] = {}
    _visit(getattr(program, "jaxpr", program), None, None, found)
    return found


def _visit(jaxpr: Any, levels: list[int] | None, loop: int | None, found: dict[Any, Place]) -> list[int]:
    """Returns the levels of the results, given those of the arguments."""
    level: dict[Any, int] = dict(zip(jaxpr.invars, levels or [0] * len(jaxpr.invars), strict=True))
    of = lambda var: 0 if isinstance(var, jax.extend.core.Literal) else level.get(var, 0)
    for equation in jaxpr.eqns:
        given = [of(var) for var in equation.invars]
        results = [max(given, default=0)] * len(equation.outvars)
        if equation.primitive is observe_p:
            record = equation.params["record"]
            first = found.get(record, Place(results[0], loop, 0))
            found[record] = first._replace(uses=first.uses + 1)
            results = [results[0] + 1]
        inner = [_visit_inner(sub, given, equation, loop, found) for sub in _programs_in(equation.params)]
        whole = [levels for levels in inner if len(levels) == len(results)]
        if whole:
            results = [max(levels) for levels in zip(*whole, strict=True)]
        level.update(zip(equation.outvars, results, strict=True))
    return [of(var) for var in jaxpr.outvars]


def _visit_inner(jaxpr: Any, given: list[int], equation: Any, loop: int | None, found: dict[Any, Place]) -> list[int]:
    # The arguments of an inner program are the last of those of the outer one: a `cond` has an index before them.
    count = len(jaxpr.invars)
    levels = given[len(given) - count :] if count <= len(given) else [max(given, default=0)] * count
    is_loop = equation.primitive.name == "scan" and loop is None
    return _visit(jaxpr, levels, id(equation) if is_loop else loop, found)


def _programs_in(params: dict[str, Any]) -> list[Any]:
    core: Any = jax.extend.core  # types of JAX 0.12 hide one of the two
    programs = (core.ClosedJaxpr, core.Jaxpr)
    is_program = lambda x: isinstance(x, programs)
    leaves = [x for value in params.values() for x in jtu.tree_leaves(value, is_leaf=is_program)]
    return [getattr(x, "jaxpr", x) for x in leaves if is_program(x)]
