"""The cache of keys and values: appended in any way it holds the same, and attention reads it packed."""

import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jaxtyping
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq

from .helpers import equations, mark_slow, weights


HEADS, CONTEXT, SIZE = 2, 160, 32
WAYS = {
    "float": {"keys": None},
    "float, window": {"keys": None, "window": 16},
    "int8": {"keys": "int8"},
    "int4": {"keys": "int4"},
    "int4 rotated": {"keys": "int4", "rotate": True},
    "int4 per channel": {"keys": "int4", "per_channel": True, "window": 128},
    "int8 per channel": {"keys": eqq.Int8(32), "values": "nf4", "per_channel": True},
    "affine": {"keys": eqq.Int4(symmetric=False), "per_channel": True, "window": 128},
    "fp8": {"keys": "fp8", "window": 32},
    "nf4, scales quantized": {"keys": eqq.NF4(16, double_quant=True)},
    "nvfp4": {"keys": "nvfp4"},
    "int3": {"keys": "int3", "window": 16},
}


def data(*batch, tokens=CONTEXT):
    """Keys of which one number is much larger than the others, as in many models; and values."""
    keys, values = weights(jr.key(0), (2, *batch, HEADS, tokens, SIZE))
    return keys.at[..., 3].add(16), values


@eqx.filter_jit
def append(cache, keys, values, count=None):
    return cache.append(keys, values, count)


def attend(cache, queries):
    scores = cache.scores(queries) / SIZE**0.5
    seen = jnp.expand_dims(cache.positions < CONTEXT, -3)  # for all heads
    return cache.weighted_values(jax.nn.softmax(jnp.where(jnp.broadcast_to(seen, scores.shape), scores, -jnp.inf)))


@pytest.mark.long
@pytest.mark.parametrize("way", mark_slow(3, WAYS))
def test_appending_step_by_step_equals_appending_at_once(way):
    keys, values = data(2)
    empty = eqq.QuantizedCache.empty((2, HEADS, CONTEXT, SIZE), **WAYS[way])
    lengths = jnp.array([150, 70])
    once = append(empty, keys[:, :, :156], values[:, :, :156], lengths)  # the rest is padding
    cache = append(empty, keys[:, :, :64], values[:, :, :64], jnp.array([64, 60]))

    def step(cache, _):
        now = lambda x: jnp.take_along_axis(x, cache.length[:, None, None, None], axis=2)
        return cache.append(now(keys), now(values), (cache.length < lengths).astype(int)), None

    cache, _ = jax.lax.scan(step, cache, length=86)
    assert cache.length.tolist() == once.length.tolist() == lengths.tolist()
    queries = weights(jr.key(1), (2, HEADS, 3, SIZE))
    np.testing.assert_array_equal(attend(cache, queries), attend(once, queries))
    # The packed codes equal `quantize` of all tokens together.
    whole = 70 // cache.window * cache.window if cache.window else 70
    for stored, x in ((cache.keys, keys), (cache.values, values)):
        if eqq.is_quantized(stored) and stored.format != eqq.NVFP4() and whole and not cache.rotated:
            expected = eqq.quantize(x[1, :, :whole], stored.format, axis=stored.axis)
            np.testing.assert_array_equal(stored[1, :, :whole], expected.dequantize())


