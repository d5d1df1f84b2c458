"""A primitive that reports statistics of an input to the host, for whole batches at once.

In `scan`, `while_loop` and `cond` it runs as often as the observed product.
"""

import functools as ft
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import mlir
from jaxtyping import Array, Bool, Float, Float32, Shaped


Moments: TypeAlias = dict[str, Array | np.ndarray]
# Called on the host with the indices of the layers and the moments of their rows. Returns the indices.
Record: TypeAlias = Callable[[Array | np.ndarray, Moments], np.ndarray]
Option: TypeAlias = Record | float | int

# Public, so that `find_places` finds it in a traced program.
observe_p = jax.extend.core.Primitive("observe")


def observe(
    x: Shaped[Array, "*inputs"],
    rows: Float[Array, "... rows features"],
    index: Float32[Array, "*stack"],
    row_mask: Bool[Array, "*stack rows"] | None = None,
    **params: Option,
) -> Shaped[Array, "*inputs"]:
    """Returns `x`, after `record` has received the moments of `rows`.

    **Arguments:**

    - `x`: the input of a weight.
    - `rows`: the same input, arranged as rows.
    - `index`: the index of the weight in a stack of layers.
    - `row_mask`: which rows reach each layer of a stack of one axis; then `rows` has no stack. By default all.
    - `params`: `record`, compared by identity; `threshold`, the magnitude above which a value counts as an outlier;
        `gram`, whether to compute the Gram matrix of the features, too; `keep`, whether `record` receives the rows as
        well; and `gated`, whether nothing is computed where all indices are negative.
    """
    if row_mask is None:
        indices = observe_p.bind(rows, index, **params)
    else:
        observe_layer = lambda at: observe_p.bind(rows, *at, **params)
        indices = jax.lax.map(observe_layer, (index, row_mask))
    return jax.lax.optimization_barrier((x, indices))[0]


@ft.partial(jax.jit, static_argnames=("threshold", "gram", "keep"))
def compute_moments(
    x: Float[Array, "*stack rows features"],
    row_mask: Bool[Array, " rows"] | None,
    threshold: float | int,
    gram: bool,
    keep: bool,
) -> Moments:
    """Returns the moments of rows; with `keep` the rows too, NaN where `row_mask` is false."""
    x = x.astype(jnp.float32)
    count = jnp.full(x.shape[:-2], x.shape[-2], jnp.int32)
    low = high = x
    if row_mask is not None:
        count, mask = jnp.sum(row_mask, dtype=jnp.int32), row_mask[:, None]
        x, low, high = (jnp.where(mask, x, other) for other in (0, jnp.inf, -jnp.inf))
    size = jnp.abs(x)
    moments: Moments = {
        "rows": count,
        "min": jnp.min(low, axis=-2),
        "max": jnp.max(high, axis=-2),
        "mean": jnp.sum(x, axis=-2),
        "mean_abs": jnp.sum(size, axis=-2),
        "second_moment": jnp.sum(jnp.square(x), axis=-2),
        "outlier_rate": jnp.sum(size > threshold, axis=-2, dtype=jnp.int32),
    }
    if keep:
        moments["values"] = x if row_mask is None else jnp.where(row_mask[:, None], x, jnp.nan)
    if gram:
        moments["gram"] = jnp.matmul(jnp.swapaxes(x, -1, -2), x, precision=jax.lax.Precision.HIGHEST)
    return moments


def _run(
    x: Array,
    index: Array,
    *row_mask: Array,
    record: Record,
    threshold: float | int,
    gram: bool,
    keep: bool = False,
    gated: bool = False,
) -> Array:
    def send(x: Array, index: Array, *row_mask: Array) -> Array:
        moments = compute_moments(x, row_mask[0] if row_mask else None, threshold, gram, keep)
        return io_callback(record, jax.ShapeDtypeStruct(index.shape, index.dtype), index, moments)

    operands = x, index, *row_mask
    return jax.lax.cond(jnp.any(index >= 0), send, lambda x, index, *_: index, *operands) if gated else send(*operands)


observe_p.def_impl(jax.jit(_run, static_argnames=("record", "threshold", "gram", "keep", "gated")))
observe_p.def_abstract_eval(lambda x, index, *row_mask, **params: index)
mlir.register_lowering(observe_p, mlir.lower_fun(_run, multiple_results=False))
