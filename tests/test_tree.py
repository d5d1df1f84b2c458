"""Whole trees: selection, rules and reports."""

import io
import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
import rich.console

import eqquant as eqq
from eqquant._report import Report

from .helpers import assert_same, Halved, sqnr, weights


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    conv: eqx.nn.Conv2d
    layers: list
    norm: eqx.nn.LayerNorm
    norm2d: eqx.nn.LayerNorm
    cell: eqx.nn.GRUCell
    steps: jax.Array
    act: callable

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.embedding = eqx.nn.Embedding(10, 64, key=keys[0])
        self.conv = eqx.nn.Conv2d(3, 8, 3, key=keys[1])
        self.layers = [eqx.nn.Linear(64, 32, key=keys[2]), eqx.nn.Linear(32, 64, key=keys[3])]
        self.norm = eqx.nn.LayerNorm(64)
        self.norm2d = eqx.nn.LayerNorm((8, 8))
        self.cell = eqx.nn.GRUCell(16, 8, key=keys[4])
        self.steps = jnp.arange(6).reshape(2, 3)
        self.act = jax.nn.relu


WEIGHTS = {
    *("embedding.weight", "conv.weight", "layers.0.weight", "layers.1.weight"),
    *("cell.weight_ih", "cell.weight_hh"),
}


@pytest.fixture
def model(getkey):
    return Model(getkey())


def quantize_model(tree):
    """The formats of the quantized leaves, by path."""
    return {leaf.path: leaf.format for leaf in eqq.summary(tree).leaves if leaf.format is not None}


def assert_same_arrays(actual, expected):
    assert_same(eqx.filter(actual, eqx.is_array), eqx.filter(expected, eqx.is_array))


# What is selected


def test_the_default_plan(model):
    leaves = {leaf.path: leaf for leaf in eqq.plan_tree(model, dtype=jnp.bfloat16).leaves}
    assert {path for path, leaf in leaves.items() if leaf.format == eqq.NF4()} == WEIGHTS
    axes = {path: leaf.axis for path, leaf in leaves.items() if leaf.format is not None}
    assert axes == {**dict.fromkeys(WEIGHTS, -1), "conv.weight": (-3, -2, -1)}
    others = {path: leaf.reason for path, leaf in leaves.items() if leaf.format is None}
    biases = dict.fromkeys(("conv.bias", "layers.0.bias", "layers.1.bias", "cell.bias", "cell.bias_n"), "a bias")
    norms = [f"{norm}.{name}" for norm in ("norm", "norm2d") for name in ("weight", "bias")]
    norm = "a parameter of a normalization layer"
    assert others == {**biases, **dict.fromkeys(norms, norm), "steps": "not floating point"}
    rows = {leaf.path: leaf.axis for leaf in eqq.plan_tree(model, "int8", where=BOTH, axis=0).leaves if leaf.format}
    assert rows == {"layers.0.weight": -2, "layers.0.bias": -1}


BOTH = lambda m: (m.layers[0].weight, m.layers[0].bias)


@pytest.mark.long
def test_default_selection(model):
    q = eqq.quantize_tree(model)
    assert quantize_model(q) == dict.fromkeys(WEIGHTS, eqq.NF4())
    assert type(q) is Model and q.act is model.act
    for get in (
        lambda m: m.norm2d.weight,
        lambda m: m.norm.bias,
        lambda m: m.conv.bias,
        lambda m: m.steps,
        lambda m: m.layers[0].bias,
    ):
        assert get(q) is get(model)
    reasons = {leaf.path: leaf.reason for leaf in eqq.summary(q).leaves}
    assert "normalization" in reasons["norm2d.weight"] and "not floating" in reasons["steps"]
    assert "bias" in reasons["conv.bias"] and "bias" in reasons["layers.0.bias"]


def test_default_axes(model):
    q = eqq.quantize_tree(model)
    assert q.layers[0].weight.axis == q.embedding.weight.axis == q.cell.weight_hh.axis == -1
    assert q.conv.weight.axis == (-3, -2, -1)
    assert_same(q.conv.weight, eqq.quantize(model.conv.weight, axis=(1, 2, 3)))


