"""`quantize_sequentially`: against the same steps made by hand with `collect_stats` and `quantize_tree`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant.calibrate import collect_stats
from eqquant.calibrate._sequential import _solve_correction

from .helpers import assert_close, assert_same, outputs, weights


FORMAT = eqq.Int2(16)


class Block(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key):
        self.query, self.key, self.out = (eqx.nn.Linear(16, 16, key=k) for k in jr.split(key, 3))

    def __call__(self, x):
        return x + self.out(jnp.tanh(self.query(x)) * jnp.exp(-jnp.square(self.key(x))))


class Layers(eqx.Module):
    """The same layers in a list or in a stack for `scan`."""

    words: eqx.nn.Embedding
    blocks: Block | list[Block]

    def __init__(self, stacked):
        keys = jr.split(jr.key(1), 2)
        self.words = eqx.nn.Embedding(40, 16, key=jr.key(0))
        self.blocks = eqx.filter_vmap(Block)(keys) if stacked else [Block(key) for key in keys]

    def __call__(self, word):
        x = self.words(word)
        if isinstance(self.blocks, list):
            for block in self.blocks:
                x = block(x)
            return x
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        return jax.lax.scan(lambda x, block: (eqx.combine(block, static)(x), None), x, arrays)[0]


@functools.cache
def batches():
    return [jr.randint(jr.key(n), (24,), 0, 40) for n in range(2)]


def by_hand(model, groups, method):
    for where in groups:
        stats = collect_stats(model, batches(), gram=True, where=where)
        model = eqq.quantize_tree(model, FORMAT, where=where, method=method(stats))
    return model


@pytest.mark.long
def test_a_layer_of_a_stack_gets_the_outputs_of_quantized_layers():
    """The second layer follows from inputs that the quantized first one returns, and half corrects their errors."""
    w, x = weights(jr.key(0), (2, 16, 16)) / 2, weights(jr.key(1), (64, 16))
    layer = lambda x, w: jnp.tanh(x @ w.T)
    apply = lambda m, x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, m["w"])[0]
    q = eqq.quantize_sequentially({"w": w}, [x[:32], x[32:]], FORMAT, eqq.GPTQ(), apply=apply)["w"]
    new = x
    for n in range(2):
        gram, cross = np.asarray(new.T @ new, np.float64) / 64, np.asarray(x.T @ new, np.float64) / 64
        damped = gram + 0.01 * np.mean(np.diag(gram)) * np.eye(16)
        wanted = w[n] + jnp.asarray(0.5 * np.asarray(w[n]) @ np.linalg.solve(damped, (cross - gram).T).T, jnp.float32)
        one = eqq.quantize(wanted, FORMAT, method=eqq.GPTQ(gram=gram))
        assert np.mean(np.abs(q[n] - one.dequantize()) < 1e-5) > 0.95  # one tie changes what follows
        x, new = layer(x, w[n]), layer(new, q[n])


@pytest.fixture(scope="module")
def expected():
    model = eqq.quantize_tree(Layers(False), FORMAT, where=lambda m: m.words)
    groups = [
        lambda m, n=n, names=names: [getattr(m.blocks[n], name).weight for name in names]
        for n in range(2)
        for names in (("query", "key"), ("out",))
    ]
    return by_hand(model, groups, eqq.GPTQ)


@pytest.mark.long
def test_layers_of_a_list(expected):
    done = []
    q = eqq.quantize_sequentially(Layers(False), batches(), FORMAT, eqq.GPTQ(), correction=0, after_each=done.append)
    compare = lambda a, b: np.testing.assert_allclose(a.dequantize(), b.dequantize(), atol=1e-5)
    jax.tree.map(lambda a, b: compare(a, b) if eqq.is_quantized(a) else None, q, expected, is_leaf=eqq.is_quantized)
    # Query and key take one step, and the embedding one before all others.
    count = lambda model: sum(map(eqq.is_quantized, jax.tree.leaves(model, is_leaf=eqq.is_quantized)))
    assert [count(model) for model in done] == [1, 3, 4, 6, 7]
    # From any step on, the rest follows.
    again = eqq.quantize_sequentially(done[2], batches(), FORMAT, eqq.GPTQ(), correction=0)
    jax.tree.map(np.testing.assert_array_equal, again, q)


@pytest.mark.long
def test_layers_of_a_scan(expected):
    q = eqq.quantize_sequentially(Layers(True), batches(), FORMAT, eqq.GPTQ(), correction=0)
    for n in range(2):
        for name in ("query", "key", "out"):
            stacked = getattr(q.blocks, name).weight
            assert stacked.shape == (2, 16, 16)
            np.testing.assert_allclose(stacked[n], getattr(expected.blocks[n], name).weight.dequantize(), atol=1e-5)


@pytest.mark.long
def test_better_than_statistics_of_the_float_model():
    model = eqx.nn.MLP(24, 24, 24, 4, key=jr.key(0))
    x, held_out = weights(jr.key(1), (2, 256, 24))
    wanted = outputs(model, held_out)
    error = lambda q: float(jnp.mean(jnp.square(outputs(q, held_out) - wanted)))
    at_once = eqq.quantize_tree(model, FORMAT, method=eqq.GPTQ(collect_stats(model, x, gram=True)))
    assert error(eqq.quantize_sequentially(model, x, FORMAT, eqq.GPTQ())) < error(at_once)


def test_a_corrected_weight_maps_other_inputs_to_the_same_outputs():
    """The products of both inputs have no symmetry: their transpose would be another correction."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(64, 8)), rng.normal(size=(4, 8))
    y = x @ (np.eye(8) + rng.normal(size=(8, 8)) / 8)
    corrected = _solve_correction(*(np.asarray(a, np.float32) for a in (w, y.T @ y / 64, x.T @ y / 64)), 1.0)
    assert_close(y @ np.asarray(corrected).T, x @ w.T, 0.05)


