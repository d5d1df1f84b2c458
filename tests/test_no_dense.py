"""`eqq.no_dense`: an error at the first decoded weight, with its name, the line and the remedy."""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqquant as eqq

from .helpers import weights


class Net(eqx.Module):
    embedding: eqx.nn.Embedding
    up: eqx.nn.Linear

    def __call__(self, i):
        return jnp.matmul(self.embedding(i), self.up.weight.T)  # decodes


@pytest.fixture
def net(getkey):
    model = Net(eqx.nn.Embedding(50, 64, key=getkey()), eqx.nn.Linear(64, 96, key=getkey()))
    return eqq.quantize_tree(model, "nf4")


MESSAGE = r"`up.weight`, float32\[64,96\] in NF4\(\), at .*test_no_dense.py:\d+ in __call__: `return jnp.matmul\(self"


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True])
def test_names_leaf_line_and_remedy(net, compiled):
    run = eqx.filter_jit(Net.__call__) if compiled else Net.__call__
    run(net, 3)  # what was compiled before is traced again
    with eqq.no_dense(net), pytest.raises(RuntimeError, match=MESSAGE + ".*eqq.quaxify"):
        run(net, 3)
    run(net, 3)
    with eqq.no_dense(net):
        assert eqx.filter_jit(eqq.quaxify(lambda net: net(3)))(net).shape == (96,)


def test_names_the_operation_under_quaxify(net):
    f = eqq.quaxify(lambda w, x: jnp.sin(w) @ x)
    with (
        eqq.no_dense(net),
        pytest.raises(RuntimeError, match=r"by `sin`, at .*lambda w, x: jnp.sin.*`sin` has no.*'up.w"),
    ):
        f(net.up.weight, jnp.ones(64))


def test_names_several_leaves_of_one_shape(net):
    with eqq.no_dense([net, net]), pytest.raises(RuntimeError, match=r"one of 0.up.weight, 1.up.weight"):
        net.up.weight.dequantize()
    with eqq.no_dense(), pytest.raises(RuntimeError, match=r"Got float32\[96,64\]"):
        jnp.sin(net.up.weight)


@pytest.mark.parametrize("format", ["int8", "nf4", eqq.NF4(double_quant=True), "q4_k", eqq.Int4(symmetric=False)])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_products_and_lookups_are_allowed(getkey, format, implementation):
    stack = eqq.quantize(weights(getkey(), (3, 32, 256)), format)
    w, x = eqq.quantize(weights(getkey(), (32, 256)), format), weights(getkey(), (4, 256))
    with eqq.no_dense():
        y = eqq.matmul(x, w.T, implementation=implementation)
        jax.jit(lambda w, x: eqq.matmul(x, w.T, implementation=implementation))(w, x)
        eqx.filter_jit(jax.grad(lambda x: jnp.sum(eqq.matmul(x, w.T, implementation=implementation))))(x)
        eqx.filter_jit(eqq.filter_grad(lambda w: jnp.sum(x @ w.T)))(w)
        eqq.take_layer(stack, 1) @ x[0]
        _ = w[3], w[jnp.array([1, 2])], w[1:3], stack[0, 1], w.scale
        eqq.arrays.ActivationQuantizedArray(w, "int8") @ x[0]
        eqq.quaxify(lambda w: jax.vmap(lambda i: w[i])(jnp.arange(4)))(w)
    assert y.shape == (4, 32)


def test_whole_matrices_are_refused(getkey):
    stack = eqq.quantize(weights(getkey(), (3, 32, 64)), "nf4")
    for decode in (
        lambda: stack[0],
        lambda: stack[:],
        lambda: stack + 1,
        lambda: eqq.take_layer(stack, 0).dequantize(),
    ):
        decode()
        with eqq.no_dense(), pytest.raises(RuntimeError, match="no_dense"):
            decode()


def test_nests_decorates_and_holds_for_one_thread(net):
    failed = []

    def decode():
        net.up.weight.dequantize()
        failed.append(False)

    with eqq.no_dense():
        with eqq.no_dense(net), pytest.raises(RuntimeError, match="`up.weight`"):
            net.up.weight.dequantize()
        with pytest.raises(RuntimeError, match="no_dense"):
            net.up.weight.dequantize()
        thread = threading.Thread(target=decode)
        thread.start()
        thread.join()
    assert failed == [False]
    with pytest.raises(RuntimeError, match="no_dense"):
        eqq.no_dense()(lambda: net.up.weight.dequantize())()
    net.up.weight.dequantize()