@pytest.mark.long
def test_sequences_of_a_batch_do_not_change_each_other():
    """Each grows at its own pace, and fills windows at other steps than the others. Each token is at its position."""
    keys, values = data(3, tokens=60)
    steps = ([16, 5, 0], [3, 16, 2], [0, 16, 16], [13, 1, 16])
    channels = {"keys": eqq.Int8(16), "values": "int4", "per_channel": True}
    for way in ({"keys": "int8"}, {"keys": "int8", "window": 16}, {"keys": None, "window": 8}, channels):
        cache = eqq.QuantizedCache.empty((3, HEADS, 64, SIZE), **way)
        alone = [eqq.QuantizedCache.empty((HEADS, 64, SIZE), **way) for _ in range(3)]
        for counts in steps:
            now = lambda x, n, cache=cache: jax.lax.dynamic_slice_in_dim(x[n], int(cache.length[n]), 16, axis=1)
            new = [[now(x, n) for n in range(3)] for x in (keys, values)]
            cache = append(cache, *map(jnp.stack, new), jnp.asarray(counts))
            alone = [append(c, *(x[n] for x in new), jnp.asarray(counts[n])) for n, c in enumerate(alone)]
        assert cache.length.tolist() == [32, 38, 34] and cache.window == way.get("window", 16 if way is channels else 0)
        if way is channels:
            assert cache.values.format == eqq.Int4()
        units = jnp.broadcast_to(jnp.eye(SIZE), (3, HEADS, SIZE, SIZE))
        scores, tokens = np.asarray(cache.scores(units)), np.arange(38)
        at = np.asarray(cache.positions) == tokens[:, None]  # the place of each token
        mixed = np.asarray(
            cache.weighted_values(jnp.broadcast_to(at[:, None], (3, HEADS, *at.shape[1:])).astype(jnp.float32))
        )
        for n, one in enumerate(alone):
            length = cache.length[n]
            held = ((scores[n] @ at[n].T).swapaxes(1, 2), keys, 127), (mixed[n], values, 7 if way is channels else 127)
            for found, x, levels in held:
                x = np.asarray(x)[n, :, :length]
                amax = np.broadcast_to(np.abs(x).max(-1, keepdims=True), x.shape)
                if way is channels:  # of 16 tokens for keys; the newest tokens are as they were
                    whole = length // 16 * 16
                    groups = np.abs(x[:, :whole]).reshape(HEADS, -1, 16, SIZE).max(2)
                    amax = np.repeat(groups, 16, 1) if levels == 127 else amax[:, :whole]
                    amax = np.concatenate([amax, 0 * x[:, whole:]], 1)
                assert (np.abs(found[:, :length] - x) <= 1.001 * amax / levels / 2 + 1e-6).all()
            seen = np.asarray(one.positions[0] < one.length)
            np.testing.assert_array_equal(cache.positions[n], one.positions)
            expected = one.scores(units[n])
            np.testing.assert_allclose(scores[n][..., seen], expected[..., seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["float, window", "int8", "affine", "int3"])
def test_truncate_keeps_what_the_first_tokens_were(way):
    """Within the window, at its edge, in an earlier one, to nothing, and in a row that is shorter already."""
    keys, values = data(5)
    cache = eqq.QuantizedCache.empty((5, HEADS, CONTEXT, SIZE), **WAYS[way])
    cache = append(cache, keys, values, jnp.array([158, 158, 158, 158, 3]))
    kept = jnp.array([150, 128, 37, 0, 40])
    cut = jax.jit(lambda cache, length: cache.truncate(length))(cache, kept)
    assert cut.length.tolist() == [150, 128, 37, 0, 3]
    queries, last = weights(jr.key(1), (5, HEADS, 1, SIZE)), cut.length[:, None] - 1
    see = jax.jit(lambda cache, at: cache.attend(queries, at))
    np.testing.assert_allclose(see(cut, last), see(cache, last), atol=1e-6)
    # And equal to a cache that never held more, where floats are not lost.
    fresh = append(eqq.QuantizedCache.empty((5, HEADS, CONTEXT, SIZE), **WAYS[way]), keys, values, cut.length)
    lossy = 2 if cut.window and way != "float, window" else None
    equal = np.array([n for n in range(5) if n != lossy])
    np.testing.assert_allclose(see(cut, last)[equal], see(fresh, last)[equal], atol=1e-6)
    # What follows takes the places of what was cut off, and fills windows that hold tokens from before.
    at = cut.length[:, None, None, None] + jnp.arange(CONTEXT).reshape(1, 1, -1, 1)
    rest = [jnp.take_along_axis(x, at, axis=2) for x in (keys, values)]
    again, whole = (append(c, *rest, CONTEXT - cut.length) for c in (cut, fresh))
    found, wanted = (see(c, jnp.full((5, 1), CONTEXT - 1)) for c in (again, whole))
    np.testing.assert_allclose(found[equal], wanted[equal], atol=1e-6)
    np.testing.assert_allclose(found, wanted, atol=0.1)


@pytest.mark.usefixtures("without_type_checks")
def test_truncate_is_of_whole_numbers():
    cache = eqq.QuantizedCache.empty((3, HEADS, 8, SIZE), "int8").append(*(jnp.ones((3, HEADS, 5, SIZE)),) * 2)
    assert cache.truncate(2).length.tolist() == [2] * 3
    assert jax.jit(lambda cache, n: cache.truncate(n))(cache, jnp.array([-1, 3, 9])).length.tolist() == [0, 3, 5]
    for length, error in (
        (-1, r"`length` must not be negative. Got -1"),
        (jnp.array([1, 2]), r"one for each row of \(3,\). Got \(2,\)"),
        (2.5, "`length` must be whole numbers. Got float32"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            cache.truncate(length)


@pytest.mark.long
def test_attention_equals_dense_attention_of_dequantized_keys_and_values():
    keys, values = data()
    cache = append(eqq.QuantizedCache.empty((HEADS, CONTEXT, SIZE), "int8"), keys, values)
    queries = weights(jr.key(1), (HEADS, 3, SIZE))
    held = [eqq.quantize(x, "int8").dequantize() for x in (keys, values)]
    shares = jax.nn.softmax(queries @ held[0].mT / SIZE**0.5)
    np.testing.assert_allclose(attend(cache, queries), shares @ held[1], atol=2e-6)


@pytest.mark.long
def test_rotation_and_scales_per_channel_reduce_errors_of_keys():
    keys, values = data(tokens=128)
    queries = weights(jr.key(1), (HEADS, 3, SIZE))

    def error(**options):
        cache = append(eqq.QuantizedCache.empty((HEADS, 128, SIZE), "int4", **options), keys, values)
        return float(jnp.abs(cache.scores(queries)[..., :128] - queries @ keys.mT).mean())

    plain = error()
    assert error(per_channel=True, window=128) < 0.4 * plain and error(rotate=True) < 0.4 * plain


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256, 576])
def test_rotation_changes_no_float(size):
    """Neither scores, nor sums of values, nor attention of queries that share heads, beyond rounding."""
    keys, values = weights(jr.key(0), (2, 1, HEADS, 6, size))
    queries, positions = weights(jr.key(1), (1, 2 * HEADS, 2, size)), jnp.array([[2, 5]])

    @jax.jit
    def results(cache):
        cache = cache.append(keys[:, :, :4], values[:, :, :4]).append(keys[:, :, 4:], values[:, :, 4:])
        scores = cache.scores(queries[:, :HEADS])
        return scores, cache.weighted_values(scores), cache.attend(queries, positions), cache.keys

    make = lambda rotate: eqq.QuantizedCache.empty((1, HEADS, 6, size), None, rotate=rotate)
    (*found, rotated), (*expected, held) = results(make(True)), results(make(False))
    assert jnp.abs(rotated - held).max() > 0.1
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * jnp.abs(y).max())