def test_custom_norms_are_left_alone_but_wrapped_weights_are_not(getkey):
    class RMSNorm(eqx.Module):
        gain: jax.Array

    wrapped = eqx.nn.WeightNorm(eqx.nn.Linear(8, 8, key=getkey()))
    q = eqq.quantize_tree((RMSNorm(jnp.ones((4, 4))), wrapped))
    assert quantize_model(q) == {"1.layer.weight": eqq.NF4()}


RULES = [
    ({"layers.*": "int8"}, {"layers.0.weight": "int8", "layers.1.weight": "int8"}),
    ({"layers.0.*": None, "layers.*": "int4"}, {"layers.1.weight": "int4"}),
    ({"layers.0": None, "layers": "int4"}, {"layers.1.weight": "int4"}),  # layers, for all leaves inside
    ({"layers.?": "int8", "layers.?.*": "int4"}, {"layers.0.weight": "int8", "layers.1.weight": "int8"}),
    ({"layers.0.*": "int8", "layers.*": "int4"}, {"layers.0.weight": "int8", "layers.1.weight": "int4"}),
    ({re.compile(r"cell\.weight_(ih|xx)"): eqq.Int8()}, {"cell.weight_ih": "int8"}),
    ({re.compile("emb"): "q8_0", "conv.*": "mxfp4"}, {"embedding.weight": "q8_0", "conv.weight": "mxfp4"}),
    (lambda path, x: "int4" if path.startswith("cell") and x.shape[1] == 8 else None, {"cell.weight_hh": "int4"}),
    (lambda path, x: eqq.NF4() if path == "conv.weight" else None, {"conv.weight": "nf4"}),
]


def test_rules(model):
    for rules, expected in RULES:
        planned = {leaf.path: leaf.format for leaf in eqq.plan_tree(model, rules).leaves if leaf.format is not None}
        assert {path: type(format).__name__.lower() for path, format in planned.items()} == expected
    assert quantize_model(eqq.quantize_tree(model, RULES[4][0])) == {
        "layers.0.weight": eqq.Int8(),
        "layers.1.weight": eqq.Int4(),
    }


def test_a_glob_matches_whole_paths_and_a_regular_expression_is_searched_for(model):
    assert set(quantize_model(eqq.quantize_tree(model, {"*": "int8"}))) == WEIGHTS
    assert set(quantize_model(eqq.quantize_tree(model, {re.compile("weight$"): "int8"}))) == {
        *("embedding.weight", "conv.weight", "layers.0.weight", "layers.1.weight")
    }
    with pytest.raises(ValueError, match="pattern"):
        eqq.quantize_tree(model, {"ayers": "int8"})


WHERE = [
    (lambda m: m.layers[0].weight, {"layers.0.weight"}),
    (lambda m: m.layers[0], {"layers.0.weight"}),
    (lambda m: (m.layers[0].weight, m.layers[0].bias), {"layers.0.weight", "layers.0.bias"}),
    (lambda m: (m.conv.weight, m.layers[1].bias), {"conv.weight", "layers.1.bias"}),
    (lambda m: [m.norm2d.weight], {"norm2d.weight"}),
    (lambda m: m.layers, {"layers.0.weight", "layers.1.weight"}),
    (lambda m: (m.norm2d, m.layers[1]), {"layers.1.weight"}),
    (lambda m: m, WEIGHTS),
]


def test_where(model):
    for where, expected in WHERE:
        assert {leaf.path for leaf in eqq.plan_tree(model, where=where).leaves if leaf.format} == expected
    assert set(quantize_model(eqq.quantize_tree(model, where=WHERE[3][0]))) == WHERE[3][1]


def test_where_with_rules(model):
    q = eqq.quantize_tree(model, {"*.bias": None, "layers.*": "int4"}, where=lambda m: (m.layers, m.conv.weight))
    assert set(quantize_model(q)) == {"layers.0.weight", "layers.1.weight"}


def test_quantized_leaves_are_left_alone(model):
    q = eqq.quantize_tree(model, "int8", where=lambda m: m.layers[0].weight)
    q = eqq.quantize_tree(q, "nf4")
    assert quantize_model(q) == {**dict.fromkeys(WEIGHTS, eqq.NF4()), "layers.0.weight": eqq.Int8()}


