"""`JointMSE`: offsets and both levels of quantized scales. The other promises of methods are in `test_methods.py`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._methods.joint import _choose_offsets, _Groups


JOINT = eqq.JointMSE()
# Signal to noise of ggml's own quantizer on the same values, in dB, as `tests/real_readers` prints it.
GGML = {"Q2_K": 10.57, "Q3_K": 16.39, "Q4_K": 22.92, "Q5_K": 28.80, "Q6_K": 35.00, "IQ4_NL": 22.33, "IQ4_XS": 22.27}
FORMATS = [getattr(eqq.formats, name)() for name in (*GGML, "Q4_1")]
FORMATS = [
    format if format == eqq.formats.Q3_K() else pytest.param(format, marks=pytest.mark.slow) for format in FORMATS
]


def values(shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def errors(x, q):
    return np.sum(np.square(np.asarray(x, np.float64) - np.asarray(q.dequantize(), np.float64)), axis=-1)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name == "Q4_K" else pytest.param(name, marks=pytest.mark.slow) for name in GGML]
)
def test_at_least_the_signal_to_noise_of_ggml(name):
    x = values((64, 1024))
    q = eqq.quantize(x, getattr(eqq.formats, name)(), method=JOINT)
    assert 10 * np.log10(np.sum(x**2) / errors(x, q).sum()) > GGML[name]


@pytest.mark.long
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    "length", [pytest.param(256, marks=pytest.mark.slow), 300, pytest.param(40, marks=pytest.mark.slow)]
)
def test_no_larger_errors_than_absmax_and_mse(format, length):
    x = values((6, length)) * np.exp(values((6, 1)))
    x[0] = 0
    x[1, :32] = 0
    x[2] = np.abs(x[2])
    x[3] *= 1e-30
    x[4, 7] *= 50
    of = lambda method: errors(x, eqq.quantize(x, format, method=method))
    found = of(JOINT)
    assert (found <= of(eqq.AbsMax()) * 1.0001).all() and found.sum() <= of(eqq.MSE()).sum() * 1.0001
    assert found[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("format", ["q4_k", pytest.param("q6_k", marks=pytest.mark.slow)])
def test_under_transformations(format):
    x = jnp.asarray(values((8, 512)))
    whole = eqq.quantize(x, format, method=JOINT)
    assert eqx.tree_equal(eqq.quantize(x[3], format, method=JOINT), jax.tree.map(lambda a: a[3], whole))
    assert eqx.tree_equal(eqx.filter_jit(lambda x: eqq.quantize(x, format, method=JOINT))(x), whole)
    assert eqx.tree_equal(eqq.requantize(whole, x, method=JOINT), whole)


@pytest.mark.long
def test_a_group_that_is_not_finite():
    x = jnp.asarray(values((2, 768))).at[0, 300].set(jnp.nan)
    dense = eqx.filter_jit(lambda x: eqq.quantize(x, "q4_k", method=JOINT).dequantize())(x)
    assert np.isnan(dense[0, 288:320]).all() and np.isfinite(dense[0, :256]).all() and np.isfinite(dense[1]).all()


@pytest.mark.long
def test_stochastic_rounding_keeps_the_scales():
    x = jnp.asarray(values((4, 256)))
    nearest = eqq.quantize(x, "q4_k", method=JOINT)
    moved = eqq.quantize(x, "q4_k", method=JOINT, key=jr.key(0))
    assert eqx.tree_equal(moved.scale, nearest.scale) and eqx.tree_equal(moved.offset, nearest.offset)
    assert not eqx.tree_equal(moved.codes, nearest.codes)


@pytest.mark.long
def test_other_formats_fall_back_to_mse():
    x = values((4, 128))
    for format in ("int4", eqq.Int4(symmetric=False)):
        assert eqx.tree_equal(eqq.quantize(x, format, method=JOINT), eqq.quantize(x, format, method=eqq.MSE()))


@pytest.mark.slow
def test_a_prefix_of_whole_groups_does_not_depend_on_the_rest():
    x = values((3, 600))
    whole, part = (eqq.quantize(a, "q3_k", method=JOINT).dequantize() for a in (x, x[:, :512]))
    np.testing.assert_array_equal(whole[:, :512], part)


@pytest.mark.parametrize(
    "format", ["q2_k", "q4_k", "q4_1", "iq4_xs", pytest.param("iq2_xs", marks=pytest.mark.slow), "int3"]
)
def test_weighs_errors_by_the_inputs(format):
    squares = np.exp(2 * values((256,)))
    x = values((16, 256))
    loss = lambda method: float((squares * np.square(x - eqq.quantize(x, format, method=method).dequantize())).sum())
    weighted = loss(eqq.JointMSE(squares))
    assert weighted < 0.9 * loss(JOINT) and weighted <= 1.0001 * loss(eqq.MSE(squares))
    if format == "q2_k":  # whose offsets are those of `AbsMax`
        assert weighted < 0.65 * loss(eqq.MSE(squares))


@pytest.mark.long
def test_equal_weights_are_none():
    x, ones = values((4, 512)), np.ones(512, np.float32)
    for format in ("q4_k", "q6_k", "iq2_xs"):
        found = eqq.quantize(x, format, method=eqq.JointMSE(ones)), eqq.quantize(x, format, method=JOINT)
        assert eqx.tree_equal(*found)


@pytest.mark.long
def test_statistics_of_stacks_and_trees():
    x, squares = values((2, 3, 8, 256)), np.exp(values((2, 1, 256)))
    q = eqq.quantize_tree({"w": x}, "q2_k", method=eqq.JointMSE({"w": np.repeat(squares, 3, 1)}))["w"]
    for a in range(2):
        for b in range(3):
            one = eqq.quantize(x[a, b], "q2_k", method=eqq.JointMSE(squares[a, 0]))
            assert eqx.tree_equal(jax.tree.map(lambda leaf: leaf[a, b], q), one)
    with pytest.raises(ValueError, match="second moments"):
        eqq.quantize(x, "q2_k", method=eqq.JointMSE(squares[..., :-1]))
    with pytest.raises(ValueError, match="must be finite"):
        eqq.quantize(x, "q2_k", method=eqq.JointMSE(squares[:, 0] * np.nan))


def test_groups_by_least_squares():
    """Errors, the floats of groups and moves of codes, in float64; of two rows with two groups each."""
    format = eqq.formats.Q4_K()
    nested = format.scale_format
    draw = np.random.default_rng(0)
    x, weights = draw.standard_normal((2, 2, 8, 32)), np.exp(draw.standard_normal((2, 2, 8, 32)))
    weights[1, 1, 6:] = 0  # padding
    codes = [draw.integers(20, 60, (2, 2, 8)).astype(np.uint8) for _ in range(2)]
    outer = (
        np.float32(np.float16([[0.01, 0.02], [0.005, 0.015]])),
        np.float32(np.float16([[-0.03, -0.04], [-0.02, 0.01]])),
    )
    values = lambda c: np.asarray(nested.decode(jnp.asarray(c)), np.float64)

    @jax.jit
    def compute(x, weights, *parts):
        groups = _Groups(x, weights, format, nested)
        parts = [parts[:2], parts[2:]]
        levels, _, _ = groups.levels(parts)
        moved = groups.move_codes(parts)
        fitted = groups.fit_floats(parts)
        single = _choose_offsets(x[0], weights[0], eqq.formats.Q4_1())
        return levels, groups.errors(parts), groups.errors(moved), moved, fitted, groups.clear_worse(parts), single

    arguments = (x, weights, codes[0], outer[0], codes[1], outer[1])
    arguments = (jnp.asarray(a, a.dtype if a.dtype == np.uint8 else jnp.float32) for a in arguments)
    levels, errors, after, moved, both, cleared, single = compute(*arguments)
    levels = np.asarray(levels, np.float64)
    scale, offset = (values(c) * o[..., None] for c, o in zip(codes, outer, strict=True))
    nearest = np.clip(np.round((x - offset[..., None]) / scale[..., None]), 0, 15)
    assert np.mean(levels == nearest) > 0.999
    error = lambda s, o, levels: np.sum(weights * (x - levels * s[..., None] - o[..., None]) ** 2, -1)
    np.testing.assert_allclose(errors, error(scale, offset, levels), rtol=1e-3)
    for index in np.ndindex(2, 2):
        root, y = np.sqrt(weights[index]).ravel(), x[index].ravel()
        u = (values(codes[0])[index][:, None] * levels[index]).ravel()
        v = np.repeat(values(codes[1])[index], 32)
        solution = np.linalg.lstsq(np.stack([u, v], 1) * root[:, None], y * root, rcond=None)[0]
        np.testing.assert_allclose([part[1][index] for part in both], solution, rtol=2e-3)
    assert (np.asarray(after) <= np.asarray(errors) * (1 + 1e-5)).all() and np.sum(after) < 0.95 * np.sum(errors)
    decoded = [values(c) for c, _ in moved]
    assert all(np.abs(new - values(old)).max() <= 8 for new, old in zip(decoded, codes, strict=True))
    new_scale, new_offset = (d * o[..., None] for d, o in zip(decoded, outer, strict=True))
    levels = np.clip(np.round((x - new_offset[..., None]) / new_scale[..., None]), 0, 15)
    np.testing.assert_allclose(after, error(new_scale, new_offset, levels), rtol=1e-3, atol=1e-4)
    worse = error(scale, offset, nearest) > np.sum(weights * x**2, -1)
    assert 0 < worse.mean() < 1
    for (c, _), old in zip(cleared, codes, strict=True):
        np.testing.assert_array_equal(c, np.where(worse, nested.encode(jnp.zeros(())), old))
    # Of blocks alone: no scales and offsets have a much smaller error for their levels.
    scale, offset = (np.asarray(x, np.float64)[..., None] for x in single)
    level = np.clip(np.round((x[0] - offset) / scale), 0, 15)
    columns = np.stack([level, np.ones_like(level)], -1) * np.sqrt(weights[0])[..., None]
    y = x[0] * np.sqrt(weights[0])
    best = sum(np.linalg.lstsq(columns[index], y[index], rcond=None)[1][0] for index in np.ndindex(2, 8))
    assert np.sum(weights[0] * (x[0] - level * scale - offset) ** 2) <= 1.03 * best