def test_a_rotated_cache_in_a_file(tmp_path):
    keys, values = data(tokens=5)
    empty = eqq.QuantizedCache.empty((HEADS, 8, SIZE), "int4", rotate=True)
    eqq.save(tmp_path / "cache.safetensors", append(empty, keys, values))
    loaded = eqq.load(tmp_path / "cache.safetensors", empty)
    np.testing.assert_allclose(loaded.scores(jnp.ones((HEADS, 1, SIZE)))[..., :5], keys.sum(-1)[:, None], rtol=0.2)


def test_nbytes_equals_codes_and_scales():
    """As computed: a code for each number, a float32 for each row, and one length."""
    assert eqq.QuantizedCache.empty((3, 8, 512, 64), "int8").nbytes == 2 * 3 * 8 * 512 * (64 + 4) + 3 * 4
    assert eqq.QuantizedCache.empty((8, 512, 64), "nf4").nbytes == 2 * 8 * 512 * (32 + 4) + 4
    windowed = eqq.QuantizedCache.empty((8, 500, 64), "int4", per_channel=True)
    assert windowed.context == 512 and windowed.window == 128
    # A scale for 64 tokens of a channel, and one for the 64 values of a token, in turn.
    assert windowed.nbytes == 2 * 8 * 512 * (32 + 4) + 2 * 8 * 128 * 64 * 4 + 4
    assert eqq.QuantizedCache.empty((8, 64, 64), "int4", rotate=True).nbytes == 2 * 8 * 64 * (32 + 4) + 4


