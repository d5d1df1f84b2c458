"""Quantization-aware training with float masters in the optimizer's state."""

import io
import itertools as it

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqquant as eqq
from eqquant._training.masters import _zero_update, FloatMastersState

from .helpers import arrays, assert_close, assert_same, FORMATS, Halved, KINDS, loss, mlp, temp_bytes, weights


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        yield


def assert_model_is_quantize_masters(model, state, format):
    quantized = 0
    for layer, master in zip(model.layers, state.masters.layers, strict=True):
        if eqq.is_quantized(layer.weight):
            assert_same(layer.weight, eqq.quantize(master.weight, format, axis=layer.weight.axis))
            quantized += 1
        else:
            assert master.weight is None
    assert quantized > 0


def train(model, optim, x, steps, state=None, static=None):
    """The trained model, the state, the losses, and how often the step was traced."""
    state = optim.init(model) if state is None else state
    traces = 0

    @eqx.filter_jit
    def step(model, state):
        nonlocal traces
        traces += 1
        whole = lambda m: m if static is None else eqx.combine(m, static)
        value, grads = eqq.filter_value_and_grad(lambda m: loss(whole(m), x))(model)
        updates, state = optim.update(grads, state, model)
        return eqq.apply_updates(model, updates), state, value

    losses = []
    for _ in range(steps):
        model, state, value = step(model, state)
        losses.append(float(value))
    return model, state, losses, traces


@pytest.mark.parametrize("name", KINDS)
def test_the_model_is_quantize_of_its_masters(name, getkey):
    format, float_model, x = FORMATS[name].format, mlp(getkey()), weights(getkey(), (32, 20))
    model = eqq.quantize_tree(float_model, format)
    optim = eqq.float_masters(optax.adamw(3e-3), masters=float_model)
    trained, state, losses, traces = train(model, optim, x, 20)
    assert traces == 1
    assert_model_is_quantize_masters(trained, state, format)
    assert jtu.tree_structure(trained) == jtu.tree_structure(model)
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_no_drift_in_a_thousand_steps(getkey):
    format, x = eqq.NF4(double_quant=True), weights(getkey(), (32, 20))
    model = eqq.quantize_tree(mlp(getkey()), format)
    optim = eqq.float_masters(optax.adamw(1e-3))
    model, state, losses, traces = train(model, optim, x, 1000)
    assert traces == 1 and losses[-1] < losses[0] / 10
    assert_model_is_quantize_masters(model, state, format)


@pytest.mark.long
@pytest.mark.parametrize("apply", [eqq.apply_updates, eqx.apply_updates, optax.apply_updates])
def test_every_apply_updates_is_exact(apply, getkey):
    float_model, x = mlp(getkey()), weights(getkey(), (8, 20))
    tree = eqq.quantize_tree({"net": float_model, "ids": jnp.arange(3), "flags": jnp.ones(2, bool)}, "int4")
    model, static = eqx.partition(tree, eqx.is_array)
    optim = eqq.float_masters(optax.sgd(0.5))
    state = optim.init(model)
    f = lambda tree: loss(eqx.combine(tree["net"], static["net"]), x)
    updates, state = optim.update(eqx.filter_jit(eqq.filter_grad(f))(model), state, model)
    assert jtu.tree_structure(updates) == jtu.tree_structure(model)
    after = apply(model, updates)
    assert_model_is_quantize_masters(after["net"], state._replace(masters=state.masters["net"]), "int4")
    assert jnp.all(after["ids"] == model["ids"]) and after["ids"].dtype == model["ids"].dtype
    assert jnp.all(after["flags"]) and after["flags"].dtype == bool
    assert_close(after["net"].layers[0].bias, model["net"].layers[0].bias + updates["net"].layers[0].bias)


