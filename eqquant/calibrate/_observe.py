"""A primitive that reports statistics of an input to the host, for whole batches at once.

In `scan`, `while_loop` and `cond` it runs as often as the product whose input it observes.
"""

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

# Public for whoever looks for it in a traced program.
observe_p = jax.extend.core.Primitive("observe")


def observe(
    x: Shaped[Array, "*inputs"],
    rows: Float[Array, "... rows features"],
    index: Float32[Array, "*stack"],
    reached: Bool[Array, "*stack rows"] | None = None,
    **params: Option,
) -> Shaped[Array, "*inputs"]:
    """Returns `x`, but only after `record` has received the moments of `rows`.

    **Arguments:**

    - `x`: the input of a weight.
    - `rows`: the same input, arranged as rows.
    - `index`: the index of the weight in a stack of layers.
    - `reached`: which rows each layer of a stack of one axis sees; then `rows` has no stack. By default all.
    - `params`: `record`, compared by identity; `threshold`, the magnitude above which a value counts as an outlier;
        `gram`, whether to compute the Gram matrix of the features, too; `keep`, whether `record` receives the rows as
        well; and `gated`, whether nothing is computed where all indices are negative.
    """
    if reached is None:
        told = observe_p.bind(rows, index, **params)
    else:
        one = lambda at: observe_p.bind(rows, *at, **params)
        told = jax.lax.map(one, (index, reached))
    return jax.lax.optimization_barrier((x, told))[0]


def _moments(
    x: Float[Array, "*stack rows features"],
    reached: Bool[Array, " rows"] | None,
    threshold: float | int,
    gram: bool,
    keep: bool,
) -> Moments:
    x = x.astype(jnp.float32)
    count = jnp.full(x.shape[:-2], x.shape[-2], jnp.int32)
    low = high = x
    if reached is not None:
        count, among = jnp.sum(reached, dtype=jnp.int32), reached[:, None]
        x, low, high = (jnp.where(among, x, other) for other in (0, jnp.inf, -jnp.inf))
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
        moments["values"] = x if reached is None else jnp.where(reached[:, None], x, jnp.nan)
    if gram:
        moments["gram"] = jnp.matmul(jnp.swapaxes(x, -1, -2), x, precision=jax.lax.Precision.HIGHEST)
    return moments


def _run(
    x: Array,
    index: Array,
    *reached: Array,
    record: Record,
    threshold: float | int,
    gram: bool,
    keep: bool = False,
    gated: bool = False,
) -> Array:
    def tell(x: Array, index: Array, *reached: Array) -> Array:
        moments = _moments(x, reached[0] if reached else None, threshold, gram, keep)
        return io_callback(record, jax.ShapeDtypeStruct(index.shape, index.dtype), index, moments)

    operands = x, index, *reached
    return jax.lax.cond(jnp.any(index >= 0), tell, lambda x, index, *_: index, *operands) if gated else tell(*operands)


observe_p.def_impl(jax.jit(_run, static_argnames=("record", "threshold", "gram", "keep", "gated")))
observe_p.def_abstract_eval(lambda x, index, *reached, **params: index)
mlir.register_lowering(observe_p, mlir.lower_fun(_run, multiple_results=False))
