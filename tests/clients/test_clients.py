"""Models of other libraries, unmodified, through everything that a user does with a quantized model."""

import fnmatch
import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqquant as eqq

from .models import CLIENTS


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=[pytest.mark.quick] * c.quick) for n, c in CLIENTS.items()]
)
def client(request):
    chosen = CLIENTS[request.param]
    importlib.import_module(chosen.library)  # not `importorskip`: a library that no longer imports is a failure
    return chosen


@pytest.fixture(scope="module")
def batches(client):
    return [client.batch(jr.key(n)) for n in range(3)]


def assert_near(a, b, tolerance=2e-3):
    """Compares by the norm: the dense model adds in another order."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and np.isfinite(a).all()
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def distance(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def weights(model):
    return [x for x in jax.tree.leaves(model, is_leaf=eqq.is_quantized) if eqq.is_quantized(x)]


def test_forward(client, batches):
    """Plain, compiled and quaxified: the outputs of the dequantized model, which are near those of the model."""
    q, x = client.quantize(), batches[0]
    assert weights(q) and eqq.tree_nbytes(q) < eqq.tree_nbytes(client.make())
    expected = client.call(eqq.dequantize_tree(q), x)
    if client.plain:
        assert_near(client.call(q, x), expected)
    assert_near(eqx.filter_jit(client.packed)(q, x), expected)
    assert 1e-6 < distance(expected, client.call(client.make(), x)) < 0.5


def test_explain(client, batches):
    """`explain` names each weight, and `no_dense` agrees with it."""
    q, x = client.quantize(), batches[0]
    report = eqq.explain(client.packed, q, x)
    assert sum(w.format is not None for w in report.weights) == len(weights(q))
    named = {w.path: [p for p in client.decoded if fnmatch.fnmatch(w.path, p)] for w in report.weights}
    if not client.hidden:
        assert {w.path for w in report.decoded} == {path for path, patterns in named.items() if patterns}
    assert {pattern for patterns in named.values() for pattern in patterns} == set(client.decoded)
    if client.decoded:
        with pytest.raises(RuntimeError, match="no whole weight may be decoded"), eqq.no_dense(q):
            eqx.filter_eval_shape(client.packed, q, x)
    else:
        with eqq.no_dense(q):
            eqx.filter_eval_shape(client.packed, q, x)


def train(client, q, x, target, optimizer, steps=6):
    def loss(q, x):
        return jnp.mean(jnp.square(client.packed(q, x) - target))

    @eqx.filter_jit
    def step(q, state, x):
        value, grads = eqq.filter_value_and_grad(loss)(q, x)
        updates, state = optimizer.update(grads, state, q)
        return eqq.apply_updates(q, updates), state, value

    state, values = optimizer.init(q), []
    for _ in range(steps):
        q, state, value = step(q, state, x)
        values.append(float(value))
    return q, values


def test_qat(client, batches):
    """Quantization-aware training lowers the distance from the model, and the codes stay packed."""
    model, x = client.make(), batches[0]
    q = client.quantize()
    trained, values = train(client, q, x, client.call(model, x), eqq.float_masters(optax.adam(1e-4), masters=model))
    assert jax.tree.structure(trained) == jax.tree.structure(q)
    assert np.isfinite(values).all() and min(values[1:]) < values[0]


@pytest.mark.long
def test_qlora(client, batches):
    model, x = client.make(), batches[0]
    q = eqq.loraify(client.quantize(), rank=4, key=jr.key(7))
    target = client.call(model, x)
    assert_near(client.packed(q, x), client.packed(client.quantize(), x))
    optimizer = eqq.train_only(optax.adam(1e-3), eqq.trainable_mask(q))
    trained, values = train(client, q, x, target, optimizer)
    assert np.isfinite(values).all() and min(values[1:]) < values[0]
    merged = eqq.merge_lora(trained, dense=True)
    assert_near(client.packed(merged, x), client.packed(trained, x), 1e-2)


@pytest.mark.long
def test_files(client, batches, tmp_path):
    q, x = client.quantize(), batches[0]
    eqq.save(tmp_path / "model.safetensors", q)
    loaded = eqq.load(tmp_path / "model.safetensors", client.make())
    assert [w.format for w in weights(loaded)] == [w.format for w in weights(q)]
    np.testing.assert_array_equal(client.packed(loaded, x), client.packed(q, x))


def test_activations(client, batches):
    """Products of codes with codes: near, and not equal to, those of weights alone."""
    x = batches[0]
    q, both = (eqq.quantize_tree(client.make(), "int8", axis=client.axis, activations=a) for a in (None, "int8"))
    outputs = client.packed(q, x), client.packed(both, x)
    assert 1e-6 < distance(outputs[1], outputs[0]) < 0.3


def test_statistics(client, batches):
    """GPTQ finds the inputs of the products however they are written, and is nearer to the model than rounding."""
    model, (*calibration, x) = client.make(), batches
    stats = eqq.calibrate.collect_stats(model, calibration, apply=client.call, gram=True)
    expected = client.call(model, x)
    rounded, gptq = (
        eqq.quantize_tree(model, "int4", axis=client.axis, method=m) for m in (eqq.AbsMax(), eqq.GPTQ(stats))
    )
    assert len(weights(gptq)) >= len(weights(rounded)) and len(stats) >= len(weights(rounded)) // 2
    assert distance(client.packed(gptq, x), expected) < 1.2 * distance(client.packed(rounded, x), expected)


@pytest.mark.long
def test_vmap(client, batches):
    """An ensemble: `vmap` over models, as over arrays."""
    q, x = client.quantize(), batches[0]
    arrays, rest = eqx.partition(q, eqx.is_array)
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), arrays)
    outputs = jax.vmap(lambda arrays: client.packed(eqx.combine(arrays, rest), x))(stack)
    expected = client.packed(q, x)
    assert_near(outputs[0], expected)
    assert_near(outputs[1], expected)


@pytest.mark.long
def test_orbax(client, batches, tmp_path):
    import orbax.checkpoint as ocp

    q = client.quantize()
    arrays, rest = eqx.partition(q, eqx.is_array)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", arrays)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", jax.eval_shape(lambda: arrays))
    assert eqx.tree_equal(restored, arrays)
    np.testing.assert_array_equal(client.packed(eqx.combine(restored, rest), batches[0]), client.packed(q, batches[0]))
