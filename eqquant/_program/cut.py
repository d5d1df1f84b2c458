"""Cuts a traced program into parts that run in turn.

Each value that depends on data is computed once. Loops over layers are unrolled, so that a part may end within a layer.
Other values, such as a transposed weight or a table of positions, are not kept between parts: each part recomputes
those that it needs, from the current weights.
"""

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jaxtyping import Array

from .. import _compat


# The name of a value of a flat program, or the value itself.
Operand = int | Literal
# An iteration of an unrolled loop: the `id` of the loop, and the index. `None` outside of loops.
Turn = tuple[int, int] | None


class Node(NamedTuple):
    """An operation of a flat program: the names of its operands and results."""

    equation: JaxprEqn
    inputs: Sequence[Operand]
    outputs: Sequence[int]
    turn: Turn

    @property
    def names(self) -> list[int]:
        """The operands that have names."""
        return [operand for operand in self.inputs if isinstance(operand, int)]


class FlatProgram:
    """A traced program, with some of its loops unrolled.

    - `inputs`: the names of its arguments, which count from 0.
    - `nodes`: its operations, in order, without the marks.
    - `marks`: the operations that mark values, in order.
    - `constants`: the known values, by name.
    - `varying`: the names of the values that depend on data.
    """

    def __init__(
        self,
        program: ClosedJaxpr,
        is_data: Callable[[int], bool],
        mark: Primitive,
        holds_marks: Callable[[JaxprEqn], bool],
        unrolled: Collection[int] = (),
    ) -> None:
        """**Arguments:**

        - `is_data`: whether an argument, given by its name, is data.
        - `mark`: a primitive that marks its first operand, and returns the second one.
        - `holds_marks`: whether an operation has marks inside it. Then its results count as data, and it is not merged
            with an equal one.
        - `unrolled`: the `scan`s to unroll, by `id`.
        """
        self.holds_marks, self._mark, self._unrolled = holds_marks, mark, unrolled
        self.nodes: list[Node] = []
        self.marks: list[Node] = []
        self.constants: dict[int, Array] = {}
        self.avals: list[Any] = []
        self._sources: dict[int, int] = {}
        self._computed: dict[Hashable, Sequence[int]] = {}
        jaxpr, consts = _compat.open_jaxpr(program)
        self.inputs = [self._name(var.aval) for var in jaxpr.invars]
        self.varying = set(filter(is_data, self.inputs))
        self._add(jaxpr, consts, self.inputs, None)

    def find_needed(self, names: Iterable[int], known: Collection[int] = ()) -> set[int]:
        """Returns the indices of the nodes to run for some values, if those in `known` are there."""
        needed: set[int] = set()
        remaining = list(names)
        while remaining:
            name = remaining.pop()
            source = self._sources.get(name)
            if source is not None and name not in known and source not in needed:
                needed.add(source)
                remaining += self.nodes[source].names
        return needed

    def evaluate(self, name: int, arguments: Mapping[int, Array]) -> Array | None:
        """Returns a value, or `None` if it needs more than these arguments and the constants."""
        values = {**self.constants, **arguments}
        for node in (self.nodes[n] for n in sorted(self.find_needed([name], values))):
            if self.holds_marks(node.equation) or not all(operand in values for operand in node.names):
                return None
            values.update(zip(node.outputs, _compute(node.equation, node.inputs, values), strict=True))
        return values.get(name)

    def _name(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _name_constant(self, x: Array) -> int:
        name = self._name(jax.typeof(x))
        self.constants[name] = x
        return name

    def _add(self, jaxpr: Jaxpr, consts: Sequence[Array], inputs: Sequence[Operand], turn: Turn) -> list[Operand]:
        """Adds the operations of a program, and returns its results."""
        values = [*map(self._name_constant, consts), *inputs]
        operands: dict[Any, Operand] = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
        read = lambda atom: atom if isinstance(atom, Literal) else operands[atom]
        for equation in jaxpr.eqns:
            add = self._unroll if id(equation) in self._unrolled else self._add_node
            operands.update(zip(equation.outvars, add(equation, list(map(read, equation.invars)), turn), strict=True))
        return list(map(read, jaxpr.outvars))

    def _add_node(self, equation: JaxprEqn, inputs: Sequence[Operand], turn: Turn) -> Sequence[Operand]:
        if equation.primitive is self._mark:
            self.marks.append(Node(equation, inputs, [], turn))
            return inputs[1:2]
        is_varying = self.holds_marks(equation)
        scalars = all(getattr(var.aval, "shape", None) == () for var in equation.outvars)
        known = all(isinstance(x, Literal) or x in self.constants for x in inputs)
        if scalars and inputs and known and not (is_varying or equation.effects):
            # Such as the index of a layer: left in the program, it would make the programs of equal layers differ.
            key = _describe_equation(equation, inputs)
            if key not in self._computed:
                self._computed[key] = list(map(self._name_constant, _compute(equation, inputs, self.constants)))
            return self._computed[key]
        node = Node(equation, inputs, [self._name(var.aval) for var in equation.outvars], turn)
        self._sources.update(dict.fromkeys(node.outputs, len(self.nodes)))
        self.nodes.append(node)
        if is_varying or not self.varying.isdisjoint(node.names):
            self.varying.update(node.outputs)
        return node.outputs

    def _unroll(self, equation: JaxprEqn, inputs: Sequence[Operand], _: Turn) -> Sequence[Operand]:
        consts, carry, xs = _compat.scan_operands(inputs, equation.params)
        body, length = _compat.open_jaxpr(equation.params["jaxpr"]), equation.params["length"]
        ys: list[list[Operand]] = [[]] * length
        for n in reversed(range(length)) if equation.params["reverse"] else range(length):
            turn, at = (id(equation), n), self._name_constant(jnp.asarray(n, jnp.int32))
            entries = [self._call(_take_entry, turn, x, at) for x in xs]
            results = self._add(*body, [*consts, *carry, *entries], turn)
            carry, ys[n] = results[: len(carry)], results[len(carry) :]
        return [*carry, *(self._call(_stack, None, *parts) for parts in zip(*ys, strict=True))]

    def _call(self, f: Callable[..., Array], turn: Turn, *operands: Operand) -> Operand:
        avals: list[Any] = [x.aval if isinstance(x, Literal) else self.avals[x] for x in operands]
        program = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
        return self._add(*_compat.open_jaxpr(program), operands, turn)[0]


def _take_entry(x: Array, n: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, n, keepdims=False)


def _stack(*parts: Array) -> Array:
    return jnp.stack(parts)


def _compute(equation: JaxprEqn, operands: Sequence[Operand], values: Mapping[int, Array]) -> list[Array]:
    return _compat.bind_equation(equation, [x.val if isinstance(x, Literal) else values[x] for x in operands])


class Stage(NamedTuple):
    """What a part computes: values by name, and nodes that it runs for their effects."""

    names: Sequence[int]
    nodes: Collection[int] = ()


class Part(NamedTuple):
    """A part of a flat program.

    - `nodes`: the indices of its nodes, in order.
    - `computed`: the nodes that it runs for values, not for effects. Later parts may use their results.
    - `outputs`: the names of the values that it returns: those of its stage, and those that later parts need.
    - `kept`: the names of all values that later parts need, also from earlier parts.
    """

    nodes: Sequence[int]
    computed: Collection[int]
    outputs: Sequence[int]
    kept: Collection[int]


def cut(program: FlatProgram, stages: Sequence[Stage]) -> list[Part]:
    """Returns one part for each stage: what it needs, without what earlier parts computed."""
    done: set[int] = set()
    drafts: list[tuple[Part, set[int], set[int]]] = []
    for names, again in stages:
        computed = program.find_needed([*names, *(name for n in again for name in program.nodes[n].names)], done)
        nodes, results = computed.union(again), {name for n in computed for name in program.nodes[n].outputs}
        outputs = [*names, *(name for n in again for name in program.nodes[n].outputs)]
        read = {*names, *(name for n in nodes for name in program.nodes[n].names)} & done
        drafts.append((Part(sorted(nodes), computed, outputs, ()), read, results & program.varying))
        done |= results & program.varying
    parts, later = [], set()
    for part, read, results in reversed(drafts):
        parts.append(part._replace(outputs=[*part.outputs, *sorted(later & results)], kept=later))
        later = (later - results) | read
    return parts[::-1]


class CompiledPart(NamedTuple):
    """A part as a function of arrays.

    - `function`: from the values of `inputs` to a list of results.
    - `results`: for each output of the part, by name, the index of its result. Equal values share one.
    """

    function: Callable[[Sequence[Array]], list[Array]]
    inputs: Sequence[int]
    results: Mapping[int, int]


class PartCompiler:
    """Compiles parts. Those of equal operations, such as equal layers, share a function."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Callable[[Sequence[Array]], list[Array]]] = {}

    def __call__(self, program: FlatProgram, part: Part, equal: Mapping[int, int]) -> CompiledPart:
        """**Arguments:**

        - `equal`: maps arguments to another argument of the same value.
        """
        count = itertools.count()
        numbers: dict[int, int] = {}
        inputs: dict[int, int] = {}
        steps: dict[Hashable, tuple[JaxprEqn, Sequence[Operand], Sequence[int]]] = {}

        def number(name: int) -> int:
            name = equal.get(name, name)
            if name not in numbers:
                inputs[name] = numbers[name] = next(count)
            return numbers[name]

        for n in part.nodes:
            node = program.nodes[n]
            operands = [x if isinstance(x, Literal) else number(x) for x in node.inputs]
            is_alone = program.holds_marks(node.equation) or bool(node.equation.effects)
            key = _describe_equation(node.equation, operands), len(steps) if is_alone else None
            if key not in steps:
                steps[key] = node.equation, operands, [next(count) for _ in node.outputs]
            numbers.update(zip(node.outputs, steps[key][2], strict=True))
        wanted = {name: number(name) for name in part.outputs}
        results = list(dict.fromkeys(wanted.values()))
        avals = tuple((inputs[name], program.avals[name]) for name in inputs)
        key = avals, tuple(steps), tuple(results)
        if key not in self._functions:
            self._functions[key] = _make_function(list(steps.values()), list(inputs.values()), results)
        return CompiledPart(self._functions[key], list(inputs), {n: results.index(wanted[n]) for n in wanted})


def _make_function(
    steps: Sequence[tuple[JaxprEqn, Sequence[Operand], Sequence[int]]], inputs: Sequence[int], results: Sequence[int]
) -> Callable[[Sequence[Array]], list[Array]]:
    def run_part(arrays: Sequence[Array]) -> list[Array]:
        values = dict(zip(inputs, arrays, strict=True))
        for equation, operands, outputs in steps:
            values.update(zip(outputs, _compute(equation, operands, values), strict=True))
        return [values[n] for n in results]

    return jax.jit(run_part)


def _describe_equation(equation: JaxprEqn, operands: Sequence[object]) -> Hashable:
    """Returns a description that is equal for equal operations on equal operands."""
    return (
        equation.primitive,
        _describe(equation.params),
        tuple(map(_describe, operands)),
        tuple(var.aval for var in equation.outvars),
    )


def _describe(x: Any) -> Hashable:
    if isinstance(x, Literal):
        return _describe(np.asarray(x.val)), x.aval
    if isinstance(x, np.ndarray):
        return x.dtype, x.shape, x.tobytes()
    if isinstance(x, Mapping):
        return tuple((name, _describe(x[name])) for name in sorted(x))
    if isinstance(x, tuple | list):
        return type(x), tuple(map(_describe, x))
    if isinstance(x, float | complex):  # 0.0 and -0.0 differ
        return type(x), repr(x)
    if isinstance(x, ClosedJaxpr | Jaxpr):
        return _describe_program(x)
    try:
        hash(x)
    except TypeError:
        return id(x)
    return type(x), x


def _describe_program(program: Any) -> Hashable:
    jaxpr = getattr(program, "jaxpr", program)
    variables = [*jaxpr.constvars, *jaxpr.invars, *(var for equation in jaxpr.eqns for var in equation.outvars)]
    numbers = {var: n for n, var in enumerate(variables)}
    read = lambda atom: atom if isinstance(atom, Literal) else numbers[atom]
    equations = tuple(_describe_equation(e, list(map(read, e.invars))) for e in jaxpr.eqns)
    consts = tuple(map(id, getattr(program, "consts", ())))
    results = tuple(_describe(read(atom)) for atom in jaxpr.outvars)
    return consts, tuple(var.aval for var in jaxpr.invars), equations, results
