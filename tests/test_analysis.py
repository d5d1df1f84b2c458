"""What quantization costs: errors, sensitivities, plans, benchmarks, and how they are shown."""

import itertools as it
import json
import math
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqquant as eqq
from eqquant import analysis
from eqquant.analysis._knapsack import choose

from .helpers import FORMATS, sqnr, weights


GOLDEN = json.loads((Path(__file__).parent / "golden" / "analysis.json").read_text())
# The reference computes in float32 throughout, sums included; ours are float64.
RTOL = 1e-4


def close(actual, expected, rtol=RTOL):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-12)


def sin(n, step=0.1):
    return np.sin(np.arange(n, dtype=np.float32) * np.float32(step))


def like_the_reference(bits, block_size="tensor", symmetric=True):
    return analysis.integer_format(bits, block_size=block_size, symmetric=symmetric, rounding="away")


#
# Against the reference
#


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers(bits, symmetric):
    golden = GOLDEN[f"per_tensor_t6_{'' if symmetric else 'a'}sym{bits}"]
    q = eqq.quantize(np.array([1, -2, 3, -4, 5, -5], np.float32), like_the_reference(bits, symmetric=symmetric))
    close(q.scale, golden["params"]["scales"], 1e-6)
    offset = 2 ** (bits - 1) if symmetric else 128  # the reference stores affine codes as signed bytes
    assert (eqq.unpack(q).astype(jnp.int32) - offset).tolist() == golden["q"]
    if not symmetric:
        assert q.zero_point.tolist() == golden["params"]["zero_points"]
    if "deq" in golden:
        close(q.dequantize(), golden["deq"], 1e-6)


def test_ties():
    golden = GOLDEN["ties_sym4"]
    q = eqq.quantize(np.array(golden["x"], np.float32), like_the_reference(4))
    assert (eqq.unpack(q).astype(jnp.int32) - 8).tolist() == golden["q"]
    even = eqq.quantize(np.array(golden["x"], np.float32), analysis.integer_format(4))
    assert (eqq.unpack(even).astype(jnp.int32) - 8).tolist() == [7, 0, 2, 2, 0, -2, -2, 3, 4]


def test_groups():
    golden = GOLDEN["per_group10_sin100_sym8"]
    q = eqq.quantize(sin(100), like_the_reference(8, 10))
    close(q.scale, golden["params"]["scales"], 1e-6)
    close(analysis.quantization_mse(sin(100), q), golden["mse"])
    golden = GOLDEN["q4bit_sin200"]  # a last group of 8
    q = eqq.quantize(sin(200), like_the_reference(4, 64))
    close(q.scale, golden["scales"], 1e-6)
    close(analysis.quantization_mse(sin(200), q), golden["mse"])
    golden = GOLDEN["q4bit_v8"]
    q = eqq.quantize(np.array(golden["x"], np.float32), like_the_reference(4, 64))
    # 2.1 / 0.6 is a tie, up to the last bit of the scale: XLA divides by seven as a product with a seventh.
    untied = np.arange(8) != 6
    close(q.dequantize()[untied], np.array(golden["deq"])[untied], 1e-6)
    for bits in (4, 8):
        error = analysis.analyze_error(sin(128), eqq.quantize(sin(128), like_the_reference(bits, 32)))
        close(error.mse, GOLDEN["gguf_sin128"][f"q{bits}_mse"])
        close(error.mae * 128, GOLDEN["gguf_sin128"][f"q{bits}_sum_abs"])


@pytest.mark.parametrize("bits, symmetric", [(4, True), (8, True), (8, False)])
def test_errors_of_one_array(bits, symmetric):
    golden = GOLDEN[f"analyze_sin100_{'' if symmetric else 'a'}sym{bits}_thr0.01"]
    q = eqq.quantize(sin(100), like_the_reference(bits, symmetric=symmetric))
    error = analysis.analyze_error(sin(100), q, threshold=0.01)
    for name in ("mse", "mae", "max_error", "sqnr_db", "outlier_rate"):
        close(getattr(error, name), golden[name])
    assert error.size == 100


def test_theory():
    close([analysis.theoretical_sqnr(b, "sine") for b in (2, 3, 4, 8)], GOLDEN["theoretical_sqnr"], 1e-6)
    for bits in (4, 8):
        q = eqq.quantize(sin(100), like_the_reference(bits))
        close(analysis.theoretical_max_error(q), GOLDEN[f"theoretical_max_error_sin100_{bits}"], 1e-6)
        assert analysis.error_within_bounds(sin(100), q)


