"""What counts as a weight: sizes, states, roles by name, axes that were observed, and weights without inputs."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqquant as eqq
from eqquant._wrappers.scaled import ScaledArray

from .helpers import outputs, weights


collect_stats = eqq.calibrate.collect_stats


def reasons(tree, format="nf4", **kwargs):
    return {leaf.path: leaf.reason for leaf in eqq.plan_tree(tree, format, **kwargs).leaves}


def list_quantized(tree, format="nf4", **kwargs):
    return {leaf.path for leaf in eqq.plan_tree(tree, format, **kwargs).leaves if leaf.format is not None}


# Sizes


@pytest.mark.parametrize("format", ["nf4", "int8", "int4", "int2", "fp8", "mxfp4", "nvfp4", "q4_0", "ternary"])
@pytest.mark.parametrize("shape", [(8, 64, 1), (64, 2), (64, 7), (64, 3, 1)])
def test_few_values_do_not_share_a_scale(format, shape):
    tree = {"small": jnp.ones(shape, jnp.bfloat16), "large": jnp.ones((64, 64))}
    q = eqq.quantize_tree(tree, format)
    assert q["small"] is tree["small"] and eqq.is_quantized(q["large"])
    expected = f"too few values share a scale: {shape[-1]}"
    assert reasons(tree, format)["small"] == expected
    assert {leaf.path: leaf.reason for leaf in eqq.summary(q).leaves}["small"] == expected


@pytest.mark.parametrize("format", ["nf4", "int8", "q8_0", eqq.Int8("tensor"), eqq.Int4(block_size=16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_leaf_grows(format, dtype):
    lengths = (1, 2, 3, 5, 8, 9, 12, 17, 33, 65, 100)
    tree = {f"w{n}": jnp.ones((16, n), dtype) for n in lengths}
    for leaf in eqq.plan_tree(tree, format).leaves:
        assert leaf.nbytes < leaf.dense_nbytes if leaf.format is not None else leaf.nbytes == leaf.dense_nbytes
    assert {f"w{n}" for n in lengths[-5:]} <= list_quantized(tree, format)


def test_the_plan_says_what_a_leaf_would_take():
    tree = {"w": jnp.ones((16, 8), jnp.float8_e4m3fn), "large": jnp.ones((8, 64))}
    assert re.fullmatch(r"Int8\(.*\) would take 192 bytes for 128", reasons(tree, "int8")["w"])


def test_the_whole_kernel_of_a_convolution_shares_a_scale():
    convs = {n: eqx.nn.Conv2d(8, 8, n, groups=8, key=jr.key(n)) for n in (2, 3)}  # depthwise: 4 and 9 values
    assert list_quantized(convs) == {"3.weight"}


def test_where_selects_small_leaves_too():
    tree = {"small": jnp.ones((64, 2)), "large": jnp.ones((64, 64))}
    q = eqq.quantize_tree(tree, "int8", where=lambda t: t["small"])
    assert eqq.is_quantized(q["small"]) and not eqq.is_quantized(q["large"])
    assert list_quantized({"node": tree}, where=lambda t: t["node"]) == {"node.large"}


def test_a_tree_of_small_leaves_is_not_quantized():
    tree = {"w": jnp.ones((64, 2), jnp.bfloat16)}
    with pytest.warns(
        UserWarning,
        match=r"Nothing is quantized.*eight values.*`where=`.*w: too few values share a scale: 2",
    ):
        assert eqq.quantize_tree(tree, "nf4")["w"] is tree["w"]


@pytest.mark.long
def test_ensembles_of_scalars():
    model = eqx.filter_vmap(lambda k: eqx.nn.MLP(1, 1, 64, 1, key=k))(jr.split(jr.key(0), 8))
    assert list_quantized(model) == {"layers.1.weight"}


# State


class Cached(eqx.Module):
    linear: eqx.nn.Linear
    cache: eqx.nn.StateIndex

    def __init__(self, key):
        self.linear = eqx.nn.Linear(64, 64, key=key)
        self.cache = eqx.nn.StateIndex({"keys": jnp.zeros((16, 64)), "values": (jnp.zeros((16, 64)),)})

    def __call__(self, x, n, state):
        cache = jax.tree.map(lambda c: c.at[n].set(self.linear(x)), state.get(self.cache))
        return cache["keys"].sum(0), state.set(self.cache, cache)


@pytest.mark.parametrize("format", ["nf4", {"*": "nf4"}])
def test_states_of_equinox(format):
    model = Cached(jr.key(0))
    assert list_quantized(model, format) == {"linear.weight"}
    q = eqq.quantize_tree(model, format)
    y, state = q(jnp.ones(64), 3, eqx.nn.State(q))
    np.testing.assert_allclose(y, q.linear(jnp.ones(64)), rtol=1e-6)
    assert list_quantized((model, state), format) == {"0.linear.weight"}


def test_states_of_optimizers_and_caches():
    params = {"w": jnp.ones((64, 64))}

    class KVCache(eqx.Module):
        keys: jax.Array

    tree = {"params": params, "optim": optax.adam(1e-3).init(params), "cache": KVCache(jnp.ones((16, 64)))}
    assert list_quantized(tree) == {"params.w"}
    assert reasons(tree)["optim.0.mu.w"] == "state, in a `ScaleByAdamState`"


# Roles by name


BY_NAME = {
    "a position table": "pos pos_embed posemb position_embedding positional_encoding abs_pos_embed pos_embed_win wpe "
    "rel_pos_h freqs_cis inv_freq cos_cached",
    "a learned token": "cls cls_token class_token class_embedding reg_token reg_tokens registers mask_token "
    "dist_token prompt_embeddings mem_tokens",
    "a rate or a logarithm": "A_log log_A_real log_step dt_log nu_log decay time_decay log_decay lambda_re "
    "Lambda ssm_a",
    "a factor or an offset of single values": "gamma beta alpha delta gamma_1 layer_scale layer_scale_1 ls1 scale gain",
    "state": "running_mean running_var moving_mean kv_cache k_cache attn_mask mask position_ids "
    "relative_index positions",
    "a low-rank factor": "lora_a lora_B lora_up lora_down",
}
WEIGHTS = (
    "w w1 weight kernel proj embedding embed embed_tokens token_embedding tok_emb wte query in_proj_weight pos_proj "
    "linear_pos delta_proj gamma_proj catalog logits head blog decayed scaled_w index_proj class_head memory cosine"
)
NAMES = [(name, role) for role, names in BY_NAME.items() for name in names.split()]


@pytest.mark.parametrize("name, role", NAMES)
def test_arrays_without_products_stay_in_float(name, role):
    tree = {"model": {name: jnp.ones((64, 64)), "w": jnp.ones((64, 64))}}
    assert list_quantized(tree) == list_quantized(tree, {"model.*": "int8"}) == {"model.w"}
    assert reasons(tree)[f"model.{name}"] == f"{role}, by its name"
    assert reasons({"model": {name: [jnp.ones((64, 64))], "w": jnp.ones((64, 64))}})[f"model.{name}.0"].startswith(role)
    summary = {leaf.path: leaf.reason for leaf in eqq.summary(eqq.quantize_tree(tree)).leaves}
    assert summary[f"model.{name}"] == f"{role}, by its name"


@pytest.mark.parametrize("name", WEIGHTS.split())
def test_names_of_weights(name):
    assert list_quantized({name: jnp.ones((64, 64))}) == {name}


def test_layers_with_such_names_hold_weights():
    """The name of the array counts. An embedding is looked up, whatever it embeds."""
    layers = {"pos_embed": eqx.nn.Embedding(32, 64, key=jr.key(0)), "delta": eqx.nn.Linear(64, 64, key=jr.key(1))}
    assert list_quantized(layers) == {"pos_embed.weight", "delta.weight"}


def test_layers_that_add_a_position_table():
    """equimo's has the name `global_pos_embed.weight`, and `pos_embed.weight` of an embedding is a weight."""

    class LearnedPosEmbed(eqx.Module):
        weight: jax.Array

    class PosEmbMLP(eqx.Module):
        mlp: eqx.nn.Linear
        w: jax.Array

    class LearnedPositionalEmbedding(eqx.nn.Embedding):
        pass

    linear = eqx.nn.Linear(64, 64, key=jr.key(0))
    layers = {
        "global_pos_embed": LearnedPosEmbed(jnp.ones((16, 64))),
        "encoder": [LearnedPosEmbed(jnp.ones((16, 64)))],
        "pos_embed": PosEmbMLP(linear, jnp.ones((64, 64))),
        "positions": LearnedPositionalEmbedding(32, 64, key=jr.key(0)),
    }
    assert list_quantized(layers) == {"pos_embed.mlp.weight", "pos_embed.w", "positions.weight"}
    assert reasons(layers)["global_pos_embed.weight"] == "a position table, by the name of its layer"
    assert list_quantized(layers, {"global_pos_embed.weight": "int8", "*": None}) == {"global_pos_embed.weight"}


