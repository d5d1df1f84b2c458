"""`distill`: never worse than its start; trained and untouched leaves."""

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
from eqquant._training.distill import _relative_error, _TrainableFloats, _TrainableQuantized
from eqquant._training.divergence import compare_logits

from .helpers import assert_same, outputs, weights


@pytest.fixture(scope="module")
def setting():
    layers = [eqx.nn.Linear(16, 32, key=jr.key(0)), eqx.nn.Lambda(jnp.tanh), eqx.nn.LayerNorm(32)]
    model = eqx.nn.Sequential([*layers, eqx.nn.Linear(32, 8, key=jr.key(1))])
    x = list(weights(jr.key(2), (10, 32, 16)))
    return model, x, weights(jr.key(3), (256, 16))


def error(q, model, x):
    return float(jnp.mean(jnp.square(outputs(q, x) - outputs(model, x))))


@pytest.mark.long
@pytest.mark.parametrize("train, gain", [("scales", 0.8), ("codes", 0.5)])
@pytest.mark.parametrize("format", [eqq.Int2(16, symmetric=False), eqq.NF4(32)], ids=["int2", "nf4"])
def test_distillation_lowers_the_loss(setting, train, gain, format):
    model, x, held_out = setting
    q = eqq.quantize_tree(model, format)
    found = eqq.distill(q, model, x, train=train, optimizer=optax.adam(3e-3), progress=False)
    assert jtu.tree_structure(found) == jtu.tree_structure(q)
    assert error(found, model, held_out) < gain * error(q, model, held_out)
    same = lambda a, b: bool(jnp.array_equal(a, b))
    assert same(eqq.unpack(found[0].weight), eqq.unpack(q[0].weight)) == (train == "scales")
    assert not same(found[0].weight.scale, q[0].weight.scale) and not same(found[2].weight, q[2].weight)
    assert eqq.tree_nbytes(found) == eqq.tree_nbytes(q)


@pytest.mark.long
@pytest.mark.parametrize("format", ["trellis2", "iq2_s"])
def test_scales_of_vectors_are_trained(setting, format):
    model, x, held_out = setting
    q = eqq.quantize_tree(model, format)
    found = eqq.distill(q, model, x, optimizer=optax.adam(3e-3), progress=False)
    assert error(found, model, held_out) < 0.8 * error(q, model, held_out)
    assert jnp.array_equal(found[0].weight.codes, q[0].weight.codes)
    assert jnp.array_equal(found[0].weight.scale, q[0].weight.scale) == (format == "iq2_s")  # its scales are codes
    with pytest.raises(ValueError, match="weight: `train` must be .scales. for .*several values"):
        eqq.distill(q, model, x, train="codes", progress=False)


