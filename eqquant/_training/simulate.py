"""Turns simulated arrays into quantized arrays after training."""

import dataclasses
from typing import Any

import jax.tree_util as jtu

from .._array.array import is_quantized, QuantizedArray
from .._array.checks import check_finite
from .._tree.leaves import named_leaves
from .._types import PyTree
from .._wrappers.activation import ActivationQuantizedArray
from .._wrappers.simulated import SimulatedArray


def finalize(tree: PyTree) -> PyTree:
    """Ends simulated quantization: turns every [`eqquant.SimulatedArray`][] into the [`eqquant.QuantizedArray`][] that
    it simulates. Learned scales become those of the result.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "int4", simulate=True)
        ...  # train it like a float model
        model = eqq.finalize(model)
        ```

    **Arguments:**

    - `tree`: a pytree with simulated arrays.

    **Returns:**

    The tree, with the same values and without the masters.

    **Raises:**

    `ValueError` if the tree has no simulated array, or, outside `jit`, if a master holds values that are not finite.
    """
    is_leaf = lambda x: is_quantized(x) or isinstance(x, SimulatedArray)
    leaves = list(named_leaves(tree, is_leaf))
    if not any(isinstance(leaf.value, SimulatedArray) for leaf in leaves):
        raise ValueError(
            "`finalize` needs a tree with simulated arrays. Got none. `quantize_tree(..., simulate=True)` makes them."
        )
    for leaf in leaves:
        if isinstance(leaf.value, SimulatedArray):
            check_finite(leaf.value.master, leaf.path)
    done: dict[Any, QuantizedArray] = {}  # an array that appears twice is quantized once

    def final(x: Any) -> Any:
        if not isinstance(x, SimulatedArray):
            return x
        same = (id(x.master), x.format, x.axis, x.logical_dtype, x.method, id(x.log_factor))
        if same not in done:
            done[same] = dataclasses.replace(x.quantized(), gradient_of=None)
        return done[same]

    tree = jtu.tree_unflatten(jtu.tree_structure(tree, is_leaf=is_leaf), [final(leaf.value) for leaf in leaves])
    quantizes = lambda x: isinstance(x, ActivationQuantizedArray)
    whole = lambda x: quantizes(x) or is_quantized(x)  # an array that appears twice stays one
    return jtu.tree_map(lambda x: x.with_fixed_scale() if quantizes(x) else x, tree, is_leaf=whole)