@pytest.mark.long
def test_steps_equal_the_optimizer_on_floats(getkey):
    # Weight decay, moments and all: the same trajectory as the bare optimizer on the float tree.
    float_model, grads_key = mlp(getkey()), getkey()
    model = eqq.quantize_tree(float_model, "int8")
    inner = optax.adamw(1e-2, weight_decay=0.1)
    optim = eqq.float_masters(inner, masters=float_model)
    state, bare, bare_state = optim.init(model), arrays(float_model), inner.init(arrays(float_model))
    for key in jr.split(grads_key, 5):
        grads = jtu.tree_map(lambda p: weights(key, p.shape), bare)
        updates, state = jax.jit(optim.update)(grads, state, arrays(model))
        model = eqq.apply_updates(model, updates)
        bare_updates, bare_state = jax.jit(inner.update)(grads, bare_state, bare)
        bare = optax.apply_updates(bare, bare_updates)
    for layer, master, expected in zip(model.layers, state.masters.layers, bare.layers, strict=True):
        assert_close(master.weight, expected.weight, 1e-6)
        assert_close(layer.bias, expected.bias, 1e-6)


def test_two_steps_by_hand(getkey):
    """With momentum, weight decay and a method, in float64. Weights that are alike round by keys of their own."""
    w, grads, rate = np.asarray(weights(getkey(), (4, 64))), np.asarray(weights(getkey(), (2, 4, 64))), np.float32(0.05)
    floats = {"a": w, "b": w, "bias": w[0]}
    inner = optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1), optax.scale(-rate))

    def train(floats, dtype, key):
        params = {k: x if k == "bias" else eqq.quantize(x, "int4", method=Halved()) for k, x in floats.items()}
        optim = eqq.float_masters(inner, masters=floats, dtype=dtype, key=key, method=Halved())
        state, codes = optim.init(params), []
        keys = [state.key_data]
        for g in grads:
            updates, state = optim.update({k: jnp.asarray(g[0] if k == "bias" else g) for k in params}, state, params)
            params = eqq.apply_updates(params, updates)
            codes += [eqq.unpack(x) for k, x in params.items() if k != "bias"]
            keys.append(state.key_data)
        return params, state.masters, jnp.stack(codes), keys

    @jax.jit
    def run(floats):
        nearest = train({"a": floats["a"], "bias": floats["bias"]}, jnp.float32, None)
        wanted = eqq.quantize(nearest[1]["a"], "int4", method=Halved())
        return nearest, wanted, train(floats, jnp.float16, jr.key(0))

    (params, masters, codes, _), wanted, (_, half, random, keys) = run(floats)
    trace, expected = np.zeros_like(w, np.float64), w.astype(np.float64)
    for g in grads:
        trace = g + 0.9 * trace
        expected = expected - 0.05 * (trace + 0.1 * expected)
    assert_same(params["a"], wanted)
    for value, exact in ((masters["a"], expected), (params["bias"], expected[0])):
        np.testing.assert_allclose(value, exact, rtol=1e-5, atol=1e-6)
    for name in "ab":
        assert half[name].dtype == jnp.float16
        np.testing.assert_allclose(half[name], expected, rtol=1e-2, atol=1e-2)
    assert len(np.unique(keys, axis=0)) == 3
    # What is alike, and each step, has other random numbers; and a value is off by less than one code.
    random = np.asarray(eqq.Int4().decode(random)).reshape(2, 2, 4, 64)
    up = random - np.asarray(eqq.Int4().decode(codes))[:, None]
    assert np.abs(up).max() <= 1 and _zero_update(jr.key(0)) is None
    assert all((a != b).any() for a, b in it.combinations(up.reshape(4, 4, 64), 2))


def test_default_masters_are_the_dequantized_model(getkey):
    model = eqq.quantize_tree(mlp(getkey()), "int8")
    masters = eqq.float_masters(optax.sgd(0.1)).init(model).masters
    assert_close(masters.layers[0].weight, model.layers[0].weight.dequantize(), 0)
    assert masters.layers[0].bias is None and masters.activation is None


