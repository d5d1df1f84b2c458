"""Gram matrices for methods: that of the inputs, the mean of $x x^T$, weighs errors."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .._numerics.batching import Index, map_chunks, report_row, vmap_leading
from .._types import PyTree
from .statistics import Inputs, LeafStats, statistic


_Found = TypeVar("_Found")

# How many columns are rounded one by one before one product corrects the rest, as the lazy batches of GPTQ.
WIDTH = 128
HIGHEST = jax.lax.Precision.HIGHEST


def get_gram(inputs: Inputs) -> Float32[Array, "*stack length length"]:
    """Returns the mean of $x x^T$ over the inputs of a weight."""
    return jnp.asarray(statistic(inputs, "gram"), jnp.float32)


def get_output_gram(inputs: Inputs) -> Float32[Array, "*stack rows rows"] | None:
    """Returns the sum of $d d^T$ over the columns $d$ of gradients, if it was collected."""
    gram = inputs.output_gram if isinstance(inputs, LeafStats) else None
    return None if gram is None else jnp.asarray(gram, jnp.float32)


def check_gram(inputs: Inputs, gram: Array | np.ndarray | None, damping: float | int) -> Inputs:
    """Returns the statistics or the Gram matrix given to a method.

    Raises for both, and for a wrong damping.
    """
    if inputs is not None and gram is not None:
        raise ValueError("`gram` must come without `inputs`. Got both. Pass the statistics, or the matrix.")
    if not 0 <= damping < float("inf"):
        raise ValueError(f"`damping` must be finite and not negative. Got {damping}. The usual one is 0.01.")
    return gram if inputs is None else inputs


def map_layers(
    prepare: Callable[..., object],
    function: Callable[..., _Found],
    grams: Sequence[Float32[Array, "*stack _ _"]],
    chunk: int | None,
    *arrays: PyTree,
) -> _Found:
    """Returns `function(prepare(*grams), *arrays)` for each layer, a chunk of rows at a time.

    The arrays are `(*stack, *batch, length)`. The function takes and returns them transposed, `(length, rows)`, so that
    a column is contiguous.
    """

    def compute(grams: Sequence[Array], *arrays: PyTree) -> _Found:
        prepared, count = prepare(*grams), math.prod(arrays[0].shape[:-1])

        def compute_rows(first: Index, *arrays: PyTree) -> _Found:
            report_row(first, count)
            *batch, _ = arrays[0].shape
            found = function(prepared, *jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]).T, arrays))
            return jax.tree.map(lambda x: x.T.reshape(*batch, len(x)), found)

        return map_chunks(compute_rows, chunk, *arrays)

    return vmap_leading(compute, grams[0].ndim - 2)(grams, *arrays)


def damp(gram: Float32[Array, "length length"], damping: float) -> Float32[Array, "length length"]:
    """Returns the Gram matrix with a mean of about one on its diagonal, and damped."""
    mean = jnp.mean(jnp.diagonal(gram))
    return gram / jnp.where(mean > 0, mean, 1) + damping * jnp.eye(len(gram), dtype=gram.dtype)
