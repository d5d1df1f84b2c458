"""`requantize`: quantizes new values like an existing quantized array."""

import dataclasses

from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from .._methods import AbsMax, AbstractMethod
from .array import QuantizedArray
from .quantize import as_method, check_finite, check_quantizable, described, how_to_get_one, quantize_array


def requantize(
    q: QuantizedArray,
    x: Float[ArrayLike, "..."],
    *,
    key: PRNGKeyArray | None = None,
    method: AbstractMethod | None = None,
) -> QuantizedArray:
    """Quantizes new values like `q`: with its format, quantized axis, dtype and sharding.

    !!! Example

        ```python
        cache = eqq.requantize(cache, cache.at[3].set(row))  # `.at[].set` returns a dense array
        ```

    **Arguments:**

    - `q`: the quantized array to imitate.
    - `x`: floats, of the shape of `q`.
    - `key`, `method`: as for [`eqquant.quantize`][].

    **Returns:**

    A [`eqquant.QuantizedArray`][] with the tree structure of `q`, so it can be the next carry of a `scan`.

    **Raises:**

    `TypeError` if `q` is not quantized. `ValueError` if the shapes differ, or, outside `jit`, if values are not finite.
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"`q` must be a quantized array. Got {described(q)}. {how_to_get_one(q)}")
    values, _ = check_quantizable(x, q._axes)
    if values.shape != q.shape:
        raise ValueError(f"`x` must have the shape of `q`, {q.shape}. Got {values.shape}.")
    check_finite(values)
    return requantize_like(q, values, key, as_method(method))


def requantize_like(
    q: QuantizedArray, x: Float[Array, "..."], key: PRNGKeyArray | None = None, method: AbstractMethod = AbsMax()
) -> QuantizedArray:
    """As `requantize`, without checks."""
    new = quantize_array(x, q.format, q._axes, q.logical_dtype, key, method, sharding=q.sharding)
    return dataclasses.replace(new, logical_sharding=q.logical_sharding)