@pytest.mark.long
def test_dtype_of_masters(getkey):
    model = eqq.quantize_tree(mlp(getkey()), "int8", dtype=jnp.bfloat16)
    x = weights(getkey(), (8, 20))
    for dtype in (jnp.float32, jnp.bfloat16):
        optim = eqq.float_masters(optax.adam(1e-3), dtype=dtype)
        trained, state, _, traces = train(model, optim, x, 3)
        assert state.masters.layers[0].weight.dtype == dtype and traces == 1
        assert trained.layers[0].weight.dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="`dtype` must be floating point"):
        eqq.float_masters(optax.sgd(0.1), dtype=jnp.int32)


@pytest.mark.long
def test_convolutions_embeddings_and_other_axes(getkey):
    keys = jr.split(getkey(), 3)
    tree = {
        "conv": eqq.quantize_tree(eqx.nn.Conv2d(3, 4, 3, key=keys[0]), "int8"),
        "embedding": eqq.quantize_tree(eqx.nn.Embedding(7, 64, key=keys[1]), "nf4"),
        "kernel": eqq.quantize(weights(keys[2], (64, 5)), "int4", axis=0),
    }

    def f(tree):
        y = jnp.sum(tree["conv"](jnp.ones((3, 6, 6))) ** 2) + jnp.sum(tree["embedding"](jnp.array(2)) ** 2)
        return y + jnp.sum((jnp.ones(64) @ tree["kernel"]) ** 2)

    optim = eqq.float_masters(optax.adam(1e-2))
    state = optim.init(tree)
    step = eqx.filter_jit(lambda tree, state: optim.update(eqq.filter_grad(f)(tree), state, tree))
    before = f(tree)
    for _ in range(5):
        updates, state = step(tree, state)
        tree = eqq.apply_updates(tree, updates)
    assert f(tree) < before
    assert_same(tree["kernel"], eqq.quantize(state.masters["kernel"], "int4", axis=0))
    assert_same(tree["conv"].weight, eqq.quantize(state.masters["conv"].weight, "int8", axis=(-3, -2, -1)))


@pytest.mark.long
def test_stacked_layers(getkey):
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(jr.split(getkey(), 3))
    model, optim = eqq.quantize_tree(stack, "nf4"), eqq.float_masters(optax.sgd(0.1))
    state = optim.init(model)

    def run(stack):
        parts, static = eqx.partition(stack, eqx.is_array)
        return jnp.sum(jax.lax.scan(lambda x, a: (eqx.combine(a, static)(x), None), jnp.ones(16), parts)[0] ** 2)

    updates, state = optim.update(eqx.filter_jit(eqq.filter_grad(run))(model), state, model)
    model = eqq.apply_updates(model, updates)
    assert_same(model.weight, eqq.quantize(state.masters.weight, "nf4"))


# Composition

lr = 1e-2
INNER = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(lr)),
    "schedule": lambda: optax.adamw(optax.cosine_decay_schedule(lr, 20)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(lr), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=lr),
    "momentum": lambda: optax.sgd(lr, momentum=0.9),
    "factored": lambda: optax.adafactor(lr),
    "lion": lambda: optax.lion(lr / 10),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(lr), 3),
}


@pytest.mark.parametrize("name", INNER)
def test_inner_optimizers(name, getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), "int8"), weights(getkey(), (32, 20))
    trained, state, losses, traces = train(model, eqq.float_masters(INNER[name]()), x, 20)
    assert_model_is_quantize_masters(trained, state, "int8")
    assert losses[-1] < losses[0] and traces == 1


OUTER = {
    "chain": lambda optim: optax.chain(optax.clip_by_global_norm(0.1), optim),
    "inject_hyperparams": lambda _: optax.inject_hyperparams(
        lambda learning_rate: eqq.float_masters(optax.adam(learning_rate))
    )(learning_rate=lr),
    "extra_args": lambda optim: optax.with_extra_args_support(optim),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OUTER)