@pytest.mark.long
def test_the_reported_loss_equals_the_loss_of_the_result(setting, capsys):
    model, x, _ = setting
    q = eqq.quantize_tree(model, eqq.Int4(16))
    spoils = optax.adam(optax.piecewise_constant_schedule(3e-3, {10: 100.0}))  # from the second pass on
    found = eqq.distill(q, model, x, held_out=x[:2], train="codes", passes=3, optimizer=spoils)
    lines = capsys.readouterr().out.splitlines()
    losses = [float(lines[0].split()[3]), *(float(line.split()[-1]) for line in lines[1:])]
    assert losses[1] == min(losses) < losses[-1]
    relative = lambda q, x: jnp.sum(jnp.square(outputs(q, x) - outputs(model, x))) / jnp.sum(outputs(model, x) ** 2)
    for m, loss in ((q, losses[0]), (found, min(losses))):
        np.testing.assert_allclose(np.mean([relative(m, b) for b in x[:2]]), loss, rtol=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("activations", [None, "mxfp8"])
def test_low_rank_factors_train_alone(setting, activations):
    model, x, held_out = setting
    q = eqq.quantize_tree(model, "mxfp4", activations=activations)
    lora = eqq.loraify(q, rank=4, key=jr.key(4))
    found = eqq.distill(lora, model, x, progress=False)
    assert error(found, model, held_out) < 0.7 * error(q, model, held_out)
    frozen = lambda m: eqx.filter(eqx.filter(m, eqq.trainable_mask(lora), inverse=True), eqx.is_array)
    assert_same(frozen(found), frozen(lora))
    factors = lambda m: jtu.tree_leaves(eqx.filter(m, eqq.trainable_mask(lora)))
    assert not any(bool((a == b).all()) for a, b in zip(factors(found), factors(lora), strict=True))
    with pytest.raises(ValueError, match="needs a model without low-rank factors"):
        eqq.distill(lora, model, x, train="codes", progress=False)


@pytest.mark.long
@pytest.mark.parametrize("format, activations", [("mxfp4", "mxfp8"), ("nvfp4", "nvfp4"), ("int2", "stats")])
def test_simulated_weights_and_learned_scales(setting, format, activations):
    """Masters and learned scales train, those of activations too; the model that they end in computes the same."""
    model, x, held_out = setting
    learns = activations == "stats"
    activations = eqq.calibrate.collect_stats(model, x) if learns else activations
    start = eqq.quantize_tree(model, format, activations=activations, simulate=True, learn_scales=learns)
    found = eqq.distill(start, model, x, optimizer=optax.adam(3e-3), progress=False)
    end = eqq.finalize(found)
    assert_same(outputs(end, held_out), outputs(found, held_out))
    assert error(end, model, held_out) < 0.85 * error(start, model, held_out)
    changes = lambda of: not bool((of(found) == of(start)).all())
    assert changes(lambda m: m[0].weight.array.master) and changes(lambda m: m[0].bias) and changes(lambda m: m[2].bias)
    if learns:  # by some percent
        for of in (lambda m: m[0].weight.array.log_factor, lambda m: m[0].weight.log_factor):
            assert 0.003 < float(jnp.abs(of(found)).max()) < 0.3


def test_never_worse_than_its_start(setting, capsys):
    model, x, _ = setting
    q = eqq.quantize_tree(model, "int8")
    found = eqq.distill(q, model, x, optimizer=optax.sgd(1e4), patience=2, passes=5)
    jtu.tree_map(lambda a, b: assert_same(a, b) if eqx.is_array(a) else None, found, q)
    # The mean of every fifth batch, and two passes without a lower loss.
    start, *passes = capsys.readouterr().out.splitlines()
    pairs = [[np.asarray(outputs(m, b), np.float64) for m in (q, model)] for b in (x[0], x[5])]
    losses = [np.sum((a - b) ** 2) / np.sum(b**2) for a, b in pairs]
    assert float(start.split()[3]) == pytest.approx(np.mean(losses), rel=5e-4) != pytest.approx(losses[0], rel=5e-4)
    assert [line.split(",")[0] for line in passes] == ["distill: pass 1 of 5", "distill: pass 2 of 5"]


def test_what_is_trained_by_hand():
    """Relative changes of scales and floats, and codes in tens of levels; a model is what its training saw."""
    w, rng = weights(jr.key(0), (48, 3)), np.random.default_rng(0)
    changes = {"scale": 0.1 * rng.standard_normal((3, 2)), "codes": 0.05 * rng.standard_normal((3, 48))}
    changes = {name: jnp.asarray(x, jnp.float32) for name, x in changes.items()}
    bias = jnp.asarray([3.0, -4, 0, 0])

    @jax.jit
    def compute(w, changes, bias):
        q = eqq.quantize(w, eqq.Int4(32, symmetric=False, scale_dtype="float16"), axis=0)
        part = _TrainableQuantized(q, True)
        assert jtu.tree_map(jnp.shape, part.start()) == jtu.tree_map(jnp.shape, changes)
        slopes = jax.grad(lambda c: jnp.sum(part.value(c) * w))(changes)
        floats = [_TrainableFloats(x).value(jnp.arange(4.0)) for x in (bias, 0 * bias)]
        end = part.finalize(changes)
        return q, part.value(changes), end, (end.dequantize(), eqq.unpack(end), eqq.unpack(q)), slopes, floats

    q, value, end, (dense, codes, old), slopes, floats = compute(w, changes, bias)
    np.testing.assert_allclose(floats[0], np.asarray(bias) + 2.5 * np.arange(4), rtol=1e-6)
    np.testing.assert_allclose(floats[1], 0.01 * np.arange(4), rtol=1e-6)
    zero, spread = np.asarray(q.zero_point, np.float64), lambda x: np.repeat(x, 32, 1)[:, :48]
    scale = np.float16(np.asarray(q.scale) * (1 + np.asarray(changes["scale"]))).astype(np.float64)
    moved = np.clip(np.round(np.asarray(old).T + 10 * np.asarray(changes["codes"], np.float64)), 0, 15)
    np.testing.assert_array_equal(np.asarray(codes).T, moved)
    np.testing.assert_allclose(value.T, (moved - spread(zero)) * spread(scale), rtol=1e-5)
    np.testing.assert_array_equal(value, dense)
    assert jtu.tree_structure(end) == jtu.tree_structure(q)
    product = (moved - spread(zero)) * np.asarray(w, np.float64).T * spread(np.asarray(q.scale, np.float64))
    np.testing.assert_allclose(slopes["scale"][:, 0], product[:, :32].sum(1), rtol=1e-3)
    np.testing.assert_allclose(slopes["scale"][:, 1], product[:, 32:].sum(1), rtol=1e-3)
    np.testing.assert_allclose(slopes["codes"], 10 * spread(scale) * np.asarray(w).T, rtol=1e-4)


def test_the_loss_is_relative_to_all_outputs():
    a, b = ([np.arange(3.0), np.ones((2, 2)), np.arange(2)], [np.arange(3.0) + 1, np.zeros((2, 2)), np.arange(2) + 9])
    a, b = (jtu.tree_map(lambda x: jnp.asarray(x, jnp.int32 if x.dtype == int else jnp.float32), x) for x in (a, b))
    assert float(jax.jit(_relative_error)(a, b)) == pytest.approx((3 + 4) / (1 + 4 + 9))


@pytest.mark.long
def test_quantized_scales_are_not_trained(setting):
    model, x, _ = setting
    q = eqq.quantize_tree(model, eqq.NF4(16, double_quant=True))
    found = eqq.distill(q, model, x, progress=False)
    assert_same(found[0].weight, q[0].weight)
    assert not jnp.array_equal(found[0].bias, q[0].bias)


class ResidualLayer(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x, *, key=None):
        return x + jax.nn.tanh(self.linear(x))


def run_layer(layer, x):
    return jax.vmap(layer)(x)


@pytest.mark.long
def test_blocks(capsys):
    """Blocks train in turn, on the outputs of the trained blocks before. Other leaves do not change."""
    linear = lambda n: eqx.nn.Linear(16, 16, key=jr.key(n))
    model = eqx.nn.Sequential([linear(0), ResidualLayer(linear(1)), ResidualLayer(linear(2)), linear(3)])
    x, held_out = list(weights(jr.key(4), (10, 32, 16))), weights(jr.key(5), (256, 16))
    q = eqq.quantize_tree(model, eqq.Int2(16))
    blocks = [(lambda m, n=n: m[n], run_layer) for n in range(3)]
    kept = []
    found = eqq.distill_blocks(q, model, x, blocks, optimizer=optax.adam(3e-3), after_each=kept.append)
    assert jtu.tree_structure(found) == jtu.tree_structure(q)
    assert error(found, model, held_out) < 0.8 * error(q, model, held_out)
    assert_same(found[3].weight, q[3].weight)
    assert len(kept) == 3
    assert_same(kept[0][1].linear.weight, q[1].linear.weight)
    assert_same(kept[-1][2].linear.weight, found[2].linear.weight)
    # The second block alone, on the outputs of the trained first block.
    inputs, wanted = (jax.vmap(m[0])(held_out) for m in (found, model))
    of = lambda block: float(jnp.mean(jnp.square(run_layer(block, inputs) - run_layer(model[1], wanted))))
    assert of(found[1]) < of(q[1])
    assert "block 3 of 3, pass 1" in capsys.readouterr().out


@pytest.mark.long
def test_a_block_gets_what_the_trained_blocks_before_it_return(capsys):
    model = eqx.nn.Sequential([eqx.nn.Linear(16, 16, key=jr.key(n)) for n in range(2)])
    q, x = eqq.quantize_tree(model, eqq.Int2(16)), list(weights(jr.key(2), (2, 32, 16)))
    blocks = [(lambda m, n=n: m[n], run_layer) for n in range(2)]
    found = eqq.distill_blocks(q, model, x[:1], blocks, passes=1, optimizer=optax.adam(0.03), held_out=x[1:])
    outputs, wanted = q[1], model[1]
    outputs, wanted = (jax.vmap(f)(jax.vmap(g)(x[1])) for f, g in ((outputs, found[0]), (wanted, model[0])))
    start = float(jnp.sum(jnp.square(outputs - wanted)) / jnp.sum(jnp.square(wanted)))
    (shown,) = re.findall(r"block 2 of 2, held-out loss ([\d.]+) at the start", capsys.readouterr().out)
    np.testing.assert_allclose(float(shown), start, rtol=1e-3)


@pytest.mark.long
def test_blocks_that_are_simulated_or_have_factors():
    """A block without factors does not train beside one that has some."""
    model = eqx.nn.Sequential([eqx.nn.Linear(16, 16, key=jr.key(n)) for n in range(3)])
    q, x = eqq.quantize_tree(model, eqq.Int2(16)), list(weights(jr.key(2), (5, 32, 16)))
    blocks = [(lambda m, n=n: m[n], run_layer) for n in range(3)]
    adam = optax.adam(3e-3)
    run = lambda q: eqq.distill_blocks(q, model, x, blocks, train="scales", optimizer=adam, passes=4, progress=False)
    lora = eqq.loraify(q, {"layers.1": 4}, key=jr.key(1))
    found = run(lora)
    assert_same(found[0], lora[0])
    assert_same(found[2], lora[2])
    assert_same(found[1].weight.base, lora[1].weight.base)
    assert not bool((found[1].weight.b == lora[1].weight.b).all())
    simulated = eqq.quantize_tree(model, eqq.Int2(16), simulate=True)
    found = run(simulated)
    assert not any(bool((a.weight.master == b.weight.master).all()) for a, b in zip(found, simulated, strict=True))


def test_errors(setting):
    model, x, _ = setting
    q = eqq.quantize_tree(model, "int4")
    of = lambda q=q, model=model, x=x, **kwargs: eqq.distill(q, model, x, progress=False, **kwargs)
    with pytest.raises(ValueError, match="must hold quantized arrays"):
        of(model)
    with pytest.raises(ValueError, match="Got 0 and 1"):
        of(x=x[:1])
    with pytest.raises(ValueError, match="Got another at layers.0.weight"):
        of(model=eqx.tree_at(lambda m: m[0].weight, model, jnp.zeros((32, 15))))
    for name, count in (("passes", 0), ("patience", -1), ("patience", 0)):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1. Got {count}"):
            of(**{name: count})
    with pytest.raises(ValueError, match="must be finite at the start"):
        of(x=[jnp.full((4, 16), jnp.nan)] * 5)


def test_blocks_run_once_and_what_is_kept_may_be_in_files(setting, tmp_path):
    """A block that is not quantized, behind the last one that is, does not run."""
    model, x, _ = setting
    q = eqq.quantize_tree(model, {"layers.0.*": eqq.Int2(16), "*": None})
    calls, found = [], []

    def count(layer, x):
        jax.debug.callback(lambda: calls.append(len(calls)))
        return jax.vmap(layer)(x)

    never = lambda layer, x: pytest.fail("must not run")
    applies = [run_layer, count, never, never]
    blocks = [(lambda m, n=n: m.layers[n], apply) for n, apply in enumerate(applies)]
    run = lambda q, **options: eqq.distill_blocks(q, model, x, blocks, passes=1, progress=False, **options)
    see = lambda m: found.append(sum(file.is_file() for file in tmp_path.rglob("*")))
    first = run(q, after_each=see)
    assert len(found) == 4 and not calls
    jtu.tree_map(assert_same, *(eqx.filter(m, eqx.is_array) for m in (first, run(q, keep_in=tmp_path, after_each=see))))
    assert found[4] == len(x) and not list(tmp_path.iterdir())
    blocks[2:] = [(lambda m: m.layers[2], run_layer), (lambda m: m.layers[3], run_layer)]
    run(eqq.quantize_tree(model, {"layers.3.*": eqq.Int2(16), "*": None}), keep_dtype="bfloat16")
    jax.effects_barrier()
    assert len(calls) == 2 * len(x)


# Divergence of logits


class Words(eqx.Module):
    embedding: eqx.nn.Embedding
    layer: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b, c = jr.split(key, 3)
        self.embedding, self.layer = eqx.nn.Embedding(40, 16, key=a), eqx.nn.Linear(16, 16, key=b)
        self.head = eqx.nn.Linear(16, 40, key=c)

    def hidden(self, word):
        return jnp.tanh(self.layer(self.embedding(word)))

    def __call__(self, word):
        return self.head(4 * self.hidden(word))


def logits_of(model, ids):
    return jax.vmap(jax.vmap(model))(ids)


def hidden_of(model, ids):
    return jax.vmap(jax.vmap(model.hidden))(ids)


def head_of(model, x):
    return jax.vmap(model.head)(4 * x)


@pytest.fixture(scope="module")
def words():
    model = Words(jr.key(0))
    return eqq.quantize_tree(model, eqq.Int2(16)), model, list(jr.randint(jr.key(1), (5, 3, 100), 0, 40))


def divergence(q, model, ids, temperature=1.0, top_k=None):
    """By the formula, in float64."""
    softmax = lambda z: np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    p, r = (softmax(np.asarray(logits_of(m, ids), np.float64).reshape(-1, 40) / temperature) for m in (model, q))
    if top_k is not None:
        best = np.argsort(-p, axis=-1)[:, :top_k]
        p, r = (np.take_along_axis(x, best, -1) for x in (p, r))
        p, r = (np.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in (p, r))
    return temperature**2 * np.mean(np.sum(p * np.log(p / r), -1))


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"top_k": 5}, {"top_k": 5, "temperature": 0.5}])
def test_the_divergence_of_logits(words, capsys, options):
    """The loss is the formula; with a head in chunks of positions, some whole and one not, it is the same."""
    q, model, data = words
    expected = divergence(q, model, data[0], **options)
    found = []
    for apply in ({"apply": logits_of}, {"apply": hidden_of, "head": head_of}):
        trained = eqq.distill(q, model, data, loss="kl", passes=2, **apply, **options)
        found.append(trained)
        lines = capsys.readouterr().out.splitlines()
        start, end = float(lines[0].split()[3]), min(float(line.split()[-1]) for line in lines[1:])
        assert start == pytest.approx(expected, rel=2e-3)
        assert end < start and divergence(trained, model, data[0], **options) == pytest.approx(end, rel=2e-3)
    scales = [jnp.concatenate([m.layer.weight.scale.ravel(), m.head.weight.scale.ravel()]) for m in found]
    np.testing.assert_allclose(*scales, rtol=1e-3)


