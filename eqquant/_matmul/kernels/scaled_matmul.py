"""`scaled_matmul`: codes times codes, by the block-scaled instructions of Blackwell GPUs.

    y(m, n) = sum_blocks x_scale(m, block) * w_scale(n, block) * (x(m, block) . w(n, block)^T)

The tensor cores multiply blocks of 32 of MXFP8, and blocks of 16 of NVFP4, and apply both scales.
`jax.nn.scaled_matmul` asks cuDNN for that, and where cuDNN declines, XLA decodes both operands to float32 instead.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Shaped

from ..._native.weight import Layout
from ..._numerics import packing
from .packed import PackedWeight


# By the bits of a code: the codes of a block, the kind of scales, and the dtype of scales in JAX.
_BLOCKS = {8: (32, "e8m0", "float8_e8m0fnu"), 4: (16, "e4m3", "float8_e4m3fn")}
_E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6))


def refusal(x: Layout, w: Layout) -> str | None:
    """Returns why the instructions cannot multiply two operands, or `None` if they can."""
    if not (x.bits == w.bits and all(_is_scaled(layout) for layout in (x, w))):
        return "it multiplies MXFP8 by MXFP8, and NVFP4 by NVFP4"
    if w.length % w.block_size != 0 or w.length == 0:
        return f"rows of {w.length} are not whole blocks of {w.block_size}"
    return None


def _is_scaled(layout: Layout) -> bool:
    floats = layout.kind.startswith("float8") if layout.bits == 8 else layout.table == _E2M1
    return floats and (layout.block_size, layout.scale) == _BLOCKS.get(layout.bits, ())[:2]


def matmul(x: PackedWeight, w: PackedWeight, x_layout: Layout, w_layout: Layout) -> Float32[Array, "*batch m n"]:
    """Computes `x(m, k) . w(n, k)^T`. Needs layouts for which `refusal` returns `None`."""
    batch = w.codes.shape[:-2]
    flat = jax.tree.map(lambda a: a.reshape(math.prod(batch), *a.shape[-2:]), (x, w))
    values = [_values(each, layout) for each, layout in zip(flat, (x_layout, w_layout), strict=True)]
    scale_dtype = jnp.dtype(_BLOCKS[w_layout.bits][2])
    scales = [jax.lax.bitcast_convert_type(each.scale, scale_dtype) for each in flat]
    y = jax.nn.scaled_matmul(*values, *scales).reshape(*batch, x.codes.shape[-2], w.codes.shape[-2])
    y = y if x.row_scale is None else y * x.row_scale
    return y if w.row_scale is None else y * jnp.swapaxes(w.row_scale, -1, -2)


def _values(packed: PackedWeight, layout: Layout) -> Shaped[Array, "batch rows k"]:
    """Returns values without their scales, in the dtype that the instructions read."""
    if layout.bits == 8:
        return jax.lax.bitcast_convert_type(packed.codes, jnp.dtype(layout.kind))
    codes = packing.unpack(packed.codes, layout.bits, layout.length)
    return jax.lax.bitcast_convert_type(codes.astype(jnp.uint4), jnp.dtype("float4_e2m1fn"))
