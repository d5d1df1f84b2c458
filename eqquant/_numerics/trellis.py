"""Trellis codes: each value is a hash of 12 bits, of which neighbors share most.

A row is cut into segments of 128 values; a last, shorter segment is rounded up to a multiple of 16. The bits of a
segment form a circle (a tail-biting trellis), numbered from the lowest of the first byte. Value `t` is the hash of a
*window*, the 12 bits from bit `t * bits` on.

Neighboring windows share bits, so not every sequence of values has codes. Encoding finds one of small error by the
Viterbi algorithm, with the windows as states. It is a JAX primitive; on CPU native code runs it.

After the bitshift trellis of QTIP, https://arxiv.org/abs/2406.11235, whose code 1MAD is the sum of the four bytes of a
32-bit hash. To correct the errors of each path in its own later values is known as per-survivor processing.
"""

import functools as ft
import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.interpreters import ad, batching
from jaxtyping import Array, Float32, Int32, UInt8, UInt32

from .. import _compat
from .._native import calls
from .._native.lowering import lower_on_cpu
from .._types import PyTreeDef
from .constants import compute_now
from .primitives import jit_impl, leading_batching_rule, zero_tangent_jvp


# The bits of a window; the values of a segment; the values of which a shorter segment is a multiple.
WINDOW, SEGMENT, UNIT = 12, 128, 16
# Two multipliers of the hash: the lower half multiplies windows, the upper one these products. Of 5000 random pairs the
# one of least error at two bits, for normally distributed values.
MULTIPLIERS = 0x394D3195

encode_trellis_p = jax.extend.core.Primitive("encode_trellis")


