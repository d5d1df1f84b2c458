"""The code of the page on other libraries runs, with the results of the dense model."""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq

from .helpers import weights


PAGE = (Path(__file__).parents[1] / "docs" / "ecosystem.md").read_text()
SECTIONS = {title: text for title, text in re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)}
NEEDS = {"Flax Linen": "flax", "Flax NNX": "flax", "diffrax": "diffrax", "Orbax": "orbax.checkpoint"}


def run(title, names):
    blocks = re.findall(r"^```python\n(.*?)^```", SECTIONS[title], re.M | re.S)
    assert blocks
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block, title, "exec"), names)
    return names


@pytest.fixture
def names():
    return run("Plain pytrees and plain JAX", {})


@pytest.mark.long
def test_plain(names):
    assert eqq.is_quantized(names["params"]["w"]) and names["y"].shape == (64,)
    assert names["embed"](names["params"]["w"], 3).shape == (32,)
    arrays, rest = names["arrays"], names["rest"]
    y = jnp.ones(64)
    for i in range(4):
        y = jnp.tanh(eqx.combine(jax.tree.map(lambda a, i=i: a[i], arrays), rest)(y))
    np.testing.assert_allclose(np.asarray(names["y"]), np.asarray(y), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("title", NEEDS)
@pytest.mark.filterwarnings("ignore")  # of these libraries
def test_every_section_of_the_page_runs(names, title):
    pytest.importorskip(NEEDS[title])
    run(title, names)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        check(names, title)


def check(names, title):
    x = names["x"]
    if title == "Flax Linen":
        assert "quantized_matmul" in str(jax.make_jaxpr(names["apply"])(names["variables"], x))
        expected = names["net"].apply(eqq.dequantize_tree(names["variables"]), x)
        np.testing.assert_allclose(np.asarray(names["y"]), np.asarray(expected), rtol=1e-5, atol=1e-5)
        with pytest.raises(Exception, match="the existing parameter it received has shape"):
            names["net"].apply(names["variables"], x)
        assert names["grads"]["params"]["layers_0"]["kernel"].shape == (64, 64)
    elif title == "Flax NNX":
        uses = [use for use in eqq.explain(names["forward"], names["state"], x).weights if use.format]
        found = {use.path.split(".")[0]: use.roles for use in uses}
        assert found == dict.fromkeys(("key", "out", "query", "value"), ("packed",))
        dense = names["nnx"].merge(names["graph"], eqq.dequantize_tree(names["state"]))
        np.testing.assert_allclose(np.asarray(names["y"]), np.asarray(dense(x)), rtol=1e-5, atol=1e-5)
    elif title == "diffrax":
        dense_grads = eqx.filter_jit(eqx.filter_grad(names["end"]))(eqq.dequantize_tree(names["mlp"]), jnp.ones(8))
        for a, e in zip(jax.tree.leaves(names["grads"]), jax.tree.leaves(dense_grads), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-3, atol=1e-4)
    elif title == "Orbax":
        assert eqq.is_quantized(names["params"]["w"])
        with names["ocp"].StandardCheckpointer() as checkpointer:
            without_target = checkpointer.restore(names["path"])
        assert set(without_target["w"]) >= {"codes", "scale_bits"}


def test_plain_gradients_say_what_to_use(getkey):
    q = eqq.quantize(weights(getkey(), (8, 64)))
    f = lambda q: jnp.sum(q @ jnp.ones(64))
    with pytest.raises(TypeError, match="uint8"):
        jax.grad(f)(q)
    with pytest.raises(TypeError, match="no gradient with respect to its codes.*`eqq.filter_grad`"):
        jax.grad(f, allow_int=True)(q).dequantize()


class NeedsTrace:
    """A node that, like Flax NNX nodes, may only be made while JAX has a current trace."""

    def __init__(self, value):
        jax.extend.core.get_opaque_trace_state(convention="nnx")
        self.value = value


jax.tree_util.register_pytree_node(NeedsTrace, lambda x: ((x.value,), None), lambda _, children: NeedsTrace(*children))


def test_quaxify_makes_nodes_where_there_is_a_trace(getkey):
    q, x = eqq.quantize(weights(getkey(), (64, 64))), weights(getkey(), (3, 64))
    f = eqq.quaxify(lambda node, x: NeedsTrace((node.value.T, jnp.matmul(x, node.value.T))))
    out = f(NeedsTrace(q), x)
    assert isinstance(out, NeedsTrace) and eqq.is_quantized(out.value[0])
    np.testing.assert_array_equal(np.asarray(out.value[1]), np.asarray(x @ q.T))
    assert "quantized_matmul" in str(jax.make_jaxpr(f)(NeedsTrace(q), x))


def test_quaxify_as_a_method(getkey):
    class Layer(eqx.Module):
        weight: eqq.QuantizedArray

        @eqq.quaxify
        def __call__(self, x):
            return jnp.einsum("oi,bi->bo", self.weight, x)

    q, x = eqq.quantize(weights(getkey(), (8, 64))), weights(getkey(), (3, 64))
    np.testing.assert_array_equal(np.asarray(Layer(q)(x)), np.asarray(x @ q.T))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # haliax calls deprecated functions of JAX
def test_haliax(getkey):
    """A real layer, and a stack of layers, multiply packed weights under `quaxify`."""
    hax = pytest.importorskip("haliax")
    inputs, layers, batch = hax.make_axes(In=64, L=3, B=8)

    class Block(eqx.Module):
        lin: hax.nn.Linear

        @staticmethod
        def init(*, key):
            return Block(hax.nn.Linear.init(inputs, inputs.alias("Mid"), key=key))

        def __call__(self, x):
            return hax.tanh(self.lin(x)).rename({"Mid": "In"})

    x = hax.random.normal(getkey(), (batch, inputs))
    layer = eqq.quantize_tree(hax.nn.Linear.init(inputs, inputs.alias("Out"), key=getkey()), "nf4")
    stack = hax.nn.Stacked.init(layers, Block)(key=jax.random.split(getkey(), 3))
    stack = eqq.quantize_tree(stack, "nf4")
    for model, f in ((layer, lambda m, x: m(x).array), (stack, lambda m, x: m.fold(x).array)):
        with eqq.no_dense(model):
            y = eqq.quaxify(f)(model, x)
        np.testing.assert_allclose(y, f(eqq.dequantize_tree(model), x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer(x).array, eqq.dequantize_tree(layer)(x).array, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="Too many leaves"):
        stack.fold(x)
