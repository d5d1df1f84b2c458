"""GPTQ, and scales weighted by inputs: against two independent libraries, brute force, and each other."""

import dataclasses
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._methods import gptq
from eqquant._methods.gptq import OUTPUT_DAMPING, ROWS
from eqquant.calibrate import collect_stats

from .helpers import assert_same, FORMATS, heavy_tailed, outputs, SWEPT_SCALARS, weights


class Fixed(eqq.extend.AbstractScaleMethod):
    """Scales that are known."""

    scale: np.ndarray

    def choose_scales(self, blocks, format):
        return jnp.asarray(self.scale, jnp.float32).reshape(blocks.shape)[..., 0], None


GOLDEN = Path(__file__).parent / "golden" / "gptq_query_layer0.npz"


def inputs(features=96, rows=400, seed=0):
    """Inputs of very different sizes that depend on each other."""
    a, b = jr.split(jr.key(seed))
    mixing = jnp.eye(features) + 0.3 * weights(b, (features, features))
    return weights(a, (rows, features)) * jnp.geomspace(0.1, 3, features)[None] @ mixing


def compute_gram(x):
    return x.T @ x / len(x)


def loss(q, w, gram):
    error = np.asarray(eqq.dequantize(q), np.float64) - np.asarray(w, np.float64)
    return float(np.sum(error @ np.asarray(gram, np.float64) * error))


@pytest.mark.long
@pytest.mark.parametrize(
    "name, format", [("int4_g64_asym", eqq.Int4(64, symmetric=False)), ("int2_g32_asym", eqq.Int2(32, symmetric=False))]
)
def test_codes_equal_two_libraries(name, format):
    """The first rows of a layer of a real model, as AutoGPTQ and llm-compressor quantize it."""
    golden = np.load(GOLDEN)
    length = golden["weight"].shape[1]
    lower = np.zeros((length, length), np.float32)
    lower[np.tril_indices(length)] = golden["hessian_lower"]
    hessian = np.tril(lower, -1).T + lower
    q = eqq.quantize(golden["weight"], format, method=eqq.GPTQ(gram=hessian))
    codes, scale, zero = (golden[f"{name}.{part}"] for part in ("codes", "scale", "zero_point"))
    np.testing.assert_allclose(q.scale, scale, rtol=1e-6)
    np.testing.assert_array_equal(q.zero_point, zero)
    assert np.mean(np.asarray(eqq.unpack(q)) == codes) >= 0.999
    size = format.block_size
    theirs = (codes - np.repeat(zero, size, 1).astype(np.float32)) * np.repeat(scale, size, 1)
    assert loss(q, golden["weight"], hessian) <= loss(theirs, golden["weight"], hessian) * (1 + 1e-5)


@pytest.mark.parametrize("name", SWEPT_SCALARS)
def test_every_format(name):
    format, x = FORMATS[name].format, inputs()
    w = weights(jr.key(1), (16, 96)) * 0.1
    q = eqq.quantize(w, format, method=eqq.GPTQ(gram=compute_gram(x)))
    plain = eqq.quantize(w, format)
    assert jax.tree.structure(q) == jax.tree.structure(plain)
    np.testing.assert_array_equal(q.scale, plain.scale)
    if format.bits < 8:  # with more bits, rounding of float32 and of scales dominates
        assert loss(q, w, compute_gram(x)) < 0.8 * loss(plain, w, compute_gram(x))


@pytest.mark.long
def test_order_and_scales_lower_the_error():
    x, w = inputs(), heavy_tailed((64, 96), freedom=5.0)
    gram = compute_gram(x)
    of = lambda **kwargs: loss(eqq.quantize(w, eqq.Int2(32), method=eqq.GPTQ(gram=gram, **kwargs)), w, gram)
    assert of() < of(order=None)
    assert of(method=eqq.MSE()) < of()