def test_a_window_never_makes_a_cache_larger_than_floats():
    for context, dtype, floats in ((64, "float32", True), (163, "float32", True), (164, "float32", False)) + (
        (199, "bfloat16", True),
        (200, "bfloat16", False),
    ):
        shape = (3, 8, context, 64)
        cache = eqq.QuantizedCache.empty(shape, "int4", per_channel=True, dtype=dtype)
        plain = eqq.QuantizedCache.empty(shape, None, dtype=dtype)
        assert cache.nbytes <= plain.nbytes and eqq.is_quantized(cache.keys) != floats
        assert not floats or (cache.context, cache.window) == (context, 0)


@pytest.mark.parametrize("way", ["float", "int8", "int4 rotated", "int4 per channel"])
def test_a_step_makes_no_copy(way):
    """Neither keys nor values are copied: not dense, not to quantize them again, and not by XLA."""
    context = 4096
    cache = eqx.filter_eval_shape(lambda: eqq.QuantizedCache.empty((HEADS, context, SIZE), **WAYS[way]))
    x = jax.ShapeDtypeStruct((HEADS, 1, SIZE), jnp.float32)

    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache, attend(cache, q)

    floats = [
        v.aval.shape
        for eqn in equations(step, cache, x, x, x)
        for v in eqn.outvars
        if jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.size >= HEADS * context * SIZE
    ]
    assert floats == [] or way == "float"

    def in_one_call(cache, q, k, v):
        cache = cache.append(k, v)
        return cache, cache.attend(q, cache.length[None] - 1)

    for compute in (step, in_one_call):
        compiled = jax.jit(compute, donate_argnums=0).lower(cache, x, x, x).compile()
        assert compiled.memory_analysis().alias_size_in_bytes == eqq.tree_nbytes(cache)  # all of it is updated in place
        copied = re.findall(r"(\w+\[[\d,]+\])\S* copy\(", compiled.as_text())
        # What a slow product decodes, some rows at a time, is as large, but of floats.
        kind = "f32" if way == "float" else "u8"
        size = lambda shape: math.prod(map(int, re.findall(r"(?<=[\[,])\d+", shape)))
        copied = [x for x in copied if x.startswith(f"{kind}[") and size(x) >= HEADS * context * SIZE // 2]
        assert copied == []


@pytest.mark.parametrize("way", ["float", "int8"])
def test_only_programs_for_cpu_hold_a_loop(way):
    """It keeps XLA for CPU from copying; elsewhere it would only cost time."""
    keys, values = data(tokens=1)
    cache = eqq.QuantizedCache.empty((HEADS, CONTEXT, SIZE), **WAYS[way])
    traced = jax.jit(lambda cache, k, v: cache.append(k, v)).trace(cache, keys, values)
    loops = {on: "stablehlo.while" in traced.lower(lowering_platforms=(on,)).as_text() for on in ("cpu", "cuda", "tpu")}
    assert loops == {"cpu": True, "cuda": False, "tpu": False}


def test_gradients_pass_through_a_float_cache():
    keys, values = data()
    queries = weights(jr.key(1), (HEADS, 3, SIZE))

    def loss(append, keys, values):
        cache = append(eqq.QuantizedCache.empty((HEADS, CONTEXT, SIZE), None), keys, values)
        return jnp.sum(attend(cache, queries) ** 2)

    plain = lambda cache, keys, values: eqq.QuantizedCache(keys, values, None, cache.length + CONTEXT)
    expected = eqx.filter_jit(jax.grad(loss, (1, 2)))(plain, keys, values)
    for found, wanted in zip(
        jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)(append, keys, values), expected, strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("way", ["float", "float, window", "int8"])
def test_an_empty_cache_can_be_donated(way):
    cache = eqq.QuantizedCache.empty((HEADS, 32, SIZE), **WAYS[way])
    cache = jax.jit(lambda cache: jax.tree.map(lambda x: x + 1, cache), donate_argnums=0)(cache)
    assert cache.length == 1


@pytest.mark.long
@pytest.mark.parametrize("way", ["int8", "int4 rotated", "int4 per channel"])
def test_vmap(way):
    keys, values = data(3)
    whole = append(eqq.QuantizedCache.empty((3, HEADS, CONTEXT, SIZE), **WAYS[way]), keys, values)
    one = lambda k, v: eqq.QuantizedCache.empty((HEADS, CONTEXT, SIZE), **WAYS[way]).append(k, v)
    mapped = jax.jit(jax.vmap(one))(keys, values)
    queries = weights(jr.key(1), (3, HEADS, 3, SIZE))
    assert mapped.length.tolist() == [CONTEXT] * 3
    np.testing.assert_allclose(jax.jit(jax.vmap(attend))(mapped, queries), attend(whole, queries), atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("way", ["int8", "int4 rotated", "int4 per channel"])
def test_sharded_heads(way):
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    keys, values = data()
    queries = weights(jr.key(1), (HEADS, 3, SIZE))
    cache = append(eqq.QuantizedCache.empty((HEADS, CONTEXT, SIZE), **WAYS[way]), keys, values)
    divided = eqq.QuantizedCache.empty((HEADS, CONTEXT, SIZE), **WAYS[way])
    divided = divided.with_sharding(NamedSharding(mesh, P("model")))
    divided = append(divided, keys, values)
    for leaf in jax.tree_util.tree_leaves((divided.keys, divided.values)):
        assert leaf.sharding.spec[0] == "model"
    compiled = jax.jit(attend).lower(divided, queries).compile()
    assert "all-gather" not in compiled.as_text() and "all-reduce" not in compiled.as_text()
    np.testing.assert_allclose(compiled(divided, queries), attend(cache, queries), atol=1e-6)


@pytest.mark.long
@pytest.mark.usefixtures("without_type_checks")
def test_arrays_of_wrong_shapes_are_errors():
    empty = eqq.QuantizedCache.empty
    for arguments, options, message in [
        ((2, 0, 8), {"keys": "int8"}, r"at least one. Got \(2, 0, 8\)"),
        ((4, 8), {"keys": "int8"}, r"\(\*batch, heads, context, size\).*Got \(4, 8\)"),
        ((2, 128, 8), {"keys": "int8", "per_channel": True}, "with blocks.*Got Int8"),
        ((2, 128, 8), {"keys": None, "per_channel": True}, "with blocks.*Got None"),
        ((2, 128, 8), {"keys": "int4", "per_channel": True, "window": 64}, "multiple of 128.*Got 64"),
        ((2, 128, 8), {"keys": "int8", "window": -1}, "negative. Got -1"),
        ((2, 128, 8), {"keys": "int7"}, "must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            empty(arguments, **options)
    for arguments, options, message in [
        ((2, 8, 64.0), {"keys": "int8"}, r"whole numbers of at least one. Got \(2, 8, 64.0\)"),
        ((2, True, 64), {"keys": "int8"}, r"Got \(2, True, 64\)"),
        (64, {"keys": "int8"}, "`shape` must be .* Got 64"),
        ((2, 8, 64), {"keys": "int8", "window": 2.5}, "`window` must be a whole number. Got 2.5"),
        ((2, 8, 64), {"keys": "int8", "window": True}, "Got True"),
        ((2, 8, 64), {"keys": None, "dtype": "int32"}, "`dtype` must be of floats. Got int32"),
        ((2, 8, 64), {"keys": 8}, "must be a format or the name of one. Got 8"),
        ((2, 8, 64), {"keys": "int8", "values": eqq.NF4}, "the class NF4"),
    ]:
        with pytest.raises(TypeError, match=message):
            empty(arguments, **options)
    assert empty([2, np.int64(8), 64], "int8").context == 8
    cache, (keys, values) = empty((HEADS, 8, SIZE), "int8"), data(tokens=9)
    with pytest.raises(ValueError, match="room for 8 tokens. Got 9"):
        cache.append(keys, values)
    with pytest.raises(ValueError, match=r"here \(2, 9, 32\). Got \(3, 9, 32\)"):
        cache.append(*(jnp.ones((3, 9, SIZE)) for _ in range(2)))
    for name, last, size in (("queries", "size", SIZE), ("probabilities", "places", 8)):
        call = cache.scores if name == "queries" else cache.weighted_values
        for shape, more in [
            ((3 * HEADS, 5, size), rf"Heads that share keys.*: write `{name}.reshape\(2, 15, {size}\)`"),
            ((HEADS + 1, 5, size), "$"),
            ((HEADS, 5, size + 1), "$"),
            ((), "$"),
        ]:
            here = rf"`{name}` must be \(\*batch, heads, rows, {last}\), here \(2, rows, {size}\)"
            with pytest.raises(ValueError, match=rf"{here}. Got {re.escape(str(shape))}. ?{more}"):
                call(jnp.ones(shape))
        assert call(jnp.ones((4, 1, 5, size))).shape[:-1] == (4, HEADS, 5)
    # Inside `jit` the count is unknown, so earlier tokens are kept.
    full = append(cache, keys[:, :8], values[:, :8])
    over = append(full, keys[:, 8:], values[:, 8:])
    np.testing.assert_array_equal(over.keys.dequantize(), full.keys.dequantize())
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    with pytest.raises(ValueError, match="batch and heads only"):
        cache.with_sharding(NamedSharding(mesh, P(None, "model")))


@pytest.mark.long
@pytest.mark.parametrize("format", [eqq.Int4(32, symmetric=False), eqq.Int2(64, symmetric=False)])
def test_zero_points_of_channels_belong_to_their_groups(format):
    """Zero points are packed, and several groups share a byte."""
    keys = 3 + weights(jr.key(0), (HEADS, 512, 4))
    cache = eqq.QuantizedCache.empty((HEADS, 512, 4), format, "int8", per_channel=True)
    for start in range(0, 512, cache.window):
        new = keys[:, start : start + cache.window]
        cache = append(cache, new, new)
    expected = eqq.quantize(keys, format, axis=-2)
    np.testing.assert_array_equal(cache.keys.zero_point, expected.zero_point)
    np.testing.assert_array_equal(cache.keys.dequantize(), expected.dequantize())


@pytest.mark.parametrize("window", [0, 4])
def test_nan_in_padding_is_masked(window):
    cache = eqq.QuantizedCache.empty((2, 1, 8, 4), "int8", window=window)
    new = jnp.ones((2, 1, 3, 4)).at[:, :, 1:].set(jnp.nan)
    cache = append(cache, new, new, jnp.array([1, 1]))
    shares = jnp.where(jnp.expand_dims(cache.positions, -3) <= 0, 1.0, 0.0)
    np.testing.assert_allclose(cache.weighted_values(shares), 1, rtol=0.01)


def test_count_limits_the_appended_tokens():
    cache, new = eqq.QuantizedCache.empty((1, 8, 4), "int8"), jnp.ones((1, 3, 4))
    for count in (-1, 4):
        with pytest.raises(ValueError, match="`count` must be at least 0 and at most the 3"):
            cache.append(new, new, count)
        assert append(cache, new, new, jnp.asarray(count)).length == min(max(count, 0), 3)
    with pytest.raises((TypeError, jaxtyping.TypeCheckError)):
        cache.append(new, new, 1.5)
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=r"count"):
        cache.append(new, new, jnp.ones(2, jnp.int32))