# The other arguments


@pytest.mark.long
def test_axis_dtype_and_key(model, getkey):
    q = eqq.quantize_tree(model, "int8", where=lambda m: (m.layers[0].weight, m.layers[0].bias), axis=0)
    assert q.layers[0].weight.axis == -2 and q.layers[0].bias.axis == -1
    assert eqq.quantize_tree(model, dtype=jnp.bfloat16).conv.weight.dtype == jnp.bfloat16
    nearest, key = eqq.quantize_tree(model, "int4"), getkey()
    first, again = eqq.quantize_tree(model, "int4", key=key), eqq.quantize_tree(model, "int4", key=key)
    assert_same_arrays(first, again)
    assert not np.array_equal(np.asarray(first.cell.weight_ih), np.asarray(nearest.cell.weight_ih))
    # A key for each leaf: equal weights of two layers are not rounded alike.
    w = weights(getkey(), (32, 32))
    a, b = eqq.quantize_tree([w, w + 0], "int4", key=key)
    assert not np.array_equal(np.asarray(a.codes), np.asarray(b.codes))


def test_a_rule_overrides_the_call(getkey):
    """Method, axis and activations of a rule hold before those of the call; without them, those of the call."""
    w, key = weights(getkey(), (64, 64)), getkey()
    tree = {"a": w, "b": w, "c": w + 0}  # one array in two places, and an equal one
    own = {"a": eqq.QuantConfig("int8", Halved(), activations="int8", axis=-2), "*": "int8"}
    plan = eqq.plan_tree(tree, own, axis=-1, method=eqq.MSE(), activations="fp8").leaves
    found = [(leaf.path, leaf.axis, leaf.activations, leaf.reason.rpartition(" by ")[2]) for leaf in plan]
    assert found == [("a", -2, eqq.Int8(), "Halved"), ("b", -1, eqq.FP8(), "MSE"), ("c", -1, eqq.FP8(), "MSE")]
    q = eqq.quantize_tree(tree, {"a": eqq.QuantConfig("int8", Halved(), axis=-2), "*": "int8"}, key=key)
    amax = jnp.abs(w)
    assert [x.axis for x in q.values()] == [-2, -1, -1]
    np.testing.assert_allclose(q["a"].scale[:, 0], amax.max(0) / 254, rtol=1e-6)
    np.testing.assert_allclose(q["b"].scale[:, 0], amax.max(1) / 127, rtol=1e-6)
    assert not np.array_equal(q["b"].codes, q["c"].codes)  # each leaf has a key of its own


def test_progress(model, capsys):
    silent = eqq.quantize_tree(model)
    assert capsys.readouterr() == ("", "")
    shown = eqq.quantize_tree(model, progress=True)
    out, err = capsys.readouterr()
    assert "Quantizing" in err and not out
    assert_same_arrays(shown, silent)


# Kinds of trees


def test_plain_trees(getkey):
    w = np.asarray(weights(getkey(), (8, 64)))
    q = eqq.quantize_tree({"block": [{"matrix": w, "bias": np.zeros(8, np.float32)}], "name": "mlp"})
    assert_same(q["block"][0]["matrix"], eqq.quantize(w))
    assert isinstance(q["block"][0]["bias"], np.ndarray) and q["name"] == "mlp"
    assert list(quantize_model(q)) == ["block.0.matrix"]
    assert_same(eqq.quantize_tree(w, "int8"), eqq.quantize(w, "int8"))
    assert eqq.summary(eqq.quantize(w)).leaves[0].path == "the array"


def test_stacked_layers(getkey):
    keys = jax.random.split(getkey(), 3)
    stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(64, 16, key=key))(keys)
    q = eqq.quantize_tree(stacked, where=lambda m: m.weight)
    assert q.weight.shape == (3, 16, 64)
    one = jtu.tree_map(lambda a: a[1], q)
    assert_same(one.weight, eqq.quantize(stacked.weight[1]))
    x = weights(getkey(), (64,))
    np.testing.assert_allclose(
        np.asarray(one(x)), np.asarray(stacked.weight[1] @ x + stacked.bias[1]), atol=0.3 * 64**0.5 / 8
    )


