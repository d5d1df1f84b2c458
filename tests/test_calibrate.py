"""Calibrators: the range, scale and zero point of data, however it is split into batches."""

import functools as ft
import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import eqquant as eqq
from eqquant.calibrate import MinMax, MovingAverage, MSERange, Percentile
from eqquant.calibrate._blocks import make_blocks
from eqquant.calibrate._calibrator import _add_saturating, find_extremes
from eqquant.calibrate._result import CalibrationResult
from eqquant.calibrate._uint64 import UInt64
from eqquant.reference import integer_format

from .helpers import assert_same, heavy_tailed, weights


OPTIMIZED = True  # programs are compared bit for bit


GOLDEN = json.loads((Path(__file__).parent / "golden" / "calibrate.json").read_text())
# The reference computes in float32, and so do we: the last digit may differ, one part in 10**6 may not.
FLOAT32 = 1e-6

T6 = np.float32([1, -2, 3, -4, 5, -5])
C6 = np.float32([0, 1, -2, 1.5, -1.5, 3])
CALIBRATORS = {"min_max": MinMax, "percentile": Percentile, "moving": MovingAverage, "mse": MSERange}
COMMUTING = ["min_max", "percentile", "mse"]
# The block size, the shape that data ends in, and the axis that blocks run along.
BY = {
    "tensor": ("tensor", (), -1),
    "columns": (None, (10,), -2),
    "rows": (None, (6, 10), -1),
    "blocks": (5, (10,), -1),
    "ragged": (4, (10,), -1),
    "both": (4, (6, 10), -1),
    "across": (4, (6, 10), -2),
    "joint": (4, (6, 10), (-2, -1)),
}


@pytest.fixture(params=CALIBRATORS)
def calibrator(request):
    return CALIBRATORS[request.param]


def data(shape=(8, 6, 10), seed=0):
    return heavy_tailed(shape, seed)


def close(actual, expected, tol=FLOAT32):
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tol, atol=tol * 1e-3)


def same(a, b):
    """Bit for bit."""
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    jtu.tree_map(np.testing.assert_array_equal, a, b)


def make(kind, by="tensor", bits=8, symmetric=True, **kwargs):
    """A calibrator of integers for blocks by name."""
    block_size, shape, axis = BY[by]
    return kind(integer_format(bits, block_size=block_size, symmetric=symmetric), shape, axis, **kwargs)


def compute_range(x, bits=8, symmetric=True, rounding="half_even", block_size="tensor", axis=-1):
    """The result for one array, in integers of any width."""
    format = integer_format(bits, block_size=block_size, symmetric=symmetric, rounding=rounding)
    return MinMax(format, x, axis).update(x).result()


def whole(q):
    """The codes as integers, signed for symmetric formats."""
    return np.asarray(q.format.decode(eqq.unpack(q))).astype(int)


