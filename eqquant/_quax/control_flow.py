"""Rules of `jit`, `checkpoint`, `cond`, `scan` and `while_loop`.

A value stays packed if all branches, or all steps, return it with the same pytree structure.
"""

import contextlib
import functools as ft
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var
from jaxtyping import ArrayLike

from .. import _compat
from .._array.value import AbstractArrayValue
from .._types import PyTree
from .._wrappers.base import AbstractWrapper
from .._wrappers.mapped import AbstractMappedArray
from .rules import rule, Value
from .trace import evaluate


class _TracedBody(NamedTuple):
    """A branch or the body of a loop, traced for operands of some structures.

    - `jaxpr`: takes the leaves of the operands, and returns the leaves of the outputs.
    - `outputs`: the outputs without values.
    - `call`: the same program as a function under `jit`.
    """

    jaxpr: ClosedJaxpr
    outputs: list[Value]
    call: Callable[..., list[jax.Array]]


# Without this cache, every call outside `jit` would compile a loop again.
_traced_bodies: weakref.WeakKeyDictionary[ClosedJaxpr, dict[Hashable, _TracedBody]] = weakref.WeakKeyDictionary()


def _trace(program: ClosedJaxpr, operands: Sequence[Value], dense: frozenset[int] = frozenset()) -> _TracedBody:
    """Traces a program under Quax. Outputs at the positions `dense` become dense."""
    leaves, tree = jtu.tree_flatten(operands)

    def run(*leaves: ArrayLike) -> list[Value]:
        outputs = evaluate(_compat.make_function(program), *jtu.tree_unflatten(tree, leaves))
        return _materialise(outputs, dense)

    traced = _traced_bodies.setdefault(program, {})
    key = (tree, tuple(map(jax.typeof, leaves)), dense, _compat.trace_context())
    if key not in traced:
        jaxpr, outputs = jax.make_jaxpr(run, return_shape=True)(*leaves)
        traced[key] = _TracedBody(jaxpr, outputs, jax.jit(_compat.make_function(jaxpr)))
    return traced[key]


def _materialise(values: Sequence[Value], positions: frozenset[int]) -> list[Value]:
    dense = lambda x: x.materialise() if isinstance(x, AbstractArrayValue) else x
    return [dense(x) if n in positions else x for n, x in enumerate(values)]


def _structure(x: Value) -> Hashable:
    """Returns the structure that a packed array keeps through a loop; `None` for a dense array."""
    if not isinstance(x, AbstractArrayValue):
        return None
    leaves, tree = jtu.tree_flatten(x)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@rule(_compat.jit_p, any_operand=True)
def _jit(*operands: Value, jaxpr: ClosedJaxpr, name: str, inline: Any, **params: object) -> PyTree:
    if name == "_pad":  # so that the rule of `pad` sees a concrete value
        return evaluate(ft.partial(_eval_folding_constants, jaxpr), *operands)
    if _compat.is_inlined_early(inline):
        return evaluate(_compat.make_function(jaxpr), *operands)
    body = _trace(jaxpr, operands)
    return jtu.tree_unflatten(jtu.tree_structure(body.outputs), body.call(*jtu.tree_leaves(operands)))


def _eval_folding_constants(program: ClosedJaxpr, *operands: PyTree) -> list[PyTree]:
    """Evaluates a jaxpr, and folds constants."""
    jaxpr, consts = _compat.open_jaxpr(program)
    values: dict[Var, PyTree] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))
    value = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for equation in jaxpr.eqns:
        given = [value(atom) for atom in equation.invars]
        known = not any(isinstance(x, jax.core.Tracer) for x in given)
        with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
            values.update(zip(equation.outvars, _compat.bind_equation(equation, given), strict=True))
    return [value(atom) for atom in jaxpr.outvars]