def test_factors_of_other_libraries():
    class LoraArray(eqx.Module):
        _w: jax.Array
        _a: jax.Array
        _b: jax.Array

    linear = lambda n: eqx.nn.Linear(64, 64, use_bias=False, key=jr.key(n))
    tree = {"q": LoraArray(*jnp.ones((3, 64, 64))), "peft": {"lora_A": linear(0), "base": linear(1)}}
    tree["levanter"] = {"wrapped": linear(2), "lora": {"lora_A": linear(3), "lora_B": linear(4)}}
    assert list_quantized(tree) == {"q._w", "peft.base.weight", "levanter.wrapped.weight"}


class Mixed(eqx.Module):
    blocks: list
    A_log: jax.Array
    pos_embed: jax.Array

    def __init__(self, key):
        self.blocks = [{"gamma": jnp.ones((16, 64)), "linear": eqx.nn.Linear(64, 64, key=key)} for _ in range(2)]
        self.A_log, self.pos_embed = jnp.ones((64, 64)), jnp.ones((16, 64))


@pytest.mark.parametrize(
    "rules, taken",
    [
        ({"*": "nf4"}, set()),
        ({"blocks.*": "int8", "*": "nf4"}, set()),
        ({"A_log": "int8", "*": "nf4"}, {"A_log"}),
        ({"*gamma": "int8", "*": "nf4"}, {"blocks.0.gamma", "blocks.1.gamma"}),
        ({re.compile("A_log|pos_embed"): "int8", "*": "nf4"}, {"A_log", "pos_embed"}),
        ({"blocks.0.gamma": eqq.QuantConfig("int8"), "A_log": None, "*": "nf4"}, {"blocks.0.gamma"}),
        (lambda path, x: "nf4", {"A_log", "pos_embed", "blocks.0.gamma", "blocks.1.gamma"}),
    ],
)
def test_a_rule_overrides_the_role_of_a_name(rules, taken):
    model = Mixed(jr.key(0))
    both = {"blocks.0.linear.weight", "blocks.1.linear.weight"}
    assert list_quantized(model, rules) == taken | both
    q = eqq.quantize_tree(model, rules)
    assert {leaf.path for leaf in eqq.summary(q).leaves if leaf.format is not None} == taken | both


