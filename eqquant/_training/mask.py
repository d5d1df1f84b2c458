"""The mask of the leaves that training changes."""

import equinox as eqx
import jax.tree_util as jtu

from .._array.array import is_quantized
from .._array.value import AbstractArrayValue
from .._types import PyTree
from .._wrappers.base import AbstractArrayAround
from .._wrappers.low_precision import map_largest


_LARGEST = object()  # stands for the largest magnitudes of delayed scaling, which change whatever else is frozen


def trainable_mask(tree: PyTree) -> PyTree[bool]:
    """Returns the mask of the leaves that training changes.

    In a model with low-rank factors ([`eqquant.loraify`][]), it selects only the factors. In any other model, it
    selects every floating point array and every quantized array. What [`eqquant.delayed_scaling`][] changes it always
    selects.

    !!! Example

        ```python
        optim = optax.masked(optax.adamw(1e-3), eqq.trainable_mask(model))
        trained, frozen = eqx.partition(model, eqq.trainable_mask(model))
        ```

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    The tree with a boolean for each leaf. A [`eqquant.QuantizedArray`][] is one leaf, so the mask is a prefix of the
    tree. Pass it to `equinox.partition`, `equinox.filter`, `optax.masked` or [`eqquant.filter_grad`][].
    """
    # What is stored in an array that maps or rounds its inputs trains as if it stood alone.
    is_leaf = lambda x: isinstance(x, AbstractArrayValue) and not isinstance(x, AbstractArrayAround)
    nodes, treedef = jtu.tree_flatten(map_largest(lambda _: _LARGEST, tree), is_leaf=is_leaf)
    adapted = any(isinstance(x, AbstractArrayValue) and x.frozen for x in nodes)

    def mask(x: PyTree) -> PyTree[bool]:
        if x is _LARGEST:
            return True
        if is_quantized(x):
            return not adapted
        if not isinstance(x, AbstractArrayValue):
            return eqx.is_inexact_array(x) and not adapted
        if adapted and not x.frozen:
            return False
        trains = lambda path, leaf: leaf is _LARGEST or path[0].name not in x.frozen and eqx.is_inexact_array(leaf)
        return jtu.tree_map_with_path(trains, x, is_leaf=is_quantized)

    return jtu.tree_unflatten(treedef, [mask(x) for x in nodes])