@pytest.mark.long
def test_codes_computed_by_hand(monkeypatch):
    """Against the same steps in float64, one column at a time, with an explicit inverse; for any multiple of it."""
    monkeypatch.setattr(gptq, "WIDTH", 40)  # three parts, the last of which is shorter
    w, draw = np.asarray(weights(jr.key(3), (2, 5, 96))), np.random.default_rng(0).standard_normal
    x = draw((2, 150, 96)) * np.geomspace(0.1, 3, 96) @ (np.eye(96) + 0.3 * draw((96, 96)))
    x[1, :, 5:45] = 0
    grams = np.swapaxes(x, 1, 2) @ x / 150
    quantize = jax.jit(lambda gram: eqq.quantize(w, eqq.NF4(32), method=eqq.GPTQ(gram=gram, damping=0.1)))
    q, *others = (quantize(jnp.asarray(grams, jnp.float32) * 2.0**n) for n in (0, 60, -60))
    for other in others:
        assert_same(other, q)
    levels, unit = np.asarray(eqq.NF4().codebook), np.abs(w).reshape(2, 5, 3, 32).max(-1).repeat(32, -1)
    codes, found, others = np.asarray(eqq.unpack(q)), np.asarray(q.dequantize(), np.float64), 0
    for n, gram in enumerate(grams):
        live = np.diag(gram) > 0
        damped = gram + 0.1 * np.mean(np.diag(gram)[live]) * np.eye(96)
        left, order = w[n].astype(np.float64), np.argsort(-np.diag(gram), kind="stable")
        for i, column in enumerate(order):
            values = left[:, column] / unit[n, :, column]
            others += np.count_nonzero(np.abs(values[:, None] - levels).argmin(-1) != codes[n, :, column])  # of ties
            inverse = np.linalg.inv(damped[np.ix_(order[i:], order[i:])])
            left[:, order[i:]] -= np.outer((left[:, column] - found[n, :, column]) / inverse[0, 0], inverse[0])
    assert others <= 2


@pytest.mark.long
def test_columns_without_inputs():
    x, w = inputs().at[:, 5:9].set(0), weights(jr.key(1), (8, 96))
    q, plain = eqq.quantize(w, "int4", method=eqq.GPTQ(gram=compute_gram(x))), eqq.quantize(w, "int4")
    np.testing.assert_array_equal(eqq.unpack(q)[:, 5:9], eqq.unpack(plain)[:, 5:9])
    assert loss(q, w, compute_gram(x)) < 0.8 * loss(plain, w, compute_gram(x))
    # Without any inputs all codes are the nearest.
    assert_same(eqq.quantize(w, "int4", method=eqq.GPTQ(gram=jnp.zeros((96, 96)))), plain)


@pytest.mark.parametrize("damping", [0, 0.01])
def test_fewer_observed_inputs_than_columns(damping):
    x, w = inputs(rows=20), weights(jr.key(1), (8, 96))
    q = eqq.quantize(w, "int4", method=eqq.GPTQ(gram=compute_gram(x), damping=damping))
    assert loss(q, w, compute_gram(x)) < 0.5 * loss(eqq.quantize(w, "int4"), w, compute_gram(x))


@pytest.mark.long
def test_stacks_and_other_axes():
    x, w = jnp.stack([inputs(seed=n) for n in range(3)]), weights(jr.key(1), (3, 8, 96))
    grams = jax.vmap(compute_gram)(x)
    of = lambda w, gram, **kwargs: eqq.quantize(w, eqq.Int4(32), method=eqq.GPTQ(gram=gram), **kwargs)
    stacked = of(w, grams)
    for n in (0, 2):
        assert_same(jax.tree.map(lambda a: a[n], stacked), of(w[n], grams[n]))
    np.testing.assert_array_equal(of(w.mT, grams, axis=-2).dequantize(), stacked.dequantize().mT)
    # One Gram matrix for all heads of one input.
    heads = of(w, grams[0])
    np.testing.assert_array_equal(heads[1], of(w[1], grams[0]).dequantize())


@pytest.mark.long
def test_under_jit_a_gram_matrix_that_is_not_finite_spoils_the_array():
    w, gram = weights(jr.key(1), (8, 64)), compute_gram(inputs(64))
    of = jax.jit(lambda w, gram: eqq.quantize(w, "int4", method=eqq.GPTQ(gram=gram)).dequantize())
    np.testing.assert_array_equal(of(w, gram), eqq.quantize(w, "int4", method=eqq.GPTQ(gram=gram)).dequantize())
    assert jnp.isnan(of(w, gram.at[3, 4].set(jnp.nan))).all()


# Errors of rows, weighed by gradients


