"""The rules of the product of rounded floats, by which layers train in low precision.

The primitive computes `x(*batch, m, k) . w(*batch, n, k)^T`. It rounds both operands along `k` and binds the quantized
matmul, so that primitive chooses the implementation. Rounding passes gradients straight through: the tangent is the
primitive with one operand replaced by its tangent, which is not rounded. The transpose of that is the primitive on the
gradient of the result, which is rounded as a gradient.

A `custom_vjp` would lose forward mode. And under a `vmap` over examples it would compute the gradient of the weight as
a sum of outer products, one for each example. Here the batching rule makes examples rows, and that gradient is one
product over them.

With delayed scaling, the largest magnitudes are a third operand. The product has no slope along them, so their gradient
is free to carry what it saw. `record` is linear in their tangent, and zero; its transpose returns magnitudes, that of
the incoming gradient among them. They belong to all examples, so under a `vmap` they have no axis of examples, along
which JAX would sum.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence

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
from .._array.primitive import bind_matmul, rounded_matmul_p, Rounding, W_PLACE, X_PLACE
from .._array.quantize import quantize_array
from .._formats.base import spans_rows
from .._methods import AbsMax
from .._methods.given import FixedAmax
from .._numerics.blocks import absmax
from .._numerics.hashing import hash_values, make_hash_key
from .._numerics.primitives import batch_axis_size, compile_alone, move_batch_axis, Primal, Tangent, zero_tangent_jvp
from .._numerics.scale_bits import scale_to_bits
from .rows import DynamicRows


largest_seen_p = jax.extend.core.Primitive("largest_seen")
record_p = jax.extend.core.Primitive("record")


def compute_rounded(
    x: Float[Array, "*batch m k"],
    w: Float[Array, "*batch n k"],
    *largest: Float32[Array, "*lead 3"],
    x_rounding: Rounding | None,
    w_rounding: Rounding | None,
    gradient_rounding: Rounding,
    precision: PrecisionLike,
    implementation: str | None,
) -> Float[Array, "*batch m n"]:
    """Rounds both operands, and multiplies them by the quantized matmul."""
    del gradient_rounding
    if 0 in (*x.shape, *w.shape):
        return jnp.zeros((*x.shape[:-1], w.shape[-2]), x.dtype)
    if w_rounding is None and x_rounding is None:
        return jnp.matmul(x, jnp.swapaxes(w, -1, -2), precision=precision)
    product = ft.partial(bind_matmul, options=Options(precision, implementation))
    if w_rounding is None:
        return jnp.swapaxes(product(w, _round(x, x_rounding, *largest)), -1, -2)
    return product(x if x_rounding is None else _rows(x, x_rounding, *largest), _round(w, w_rounding, *largest))


def _rows(x: Float[Array, "*batch m k"], rounding: Rounding, *largest: Array) -> DynamicRows | QuantizedArray:
    """Returns the left operand: rows that an implementation quantizes where that is cheapest, if it may."""
    whole = spans_rows(rounding.format) or rounding.stochastic or bool(largest)
    return _round(x, rounding, *largest) if whole else DynamicRows(x, rounding.format)


def _round(x: Float[Array, "*batch m k"], rounding: Rounding | None, *largest: Array) -> QuantizedArray:
    format, stochastic, place = rounding  # pyright: ignore[reportGeneralTypeIssues]

    # One matrix at a time: a scale of a whole tensor is that of a product. Its own bits seed its rounding: runs repeat
    # bit for bit, and two gradients share a seed about once in 2**32.
    def quantize(x: Array, *expected: Array) -> QuantizedArray:
        key = make_hash_key(hash_values(x)) if stochastic else None
        q = quantize_array(x, format, (-1,), None, key, FixedAmax(*expected) if expected else AbsMax())
        return _mark_not_finite(q, x) if expected else q

    operands, batch = (x, *(_find_largest(x, array[..., place]) for array in largest)), x.shape[:-2]
    flat = [a.reshape(math.prod(batch), *a.shape[len(batch) :]) for a in operands] if batch else operands
    q = jax.vmap(quantize)(*flat) if batch else quantize(*flat)
    q = jax.tree_util.tree_map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), q) if batch else q
    return dataclasses.replace(q, logical_sharding=None)


def _find_largest(x: Float[Array, "*batch m k"], largest: Float32[Array, "*lead"]) -> Float32[Array, "*batch"]:
    """Returns the largest magnitude that each matrix is scaled by; that of now, where none is known."""
    x, largest = _compat.vary_alike((x, largest))
    known = largest > 0
    # A branch, so that encoding need not wait for a pass over the values.
    now = lambda: jnp.where(known, largest, _largest_seen(x, largest[..., None]))
    return jnp.broadcast_to(jax.lax.cond(jnp.all(known), lambda: largest, now), x.shape[:-2])


def _mark_not_finite(q: QuantizedArray, x: Float[Array, "m k"]) -> QuantizedArray:
    """Makes the scale NaN if a value is not finite: such a value has no code."""
    bad = jnp.isnan(_largest_seen(x, jnp.zeros(1, jnp.float32)))
    return dataclasses.replace(q, scale_bits=scale_to_bits(jnp.where(bad, jnp.nan, q.scale), q.format.scale_dtype))


def _largest_seen(x: Float[Array, "*batch m k"], largest: Float32[Array, "*lead n"]) -> Float32[Array, "*lead"]:
    """Returns the largest magnitude for each of `lead`, the last axes of `batch`; NaN if a value is not finite."""
    lead, ndim = largest.shape[:-1], x.ndim - 2
    rows = absmax(x.astype(jnp.float32))  # along an axis first, so that devices that divide another need no other's
    rows = jnp.moveaxis(rows, range(ndim - len(lead)), range(len(lead), ndim))
    return absmax(rows.reshape(*lead, 1, math.prod(rows.shape[len(lead) :])))[..., 0]


def largest_seen(x: Float[Array, "*batch m k"], largest: Float32[Array, "*lead 3"]) -> Float32[Array, "*lead"]:
    """As `_largest_seen`, of all examples of a `vmap` and of all devices of a `shard_map` that share `largest`."""
    others = tuple(sorted(_compat.varying_axes(x) - _compat.varying_axes(largest)))
    seen = largest_seen_p.bind(*_compat.vary_alike((x, largest)))
    return jax.lax.pmax(seen, others) if others else seen


def _batch_seen(args: Sequence[Array], dims: Sequence[int | None]) -> tuple[Array, int | None]:
    (x, largest), (x_axis, largest_axis) = args, dims
    x = move_batch_axis(x, x_axis, batch_axis_size(args, dims))
    if largest_axis is None:
        return largest_seen_p.bind(x, largest), None
    return largest_seen_p.bind(jnp.moveaxis(x, 0, x.ndim - largest.ndim - 1), jnp.moveaxis(largest, largest_axis, 0)), 0


def _record(
    dlargest: Array, seen: Array, largest: Array, nothing: Array, *, result: jax.core.ShapedArray
) -> Float[Array, "*batch m n"]:
    """Returns zeros. The transpose returns `seen`, and the largest magnitude of the gradient of these zeros."""
    del dlargest, seen, largest, nothing
    return jnp.zeros(result.shape, result.dtype)


def _transpose_record(
    dy: Tangent, dlargest: Primal, seen: Array, largest: Array, nothing: Array, *, result: jax.core.ShapedArray
) -> list[Array | None]:
    del dlargest, nothing, result
    if isinstance(dy, ad.Zero):
        return [None, None, None, None]
    return [jnp.concatenate([seen, largest_seen(dy, largest)[..., None]], axis=-1), None, None, None]


def _batch_record(
    args: Sequence[Array], dims: Sequence[int | None], *, result: jax.core.ShapedArray
) -> tuple[Array, int]:
    (*values, nothing), (*axes, nothing_axis) = args, dims
    size = batch_axis_size(args, dims)
    place = 0
    if any(axis is not None for axis in axes):  # of models, each with its own
        values = [move_batch_axis(a, axis, size) for a, axis in zip(values, axes, strict=True)]
        place = result.ndim - values[0].ndim  # before as many axes of a batch as the largest magnitudes have
    result = result.update(shape=(*result.shape[:place], size, *result.shape[place:]))
    return record_p.bind(*values, move_batch_axis(nothing, nothing_axis, size, place), result=result), place


def _abstract(
    x: jax.core.ShapedArray, w: jax.core.ShapedArray, *largest: jax.core.ShapedArray, **params: object
) -> jax.core.ShapedArray:
    del params, largest
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
    (x, w, *largest), (dx, dw, *dlargest) = primals, tangents
    y = rounded_matmul_p.bind(x, w, *largest, x_rounding=x_rounding, w_rounding=w_rounding, **params)
    params["implementation"] = None
    dys = []
    if not isinstance(dx, ad.Zero):
        dys.append(rounded_matmul_p.bind(dx, w, *largest, x_rounding=None, w_rounding=w_rounding, **params))
    if not isinstance(dw, ad.Zero):
        dys.append(rounded_matmul_p.bind(x, dw, *largest, x_rounding=x_rounding, w_rounding=None, **params))
    places = {rounding.largest: a for rounding, a in ((x_rounding, x), (w_rounding, w)) if rounding is not None}
    if places.keys() == {X_PLACE, W_PLACE} and not isinstance(dlargest[0], ad.Zero):  # the product of the forward pass
        seen = jnp.stack([largest_seen(places[X_PLACE], *largest), largest_seen(places[W_PLACE], *largest)], axis=-1)
        # No values of the result, but under a `vmap` as many axes: without it examples would be summed before `record`
        # is transposed, if its own operands have no axis of them.
        nothing = jax.lax.slice_in_dim(y, 0, 0, axis=-1)
        dys.append(record_p.bind(*dlargest, seen, *largest, nothing, result=jax.typeof(y)))
    if not dys:
        return y, _compat.zero_tangent(y)
    return y, ft.reduce(ad.add_jaxvals, dys)


def _transpose(
    dy: Tangent,
    x: Primal,
    w: Primal,
    *largest: Array,
    x_rounding: Rounding | None,
    w_rounding: Rounding | None,
    gradient_rounding: Rounding,
    **params: object,
) -> list[Array | None]:
    none = [None] * len(largest)
    if isinstance(dy, ad.Zero):
        return [None, None, *none]
    turn = lambda a: jnp.swapaxes(a, -1, -2)
    bind = ft.partial(
        rounded_matmul_p.bind, x_rounding=gradient_rounding, gradient_rounding=gradient_rounding, **params
    )
    if ad.is_undefined_primal(x):
        return [bind(dy, turn(w), *largest, w_rounding=w_rounding), None, *none]
    return [None, bind(turn(dy), turn(x), *largest, w_rounding=x_rounding), *none]


def _batch(args: Sequence[Array], dims: Sequence[int | None], **params: object) -> tuple[Array, int]:
    (x, w, *largest), (x_axis, w_axis, *largest_axes) = args, dims
    size = batch_axis_size(args, dims)
    if any(d is not None for d in largest_axes):  # of models, each with its own
        largest = [move_batch_axis(a, d, size) for a, d in zip(largest, largest_axes, strict=True)]
        place = max(x.ndim - (x_axis is not None), w.ndim - (w_axis is not None)) - largest[0].ndim
        return rounded_matmul_p.bind(
            move_batch_axis(x, x_axis, size, place), move_batch_axis(w, w_axis, size, place), *largest, **params
        ), place
    bind = lambda x, w: rounded_matmul_p.bind(x, w, *largest, **params)
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


largest_seen_p.def_abstract_eval(lambda x, largest: largest.update(shape=largest.shape[:-1]))
largest_seen_p.def_impl(compile_alone(largest_seen_p, _largest_seen, []))
ad.primitive_jvps[largest_seen_p] = zero_tangent_jvp(largest_seen_p)
batching.primitive_batchers[largest_seen_p] = _batch_seen
mlir.register_lowering(largest_seen_p, mlir.lower_fun(_largest_seen, multiple_results=False))

record_p.def_abstract_eval(lambda *args, result: result)
record_p.def_impl(_record)
ad.primitive_jvps[record_p] = zero_tangent_jvp(record_p)
ad.primitive_transposes[record_p] = _transpose_record
batching.primitive_batchers[record_p] = _batch_record
mlir.register_lowering(record_p, mlir.lower_fun(_record, multiple_results=False))

rounded_matmul_p.def_abstract_eval(_abstract)
rounded_matmul_p.def_impl(
    compile_alone(
        rounded_matmul_p,
        compute_rounded,
        ["x_rounding", "w_rounding", "gradient_rounding", "precision", "implementation"],
    )
)
ad.primitive_jvps[rounded_matmul_p] = _jvp
ad.primitive_transposes[rounded_matmul_p] = _transpose
batching.primitive_batchers[rounded_matmul_p] = _batch
_compat.lower_with_devices(rounded_matmul_p)
mlir.register_lowering(rounded_matmul_p, mlir.lower_fun(compute_rounded, multiple_results=False))
