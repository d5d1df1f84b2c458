"""Quax rules of `cond`, `scan` and `while_loop`.

A value stays packed if all branches, or all steps, return it with the same pytree structure.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import quax
from jax import lax
from jax.extend.core import ClosedJaxpr
from jaxtyping import ArrayLike

from .. import _compat
from .._array.value import AbstractArrayValue
from .._types import PyTree


Value: TypeAlias = PyTree  # an array of ours, any other, or the shape and dtype of one


class _Program(NamedTuple):
    """A branch or the body of a loop, traced for operands of some structures.

    - `jaxpr`: takes the leaves of the operands, and returns those of the outputs.
    - `outputs`: the outputs without values.
    """

    jaxpr: ClosedJaxpr
    outputs: list[Value]


# Without it, each call outside of `jit` would compile a loop again.
_programs: weakref.WeakKeyDictionary[ClosedJaxpr, dict[Hashable, _Program]] = weakref.WeakKeyDictionary()


def _trace(program: ClosedJaxpr, operands: Sequence[Value], dense: frozenset[int] = frozenset()) -> _Program:
    """Traces a program under Quax. Outputs at the positions `dense` become dense."""
    leaves, tree = jtu.tree_flatten(operands)

    def run(*leaves: ArrayLike) -> list[Value]:
        outputs = quax.quaxify(_compat.make_function(program))(*jtu.tree_unflatten(tree, leaves))
        return _materialise(outputs, dense)

    traced = _programs.setdefault(program, {})
    key = (tree, tuple(map(jax.typeof, leaves)), dense, _compat.trace_context())
    if key not in traced:
        traced[key] = _Program(*jax.make_jaxpr(run, return_shape=True)(*leaves))
    return traced[key]


def _materialise(values: Sequence[Value], numbers: frozenset[int]) -> list[Value]:
    dense = lambda x: x.materialise() if isinstance(x, AbstractArrayValue) else x
    return [dense(x) if n in numbers else x for n, x in enumerate(values)]


def _structure(x: Value) -> Hashable:
    """Returns the structure that a packed array keeps through a loop; `None` for a dense array."""
    if not isinstance(x, AbstractArrayValue):
        return None
    leaves, tree = jtu.tree_flatten(x)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@quax.register(lax.cond_p)
def _cond(
    index: ArrayLike, *operands: AbstractArrayValue | ArrayLike, branches: tuple[ClosedJaxpr, ...], **params: object
) -> PyTree:
    programs = [_trace(branch, operands) for branch in branches]
    outputs = zip(*(map(_structure, program.outputs) for program in programs), strict=True)
    dense = frozenset(n for n, structures in enumerate(outputs) if len(set(structures)) > 1)
    first, *others = [_trace(branch, operands, dense) for branch in branches]
    jaxprs = tuple(program.jaxpr for program in (first, *others))
    y = lax.cond_p.bind(index, *jtu.tree_leaves(operands), branches=jaxprs, **params)
    return jtu.tree_unflatten(jtu.tree_structure(first.outputs), y)


def _find_fixpoint(
    trace: Callable[[Sequence[Value], frozenset[int]], _Program], carry: Sequence[Value]
) -> tuple[_Program, Sequence[Value]]:
    """Traces the body of a loop.

    Returns it with the carry. Values of the carry become dense if the body changes their structure.
    """
    dense: frozenset[int] = frozenset()
    while True:
        program = trace(carry, dense)
        pairs = enumerate(zip(carry, program.outputs, strict=False))
        changed = {n for n, (before, after) in pairs if _structure(before) != _structure(after)}
        # Leaves of a deferred operation are not stacked.
        results = enumerate(program.outputs[len(carry) :], len(carry))
        changed |= {n for n, x in results if isinstance(x, AbstractArrayValue) and x.deferred}
        if changed <= dense:
            return program, carry
        dense |= changed
        carry = _materialise(carry, dense)


@quax.register(lax.scan_p)
def _scan(*operands: AbstractArrayValue | ArrayLike, jaxpr: ClosedJaxpr, length: int, **params: object) -> PyTree:
    consts, carry, stacked = _compat.scan_operands(operands, params)
    stacked = [_along_loop(x, length) for x in stacked]
    slices = jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    program, carry = _find_fixpoint(lambda carry, dense: _trace(jaxpr, [*consts, *carry, *slices], dense), carry)
    groups = [jtu.tree_leaves(group) for group in (consts, carry, stacked)]
    results = jtu.tree_leaves(program.outputs[len(carry) :])
    params = _compat.scan_params(params, *map(len, (*groups, results)))
    y = lax.scan_p.bind(*[x for group in groups for x in group], jaxpr=program.jaxpr, length=length, **params)
    return jtu.tree_unflatten(jtu.tree_structure(program.outputs), y)


def _along_loop(x: Value, length: int) -> Value:
    """Repeats scalars that all layers of a stack share.

    If layers share other leaves, the stack becomes dense.
    """
    if not isinstance(x, AbstractArrayValue):
        return x
    x = jtu.tree_map(lambda leaf: jnp.broadcast_to(leaf, (length,)) if leaf.ndim == 0 else leaf, x)
    is_stack = all(leaf.shape[0] == length for leaf in jtu.tree_leaves(x))
    return x if is_stack else x.materialise()


@quax.register(lax.while_p)
def _while_loop(
    *operands: AbstractArrayValue | ArrayLike,
    cond_nconsts: int,
    cond_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    **params: object,
) -> PyTree:
    start = cond_nconsts + body_nconsts
    test_consts, body_consts, carry = operands[:cond_nconsts], operands[cond_nconsts:start], operands[start:]
    body, carry = _find_fixpoint(lambda carry, dense: _trace(body_jaxpr, [*body_consts, *carry], dense), carry)
    test = _trace(cond_jaxpr, [*test_consts, *carry])
    groups = [jtu.tree_leaves(group) for group in (test_consts, body_consts, carry)]
    y = lax.while_p.bind(
        *[x for group in groups for x in group],
        cond_nconsts=len(groups[0]),
        cond_jaxpr=test.jaxpr,
        body_nconsts=len(groups[1]),
        body_jaxpr=body.jaxpr,
        **params,
    )
    return jtu.tree_unflatten(jtu.tree_structure(body.outputs), y)
