"""`cpu`: `x(m, k) . w(n, k)^T` in C++, or with `transpose` `x(m, n) . w(n, k)`.

The kernels are in `native/`; its README explains them. They read every packed weight as it is stored, and never write
a dense weight to memory. Sums are float32. One call handles all leading batch axes, `x` and the result in either memory
order, and weights that indices select from a stack.
"""

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from ..._native import calls, library
from ..._native.weight import Layout, StoredWeight
from .target import TargetDevice


def refusal(
    layout: Layout,
    m: int,
    n: int,
    dtype: DTypeLike,
    *,
    transpose: bool,
    precision: str,
    target: TargetDevice = TargetDevice("cpu"),
) -> str | None:
    """Returns why the kernel cannot take the product, or `None` if it can."""
    del transpose, precision, target
    if jnp.dtype(dtype) not in calls.DTYPES:
        return f"it multiplies float32, bfloat16 and float16, not {jnp.dtype(dtype)}"
    if m == 0 or n == 0 or layout.length == 0:
        return "there is nothing to multiply"
    return library.refusal()


def matmul(
    x: Float[Array, "*batch rows columns"],
    weight: StoredWeight,
    layout: Layout,
    *,
    transpose: bool,
    precision: str,
    target: TargetDevice = TargetDevice("cpu"),
    column_major: tuple[bool, bool] = (False, False),
) -> Float[Array, "*batch y_rows y_columns"]:
    """Computes the product, where `refusal` returns `None`.

    Products are as exact as XLA's own in float32. With results of 16 bits, or with precision "fastest", the kernel may
    round `x` to 16 bits.

    `column_major`: whether memory holds `x`, and the result, by columns. The kernel then reads or writes the transpose,
    so that the transposes of its caller cancel.
    """
    del target
    outer, dtype = layout.length if transpose else weight.codes.shape[-2], x.dtype
    coarse = dtype.itemsize < 4 or precision == "fastest"
    if layout.offsets:
        x = x.astype(jnp.float32)  # so that the sum of two products is rounded only once
    options = {"transpose": transpose, "coarse": coarse}
    y = calls.multiply(library.MATMUL, x, weight, layout, outer, x.dtype, column_major, **options)
    return y.astype(dtype)
