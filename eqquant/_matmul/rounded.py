"""The primitive `rounded_matmul` and its rules, by which layers train in low precision.

It computes `x(*batch, m, k) . w(*batch, n, k)^T`. It rounds both operands along `k` and binds the quantized
matmul, so that primitive chooses the implementation. Rounding passes gradients straight through: the tangent is the
primitive with one operand replaced by its tangent, which is not rounded. The transpose of that is the primitive on the
gradient of the result, which is rounded as a gradient.

A `custom_vjp` would lose forward mode. And under a `vmap` over examples it would compute the gradient of the weight as
a sum of outer products, one for each example. Here the batching rule makes examples rows, and that gradient is one
product over them.

With delayed scaling, `amax` is a third operand: the amax of `x`, `w` and the gradient. The true gradient of a product
with respect to it is zero, so this gradient is free to carry the current amax. `record_amax` is linear in its tangent,
and zero; its transpose returns the current amax of `x`, `w` and the incoming gradient. All examples share an amax, so
under a `vmap` it gets no axis of examples, along which JAX would sum.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir
from jax.lax import PrecisionLike
from jaxtyping import Array, Float, Float32

from .. import _compat
from .._array.array import QuantizedArray
from .._array.contraction import Options
from .._array.primitive import bind_matmul, with_default
from .._array.quantize import quantize_array
from .._formats.base import AbstractFormat, spans_rows
from .._methods import AbsMax
from .._methods.given import FixedAmax
from .._numerics.blocks import absmax
from .._numerics.hadamard import rotate_blocks
from .._numerics.hashing import hash_values, make_hash_key
from .._numerics.primitives import batch_axis_size, jit_impl, move_batch_axis, Primal, Tangent, zero_tangent_jvp
from .._numerics.scale_bits import scale_to_bits
from .rows import DynamicRows


rounded_matmul_p = jax.extend.core.Primitive("rounded_matmul")
amax_p = jax.extend.core.Primitive("amax")
record_amax_p = jax.extend.core.Primitive("record_amax")

# The indices of an array of three amax values: of `x`, of the weight, and of the gradient of the result.
X_AMAX, W_AMAX, GRADIENT_AMAX = 0, 1, 2


class Rounding(NamedTuple):
    """How a product rounds an operand.

    - `format`: the format to round to.
    - `stochastic`: whether to round stochastically.
    - `amax_index`: with delayed scaling, the index of the amax of this operand.
    - `rotates`: of a gradient, whether its product with the inputs, which sums over rows, rotates both along the rows
        first. That spreads outliers, and does not change the product.
    """

    format: AbstractFormat
    stochastic: bool = False
    amax_index: int | None = None
    rotates: bool = False


def bind_rounded_matmul(
    x: Float[Array, "*batch rows inner"],
    w: Float[Array, "*batch outer inner"],
    amax: Float32[Array, "*lead 3"] | None = None,
    *,
    x_rounding: Rounding | None,
    w_rounding: Rounding | None,
    gradient_rounding: Rounding,
    precision: PrecisionLike = None,
    implementation: str | None = None,
) -> Float[Array, "*batch rows outer"]:
    """Returns `x . w^T` of floats rounded along `k`, as the primitive `rounded_matmul`.

    Shapes are `(*batch, m, k)` and `(*batch, n, k)`, of equal dtype. The products of its gradient bind the primitive
    too, and round the incoming gradient.

    **Arguments:**

    - `x`, `w`: floats.
    - `amax`: with delayed scaling, the amax of `x`, `w` and the gradient of the result, by which they are scaled; not
        positive while it is unknown. `lead` are the last axes of `batch`, or fewer. Its gradient is the current amax
        of each, as this product saw it.
    - `x_rounding`, `w_rounding`: how each is rounded; `None` for a tangent, which is not rounded.
    - `gradient_rounding`: how the gradient of the result is rounded, in the products of the backward pass.
    - `precision`, `implementation`: as in `bind_matmul`; the latter is of the forward pass.
    """
    return rounded_matmul_p.bind(
        x,
        w,
        *([] if amax is None else [amax]),
        x_rounding=x_rounding,
        w_rounding=w_rounding,
        gradient_rounding=gradient_rounding,
        precision=with_default(precision),
        implementation=implementation,
        rotated=False,
    )


def compute_rounded(
    x: Float[Array, "*batch m k"],
    w: Float[Array, "*batch n k"],
    *amax: Float32[Array, "*lead 3"],
    x_rounding: Rounding | None,
    w_rounding: Rounding | None,
    gradient_rounding: Rounding,
    precision: PrecisionLike,
    implementation: str | None,
    rotated: bool,
) -> Float[Array, "*batch m n"]:
    """Rounds both operands, and multiplies them with the quantized matmul.

    If `rotated`, rotates them first.
    """
    del gradient_rounding
    if 0 in (*x.shape, *w.shape):
        return jnp.zeros((*x.shape[:-1], w.shape[-2]), x.dtype)
    if rotated:
        x, w = rotate_blocks(x), rotate_blocks(w)
    if w_rounding is None and x_rounding is None:
        return jnp.matmul(x, jnp.swapaxes(w, -1, -2), precision=precision)
    product = ft.partial(bind_matmul, options=Options(precision, implementation))
    if w_rounding is None:
        return jnp.swapaxes(product(w, _round(x, x_rounding, *amax)), -1, -2)
    return product(x if x_rounding is None else _round_or_defer(x, x_rounding, *amax), _round(w, w_rounding, *amax))


def _round_or_defer(x: Float[Array, "*batch m k"], rounding: Rounding, *amax: Array) -> DynamicRows | QuantizedArray:
    """Returns rounded rows, or rows for the implementation to round, where it may."""
    round_here = spans_rows(rounding.format) or rounding.stochastic or bool(amax)
    return _round(x, rounding, *amax) if round_here else DynamicRows(x, rounding.format)


def _round(x: Float[Array, "*batch m k"], rounding: Rounding | None, *amax: Array) -> QuantizedArray:
    format, stochastic, index, _ = rounding  # pyright: ignore[reportGeneralTypeIssues]

    # One matrix at a time: a per-tensor scale is for one product. A matrix seeds its own stochastic rounding, so runs
    # repeat bit for bit, and two gradients share a seed about once in 2**32.
    def quantize(x: Array, *expected: Array) -> QuantizedArray:
        key = make_hash_key(hash_values(x)) if stochastic else None
        q = quantize_array(x, format, (-1,), None, key, FixedAmax(*expected) if expected else AbsMax())
        return _mark_not_finite(q, x) if expected else q

    operands, batch = (x, *(_choose_amax(x, array[..., index]) for array in amax)), x.shape[:-2]
    flat = [a.reshape(math.prod(batch), *a.shape[len(batch) :]) for a in operands] if batch else operands
    q = jax.vmap(quantize)(*flat) if batch else quantize(*flat)
    q = jax.tree_util.tree_map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), q) if batch else q
    return dataclasses.replace(q, logical_sharding=None)


def _choose_amax(x: Float[Array, "*batch m k"], amax: Float32[Array, "*lead"]) -> Float32[Array, "*batch"]:
    """Returns the amax to scale each matrix by: delayed, or current where unknown."""
    x, amax = _compat.vary_alike((x, amax))
    is_known = amax > 0
    # A branch, so that encoding usually needs no pass over the values first.
    fill = lambda: jnp.where(is_known, amax, _compute_amax(x, amax[..., None]))
    return jnp.broadcast_to(jax.lax.cond(jnp.all(is_known), lambda: amax, fill), x.shape[:-2])


def _mark_not_finite(q: QuantizedArray, x: Float[Array, "m k"]) -> QuantizedArray:
    """Makes the scale NaN if a value is not finite: no code stands for it."""
    bad = jnp.isnan(_compute_amax(x, jnp.zeros(1, jnp.float32)))
    return dataclasses.replace(q, scale_bits=scale_to_bits(jnp.where(bad, jnp.nan, q.scale), q.format.scale_dtype))


def _compute_amax(x: Float[Array, "*batch m k"], amax: Float32[Array, "*lead n"]) -> Float32[Array, "*lead"]:
    """Returns the amax over all axes but `lead`, the last of `batch`; NaN if not finite."""
    lead, ndim = amax.shape[:-1], x.ndim - 2
    rows = absmax(x.astype(jnp.float32))  # of rows first, so that devices need not exchange rows
    rows = jnp.moveaxis(rows, range(ndim - len(lead)), range(len(lead), ndim))
    return absmax(rows.reshape(*lead, 1, math.prod(rows.shape[len(lead) :])))[..., 0]


def compute_shared_amax(x: Float[Array, "*batch m k"], amax: Float32[Array, "*lead 3"]) -> Float32[Array, "*lead"]:
    """Returns the amax over all examples of a `vmap` and all devices of a `shard_map`."""
    others = tuple(sorted(_compat.varying_axes(x) - _compat.varying_axes(amax)))
    current = amax_p.bind(*_compat.vary_alike((x, amax)))
    return jax.lax.pmax(current, others) if others else current


def _batch_amax(args: Sequence[Array], dims: Sequence[int | None]) -> tuple[Array, int | None]:
    (x, amax), (x_axis, amax_axis) = args, dims
    x = move_batch_axis(x, x_axis, batch_axis_size(args, dims))
    if amax_axis is None:
        return amax_p.bind(x, amax), None
    return amax_p.bind(jnp.moveaxis(x, 0, x.ndim - amax.ndim - 1), jnp.moveaxis(amax, amax_axis, 0)), 0


def _record_amax(
    damax: Array, current: Array, amax: Array, empty: Array, *, result: jax.core.ShapedArray
) -> Float[Array, "*batch m n"]:
    """Returns zeros. The transpose returns `current`, and the amax of the cotangent."""
    del damax, current, amax, empty
    return jnp.zeros(result.shape, result.dtype)


def _transpose_record_amax(
    cotangent: Tangent, damax: Primal, current: Array, amax: Array, empty: Array, *, result: jax.core.ShapedArray
) -> list[Array | None]:
    del damax, empty, result
    if isinstance(cotangent, ad.Zero):
        return [None, None, None, None]
    return [jnp.concatenate([current, compute_shared_amax(cotangent, amax)[..., None]], axis=-1), None, None, None]


def _batch_record_amax(
    args: Sequence[Array], dims: Sequence[int | None], *, result: jax.core.ShapedArray
) -> tuple[Array, int]:
    (*values, empty), (*axes, empty_axis) = args, dims
    size = batch_axis_size(args, dims)
    place = 0
    if any(axis is not None for axis in axes):  # a batch of models, each with its own amax
        values = [move_batch_axis(a, axis, size) for a, axis in zip(values, axes, strict=True)]
        place = result.ndim - values[0].ndim  # before the axes of a stack that `amax` has
    result = result.update(shape=(*result.shape[:place], size, *result.shape[place:]))
    return record_amax_p.bind(*values, move_batch_axis(empty, empty_axis, size, place), result=result), place


def _abstract(
    x: jax.core.ShapedArray, w: jax.core.ShapedArray, *amax: jax.core.ShapedArray, **params: object
) -> jax.core.ShapedArray:
    del params, amax
    if x.shape[-1] != w.shape[-1] or x.shape[:-2] != w.shape[:-2] or x.dtype != w.dtype:
        raise ValueError(f"rounded_matmul: {x.str_short()} and {w.str_short()} do not fit.")
    return x.update(shape=(*x.shape[:-1], w.shape[-2]))


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Tangent],
    *,
    x_rounding: Rounding | None,
    w_rounding: Rounding | None,
    **params: object,
) -> tuple[Array, Tangent]:
    (x, w, *amax), (dx, dw, *damax) = primals, tangents
    y = rounded_matmul_p.bind(x, w, *amax, x_rounding=x_rounding, w_rounding=w_rounding, **params)
    params["implementation"] = None
    dys = []
    if not isinstance(dx, ad.Zero):
        dys.append(rounded_matmul_p.bind(dx, w, *amax, x_rounding=None, w_rounding=w_rounding, **params))
    if not isinstance(dw, ad.Zero):
        dys.append(rounded_matmul_p.bind(x, dw, *amax, x_rounding=x_rounding, w_rounding=None, **params))
    rounded = {rounding.amax_index: a for rounding, a in ((x_rounding, x), (w_rounding, w)) if rounding is not None}
    if rounded.keys() == {X_AMAX, W_AMAX} and not isinstance(damax[0], ad.Zero):  # the product of the forward pass
        current = jnp.stack([compute_shared_amax(rounded[n], *amax) for n in (X_AMAX, W_AMAX)], axis=-1)
        # An operand with the batch axes of the result but no values. Without it, `record_amax` may have no axis of
        # examples under a `vmap`, and JAX would sum over examples before its transpose.
        empty = jax.lax.slice_in_dim(y, 0, 0, axis=-1)
        dys.append(record_amax_p.bind(*damax, current, *amax, empty, result=jax.typeof(y)))
    if not dys:
        return y, _compat.zero_tangent(y)
    return y, ft.reduce(ad.add_jaxvals, dys)


def _transpose(
    cotangent: Tangent,
    x: Primal,
    w: Primal,
    *amax: Array,
    x_rounding: Rounding | None,
    w_rounding: Rounding | None,
    gradient_rounding: Rounding,
    rotated: bool,
    **params: object,
) -> list[Array | None]:
    del rotated  # the product whose transpose this is does not depend on it
    none = [None] * len(amax)
    if isinstance(cotangent, ad.Zero):
        return [None, None, *none]
    transpose = lambda a: jnp.swapaxes(a, -1, -2)
    bind = ft.partial(
        rounded_matmul_p.bind, x_rounding=gradient_rounding, gradient_rounding=gradient_rounding, **params
    )
    if ad.is_undefined_primal(x):
        return [bind(cotangent, transpose(w), *amax, w_rounding=w_rounding, rotated=False), None, *none]
    rotated = gradient_rounding.rotates
    return [None, bind(transpose(cotangent), transpose(x), *amax, w_rounding=x_rounding, rotated=rotated), *none]


def _batch(args: Sequence[Array], dims: Sequence[int | None], **params: object) -> tuple[Array, int]:
    (x, w, *amax), (x_axis, w_axis, *amax_axes) = args, dims
    size = batch_axis_size(args, dims)
    if any(d is not None for d in amax_axes):  # a batch of models, each with its own amax
        amax = [move_batch_axis(a, d, size) for a, d in zip(amax, amax_axes, strict=True)]
        place = max(x.ndim - (x_axis is not None), w.ndim - (w_axis is not None)) - amax[0].ndim
        return rounded_matmul_p.bind(
            move_batch_axis(x, x_axis, size, place), move_batch_axis(w, w_axis, size, place), *amax, **params
        ), place
    bind = lambda x, w: rounded_matmul_p.bind(x, w, *amax, **params)
    if w_axis is None:
        # All examples share the weight: they become rows, so that the gradient of the weight sums over them.
        x = move_batch_axis(x, x_axis, size, to=-3)
        *batch, _, m, k = x.shape
        y = bind(x.reshape(*batch, size * m, k), w)
        return y.reshape(*batch, size, m, y.shape[-1]), len(batch)
    if x_axis is None:
        w = move_batch_axis(w, w_axis, size, to=-3)
        *batch, _, n, k = w.shape
        y = bind(x, w.reshape(*batch, size * n, k))
        return y.reshape(*y.shape[:-1], size, n), y.ndim - 1
    return bind(move_batch_axis(x, x_axis, size), move_batch_axis(w, w_axis, size)), 0


amax_p.def_abstract_eval(lambda x, amax: amax.update(shape=amax.shape[:-1]))
amax_p.def_impl(jit_impl(amax_p, _compute_amax, []))
ad.primitive_jvps[amax_p] = zero_tangent_jvp(amax_p)
batching.primitive_batchers[amax_p] = _batch_amax
mlir.register_lowering(amax_p, mlir.lower_fun(_compute_amax, multiple_results=False))

record_amax_p.def_abstract_eval(lambda *args, result: result)
record_amax_p.def_impl(_record_amax)
ad.primitive_jvps[record_amax_p] = zero_tangent_jvp(record_amax_p)
ad.primitive_transposes[record_amax_p] = _transpose_record_amax
batching.primitive_batchers[record_amax_p] = _batch_record_amax
mlir.register_lowering(record_amax_p, mlir.lower_fun(_record_amax, multiple_results=False))

rounded_matmul_p.def_abstract_eval(_abstract)
rounded_matmul_p.def_impl(
    jit_impl(
        rounded_matmul_p,
        compute_rounded,
        ["x_rounding", "w_rounding", "gradient_rounding", "precision", "implementation", "rotated"],
    )
)
ad.primitive_jvps[rounded_matmul_p] = _jvp
ad.primitive_transposes[rounded_matmul_p] = _transpose
batching.primitive_batchers[rounded_matmul_p] = _batch
_compat.lower_with_devices(rounded_matmul_p)
mlir.register_lowering(rounded_matmul_p, mlir.lower_fun(compute_rounded, multiple_results=False))
