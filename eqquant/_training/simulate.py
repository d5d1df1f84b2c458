"""Converts fake-quantized arrays to quantized arrays after training."""

import dataclasses

import jax.tree_util as jtu

from .._array.array import is_quantized, QuantizedArray
from .._array.checks import check_finite
from .._tree.leaves import Leaf
from .._tree.select import replace_selected, select_nodes
from .._types import Model
from .._wrappers.activation import ActivationQuantizedArray
from .._wrappers.simulated import FakeQuantizedArray


def finalize(tree: Model) -> Model:
    """Returns a tree with every fake-quantized array quantized: the end of QAT.

    Each [`eqquant.arrays.FakeQuantizedArray`][] becomes the [`eqquant.QuantizedArray`][] that it simulates, with its
    learned scales.

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
    is_simulated = lambda x: isinstance(x, FakeQuantizedArray)
    selections = select_nodes(tree, is_simulated)
    if all(reason is not None for _, reason in selections):
        raise ValueError(
            "`finalize` needs a tree with simulated arrays. Got none. `quantize_tree(..., simulate=True)` makes them."
        )
    for leaf, reason in selections:
        if reason is None:
            check_finite(leaf.value.master, leaf.path)

    def finish(leaf: Leaf) -> QuantizedArray:
        return dataclasses.replace(leaf.value.quantized(), gradient_of=None)

    tree = replace_selected(tree, selections, finish, is_simulated)
    quantizes = lambda x: isinstance(x, ActivationQuantizedArray)
    whole = lambda x: quantizes(x) or is_quantized(x)  # so that a shared array stays shared
    return jtu.tree_map(lambda x: x.with_fixed_scale() if quantizes(x) else x, tree, is_leaf=whole)