def test_outer_transformations(name, getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), "int8"), weights(getkey(), (32, 20))
    params, static = eqx.partition(model, eqx.is_array)  # optax wants arrays alone
    optim = OUTER[name](eqq.float_masters(optax.adam(lr)))
    params, state, losses, traces = train(params, optim, x, 20, static=static)
    inner = next(s for s in jtu.tree_leaves(state, is_leaf=is_state) if is_state(s))
    assert_model_is_quantize_masters(params, inner, "int8")
    assert losses[-1] < losses[0] and traces == 1


def is_state(x):
    return isinstance(x, FloatMastersState)


@pytest.mark.long
def test_masked_and_multi_transform(getkey):
    model, x = (
        eqq.quantize_tree(mlp(getkey()), {"layers.0.*": "int8", "layers.1.*": "nf4"}),
        weights(getkey(), (32, 20)),
    )
    kind = lambda leaf: "quantized" if eqq.is_quantized(leaf) else "float" if eqx.is_inexact_array(leaf) else "none"
    labels = jtu.tree_map(kind, model, is_leaf=eqq.is_quantized)
    optim = optax.multi_transform(
        {"quantized": eqq.float_masters(optax.adam(lr)), "float": optax.sgd(lr), "none": optax.set_to_zero()},
        lambda _: labels,  # optax calls whatever is callable, and this model is
    )
    trained, state, losses, traces = train(model, optim, x, 20)
    assert losses[-1] < losses[0] and traces == 1
    masters = next(s for s in jtu.tree_leaves(state, is_leaf=is_state) if is_state(s)).masters
    assert_same(trained.layers[0].weight, eqq.quantize(masters.layers[0].weight, "int8"))
    assert jnp.any(trained.layers[0].bias != model.layers[0].bias)

    # Masked: the first layer alone. What is masked passes through, so its gradients must not be there.
    mask = jtu.tree_map(lambda _: False, model, is_leaf=eqq.is_quantized)
    mask = eqx.tree_at(lambda m: m.layers[0].weight, mask, True)
    optim = optax.masked(eqq.float_masters(optax.adam(lr)), mask)
    state = optim.init(model)
    gradient = eqx.filter_jit(eqq.filter_grad(loss, filter_spec=mask))
    for _ in range(3):
        grads = gradient(model, x)
        updates, state = optim.update(grads, state, model)
        after = eqq.apply_updates(model, updates)
    assert_same(after.layers[1].weight, model.layers[1].weight)
    masters = state.inner_state.masters
    assert_same(after.layers[0].weight, eqq.quantize(masters.layers[0].weight, "int8"))
    assert len(jtu.tree_leaves(masters)) == 1


