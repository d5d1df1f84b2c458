"""Quax rules of products: `eqq.quaxify(f)` brings `jax.lax.dot_general` to the quantized matmul.

Rules of structure, and of products that select from a stack, are in `_wrappers`, since they hold for its arrays too.
"""

from typing import Any

import quax
from jax import lax
from jaxtyping import Array, ArrayLike

from .._array.contraction import dot_general
from .._array.value import AbstractArrayValue


@quax.register(lax.dot_general_p)
def _dot_general(first: AbstractArrayValue | ArrayLike, second: AbstractArrayValue | ArrayLike, **params: Any) -> Array:
    y, precision = None, params.get("precision")
    # Quax may pass operands of which neither is ours.
    ours = isinstance(first, AbstractArrayValue) or isinstance(second, AbstractArrayValue)
    if ours and params.get("out_sharding") is None and not isinstance(precision, str):
        dtype = params.get("preferred_element_type")
        y = dot_general(first, second, params["dimension_numbers"], precision=precision, dtype=dtype)
    if y is not None:
        return y
    dense = (x.dequantize() if isinstance(x, AbstractArrayValue) else x for x in (first, second))
    return lax.dot_general_p.bind(*dense, **params)
