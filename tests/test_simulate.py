"""Straight-through quantization, and models that are trained through it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqquant as eqq
from eqquant._wrappers.learned_scale import ste_source

from .helpers import assert_same, FORMATS, Halved, KINDS, primitives, SWEPT_FORMATS, weights


OPTIMIZED = True  # programs are compared bit for bit
every_format = pytest.mark.parametrize("name", SWEPT_FORMATS)
every_kind = pytest.mark.parametrize("name", KINDS)
SHAPES = [((6, 200), -1), ((70, 3), 0), ((4, 3, 5), (-2, -1))]


# fake_quantize


@every_format
def test_value_is_exact_and_gradient_the_identity(name, getkey):
    format = FORMATS[name].format
    for shape, axis in SHAPES if name in ("nf4", "int8_affine") else SHAPES[len(name) % 3 :][:1]:
        x, dx = weights(getkey(), shape), weights(getkey(), shape)
        fake = lambda x: eqq.fake_quantize(x, format, axis=axis)
        expected = np.asarray(eqq.quantize(x, format, axis=axis).dequantize())
        y, dy = jax.jvp(fake, (x,), (dx,))
        for value in (y, fake(x), jax.jit(fake)(x), jax.checkpoint(fake)(x)):
            np.testing.assert_array_equal(np.asarray(value), expected)
        np.testing.assert_array_equal(np.asarray(dy), np.asarray(dx))
        np.testing.assert_array_equal(np.asarray(jax.vjp(fake, x)[1](dx)[0]), np.asarray(dx))


def test_value_is_exact_where_the_detach_trick_rounds(getkey):
    # x + (q - x) is not q in floating point.
    x = weights(getkey(), (4, 4096))
    q = eqq.quantize(x, "binary").dequantize()
    assert jnp.any(x + (q - x) != q)
    assert jnp.all(eqq.fake_quantize(x, "binary") == q)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(dtype, getkey):
    x = weights(getkey(), (3, 100), dtype)
    y, pullback = jax.vjp(eqq.fake_quantize, x)
    assert y.dtype == dtype and pullback(y)[0].dtype == dtype


@pytest.mark.long
def test_under_transformations(getkey):
    x = weights(getkey(), (5, 3, 64))
    fake = lambda x: eqq.fake_quantize(x, "nf4")
    each = jnp.stack([fake(row) for row in x])
    np.testing.assert_array_equal(np.asarray(jax.vmap(fake)(x)), np.asarray(each))
    scanned = lambda x: jax.lax.scan(lambda carry, row: (carry + fake(row).sum(), fake(row)), 0.0, x)
    np.testing.assert_array_equal(np.asarray(scanned(x)[1]), np.asarray(each))
    np.testing.assert_array_equal(np.asarray(eqx.filter_jit(jax.grad(lambda x: scanned(x)[0]))(x)), np.ones(x.shape))
    for hessian in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f)), lambda f: jax.jacfwd(jax.jacfwd(f))):
        h = hessian(lambda v: jnp.sum(fake(v) ** 2) / 2)(x[0, 0])
        np.testing.assert_allclose(np.asarray(h), np.eye(64), atol=1e-6)


def test_stochastic(getkey):
    x, key = weights(getkey(), (2, 64)), getkey()
    expected = eqq.quantize(x, "int4", key=key).dequantize()
    assert jnp.all(eqq.fake_quantize(x, "int4", key=key) == expected)
    assert jnp.any(expected != eqq.fake_quantize(x, "int4"))


def test_the_method_chooses_scales(getkey):
    w = weights(getkey(), (3, 64)).at[1, 32:].set(0)
    amax = np.abs(w).reshape(3, 2, 32).max(-1)
    rounded = eqq.quantize(w, eqq.Int4(32), method=Halved())
    np.testing.assert_allclose(rounded.scale, amax / 14, rtol=1e-6)
    found = eqq.fake_quantize(w, eqq.Int4(32), method=Halved())
    np.testing.assert_array_equal(found, rounded.dequantize())
    tree = eqq.quantize_tree({"w": w}, eqq.Int4(32), method=Halved(), simulate=True, learn_scales=True)
    scale = tree["w"].scale_bits.view(jnp.float32)  # a scale of zero could not grow
    np.testing.assert_allclose(scale, np.where(amax == 0, 1e-8, amax / 14), rtol=1e-6)


def find_clipped(x, format, **kwargs):
    """Where the gradient is zero."""
    return (
        np.asarray(eqx.filter_jit(jax.grad(lambda x: eqq.fake_quantize(x, format, clip=True, **kwargs).sum()))(x)) == 0
    )


def test_clip_of_one_bit_and_of_ternary():
    # The scale is the mean magnitude, 1: levels -1, (0,) 1, and half a step more.
    x = jnp.array([0.1, -0.1, 1.4, -1.4, 1.6, -1.6, 2.1, -2.1, 0.4, -0.4, 0.4, -0.4])
    assert float(jnp.mean(jnp.abs(x))) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(find_clipped(x, "ternary"), np.abs(x) > 1.5)
    np.testing.assert_array_equal(find_clipped(x, "binary"), np.abs(x) > 2)


def test_clip_takes_the_zero_point_into_account():
    x = jnp.array([10.0, 11.0, 12.0, 15.0])  # the range is widened to 0 ... 15, scale 1, zero point 0
    assert not find_clipped(x, eqq.Int4(symmetric=False)).any()
    x = jnp.array([-1.0, -0.9, 0.2, 1.0])  # without the zero point, negative values would lie outside
    assert not find_clipped(x, eqq.Int8(symmetric=False)).any()
    x = jnp.array([10.0, 11.0, 12.0, 15.0] * 8)  # an offset of 10, and steps of a third
    assert not find_clipped(x, "q4_1").any()


def test_clip_where_scales_are_negative():
    x = jnp.array([-8.0, 1.0, 4.0, 7.9])  # Q4_0: scale 1, levels -8 ... 7
    np.testing.assert_array_equal(find_clipped(jnp.tile(x, 8), "q4_0"), np.tile([False, False, False, True], 8))
    np.testing.assert_array_equal(find_clipped(jnp.tile(-x, 8), "q4_0"), np.tile([False, False, False, True], 8))


@every_kind
def test_values_in_range_get_a_gradient(name, getkey):
    # Along any axis. Values out of range equal the rounded end of the range.
    x = jr.normal(getkey(), (70, 4))
    format = FORMATS[name].format
    outside = find_clipped(x, format, axis=0)
    error = np.abs(np.asarray(x - eqq.quantize(x, format, axis=0).dequantize()))
    assert outside.mean() < 0.25
    if outside.any():
        assert error[outside].min() > np.median(error)


@pytest.mark.parametrize("format", [eqq.Dynamic8(), eqq.NF4(), eqq.Int8()])
@pytest.mark.parametrize("largest", [-3.0, 3.0])
def test_the_amax_gets_a_gradient(format, largest):
    assert not find_clipped(jnp.array([largest, 1.0, 2.0, 0.5]), format).any()


def test_unsigned_formats_clip_negative_values():
    x = jnp.array([0.5, 1.0, 0.1, 0.7])
    assert not find_clipped(x, eqq.FP8("ue4m4")).any() and not find_clipped(x, eqq.Dynamic8(signed=False)).any()
    assert find_clipped(jnp.array([-0.5, 1.0]), eqq.Dynamic8(signed=False)).tolist() == [True, False]


def test_bad_input():
    with pytest.raises(ValueError, match="`x` must have at least one dimension"):
        eqq.fake_quantize(jnp.float32(1), "int8")
    with pytest.raises(ValueError, match="`axis` must name"):
        eqq.fake_quantize(jnp.ones(3), "int8", axis=1)


# Models


def mlp(key):
    return eqx.nn.MLP(20, 3, 40, 1, key=key)


@eqx.filter_jit
def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


@pytest.mark.long
@every_kind
def test_simulated_model_equals_its_final_one(name, getkey):
    format, x = FORMATS[name].format, weights(getkey(), (7, 20))
    model = mlp(getkey())
    simulated = eqq.quantize_tree(model, format, simulate=True)
    final = eqq.finalize(simulated)
    assert type(simulated) is type(final) is eqx.nn.MLP
    for a, b, w in zip(simulated.layers, final.layers, model.layers, strict=True):
        assert isinstance(a.weight, eqq.arrays.FakeQuantizedArray) and isinstance(b.weight, eqq.QuantizedArray)
        assert_same(b.weight, eqq.quantize(w.weight, format))
        assert jnp.all(a.weight.master == w.weight)
        np.testing.assert_array_equal(np.asarray(a.weight), np.asarray(b.weight))
    np.testing.assert_array_equal(np.asarray(jax.vmap(simulated)(x)), np.asarray(jax.vmap(final)(x)))


@pytest.mark.long
def test_trains_in_an_ordinary_loop(getkey):
    model = eqq.quantize_tree(mlp(getkey()), "int4", simulate=True)
    x, optim = weights(getkey(), (64, 20)), optax.adam(1e-2)
    state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    traces = 0

    @eqx.filter_jit
    def step(model, state):
        nonlocal traces
        traces += 1
        value, grads = eqx.filter_value_and_grad(loss)(model, x)
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    values = []
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        for _ in range(50):
            model, state, value = step(model, state)
            values.append(float(value))
    assert values[-1] < values[0] / 5 and traces == 1
    np.testing.assert_array_equal(np.asarray(loss(model, x)), np.asarray(loss(eqq.finalize(model), x)))


@pytest.mark.long
def test_gradient_of_a_simulated_model(getkey):
    model, x = mlp(getkey()), weights(getkey(), (7, 20))
    simulated = eqq.quantize_tree(model, "nf4", simulate=True)
    grads = eqx.filter_jit(eqx.filter_grad(loss))(simulated, x)
    dense = eqx.filter_jit(eqx.filter_grad(loss))(eqq.dequantize_tree(eqq.finalize(simulated)), x)
    for a, b in zip(grads.layers, dense.layers, strict=True):
        np.testing.assert_allclose(np.asarray(a.weight.master), np.asarray(b.weight), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make, x",
    [
        (lambda key: eqx.nn.Conv2d(3, 4, 3, key=key), np.ones((3, 8, 8), np.float32)),
        (lambda key: eqx.nn.ConvTranspose1d(3, 4, 3, key=key), np.ones((3, 8), np.float32)),
        (lambda key: eqx.nn.Embedding(10, 8, key=key), np.array(3, np.int32)),
        (lambda key: eqx.nn.GRUCell(8, 9, key=key), (np.ones(8, np.float32), np.ones(9, np.float32))),
        (lambda key: eqx.nn.MultiheadAttention(2, 8, key=key), (np.ones((5, 8), np.float32),) * 3),
    ],
)
def test_layers(make, x, getkey):
    x = x if isinstance(x, tuple) else (x,)
    simulated = eqq.quantize_tree(make(getkey()), "int8", simulate=True)
    final = eqq.finalize(simulated)
    np.testing.assert_allclose(np.asarray(simulated(*x)), np.asarray(final(*x)), rtol=1e-6, atol=1e-6)
    grads = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(m(*x) ** 2)))(simulated)
    assert any(jnp.any(g != 0) for g in jtu.tree_leaves(grads))


def test_runs_the_quantized_matmul(getkey):
    simulated = eqq.quantize_tree(mlp(getkey()), "int4", simulate=True)
    assert primitives(lambda m, x: m(x), simulated, jnp.ones(20)).count("quantized_matmul") == 2


@pytest.mark.long
def test_behaves_as_an_array(getkey):
    w = weights(getkey(), (6, 64))
    s = eqq.quantize_tree({"w": w}, "int4", simulate=True)["w"]
    q = eqq.quantize(w, "int4")
    assert (s.shape, s.dtype, s.ndim, s.size, s.nbytes) == ((6, 64), jnp.float32, 2, 384, 4 * 384)
    for f in (
        lambda a: a.T.dequantize(),
        lambda a: a.reshape(2, 3, 64).dequantize(),
        lambda a: a[2:4],
        lambda a: a + 1.0,
        lambda a: jnp.sin(a),
        lambda a: jax.lax.sin(a),
        lambda a: a @ jnp.ones(64),
        lambda a: jnp.ones(6) @ a,
        lambda a: a.astype(jnp.bfloat16).dequantize(),
        lambda a: a == 0.0,
        lambda a: a.sum(),
    ):
        np.testing.assert_array_equal(np.asarray(f(s)), np.asarray(f(q)))
    assert "FakeQuantizedArray" in repr(s) and "Int4()" in repr(s)


def test_dtype_of_the_model_and_of_the_master(getkey):
    simulated = eqq.quantize_tree(mlp(getkey()), "int8", dtype=jnp.bfloat16, simulate=True)
    w = simulated.layers[0].weight
    assert w.master.dtype == jnp.float32 and w.dtype == w.dequantize().dtype == jnp.bfloat16
    assert eqq.finalize(simulated).layers[0].weight.dtype == jnp.bfloat16


@pytest.mark.long
def test_stacked_layers_in_a_scan(getkey):
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(jr.split(getkey(), 3))
    simulated = eqq.quantize_tree(stack, "nf4", simulate=True)
    x = jnp.ones(16)

    def run(stack):
        arrays, static = eqx.partition(stack, eqx.is_array)
        return jax.lax.scan(lambda x, a: (eqx.combine(a, static)(x), None), x, arrays)[0]

    np.testing.assert_array_equal(np.asarray(run(simulated)), np.asarray(run(eqq.finalize(simulated))))
    grads = eqx.filter_jit(eqx.filter_grad(lambda m: run(m).sum()))(simulated)
    assert grads.weight.master.shape == (3, 16, 16) and jnp.all(jnp.any(grads.weight.master != 0, axis=(1, 2)))


MATRICES = {  # the shape of a weight, its quantized axes, and how many of its first axes are a stack of matrices
    "linear": ((6, 64), -1, 0),
    "of Flax": ((64, 6), -2, 0),
    "a row": ((64,), -1, 0),
    "layers": ((3, 6, 64), -1, 1),
    "layers of Flax": ((3, 64, 6), -2, 1),
    "experts of layers": ((2, 3, 6, 64), -1, 2),
    "convolution": ((6, 8, 3, 3), (-3, -2, -1), 0),
    "convolutions": ((2, 6, 8, 3, 3), (-3, -2, -1), 1),
    "convolution of Flax": ((3, 3, 8, 6), (0, 1, 2), 0),
    "from heads": ((2, 16, 5), (0, 1), 0),
}


@pytest.mark.parametrize("format", [eqq.NVFP4(), pytest.param(eqq.Int8("tensor"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MATRICES)
def test_each_matrix_has_a_scale_for_its_tensor(name, format, getkey):
    """The whole, a stack of its matrices under `vmap`, and each alone have the same codes and scales."""
    shape, axis, stack = MATRICES[name]
    sizes = np.exp2(np.arange(np.prod(shape[:stack], dtype=int))).reshape(*shape[:stack], *[1] * (len(shape) - stack))
    w = weights(getkey(), shape) * sizes.astype(np.float32)
    one = lambda w: eqq.quantize(w, format, axis=axis)
    each = one
    for _ in range(stack):
        each = jax.vmap(each)
    whole = one(w)
    assert_same(whole, each(w))
    scale = np.asarray(whole.scale_bits.scale if format == eqq.NVFP4() else whole.scale)
    found = scale.reshape(int(np.prod(shape[:stack])), -1)
    assert all(len(np.unique(row)) == 1 for row in found) and len(np.unique(found)) == len(found)
    first = (0,) * stack
    assert_same(jtu.tree_map(lambda leaf: leaf[first], whole), one(w[first]))


def _run_stack(stack, x):
    arrays, static = eqx.partition(stack, eqx.is_array)
    return jax.lax.scan(lambda x, layer: (jax.vmap(eqx.combine(layer, static))(x), None), x, arrays)[0]


def _run_experts(model, x):
    product = eqq.quaxify(lambda x, w: jax.lax.ragged_dot(x, w, jnp.asarray([2, 0, 5])))
    return product(x, model["experts"])


def _many(make):
    return lambda key: eqx.filter_vmap(make)(jr.split(key, 3))


SIMULATED = {
    "plain": (lambda key: eqx.nn.MLP(32, 32, 32, 1, key=key), jax.vmap),
    "stack": (_many(lambda key: eqx.nn.Linear(32, 32, key=key)), lambda model: lambda x: _run_stack(model, x)),
    "experts": (lambda key: {"experts": weights(key, (3, 32, 16))}, lambda model: lambda x: _run_experts(model, x)),
    "ensemble": (
        _many(lambda key: eqx.nn.MLP(32, 32, 32, 1, key=key)),
        lambda model: lambda x: eqx.filter_vmap(lambda model: jax.vmap(model)(x))(model),
    ),
    "convolution": (
        lambda key: eqx.nn.Conv1d(4, 6, 3, key=key),
        lambda model: lambda x: jax.vmap(model)(x.reshape(7, 4, 8)),
    ),
}


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("format, activations", [("nvfp4", "nvfp4"), ("mxfp4", "mxfp8")])
def test_training_simulates_the_final_model(name, format, activations, getkey, tmp_path):
    """The forward pass in training, of the final model, and of the model in a file: equal bits."""
    (make, run), x = SIMULATED[name], weights(getkey(), (7, 32))
    model = make(getkey())
    axis = -2 if name == "experts" else None
    activations = None if name in ("experts", "convolution") else activations
    # Layers of different sizes would share a scale of the whole stack.
    sizes = lambda w: w * np.exp2(np.arange(w.shape[0], dtype=np.float32)).reshape(-1, *[1] * (w.ndim - 1))
    model = jtu.tree_map(lambda w: sizes(w) if eqx.is_array(w) and w.ndim > 2 else w, model)
    simulated = eqq.quantize_tree(model, format, axis=axis, activations=activations, simulate=True)
    forward = eqx.filter_jit(lambda model: run(model)(x))
    in_training, pullback = eqx.filter_vjp(forward, simulated)
    assert any(bool(jnp.any(leaf != 0)) for leaf in jtu.tree_leaves(pullback(jnp.ones_like(in_training))))
    final = eqq.finalize(simulated)
    np.testing.assert_array_equal(np.asarray(in_training), np.asarray(forward(final)))
    eqq.save(tmp_path / "model.safetensors", final)
    loaded = eqq.load(tmp_path / "model.safetensors", final)
    np.testing.assert_array_equal(np.asarray(forward(loaded)), np.asarray(forward(final)))


def test_a_fake_quantized_model_is_not_quantized_again(getkey):
    simulated = eqq.quantize_tree(mlp(getkey()), "int8", simulate=True)
    with pytest.raises(ValueError, match=r"layers\.0\.weight\.master: simulated: `finalize` first"):
        eqq.quantize_tree(simulated, "int4")
    # A simulated array is a node, of which `where` selects the weights; its master alone is a leaf.
    with pytest.raises(ValueError, match=r"layers\.0\.weight\.master: simulated: `finalize` first"):
        eqq.quantize_tree(simulated, "int4", where=lambda m: m.layers[0].weight)
    with pytest.raises(TypeError, match=r"layers\.0\.weight\.master: simulated: `finalize` first"):
        eqq.quantize_tree(simulated, "int4", where=lambda m: m.layers[0].weight.master)


def test_trees_of_simulated_arrays(getkey):
    w = weights(getkey(), (8, 64))
    tree = eqq.quantize_tree({"a": w, "b": w}, "int4", simulate=True)
    final = eqq.finalize(tree)
    assert final["a"] is final["b"]
    dense = eqq.dequantize_tree(tree, jnp.bfloat16)
    assert isinstance(dense["a"], jax.Array) and dense["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(eqq.dequantize_tree(tree)["a"]), np.asarray(final["a"]))
    row = eqq.summary(tree).leaves[0]
    assert (row.path, row.shape, row.reason, row.nbytes) == ("a", (8, 64), "simulates Int4()", w.nbytes)


def test_errors(getkey):
    model = mlp(getkey())
    with pytest.raises(ValueError, match="`key` must be None"):
        eqq.quantize_tree(model, "int8", simulate=True, key=getkey())
    with pytest.raises(ValueError, match="simulate=True"):
        eqq.finalize(model)
    broken = eqq.quantize_tree(model, "int8", simulate=True)
    broken = eqx.tree_at(lambda m: m.layers[1].weight.master, broken, replace_fn=lambda w: w * jnp.nan)
    with pytest.raises(ValueError, match=r"layers\.1\.weight must be finite"):
        eqq.finalize(broken)


def test_abstract_arrays(getkey):
    model = eqx.filter_eval_shape(mlp, jr.key(0))
    simulated = eqq.quantize_tree(model, "int8", simulate=True)
    assert simulated.layers[0].weight.master.shape == (40, 20)
    assert eqx.filter_eval_shape(eqq.finalize, simulated).layers[0].weight.codes.dtype == jnp.uint8


# Learned scales


@pytest.mark.long
def test_gradients_of_learned_scales(getkey):
    """Against the formulas of LSQ, for the logarithm of each scale: rounded minus value, or the end where it clips."""
    w, x, dy = weights(getkey(), (4, 64)), weights(getkey(), (6, 64)), weights(getkey(), (6, 4))
    simulated = eqq.quantize_tree({"w": w}, eqq.Int4(32), simulate=True, learn_scales=True)["w"]
    simulated = eqx.tree_at(lambda s: s.log_factor, simulated, simulated.log_factor - 0.5)  # so that some values clip
    quantizing = eqq.arrays.ActivationQuantizedArray(simulated, eqq.Int8(symmetric=False), 0.01, 100, learn_scale=True)
    larger = eqx.tree_at(lambda q: q.log_factor, quantizing, jnp.log(jnp.float32(1.25)))
    np.testing.assert_allclose(larger.with_fixed_scale().scale, 0.0125, rtol=1e-6)
    f = lambda pair: jnp.sum(pair[1] @ pair[0].T * dy)
    w_grad, x_grad = eqx.filter_jit(eqx.filter_grad(f))((quantizing, x))

    def rounded(v, scale, low, high):
        inside = (v / scale >= low - 0.5) & (v / scale <= high + 0.5)
        value = np.clip(np.round(v / scale), low, high) * scale
        return value, inside, (value - np.where(inside, v, 0))

    v = np.asarray(w, np.float64).reshape(4, 2, 32)
    scale = np.asarray(simulated.quantized().scale, np.float64)[..., None]
    w_hat, w_inside, w_slope = rounded(v, scale, -8, 7)
    x_hat, x_inside, x_slope = rounded(np.asarray(x, np.float64), np.float64(np.float32(0.01)), -100, 155)
    assert not w_inside.all() and w_inside.mean() > 0.5 and not x_inside.all()
    dw = (np.asarray(dy, np.float64).T @ x_hat).reshape(v.shape)
    dx = np.asarray(dy, np.float64) @ w_hat.reshape(4, 64)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    close(w_grad.array.master, np.where(w_inside, dw, 0).reshape(4, 64))
    close(x_grad, np.where(x_inside, dx, 0))
    close(w_grad.array.log_factor, (dw * w_slope).sum(-1) / np.sqrt(32 * 8))
    close(w_grad.log_factor, (dx * x_slope).sum() / np.sqrt(64 * 255))


@pytest.mark.long
def test_gradients_of_learned_scales_of_short_rows(getkey):
    """A row of 20 values has no whole block of 32: the gradient is divided by the root of 20 times the last level."""
    rows = weights(getkey(), (3, 20))
    q = eqq.quantize(rows, eqq.Int4(32))
    gradient = jax.grad(lambda log_factor: jnp.sum(ste_source(rows, q, log_factor)))(jnp.zeros((3, 1)))
    slope = np.asarray(q.dequantize(), np.float64) - np.asarray(rows, np.float64)
    np.testing.assert_allclose(gradient, slope.sum(-1, keepdims=True) / np.sqrt(20 * 8), rtol=1e-4, atol=1e-6)


def test_a_static_scale_passes_no_gradient_to_what_it_clips(getkey):
    w = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weights(getkey(), (3, 4)), "int8"), "int8", 0.01)
    dx = eqx.filter_jit(jax.grad(lambda x: jnp.sum(w @ x)))(jnp.asarray([0.5, -1.26, 1.4, -2.0]))
    assert (dx[:2] != 0).all() and (dx[2:] == 0).all()


@pytest.mark.long
@pytest.mark.parametrize("static", [pytest.param(False, marks=pytest.mark.slow), True])
def test_training_with_learned_scales(getkey, static):
    """Scales of a stack train beside the masters, and `finalize` keeps them: the same values, bit for bit."""
    keys = jr.split(getkey(), 2)
    model = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(keys)
    x, t = weights(getkey(), (20, 16)), weights(getkey(), (20, 16))

    def apply(model, x):
        arrays, other = eqx.partition(model, eqx.is_array)
        layer = lambda x, arrays: (jnp.tanh(jax.vmap(eqx.combine(arrays, other))(x)), None)
        return jax.lax.scan(layer, x, arrays)[0]

    activations = eqq.calibrate.collect_stats(model, [x], apply=apply) if static else "int8"
    options = {"activations": activations, "simulate": True}
    simulated = eqq.quantize_tree(model, "int4", learn_scales=True, **options)
    fixed = eqq.quantize_tree(model, "int4", **options)
    loss = lambda model: jnp.mean(jnp.square(apply(model, x) - t))
    assert float(loss(simulated)) == float(loss(fixed))
    optim = optax.adam(3e-3)

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(loss)(model)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    after, state = simulated, optim.init(eqx.filter(simulated, eqx.is_inexact_array))
    for _ in range(5):
        after, state = step(after, state)
    assert bool(jnp.all(after.weight.array.log_factor != 0))
    assert (after.weight.log_factor is not None) == static and (not static or bool(jnp.all(after.weight.log_factor)))
    assert float(loss(after)) < float(loss(simulated))
    final = eqq.finalize(after)
    assert float(loss(final)) == float(loss(after))
    assert jtu.tree_structure(final) == jtu.tree_structure(eqq.finalize(fixed))


def test_bad_learned_scales(getkey):
    tree = {"w": weights(getkey(), (8, 64))}
    with pytest.raises(ValueError, match="must come with `simulate=True`"):
        eqq.quantize_tree(tree, "int4", learn_scales=True)
    for format in (eqq.MXFP4(), eqq.NVFP4(), eqq.Int4(symmetric=False), eqq.formats.Q4_1(), eqq.Int8("tensor")):
        with pytest.raises(ValueError, match="`learn_scales=True` needs a format whose scales are floats"):
            eqq.quantize_tree(tree, format, simulate=True, learn_scales=True)
    with pytest.raises(ValueError, match="needs a scale to begin with"):
        eqq.arrays.ActivationQuantizedArray(eqq.quantize(tree["w"]), "int8", learn_scale=True)