def test_where_overrides_the_role_of_a_name():
    model = Mixed(jr.key(0))
    assert list_quantized(model, where=lambda m: m.A_log) == {"A_log"}
    assert list_quantized(model, where=lambda m: m.blocks[0]) == {"blocks.0.linear.weight"}


def test_added_weights_get_no_activations():
    model = {"pos_embed": jnp.ones((16, 64)), "w": jnp.ones((64, 64))}
    q = eqq.quantize_tree(model, {"pos_embed": "int8", "*": "int8"}, activations="int8")
    assert eqq.is_quantized(q["pos_embed"]) and isinstance(q["w"], eqq.arrays.ActivationQuantizedArray)


# What statistics say


class Bilinear(eqx.Module):
    """A matrix that has the name of a factor, and is multiplied."""

    delta: jax.Array
    gamma: jax.Array

    def __call__(self, x):
        return self.delta @ (self.gamma[0] * x)


def test_an_observed_product_overrules_a_name():
    model = Bilinear(weights(jr.key(0), (32, 64)), jnp.ones((16, 64)))
    with pytest.raises(ValueError, match="delta: a factor.*by its name"):
        eqq.quantize_tree(model, "int8")
    stats = collect_stats(model, [weights(jr.key(1), (32, 64))], gram=True)
    for kwargs in (dict(method=eqq.GPTQ(stats)), dict(method=eqq.MSE(stats)), dict(activations=stats)):
        assert list_quantized(model, "int8", **kwargs) == list_quantized(model, {"*": "int8"}, **kwargs) == {"delta"}
    rules = {"*": eqq.QuantConfig("int8", eqq.GPTQ(stats))}
    assert list_quantized(model, rules) == {"delta"}
    assert isinstance(eqq.quantize_tree(model, "int8", activations=stats).delta, eqq.arrays.ActivationQuantizedArray)