def dequantize_codes(x, by):
    """The values that share each scale, in plain Python, by the index of the scale."""
    block_size, shape, axis = BY[by]
    axes = axis if isinstance(axis, tuple) else (axis,)
    kept = [a for a in range(-len(shape), 0) if a not in axes]
    x, found = np.asarray(x), {}
    for index in np.ndindex(x.shape):
        key = ()
        if block_size != "tensor":
            along = 0
            for a in axes:
                along = along * x.shape[a] + index[a]
            key = (*(index[a] for a in kept), along // block_size if block_size else 0)
        found.setdefault(key, []).append(float(x[index]))
    return found


# The reference


@pytest.mark.long
@pytest.mark.parametrize(
    "name, x, bits, symmetric",
    [
        ("cal_minmax_c6_asym8", C6, 8, False),
        ("cal_minmax_c6_sym4", C6, 4, True),
        ("cal_minmax_-5..0_asym8", np.arange(-5, 1, dtype=np.float32), 8, False),
    ],
)
def test_min_max_equals_the_reference(name, x, bits, symmetric):
    golden, result = GOLDEN[name], compute_range(x, bits, symmetric)
    close(result.scale, golden["scale"])
    close([result.min, result.max], [golden["min"], golden["max"]])
    assert golden["zero_point"] == (0 if symmetric else int(result.zero_point))


@pytest.mark.long
@pytest.mark.parametrize(
    "name, x",
    [
        ("cal_pct_1_99_outliers_sym8", np.append(0.1 * np.arange(100), [1000, -1000])),
        ("cal_pct_1_99_ramp1000", np.arange(1000) / 100),
    ],
)
def test_percentile_equals_the_reference(name, x):
    # A percentile is stated to 1/64 of its magnitude; the reference keeps all values and sorts them.
    golden, result = GOLDEN[name], Percentile(lower=1, upper=99).update(np.float32(x)).result()
    close(result.scale, golden["scale"], 1 / 64)
    close(result.max, golden["max"], 1 / 64)
    assert float(result.min) == 0 <= golden["min"] < 0.2  # widened to include zero


def test_moving_average_equals_the_reference():
    golden, calibrator = GOLDEN["cal_ma_0.5"], MovingAverage(momentum=0.5)
    result = calibrator.update(np.float32([-1, 1])).update(np.float32([-2, 2])).result()
    close([result.scale, result.min, result.max], [golden["scale"], golden["min"], golden["max"]])


@pytest.mark.parametrize("bits, symmetric", [(4, True), (8, True), (8, False)])
def test_codes_equal_the_reference(bits, symmetric):
    golden = GOLDEN[f"per_tensor_t6_{'' if symmetric else 'a'}sym{bits}"]
    result = compute_range(T6, bits, symmetric, "half_away")
    q = result.quantize(T6)
    # The reference stores affine codes less 128.
    assert (whole(q) - (0 if symmetric else 128)).tolist() == golden["q"]
    close(q.dequantize(), golden["deq"])
    close(result.scale, golden["params"]["scales"][0])
    assert golden["params"]["zero_points"] == ([] if symmetric else [int(result.zero_point)])


def test_groups_equal_the_reference():
    golden = GOLDEN["per_group10_sin100_sym8"]
    x = np.sin(np.float32(0.1) * np.arange(100, dtype=np.float32))
    result = compute_range(x, rounding="half_away", block_size=10)
    close(result.scale, golden["params"]["scales"])
    error = result.quantize(x).dequantize() - x
    close(np.mean(np.square(error)), golden["mse"], 1e-4)  # errors are differences of float32 a hundred times larger


def test_ties():
    x = np.float32(GOLDEN["ties_sym4"]["x"])
    assert float(compute_range(x, 4).scale) == 1
    assert whole(compute_range(x, 4, rounding="half_away").quantize(x)).tolist() == GOLDEN["ties_sym4"]["q"]
    assert whole(compute_range(x, 4).quantize(x)).tolist() == [7, 0, 2, 2, 0, -2, -2, 3, 4]


def test_range_includes_zero():
    # The reference takes the range from 10 to 50, has no code for zero and saturates.
    golden, x = GOLDEN["cal_minmax_10..50_asym8"], np.float32([10, 20, 30, 40, 50])
    result = compute_range(x, 8, False)
    assert (golden["min"], float(result.min), float(result.max)) == (10, 0, 50)
    close(result.quantize(x).dequantize(), x, 0.5 / 255 * 5)
    below = compute_range(-x, 8, False)
    assert (float(below.min), float(below.max), int(below.zero_point)) == (-50, 0, 255)


# Scales and zero points


@pytest.mark.parametrize(
    "bits, symmetric, by",
    [
        *((bits, symmetric, "both") for bits in range(2, 9) for symmetric in (True, False)),
        *((4, False, by) for by in BY if by != "both"),
    ],
)
def test_ranges_equal_their_formulas(bits, symmetric, by):
    x = data() + 0.5
    result = make(MinMax, by, bits, symmetric).update(x).result()
    assert (result.zero_point is None) == symmetric
    expected, found = dequantize_codes(x, by), jtu.tree_map(np.asarray, result)
    assert set(expected) == set(np.ndindex(result.scale.shape))
    assert result.scale.shape == result.min.shape == result.max.shape
    for index, values in expected.items():
        low, high = min(*values, 0), max(*values, 0)
        scale = max(-low, high) / (2 ** (bits - 1) - 1) if symmetric else (high - low) / (2**bits - 1)
        close([found.min[index], found.max[index], found.scale[index]], [low, high, scale])
        if not symmetric:
            assert abs(int(found.zero_point[index]) + low / scale) <= 0.5 + 1e-3
    q = result.quantize(x)
    codes = whole(q)
    # Nothing is clipped, so nothing is off by more than half a step; and half a step more for a zero point.
    errors = dequantize_codes(jnp.abs(q.dequantize() - x), by)
    worst = max(max(values) / found.scale[index] for index, values in errors.items())
    assert 0.2 < float(worst) < (0.5 if symmetric else 1) + 1e-3
    if symmetric:
        assert np.abs(codes).max() == 2 ** (bits - 1) - 1
    else:
        assert (int(codes.min()), int(codes.max())) == (0, 2**bits - 1)


def test_zeros_and_extremes(calibrator):
    zeros = make(calibrator, symmetric=False).update(jnp.zeros((4,))).result()
    assert (float(zeros.scale), int(zeros.zero_point)) == (0, 0)
    assert zeros.quantize(jnp.zeros((4,))).dequantize().tolist() == [0] * 4
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    x_range = calibrator().update(x).result()
    for size in np.float32([1e-30, 1e30, 5e37]):
        close(np.asarray(calibrator().update(x * size).result().scale) / size, x_range.scale, 1 / 64)


@pytest.mark.long
def test_dtypes(calibrator):
    x = data((64,))
    for dtype in (jnp.float16, jnp.bfloat16):
        result = calibrator().update(x.astype(dtype)).result()
        same(result, calibrator().update(x.astype(dtype).astype(jnp.float32)).result())
        assert result.scale.dtype == jnp.float32


# Data in pieces


@pytest.mark.parametrize(
    "kind, by", [("min_max", "both"), ("mse", "ragged"), *(("percentile", by) for by in ("tensor", "both", "across"))]
)
def test_order_and_batch_sizes_do_not_matter(kind, by):
    parts = [data(seed=n) * 10.0 ** (n - 2) for n in range(4)]
    start = make(CALIBRATORS[kind], by, symmetric=False)
    forward = ft.reduce(lambda cal, x: cal.update(x), parts, start)
    backward = ft.reduce(lambda cal, x: cal.update(x), parts[::-1], start)
    one = [start.update(x) for x in parts]
    left = one[0].merge(one[1]).merge(one[2]).merge(one[3])
    right = one[0].merge(one[1].merge(one[2].merge(one[3])))
    swapped = one[3].merge(one[1]).merge(one[0].merge(one[2]))
    with_nothing = start.merge(forward).merge(start)
    for other in (backward, left, right, swapped, with_nothing):
        same(other, forward)
        same(other.result(), forward.result())
    whole = start.update(jnp.concatenate(parts))
    same(whole.result(), forward.result())
    assert int(forward.batches) == 4


def test_moving_average():
    # Each step by hand, in float64; and the order matters.
    batches = [data(seed=n) for n in range(5)]
    low, high = float(batches[0].min()), float(batches[0].max())
    for x in batches[1:]:
        low, high = 0.9 * low + 0.1 * float(x.min()), 0.9 * high + 0.1 * float(x.max())
    result = ft.reduce(lambda cal, x: cal.update(x), batches, MovingAverage(momentum=0.1)).result()
    close([result.min, result.max], [low, high], 1e-5)
    # A merge weighs by batches.
    a, b = MovingAverage().update(jnp.array([-1.0, 1.0])), MovingAverage().update(jnp.array([-4.0, 7.0]))
    merged = a.merge(b).merge(b)
    close(merged.range(), [-3, 5])
    assert int(merged.batches) == 3
    assert [int(_add_saturating(jnp.int32(2**31 - n), jnp.int32(7))) for n in (3, 9)] == [2**31 - 1, 2**31 - 2]


@pytest.mark.long
def test_transformations(calibrator):
    parts = jnp.stack([data(seed=n) for n in range(3)])
    start = make(calibrator, "ragged", symmetric=False)
    expected = ft.reduce(lambda cal, x: cal.update(x), parts, start)

    @jax.jit
    def scan_batches(start, parts):
        cal, _ = jax.lax.scan(lambda cal, x: (cal.update(x), None), start, parts)
        return cal, cal.result()

    cal, result = scan_batches(start, parts)
    close(cal.range(), np.asarray(expected.range()), 1e-5)
    close(result.scale, np.asarray(expected.result().scale), 1e-5)

    mapped = jax.vmap(start.update)(parts)
    one = jtu.tree_map(lambda a: a[1], mapped)
    assert jtu.tree_structure(one) == jtu.tree_structure(start)
    close(one.range(), np.asarray(start.update(parts[1]).range()), 1e-5)
    close(jax.vmap(lambda c: c.result().scale)(mapped)[1], np.asarray(start.update(parts[1]).result().scale), 1e-5)


@pytest.mark.long
def test_across_devices():
    program = """
import functools as ft, jax, jax.random as jr, jax.tree_util as jtu, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from eqquant.calibrate import MinMax, MSERange, Percentile

def same(a, b):
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    jtu.tree_map(np.testing.assert_array_equal, a, b)

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = np.random.default_rng(0).standard_t(3.0, (8, 50)).astype("float32")
for start in (MinMax(), Percentile(), MSERange()):
    expected = start.update(x)
    # XLA merges by itself where the batch is sharded,
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    same(start.update(sharded), expected)

    # and in `shard_map` calibrators are gathered and merged.
    def merged(x):
        every = jax.lax.all_gather(start.update(x), "data")
        first, second = (jtu.tree_map(lambda a, n=n: a[n], every) for n in range(2))
        return jtu.tree_map(lambda a: a[None], first.merge(second))

    specs = dict(in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    both = jax.jit(jax.shard_map(merged, mesh=mesh, **specs))(x)
    for device in range(2):
        same(jtu.tree_map(lambda a: a[device], both).seen, expected.seen)
print("done")
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


# Percentiles


@pytest.mark.parametrize("shape", ["normal", "heavy", "uniform", "positive", "spikes"])
def test_percentiles_are_as_accurate_as_stated(shape):
    rng = np.random.default_rng(0)
    x = {
        "normal": rng.normal(size=20_000),
        "heavy": rng.standard_t(2, size=20_000) * 100,
        "uniform": rng.uniform(-1, 3, size=20_000),
        "positive": rng.exponential(size=20_000) + 5,
        "spikes": np.where(rng.uniform(size=20_000) < 0.3, 2.5, -1e-4 * rng.normal(size=20_000)),
    }[shape].astype(np.float32)
    cal = ft.reduce(lambda cal, part: cal.update(part), np.split(x, 8), Percentile(lower=0, upper=100))
    sketch = cal.seen
    np.testing.assert_array_equal(np.ravel(cal.range()), [x.min(), x.max()])
    for p in (0.01, 1, 5, 25, 50, 75, 99, 99.9, 99.99):
        # The order statistic at rank p n / 100, to 1/64, or zero below 2**-24 of the largest.
        exact = np.sort(x)[int(Fraction(str(p)) * x.size / 100)]
        assert abs(float(sketch.quantile(p / 100)) - exact) <= abs(exact) / 64 + abs(x).max() * 2**-24, p


@pytest.mark.long
@pytest.mark.parametrize("shape", ["normal", "uniform"])
def test_percentiles_equal_numpy(shape):
    # NumPy interpolates between order statistics, which differ by little in so many values.
    rng = np.random.default_rng(1)
    x = (rng.normal(size=100_000) if shape == "normal" else rng.uniform(-2, 1, size=100_000)).astype(np.float32)
    result = make(Percentile, symmetric=False, lower=0.5, upper=99).update(x).result()
    np.testing.assert_allclose([result.min, result.max], np.percentile(x, [0.5, 99]), rtol=1 / 60)


@pytest.mark.long
@pytest.mark.parametrize("by", ["tensor", "ragged", "across"])
def test_extreme_percentiles_are_exact(by):
    x = data()
    result = make(Percentile, by, lower=0, upper=100).update(x).result()
    same(result, make(MinMax, by).update(x).result())


@pytest.mark.long
def test_counts_beyond_32_bits():
    """Merging a sketch with itself doubles the counts: 16 values become 2**36."""
    x = jnp.concatenate([jnp.full(15, 1.0), jnp.full(1, 100.0)])
    few = {kind: CALIBRATORS[kind]().update(x) for kind in ("percentile", "mse")}
    for kind, cal in few.items():
        many = ft.reduce(lambda cal, _: cal.merge(cal), range(32), cal)
        same(many.result(), cal.result())
        assert float(many.seen.counts.sum().to_float()[0]) == 2.0**36
        # A larger magnitude moves bins below others, and the smallest of them join zero.
        moved = many.update(jnp.full(1, 1e9))
        assert float(moved.seen.counts.sum().to_float()[0]) == 2.0**36
        assert int(moved.seen.counts.sum().low[0]) == 1


def test_uint64_arithmetic():
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 2**44, (3, 3073))
    split = lambda x: UInt64(jnp.asarray((x % 2**32).astype(np.uint32)), jnp.asarray((x >> 32).astype(np.uint32)))
    together = lambda x: np.asarray(x.low, np.int64) + (np.asarray(x.high, np.int64) << 32)
    np.testing.assert_array_equal(together(split(numbers)), numbers)
    np.testing.assert_array_equal(together(split(numbers).cumsum()), numbers.cumsum(axis=-1))
    np.testing.assert_array_equal(together(split(numbers).sum()), numbers.sum(axis=-1, keepdims=True))
    np.testing.assert_array_equal(together(split(numbers) + split(numbers[::-1])), numbers + numbers[::-1])
    close(split(numbers).to_float(), numbers, 3e-7)


@pytest.mark.long
def test_percentiles_clip_outliers():
    x = weights(jr.key(0), (100_000,)).at[7].set(1e6)
    wide, narrow = (kind().update(x).result() for kind in (MinMax, Percentile))
    assert float(wide.max) == 1e6 and 3.5 < float(narrow.max) < 4.5


def test_percentile_of_later_batches_counts():
    # The reference's reservoir keeps its first thousand samples for good.
    batches = [b + np.arange(1000, dtype=np.float32) / 1000 for b in range(100)]
    result = ft.reduce(lambda cal, x: cal.update(x), batches, Percentile(lower=1, upper=99)).result()
    np.testing.assert_allclose(float(result.max), 99, rtol=1 / 64)


# Clipping


def squared_error(x, result):
    return float(jnp.mean(jnp.square(result.quantize(x).dequantize() - x)))


def test_errors_of_ranges_are_integrals():
    """Of squared distances from levels, over bins of uniform density: by sums over many points of each bin."""
    edges = np.float32([-2.5, -2.46, -1, -0.2, 0, 0, 0.3, 0.31, 1.9, 2.6])
    counts, scales = np.float32([3, 1, 4, 1, 5, 9, 2, 6, 5]), np.float32([0.05, 0.3, 0.7])
    points = edges[:-1, None] + np.diff(edges)[:, None] * (np.arange(20_000) + 0.5) / 20_000
    kinds = {True: (-8, 7, None), False: (-6, 9, jnp.uint8(6))}

    @jax.jit
    def compute(counts, edges, scales):
        of = lambda symmetric: MSERange(eqq.Int4("tensor", symmetric=symmetric))._compute_error
        return {kind: [of(kind)(counts, edges, s, zero) for s in scales] for kind, (_, _, zero) in kinds.items()}

    for kind, found in compute(*map(jnp.asarray, (counts, edges, scales))).items():
        bottom, top, _ = kinds[kind]
        for s, error in zip(scales.astype(np.float64), found, strict=True):
            distance = points - np.clip(np.round(points / s), bottom, top) * s
            np.testing.assert_allclose(error, np.sum(counts * np.mean(distance**2, axis=-1)), rtol=1e-3)


def test_extremes_of_blocks():
    """Of every kind of block."""
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 10), np.float32)
    blocks = {by: make_blocks(*args) for by, args in BY.items()}
    found = jax.jit(lambda x: {by: find_extremes(x, b) for by, b in blocks.items()})(x)
    for by, (low, high) in jtu.tree_map(np.asarray, found).items():
        for index, values in dequantize_codes(x, by).items():
            assert (low[index], high[index]) == (min(values), max(values)), by
        assert low.shape == high.shape == blocks[by].scale_shape


@pytest.mark.long
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "bits", [2, pytest.param(3, marks=pytest.mark.slow), 4, pytest.param(6, marks=pytest.mark.slow), 8]
)
def test_mse_beats_every_other_range(bits, symmetric):
    x = data((50_000,), seed=3)  # a range of a 60th of its largest value is no error yet
    x = x if symmetric else jnp.abs(x)
    wide = compute_range(x, bits, symmetric)
    found = make(MSERange, "tensor", bits, symmetric).update(x).result()
    error = squared_error(x, found)
    assert error < (0.97 if bits == 8 else 0.8) * squared_error(x, wide)
    # No range on a grid of its own is better by more than 2 %: steps of the grid, and bins.
    ranges = [f * float(jnp.abs(x).max()) for f in np.geomspace(1 / 60, 1, 60)]
    for limit in ranges:
        other = compute_range(jnp.clip(x, -limit, limit), bits, symmetric)
        assert error < 1.02 * squared_error(x, other)


def test_mse_clips_nothing_of_uniform_data():
    x = jr.uniform(jr.key(0), (50_000,), minval=-1.0)
    np.testing.assert_allclose(float(MSERange().update(x).result().max), 1, atol=0.02)


@pytest.mark.long
def test_mse_of_each_channel():
    x = weights(jr.key(0), (4000, 3)) * jnp.array([1e-3, 1.0, 1e3]).reshape(1, 3)
    together = MSERange(eqq.Int4(block_size=None), (3,), axis=-2).update(x).result()
    for n in range(3):
        close(together.scale[n, 0], MSERange(eqq.Int4("tensor")).update(x[:, n]).result().scale, 1e-5)


# Shapes


@pytest.mark.long
def test_shapes_and_axes():
    x = data((2, 3, 4))
    assert (MinMax("int8", x, 0).shape, MinMax("int8", x, 0).axis) == ((2, 3, 4), -3)
    assert MinMax("int8", x, (1, -1)).axis == (-2, -1)
    assert MinMax("int8", 4, -2).shape == MinMax("int8", (4,), -2).shape == (4,)
    assert MinMax("int8", jax.ShapeDtypeStruct((2, 3), jnp.float32)).shape == (2, 3)
    # One scale needs no shape, and forgets it.
    assert jtu.tree_structure(MinMax(eqq.Int8("tensor"), x)) == jtu.tree_structure(MinMax(eqq.Int8("tensor")))
    # Batches come in front; and where blocks run along a whole axis, its length may vary.
    columns = MinMax("int8", (4,), axis=-2).update(x[0]).update(x).update(x[:, :1])
    np.testing.assert_array_equal(columns.result().max[:, 0], jnp.maximum(x.max(axis=(0, 1)), 0))
    blocks = MinMax(eqq.Int4(block_size=2), (4,)).update(x)
    np.testing.assert_array_equal(blocks.result().max, jnp.maximum(x.max(axis=(0, 1)).reshape(2, 2).max(axis=1), 0))


# A calibrated scale in a format


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "format, axis, block_size",
    [
        *((format, -2, 4) for format in (eqq.Int8, eqq.Int4, eqq.Int2)),
        *((eqq.Int4, axis, size) for axis in (-1, -2) for size in (None, "tensor")),
        (eqq.Int4, -1, 4),
    ],
)
def test_formats_take_a_calibrated_scale(format, symmetric, axis, block_size):
    w = data((12, 10))
    format = format(block_size=block_size, symmetric=symmetric)
    result = compute_range(w, format.bits, symmetric, block_size=block_size, axis=axis)
    assert result.axis == axis or block_size == "tensor"
    q = eqq.quantize(w, format, axis=axis, scale=result.scale, zero_point=result.zero_point)
    np.testing.assert_array_equal(whole(q), whole(result.quantize(w)))
    np.testing.assert_allclose(q.dequantize(), result.quantize(w).dequantize(), rtol=1e-6)
    if not (format.bits == 2 and symmetric):  # whose own rule is another
        assert_same(q, eqq.quantize(w, format, axis=axis))


@pytest.mark.long
def test_formats_take_the_scale_of_another_array():
    for format in (eqq.NF4(), eqq.NF4(double_quant=True), eqq.MXFP4(), eqq.NVFP4()):
        w = data((4, 64))
        q = eqq.quantize(w, format)
        np.testing.assert_array_equal(eqq.unpack(eqq.quantize(w, format, scale=q.scale)), eqq.unpack(q))


@pytest.mark.long
def test_a_result_knows_its_format_and_axis():
    w = data((12, 64))
    for axis in (-1, 0):
        assert_same(MinMax("int8", w, axis=axis).update(w).result().quantize(w), eqq.quantize(w, "int8", axis=axis))
    result = MinMax("int8", w).update(w).result()
    with pytest.raises(ValueError, match=r"`scale` must broadcast to \(5, 1\)"):
        result.quantize(w[:5])
    with pytest.raises(ValueError, match="`scale` must suit the values"):
        result.quantize(1000 * w)
    # By hand, where a result is not seen: the values tell.
    for w in (weights(jr.key(0), (64, 64)), jr.uniform(jr.key(0), (64, 64), minval=-1.0)):
        scale = compute_range(w).scale
        with pytest.raises(ValueError, match=r"`scale` must suit the values and Int4\(.* relative error of 0\.[89]"):
            eqq.quantize(w, eqq.Int4("tensor"), scale=scale)
        affine = compute_range(w, symmetric=False)
        with pytest.raises(ValueError, match=r"`scale` must suit the values|`zero_point` must hold"):
            eqq.quantize(w, eqq.Int4("tensor", symmetric=False), scale=affine.scale, zero_point=affine.zero_point)
        for bits in (4, 3, 2):  # clipping on purpose
            best = make(MSERange, "tensor", bits).update(w).result()
            eqq.quantize(w, eqq.Int4("tensor"), scale=best.scale)


@pytest.mark.long
def test_a_scale_that_cannot_be_stored_is_refused():
    w = data((4, 64))
    for format in ("mxfp4", "mxfp8"):
        with pytest.raises(ValueError, match=r"`scale` must be a power of two.* Got one that would be off by 33.3%"):
            eqq.quantize(w, format, scale=1.5)
        for scale in (0.5, 2.0**-120):
            assert jnp.all(eqq.quantize(w * scale, format, scale=scale).scale == scale)
    with pytest.raises(ValueError, match=r"`scale` must be a power of two"):
        eqq.quantize(w, "mxfp4", scale=-1.0)
    for scale in (1e6, 1e-9):
        with pytest.raises(ValueError, match=r"`scale` must be in the range of float16"):
            eqq.quantize(w, "q8_0", scale=scale)
    np.testing.assert_allclose(eqq.quantize(w, "q8_0", scale=0.1).scale, 0.1, rtol=1e-3)


@pytest.mark.long
def test_given_scales_of_a_convolution():
    w = data((5, 3, 2, 2))
    axes = (-3, -2, -1)
    for format in ("int8", eqq.Int4(block_size=4), eqq.Int8("tensor")):
        result = MinMax(format, w, axes).update(w).result()
        assert_same(result.quantize(w), eqq.quantize(w, format, axis=axes))
    assert_same(compute_range(w, block_size=None, axis=axes).quantize(w), eqq.quantize(w, "int8", axis=axes))


@pytest.mark.long
def test_given_scales_in_transformations():
    w = data((3, 4, 10))
    result = compute_range(w[0], block_size=None)
    quantize = lambda w, scale: eqq.quantize(w, "int8", scale=scale)
    expected = quantize(w[0], result.scale)
    assert_same(jax.jit(quantize)(w[0], result.scale), expected)
    mapped = jax.vmap(quantize, in_axes=(0, None))(w, result.scale)
    assert_same(jtu.tree_map(lambda a: a[0], mapped), expected)
    # What is beyond the range is clipped.
    assert float(jnp.max(eqq.quantize(w, "int8", scale=0.01).dequantize())) == pytest.approx(1.27)


# Errors


def test_errors_of_calibrators():
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"Got none for layer\.weight\. Call `update`"):
        MinMax(name="layer.weight").result()
    with pytest.raises(ValueError, match=r"must not be empty\. Got shape \(0, 4\) for layer\.weight"):
        MinMax(name="layer.weight").update(x[:0])
    with pytest.raises(ValueError, match=r"NaN or infinity in layer\.weight"):
        MinMax(name="layer.weight").update(x.at[0, 0].set(jnp.nan))
    with pytest.raises(ValueError, match=r"x\.y must end in the shape.*, \(5,\).* Got shape \(2, 4\)"):
        MinMax("int4", (5,), name="x.y").update(x)
    with pytest.raises(ValueError, match=r"Got MinMax\(format=Int4\(.*\) for MinMax\(format=Int8"):
        MinMax().merge(MinMax(eqq.Int4("tensor")))
    with pytest.raises(ValueError, match="`merge` takes a calibrator of the same kind"):
        MinMax().merge(MSERange())
    for lower, upper in ((99, 1), (-1, 99), (1, 101), (50, 50), (100, 100)):
        with pytest.raises(ValueError, match=f"Got lower={lower} and upper={upper}"):
            Percentile(lower=lower, upper=upper)
    for momentum in (0, 1.5, -0.1):
        with pytest.raises(ValueError, match=f"at most 1. Got {momentum}"):
            MovingAverage(momentum=momentum)


@pytest.mark.parametrize("columns", [pytest.param(64, marks=pytest.mark.slow), 4096])
@pytest.mark.parametrize("bad", [jnp.nan, pytest.param(-jnp.nan, marks=pytest.mark.slow), jnp.inf, -jnp.inf])
def test_nan_and_infinity_inside_jit(calibrator, bad, columns):
    """It makes the scale of its block NaN, and no other; outside it is refused."""
    x = weights(jr.key(0), (8, columns)).at[3, columns // 2].set(bad)
    x = jnp.stack([jnp.ones_like(x), x, jnp.ones_like(x)])

    @jax.jit
    def update(x):
        cal, _ = jax.lax.scan(lambda cal, x: (cal.update(x), None), calibrator("int8", x[0], name="layer.weight"), x)
        return cal, cal.result()

    cal, result = update(x)
    assert jnp.flatnonzero(jnp.isnan(result.scale[:, 0])).tolist() == [3]
    assert np.array_equal(jnp.isnan(result.min), jnp.isnan(result.scale))
    assert np.array_equal(jnp.isnan(result.max), jnp.isnan(result.scale))
    healthy = calibrator("int8", x[0], name="layer.weight").update(jnp.ones_like(x[0]))
    for cal in (cal, cal.merge(healthy), healthy.merge(cal)):
        with pytest.raises(ValueError, match=r"NaN or infinity in layer\.weight"):
            cal.result()


@pytest.mark.long
def test_errors_of_shapes_and_formats():
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"`axis` must name axes of the data, from -2 to 1 for shape \(2, 4\).* Got 2"):
        MinMax("int8", x, 2)
    with pytest.raises(ValueError, match="`axis` must name different axes"):
        MinMax("int8", x, (0, -2))
    with pytest.raises(ValueError, match=r"`shape` must say how long `axis` is, for blocks of 64\. Got shape \(\)"):
        MinMax("int4")
    with pytest.raises(ValueError, match=r"`shape` must hold positive lengths\. Got \(0,\)"):
        MinMax("int4", (0,))
    for format in (eqq.Ternary(), eqq.Binary()):
        with pytest.raises(ValueError, match="`format` must take its scale from the extremes of a block. Got "):
            MinMax(format, x)
    for format in ("nf4", "fp8", "mxfp4"):
        with pytest.raises(ValueError, match="`format` must be one of integers. Got .*, such as `Percentile`"):
            MSERange(format, x)
    with pytest.raises((TypeError, TypeCheckError)):
        MinMax(8)


@pytest.mark.parametrize("lower, upper, remedy", [(0.001, 0.999, "99.9"), (0, 1, "100"), (0, 0.5, "50")])
def test_fractions_as_percentiles_are_an_error(lower, upper, remedy):
    with pytest.raises(ValueError, match=f"not fractions. Got upper={upper}. Write `upper={remedy}`"):
        Percentile(lower=lower, upper=upper)


def test_errors_of_given_scales():
    w, affine = jnp.ones((4, 8)), eqq.Int8(symmetric=False)
    quantize = ft.partial(eqq.quantize, w)
    with pytest.raises(ValueError, match="`zero_point` must come with `scale`"):
        quantize(affine, zero_point=3)
    with pytest.raises(ValueError, match="Got none, and .* has a zero point"):
        quantize(affine, scale=0.1)
    with pytest.raises(ValueError, match="Got one, and .* has no zero point"):
        quantize("int8", scale=0.1, zero_point=3)
    with pytest.raises(ValueError, match=r"`scale` must broadcast to \(4, 2\).* Got shape \(4, 3\)"):
        quantize(eqq.Int4(4), scale=jnp.ones((4, 3)))
    with pytest.raises(ValueError, match=r"`scale` must be finite"):
        quantize("int8", scale=jnp.nan)
    for zero in (256, -1, 0.5):
        with pytest.raises(ValueError, match="whole numbers from 0 to 255"):
            quantize(affine, scale=0.1, zero_point=zero)
    with pytest.raises(ValueError, match="whole numbers from 0 to 15"):
        quantize(eqq.Int4(symmetric=False), scale=0.1, zero_point=16)


@pytest.mark.long
def test_results_are_pytrees():
    result = compute_range(data((4, 6)), symmetric=False, block_size=None)
    assert isinstance(jtu.tree_map(lambda a: a, result), CalibrationResult)
    assert [a.shape for a in jtu.tree_leaves(result)] == [(4, 1)] * 4
    jitted = eqx.filter_jit(lambda x, r: r.quantize(x).dequantize())
    assert jitted(data((4, 6)), result).shape == (4, 6)
    assert math.prod(result.scale.shape) == 4


@pytest.mark.long
def test_mse_result_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    x = weights(jr.key(0), (2, 64))
    scales = jax.jit(
        jax.shard_map(lambda x: MSERange().update(x).result().scale[None], mesh=mesh, in_specs=spec, out_specs=spec)
    )
    expected = [MSERange().update(row).result().scale for row in x]
    np.testing.assert_array_equal(scales(x), expected)


def test_complex_data():
    with pytest.raises(TypeError, match="Data must be real. Got dtype complex64 in the data"):
        MinMax()._check(jnp.ones(3, jnp.complex64))
