"""Finds the data dependencies between the observed products of a traced program."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params, Literal, Var
from jaxtyping import Array

from .. import _compat
from .._program.cut import FlatProgram, Node
from ._observe_primitive import observe_p, Record
from ._observers import Sums


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


def find_records(equation: JaxprEqn) -> list[Record]:
    """Returns the `record` of each observed product of an operation, which may be a loop."""
    inner = [e for jaxpr in jaxprs_in_params(equation.params) for e in jaxpr.eqns]
    own = [equation.params["record"]] if equation.primitive is observe_p else []
    return [*own, *(record for e in inner for record in find_records(e))]


def flatten(
    program: ClosedJaxpr, is_data: Callable[[int], bool], indices: Mapping[int, Array]
) -> tuple[FlatProgram, list[int | None]]:
    """Returns a program with its loops over layers unrolled, and the layer of each mark.

    Marks are observed products; one outside of loops has no layer. A loop is unrolled if each iteration multiplies one
    layer of each observed weight, a different one each time.

    **Arguments:**

    - `is_data`: whether an argument, given by its position, is data.
    - `indices`: the arguments that hold indices of layers, by position, with their values.
    """
    loops = {id(equation) for equation in program.jaxpr.eqns if _may_run_layers(equation)}
    while True:
        flat = FlatProgram(program, is_data, observe_p, lambda equation: bool(find_records(equation)), loops)
        layers = [None if mark.turn is None else _find_layer(flat, mark, indices) for mark in flat.marks]
        seen = Counter(
            (mark.turn[0], mark.equation.params["record"], layer)
            for mark, layer in zip(flat.marks, layers, strict=True)
            if mark.turn is not None
        )
        failed = {loop for (loop, _, layer), count in seen.items() if layer is None or count > 1}
        if not failed:
            return flat, layers
        loops -= failed


def _find_layer(flat: FlatProgram, mark: Node, indices: Mapping[int, Array]) -> int | None:
    index = mark.inputs[1]
    found = flat.evaluate(index, indices) if isinstance(index, int) else None
    return None if found is None else int(found)


def _may_run_layers(equation: JaxprEqn) -> bool:
    if equation.primitive.name != "scan":
        return False
    records = find_records(equation)
    body = _compat.open_jaxpr(equation.params["jaxpr"])[0]
    direct = [e for e in body.eqns if e.primitive is observe_p and _compat.result_shape(e) == ()]
    stacks = [r for r in set(records) if isinstance(r, Sums) and r.num_layers >= equation.params["length"] > 1]
    return 0 < len(records) == len(direct) == len(stacks)


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
