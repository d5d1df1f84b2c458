"""Trees of other libraries: Flax's variables and dictionaries, haliax's named arrays, stacks of layers."""

import dataclasses
import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._tree.leaves import named_leaves

from .helpers import weights


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def plan(tree, *args, **kwargs):
    """Of each array, the axis that it is quantized along, or why it is not."""
    report = eqq.plan_tree(tree, *args, **kwargs)
    return {leaf.path: leaf.axis if leaf.format is not None else leaf.reason for leaf in report.leaves}


BIAS, NORM = "a bias", "a parameter of a normalization layer"


# haliax: nodes of the same shapes, whose arrays have no names of their own in a key path


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class NamedArray:
    array: jax.Array
    axes: tuple

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], aux)


def make_named(*axes):
    return NamedArray(normal(*(axis.size for axis in axes)), axes)


class Linear(eqx.Module):
    weight: NamedArray
    bias: NamedArray | None
    In: Axis | tuple = eqx.field(static=True)
    Out: Axis | tuple = eqx.field(static=True)


class LayerNorm(eqx.Module):
    weight: NamedArray
    bias: NamedArray


class Embedding(eqx.Module):
    weight: NamedArray
    Vocab: Axis = eqx.field(static=True)
    Embed: Axis = eqx.field(static=True)


class Block(eqx.Module):
    up: Linear
    attention: Linear
    norm_1: LayerNorm


class Stacked(eqx.Module):
    stacked: eqx.Module


LAYER, EMBED, UP, HEADS, SIZE, VOCAB = (
    Axis(name, size) for name, size in dict(layer=3, embed=16, up=32, heads=4, size=8, vocab=20).items()
)


@pytest.fixture
def haliax_model():
    stacked = Block(
        up=Linear(make_named(LAYER, EMBED, UP), make_named(LAYER, UP), EMBED, UP),
        attention=Linear(make_named(LAYER, EMBED, HEADS, SIZE), None, (HEADS, SIZE), EMBED),
        norm_1=LayerNorm(make_named(LAYER, EMBED), make_named(LAYER, EMBED)),
    )
    embeddings = Embedding(make_named(VOCAB, EMBED), VOCAB, EMBED)
    return {"embeddings": embeddings, "blocks": Stacked(stacked), "free": make_named(EMBED, UP)}


def test_haliax(haliax_model):
    assert plan(haliax_model) == {
        "blocks.stacked.up.weight.0": -2,
        "blocks.stacked.up.bias.0": BIAS,
        "blocks.stacked.attention.weight.0": (-2, -1),
        "blocks.stacked.norm_1.weight.0": NORM,
        "blocks.stacked.norm_1.bias.0": NORM,
        "embeddings.weight.0": -1,
        "free.0": -1,
    }
    reasons = {leaf.path: leaf.reason for leaf in eqq.plan_tree(haliax_model).leaves}
    # An array without a layer has nobody who knows its inputs.
    assert "its input axis is not known" in reasons["free.0"]
    assert not any("not known" in reason for path, reason in reasons.items() if path != "free.0")


def test_patterns_match_with_and_without_the_key_of_a_wrapper(haliax_model):
    rules = {"*.up.weight": "int8", "embeddings.weight.0": "int4", re.compile(r"attention\.weight$"): "nf4"}
    report = eqq.plan_tree(haliax_model, rules)
    formats = {leaf.path: leaf.format for leaf in report.leaves if leaf.format is not None}
    assert formats == {
        "blocks.stacked.up.weight.0": eqq.Int8(),
        "embeddings.weight.0": eqq.Int4(),
        "blocks.stacked.attention.weight.0": eqq.NF4(),
    }


def test_quantized_named_arrays(haliax_model):
    q = eqq.quantize_tree(haliax_model, "int8")
    up = q["blocks"].stacked.up.weight
    assert isinstance(up, NamedArray) and up.axes == (LAYER, EMBED, UP) and up.array.axis == -2
    one = jax.tree_util.tree_map(lambda a: a[1], up.array)
    np.testing.assert_array_equal(
        one.dequantize(), eqq.quantize(haliax_model["blocks"].stacked.up.weight.array[1], "int8", axis=0).dequantize()
    )


# Dictionaries of parameters, as Linen makes them


@pytest.mark.parametrize(
    "path, shape",
    [
        ("ScanBlock_0.LayerNorm_0.scale", (3, 8)),
        ("ScanBlock_0.RMSNorm_1.scale", (3, 8)),
        ("encoder.ln_1.weight", (3, 8)),
        ("encoder.ln_f.scale", (3, 8)),
        ("layers.input_layernorm.weight", (3, 8)),
        ("layers.q_norm.scale", (3, 8)),
        ("bn1.gamma", (3, 8)),
        ("layernorm_before.weight", (3, 8)),
        ("norm_out.scale", (3, 8)),
        ("norms.0.scale", (3, 8)),
        ("norm.inner.scale", (3, 8)),
    ],
)
def test_norms_by_name(path, shape):
    tree = {"w": normal(4, 8), **nest(path, normal(*shape))}
    assert plan(tree)[path] == NORM