def test_logits_of_a_chunk_at_a_time(words):
    """No array of the loss or of its gradients holds the logits of all 300 positions."""
    _, model, data = words
    for top_k in (None, 3):
        criterion = compare_logits(1.0, top_k, head_of)

        def compute_loss(scale, model, ids, criterion=criterion):
            changed = eqx.tree_at(lambda m: m.head.weight, model, scale * model.head.weight)
            wanted = criterion.summarize(model, hidden_of(model, ids))
            return criterion.loss(changed, hidden_of(changed, ids), model, wanted)

        program = str(eqx.filter_make_jaxpr(jax.grad(compute_loss))(jnp.ones(()), model, data[0])[0])
        assert "[256,40]" in program and "[300,40]" not in program and "[3,100,40]" not in program


def test_a_float_model_that_runs_in_each_step_or_once(words):
    """It runs in each step; with the best tokens alone once for each batch."""
    q, model, data = words
    runs, counts = [], []

    def apply(model, ids):
        jax.debug.callback(lambda: runs.append(None))
        return logits_of(model, ids)

    for options in ({}, {"top_k": 3}):
        eqq.distill(q, model, data, apply=apply, loss="kl", passes=1, progress=False, **options)
        jax.effects_barrier()
        counts.append(len(runs))
        runs.clear()
    students = 4 + 2 * 1  # four batches to train on, and one held out, before and after
    assert counts == [2 * students, students + 5]