@pytest.mark.long
def test_extra_arguments_reach_the_optimizer(getkey):
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        seen.append((value, extra))
        return updates, state

    optim = eqq.float_masters(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    model = eqq.quantize_tree(mlp(getkey()), "int8")
    grads = eqx.filter_jit(eqq.filter_grad(loss))(model, jnp.ones((2, 20)))
    optim.update(grads, optim.init(model), model, value=3, more=4)
    assert seen == [(3, {"more": 4})]


@pytest.mark.long
def test_together_with_quantized_moments(getkey):
    model = eqq.quantize_tree(eqx.nn.MLP(64, 3, 128, 2, key=getkey()), "int8")
    optim = eqq.float_masters(eqq.quantize_state(optax.adam(lr)))
    trained, state, losses, traces = train(model, optim, weights(getkey(), (32, 64)), 20)
    assert losses[-1] < losses[0] and traces == 1
    assert eqq.is_quantized(state.inner_state[0].mu.layers[1].weight)
    assert_model_is_quantize_masters(trained, state, "int8")


# Stochastic rounding


@pytest.mark.long
def test_stochastic_rounding_keeps_small_steps_on_average(getkey):
    # Steps of a hundredth of a quantization step: rounding to nearest never leaves the code.
    w = jnp.full((64, 64), 0.3).at[:, 0].set(1.0)
    q, grads = eqq.quantize(w, "int4"), jnp.zeros((64, 64)).at[:, 1:].set(-1.0)
    mean = {}
    for key in (None, getkey()):
        optim = eqq.float_masters(optax.sgd(1e-2), masters=w, key=key)
        state, p = optim.init(q), q
        updates, state = optim.update(grads, state, p)
        p = eqq.apply_updates(p, updates)
        mean[key is None] = float(jnp.mean(p[:, 1:]))
        assert (state.key_data is None) == (key is None)
    assert mean[True] == pytest.approx(2 / 7, abs=1e-4)
    assert mean[False] == pytest.approx(0.31, abs=5e-3)


@pytest.mark.long
def test_stochastic_rounding_is_new_at_every_step_and_reproducible(getkey):
    w, key = weights(getkey(), (8, 64)), getkey()
    q, runs = eqq.quantize(w, "int4"), []
    for _ in range(2):
        optim = eqq.float_masters(optax.sgd(0.0), masters=w, key=key)
        state, p, codes = optim.init(q), q, []
        start = state.masters
        for _ in range(3):
            updates, state = jax.jit(optim.update)(jnp.zeros((8, 64)), state, p)
            p = eqq.apply_updates(p, updates)
            codes.append(np.asarray(eqq.unpack(p)))
        assert jnp.all(state.masters == start)
        runs.append(codes)
    np.testing.assert_array_equal(runs[0], runs[1])
    first, second, third = runs[0]
    assert (first != second).any() and (second != third).any()


# State


@pytest.mark.long
def test_training_resumes_from_a_saved_state(getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), "nf4"), weights(getkey(), (8, 20))
    optim = eqq.float_masters(optax.adam(lr), key=getkey())
    model, state, _, _ = train(model, optim, x, 3)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (model, state))
    file.seek(0)
    again, again_state = eqx.tree_deserialise_leaves(file, (model, optim.init(model)))
    a, b = train(model, optim, x, 3, state), train(again, optim, x, 3, again_state)
    for one, other in zip(jtu.tree_leaves(arrays(a[:2])), jtu.tree_leaves(arrays(b[:2])), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.long
def test_state_has_a_constant_structure(getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), "nf4"), weights(getkey(), (8, 20))
    optim = eqq.float_masters(optax.adamw(lr), key=getkey())
    state = optim.init(model)
    _, after, _, _ = train(model, optim, x, 2)
    describe = lambda tree: [(jtu.keystr(p), x.shape, x.dtype, x.weak_type) for p, x in jtu.tree_leaves_with_path(tree)]
    assert describe(state) == describe(after) and jtu.tree_structure(state) == jtu.tree_structure(after)


@pytest.mark.long
def test_training_runs_in_a_scan(getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), "int4"), weights(getkey(), (32, 20))
    optim = eqq.float_masters(optax.adam(lr))
    params, static = eqx.partition(model, eqx.is_array)

    def step(carry, _):
        params, state = carry
        value, grads = eqq.filter_value_and_grad(lambda p: loss(eqx.combine(p, static), x))(params)
        updates, state = optim.update(grads, state, params)
        return (eqq.apply_updates(params, updates), state), value

    (params, state), losses = jax.jit(lambda c: jax.lax.scan(step, c, None, length=20))((params, optim.init(params)))
    assert losses[-1] < losses[0]
    assert_model_is_quantize_masters(eqx.combine(params, static), state, "int4")


def test_model_and_state_can_be_donated(getkey):
    float_model = mlp(getkey())
    model, static = eqx.partition(eqq.quantize_tree(float_model, "int8"), eqx.is_array)
    x = weights(getkey(), (8, 20))
    optim = eqq.float_masters(optax.adam(lr), masters=float_model)

    def step(model, state):
        grads = eqq.filter_grad(lambda m: loss(eqx.combine(m, static), x))(model)
        updates, state = optim.update(grads, state, model)
        return eqq.apply_updates(model, updates), state

    step, state = jax.jit(step, donate_argnums=(0, 1)), optim.init(model)
    for _ in range(2):
        model, state = step(model, state)
    assert not float_model.layers[0].weight.is_deleted()
    assert_model_is_quantize_masters(eqx.combine(model, static), state, "int8")


