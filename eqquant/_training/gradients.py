"""Gradients of models with quantized arrays."""

import dataclasses
import functools as ft
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import ArrayLike

from .._array.array import is_quantized
from .._numerics.axes import as_axes, memory_order
from .._types import PyTree
from .mask import trainable_mask


FilterSpec = PyTree[bool | Callable[[object], bool]]


def filter_value_and_grad(
    fun: Callable[..., PyTree] | None = None, *, has_aux: bool = False, filter_spec: FilterSpec | None = None
) -> Callable[..., PyTree]:
    """Computes a value and gradients, of quantized arrays too.

    It is like `equinox.filter_value_and_grad`.

    The gradient of a [`eqquant.QuantizedArray`][] is a dense float array of its logical shape and dtype: the gradient
    with respect to the dequantized weight (straight-through). Differentiation does not change the forward pass: it
    still uses the quantized matmul and makes no dense copy of a weight.

    !!! Example

        ```python
        @eqx.filter_jit
        @eqq.filter_value_and_grad
        def loss(model, x, y):
            return jnp.mean(jnp.square(jax.vmap(model)(x) - y))

        value, grads = loss(model, x, y)  # grads.layers[0].weight is a float array
        ```

    **Arguments:**

    - `fun`: a function whose first argument is a pytree (the model), and which returns a float scalar; with `has_aux`,
        a pair of a float scalar and any auxiliary data. If `fun` is left out, returns a decorator.
    - `has_aux`: whether `fun` returns such a pair.
    - `filter_spec`: selects the leaves to differentiate: a tree of booleans, or of functions from a leaf to a boolean,
        that is a prefix of the model. A [`eqquant.QuantizedArray`][] counts as one leaf. To select it, write `True` or
        a function that returns `True` for it; `equinox.is_inexact_array` returns `False`. Defaults to
        [`eqquant.trainable_mask`][].

    **Returns:**

    A function of the same arguments that returns the value and the gradients with respect to its first argument. The
    gradients have the structure of that argument, with a dense array in the place of each quantized one, and `None` for
    leaves that are not differentiated.

    **Raises:**

    The returned function raises `ValueError` if `filter_spec` selects no leaf of its first argument.
    """

    if fun is None:
        return ft.partial(filter_value_and_grad, has_aux=has_aux, filter_spec=filter_spec)

    @ft.wraps(fun)
    def value_and_grad(model: PyTree, /, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        leaves, treedef = jtu.tree_flatten(model, is_leaf=is_quantized)
        chosen = treedef.flatten_up_to(_choose_leaves(model, filter_spec))
        if not any(chosen):
            raise ValueError(
                f"The first argument of `{getattr(fun, '__name__', 'fun')}` must hold something to differentiate: "
                f"floating point or quantized arrays that `filter_spec` selects. Got none among {len(leaves)} leaves."
            )
        # A quantized array has no float leaf to differentiate, so an extra float leaf receives the gradient of the
        # weight. Nothing reads its value, so it is zeros.
        make_variable = lambda x: jnp.zeros(x.shape, x.dtype) if is_quantized(x) else x
        diff = [make_variable(x) if c else None for x, c in zip(leaves, chosen, strict=True)]

        @ft.partial(eqx.filter_value_and_grad, has_aux=has_aux)
        def call(diff: list[ArrayLike | None]) -> PyTree:
            merged = [x if d is None else _attach_variable(x, d) for x, d in zip(leaves, diff, strict=True)]
            return fun(jtu.tree_unflatten(treedef, merged), *args, **kwargs)

        value, grads = call(diff)
        # In a gradient of a gradient, the outer call has added such leaves, and needs them in `aux`.
        if has_aux and not any(is_quantized(x) and x.gradient_of is not None for x in leaves):
            detach = lambda x: dataclasses.replace(x, gradient_of=None) if is_quantized(x) else x
            value = (value[0], jtu.tree_map(detach, value[1], is_leaf=is_quantized))
        return value, jtu.tree_unflatten(treedef, grads)

    return value_and_grad


def filter_grad(
    fun: Callable[..., PyTree] | None = None, *, has_aux: bool = False, filter_spec: FilterSpec | None = None
) -> Callable[..., PyTree]:
    """Computes gradients, as `equinox.filter_grad`, for quantized arrays too.

    See [`eqquant.filter_value_and_grad`][].

    !!! Example

        ```python
        grads = eqq.filter_grad(loss)(model, x, y)
        ```

    **Arguments:**

    - `fun`: a function whose first argument is a pytree (the model), and which returns a float scalar; with `has_aux`,
        a pair of a float scalar and any auxiliary data. If `fun` is left out, returns a decorator.
    - `has_aux`: whether `fun` returns such a pair.
    - `filter_spec`: selects the leaves to differentiate, as for [`eqquant.filter_value_and_grad`][]. Defaults to
        [`eqquant.trainable_mask`][].

    **Returns:**

    A function of the same arguments that returns the gradients; with `has_aux`, the pair of gradients and auxiliary
    data.

    **Raises:**

    As [`eqquant.filter_value_and_grad`][].
    """
    if fun is None:
        return ft.partial(filter_grad, has_aux=has_aux, filter_spec=filter_spec)
    value_and_grad = filter_value_and_grad(fun, has_aux=has_aux, filter_spec=filter_spec)

    @ft.wraps(fun)
    def grad(model: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        value, grads = value_and_grad(model, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad


def _choose_leaves(model: PyTree, spec: FilterSpec | None) -> PyTree[bool]:
    """Returns a boolean for each leaf of the model: whether to differentiate it."""
    spec = trainable_mask(model) if spec is None else spec

    def choose(wanted: PyTree, node: PyTree) -> PyTree[bool]:
        if is_quantized(wanted):  # from a `tree_map` over the parts of the array
            wanted = _merge_booleans(wanted)
        select = wanted if callable(wanted) else lambda _: wanted
        return jtu.tree_map(
            lambda x: bool(select(x)) and (is_quantized(x) or eqx.is_inexact_array(x)), node, is_leaf=is_quantized
        )

    return jtu.tree_map(choose, spec, model, is_leaf=is_quantized)


def _merge_booleans(spec: PyTree) -> bool:
    wanted = {bool(w) for w in jtu.tree_leaves(spec)}
    if len(wanted) != 1:
        raise ValueError(
            "`filter_spec` must select a quantized array as a whole. Got one with some parts selected and some not. "
            "Make it with `jax.tree_util.tree_map(..., is_leaf=eqq.is_quantized)`."
        )
    return wanted.pop()


def _attach_variable(x: PyTree, variable: ArrayLike) -> PyTree:
    if not is_quantized(x):
        return variable
    source = memory_order(jnp.asarray(variable), as_axes(x.axis))
    # In a gradient of a gradient the array already has such a leaf. It must receive its gradient too.
    return dataclasses.replace(x, gradient_of=source if x.gradient_of is None else x.gradient_of + source)
