"""The mask of trainable leaves, and optimizers that change only these."""

from typing import TYPE_CHECKING

import equinox as eqx
import jax.tree_util as jtu

from .. import _compat
from .._array.array import is_quantized
from .._array.value import AbstractArrayValue
from .._types import PyTree
from .._wrappers.base import AbstractWrapper
from .._wrappers.low_precision import map_amax


if TYPE_CHECKING:
    import optax  # imported on first use: it takes as long to import as this package


_AMAX = object()  # marks the amax of delayed scaling, which is never frozen


def trainable_mask(tree: PyTree) -> PyTree[bool]:
    """Returns the mask of the trainable leaves.

    In a model with low-rank factors ([`eqquant.loraify`][]), it selects only the factors. In any other model, it
    selects every floating point array and every quantized array. It always selects the amax of
    [`eqquant.delayed_scaling`][].

    !!! Example

        ```python
        optim = eqq.train_only(optax.adamw(1e-3), eqq.trainable_mask(model))
        trained, frozen = eqx.partition(model, eqq.trainable_mask(model))
        ```

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    The tree with a boolean for each leaf. A [`eqquant.QuantizedArray`][] is one leaf, so the mask is a prefix of the
    tree. Pass it to `equinox.partition`, `equinox.filter`, `optax.masked` or [`eqquant.filter_grad`][].
    """
    # The array inside a wrapper trains as if there were no wrapper.
    is_leaf = lambda x: isinstance(x, AbstractArrayValue) and not isinstance(x, AbstractWrapper)
    nodes, treedef = jtu.tree_flatten(map_amax(lambda _: _AMAX, tree), is_leaf=is_leaf)
    has_factors = any(isinstance(x, AbstractArrayValue) and x.frozen for x in nodes)

    def mask(x: PyTree) -> PyTree[bool]:
        if x is _AMAX:
            return True
        if is_quantized(x):
            return not has_factors
        if not isinstance(x, AbstractArrayValue):
            return eqx.is_inexact_array(x) and not has_factors
        if has_factors and not x.frozen:
            return False
        is_trained = lambda path, leaf: leaf is _AMAX or path[0].name not in x.frozen and eqx.is_inexact_array(leaf)
        return jtu.tree_map_with_path(is_trained, x, is_leaf=is_quantized)

    return jtu.tree_unflatten(treedef, [mask(x) for x in nodes])


def train_only(optimizer: "optax.GradientTransformation", mask: PyTree[bool]) -> "optax.GradientTransformation":
    """Returns an optimizer that changes only the leaves that a mask selects.

    As `optax.masked`, but every other leaf gets no update. `optax.masked` passes on the gradients of other leaves as
    updates: with a gradient of the whole model, as `equinox.filter_value_and_grad` returns it, biases and norms would
    climb the loss.

    !!! Example

        ```python
        optim = eqq.train_only(optax.adamw(1e-3), eqq.trainable_mask(model))
        state = optim.init(model)
        updates, state = optim.update(grads, state, model)
        ```

    **Arguments:**

    - `optimizer`: any optax optimizer. It has state for the selected leaves only.
    - `mask`: a tree of booleans, such as [`eqquant.trainable_mask`][] returns, or a prefix of one.

    **Returns:**

    An optax gradient transformation, whose updates of other leaves are `None`. Wrap it around
    [`eqquant.float_masters`][], not the other way round.
    """
    import optax

    masked = optax.masked(optimizer, mask)

    def init(params: PyTree) -> PyTree:
        check_no_multi_steps("train_only", params)
        return masked.init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        updates, state = masked.update(updates, state, params, **extra_args)
        drop = lambda updates: jtu.tree_map(lambda _: None, updates, is_leaf=is_quantized)
        return jtu.tree_map(lambda selected, step: step if selected else drop(step), mask, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def check_no_multi_steps(wrapper: str, params: PyTree) -> None:
    """Raises where `optax.MultiSteps` is around a wrapper: it would add gradients to codes."""
    import optax

    quantized = any(map(is_quantized, jtu.tree_leaves(params, is_leaf=is_quantized)))
    if quantized and _compat.is_called_inside(optax.MultiSteps):
        raise ValueError(
            f"`optax.MultiSteps` must be inside `{wrapper}`, to add up gradients and not codes. Got it outside. "
            f"Write `eqq.{wrapper}(optax.MultiSteps(optimizer, n), ...)`."
        )
