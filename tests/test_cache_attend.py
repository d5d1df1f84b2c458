"""Attention to a cache in one call: what a token sees, on every path."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._native import library as native

from .helpers import mark_slow, weights


BATCH, HEADS, CONTEXT, SIZE = 3, 2, 80, 32
LENGTHS = np.array([77, 3, 40])
NEW = 3
CALL = "eqquant_cpu_attention"
CACHES = {
    "float": {"keys": None},
    "int8": {"keys": "int8"},
    "float, window": {"keys": None, "window": 16},
    "int4 rotated": {"keys": "int4", "rotate": True},
    "iq4_nl rotated": {"keys": "iq4_nl", "rotate": True},
    "int4 per channel": {"keys": eqq.Int4(16), "values": "int8", "per_channel": True, "window": 128},
    "bfloat16": {"keys": None, "dtype": jnp.bfloat16},
    "float16 int8": {"keys": "int8", "dtype": jnp.float16},
    "affine": {"keys": eqq.Int4(16, symmetric=False), "values": "nf4"},
    "int3": {"keys": "int3"},
    "q4_k": {"keys": None, "values": eqq.formats.Q4_K()},
    "nvfp4": {"keys": "nvfp4"},
    "nf4, scales quantized": {"keys": eqq.NF4(16, double_quant=True)},
}


def filled(way, size=SIZE):
    """A cache whose rows have as many tokens as `LENGTHS`."""
    keys, values = weights(jr.key(0), (2, BATCH, HEADS, CONTEXT, size)).astype(CACHES[way].get("dtype", jnp.float32))
    cache = eqq.QuantizedCache.empty((BATCH, HEADS, CONTEXT, size), **CACHES[way])
    return jax.jit(lambda cache, *new: cache.append(*new))(cache, keys, values, jnp.asarray(LENGTHS))


def ask(heads=2 * HEADS, size=SIZE, dtype=jnp.float32):
    """Queries of the newest tokens, and their positions."""
    queries = weights(jr.key(1), (BATCH, heads, NEW, size)).astype(dtype)
    return queries, jnp.asarray(LENGTHS[:, None] - NEW + np.arange(NEW), jnp.int32)


@jax.jit
def parts(cache, queries):
    """Scores, their positions, and the values as columns of `weighted_values`, all in float32 for the reference."""
    rows = queries.reshape(BATCH, HEADS, -1, queries.shape[-1])
    places = cache.context + cache.window
    units = jnp.broadcast_to(jnp.eye(places, dtype=rows.dtype), (BATCH, HEADS, places, places))
    return cache.scores(rows), cache.positions, cache.weighted_values(units)


def expected(cache, queries, positions, scale=None, window=0, cap=None):
    """One token at a time, in float64."""
    scores, places, values = (np.asarray(x, np.float64) for x in parts(cache, queries))
    out = np.zeros(scores.shape[:3] + values.shape[-1:])
    for b, h, r in np.ndindex(*scores.shape[:3]):
        at = int(positions[b, r % NEW])
        seen = (places[b, 0] <= at) & ((places[b, 0] > at - window) if window else True)
        s = scores[b, h, r, seen] * (queries.shape[-1] ** -0.5 if scale is None else scale)
        s = s if cap is None else cap * np.tanh(s / cap)
        shares = np.exp(s - s.max(initial=0))
        out[b, h, r] = shares @ values[b, h, seen] / (shares.sum() or 1)
    return out.reshape(queries.shape)


def tolerance(dtype):
    return {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}[jnp.dtype(dtype).name]


OPTIONS = [{}, {"sliding_window": 2}, {"soft_cap": 0.5, "scale": 2.0}, {"sliding_window": 30, "soft_cap": 50.0}]


@pytest.mark.parametrize("way", mark_slow(4, CACHES))
def test_attention_equals_a_softmax_over_the_tokens_that_are_seen(way):
    cache = filled(way)
    queries, positions = ask(dtype=CACHES[way].get("dtype", jnp.float32))
    attend = lambda cache, q, at, **options: cache.attend(q, at, **options)
    for options in OPTIONS:
        found = jax.jit(attend, static_argnames=tuple(options))(cache, queries, positions, **options)
        names = {"sliding_window": "window", "soft_cap": "cap", "scale": "scale"}
        wanted = expected(cache, queries, positions, **{names[n]: value for n, value in options.items()})
        assert found.dtype == queries.dtype and found.shape == queries.shape
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=tolerance(queries.dtype))


@pytest.mark.parametrize("keys", [None, "int8"])
def test_scores_beyond_float16_are_numbers(keys):
    """A key is 25 in each channel, so that its product with a query of the same is 80,000."""
    cache = eqq.QuantizedCache.empty((1, 8, 128), keys, dtype=jnp.float16)
    new = jnp.full((1, 2, 128), 25, jnp.float16).at[:, 1].set(-25)
    cache = cache.append(new, new)
    for copies in (1, 40):  # native, and XLA
        queries = jnp.tile(new[:, :1], (1, copies, 1))
        found = jax.jit(lambda cache, q, at: cache.attend(q, at))(cache, queries, jnp.ones(copies, jnp.int32))
        np.testing.assert_allclose(np.asarray(found, np.float32), 25, rtol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("way", ["float", "int8", "float, window"])
def test_a_token_that_sees_nothing_is_zero(way):
    """As in padding, left or right: neither NaN, nor a gradient that is NaN, nor what empty places hold."""
    cache, (queries, positions) = filled(way), ask()
    attend = jax.jit(lambda cache, q, at: cache.attend(q, at))
    least = np.iinfo(np.int32).min
    at = positions.at[0].set(jnp.array([-1, -2, least], jnp.int32))
    found = attend(cache, queries, at)
    assert not found[0].any() and found[1:].all()
    with jax.debug_nans(True):
        gradient = jax.grad(lambda q: jnp.sum(attend(cache, q, at) ** 2))(queries)
    assert not gradient[0].any() and jnp.isfinite(gradient).all()
    # Beyond the last token there is nothing to see.
    latest = attend(cache, queries, jnp.full_like(at, np.iinfo(np.int32).max))
    np.testing.assert_array_equal(latest, attend(cache, queries, jnp.full_like(at, CONTEXT)))
    wide = jnp.full(at.shape, 2**32 - 1, jnp.uint32)
    np.testing.assert_array_equal(latest, attend(cache, queries, wide))
    everything = jax.jit(lambda cache, q, at: cache.attend(q, at, sliding_window=2**40))
    np.testing.assert_array_equal(found, everything(cache, queries, at))
    # Outside of `jit`, where XLA rounds each operation.
    np.testing.assert_allclose(cache.attend(queries, wide), latest, atol=tolerance(jnp.float32))


@pytest.mark.parametrize("way", ["float", "int8", "float, window"])
def test_rows_without_room_are_nan(way):
    """Not zeros, nor attention to the tokens that had room: natively and by XLA. Other rows are as they were."""
    cache, (queries, positions) = filled(way), ask()
    new = weights(jr.key(2), (BATCH, HEADS, NEW, SIZE))
    count = jnp.array([3, 3, 2])
    cache = jax.jit(lambda cache, *new: cache.append(*new))(cache, new, new, count)  # 80, 6 and 42 of 80
    attend = jax.jit(lambda cache, q, at: cache.attend(q, at, sliding_window=2))
    assert jnp.isfinite(attend(cache, queries, positions)).all()
    over = jax.jit(lambda cache, *new: cache.append(*new))(cache, new, new, count)
    many = jnp.tile(queries, (1, 1, 6, 1))[:, :, :17], jnp.tile(positions, (1, 6))[:, :17]
    for args in ((queries, positions), (queries, positions + 3), many):
        found = attend(over, *args)
        assert jnp.isnan(found[0]).all() and jnp.isfinite(found[1:]).all()
    mixed = over.weighted_values(jnp.zeros((BATCH, HEADS, 1, CONTEXT + over.window)))
    assert jnp.isnan(mixed[0]).all() and jnp.isfinite(mixed[1:]).all()
    back = over.truncate(cache.length)
    np.testing.assert_allclose(attend(back, queries, positions), attend(cache, queries, positions), atol=1e-6)


def test_gradients_are_those_of_scores_and_weighted_values():
    cache = filled("float")
    queries, positions = ask(HEADS)
    at = positions[:, :, None]

    def by_hand(cache, q):
        seen = jnp.broadcast_to((cache.positions <= at)[:, None], (BATCH, HEADS, NEW, CONTEXT))
        scores = jnp.where(seen, cache.scores(q) / SIZE**0.5, -jnp.inf)
        return cache.weighted_values(jax.nn.softmax(scores))

    def gradient(attend):
        loss = lambda floats, q: jnp.sum(attend(eqq.QuantizedCache(*floats, None, cache.length), q) ** 2)
        return jax.jit(jax.grad(loss, (0, 1)))((cache.keys, cache.values), queries)

    ours, theirs = gradient(lambda cache, q: cache.attend(q, positions)), gradient(by_hand)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)


@pytest.mark.parametrize("way", ["float", "int8", "int4 rotated", "int4 per channel"])
def test_a_traced_window_and_vmap(way):
    cache, (queries, positions) = filled(way), ask()
    whole = jax.jit(lambda cache, window: cache.attend(queries, positions, sliding_window=window))
    one = lambda cache, q, at: cache.attend(q, at, sliding_window=5)
    found = jax.jit(jax.vmap(one))(cache, queries, positions)
    np.testing.assert_allclose(found, whole(cache, jnp.int32(5)), atol=1e-6)
    assert not np.allclose(found, whole(cache, jnp.int32(0)), atol=1e-3)


RINGS = {"float": {"keys": None}, "int8": {"keys": "int8"}, "int4 rotated": {"keys": "int4", "rotate": True}}


def roll(way, sinks, counts, window, options, tokens=90):
    """Appends tokens in some ways to a ring and to a whole cache; yields both, with the attention of new tokens."""
    keys, values = weights(jr.key(0), (2, BATCH, HEADS, tokens, SIZE))
    queries = weights(jr.key(1), (BATCH, 2 * HEADS, tokens, SIZE))
    shape = (BATCH, HEADS, tokens, SIZE)
    ring = eqq.QuantizedCache.empty(shape, **RINGS[way], sinks=sinks, **options)
    whole = eqq.QuantizedCache.empty(shape, **RINGS[way])

    @jax.jit
    def step(ring, whole, q, k, v, count):
        found, ring = ring.append_and_attend(q, k, v, count, sliding_window=window)
        positions = whole.length[:, None] + jnp.arange(q.shape[2])[None]
        whole, rows = whole.append(k, v, count), q.reshape(BATCH, HEADS, -1, SIZE)
        at = positions[..., None]
        seen = (whole.positions <= at) & ((whole.positions > at - window) | (whole.positions < sinks))
        scores = whole.scores(rows).reshape(*q.shape[:3], -1) / SIZE**0.5
        shares = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
        return ring, whole, found, whole.weighted_values(shares.reshape(*rows.shape[:3], -1)).reshape(q.shape)

    for new, count in counts:
        at = whole.length[:, None, None, None] + jnp.arange(new).reshape(1, 1, -1, 1)
        now = [jnp.take_along_axis(x, at, axis=2, mode="clip") for x in (queries, keys, values)]
        ring, whole, found, expected = step(ring, whole, *now, jnp.asarray(count))
        text = np.arange(new) < np.asarray(count)[:, None]
        np.testing.assert_allclose(*(np.moveaxis(x, 2, 1)[text] for x in (found, expected)), atol=3e-6)
        yield ring, whole


def assert_equal_codes(ring, whole):
    """The codes and scales of each token that a ring holds are those of the whole cache, to the bit."""
    for row, positions in enumerate(np.asarray(ring.positions)[:, 0]):
        held = positions < whole.context
        for a, b in zip(*map(jax.tree.leaves, ((ring.keys, ring.values), (whole.keys, whole.values))), strict=True):
            np.testing.assert_array_equal(a[row][:, held], b[row][:, positions[held]])


COUNTS = [(9, [9, 2, 0]), (1, [1, 1, 1]), (40, [40, 33, 5]), (1, [1, 1, 0]), (1, [1, 0, 1]), (9, [3, 0, 9])]


@pytest.mark.parametrize("way, sinks, ring", [("float", 0, 8), ("int8", 0, 8), ("int8", 3, 10), ("int4 rotated", 3, 8)])
def test_a_ring_equals_a_whole_cache_with_a_window(way, sinks, ring):
    """Rows of unequal length, one or many tokens that wrap, and more than the ring holds; with and without sinks."""
    for held, whole in roll(way, sinks, COUNTS, 8, {"ring": ring}):
        assert_equal_codes(held, whole)
        count = np.sum(np.asarray(held.positions) < whole.context, axis=(1, 2))
        assert count.tolist() == np.minimum(whole.length, ring + sinks).tolist()
    assert held.context == ring + sinks and held.nbytes < whole.nbytes / 4


@pytest.mark.parametrize("ring", [8, 12])
def test_a_ring_after_tokens_are_taken_back(ring):
    """As many as it holds beyond the window; what more would have seen is NaN, or an error outside of `jit`."""
    for held, whole in roll("int8", 2, COUNTS[:3], 8, {"ring": ring}):
        pass
    back = jnp.array([ring - 8, ring - 8, 1])
    held, whole = (cache.truncate(cache.length - back) for cache in (held, whole))
    assert_equal_codes(held, whole)
    order = jnp.array([1, 1, 0, 2])
    repeated = jax.tree.map(lambda x: x[order], held)
    q, k, v = weights(jr.key(5), (3, BATCH, 2 * HEADS, 1, SIZE))
    add = jax.jit(lambda cache, *new: cache.append_and_attend(*new, sliding_window=8))
    y, held = add(held, q, k[:, :HEADS], v[:, :HEADS])
    again, _ = add(repeated, *(x[order] for x in (q, k[:, :HEADS], v[:, :HEADS])))
    np.testing.assert_array_equal(again, y[order])
    whole = whole.append(k[:, :HEADS], v[:, :HEADS])
    assert_equal_codes(held, whole)
    assert jnp.isfinite(y).all()
    cut = held.truncate(jnp.maximum(held.length - (ring - 5), 0))
    at = cut.length[:, None]
    with pytest.raises(ValueError, match=f"see only tokens that the ring of {ring} still holds.* larger by as many"):
        cut.append(k[:, :HEADS], v[:, :HEADS]).attend(q, at, sliding_window=8)
    lost, _ = add(cut, q, k[:, :HEADS], v[:, :HEADS])
    assert jnp.isnan(lost[0]).all() and jnp.isfinite(lost[2]).all()
    with pytest.raises(ValueError, match=f"`length` must leave tokens that the ring of {ring} still holds"):
        held.truncate(jnp.maximum(held.length - ring, 0))
    fresh = held.truncate(0)
    y, _ = add(fresh, q, k[:, :HEADS], v[:, :HEADS])
    np.testing.assert_allclose(y, jnp.repeat(v[:, :HEADS], 2, axis=1), atol=0.05)


def test_sinks_are_seen_wherever_they_are_kept():
    """Where the whole context fits too; and a sink of a full ring sees no later token."""
    q, k, v = weights(jr.key(5), (3, BATCH, HEADS, 20, SIZE))
    small, ring, whole = (
        eqq.QuantizedCache.empty((BATCH, HEADS, context, SIZE), None, **options)
        for context, options in ((20, {"ring": 18, "sinks": 2}), (30, {"ring": 18, "sinks": 2}), (30, {}))
    )
    newest, one = jnp.full((BATCH, 1), 19), jnp.full((BATCH, 1), 1)
    outputs = [c.append(k, v).attend(q[:, :, -1:], newest, sliding_window=4) for c in (small, ring, whole)]
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-6)
    assert jnp.abs(outputs[0] - outputs[2]).max() > 1e-3
    _, ring = ring.append(k, v).append_and_attend(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    expected = whole.append(k, v).attend(q[:, :, 1:2], one)
    np.testing.assert_allclose(ring.attend(q[:, :, 1:2], one), expected, atol=1e-6)


@pytest.mark.parametrize("way", ["int8", "int4 rotated"])
def test_a_ring_under_vmap_and_on_a_mesh(way):
    for held, _ in roll(way, 1, COUNTS[:3], 8, {"ring": 8}):
        pass
    new = weights(jr.key(5), (3, BATCH, HEADS, 2, SIZE))
    add = jax.jit(lambda cache, *new: cache.append_and_attend(*new))
    y, after = add(held, *new)
    one = lambda cache, *new: cache.append_and_attend(*new)
    mapped, mapped_after = jax.jit(jax.vmap(one))(held, *new)
    np.testing.assert_allclose(mapped, y, atol=1e-6)
    mesh = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("model",)), P(None, "model"))
    divided, divided_after = add(held.with_sharding(mesh), *(jax.device_put(x, mesh) for x in new))
    np.testing.assert_allclose(divided, y, atol=1e-5)
    for other in (mapped_after, divided_after):
        for x, expected in zip(*map(jax.tree.leaves, (other, after)), strict=True):
            np.testing.assert_array_equal(x, expected)


@pytest.mark.skipif(native.refusal() is not None, reason=str(native.refusal()))
def test_the_newest_token_of_a_ring_is_read_by_native_code():
    for held, _ in roll("int8", 1, COUNTS[:2], 8, {"ring": 8}):
        pass
    new = weights(jr.key(5), (3, BATCH, HEADS, 1, SIZE))
    count = lambda window: (
        jax.jit(lambda cache, *new: cache.append_and_attend(*new, sliding_window=window)[0])
        .lower(held, *new)
        .as_text()
        .count(f"@{CALL}")
    )
    assert [count(window) for window in (None, 8, 7)] == [1, 1, 0]


@pytest.mark.usefixtures("without_type_checks")
def test_what_a_ring_cannot_be():
    empty = lambda **options: eqq.QuantizedCache.empty((2, 256, 32), "int4", **options)
    for options, error in (
        ({"ring": 0}, "`ring` must be at least 1.*Got 0 and 0"),
        ({"ring": 8, "sinks": -1}, "Got 8 and -1"),
        ({"sinks": 4}, "Got None and 4"),
        ({"ring": 8, "window": 4}, "each token at once.*`rotate=True`"),
        ({"ring": 8, "per_channel": True}, "each token at once.*`rotate=True`"),
        ({"ring": 8.5}, "`ring` must be a whole number. Got 8.5"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            empty(**options)
    assert empty(ring=252, sinks=4).start is None and empty(ring=251, sinks=4).ring == 251
    new = jnp.ones((2, 5, 32))
    cache = empty(ring=4).append(new, new)
    with pytest.raises(
        ValueError, match="Got some that see tokens from 0 on. Add several tokens by `append_and_attend`"
    ):
        cache.attend(new, jnp.arange(5))


@pytest.mark.parametrize("way", ["float", "int8", "int4 rotated"])
def test_heads_on_a_mesh_stay_apart(way):
    cache, (queries, positions) = filled(way), ask()
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    divided = cache.with_sharding(NamedSharding(mesh, P(None, "model")))
    attend = jax.jit(lambda cache, q: cache.attend(q, positions))
    rows = jax.device_put(queries, NamedSharding(mesh, P(None, "model")))
    compiled = attend.lower(divided, rows).compile()
    assert "all-gather" not in compiled.as_text() and CALL not in compiled.as_text()
    np.testing.assert_allclose(compiled(divided, rows), attend(cache, queries), atol=1e-5)


@pytest.mark.usefixtures("without_type_checks")
def test_wrong_arguments_are_errors():
    cache, (queries, positions) = filled("int8"), ask()
    for q, at, options, message in [
        (queries[:, :3], positions, {}, r"here \(3, a multiple of 2, new, 32\). Got \(3, 3, 3, 32\)"),
        (queries[0], positions, {}, r"Got \(4, 3, 32\)"),
        (queries[..., :16], positions, {}, r"Got \(3, 4, 3, 16\)"),
        (queries[:2], positions, {}, r"Got \(2, 4, 3, 32\)"),
        (queries, positions[:, :2], {}, r"`positions` must be \(\*batch, new\), here \(3, 3\). Got \(3, 2\)"),
        (queries, positions, {"sliding_window": -1}, "`sliding_window` must be positive, or 0 or None for all. Got -1"),
        (queries, positions, {"sliding_window": jnp.int32(-1)}, "positive, or 0 or None for all. Got -1"),
        (
            queries,
            positions,
            {"soft_cap": 0.0},
            "`soft_cap` must be between 1e-30 and 1e30, or None.*Got 0.0",
        ),
        (queries, positions, {"soft_cap": float("inf")}, "Got inf"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.attend(q, at, **options)
    with pytest.raises(TypeError, match="`positions` must be integers. Got float32"):
        cache.attend(queries, positions.astype(jnp.float32))
    with pytest.raises(TypeError, match="`queries` must be floats. Got int32"):
        cache.attend(queries.astype(jnp.int32), positions)
    for name in ("scale", "soft_cap"):
        with pytest.raises(TypeError, match=rf"`{name}` must be a number when .* Got a traced float32\[\]"):
            jax.jit(lambda x, name=name: cache.attend(queries, positions, **{name: x}))(jnp.float32(2))
    for window in (2.5, True, jnp.ones(()), jnp.array([1, 2])):
        with pytest.raises(TypeError, match="`sliding_window` must be a whole number, or None"):
            cache.attend(queries, positions, sliding_window=window)
    with pytest.raises(ValueError, match="`sliding_window` must be positive, or 0 or None for all. Got -1"):
        jax.jit(lambda q: cache.attend(q, positions, sliding_window=-1))(queries)
    assert cache.attend(queries[:, :, :0], positions[:, :0]).shape == (3, 4, 0, 32)
    np.testing.assert_array_equal(cache.attend(queries, positions.tolist()), cache.attend(queries, positions))


@pytest.mark.skipif(native.refusal() is not None, reason=str(native.refusal()))
@pytest.mark.parametrize("way", CACHES)
def test_programs_for_one_cpu_call_native_code_as_xla_computes(way):
    cache, dtype = filled(way), CACHES[way].get("dtype", jnp.float32)
    queries, positions = ask(dtype=dtype)
    attend = jax.jit(lambda cache, q, at: cache.attend(q, at))
    # 3 or 99 new tokens, of which those at negative positions see nothing.
    many = weights(jr.key(2), (BATCH, 2 * HEADS, 99, SIZE)).astype(dtype).at[:, :, -NEW:].set(queries)
    for args in ((queries, positions), (many, jnp.asarray(LENGTHS[:, None] - 99 + np.arange(99), jnp.int32))):
        assert attend.lower(cache, *args).as_text().count(f"@{CALL}") == (0 if cache.window else 1)
        exported = jax.export.export(attend)(cache, *args)
        assert CALL not in exported.mlir_module()  # it may run on a machine without the library
        by_xla, found = (np.asarray(f(cache, *args), np.float32) for f in (exported.call, attend))
        np.testing.assert_allclose(found, by_xla, atol=2 * tolerance(dtype))
