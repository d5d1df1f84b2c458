"""An array with a scale per input, for AWQ and SmoothQuant where scales do not fold."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import PyTree
from .mapped import AbstractMappedArray, align


class ScaledArray(AbstractMappedArray):
    """An array with a scale for each of its inputs: `w @ x` is `w.array @ (w.scale * x)`.

    [`eqquant.transforms.smooth`][] makes it where no other layer can take the scales. A product costs one more
    multiplication for each of its inputs.

    !!! Example

        ```python
        w = ScaledArray(eqq.quantize(dense / scale, "int4"), scale)    # about `dense`
        ```

    `scale` is an array of floats, and trains as the weight of a norm does.

    **Arguments:**

    - `array`: the array, quantized or not.
    - `scale`: a float for each input, `(*stack, inputs)`.
    - `axis`: the axis of the inputs, -1 or -2.
    """

    is_diagonal: ClassVar[bool] = True

    array: PyTree
    scale: Float[Array, "*stack inputs"]
    axis: int = eqx.field(static=True, default=-1)

    def map_inputs(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        scale = align(self, "scale", x, axis, jnp.floating)
        with jax.numpy_dtype_promotion("standard"):
            wide = jnp.promote_types(x.dtype, scale.dtype)  # all values would share the rounding error of a scale
        return (x.astype(wide) * scale.astype(wide)).astype(x.dtype)

    map_back = map_inputs