@pytest.mark.parametrize("bits, change", [(4, 0.1), (8, 0.1), (8, -0.1)])
def test_scale_sensitivity(bits, change):
    report = analysis.scale_sensitivity(sin(100), eqq.quantize(sin(100), like_the_reference(bits)), change)
    golden = GOLDEN[f"scale_sensitivity_sin100_{bits}_{change}"]
    close([report.mse, report.changed_mse, report.sensitivity], golden, 2e-4)


@pytest.mark.parametrize("percentile", [95, 98, 99])
def test_outlier_impact(percentile):
    x = np.concatenate([sin(100, 0.01), np.array([100, -100], np.float32)])
    report = analysis.outlier_impact(x, percentile, like_the_reference(8))
    close([report.mse, report.clipped_mse, report.ratio], GOLDEN[f"outlier_impact_{percentile}"], 2e-4)
    assert report.total_mse >= report.clipped_mse


def test_comparisons():
    x = np.array([0.01, 0.02, -0.01, -0.02, 100, 200, -100, -200], np.float32).reshape(2, 4)
    report = analysis.compare_granularities(x, 8, group_size=2, rounding="away")
    close([report["tensor"].error.mse, report["channel"].error.mse], GOLDEN["compare_granularities_tiny_huge"])
    report = analysis.compare_bit_widths(sin(100), rounding="away")
    close(report["4 bits"].error.mse / report["8 bits"].error.mse, GOLDEN["compare_bit_widths_sin100"]["ratio"])
    rows = analysis.bit_width_degradation(sin(100), (4, 8), rounding="away").rows
    assert [(row.bits, row.compression) for row in rows] == [(4, 8.0), (8, 4.0)]
    close([rows[0].mse, rows[1].mse], [report[name].error.mse for name in ("4 bits", "8 bits")])


def test_accuracy_retention():
    for before, after in ((0, 0), (0.01, 0.02), (0.02, 0.01), (1, 1)):
        close(analysis.accuracy_retention(before, after), GOLDEN[f"accuracy_retention({before},{after})"], 1e-6)


def test_repeatable_generators():
    golden, x = GOLDEN["gaussian_1000_seed42"], analysis.lcg_gaussian(1000, seed=42)
    close(x[:8], golden["first8"], 1e-5)
    close([x.mean(), x.std(), np.abs(x).max()], [golden["mean"], golden["std"], golden["absmax"]], 1e-5)
    for bits, mse in GOLDEN["gaussian_1000_seed42_mse"].items():
        close(analysis.run_benchmark(x, like_the_reference(int(bits))).error.mse, mse)
    close(analysis.lcg_uniform(1000, seed=43)[:4], GOLDEN["uniform_1000_seed43_first4"], 1e-6)
    golden, x = GOLDEN["outliers_1000_seed44"], analysis.lcg_outliers(1000, seed=44)
    close(x[:4], golden["first4"], 1e-5)
    places = np.flatnonzero(np.abs(x) == 10)
    assert [int(n * np.sign(x[n])) for n in places] == golden["idx"]
    x = analysis.lcg_channels(16, 64, seed=45).ravel()
    close([*x[:4], *x[-4:]], GOLDEN["multi_channel_16x64_seed45_first4_last4"], 1e-5)
    assert x.dtype == np.float32


def test_one_benchmark():
    golden = GOLDEN["run_benchmark_gauss1000_pertensor8"]
    row = analysis.run_benchmark(analysis.lcg_gaussian(1000, seed=42), like_the_reference(8))
    close([row.error.mse, row.error.max_error], [golden["mse"], golden["max_error"]])
    close([row.error.sqnr_db, row.compression], [golden["sqnr"], golden["ratio"]], 1e-6)


@pytest.mark.parametrize("size", [256, 4096, 65536])
def test_suite(size):
    golden, report = GOLDEN[f"suite_{size}"], analysis.run_suite(size)
    names = {}
    for row, expected in zip(report.rows, golden["rows"], strict=False):
        names[expected["name"]] = row.name
        actual = [row.error.mse, row.error.max_error, row.error.sqnr_db, row.compression, row.quality]
        close(actual, [expected[k] for k in ("mse", "max_error", "sqnr_db", "compression", "quality")])
        assert row.error.size == expected["n"]
    integers = analysis.Comparison(report.rows[:11])
    assert integers.best_by_sqnr.name == names[golden["best_by_sqnr"]]
    assert integers.best_by_mse.name == names[golden["best_by_mse"]]
    assert integers.best_by_quality.name == names[golden["top_quality"]]
    assert len(report.rows) == 27 and report["gaussian, NF4()"].format == eqq.NF4()


