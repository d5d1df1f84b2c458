"""The Kullback-Leibler divergence of two language models, in chunks of positions."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Int

from .._tree.batches import Apply
from .._types import PyTree


# For how many positions logits are computed at a time.
_POSITIONS = 256
# The least probability of all tokens outside the top k together. In float32, less would be rounding error.
_LEAST = 1e-7

_Best = tuple[Float[Array, "positions k"], Int[Array, "positions k"]]


class Criterion(NamedTuple):
    """How the outputs of a model are compared with those of its float model.

    - `loss`: the loss from a model and its outputs, and from the float model and a summary of its outputs.
    - `summarize`: makes the summary from the float model and its outputs.
    - `keeps`: whether the summaries of all batches are kept.
    """

    loss: Callable[[PyTree, PyTree, PyTree, PyTree], Float[Array, ""]]
    summarize: Callable[[PyTree, PyTree], PyTree]
    keeps: bool


def compare_logits(temperature: float | int, top_k: int | None, head: Apply | None) -> Criterion:
    """Returns the criterion `"kl"` of `distill`."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"`temperature` must be positive and finite. Got {temperature}. It is 1 unless given.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"`top_k` must be at least 1. Got {top_k}. Pass None to compare all tokens.")

    def log_probabilities(model: PyTree, rows: Array) -> Float[Array, "positions vocabulary"]:
        logits = rows if head is None else head(model, rows)
        return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)

    def summarize(float_model: PyTree, outputs: PyTree) -> PyTree:
        rows, count = _find_rows(outputs), top_k
        if count is None:
            return rows

        def find_best(rows: Array) -> _Best:
            log_p = log_probabilities(float_model, rows)
            best, at = jax.lax.top_k(log_p, min(count, log_p.shape[-1]))
            return best, at

        return _map_positions(find_best, rows)

    def loss(model: PyTree, outputs: PyTree, float_model: PyTree, summary: PyTree) -> Float[Array, ""]:
        def compare(rows: Array, wanted: Array | _Best) -> Float[Array, " positions"]:
            log_q = log_probabilities(model, rows)
            if isinstance(wanted, tuple):
                log_p, best = wanted
                log_p, log_q = map(_append_others, (log_p, jnp.take_along_axis(log_q, best, axis=-1)))
            else:
                log_p = log_probabilities(float_model, wanted)
            terms = jnp.where(jnp.isneginf(log_p), 0, jnp.exp(log_p) * (log_p - log_q))
            return temperature**2 * jnp.sum(terms, axis=-1)

        return jnp.mean(_map_positions(compare, _find_rows(outputs), summary))

    return Criterion(loss, summarize, keeps=top_k is not None or head is not None)


def _append_others(log_p: Float[Array, "positions k"]) -> Float[Array, "positions _"]:
    """Appends the log-probability of all other tokens."""
    others = -jnp.expm1(jax.nn.logsumexp(log_p, axis=-1, keepdims=True))
    return jnp.concatenate([log_p, jnp.log(jnp.maximum(others, _LEAST))], axis=-1)


def _find_rows(outputs: PyTree) -> Float[Array, "positions _"]:
    leaves = jtu.tree_leaves(outputs)
    x = leaves[0] if len(leaves) == 1 else None
    if x is None or not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < 2:
        found = ", ".join(f"{x.dtype} {x.shape}" for x in leaves) or "nothing"
        raise ValueError(
            'For `loss="kl"`, `apply` must return one array of logits `(..., vocabulary)`, or of the inputs of `head`. '
            f"Got {found}."
        )
    return x.reshape(-1, x.shape[-1])


def _map_positions(f: Callable[..., PyTree], *arrays: PyTree) -> PyTree:
    """Applies a function to positions, a chunk at a time.

    Gradients recompute each chunk.
    """
    count = len(jtu.tree_leaves(arrays)[0])
    whole = count // _POSITIONS * _POSITIONS
    results: list[PyTree] = []
    if whole:
        chunks = jtu.tree_map(lambda x: x[:whole].reshape(-1, _POSITIONS, *x.shape[1:]), arrays)
        found = jax.lax.map(jax.checkpoint(lambda arrays: f(*arrays)), chunks)
        results.append(jtu.tree_map(lambda x: x.reshape(whole, *x.shape[2:]), found))
    if whole < count:
        results.append(jax.checkpoint(f)(*jtu.tree_map(lambda x: x[whole:], arrays)))
    return jtu.tree_map(lambda *parts: jnp.concatenate(parts), *results)
