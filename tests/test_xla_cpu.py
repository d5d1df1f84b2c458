"""`xla` on CPU against float64: every format, in parts and in steps of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._formats.layout import make_layout
from eqquant._matmul import dispatch
from eqquant._matmul.kernels import xla_cpu

from .helpers import FORMATS, KINDS, mark_slow, relative_error, SWEPT_SCALARS, weights


N, K = 40, 1100  # two segments or more of each packing, and a rest


def product(x, q, transpose):
    layout = make_layout(q.format, q.shape[-1])
    f = lambda x, q: xla_cpu.matmul(
        x, dispatch.as_packed_weight(q), layout, q.dtype, transpose=transpose, precision="highest"
    )
    return jax.jit(f)(x, q)


def error(y, x, q, transpose):
    dense = np.asarray(q.dequantize(), np.float64)
    return relative_error(y, np.asarray(x, np.float64) @ (dense if transpose else np.swapaxes(dense, -1, -2)))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", SWEPT_SCALARS)
def test_every_format(getkey, monkeypatch, name, steps, transpose):
    q = eqq.quantize(weights(getkey(), (N, K)), FORMATS[name].format)
    if steps > 1:  # of 13 rows, and one row that is left
        planes = make_layout(q.format, K).planes
        monkeypatch.setattr(xla_cpu, "ROWS_BYTES", 13 * 4 * K // planes + 1)
    x = weights(getkey(), (3, N if transpose else K))
    assert error(product(x, q, transpose), x, q, transpose) < 1e-6


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("k", mark_slow(2, [1, 64, 129, 63, 600, 128]))
@pytest.mark.parametrize("format", [eqq.Int4(block_size=48), eqq.Int2(block_size=20), eqq.Int8(block_size=96), "int2"])
def test_blocks_and_lengths(getkey, format, k, transpose):
    q = eqq.quantize(weights(getkey(), (5, k)), format)
    x = weights(getkey(), (2, 5 if transpose else k))
    assert error(product(x, q, transpose), x, q, transpose) < 1e-6


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("name", mark_slow(2, KINDS))
@pytest.mark.parametrize(
    "xdtype, wdtype, tol", [("bfloat16", "bfloat16", 6e-3), ("float16", "float16", 1e-3), ("float32", "bfloat16", 1e-6)]
)
def test_dtypes(getkey, name, xdtype, wdtype, tol, transpose):
    """Weights of 16 bits are rounded to them where `x` has more."""
    q = eqq.quantize(weights(getkey(), (N, K)), FORMATS[name].format, dtype=wdtype)
    x = weights(getkey(), (3, N if transpose else K)).astype(xdtype)
    y = product(x, q, transpose)
    assert y.dtype == x.dtype and error(y, x, q, transpose) < tol


@pytest.mark.long
@pytest.mark.parametrize("limit", [2**21, 2**12])
def test_batches(getkey, monkeypatch, limit):
    monkeypatch.setattr(xla_cpu, "ROWS_BYTES", limit)
    q, x = eqq.quantize(weights(getkey(), (2, 3, N, 200)), "nf4"), weights(getkey(), (2, 3, 4, 200))
    assert error(product(x, q, False), x, q, False) < 1e-6
    assert error(product(x[..., :N], q, True), x[..., :N], q, True) < 1e-6
    for shape in ((0, 4, 200), (3, 0, 200)):
        none = eqq.quantize(jnp.ones((shape[0], N, 200)), "nf4")
        assert product(jnp.ones(shape), none, False).shape == (*shape[:-1], N)


def test_values_beyond_bfloat16_are_its_largest():
    """Scales are float32, so the outermost level may be beyond: it is not infinite, as with `dequantize`."""
    scale, zero = jnp.full((1, 1), 3.3985e38 / 15), jnp.zeros((1, 1), jnp.uint8)
    q = eqq.quantize(jnp.full((1, 64), 3.38e38, jnp.bfloat16), eqq.Int4(symmetric=False), scale=scale, zero_point=zero)
    y = product(jnp.eye(1, 64), q, False)
    assert float(y[0, 0]) == float(q.dequantize()[0, 0]) == float(jnp.finfo(jnp.bfloat16).max)