#
# Where the reference is wrong
#


def test_small_magnitudes(getkey):
    w = np.asarray(weights(getkey(), (64,)))
    for factor in (2.0**-60, 1.0, 2.0**60):
        error = analysis.analyze_error(w * np.float32(factor), eqq.quantize(w * np.float32(factor), "int8"))
        close(error.sqnr_db, sqnr(w, eqq.quantize(w, "int8").dequantize()), 1e-6)


def test_a_ragged_last_group(getkey):
    x = np.asarray(weights(getkey(), (1000,)))
    report = analysis.compare_granularities(x, 8, group_size=32)
    assert report["group"].error.mse < report["tensor"].error.mse
    tail = eqq.quantize(x, analysis.integer_format(8, block_size=32)).dequantize()[-8:]
    close(tail, eqq.quantize(x[-8:], analysis.integer_format(8)).dequantize(), 1e-6)


def test_all_positive_values():
    x = np.linspace(10, 13, 64, dtype=np.float32)
    q = eqq.quantize(x, like_the_reference(8, symmetric=False))
    assert analysis.analyze_error(x, q).max_error < 13 / 255


#
# Errors and theory
#


@pytest.mark.parametrize("name", FORMATS)
def test_analyze_error(name, getkey):
    w = weights(getkey(), (24, 130))
    q = eqq.quantize(w, FORMATS[name].format)
    error = analysis.analyze_error(w, q)
    a, b = np.asarray(w, np.float64), np.asarray(q.dequantize(), np.float64)
    close(error.mse, ((a - b) ** 2).mean(), 1e-9)
    close([error.rmse, error.mae], [math.sqrt(error.mse), np.abs(a - b).mean()], 1e-9)
    close([error.max_error, error.sqnr_db], [np.abs(a - b).max(), sqnr(a, b)], 1e-9)
    close(error.relative_l2, np.linalg.norm(a - b) / np.linalg.norm(a), 1e-9)
    close(error.cosine, (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b), 1e-9)
    close(error.outlier_rate, (np.abs(a - b) > 0.1 * math.sqrt((a**2).mean())).mean(), 1e-9)


@pytest.mark.parametrize("name", ["int8", "int8_affine", "int4", "int4_affine", "int2_affine", "nf4", "nf4_channel"])
def test_bounds(name, getkey):
    w = weights(getkey(), (24, 130))
    q = eqq.quantize(w, FORMATS[name].format)
    assert analysis.error_within_bounds(w, q, 1e-4)
    assert not analysis.error_within_bounds(w + 100, q)


def test_many_values_are_summed_in_pieces(getkey):
    x = np.asarray(weights(getkey(), (700, 600)))
    close(analysis.quantization_mse(x, x * np.float32(0.5)), 0.25 * np.mean(np.float64(x) ** 2), 1e-6)