@rule(_compat.remat_p, any_operand=True)
def _checkpoint(*operands: Value, jaxpr: Any, prevent_cse: bool | tuple[bool, ...], **params: Any) -> PyTree:
    leaves, tree = jtu.tree_flatten(operands)
    out_tree = None

    def call_on_leaves(*leaves: ArrayLike) -> list[ArrayLike]:
        nonlocal out_tree
        out = evaluate(_compat.make_function(jaxpr), *jtu.tree_unflatten(tree, leaves))
        flat, out_tree = jtu.tree_flatten(out)
        return flat

    # A tuple has an entry for each operand, but the new jaxpr has more: its constants come first.
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    y = _compat.bind_checkpoint(call_on_leaves, leaves, {"prevent_cse": prevent_cse, **params})
    return jtu.tree_unflatten(out_tree, y)


@rule(lax.cond_p, any_operand=True)
def _cond(index: ArrayLike, *operands: Value, branches: tuple[ClosedJaxpr, ...], **params: object) -> PyTree:
    traced = [_trace(branch, operands) for branch in branches]
    outputs = zip(*(map(_structure, branch.outputs) for branch in traced), strict=True)
    dense = frozenset(n for n, structures in enumerate(outputs) if len(set(structures)) > 1)
    first, *others = [_trace(branch, operands, dense) for branch in branches]
    jaxprs = tuple(branch.jaxpr for branch in (first, *others))
    y = lax.cond_p.bind(index, *jtu.tree_leaves(operands), branches=jaxprs, **params)
    return jtu.tree_unflatten(jtu.tree_structure(first.outputs), y)


def _find_fixpoint(
    trace: Callable[[Sequence[Value], frozenset[int]], _TracedBody], carry: Sequence[Value]
) -> tuple[_TracedBody, Sequence[Value]]:
    """Traces the body of a loop.

    Returns it with the carry. Values of the carry become dense if the body changes their structure.
    """
    dense: frozenset[int] = frozenset()
    while True:
        body = trace(carry, dense)
        pairs = enumerate(zip(carry, body.outputs, strict=False))
        changed = {n for n, (before, after) in pairs if _structure(before) != _structure(after)}
        if changed <= dense:
            return body, carry
        dense |= changed
        carry = _materialise(carry, dense)


@rule(lax.scan_p, any_operand=True)
def _scan(*operands: Value, jaxpr: ClosedJaxpr, length: int, **params: object) -> PyTree:
    consts, carry, xs = _compat.scan_operands(operands, params)
    xs = [_along_loop(x, length) for x in xs]
    slices = jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), xs)
    body, carry = _find_fixpoint(lambda carry, dense: _trace(jaxpr, [*consts, *carry, *slices], dense), carry)
    groups = [jtu.tree_leaves(group) for group in (consts, carry, xs)]
    ys = jtu.tree_leaves(body.outputs[len(carry) :])
    params = _compat.scan_params(params, *map(len, (*groups, ys)))
    outputs = lax.scan_p.bind(*[x for group in groups for x in group], jaxpr=body.jaxpr, length=length, **params)
    return jtu.tree_unflatten(jtu.tree_structure(body.outputs), outputs)


def _along_loop(x: Value, length: int) -> Value:
    """Repeats scalars that all layers of a stack share.

    If layers share other leaves, the stack becomes dense.
    """
    if not isinstance(x, AbstractArrayValue):
        return x
    if not _is_stack(x, length):
        return x.materialise()
    return jtu.tree_map(lambda leaf: jnp.broadcast_to(leaf, (length,)) if leaf.ndim == 0 else leaf, x)


def _is_stack(x: AbstractArrayValue, length: int) -> bool:
    """Returns whether every leaf except scalars has a leading axis of `length`."""
    if isinstance(x, AbstractMappedArray) and x.axis % x.ndim == 0:
        return False
    is_nested = lambda part: isinstance(part, AbstractArrayValue) and part is not x

    def is_by_layer(part: AbstractArrayValue | jax.Array) -> bool:
        if isinstance(part, AbstractArrayValue):
            return _is_stack(part, length)
        shared = isinstance(x, AbstractWrapper) and 0 not in x.leaf_axes(part)
        return part.ndim == 0 or (part.shape[0] == length and not shared)

    return all(is_by_layer(part) for part in jtu.tree_leaves(x, is_leaf=is_nested))


@rule(lax.while_p, any_operand=True)
def _while_loop(
    *operands: Value,
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
