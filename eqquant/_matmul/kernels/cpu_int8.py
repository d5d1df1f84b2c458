"""Computes `x(m, k) . w(n, k)^T` on CPU where both are integers: int8 codes of `x`, and a weight of integers.

Sums of products are exact integers, and scaled in float32, by the block. `x` is codes with a scale for each row, or
floats that the kernel quantizes itself: with a scale for each row, or by default its absolute maximum divided by 127. A
row with a value that is not finite gives NaN. Rows may have zero points too; products with them are corrected as
integers. The kernels are those of `native/`, as in `cpu.py`.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Float32, Int8, UInt8

from ..._native import calls, library
from ..._native.layout import Layout, Stored
from .target import TargetDevice


def supports(
    layout: Layout, m: int, n: int, dtype: DTypeLike, *, target: TargetDevice = TargetDevice("cpu")
) -> str | None:
    """Returns why the kernel cannot take the product with a result of `dtype`, or `None` if it can."""
    del target
    if jnp.dtype(dtype) not in calls.DTYPES:
        return f"its results are float32, bfloat16 or float16, not {jnp.dtype(dtype)}"
    table = np.asarray(layout.table)
    if calls.has_byte_codes(layout) and layout.kind != "integer":
        return f"it multiplies integers, and these codes of {layout.bits} bits are not consecutive ones"
    if not (table == np.trunc(table)).all() or np.abs(table).max() > 255 or np.ptp(table) > 255:
        return "it multiplies integers of at most eight bits, and the values of this format are not such"
    if m == 0 or n == 0 or layout.length == 0:
        return "there is nothing to multiply"
    return "it adds no offsets of blocks" if layout.offsets else library.refusal()


def matmul(
    x: Int8[Array, "*batch rows columns"] | UInt8[Array, "*batch rows columns"] | Float[Array, "*batch rows columns"],
    weight: Stored,
    layout: Layout,
    *,
    x_scale: Float32[Array, "*batch m 1"] | None = None,
    x_zero: UInt8[Array, "*batch m 1"] | None = None,
    affine: bool = False,
    dtype: DTypeLike | None = None,
    by_columns: tuple[bool, bool] = (False, False),
) -> Float[Array, "*batch y_rows y_columns"]:
    """Computes the product, for operands that `supports` accepts.

    Codes of `x` are `int8`, or `uint8` that are 128 more than what they mean, as an array stores them; `x_scale` has
    their scales, and `dtype` is that of the result. With `x_zero`, the codes are `uint8` that mean what they are less
    that. Or `x` is floats, and the result has their dtype: they are quantized with `x_scale` and `x_zero`, or without
    those with scales of their own, and zero points if `affine`. `by_columns` is that of `cpu.matmul`.
    """
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    more = [a for a in (x_scale, x_zero) if a is not None]
    attributes = {"affine": affine or x_zero is not None, "scaled": x_scale is not None}
    outer = weight.codes.shape[-2]
    return calls.multiply(library.MATMUL_INT8, x, weight, layout, outer, dtype, by_columns, *more, **attributes)
