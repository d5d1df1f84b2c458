"""Low-rank factors that correct the error of quantized weights."""

import functools as ft
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from .._array.checks import check_finite
from .._array.value import AbstractArrayValue
from .._methods.fingerprint import check_same_weight
from .._methods.gram import damp
from .._methods.statistics import check_statistic, InputsError, LeafStats
from .._numerics.batching import vmap_leading
from .._tree.leaves import Leaf
from .._types import PyTree


# Added to the Gram matrix, relative to the mean of its diagonal, so that rare inputs count a little.
_DAMPING = 0.01


def find_factors(
    leaf: Leaf,
    weights: Mapping[str, PyTree],
    inputs: Mapping[str, LeafStats] | None,
    rank: int,
    in_ndim: int,
    scale: float,
) -> tuple[Float32[Array, "*batch out rank"], Float32[Array, "..."]]:
    """Returns `b` and `a`, whose product times `scale` is nearest to the error of a weight.

    **Arguments:**

    - `weights`: the weights of the float model, by path.
    - `inputs`: the statistics of their inputs, by path.
    - `in_ndim`: the number of axes of the inputs, the last ones.
    """
    q, path = leaf.value, leaf.float_path or leaf.path
    w = weights.get(path)
    if w is None or tuple(w.shape) != tuple(q.shape):
        raise ValueError(
            f"`init` must be a model with the weights of `model`. Got "
            f"{'none' if w is None else f'one of shape {tuple(w.shape)}'} for {leaf.path} of shape {tuple(q.shape)}. "
            "Pass the model from before it was quantized."
        )
    dense = lambda x: (x.dequantize() if isinstance(x, AbstractArrayValue) else jnp.asarray(x)).astype(jnp.float32)
    error = dense(w) - dense(q)
    check_finite(error, leaf.path)
    *batch, out = q.shape[: q.ndim - in_ndim]
    features = q.shape[q.ndim - in_ndim :]
    error = error.reshape(*batch, out, math.prod(features))
    gram, transposed = None, False
    if inputs is not None:
        gram, transposed = _find_gram(path, w, inputs, in_ndim)
    error = error.mT if transposed else error
    gram = jnp.eye(error.shape[-1]) if gram is None else gram
    gram = jnp.broadcast_to(gram, (*batch, *gram.shape[-2:]))
    b, a = vmap_leading(ft.partial(_approximate, rank=rank), len(batch))(error, gram)
    b, a = (a.mT, b.mT) if transposed else (b, a)
    return b / scale, a.reshape(*batch, rank, *features)


def _find_gram(
    path: str, w: PyTree, inputs: Mapping[str, LeafStats], in_ndim: int
) -> tuple[Float32[Array, "*stack features features"] | None, bool]:
    """Returns the Gram matrix of the inputs of a weight, and whether it is for `x @ w`.

    It is diagonal if only mean squares were collected, and `None` if the statistics have no axis.
    """
    if path not in inputs:
        raise InputsError(
            "`inputs` must hold statistics of every weight that gets factors",
            f"none for {path}",
            "Collect them on the same model, or select other weights by `where` or `rank`.",
        )
    stats = inputs[path]
    if stats.axis is None:
        return None, False
    axes = (stats.axis,) if isinstance(stats.axis, int) else tuple(stats.axis)
    name = "second_moment" if stats.gram is None else "gram"
    check_statistic(stats, name, "loraify", path, tuple(w.shape), axes)
    check_same_weight(stats, "`inputs` of loraify", path, w)
    last = tuple(range(-in_ndim, 0))
    if axes not in (last, (-2,)):
        raise InputsError(
            "`loraify` needs inputs along the last axes of a weight, or `x @ w`",
            f"inputs along {axes} of {path}",
            "Leave this weight out of `rank`.",
        )
    moments = jnp.asarray(getattr(stats, name), jnp.float32)
    return moments if name == "gram" else vmap_leading(jnp.diag, moments.ndim - 1)(moments), axes != last


@ft.partial(jax.jit, static_argnames="rank")
def _approximate(
    error: Float32[Array, "rows columns"], gram: Float32[Array, "columns columns"], rank: int
) -> tuple[Float32[Array, "rows rank"], Float32[Array, "rank columns"]]:
    r"""Returns factors, whose product $P$ has the least $\operatorname{tr} (E - P) G (E - P)^T$."""
    rows, columns = error.shape
    lower = jnp.linalg.cholesky(damp(gram, _DAMPING))
    matmul = ft.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    weighted = matmul(error, lower)
    # The best approximation projects `weighted` on its top singular vectors, on the shorter side.
    if rows < columns:
        best = jnp.linalg.eigh(matmul(weighted, weighted.T))[1][:, : -rank - 1 : -1]
        return best, matmul(best.T, error)
    best = jnp.linalg.eigh(matmul(weighted.T, weighted))[1][:, : -rank - 1 : -1]
    return matmul(weighted, best), jax.scipy.linalg.solve_triangular(lower, best, trans="T", lower=True).T
