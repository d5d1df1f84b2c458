"""`matmul`, the public function of the quantized matmul."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from .._array.array import is_quantized
from .._array.value import AbstractArrayValue, multiply


def matmul(
    x: Float[ArrayLike | AbstractArrayValue, "..."],
    w: Float[ArrayLike | AbstractArrayValue, "..."],
    *,
    implementation: str | None = None,
    precision: Any = None,
) -> Array:
    """Computes `x @ w`, where either operand may be quantized.

    `q @ x` and `x @ q` call this function with the defaults.

    !!! Example

        ```python
        y = eqq.matmul(x, q.T, implementation="xla")
        ```

    **Arguments:**

    - `x`, `w`: arrays or quantized arrays, of the shapes that `jnp.matmul` takes. If both are quantized along the axis
        that the sum runs along, multiplies codes with codes; otherwise dequantizes `x`. Also dequantizes an operand if
        the sum runs along only part of its quantized axis.
    - `implementation`: the name of an implementation, or `None` to choose the best for the platform, the shapes and
        the format. [`eqquant.explain_matmul`][] lists them.
    - `precision`: as in `jnp.matmul`; `None` takes `jax.default_matmul_precision`. Sums are float32 (float64 for
        float64 operands).

    **Returns:**

    An array of dtype `jnp.result_type(x, w)`.

    **Raises:**

    `ValueError` if the contracted lengths differ, or if the implementation is unknown, is for another platform, or
    cannot take the product.
    """
    options = {"implementation": implementation, "precision": precision}
    if isinstance(w, AbstractArrayValue):
        x = x.dequantize() if isinstance(x, AbstractArrayValue) and not is_quantized(x) else x
        return w._matmul(x, left=False, **options)
    if isinstance(x, AbstractArrayValue):
        return x._matmul(w, left=True, **options)
    return multiply(jnp.asarray(w), x, left=False, **options)