class BothOrders(eqx.Module):
    conv: eqx.nn.Conv2d
    linear: eqx.nn.Linear
    proj: jax.Array

    def __init__(self):
        k = jr.split(jr.key(0), 3)
        self.conv = eqx.nn.Conv2d(3, 8, 4, 4, key=k[0])
        self.linear = eqx.nn.Linear(128, 64, key=k[1])
        self.proj = weights(k[2], (64, 64))  # square: no length tells the order

    def __call__(self, x):
        return jax.nn.relu(self.linear(self.conv(x).reshape(-1))) @ self.proj


AXES = {"conv.weight": (-3, -2, -1), "linear.weight": -1, "proj": -2}


@functools.cache
def images():
    return [weights(jr.key(n), (32, 3, 16, 16)) for n in range(2)]


def list_axes(q):
    return {leaf.path: leaf.axis for leaf in eqq.summary(q).leaves if leaf.format is not None}


@pytest.mark.parametrize("name", ["GPTQ", "MSE", "LearnedRounding", "activations", "sequential", "rule"])
def test_axes_come_from_statistics(name):
    model = BothOrders()
    stats = collect_stats(model, images(), gram=True)
    if name == "activations":
        q = eqq.quantize_tree(model, "int8", activations=stats)
    elif name == "sequential":
        q = eqq.quantize_sequentially(model, images(), "int4", eqq.GPTQ())
    elif name == "rule":
        q = eqq.quantize_tree(model, {"*": eqq.QuantConfig("int4", eqq.GPTQ(stats))})
    else:
        q = eqq.quantize_tree(model, "int4", method=getattr(eqq, name)(stats))
    assert list_axes(q) == AXES


def test_a_rule_says_the_axis():
    model = BothOrders()
    rules = {"proj": eqq.QuantConfig("nf4", axis=-2), "*": "nf4"}
    assert list_axes(eqq.quantize_tree(model, rules)) == AXES
    assert {leaf.path: leaf.axis for leaf in eqq.plan_tree(model, rules).leaves if leaf.format} == AXES
    # A rule before the whole call, for which all axes of a convolution may be asked too.
    rules = {
        "conv.*": eqq.QuantConfig("int8", axis=(-3, -2, -1)),
        "linear.*": eqq.QuantConfig("int8", axis=-1),
        "*": "int8",
    }
    assert list_axes(eqq.quantize_tree(model, rules, axis=-2)) == AXES
    assert eqq.QuantConfig("nf4", axis=-2) != eqq.QuantConfig("nf4") and "along -2" in repr(
        eqq.QuantConfig("nf4", axis=-2)
    )
    with pytest.raises(TypeError, match="`axis` must be a whole number"):
        eqq.QuantConfig("nf4", axis=())


@pytest.mark.long
def test_smooth_finds_both_orders():
    model = BothOrders()
    stats = collect_stats(model, images(), gram=True)
    for method in (eqq.transforms.SmoothQuant(stats), eqq.transforms.AWQ(stats)):
        smoothed = eqq.transforms.smooth(model, method)
        assert (smoothed.linear.weight.axis, smoothed.proj.axis) == (-1, -2)
        wanted = outputs(model, images()[0])
        np.testing.assert_allclose(outputs(smoothed, images()[0]), wanted, atol=1e-4 * float(jnp.abs(wanted).max()))


