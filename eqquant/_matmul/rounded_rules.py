"""The rules of the product of rounded floats, by which layers train in low precision.

The primitive computes `x(*batch, m, k) . w(*batch, n, k)^T`. It rounds both operands along `k` and binds the quantized
matmul, so that primitive chooses the implementation. Rounding passes gradients straight through: the tangent is the
primitive with one operand replaced by its tangent, which is not rounded. The transpose of that is the primitive on the
gradient of the result, which is rounded as a gradient.

A `custom_vjp` would lose forward mode. And under a `vmap` over examples it would compute the gradient of the weight as
a sum of outer products, one for each example. Here the batching rule makes examples rows, and that gradient is one
product over them.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from .. import _compat
from .._array.activation import DynamicRows
from .._array.array import QuantizedArray
from .._array.primitive import bind_matmul, rounded_matmul_p, Rounding
from .._array.quantize import quantize_array
from .._numerics.hashing import hashed_key, seed_of
from .._numerics.primitives import compiled, moved


def compute_rounded(
    x: Float[Array, "*batch m k"],
    w: Float[Array, "*batch n k"],
    *,
    of_x: Rounding | None,
    of_w: Rounding | None,
    of_gradient: Rounding,
    precision: Any,
    implementation: str | None,
) -> Float[Array, "*batch m n"]:
    """Rounds both operands, and multiplies them by the quantized matmul."""
    del of_gradient
    if 0 in (*x.shape, *w.shape):
        return jnp.zeros((*x.shape[:-1], w.shape[-2]), x.dtype)
    if of_w is None and of_x is None:
        return jnp.matmul(x, jnp.swapaxes(w, -1, -2), precision=precision)
    product = ft.partial(bind_matmul, transpose=False, precision=precision, implementation=implementation)
    if of_w is None:
        return jnp.swapaxes(product(w, _rounded(x, of_x)), -1, -2)
    return product(x if of_x is None else _rows(x, of_x), _rounded(w, of_w))


def _rows(x: Float[Array, "*batch m k"], rounding: Rounding) -> DynamicRows | QuantizedArray:
    """Returns the left operand: rows that an implementation quantizes where that is cheapest, if it may."""
    nested = rounding.format.scale_format
    of_tensor = "tensor" in (rounding.format.block_size, None if nested is None else nested.block_size)
    return _rounded(x, rounding) if rounding.stochastic or of_tensor else DynamicRows(x, rounding.format)


def _rounded(x: Float[Array, "*batch m k"], rounding: Rounding | None) -> QuantizedArray:
    format, stochastic = rounding  # pyright: ignore[reportGeneralTypeIssues]
    # One matrix at a time: a scale of a whole tensor is that of a product. Its own bits seed its rounding: runs repeat
    # bit for bit, and two gradients share a seed about once in 2**32.
    quantize = lambda x: quantize_array(x, format, (-1,), None, hashed_key(seed_of(x)) if stochastic else None)
    batch = x.shape[:-2]
    q = jax.vmap(quantize)(x.reshape(math.prod(batch), *x.shape[-2:])) if batch else quantize(x)
    q = jax.tree_util.tree_map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), q) if batch else q
    return dataclasses.replace(q, logical_sharding=None)


def _abstract(x: Any, w: Any, **params: Any) -> jax.core.ShapedArray:
    del params
    if x.shape[-1] != w.shape[-1] or x.shape[:-2] != w.shape[:-2] or x.dtype != w.dtype:
        raise ValueError(f"rounded_matmul: {x.str_short()} and {w.str_short()} do not fit.")
    return x.update(shape=(*x.shape[:-1], w.shape[-2]))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, of_x: Any, of_w: Any, **params: Any) -> tuple[Any, Any]:
    (x, w), (dx, dw) = primals, tangents
    y = rounded_matmul_p.bind(x, w, of_x=of_x, of_w=of_w, **params)
    params["implementation"] = None
    dys = []
    if type(dx) is not ad.Zero:
        dys.append(rounded_matmul_p.bind(dx, w, of_x=None, of_w=of_w, **params))
    if type(dw) is not ad.Zero:
        dys.append(rounded_matmul_p.bind(x, dw, of_x=of_x, of_w=None, **params))
    if not dys:
        return y, _compat.zero_tangent(y)
    return y, ft.reduce(ad.add_jaxvals, dys)


def _transpose(dy: Any, x: Any, w: Any, *, of_x: Any, of_w: Any, of_gradient: Any, **params: Any) -> list[Any]:
    if type(dy) is ad.Zero:
        return [None, None]
    turn = lambda a: jnp.swapaxes(a, -1, -2)
    bind = ft.partial(rounded_matmul_p.bind, of_x=of_gradient, of_gradient=of_gradient, **params)
    if ad.is_undefined_primal(x):
        return [bind(dy, turn(w), of_w=of_w), None]
    return [None, bind(turn(dy), turn(x), of_w=of_x)]


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    (x, w), (of_x, of_w) = args, dims
    size = x.shape[of_x] if of_x is not None else w.shape[of_w]
    bind = ft.partial(rounded_matmul_p.bind, **params)
    if of_w is None:
        # All examples share the weight: they become rows, so that the gradient of the weight sums over them.
        x = moved(x, of_x, size, to=-3)
        *batch, _, m, k = x.shape
        y = bind(x.reshape(*batch, size * m, k), w)
        return y.reshape(*batch, size, m, y.shape[-1]), len(batch)
    if of_x is None:
        w = moved(w, of_w, size, to=-3)
        *batch, _, n, k = w.shape
        y = bind(x, w.reshape(*batch, size * n, k))
        return y.reshape(*y.shape[:-1], size, n), y.ndim - 1
    return bind(moved(x, of_x, size), moved(w, of_w, size)), 0


rounded_matmul_p.def_abstract_eval(_abstract)
rounded_matmul_p.def_impl(
    compiled(rounded_matmul_p, compute_rounded, ["of_x", "of_w", "of_gradient", "precision", "implementation"])
)
ad.primitive_jvps[rounded_matmul_p] = _jvp
ad.primitive_transposes[rounded_matmul_p] = _transpose
batching.primitive_batchers[rounded_matmul_p] = _batch
_compat.lower_with_devices(rounded_matmul_p)
mlir.register_lowering(rounded_matmul_p, mlir.lower_fun(compute_rounded, multiple_results=False))