@pytest.mark.parametrize("path", ["Dense_0.bias", "b.bias.value", "cell.bias_ih", "biases.0", "out.attention_bias"])
def test_biases_by_name(path):
    assert plan({"w": normal(4, 8), **nest(path, normal(3, 8))})[path] == BIAS


@pytest.mark.parametrize(
    "path",
    [
        "PreNorm_0.Dense_0.kernel",
        "norm.kernel",
        "normalizer.weight",
        "norm_proj.weight",
        "bn_linear.weight",
        "inorm_mlp.projection",
        "bias_net.layers.weight",
        "unbiased",
        "WeightNorm_0.weight",
        "value",
    ],
)
def test_weights_with_names_like_norms(path):
    assert plan({"w": normal(4, 8), **nest(path, normal(16, 8))})[path] in (-1, -2)


def nest(path, leaf):
    for key in reversed(path.split(".")):
        leaf = {key: leaf}
    return leaf


def test_a_module_that_holds_a_norm_is_not_a_norm():
    class PreNorm(eqx.Module):
        norm: eqx.nn.LayerNorm
        linear: eqx.nn.Linear

    class AddAndNorm(eqx.Module):
        norm: eqx.nn.LayerNorm
        linear: eqx.nn.Linear

    key = jax.random.key(0)
    for kind in (PreNorm, AddAndNorm):
        tree = kind(eqx.nn.LayerNorm((4, 4)), eqx.nn.Linear(8, 8, key=key))
        assert plan(tree) == {"norm.weight": NORM, "norm.bias": NORM, "linear.weight": -1, "linear.bias": BIAS}


@pytest.mark.parametrize(
    "kernel, bias, axis",
    [
        ((8, 16), None, -2),
        ((8, 16), (16,), -2),
        ((3, 8, 16), (3, 16), -2),  # a stack of dense layers
        ((3, 5, 8, 16), (16,), (-4, -3, -2)),  # a convolution
        ((2, 3, 5, 8, 16), (2, 16), (-4, -3, -2)),  # a stack of convolutions
        ((8, 4, 6), (4, 6), -3),  # a projection to heads
        ((4, 6, 8), (8,), (-3, -2)),  # and back
        ((3, 8, 4, 6), (3, 4, 6), -3),  # a stack of the former
    ],
)
def test_the_inputs_of_a_kernel(kernel, bias, axis):
    layer = {"kernel": normal(*kernel)} | ({} if bias is None else {"bias": normal(*bias)})
    report = eqq.plan_tree({"layer": layer})
    row = next(leaf for leaf in report.leaves if leaf.path == "layer.kernel")
    assert row.axis == axis and row.reason == "a weight"
    x = layer["kernel"]
    np.testing.assert_array_equal(
        eqq.quantize_tree({"layer": layer})["layer"]["kernel"].dequantize(), eqq.quantize(x, axis=axis).dequantize()
    )


@pytest.mark.parametrize("kernel, bias", [((3, 8, 16), None), ((8, 8, 8), (8, 8)), ((3, 8, 16), (7,))])
def test_the_plan_says_that_the_inputs_of_a_kernel_are_not_known(kernel, bias):
    layer = {"kernel": normal(*kernel)} | ({} if bias is None else {"bias": normal(*bias)})
    row = next(leaf for leaf in eqq.plan_tree({"layer": layer}).leaves if leaf.path == "layer.kernel")
    assert row.axis == -1 and "its input axis is not known" in row.reason
    given = next(leaf for leaf in eqq.plan_tree(layer, axis=-2).leaves if leaf.path == "kernel")
    assert given.axis == -2 and given.reason == "a weight"


@pytest.mark.long
def test_factors_beside_kernels():
    params = {"embed": {"embedding": normal(10, 8)}, "dense": {"kernel": normal(8, 16), "bias": normal(16)}}
    lora = eqq.loraify(eqq.quantize_tree(params, "int8"), 2, key=jax.random.key(0))
    assert isinstance(lora["dense"]["kernel"], eqq.arrays.LoraArray) and eqq.is_quantized(lora["embed"]["embedding"])
    x = normal(3, 8)
    np.testing.assert_allclose(
        x @ lora["dense"]["kernel"], x @ lora["dense"]["kernel"].dequantize(), rtol=1e-4, atol=1e-4
    )


# Names that are no keys


