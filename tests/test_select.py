"""`eqq.take_layer`: layers and experts of a stack, against the arrays themselves."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._native import library as native

from .helpers import weights


needs_native = pytest.mark.skipif(native.refusal() is not None, reason=str(native.refusal()))
NAMES = {
    "nf4": eqq.NF4(),
    "double": eqq.NF4(double_quant=True),
    "int8": eqq.Int8(),
    "affine": eqq.Int4(symmetric=False),
    "offsets": eqq.formats.Q4_1(),
    "transposed": eqq.Int2(),
}


@pytest.fixture(params=NAMES)
def stack(request, getkey):
    """Five matrices `(48, 200)`; `transposed`: quantized along their first axis."""
    axis = -2 if request.param == "transposed" else -1
    return eqq.quantize(weights(getkey(), (5, 48, 200)), NAMES[request.param], axis=axis)


def close(y, expected, tol=2e-5):
    expected = np.asarray(expected)
    assert np.asarray(y).shape == expected.shape
    np.testing.assert_allclose(np.asarray(y), expected, atol=tol * np.abs(expected).max())


def test_products(getkey, stack):
    dense, x, z = stack.dequantize(), weights(getkey(), (3, 200)), weights(getkey(), (3, 48))
    for index, place in ((0, 0), (3, 3), (-1, 4), (-5, 0)):
        q, w = eqq.take_layer(stack, index), dense[place]
        assert q.shape == w.shape and q.dtype == w.dtype and q.ndim == 2
        close(x @ q.T, x @ w.T)
        close(q @ x[0], w @ x[0])
        close(z @ q, z @ w)
    multiply_layer = jax.jit(lambda stack, index: eqq.take_layer(stack, index) @ x.T)
    close(multiply_layer(stack, 2), dense[2] @ x.T)
    assert np.array_equal(eqq.take_layer(stack, 1).dequantize(), dense[1])


@pytest.mark.long
@pytest.mark.parametrize("stack", ["double", "offsets", "transposed"], indirect=True)
def test_several_indices(getkey, stack):
    dense, x = stack.dequantize(), weights(getkey(), (3, 200))
    chosen = jnp.array([4, 0, 4])
    q, w = eqq.take_layer(stack, chosen), dense[chosen]
    assert q.shape == w.shape
    close(q @ x.T, w @ x.T)
    close(x[:, :48] @ q, x[:, :48] @ w)
    close(q @ x[:, :, None], w @ x[:, :, None])
    close(jnp.tensordot(q, x, ((0,), (0,))), jnp.tensordot(w, x, ((0,), (0,))))
    close(jax.vmap(lambda n, x: eqq.take_layer(stack, n) @ x)(chosen, x), jnp.einsum("mnk,mk->mn", w, x))
    by_rows, y = lambda w, y: jnp.einsum("mnk,mnk->mn", w, y), weights(getkey(), (3, 48, 200))
    close(eqq.quaxify(by_rows)(q, y), by_rows(w, y))
    close(jax.vmap(lambda x: eqq.take_layer(stack, 1) @ x)(x), x @ dense[1].T)
    both = jax.tree_util.tree_map(lambda a: jnp.stack([a, a[::-1]]), stack)
    y = jax.vmap(lambda stack, n: eqq.take_layer(stack, n) @ x[0])(both, chosen[:2])
    close(y, jnp.stack([dense[4], dense[4]]) @ x[0])


@pytest.mark.long
def test_nested_selection(getkey):
    """Experts of a layer."""
    stack = eqq.quantize(weights(getkey(), (3, 4, 16, 64)), "nf4")
    dense, x, chosen = stack.dequantize(), weights(getkey(), (2, 64)), jnp.array([3, -4])
    layer = eqq.take_layer(stack, 1)
    close(layer @ x[0], dense[1] @ x[0])
    close(eqq.take_layer(layer, chosen) @ x[0], dense[1][chosen] @ x[0])
    close(jax.jit(lambda n: eqq.take_layer(eqq.take_layer(stack, n), 2) @ x.T)(2), dense[2, 2] @ x.T)
    close(eqq.take_layer(eqq.take_layer(stack, jnp.array([2, 0])), 1).dequantize(), dense[0])
    columns = eqq.quantize(dense, "nf4", axis=-2)
    close(eqq.take_layer(eqq.take_layer(columns, 1), 2).dequantize(), columns[1, 2])


@pytest.mark.long
@pytest.mark.parametrize("stack", ["affine", "transposed"], indirect=True)
def test_gradients(getkey, stack):
    x = weights(getkey(), (3, 200))
    steps = jnp.arange(5)

    def run(layers, x, select):
        step = lambda x, n: (jnp.tanh(x @ select(layers, n).T @ select(layers, n) / 100), None)
        return jnp.sum(jax.lax.scan(step, x, steps)[0] ** 2)

    dense = stack.dequantize()
    value, gradient = jax.jit(jax.value_and_grad(lambda x: run(stack, x, eqq.take_layer)))(x)
    expected = eqx.filter_jit(jax.value_and_grad(lambda x: run(dense, x, lambda w, n: w[n])))(x)
    close(value, expected[0])
    close(gradient, expected[1], 1e-4)
    tangent = jax.jvp(lambda x: run(stack, x, eqq.take_layer), (x,), (x,))[1]
    close(tangent, jnp.sum(expected[1] * x), 1e-3)


def test_training(getkey):
    """Gradients of quantized weights reach the stack."""
    stack, x = eqq.quantize(weights(getkey(), (3, 8, 64)), "int8"), weights(getkey(), (64,))
    gradient = eqx.filter_jit(eqq.filter_grad(lambda q: jnp.sum(eqq.take_layer(q, 1) @ x)))(stack)
    close(gradient, jnp.zeros((3, 8, 64)).at[1].set(x))


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    scale: jax.Array
    name: str = "layer"

    def __call__(self, x):
        return jnp.tanh(self.linear(x)) * self.scale


def make(getkey, length=5):
    layers = eqx.filter_vmap(lambda key: Layer(eqx.nn.Linear(64, 64, key=key), jnp.ones(())))(
        jr.split(getkey(), length)
    )
    return eqq.quantize_tree(layers, "nf4")


@pytest.mark.long
@pytest.mark.parametrize("lora", [False, True])
def test_modules(getkey, lora):
    layers, x = make(getkey), weights(getkey(), (2, 64))
    if lora:
        layers = eqq.loraify(layers, rank=4, key=getkey())
    expected = x
    for n in range(5):
        expected = jax.vmap(jtu.tree_map(lambda a: a[n] if eqx.is_array(a) else a, layers))(expected)
    step = lambda x, n: (jax.vmap(eqq.take_layer(layers, n))(x), None)
    close(eqx.filter_jit(lambda: jax.lax.scan(step, x, jnp.arange(5))[0])(), expected)


@needs_native
def test_copies_nothing(getkey):
    """The loop of the compiled program hands the whole stack to the native call."""
    layers, x = make(getkey), weights(getkey(), (64,))

    @jax.jit
    def run(layers, x):
        return jax.lax.scan(lambda x, n: (eqq.take_layer(layers, n) @ x, None), x, jnp.arange(5))[0]

    text = run.lower(layers.linear.weight, x).compile().as_text()
    assert "eqquant_cpu_matmul" in text
    assert not re.search(r"= u8\[[^\]]*\]\S* (copy|dynamic-slice|slice|fusion)\(", text)
    assert eqq.explain_matmul(x, eqq.take_layer(layers.linear.weight, 0)).implementation == "cpu"


@pytest.mark.parametrize("index", [1, np.array([0, 2, 2])], ids=["one", "several"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_products_are_traced_with_the_stack(index, axis):
    q = eqq.quantize(jnp.ones((3, 64, 64)), "int8", axis=axis)
    for multiply in (lambda x, w: x @ w, lambda x, w: x @ w.mT, lambda x, w: w @ x):
        traced = jax.make_jaxpr(lambda x: multiply(x, eqq.take_layer(q, index)))(jnp.ones((64, 64)))
        (product,) = [e for e in traced.eqns if e.primitive.name == "quantized_matmul"]
        assert "SelectedArray" in str(product.params["w_tree"])


def test_on_several_devices(getkey):
    """Products that devices share take the arrays out of the stack."""
    q, x = eqq.quantize(weights(getkey(), (3, 16, 64)), "nf4"), weights(getkey(), (8, 64))
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    q = q.with_sharding(NamedSharding(mesh, P(None, "data", None)))
    y = jax.jit(lambda q, x, n: x @ eqq.take_layer(q, n).T)(q, x, 1)
    close(y, np.asarray(x) @ np.asarray(q.dequantize())[1].T)


@pytest.mark.long
def test_other_operations_are_dense(getkey):
    stack = eqq.quantize(weights(getkey(), (5, 8, 64)), "nf4")
    q, w = eqq.take_layer(stack, 2), stack.dequantize()[2]
    for f in (lambda a: a[3], lambda a: a + 1, jnp.sin, lambda a: a.reshape(-1), lambda a: a.astype("int32"), jnp.sum):
        assert np.array_equal(f(q), f(w))
    assert q.astype("bfloat16").dtype == jnp.bfloat16 and q.T.shape == (64, 8)
    close(eqq.quaxify(lambda w, x: jax.lax.dot_general(w, x, (((1,), (0,)), ((), ()))))(q, w[0]), w @ w[0])
    close(eqq.matmul(w, q.T, implementation="xla"), w @ w.T)
    assert "SelectedArray" in repr(q)


def test_errors(getkey):
    stack = eqq.quantize(weights(getkey(), (5, 8, 64)), "nf4")
    with pytest.raises(TypeError, match="integers. Got float64"):
        eqq.take_layer(stack, 1.0)
    with pytest.raises(ValueError, match="first axis, before the quantized one"):
        eqq.take_layer(eqq.quantize(jnp.ones(64), "nf4"), 0)
    with pytest.raises(ValueError, match="Got a scalar"):
        eqq.take_layer({"scale": jnp.ones(())}, 0)
    with pytest.raises(ValueError, match="map over the index"):
        jax.vmap(lambda q: q @ jnp.ones(64))(eqq.take_layer(stack, jnp.arange(5)))
    for tree in (stack, {"bias": jnp.ones((5, 3))}, eqq.take_layer(eqq.quantize(jnp.ones((2, 5, 8, 64)), "nf4"), 1)):
        for index in (9, -6, np.int64(5), np.array([0, 5]), jnp.array([[1], [-7]])):
            with pytest.raises(IndexError, match="at least -5 and below 5, the length of the stack. Got (9|-6|5|-7)"):
                eqq.take_layer(tree, index)
            with pytest.raises(IndexError, match="at least -5 and below 5"):
                jax.jit(lambda tree, index=index: jnp.zeros(()) * eqq.take_layer(tree, index))(tree)
    # A traced one cannot be known: it takes the nearest.
    last = jax.jit(lambda stack, n: eqq.take_layer(stack, n).dequantize())(stack, 9)
    assert np.array_equal(last, stack.dequantize()[4])


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int8", "int16"])
def test_dtypes_of_the_index(dtype):
    stack = {"q": eqq.quantize(jnp.arange(200.0)[:, None] * jnp.ones((1, 64)), "int8"), "b": jnp.arange(200.0)}
    known = (0, 100, 127, *((199,) if dtype == "uint8" else ()), *((-1, -128) if dtype.startswith("i") else ()))
    taken = jax.jit(lambda n: (lambda at: (at["q"].dequantize()[0], at["b"]))(eqq.take_layer(stack, n)))
    for n in known:
        wanted = n % 200
        at = eqq.take_layer(stack, np.dtype(dtype).type(n))
        assert float(at["b"]) == wanted and float(at["q"].dequantize()[0]) == pytest.approx(wanted)
        assert [float(x) for x in taken(np.asarray(n, dtype))] == pytest.approx([wanted, wanted])
