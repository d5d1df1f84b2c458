"""Delayed scaling: an optax wrapper that keeps an amax history for the scales of products."""

import dataclasses
import math
from typing import NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Float32

from .._array.array import is_quantized
from .._tree.leaves import abbreviate_list, named_leaves
from .._types import PyTree
from .._wrappers.low_precision import LowPrecisionArray, map_amax
from .masters import as_optimizer, check_params


if TYPE_CHECKING:
    import optax  # imported on first use: it takes as long to import as this package


class DelayedScalingState(NamedTuple):
    """The state of [`eqquant.delayed_scaling`][].

    - `history`: the amax history of each weight, by its path: for $x$, $W$ and $\\mathrm d y$ in the last steps,
        `(*stack, 3, history)`, the last step first; zero for a step without a product.
    - `inner_state`: the state of the wrapped optimizer, which sees no amax.

    **Arguments:** the two above. `init` makes the state; do not make it by hand.
    """

    history: dict[str, Float32[Array, "*stack 3 history"]]
    inner_state: PyTree


def delayed_scaling(
    optimizer: "optax.GradientTransformation", *, history: int = 16, margin: float = 0.0
) -> "optax.GradientTransformationExtraArgs":
    r"""Wraps an optimizer to update the scales of low-precision training: *delayed scaling*.

    The model comes from `eqq.low_precision_training(..., delayed=True)`. Each of its low-precision weights holds three
    floats, the amax that its products expect of $x$, $W$ and $\mathrm d y$. Their gradient is the current amax of this
    step. The wrapper appends it to a history, and returns updates after which the model holds the maximum of the
    history. The wrapped optimizer gets everything else, and never sees an amax: not in its moments, its weight decay or
    its clipping of gradients.

    A value above the expected amax is clipped. Before the first step nothing is expected, and each product uses the
    current amax. A NaN or an infinity turns its product into NaN. Such a step enters the history as zero, so that later
    steps do not suffer from it.

    !!! Example

        ```python
        model = eqq.low_precision_training(model, "fp8", delayed=True)
        optim = eqq.delayed_scaling(optax.adamw(1e-3))
        state = optim.init(model)

        @eqx.filter_jit
        def step(model, state, x, y):
            loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
            updates, state = optim.update(grads, state, model)
            return eqx.apply_updates(model, updates), state, loss
        ```

    `init` and `update` take the model itself, or its parameters. Wrap the whole optimizer, chains, clipping,
    `optax.MultiSteps` and [`eqquant.float_masters`][] included: the wrapper needs unchanged gradients. Without the
    wrapper an optimizer takes amax values for gradients, which spoils their norm. It moves the expected amax below
    zero, so that products use the current one, as before the first step.

    ??? cite

        [FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433)

    **Arguments:**

    - `optimizer`: an optax optimizer.
    - `history`: the number of steps in the history.
    - `margin`: the model holds the maximum of the history times $2^{\text{margin}}$. A margin above zero keeps growing
        values from being clipped. A weight that a step uses $n$ times, tied or in a recurrence, gets the sum of the
        amax of its uses, which is up to $n$ times the maximum: a margin of $-\log_2 n$ compensates for this.

    **Returns:**

    An `optax.GradientTransformationExtraArgs`, whose state holds the history of amax of each weight.

    **Raises:**

    `TypeError` if `optimizer` is not an optax optimizer; `ValueError` if `history` is not positive or `margin` not
    finite. `init` raises `ValueError` if no weight has delayed scales. `update` raises `ValueError` without
    parameters, or if the state belongs to other parameters.
    """
    import optax

    if isinstance(history, bool) or not isinstance(history, int) or history < 1:
        raise ValueError(f"`history` must be a number of steps, at least 1. Got {history!r}.")
    if not math.isfinite(margin):
        raise ValueError(f"`margin` must be a finite number. Got {margin!r}.")
    inner = as_optimizer(optimizer)

    def init(params: PyTree) -> DelayedScalingState:
        if not jtu.tree_leaves(params):  # from `optax.tree_map_params`, to which the history must be one leaf
            return DelayedScalingState(jnp.zeros(()), inner.init(params))  # pyright: ignore[reportArgumentType]
        amax = _find_amax(params)
        if not amax:
            raise ValueError(
                "`delayed_scaling` needs weights with delayed scales. Got none among the leaves of the parameters "
                f"({abbreviate_list(leaf.path for leaf in named_leaves(params))}). Make the model with "
                "`eqq.low_precision_training(model, 'fp8', delayed=True)`, or use the optimizer without the wrapper."
            )
        # The amax in the model is the maximum of an earlier history.
        empty = lambda x: jnp.zeros((*x.shape, history), jnp.float32)
        start = {path: _push_amax(empty(x), x * 2.0**-margin) for path, x in amax.items()}
        return DelayedScalingState(start, inner.init(_strip_amax(params)))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: PyTree
    ) -> tuple[PyTree, DelayedScalingState]:
        check_params(params, "delayed_scaling")
        old, observed = _find_amax(params), _find_amax(updates)
        if not isinstance(state, DelayedScalingState) or state.history.keys() != old.keys():
            raise ValueError(
                "`delayed_scaling` needs the state that its `init` returns for these parameters. Got another. Make it "
                "with `state = optim.init(model)`."
            )
        histories = {
            path: _push_amax(x, observed[path]) if path in observed else x for path, x in state.history.items()
        }
        new = {path: jnp.max(x, axis=-1) * 2.0**margin for path, x in histories.items()}
        steps, inner_state = inner.update(_strip_amax(updates), state.inner_state, _strip_amax(params), **extra_args)
        steps = _fill_amax(steps, updates, {path: (new[path] - old[path]).astype(old[path].dtype) for path in observed})
        return steps, DelayedScalingState(histories, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_node(x: object) -> bool:
    return isinstance(x, LowPrecisionArray)


def _find_nodes(tree: PyTree) -> dict[str, LowPrecisionArray]:
    """Returns the low-precision weights, by path."""
    flat = jtu.tree_leaves_with_path(tree, is_leaf=_is_node)
    return {jtu.keystr(path): x for path, x in flat if _is_node(x)}


def _find_amax(tree: PyTree) -> dict[str, Float[Array, "*stack 3"]]:
    """Returns the amax of each low-precision weight, by path, unless a mask has removed it."""
    return {path: x.amax for path, x in _find_nodes(tree).items() if isinstance(x.amax, (jax.Array, np.ndarray))}


def _strip_amax(tree: PyTree) -> PyTree:
    """Returns the parameters for the wrapped optimizer: without amax."""
    keep = lambda x: x if is_quantized(x) or eqx.is_inexact_array(x) else None
    return jtu.tree_map(keep, map_amax(lambda _: None, tree), is_leaf=is_quantized)


def _fill_amax(steps: PyTree, like: PyTree, values: dict[str, Array]) -> PyTree:
    """Returns the steps with amax filled in, from `values` or else from `like`."""
    others = _find_nodes(like)

    def fill(path: str, x: PyTree) -> PyTree:
        return dataclasses.replace(x, amax=values.get(path, others[path].amax)) if path in others else x

    return jtu.tree_map_with_path(lambda path, x: fill(jtu.keystr(path), x), steps, is_leaf=_is_node)


def _push_amax(
    history: Float32[Array, "*stack 3 history"], observed: Float[Array, "*stack 3"]
) -> Float32[Array, "..."]:
    """Returns the history with a new amax first, without the oldest.

    An amax that is not finite, or negative, counts as zero.
    """
    observed = jnp.where(jnp.isfinite(observed), jnp.maximum(observed, 0), 0).astype(jnp.float32)
    return jnp.concatenate([observed[..., None], history[..., :-1]], axis=-1)