def test_errors_of_the_divergence(words):
    q, model, data = words
    run = lambda **options: eqq.distill(q, model, data, progress=False, **{"apply": logits_of, **options})
    with pytest.raises(ValueError, match="`temperature` must be positive and finite. Got 0."):
        run(loss="kl", temperature=0)
    with pytest.raises(ValueError, match="`top_k` must be at least 1. Got 0."):
        run(loss="kl", top_k=0)
    with pytest.raises(ValueError, match="must come with `loss=.kl.`. Got another loss."):
        run(top_k=3)
    with pytest.raises(ValueError, match=r"must return one array of logits .* Got int32 \(3, 100\)."):
        run(loss="kl", apply=lambda model, ids: ids)
    nan = eqx.tree_at(lambda m: m.layer.bias, model, model.layer.bias.at[0].set(jnp.nan))
    with pytest.raises(ValueError, match="The loss must be finite at the start. Got nan"):
        eqq.distill(q, nan, data, apply=logits_of, loss="kl", progress=False)


@pytest.mark.usefixtures("without_type_checks")
def test_loss_is_known(setting):
    model, x, _ = setting
    with pytest.raises(ValueError, match="`loss` must be a function, or None"):
        eqq.distill(eqq.quantize_tree(model, "int4"), model, x, loss="kll", progress=False)