def with_gradients(features=96, rows=24, seed=0):
    """Statistics of a weight whose outputs the model mixes, and the Gram matrices of both sides."""
    w = jr.normal(jr.key(seed), (rows, features))
    mixing = jr.normal(jr.key(seed + 1), (rows, rows)) * jnp.geomspace(0.05, 3, rows)[None]
    apply = lambda m, x: x @ m["w"].T @ mixing
    data = list(inputs(features, seed=seed).reshape(8, -1, features))
    stats = collect_stats({"w": w}, data, apply=apply, gram=True, gradients=True)["w"]
    return w, stats


def loss_of_both(q, w, stats):
    error = np.asarray(eqq.dequantize(q), np.float64) - np.asarray(w, np.float64)
    return float(np.sum((stats.output_gram @ error @ stats.gram) * error))


@pytest.mark.long
@pytest.mark.parametrize("rows", [40, 75])  # some rows are found together
def test_rows_make_up_for_errors_by_hand(rows):
    """Against the same steps in float64, with explicit inverses."""
    w, stats = with_gradients(rows=rows)
    q = eqq.quantize(w, eqq.Int4(32), method=eqq.GPTQ(stats))
    both = np.asarray(stats.output_gram) + OUTPUT_DAMPING * np.mean(np.diag(stats.output_gram)) * np.eye(rows)
    left, scale = np.asarray(w, np.float64), np.repeat(np.asarray(q.scale), 32, 1)
    for first in range(0, rows, ROWS):
        own, rest = slice(first, first + ROWS), slice(first, rows)
        # These rows alone, with the scales of the first weight.
        alone = eqq.quantize(
            left[own].astype(np.float32), eqq.Int4(32), method=eqq.GPTQ(gram=stats.gram, method=Fixed(scale[own]))
        )
        inverse = np.linalg.inv(both[rest, rest])
        count = len(left[own])
        change = inverse[:, :count] @ np.linalg.solve(
            inverse[:count, :count], left[own] - np.asarray(alone.dequantize())
        )
        assert np.mean(np.abs(np.asarray(q.dequantize())[own] - alone.dequantize()) < 1e-5) > 0.95
        left[rest] -= change


@pytest.mark.long
@pytest.mark.parametrize("format", [eqq.Int2(32), eqq.Int4(32, symmetric=False), eqq.NF4(), eqq.formats.Trellis(2)])
def test_rows_lower_the_error_of_all_outputs(format):
    # Without native kernels the search of a trellis takes long.
    w, stats = with_gradients(16 if isinstance(format, eqq.formats.Trellis) else 96, 5 * ROWS)
    rows_alone = dataclasses.replace(stats, output_gram=None)
    q, alone = (eqq.quantize(w, format, method=eqq.GPTQ(x)) for x in (stats, rows_alone))
    assert jax.tree.structure(q) == jax.tree.structure(alone)
    np.testing.assert_array_equal(q.scale, alone.scale)
    assert loss_of_both(q, w, stats) < 0.7 * loss_of_both(alone, w, stats)
    # Rows that do not depend on each other are quantized alone, also those without a gradient.
    apart = dataclasses.replace(stats, output_gram=np.diag([*range(5 * ROWS - 1), 0.0]))
    assert_same(eqq.quantize(w, format, method=eqq.GPTQ(apart)), alone)


@pytest.mark.long
def test_rows_of_stacks_and_other_axes():
    (w, stats), (other, others) = with_gradients(), with_gradients(seed=5)
    stack = lambda name: np.stack([getattr(stats, name), getattr(others, name)])
    both = dataclasses.replace(
        stats,
        shape=(2, *w.shape),
        rows=np.ones(2),
        gram=stack("gram"),
        output_gram=stack("output_gram"),
        fingerprint=None,
    )
    stacked = eqq.quantize(jnp.stack([w, other]), "int4", method=eqq.GPTQ(both))
    for n, (x, known) in enumerate(((w, stats), (other, others))):
        assert_same(jax.tree.map(lambda a, n=n: a[n], stacked), eqq.quantize(x, "int4", method=eqq.GPTQ(known)))
    turned = dataclasses.replace(stats, shape=w.T.shape, axis=-2, fingerprint=None)
    q = eqq.quantize(w.T, "int4", axis=-2, method=eqq.GPTQ(turned))
    np.testing.assert_array_equal(q.dequantize().T, stacked.dequantize()[0])


