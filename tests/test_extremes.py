"""No format and no method is worse than zeros, however small or large values are."""

import itertools as it

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._formats.base import has_offsets

from .helpers import FORMATS, KINDS, SCALARS, VECTORS


LENGTH = 256
GRAM = np.eye(LENGTH, dtype=np.float32)
METHODS = {
    "absmax": eqq.AbsMax(),
    "mse": eqq.MSE(),
    "hqq": eqq.HQQ(),
    "joint": eqq.JointMSE(),
    "gptq": eqq.GPTQ(gram=GRAM),
    "learned": eqq.LearnedRounding(gram=GRAM, rounds=1),
}
SIZES = [1e-45, 1e-42, 2e-38, 1e-37, 1e-36, 1e-30, 1e-20, *np.geomspace(1e-9, 1e-3, 13), 1, 1e3]
SIZES += [*np.geomspace(1e4, 1e6, 4), 1e10, 1e20, 1e30, 1e37, 5e37, 1.2e38, 2e38, 3.4e38]
OFFSETS = [name for name, row in FORMATS.items() if has_offsets(row.format)]


def values():
    """For each size rows of both signs and of one, far from zero, of all magnitudes, of small and large blocks."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(7, LENGTH))
    rows /= np.abs(rows).max()
    rows[1], rows[2], rows[3] = np.abs(rows[1]), -np.abs(rows[2]), 0.9 + 0.1 * rows[3]
    rows[4] = np.sign(rows[4]) * 10.0 ** rng.uniform(-6, 0, LENGTH)
    rows[5] *= np.repeat(10.0 ** rng.uniform(-5, 0, 8), 32)
    rows[6] *= rng.random(LENGTH) < 0.1
    return np.stack([rows * size for size in SIZES]).astype(np.float32)


def norms(x, size):
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, size)
    return np.sqrt(np.square(blocks).sum(-1))


def quantize_values(x, format, method):
    quantize = lambda x: eqq.quantize(x, format, method=method)
    alone = "tensor" in (format.block_size, getattr(format.scale_format, "block_size", None))
    # Rows that share a scale would hide each other.
    return np.asarray((jax.vmap(jax.vmap(lambda x: quantize(x[None])[0])) if alone else quantize)(jnp.asarray(x)))


def is_slow(name, method):
    return method == "learned" or (method != "absmax" and name not in (*OFFSETS, *KINDS))


CASES = [
    pytest.param(name, method, marks=pytest.mark.slow if is_slow(name, method) else ())
    for method, name in it.product(METHODS, SCALARS)  # vectors have no zero
]


@pytest.mark.parametrize("name, method", CASES)
def test_never_worse_than_zeros(name, method):
    format, x = FORMATS[name].format, values()
    dense = quantize_values(x, format, METHODS[method])
    assert np.isfinite(dense).all()
    # Learned rounding weighs all errors of a row against each other.
    size = format.block_size if isinstance(format.block_size, int) and method != "learned" else LENGTH
    error, all_lost = norms(dense.astype(np.float64) - x, size), norms(x, size)
    # A float16 rounds a scale by 2**-11, and float32 flushes subnormal numbers.
    worse = error > all_lost * (1 + 2**-10) + 2.0**-120
    assert not worse.any(), [
        (SIZES[i], row, error[i, row, n] / all_lost[i, row, n]) for i, row, n in np.argwhere(worse)
    ]


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q2_k"])
def test_scales_of_scales_do_not_vanish(name):
    """Values of 1e-5 have relative errors as small as values of one, up to float16 scales."""
    x = np.random.default_rng(1).normal(size=(8, LENGTH)).astype(np.float32)
    error = lambda x: np.linalg.norm(quantize_values(x, FORMATS[name].format, eqq.AbsMax()) - x) / np.linalg.norm(x)
    assert error(1e-5 * x) < 1.2 * error(x)


@pytest.mark.parametrize("name", OFFSETS)
def test_blocks_far_from_zero_keep_their_offset(name):
    """A scale that vanishes beside an offset is right where all values are alike."""
    x = np.full((2, LENGTH), 3e-2, np.float32)
    x[1, ::2] += 1e-8
    np.testing.assert_allclose(quantize_values(x, FORMATS[name].format, eqq.AbsMax()), x, rtol=0.01)


@pytest.mark.parametrize("name", OFFSETS)
def test_small_blocks_next_to_large_ones_keep_their_values(name):
    """Of a block whose scale the group cannot hold, zeros are left, not its offset."""
    x = np.zeros((1, LENGTH), np.float32)
    x[0, :64], x[0, 64] = np.random.default_rng(2).normal(size=64), -0.02
    x[0, 65:128] = 1e-4
    dense = quantize_values(x, FORMATS[name].format, eqq.AbsMax())
    size = FORMATS[name].format.block_size or LENGTH
    assert (norms(dense - x, size) <= norms(x, size) * (1 + 2**-10)).all()


EMPTY = [(4, 0), (0, 8), (2, 0, 64), (0,), (3, 0, 0)]
EMPTY_CASES = [
    pytest.param(name, method, marks=() if method == "absmax" or name in KINDS else pytest.mark.slow)
    for name, method in it.product(FORMATS, METHODS)
]


@pytest.mark.parametrize("name, method", EMPTY_CASES)
def test_empty_arrays(name, method):
    if name in VECTORS and method in ("gptq", "learned"):
        pytest.skip("it rounds value by value")
    for shape in EMPTY if name in ("nf4", "q4_k", "mlx_channel") else EMPTY[:1]:
        gram = {"gram": jnp.eye(shape[-1])}
        found_by = {"gptq": eqq.GPTQ(**gram), "learned": eqq.LearnedRounding(**gram)}.get(method, METHODS[method])
        q = eqq.quantize(jnp.zeros(shape), FORMATS[name].format, method=found_by)
        assert q.shape == q.dequantize().shape == shape
        again = eqq.requantize(q, jnp.zeros(shape))
        assert jax.tree.structure(again) == jax.tree.structure(q)
        if len(shape) == 2:
            assert not np.asarray(q @ jnp.ones(shape[-1])).any()
