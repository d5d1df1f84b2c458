"""Arrays that map their inputs first: permuted, scaled and rotated ones, under transformations and in models."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqquant as eqq
from eqquant._numerics.hadamard import factors, random_signs, rotate
from eqquant._wrappers.permuted import PermutedArray
from eqquant._wrappers.rotated import RotatedArray
from eqquant._wrappers.scaled import ScaledArray

from .helpers import weights


OUT, IN = 24, 96


def permuted(w):
    order = np.random.default_rng(0).permutation(w.shape[-1])
    return PermutedArray(w[..., order], jnp.asarray(order, jnp.uint32))


def scaled(w):
    scale = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, w.shape[-1]), jnp.float32)
    return ScaledArray(w / scale.reshape(*[1] * (w.ndim - 1), -1), scale)


KINDS = {"permuted": permuted, "scaled": scaled, "rotated": RotatedArray.of}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def w():
    return weights(jr.key(0), (OUT, IN))


def close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=tolerance * (1 + np.abs(np.asarray(b)).max()))


# The transform


@pytest.mark.parametrize("size", [1, 13, 92, 384, 768])
def test_rotations_are_orthogonal(size):
    r = np.asarray(rotate(jnp.eye(size), -1, seed=5), np.float64)
    np.testing.assert_allclose(r @ r.T, np.eye(size), rtol=0, atol=1e-6)
    x = weights(jr.key(0), (2, size, 3))
    close(rotate(rotate(x, -2, 5), -2, 5, back=True), x, 1e-6)
    close(rotate(x, -2, 5), np.einsum("ji,bjk->bik", r, x), 1e-6)


@pytest.mark.parametrize("size", [64, 384, 768, 1536, 28 * 64, 36 * 4])
def test_entries_of_hadamard_matrices_have_one_magnitude(size):
    assert np.prod([len(f) for f in factors(size)]) == size
    for factor in factors(size):
        np.testing.assert_array_equal(np.abs(factor), 1)


def test_other_sizes_have_flat_factors_too():
    for size in (13, 11008, 92):
        for factor in factors(size):
            np.testing.assert_allclose(factor @ factor.T, len(factor) * np.eye(len(factor)), atol=1e-9)
            assert np.abs(factor).max() < 2**0.5 + 1e-9


def test_signs_are_the_same_in_all_versions():
    assert random_signs(24, 1).tolist() == SIGNS_OF_SEED_1


# PCG64 is specified, so these hold for every version of NumPy and JAX.
SIGNS_OF_SEED_1 = [-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1, 1, -1, 1, 1, 1, 1, -1, 1, 1, 1, -1, 1]


def test_half_precision_is_rounded_once():
    x = weights(jr.key(0), (5, IN)).astype(jnp.bfloat16)
    wanted = rotate(x.astype(jnp.float32), -1, 0).astype(jnp.bfloat16)
    assert rotate(x, -1, 0).dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(rotate(x, -1, 0), np.float32), np.asarray(wanted, np.float32))


# The array


def test_dequantizes_to_the_dense_array(kind, w):
    m = kind(w)
    assert m.shape == (OUT, IN) and m.ndim == 2 and m.dtype == jnp.float32 and m.T.shape == (IN, OUT)
    close(m.dequantize(), w)
    close(m.T.dequantize(), w.T)
    close(m[3], w[3])
    close(m[1:4], w[1:4])
    close(m[jnp.array([2, 0])], w[jnp.array([2, 0])])
    close(m[2, 5], w[2, 5])
    close(m + 1, w + 1)
    assert m.astype(jnp.bfloat16).dtype == jnp.bfloat16 and isinstance(m.astype(jnp.bfloat16), type(m))
    assert m.astype(jnp.int32).dtype == jnp.int32
    assert repr(m).startswith(type(m).__name__)


@pytest.mark.parametrize("shape", [(IN,), (IN, 3), (2, IN, 3)], ids=str)
def test_products(kind, w, shape):
    m, x = kind(w), weights(jr.key(1), shape)
    y = jnp.swapaxes(x, -1, -2) if x.ndim > 1 else x
    close(m @ x, w @ x)
    close(y @ m.T, y @ w.T)
    x = weights(jr.key(2), tuple(OUT if n == IN else n for n in shape))
    y = jnp.swapaxes(x, -1, -2) if x.ndim > 1 else x
    close(m.T @ x, w.T @ x)
    close(y @ m, y @ w)


@pytest.mark.long
def test_transformations(kind, w):
    m, xs = kind(w), weights(jr.key(1), (5, IN))
    f = lambda m, x: jnp.sum(jnp.sin(m @ x))
    close(jax.jit(jax.vmap(lambda x: m @ x))(xs), xs @ w.T)
    close(eqx.filter_jit(jax.grad(f, 1))(m, xs[0]), eqx.filter_jit(jax.grad(f, 1))(w, xs[0]))
    close(jax.vmap(jax.grad(f, 1), (None, 0))(m, xs), jax.vmap(jax.grad(f, 1), (None, 0))(w, xs))
    close(eqx.filter_jit(jax.jacfwd(lambda x: m @ x))(xs[0]), w)
    close(eqx.filter_jit(jax.hessian(f, 1))(m, xs[0]), eqx.filter_jit(jax.hessian(f, 1))(w, xs[0]), 1e-4)


def test_gradients_are_transformed_dense_gradients(kind, w):
    m, x = kind(w), weights(jr.key(1), (IN,))
    f = lambda m: jnp.sum(jnp.sin(m @ x))
    grads = eqx.filter_jit(eqx.filter_grad(f))(m)
    wanted = m.map_inputs(eqx.filter_jit(jax.grad(f))(w), -1)
    close(grads.array, wanted)
    # Straight through, of codes: as if the decoded array were stored.
    q = dataclasses.replace(m, array=eqq.quantize(m.array, "int8"))
    dense = dataclasses.replace(m, array=q.array.dequantize())
    close(eqx.filter_jit(eqq.filter_grad(f))(q).array, eqx.filter_jit(eqx.filter_grad(f))(dense).array)


@pytest.mark.long
def test_stacks(kind):
    ws = weights(jr.key(0), (3, OUT, IN))
    x = weights(jr.key(1), (IN,))
    stack = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *[kind(w) for w in ws])
    close(stack.dequantize(), ws)
    close(stack.mT.dequantize(), ws.mT)
    _, ys = jax.lax.scan(lambda _, m: (None, m @ x), None, stack)
    close(ys, ws @ x)
    close(eqx.filter_vmap(lambda m: m @ x)(stack), ws @ x)
    close(stack @ x[:, None], ws @ x[:, None])


def test_nested_input_transforms(w):
    m = RotatedArray(RotatedArray.of(rotate(w, -1, 1), 2), 1)
    x = weights(jr.key(1), (IN,))
    close(m @ x, w @ x)
    close(m.dequantize(), w)


# In models


@pytest.fixture
def model():
    return eqx.nn.MLP(IN, 8, 64, 2, key=jr.key(0))


@pytest.fixture
def xs():
    return weights(jr.key(1), (32, IN))


def run(model, xs):
    return eqx.filter_jit(lambda m, x: jax.vmap(m)(x))(model, xs)


@pytest.mark.long
def test_rotated_models_are_the_same(model, xs):
    rotated = eqq.transforms.rotate(model, seed=3)
    assert isinstance(rotated.layers[0].weight, RotatedArray)
    close(run(rotated, xs), run(model, xs))
    close(run(eqq.dequantize_tree(rotated), xs), run(model, xs))
    assert eqq.tree_nbytes(rotated) == eqq.tree_nbytes(model)
    one = eqq.transforms.rotate(model, where=lambda m: m.layers[1].weight)
    assert isinstance(one.layers[0].weight, jax.Array) and isinstance(one.layers[1].weight, RotatedArray)
    planned = eqq.transforms.rotate(eqx.filter_eval_shape(lambda: model))
    assert planned.layers[0].weight.array.shape == (64, IN)


@pytest.mark.long
def test_quantizing_uses_the_stored_array(model, xs):
    rotated = eqq.transforms.rotate(model)
    stats = eqq.calibrate.collect_stats(rotated, [xs], gram=True)
    turned = np.asarray(rotate(xs, -1, 0), np.float64)
    close(stats["layers.0.weight.array"].gram, turned.T @ turned / len(xs))
    q = eqq.quantize_tree(rotated, {"layers.0.weight": "int8", "*": "int4"}, method=eqq.GPTQ(stats))
    formats = [type(layer.weight.format).__name__ for layer in q.layers]
    assert formats == ["Int8", "Int4", "Int4"]
    by_hand = eqq.quantize(
        rotate(model.layers[1].weight, -1, 0), "int4", method=eqq.GPTQ(stats["layers.1.weight.array"])
    )
    assert eqx.tree_equal(q.layers[1].weight.array, by_hand)
    assert "quantized, in a RotatedArray" in str(eqq.summary(q).to_dict())
    in_order = eqq.quantize_sequentially(rotated, [xs], "int4", eqq.GPTQ())
    assert isinstance(in_order.layers[2].weight.array, eqq.QuantizedArray)
    assert np.abs(run(in_order, xs) - run(model, xs)).max() < 0.1
    dense = eqq.dequantize_tree(q)
    assert isinstance(dense.layers[0].weight, jax.Array)
    close(run(dense, xs), run(q, xs))


def test_rotations_spread_outliers():
    w = weights(jr.key(0), (64, 256)).at[:, 7].mul(50)
    eqq_error = lambda m: float(
        jnp.linalg.norm(eqq.dequantize_tree(eqq.quantize_tree({"w": m}, eqq.Int4(None)))["w"] - w)
    )
    assert eqq_error(RotatedArray.of(w)) < 0.5 * eqq_error(w)


@pytest.mark.long
def test_training(model, xs):
    q = eqq.quantize_tree(eqq.transforms.rotate(model), "int4")
    loss = lambda m: jnp.mean(jnp.square(jax.vmap(m)(xs) - 1))
    optim = eqq.float_masters(optax.sgd(0.1), masters=eqq.transforms.rotate(model))
    state, before = optim.init(q), loss(q)

    @eqx.filter_jit
    def step(q, state):
        updates, state = optim.update(eqq.filter_grad(loss)(q), state, q)
        return eqq.apply_updates(q, updates), state

    for _ in range(3):
        q, state = step(q, state)
    assert loss(q) < before and isinstance(q.layers[0].weight.array, eqq.QuantizedArray)
    # The masters are in the rotated space.
    wanted = eqq.quantize(state.masters.layers[0].weight.array, "int4")
    assert eqx.tree_equal(q.layers[0].weight.array, wanted)
    simulated = eqq.quantize_tree(eqq.transforms.rotate(model), "int4", simulate=True)
    done = eqq.finalize(simulated)
    assert eqx.tree_equal(done, eqq.quantize_tree(eqq.transforms.rotate(model), "int4"))
    close(run(simulated, xs), run(done, xs))


@pytest.mark.long
def test_low_rank_factors(model, xs):
    q = eqq.quantize_tree(eqq.transforms.rotate(model), "int4")
    adapted = eqq.loraify(q, rank=2, key=jr.key(2))
    assert isinstance(adapted.layers[0].weight.array, eqq.arrays.LoraArray)
    close(run(adapted, xs), run(q, xs))
    # The factors alone train, though they stand inside of an array that maps its inputs.
    mask = eqq.trainable_mask(adapted)
    assert not mask.layers[0].bias and not mask.layers[0].weight.array.base and mask.layers[0].weight.array.a
    grads = eqx.filter_jit(eqq.filter_grad(lambda m: jnp.sum(jax.vmap(m)(xs))))(adapted)
    assert grads.layers[0].bias is None and np.abs(grads.layers[2].weight.array.b).max() > 0
    close(run(eqq.merge_lora(adapted, dense=True), xs), run(q, xs))
    close(run(eqq.dequantize_tree(adapted), xs), run(q, xs))


@pytest.mark.long
def test_files(model, tmp_path):
    for m in (eqq.quantize_tree(eqq.transforms.rotate(model, seed=4), "nf4"), eqq.transforms.rotate(model)):
        eqq.save(tmp_path / "m.safetensors", m)
        assert eqx.tree_equal(eqq.load(tmp_path / "m.safetensors", m), m)
    other = eqq.transforms.rotate(model, seed=5)
    with pytest.raises(ValueError, match="seed=0.*seed=5|seed=5.*seed=0"):
        eqq.load(tmp_path / "m.safetensors", other)


def test_arrays_in_two_places_stay_shared(xs):
    w = weights(jr.key(0), (8, IN))
    rotated = eqq.transforms.rotate({"a": w, "b": w})
    assert rotated["a"] is rotated["b"]


def test_transformed_weights_on_the_right(xs):
    w = weights(jr.key(0), (IN, 8))
    rotated = eqq.transforms.rotate({"w": w}, axis=-2)
    close(xs @ rotated["w"], xs @ w)
    q = eqq.quantize_tree(rotated, "int8")
    assert q["w"].array.axis == -2 and np.abs(xs @ q["w"] - xs @ w).max() < 0.5


def test_errors(model):
    conv = eqx.nn.Conv1d(4, 4, 3, key=jr.key(0))
    embedding = eqx.nn.Embedding(8, 4, key=jr.key(0))
    for tree, why in (
        (conv, "a convolution"),
        (embedding, "an embedding"),
        (eqq.quantize_tree(model), "already quant"),
    ):
        with pytest.raises(ValueError, match=f"`rotate` needs weights in float.*{why}"):
            eqq.transforms.rotate(tree)
    with pytest.raises(TypeError, match="layers.0.bias: fewer than two dimensions"):
        eqq.transforms.rotate(model, where=lambda m: m.layers[0].bias)
    for seed in (-1, True):
        with pytest.raises(ValueError, match="`seed` must be a whole number"):
            eqq.transforms.rotate(model, seed=seed)
    for axis in (0, 1, 2, -3):
        with pytest.raises(ValueError, match="`axis` must be -1, for weights"):
            eqq.transforms.rotate(model, axis=axis)
        with pytest.raises(ValueError, match="`axis` must be -1 or -2"):
            RotatedArray(jnp.ones((4, 4)), 0, axis)
        with pytest.raises(ValueError, match="`axis` must be -1 or -2"):
            ScaledArray(jnp.ones((4, 4)), jnp.ones(4), axis)
    with pytest.raises(ValueError, match="its inputs are transformed already"):
        eqq.transforms.rotate(eqq.transforms.rotate(model))


def test_floats_have_no_format():
    """The `format` of a `jax.Array` is another thing."""
    assert RotatedArray.of(jnp.ones((2, 4))).format is None
