"""Delayed scaling: an optax wrapper that keeps the largest magnitudes of earlier steps, which scale products."""

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
from .masters import as_optimizer, check_given


if TYPE_CHECKING:
    import optax  # imported on first use: it takes as long to import as this package


class DelayedScalingState(NamedTuple):
    """The state of [`eqquant.delayed_scaling`][].

    - `history`: for each weight, by its path, the largest magnitudes of $x$, $W$ and $\\mathrm d y$ in the last steps,
        `(*stack, 3, history)`, those of the last step first; zero for a step that saw none.
    - `inner_state`: the state of the wrapped optimizer, which sees no magnitudes.

    **Arguments:** the two above. `init` makes the state; do not make it by hand.
    """

    history: dict[str, Float32[Array, "*stack 3 history"]]
    inner_state: PyTree


def delayed_scaling(
    optimizer: "optax.GradientTransformation", *, history: int = 16, margin: float = 0.0
) -> "optax.GradientTransformationExtraArgs":
    r"""Keeps the scales of a model that was made by `eqq.low_precision_training(..., delayed=True)`: *delayed scaling*.

    Each weight of such a model holds three floats, the largest magnitudes that its
    products expect of $x$, $W$ and $\mathrm d y$. Their gradients are no gradients, but the magnitudes that the
    products of this step saw. The wrapper puts these into a history, and returns updates by which the model then holds
    the largest of the history. All else is left to the wrapped optimizer, which sees no magnitudes: neither its moments
    nor its weight decay nor the clipping of gradients.

    A value beyond the largest that is expected is clipped. Before the first step nothing is expected, and each product
    takes the current ones. A NaN or an infinity turns its product into NaN; a step that saw one enters the
    history as zero, so later steps do not suffer from it.

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
    `optax.MultiSteps` and [`eqquant.float_masters`][] included: gradients must come to the wrapper as they are. Without
    the wrapper an optimizer takes magnitudes for gradients, which spoils their norm; it moves what products expect
    below zero, so they take the current ones, as before the first step.

    ??? cite

        [FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433)

    **Arguments:**

    - `optimizer`: an optax optimizer.
    - `history`: how many steps the history has.
    - `margin`: the model holds the largest magnitude of the history times $2^{\text{margin}}$. Some room keeps values
        that grow from being clipped. A weight that a step uses $n$ times, tied or in a recurrence, sees the sum of
        the largest magnitudes of its uses, which is up to $n$ times the largest: a margin of $-\log_2 n$ makes up
        for that.

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
        found = _held_amax(params)
        if not found:
            raise ValueError(
                "`delayed_scaling` needs weights with delayed scales. Got none among the leaves of the parameters "
                f"({abbreviate_list(leaf.path for leaf in named_leaves(params))}). Make the model with "
                "`eqq.low_precision_training(model, 'fp8', delayed=True)`, or use the optimizer without the wrapper."
            )
        # What the model holds already was the largest of a history.
        empty = lambda x: jnp.zeros((*x.shape, history), jnp.float32)
        start = {path: _shift(empty(x), x * 2.0**-margin) for path, x in found.items()}
        return DelayedScalingState(start, inner.init(_bare(params)))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: PyTree
    ) -> tuple[PyTree, DelayedScalingState]:
        check_given(params, "delayed_scaling")
        old, seen = _held_amax(params), _held_amax(updates)
        if not isinstance(state, DelayedScalingState) or state.history.keys() != old.keys():
            raise ValueError(
                "`delayed_scaling` needs the state that its `init` returns for these parameters. Got another. Make it "
                "with `state = optim.init(model)`."
            )
        kept = {path: _shift(x, seen[path]) if path in seen else x for path, x in state.history.items()}
        new = {path: jnp.max(x, axis=-1) * 2.0**margin for path, x in kept.items()}
        steps, inner_state = inner.update(_bare(updates), state.inner_state, _bare(params), **extra_args)
        steps = _with_amax(steps, updates, {path: (new[path] - old[path]).astype(old[path].dtype) for path in seen})
        return steps, DelayedScalingState(kept, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _is_node(x: PyTree) -> bool:
    return isinstance(x, LowPrecisionArray)


def _nodes(tree: PyTree) -> dict[str, LowPrecisionArray]:
    """Returns the weights with scales of their own, by path."""
    flat = jtu.tree_leaves_with_path(tree, is_leaf=_is_node)
    return {jtu.keystr(path): x for path, x in flat if _is_node(x)}


def _held_amax(tree: PyTree) -> dict[str, Float[Array, "*stack 3"]]:
    """Returns the largest magnitudes that the weights of a tree hold, by path; not those that a mask has taken away."""
    return {path: x.amax for path, x in _nodes(tree).items() if isinstance(x.amax, (jax.Array, np.ndarray))}


def _bare(tree: PyTree) -> PyTree:
    """Returns what the wrapped optimizer sees: parameters without largest magnitudes, and nothing else."""
    keep = lambda x: x if is_quantized(x) or eqx.is_inexact_array(x) else None
    return jtu.tree_map(keep, map_amax(lambda _: None, tree), is_leaf=is_quantized)


def _with_amax(steps: PyTree, like: PyTree, values: dict[str, Array]) -> PyTree:
    """Puts values, or else what stands in `like`, to where the steps of the wrapped optimizer have none."""
    others = _nodes(like)

    def fill(path: str, x: PyTree) -> PyTree:
        return dataclasses.replace(x, amax=values.get(path, others[path].amax)) if path in others else x

    return jtu.tree_map_with_path(lambda path, x: fill(jtu.keystr(path), x), steps, is_leaf=_is_node)


def _shift(history: Float32[Array, "*stack 3 history"], seen: Float[Array, "*stack 3"]) -> Float32[Array, "..."]:
    """Puts what was seen first and forgets what is last. What is not finite, or no magnitude, counts as zero."""
    seen = jnp.where(jnp.isfinite(seen), jnp.maximum(seen, 0), 0).astype(jnp.float32)
    return jnp.concatenate([seen[..., None], history[..., :-1]], axis=-1)