@pytest.mark.long
def test_paths_of_one_name_are_told_apart_by_statistics_and_plans():
    tree = {"a.b": normal(8, 16), "a": {"b": normal(4, 16)}}
    x = normal(5, 16)
    apply = lambda m, x: (x @ m["a.b"].T, 2 * x @ m["a"]["b"].T)
    stats = eqq.calibrate.collect_stats(tree, [x], apply=apply)
    assert stats["['a.b']"].shape == (8, 16) and stats["['a']['b']"].shape == (4, 16)
    np.testing.assert_allclose(stats["['a']['b']"].max, 2 * np.max(x, 0), rtol=1e-6)

    loss = lambda m, x: jnp.mean(jnp.square(x @ m["a.b"].T)) + 100 * jnp.mean(jnp.square(x @ m["a"]["b"].T))
    report = eqq.analysis.sensitivity(tree, loss, x, ("int2", "int8"))
    assert [leaf.shape for leaf in report.leaves] == [(4, 16), (8, 16)]
    plan = eqq.analysis.plan_bits(tree, report, target_bits=30)
    q = eqq.quantize_tree(tree, plan)
    formats = {leaf.path: leaf.format for leaf in eqq.summary(q).leaves}
    assert formats == {row.paths[0]: row.format for row in plan.leaves} and any(formats.values())


def test_names_of_one_array():
    assert [leaf.paths for leaf in named_leaves(normal(2, 2))] == [("the array",)]


# Flax itself


@pytest.fixture
def nnx():
    return pytest.importorskip("flax.nnx")


@pytest.fixture
def linen():
    return pytest.importorskip("flax.linen")


@pytest.fixture
def nnx_model(nnx):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 16, rngs=rngs)
            self.norm = nnx.LayerNorm(16, rngs=rngs)
            self.conv = nnx.Conv(3, 4, (5, 5), rngs=rngs)
            self.embed = nnx.Embed(10, 8, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
            self.general = nnx.LinearGeneral((2, 4), (3, 5), axis=(-2, -1), rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    return Model


NNX = {
    "linear.kernel.value": -2,
    "linear.bias.value": BIAS,
    "norm.scale.value": NORM,
    "norm.bias.value": NORM,
    "conv.kernel.value": (-4, -3, -2),
    "conv.bias.value": BIAS,
    "embed.embedding.value": -1,
    "general.kernel.value": (-4, -3),
    "general.bias.value": BIAS,
    "attention.out.kernel.value": (-3, -2),
    "attention.out.bias.value": BIAS,
    **{f"attention.{name}.kernel.value": -3 for name in ("query", "key", "value")},
    **{f"attention.{name}.bias.value": BIAS for name in ("query", "key", "value")},
}


@pytest.mark.long
def test_nnx(nnx, nnx_model):
    model = nnx_model(nnx.Rngs(0))
    state = nnx.split(model)[1]
    assert plan(model) == NNX and plan(state) == NNX
    rules = {"linear.kernel": "int8", "attention.*": "nf4"}
    formats = {leaf.path: leaf.format for leaf in eqq.plan_tree(state, rules).leaves if leaf.format is not None}
    assert formats["linear.kernel.value"] == eqq.Int8() and formats["attention.value.kernel.value"] == eqq.NF4()
    assert len(formats) == 5


@pytest.mark.long
def test_stacked_nnx(nnx, nnx_model):
    @nnx.vmap
    def make(key):
        return nnx_model(nnx.Rngs(key))

    model = make(jax.random.split(jax.random.key(0), 7))
    assert plan(model) == NNX and plan(nnx.split(model)[1]) == NNX


def test_quantized_nnx_runs(nnx, nnx_model):
    model = nnx_model(nnx.Rngs(0))
    graph, state = nnx.split(model)
    q = eqq.quantize_tree(state, "int8")
    assert eqq.is_quantized(q["linear"]["kernel"].get_value())
    x = weights(jax.random.key(1), (4, 8))
    np.testing.assert_allclose(nnx.merge(graph, q)(x), model(x), atol=0.1)


@pytest.mark.long
def test_scanned_linen(linen):
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return linen.Dense(16)(linen.LayerNorm()(x)), None

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            blocks = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = blocks()(x, None)
            x = linen.Conv(16, (3,))(x)
            x = linen.MultiHeadDotProductAttention(2)(x)
            return linen.BatchNorm(use_running_average=True)(x)

    params = Net().init(jax.random.key(0), normal(5, 16))
    attention = "params.MultiHeadDotProductAttention_0"
    assert plan(params) == {
        "params.ScanBlock_0.Dense_0.kernel": -2,
        "params.ScanBlock_0.Dense_0.bias": BIAS,
        "params.ScanBlock_0.LayerNorm_0.scale": NORM,
        "params.ScanBlock_0.LayerNorm_0.bias": NORM,
        "params.Conv_0.kernel": (-3, -2),
        "params.Conv_0.bias": BIAS,
        "params.BatchNorm_0.scale": NORM,
        "params.BatchNorm_0.bias": NORM,
        "batch_stats.BatchNorm_0.mean": NORM,
        "batch_stats.BatchNorm_0.var": NORM,
        **{f"{attention}.{name}.kernel": -3 for name in ("query", "key", "value")},
        f"{attention}.out.kernel": (-3, -2),
        **{f"{attention}.{name}.bias": BIAS for name in ("query", "key", "value", "out")},
    }
    json.dumps(eqq.plan_tree(params).to_dict())
