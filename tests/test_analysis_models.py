"""What quantizing a model costs: errors by leaf, sensitivities, plans, outputs; and how reports are shown."""

import dataclasses
import itertools as it
import json
import math
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqquant as eqq
from eqquant import analysis, reference
from eqquant._report import Report
from eqquant.analysis._comparison import run_benchmark
from eqquant.analysis._knapsack import choose_options
from eqquant.analysis._layers import TreeErrorReport
from eqquant.analysis._roles import estimate_role_factors
from eqquant.analysis._sensitivity import LeafSensitivity, SensitivityReport

from .helpers import outputs, sqnr, weights


def close(actual, expected, rtol=1e-4):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-12)


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        up, down = jr.split(key)
        self.up = eqx.nn.Linear(32, 64, key=up)
        self.down = eqx.nn.Linear(64, 32, key=down)
        self.norm = eqx.nn.LayerNorm(32)

    def __call__(self, x, *, key=None):
        return self.norm(x + self.down(jax.nn.relu(self.up(x))))


@pytest.fixture
def model(getkey):
    blocks = [Block(getkey()) for _ in range(3)]
    # The first block matters most.
    blocks[0] = eqx.tree_at(lambda b: b.down.weight, blocks[0], 20 * blocks[0].down.weight)
    return eqx.nn.Sequential([*blocks, eqx.nn.Linear(32, 10, key=getkey())])


