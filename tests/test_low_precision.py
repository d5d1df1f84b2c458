"""Training in low precision: every product against a float64 model of the same rounding, and whole models."""

import functools as ft
import itertools as it

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._numerics.hadamard import random_signs
from eqquant._numerics.hashing import hash_values, make_hash_key
from eqquant._wrappers.low_precision import LowPrecisionArray
from eqquant._wrappers.scaled import ScaledArray

from .helpers import primitives, weights


NEAREST = {"stochastic": False}
PAIRS = {
    "int8": (eqq.Int8(), eqq.Int8()),
    "fp8": (eqq.FP8(), eqq.FP8("e5m2")),
    "fp8_tensor": (eqq.FP8("e4m3", "tensor"), eqq.FP8("e5m2", "tensor")),
    "mxfp8": (eqq.MXFP8(), eqq.MXFP8()),
    "int8_affine": (eqq.Int8(symmetric=False), eqq.Int8(block_size=32)),
    "nvfp4": (eqq.NVFP4(), eqq.NVFP4()),
}


def round_operand(x, format):
    """The values of the rows of a matrix after rounding, in float64."""
    return np.asarray(eqq.quantize(x, format).dequantize(), np.float64)


def close(y, x, w, tol=2e-6):
    """Compares with the product in float64, relative to the sum of magnitudes."""
    assert y.shape == (x @ w.T).shape
    assert (np.abs(np.asarray(y, np.float64) - x @ w.T) <= tol * (np.abs(x) @ np.abs(w).T) + 1e-30).all()


def relative(x, y):
    return float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))


