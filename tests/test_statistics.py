"""Statistics of inputs on their way into methods: each step against its formula, in NumPy and float64."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._methods.choose import choose_by_weights
from eqquant._methods.given import FixedAmax
from eqquant._methods.gram import map_layers
from eqquant._methods.grid import _uniform_by_row, decode_rows
from eqquant._methods.statistics import LeafStats, share_inputs, weigh_columns
from eqquant.calibrate._dataflow import Place
from eqquant.calibrate._observers import Sums, WeightObserver
from eqquant.calibrate._result import CalibrationResult
from eqquant.calibrate._sequential import _compute_means, _correct_weight, _order_stages, _select_layer

from .bounds import UNIT


@pytest.fixture
def draw():
    return np.random.default_rng(0).standard_normal


def make_stats(x, counts=None, **fields):
    """Statistics of inputs `(*stack, rows, features)`, of which each layer saw the first `counts`."""
    *stack, length, features = x.shape
    counts = np.full(stack, length) if counts is None else np.asarray(counts)
    x = np.where(np.arange(length)[:, None] < counts[..., None, None], x, 0)
    mean = lambda value: value.sum(axis=-2) / np.maximum(counts, 1)[..., None]
    gram = np.swapaxes(x, -1, -2) @ x / np.maximum(counts, 1)[..., None, None]
    moments = {"mean": mean(x), "mean_abs": mean(abs(x)), "second_moment": mean(x**2), "gram": gram}
    ends = {"min": x.min(axis=-2), "max": x.max(axis=-2)}
    return LeafStats("w", (*stack, 5, features), -1, "", counts, **{**ends, **moments, **fields})


# Methods


def test_experts_share_inputs_by_the_formula(draw):
    """Of six features: layers that saw 9, 6, 2 and none; or 4, 3, 2 and none, fewer than there are features."""
    x = draw((2, 2, 9, 6)) * np.array([1, 2, 3, 4])[:, None, None].reshape(2, 2, 1, 1)
    for counts in ([[9, 6], [2, 0]], [[4, 3], [2, 0]]):
        stats = make_stats(x, counts)
        shared = share_inputs(stats)
        needed, weight = min(6, np.max(counts)), np.asarray(counts) / np.sum(counts)
        for name in ("second_moment", "gram"):
            value, found = getattr(stats, name), getattr(shared, name)
            mean = sum(weight[i] * value[i] for i in np.ndindex(2, 2))
            for i in np.ndindex(2, 2):
                part = min(np.asarray(counts)[i] / needed, 1)
                np.testing.assert_allclose(found[i], part * value[i] + (1 - part) * mean, rtol=1e-12)
        assert share_inputs(dataclasses.replace(stats, gram=None)).gram is None
        np.testing.assert_array_equal(shared.mean, stats.mean)
    enough = make_stats(x, [[9, 6], [7, 8]])
    assert share_inputs(enough) is enough
    # `for_leaf` shares them, for a method and for the one inside it.
    inputs = {"a": stats, "b": enough}
    method = eqq.GPTQ(inputs, damping=0.5, order=None, method=eqq.MSE(inputs)).for_leaf("a")
    assert (method.damping, method.order) == (0.5, None)
    for one in (method, method.method):
        np.testing.assert_array_equal(one.inputs.gram, shared.gram)
    assert eqq.MSE(inputs).for_leaf("b").inputs is enough


def test_weights_of_columns_are_relative_mean_squares(draw):
    moments = np.abs(draw((3, 8))) * np.array([[1e-3], [1], [1e12]])
    moments[1, 2], moments[2] = 0, moments[2] * (np.arange(8) != 5)
    expected = moments / moments.mean(-1, keepdims=True) + 0.01
    for inputs in (moments, make_stats(draw((3, 2, 8)), second_moment=moments)):
        np.testing.assert_allclose(weigh_columns(inputs), expected, rtol=1e-5)
    np.testing.assert_allclose(weigh_columns(np.zeros((2, 4))), np.full((2, 4), 1.01), rtol=1e-6)


def test_each_block_gets_the_weights_of_its_columns(draw):
    """Blocks of a row that ends within one, of whole rows and of matrices, in a stack with weights of its own."""
    rows, weights = draw((2, 3, 7, 10)).astype(np.float32), draw((2, 3, 10)).astype(np.float32)
    choose = lambda blocks, weights, format: (jnp.sum(blocks * weights, axis=-1), jnp.min(weights, axis=-1))
    product = rows.astype(np.float64) * weights[:, :, None]
    split = lambda x: (x[..., :4], x[..., 4:8], x[..., 8:])
    sums = np.stack([part.sum(-1) for part in split(product)], -1)
    least = np.stack([part.min(-1) for part in split(weights[:, :, None] + 0 * product)], -1)
    cases = [(eqq.Int4(4), weights, None), (eqq.Int4(4), weights, 2)]
    cases += [(eqq.Int4(None), weights[:, 0], None), (eqq.Int8("tensor"), weights, None)]
    compute = lambda rows: [choose_by_weights(choose, rows, jnp.asarray(w), format, n) for format, w, n in cases]
    *blocks, (whole, _), (tensor, _) = jax.jit(compute)(jnp.asarray(rows))
    close = ft.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    for found, zero in blocks:
        close(found, sums)
        np.testing.assert_array_equal(zero, least)
    close(whole[..., 0], (rows * weights[:, :1, None]).sum(-1))
    close(tensor, np.broadcast_to(product.sum((-2, -1), keepdims=True), (2, 3, 7, 1)))


class Weighted(eqq.extend.AbstractScaleMethod):
    """Scales that are sums of weights."""

    inputs: object = None

    def choose_scales(self, blocks, format):
        return jnp.zeros(blocks.shape[:-1]), None

    def choose_weighted(self, blocks, weights, format):
        return jnp.sum(weights, axis=-1), None


def test_methods_inside_others_take_their_inputs(draw):
    """The diagonal of a Gram matrix for scales, the matrix for codes; unless they have inputs of their own."""
    x, rows = draw((2, 30, 8)) * np.arange(1, 9), jnp.asarray(draw((2, 3, 8)), jnp.float32)
    gram = jnp.asarray(np.swapaxes(x, 1, 2) @ x, jnp.float32)
    moments = np.diagonal(gram, axis1=1, axis2=2)
    weights = (moments / moments.mean(-1, keepdims=True) + 0.01).reshape(2, 1, 2, 4).sum(-1)
    for method, wanted in ((Weighted(), weights), (Weighted(np.ones((2, 8))), np.full((2, 1, 2), 4.04))):
        choose = lambda gram, method=method: eqq.GPTQ(gram=gram, method=method)._choose_scales(
            rows, [gram], eqq.Int4(4), None
        )
        scale, _ = jax.jit(choose)(gram)
        np.testing.assert_allclose(scale, np.broadcast_to(wanted, (2, 3, 2)), rtol=1e-4)
    start = eqq.LearnedRounding(gram=gram, damping=0.5).method
    assert isinstance(start, eqq.GPTQ) and start.damping == 0.5 and isinstance(start.method, eqq.MSE)
    methods = (start, eqq.MSE(), eqq.AbsMax(), eqq.GPTQ(gram=gram), eqq.MSE(moments))
    assert [method.lacks_inputs() for method in methods] == [True, True, False, False, False]


def test_a_known_amax_is_the_scale_of_every_row(draw):
    rows, format = np.float32(4 * draw((2, 3, 8))), eqq.Int8(None)
    found = jax.jit(lambda x, amax: decode_rows(FixedAmax(amax).quantize_rows(x, format), format))(rows, jnp.float32(3))
    np.testing.assert_allclose(found, np.clip(rows, -3, 3), atol=3 / 127 / 2 + 1e-6)


def test_each_layer_gets_its_own_matrix(draw):
    """In chunks of rows, transposed; and layers of several axes."""
    grams, rows, other = draw((2, 3, 4, 4)), draw((2, 3, 5, 4)), draw((2, 3, 5, 2))
    product = lambda gram, columns, other: (gram @ columns, other[:1])
    compute = lambda grams, *rows: [map_layers(lambda g: 2 * g, product, [grams], n, *rows) for n in (None, 2)]
    for found, first in jax.jit(compute)(*(jnp.asarray(x, jnp.float32) for x in (grams, rows, other))):
        np.testing.assert_allclose(found, 2 * rows @ np.swapaxes(grams, -1, -2), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(first, other[..., :1], rtol=1e-6)


def test_each_row_has_its_own_random_numbers():
    run = jax.jit(lambda key, first: _uniform_by_row(key, first, (2, 3, 5)))
    here, next, other = (np.asarray(run(jax.random.key(k), n)) for k, n in ((0, 0), (0, 3), (1, 0)))
    assert len(np.unique([here, other])) == 60 and (here >= 0).all() and (here < 1).all()
    np.testing.assert_array_equal(here[1], next[0])


# Sums


def test_sums_of_layers_that_take_turns(draw):
    """Three layers, of which a call observes some, in any order; -1 stands for none."""
    sums, seen = Sums(3), {n: [] for n in range(3)}
    for index, rows in (([2, 0], 4), ([0, -1], 3), ([2, 1], 1)):
        x = draw((2, rows, 4)).astype(np.float32)
        for layer, values in zip(index, x, strict=True):
            if layer >= 0:
                seen[layer].append(values)
        moments = {"rows": np.full(2, rows), "min": x.min(1), "max": x.max(1), "mean": x.sum(1)}
        assert sums(np.asarray(index, np.float32), {**moments, "gram": np.swapaxes(x, 1, 2) @ x}).tolist() == index
    for n, parts in seen.items():
        x = np.concatenate(parts).astype(np.float64)
        expected = {"rows": len(x), "min": x.min(0), "max": x.max(0), "mean": x.sum(0), "gram": x.T @ x}
        for name, value in expected.items():
            np.testing.assert_allclose(sums.total[name][n], value, rtol=1e-5, atol=1e-5)
            assert sums.total[name].dtype == np.float64


def test_calibrators_of_layers_see_every_value():
    sums, x = Sums(2, eqq.calibrate.MinMax()), np.float32([[[1, -2], [np.nan, np.nan]], [[3, 8], [-9, 4]]])
    for factor in (1, 2):  # rows of NaN reached no expert
        sums(np.float32([1, 0]), {"rows": np.array([2, 2]), "values": factor * x})
        sums.calibrate()
    assert [[float(end) for end in c.range()] for c in sums.calibrators] == [[-18, 16], [-4, 2]]
    assert [int(c.batches) for c in sums.calibrators] == [2, 2] and sums.pending == {}


def test_activations_of_a_stack(draw):
    """A layer that no input reached takes the widest range of the others; a range holds zero."""
    low, high = np.array([[2.0, 3], [-4, -1], [0, 0]]), np.array([[5.0, 7], [-3, 1], [0, 0]])
    stats = make_stats(draw((3, 2, 2)), [2, 2, 0], min=low, max=high)
    format, scale, zero = stats.activations()
    assert format == eqq.Int8("tensor", symmetric=False)
    np.testing.assert_allclose(scale, np.array([7, 5, 11]) / 255, rtol=1e-6)
    assert zero.tolist() == [0, 204, 93]
    scale, zero = jnp.array([0.5, 2, 0]), jnp.array([3, 5, 0], jnp.uint8)
    calibrated = CalibrationResult(scale, zero, scale, scale, eqq.FP8(), -1)
    format, scale, zero = dataclasses.replace(stats, calibrated=calibrated).activations()
    assert (format, scale.tolist(), zero.tolist()) == (eqq.FP8(), [0.5, 2, 2], [3, 5, 5])


# Layer by layer


def make_observer(stack, by_axes):
    observer = WeightObserver("w", (*stack, 3, 4), 1.0, True)
    observer.by_axes, observer.stack_axes = by_axes, dict.fromkeys(by_axes, tuple(range(len(stack))))
    return observer


def test_weights_correct_earlier_errors(draw):
    """The weight whose products with the new inputs are nearest to the old products, by ridge regression."""
    x, w = draw((2, 40, 4)), draw((2, 3, 4)).astype(np.float32)
    new = x + 0.3 * draw((2, 40, 4))
    sums, other = Sums(2), Sums(2)
    observer = make_observer((2,), {(-1,): other, (-2,): sums})
    for part in (np.s_[:25], np.s_[25:]):  # batches of unequal lengths
        for recording, values in ((True, x), (False, new)):
            observer.compare(recording)
            for use in np.split(values[:, part].astype(np.float32), [10], axis=1):  # a weight that is used twice
                moments = {"rows": np.full(2, use.shape[1]), "gram": np.swapaxes(use, 1, 2) @ use}
                sums(np.float32([0, 1]), {**moments, "values": use})
    means = _compute_means(observer)
    for name, old in (("gram", new), ("cross", x)):  # a term passes through at most 44 roundings to float32
        most = np.swapaxes(abs(old), 1, 2) @ abs(new) / 40
        assert np.all(abs(means[name] - np.swapaxes(old, 1, 2) @ new / 40) <= 44 * UNIT * most)
    for share in (1.0, 0.25):
        found = _correct_weight(jnp.asarray(w), (-1,), means, share)
        for n in range(2):
            damped = new[n].T @ new[n] + 0.01 * np.trace(new[n].T @ new[n]) / 4 * np.eye(4)
            change = np.linalg.solve(damped, new[n].T @ (x[n] - new[n]) @ w[n].T).T
            np.testing.assert_allclose(found[n], w[n] + share * change, rtol=1e-3, atol=1e-4)
    turned = _correct_weight(jnp.asarray(w).mT, (-2,), means, 0.25)
    np.testing.assert_allclose(turned, jnp.asarray(found).mT, rtol=1e-5)
    unseen = _compute_means(make_observer((2,), {(-1,): other}))
    assert _correct_weight(turned, (-1,), unseen, 1.0) is turned


def test_order_of_stages():
    """A loop runs at the level of its first product, layer by layer; other weights of a level go together."""
    places = {5: Place(0, None), 2: Place(3, 7), 3: Place(2, 7), 4: Place(3, 7), 0: Place(5, None), 1: Place(3, None)}
    places |= {6: Place(5, 7), 8: Place(0, None)}  # one matrix for all turns of the loop
    observers = {n: make_observer((2,) if n in (2, 3, 4) else (), {(-1,): Sums(2)}) for n in places}
    stages = [(*stage.indices, stage.layer) for stage in _order_stages(places, observers)]
    loop = [(3, 0), (2, 4, 0), (3, 1), (2, 4, 1)]
    assert stages == [(5, 8, None), *loop, (1, None), (0, 6, None)]


def test_statistics_of_one_layer(draw):
    stats = make_stats(draw((3, 9, 4)), [9, 7, 8], output_gram=draw((3, 5, 5)))
    one = _select_layer(eqq.GPTQ(stats), 1).inputs
    assert one.shape == (5, 4) and int(one.rows) == 7
    for name in ("min", "max", "mean", "mean_abs", "second_moment", "gram", "output_gram"):
        np.testing.assert_array_equal(getattr(one, name), getattr(stats, name)[1])