def test_under_jit(model):
    assert_same_arrays(eqx.filter_jit(eqq.quantize_tree)(model), eqq.quantize_tree(model))
    struct = eqx.filter_eval_shape(eqq.quantize_tree, model)
    assert eqq.tree_nbytes(struct) == eqq.tree_nbytes(eqq.quantize_tree(model))


def test_tied_arrays_stay_one(getkey):
    w = weights(getkey(), (16, 64))
    q = eqq.quantize_tree({"a": w, "b": {"c": w}})
    assert q["a"].codes is q["b"]["c"].codes
    assert eqq.tree_nbytes(q) == q["a"].nbytes
    assert eqq.tree_nbytes({"a": w, "b": w}) == w.nbytes
    apart = eqq.quantize_tree({"a": w, "b": {"c": w}}, {"a": "int8", "b.*": "nf4"})
    assert type(apart["a"].format) is eqq.Int8 and type(apart["b"]["c"].format) is eqq.NF4


def test_an_error_quantizes_nothing(getkey):
    bad = weights(getkey(), (8, 8)).at[3, 4].set(jnp.nan)
    tree = {"a": weights(getkey(), (8, 8)), "z": [bad]}
    before = dict(tree)
    with pytest.raises(ValueError, match=r"z\.0 must be finite"):
        eqq.quantize_tree(tree)
    assert tree["a"] is before["a"] and tree["z"][0] is bad
    assert set(quantize_model(eqq.quantize_tree(tree, {"z.*": None, "*": "nf4"}))) == {"a"}


# Dequantizing and counting


def test_dequantize_tree(model):
    q = eqq.quantize_tree(model, "int8")
    dense = eqq.dequantize_tree(q)
    assert jtu.tree_structure(dense) == jtu.tree_structure(model)
    assert sqnr(model.conv.weight, dense.conv.weight) > 35 and dense.conv.bias is model.conv.bias
    half = eqq.dequantize_tree(q, jnp.bfloat16)
    assert half.conv.weight.dtype == jnp.bfloat16 and half.conv.bias.dtype == jnp.float32


def test_tree_nbytes(model):
    arrays = eqx.filter(model, eqx.is_inexact_array)
    params = sum(x.size for x in jtu.tree_leaves(arrays))
    q = eqq.quantize_tree(model)
    assert eqq.tree_nbytes(model) == 4 * params + model.steps.nbytes
    assert eqq.tree_nbytes(q) == sum(x.nbytes for x in jtu.tree_leaves(q) if eqx.is_array(x))
    assert eqq.is_quantized(q.conv.weight) and not eqq.is_quantized(q.conv.bias) and not eqq.is_quantized(q)


# Reports


@pytest.mark.parametrize("format", ["nf4", {"layers.*": "int4", "*": "mxfp8"}, eqq.NF4(double_quant=True)])
def test_the_plan_equals_the_result(model, format):
    plan = eqq.plan_tree(model, format)
    done = eqq.summary(eqq.quantize_tree(model, format))
    shown = lambda report: [(*leaf[:5], leaf.nbytes, leaf.dense_nbytes) for leaf in report.leaves]
    assert shown(plan) == shown(done)
    assert plan.nbytes == done.nbytes == eqq.tree_nbytes(eqq.quantize_tree(model, format))


def test_plan_computes_nothing(model):
    structs = eqx.filter_eval_shape(lambda: Model(jax.random.key(0)))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves(eqx.filter(structs, eqx.is_array_like)))
    assert eqq.plan_tree(structs, "int4").to_dict() == eqq.plan_tree(model, "int4").to_dict()
    # Nor is there memory for this one.
    huge = {"w": jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)}
    assert eqq.plan_tree(huge, "int8").nbytes == 10**12 + 4 * 10**6
    assert eqq.quantize_tree(huge, "int8")["w"].codes.shape == (10**6, 10**6)


