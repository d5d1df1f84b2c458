"""What quantizing an array costs: errors, theory, comparisons, generators and the benchmark suite."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import eqquant as eqq
from eqquant import analysis
from eqquant._numerics.packing import packed_length
from eqquant.analysis.reference import suite

from .helpers import FORMATS, sqnr, weights


GOLDEN = json.loads((Path(__file__).parent / "golden" / "analysis.json").read_text())
# The reference computes in float32 throughout, sums included; ours are float64.
RTOL = 1e-4


def close(actual, expected, rtol=RTOL):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-12)


def sin(n, step=0.1):
    return np.sin(np.arange(n, dtype=np.float32) * np.float32(step))


def like_the_reference(bits, block_size="tensor", symmetric=True):
    return analysis.integer_format(bits, block_size=block_size, symmetric=symmetric, rounding="half_away")


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
    nibbles = np.frombuffer(bytes.fromhex(golden["data"]), np.uint8)  # the first of two in the high half, signed
    assert (eqq.unpack(q) ^ 8).tolist() == np.stack([nibbles >> 4, nibbles & 15], axis=1).ravel().tolist()
    close(analysis.quantization_mse(sin(200), q), golden["mse"])
    golden = GOLDEN["q4bit_v8"]
    q = eqq.quantize(np.array(golden["x"], np.float32), like_the_reference(4, 64))
    # 2.1 / 0.6 is a tie, up to the last bit of the scale: XLA divides by seven as a product with a seventh.
    untied = np.arange(8) != 6
    close(q.dequantize()[untied], np.array(golden["deq"])[untied], 1e-6)
    q = eqq.quantize(np.zeros(64, np.float32), like_the_reference(4, 64))
    assert q.scale.tolist() == GOLDEN["q4bit_zeros64"]["scales"] and not q.dequantize().any()
    row = analysis.run_benchmark(np.ones(1024, np.float32), like_the_reference(4, 64))
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
    report = analysis.compare_granularities(x, 8, block_size=2, rounding="half_away")
    close([report["tensor"].error.mse, report["channel"].error.mse], GOLDEN["compare_granularities_tiny_huge"])
    report = analysis.compare_bit_widths(sin(100), rounding="half_away")
    close(report["4 bits"].error.mse / report["8 bits"].error.mse, GOLDEN["compare_bit_widths_sin100"]["ratio"])
    rows = analysis.bit_width_degradation(sin(100), (4, 8), rounding="half_away").rows
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
def test_integers_of_the_suite(size):
    golden, report = GOLDEN[f"suite_{size}"], analysis.Comparison(tuple(suite.integer_rows(size)))
    names = {}
    for row, expected in zip(report.rows, golden["rows"], strict=True):
        names[expected["name"]] = row.name
        actual = [row.error.mse, row.error.max_error, row.error.sqnr_db, row.compression, row.quality]
        close(actual, [expected[k] for k in ("mse", "max_error", "sqnr_db", "compression", "quality")])
        assert row.error.size == expected["n"]
    assert report.best_by_sqnr.name == names[golden["best_by_sqnr"]]
    assert report.best_by_mse.name == names[golden["best_by_mse"]]
    assert report.best_by_quality.name == names[golden["top_quality"]]


def test_suite():
    report = analysis.run_suite(1024)
    assert report.rows[:11] == tuple(suite.integer_rows(1024))
    assert report["gaussian, NF4()"].format == eqq.NF4() and len(report.rows) == 11 + 19 + 12
    for kind in ("Int8", "Int4", "Int2", "NF4"):
        absmax, mse, hqq = (report[f"heavy tails, {kind} by {rule}"].error for rule in ("AbsMax", "MSE", "HQQ"))
        assert min(mse.sqnr_db, hqq.sqnr_db) > absmax.sqnr_db
    assert report.best_by_sqnr is max(report.rows, key=lambda row: row.error.sqnr_db)


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
    report = analysis.compare_granularities(x, 8, block_size=32)
    assert report["block"].error.mse < report["tensor"].error.mse
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


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "numpy", "float64", "quantized"])
def test_kinds_of_arrays(kind, getkey):
    w = weights(getkey(), (8, 70))
    if kind in ("numpy", "float64"):
        w = np.asarray(w, "float32" if kind == "numpy" else kind)
    elif kind == "quantized":
        w = eqq.quantize(w, "int8")
    else:
        w = w.astype(kind)
    dense = np.asarray(w, np.float64)
    q = eqq.quantize(w.dequantize() if kind == "quantized" else w, eqq.Int4(block_size=None))
    error = analysis.analyze_error(w, q)
    close(error.sqnr_db, sqnr(dense, q.dequantize()), 1e-9)
    assert 10 < error.sqnr_db < 25 and analysis.error_within_bounds(w, q, 0.02)
    report = analysis.scale_sensitivity(w, q, 1e-6)
    close(report.changed_mse, report.mse, 1e-2)
    assert analysis.scale_sensitivity(w, q, 0.5).changed_mse > report.mse == error.mse
    assert analysis.outlier_impact(w, 95).ratio > 1
    close(analysis.run_benchmark(w, eqq.Int4(block_size=None)).error.mse, error.mse, 1e-9)
    assert analysis.compare_granularities(w, 4).best_by_mse.name == "block"


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


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integer_formats(bits, symmetric, getkey):
    w = weights(getkey(), (16, 130))
    ours = analysis.integer_format(bits, block_size=32, symmetric=symmetric)
    away = analysis.integer_format(bits, block_size=32, symmetric=symmetric, rounding="half_away")
    a, b = eqq.quantize(w, ours), eqq.quantize(w, away)
    if type(ours) in (eqq.Int8, eqq.Int4, eqq.Int3, eqq.Int2):
        np.testing.assert_array_equal(a.dequantize(), b.dequantize())
    assert len(np.unique(eqq.unpack(b))) <= 2**bits
    packed, blocks = 8 * packed_length(130, bits), 5
    zero_points = 0 if symmetric else 8 * packed_length(blocks, bits)
    close(analysis.run_benchmark(w, away).bits, (packed + 32 * blocks + zero_points) / 130)
    assert eval(repr(away), {"integer_format": analysis.integer_format}) == away


def test_random_weights(getkey):
    x = np.asarray(analysis.outlier_weights(getkey(), (200, 200), rate=0.05, magnitude=30))
    assert abs((np.abs(x) == 30).mean() - 0.05) < 0.01
    x = np.asarray(analysis.channel_weights(getkey(), (4, 20_000), spread=4))
    np.testing.assert_allclose(x.std(axis=1), [1, 2, 3, 4], rtol=0.03)
    x = np.asarray(analysis.gaussian_weights(getkey(), (20_000,), 2, 3))
    assert abs(x.mean() - 2) < 0.1 and abs(x.std() - 3) < 0.1
    x = np.asarray(analysis.uniform_weights(getkey(), (1000,), 2, 3))
    assert 2 <= x.min() < x.max() < 3
    # From the tables, for three degrees of freedom.
    for x in (np.asarray(analysis.student_weights(getkey(), (50_000,))), analysis.lcg_student(50_000, seed=1)):
        close(np.quantile(np.abs(x), [0.5, 0.9, 0.99]), [0.7649, 2.3534, 5.8409], 0.05)


def test_compare_formats():
    report = analysis.compare_formats(analysis.lcg_gaussian(1024, seed=42))
    assert report.best_by_sqnr.format.bits == report.best_by_mse.format.bits == 8
    assert report["NF4()"].bits == 4.5
    assert report["Binary()"].error.mse > report["Int8()"].error.mse
    assert [row.name for row in analysis.compare_formats(sin(1024), ("nf4", eqq.Int4())).rows] == ["NF4()", "Int4()"]


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
    with pytest.raises(ValueError, match="`block_size` must be from 1 to the length of the axis, 8. Got 16"):
        analysis.compare_granularities(w, block_size=16)
    for bits in (1, 9):
        with pytest.raises(ValueError, match=f"`bits` must be an integer from 2 to 8. Got {bits}"):
            analysis.integer_format(bits)
    with pytest.raises(ValueError, match="`bits` must be an integer, at least 1"):
        analysis.theoretical_sqnr(0)
    for change in (0, -1, math.nan):
        with pytest.raises(ValueError, match="`change` must be above -1 and not zero"):
            analysis.scale_sensitivity(w, eqq.quantize(w), change)
    with pytest.raises(ValueError, match="not a fraction. Got 0.99. Write `percentile=99`"):
        analysis.outlier_impact(w, 0.99)
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
    for degrees in (2, math.nan):
        with pytest.raises(ValueError, match="`degrees` must be above 2"):
            analysis.student_weights(getkey(), (4,), degrees)
    with pytest.raises(ValueError, match="`axis` must name different axes of `x`"):
        analysis.compare_granularities(w, axis=2)
    with pytest.raises(ValueError, match="`plot` needs the values"):
        analysis.run_benchmark(w, "nf4").error.plot()


def test_rounding_is_spelled_one_way():
    for rounding in ("even", "stochastic"):
        with pytest.raises((ValueError, TypeCheckError)):
            analysis.integer_format(8, rounding=rounding)  # pyright: ignore[reportArgumentType]
    with pytest.raises((ValueError, TypeCheckError)):
        analysis.compare_bit_widths(sin(100), rounding="away")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bits", [2.5, 4.0, "8", None, True])
def test_bits_are_integers(bits):
    for function in (analysis.integer_format, analysis.theoretical_sqnr):
        with pytest.raises((ValueError, TypeCheckError)):
            function(bits)


def test_one_format_alone():
    report = analysis.compare_formats(sin(128), "nf4")
    assert [row.format for row in report.rows] == [eqq.NF4()]
    assert analysis.compare_formats(sin(128), eqq.NF4()) == report


def test_errors_are_named_in_words():
    shown = str(analysis.analyze_error(sin(128), eqq.quantize(sin(128))))
    assert "largest error" in shown and "_" not in shown


def test_reference_names():
    from eqquant.analysis import reference

    for name in ("lcg_gaussian", "run_suite", "compare_granularities", "theoretical_sqnr", "outlier_impact"):
        assert getattr(reference, name) is getattr(analysis, name)


def test_names_are_no_markup():
    row = analysis.run_benchmark(sin(128), "nf4", name="[bold]a[/x]")
    assert "[bold]a[/x]" in str(row)