@pytest.mark.long
def test_suggested_axes_are_accepted():
    model = BothOrders()
    stats = collect_stats(model, images(), gram=True)
    words = r"Got blocks along axis -1 of proj, whose inputs lie along axis -2. Leave `axis` out"
    with pytest.raises(ValueError, match=words):
        eqq.quantize_tree(model, "int4", method=eqq.GPTQ(stats), axis=-1)
    with pytest.raises(ValueError, match=r"different axes of linear.weight.*eqq.QuantConfig\("):
        eqq.quantize_tree(model, "int4", axis=(-3, -2, -1))
    assert list_axes(eqq.quantize_tree(model, "int4", method=eqq.GPTQ(stats))) == AXES  # as the message says


# Weights without inputs


class Added(eqx.Module):
    """A table that is added, one that is concatenated, one that is looked up, one that is not used; and a product."""

    table: jax.Array
    rows: jax.Array
    words: eqx.nn.Embedding
    spare: jax.Array
    linear: eqx.nn.Linear

    def __init__(self):
        k = jr.split(jr.key(0), 5)
        self.table, self.rows, self.spare = (weights(k[n], (n + 4, 64)) for n in range(3))
        self.words, self.linear = eqx.nn.Embedding(10, 64, key=k[3]), eqx.nn.Linear(64, 10, key=k[4])

    def __call__(self, x):
        rows = jnp.concatenate([self.rows, x + self.table, self.words(3)[None]])
        return jax.vmap(self.linear)(rows).mean(0)


@functools.cache
def tokens():
    return [weights(jr.key(n), (64, 4, 64)) for n in range(2)]


UNUSED = r"Got none for table \(.*\), rows \(.*\), spare \(no batch reached it\): "


@pytest.mark.parametrize(
    "make, inner",
    [
        (lambda s: eqq.GPTQ(s), eqq.AbsMax()),
        (lambda s: eqq.GPTQ(s, method=eqq.MSE()), eqq.MSE()),
        (lambda s: eqq.MSE(s), eqq.MSE()),
        (lambda s: eqq.LearnedRounding(s), eqq.MSE()),
        (lambda s: eqq.LearnedRounding(s, method=eqq.HQQ()), eqq.HQQ()),
    ],
)
def test_a_weight_without_inputs_gets_the_inner_method(make, inner):
    model = Added()
    method = make(collect_stats(model, tokens(), gram=True))
    with pytest.warns(UserWarning, match=UNUSED + "quantized without them") as caught:
        q = eqq.quantize_tree(model, "int4", method=method)
    assert '{"table": None, "rows": None, "spare": None, "*": ...}' in str(caught[0].message)
    wanted = eqq.quantize_tree(model, "int4", method=inner)
    for name in ("table", "rows", "spare"):
        assert eqx.tree_equal(getattr(q, name), getattr(wanted, name))
    assert eqx.tree_equal(q.words, wanted.words) and not eqx.tree_equal(q.linear, wanted.linear)
    plan = reasons(model, "int4", method=method)
    assert plan["spare"].startswith("a weight; no batch reached it")
    assert plan["words.weight"].startswith("a weight; looked up, not multiplied")
    if inner != eqq.AbsMax():
        assert all(plan[path].endswith(f"by {type(inner).__name__}") for path in ("table", "rows", "words.weight"))


def test_the_suggested_rule_leaves_weights_in_float():
    model = Added()
    stats = collect_stats(model, tokens(), gram=True)
    q = eqq.quantize_tree(model, {"table": None, "rows": None, "spare": None, "*": "int4"}, method=eqq.GPTQ(stats))
    assert not eqq.is_quantized(q.table) and eqq.is_quantized(q.linear.weight)