def packed_length(length: int, bits: int) -> int:
    """Returns the number of bytes of a row of `length` values."""
    whole, rest = divmod(length, SEGMENT)
    return (whole * SEGMENT + -(-rest // UNIT) * UNIT) * bits // 8


def hash_windows(windows: UInt32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Returns the value of each window, an integer from -123 to 113, with a mean of about zero.

    Values are nearly normally distributed: sums of four numbers of six bits. Products have 16 bits, since vector
    instructions compute most of these at once.
    """
    product = windows * np.uint32(MULTIPLIERS & 0xFFFF) & np.uint32(0xFFFF)
    high = product * np.uint32(MULTIPLIERS >> 16) >> np.uint32(16)
    pairs = (product & np.uint32(0x3F3F)) + (high & np.uint32(0x3F3F))
    return ((pairs & np.uint32(0xFF)) + (pairs >> np.uint32(8))).astype(jnp.int32) - 123  # in native code too


@ft.lru_cache
def decode_windows() -> np.ndarray:
    """Returns the values of all windows, float32 `(4096,)`."""
    with compute_now():
        return np.asarray(jax.jit(hash_windows)(np.arange(2**WINDOW, dtype=np.uint32)), np.float32)


def decode(packed: UInt8[Array, "*batch bytes"], bits: int, length: int) -> Int32[Array, "*batch length"]:
    """Returns the first `length` values of packed rows."""
    *batch, nbytes = packed.shape
    size = SEGMENT * bits // 8
    whole = nbytes // size
    split = whole * size
    segments = _decode_segments(packed[..., :split].reshape(*batch, whole, size), bits)
    last = _decode_segments(packed[..., split:], bits)
    return jnp.concatenate([segments.reshape(*batch, whole * SEGMENT), last], axis=-1)[..., :length]


def _decode_segments(packed: UInt8[Array, "*batch bytes"], bits: int) -> Int32[Array, "*batch values"]:
    """Returns the values of whole segments. Eight values take `bits` bytes."""
    *batch, nbytes = packed.shape
    words = packed.astype(jnp.uint32)
    following = lambda n: jnp.roll(words, -n, axis=-1)
    words = (words | following(1) << 8 | following(2) << 16).reshape(*batch, nbytes // bits, bits)
    windows = [words[..., i * bits // 8] >> np.uint32(i * bits % 8) & np.uint32(2**WINDOW - 1) for i in range(8)]
    return hash_windows(jnp.stack(windows, axis=-1).reshape(*batch, nbytes * 8 // bits))


# Encoding


class TrellisRows(NamedTuple):
    """Rows to encode.

    - `values`: in units of the scales, finite.
    - `weights`: how much the squared error of each value counts.
    - `feedback`: `feedback[i, j]` is how much of the error of value `i` is subtracted from value `j` after it, the same
        for all rows, which have at most a segment; `None` corrects nothing. An error is the corrected value less its
        quantized value.
    """

    values: Float32[Array, "*batch rows length"]
    weights: Float32[Array, "*batch rows length"]
    feedback: Float32[Array, "*batch length length"] | None = None


def encode(
    values: Float32[Array, "*batch length"],
    bits: int,
    weights: Float32[Array, "*batch length"] | None = None,
    feedback: Float32[Array, "length length"] | None = None,
) -> UInt8[Array, "*batch bytes"]:
    """Returns the packed codes of sequences of small squared error.

    The arguments are the fields of `TrellisRows`. Each path through the trellis corrects its own errors.
    """
    *batch, length = values.shape
    flat = lambda x: x.astype(jnp.float32).reshape(math.prod(batch), length)
    if weights is None:
        weights = jnp.ones_like(values)
    else:  # only their ratios count, and sums of costs stay far from overflow
        largest = jnp.max(weights, axis=-1, keepdims=True, initial=0)
        weights = weights / jnp.where(largest > 0, largest, 1)
    rows = TrellisRows(flat(values), flat(weights), feedback)
    leaves, tree = jtu.tree_flatten(_compat.vary_alike(rows))
    return encode_trellis_p.bind(*leaves, tree=tree, bits=bits).reshape(*batch, packed_length(length, bits))


def _by_xla(*args: Array, tree: PyTreeDef, bits: int) -> UInt8[Array, "*batch rows bytes"]:
    """Encodes by operations of XLA, some rows at a time."""
    trellis: TrellisRows = jtu.tree_unflatten(tree, args)
    *batch, rows, length = trellis.values.shape
    if length == 0 or rows == 0:
        return jnp.zeros((*batch, rows, packed_length(length, bits)), jnp.uint8)
    if trellis.feedback is not None and batch:
        return jax.vmap(lambda *args: _by_xla(*args, tree=tree, bits=bits))(*args)
    whole, rest = divmod(length, SEGMENT)
    flat = lambda x: x.reshape(-1, x.shape[-1])

    def encode_part(first: int, size: int, count: int) -> Array:
        padding = -size % UNIT
        part = lambda x: jnp.pad(flat(x)[:, first : first + size * count].reshape(-1, size), ((0, 0), (0, padding)))
        feedback = trellis.feedback if trellis.feedback is None else jnp.pad(trellis.feedback, (0, padding))
        search = lambda pair: _search_circle(pair[0], pair[1], feedback, bits)
        batch_size = 8 if feedback is not None else 64  # segments: feedback takes more memory
        windows = jax.lax.map(search, (part(trellis.values), part(trellis.weights)), batch_size=batch_size)
        return _pack(windows, bits).reshape(flat(trellis.values).shape[0], -1)

    parts = [encode_part(0, SEGMENT, whole)] if whole else []
    parts += [encode_part(whole * SEGMENT, rest, 1)] if rest else []
    return jnp.concatenate(parts, axis=-1).reshape(*batch, rows, packed_length(length, bits))


def _pack(windows: Int32[Array, "rows values"], bits: int) -> UInt8[Array, "rows bytes"]:
    """Packs the lowest `bits` bits of each window, one after the other."""
    rows, length = windows.shape
    places = lambda count: jnp.arange(count, dtype=jnp.int32)[None, None, :]
    each = (windows[..., None] >> places(bits) & 1).reshape(rows, length * bits // 8, 8)
    return jnp.sum(each << places(8), axis=-1).astype(jnp.uint8)


def _search_circle(
    values: Float32[Array, " length"],
    weights: Float32[Array, " length"],
    feedback: Float32[Array, "length length"] | None,
    bits: int,
) -> Int32[Array, " length"]:
    """Returns the windows of the best sequence that ends where it begins.

    An approximation: the bits that the first and the last window share are those of the best sequence that begins
    half a segment later and ends anywhere, without feedback.
    """
    half = len(values) // 2
    turned = _search(jnp.roll(values, -half), jnp.roll(weights, -half), None, bits, None)
    shared = turned[len(values) - half] & 2 ** (WINDOW - bits) - 1
    return _search(values, weights, feedback, bits, shared)


def _search(
    values: Float32[Array, " length"],
    weights: Float32[Array, " length"],
    feedback: Float32[Array, "length length"] | None,
    bits: int,
    shared: Int32[Array, ""] | None,
) -> Int32[Array, " length"]:
    """Returns the windows of the best sequence.

    - `shared`: the lowest `WINDOW - bits` bits of its first window, which are the highest of its last; `None` if these
        may differ.

    A *group* is the windows with the same lowest bits: the same windows precede them.
    """
    length, groups, choices = len(values), 2 ** (WINDOW - bits), 2**bits
    table = jnp.asarray(decode_windows()).reshape(choices, groups)
    group = jnp.arange(groups)
    changes = jnp.zeros((groups, 0 if feedback is None else length), jnp.float32)
    costs = jnp.zeros(groups, jnp.float32) if shared is None else jnp.where(group == shared, 0.0, jnp.inf)

    def advance(state: tuple[Array, Array], step: tuple[Any, ...]) -> tuple[tuple[Array, Array], Array]:
        costs, changes = state  # of the best path to each group: its cost, and what it subtracts from each value
        n, value, weight, row = step
        target = value if feedback is None else value - changes[:, n][None, :]
        errors = target - table
        # The highest bits of a window are its new ones. The windows that precede a group differ in their lowest bits.
        totals = (costs[None, :] + weight * jnp.square(errors)).reshape(groups, choices)
        choice = jnp.argmin(totals, axis=-1).astype(jnp.int32)
        window = group * choices + choice
        if feedback is not None:
            changes = changes[window % groups] + errors.reshape(-1)[window][:, None] * row[None, :]
        costs = jnp.min(totals, axis=-1)
        return (costs - jnp.min(costs), changes), choice  # relative to the least, so that small costs are exact

    steps = (jnp.arange(length), values, weights, feedback)
    (costs, _), chosen = jax.lax.scan(advance, (costs, changes), steps)

    def trace_back(group: Array, choices_of_groups: Array) -> tuple[Array, Array]:
        window = group * choices + choices_of_groups[group]
        return window % groups, window

    end = jnp.argmin(costs).astype(jnp.int32) if shared is None else shared
    return jax.lax.scan(trace_back, end, chosen, reverse=True)[1]


def _native(*args: Array, tree: PyTreeDef, bits: int) -> UInt8[Array, "*batch rows bytes"]:
    """Encodes by native code, where that is installed."""
    trellis: TrellisRows = jtu.tree_unflatten(tree, args)
    if trellis.values.size == 0 or calls.why_not_encode(trellis.values, bits) is not None:
        return _by_xla(*args, tree=tree, bits=bits)
    return calls.encode_trellis(*trellis, bits, MULTIPLIERS, packed_length(trellis.values.shape[-1], bits))


def _abstract(*args: Any, tree: PyTreeDef, bits: int) -> jax.core.ShapedArray:
    del tree
    *batch, length = args[0].shape
    return args[0].update(shape=(*batch, packed_length(length, bits)), dtype=jnp.dtype(jnp.uint8), weak_type=False)


encode_trellis_p.def_abstract_eval(_abstract)
encode_trellis_p.def_impl(jit_impl(encode_trellis_p, _by_xla, ["tree", "bits"]))
ad.primitive_jvps[encode_trellis_p] = zero_tangent_jvp(encode_trellis_p)
batching.primitive_batchers[encode_trellis_p] = leading_batching_rule(encode_trellis_p)
lower_on_cpu(encode_trellis_p, _native, _by_xla)