def test_an_exact_copy_and_zeros():
    w, zeros = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
    error = analysis.analyze_error(w, w)
    assert (error.mse, error.sqnr_db, error.relative_l2, error.cosine) == (0, math.inf, 0, 1)
    error = analysis.analyze_error(zeros, zeros)
    assert (error.sqnr_db, error.relative_l2, error.cosine) == (math.inf, 0, 1)
    error = analysis.analyze_error(zeros, w)
    assert (error.sqnr_db, error.relative_l2, error.cosine) == (-math.inf, math.inf, 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(dtype, getkey):
    w = weights(getkey(), (8, 64), dtype)
    assert 15 < analysis.analyze_error(w, eqq.quantize(w)).sqnr_db < 25


def test_uniform_values_reach_the_theory(getkey):
    x = analysis.uniform_weights(getkey(), (100_000,))
    for bits in range(4, 9):
        report = analysis.compare_bit_widths(x, (bits,))
        # The middle code of 2**bits is missing from symmetric integers.
        missing = 20 * math.log10(2**bits / (2**bits - 2))
        assert abs(report.rows[0].error.sqnr_db - analysis.theoretical_sqnr(bits) + missing) < 0.1


def test_each_bit_is_worth_six_decibels(getkey):
    rows = analysis.bit_width_degradation(analysis.gaussian_weights(getkey(), (1 << 16,))).rows
    lost = np.diff([row.sqnr_db for row in rows][2:])
    assert (abs(lost - 6.02) < 1).all() and rows[-1].lost_db == 0


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_integer_formats(bits, symmetric, getkey):
    w = weights(getkey(), (16, 130))
    for size in (None, 32, "tensor"):
        ours = analysis.integer_format(bits, block_size=size, symmetric=symmetric)
        away = analysis.integer_format(bits, block_size=size, symmetric=symmetric, rounding="away")
        a, b = eqq.quantize(w, ours), eqq.quantize(w, away)
        if type(ours) in (eqq.Int8, eqq.Int4, eqq.Int2):
            np.testing.assert_array_equal(a.dequantize(), b.dequantize())
        assert len(np.unique(eqq.unpack(b))) <= 2**bits
        row = analysis.run_benchmark(w, away)
        blocks = {None: 1, "tensor": 1, 32: 5}[size]
        packed = math.ceil(130 * bits / 8) * 8
        close(row.bits, (packed + blocks * (32 if symmetric else 40)) / 130)
    assert eval(repr(away), {"integer_format": analysis.integer_format}) == away


def test_random_weights(getkey):
    x = analysis.outlier_weights(getkey(), (200, 200), rate=0.05, magnitude=30)
    assert abs((jnp.abs(x) == 30).mean() - 0.05) < 0.01
    x = analysis.channel_weights(getkey(), (4, 20_000), spread=4)
    np.testing.assert_allclose(x.std(axis=1), [1, 2, 3, 4], rtol=0.03)
    x = analysis.gaussian_weights(getkey(), (20_000,), 2, 3)
    assert abs(x.mean() - 2) < 0.1 and abs(x.std() - 3) < 0.1
    x = analysis.uniform_weights(getkey(), (1000,), 2, 3)
    assert 2 <= x.min() < x.max() < 3


def test_compare_formats(getkey):
    report = analysis.compare_formats(weights(getkey(), (32, 256)))
    assert report.best_by_sqnr.format.bits == report.best_by_mse.format.bits == 8
    assert report["NF4()"].bits == 4.5
    assert report["Binary()"].error.mse > report["Int8()"].error.mse
    assert len(analysis.compare_formats(sin(64), ("nf4", eqq.Int4(block_size=32))).rows) == 2


#
# Models
#


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
    return x, jax.vmap(model)(x)


def test_analyze_tree(model):
    report = analysis.analyze_tree(model, {"*down*": "int8", "*": "nf4"})
    assert [leaf.path for leaf in report.leaves][:2] == ["layers.0.up.weight", "layers.0.down.weight"]
    assert len(report.leaves) == 7
    leaf = report.leaves[1]
    expected = analysis.analyze_error(model.layers[0].down.weight, eqq.quantize(model.layers[0].down.weight, "int8"))
    assert leaf.error == expected and leaf.format == eqq.Int8() and leaf.bits == 8.5
    pairs = zip(jtu.tree_leaves(model), jtu.tree_leaves(eqq.dequantize_tree(eqq.quantize_tree(model, "nf4"))))
    joined = [np.concatenate([np.ravel(x) for x, y in pairs if (x != y).any()]) for pairs in [list(pairs)]]
    report = analysis.analyze_tree(model, "nf4")
    assert report.leaves and sum(leaf.error.size for leaf in report.leaves) == joined[0].size
    close(report.bits, eqq.plan_tree(eqx.filter(model, lambda x: eqx.is_array(x) and x.ndim > 1), "nf4").bits)
    one = analysis.analyze_tree(model, "nf4", where=lambda m: m.layers[3].bias, axis=-1)
    assert [leaf.path for leaf in one.leaves] == ["layers.3.bias"]
    close(one.sqnr_db, one.leaves[0].error.sqnr_db, 1e-9)


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
    quantized = eqq.quantize_tree(model, plan)
    size = sum(math.prod(leaf.shape) for leaf in report.leaves)
    found = [leaf for leaf in eqq.summary(quantized).leaves if leaf.path in plan]
    close(8 * sum(leaf.nbytes for leaf in found) / size, plan.bits, 1e-9)
    assert plan.bits <= target
    uniform = [
        sum(leaf.losses[n] for leaf in report.leaves)
        for n in range(len(formats))
        if 8 * sum(leaf.nbytes[n] for leaf in report.leaves) <= target * size
    ]
    assert plan.increase <= min(uniform, default=math.inf) + 1e-6
    if target == 40:
        assert set(plan.values()) == {None} and plan.increase == 0
    if target == 4.5:
        distance = {
            name: float(squared_distance(eqq.dequantize_tree(eqq.quantize_tree(model, p)), batch))
            for name, p in (("plan", plan), ("nf4", "nf4"))
        }
        assert distance["plan"] <= distance["nf4"]


def test_paths_with_brackets(getkey):
    model = {"w[0]": weights(getkey(), (32, 32)), "w0": weights(getkey(), (32, 32)), "*": weights(getkey(), (32, 32))}
    loss = lambda m, x: sum(jnp.mean((x @ w) ** 2) for w in m.values())
    report = analysis.sensitivity(model, loss, jnp.ones((1, 32)), ("nf4",))
    leaves = tuple(
        analysis.LeafSensitivity(leaf.paths, leaf.shape, leaf.dense_nbytes, leaf.formats, leaf.nbytes, (loss,))
        for leaf, loss in zip(report.leaves, (0.0, 5.0, 5.0), strict=True)  # "*", "w0", "w[0]"
    )
    plan = analysis.plan_bits(model, analysis.SensitivityReport(0.0, leaves), 25)
    quantized = eqq.quantize_tree(model, plan)
    kinds = {path: eqq.is_quantized(w) for path, w in quantized.items()}
    assert kinds == {"*": True, "w0": False, "w[0]": False}


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
    chosen = choose(costs, losses, budget)
    assert sum(c[n] for c, n in zip(costs, chosen)) <= budget
    assert sum(l[n] for l, n in zip(losses, chosen)) == min(loss for cost, loss in mixes if cost <= budget)


def test_knapsack_of_large_costs():
    rng = np.random.default_rng(0)
    costs = [np.sort(rng.integers(1, 10**9, 6)) for _ in range(40)]
    losses = [np.sort(rng.exponential(size=6))[::-1].copy() for _ in range(40)]
    budget = sum(int(c[2]) for c in costs)
    chosen = choose(costs, losses, budget)
    assert sum(int(c[n]) for c, n in zip(costs, chosen)) <= budget
    # The Lagrangian is a lower bound of what any choice can reach.
    loss = sum(l[n] for l, n in zip(losses, chosen))
    bound = max(
        sum((l + m * c).min() for c, l in zip(costs, losses)) - m * budget for m in np.geomspace(1e-12, 1e-6, 400)
    )
    assert bound <= loss <= bound + 0.02 * sum(l[2] for l in losses)


def test_output_divergence(model, batch):
    x, _ = batch
    same = analysis.output_divergence(model, model, x)
    assert (same.outputs, same.kl, same.top1, same.relative_l2) == (16, 0, 1, 0) and abs(same.cosine - 1) < 1e-6
    reports = [analysis.output_divergence(model, eqq.quantize_tree(model, f), x) for f in ("int8", "nf4", "int2")]
    assert reports[0].kl < reports[1].kl < reports[2].kl
    assert reports[0].cosine > reports[1].cosine > reports[2].cosine
    p, q = (jax.nn.softmax(jax.vmap(m)(x)) for m in (model, eqq.quantize_tree(model, "nf4")))
    close(reports[1].kl, jnp.sum(p * jnp.log(p / q), axis=-1).mean(), 1e-3)
    close(reports[1].top1, (p.argmax(-1) == q.argmax(-1)).mean())
    applied = analysis.output_divergence(model, model, (x, 2), apply=lambda m, b: jax.vmap(m)(b[0]) * b[1])
    assert applied.kl == 0


#
# Shown
#


def reports(model, batch):
    w = model.layers[0].up.weight
    sensitivity = analysis.sensitivity(model, squared_distance, batch, ("int2", "int8"))
    return [
        analysis.analyze_error(w, eqq.quantize(w)),
        analysis.analyze_error(w, eqq.quantize(w, eqq.Int4(symmetric=False))),
        analysis.analyze_error(w, w.round(1)),
        analysis.compare_formats(w),
        analysis.bit_width_degradation(w),
        analysis.analyze_tree(model, "int4"),
        sensitivity,
        analysis.plan_bits(model, sensitivity, 5),
        analysis.output_divergence(model, eqq.quantize_tree(model, "nf4"), batch[0]),
    ]


def test_shown(model, batch):
    w = model.layers[0].up.weight
    others = [analysis.scale_sensitivity(w, eqq.quantize(w)), analysis.outlier_impact(w)]
    for report in reports(model, batch) + others:
        assert isinstance(report, analysis.Report)
        assert str(report).startswith(("┏", " ")) and repr(report) == str(report)
        assert "…" not in str(report)
        assert json.loads(report.to_json()).keys() == report.to_dict().keys()
    assert json.loads(analysis.analyze_error(w, w).to_json())["sqnr_db"] is None
    assert "39" not in str(reports(model, batch)[-2]) and "layers.0.up.weight" in str(reports(model, batch)[-2])


def test_plots(model, batch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for report in reports(model, batch):
        axes = report.plot()
        assert axes.get_xlabel()
        axes.figure.canvas.draw()
        given = plt.subplots()[1]
        assert report.plot(given) is given
        plt.close("all")


def test_plots_without_matplotlib(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="`plot` needs Matplotlib.*Run `pip install matplotlib`"):
        analysis.analyze_tree(model).plot()


#
# Mistakes
#


def test_bad_arrays(getkey):
    w = weights(getkey(), (4, 8))
    with pytest.raises(ValueError, match=r"`x` and `q` must have the same shape. Got \(4, 8\) and \(8, 4\)"):
        analysis.analyze_error(w, w.T)
    with pytest.raises(ValueError, match="`x` must be finite. Got 1 of 32 values that are not"):
        analysis.analyze_error(w.at[0, 0].set(jnp.nan), w)
    with pytest.raises(ValueError, match="`q` must be finite. Got 2 of 32 values"):
        analysis.analyze_error(w, w.at[0, :2].set(jnp.inf))
    with pytest.raises(ValueError, match="`x` must hold at least one value"):
        analysis.analyze_error(jnp.zeros((0, 3)), jnp.zeros((0, 3)))
    with pytest.raises(TypeError, match="`q` must be a floating point array. Got dtype int32"):
        analysis.analyze_error(w, jnp.ones((4, 8), jnp.int32))
    with pytest.raises(ValueError, match="`x` must be finite"):
        analysis.outlier_impact(w.at[0, 0].set(jnp.nan))


def test_bad_numbers(getkey):
    w = weights(getkey(), (4, 8))
    with pytest.raises(ValueError, match="`group_size` must be from 1 to the length of the axis, 8. Got 16"):
        analysis.compare_granularities(w, group_size=16)
    for bits in (1, 9):
        with pytest.raises(ValueError, match=f"`bits` must be from 2 to 8. Got {bits}"):
            analysis.integer_format(bits)
    with pytest.raises(ValueError, match="`bits` must be at least 1"):
        analysis.theoretical_sqnr(0)
    for change in (0, -1, math.nan):
        with pytest.raises(ValueError, match="`change` must be above -1 and not zero"):
            analysis.scale_sensitivity(w, eqq.quantize(w), change)
    for percentile in (0, 100):
        with pytest.raises(ValueError, match="`percentile` must be between 0 and 100"):
            analysis.outlier_impact(w, percentile)
    with pytest.raises(ValueError, match="must not be negative. Got -1 and 2"):
        analysis.accuracy_retention(-1, 2)
    with pytest.raises(ValueError, match="`size` must be at least 256"):
        analysis.run_suite(100)
    with pytest.raises(ValueError, match="`formats` must name at least one format"):
        analysis.compare_formats(w, ())
    with pytest.raises(ValueError, match="`bits` must name at least one width"):
        analysis.compare_bit_widths(w, ())
    with pytest.raises(KeyError, match="Got '3 bits'. There are 4 bits, 8 bits"):
        analysis.compare_bit_widths(w)["3 bits"]
    with pytest.raises(ValueError, match="`plot` needs the values"):
        analysis.analyze_tree([w]).leaves[0].error.plot()


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
    with pytest.raises(ValueError, match="`target_bits` must be within reach.*from 4.500 to 32.000 bits.*Got 3"):
        analysis.plan_bits(model, report, 3)
    with pytest.raises(ValueError, match="Got layers.0.up.weight, which is none of its leaves"):
        analysis.plan_bits(model.layers[3], report)
    larger = eqx.tree_at(lambda m: m.layers[0].up.weight, model, replace_fn=lambda w: jnp.zeros((64, 33)))
    with pytest.raises(ValueError, match=r"in the model it has shape \(64, 33\)"):
        analysis.plan_bits(larger, report)
