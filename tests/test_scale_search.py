"""Scale rules that search: how much error they leave, and that they are the rules they claim to be."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import eqquant as eqq

from .helpers import assert_same


FORMATS = {
    "int2": lambda **k: eqq.Int2(**k),
    "int2_affine": lambda **k: eqq.Int2(symmetric=False, **k),
    "int4": lambda **k: eqq.Int4(**k),
    "int4_affine": lambda **k: eqq.Int4(symmetric=False, **k),
    "int4_channel": lambda **k: eqq.Int4(block_size=None, **k),
    "int8_block": lambda **k: eqq.Int8(block_size=64, **k),
    "nf4": lambda **k: eqq.NF4(**k),
    "codebook": lambda **k: eqq.Codebook([-1, -0.5, -0.25, 0, 0.25, 0.5, 1], **k),
}
# What the least squared error gains over absmax in dB, on Student-t(3) weights in rows of 512: rounded down. The robust
# rule is held to half of that, being after another error.
GAINS = {
    "int2": 1.0,
    "int2_affine": 1.4,
    "int4": 0.8,
    "int4_affine": 0.2,
    "int4_channel": 2.0,
    "int8_block": 0.3,
    "nf4": 0.2,
    "codebook": 0.5,
}


@pytest.fixture(params=FORMATS)
def name(request):
    return request.param


@pytest.fixture(params=["mse", "hqq"])
def rule(request):
    return request.param


def heavy(shape=(64, 512), seed=0):
    return jr.t(jr.key(seed), 3.0, shape)


def errors(w, format):
    return np.asarray(eqq.quantize(w, format).dequantize(), np.float64) - np.asarray(w, np.float64)


def measure(e, rule):
    return np.square(e) if rule == "mse" else np.abs(e) ** 0.7


def test_gains_on_heavy_tails(name):
    w = heavy()
    by_rule = {rule: np.sum(errors(w, FORMATS[name](scale_rule=rule)) ** 2) for rule in ("absmax", "mse", "hqq")}
    gains = {rule: 10 * np.log10(by_rule["absmax"] / error) for rule, error in by_rule.items()}
    print(name, gains)
    assert gains["mse"] > GAINS[name]
    assert gains["hqq"] > 0
    assert gains["mse"] > gains["hqq"] - 0.05


def test_never_worse_by_its_own_measure(rule, name):
    if name == "int4_channel":
        pytest.skip("its blocks are longer than those compared here")
    # Block by block, whatever the weights: heavy tails, uniform, one-sided, an outlier, zeros, tiny, huge, all alike.
    parts = [
        heavy((64, 64)),
        jr.uniform(jr.key(1), (64, 64), minval=-1.0),
        jnp.abs(heavy((64, 64))),
        jr.normal(jr.key(2), (64, 64)).at[:, 3].set(100.0),
        jnp.zeros((64, 64)),
        jr.normal(jr.key(3), (64, 64)) * 1e-30,
        jr.normal(jr.key(4), (64, 64)) * 1e30,
        jnp.full((64, 64), 0.3),
    ]
    w = jnp.concatenate(parts, axis=-1)
    blocks = np.asarray(w).reshape(64, 8, 64)
    unit = np.maximum(np.max(np.abs(blocks), axis=-1, keepdims=True), 1e-37)
    formats = (FORMATS[name](scale_rule=rule), FORMATS[name]())
    by_block = lambda format: errors(w, format).reshape(blocks.shape) / unit
    found, plain = (measure(by_block(format), rule).sum(axis=-1) for format in formats)
    assert np.isfinite(found).all()
    # An error of float32, 1e-7, is 1e-5 to the power of 0.7, and there are 64.
    assert (found <= plain * (1 + 1e-4) + (1e-12 if rule == "mse" else 2e-3)).all()
    assert found.sum() < plain.sum()


@pytest.mark.parametrize("name", ["int2", "int4", "int8_block", "nf4"])
def test_mse_is_the_least(name):
    # Against every scale from 0.05 to 1.3 of absmax's, in steps of a thousandth.
    w, format = heavy(), FORMATS[name]()
    plain = eqq.quantize(w, format)

    @jax.jit
    def squared(factor):
        q = eqq.quantize(w, format, scale=plain.scale * factor)
        return jnp.sum(jnp.square(q.dequantize() - w).reshape(64, 8, 64), axis=-1)

    least = np.full((64, 8), np.inf)
    for factor in np.linspace(0.05, 1.3, 1251, dtype=np.float32):
        least = np.minimum(least, squared(factor))
    found = np.sum(errors(w, FORMATS[name](scale_rule="mse")).reshape(64, 8, 64) ** 2, axis=-1)
    assert found.sum() < 1.02 * least.sum()
    assert (found < 1.5 * least).all()


def test_hqq_cares_less_for_outliers():
    w = jr.normal(jr.key(0), (64, 512)).at[:, 5::64].set(12.0)
    body = lambda rule: np.delete(errors(w, eqq.Int4(scale_rule=rule)), np.s_[5::64], axis=-1)
    robust, squared, plain = (np.mean(np.abs(body(rule))) for rule in ("hqq", "mse", "absmax"))
    assert robust < squared < plain


def test_absmax_is_the_default(name):
    assert FORMATS[name](scale_rule="absmax") == FORMATS[name]()
    assert hash(FORMATS[name]()) == hash(FORMATS[name](scale_rule="absmax"))
    assert FORMATS[name](scale_rule="mse") != FORMATS[name]()


@pytest.mark.parametrize("format", [eqq.Int4, eqq.NF4])
def test_blocks_are_searched_alone(rule, format):
    # Ragged too: the last block is searched without padding.
    w, format = heavy((4, 150)), format(scale_rule=rule)
    dense = np.asarray(eqq.quantize(w, format).dequantize())
    # Sums of float32 in another order may tip the balance between two scales that are as good.
    close = lambda a, b: np.testing.assert_array_less(np.sum((a - b) ** 2), 1e-3 * np.sum(np.square(b)))
    close(dense[2], np.asarray(eqq.quantize(w[2], format).dequantize()))
    close(dense[:, 128:], np.asarray(eqq.quantize(w[:, 128:], format).dequantize()))


def test_transformations(rule):
    w, format = heavy((3, 8, 70)), eqq.Int4(scale_rule=rule)
    one = eqq.quantize(w[1], format)
    assert_same(jax.jit(lambda w: eqq.quantize(w, format))(w[1]), one)
    mapped = jtu.tree_map(lambda a: a[1], jax.vmap(lambda w: eqq.quantize(w, format))(w))
    assert jtu.tree_structure(mapped) == jtu.tree_structure(one)
    # XLA may sum in another order.
    np.testing.assert_allclose(mapped.dequantize(), one.dequantize(), atol=0.05 * float(jnp.max(one.scale)))
    assert jax.eval_shape(lambda w: eqq.quantize(w, format), w).shape == w.shape


def test_models(rule):
    model = eqx.nn.Sequential([eqx.nn.Conv2d(3, 8, 3, key=jr.key(0)), eqx.nn.Linear(8, 5, key=jr.key(1))])
    searched = eqq.quantize_tree(model, eqq.Int2(scale_rule=rule))
    plain = eqq.quantize_tree(model, eqq.Int2())
    for n in range(2):
        w = model.layers[n].weight
        found, old = (np.asarray(m.layers[n].weight.dequantize() - w) for m in (searched, plain))
        assert np.sum(found**2) < np.sum(old**2)


def test_dtypes_and_stochastic_rounding(rule):
    w, format = heavy(), eqq.Int4(scale_rule=rule)
    half = w.astype(jnp.bfloat16)
    assert_same(eqq.quantize(half, format).astype(jnp.float32), eqq.quantize(half.astype(jnp.float32), format))
    rounded = eqq.quantize(w, format, key=jr.key(0))
    np.testing.assert_array_equal(rounded.scale, eqq.quantize(w, format).scale)


def test_huge_weights_stay_finite(rule):
    w = jnp.array([[3.4e38, -3.4e38, 1e38, 0.0]])
    for format in (eqq.Int4(scale_rule=rule), eqq.Int8(symmetric=False, scale_rule=rule)):
        assert jnp.isfinite(eqq.quantize(w, format).dequantize()).all()


def test_unknown_rule():
    for format in (eqq.Int4, eqq.NF4, lambda scale_rule: eqq.Codebook([0, 1], scale_rule=scale_rule)):
        # The type checker of the tests is the first to find it.
        with pytest.raises((ValueError, TypeCheckError), match="minmax"):
            format(scale_rule="minmax")
