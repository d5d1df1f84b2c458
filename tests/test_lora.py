"""Low-rank factors beside frozen weights."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqquant as eqq

from .helpers import assert_close, assert_same, FORMATS, KINDS, outputs, primitives, temp_bytes, weights


def mlp(key):
    return eqx.nn.MLP(20, 3, 40, 2, key=key)


@eqx.filter_jit
def loss(model, x):
    return jnp.mean((jax.vmap(model)(x) - jnp.sin(x[:, :3])) ** 2)


def with_factors(w, getkey, rank=3, **kwargs):
    """A LoRA array whose factors are not zero."""
    x = eqq.loraify({"w": w}, rank, key=getkey(), where=lambda tree: tree["w"], **kwargs)["w"]
    return eqx.tree_at(lambda x: x.b, x, weights(getkey(), x.b.shape))


@pytest.mark.parametrize("name", KINDS)
def test_initial_outputs_equal_the_base_model(name, getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), FORMATS[name].format), weights(getkey(), (7, 20))
    adapted = eqq.loraify(model, rank=3, key=getkey())
    assert type(adapted) is eqx.nn.MLP
    assert all(isinstance(layer.weight, eqq.arrays.LoraArray) for layer in adapted.layers)
    assert_close(jax.vmap(adapted)(x), jax.vmap(model)(x), 0)
    assert_same(adapted.layers[0].weight.base, model.layers[0].weight)


BASES = {
    "float": lambda w: w,
    "nf4": lambda w: eqq.quantize(w, "nf4"),
    "int4 along the first axis": lambda w: eqq.quantize(w, "int4", axis=0),
}


@pytest.mark.long
@pytest.mark.parametrize("base", BASES)
def test_value_is_base_plus_product_of_factors(base, getkey):
    w = BASES[base](weights(getkey(), (6, 70)))
    x = with_factors(w, getkey, alpha=12)
    dense = eqq.dequantize(w) + 12 / 3 * x.b @ x.a
    assert (x.shape, x.dtype, x.ndim, x.size, x.rank, x.scaling) == ((6, 70), jnp.float32, 2, 420, 3, 4.0)
    v, m = weights(getkey(), (70,)), weights(getkey(), (70, 5))
    uses = [
        lambda x: x @ v,
        lambda x: x @ m,
        lambda x: v[:6] @ x,
        lambda x: m[:6].T @ x,
        lambda x: jnp.stack([m, 2 * m]).swapaxes(-1, -2) @ x.T,
        lambda x: x.T @ v[:6],
        lambda x: x.mT @ m[:6],
        lambda x: x.transpose(1, 0)[3],
        lambda x: x.transpose(0, 1),
        lambda x: x[2],
        lambda x: x[1:3],
        lambda x: x[jnp.array([4, 0])],
        lambda x: x[2, 3:5],
        lambda x: x[..., 1],
        lambda x: x + 1.0,
        lambda x: jnp.cos(x),
        lambda x: jax.lax.cos(x),
        lambda x: x.reshape(420),
        lambda x: x.sum(axis=0),
        lambda x: eqq.quaxify(lambda x: jnp.einsum("oi,i->o", x, v))(x),
        lambda x: jax.vmap(lambda row: x @ row)(m.T),
    ]
    for use in uses:
        assert_close(jax.jit(use)(x), use(dense), 1e-5)
    assert "LoraArray" in repr(x) and "rank=3" in repr(x)
    assert "rank=True" in repr(eqq.trainable_mask({"w": x}))


@pytest.mark.long
def test_layers(getkey):
    for layer, x in [
        (eqx.nn.Conv2d(3, 4, 3, key=getkey()), (jnp.ones((3, 8, 8)),)),
        (eqx.nn.ConvTranspose1d(3, 4, 3, key=getkey()), (jnp.ones((3, 8)),)),
        (eqx.nn.GRUCell(8, 9, key=getkey()), (jnp.ones(8), jnp.ones(9))),
        (eqx.nn.MultiheadAttention(2, 8, key=getkey()), (jnp.ones((5, 8)),) * 3),
    ]:
        for base in (layer, eqq.quantize_tree(layer, "int8")):
            adapted = eqq.loraify(base, 2, key=getkey())
            assert_close(adapted(*x), base(*x), 1e-6)
            moved = jtu.tree_map(lambda leaf, m: leaf + 0.1 if m else leaf, *eqx_spread(adapted))
            assert_close(moved(*x), eqq.merge_lora(moved, dense=True)(*x), 1e-5)


def eqx_spread(model):
    """The model, and its trainable mask leaf by leaf."""
    spread = lambda wanted, node: jtu.tree_map(lambda _: wanted, node)
    return model, jtu.tree_map(spread, eqq.trainable_mask(model), model)


def test_convolution_has_all_its_inputs_as_one(getkey):
    conv = eqq.loraify(eqx.nn.Conv2d(3, 8, 5, key=getkey()), 2, key=getkey())
    assert (
        conv.weight.a.shape == (2, 3, 5, 5)
        and conv.weight.b.shape == (8, 2)
        and conv.weight.delta().shape == (8, 3, 5, 5)
    )
    assert 0.9 < 75**0.5 * float(jnp.max(jnp.abs(conv.weight.a))) <= 1


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1)])
def test_input_axes_do_not_depend_on_the_quantized_one(axis, getkey):
    weight = lambda layer: layer.weight  # named, it is quantized whatever its size
    conv = eqq.quantize_tree(eqx.nn.Conv2d(16, 32, 3, key=getkey()), "int4", axis=axis, where=weight)
    linear = eqq.quantize_tree(eqx.nn.Linear(8, 6, key=getkey()), "int4", axis=axis, where=weight)
    for layer, x in ((conv, jnp.ones((16, 5, 5))), (linear, jnp.ones(8))):
        adapted = eqq.loraify(layer, 2, key=getkey())
        assert adapted.weight.b.shape == (layer.weight.shape[0], 2)
        assert adapted.weight.a.shape == (2, *layer.weight.shape[1:])
        assert_close(adapted(x), layer(x), 1e-5)


def test_one_array(getkey):
    q = eqq.quantize(weights(getkey(), (6, 70)), "int4")
    assert isinstance(eqq.loraify(q, 2, key=getkey()), eqq.arrays.LoraArray)


@pytest.mark.long
def test_embeddings_only_when_selected(getkey):
    model = {"embedding": eqx.nn.Embedding(10, 64, key=getkey()), "linear": eqx.nn.Linear(64, 3, key=getkey())}
    model = eqq.quantize_tree(model, "nf4")
    adapted = eqq.loraify(model, 2, key=getkey())
    assert eqq.is_quantized(adapted["embedding"].weight) and isinstance(adapted["linear"].weight, eqq.arrays.LoraArray)
    chosen = eqq.loraify(model, 2, key=getkey(), where=lambda m: m["embedding"])
    assert isinstance(chosen["embedding"].weight, eqq.arrays.LoraArray) and eqq.is_quantized(chosen["linear"].weight)
    x = eqx.tree_at(lambda m: m["embedding"].weight.b, chosen, jnp.ones((10, 2)))["embedding"]
    assert_close(jax.vmap(x)(jnp.array([3, 3, 7])), x.weight.dequantize()[jnp.array([3, 3, 7])], 1e-6)


@pytest.mark.long
def test_lookup_computes_only_its_rows(getkey):
    # A table of 64 MiB in float32.
    x = with_factors(eqq.quantize(weights(getkey(), (2**17, 128)), "int4"), getkey)
    assert temp_bytes(lambda x, i: x[i], x, jnp.array([1, 2, 3])) < 2**20


@pytest.mark.long
def test_product_does_not_add_factors_to_the_weight(getkey):
    x = with_factors(eqq.quantize(weights(getkey(), (4096, 4096)), "nf4"), getkey)
    assert temp_bytes(lambda x, v: v @ x.T, x, jnp.ones((4, 4096))) < 2**24
    assert primitives(lambda x, v: v @ x.T, x, jnp.ones((4, 4096))).count("quantized_matmul") == 1


def test_stacked_layers(getkey):
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(jr.split(getkey(), 3))
    adapted = eqq.loraify(eqq.quantize_tree(stack, "nf4"), 2, key=getkey())
    adapted = eqx.tree_at(lambda m: m.weight.b, adapted, jnp.ones((3, 16, 2)))
    assert adapted.weight.a.shape == (3, 2, 16)

    def run(stack):
        arrays, static = eqx.partition(stack, eqx.is_array)
        return jax.lax.scan(lambda x, a: (jnp.tanh(eqx.combine(a, static)(x)), None), jnp.ones(16), arrays)[0]

    assert_close(run(adapted), run(eqq.merge_lora(adapted, dense=True)), 1e-5)
    grads = eqx.filter_jit(eqq.filter_grad(lambda m: run(m).sum()))(adapted)
    assert grads.weight.a.shape == (3, 2, 16) and grads.weight.base is None


def test_rank_is_at_most_that_of_the_weight(getkey):
    layers = {
        "classes": eqx.nn.Linear(40, 2, key=getkey()),
        "inputs": eqx.nn.Linear(9, 40, key=getkey()),
        "conv": eqx.nn.Conv2d(2, 64, 2, key=getkey()),
        "wide": eqx.nn.Linear(40, 40, key=getkey()),
    }
    for model in (layers, eqq.quantize_tree(layers, "int8")):
        adapted = eqq.loraify(model, 16, alpha=24, key=getkey())
        assert {name: layer.weight.rank for name, layer in adapted.items()} == dict(
            classes=2, inputs=9, conv=8, wide=16
        )
        assert all(layer.weight.scaling == 24 / 16 for layer in adapted.values())
        assert_close(adapted["classes"](jnp.ones(40)), model["classes"](jnp.ones(40)), 1e-6)


def test_rank_by_path(getkey):
    linear = lambda: eqx.nn.Linear(16, 16, key=getkey())
    block = lambda: {"attn": {"q": linear(), "k": linear()}, "mlp": linear()}
    model = eqq.quantize_tree({"blocks": [block(), block()], "head": linear()}, "nf4")
    adapted = eqq.loraify(model, {"*.attn.*": 4, "head": None, "blocks.1": 2, "*": 3}, alpha=12, key=getkey())
    ranks = lambda block: [w.weight.rank for w in (block["attn"]["q"], block["attn"]["k"], block["mlp"])]
    assert ranks(adapted["blocks"][0]) == [4, 4, 3] and ranks(adapted["blocks"][1]) == [4, 4, 2]
    assert adapted["blocks"][0]["mlp"].weight.scaling == 12 / 3
    assert_same(adapted["head"].weight, model["head"].weight)
    only = eqq.loraify(model, {re.compile("mlp"): 2}, key=getkey())
    assert eqq.is_quantized(only["head"].weight) and only["blocks"][1]["mlp"].weight.rank == 2
    chosen = eqq.loraify(model, {"*": 2}, where=lambda m: m["blocks"][0], key=getkey())
    assert eqq.is_quantized(chosen["blocks"][1]["mlp"].weight) and chosen["blocks"][0]["mlp"].weight.rank == 2


def test_initial_factors(getkey):
    x = eqq.loraify({"w": weights(getkey(), (300, 400))}, 64, key=getkey())["w"]
    assert jnp.all(x.b == 0) and x.a.dtype == x.b.dtype == jnp.float32
    assert float(jnp.var(x.a)) == pytest.approx(1 / 3 / 400, rel=0.05) and float(jnp.max(jnp.abs(x.a))) <= 1 / 20
    half = eqq.loraify({"w": weights(getkey(), (30, 40), jnp.bfloat16)}, 4, key=getkey())["w"]
    assert half.dtype == jnp.bfloat16 and half.a.dtype == jnp.float32
    assert (half @ jnp.ones(40, jnp.bfloat16)).dtype == half.dequantize().dtype == jnp.bfloat16
    both = eqq.loraify([jnp.zeros((30, 40)), jnp.ones((30, 40))], 4, key=getkey())
    assert not jnp.array_equal(both[0].a, both[1].a)


# Training


def train(model, x, steps=30):
    optim = optax.masked(optax.adamw(1e-2), eqq.trainable_mask(model))
    state = optim.init(model)

    @eqx.filter_jit
    def step(model, state):
        value, grads = eqq.filter_value_and_grad(loss)(model, x)
        updates, state = optim.update(grads, state, model)
        return eqq.apply_updates(model, updates), state, value

    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        losses = []
        for _ in range(steps):
            model, state, value = step(model, state)
            losses.append(float(value))
    return model, state, losses


@pytest.mark.parametrize("format", [None, "nf4", eqq.NF4(double_quant=True)])
def test_only_factors_are_trained(format, getkey):
    model, x = mlp(getkey()), weights(getkey(), (32, 20))
    model = model if format is None else eqq.quantize_tree(model, format)
    start = eqq.loraify(model, 3, key=getkey())
    trained, state, losses = train(start, x)
    assert losses[-1] < losses[0] / 2
    for a, b in zip(start.layers, trained.layers, strict=True):
        assert eqx.tree_equal(a.weight.base, b.weight.base) and jnp.all(a.bias == b.bias)
        assert jnp.any(a.weight.a != b.weight.a) and jnp.any(a.weight.b != b.weight.b)
    # Gradients and optimizer state: the factors', and nothing else's.
    factors = [leaf.size for layer in start.layers for leaf in (layer.weight.a, layer.weight.b)]
    grads = eqx.filter_jit(eqq.filter_grad(loss))(start, x)
    assert sorted(g.size for g in jtu.tree_leaves(grads)) == sorted(factors)
    assert sum(leaf.size for leaf in jtu.tree_leaves(state)) == 2 * sum(factors) + 1
    assert eqq.tree_nbytes(eqx.filter(start, eqq.trainable_mask(start))) == 4 * sum(factors)


def test_gradients_are_those_of_the_sum(getkey):
    model, x = eqq.loraify(eqq.quantize_tree(mlp(getkey()), "nf4"), 3, key=getkey()), weights(getkey(), (7, 20))
    model = eqx.tree_at(lambda m: m.layers[0].weight.b, model, jnp.ones((40, 3)))
    grads = eqx.filter_jit(eqq.filter_grad(loss))(model, x)
    dense = eqx.filter_jit(eqx.filter_grad(loss))(eqq.merge_lora(model, dense=True), x).layers[0].weight
    w = model.layers[0].weight
    assert_close(grads.layers[0].weight.a, w.scaling * w.b.T @ dense, 1e-5)
    assert_close(grads.layers[0].weight.b, w.scaling * dense @ w.a.T, 1e-5)


def test_partitioned_models_train(getkey):
    model, x = eqq.loraify(eqq.quantize_tree(mlp(getkey()), "nf4"), 3, key=getkey()), weights(getkey(), (7, 20))
    trained, frozen = eqx.partition(model, eqq.trainable_mask(model))
    assert {leaf.shape[-1] for leaf in jtu.tree_leaves(trained)} <= {3, 20, 40}
    grads = eqx.filter_jit(eqx.filter_grad(lambda trained: loss(eqx.combine(trained, frozen), x)))(trained)
    assert_close(grads, eqx.filter_jit(eqq.filter_grad(loss))(model, x))


def test_more_than_the_factors_with_a_spec(getkey):
    model, x = eqq.loraify(mlp(getkey()), 3, key=getkey()), weights(getkey(), (7, 20))
    mask = eqx.tree_at(lambda m: m.layers[0].bias, eqq.trainable_mask(model), True)
    grads = eqx.filter_jit(eqq.filter_grad(loss, filter_spec=mask))(model, x)
    assert grads.layers[0].bias.shape == (40,) and grads.layers[1].bias is None and grads.layers[0].weight.base is None


# Merging


@pytest.mark.filterwarnings("ignore:Rounding keeps")  # of one or two bits
@pytest.mark.parametrize("name", KINDS)
def test_merge_quantizes_again(name, getkey):
    format = FORMATS[name].format
    model, x = eqq.quantize_tree(mlp(getkey()), format), weights(getkey(), (7, 20))
    adapted = eqq.loraify(model, 3, key=getkey())
    adapted = eqx.tree_at(lambda m: m.layers[1].weight.b, adapted, 0.01 * jnp.ones((40, 3)))
    dense, merged = eqq.merge_lora(adapted, dense=True), eqq.merge_lora(adapted)
    assert_close(outputs(dense, x), outputs(adapted, x), 1e-5)
    assert_same(merged.layers[1].weight, eqq.quantize(adapted.layers[1].weight.dequantize(), format))
    assert jtu.tree_structure(merged) == jtu.tree_structure(model)


@pytest.mark.parametrize("name", FORMATS)
def test_merge_of_untrained_factors_changes_no_bit(name, getkey):
    w = eqq.quantize(weights(getkey(), (6, 200)), FORMATS[name].format)
    adapted = eqq.loraify({"w": w}, 3, key=getkey())
    assert_same(eqq.merge_lora(adapted)["w"], w)
    assert_same(jax.jit(eqq.merge_lora)(adapted)["w"], w)


def test_merge_into_float(getkey):
    model = mlp(getkey())
    adapted = eqq.loraify(model, 3, key=getkey())
    adapted = eqx.tree_at(lambda m: m.layers[1].weight.b, adapted, jnp.ones((40, 3)))
    merged = eqq.merge_lora(adapted)
    assert jtu.tree_structure(merged) == jtu.tree_structure(model)
    assert_close(merged.layers[1].weight, model.layers[1].weight + adapted.layers[1].weight.delta(), 1e-6)


def train_shortly(getkey):
    """A linear layer after a few small steps, with inputs that vary in few directions, and the dense merge."""
    layer = eqq.quantize_tree(eqx.nn.Linear(64, 64, key=getkey()), "nf4")
    x = weights(getkey(), (200, 6)) @ weights(getkey(), (6, 64))
    adapted = eqq.loraify(layer, 4, key=getkey())
    adapted = eqx.tree_at(lambda m: m.weight.b, adapted, 0.003 * weights(getkey(), (64, 4)))
    return layer, adapted, x


def test_merge_warns_of_lost_factors(getkey):
    layer, adapted, _ = train_shortly(getkey)
    with pytest.warns(UserWarning, match=r"Rounding keeps \d% of the change.*`eqq.merge_lora\(model, method=eqq.GPTQ"):
        eqq.merge_lora(adapted)
    jax.jit(eqq.merge_lora)(adapted)  # where values are unknown
    eqq.merge_lora(eqx.tree_at(lambda m: m.weight.b, adapted, jnp.ones((64, 4))))


@pytest.mark.long
def test_merge_with_statistics_keeps_the_gain(getkey):
    layer, adapted, x = train_shortly(getkey)
    dense = eqq.merge_lora(adapted, dense=True)
    stats = eqq.calibrate.collect_stats(dense, [x], gram=True)
    with pytest.warns(UserWarning, match="near its base"):
        plain = eqq.merge_lora(adapted)
    merged = eqq.merge_lora(adapted, method=eqq.GPTQ(stats))
    assert jtu.tree_structure(merged) == jtu.tree_structure(layer)
    error = lambda m: float(jnp.linalg.norm(outputs(m, x) - outputs(dense, x)))
    assert error(merged) < 0.5 * error(plain)
    distilled = eqq.distill(merged, dense, [x], held_out=[x], progress=False)
    assert jtu.tree_structure(distilled) == jtu.tree_structure(layer)
    assert error(distilled) < error(merged)
    with pytest.raises(ValueError, match="weight"):
        eqq.merge_lora({"other": adapted}, method=eqq.GPTQ(stats))


# Bad input


def test_errors(getkey):
    model, key = mlp(getkey()), getkey()
    for rank in (0, -1, True, {"*": 0}, {}):
        with pytest.raises(ValueError, match="`rank` must be a whole number, at least 1"):
            eqq.loraify(model, rank, key=key)
    for where, message in [
        (lambda m: m.layers[0].bias, r"Got layers\.0\.bias: it has one dimension"),
        (lambda m: m.activation, "Got activation: not an array"),
    ]:
        with pytest.raises(TypeError, match=message):
            eqq.loraify(model, key=key, where=where)
    with pytest.raises(TypeError, match="Got ids: not floating point"):
        eqq.loraify({"ids": jnp.ones((3, 3), int)}, key=key, where=lambda t: t["ids"])
    with pytest.raises(ValueError, match="must hold weights.*bias: it has one dimension"):
        eqq.loraify({"bias": jnp.ones(3)}, key=key)
    with pytest.raises(ValueError, match="Each pattern of `rank` must match a leaf. Got 'head'"):
        eqq.loraify(model, {"head": 2}, key=key)
    with pytest.raises(ValueError, match=r"layers\.0\.weight: rule '\*'"):
        eqq.loraify(model, {"*": None}, key=key)
    with pytest.raises(TypeError, match=r"no argument `target_modules`. Write ranks by path: `rank=\{"):
        eqq.loraify(model, target_modules=["q"], key=key)
    with pytest.raises(TypeError, match="no argument `lora_alpha`. It is called `alpha`"):
        eqq.loraify(model, lora_alpha=8, key=key)
    with pytest.raises(ValueError, match=r"layers\.0\.weight\.master: it is simulated: `finalize` first"):
        eqq.loraify(eqq.quantize_tree(model, "int8", simulate=True), 2, key=key)
    with pytest.raises(ValueError, match="`where` must return leaves or nodes"):
        eqq.loraify(model, key=key, where=lambda m: m.nothing)
    adapted = eqq.loraify(model, 2, key=key)
    with pytest.raises(TypeError, match=r"layers\.0\.weight: it has factors already: `merge_lora` first"):
        eqq.loraify(adapted, key=key, where=lambda m: m.layers[0].weight)
    with pytest.raises(ValueError, match="it has factors already"):
        eqq.loraify(adapted, key=key)
    with pytest.raises(ValueError, match="`loraify` makes them"):
        eqq.merge_lora(model)
    broken = eqx.tree_at(lambda m: m.layers[0].weight.b, adapted, replace_fn=lambda b: b * jnp.nan)
    with pytest.raises(ValueError, match=r"layers\.0\.weight must be finite"):
        eqq.merge_lora(broken)


def test_factors_are_not_quantized(getkey):
    with pytest.raises(ValueError, match="part of a LoraArray"):
        eqq.quantize_tree(eqq.loraify(mlp(getkey()), 2, key=getkey()), "int8")


def test_masters_leave_frozen_weights_alone(getkey):
    model = eqq.loraify(eqq.quantize_tree(mlp(getkey()), "int8"), 2, key=getkey())
    with pytest.raises(ValueError, match="needs quantized parameters to train.*`eqq.train_only.optimizer, "):
        eqq.float_masters(optax.sgd(0.1)).init(model)


def test_factors_are_saved_and_loaded(getkey, tmp_path):
    model = eqq.loraify(eqq.quantize_tree(mlp(getkey()), "nf4"), 3, key=getkey())
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    again = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", model)
    np.testing.assert_array_equal(np.asarray(again.layers[0].weight), np.asarray(model.layers[0].weight))


@pytest.mark.long
def test_gradients_as_updates_are_refused(getkey):
    """`optax.masked` passes on gradients of biases, norms and float weights, along which they would climb the loss."""
    model = eqx.nn.Sequential([eqx.nn.Linear(8, 64, key=getkey()), eqx.nn.LayerNorm(64)])
    for quantized in (model, eqq.quantize_tree(model, "nf4")):
        adapted = eqq.loraify(quantized, 4, key=getkey())
        grads = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(jnp.ones((2, 8))))))(adapted)
        optim = optax.masked(optax.adam(1e-2), eqq.trainable_mask(adapted))
        with jax.numpy_dtype_promotion("standard"):  # Adam needs it
            updates, _ = optim.update(grads, optim.init(adapted), adapted)
        with pytest.raises(ValueError, match="other floats are frozen.*To freeze it, .*`eqq.train_only`"):
            eqq.apply_updates(adapted, updates)
        updates = eqx.tree_at(lambda u: (u[0].bias, u[1].weight, u[1].bias), updates, (None, None, None))
        if quantized is model:
            with pytest.raises(ValueError, match=r"Got a float32 array for layers.0.weight.base.*`eqx.apply_updates`"):
                eqq.apply_updates(adapted, updates)
        else:
            assert_same(eqq.apply_updates(adapted, updates)[0].bias, model[0].bias)


@pytest.mark.parametrize("library", ["equinox", "eqquant"])
def test_the_usual_loop_trains_only_factors(library, getkey):
    """`eqx.filter_value_and_grad` gives biases and norms gradients, too."""
    linear = lambda: eqx.nn.Linear(64, 64, key=getkey())
    model = eqx.nn.Sequential([linear(), eqx.nn.LayerNorm(64), linear()])
    model = eqq.loraify(eqq.quantize_tree(model, "nf4"), 4, key=getkey())
    x, y = weights(getkey(), (16, 64)), weights(getkey(), (16, 64))
    loss = lambda m: jnp.mean(jnp.square(jax.vmap(m)(x) - y))
    optim = eqq.train_only(optax.adam(1e-2), eqq.trainable_mask(model))
    grad, apply = {
        "equinox": (eqx.filter_value_and_grad, eqx.apply_updates),
        "eqquant": (eqq.filter_value_and_grad, eqq.apply_updates),
    }[library]

    @eqx.filter_jit
    def step(m, state):
        with jax.numpy_dtype_promotion("standard"):  # Adam needs it
            value, grads = grad(loss)(m)
            updates, state = optim.update(grads, state, m)
        return apply(m, updates), state, value

    trained, state = model, optim.init(eqx.filter(model, eqx.is_inexact_array) if library == "equinox" else model)
    values = []
    for _ in range(20):
        trained, state, value = step(trained, state)
        values.append(float(value))
    assert values[-1] < 0.9 * values[0]
    frozen = lambda m: eqx.partition(m, eqq.trainable_mask(m))[1]
    assert eqx.tree_equal(frozen(trained), frozen(model))


# Factors that make up for the error of quantization


def best_error(error, gram, rank):
    """The least weighted error of a product of this rank, by singular values in float64."""
    values, vectors = np.linalg.eigh(np.asarray(gram, np.float64))
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    return np.sum(np.linalg.svd(np.asarray(error, np.float64) @ root, compute_uv=False)[rank:] ** 2)


def weighted_error(error, gram):
    error = np.asarray(error, np.float64)
    return np.trace(error @ gram @ error.T)


@pytest.mark.parametrize("shape", [(24, 10), (10, 24)])
def test_factors_are_the_best_approximation_of_the_error(shape):
    """By the formula, with the inputs of `w @ x` and of `x @ w`, with Gram matrices, mean squares or neither."""
    w, rank = weights(jr.key(0), shape), 3
    for axis, apply in ((-1, lambda m, x: x @ m["w"].T), (-2, lambda m, x: x @ m["w"])):
        model = {"w": w}
        q = eqq.quantize_tree(model, eqq.Int2(), axis=axis)
        x = weights(jr.key(1), (40, shape[axis])) * jnp.logspace(-1, 1, shape[axis])[None]
        for gram in (True, False):
            stats = eqq.calibrate.collect_stats(model, [x], apply=apply, gram=gram)
            adapted = eqq.loraify(q, rank, alpha=8, init=model, inputs=stats)["w"]
            assert adapted.scaling == 8 / 3
            moments = np.asarray(x, np.float64).T @ np.asarray(x, np.float64) / 40
            moments = moments if gram else np.diag(np.diag(moments))
            damped = moments / np.mean(np.diag(moments)) + 0.01 * np.eye(shape[axis])
            left, error = w - adapted.dequantize(), w - q["w"].dequantize()
            left, error = (left, error) if axis == -1 else (left.T, error.T)
            assert weighted_error(left, damped) == pytest.approx(best_error(error, damped, rank), rel=1e-3)
        plain = eqq.loraify(q, rank, init=model)["w"]
        left = w - plain.dequantize()
        assert jnp.sum(left**2) == pytest.approx(best_error(w - q["w"].dequantize(), np.eye(shape[1]), rank), rel=1e-3)


@pytest.mark.long
def test_factors_of_convolutions_stacks_and_wrapped_weights(getkey):
    """Each layer of a stack, and each kernel as one matrix; all ranks together leave no error."""
    conv, stack = eqx.nn.Conv2d(2, 6, 3, key=getkey()), {"w": weights(getkey(), (3, 8, 8))}
    images, x = weights(getkey(), (4, 2, 8, 8)), weights(getkey(), (5, 3, 8))
    apply = lambda m, x: jnp.einsum("bsi,soi->bso", x, m["w"])
    for model, batch, run in ((conv, images, None), (stack, x, apply)):
        stats = eqq.calibrate.collect_stats(model, [batch], apply=run, gram=True)
        q = eqq.quantize_tree(model, "int2")
        errors = []
        for rank in (1, 4, 8):
            adapted = eqq.loraify(q, rank, init=model, inputs=stats)
            w, found = (jtu.tree_leaves(m)[0] for m in (model, eqq.merge_lora(adapted, dense=True)))
            errors.append(float(jnp.mean((w - found) ** 2)))
        assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-9
    model = mlp(getkey())
    q = eqq.quantize_tree(model, "int2", activations="int8")
    adapted = eqq.loraify(q, 40, init=model)
    found = [
        x.dequantize()
        for x in jtu.tree_leaves(adapted, is_leaf=lambda x: isinstance(x, eqq.arrays.LoraArray))
        if isinstance(x, eqq.arrays.LoraArray)
    ]
    for w, layer in zip(found, model.layers, strict=True):
        assert_close(w, layer.weight, 1e-5)


def test_errors_of_factors_for_the_error(getkey):
    model = mlp(getkey())
    q, x = eqq.quantize_tree(model, "int4"), weights(getkey(), (30, 20))
    stats = eqq.calibrate.collect_stats(model, [x])
    with pytest.raises(ValueError, match="either a `key`, or the float model as `init`. Got neither"):
        eqq.loraify(q, 2)
    with pytest.raises(ValueError, match="Got both"):
        eqq.loraify(q, 2, key=getkey(), init=model)
    with pytest.raises(ValueError, match="they need `init`. Got none"):
        eqq.loraify(q, 2, key=getkey(), inputs=stats)
    with pytest.raises(ValueError, match="`alpha` must not be 0"):
        eqq.loraify(q, 2, 0, init=model)
    with pytest.raises(ValueError, match=r"Got one of shape \(40, 10\) for layers.0.weight of shape \(40, 20\)"):
        eqq.loraify(q, 2, init=eqx.nn.MLP(10, 3, 40, 2, key=getkey()))
    with pytest.raises(ValueError, match="Got none for layers.0.weight"):
        eqq.loraify(q, 2, init=[model])
    with pytest.raises(ValueError, match="statistics of other values of layers.0.weight"):
        eqq.loraify(q, 2, init=mlp(getkey()), inputs=stats)
    with pytest.raises(ValueError, match="Got none for layers.1.weight"):
        only = eqq.calibrate.collect_stats(model, [x], where=lambda m: m.layers[0].weight)
        eqq.loraify(q, 2, init=model, inputs=only)
    with pytest.raises(ValueError, match="layers.0.weight"):
        eqq.loraify(q, 2, init=eqx.tree_at(lambda m: m.layers[0].weight, model, jnp.full((40, 20), jnp.nan)))
