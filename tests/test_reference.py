"""The figures of reference systems: integers of any width, generators, the benchmark suite and theory."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import eqquant as eqq
from eqquant import analysis, reference
from eqquant._numerics.packing import packed_length
from eqquant.analysis._comparison import run_benchmark

from .helpers import FORMATS, weights


GOLDEN = json.loads((Path(__file__).parent / "golden" / "analysis.json").read_text())
# The reference computes in float32 throughout, sums included; ours are float64.
RTOL = 1e-4


def close(actual, expected, rtol=RTOL):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-12)


def sin(n, step=0.1):
    return np.sin(np.arange(n, dtype=np.float32) * np.float32(step))


def like_the_reference(bits, block_size="tensor", symmetric=True):
    return reference.integer_format(bits, block_size=block_size, symmetric=symmetric, rounding="half_away")


@pytest.mark.long
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
    even = eqq.quantize(np.array(golden["x"], np.float32), reference.integer_format(4))
    assert (eqq.unpack(even).astype(jnp.int32) - 8).tolist() == [7, 0, 2, 2, 0, -2, -2, 3, 4]


@pytest.mark.long
def test_groups():
    golden = GOLDEN["per_group10_sin100_sym8"]
    q = eqq.quantize(sin(100), like_the_reference(8, 10))
    close(q.scale, golden["params"]["scales"], 1e-6)
    close(analysis.analyze_error(sin(100), q).mse, golden["mse"])
    golden = GOLDEN["q4bit_sin200"]  # a last group of 8
    q = eqq.quantize(sin(200), like_the_reference(4, 64))
    close(q.scale, golden["scales"], 1e-6)
    nibbles = np.frombuffer(bytes.fromhex(golden["data"]), np.uint8)  # the first of two in the high half, signed
    assert (eqq.unpack(q) ^ 8).tolist() == np.stack([nibbles >> 4, nibbles & 15], axis=1).ravel().tolist()
    close(analysis.analyze_error(sin(200), q).mse, golden["mse"])
    golden = GOLDEN["q4bit_v8"]
    q = eqq.quantize(np.array(golden["x"], np.float32), like_the_reference(4, 64))
    # 2.1 / 0.6 is a tie, up to the last bit of the scale: XLA divides by seven as a product with a seventh.
    untied = np.arange(8) != 6
    close(q.dequantize()[untied], np.array(golden["deq"])[untied], 1e-6)
    q = eqq.quantize(np.zeros(64, np.float32), like_the_reference(4, 64))
    assert q.scale.tolist() == GOLDEN["q4bit_zeros64"]["scales"] and not q.dequantize().any()
    row = run_benchmark(np.ones(1024, np.float32), like_the_reference(4, 64))
    close([row.bits * 128, row.compression], [GOLDEN["q4bit_ones1024"][k] for k in ("bytes", "ratio")], 1e-6)
    for bits in (4, 8):
        error = analysis.analyze_error(sin(128), eqq.quantize(sin(128), like_the_reference(bits, 32)))
        close(error.mse, GOLDEN["gguf_sin128"][f"q{bits}_mse"])
        close(error.mae * 128, GOLDEN["gguf_sin128"][f"q{bits}_sum_abs"])


@pytest.mark.parametrize(
    "name, x",
    {
        "g8": [0, 1, -1, 0.5, -0.5, 2, -2, 1.5],
        "sin32": sin(32),
        "neg1..8": -np.arange(1, 9),
        "sin50": np.arange(50) * np.float32(0.1),
    }.items(),
)
def test_eight_bits_in_groups_of_32(name, x):
    golden = GOLDEN[f"Q8_0_{name}"]
    q = eqq.quantize(np.asarray(x, np.float32), like_the_reference(8, 32))
    close(q.scale, golden["scales"], 1e-6)
    close(q.dequantize(), golden["deq"], 1e-6)
    assert (eqq.unpack(q).astype(jnp.int32) - 128).tolist() == list(memoryview(bytes.fromhex(golden["data"])).cast("b"))


@pytest.mark.parametrize("bits, symmetric", [(4, True), (8, True), (8, False)])
def test_errors_of_one_array(bits, symmetric):
    golden = GOLDEN[f"analyze_sin100_{'' if symmetric else 'a'}sym{bits}_thr0.01"]
    q = eqq.quantize(sin(100), like_the_reference(bits, symmetric=symmetric))
    error = analysis.analyze_error(sin(100), q, threshold=0.01)
    for name in ("mse", "mae", "max_error", "sqnr_db", "outlier_rate"):
        close(getattr(error, name), golden[name])
    assert error.size == 100


def test_theory():
    close([reference.theoretical_sqnr(b, "sine") for b in (2, 3, 4, 8)], GOLDEN["theoretical_sqnr"], 1e-6)
    for bits in (4, 8):
        q = eqq.quantize(sin(100), like_the_reference(bits))
        close(reference.theoretical_max_error(q), GOLDEN[f"theoretical_max_error_sin100_{bits}"], 1e-6)
        assert analysis.analyze_error(sin(100), q).max_error <= 1.01 * reference.theoretical_max_error(q)


@pytest.mark.parametrize("bits, change", [(4, 0.1), (8, 0.1), (8, -0.1)])
def test_scale_sensitivity(bits, change):
    report = reference.scale_sensitivity(sin(100), eqq.quantize(sin(100), like_the_reference(bits)), change)
    golden = GOLDEN[f"scale_sensitivity_sin100_{bits}_{change}"]
    close([report.mse, report.changed_mse, report.sensitivity], golden, 2e-4)


@pytest.mark.parametrize("percentile", [95, 98, 99])
def test_outlier_impact(percentile):
    x = np.concatenate([sin(100, 0.01), np.array([100, -100], np.float32)])
    report = reference.outlier_impact(x, percentile, like_the_reference(8))
    close([report.mse, report.clipped_mse, report.ratio], GOLDEN[f"outlier_impact_{percentile}"], 2e-4)
    assert report.total_mse >= report.clipped_mse


def test_comparisons():
    x = np.array([0.01, 0.02, -0.01, -0.02, 100, 200, -100, -200], np.float32).reshape(2, 4)
    tensor, channel = analysis.compare_formats(x, [like_the_reference(8, size) for size in ("tensor", None)]).rows
    close([tensor.error.mse, channel.error.mse], GOLDEN["compare_granularities_tiny_huge"])
    four, eight = analysis.compare_formats(sin(100), [like_the_reference(bits) for bits in (4, 8)]).rows
    close(four.error.mse / eight.error.mse, GOLDEN["compare_bit_widths_sin100"]["ratio"])


def test_accuracy_retention():
    for before, after in ((0, 0), (0.01, 0.02), (0.02, 0.01), (1, 1)):
        close(reference.accuracy_retention(before, after), GOLDEN[f"accuracy_retention({before},{after})"], 1e-6)


def test_repeatable_generators():
    golden, x = GOLDEN["gaussian_1000_seed42"], reference.lcg_gaussian(1000, seed=42)
    close(x[:8], golden["first8"], 1e-5)
    close([x.mean(), x.std(), np.abs(x).max()], [golden["mean"], golden["std"], golden["absmax"]], 1e-5)
    for bits, mse in GOLDEN["gaussian_1000_seed42_mse"].items():
        close(run_benchmark(x, like_the_reference(int(bits))).error.mse, mse)
    close(reference.lcg_uniform(1000, seed=43)[:4], GOLDEN["uniform_1000_seed43_first4"], 1e-6)
    golden, x = GOLDEN["outliers_1000_seed44"], reference.lcg_outliers(1000, seed=44)
    close(x[:4], golden["first4"], 1e-5)
    places = np.flatnonzero(np.abs(x) == 10)
    assert [int(n * np.sign(x[n])) for n in places] == golden["idx"]
    x = reference.lcg_channels(16, 64, seed=45).ravel()
    close([*x[:4], *x[-4:]], GOLDEN["multi_channel_16x64_seed45_first4_last4"], 1e-5)
    assert x.dtype == np.float32


def test_one_benchmark():
    golden = GOLDEN["run_benchmark_gauss1000_pertensor8"]
    row = run_benchmark(reference.lcg_gaussian(1000, seed=42), like_the_reference(8))
    close([row.error.mse, row.error.max_error], [golden["mse"], golden["max_error"]])
    close([row.error.sqnr_db, row.compression], [golden["sqnr"], golden["ratio"]], 1e-6)


@pytest.mark.parametrize("size", [256, 4096, 65536])
def test_integers_of_the_suite(size):
    golden, report = GOLDEN[f"suite_{size}"], reference.run_suite(size)
    names = {}
    for row, expected in zip(report.rows, golden["rows"], strict=True):
        names[expected["name"]] = row.name
        actual = [row.error.mse, row.error.max_error, row.error.sqnr_db, row.compression, row.quality]
        close(actual, [expected[k] for k in ("mse", "max_error", "sqnr_db", "compression", "quality")])
        assert row.error.size == expected["n"]
    assert report.best_by_sqnr.name == names[golden["best_by_sqnr"]]
    assert report.best_by_mse.name == names[golden["best_by_mse"]]
    assert report.best_by_quality.name == names[golden["top_quality"]]


def test_a_ragged_last_group(getkey):
    x = np.asarray(weights(getkey(), (1000,)))
    tail = eqq.quantize(x, reference.integer_format(8, block_size=32)).dequantize()[-8:]
    close(tail, eqq.quantize(x[-8:], reference.integer_format(8)).dequantize(), 1e-6)


def test_all_positive_values():
    x = np.linspace(10, 13, 64, dtype=np.float32)
    q = eqq.quantize(x, like_the_reference(8, symmetric=False))
    assert analysis.analyze_error(x, q).max_error < 13 / 255


@pytest.mark.long
def test_uniform_values_reach_the_theory(getkey):
    x = jr.uniform(getkey(), (100_000,), minval=-1.0)
    for bits in range(4, 9):
        row = run_benchmark(x, reference.integer_format(bits))
        # The middle code of 2**bits is missing from symmetric integers.
        missing = 20 * math.log10(2**bits / (2**bits - 2))
        assert abs(row.error.sqnr_db - reference.theoretical_sqnr(bits) + missing) < 0.1


def test_each_bit_is_worth_six_decibels(getkey):
    formats = [reference.integer_format(bits) for bits in range(4, 9)]
    report = analysis.compare_formats(weights(getkey(), (1 << 16,)), formats)
    gained = np.diff([row.error.sqnr_db for row in report.rows])
    assert (abs(gained - 6.02) < 1).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integer_formats(bits, symmetric, getkey):
    w = weights(getkey(), (16, 130))
    ours = reference.integer_format(bits, block_size=32, symmetric=symmetric)
    away = reference.integer_format(bits, block_size=32, symmetric=symmetric, rounding="half_away")
    a, b = eqq.quantize(w, ours), eqq.quantize(w, away)
    if type(ours) in (eqq.Int8, eqq.Int4, eqq.Int3, eqq.Int2):
        np.testing.assert_array_equal(a.dequantize(), b.dequantize())
    assert len(np.unique(eqq.unpack(b))) <= 2**bits
    packed, blocks = 8 * packed_length(130, bits), 5
    zero_points = 0 if symmetric else 8 * packed_length(blocks, bits)
    close(run_benchmark(w, away).bits, (packed + 32 * blocks + zero_points) / 130)
    assert eval(repr(away), {"integer_format": reference.integer_format}) == away


def test_rounding_is_spelled_one_way():
    for rounding in ("even", "stochastic"):
        with pytest.raises((ValueError, TypeCheckError)):
            reference.integer_format(8, rounding=rounding)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bits", [2.5, 4.0, "8", None, True])
def test_bits_are_integers(bits):
    for function in (reference.integer_format, reference.theoretical_sqnr):
        with pytest.raises((ValueError, TypeCheckError)):
            function(bits)


@pytest.mark.parametrize("name", ["int8", "int8_affine", "int4", "int4_affine", "int2_affine", "nf4", "nf4_channel"])
def test_the_error_bound_holds(name, getkey):
    w = weights(getkey(), (24, 130))
    q = eqq.quantize(w, FORMATS[name].format)
    bound = reference.theoretical_max_error(q) * (1 + 1e-4)
    assert analysis.analyze_error(w, q).max_error <= bound < analysis.analyze_error(w + 100, q).max_error


def test_bad_numbers(getkey):
    w = weights(getkey(), (4, 8))
    for bits in (1, 9):
        with pytest.raises(ValueError, match=f"`bits` must be an integer from 2 to 8. Got {bits}"):
            reference.integer_format(bits)
    with pytest.raises((ValueError, TypeCheckError), match="symmetric"):
        reference.integer_format(8, symmetric="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`bits` must be an integer, at least 1"):
        reference.theoretical_sqnr(0)
    with pytest.raises((ValueError, TypeCheckError)):
        reference.theoretical_sqnr(8, "square")  # pyright: ignore[reportArgumentType]
    for change in (0, -1, math.nan):
        with pytest.raises(ValueError, match="`change` must be above -1 and not zero"):
            reference.scale_sensitivity(w, eqq.quantize(w), change)
    with pytest.raises(ValueError, match="must not be negative. Got -1 and 2"):
        reference.accuracy_retention(-1, 2)
    with pytest.raises(ValueError, match="`size` must be at least 256"):
        reference.run_suite(100)
