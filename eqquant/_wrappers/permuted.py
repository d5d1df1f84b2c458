"""An array whose columns are stored in another order, so that those that share a scale are neighbours."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from .._array.array import QuantizedArray
from .._types import PyTree
from .mapped import AbstractMappedArray, beside


class PermutedArray(AbstractMappedArray):
    """A quantized array whose quantized axis is stored in another order.

    GPTQ with `desc_act` quantizes inputs in the order of their importance, so that the inputs of a group, which share a
    scale, are not neighbours. Here they are stored as neighbours, and products gather their operand first.
    [`eqquant.io.open`][] makes it.

    !!! Example

        ```python
        w = eqq.io.open("gptq-act-order")["model.layers.0.mlp.up_proj.weight"]      # a PermutedArray
        y = w @ x                                                                   # w.array @ x[w.order]
        ```

    **Arguments:**

    - `array`: the array in stored order, a [`eqquant.QuantizedArray`][], or one with low-rank factors.
    - `order`: the logical index of each stored one.
    - `axis`: the axis that is permuted, -1 or -2.
    """

    array: PyTree
    order: UInt32[Array, "*batch length"]
    axis: int = eqx.field(static=True, default=-1)

    def map_inputs(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        return _gathered(x, self.order, axis)

    def map_back(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        return _gathered(x, jnp.argsort(self.order, axis=-1), axis)


def _gathered(x: Array, order: Array, axis: int) -> Array:
    if order.ndim == 1:
        return jnp.take(x, order, axis)
    # A stack: one order for each array of it.
    return jnp.take_along_axis(x, beside(order, x.ndim, axis), axis)


def permuted(q: QuantizedArray, order: np.ndarray | None) -> "QuantizedArray | PermutedArray":
    """Returns an array whose last axis is stored in this order; `None` is the order of memory."""
    return q if order is None else PermutedArray(q, order=jnp.asarray(order, jnp.uint32))
