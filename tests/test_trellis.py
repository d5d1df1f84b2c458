"""Trellis codes: their values, how good the search is, and that native code finds and multiplies the same."""

import itertools as it

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from rich.progress import Progress

import eqquant as eqq
from eqquant._matmul.kernels import cpu, cpu_int8
from eqquant._native import calls, library
from eqquant._native.weight import Codec, Layout, StoredWeight
from eqquant._numerics import trellis

from .helpers import assert_same, sqnr, weights


BITS = (1, 2, 3, 4)
needs_native = pytest.mark.skipif(library.refusal() is not None, reason="needs native kernels")


def decode_by_hand(packed: np.ndarray, bits: int, length: int) -> list[int]:
    """The values of a packed row by the definition, bit by bit."""
    values, at = [], 0
    while len(values) < length:
        count = min(128, -(-(length - len(values)) // 16) * 16)
        size = count * bits
        stream = [int(packed[at + n // 8]) >> n % 8 & 1 for n in range(size)]
        for n in range(count):
            window = sum(stream[(n * bits + i) % size] << i for i in range(12))
            product = window * 0x3195 % 2**16
            high = product * 0x394D // 2**16
            values.append(sum(number >> shift & 0x3F for number in (product, high) for shift in (0, 8)) - 123)
        at += size // 8
    return values[:length]


@pytest.mark.long
@pytest.mark.parametrize("bits", BITS)
def test_decoding_by_hand(bits):
    packed = np.random.default_rng(bits).integers(0, 256, (3, trellis.packed_length(300, bits)), np.uint8)
    for length in (300, 290, 256, 17, 1):
        row = packed[:, : trellis.packed_length(length, bits)]
        expected = [decode_by_hand(each, bits, length) for each in row]
        np.testing.assert_array_equal(trellis.decode(jnp.asarray(row), bits, length), expected)


@pytest.mark.long
@pytest.mark.parametrize("bits", BITS)
def test_scales_balance_clipping_and_rounding(bits):
    """Of 13 scales the one of least error, which is estimated for normal values that are not clipped."""
    format, rng = eqq.formats.Trellis(bits), np.random.default_rng(bits)
    deviation, error = {1: (43, 512), 2: (37, 99.1), 3: (35, 23.3), 4: (33, 5.45)}[bits]
    for length in (300, 1):
        w = rng.standard_t([[1.5], [2], [3], [99]], (4, length))
        scales = np.geomspace(1, 16, 13) * np.sqrt(np.mean(w**2, axis=-1, keepdims=True)) / deviation
        clipped = np.maximum(np.abs(w)[:, None] - 113 * scales[..., None], 0)
        best = np.argmin(np.sum(clipped**2, axis=-1) + length * error * scales**2, axis=-1)
        for size in (1e-30, 1, 1e36):
            found = format.choose_scale(jnp.float32(w * size)[:, None])[:, 0]
            np.testing.assert_allclose(found, size * scales[np.arange(4), best], rtol=1e-5)
    assert not format.choose_scale(jnp.zeros((1, 1, 9))).any() and format.choose_scale(jnp.ones((1, 1, 0))) == 0
    largest = np.finfo(np.float32).max
    np.testing.assert_allclose(format.choose_scale(jnp.full((1, 1, 9), largest)), largest / (123 * (1 + 2**-7)))
    assert format.codec.lowest == format.levels[0] == -123 and format.levels[-1] == 113


@pytest.mark.long
@pytest.mark.parametrize("bits, least", zip(BITS, (5.3, 11.2, 17.0, 22.8), strict=True))
def test_error_of_normal_weights(bits, least):
    w = weights(jr.key(0), (48, 512))
    q = eqq.quantize(w, eqq.formats.Trellis(bits))
    assert sqnr(w, q.dequantize()) > least
    assert q.nbytes == 48 * (512 * bits // 8 + 2)


@pytest.mark.long
def test_search_finds_the_best_sequence():
    """Of 16 values of one bit each there are 65,536 sequences, so all can be tried.

    The first 11 bits are a guess: the found sequence is the best of those that share them, and a good one of all.
    """
    values = 50 * weights(jr.key(1), (20, 16))
    codes = np.arange(2**16, dtype="<u2")
    sequences = np.asarray(trellis.decode(jnp.asarray(codes.view(np.uint8).reshape(-1, 2)), 1, 16), np.float32)
    errors = np.square(np.asarray(values)[:, None] - sequences).sum(-1)
    found = np.asarray(trellis.encode(values, 1)).view("<u2")[:, 0]
    for own, code in zip(errors, found, strict=True):
        assert own[code] == own[codes & 0x7FF == code & 0x7FF].min()
    assert np.median([(own < own[code]).mean() for own, code in zip(errors, found, strict=True)]) < 0.01


@pytest.mark.long
@pytest.mark.parametrize("bits", BITS)
def test_a_sequence_that_has_codes_is_found(bits):
    packed = np.random.default_rng(bits).integers(0, 256, (4, trellis.packed_length(272, bits)), np.uint8)
    values = trellis.decode(jnp.asarray(packed), bits, 272).astype(jnp.float32)
    np.testing.assert_array_equal(trellis.decode(trellis.encode(values, bits), bits, 272), values)


def find_feedback(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The feedback and the weights of errors with which the search lowers the error of outputs."""
    factor = np.linalg.inv(np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1])
    diagonal = np.diag(factor)
    return (np.triu(factor, 1) / diagonal[:, None]).astype(np.float32), (1 / diagonal**2).astype(np.float32)


def gram_matrix(length: int) -> np.ndarray:
    mix = np.random.default_rng(0).normal(size=(length, length)) / (1 + np.arange(length))[:, None] ** 0.5
    return mix.T @ mix + 0.01 * np.eye(length)


@pytest.mark.long
@pytest.mark.parametrize("length", [40, 128])
def test_feedback_is_what_the_search_minimizes(length):
    """The weighted error with feedback is the error of outputs; without the search's feedback it is larger."""
    gram = gram_matrix(length)
    feedback, worth = find_feedback(gram)
    values = np.asarray(36 * weights(jr.key(2), (8, length)))
    worth = jnp.broadcast_to(worth, values.shape)
    codes = [trellis.encode(jnp.asarray(values), 2, worth, f) for f in (jnp.asarray(feedback), None)]
    decoded = [np.asarray(trellis.decode(each, 2, length)) for each in codes]
    loss = [np.einsum("ni,ij,nj->", values - each, gram, values - each) for each in decoded]
    assert loss[0] < 0.7 * loss[1]


@pytest.mark.long
@pytest.mark.parametrize("bits", BITS)
def test_gptq_is_below_rounding_and_scalars(bits):
    gram, w = jnp.asarray(gram_matrix(300), jnp.float32), weights(jr.key(3), (12, 300))
    loss = lambda q: float(jnp.einsum("ni,ij,nj->", w - q.dequantize(), gram, w - q.dequantize()))
    quantize = lambda format, method: loss(eqq.quantize(w, format, method=method))
    found = quantize(eqq.formats.Trellis(bits), eqq.GPTQ(gram=gram))
    assert found < 0.7 * quantize(eqq.formats.Trellis(bits), eqq.AbsMax())
    if bits > 1:
        scalar = {2: eqq.Int2(128), 3: eqq.Int3(128), 4: eqq.Int4(128)}[bits]
        assert found < 0.7 * quantize(scalar, eqq.GPTQ(gram=gram))


@pytest.mark.long
def test_gptq_of_stacks_and_chunks():
    gram, w = jnp.asarray(gram_matrix(160), jnp.float32), weights(jr.key(4), (2, 6, 160))
    both = jnp.stack([gram, jnp.eye(160)])
    q = eqq.quantize(w, "trellis2", method=eqq.GPTQ(gram=both))
    for n in range(2):
        one = eqq.quantize(w[n], "trellis2", method=eqq.GPTQ(gram=both[n]))
        assert_same(jax.tree.map(lambda a: a[n], q), one)
    assert_same(eqx.filter_jit(eqq.quantize)(w, "trellis2", method=eqq.GPTQ(gram=both)), q)


@pytest.mark.long
def test_columns_without_inputs_count_least():
    """Half of the inputs are zero: the others lose hardly more than without those columns."""
    gram, w = gram_matrix(128), weights(jr.key(8), (16, 128))
    live = np.arange(128) % 2 == 0
    loss = lambda q: float(np.einsum("ni,ij,nj->", error := np.asarray(w - q.dequantize()), masked, error))
    masked = np.where(live[:, None] & live[None, :], gram, 0)
    found = loss(eqq.quantize(w, "trellis2", method=eqq.GPTQ(gram=masked)))
    assert found < 0.5 * loss(eqq.quantize(w, "trellis2", method=eqq.GPTQ(gram=gram)))
    assert sqnr(w[:, ~live], eqq.quantize(w, "trellis2", method=eqq.GPTQ(gram=masked)).dequantize()[:, ~live]) > 0


@pytest.mark.long
@pytest.mark.parametrize("size", [128, "tensor"])
def test_gptq_of_blocks(size):
    """Segments have scales of their own, and a row or a block may be zero."""
    gram, w = jnp.asarray(gram_matrix(300), jnp.float32), weights(jr.key(9), (6, 300))
    w = w * jnp.where(jnp.arange(300) < 128, 1.0, 0.1)[None] * jnp.array([1, 1, 1, 0, 1, 1.0])[:, None]
    w = w.at[4, :128].set(0)
    format = eqq.formats.Trellis(2, block_size=size)
    loss = lambda q: float(jnp.einsum("ni,ij,nj->", w - q.dequantize(), gram, w - q.dequantize()))
    q = eqq.quantize(w, format, method=eqq.GPTQ(gram=gram))
    assert loss(q) < 0.8 * loss(eqq.quantize(w, format))
    if size == 128:
        assert not q.dequantize()[3].any() and not q.dequantize()[4, :128].any()


@pytest.mark.long
@pytest.mark.parametrize("bits", BITS)
def test_an_outlier_does_not_spoil_what_follows(bits):
    """All paths pay the same for it, so later costs must not be lost in its rounding."""
    values = 30 * weights(jr.key(10), (4, 128))
    error = lambda v: np.square(np.asarray(v) - np.asarray(trellis.decode(trellis.encode(v, bits), bits, 128)))[
        :, 64:100
    ]
    assert error(values.at[:, 20].set(1e4)).sum() < 1.3 * error(values).sum()


@pytest.mark.long
def test_vmap_with_feedback():
    values, feedback = (
        36 * weights(jr.key(11), (2, 3, 40)),
        np.stack([find_feedback(g)[0] for g in (gram_matrix(40), np.eye(40))]),
    )
    encode = lambda values, feedback: trellis.encode(values, 2, None, feedback)
    both = jax.vmap(encode)(values, jnp.asarray(feedback))
    for n in range(2):
        np.testing.assert_array_equal(both[n], encode(values[n], jnp.asarray(feedback[n])))
    shared = jax.vmap(encode, in_axes=(0, None))(values, jnp.asarray(feedback[0]))
    np.testing.assert_array_equal(shared[1], encode(values[1], jnp.asarray(feedback[0])))


@needs_native
@pytest.mark.parametrize("bits, length", it.product(BITS, (16, 100, 128, 300)))
def test_native_search_finds_the_same(bits, length):
    """Native code compares fewer bits of the costs, so another sequence of nearly the same worth may be found."""
    values, worth = 36 * weights(jr.key(5), (5, length)), jnp.abs(weights(jr.key(6), (5, length))) + 0.1

    def both(worth, feedback):
        leaves, tree = jax.tree.flatten(trellis.TrellisRows(values, worth, feedback))
        packed = trellis.encode(values, bits, worth, feedback), trellis._by_xla(*leaves, tree=tree, bits=bits)
        return [np.asarray(values) - np.asarray(trellis.decode(each, bits, length)) for each in packed]

    found, expected = (np.sum(worth * np.square(error), axis=-1) for error in both(worth, None))
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    if length <= trellis.SEGMENT:
        gram = gram_matrix(length)
        feedback, own = find_feedback(gram)
        errors = both(jnp.broadcast_to(own / own.max(), values.shape), jnp.asarray(feedback))
        found, expected = (np.einsum("ni,ij,nj->n", error, gram, error) for error in errors)
        np.testing.assert_allclose(found, expected, rtol=0.05)


@needs_native
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [1, 300, 1152])
def test_native_products(bits, length):
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (24, trellis.packed_length(length, bits)), np.uint8)
    weight = StoredWeight(jnp.asarray(packed), jnp.full((24, 1), np.float32(0.5).view(np.uint32)))
    codec = Codec("trellis", (bits, trellis.MULTIPLIERS), lowest=-123)
    layout = Layout(length, 8, length, tuple(map(float, range(-123, 133))), codec=codec)
    w = np.array([decode_by_hand(row, bits, length) for row in packed]) / 2
    np.testing.assert_array_equal(calls.decode(weight, layout, jnp.float32, clip=False), w)
    for m in (1, 20):
        for transpose in (False, True):
            x = rng.integers(-99, 99, (m, w.shape[0 if transpose else 1])).astype(np.float32)
            y = cpu.matmul(jnp.asarray(x), weight, layout, transpose=transpose, precision="default")
            np.testing.assert_allclose(y, x @ (w if transpose else w.T), rtol=1e-6, atol=0.25)
        codes = rng.integers(-127, 128, (m, length)).astype(np.int8)
        y = cpu_int8.matmul(jnp.asarray(codes), weight, layout, x_scale=jnp.ones((m, 1)), dtype=jnp.float32)
        np.testing.assert_array_equal(y, codes.astype(float) @ w.T)


def test_names_and_bad_input():
    assert eqq.quantize(jnp.ones((2, 4)), "trellis3").format == eqq.formats.Trellis(3)
    assert eqq.quantize(jnp.ones((2, 4)), "mlx8").format == eqq.formats.MLX(8)
    for bad, remedy in (("trellis", "trellis2"), ("trellis5", "1, 2, 3 or 4"), ("trellis0", "1, 2, 3 or 4")):
        with pytest.raises(ValueError, match=remedy):
            eqq.quantize(jnp.ones((2, 4)), bad)
    for bits in (0, 5, True):
        with pytest.raises(ValueError, match="`bits` of Trellis must be"):
            eqq.formats.Trellis(bits)
    with pytest.raises(ValueError, match="multiple of 128"):
        eqq.formats.Trellis(2, block_size=64)
    with pytest.raises(ValueError, match="several values"):
        eqq.quantize(jnp.ones((2, 4)), "trellis2", key=jr.key(0))


@pytest.mark.long
def test_a_row_with_nan_leaves_the_others():
    w = weights(jr.key(7), (3, 130)).at[1, 3].set(jnp.nan)
    gram = jnp.eye(130)
    for method in (eqq.AbsMax(), eqq.GPTQ(gram=gram)):
        decoded = eqx.filter_jit(eqq.quantize)(w, "trellis2", method=method).dequantize()
        assert jnp.isnan(decoded[1]).all()
        assert jnp.isfinite(decoded[jnp.array([0, 2])]).all()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rounding", "GPTQ", "GPTQ with gradients", "sequentially"])
def test_progress_within_an_array(kind, monkeypatch, getkey):
    """The bar advances with the rows of each array, and codes are the same."""
    steps, update = [], Progress.update

    def record(bar, task, *, completed, **options):
        update(bar, task, completed=completed, **options)
        steps.append(completed)

    monkeypatch.setattr(Progress, "update", record)
    monkeypatch.setattr("eqquant._array.quantize._CHUNK_SIZE", 25 * 96)
    model = {name: weights(getkey(), (96, 96)) for name in ("up", "down")}
    batches, apply = [jr.normal(getkey(), (128, 96))], lambda m, x: jnp.tanh(x @ m["up"].T) @ m["down"].T

    def quantize(progress: bool):
        if kind == "sequentially":
            return eqq.quantize_sequentially(model, batches, "trellis1", eqq.GPTQ(), apply=apply, progress=progress)
        gradients = kind == "GPTQ with gradients"
        stats = eqq.calibrate.collect_stats(model, batches, apply=apply, gram=True, gradients=gradients)
        method = None if kind == "rounding" else eqq.GPTQ(stats)
        return eqq.quantize_tree(model, "trellis1", method=method, progress=progress)

    silent = quantize(False)
    assert not steps
    shown = quantize(True)
    for name in model:
        assert_same(shown[name], silent[name])
    assert steps == sorted(steps) and steps[-1] == 2
    assert all(sum(n < step < n + 1 for step in steps) >= 2 for n in range(2))