def test_reports(model):
    q = eqq.quantize_tree(model, {"conv.*": eqq.Int8(), "*": "nf4"})
    report = eqq.summary(q)
    as_dict = json.loads(json.dumps(report.to_dict()))
    assert as_dict["nbytes"] == report.nbytes == eqq.tree_nbytes(q)
    assert as_dict["dense_nbytes"] == eqq.tree_nbytes(model)
    assert as_dict["bits"] == pytest.approx(8 * report.nbytes / report.params)
    by_path = {leaf["path"]: leaf for leaf in as_dict["leaves"]}
    assert by_path["layers.0.weight"]["bits"] == 4.5 and by_path["layers.0.bias"]["bits"] == 32
    assert by_path["conv.weight"]["format"] == repr(eqq.Int8()) and by_path["conv.bias"]["format"] is None
    assert by_path["conv.weight"]["axis"] == [-3, -2, -1]
    text = str(report)
    assert text == repr(report) and repr(eqq.NF4()) in text and f"6 of {len(by_path)} quantized" in text
    assert all(leaf.path in text for leaf in report.leaves if leaf.format is not None)
    assert json.loads(report.to_json()) == as_dict


def test_a_report_has_one_headline_and_says_whether_it_is_a_plan():
    tree = {"w": np.ones((1000, 640), np.float32), "v": np.ones((64, 60), np.float32)}
    plan = eqq.plan_tree(tree, {"w": "int4"})
    done = eqq.summary(eqq.quantize_tree(tree, {"w": "int4"}))
    headline = "2.58 MB -> 375 KB, 6.9 times smaller, 4.66 bits per weight"
    assert str(done).splitlines()[0] == headline
    assert str(plan).splitlines()[:2] == ["A plan, nothing is quantized yet:", headline]
    assert plan.planned and not done.planned
    assert str(eqq.summary(tree)).startswith("2.58 MB, nothing is quantized")
    # The report has the bits that `plan_bits` counts, and the bits of the whole tree.
    assert "4.500 bits per weight in the quantized arrays" in str(done) and f"{done.bits:.3f} over all" in str(done)
    assert done.quantized_bits == 4.5 < done.bits


def test_a_report_sums_up_small_arrays_that_stay_in_float(model):
    model = eqx.tree_at(lambda m: m.embedding, model, eqx.nn.Embedding(1000, 64, key=jax.random.key(0)))
    report = eqq.summary(eqq.quantize_tree(model, {"layers.*": "nf4"}))
    text = str(report)
    assert "layers.0.bias" not in text and "5 arrays" in text and "embedding.weight" in text
    assert {leaf["path"] for leaf in report.to_dict()["leaves"]} >= {"layers.0.bias", "norm.bias", "conv.bias"}
    console = rich.console.Console(width=100, file=io.StringIO())
    console.print(report.table(every_leaf=True))
    assert all(leaf.path in console.file.getvalue() for leaf in report.leaves)