def test_a_row_that_is_not_finite_spoils_no_other():
    w, stats = with_gradients()
    stats = dataclasses.replace(stats, fingerprint=None)
    of = jax.jit(lambda w, stats: eqq.quantize(w, eqq.Int4(96), method=eqq.GPTQ(stats)).dequantize())
    found = of(w.at[3, 4].set(jnp.inf), stats)
    assert jnp.isnan(found[3]).all() and jnp.isfinite(jnp.delete(found, 3, axis=0)).all()
    spoiled = dataclasses.replace(stats, output_gram=stats.output_gram + np.where(np.eye(24), np.nan, 0))
    assert jnp.isnan(of(w, spoiled)).all()


# Models


class Tower(eqx.Module):
    """An embedding, convolutions, and a stack of layers for `scan`."""

    words: eqx.nn.Embedding
    conv: eqx.nn.Conv1d
    layers: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self):
        a, b, c, d = jr.split(jr.key(0), 4)
        self.words = eqx.nn.Embedding(50, 32, key=a)
        self.conv = eqx.nn.Conv1d(32, 32, 3, key=b)
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, key=key))(jr.split(c, 3))
        self.head = eqx.nn.Linear(32, 8, key=d)

    def __call__(self, ids):
        x = self.conv(jax.vmap(self.words)(ids).T).T
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def step(x, layer):
            return x + jax.nn.tanh(jax.vmap(eqx.combine(layer, static))(x)), None

        x, _ = jax.lax.scan(step, x, arrays)
        return jax.vmap(self.head)(x)


@pytest.fixture(scope="module")
def tower():
    model, ids = Tower(), jr.randint(jr.key(9), (64, 12), 0, 50)
    return model, ids, collect_stats(model, ids, gram=True)


@pytest.mark.long
def test_a_model(tower):
    model, ids, stats = tower
    wanted, rules = outputs(model, ids), {"words.*": None, "*": eqq.Int2(32)}
    error = lambda q: float(jnp.mean(jnp.square(outputs(q, ids) - wanted)))
    plain, found = (eqq.quantize_tree(model, rules, method=method) for method in (None, eqq.GPTQ(stats)))
    assert error(found) < 0.8 * error(plain)
    for path, w, q in (
        ("conv.weight", model.conv.weight, found.conv.weight),
        ("head.weight", model.head.weight, found.head.weight),
    ):
        assert_same(eqq.quantize(w, eqq.Int2(32), axis=stats[path].axis, method=eqq.GPTQ(stats[path])), q)
    # An embedding has no inputs.
    method = eqq.GPTQ(stats, method=eqq.MSE())
    looked_up = eqq.quantize_tree(model, "int4", where=lambda m: m.words, method=method).words.weight
    assert_same(looked_up, eqq.quantize(model.words.weight, "int4", method=eqq.MSE()))
    assert "by GPTQ" in str(eqq.plan_tree(model, "int4", method=eqq.GPTQ(stats)))


@pytest.mark.long
def test_plans_take_methods_with_statistics(tower):
    model, ids, stats = tower
    wanted = outputs(model, ids)
    loss = lambda model, batch: jnp.mean(jnp.square(jax.vmap(model)(batch[0]) - batch[1]))
    offered = [eqq.Int2(32), eqq.QuantConfig(eqq.Int2(32), eqq.GPTQ(stats)), eqq.Int8()]
    report = eqq.analysis.sensitivity(model, loss, (ids, wanted), offered, where=lambda m: (m.head, m.layers))
    for leaf in report.leaves:
        assert leaf.losses[2] < leaf.losses[1] < leaf.losses[0]
    plan = eqq.analysis.plan_bits(model, report, 3.0)  # too little for eight bits
    assert all(leaf.format == offered[1] for leaf in plan.leaves)
    q = eqq.quantize_tree(model, plan, where=lambda m: (m.head, m.layers))
    assert_same(q.head.weight, eqq.quantize(model.head.weight, offered[0], method=eqq.GPTQ(stats["head.weight"])))
    assert repr(offered[1]).startswith("Int2(block_size=32) by GPTQ(..., ")


