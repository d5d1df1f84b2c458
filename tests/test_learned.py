"""Learned rounding: never worse than its start by its own measure, and no single change makes it better."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._methods import learned

from .helpers import assert_same, FORMATS, SWEPT_SCALARS, weights
from .test_gptq import compute_gram, inputs


def losses(q, w, gram, damping=0.01):
    """The error of each row, with the damping, in float64."""
    gram = np.asarray(gram, np.float64)
    gram = gram / np.mean(np.diag(gram)) + damping * np.eye(len(gram))
    error = np.asarray(eqq.dequantize(q), np.float64) - np.asarray(w, np.float64)
    return np.sum(error @ gram * error, axis=-1)


def quantize_learned(w, format, gram, **kwargs):
    return eqq.quantize(w, format, method=eqq.LearnedRounding(gram=gram, **kwargs))


@pytest.mark.parametrize("name", SWEPT_SCALARS)
def test_never_worse_than_its_start(name):
    format, gram = FORMATS[name].format, compute_gram(inputs())
    w = weights(jr.key(1), (16, 96)) * 0.1
    start = eqq.quantize(w, format, method=eqq.GPTQ(gram=gram))
    q = quantize_learned(w, format, gram, method=eqq.GPTQ(), rounds=2)
    assert jax.tree.structure(q) == jax.tree.structure(start)
    before, after = losses(start, w, gram), losses(q, w, gram)
    assert (after <= before * (1 + 1e-5)).all()
    if format.bits <= 4:
        assert after.sum() < 0.97 * before.sum()


def descend(w, gram, codes, scale, rounds, damping):
    """The rule in float64: columns one by one, and the scale of each block of eight, where the error falls."""
    damped = gram / np.mean(np.diag(gram)) + damping * np.eye(len(gram))
    falls = lambda step, slope, curvature: step * (2 * slope + curvature * step) < 0
    spread = lambda scale: np.repeat(scale, 8, 1)[:, : len(gram)]
    for turn in range(rounds + 1):
        for i in range(len(gram)):
            slope, curvature, unit = (codes * spread(scale) - w) @ damped[i], damped[i, i], spread(scale)[:, i]
            new = np.clip(np.round(codes[:, i] - slope / curvature / unit), -4, 3)
            codes[:, i] = np.where(falls((new - codes[:, i]) * unit, slope, curvature), new, codes[:, i])
        for block in range(scale.shape[1] if turn < rounds else 0):
            own = np.s_[8 * block : 8 * block + 8]
            slope = np.sum(codes[:, own] * ((codes * spread(scale) - w) @ damped[:, own]), -1)
            curvature = np.sum(codes[:, own] @ damped[own, own] * codes[:, own], -1)
            step = -slope / np.where(curvature > 0, curvature, 1)
            usable = falls(step, slope, curvature) & ((scale[:, block] + step) * scale[:, block] > 0)
            scale[:, block] += np.where(usable, step, 0)
    return codes, scale


def test_codes_and_scales_by_hand(monkeypatch):
    monkeypatch.setattr(learned, "WIDTH", 9)  # three parts, the last of which is shorter, as is the last block
    w, x = np.asarray(weights(jr.key(1), (2, 4, 20))), np.random.default_rng(0).standard_normal((2, 30, 20))
    x = x @ (np.eye(20) + 0.3 * np.random.default_rng(1).standard_normal((20, 20)))
    grams, format = np.swapaxes(x, 1, 2) @ x, eqq.Int3(8)
    method = eqq.LearnedRounding(gram=grams, method=eqq.AbsMax(), rounds=2, damping=0.05)
    start, q = jax.jit(lambda w: (eqq.quantize(w, format), eqq.quantize(w, format, method=method)))(w)
    codes = lambda q: np.asarray(q.format.decode(eqq.unpack(q)), np.float64)
    found, start, scale = codes(q), codes(start), np.asarray(start.scale, np.float64)
    for n in range(2):
        expected, fitted = descend(w[n].astype(np.float64), grams[n], start[n].copy(), scale[n].copy(), 2, 0.05)
        same = (found[n] == expected).all(-1)  # a tie in float32 changes what follows in its row
        assert same.sum() >= 3 and (expected != start[n]).any(-1).all()
        np.testing.assert_allclose(np.asarray(q.scale)[n][same], fitted[same], rtol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("format", [eqq.Int2(32), eqq.Int3(48, scale_dtype="float16"), eqq.NF4(32)], ids=repr)
def test_no_other_code_is_better(format):
    w, gram = weights(jr.key(1), (4, 96)), compute_gram(inputs())
    q = quantize_learned(w, format, gram, rounds=20)
    least = losses(q, w, gram)
    levels = np.sort(np.unique(np.asarray(format.decode(jnp.arange(2**format.bits, dtype=jnp.uint8)))))
    scale = np.repeat(np.asarray(q.scale), format.block_size, 1)
    for column in range(0, 96, 7):
        for level in levels:
            moved = np.asarray(q.dequantize()).copy()
            moved[:, column] = level * scale[:, column]
            assert (losses(moved, w, gram) >= least * (1 - 1e-3)).all()


@pytest.mark.long
def test_every_initial_method():
    w, gram = weights(jr.key(1), (8, 96)), compute_gram(inputs())
    for method in (eqq.AbsMax(), eqq.MSE(), eqq.GPTQ(order=None)):
        own = {"inputs": gram} if isinstance(method, eqq.GPTQ) else {}
        start = eqq.quantize(w, eqq.Int3(32), method=dataclasses.replace(method, **own))
        q = quantize_learned(w, eqq.Int3(32), gram, method=method)
        assert losses(q, w, gram).sum() < 0.9 * losses(start, w, gram).sum()
    more, fewer = (losses(quantize_learned(w, eqq.Int3(32), gram, rounds=n), w, gram).sum() for n in (8, 1))
    assert more < fewer


@pytest.mark.long
def test_stacks_other_axes_and_columns_without_inputs():
    x, w = jnp.stack([inputs(seed=n) for n in range(2)]).at[:, :, 3:9].set(0), weights(jr.key(1), (2, 8, 96))
    grams = jax.vmap(compute_gram)(x)
    of = lambda w, gram, **kwargs: eqq.quantize(w, "int4", method=eqq.LearnedRounding(gram=gram), **kwargs)
    stacked = of(w, grams)
    assert_same(jax.tree.map(lambda a: a[1], stacked), of(w[1], grams[1]))
    np.testing.assert_array_equal(of(w.mT, grams, axis=-2).dequantize(), stacked.dequantize().mT)
    assert jnp.isfinite(stacked.dequantize()).all()


@pytest.mark.long
def test_nan_in_one_row_leaves_other_rows_finite():
    w, gram = weights(jr.key(1), (4, 96)), compute_gram(inputs())
    of = jax.jit(lambda w: quantize_learned(w, "int4", gram).dequantize())
    found = of(w.at[1, 5].set(jnp.nan))
    assert jnp.isnan(found[1, 5])
    np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(of(w), 1, 0))


def test_errors():
    w = jnp.ones((4, 32))
    for kwargs, words in (
        (dict(rounds=0), "`rounds` must be"),
        (dict(damping=-1), "`damping` must be"),
        (dict(inputs={}, gram=jnp.eye(32)), "without `inputs`"),
    ):
        with pytest.raises(ValueError, match=words):
            eqq.LearnedRounding(**kwargs)
    with pytest.raises(ValueError, match="LearnedRounding needs statistics of inputs.*Got none for `x`"):
        eqq.quantize(w, "int4", method=eqq.LearnedRounding())
    with pytest.raises(ValueError, match="rounds to the best code"):
        eqq.quantize(w, "int4", method=eqq.LearnedRounding(gram=jnp.eye(32)), key=jr.key(0))


@pytest.mark.long
def test_statistics_of_a_tree_reach_the_method_it_starts_from():
    model = {"a": weights(jr.key(1), (8, 96)), "b": weights(jr.key(2), (8, 96))}
    grams = {name: compute_gram(inputs(seed=n)) for n, name in enumerate("ab")}
    starts = eqq.quantize_tree(model, "int3", method=eqq.LearnedRounding(grams, method=eqq.GPTQ(grams)))
    for name, w in model.items():
        own = eqq.LearnedRounding(gram=grams[name], method=eqq.GPTQ(gram=grams[name]))
        assert_same(starts[name], eqq.quantize(w, "int3", method=own))
