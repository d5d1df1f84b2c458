"""Finds out, from a traced program, which weights see what others computed."""

from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params, Literal, Var

from ._observe import observe_p, Record


class Place(NamedTuple):
    """Where an observed product stands in a program.

    - `level`: how many observed products its input depends on, one after the other.
    - `loop`: the loop that runs it, or `None`.
    - `uses`: in how many places the weight is used.
    """

    level: int
    loop: int | None
    uses: int = 1


def find_places(program: ClosedJaxpr) -> dict[Record, Place]:
    """Returns the place of each `record` of a program traced with observed weights; in a loop, of its first pass."""
    found: dict[Record, Place] = {}
    _visit(program.jaxpr, [0] * len(program.jaxpr.invars), None, found)
    return found


def _visit(jaxpr: Jaxpr, levels: list[int], loop: int | None, found: dict[Record, Place]) -> list[int]:
    """Returns the levels of the results, given those of the arguments."""
    level: dict[Var, int] = dict(zip(jaxpr.invars, levels, strict=True))
    level_of = lambda var: 0 if isinstance(var, Literal) else level.get(var, 0)
    for equation in jaxpr.eqns:
        given = [level_of(var) for var in equation.invars]
        results = [max(given, default=0)] * len(equation.outvars)
        if equation.primitive is observe_p:
            record = equation.params["record"]
            first = found.get(record, Place(results[0], loop, 0))
            found[record] = first._replace(uses=first.uses + 1)
            results = [results[0] + 1]
        inner = [_visit_inner(sub, given, equation, loop, found) for sub in jaxprs_in_params(equation.params)]
        whole = [levels for levels in inner if len(levels) == len(results)]
        if whole:
            results = [max(levels) for levels in zip(*whole, strict=True)]
        level.update(zip(equation.outvars, results, strict=True))
    return [level_of(var) for var in jaxpr.outvars]


def _visit_inner(
    jaxpr: Jaxpr, given: list[int], equation: JaxprEqn, loop: int | None, found: dict[Record, Place]
) -> list[int]:
    # The arguments of an inner program are the last of those of the outer one: a `cond` has an index before them.
    count = len(jaxpr.invars)
    levels = given[len(given) - count :] if count <= len(given) else [max(given, default=0)] * count
    is_loop = equation.primitive.name == "scan" and loop is None
    return _visit(jaxpr, levels, id(equation) if is_loop else loop, found)