def squared_distance(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@pytest.fixture
def batch(model, getkey):
    x = weights(getkey(), (16, 32))
    return x, outputs(model, x)


@pytest.mark.long
def test_analyze_tree(model):
    report = analysis.analyze_tree(model, {"*down*": "int8", "*": "nf4"})
    assert [leaf.path for leaf in report.leaves][:2] == ["layers.0.up.weight", "layers.0.down.weight"]
    assert len(report.leaves) == 7
    leaf = report.leaves[1]
    expected = analysis.analyze_error(model.layers[0].down.weight, eqq.quantize(model.layers[0].down.weight, "int8"))
    assert leaf.error == expected and leaf.format == eqq.Int8() and leaf.bits == 8.5
    report, rounded = analysis.analyze_tree(model), eqq.dequantize_tree(eqq.quantize_tree(model))
    joined = lambda tree: np.concatenate([np.ravel(x) for x in jtu.tree_leaves(tree) if eqx.is_array(x) and x.ndim > 1])
    x, y = joined(model), joined(rounded)
    close([report.sqnr_db, report.mse], [sqnr(x, y), ((np.float64(x) - y) ** 2).mean()], 1e-6)
    close(report.bits, eqq.plan_tree(eqx.filter(model, lambda x: eqx.is_array(x) and x.ndim > 1), "nf4").bits)
    one = analysis.analyze_tree(model, "nf4", where=lambda m: m.layers[3].bias, axis=-1)
    assert [leaf.path for leaf in one.leaves] == ["layers.3.bias"]
    close(one.sqnr_db, one.leaves[0].error.sqnr_db, 1e-9)


@pytest.mark.long
def test_sensitivity_compiles_once(model, batch):
    traces = []

    def loss(model, batch):
        traces.append(None)
        return squared_distance(model, batch)

    report = analysis.sensitivity(model, loss, batch, ("int2", "nf4", "int8"))
    assert len(traces) == 1
    assert report.loss < 1e-10 and len(report.leaves) == 7
    for leaf in report.leaves:
        assert leaf.losses[0] > leaf.losses[1] > leaf.losses[2] >= 0
    leaf = report.leaves[1]
    changed = eqq.quantize_tree(model, "nf4", where=lambda m: m.layers[0].down.weight)
    close(leaf.losses[1], squared_distance(eqq.dequantize_tree(changed), batch), 1e-3)
    assert leaf.nbytes[1] == changed.layers[0].down.weight.nbytes


@pytest.mark.parametrize("dtype", ["numpy", "float16", "bfloat16"])
def test_models_of_other_dtypes(dtype, getkey):
    """NumPy arrays, 16-bit floats, and quantized leaves, which are left alone."""
    make = (lambda w: np.asarray(w) * 1e-6) if dtype == "numpy" else lambda w: w.astype(dtype)
    model = {name: make(weights(getkey(), (32, 72))) for name in "ab"} | {"c": eqq.quantize(weights(getkey(), (8, 32)))}
    traces = []

    def loss(model, x):
        traces.append(None)
        w = model["a"].T @ model["b"]
        return jnp.var(w @ x).astype(jnp.float32) + (model["c"] @ jnp.ones(32)).sum()

    x = jnp.ones((72, 3), model["a"].dtype)
    report = analysis.sensitivity(model, loss, x, ("int2", "int8"))
    assert len(traces) == 1 and [leaf.paths for leaf in report.leaves] == [("a",), ("b",)]
    quantized = eqq.quantize_tree(model, analysis.plan_bits(model, report, 6))
    errors = analysis.compare_trees(model, quantized)
    assert [leaf.path for leaf in errors.leaves] == ["a", "b"] and 5 < errors.sqnr_db < 60
    close(errors.leaves[0].error.mse, analysis.analyze_error(model["a"], quantized["a"]).mse, 1e-9)


def test_one_array_in_two_places(getkey):
    w = weights(getkey(), (32, 32))
    model, x = {"a": w, "b": w, "c": weights(getkey(), (32, 32))}, weights(getkey(), (4, 32))
    report = analysis.sensitivity(model, lambda m, x: jnp.mean((x @ m["a"] @ m["b"] @ m["c"]) ** 2), x, ("nf4", "int8"))
    assert [leaf.paths for leaf in report.leaves] == [("a", "b"), ("c",)]
    plan = analysis.plan_bits(model, report, 6.8)
    quantized = eqq.quantize_tree(model, plan)
    assert quantized["a"] is quantized["b"]
    close(plan.bits, 8 * eqq.tree_nbytes(quantized) / (2 * w.size))


@pytest.mark.parametrize("target", [2.8, 3.5, 4.5, 6, 40])
def test_plans_keep_the_budget_and_are_better_than_uniform(model, batch, target):
    formats = (eqq.Int2(), eqq.NF4(), eqq.Int8(block_size=64))
    report = analysis.sensitivity(model, squared_distance, batch, formats)
    plan = analysis.plan_bits(model, report, target)
    size = sum(math.prod(leaf.shape) for leaf in report.leaves)
    assert plan.bits <= target
    if target == 40:  # more than all of them take
        assert set(plan.values()) == {None} and plan.increase == 0 and plan.bits == 32
        return
    quantized = eqq.quantize_tree(model, plan)
    found = [leaf for leaf in eqq.summary(quantized).leaves if leaf.path in plan]
    close(8 * sum(leaf.nbytes for leaf in found) / size, plan.bits, 1e-9)
    uniform = [
        sum(leaf.losses[n] for leaf in report.leaves)
        for n in range(len(formats))
        if 8 * sum(leaf.nbytes[n] for leaf in report.leaves) <= target * size
    ]
    assert plan.increase <= min(uniform, default=math.inf) + 1e-6
    if target == 4.5:
        distance = {
            name: float(squared_distance(eqq.dequantize_tree(eqq.quantize_tree(model, p)), batch))
            for name, p in (("plan", plan), ("nf4", "nf4"))
        }
        assert distance["plan"] <= distance["nf4"]


def test_groups_are_measured_and_planned_together(model, batch):
    formats = (eqq.Int2(), eqq.Int8(block_size=64))
    report = analysis.sensitivity(model, squared_distance, batch, formats, group="layers.*")
    assert [leaf.name for leaf in report.leaves] == ["layers.*.up.weight", "layers.*.down.weight", "layers.3.weight"]
    up = report.leaves[0]
    assert up.paths == tuple(f"layers.{n}.up.weight" for n in range(3)) and (up.arrays, up.size) == (3, 3 * 32 * 64)
    q = eqq.quantize_tree(model, {path: formats[0] for path in up.paths} | {"*": None})
    close(up.losses[0], squared_distance(eqq.dequantize_tree(q), batch))
    assert up.nbytes[0] == sum(q[n].up.weight.nbytes for n in range(3))
    plan = analysis.plan_bits(model, report, 6)
    assert all(len({plan[path] for path in leaf.paths}) == 1 for leaf in report.leaves)
    q = eqq.quantize_tree(model, plan)
    found = [leaf for leaf in eqq.summary(q).leaves if leaf.path in plan]
    assert 2.5 < plan.bits <= 6
    close(8 * sum(leaf.nbytes for leaf in found) / sum(leaf.size for leaf in report.leaves), plan.bits)
    assert "layers.*.up.weight" in str(plan) and "7 weights" in str(plan)
    estimated = analysis.weight_sensitivity(model, formats, group=["layers.*"])
    assert [leaf.name for leaf in estimated.leaves] == [leaf.name for leaf in report.leaves]
    with pytest.raises(ValueError, match=r"`group` must match.*Got 'blocks.\*'"):
        analysis.sensitivity(model, squared_distance, batch, formats, group="blocks.*")


def test_paths_with_brackets(getkey):
    model = {"w[0]": weights(getkey(), (32, 32)), "w0": weights(getkey(), (32, 32)), "*": weights(getkey(), (32, 32))}
    loss = lambda m, x: sum(jnp.mean((x @ w) ** 2) for w in m.values())
    report = analysis.sensitivity(model, loss, jnp.ones((1, 32)), ("nf4",))
    leaves = tuple(
        LeafSensitivity(leaf.paths, leaf.shape, leaf.dense_nbytes, leaf.formats, leaf.nbytes, (loss,))
        for leaf, loss in zip(report.leaves, (0.0, 5.0, 5.0), strict=True)  # "*", "w0", "w[0]"
    )
    plan = analysis.plan_bits(model, SensitivityReport(0.0, leaves), 25)
    quantized = eqq.quantize_tree(model, plan)
    kinds = {path: eqq.is_quantized(w) for path, w in quantized.items()}
    assert kinds == {"*": True, "w0": False, "w[0]": False}


#
# Without data
#


def test_weight_sensitivity():
    model = {"a": weights(jr.key(0), (8, 64)), "lm_head": weights(jr.key(1), (32, 64)) * 100}
    report = analysis.weight_sensitivity(model, ("int2", "int8"))
    for leaf in report.leaves:
        w = model[leaf.paths[0]]
        error = jnp.linalg.norm(w - eqq.quantize(w, "int2").dequantize()) / jnp.linalg.norm(w)
        role = {"a": 1, "lm_head": 8}[leaf.paths[0]]
        close(leaf.losses[0], role * float(error) ** 2, 1e-5)  # whatever the magnitude and the size
        assert leaf.losses[1] < leaf.losses[0] / 100
    assert "error, weighed by role" in str(report) and "loss" not in str(analysis.plan_bits(model, report, 5))
    with pytest.raises(ValueError, match="at least one format"):
        analysis.weight_sensitivity(model, ())


def test_weight_sensitivity_reads_one_array_at_a_time():
    model = {"layers": {str(n): {"w": weights(jr.key(n), (8, 64))} for n in range(3)}, "bias": jnp.ones((2, 2))}
    shapes, seen = jax.eval_shape(lambda: model), []

    def read(path):
        seen.append(path)
        return model["layers"][path.split(".")[1]]["w"]

    report = analysis.weight_sensitivity(shapes, ("int2", "int8"), read=read)
    assert seen == ["layers.0.w", "layers.1.w", "layers.2.w"]
    wanted = analysis.weight_sensitivity(model, ("int2", "int8"))
    assert report.leaves == wanted.leaves
    assert analysis.plan_bits(shapes, report, 5).increase == analysis.plan_bits(model, wanted, 5).increase


def test_stacks_count_as_several_matrices():
    layers = [weights(jr.key(n), (16, 32)) for n in range(4)]
    stacked = {"stack": jnp.stack(layers), "experts": jnp.stack(layers), "conv1d": jnp.ones((16, 32, 9))}
    alone = [analysis.weight_sensitivity({"w": w}, "int3").leaves[0].losses[0] for w in layers]
    conv, experts, stack = (leaf.losses[0] for leaf in analysis.weight_sensitivity(stacked, "int3").leaves)
    close(stack, 4 * experts)
    close(experts, np.mean(alone), 0.1)
    assert conv <= 1


ROLES = {
    "an encoder": {
        "embeddings.word_embeddings.weight": 1,
        "embeddings.position_embeddings.weight": 0.5,
        "embeddings.token_type_embeddings.weight": 0.5,
        "encoder.layer.0.attention.self.query.weight": 0.3,
        "encoder.layer.0.attention.output.dense.weight": 2,
        "encoder.layer.1.attention.self.key.weight": 0.15,
        "encoder.layer.1.output.dense.weight": 1,
        "encoder.layer.2.attention.self.value.weight": 3,
    },
    "a head": {
        "model.embed_tokens.weight": 1,
        "model.layers.0.self_attn.q_proj.weight": 0.3,
        "model.layers.1.self_attn.v_proj.weight": 1.5,
        "model.layers.1.mlp.down_proj.weight": 1,
        "model.layers.2.mlp.up_proj.weight": 2,
        "lm_head.weight": 8,
    },
    "a table for both ends": {"model.embed_tokens.weight": 8, "model.layers.0.self_attn.k_proj.weight": 0.3},
    "GPT-2": {"wte.weight": 8, "wpe.weight": 0.5, "h.0.attn.c_attn.weight": 2},
    "GGUF": {"token_embd.weight": 1, "output.weight": 8, "blk.0.attn_q.weight": 0.3, "blk.0.attn_output.weight": 2},
    "a vision transformer": {
        "patch_embed.proj.weight": 2,
        "pos_embed": 0.5,
        "blocks.0.attn.qkv.weight": 2,
        "blocks.1.mlp.fc1.weight": 1,
        "blocks.2.mlp.fc2.weight": 2,
        "head.weight": 8,
    },
}


@pytest.mark.parametrize("wanted", ROLES.values(), ids=ROLES)
def test_roles(wanted):
    assert estimate_role_factors(wanted) == wanted


def test_plans_are_the_best_of_all_mixes():
    """Every mix of formats counted out, where a leaf stays in float without loss."""
    shapes, formats = {"a": (4, 64), "b.0": (3, 100), "c": (2, 8, 32)}, (eqq.Int8(None), eqq.Int4(32))
    losses = {"a": (2.01, 2.3), "b.0": (2.05, 2.4), "c": (2.02, 2.15)}  # 2 without quantizing
    model = {"a": np.ones(shapes["a"], np.float32), "b": [np.ones(shapes["b.0"], np.float32)]}
    model["c"] = np.ones(shapes["c"], np.float32)
    leaves, options = [], []
    for path, shape in shapes.items():
        size, rows = math.prod(shape), math.prod(shape[:-1])
        nbytes = size + 4 * rows, rows * (-(-shape[-1] // 32)) * (32 // 2 + 4)
        leaves.append(LeafSensitivity((path,), shape, 4 * size, formats, nbytes, losses[path], axes=(-1,)))
        increases = [loss - 2 for loss in losses[path]]
        options.append([*zip(nbytes, increases, formats, strict=True), (4 * size, 0, None)])
    mixes = [(*(sum(o[n] for o in mix) for n in (0, 1)), [o[2] for o in mix]) for mix in it.product(*options)]
    report, size, chosen = SensitivityReport(2.0, tuple(leaves)), sum(map(math.prod, shapes.values())), []
    for target in (6, 7.5, 9, 12, 16, 20, 31, 32):
        plan = analysis.plan_bits(model, report, target)
        nbytes, increase, wanted = min((m for m in mixes if 8 * m[0] <= target * size), key=lambda m: m[1])
        assert plan == dict(zip(shapes, wanted, strict=True)) and plan.nbytes == nbytes
        np.testing.assert_allclose([plan.increase, plan.bits], [increase, 8 * nbytes / size], atol=1e-9)
        counts = {
            path: next(o[0] for o in found if o[2] == plan[path]) for path, found in zip(shapes, options, strict=True)
        }
        assert [leaf.bits for leaf in plan.leaves] == [8 * counts[p] / math.prod(shapes[p]) for p in shapes]
        chosen.append(repr(wanted))
    assert len({*chosen}) > 5
    least = 8 * min(m[0] for m in mixes) / size
    assert analysis.plan_bits(model, report, least).bits == least
    with pytest.raises(ValueError, match=f"from {least:.3f} to 32.000 bits per weight. Got {least - 0.01}"):
        analysis.plan_bits(model, report, least - 0.01)


@pytest.mark.long
def test_a_plan_without_data_is_not_worse_than_one_format(model):
    report = analysis.weight_sensitivity(model, (eqq.Int2(32), eqq.Int3(64), "nf4", eqq.Int5(64), eqq.Int8(64)))
    size, increases = sum(leaf.size for leaf in report.leaves), []
    for target in np.arange(3, 6.1, 0.25):
        plan = analysis.plan_bits(model, report, float(target))
        uniform = [
            sum(leaf.losses[n] for leaf in report.leaves)
            for n in range(5)
            if 8 * sum(leaf.nbytes[n] for leaf in report.leaves) <= target * size
        ]
        assert plan.bits <= target and plan.increase <= min(uniform, default=math.inf)
        increases.append(plan.increase)
    assert increases == sorted(increases, reverse=True)


def test_a_plan_is_compared_with_one_format(model, batch):
    """Sensitivities that are wrong make a mix that is worse than one format, and measuring it shows that."""
    formats = (eqq.Int2(32), eqq.NF4(), eqq.Int8(64))
    true = analysis.sensitivity(model, squared_distance, batch, formats)
    flat = [dataclasses.replace(leaf, losses=(1.0, 0.9, 0.1 * n)) for n, leaf in enumerate(true.leaves)]
    wrong = SensitivityReport(true.loss, tuple(flat))
    distance = lambda rules: float(squared_distance(eqq.dequantize_tree(eqq.quantize_tree(model, rules)), batch))
    mix = analysis.plan_bits(model, wrong, 4.8)
    measured = analysis.plan_bits(model, wrong, 4.8, loss=squared_distance, batch=batch)
    assert distance(mix) > distance("nf4") and set(measured.values()) == {eqq.NF4()}
    best = analysis.plan_bits(model, true, 4.8, loss=squared_distance, batch=batch)
    assert distance(best) <= distance("nf4") and best.bits <= 4.8
    for alone in ({"loss": squared_distance}, {"batch": batch}):
        with pytest.raises(ValueError, match="`loss` and `batch` must be given together"):
            analysis.plan_bits(model, true, 4.8, **alone)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_knapsack_finds_the_optimum(data):
    items = data.draw(st.integers(1, 5))
    options = data.draw(st.integers(1, 4))
    numbers = lambda most: st.lists(st.integers(0, most), min_size=options, max_size=options)
    costs = [np.array(data.draw(numbers(50))) for _ in range(items)]
    losses = [np.array(data.draw(numbers(1000)), float) for _ in range(items)]
    mixes = [
        (sum(c[n] for c, n in zip(costs, mix)), sum(l[n] for l, n in zip(losses, mix)))
        for mix in it.product(range(options), repeat=items)
    ]
    budget = data.draw(st.integers(int(min(cost for cost, _ in mixes)), int(max(cost for cost, _ in mixes)) + 5))
    chosen = choose_options(costs, losses, budget)
    assert sum(c[n] for c, n in zip(costs, chosen)) <= budget
    assert sum(l[n] for l, n in zip(losses, chosen)) == min(loss for cost, loss in mixes if cost <= budget)


def test_knapsack_of_large_costs():
    for seed in range(3):
        rng = np.random.default_rng(seed)
        costs = [np.sort(rng.integers(1, 10**9, 6)) for _ in range(40)]
        losses = [np.sort(rng.exponential(size=6))[::-1].copy() for _ in range(40)]
        budget = sum(int(c[2]) for c in costs)
        chosen = choose_options(costs, losses, budget)
        assert sum(int(c[n]) for c, n in zip(costs, chosen)) <= budget
        # The Lagrangian is a lower bound for every choice.
        loss = sum(l[n] for l, n in zip(losses, chosen))
        bound = max(
            sum((l + m * c).min() for c, l in zip(costs, losses)) - m * budget for m in np.geomspace(1e-12, 1e-6, 400)
        )
        assert bound <= loss <= bound + 0.02 * sum(l[2] for l in losses)


def test_knapsack_of_many_items_stays_within_the_budget():
    """Costs are no whole cells, and a choice that rounds them down would spend too much."""
    rng = np.random.default_rng(0)
    costs = [np.array([0, cost]) for cost in rng.integers(10**9 // 2, 10**9, 200)]
    losses = [np.array([cost[1] * rng.uniform(0.9, 1.1), 0]) for cost in costs]
    budget = sum(int(cost[1]) for cost in costs) // 2
    assert 0.99 * budget < sum(int(c[n]) for c, n in zip(costs, choose_options(costs, losses, budget))) <= budget


def test_divergence_by_the_formulas():
    rng = np.random.default_rng(0)
    x = {"model": rng.standard_normal((2, 3, 5)), "quantized": rng.standard_normal((2, 3, 5))}
    x["model"][0, 1], x["quantized"][0, 1] = np.arange(5) * 1e20, np.arange(5)[::-1] * 1e20
    x["model"][1, 2] = x["quantized"][1, 2] = 0
    x = {name: y.astype(np.float32) for name, y in x.items()}
    found = analysis.output_divergence(x["model"], x["quantized"], np.ones(1), apply=lambda y, _: jnp.asarray(y))
    a, b = (y.reshape(6, 5).astype(np.float64) for y in x.values())
    log_p, log_q = (y - y.max(-1, keepdims=True) for y in (a, b))
    log_p, log_q = (y - np.log(np.exp(y).sum(-1, keepdims=True)) for y in (log_p, log_q))
    kls = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosines = np.where(norms > 0, np.sum(a * b, axis=-1) / np.maximum(norms, 1e-30), 1)
    close(found.kls, kls, 1e-4)
    np.testing.assert_allclose(found.cosines, cosines, atol=1e-5)
    close([found.kl, found.kl_worst, found.cosine], [kls.mean(), kls.max(), cosines.mean()])
    close([found.cosine_worst, found.relative_l2], [cosines.min(), np.linalg.norm(a - b) / np.linalg.norm(a)])
    assert found.outputs == 6 and found.top1 == np.mean(a.argmax(-1) == b.argmax(-1)) not in (0, 0.5, 1)


def test_a_tree_counts_its_values_not_its_leaves():
    """Errors, bits and budgets, where leaves are of unlike sizes, formats and magnitudes."""
    w = {"a": np.asarray(weights(jr.key(0), (8, 64))), "b": 100 * np.asarray(weights(jr.key(1), (32, 64)))}
    w |= {"bias": np.ones(3, np.float32)}
    q = eqq.quantize_tree(w, {"a": "int8", "b": "int4"})
    report = analysis.compare_trees(w, q, threshold=0.5)
    errors = {name: np.asarray(w[name], np.float64) - q[name].dequantize() for name in "ab"}
    noise, signal = (sum(np.sum(np.square(x[name], dtype=np.float64)) for name in "ab") for x in (errors, w))
    close([report.mse, report.sqnr_db], [noise / 2560, 10 * np.log10(signal / noise)])
    close(report.bits, 8 * (q["a"].nbytes + q["b"].nbytes) / 2560)
    for leaf in report.leaves:
        error = errors[leaf.path]
        close([leaf.error.mse, leaf.error.outlier_rate], [np.mean(error**2), np.mean(np.abs(error) > 0.5)])
        assert (leaf.format, leaf.shape) == (q[leaf.path].format, w[leaf.path].shape)
    formats = (eqq.Int4(), eqq.Int8())
    leaves = [
        LeafSensitivity(("a",), (8, 64), w["a"].nbytes, formats, (300, 700), (1.0, 0.25)),
        LeafSensitivity(("b",), (32, 64), w["b"].nbytes, formats, (600, 1500), (1.5, 0.3)),
    ]
    plan = analysis.plan_bits(w, SensitivityReport(0.25, tuple(leaves)), 8 * (300 + 1500) / 2560)
    assert dict(plan) == {"a": formats[0], "b": formats[1]} and (plan.nbytes, plan.bits) == (1800, 8 * 1800 / 2560)
    close(plan.increase, 0.75 + 0.05)
    less = analysis.plan_bits(w, SensitivityReport(0.25, tuple(leaves)), 8 * 1799 / 2560)
    assert dict(less) == {"a": formats[1], "b": formats[0]}


def test_losses_of_groups_and_shared_leaves(getkey):
    """One evaluation for each format, in which all arrays of a group, and all places of one, are quantized."""
    w = {name: np.asarray(weights(getkey(), (8, 64))) for name in "abc"}
    model = {"layers": [{"w": w["a"]}, {"w": w["b"]}], "other": {"x": w["c"], "y": w["c"]}}
    x = np.asarray(weights(getkey(), (64,)))
    factors = np.float32([1, 10, 100, 1000])
    loss = lambda m, x: sum(f * jnp.sum(jnp.square(w @ x)) for f, w in zip(factors, jtu.tree_leaves(m)))
    report = analysis.sensitivity(model, loss, x, (eqq.Int4(32), eqq.Int2(64)), group="layers.*", method=Doubled())
    rounded = lambda w, f: np.asarray(eqq.quantize(w, f, method=Doubled()).dequantize(), np.float64)
    value = lambda a, b, c, d: sum(f * np.sum((w.astype(np.float64) @ x) ** 2) for f, w in zip(factors, (a, b, c, d)))
    a, b, c = w.values()
    close(report.loss, value(a, b, c, c))
    assert [leaf.paths for leaf in report.leaves] == [("layers.0.w", "layers.1.w"), ("other.x", "other.y")]
    for n, format in enumerate((eqq.Int4(32), eqq.Int2(64))):
        close(report.leaves[0].losses[n], value(rounded(a, format), rounded(b, format), c, c))
        close(report.leaves[1].losses[n], value(a, b, *[rounded(c, format)] * 2))
    q = eqq.quantize(w["a"], eqq.Int4(32))
    assert report.leaves[0].nbytes[0] == 2 * q.nbytes and report.leaves[1].nbytes[0] == q.nbytes
    assert [leaf.dense_nbytes for leaf in report.leaves] == [2 * w["a"].nbytes, w["a"].nbytes]
    assert report.leaves[0].formats[0].method == Doubled()


class Doubled(eqq.extend.AbstractScaleMethod):
    """Twice the scales that the format chooses."""

    def choose_scales(self, blocks, format):
        return 2 * format.choose_scale(blocks), None


@pytest.mark.long
def test_output_divergence(model, batch):
    x, _ = batch
    same = analysis.output_divergence(model, model, x)
    assert (same.outputs, same.kl, same.top1, same.relative_l2) == (16, 0, 1, 0) and abs(same.cosine - 1) < 1e-6
    reports = [analysis.output_divergence(model, eqq.quantize_tree(model, f), x) for f in ("int8", "nf4", "int2")]
    assert reports[0].kl < reports[1].kl < reports[2].kl
    assert reports[0].cosine > reports[1].cosine > reports[2].cosine
    p, q = (jax.nn.softmax(outputs(m, x)) for m in (model, eqq.quantize_tree(model, "nf4")))
    close(reports[1].kl, jnp.sum(p * jnp.log(p / q), axis=-1).mean(), 1e-3)
    close(reports[1].top1, (p.argmax(-1) == q.argmax(-1)).mean())
    applied = analysis.output_divergence(model, model, (x, 2), apply=lambda m, b: jax.vmap(m)(b[0]) * b[1])
    assert applied.kl == 0


#
# Shown
#


@pytest.fixture
def reports(model, batch):
    w = model.layers[0].up.weight
    sensitivity = analysis.sensitivity(model, squared_distance, batch, ("int2", "int8"))
    return [
        analysis.analyze_error(w, eqq.quantize(w)),
        analysis.analyze_error(w, eqq.quantize(w, eqq.Int4(symmetric=False))),
        analysis.analyze_error(w, w.round(1)),
        analysis.compare_formats(w, ("int8", "nf4", "int4")),
        analysis.analyze_tree(model, "int4"),
        sensitivity,
        analysis.plan_bits(model, sensitivity, 5),
        analysis.output_divergence(model, eqq.quantize_tree(model, "nf4"), batch[0]),
    ]


@pytest.mark.long
def test_reports_are_printed(model, reports):
    w = model.layers[0].up.weight
    others = [
        run_benchmark(w, "int8"),
        reference.outlier_impact(w, format="nf4"),
        reports[4].leaves[0],
    ]
    for report in reports + others:
        assert isinstance(report, Report)
        assert "───" in str(report) and repr(report) == str(report)
        assert "…" not in str(report)
        assert json.loads(report.to_json()) == report.to_dict()
    exact = analysis.analyze_error(w, w)
    assert exact.to_dict()["sqnr_db"] == math.inf and json.loads(exact.to_json())["sqnr_db"] is None
    assert "layers.0.up.weight" in str(reports[-2])


@pytest.mark.long
def test_plots(reports):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    imported = "matplotlib.pyplot" in sys.modules
    for report in reports:
        axes = report.plot()
        assert axes.get_xlabel() and axes.get_title()
        assert axes.figure.get_facecolor()[3] == axes.get_facecolor()[3] == 0  # readable on dark pages too
        axes.figure.canvas.draw()
        given = Figure().subplots()
        assert report.plot(given) is given
    # It keeps figures, and may open windows.
    assert ("matplotlib.pyplot" in sys.modules) == imported


@pytest.mark.long
def test_the_plot_of_sensitivities_names_every_format(model, batch):
    pytest.importorskip("matplotlib")
    report = analysis.sensitivity(model, squared_distance, batch, ("int2", "nf4", "int8"))
    axes = report.plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["Int2()", "NF4()", "Int8()"]
    assert axes.get_xscale() == "log"
    dots = [collection.get_offsets() for collection in axes.collections]
    expected = [[leaf.losses[n] - report.loss for leaf in report.leaves] for n in range(3)]
    for offsets, increases in zip(dots, expected, strict=True):
        close(offsets[:, 0], increases, 1e-6)
        assert offsets[:, 1].tolist() == list(range(7))
    # What does not harm has no place on such an axis.
    harmless = SensitivityReport(1.0, tuple(dataclasses.replace(r, losses=(1.0,) * 3) for r in report.leaves))
    harmless.plot().figure.canvas.draw()


def test_number_of_histogram_bins(model, batch):
    pytest.importorskip("matplotlib")
    report = analysis.output_divergence(model, eqq.quantize_tree(model, "nf4"), batch[0])
    assert len(report.plot().patches) == 8
    w = weights(jr.key(0), (300, 300))
    assert len(analysis.analyze_error(w, eqq.quantize(w)).plot().patches) == 200


def test_names_of_many_rows_do_not_collide(model):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    leaf = analysis.analyze_tree(model).leaves[0]
    report = TreeErrorReport((leaf,) * 200)
    assert len(report.plot().get_yticks()) == 200
    assert 5 < len(report.plot(Figure(figsize=(4, 3)).subplots()).get_yticks()) < 30


@pytest.mark.long
def test_methods(model, batch):
    by_mse = eqq.QuantConfig("int4", eqq.MSE())
    report = analysis.analyze_tree(model, "int4", method=eqq.MSE())
    assert report.leaves == analysis.analyze_tree(model, {"*": by_mse}).leaves
    assert report.sqnr_db > analysis.analyze_tree(model, "int4").sqnr_db + 0.3
    assert analysis.sensitivity(model, squared_distance, batch, "int4", method=eqq.MSE()) == (
        analysis.sensitivity(model, squared_distance, batch, (by_mse,))
    )
    w = model.layers[0].up.weight
    rows = analysis.compare_formats(w, ("int4", eqq.QuantConfig("int4", eqq.HQQ())), method=eqq.MSE()).rows
    assert rows[0] == run_benchmark(w, "int4", method=eqq.MSE()) and rows[0].name == "Int4() by MSE()"
    assert rows[1] == run_benchmark(w, eqq.QuantConfig("int4", eqq.HQQ()))
    best = reference.outlier_impact(w, 95, "int4", method=eqq.MSE())
    assert best.mse < reference.outlier_impact(w, 95, "int4").mse


def test_plots_without_matplotlib(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'`plot` needs Matplotlib.*Run `pip install "eqquant\[plot\]"`'):
        analysis.analyze_tree(model).plot()


#
# Mistakes
#


def test_bad_trees(model, batch):
    broken = eqx.tree_at(lambda m: m.layers[0].up.weight, model, replace_fn=lambda w: w.at[0, 0].set(jnp.nan))
    for call in (
        lambda: analysis.analyze_tree(broken),
        lambda: analysis.sensitivity(broken, lambda m, b: jnp.zeros(()), batch),
    ):
        with pytest.raises(ValueError, match="layers.0.up.weight.*must be finite"):
            call()
    quantized = eqq.quantize_tree(model)
    with pytest.raises(ValueError, match="`quantized` must hold a quantized array"):
        analysis.compare_trees(quantized, model)
    with pytest.raises(ValueError, match="`quantized` must have the leaves of `model`"):
        analysis.compare_trees(model.layers[0], quantized)


def test_bad_batches_and_losses(model, batch):
    empty = (jnp.zeros((0, 32)), jnp.zeros((0, 10)))
    for call in (
        lambda b: analysis.sensitivity(model, squared_distance, b),
        lambda b: analysis.output_divergence(model, model, b),
    ):
        for bad in (empty, ()):
            with pytest.raises(ValueError, match="`batch` must hold at least one example"):
                call(bad)
    with pytest.raises(ValueError, match=r"`loss` must return one finite number. Got shape \(16,\)"):
        analysis.sensitivity(model, lambda m, b: jnp.zeros(16), batch)
    with pytest.raises(ValueError, match="Got nan with the model as it is"):
        analysis.sensitivity(model, lambda m, b: jnp.full((), jnp.nan), batch)
    with pytest.raises(ValueError, match="`formats` must name at least one format"):
        analysis.sensitivity(model, squared_distance, batch, ())
    with pytest.raises(ValueError, match="`apply` must return arrays of one shape"):
        analysis.output_divergence(model, model, batch[0], apply=lambda m, b: jnp.zeros(()))
    with pytest.raises(ValueError, match="The outputs must be finite. Got 3 of `model`"):
        analysis.output_divergence(model, model, batch[0], apply=lambda m, b: jnp.full((1, 3), jnp.nan))


def test_bad_plans(model, batch):
    report = analysis.sensitivity(model, squared_distance, batch, ("nf4", "int8"))
    with pytest.raises(ValueError, match="`target_bits` must be within reach.*from 4.756 to 32.000 bits.*Got 3"):
        analysis.plan_bits(model, report, 3)
    with pytest.raises(ValueError, match="Got layers.0.up.weight, which is none of its float arrays"):
        analysis.plan_bits(model.layers[3], report)
    larger = eqx.tree_at(lambda m: m.layers[0].up.weight, model, replace_fn=lambda w: jnp.zeros((64, 33)))
    with pytest.raises(ValueError, match=r"in the model it has shape \(64, 33\)"):
        analysis.plan_bits(larger, report)


def test_names_of_leaves_are_not_parsed_as_markup():
    model = {name: weights(jr.key(1), (4, 64)) for name in ("[bold]a", "[/x]")}
    x = weights(jr.key(2), (8, 64))
    loss = lambda model, x: sum(jnp.mean((x @ w.T) ** 2) for w in model.values())
    report = analysis.sensitivity(model, loss, x, "int4")
    shown = (eqq.plan_tree(model), analysis.analyze_tree(model), report, analysis.plan_bits(model, report, 5))
    for table in shown:
        assert "[bold]a" in str(table) and "[/x]" in str(table)


X = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)


def test_a_loss_must_use_its_model():
    model, x = {"w": weights(jr.key(0), (4, 64))}, jnp.ones(64)
    with pytest.raises(ValueError, match="`loss` must use the model that it is given. Got the same value"):
        analysis.sensitivity(model, lambda _, x: jnp.sum(model["w"] @ x), x, ("int8",))
    report = analysis.sensitivity(model, lambda m, x: jnp.sum(m["w"] > -100), x, ("int8",))
    assert report.leaves[0].losses == (report.loss,)  # that rounding changes nothing is no error


@pytest.mark.parametrize("value", [None, {"loss": 1.0}, np.ones(2), 1j])
def test_a_loss_must_be_a_number(model, value):
    with pytest.raises(ValueError, match="`loss` must return one finite number"):
        analysis.sensitivity(model, lambda model, x: value, X)


def test_a_budget_must_be_finite(model):
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    report = analysis.sensitivity(model, loss, X, "int4")
    for target in (math.inf, math.nan):
        with pytest.raises(ValueError, match="`target_bits` must be finite"):
            analysis.plan_bits(model, report, target)
