"""Training quantized weights: an optax wrapper that steps float masters, and requantizes them."""

import dataclasses
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
import jax.core
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray, PyTree, UInt32

from .._array import QuantizedArray
from .._leaves import named_leaves, some, trainable_mask
from .._quantize import encode_array, is_quantized


if TYPE_CHECKING:
    import optax  # imported when it is needed: it takes as long as all of this package


class FloatMastersState(NamedTuple):
    """The state of [`eqquant.float_masters`][].

    - `masters`: the tree of parameters, with a float array for each quantized one that is trained and `None` elsewhere.
    - `inner_state`: the state of the wrapped optimizer, over the masters and the parameters that are float anyway.
    - `key_data`: what the next step rounds stochastically with, or `None`.

    **Arguments:** the three above. Made by `init`, and not by hand.
    """

    masters: PyTree
    inner_state: PyTree
    key_data: UInt32[Array, "..."] | None


def float_masters(
    optimizer: "optax.GradientTransformation",
    *,
    masters: PyTree | None = None,
    dtype: DTypeLike = jnp.float32,
    key: PRNGKeyArray | None = None,
) -> "optax.GradientTransformationExtraArgs":
    """Trains quantized weights with any optax optimizer: quantization-aware training.

    Each quantized weight has a float master in the optimizer's state. A step moves the masters with the wrapped
    optimizer (weight decay too sees masters), quantizes them, and returns the difference from the codes and scales that
    the model has. As every leaf of a quantized array is an unsigned integer, that difference is exact: after
    `eqq.apply_updates`, `eqx.apply_updates` or `optax.apply_updates` the model *is* `quantize(masters)`. Float
    parameters train as usual.

    !!! Example

        ```python
        optim = eqq.float_masters(optax.adamw(1e-4))
        state = optim.init(model)

        @eqx.filter_jit
        def step(model, state, x, y):
            loss, grads = eqq.filter_value_and_grad(loss_fn)(model, x, y)
            updates, state = optim.update(grads, state, model)
            return eqq.apply_updates(model, updates), state, loss
        ```

    It composes. Chains, schedules, clipping, `optax.MultiSteps` and `optax.inject_hyperparams` go inside. Outside go
    `optax.masked`, `optax.multi_transform`, and, in an `optax.chain`, what comes before it. Nothing that scales updates
    may come after it: its updates are differences of codes. `init` and `update` take the model itself; some of optax's
    own functions want it without what is no array, `eqx.filter(model, eqx.is_array)`, and these take that too.

    **Arguments:**

    - `optimizer`: the optimizer of the masters.
    - `masters`: what the masters start from: the float model that the model was quantized from, or a tree like it. What
        the model dequantizes to unless given, which loses what quantization rounded off. ([`eqquant.Ternary`][] and
        [`eqquant.Binary`][] choose other scales for values that they have rounded already, so with them the model would
        change at the first step.)
    - `dtype`: the dtype of the masters.
    - `key`: rounds stochastically, with new randomness at every step, so that small steps are not lost on average.
        Otherwise rounding is to nearest.

    **Returns:**

    An `optax.GradientTransformationExtraArgs`, whose state is a [`eqquant.FloatMastersState`][]: a pytree of constant
    structure, that `equinox.tree_serialise_leaves` and orbax save.

    **Raises:**

    Its `init`: `ValueError` if nothing quantized is trained, or if the masters lack a leaf or have one of another
    shape; its `update`: `ValueError` if it gets no parameters, or gradients of another structure or shape. The message
    names the leaf.
    """
    import optax

    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"`dtype` must be floating point. Got {jnp.dtype(dtype)}. Masters are floats.")
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> FloatMastersState:
        leaves = _trained(params)
        given = None if masters is None else {leaf.path: leaf.value for leaf in named_leaves(masters)}
        start = [_master(path, q, given, dtype) if is_quantized(q) else None for path, q in leaves]
        logical = [q if m is None else m for m, (_, q) in zip(start, leaves, strict=True)]
        if all(m is None for m in start):
            raise ValueError(
                "`float_masters` needs quantized parameters to train. Got none among its leaves "
                f"({some(path for path, x in leaves if x is not None) or 'none'}). Quantize the model first, or use the "
                "optimizer without the wrapper."
            )
        treedef = _treedef(params)
        key_data = None if key is None else jr.key_data(key)
        return FloatMastersState(
            jtu.tree_unflatten(treedef, start), inner.init(jtu.tree_unflatten(treedef, logical)), key_data
        )

    def update(
        updates: PyTree, state: FloatMastersState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, FloatMastersState]:
        if params is None:
            raise ValueError(
                "`float_masters` needs the parameters. Got none. Call `optim.update(grads, state, model)`."
            )
        leaves, treedef = _trained(params), _treedef(params)
        old = treedef.flatten_up_to(state.masters)
        grads = [
            _gradient(path, x, g, m)
            for (path, x), g, m in zip(leaves, _flatten_gradients(treedef, updates), old, strict=True)
        ]
        logical = jtu.tree_unflatten(treedef, [x if m is None else m for m, (_, x) in zip(old, leaves, strict=True)])
        steps, inner_state = inner.update(jtu.tree_unflatten(treedef, grads), state.inner_state, logical, **extra_args)
        steps = treedef.flatten_up_to(steps)
        new = [None if m is None else m + s.astype(m.dtype) for m, s in zip(old, steps, strict=True)]
        # Without the barrier a compiler may compute a master twice, once to keep and once to quantize, and round the
        # two differently.
        new = jax.lax.optimization_barrier(new)

        key_data, keys = state.key_data, [None] * len(new)
        if key is not None and key_data is not None:
            first, *keys = jr.split(jr.wrap_key_data(key_data, impl=jr.key_impl(key)), len(new) + 1)
            key_data = jr.key_data(first)
        whole = treedef.flatten_up_to(params)
        out = [
            _difference(x, m, k) if m is not None else _unchanged(p) if x is None else s
            for p, (_, x), m, s, k in zip(whole, leaves, new, steps, keys, strict=True)
        ]
        state = FloatMastersState(jtu.tree_unflatten(treedef, new), inner_state, key_data)
        return jtu.tree_unflatten(treedef, out), state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def apply_updates(model: PyTree, updates: PyTree) -> PyTree:
    """Adds updates to a model, as `equinox.apply_updates` does, and refuses those that would break a quantized array.

    !!! Example

        ```python
        updates, state = optim.update(grads, state, model)
        model = eqq.apply_updates(model, updates)
        ```

    **Arguments:**

    - `model`: any pytree.
    - `updates`: a tree of its structure. `None` leaves a leaf as it is.

    **Returns:**

    The model after the step, of the same structure and dtypes.

    **Raises:**

    `ValueError` for a dense update of a quantized array, or for a tree of another structure.
    """
    leaves, treedef = list(named_leaves(model)), _treedef(model)
    try:
        steps = treedef.flatten_up_to(updates)
    except ValueError as e:
        raise ValueError(f"`updates` must have the structure of the model. {e}") from None

    def apply(path: str, x: Any, step: Any) -> Any:
        if step is None:
            return x
        if is_quantized(x) != is_quantized(step):
            raise ValueError(
                f"The update of a quantized array must be one of its codes. Got {_describe(step)} for {path}. Wrap the "
                "optimizer in `eqq.float_masters`, which keeps the float array that such an update belongs to."
            )
        return jtu.tree_map(lambda leaf, by: (leaf + by).astype(leaf.dtype), x, step)

    return jtu.tree_unflatten(treedef, [apply(leaf.path, leaf.value, s) for leaf, s in zip(leaves, steps, strict=True)])