def rotated(x):
    """The random Hadamard transform of each 16 values of a row, and of zeros after the last."""
    signs, size = np.asarray(random_signs(16, 0), np.float32), -(-x.shape[1] // 16)
    padded = np.pad(np.asarray(x), ((0, 0), (0, size * 16 - x.shape[1]))).reshape(len(x), size, 16)
    return jnp.asarray(
        (padded * signs @ ft.reduce(np.kron, [[[1, 1], [1, -1]]] * 4) / 4).reshape(len(x), -1).astype(np.float32)
    )


@pytest.fixture
def operands(getkey):
    return weights(getkey(), (20, 40)), weights(getkey(), (24, 40)), weights(getkey(), (20, 24))


slow = ft.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4", *map(slow, ("int8", "fp8", "mxfp8", "int8_affine"))])
def test_the_three_products(operands, name):
    (x, w, dy), (forward, gradient) = operands, PAIRS[name]

    @jax.jit
    def products(x, w, dy):
        product = lambda x, w: x @ LowPrecisionArray(w, forward, gradient, False).T
        y, pull = jax.vjp(product, x, w)
        return y, *pull(dy)

    y, dx, dw = products(x, w, dy)
    weight, along = (eqq.NVFP4((16, 16)), rotated) if name == "nvfp4" else (forward, lambda x: x)
    close(y, round_operand(x, forward), round_operand(w, weight))
    close(dx, round_operand(dy, gradient), round_operand(w.T, weight))
    close(dw, round_operand(along(dy.T), gradient), round_operand(along(x.T), forward))


def test_forward_mode_passes_straight_through(operands):
    x, w, _ = operands
    product = lambda x, w: x @ LowPrecisionArray(w, "int8", "int8").T
    dx, dw = x[::-1], w[::-1]
    _, dy = jax.jvp(product, (x, w), (dx, dw))
    values = round_operand(x, "int8"), round_operand(w, "int8")
    exact = np.asarray(dx, np.float64) @ values[1].T + values[0] @ np.asarray(dw, np.float64).T
    np.testing.assert_allclose(dy, exact, rtol=1e-4, atol=1e-5)
    second = jax.jit(jax.hessian(lambda x: jnp.sum(product(x, w)[0] ** 2)))(x[:1])
    assert second.shape == (1, 40, 1, 40) and bool(jnp.isfinite(second).all())


def test_vmap_folds_examples_into_rows(operands):
    """The gradient of the weight is one product over all examples, not a sum of outer products."""
    x, w, dy = operands
    layer = eqq.low_precision_training({"weight": w}, **NEAREST)

    def loss(layer, x):
        return jnp.sum(jax.vmap(lambda x: layer["weight"] @ x)(x) * dy)

    def whole(layer, x):
        return jnp.sum(x @ layer["weight"].T * dy)

    of = lambda f: jax.jit(jax.grad(f, (0, 1)))(layer, x)
    for got, expected in zip(jax.tree.leaves(of(loss)), jax.tree.leaves(of(whole)), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert primitives(jax.grad(loss, (0, 1)), layer, x).count("rounded_matmul") == 3


@pytest.mark.long
@pytest.mark.parametrize("format", [eqq.FP8(), eqq.Int8("tensor")], ids=str)
def test_a_batch_of_weights(getkey, format):
    size = jnp.array([0.1, 1, 10])[:, None, None]  # each matrix has a scale of its own
    w, x, dy = (size * weights(getkey(), shape) for shape in ((3, 24, 40), (3, 5, 40), (3, 5, 24)))
    product = lambda w, x, dy: jax.vjp(lambda w, x: x @ LowPrecisionArray(w, format, format, False).mT, w, x)[1](dy)
    together = product(w, x, dy)
    each = [product(*operands) for operands in zip(w, x, dy, strict=True)]
    for got, expected in zip(together, zip(*each, strict=True), strict=True):
        np.testing.assert_allclose(got, jnp.stack(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(product)(w, x, dy)[0], together[0], rtol=1e-5, atol=1e-6)
    change = lambda w, x: jax.jvp(lambda w: x @ LowPrecisionArray(w, format, format).mT, (w,), (w,))[1]
    np.testing.assert_allclose(change(w, x)[2], change(w[2], x[2]), rtol=1e-5, atol=1e-5)
    # One input for many weights, and per-example gradients.
    one_token = jax.vmap(lambda w: LowPrecisionArray(w, "int8", "int8") @ x[0, 0])(w)
    np.testing.assert_allclose(one_token[1], LowPrecisionArray(w[1], "int8", "int8") @ x[0, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(40,), slow((40, 3)), slow((2, 40, 3)), (3, 2, 40, 5)])
def test_shapes(getkey, shape):
    """The operators take the shapes of `jnp.matmul`, and so does `quaxify`."""
    w, x = weights(getkey(), (24, 40)), weights(getkey(), shape)
    q = LowPrecisionArray(w, "int8", "int8")
    left, right = (jnp.matmul(w, x), jnp.matmul(x.T, w.T)) if len(shape) < 3 else (jnp.matmul(w, x), None)
    assert (q @ x).shape == left.shape and relative(q @ x, left) < 0.02
    np.testing.assert_allclose(eqq.quaxify(jnp.matmul)(q, x), q @ x, rtol=1e-5, atol=1e-5)
    if right is not None:
        assert (x.T @ q.T).shape == right.shape and relative(x.T @ q.T, right) < 0.02
        np.testing.assert_allclose(eqq.quaxify(jnp.matmul)(x.T, q.T), x.T @ q.T, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_stacks_broadcast(getkey):
    w, x = weights(getkey(), (3, 24, 40)), weights(getkey(), (7, 40))
    q = LowPrecisionArray(w, "int8", "int8")
    for rows in (x, x[0]):
        y = jnp.stack([rows @ layer.T for layer in w])
        assert (rows @ q.mT).shape == y.shape and relative(rows @ q.mT, y) < 0.02
    y = jnp.stack([layer @ x.T for layer in w])
    assert (q @ x.T).shape == y.shape and relative(q @ x.T, y) < 0.02


@pytest.mark.long
def test_stochastic_rounding(operands):
    """The mean over many roundings is the exact gradient; each repeats bit for bit, and no two are alike."""
    x, w, dy = operands
    w, dy = w[:4], dy[:, :4]

    @jax.jit
    def gradient(salt):
        # A last example whose gradient meets a zero: it changes only the randomness.
        product = lambda w: jnp.concatenate([x, jnp.zeros((1, 40))]) @ LowPrecisionArray(w, "int4", "int4").T
        salted = jnp.concatenate([dy, jnp.full((1, 4), salt)])
        return jax.vjp(product, w)[1](salted)[0]

    salts = jnp.linspace(0.001, 0.002, 400)
    many = jax.lax.map(gradient, salts)
    np.testing.assert_array_equal(gradient(salts[3]), many[3])
    assert len(np.unique(np.asarray(many[:, 0, 0]))) > 10
    rows = jnp.concatenate([dy, jnp.zeros((1, 4))]), jnp.concatenate([x, jnp.zeros((1, 40))])
    exact = jnp.asarray(np.asarray(rows[0], np.float64).T @ round_operand(rows[1].T, "int4").T, jnp.float32)
    nearest = jnp.asarray(round_operand(rows[0].T, "int4") @ round_operand(rows[1].T, "int4").T, jnp.float32)
    assert relative(many.mean(0), exact) < 0.25 * relative(nearest, exact)
    spread = jnp.std(many, axis=0) / np.sqrt(len(salts))
    assert float(jnp.mean(jnp.abs(many.mean(0) - exact) < 4 * spread)) > 0.98


def test_gradients_of_16_bits_seed_alike_rarely(operands):
    """Their lower halves are zeros in float32. What multiplies into `dx` and `dW` rounds otherwise, one a transpose."""
    many = weights(jr.key(0), (2000, 4, 6), jnp.bfloat16)
    seeds = jax.jit(jax.vmap(hash_values))
    assert len(np.unique(seeds(many))) == len(many)
    row = jnp.swapaxes(many[:, :1], -1, -2)
    assert not (seeds(many) == seeds(jnp.swapaxes(many, -1, -2))).any()
    assert not (seeds(many[:, :1]) == seeds(row)).any()


def test_random_numbers_are_hashes_of_their_places():
    """Against integers of Python: so a run repeats bit for bit in later versions too."""
    step, second = 0x9E3779B9, 0x735A2D97

    def mix(x):
        for shift, factor in ((16, 0x21F0AAAD), (15, second), (15, 1)):
            x = (x ^ x >> shift) * factor % 2**32
        return x

    seed, key = mix(7 + step), make_hash_key(jnp.uint32(7))
    bits = [mix((n * step + seed) % 2**32) for n in range(6)]
    assert jr.bits(key, (2, 3)).tolist() == [bits[:3], bits[3:]]
    for dtype in (jnp.uint8, jnp.uint16):
        assert jr.bits(key, (6,), dtype).tolist() == [b >> 32 - jnp.iinfo(dtype).bits for b in bits]
    assert jr.key_data(jr.split(key, 3)).ravel().tolist() == [
        mix((n * step + mix(2**32 - 1 - seed)) % 2**32) for n in range(3)
    ]
    assert jr.key_data(jr.fold_in(key, 5)).tolist() == [mix(seed ^ mix(5 + step))]
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    places = [(int(x.view(np.uint32)[r, c]) + r * step + c * second) % 2**32 for r in range(2) for c in range(3)]
    assert int(hash_values(jnp.asarray(x))) == sum(map(mix, places)) % 2**32


def test_x64_mode(operands):
    x, w, dy = operands
    with jax.enable_x64(True):
        dw = eqx.filter_jit(jax.grad(lambda w: jnp.sum(x @ LowPrecisionArray(w, "int8", "int8").T * dy)))(w)
        assert dw.dtype == jnp.float32 and relative(dw, dy.T @ x) < 0.05


@pytest.mark.parametrize("precision", ["F32_F32_F32", ("highest", "default"), "highest"])
def test_precisions(operands, precision):
    x, w, _ = operands
    q = LowPrecisionArray(w, "int8", "int8")
    product = lambda x, w: jnp.matmul(x, w.T, precision=precision)
    y, pull = jax.vjp(lambda x: eqq.quaxify(product)(x, q), x)
    np.testing.assert_allclose(y, x @ q.T, rtol=1e-5, atol=1e-5)
    assert jnp.isfinite(pull(y)[0]).all()


CASES = [("int8", jnp.nan), ("fp8_tensor", jnp.inf)]
CASES += [slow(*case) for case in it.product(("int8", "fp8", "fp8_tensor", "mxfp8"), (jnp.nan, jnp.inf))]


@pytest.mark.parametrize(("name", "bad"), CASES)
def test_not_finite(operands, name, bad):
    x, w, dy = operands
    product = lambda x, w: x @ LowPrecisionArray(w, *PAIRS[name]).T
    y, pull = jax.vjp(product, x.at[3, 5].set(bad), w)
    assert not jnp.isfinite(y[3]).any()
    dx, dw = pull(dy.at[2, 7].set(bad))
    assert not jnp.isfinite(dx[2]).any() and not jnp.isfinite(dw[7]).any() and not jnp.isfinite(dw[:, 5]).any()
    if name != "fp8_tensor":
        assert jnp.isfinite(y[:3]).all() and jnp.isfinite(dx[:2]).all()
        assert name == "mxfp8" or jnp.isfinite(dw[:7, :5]).all()


# Models


class Network(eqx.Module):
    table: eqx.nn.Embedding
    conv: eqx.nn.Conv1d
    layers: eqx.nn.Linear  # a stack
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 4)
        self.table = eqx.nn.Embedding(11, 16, key=keys[0])
        self.conv = eqx.nn.Conv1d(16, 16, 3, padding=1, key=keys[1])
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(jr.split(keys[2], 3))
        self.norm = eqx.nn.LayerNorm(16)
        self.head = eqx.nn.Linear(16, 11, key=keys[3])

    def __call__(self, tokens):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        x = self.conv(jax.vmap(self.table)(tokens).T).T
        layer = lambda x, arrays: (x + jax.nn.gelu(jax.vmap(eqx.combine(arrays, static))(x)), None)
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, arrays)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_model(model, tokens, steps=20, grad=eqx.filter_value_and_grad, mask=None, repeat=False):
    optim = optax.adamw(1e-2) if mask is None else optax.masked(optax.adamw(1e-2), mask)

    @eqx.filter_jit
    def step(model, state):
        value, grads = grad(loss)(model, tokens)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    runs = []
    for _ in range(1 + repeat):
        state, values = (model, optim.init(eqx.filter(model, eqx.is_inexact_array))), []
        for _ in range(steps):
            *state, value = step(*state)
            values.append(float(value))
        runs.append(state[0])
    assert all(eqx.tree_equal(runs[0], other) for other in runs)
    return runs[0], values


@pytest.mark.long
def test_training_a_model():
    """An ordinary loop, with `eqx.filter_grad` and optax: the loss falls, and runs repeat bit for bit."""
    model, tokens = Network(jr.key(0)), jr.randint(jr.key(1), (8, 33), 0, 11)
    low, values = train_model(eqq.low_precision_training(model), tokens, repeat=True)
    assert values[-1] < 0.9 * values[0]
    dense = eqq.dequantize_tree(low)
    assert jax.tree.structure(dense) == jax.tree.structure(model)
    assert dense.head.weight is low.head.weight.array


@pytest.mark.slow
def test_losses_are_near_float_training():
    model, tokens = Network(jr.key(0)), jr.randint(jr.key(1), (8, 33), 0, 11)
    np.testing.assert_allclose(
        train_model(eqq.low_precision_training(model), tokens)[1], train_model(model, tokens)[1], rtol=0.01
    )


def test_the_recipe_of_four_bits(operands):
    """A rotated product is exact but for rounding, in all modes; and the last layers stay as they are."""
    x, w, dy = operands
    x = x.at[3, 7].set(100.0)  # spread among 16 examples
    product = lambda x, w: x @ LowPrecisionArray(w, "nvfp4", "nvfp4").T
    dw = jax.jit(lambda x: jax.vjp(product, x, w)[1](dy)[1])
    plain = round_operand(dy.T, eqq.NVFP4()) @ round_operand(x.T, eqq.NVFP4()).T
    exact = dy.T @ x
    assert relative(dw(x), exact) < 0.2 and relative(dw(x)[:, :7], exact[:, :7]) < 0.2
    assert relative(dw(x), exact) != relative(plain, exact)
    change = jax.jit(lambda x, v: jax.jvp(dw, (x,), (v,))[1])(x, x[::-1])
    assert relative(change, dy.T @ x[::-1]) < 0.2
    back = jax.jit(lambda x, v: jax.vjp(dw, x)[1](v)[0])(x, w)
    assert relative(back, dy @ w) < 0.3
    layers = {f"{n:02}": w for n in range(10)}
    low = eqq.low_precision_training(layers, "nvfp4")
    assert [isinstance(layer, LowPrecisionArray) for layer in low.values()] == [True] * 8 + [False] * 2
    assert low["00"].weight_format == eqq.NVFP4((16, 16)) and "the weight in tiles" in low["00"].products
    everything = eqq.low_precision_training(layers, "nvfp4", where=lambda tree: tree)
    assert all(isinstance(layer, LowPrecisionArray) for layer in everything.values())
    assert not isinstance(eqq.low_precision_training(layers, "mxfp8")["09"], jax.Array)


def test_wrapped_leaves():
    model = Network(jr.key(0))
    low = eqq.low_precision_training(model, "fp8")
    assert isinstance(low.head.weight, LowPrecisionArray) and isinstance(low.layers.weight, LowPrecisionArray)
    assert low.head.weight.gradient == eqq.FP8("e5m2") and low.head.weight.format is None
    tensor = eqq.FP8("e4m3", "tensor")
    other = eqq.low_precision_training(model, tensor, stochastic=False).head.weight
    assert (other.forward, other.gradient, other.stochastic) == (tensor, eqq.FP8("e5m2", "tensor"), False)
    own = eqq.low_precision_training(model, "int8", "int4").head.weight
    assert (own.forward, own.gradient, own.stochastic, own.amax) == (eqq.Int8(), eqq.Int4(), True, None)
    assert low.table.weight is model.table.weight and low.conv.weight is model.conv.weight
    assert low.layers.bias is model.layers.bias
    text = str(eqq.summary(low))
    assert "head.weight" in text and "gradients" in text and "LowPrecisionArray" in repr(low.head)
    assert "Int8() x Int8()" in str(
        eqq.explain_matmul(jnp.ones((4, 16)), eqq.low_precision_training(model).head.weight.T)
    )
    only = eqq.low_precision_training(model, where=lambda m: m.head)
    assert isinstance(only.head.weight, LowPrecisionArray) and only.layers.weight is model.layers.weight
    shared = eqq.low_precision_training({"a": model.head.weight, "b": model.head.weight})
    assert shared["a"] is shared["b"]
    masked = jax.tree.leaves(eqq.trainable_mask(low))
    assert all(masked) and len(masked) == len(jax.tree.leaves(low))


def test_other_operations_see_the_float_array(operands):
    _, w, _ = operands
    q = LowPrecisionArray(w, "int8", "int8")
    np.testing.assert_array_equal(q[3], w[3])
    np.testing.assert_array_equal(jnp.sin(q), jnp.sin(w))
    assert q.T.shape == (40, 24) and q.reshape(2, 12, 40).shape == (2, 12, 40)
    assert q.astype(jnp.bfloat16).dtype == jnp.bfloat16 and isinstance(q.astype(jnp.bfloat16), LowPrecisionArray)
    assert isinstance(q.astype(jnp.int32), jax.Array)
    y = q.astype(jnp.bfloat16) @ w[0].astype(jnp.bfloat16)
    assert y.dtype == jnp.bfloat16


@pytest.mark.long
def test_low_rank_factors():
    """The frozen base multiplies in low precision, float or quantized; only factors train."""
    model, tokens = Network(jr.key(0)), jr.randint(jr.key(1), (4, 17), 0, 11)
    for base in (model, eqq.quantize_tree(model, "nf4")):
        low = eqq.low_precision_training(eqq.loraify(base, rank=2, key=jr.key(2)))
        assert isinstance(low.head.weight.base, LowPrecisionArray)
        mask = eqq.trainable_mask(low)
        after, values = train_model(low, tokens, 5, eqq.filter_value_and_grad, mask)
        assert values[-1] < values[0]
        assert eqx.tree_equal(after.head.weight.base, low.head.weight.base)
        assert not eqx.tree_equal(after.head.weight.b, low.head.weight.b)
    with pytest.raises(ValueError, match="`loraify` first"):
        eqq.loraify(eqq.low_precision_training(eqq.quantize_tree({"w": model.head.weight})), rank=2, key=jr.key(2))


def test_quantized_weights_train_with_masters(operands):
    x, w, dy = operands
    model = eqq.low_precision_training(eqq.quantize_tree({"w": w}, "int8"))
    optim = eqq.float_masters(optax.sgd(0.1), masters={"w": w})
    state = optim.init(model)
    grads = eqx.filter_jit(eqq.filter_grad(lambda m: jnp.sum(x @ m["w"].T * dy)))(model)
    assert relative(jax.tree.leaves(grads)[0], dy.T @ x) < 0.03
    updates, state = optim.update(grads, state, model)
    after = eqq.apply_updates(model, updates)
    assert isinstance(after["w"], LowPrecisionArray) and eqq.is_quantized(after["w"].array)
    np.testing.assert_array_equal(
        after["w"].array.dequantize(), eqq.quantize(jax.tree.leaves(state.masters)[0], "int8").dequantize()
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharding(operands, kind):
    """Rows and outputs divided among devices: the same bits, with the same randomness."""
    x, w, dy = operands
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))

    @jax.jit
    def products(x, w, dy):
        y, pull = jax.vjp(lambda x, w: x @ LowPrecisionArray(w, "int8", "int8").T, x, w)
        return y, *pull(dy)

    alone = products(x, w, dy)
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        divided = products(place(x, "data"), place(w, "model"), place(dy, "data", "model"))
    for got, expected in zip(divided, alone, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_shard_map(operands):
    x, w, dy = operands
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def gradient(w, x, dy):
        return jax.grad(lambda w: jnp.sum(x @ LowPrecisionArray(w, "int8", "int8", False).T * dy))(w)

    each = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P()))
    parts = [gradient(w, *pair) for pair in zip(jnp.split(x, 4), jnp.split(dy, 4), strict=True)]
    np.testing.assert_allclose(each(w, x, dy), sum(parts), rtol=1e-4, atol=1e-5)


