"""A primitive that reports statistics of an input to the host, for whole batches at once.

Models are written for one example and mapped over a batch. Under `vmap` the primitive folds the batch into rows, like
the quantized matmul, so the device computes the statistics of the whole batch. In `scan`, `while_loop` and `cond` it
runs as often as the product whose input it observes.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Float32, Shaped


Moments: TypeAlias = dict[str, Array | np.ndarray]
# Called on the host with the indices of the layers and the moments of their rows. Returns the indices.
Record: TypeAlias = Callable[[Array | np.ndarray, Moments], np.ndarray]
Option: TypeAlias = Record | float | int

# Public for whoever looks for it in a traced program.
observe_p = jax.extend.core.Primitive("observe")


def observe(
    x: Shaped[Array, "*inputs"],
    rows: Float[Array, "*stack rows features"],
    index: Float32[Array, "*stack"],
    **params: Option,
) -> Shaped[Array, "*inputs"]:
    """Returns `x`, but only after `record` has received the moments of `rows`.

    **Arguments:**

    - `x`: the input of a weight.
    - `rows`: the same input, arranged as rows.
    - `index`: the index of the weight in a stack of layers.
    - `params`: `record`, compared by identity; `threshold`, the magnitude above which a value counts as an outlier;
        `gram`, whether to compute the Gram matrix of the features, too; `keep`, whether `record` receives the rows as
        well; and `gated`, whether nothing is computed where all indices are negative.
    """
    told = observe_p.bind(rows, index, **params)
    return jax.lax.optimization_barrier((x, told))[0]


def _moments(x: Float[Array, "*stack rows features"], threshold: float | int, gram: bool, keep: bool) -> Moments:
    x = x.astype(jnp.float32)
    size = jnp.abs(x)
    moments: Moments = {
        "rows": jnp.full(x.shape[:-2], x.shape[-2], jnp.int32),
        "min": jnp.min(x, axis=-2),
        "max": jnp.max(x, axis=-2),
        "mean": jnp.sum(x, axis=-2),
        "mean_abs": jnp.sum(size, axis=-2),
        "second_moment": jnp.sum(jnp.square(x), axis=-2),
        "outlier_rate": jnp.sum(size > threshold, axis=-2, dtype=jnp.int32),
    }
    if keep:
        moments["values"] = x
    if gram:
        moments["gram"] = jnp.matmul(jnp.swapaxes(x, -1, -2), x, precision=jax.lax.Precision.HIGHEST)
    return moments


def _run(
    x: Array,
    index: Array,
    *,
    record: Record,
    threshold: float | int,
    gram: bool,
    keep: bool = False,
    gated: bool = False,
) -> Array:
    def tell(x: Array, index: Array) -> Array:
        return io_callback(
            record, jax.ShapeDtypeStruct(index.shape, index.dtype), index, _moments(x, threshold, gram, keep)
        )

    return jax.lax.cond(jnp.any(index >= 0), tell, lambda x, index: index, x, index) if gated else tell(x, index)


def _batch(operands: Sequence[Array], axes: Sequence[int | None], **params: Option) -> tuple[Array, int | None]:
    (x, index), (x_axis, index_axis) = operands, axes
    if index_axis is None and x_axis is not None:  # one layer for the whole batch: the examples become rows
        x = jnp.moveaxis(x, x_axis, -3)
        x = x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
        return observe_p.bind(x, index, **params), None
    index = jnp.moveaxis(index, index_axis or 0, 0)
    x = jnp.broadcast_to(x, (index.shape[0], *x.shape)) if x_axis is None else jnp.moveaxis(x, x_axis, 0)
    return observe_p.bind(x, index, **params), 0


def _jvp(primals: Sequence[Array], tangents: Sequence[object], **params: Option) -> tuple[Array, Array]:
    del tangents
    told = observe_p.bind(*primals, **params)
    return told, jnp.zeros_like(told)


observe_p.def_impl(jax.jit(_run, static_argnames=("record", "threshold", "gram", "keep", "gated")))
observe_p.def_abstract_eval(lambda x, index, **params: index)
batching.primitive_batchers[observe_p] = _batch
ad.primitive_jvps[observe_p] = _jvp
mlir.register_lowering(observe_p, mlir.lower_fun(_run, multiple_results=False))