@pytest.mark.long
def test_corrections_compensate_for_earlier_errors():
    """The first layer loses most of its weights, and the second compensates for it."""
    model = eqx.nn.MLP(24, 24, 24, 1, activation=jnp.tanh, key=jr.key(0))
    x = weights(jr.key(1), (512, 24))
    rules = {"layers.0.weight": eqq.Int2(24), "*": "int8"}
    wanted = outputs(model, x)

    def error(correction):
        done = []
        q = eqq.quantize_sequentially(model, x, rules, eqq.GPTQ(), correction=correction, after_each=done.append)
        # To continue, the float model is the reference.
        again = eqq.quantize_sequentially(done[0], x, rules, eqq.GPTQ(), correction=correction, float_model=model)
        jax.tree.map(np.testing.assert_array_equal, again, q)
        return float(jnp.mean(jnp.square(outputs(q, x) - wanted)))

    none, half, whole = (error(correction) for correction in (0, 0.5, 1))
    assert whole < 0.9 * half < 0.9 * 0.9 * none


@pytest.mark.long
def test_continues_with_quantized_activations():
    model = eqx.nn.MLP(16, 16, 16, 2, key=jr.key(0))
    x = weights(jr.key(1), (32, 16))
    for activations in ("int8", collect_stats(model, x)):
        options, done = {"activations": activations}, []
        q = eqq.quantize_sequentially(model, x, "int4", eqq.GPTQ(), after_each=done.append, **options)
        assert len(done) == 3
        for saved in done[:-1]:
            again = eqq.quantize_sequentially(saved, x, "int4", eqq.GPTQ(), float_model=model, **options)
            jax.tree.map(np.testing.assert_array_equal, again, q)
    with pytest.raises(ValueError, match="before it was quantized. Got one that differs at layers.0.weight"):
        other = eqx.nn.MLP(8, 16, 16, 2, key=jr.key(0))
        eqq.quantize_sequentially(done[0], x, "int4", eqq.GPTQ(), float_model=other)


@pytest.mark.long
def test_shared_arrays_convolutions_and_other_methods():
    model = eqx.nn.MLP(16, 16, 16, 2, key=jr.key(0))
    model = eqx.tree_at(lambda m: m.layers[1].weight, model, model.layers[0].weight)
    x = weights(jr.key(1), (32, 16))
    q = eqq.quantize_sequentially(
        model, [x], {"layers.2.*": eqq.QuantConfig("int8", eqq.MSE()), "*": "int4"}, eqq.GPTQ()
    )
    assert q.layers[0].weight is q.layers[1].weight
    assert q.layers[2].weight.format == eqq.Int8()
    conv = eqx.nn.Conv1d(4, 8, 3, key=jr.key(0))
    images = weights(jr.key(1), (6, 4, 10))
    found = eqq.quantize_sequentially(conv, [images], "int4", eqq.GPTQ())
    expected = eqq.quantize_tree(conv, "int4", method=eqq.GPTQ(collect_stats(conv, [images], gram=True)))
    assert_same(found.weight, expected.weight)
    # Without correction and statistics, the result equals `quantize_tree`.
    plain = eqq.quantize_sequentially(model, [x], "int4", correction=0)
    assert_same(plain.layers[2].weight, eqq.quantize_tree(model, "int4").layers[2].weight)


@pytest.mark.long
def test_errors():
    model, x = eqx.nn.MLP(8, 8, 8, 1, key=jr.key(0)), jnp.ones((4, 8))
    with pytest.raises(ValueError, match="must hold data"):
        eqq.quantize_sequentially(model, [], "int4", eqq.GPTQ())
    with pytest.raises(TypeError, match="iterable of batches"):
        eqq.quantize_sequentially(model, {"x": x}, "int4", eqq.GPTQ())
    first = lambda model, x: jax.vmap(model.layers[0])(x)
    with pytest.warns(UserWarning, match=r"Got none for layers.1.weight \(no batch reached it\)"):
        q = eqq.quantize_sequentially(model, x, "int4", eqq.GPTQ(), apply=first)
    assert_same(q.layers[1].weight, eqq.quantize_tree(model, "int4").layers[1].weight)
    with pytest.raises(ValueError, match="`correction` must be between 0 and 1. Got 2."):
        eqq.quantize_sequentially(model, x, "int4", eqq.GPTQ(), correction=2)
    with pytest.raises(ValueError, match="before it was quantized. Got one that differs at layers.0.weight"):
        other = eqx.nn.MLP(8, 8, 6, 1, key=jr.key(0))
        eqq.quantize_sequentially(model, x, "int4", eqq.GPTQ(), float_model=other)
    with pytest.raises(ValueError, match=r"inputs of layers.0.weight must be finite"):
        eqq.quantize_sequentially(model, x * jnp.nan, "int4", eqq.GPTQ())