def test_files(tmp_path):
    low = eqq.low_precision_training(Network(jr.key(0)), "fp8")
    eqq.save(tmp_path / "low.safetensors", low)
    assert eqx.tree_equal(eqq.load(tmp_path / "low.safetensors", low), low)


def test_bad_input():
    model = Network(jr.key(0))
    with pytest.raises(ValueError, match="must hold weights that products use"):
        eqq.low_precision_training({"bias": jnp.ones(3)})
    with pytest.raises(TypeError, match="one dimension"):
        eqq.low_precision_training(model, where=lambda m: m.head.bias)
    with pytest.raises(TypeError, match="a convolution, which is computed in float"):
        eqq.low_precision_training(model, where=lambda m: (m.conv.weight, m.head.weight))
    with pytest.raises(TypeError, match="Got a LowPrecisionArray"):
        eqq.arrays.ActivationQuantizedArray(eqq.low_precision_training(model).head.weight, "int8")
    with pytest.raises(TypeError, match="low precision already"):
        eqq.low_precision_training(eqq.low_precision_training(model), where=lambda m: m.head.weight.array)
    with pytest.raises(ValueError, match="part of an ActivationQuantizedArray, whose products round already"):
        eqq.low_precision_training(eqq.quantize_tree(model, "int8", activations="int8"))
    with pytest.raises(ValueError, match="`forward` must be one of .*int9"):
        eqq.low_precision_training(model, "int9")
    with pytest.raises(ValueError, match="`forward` must have scales of their own for each row"):
        eqq.low_precision_training(model, eqq.FP8(block_size=(16, 16)))
    with pytest.raises(ValueError, match="`gradient` must be one of .*int9"):
        eqq.low_precision_training(model, gradient="int9")
    with pytest.raises(ValueError, match="axes of equal length"):
        eqq.low_precision_training(model).head.weight @ jnp.ones(7)


