"""Computes `x(m, k) . w(n, k)^T` on CPU in C++, for every packed weight; with `transpose`, `x(m, n) . w(n, k)`.

The kernels are in `native/`; its README explains them. They read the packed weight as it is: they pack nothing again
and never write a dense weight to memory. Sums are float32. One call handles all leading batch axes, and takes `x` and
the result in either memory order. Of a stack of weights it takes those that indices select, where they lie.

"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ..._numerics.packing import widths
from .. import native
from .packed import Layout, Stored
from .target import Target


_SCALES = ("float32", "float16", "bfloat16", "e8m0", "e4m3", "e5m2", "ue4m4")
DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def supports(
    layout: Layout,
    m: int,
    n: int,
    dtype: Any,
    *,
    transpose: bool,
    precision: str,
    target: Target = Target("cpu"),
) -> str | None:
    """Returns why the kernel cannot take the product, or `None` if it can."""
    del transpose, precision, target
    if jnp.dtype(dtype) not in DTYPES:
        return f"it multiplies float32, bfloat16 and float16, not {jnp.dtype(dtype)}"
    if m == 0 or n == 0 or layout.length == 0:
        return "there is nothing to multiply"
    return native.refusal()


def matmul(
    x: Float[Array, "*batch rows columns"],
    weight: Stored,
    layout: Layout,
    *,
    transpose: bool,
    precision: str,
    target: Target = Target("cpu"),
    by_columns: tuple[bool, bool] = (False, False),
) -> Float[Array, "*batch results of_results"]:
    """Computes the product, for operands that `supports` accepts.

    Products are as exact as XLA's own in float32. With results of 16 bits, or with precision "fastest", the kernel may
    round `x` to 16 bits.
    `by_columns`: whether memory holds `x`, and the result, by columns. The kernel then reads or writes the transpose,
    so that the transposes of its caller cancel.
    """
    del target
    outer, dtype = layout.length if transpose else weight.codes.shape[-2], x.dtype
    coarse = dtype.itemsize < 4 or precision == "fastest"
    if layout.offsets:
        x = x.astype(jnp.float32)  # the sum of two products is rounded once
    options = {"transpose": transpose, "coarse": coarse}
    y = call_product(native.MATMUL, x, weight, layout, outer, x.dtype, by_columns, **options)
    return y.astype(dtype)


def decodes(layout: Layout, dtype: Any) -> str | None:
    """Returns why `decode` cannot return values of this dtype, or `None` if it can."""
    if jnp.dtype(dtype) not in DTYPES:
        return f"it decodes to float32, bfloat16 and float16, not {jnp.dtype(dtype)}"
    if layout.offsets:
        return "it adds no offsets of blocks"
    return "there is nothing to decode" if layout.length == 0 else native.refusal()


def decode(weight: Stored, layout: Layout, dtype: Any, *, clip: bool) -> Float[Array, "*batch k"]:
    """Decodes to a dense weight, for arguments that `decodes` accepts. The bits are those of XLA's operations.

    The weight may have a single row without an axis for it. With `clip`, clips to the finite range of `dtype`.
    """
    shape = (*weight.codes.shape[:-1], layout.length)
    rows = [a.reshape(-1, a.shape[-1]) if a.ndim < 2 else a for a in _arrays(weight)]
    call = jax.ffi.ffi_call(
        native.DECODE,
        jax.ShapeDtypeStruct((*rows[0].shape[:-1], layout.length), dtype),
        vmap_method="broadcast_all",
    )
    return call(*rows, **_attributes(weight, layout), clip=clip).reshape(shape)


def call_product(
    name: str,
    x: Shaped[Array, "*batch rows columns"],
    weight: Stored,
    layout: Layout,
    outer: int,
    dtype: Any,
    by_columns: tuple[bool, bool],
    *more: Array,
    **attributes: Any,
) -> Float[Array, "*batch results of_results"]:
    """Calls a product of the C++ interface, with `more` arguments and attributes than all of them have."""
    turn = lambda a, by_columns: jnp.swapaxes(a, -1, -2) if by_columns else a
    m, (x_by_columns, y_by_columns) = x.shape[-2], by_columns
    shape = (outer, m) if y_by_columns else (m, outer)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((*x.shape[:-2], *shape), dtype), vmap_method="broadcast_all")
    y = call(
        turn(x, x_by_columns),
        *_arrays(weight),
        *more,
        **_attributes(weight, layout),
        x_transposed=x_by_columns,
        y_transposed=y_by_columns,
        **attributes,
    )
    return turn(y, y_by_columns)


def _arrays(weight: Stored) -> list[Array]:
    """Returns the arguments of the C++ interface that hold a weight."""
    return [a for a in weight if a is not None]


def _attributes(weight: Stored, layout: Layout) -> dict[str, Any]:
    """Returns the attributes of the C++ interface that describe a weight: `WeightAttr` in `native/src/ffi/ffi.cpp`."""
    nested = layout.nested
    codes = (layout.bits, layout.length, layout.block_size)
    scales = (0, 0) if nested is None else (nested.bits, nested.block_size)
    given = [a is not None for a in weight[2:]]
    numbers = (*codes, _SCALES.index((nested or layout).scale), _values(layout), *scales, *given)
    return {
        "table": np.asarray(layout.table, np.float32),
        "scale_table": np.asarray(() if nested is None else nested.table, np.float32),
        "weight": np.asarray(numbers, np.int64),
    }


def in_bytes(layout: Layout) -> bool:
    """Returns whether kernels multiply codes of eight bits: those, and the ones that lie in several bytes."""
    return layout.bits == 8 or len(widths(layout.bits)) > 1


def _values(layout: Layout) -> int:
    """Returns the fastest way to decode codes of eight bits, as a number of the C++ interface."""
    return ("table", "integer", "float8_e4m3fn", "float8_e5m2").index(layout.kind) if in_bytes(layout) else 0
