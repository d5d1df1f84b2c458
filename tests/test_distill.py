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


def test_never_worse_than_its_start(setting):
    model, x, _ = setting
    q = eqq.quantize_tree(model, "int8")
    found = eqq.distill(q, model, x, optimizer=optax.sgd(1e4), patience=2, progress=False)
    jtu.tree_map(lambda a, b: assert_same(a, b) if eqx.is_array(a) else None, found, q)


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