@pytest.mark.long
def test_weights_count_by_their_inputs():
    x, w = inputs(64), heavy_tailed((32, 64))
    moments, format = jnp.mean(jnp.square(x), axis=0), eqq.Int4(64)
    weights = moments / moments.mean() + 0.01
    squared = lambda q: jnp.sum(jnp.square(q.dequantize() - w) * weights[None], axis=-1)
    q, plain = eqq.quantize(w, format, method=eqq.MSE(moments)), eqq.quantize(w, format)
    least = jnp.min(
        jnp.stack([squared(eqq.quantize(w, format, scale=plain.scale * f)) for f in np.linspace(0.3, 1.2, 181)]), axis=0
    )
    assert squared(q).sum() < 1.02 * least.sum() and (squared(q) < 1.5 * least).all()
    assert squared(q).sum() < squared(eqq.quantize(w, format, method=eqq.MSE())).sum()
    # If all columns have the same input, nothing changes; nor if none has.
    for alike in (jnp.full(64, 7.0), jnp.zeros(64)):
        same = eqq.quantize(w, format, method=eqq.MSE(alike))
        np.testing.assert_allclose(same.scale, eqq.quantize(w, format, method=eqq.MSE()).scale, rtol=1e-5)


@pytest.mark.long
def test_errors(tower):
    model, ids, stats = tower
    w, gram = jnp.ones((4, 32)), jnp.eye(32)
    for kwargs, words in (
        (dict(damping=-1), "`damping` must be finite"),
        (dict(order="random"), "`order` must be"),
        (dict(inputs=stats, gram=gram), "without `inputs`"),
    ):
        with pytest.raises(ValueError, match=words):
            eqq.GPTQ(**kwargs)
    with pytest.raises(TypeError, match="must choose scales alone"):
        eqq.GPTQ(stats, method=eqq.GPTQ(stats))
    for method, words in (
        (eqq.GPTQ(), "needs statistics of inputs.*Got none for `x`"),
        (eqq.GPTQ(gram=jnp.eye(31)), r"Got shape \(31, 31\) for `x`, which needs \(32, 32\)"),
        (eqq.GPTQ(gram=jnp.ones((3, 32, 32))), r"Got shape \(3, 32, 32\)"),
        (eqq.GPTQ(gram=gram.at[1, 2].set(jnp.nan)), "must be finite.*for `x`"),
        (eqq.GPTQ(gram=-gram), "must be means of squares. Got negative ones for `x`"),
        (eqq.GPTQ(gram=gram.astype(jnp.complex64)), "Got complex values for `x`"),
        (eqq.GPTQ(stats["conv.weight"]), "same weight"),
        (eqq.GPTQ(stats), "statistics of this array"),
        (eqq.MSE(jnp.ones(31)), r"second moments of the inputs.*Got shape \(31,\) for `x`, which needs \(32,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            eqq.quantize(w, "int4", method=method)
    with pytest.raises(ValueError, match="nearest"):
        eqq.quantize(w, "int4", method=eqq.GPTQ(gram=gram), key=jr.key(0))
    with pytest.raises(ValueError, match=r"blocks along axis -2 of `x`, whose inputs lie along axis -1"):
        eqq.quantize(model.head.weight, "int4", axis=-2, method=eqq.GPTQ(stats["head.weight"]))
    for method, words in (
        (eqq.GPTQ(collect_stats(model, ids)), "conv.weight.*gram=True"),
        (
            eqq.GPTQ(collect_stats(model, ids, where=lambda m: m.head, gram=True)),
            "none for words.weight",
        ),
        (eqq.GPTQ({leaf: gram for leaf in stats}), "for conv.weight"),
    ):
        with pytest.raises(ValueError, match=words):
            eqq.quantize_tree(model, "int4", method=method)
    unseen = collect_stats(
        eqx.nn.MLP(8, 8, 8, 1, key=jr.key(0)),
        ids[:, :8].astype(jnp.float32),
        gram=True,
        apply=lambda model, x: jax.vmap(model.layers[0])(x),
    )
    with pytest.warns(UserWarning, match=r"Got none for layers.1.weight \(no batch reached it\): quantized without"):
        eqq.quantize_tree(eqx.nn.MLP(8, 8, 8, 1, key=jr.key(0)), "int4", method=eqq.GPTQ(unseen))