@pytest.mark.long
def test_memory_of_a_step(getkey):
    # A master of 16 MiB: the step needs the gradient's size for its own, and no more than a few such buffers.
    q = eqq.quantize(weights(getkey(), (2048, 2048)), "int8")
    optim = eqq.float_masters(optax.sgd(1e-2))
    assert temp_bytes(optim.update, jnp.zeros((2048, 2048)), optim.init(q), q) <= 3 * 2**24


def test_jitted_init_and_abstract_state(getkey):
    model = arrays(eqq.quantize_tree(mlp(getkey()), "int8"))
    optim = eqq.float_masters(optax.adam(lr))
    shapes = jax.eval_shape(optim.init, model)
    assert jtu.tree_structure(shapes) == jtu.tree_structure(jax.jit(optim.init)(model))


def test_masters_of_a_simulated_model(getkey):
    float_model = mlp(getkey())
    model, simulated = eqq.quantize_tree(float_model, "int4"), eqq.quantize_tree(float_model, "int4", simulate=True)
    masters = eqq.float_masters(optax.sgd(lr), masters=simulated).init(model).masters
    assert jnp.all(masters.layers[0].weight == float_model.layers[0].weight)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_step_of_size_zero_changes_nothing(dtype, getkey):
    model = eqq.quantize_tree(mlp(getkey()), "int8", dtype=dtype)
    optim = eqq.float_masters(optax.sgd(0.0))
    updates, _ = optim.update(eqx.filter_jit(eqq.filter_grad(loss))(model, jnp.ones((2, 20))), optim.init(model), model)
    after = eqq.apply_updates(model, updates)
    assert eqx.tree_equal(*([layer.weight.codes for layer in m.layers] for m in (after, model)))
    for layer, before in zip(after.layers, model.layers, strict=True):
        assert_close(layer.weight.scale, before.weight.scale, 1e-6)


@pytest.mark.long
def test_freezing(getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), "int8"), weights(getkey(), (8, 20))
    mask = jtu.tree_map(eqq.is_quantized, model, is_leaf=eqq.is_quantized)
    mask = eqx.tree_at(lambda m: m.layers[0].weight, mask, False)
    optim = optax.masked(eqq.float_masters(optax.adam(lr)), mask)
    updates, _ = optim.update(
        eqx.filter_jit(eqq.filter_grad(loss, filter_spec=mask))(model, x), optim.init(model), model
    )
    after = eqq.apply_updates(model, updates)
    assert_same(after.layers[0].weight, model.layers[0].weight)
    assert jnp.any(after.layers[1].weight.codes != model.layers[1].weight.codes)
    whole = eqx.filter_jit(eqq.filter_grad(loss))(model, x)
    updates, _ = optim.update(whole, optim.init(model), model)
    with pytest.raises(ValueError, match="To freeze it, wrap the optimizer in `eqq.train_only`"):
        eqq.apply_updates(model, updates)
    optim = eqq.train_only(eqq.float_masters(optax.adam(lr)), mask)
    updates, _ = optim.update(whole, optim.init(model), model)
    for apply in (eqq.apply_updates, eqx.apply_updates):
        assert eqx.tree_equal(apply(model, updates), after)
    optim = eqq.train_only(eqq.float_masters(optax.adam(lr)), eqx.tree_at(lambda m: m.layers[0], mask, False))
    updates, _ = optim.update(whole, optim.init(model), model)  # a whole layer by one value of the mask
    assert eqx.tree_equal(eqq.apply_updates(model, updates), after)


def test_optax_finds_the_parameters_in_the_state(getkey):
    model = eqq.quantize_tree(mlp(getkey()), "int8")
    optim = eqq.float_masters(optax.adam(lr))
    specs = optax.tree_map_params(optim, lambda x: x.shape, optim.init(model))
    assert specs.masters.layers[0].weight == specs.inner_state[0].mu.layers[0].weight == (40, 20)
