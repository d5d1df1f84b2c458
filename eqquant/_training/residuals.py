"""Quantized residuals: activations saved in few bits for the backward pass."""

import functools as ft
import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, jaxprs_in_params, Literal, Var
from jaxtyping import Array

from .._array.array import QuantizedArray
from .._array.quantize import quantize_array
from .._formats.base import AbstractFormat
from .._formats.names import as_format
from .._types import PyTree


# Quantizing smaller arrays, such as the factors of a norm, would save little.
_MIN_SIZE = 64
# Primitives that divide by an operand, and its place; and those whose result is zero where an operand is.
_DIVIDE = {"div": 1, "rem": 1, "log": 0, "rsqrt": 0, "pow": 0}
_KEEP_ZEROS = {"abs", "asin", "atan", "broadcast_in_dim", "cbrt", "concatenate", "convert_element_type", "copy", "erf"}
_KEEP_ZEROS |= {"expand_dims", "expm1", "integer_pow", "log1p", "mul", "neg", "optimization_barrier"}
_KEEP_ZEROS |= {"reduce_precision", "reshape", "rev", "select_n", "sin", "sinh", "slice", "sqrt", "square", "squeeze"}
_KEEP_ZEROS |= {"tan", "tanh", "transpose"}


def checkpoint_quantized(
    fun: Callable[..., PyTree], format: AbstractFormat | str = "int8", *, policy: Callable[..., bool] | None = None
) -> Callable[..., PyTree]:
    """Returns a function that saves its residuals quantized for the backward pass.

    The backward pass needs some arrays of the forward pass (*residuals*), which take most of the memory of training.
    `jax.checkpoint` forgets them and computes them again. This function quantizes them along their last axis, and
    dequantizes them when the backward pass needs them.

    The result of the function is exact. Its gradient is computed from rounded residuals: its relative error is about
    the error of the format. Divisors of the backward pass are not rounded, since rounding sends small numbers to zero.

    Use it in the body of a `scan`. In a Python loop over layers XLA for CPU may decode all residuals early, and then no
    memory is saved.

    !!! Example

        ```python
        x = eqq.checkpoint_quantized(block)(x)             # a layer of a model
        x = eqq.checkpoint_quantized(block, "int4")(x)
        # Saves only the results of products, and recomputes everything else.
        dots = jax.checkpoint_policies.dots_saveable
        x = eqq.checkpoint_quantized(block, policy=dots)(x)
        ```

    **Arguments:**

    - `fun`: a function of pytrees of arrays, which returns such a tree: often a layer. The arrays that it holds or
        closes over count as parameters: they are not rounded, nor is anything that is computed from them alone.
    - `format`: the format of residuals, or its lower-case name. Integers, booleans, small arrays, divisors, and arrays
        that would not become smaller by half are saved unchanged.
    - `policy`: selects the residuals that are saved, not recomputed, as in `jax.checkpoint`. By default all.

    **Returns:**

    A function of the same arguments and results. It works under `jit`, `vmap`, `scan` and `shard_map`, and in forward
    mode. It has first derivatives: a second one treats saved residuals as constants.

    **Raises:**

    `TypeError` if `fun` or `policy` is not a function; `ValueError` if the name of the format is unknown.
    """
    format = as_format(format)
    if not callable(fun):
        raise TypeError(f"`fun` must be a function. Got {fun!r}. For instance `eqq.checkpoint_quantized(layer)(x)`.")
    if policy is not None and not callable(policy):
        raise TypeError(
            f"`policy` must be a function, as for `jax.checkpoint`. Got {policy!r}. For instance "
            "`jax.checkpoint_policies.dots_saveable`."
        )
    # A lambda, since a module that holds arrays has no hash.
    wrapped = fun if policy is None else jax.checkpoint(lambda *args, **kwargs: fun(*args, **kwargs), policy=policy)

    @ft.wraps(fun, updated=())
    def checkpointed(*args: PyTree, **kwargs: PyTree) -> PyTree:
        arrays, other = eqx.partition((args, kwargs), eqx.is_array)
        arrays, treedef = jtu.tree_flatten(arrays)

        def call(*arrays: Array) -> PyTree:
            args, kwargs = eqx.combine(jtu.tree_unflatten(treedef, arrays), other)
            return wrapped(*args, **kwargs)

        # The constants of the traced function are its parameters, and all other arrays that it closes over.
        traced, out = jax.make_jaxpr(call, return_shape=True)(*arrays)
        results = _call(traced.jaxpr, format, len(traced.consts), *traced.consts, *arrays)
        return jtu.tree_unflatten(jtu.tree_structure(out), results)

    return checkpointed


