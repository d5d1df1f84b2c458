"""The end of training with simulated quantization."""

import dataclasses
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array.array import is_quantized, QuantizedArray
from .._array.quantize import check_finite
from .._array.simulated import SimulatedArray
from .._tree.leaves import named_leaves


def finalize(tree: PyTree) -> PyTree:
    """Ends simulated quantization: every [`eqquant.SimulatedArray`][] becomes the [`eqquant.QuantizedArray`][] that it
    stood for.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "int4", simulate=True)
        ...  # train as if it were a float model
        model = eqq.finalize(model)
        ```

    **Arguments:**

    - `tree`: any pytree with simulated arrays.

    **Returns:**

    The tree, with the same values and without the masters.

    **Raises:**

    `ValueError` if nothing is simulated, or, outside of `jit`, if training left values that are not finite.
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
    done: dict[Any, QuantizedArray] = {}  # one array in two places stays one

    def final(x: Any) -> Any:
        if not isinstance(x, SimulatedArray):
            return x
        same = (id(x.master), x.format, x.axis, x.logical_dtype, x.method)
        if same not in done:
            done[same] = dataclasses.replace(x.quantized(), gradient_of=None)
        return done[same]

    return jtu.tree_unflatten(jtu.tree_structure(tree, is_leaf=is_leaf), [final(leaf.value) for leaf in leaves])
