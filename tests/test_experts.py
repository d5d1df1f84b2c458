"""Mixtures of experts multiply packed experts: `jax.lax.ragged_dot` and forms of einsum."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant._methods.statistics import LeafStats
from eqquant._native import library as native

from .helpers import primitives, weights


def close(y, expected, tol=1e-4):
    np.testing.assert_allclose(np.asarray(y), np.asarray(expected), rtol=tol, atol=tol * np.abs(expected).max() + 1e-6)


SIZES = {
    "one token": (1, [0, 1, 0]),
    "a token each": (3, [1, 1, 1]),
    "few": (8, [2, 0, 5, 1]),
    "empty first and last": (64, [0, 10, 30, 4, 0, 0, 20, 0]),
    "tokens beyond": (64, [3, 0, 10, 7]),
    "all beyond": (7, [0, 0, 0]),
    "one has all": (70, [0, 70]),
    "more than there are": (5, [9, 9]),
    "many": (700, [300, 0, 399]),
}


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", SIZES)
def test_ragged_dot(getkey, name, axis):
    count, sizes = SIZES[name]
    w, x = eqq.quantize(weights(getkey(), (len(sizes), 96, 64)), "int8", axis=axis), weights(getkey(), (count, 96))
    run = eqq.quaxify(lax.ragged_dot)
    sizes = jnp.array(sizes)
    with eqq.no_dense():
        y = jax.jit(run)(x, w, sizes)
    close(y, lax.ragged_dot(x, w.dequantize(), sizes))
    loss = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w, sizes)))
    close(jax.jit(jax.grad(loss(run)))(x, w), jax.jit(jax.grad(loss(lax.ragged_dot)))(x, w.dequantize()))
    weight_grad = jax.jit(eqq.filter_grad(lambda w: loss(run)(x, w)))(w)
    close(weight_grad, jax.jit(jax.grad(loss(lax.ragged_dot), 1))(x, w.dequantize()))


@pytest.mark.long
def test_other_layouts(getkey):
    """Any axis may be contracted and ragged; a sum over ragged rows is dense."""
    w, sizes = eqq.quantize(weights(getkey(), (48, 3, 64)), "nf4"), jnp.array([2, 3, 4])
    numbers = lambda contract, ragged, group: lax.RaggedDotDimensionNumbers((contract, ((), ())), [ragged], group)
    for shape, dims in (((9, 64), (((1,), (2,)), 0, [1])), ((48, 9, 2), (((0,), (0,)), 1, [1]))):
        f = lambda x, w: lax.ragged_dot_general(x, w, sizes, numbers(*dims))  # noqa: B023
        x = weights(getkey(), shape)
        assert "dequantize" not in primitives(eqq.quaxify(f), x, w)
        close(eqq.quaxify(f)(x, w), f(x, w.dequantize()))
    x, w = weights(getkey(), (9, 8)), eqq.quantize(weights(getkey(), (9, 64)), "nf4")
    f = lambda x, w: lax.ragged_dot_general(x, w, sizes, numbers(((0,), (0,)), 0, []))
    close(eqq.quaxify(f)(x, w), f(x, w.dequantize()))


@pytest.mark.long
def test_dtypes(getkey):
    x, w = weights(getkey(), (6, 64), jnp.bfloat16), eqq.quantize(weights(getkey(), (2, 64, 32), jnp.bfloat16), "int8")
    for preferred in (None, jnp.float32):
        f = lambda x, w: lax.ragged_dot(x, w, jnp.array([2, 3]), preferred_element_type=preferred)  # noqa: B023
        y, expected = eqq.quaxify(f)(x, w), f(x, w.dequantize())
        assert y.dtype == expected.dtype
        close(y.astype(jnp.float32), expected.astype(jnp.float32), tol=2e-2)


@pytest.mark.skipif(native.refusal() is not None, reason=str(native.refusal()))
def test_native_kernels_copy_no_expert(getkey):
    w, x = eqq.quantize(weights(getkey(), (8, 512, 512)), "nf4"), weights(getkey(), (64, 512))
    f = eqq.quaxify(lambda x, w: lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), jnp.full(8, 8)))
    program = jax.jit(f).lower(x, w).compile()
    assert program.memory_analysis().temp_size_in_bytes < w.nbytes
    assert not re.search(r"u8\[\d+,512,256\]\S* (gather|copy|dynamic-slice)", program.as_text())


@pytest.mark.long
def test_pointwise_convolutions(getkey):
    """Convolutions with windows of one are products; others are dense, and right."""
    layouts = {
        "channels first": ((24, 16, 1, 1), (1, 2, 3), ("NCHW", "OIHW", "NCHW"), (2, 16, 9, 7)),
        "channels last": ((1, 1, 16, 24), (0, 1, 2), ("NHWC", "HWIO", "NHWC"), (2, 9, 7, 16)),
        "across blocks": ((1, 1, 16, 24), -1, ("NHWC", "HWIO", "NHWC"), (2, 9, 7, 16)),
        "one axis": ((24, 16, 1), -2, ("NCH", "OIH", "NCH"), (2, 16, 9)),
    }
    for shape, axis, numbers, x_shape in layouts.values():
        w, x = eqq.quantize(weights(getkey(), shape), "int8", axis=axis), weights(getkey(), x_shape)
        for stride in (1, 2):
            strides = (stride, 1)[: len(shape) - 2]
            f = lambda x, w: lax.conv_general_dilated(x, w, strides, "VALID", dimension_numbers=numbers)  # noqa: B023
            names = primitives(eqq.quaxify(f), x, w)
            assert "quantized_matmul" in names and "conv_general_dilated" not in names
            close(jax.jit(eqq.quaxify(f))(x, w), f(x, w.dequantize()))


@pytest.mark.long
def test_other_convolutions_are_dense(getkey):
    w, x = eqq.quantize(weights(getkey(), (16, 4, 1, 1)), "int8"), weights(getkey(), (2, 16, 9, 7))
    depthwise = eqq.quantize(weights(getkey(), (16, 1, 3, 3)), "int8", axis=(-3, -2, -1))
    pointwise = eqq.quantize(weights(getkey(), (8, 16, 1, 1)), "int8", axis=(-3, -2, -1))
    for w, options in (
        (w, {"feature_group_count": 4}),
        (depthwise, {"feature_group_count": 16}),
        (pointwise, {"padding": ((1, 1), (0, 2))}),
        (pointwise, {"padding": ((0, 0), (0, 0)), "lhs_dilation": (2, 1)}),
    ):
        f = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), **{"padding": "VALID", **options})  # noqa: B023
        close(eqq.quaxify(f)(x, w), f(x, w.dequantize()))


COUNTS = {"all see enough": [70, 70, 70, 70], "one saw few": [100, 97, 3, 80], "one saw none": [100, 0, 90, 80]}


def test_statistics_of_all_experts_are_means_over_their_inputs():
    """Each input counts alike, and so an expert without any takes no part."""
    moments = np.array([[1.0, 2, 3, 4], [5, 6, 5, 6], [0, 0, 0, 0]])
    stats = LeafStats("w", (3, 8, 4), -1, "", np.array([6, 2, 0]), second_moment=moments)
    mean = (6 * moments[0] + 2 * moments[1]) / 8
    used = eqq.MSE({"w": stats}).for_leaf("w").inputs.second_moment
    np.testing.assert_allclose(used, [moments[0], (moments[1] + mean) / 2, mean])


@pytest.mark.long
@pytest.mark.parametrize("name", COUNTS)
def test_experts_that_saw_few_inputs(getkey, name):
    """The mean of all experts stands in for the inputs that one did not see, and reports say so."""
    counts, w = np.array(COUNTS[name]), weights(getkey(), (4, 32, 64))
    mix = weights(getkey(), (64, 8)) @ weights(getkey(), (8, 64)) + 0.3 * jnp.eye(64)  # features depend on each other
    x = weights(getkey(), (int(counts.sum()), 64)) @ mix
    run = lambda w, x: lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), jnp.array(counts))
    stats = eqq.calibrate.collect_stats({"w": w}, [x], apply=lambda m, x: run(m["w"], x), gram=True)
    seen = stats["w"]
    assert seen.rows.tolist() == counts.tolist()
    few, gptq = int(np.argmin(counts)), eqq.GPTQ(stats)
    used = gptq.for_leaf("w").inputs
    share = min(counts[few] / 64, 1)
    mean = np.einsum("e,eij->ij", counts, seen.gram) / counts.sum()
    np.testing.assert_allclose(used.gram[few], share * seen.gram[few] + (1 - share) * mean, rtol=1e-9)
    np.testing.assert_allclose(np.diagonal(used.gram, axis1=1, axis2=2), used.second_moment, rtol=1e-5)
    enough = np.flatnonzero(counts >= 64)
    np.testing.assert_array_equal(used.gram[enough], seen.gram[enough])
    note = {"one saw few": "1 of 4 layers saw fewer than 64 inputs", "one saw none": "1 of 4 layers were not reached"}
    (row,) = eqq.plan_tree({"w": w}, "int4", method=gptq).leaves
    assert note.get(name, "") in seen.note and row.reason.endswith(f"({note[name]})" if name in note else "by GPTQ")
    if name in note:  # better for other inputs of that expert than its own statistics
        more = weights(getkey(), (500, 64)) @ mix
        error = lambda q: float(jnp.linalg.norm(more @ (q.dequantize() - w)[few].T))
        own = eqq.quantize(w, "int4", method=eqq.GPTQ(gram=seen.gram))
        assert error(eqq.quantize_tree({"w": w}, "int4", method=gptq)["w"]) < 0.8 * error(own)


@pytest.mark.long
def test_static_activations_of_experts_without_inputs(getkey):
    w, x = weights(getkey(), (3, 32, 64)), weights(getkey(), (20, 64))
    run = lambda w, x: lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), jnp.array([11, 0, 9]))
    calibrator = eqq.calibrate.MSERange(eqq.Int8("tensor"))
    for options in ({}, {"calibrator": calibrator}):
        stats = eqq.calibrate.collect_stats(w, [x], apply=run, **options)
        q = eqq.quantize_tree(w, "int8", activations=stats)
        assert q.scale[1] >= jnp.delete(q.scale, 1).max() * (1 - 1e-6)
        assert jnp.isfinite(jnp.einsum("eoi,ti->eto", q.dequantize(), x)).all() and jnp.isfinite(q @ x.T).all()