@ft.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _call(jaxpr: Jaxpr, format: AbstractFormat, count: int, *operands: Array) -> list[Array]:
    return jax.core.eval_jaxpr(jaxpr, operands[:count], *operands[count:])


@ft.partial(_call.defjvp, symbolic_zeros=True)
def _jvp(
    jaxpr: Jaxpr,
    format: AbstractFormat,
    count: int,
    operands: Sequence[Array],
    tangents: Sequence[Array | SymbolicZero],
) -> tuple[list[Array], list[Array]]:
    active = [n for n, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
    linear: PyTree = None  # the structure of the linearized function
    active_tangents = [tangents[n] for n in active]

    def linearize(*operands: Array) -> tuple[list[Array], list[Array]]:
        nonlocal linear

        def call(*values: Array) -> list[Array]:
            replaced = dict(zip(active, values, strict=True))
            return _call.fun(jaxpr, format, count, *(replaced.get(n, x) for n, x in enumerate(operands)))

        results, tangent = jax.linearize(call, *(operands[n] for n in active))
        saved, linear = jtu.tree_flatten(tangent)
        return results, saved

    traced = jax.make_jaxpr(linearize)(*operands)
    values = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *operands)
    results, residuals = values[: len(jaxpr.outvars)], values[len(jaxpr.outvars) :]
    variables = traced.jaxpr.outvars[len(jaxpr.outvars) :]
    dependent = _find_dependent(traced.jaxpr, traced.jaxpr.invars[count:])
    apply = lambda residuals, tangents: jtu.tree_unflatten(linear, residuals)(*tangents)
    uses = jax.make_jaxpr(apply)(residuals, active_tangents).jaxpr
    divisors = _find_divisors(uses, set())
    exact = {variable for variable, used in zip(variables, uses.invars, strict=False) if used in divisors}
    # Save a residual that is used twice only once.
    first = [next(n for n, other in enumerate(variables) if other is variable) for variable in variables]
    is_exact = lambda n: variables[n] not in dependent or variables[n] in exact
    saved = {n: residuals[n] if is_exact(n) else _quantize_residual(residuals[n], format) for n in {*first}}

    # Inside `checkpoint`, so that codes are saved, and decoded only in the backward pass.
    @jax.checkpoint
    def apply_saved(saved: dict[int, Array | QuantizedArray], tangents: list[Array]) -> list[Array]:
        loaded = {n: x.dequantize() if isinstance(x, QuantizedArray) else x for n, x in saved.items()}
        return apply([loaded[n] for n in first], tangents)

    return results, apply_saved(saved, active_tangents)


def _find_dependent(jaxpr: Jaxpr, variables: Sequence[Var]) -> set[Var]:
    """Returns the variables of a jaxpr whose values depend on any of `variables`."""
    found = set(variables)
    for equation in jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in found for v in equation.invars):
            found.update(equation.outvars)
    return found


def _find_divisors(jaxpr: Jaxpr, found: set[Var]) -> set[Var]:
    """Returns the variables of a jaxpr that must not be rounded to zero: divisors.

    - `found`: the results of the jaxpr that are divisors.
    """
    found = set(found)
    add = lambda variables: found.update(v for v in variables if not isinstance(v, Literal))
    for equation in reversed(jaxpr.eqns):
        name, operands, is_found = equation.primitive.name, equation.invars, [v in found for v in equation.outvars]
        if name in _DIVIDE:
            add([operands[_DIVIDE[name]]])
        elif name == "integer_pow" and equation.params["y"] < 0 or name in _KEEP_ZEROS and any(is_found):
            add(operands)
        for inner in jaxprs_in_params(equation.params):
            results = {v for v, wanted in zip(inner.outvars[::-1], is_found[::-1], strict=False) if wanted}
            within = _find_divisors(inner, {v for v in results if not isinstance(v, Literal)})
            # Match from the end: the index of a `cond` comes first, and its branches do not take it.
            pairs = zip(inner.invars[::-1], operands[::-1], strict=False)
            add(operand for variable, operand in pairs if variable in within)
    return found


def _quantize_residual(x: Array, format: AbstractFormat) -> Array | QuantizedArray:
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.size < _MIN_SIZE:
        return x
    quantize = lambda x: quantize_array(x, format, (-1,), None, None)
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jtu.tree_leaves(jax.eval_shape(quantize, x)))
    return quantize(x) if nbytes <= x.size * x.dtype.itemsize / 2 else x
