"""Gradients of models that hold quantized arrays."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array.array import is_quantized
from .._array.axes import memory_order
from .._docs import fill_doc
from .mask import trainable_mask


FilterSpec = PyTree[bool | Callable[[Any], bool]]

_ARGUMENTS = """
    - `fun`: a function of a pytree (the model) and anything else, that returns a float scalar; with `has_aux`, a pair
        of that and of anything. Without it, a decorator with the other arguments is returned.
    - `has_aux`: whether it does.
    - `filter_spec`: which leaves are differentiated: a tree of booleans, or of functions from a leaf to a boolean, that
        is a prefix of the model. A [`eqquant.QuantizedArray`][] counts as one leaf: `True` selects it, and so does a
        function that is true of it, which `equinox.is_inexact_array` is not. [`eqquant.trainable_mask`][] unless given.
"""


@fill_doc(arguments=_ARGUMENTS)
def filter_value_and_grad(
    fun: Callable[..., Any] | None = None, *, has_aux: bool = False, filter_spec: FilterSpec | None = None
) -> Callable[..., Any]:
    """As `equinox.filter_value_and_grad`, and quantized arrays have gradients too.

    The gradient of a [`eqquant.QuantizedArray`][] is a dense float array of its logical shape and dtype: the gradient
    with respect to the weight that it dequantizes to (straight-through). The forward pass computes what it would
    without differentiation, quantized matmul included, and makes no dense copy of a weight.

    !!! Example

        ```python
        @eqx.filter_jit
        @eqq.filter_value_and_grad
        def loss(model, x, y):
            return jnp.mean(jnp.square(jax.vmap(model)(x) - y))

        value, grads = loss(model, x, y)  # grads.layers[0].weight is a float array
        ```

    **Arguments:**

    {arguments}

    **Returns:**

    A function of the same arguments that returns the value and the gradients with respect to its first argument: a tree
    of its structure, in which a dense array stands for each quantized one, and `None` for what is not differentiated.

    **Raises:**

    Called with a tree in which nothing is to be differentiated: `ValueError`.
    """

    if fun is None:
        return ft.partial(filter_value_and_grad, has_aux=has_aux, filter_spec=filter_spec)

    @ft.wraps(fun)
    def value_and_grad(model: PyTree, /, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        leaves, treedef = jtu.tree_flatten(model, is_leaf=is_quantized)
        chosen = treedef.flatten_up_to(_chosen(model, filter_spec))
        if not any(chosen):
            raise ValueError(
                f"The first argument of `{getattr(fun, '__name__', 'fun')}` must hold something to differentiate: "
                f"floating point or quantized arrays that `filter_spec` selects. Got none among {len(leaves)} leaves."
            )
        # A quantized array has no float leaf to differentiate, so one is put there, of zeros, since its value
        # has no part in anything and its gradient is that of the weight.
        diff = [_variable(x) if c else None for x, c in zip(leaves, chosen, strict=True)]

        @ft.partial(eqx.filter_value_and_grad, has_aux=has_aux)
        def of_diff(diff: list[Any]) -> Any:
            merged = [x if d is None else _with_variable(x, d) for x, d in zip(leaves, diff, strict=True)]
            return fun(jtu.tree_unflatten(treedef, merged), *args, **kwargs)

        value, grads = of_diff(diff)
        # Under a gradient of a gradient, such leaves are somebody else's too, and must go on.
        if has_aux and not any(is_quantized(x) and x.gradient_of is not None for x in leaves):
            value = (value[0], jtu.tree_map(_without_variable, value[1], is_leaf=is_quantized))
        return value, jtu.tree_unflatten(treedef, grads)

    return value_and_grad


@fill_doc(arguments=_ARGUMENTS)
def filter_grad(
    fun: Callable[..., Any] | None = None, *, has_aux: bool = False, filter_spec: FilterSpec | None = None
) -> Callable[..., Any]:
    """As `equinox.filter_grad`, and quantized arrays have gradients too. See [`eqquant.filter_value_and_grad`][].

    !!! Example

        ```python
        grads = eqq.filter_grad(loss)(model, x, y)
        ```

    **Arguments:**

    {arguments}

    **Returns:**

    A function of the same arguments that returns the gradients; with `has_aux`, a pair of these and of the rest.

    **Raises:**

    As [`eqquant.filter_value_and_grad`][].
    """
    if fun is None:
        return ft.partial(filter_grad, has_aux=has_aux, filter_spec=filter_spec)
    value_and_grad = filter_value_and_grad(fun, has_aux=has_aux, filter_spec=filter_spec)

    @ft.wraps(fun)
    def grad(model: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grad(model, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad


def _chosen(model: PyTree, spec: FilterSpec | None) -> PyTree[bool]:
    """A boolean for each leaf of the model: whether it is differentiated."""
    spec = trainable_mask(model) if spec is None else spec

    def under(wanted: Any, node: PyTree) -> PyTree[bool]:
        if is_quantized(wanted):  # made by a `tree_map` over the model that went inside
            wanted = _one_boolean(wanted)
        wants = wanted if callable(wanted) else lambda _: wanted
        return jtu.tree_map(
            lambda x: bool(wants(x)) and (is_quantized(x) or eqx.is_inexact_array(x)), node, is_leaf=is_quantized
        )

    return jtu.tree_map(under, spec, model, is_leaf=is_quantized)


def _one_boolean(spec: Any) -> bool:
    wanted = {bool(w) for w in jtu.tree_leaves(spec)}
    if len(wanted) != 1:
        raise ValueError(
            "`filter_spec` must select a quantized array as a whole. Got one of which some parts are selected and some "
            "are not. Make it with `jax.tree_util.tree_map(..., is_leaf=eqq.is_quantized)`."
        )
    return wanted.pop()


def _variable(x: Any) -> Any:
    return jnp.zeros(x.shape, x.dtype) if is_quantized(x) else x


def _with_variable(x: Any, variable: Any) -> Any:
    if not is_quantized(x):
        return variable
    source = memory_order(variable, x._axes)
    # Under a gradient of a gradient there is such a leaf already, which wants its share.
    return dataclasses.replace(x, gradient_of=source if x.gradient_of is None else x.gradient_of + source)


def _without_variable(x: Any) -> Any:
    return dataclasses.replace(x, gradient_of=None) if is_quantized(x) else x