#
# Leaf by leaf
#


def _treedef(tree: PyTree) -> Any:
    return jtu.tree_structure(tree, is_leaf=is_quantized)


def _trained(params: PyTree) -> list[tuple[str, Any]]:
    """Path and value of every leaf, in which `None` stands for what is not trained."""
    mask = jtu.tree_map(
        lambda m, node: jtu.tree_map(lambda _: m, node, is_leaf=is_quantized), trainable_mask(params), params
    )
    return [
        (leaf.path, leaf.value if m else None)
        for leaf, m in zip(named_leaves(params), jtu.tree_leaves(mask), strict=True)
    ]


def _master(path: str, q: QuantizedArray, given: dict[str, Any] | None, dtype: DTypeLike) -> Float[Array, "..."]:
    if not isinstance(q.codes, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        raise ValueError(
            f"The parameters must hold whole quantized arrays. Got {path} without its codes, which are integers: a "
            "filter for floats has taken them away. Pass the model itself, or `eqx.filter(model, eqx.is_array)`."
        )
    if given is None:
        return q.dequantize().astype(dtype)
    master = given.get(path)
    if master is None or is_quantized(master) or not jnp.issubdtype(getattr(master, "dtype", bool), jnp.floating):
        raise ValueError(
            f"`masters` must have a float array for every quantized one. Got {_describe(master)} for {path}. Pass the "
            "model as it was before `quantize_tree`."
        )
    if tuple(master.shape) != q.shape:
        raise ValueError(f"`masters` must have the shapes of the model. Got {master.shape} for {path}, of {q.shape}.")
    return jnp.array(master, dtype)  # a copy: the model and the state may be donated together


def _flatten_gradients(treedef: Any, grads: PyTree) -> list[Any]:
    try:
        return treedef.flatten_up_to(grads)
    except ValueError as e:
        raise ValueError(
            "Gradients must have the structure of the parameters, with a float array for each quantized one, as "
            f"`eqq.filter_grad` returns them. {e}"
        ) from None


def _gradient(path: str, x: Any, grad: Any, master: Any) -> Any:
    """The gradient as the wrapped optimizer wants it; or an error that names the leaf."""
    if x is None:
        return None
    if grad is None or is_quantized(grad):
        raise ValueError(
            f"Every trained parameter needs a gradient. Got none for {path}. Differentiate with "
            "`eqq.filter_value_and_grad`, which gives quantized arrays one; to freeze a leaf, use `optax.masked`."
        )
    if jnp.shape(grad) != tuple(x.shape):
        raise ValueError(
            f"A gradient must have the shape of its parameter. Got {jnp.shape(grad)} for {path}, {x.shape}."
        )
    return grad if master is None else grad.astype(master.dtype)


def _difference(q: QuantizedArray, master: Float[Array, "..."], key: Any) -> QuantizedArray:
    """What to add to the codes and scales of `q`, modulo the range of each integer, to get those of the master."""
    new = encode_array(master, q.format, q._axes, q.logical_dtype, key)
    new = dataclasses.replace(new, logical_sharding=q.logical_sharding)
    return jtu.tree_map(lambda n, old: n - old, new, q)


def _unchanged(x: Any) -> Any:
    """An update that changes nothing, which every `apply_updates` takes."""
    plain = isinstance(x, (jax.Array, np.ndarray)) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return jtu.tree_map(jnp.zeros_like, x) if plain or is_quantized(x) else None


def _describe(x: Any) -> str:
    return "nothing" if x is None else "a quantized array" if is_quantized(x) else f"a {type(x).__name__}"
