"""Convolutions that quantize inputs, and operations without a rule, which warn."""

import functools as ft
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq

from .helpers import weights


AFFINE = eqq.Int8(symmetric=False)


def convolve(x, w, groups=1):
    return jax.lax.conv_general_dilated(x, w, (1,) * (w.ndim - 2), "SAME", feature_group_count=groups)


def split_integers(q):
    """Returns the decoded values without zero points, and their scales."""
    rows = np.asarray(eqq.unpack(q)).astype(np.int64).reshape(q.scale.shape[0], -1)
    zero = np.full((len(rows), 1), 128) if q.zero_point is None else np.asarray(q.zero_point, np.int64)
    return (rows - zero).reshape(q.shape), np.asarray(q.scale, np.float64)


@pytest.mark.parametrize(
    "groups, channels, size, format",
    [(1, 4, 3, AFFINE), (2, 8, 3, eqq.Int8()), (6, 6, 3, AFFINE), (1, 96, 4, eqq.Int8()), (2, 160, 4, AFFINE)],
)
def test_convolutions_multiply_integers(groups, channels, size, format, getkey):
    """Equal to NumPy's integers, scaled once. Sums over 96 channels would not be exact in float32."""
    x = weights(getkey(), (2, channels, 7, 6)) + 0.5
    q = eqq.quantize(weights(getkey(), (6, channels // groups, size, size)), eqq.Int8(), axis=(1, 2, 3))
    f = jax.jit(eqq.quaxify(ft.partial(convolve, groups=groups)))
    y = f(x, eqq.arrays.ActivationQuantizedArray(q, format))
    a, s = split_integers(eqq.quantize(x.reshape(2, -1), format))
    b, t = split_integers(q)
    sides = ((size - 1) // 2, size // 2)
    a = np.pad(a.reshape(x.shape), ((0, 0), (0, 0), sides, sides))
    windows = np.lib.stride_tricks.sliding_window_view(a, (size, size), (2, 3))
    windows = windows.reshape(2, groups, channels // groups, 7, 6, size, size)
    b = b.reshape(groups, 6 // groups, channels // groups, size, size)
    sums = np.einsum("ngchwij,gocij->ngohw", windows, b).reshape(y.shape)
    np.testing.assert_allclose(y, sums * (s * t.T)[:, :, None, None], rtol=1e-6, atol=1e-9)


def test_large_sums_with_zero_points_are_exact(getkey):
    """Sums over half of the channels of a group exceed 2^24; both halves together are small."""
    near_one = lambda *shape: 1 + 0.01 * np.asarray(weights(getkey(), shape))
    x, signs = jnp.asarray(near_one(1, 256, 4, 4)), np.repeat([1, -1], 64)[:, None, None]
    q = eqq.quantize(jnp.asarray(signs * near_one(6, 128, 4, 4), jnp.float32), eqq.Int8(), axis=(1, 2, 3))
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", feature_group_count=2)
    y = jax.jit(eqq.quaxify(convolve))(x, eqq.arrays.ActivationQuantizedArray(q, AFFINE)).reshape(2, 3)
    (a, s), (b, t) = split_integers(eqq.quantize(x.reshape(1, -1), AFFINE)), split_integers(q)
    sums = np.einsum("goi,gi->go", b.reshape(2, 3, -1), a.reshape(2, -1))
    np.testing.assert_allclose(y, sums * (s * t).reshape(2, 3), rtol=1e-6)


@pytest.mark.long
def test_explanation_of_convolutions(getkey):
    """On CPU codes are floats, elsewhere int8; with blocks or small floats the values are decoded."""
    x, weight = weights(getkey(), (2, 4, 8, 8)), weights(getkey(), (6, 4, 3, 3))
    f = eqq.quaxify(convolve)

    def integers(format, activations, platform):
        w = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weight, format, axis=(1, 2, 3)), activations)
        program = jax.jit(f).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
        lines = [line for line in program.splitlines() if "stablehlo.convolution" in line]
        return any(re.search(r": \(tensor<\w*xi8>, tensor<\w*xi8>\) -> tensor<\w*xi32>", line) for line in lines)

    assert integers(eqq.Int8(), "int8", "tpu") and integers(eqq.Int4(None), AFFINE, "cuda")
    assert not integers(eqq.Int8(), "int8", "cpu") and not integers(eqq.FP8(), "fp8", "cuda")
    w = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weight, eqq.Int4(32), axis=(1, 2, 3)), "int8")
    rounded = eqq.quantize(x.reshape(2, -1), "int8").dequantize().reshape(x.shape)
    np.testing.assert_allclose(f(x, w), convolve(rounded, w.dequantize()), rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_models_with_convolutions(getkey):
    model = eqx.nn.Sequential([eqx.nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, key=getkey())])
    x = weights(getkey(), (3, 4, 6, 6))
    assert "multiplies codes under `eqq.quaxify`" in str(eqq.plan_tree(model, eqq.Int8(), activations="int8").to_dict())
    run = eqx.filter_jit(lambda m, x: jax.vmap(m)(x))
    expected = run(model, x)
    near = ft.partial(np.testing.assert_allclose, atol=0.03 * float(jnp.abs(expected).max()))
    stats = eqq.calibrate.collect_stats(model, [x], apply=lambda m, x: jax.vmap(m)(x))
    for activations in ("int8", stats):
        q = eqq.quantize_tree(model, eqq.Int8(), activations=activations)
        assert (q[0].weight.scale is None) == (activations == "int8")
        y = eqq.quaxify(run)(q, x)
        near(y, expected)
        with pytest.warns(UserWarning, match="quantize no activations.*call the function through `eqq.quaxify`"):
            floats = run(q, x)  # without it floats are convolved
        assert float(jnp.abs(floats - y).max()) > 0


@pytest.mark.long
@pytest.mark.parametrize("format", [eqq.Int8(), eqq.Int4(32)])  # codes are multiplied, or decoded
def test_gradients_of_convolutions(getkey, format):
    """Gradients equal those of a convolution of rounded values: of `x` in range, and of learned scales."""
    x, weight = weights(getkey(), (2, 4, 6, 6)), weights(getkey(), (6, 4, 3, 3))
    dy, scale = weights(getkey(), (2, 6, 6, 6)), np.float32(0.01)
    simulated = eqq.quantize_tree({"w": weight}, format, axis=(1, 2, 3), simulate=True)["w"]
    w = eqq.arrays.ActivationQuantizedArray(simulated, "int8", scale, learn_scale=True)
    f = lambda w, x: jnp.sum(eqq.quaxify(convolve)(x, w) * dy)
    w_grad, x_grad = eqx.filter_jit(jax.grad(f, (0, 1), allow_int=True))(w, x)
    inside = (x / scale >= -128.5) & (x / scale <= 127.5)
    rounded = jnp.clip(jnp.round(x / scale), -128, 127) * scale
    dw, dx = jax.vjp(lambda w, x: convolve(x, w), w.dequantize(), rounded)[1](dy)
    close = ft.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    assert not inside.all()
    close(w_grad.array.master, dw)
    close(x_grad, jnp.where(inside, dx, 0))
    slope = rounded - jnp.where(inside, x, 0)
    close(w_grad.log_factor, jnp.sum(dx * slope) / np.sqrt(4 * 36 * 128))


def test_jax_functions_warn_about_float_activations(getkey):
    layer, x = eqx.nn.Linear(64, 64, key=getkey()), weights(getkey(), (8, 64))
    w = eqq.quantize_tree(layer, "int8", activations="int8").weight
    for f in (
        lambda w, x: jnp.matmul(x, w.T),
        lambda w, x: jnp.einsum("oi,bi->bo", w, x),
        lambda w, x: jnp.dot(x, w.T),
    ):
        with pytest.warns(UserWarning, match="the dense weight of an ActivationQuantizedArray of shape"):
            f(w, x)
        np.testing.assert_array_equal(eqq.quaxify(f)(w, x), x @ w.T)


@jax.custom_vjp
def with_own_gradient(w, x):
    return w @ x


with_own_gradient.defvjp(lambda w, x: (w @ x, (w, x)), lambda saved, g: (jnp.outer(g, saved[1]), saved[0].T @ g))


def in_checkpointed_loop(w, x):
    step = lambda carry: (jnp.tanh(w @ carry[0]), carry[1] + 1)
    return eqx.internal.while_loop(lambda carry: carry[1] < 3, step, (x, 0), kind="checkpointed", max_steps=4)[0]


@pytest.mark.parametrize(
    "f, operation",
    [
        (lambda w, x: jnp.sin(w) @ x, "sin"),
        (lambda w, x: jnp.sin(2 * w) @ x, "sin"),
    ],
)
def test_operations_without_a_rule_warn_about_float_activations(getkey, f, operation):
    q, x = eqq.quantize(weights(getkey(), (64, 64)), "int8"), weights(getkey(), (64,))
    w = eqq.arrays.ActivationQuantizedArray(q, "int8")
    quaxified = eqq.quaxify(f)
    match = rf"`{operation}`, at .*{Path(__file__).name}:\d+ in .*an? \w+ of shape \(64, 64\), so its products quantize"
    with pytest.warns(UserWarning, match=match):
        y = quaxified(w, x)
    np.testing.assert_array_equal(y, f(q.dequantize(), x))
    with pytest.warns(UserWarning, match=match):
        gradient = jax.grad(lambda x: jnp.sum(quaxified(w, x)))(x)
    expected = eqx.filter_jit(jax.grad(lambda x: jnp.sum(f(q.dequantize(), x))))(x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    with eqq.no_dense(), pytest.raises(RuntimeError, match=rf"`{operation}` has no packed form"):
        quaxified(q, x)


@pytest.mark.parametrize("f", [with_own_gradient, in_checkpointed_loop])
def test_gradients_by_the_rule_of_a_user_are_those_of_floats(getkey, f):
    q, x = eqq.quantize(weights(getkey(), (64, 64)) / 8, "int8"), weights(getkey(), (64,))
    w = eqq.arrays.ActivationQuantizedArray(q, "int8")
    quaxified = eqq.quaxify(f)
    with eqq.no_dense():
        y = jax.jit(quaxified)(w, x)
    dense = f(q.dequantize(), x)
    assert 1e-4 < jnp.abs(y - dense).max() < 0.03 * jnp.abs(dense).max()  # activations are rounded
    with pytest.warns(UserWarning, match=rf"`custom_[jv]*p_call`, at .*{Path(__file__).name}:\d+ in"):
        gradient = jax.grad(lambda x: jnp.sum(quaxified(w, x)))(x)
    expected = eqx.filter_jit(jax.grad(lambda x: jnp.sum(f(q.dequantize(), x))))(x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
