"""A primitive that lets the host see an array in passing, in whole batches, and is the identity otherwise.

Models are written for one example and mapped over a batch. Under `vmap` the primitive folds the batch into rows, as the
quantized matmul does, so that statistics are taken of the batch at once and on the device. In `scan`, `while_loop` and
`cond` it runs as often as the product it stands before.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Float32


Moments = dict[str, Any]
# Called on the host with the index of the layer, and the sums over rows that `_moments` gives.
Record = Callable[[np.ndarray, Moments], np.ndarray]

_observe_p = jax.extend.core.Primitive("observe")


def observe(
    x: Float[Array, "*stack rows features"],
    index: Float32[Array, "*stack"],
    *,
    record: Record,
    threshold: float,
    gram: bool,
) -> Float[Array, "*stack rows features"]:
    """`x`, whose rows `record` is told of.

    **Arguments:**

    - `x`: what a weight is multiplied with.
    - `index`: which of a stack of layers that weight is.
    - `record`: what is called. It is compared by identity.
    - `threshold`: magnitudes above it are counted.
    - `gram`: whether to take the products of features with each other, too.
    """
    return _observe_p.bind(x, index, record=record, threshold=threshold, gram=gram)


def _moments(x: Float[Array, "*stack rows features"], threshold: float, gram: bool) -> Moments:
    x = x.astype(jnp.float32)
    size = jnp.abs(x)
    moments = {
        "rows": jnp.full(x.shape[:-2], x.shape[-2], jnp.int32),
        "min": jnp.min(x, axis=-2),
        "max": jnp.max(x, axis=-2),
        "sum": jnp.sum(x, axis=-2),
        "sum_abs": jnp.sum(size, axis=-2),
        "sum_square": jnp.sum(jnp.square(x), axis=-2),
        "outliers": jnp.sum((size > threshold).astype(jnp.float32), axis=(-2, -1)),
    }
    if gram:
        moments["gram"] = jnp.matmul(jnp.swapaxes(x, -1, -2), x, precision=jax.lax.Precision.HIGHEST)
    return moments


def _run(x: Array, index: Array, *, record: Record, threshold: float, gram: bool) -> Array:
    done = io_callback(record, jax.ShapeDtypeStruct((), jnp.bool_), index, _moments(x, threshold, gram))
    # What is computed of `x` is ready only after the host has been told.
    return jax.lax.optimization_barrier((x, done))[0]


def _batch(operands: Sequence[Array], axes: Sequence[Any], **params: Any) -> tuple[Array, int]:
    (x, index), (of_x, of_index) = operands, axes
    size = x.shape[of_x] if of_x is not batching.not_mapped else index.shape[of_index]
    if of_index is not batching.not_mapped:  # mapped over layers: one more axis of the stack
        x = jnp.broadcast_to(x, (size, *x.shape)) if of_x is batching.not_mapped else jnp.moveaxis(x, of_x, 0)
        return _observe_p.bind(x, jnp.moveaxis(index, of_index, 0), **params), 0
    x = jnp.moveaxis(x, of_x, -3)
    *stack, _, rows, features = x.shape
    folded = _observe_p.bind(x.reshape(*stack, size * rows, features), index, **params)
    return folded.reshape(*stack, size, rows, features), len(stack)


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> tuple[Array, Any]:
    return _observe_p.bind(*primals, **params), tangents[0]


_observe_p.def_impl(jax.jit(_run, static_argnames=("record", "threshold", "gram")))
_observe_p.def_abstract_eval(lambda x, index, **params: x)
batching.primitive_batchers[_observe_p] = _batch
ad.primitive_jvps[_observe_p] = _jvp
mlir.register_lowering(_observe_p, mlir.lower_fun(_run, multiple_results=False))
