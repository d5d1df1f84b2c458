"""What quantizing an array costs: errors and comparisons."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant import analysis, reference
from eqquant.analysis._comparison import run_benchmark

from .helpers import FORMATS, sqnr, weights


def close(actual, expected, rtol=1e-4):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-12)


def sin(n, step=0.1):
    return np.sin(np.arange(n, dtype=np.float32) * np.float32(step))


@pytest.mark.long
def test_small_magnitudes_do_not_underflow(getkey):
    w = np.asarray(weights(getkey(), (64,)))
    for factor in (2.0**-60, 1.0, 2.0**60):
        error = analysis.analyze_error(w * np.float32(factor), eqq.quantize(w * np.float32(factor), "int8"))
        close(error.sqnr_db, sqnr(w, eqq.quantize(w, "int8").dequantize()), 1e-6)


#
# Errors
#


@pytest.mark.parametrize("name", FORMATS)
def test_analyze_error(name, getkey):
    w = weights(getkey(), (6, 200))
    q = eqq.quantize(w, FORMATS[name].format)
    error = analysis.analyze_error(w, q)
    a, b = np.asarray(w, np.float64), np.asarray(q.dequantize(), np.float64)
    close(error.mse, ((a - b) ** 2).mean(), 1e-9)
    close([error.rmse, error.mae], [math.sqrt(error.mse), np.abs(a - b).mean()], 1e-9)
    close([error.max_error, error.sqnr_db], [np.abs(a - b).max(), sqnr(a, b)], 1e-9)
    close(error.relative_l2, np.linalg.norm(a - b) / np.linalg.norm(a), 1e-9)
    close(error.cosine, (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b), 1e-9)
    close(error.outlier_rate, (np.abs(a - b) > 0.1 * math.sqrt((a**2).mean())).mean(), 1e-9)


def test_many_values_are_summed_in_pieces(getkey):
    x = np.array(weights(getkey(), (700, 600)), np.float64)
    x[350, 0] = 9  # neither in the first piece nor in the last
    error, size = analysis.analyze_error(x, 0.5 * x), np.abs(x)
    close([error.mse, error.mae, error.max_error], [0.25 * (x**2).mean(), 0.5 * size.mean(), 0.5 * size.max()], 1e-9)
    close([error.cosine, error.outlier_rate], [1, (size > 0.2 * error.rms).mean()], 1e-9)


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
    assert 10 < error.sqnr_db < 25 and error.max_error <= 1.02 * reference.theoretical_max_error(q)
    report = reference.scale_sensitivity(w, q, 1e-6)
    close(report.changed_mse, report.mse, 1e-2)
    assert reference.scale_sensitivity(w, q, 0.5).changed_mse > report.mse == error.mse
    assert reference.outlier_impact(w, 95).ratio > 1
    close(run_benchmark(w, eqq.Int4(block_size=None)).error.mse, error.mse, 1e-9)


@pytest.mark.long
def test_compare_formats():
    report = analysis.compare_formats(reference.lcg_gaussian(1024, seed=42))
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
        reference.outlier_impact(w.at[0, 0].set(jnp.nan))


def test_bad_numbers(getkey):
    w = weights(getkey(), (4, 8))
    with pytest.raises(ValueError, match="not a fraction. Got 0.99. Write `percentile=99`"):
        reference.outlier_impact(w, 0.99)
    for percentile in (0, 100):
        with pytest.raises(ValueError, match="`percentile` must be between 0 and 100"):
            reference.outlier_impact(w, percentile)
    with pytest.raises(ValueError, match="`formats` must name at least one format"):
        analysis.compare_formats(w, ())
    with pytest.raises(KeyError, match=r"Got 'nf4'. There are NF4\(\)"):
        analysis.compare_formats(w, "nf4")["nf4"]
    with pytest.raises(ValueError, match="`axis` must name different axes of `x`"):
        analysis.compare_formats(w, "int8", axis=2)
    with pytest.raises(ValueError, match="`plot` needs the values"):
        run_benchmark(w, "nf4").error.plot()


def test_a_comparison_of_one_format():
    report = analysis.compare_formats(sin(128), "nf4")
    assert [row.format for row in report.rows] == [eqq.NF4()]
    assert analysis.compare_formats(sin(128), eqq.NF4()) == report
    # And others that are made up: the best of each kind.
    (row,) = report.rows
    close([row.bits, row.compression, row.quality], [4.5, 32 / 4.5, row.error.sqnr_db * 4.5 / 32])
    worse = dataclasses.replace(
        row, name="small", bits=2.0, error=dataclasses.replace(row.error, sqnr_db=12.0, mse=9.0)
    )
    large = dataclasses.replace(
        row, name="large", bits=64.0, error=dataclasses.replace(row.error, sqnr_db=30.0, mse=10.0)
    )
    every = dataclasses.replace(report, rows=(worse, row, large))
    assert (large.quality, every["small"]) == (30, worse)
    assert (every.best_by_sqnr, every.best_by_mse, every.best_by_quality) == (large, row, large)


def test_labels_of_errors_are_words():
    shown = str(analysis.analyze_error(sin(128), eqq.quantize(sin(128))))
    assert "largest error" in shown and "_" not in shown
    lines = shown.splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.strip().startswith("values"))
    assert not lines[at - 1].strip()  # apart, since what follows is no error


def test_names_are_not_parsed_as_markup():
    row = run_benchmark(sin(128), "nf4", name="[bold]a[/x]")
    assert "[bold]a[/x]" in str(row)
