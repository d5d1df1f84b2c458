"""An optax wrapper that updates float masters of quantized weights, and requantizes them."""

from collections.abc import Sequence
from typing import NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray, UInt32

from .._array.array import is_quantized, QuantizedArray
from .._array.quantize import requantize_like
from .._mesh import move_to_mesh
from .._methods.names import as_method, MethodLike
from .._tree.leaves import abbreviate_list, DenseArray, float_leaves, Leaf, named_leaves, replace_leaves
from .._tree.placement import replicated_sharding
from .._types import PyTree
from .._wrappers.simulated import FakeQuantizedArray
from .mask import check_no_multi_steps, trainable_mask


if TYPE_CHECKING:
    import optax  # imported on first use: it takes as long to import as this package


# The path of each leaf, with its value, or `None` if it is not trained; and the master of each leaf, or `None`.
TrainedLeaves = Sequence[tuple[str, PyTree]]
Masters = Sequence[Array | np.ndarray | None]


class FloatMastersState(NamedTuple):
    """The state of [`eqquant.float_masters`][].

    - `masters`: the tree of parameters, with a float array for each trained quantized array and `None` elsewhere.
    - `inner_state`: the state of the wrapped optimizer, for the masters and the float parameters.
    - `key_data`: the data of the key for stochastic rounding at the next step, or `None`.

    **Arguments:** the three above. `init` returns the state; do not construct it yourself.
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
    method: MethodLike | None = None,
) -> "optax.GradientTransformationExtraArgs":
    """Returns an optimizer that trains quantized weights: quantization-aware training (QAT).

    Each quantized weight has a float master in the optimizer's state. A step updates the masters with the wrapped
    optimizer (weight decay applies to the masters too), quantizes them, and returns the difference from the codes and
    scales of the model. Every leaf of a quantized array is an unsigned integer, so the difference is exact: after
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

    It composes with optax. Pass it any optimizer: chains, schedules, clipping, momentum, `optax.MultiSteps`,
    `optax.apply_if_finite`, `optax.inject_hyperparams`. You can put [`eqquant.train_only`][] around it, which freezes
    leaves, or `optax.multi_transform`. In an `optax.chain`, only stateless gradient
    transformations, such as clipping, may come before it. Nothing that scales updates may come after it, because its
    updates are differences of codes. `init` and `update` take the model itself, or its arrays,
    `eqx.filter(model, eqx.is_array)`, which some functions of optax need.

    **Arguments:**

    - `optimizer`: an optax optimizer, which updates the masters.
    - `masters`: the initial masters: the float model that the model was quantized from, a tree of the same structure,
        or the same model simulated. By default the dequantized model in float32, which keeps the rounding error of
        quantization. ([`eqquant.Ternary`][] and [`eqquant.Binary`][] choose other scales for dequantized values, so
        with them the default changes the model at the first step.)
    - `dtype`: the dtype of the masters.
    - `key`: for stochastic rounding, with new randomness at every step, so that small steps are not lost on average.
        Without it, values round to the nearest code.
    - `method`: the method that quantizes the masters at each step; [`eqquant.AbsMax`][] by default. A method that
        searches makes each step slow.

    **Returns:**

    An `optax.GradientTransformationExtraArgs`, whose state is a pytree of constant structure, which you can save with
    `equinox.tree_serialise_leaves` or orbax. It is a named tuple:

    - `masters`: the tree of parameters, with a float array of `dtype` and of the logical shape for each trained
        quantized array, and `None` elsewhere.
    - `inner_state`: the state of `optimizer`, for the masters and the float parameters.
    - `key_data`: the data of the key for stochastic rounding at the next step, uint32, or `None`.

    **Raises:**

    `TypeError` if `optimizer` is not an optax optimizer. `init` raises `ValueError` if no quantized array is trained,
    if `optax.MultiSteps` is around it, or if `masters` lacks a leaf or has one of another shape or, outside `jit`, the
    values of another weight. `update` raises `ValueError` without parameters, or if the state or the gradients belong
    to other parameters. The message names the leaf.
    """
    import optax

    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"`dtype` must be floating point. Got {jnp.dtype(dtype)}. Masters are floats.")
    inner, method = as_optimizer(optimizer), as_method(method)

    def init(params: PyTree) -> FloatMastersState:
        check_no_multi_steps("float_masters", params)
        leaves = _find_trained(params)
        key_data = None if key is None else jr.key_data(key)
        if not leaves:  # `optax.tree_map_params` passes a placeholder to find the parameters in the state
            return FloatMastersState(params, inner.init(params), key_data)
        start = _init_masters(leaves, masters, jnp.dtype(dtype))
        if all(m is None for m in start):
            raise ValueError(_nothing_message(params, leaves))
        inner_state = inner.init(replace_leaves(params, _list_logical(start, leaves)))
        sharding = next(
            (s for _, q in leaves if is_quantized(q) and (s := replicated_sharding(q.sharding)) is not None), None
        )
        # Counters are on the mesh too, or the second step would compile again.
        inner_state, key_data = move_to_mesh((inner_state, key_data), sharding)
        return FloatMastersState(replace_leaves(params, start), inner_state, key_data)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: PyTree
    ) -> tuple[PyTree, FloatMastersState]:
        check_params(params, "float_masters")
        leaves = _find_trained(params)
        old = _flatten_masters(params, leaves, state)
        grads = _flatten_gradients(params, leaves, updates, old)
        logical = replace_leaves(params, _list_logical(old, leaves))
        steps, inner_state = inner.update(replace_leaves(params, grads), state.inner_state, logical, **extra_args)
        steps = _flatten_like(params, steps)
        new = [None if m is None else m + s.astype(m.dtype) for m, s in zip(old, steps, strict=True)]
        # Without the barrier XLA may compute a master twice, once for the state and once to quantize it, and round the
        # two differently.
        new = jax.lax.optimization_barrier(new)

        key_data, keys = state.key_data, [None] * len(new)
        if key is not None and key_data is not None:
            next_key, *keys = jr.split(jr.wrap_key_data(key_data, impl=jr.key_impl(key)), len(new) + 1)
            key_data = jr.key_data(next_key)
        whole = _flatten_like(params, params)
        # Integers wrap around, so that adding the change to the codes is exact.
        change = lambda path, q, m, k: jtu.tree_map(jnp.subtract, requantize_like(q, m, k, method.for_leaf(path)), q)
        out = [
            change(path, x, m, k) if m is not None else _zero_update(p) if x is None else s
            for p, (path, x), m, s, k in zip(whole, leaves, new, steps, keys, strict=True)
        ]
        return replace_leaves(params, out), FloatMastersState(replace_leaves(params, new), inner_state, key_data)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def apply_updates(model: PyTree, updates: PyTree) -> PyTree:
    """Returns the model with updates added, like `equinox.apply_updates`.

    It rejects updates that would break a quantized array.

    !!! Example

        ```python
        updates, state = optim.update(grads, state, model)
        model = eqq.apply_updates(model, updates)
        ```

    **Arguments:**

    - `model`: any pytree.
    - `updates`: a tree of the same structure. `None` keeps a leaf unchanged.

    **Returns:**

    The model after the step, of the same structure and dtypes.

    **Raises:**

    `ValueError` if the update of a quantized array is dense or scaled, if a float that is frozen beside low-rank
    factors has one, if an update has another shape, or if the tree has another structure. The message names the leaf.
    """
    steps = _flatten_like(model, updates, "`updates` must have the structure of the model.")
    mask = jtu.tree_leaves(trainable_mask(model))

    def apply(leaf: Leaf, step: PyTree, trains: bool) -> PyTree:
        path, x = leaf.path, leaf.value
        if step is None:
            return x
        if not trains and eqx.is_inexact_array(x):
            raise ValueError(
                "Beside low-rank factors, other floats are frozen: their update must be `None`. Got "
                f"{_describe(step)} for {path}: perhaps a gradient, which `optax.masked` passes on. {_TO_FREEZE} To "
                "train it too, call `eqx.apply_updates`."
            )
        if is_quantized(step) and not jtu.tree_leaves(step):  # from `eqx.filter_grad`, to which codes are no parameters
            if trains and jtu.tree_leaves(x):
                raise ValueError(
                    f"A quantized array that trains needs an update. Got none for {path}. {_TO_DIFFERENTIATE} Wrap the "
                    "optimizer in `eqq.float_masters`. To train floats alone, call `eqx.apply_updates`."
                )
            return x
        if is_quantized(x) != is_quantized(step):
            raise ValueError(
                f"The update of a quantized array must be one of its codes. Got {_describe(step)} for {path}. Wrap the "
                "optimizer in `eqq.float_masters`, which keeps the float array that such an update belongs to. "
                f"{_TO_FREEZE}"
            )
        return jtu.tree_map(lambda part, step: _add_update(path, part, step, is_quantized(x)), x, step)

    return replace_leaves(model, map(apply, named_leaves(model), steps, mask))


_TO_DIFFERENTIATE = "Differentiate with `eqq.filter_value_and_grad`, which gives quantized arrays a gradient."
_TO_FREEZE = "To freeze it, wrap the optimizer in `eqq.train_only`."


def as_optimizer(optimizer: object) -> "optax.GradientTransformationExtraArgs":
    """Returns an optax optimizer that takes extra arguments. Raises for any other object."""
    import optax

    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise TypeError(
            f"`optimizer` must be an optax optimizer. Got `{name}`. A function that makes one must be called: "
            "`optax.adamw(1e-3)`."
        )
    return optax.with_extra_args_support(optimizer)


def check_params(params: PyTree | None, wrapper: str) -> None:
    """Raises if the update of a wrapped optimizer got no parameters."""
    if params is None:
        raise ValueError(f"`{wrapper}` needs the parameters. Got none. Call `optim.update(grads, state, model)`.")


def _flatten_like(like: PyTree, tree: PyTree, rule: str = "") -> list[PyTree]:
    """Returns the part of `tree` for each leaf of `like`.

    Raises an error that begins with `rule` if the structures differ.
    """
    try:
        return jtu.tree_structure(like, is_leaf=is_quantized).flatten_up_to(tree)
    except ValueError as e:
        raise ValueError(f"{rule} {e}") from None


def _find_trained(params: PyTree) -> TrainedLeaves:
    """Returns the path of every leaf, with its value, or `None` if it is not trained."""
    spread = lambda m, node: jtu.tree_map(lambda _: m, node, is_leaf=is_quantized)
    mask = jtu.tree_map(spread, trainable_mask(params), params)
    leaves = [
        (leaf.float_path or leaf.path, leaf.value if m else None)
        for leaf, m in zip(named_leaves(params), jtu.tree_leaves(mask), strict=True)
    ]
    for path, x in leaves:
        if isinstance(x, QuantizedArray) and not isinstance(x.codes, DenseArray):
            raise ValueError(
                f"The parameters must hold whole quantized arrays. Got {path} without its codes, which are integers: a "
                "filter for floats has taken them away. Pass the model itself, or `eqx.filter(model, eqx.is_array)`."
            )
    return leaves


def _list_logical(masters: Masters, leaves: TrainedLeaves) -> list[PyTree]:
    """Returns the parameters of the wrapped optimizer: masters, and float parameters."""
    return [x if m is None else m for m, (_, x) in zip(masters, leaves, strict=True)]


def _nothing_message(params: PyTree, leaves: TrainedLeaves) -> str:
    frozen = any(is_quantized(x) for x in jtu.tree_leaves(params, is_leaf=is_quantized))
    remedy = (
        "Weights with low-rank factors are frozen: train the factors with `eqq.train_only(optimizer, "
        "eqq.trainable_mask(model))`, without the wrapper."
        if frozen
        else "Quantize the model first, or use the optimizer without the wrapper."
    )
    return (
        "`float_masters` needs quantized parameters to train. Got none among its leaves "
        f"({abbreviate_list(path for path, x in leaves if x is not None) or 'none'}). {remedy}"
    )


def _init_masters(leaves: TrainedLeaves, masters: PyTree | None, dtype: np.dtype) -> Masters:
    """Returns the initial masters: from `masters`, or the dequantized arrays."""
    if masters is None:
        # In float32, whatever the logical dtype: masters rounded to less precision would quantize to other codes.
        return [x.astype(jnp.float32).dequantize().astype(dtype) if is_quantized(x) else None for _, x in leaves]
    is_leaf = lambda x: is_quantized(x) or isinstance(x, FakeQuantizedArray)
    float_params = float_leaves(masters, is_leaf)
    float_params = {path: x.master if isinstance(x, FakeQuantizedArray) else x for path, x in float_params.items()}
    return [_copy_master(path, q, float_params.get(path), dtype) if is_quantized(q) else None for path, q in leaves]


def _copy_master(path: str, q: QuantizedArray, master: PyTree, dtype: np.dtype) -> Float[Array, "..."]:
    if not isinstance(master, DenseArray) or not jnp.issubdtype(master.dtype, jnp.floating):
        raise ValueError(
            f"`masters` must have a float array for every quantized one. Got {_describe(master)} for {path}. Pass the "
            "model as it was before `quantize_tree`."
        )
    if tuple(master.shape) != q.shape:
        raise ValueError(f"`masters` must have the shapes of the model. Got {master.shape} for {path}, of {q.shape}.")
    # Copy, so that both the model and the state can be donated to `jit`.
    master = move_to_mesh(jnp.array(master, dtype), q.sharding)
    if not any(isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) for x in (q.codes, master)):
        with jax.ensure_compile_time_eval():  # the arrays are concrete, though `init` may run under `jit`
            distance, length = _measure_distances(q, master)
            if distance > length:
                raise ValueError(
                    f"`masters` must be the float model that was quantized. Got another array for {path}: it is "
                    "further from the quantized one than zeros are. Pass the model as it was before `quantize_tree`."
                )
    return master


@jax.jit
def _measure_distances(q: QuantizedArray, master: Float[Array, "..."]) -> tuple[Array, Array]:
    """Returns the squared distances of a master from the dequantized array and from zero.

    Unlike a comparison of codes, it tolerates other scales and stochastic rounding.
    """
    dense, master = q.dequantize().astype(jnp.float32), master.astype(jnp.float32)
    return jnp.sum(jnp.square(dense - master)), jnp.sum(jnp.square(master))


def _flatten_masters(params: PyTree, leaves: TrainedLeaves, state: PyTree) -> Masters:
    remedy = "Make it with `state = optim.init(model)`."
    if not isinstance(state, FloatMastersState):
        raise ValueError(f"`float_masters` needs the state that its `init` returns. Got {_describe(state)}. {remedy}")
    rule = "The state must belong to these parameters."
    masters = _flatten_like(params, state.masters, f"{rule} Got masters of another structure. {remedy}")
    for (path, x), master in zip(leaves, masters, strict=True):
        expected = tuple(x.shape) if is_quantized(x) else None
        got = None if master is None else jnp.shape(master)
        if got != expected:
            raise ValueError(f"{rule} Got {got} for {path}, whose master is of shape {expected}. {remedy}")
    return masters


def _flatten_gradients(params: PyTree, leaves: TrainedLeaves, grads: PyTree, masters: Masters) -> list[PyTree]:
    """Returns the gradients, in the dtypes of the masters. Raises if one does not fit."""
    rule = (
        "Gradients must have the structure of the parameters, with a float array for each quantized one, as "
        "`eqq.filter_grad` returns them."
    )
    flat = _flatten_like(params, grads, rule)
    out = []
    for (path, x), grad, master in zip(leaves, flat, masters, strict=True):
        if x is None:
            out.append(None)
            continue
        if grad is None or is_quantized(grad):
            raise ValueError(
                f"Every trained parameter needs a gradient. Got none for {path}. {_TO_DIFFERENTIATE} {_TO_FREEZE}"
            )
        if jnp.shape(grad) != tuple(x.shape):
            raise ValueError(
                f"A gradient must have the shape of its parameter. Got {jnp.shape(grad)} for {path}, {x.shape}."
            )
        out.append(grad if master is None else grad.astype(master.dtype))
    return out


def _add_update(path: str, x: PyTree, step: PyTree, codes: bool) -> PyTree:
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):  # a Python number
        return x + step
    if codes and step.dtype != x.dtype:
        raise ValueError(
            f"The update of codes must be of integers, as `eqq.float_masters` returns it. Got {step.dtype} for {path}. "
            "Nothing that scales updates may come after it in an `optax.chain`: put that before it or inside."
        )
    if jnp.shape(step) != x.shape or (jnp.iscomplexobj(step) and not jnp.iscomplexobj(x)):
        raise ValueError(
            f"An update must have the shape of its parameter, and be real if the parameter is. Got {jnp.shape(step)}, "
            f"{jnp.result_type(step)}, for {path}, {x.shape}, {x.dtype}. Apply updates of this model."
        )
    return (x + step).astype(x.dtype)


def _zero_update(x: PyTree) -> PyTree:
    """Returns an update of zero that every `apply_updates` accepts."""
    plain = isinstance(x, (jax.Array, np.ndarray)) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return jtu.tree_map(jnp.zeros_like, x) if plain or is_quantized(x) else None


def _describe(x: PyTree) -> str:
    if x is None:
        return "nothing"
    if is_quantized(x):
        return "a quantized array"
    return f"a {x.dtype} array" if isinstance(x, jax.Array) else f"a {type(x).__name__}"
