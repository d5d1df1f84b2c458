"""Static scales of activations: from calibration, one for each layer, and inside of kernels."""

import functools as ft
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._methods.statistics import LeafStats
from eqquant._native import library as native
from eqquant._tree.decide import Activations, Decision
from eqquant._tree.quantize import add_activations

from .helpers import outputs, relative_error, weights
from .test_activations import close


AFFINE = eqq.Int8(symmetric=False)


slow = ft.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def model(getkey):
    return eqx.nn.MLP(32, 8, 64, 2, key=getkey())


@pytest.mark.long
@pytest.mark.parametrize(
    "calibrator",
    [
        None,
        lambda: eqq.calibrate.MSERange(eqq.Int8("tensor", symmetric=False)),
        slow(lambda: eqq.calibrate.MinMax("int8")),
        slow(lambda: eqq.calibrate.Percentile("fp8")),
        slow(lambda: eqq.calibrate.MovingAverage("int8")),
    ],
)
def test_static_scales(getkey, model, calibrator):
    calibrator = calibrator and calibrator()
    x = weights(getkey(), (32, 32))
    stats = eqq.calibrate.collect_stats(model, [x[:16], x[16:]], calibrator=calibrator)
    q = eqq.quantize_tree(model, "int8", activations=stats)
    assert relative_error(outputs(q, x), outputs(model, x)) < 0.08
    w, inputs = q.layers[0].weight, x
    if calibrator is None:
        step = (inputs.max() - inputs.min()) / 255
        np.testing.assert_allclose(w.scale, step, rtol=1e-6)
        np.testing.assert_allclose(w.zero_point, jnp.round(-inputs.min() / step))
        zero = w.zero_point.astype(jnp.float32)
        values = (jnp.clip(jnp.round(x / w.scale) + zero, 0, 255) - zero) * w.scale
        close(jax.jit(operator.matmul)(x, w.T), values, w.dequantize())
    assert "from calibration" in eqq.summary(q).leaves[0].reason
    grads = eqx.filter_jit(eqq.filter_grad(lambda m: jnp.sum(jax.vmap(m)(x))))(q)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_ranges_of_statistics():
    """A range holds zero, and a layer without inputs gets the whole range of the others. Without products none."""
    low = np.array([[-3.0, 1, 2, 0], [9, 9, 9, 9], [0.5, 1, 1, 1]])
    high = np.array([[1.0, 2, 3, 4], [-9, -9, -9, -9], [6, 1, 1, 2]])
    low, high = np.tile(low, 8), np.tile(high, 8)
    stats = LeafStats("used", (3, 64, 32), -1, "", np.array([6, 0, 2]), min=low, max=high)
    unused = LeafStats("unused", (64, 32), None, "not observed", np.array(0))
    format, scale, zero_point = stats.activations()
    wanted = (np.array([4, 6, 6]) - np.array([-3, -3, 0])) / 255
    assert format == eqq.Int8("tensor", symmetric=False)
    np.testing.assert_allclose(scale, wanted, rtol=1e-6)
    np.testing.assert_array_equal(zero_point, np.round(np.array([3, 3, 0]) / wanted))
    tree = {"used": np.ones((3, 64, 32), np.float32), "unused": np.ones((64, 32), np.float32)}
    plan = eqq.plan_tree(tree, "int8", activations={"used": stats, "unused": unused})
    reasons = {leaf.path: leaf.reason.rpartition("; ")[2] for leaf in plan.leaves}
    assert reasons["unused"] == "no product was observed, so no activations" and "observed" not in reasons["used"]


@pytest.mark.long
def test_static_scales_of_a_stack(getkey):
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, key=key))
    layers, x = make(jr.split(getkey(), 3)), weights(getkey(), (8, 32))

    def run(layers, x):
        arrays, static = eqx.partition(layers, eqx.is_array)
        return jax.lax.scan(lambda x, a: (jnp.tanh(eqx.combine(a, static)(x)), None), x, arrays)[0]

    apply = lambda m, x: jax.vmap(ft.partial(run, m))(x)
    stats = eqq.calibrate.collect_stats(layers, [x], apply=apply)
    q = eqq.quantize_tree(layers, "int8", activations=stats)
    assert q.weight.scale.shape == (3,)
    assert relative_error(apply(q, x), apply(layers, x)) < 0.05
    second_layer = jax.tree.map(lambda a: a[1], q.weight)
    assert second_layer.scale == q.weight.scale[1]
    np.testing.assert_allclose((q.weight @ x.T)[1], second_layer @ x.T, rtol=1e-6)


