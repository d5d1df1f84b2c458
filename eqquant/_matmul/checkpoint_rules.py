"""Quax rules of `jax.checkpoint` and custom derivatives, which keep arrays packed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import quax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import set_current_trace, take_current_trace
from jaxtyping import Array, ArrayLike

from .. import _compat
from .._array.value import AbstractArrayValue
from .._types import PyTree


def _support_custom_derivatives(name: str) -> None:
    """Lets Quax run a function with a custom derivative on packed values.

    Its derivative is that of dense operands, by the user's rule. A function that returns packed values, such as an
    identity, runs as Quax does it.

    JAX calls a method of the trace (https://github.com/nstarman/quax/blob/main/src/quax/_trace.py). Quax has none for
    `custom_vjp`, and that for `custom_jvp` builds values of tangents, which codes do not have.
    """
    try:
        from quax._trace import _QuaxTrace, _QuaxTracer
    except ImportError:  # pragma: no cover
        return
    original = vars(_QuaxTrace).get(name)

    def process(self: Any, primitive: Any, fun: Any, *rest: Any, **params: Any) -> Any:
        *rules, tracers = rest
        values = [self.to_value(tracer) for tracer in tracers]
        is_packed = any(isinstance(value, AbstractArrayValue) for value in values)
        if original is not None and not is_packed:
            return original(self, primitive, fun, *rest, **params)
        leaves, tree = jtu.tree_flatten(values)
        wrap = lambda arrays: [_QuaxTracer(self, self.to_value(y)) for y in arrays]

        def forget_results() -> None:
            """Allows another call of functions that record the structure of results once."""
            for store in [store for f in (fun, *rules) for store in f.stores if store is not None]:
                store.reset()

        def call_dense(leaves: Sequence[Any]) -> list[Array]:
            arrays = _to_dense(jtu.tree_unflatten(tree, leaves))
            forget_results()
            with take_current_trace() as trace:
                return getattr(trace, name)(primitive, fun, *rules, arrays, **params)

        def call_packed(*leaves: Any) -> list[Any]:
            with take_current_trace() as parent, set_current_trace(trace := _QuaxTrace(parent, self.tag)):
                tracers = [_QuaxTracer(trace, value) for value in jtu.tree_unflatten(tree, leaves)]
                out = [trace.to_value(y) for y in fun.call_wrapped(*tracers)]
            return out if original is not None else _to_dense(out)

        def differentiate(primals: Sequence[Any], tangents: Sequence[Any]) -> PyTree:
            changes = {n: tangent for n, tangent in enumerate(tangents) if type(tangent) is not SymbolicZero}
            f = lambda changed: call_dense([changed.get(n, x) for n, x in enumerate(primals)])
            return jax.jvp(f, ({n: primals[n] for n in changes},), (changes,))

        with set_current_trace(self.parent_trace):
            if not is_packed:
                return wrap(call_dense(leaves))
            program, out = jax.make_jaxpr(call_packed, return_shape=True)(*leaves)
            if original is None or not any(isinstance(y, AbstractArrayValue) for y in out):
                call = jax.custom_jvp(_compat.make_function(program))
                call.defjvp(differentiate, symbolic_zeros=True)
                return wrap(call(*leaves))
        forget_results()
        return original(self, primitive, fun, *rest, **params)

    setattr(_QuaxTrace, name, process)


def _to_dense(values: Sequence[Any]) -> list[Array]:
    return [jnp.asarray(value.materialise()) for value in values]  # Python numbers have no shape


_support_custom_derivatives("process_custom_vjp_call")
_support_custom_derivatives("process_custom_jvp_call")


@quax.register(_compat.remat_p)
def _checkpoint(
    *operands: AbstractArrayValue | ArrayLike, jaxpr: Any, prevent_cse: bool | tuple[bool, ...], **params: Any
) -> PyTree:
    leaves, tree = jtu.tree_flatten(operands)
    out_tree = None

    def call_on_leaves(*leaves: ArrayLike) -> list[ArrayLike]:
        nonlocal out_tree
        out = quax.quaxify(_compat.make_function(jaxpr))(*jtu.tree_unflatten(tree, leaves))
        flat, out_tree = jtu.tree_flatten(out)
        return flat

    # A tuple has an entry for each operand, but the new jaxpr has more: its constants come first.
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    y = _compat.bind_checkpoint(call_on_leaves, leaves, {"prevent_cse": prevent_cse, **params})
    return jtu.tree_unflatten(out_tree, y)