def test_a_report_groups_repeated_layers():
    layer = lambda n: {"a2": {"weight": jnp.ones((64, 64))}, "bias": jnp.ones(64), "up": jnp.ones((64, 32 + n // 2))}
    tree = {"embed": jnp.ones((64, 64)), "layers": [layer(n) for n in range(3)]}
    lines = str(eqq.summary(eqq.quantize_tree(tree, {"layers.*": "int8"}))).splitlines()
    names = [" ".join(line.split()[:2]) for line in lines[3:-3]]
    # What is quantized comes first; only layers of one shape and format share a row.
    assert names == ["layers.*.a2.weight (3)", "layers.*.up (2)", "layers.2.up Int8()", "embed float32", "3 arrays"]


@pytest.mark.parametrize("depth", [1, 12])
def test_reports_take_at_most_80_columns(depth):
    tree = {"a_long_name_of_a_block_of_layers": jnp.ones((64, 64))}
    for _ in range(depth):
        tree = {"transformer": tree, "attention": [jnp.ones((64, 64))]}
    rules = {"*attention*": eqq.NF4(32, double_quant=True), "*": eqq.Int4(128, symmetric=False)}
    for report in (eqq.plan_tree(tree, rules), eqq.summary(eqq.quantize_tree(tree, rules))):
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)


def test_a_report_in_a_notebook(model):
    html = eqq.summary(eqq.quantize_tree(model))._repr_html_()
    assert html.startswith("<pre") and html.endswith("</pre>") and "layers.0.weight" in html and "NF4()" in html


def test_all_reports_have_one_base(model):
    w = eqq.quantize(model.conv.weight.reshape(8, -1))
    stats = eqq.calibrate.collect_stats({"w": jnp.ones((4, 8))}, [jnp.ones((3, 8))], apply=lambda m, x: x @ m["w"].T)
    for report in (
        eqq.summary(model),
        eqq.explain_matmul(jnp.ones((2, 27)), w.T),
        stats,
        eqq.analysis.analyze_error(w, w),
    ):
        assert isinstance(report, Report)
        assert str(report) == repr(report) and report._repr_html_().startswith("<pre")
        assert set(json.loads(report.to_json())) == set(report.to_dict())


# Names


def test_every_leaf_has_a_path_of_its_own(getkey):
    tree = {"a.b": weights(getkey(), (8, 64)), "a": {"b": weights(getkey(), (4, 64))}, "c": weights(getkey(), (2, 64))}
    names = [leaf.path for leaf in eqq.plan_tree(tree).leaves]
    assert names == ["['a']['b']", "['a.b']", "c"]
    q = eqq.quantize_tree(tree, {re.compile(r"^\['a.b'\]$"): "int4", "*": "int8"})
    assert q["a.b"].format == eqq.Int4() and q["a"]["b"].format == q["c"].format == eqq.Int8()


def test_masters_of_leaves_with_similar_names(getkey):
    tree = {"a.b": weights(getkey(), (8, 64)), "a": {"b": weights(getkey(), (8, 64))}}
    state = eqq.float_masters(optax.sgd(0.1), masters=tree).init(eqq.quantize_tree(tree, "int8"))
    assert_same_arrays(state.masters, tree)


# Ties


def test_shared_arrays_survive_dequantizing_and_factors(getkey):
    w = weights(getkey(), (16, 64))
    q = eqq.quantize_tree({"a": w, "b": [w], "c": w + 1})
    dense = eqq.dequantize_tree(q)
    assert dense["a"] is dense["b"][0] and dense["c"] is not dense["a"]
    lora = eqq.loraify(q, 2, key=getkey())
    assert lora["a"] is lora["b"][0] and lora["c"].a is not lora["a"].a
    merged = eqq.merge_lora(lora)
    assert merged["a"] is merged["b"][0]


def test_a_summary_gives_the_reasons_of_the_plan():
    """For every array that stays in float; what the call alone knows, it says of the call."""
    tree = {
        "w": jnp.ones((64, 64)),
        "few": jnp.ones((64, 3)),
        "no_smaller": jnp.ones((4, 8), jnp.float8_e4m3fn),
        "bias": jnp.ones((2, 64)),
        "pos_embed": jnp.ones((8, 64)),
        "ids": jnp.arange(4),
    }
    reasons = lambda report: {leaf.path: leaf.reason for leaf in report.leaves if leaf.format is None}
    planned = reasons(eqq.plan_tree(tree, "nf4"))
    assert "would take" in planned["no_smaller"] and planned["few"] == "too few values share a scale: 3"
    assert reasons(eqq.summary(eqq.quantize_tree(tree, "nf4"))) == planned
    chosen = eqq.quantize_tree({**tree, "other": tree["w"]}, {"other": "nf4"})
    assert reasons(eqq.summary(chosen)) == {**planned, "w": "left out by the call"}
    assert reasons(eqq.summary(tree))["w"] == "nothing is quantized yet"


def test_reasons_name_the_axis_of_a_layer():
    """An axis for all is taken at its word, and the reason says where the inputs of a layer are."""
    kernel = {"q": {"kernel": jnp.ones((64, 4, 16)), "bias": jnp.ones((4, 16))}, "w": jnp.ones((64, 4))}
    planned = eqq.plan_tree({**kernel, "x": jnp.ones((64, 64))}, "nf4", axis=-2).leaves
    reasons = {leaf.path: leaf.reason for leaf in planned}
    assert reasons["q.kernel"] == "too few values share a scale: 4; its layer sums along -3: see `axis`"
    assert {leaf.path: leaf.axis for leaf in eqq.plan_tree(kernel, "nf4").leaves}["q.kernel"] == -3