@pytest.mark.long
def test_static_scales_by_hand(getkey):
    """A scale and a zero point for each layer; views of the weight keep them, or quantize no activations."""
    w, x = eqq.quantize(weights(getkey(), (2, 5, 64)), "int8"), weights(getkey(), (2, 3, 64))
    scale, zero = jnp.array([0.01, 0.03]), jnp.array([120, 3], jnp.uint8)
    wrap = eqq.arrays.ActivationQuantizedArray
    s, z = (np.asarray(a, np.float32)[:, None, None] for a in (scale, zero))
    rounded = (np.clip(np.rint(x / s + z), 0, 255) - z) * s
    wanted = rounded @ np.asarray(w.dequantize()).swapaxes(1, 2)
    stack, one = wrap(w, AFFINE, scale, zero), wrap(w, AFFINE, scale[0], zero[0])  # one for all layers
    assert not any(isinstance(view, wrap) for view in (stack.transpose(1, 0, 2), stack.reshape(10, 64)))
    found = jax.jit(lambda stack, one, x: (x @ stack.swapaxes(-1, -2), one.reshape(10, 64) @ x[0].T))(stack, one, x)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1][:5], wanted[0].T, rtol=1e-5, atol=1e-5)
    learned = eqx.tree_at(
        lambda w: w.log_factor, wrap(w, AFFINE, scale, zero, learn_scale=True), jnp.log(jnp.array([2.0, 3]))
    )
    fixed = learned.with_fixed_scale()
    assert fixed.log_factor is None and stack.with_fixed_scale() is stack
    decision = Decision(None, w.format, (-1,), "", activations=Activations(AFFINE, scale, zero))
    assert [add_activations(decision, w, learn).log_factor is None for learn in (True, False)] == [False, True]
    for found in (learned.scale, fixed.scale):
        np.testing.assert_allclose(found, scale * jnp.array([2.0, 3]), rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("format", [eqq.Int8("tensor"), AFFINE])
def test_static_scales_quantize_inside_the_kernel(getkey, format):
    """The product quantizes rows itself: under `jit`, `vmap`, `scan` and `grad`, in stacks, and on every platform."""
    w, x = eqq.quantize(weights(getkey(), (3, 24, 64)), "int8"), weights(getkey(), (3, 6, 64))
    zero = None if format.symmetric else jnp.array([0, 120, 255], jnp.uint8)
    stack = eqq.arrays.ActivationQuantizedArray(w, format, jnp.array([0.01, 0.03, 1e-3]), zero)
    layers = [jax.tree.map(lambda a, n=n: a[n], stack) for n in range(3)]

    def rounded(layer, x):
        start = 0 if layer.zero_point is None else np.float32(layer.zero_point)
        whole = np.rint(np.asarray(x) / np.asarray(layer.scale) + start)
        return (np.clip(whole, *((-128, 127) if format.symmetric else (0, 255))) - start) * np.asarray(layer.scale)

    wanted = [rounded(layer, x[n]) @ layer.dequantize().T for n, layer in enumerate(layers)]
    near = ft.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    alone = jnp.stack([jax.jit(lambda layer, x: x @ layer.T)(layer, x[n]) for n, layer in enumerate(layers)])
    near(alone, wanted)
    same = ft.partial(np.testing.assert_array_equal, alone)
    product = lambda layer, x: x @ layer.T
    same(jax.vmap(product)(stack, x))
    same(jax.vmap(lambda layer, x: jax.vmap(lambda x: layer @ x)(x))(stack, x))
    same(jax.lax.scan(lambda _, of: (None, product(*of)), None, (stack, x))[1])
    same(jnp.stack([(layer @ x[n].T).T for n, layer in enumerate(layers)]))
    same((stack @ x.mT).mT)
    shared = jax.vmap(product, (0, None))(stack, x[0])  # one operand, a scale for each layer
    near(shared, [rounded(layer, x[0]) @ layer.dequantize().T for layer in layers])

    clipped = eqx.filter_jit(jax.grad(lambda x: jnp.sum(product(layers[0], x))))(x[0])
    levels = np.array([-128.5, 127.5] if format.symmetric else [-0.5, 255.5]) * 0.01
    inside = (np.asarray(x[0]) >= levels[0]) & (np.asarray(x[0]) <= levels[1])
    assert 0 < inside.mean() < 1
    near(clipped, np.where(inside, np.asarray(layers[0].dequantize()).sum(0), 0))

    text = jax.jit(product).trace(layers[1], x[0]).lower(lowering_platforms=("cpu",)).as_text()
    if native.refusal() is None and native.isa() != "generic":
        assert "eqquant_cpu_matmul_int8" in text and "eqquant_cpu_encode" not in text
        assert "rows of floats are quantized inside" in str(eqq.explain_matmul(x[0], layers[1].T).verdicts)
    text = jax.jit(product).trace(layers[1], x[0]).lower(lowering_platforms=("tpu",)).as_text()
    assert any("xi8>" in line and "xi32>" in line for line in text.splitlines() if "stablehlo.dot_general" in line)


@pytest.mark.long
def test_functions_of_quax_with_a_scale_for_each_layer(getkey):
    q, x = eqq.quantize(weights(getkey(), (3, 8, 32)), "int8"), weights(getkey(), (6, 32))
    w = eqq.arrays.ActivationQuantizedArray(q, "int8", jnp.array([0.01, 0.03, 0.1]))
    layers = [jax.tree.map(lambda a, n=n: a[n], w) for n in range(3)]
    alone = jnp.stack([layer @ x.T for layer in layers])
    xs = weights(getkey(), (6, 3, 32))
    paired = jnp.stack([layer @ xs[:, n].T for n, layer in enumerate(layers)])
    for equation, operand, expected in (
        ("loi,bi->lob", x, alone),
        ("bi,loi->bol", x, alone.transpose(2, 1, 0)),
        ("loi,bli->lob", xs, paired),
        ("bli,loi->bol", xs, paired.transpose(2, 1, 0)),
        ("loi,bli->ob", xs, paired.sum(0)),
    ):
        product = lambda w, equation=equation, x=operand: jnp.einsum(
            equation, *((w, x) if equation.startswith("loi") else (x, w))
        )
        np.testing.assert_allclose(eqq.quaxify(product)(w), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_each_layer_of_a_stack_multiplies_its_operand(getkey):
    q = eqq.quantize(weights(getkey(), (3, 8, 32)), "int8")
    w = eqq.arrays.ActivationQuantizedArray(q, "int8", jnp.array([0.01, 0.03, 0.1]))
    layers, product = [jax.tree.map(lambda a, n=n: a[n], w) for n in range(3)], jax.jit(operator.matmul)

    def multiply(n, x):
        return np.stack([multiply(n, part) for part in x]) if x.ndim > 2 else np.asarray(product(layers[n], x))

    for shape in ((3, 3, 32, 5), (4, 3, 32, 5), (4, 1, 32, 5), (3, 32, 5), (1, 32, 5), (32, 5), (32,)):
        x = np.asarray(weights(getkey(), shape))
        take_layer = lambda n, x=x: x if x.ndim < 3 else x[..., n % x.shape[-3], :, :]
        expected = np.stack([multiply(n, take_layer(n)) for n in range(3)], -2 if x.ndim < 2 else -3)
        np.testing.assert_allclose(product(w, x), expected, rtol=1e-5, atol=1e-5)
        if x.ndim > 1:
            np.testing.assert_allclose(product(x.mT, w.mT), expected.mT, rtol=1e-5, atol=1e-5)
    one, x = jax.tree.map(lambda a: a[1:2], w), weights(getkey(), (3, 32, 5))
    np.testing.assert_allclose(one @ x, layers[1] @ x, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError):
        w @ weights(getkey(), (2, 32, 5))


@pytest.mark.long
def test_unreached_layers_are_an_error(getkey):
    """An expert that the gate never chose gets the range of the others."""
    model, x = {"experts": weights(getkey(), (3, 8, 32))}, weights(getkey(), (16, 32))
    gate = lambda x: jnp.where(x[0] > 1e6, 2, jnp.where(x[0] > 0, 1, 0))
    apply = lambda model, x: jax.lax.map(lambda x: jax.tree.map(lambda a: a[gate(x)], model["experts"]) @ x, x)
    stats = eqq.calibrate.collect_stats(model, [x], apply=apply)
    assert (stats["experts"].rows > 0).tolist() == [True, True, False]
    assert "1 of 3 layers were not reached" in stats["experts"].note
    static = eqq.quantize_tree(model, "int8", activations=stats)["experts"]
    assert static.scale[2] >= static.scale[:2].max() and jnp.isfinite(static @ x.T).all()
    calibrator = eqq.calibrate.MSERange(eqq.Int8("tensor", symmetric=False))
    ranges = eqq.calibrate.collect_stats(model, [x], apply=apply, calibrator=calibrator)
    _, scale, zero_point = ranges["experts"].activations()
    widest = int(scale[:2].argmax())
    assert scale[2] == scale[widest] and zero_point[2] == zero_point[widest]
    q = eqq.quantize_tree(model, "int8", activations="int8")["experts"]
    assert (jnp.abs(q @ x.T) > 0).any(axis=(1, 2)).all()


@pytest.mark.long
def test_bad_statistics(getkey, model):
    x = weights(getkey(), (8, 32))
    with pytest.raises(ValueError, match="layers.0.weight: `scale` must be positive"):
        eqq.quantize_tree(model, "int8", activations=eqq.calibrate.collect_stats(model, [jnp.zeros((8, 32))]))
    stats = eqq.calibrate.collect_stats(model, [x])
    with pytest.raises(ValueError, match="statistics of every weight. Got none of weight"):
        eqq.quantize_tree(eqx.nn.Linear(32, 8, key=getkey()), "int8", activations=stats)
    with pytest.raises(ValueError, match="statistics of this model.*shape"):
        eqq.quantize_tree(eqx.nn.MLP(32, 8, 16, 2, key=getkey()), "int8", activations=stats)
    with pytest.raises(ValueError, match="one range for all values"):
        eqq.calibrate.collect_stats(model, [x], calibrator=eqq.calibrate.MinMax(eqq.Int8(32), (32,)))
    q = eqq.quantize(weights(getkey(), (8, 32)), "int8")
    for arguments, message in (
        ((q, "int4", 0.1), "a format of one scale"),
        ((q, "int8", jnp.ones(8)), "one for each layer of a stack"),
        ((q, "int8", 0.1, 3), "`zero_point` must be given"),
        ((q, AFFINE, 0.1), "`zero_point` must be given"),
        ((q, AFFINE, 0.1, 256), "whole numbers from 0 to 255"),
        ((q, AFFINE, 0.1, -1), "whole numbers from 0 to 255"),
        ((q, AFFINE, 0.1, 3.5), "whole numbers from 0 to 255"),
        ((q, eqq.Int4(symmetric=False, block_size=None), 0.1, 16), "whole numbers from 0 to 15"),
        ((q, "int8", 0.0), "`scale` must be positive"),
        ((q, "int8", -0.1), "`scale` must be positive"),
        ((q, "int8", jnp.nan), "`scale` must be finite"),
        ((q, "int8", jnp.inf), "`scale` must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            eqq.arrays.ActivationQuantizedArray(*arguments)
    with pytest.raises(TypeError, match="`scale` must be floating point"):
        eqq.arrays.ActivationQuantizedArray(q, "int8", 1)
    jax.jit(lambda scale, zero: eqq.arrays.ActivationQuantizedArray(q, AFFINE, scale, zero))(
        jnp.float32(0), jnp.uint8(3)
    )
    with pytest.raises(TypeError, match="a quantized weight"):
        eqq.arrays.ActivationQuantizedArray(jnp.ones((3, 4)), "int8")
