"""Attention to a cache, as a JAX primitive.

On CPU native code reads only the places that hold tokens and that a query sees, packed as they are. XLA, which needs
static shapes, computes scores for all places: on other platforms, for gradients, in exported programs, and where the
compiler divides the cache or the cache has a float window.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.core
import jax.extend
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.interpreters import ad, batching
from jaxtyping import Array, DTypeLike, Float, Int32

from .. import _compat
from .._array.array import QuantizedArray
from .._array.codes import row_length
from .._array.dequantize import as_stored, has_decoded_scales
from .._formats.layout import make_layout
from .._native import calls
from .._native.lowering import lower_on_cpu
from .._native.weight import Layout, StoredWeight
from .._numerics.primitives import jit_impl, leading_batching_rule, Tangent
from .._types import PyTreeDef
from .write import MaybeQuantized


EMPTY_POSITION = np.iinfo(np.int32).max  # of a place without a token: after every token

attention_p = jax.extend.core.Primitive("cache_attention")


@runtime_checkable
class AttendedCache(Protocol):
    """What attention uses of a `QuantizedCache`."""

    keys: MaybeQuantized
    values: MaybeQuantized
    length: Array
    sinks: int

    @property
    def context(self) -> int: ...
    @property
    def positions(self) -> Array: ...
    def scores(self, queries: Array, dtype: DTypeLike | None = None) -> Array: ...
    def weighted_values(self, probabilities: Array) -> Array: ...


def bind_attention(
    queries: Float[Array, "*batch heads rows size"],
    positions: Int32[Array, "*batch tokens"],
    window: Int32[Array, "*batch"],
    cache: AttendedCache,
    scale: float,
    cap: float,
) -> Float[Array, "*batch heads rows size"]:
    """Binds the primitive.

    Row `r` of a head belongs to token `r % tokens`. A window of 0 shows all places, and a cap of 0 bounds no score.
    """
    operands = _compat.vary_alike((queries, positions, window, cache))
    leaves, tree = jtu.tree_flatten(operands)
    return attention_p.bind(*leaves, tree=tree, scale=scale, cap=cap)


def attend_by_xla(
    queries: Float[Array, "*batch heads rows size"],
    positions: Int32[Array, "*batch tokens"],
    window: Int32[Array, "*batch"],
    cache: AttendedCache,
    scale: float,
    cap: float,
) -> Float[Array, "*batch heads rows size"]:
    """Computes scores of all places, and hides those that a token does not see."""
    # In 16 bits large scores would overflow, or lose the differences that a softmax sees.
    scores = cache.scores(queries, queries.dtype if queries.dtype.itemsize > 4 else jnp.float32) * scale
    if cap:
        scores = cap * jnp.tanh(scores / cap)
    at = jnp.clip(positions, -1, EMPTY_POSITION - 1)[..., None]
    width = window[..., None, None]
    places = cache.positions
    seen = (places <= at) & ((width <= 0) | (places > at - width) | (places < cache.sinks))
    *front, rows, count = scores.shape
    tokens = positions.shape[-1]
    grouped = jnp.broadcast_to(seen[..., None, None, :, :], (*front, rows // tokens, tokens, count))
    seen = grouped.reshape(scores.shape)
    # A token that sees nothing gets zeros. Its scores are zeros too, since a softmax of nothing is NaN.
    hidden = jnp.where(seen.any(axis=-1, keepdims=True), -jnp.inf, jnp.zeros_like(scores[..., :1]))
    probabilities = jax.nn.softmax(jnp.where(seen, scores, jnp.broadcast_to(hidden, scores.shape)))
    return cache.weighted_values(jnp.where(seen, probabilities, 0).astype(queries.dtype))


def nan_without_room(cache: AttendedCache, y: Float[Array, "*batch heads rows size"]) -> Array:
    """Returns results of attention: NaN in rows with more tokens than fit."""
    # Computed, since `jax_debug_nans` stops at a constant NaN.
    zero_or_nan = jnp.sqrt(jnp.minimum(cache.context - cache.length, 0).astype(y.dtype))
    return y + jnp.broadcast_to(zero_or_nan[..., None, None, None], y.shape)


def _by_xla(*leaves: Array, tree: PyTreeDef, scale: float, cap: float) -> Array:
    queries, positions, window, cache = jtu.tree_unflatten(tree, leaves)
    return attend_by_xla(queries, positions, window, cache, scale, cap)


def _native(*leaves: Array, tree: PyTreeDef, scale: float, cap: float) -> Array:
    queries, positions, window, cache = jtu.tree_unflatten(tree, leaves)
    if calls.why_not_attend(queries) is not None or not (_is_read(cache.keys) and _is_read(cache.values)):
        return attend_by_xla(queries, positions, window, cache, scale, cap)
    stored = (_as_rows(cache.keys), _as_rows(cache.values))
    length = cache.length.astype(jnp.int32)
    return nan_without_room(cache, calls.attend(queries, positions, length, window, *stored, scale=scale, cap=cap))


def _is_read(x: MaybeQuantized) -> bool:
    """Returns whether native code reads these keys or values."""
    if not isinstance(x, QuantizedArray):
        return x.dtype in calls.DTYPES
    return x.axis == -1 and bool(_layout(x).table)


def _layout(q: QuantizedArray) -> Layout:
    return make_layout(q.format, row_length(q), has_decoded_scales(q))


def _as_rows(x: MaybeQuantized) -> tuple[StoredWeight, Layout] | Array:
    return (as_stored(x), _layout(x)) if isinstance(x, QuantizedArray) else x


def _abstract(queries: jax.core.ShapedArray, *rest: object, **params: object) -> jax.core.ShapedArray:
    del rest, params
    return queries.update(weak_type=False)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Tangent], *, tree: PyTreeDef, scale: float, cap: float
) -> tuple[Array, Tangent]:
    differentiated = [n for n, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def attend(*some: Array) -> Array:
        chosen = dict(zip(differentiated, some, strict=True))
        return _by_xla(*(chosen.get(n, primal) for n, primal in enumerate(primals)), tree=tree, scale=scale, cap=cap)

    pick = lambda operands: [operands[n] for n in differentiated]
    return jax.jvp(attend, pick(primals), pick(tangents))


attention_p.def_abstract_eval(_abstract)
attention_p.def_impl(jit_impl(attention_p, _by_xla, ["tree", "scale", "cap"]))
ad.primitive_jvps[attention_p] = _jvp
batching.primitive_batchers[attention_p] = leading_batching_rule(attention_p)
lower_on_cpu(attention_p, _native, _by_xla)
