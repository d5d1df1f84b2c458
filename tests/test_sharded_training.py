"""Training a sharded model gives the numbers of one device, and state is where the model is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq

from .helpers import weights


SPECS = {"layers.0.weight": P("model"), "layers.0.bias": P("model"), "layers.1.weight": P(None, "model")}
FORMAT = {"layers.0.weight": "nf4", "layers.1.weight": eqq.NF4(double_quant=True)}


@pytest.fixture(autouse=True)
def _standard():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def model(getkey):
    return eqx.nn.MLP(128, 64, 512, 1, key=getkey())


@pytest.fixture
def batch(getkey):
    x = weights(getkey(), (16, 128))
    return x, jnp.sin(x[:, :64])


def loss(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def steps(model, optim, batch, n=4):
    state, losses, traces = optim.init(eqx.filter(model, eqx.is_array)), [], []

    @eqx.filter_jit
    def step(model, state, batch):
        traces.append(1)
        value, grads = eqq.filter_value_and_grad(loss)(model, batch)
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqq.apply_updates(model, updates), state, value

    for _ in range(n):
        model, state, value = step(model, state, batch)
        losses.append(float(value))
    return model, state, losses, len(traces)


def shard_model(model, batch):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    on = lambda spec: NamedSharding(mesh, spec)
    rules = {**{path: on(spec) for path, spec in SPECS.items()}, "*": on(P())}
    return eqq.quantize_tree(model, FORMAT, shardings=rules), jax.device_put(batch, on(P("data")))


def specs(tree):
    weights_of = lambda x: isinstance(x, eqq.QuantizedArray) or (eqx.is_array(x) and x.ndim == 2)
    found = [x for x in jtu.tree_leaves(tree, is_leaf=eqq.is_quantized) if weights_of(x)]
    return [tuple(x.sharding.spec) for x in found]


@pytest.mark.long
def test_qat(model, batch):
    make = lambda: eqq.float_masters(optax.adamw(3e-3), masters=model)
    _, _, expected, _ = steps(eqq.quantize_tree(model, FORMAT), make(), batch)
    q, batch = shard_model(model, batch)
    trained, state, losses, traces = steps(q, make(), batch)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert traces == 1 and losses[-1] < losses[0]
    here = [("model", None), (None, "model")]
    assert specs(q) == specs(trained) == specs(state.masters) == here
    assert specs(eqx.filter(state.inner_state, eqx.is_array)) == 2 * here  # two moments
    assert eqx.tree_equal(
        eqq.quantize_tree(eqx.combine(state.masters, trained, is_leaf=eqq.is_quantized), FORMAT), trained
    )


@pytest.mark.long
def test_masters_sharded_over_more_axes(model, batch):
    # As in ZeRO: the masters, and so the moments, are divided by both axes of the mesh.
    q, batch = shard_model(model, batch)
    mesh = q.layers[0].weight.sharding.mesh
    further = NamedSharding(mesh, P("model", "data"))
    masters = eqx.tree_at(lambda m: m.layers[0].weight, model, replace_fn=lambda w: jax.device_put(w, further))
    _, _, expected, _ = steps(
        eqq.quantize_tree(model, FORMAT), eqq.float_masters(optax.adam(3e-3), masters=model), batch
    )
    trained, state, losses, _ = steps(q, eqq.float_masters(optax.adam(3e-3), masters=masters), batch)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert tuple(state.masters.layers[0].weight.sharding.spec) == ("model", "data")
    assert specs(trained)[0] == ("model", None)


@pytest.mark.long
def test_qlora(model, batch, getkey):
    key = getkey()
    make = lambda m: optax.masked(optax.adamw(3e-3), eqq.trainable_mask(m))
    alone = eqq.loraify(eqq.quantize_tree(model, FORMAT), 8, key=key)
    _, _, expected, _ = steps(alone, make(alone), batch)
    q, batch = shard_model(model, batch)
    q = eqq.loraify(q, 8, key=key)
    first, second = q.layers
    assert tuple(first.weight.b.sharding.spec) == ("model", None) and first.weight.a.sharding.is_fully_replicated
    assert tuple(second.weight.a.sharding.spec) == (None, "model") and second.weight.b.sharding.is_fully_replicated
    trained, _, losses, _ = steps(q, make(q), batch)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]
    merged = eqq.merge_lora(trained)
    assert specs(merged) == [("model", None), (None, "model")]


@pytest.mark.long
def test_eight_bit_moments(model, batch):
    make = lambda: eqq.float_masters(eqq.quantize_state(optax.adam(3e-3)), masters=model)
    _, _, expected, _ = steps(eqq.quantize_tree(model, FORMAT), make(), batch)
    q, batch = shard_model(model, batch)
    _, state, losses, traces = steps(q, make(), batch)
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert traces == 1
    moments = [x for x in jtu.tree_leaves(state, is_leaf=eqq.is_quantized) if eqq.is_quantized(x)]
    # Blocks are 256 values: where a device would have half of one, the row stays whole.
    assert [tuple(m.sharding.spec) for m in moments] == 2 * [("model", None), (None, None)]


@pytest.mark.long
def test_fake_quantization(model, batch):
    q, batch = shard_model(model, batch)
    mesh = q.layers[0].weight.sharding.mesh
    rules = {path: NamedSharding(mesh, spec) for path, spec in SPECS.items()}
    simulated = eqq.quantize_tree(model, FORMAT, simulate=True, shardings=rules)
    assert simulated.layers[0].weight.master.sharding.spec == P("model", None)
    np.testing.assert_allclose(eqx.filter_jit(loss)(simulated, batch), eqx.filter_jit(loss)(q, batch), rtol=1e-5)
    final = eqq.finalize(simulated)
    assert specs(final) == [("model", None), (None, "model")]
    assert eqx.tree_equal(final.layers[0].weight, q.layers[0].weight)
