"""Finds the data dependencies between the observed products of a traced program."""

from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params, Literal, Var

from ._observe_primitive import observe_p, Record


class Place(NamedTuple):
    """The place of an observed product in a program.

    - `level`: the length of the longest chain of observed products that its input depends on.
    - `loop`: the loop that runs it, or `None`.
    - `uses`: the number of places that use the weight.
    """

    level: int
    loop: int | None
    uses: int = 1


def find_places(program: ClosedJaxpr) -> dict[Record, Place]:
    """Returns the place of each `record` of a program; of a loop, in its first iteration."""
    places: dict[Record, Place] = {}
    _visit(program.jaxpr, [0] * len(program.jaxpr.invars), None, places)
    return places


def _visit(jaxpr: Jaxpr, levels: list[int], loop: int | None, places: dict[Record, Place]) -> list[int]:
    """Returns the levels of the results from the levels of the arguments."""
    level: dict[Var, int] = dict(zip(jaxpr.invars, levels, strict=True))
    read_level = lambda var: 0 if isinstance(var, Literal) else level.get(var, 0)
    for equation in jaxpr.eqns:
        inputs = [read_level(var) for var in equation.invars]
        out_levels = [max(inputs, default=0)] * len(equation.outvars)
        if equation.primitive is observe_p:
            record = equation.params["record"]
            first = places.get(record, Place(out_levels[0], loop, 0))
            places[record] = first._replace(uses=first.uses + 1)
            out_levels = [out_levels[0] + 1]
        inner = [_visit_inner(sub, inputs, equation, loop, places) for sub in jaxprs_in_params(equation.params)]
        matching = [levels for levels in inner if len(levels) == len(out_levels)]
        if matching:
            out_levels = [max(levels) for levels in zip(*matching, strict=True)]
        level.update(zip(equation.outvars, out_levels, strict=True))
    return [read_level(var) for var in jaxpr.outvars]


def _visit_inner(
    jaxpr: Jaxpr, inputs: list[int], equation: JaxprEqn, loop: int | None, places: dict[Record, Place]
) -> list[int]:
    # The inner program takes the last operands of the equation: a `cond` has an index before them.
    count = len(jaxpr.invars)
    levels = inputs[len(inputs) - count :] if count <= len(inputs) else [max(inputs, default=0)] * count
    is_loop = equation.primitive.name == "scan" and loop is None
    return _visit(jaxpr, levels, id(equation) if is_loop else loop, places)
