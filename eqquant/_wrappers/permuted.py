"""An array whose columns are stored in another order, so that groups are contiguous."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from .._array.array import QuantizedArray
from .._types import PyTree
from .mapped import AbstractMappedArray, align


class PermutedArray(AbstractMappedArray):
    """A quantized array whose quantized axis is stored in another order.

    GPTQ with `desc_act` quantizes inputs in the order of their importance, so that the inputs of a group, which share a
    scale, are not neighbors. Here they are stored as neighbors, and products gather their operand first.
    [`eqquant.io.open`][] makes it.

    !!! Example

        ```python
        w = eqq.io.open("gptq-act-order")["model.layers.0.mlp.up_proj.weight"]      # a PermutedArray
        y = w @ x                                                                   # w.array @ x[w.order]
        ```

    **Arguments:**

    - `array`: the array in stored order, a [`eqquant.QuantizedArray`][], or one with low-rank factors.
    - `order`: the logical index of each stored input.
    - `axis`: the axis that is permuted, -1 or -2.
    """

    array: PyTree
    order: UInt32[Array, "*batch length"]
    axis: int = eqx.field(static=True, default=-1)

    def map_inputs(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        order = align(self, "order", x, axis, jnp.unsignedinteger)
        return _gather(x, order, axis)

    def map_back(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        order = align(self, "order", x, axis, jnp.unsignedinteger)
        return _gather(x, jnp.argsort(order, axis), axis)


def _gather(x: Array, order: Array, axis: int) -> Array:
    if order.size == order.shape[axis]:
        return jnp.take(x, order.reshape(-1), axis)
    return jnp.take_along_axis(x, order, axis)  # an order for each array of a stack


def wrap_permuted(q: QuantizedArray, order: np.ndarray | None) -> "QuantizedArray | PermutedArray":
    """Wraps an array whose last axis is stored in this order; `None` is logical order."""
    return q if order is None else PermutedArray(q, order=jnp.asarray(order, jnp.uint32))
