"""`cpu_int8`: `x(m, k) . w(n, k)^T` in C++, where both operands are integers.

Sums of products are exact integers, scaled per block in float32. `x` is int8 codes with a scale per token (row), or
floats that the kernel quantizes itself: with given scales, or by default dynamically, by the amax of a row over 127. A
row with a value that is not finite gives NaN. Rows may have zero points too, which integer sums correct. Offsets of
blocks are multiplied by sums over the blocks of `x`. The kernels are in `native/`, as for `cpu.py`.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Float32, Int8, UInt8

from ..._native import calls, library
from ..._native.weight import Layout, StoredWeight
from .packed import as_integers
from .target import TargetDevice


def refusal(
    layout: Layout, m: int, n: int, dtype: DTypeLike, *, target: TargetDevice = TargetDevice("cpu")
) -> str | None:
    """Returns why the kernel cannot take the product, or `None` if it can."""
    del target
    if jnp.dtype(dtype) not in calls.DTYPES:
        return f"its results are float32, bfloat16 or float16, not {jnp.dtype(dtype)}"
    if (calls.has_byte_codes(layout) or layout.offsets) and layout.kind != "integer":
        return f"it multiplies integers, and these codes of {layout.bits} bits are not consecutive ones"
    table = np.asarray(as_integers(layout)[0].table)
    if not (table == np.trunc(table)).all() or np.abs(table).max() > 255 or np.ptp(table) > 255:
        return "it multiplies integers of at most eight bits, and the values of this format are not such"
    return "there is nothing to multiply" if m == 0 or n == 0 or layout.length == 0 else library.refusal()


def matmul(
    x: Int8[Array, "*batch rows columns"] | UInt8[Array, "*batch rows columns"] | Float[Array, "*batch rows columns"],
    weight: StoredWeight,
    layout: Layout,
    *,
    x_scale: Float32[Array, "*batch m 1"] | None = None,
    x_zero: UInt8[Array, "*batch m 1"] | None = None,
    affine: bool = False,
    dtype: DTypeLike | None = None,
    column_major: tuple[bool, bool] = (False, False),
) -> Float[Array, "*batch y_rows y_columns"]:
    """Computes the product, where `refusal` returns `None`.

    - `x`: `int8` values; stored codes, `uint8` with a zero point of 128 or of `x_zero`; or floats to quantize.
    - `x_scale`, `x_zero`: the scales and zero points of codes, or static ones for floats. Without them floats are
        quantized dynamically, with zero points if `affine`.
    - `dtype`: the dtype of the result; by default the dtype of the floats `x`.
    - `column_major`: as in `cpu.matmul`.
    """
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    more = [a for a in (x_scale, x_zero) if a is not None]
    attributes = {"affine": affine or x_zero is not None, "scaled": x_scale is not None}
    outer = weight.codes.shape[-2]
    layout, factor = as_integers(layout)
    if factor > 1:
        scale = jnp.full((*weight.codes.shape[:-1], 1), 1.0) if weight.row_scale is None else weight.row_scale
        weight = weight._replace(row_scale=scale / factor)
    wide = dtype
    if layout.offsets:  # so that the sum of two products is rounded only once
        wide = jnp.dtype(jnp.float32)
        x = x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x
    y = calls.multiply(library.MATMUL_INT8, x, weight, layout, outer, wide, column_major, *more, **attributes)
    return y.astype(dtype)
