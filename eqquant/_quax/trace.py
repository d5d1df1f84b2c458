"""The trace of `eqquant.quaxify`: a subclass of that of Quax, which calls our rules."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import quax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, set_current_trace, take_current_trace
from jaxtyping import Array

from .. import _compat
from .._array.value import AbstractArrayValue
from .._types import PyTree
from .rules import RULES, Value


class Trace(_compat.QuaxTrace):
    """Calls our rules, unless an operand is a value of another library."""

    def process_primitive(self, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any]) -> Any:
        apply_rule = RULES.get(primitive)
        operands = [] if apply_rule is None else [_compat.unwrap_quax(self.to_value(tracer)) for tracer in tracers]
        ours = [isinstance(x, AbstractArrayValue) for x in operands if isinstance(x, quax.Value)]
        if apply_rule is None or not ours or not all(ours):
            return super().process_primitive(primitive, tracers, params)
        with set_current_trace(self.parent_trace):
            y = apply_rule(*operands, **params)
        return list(map(self.to_tracer, y)) if primitive.multiple_results else self.to_tracer(y)

    def process_custom_jvp_call(self, primitive: Primitive, fun: Any, jvp: Any, tracers: Any, **params: Any) -> Any:
        return self._call_custom("process_custom_jvp_call", primitive, fun, (jvp,), tracers, params)

    def process_custom_vjp_call(
        self, primitive: Primitive, fun: Any, fwd: Any, bwd: Any, tracers: Any, **params: Any
    ) -> Any:
        return self._call_custom("process_custom_vjp_call", primitive, fun, (fwd, bwd), tracers, params)

    def _call_custom(
        self, name: str, primitive: Primitive, fun: Any, rules: Sequence[Any], tracers: Any, params: dict[str, Any]
    ) -> Any:
        """Calls a function that has a `custom_jvp` or `custom_vjp`.

        The primal runs packed; the derivative is the user's rule, applied to dense operands. A `custom_jvp` function
        that returns packed arrays, such as an identity, is left to Quax. Quax has no method for `custom_vjp`, and its
        method for `custom_jvp` builds arrays of tangents, which codes do not have.
        """
        quax_has_it = name in vars(_compat.QuaxTrace)
        values = [self.to_value(tracer) for tracer in tracers]
        is_packed = any(isinstance(value, AbstractArrayValue) for value in values)
        call_by_quax = lambda: getattr(super(Trace, self), name)(primitive, fun, *rules, tracers, **params)
        if quax_has_it and not is_packed:
            return call_by_quax()
        leaves, tree = jtu.tree_flatten(values)

        def forget_results() -> None:
            """Resets the stores of output trees in wrapped functions, so that they can be called again."""
            for store in [store for f in (fun, *rules) for store in f.stores if store is not None]:
                store.reset()

        def call_dense(leaves: Sequence[Any]) -> list[Array]:
            arrays = _to_dense(jtu.tree_unflatten(tree, leaves))
            forget_results()
            with take_current_trace() as trace:
                return getattr(trace, name)(primitive, fun, *rules, arrays, **params)

        def call_packed(*leaves: Any) -> list[Any]:
            with take_current_trace() as parent, set_current_trace(trace := Trace(parent, self.tag)):
                packed = [_compat.QuaxTracer(trace, value) for value in jtu.tree_unflatten(tree, leaves)]
                out = [trace.to_value(y) for y in fun.call_wrapped(*packed)]
            return out if quax_has_it else _to_dense(out)

        def differentiate(primals: Sequence[Any], tangents: Sequence[Any]) -> PyTree:
            changes = {n: tangent for n, tangent in enumerate(tangents) if type(tangent) is not SymbolicZero}
            f = lambda changed: call_dense([changed.get(n, x) for n, x in enumerate(primals)])
            return jax.jvp(f, ({n: primals[n] for n in changes},), (changes,))

        with set_current_trace(self.parent_trace):
            if not is_packed:
                return list(map(self.to_tracer, call_dense(leaves)))
            program, out = jax.make_jaxpr(call_packed, return_shape=True)(*leaves)
            if not quax_has_it or not any(isinstance(y, AbstractArrayValue) for y in out):
                call = jax.custom_jvp(_compat.make_function(program))
                call.defjvp(differentiate, symbolic_zeros=True)
                return list(map(self.to_tracer, call(*leaves)))
        forget_results()
        return call_by_quax()

    def to_tracer(self, x: Value | quax.Value) -> Any:
        """Returns the tracer of an array of any kind."""
        return _compat.QuaxTracer(self, x if isinstance(x, quax.Value) else self.to_value(x))


def _to_dense(values: Sequence[Any]) -> list[Array]:
    return [jnp.asarray(value.materialise()) for value in values]  # Python numbers have no shape


def evaluate(function: Callable[..., PyTree], *operands: PyTree, selected: Sequence[bool] | None = None) -> list[Any]:
    """Calls a function of arrays of any kind in a new trace.

    **Arguments:**

    - `function`: takes tracers, and returns a list of arrays.
    - `operands`: arrays, or anything else, which is passed on.
    - `selected`: which operands the trace sees. By default all.
    """
    if not any(isinstance(x, quax.Value) for x in operands):
        return function(*operands)
    if _compat.QuaxTrace is object:  # pragma: no cover
        return quax.quaxify(function)(*operands)
    with take_current_trace() as parent:
        trace = Trace(parent, _compat.TraceTag())
        sees = [isinstance(x, quax.Value) for x in operands] if selected is None else selected
        tracers = [trace.to_tracer(x) if seen else x for x, seen in zip(operands, sees, strict=True)]
        with set_current_trace(trace):
            out = function(*tracers)
        # `to_value` also takes arrays from outside the trace.
        return [_compat.unwrap_quax(trace.to_value(x)) if eqx.is_array_like(x) else x for x in out]