# Policies of mixed precision


def cast_floats(tree, dtype):
    """As `cast_to_compute` of jmp's policies."""
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


POLICY_MODELS = {
    "quantized": lambda m: eqq.quantize_tree(m, "int8", dtype=jnp.bfloat16),
    "activations": lambda m: eqq.quantize_tree(m, "int8", dtype=jnp.bfloat16, activations="int8"),
    "factors": lambda m: eqq.loraify(eqq.quantize_tree(m, "int8", dtype=jnp.bfloat16), 2, key=jr.key(0)),
    "simulated": lambda m: eqq.quantize_tree(m, "int8", dtype=jnp.bfloat16, simulate=True),
    "scaled": lambda m: eqx.tree_at(
        lambda m: m.weight,
        m,
        ScaledArray(eqq.quantize(m.weight, "int8", dtype=jnp.bfloat16), jnp.ones(64, jnp.bfloat16)),
    ),
}


@pytest.mark.parametrize("kind", POLICY_MODELS)
def test_dtypes_after_a_cast_follow_the_logical_dtype(kind, getkey):
    """A cast of all floats keeps the logical dtype. Results have the wider of both dtypes."""
    layer = eqx.nn.Linear(64, 32, use_bias=False, key=getkey())
    model = POLICY_MODELS[kind](layer)
    for dtype in (jnp.bfloat16, jnp.float32):
        cast = cast_floats(model, dtype)
        assert cast.weight.dtype == jnp.bfloat16
        for x in (jnp.bfloat16, jnp.float32):
            with jax.numpy_dtype_promotion("standard"):
                assert cast(jnp.ones(64, x)).dtype == x
