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


class _TracedBody(NamedTuple):
    """A branch or the body of a loop, traced for operands of some structures.

    - `jaxpr`: takes the leaves of the operands, and returns the leaves of the outputs.
    - `outputs`: the outputs without values.
    """

    jaxpr: ClosedJaxpr
    outputs: list[Value]


# Without it, each call outside of `jit` would compile a loop again.
_traced_bodies: weakref.WeakKeyDictionary[ClosedJaxpr, dict[Hashable, _TracedBody]] = weakref.WeakKeyDictionary()


def _trace(program: ClosedJaxpr, operands: Sequence[Value], dense: frozenset[int] = frozenset()) -> _TracedBody:
    """Traces a program under Quax. Outputs at the positions `dense` become dense."""
    leaves, tree = jtu.tree_flatten(operands)

    def run(*leaves: ArrayLike) -> list[Value]:
        outputs = quax.quaxify(_compat.make_function(program))(*jtu.tree_unflatten(tree, leaves))
        return _materialise(outputs, dense)

    traced = _traced_bodies.setdefault(program, {})
    key = (tree, tuple(map(jax.typeof, leaves)), dense, _compat.trace_context())
    if key not in traced:
        traced[key] = _TracedBody(*jax.make_jaxpr(run, return_shape=True)(*leaves))
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


@quax.register(lax.cond_p)
def _cond(
    index: ArrayLike, *operands: AbstractArrayValue | ArrayLike, branches: tuple[ClosedJaxpr, ...], **params: object
) -> PyTree:
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
        # A deferred operation has leaves that `scan` cannot stack.
        ys = enumerate(body.outputs[len(carry) :], len(carry))
        changed |= {n for n, y in ys if isinstance(y, AbstractArrayValue) and y.deferred}
        if changed <= dense:
            return body, carry
        dense |= changed
        carry = _materialise(carry, dense)


@quax.register(lax.scan_p)
def _scan(*operands: AbstractArrayValue | ArrayLike, jaxpr: ClosedJaxpr, length: int, **params: object) -> PyTree:
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
    """Returns whether all leaves but scalars have a first axis of so many layers."""
    is_nested = lambda part: isinstance(part, AbstractArrayValue) and part is not x

    def is_by_layer(part: AbstractArrayValue | jax.Array) -> bool:
        if isinstance(part, AbstractArrayValue):
            return _is_stack(part, length)
        shared = x.shares_vectors and part.ndim <= x.ndim - 2
        return part.ndim == 0 or (part.shape[0] == length and not shared)

    return all(is_by_layer(part) for part in jtu.tree_leaves(x, is_leaf=is_nested))


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