@pytest.mark.parametrize("method", [eqq.GPTQ(), eqq.GPTQ(method=eqq.MSE()), eqq.MSE(), eqq.LearnedRounding()])
def test_quantize_sequentially_warns_too(method):
    model = Added()
    with pytest.warns(UserWarning, match=UNUSED):
        q = eqq.quantize_sequentially(model, tokens(), "int4", method)
    wanted = eqq.quantize_tree(model, "int4", method=method.without_inputs())
    assert all(eqx.tree_equal(getattr(q, name), getattr(wanted, name)) for name in ("table", "rows", "words", "spare"))
    assert not eqx.tree_equal(q.linear, wanted.linear)


@pytest.mark.long
def test_smooth_leaves_unused_weights_alone():
    model = Added()
    stats = collect_stats(model, tokens(), gram=True)
    for method in (eqq.transforms.SmoothQuant(stats), eqq.transforms.AWQ(stats)):
        with pytest.warns(UserWarning, match=UNUSED + "they stay as they are"):
            smoothed = eqq.transforms.smooth(model, method)
        assert smoothed.table is model.table and isinstance(smoothed.linear.weight, ScaledArray)


# Errors that list all leaves


def many(n=3):
    return {"layers": [{"w": weights(jr.key(i), (8, 32)), "v": weights(jr.key(i), (8, 32))} for i in range(n)]}


def test_missing_statistics_are_one_error():
    model, gram = many(), np.eye(32)
    with pytest.raises(ValueError) as e:
        eqq.quantize_tree(model, "int4", method=eqq.GPTQ({f"layers.{n}.w": gram for n in range(3)}))
    for n in range(3):
        assert f"none for layers.{n}.v" in str(e.value)
    assert '{"layers.*.v": None, "*": ...}' in str(e.value)
    some = {path: gram for path in ("layers.0.w", "layers.1.w", "layers.2.w", "layers.0.v")}
    with pytest.raises(ValueError, match=r'\{"layers.1.v": None, "layers.2.v": None, "\*": \.\.\.\}'):
        eqq.quantize_tree(model, "int4", method=eqq.GPTQ(some))
    # The rule works.
    rules = {"layers.1.v": None, "layers.2.v": None, "*": "int4"}
    assert eqq.is_quantized(eqq.quantize_tree(model, rules, method=eqq.GPTQ(some))["layers"][0]["v"])


def test_errors_of_several_kinds_are_one_error():
    model = many()
    grams = {leaf.path: np.eye(32) for leaf in eqq.plan_tree(model).leaves}
    grams["layers.0.w"] = np.full((32, 32), np.nan)
    grams["layers.1.w"] = np.eye(31)
    del grams["layers.2.w"]
    with pytest.raises(ValueError) as e:
        eqq.quantize_tree(model, "int4", method=eqq.GPTQ(grams))
    for words in ("NaN or an infinity for layers.0.w", "(31, 31) for layers.1.w", "none for layers.2.w"):
        assert words in str(e.value)
    assert str(e.value).endswith('{"layers.*.w": None, "*": ...}`.')


def test_statistics_of_activations_are_one_error():
    model = many()
    apply = lambda m, x: [x @ layer["w"].T for layer in m["layers"]]
    stats = collect_stats(model, [weights(jr.key(1), (16, 32))], apply=apply, where=lambda m: m["layers"][0]["w"])
    with pytest.raises(ValueError) as e:
        eqq.quantize_tree(model, "int8", activations=stats)
    assert all(f"none of {path}" in str(e.value) for path in ("layers.0.v", "layers.1.w", "layers.2.v"))
    assert '{"layers.*.v": None, "layers.1.w": None, "layers.2.w": None, "*": ...}' in str(e.value)
    with pytest.raises(ValueError, match="none of layers.0.v, none of layers.1.v"):
        eqq.quantize_activations(eqq.quantize_tree(model, "int8"), stats)


def test_no_rule_is_suggested_if_all_leaves_have_errors():
    with pytest.raises(ValueError, match=r"Got none for layers.0.v, none for layers.0.w.*Pass what.*returns\.$"):
        eqq.quantize_tree(many(), "int4", method=eqq.GPTQ())
