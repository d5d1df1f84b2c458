"""`cpu_int8`, integers times integers, against NumPy's integers."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._formats.layout import make_layout
from eqquant._matmul import dispatch
from eqquant._matmul.kernels import cpu_int8
from eqquant._matmul.rows import DynamicRows
from eqquant._native import library as native

from .helpers import weights


pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=str(native.refusal()))
FORMATS = {
    "int8": eqq.Int8(),
    "int8_blocks": eqq.Int8(block_size=64),
    "int8_affine": eqq.Int8(symmetric=False),
    "int4": eqq.Int4(),
    "int4_32": eqq.Int4(block_size=32),
    "int4_odd": eqq.Int4(block_size=50, symmetric=False),
    "int2": eqq.Int2(symmetric=False),
    "ternary": eqq.Ternary(),
    "binary": eqq.Binary(),
    "q4_0": eqq.formats.Q4_0(),
    "q8_0": eqq.formats.Q8_0(),
    "int6": eqq.Int6(),
    "int5_odd": eqq.Int5(block_size=40, symmetric=False),
    "q6_k": eqq.formats.Q6_K(),
}


def unpack_codes(key, shape):
    return jr.randint(key, shape, -127, 128, jnp.int8)


def product(x, q, **options):
    layout = make_layout(q.format, q.shape[-1])
    dtype = options.get("dtype", x.dtype)
    assert cpu_int8.refusal(layout, x.shape[-2], q.shape[-2], dtype) is None
    return cpu_int8.matmul(x, dispatch.as_stored_weight(q), layout, **options)


def compute_expected(x, x_scale, q):
    """Integer sums of blocks, scaled in float64; and the sums of their magnitudes."""
    layout, packed = make_layout(q.format, q.shape[-1]), dispatch.as_packed_weight(q)
    whole = np.asarray(layout.table, np.int64)[np.asarray(eqq.unpack(q))]
    block = np.arange(q.shape[-1]) // layout.block_size
    if packed.zero_point is not None:
        whole = whole - np.asarray(packed.zero_point, np.int64)[..., block]
    sums = np.stack(
        [np.asarray(x, np.int64)[..., block == b] @ np.swapaxes(whole[..., block == b], -1, -2) for b in set(block)]
    )
    scale = np.moveaxis(np.asarray(q.scale, np.float64), -1, 0)[:, ..., None, :] * np.asarray(x_scale, np.float64)
    return (sums * scale).sum(0), np.abs(sums * scale).sum(0)


def check(y, x, x_scale, q):
    e, magnitude = compute_expected(x, x_scale, q)
    assert y.shape == e.shape
    rounding = {"float32": 0, "bfloat16": 2.0**-8, "float16": 2.0**-10}[jnp.dtype(y.dtype).name]
    assert (np.abs(np.asarray(y, np.float64) - e) <= 2e-6 * magnitude + rounding * np.abs(e)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_product(getkey, name):
    q = eqq.quantize(weights(getkey(), (50, 582)), FORMATS[name])
    for m in (1, 3, 20, 70):
        x, x_scale = unpack_codes(getkey(), (m, 582)), jnp.abs(weights(getkey(), (m, 1)))
        check(product(x, q, x_scale=x_scale, dtype=jnp.float32), x, x_scale, q)


@pytest.mark.parametrize("k", [576, 768, 992])
@pytest.mark.parametrize(
    "name", ["q4_1", "q5_0", "q5_1", "q2_k", "q4_k", "q6_k", "mlx4", "mxfp4", "nvfp4", "int4", "iq4_nl"]
)
def test_block_formats_at_widths_that_end_within_a_segment(getkey, name, k):
    """Offsets meet sums of codes of x, and halves of integers are doubled."""
    w = weights(getkey(), (21, k))
    try:
        q = eqq.quantize(w, name)
    except ValueError:  # blocks of 256 ask for a multiple
        assert k % 256 != 0
        return
    assert make_layout(q.format, k).offsets == (name in ("q4_1", "q5_1", "q2_k", "q4_k", "mlx4"))
    for m in (1, 3, 20):
        x, x_scale = unpack_codes(getkey(), (m, k)), jnp.abs(weights(getkey(), (m, 1)))
        rows, dense = np.asarray(x, np.float64) * np.asarray(x_scale), np.asarray(q.dequantize(), np.float64)
        y = product(x, q, x_scale=x_scale, dtype=jnp.float32)
        np.testing.assert_allclose(
            y, rows @ dense.T, rtol=0, atol=4e-6 * np.abs(rows).sum(1).max() * np.abs(dense).max()
        )
    chosen = eqq.explain_matmul(weights(getkey(), (1, k)), eqq.quantize_activations({"w": q}, "int8")["w"].T)
    assert "cpu_int8" in str(chosen).partition("chosen")[0].splitlines()[-1]


@pytest.mark.parametrize("m", [1, 5, 40])
def test_equals_integers_to_the_bit(getkey, m):
    """With scales of powers of two nothing is rounded while sums stay below 2^24."""
    for k in (200, 1024):
        w = unpack_codes(getkey(), (40, k)).at[:, 0].set(127)
        q = eqq.quantize(w.astype(jnp.float32), "int8")
        x = unpack_codes(getkey(), (m, k))
        y = product(x, q, x_scale=jnp.full((m, 1), 0.5), dtype=jnp.float32)
        whole = np.asarray(x, np.int64) @ np.asarray(w, np.int64).T
        assert np.abs(whole).max() < 2**24
        np.testing.assert_array_equal(np.asarray(y), whole / 2)
        unsigned = (x.astype(jnp.int16) + 128).astype(jnp.uint8)
        np.testing.assert_array_equal(product(unsigned, q, x_scale=jnp.full((m, 1), 0.5), dtype=jnp.float32), y)


@pytest.mark.parametrize("m", [1, 20])
def test_sums_that_fill_32_bits(m):
    """Every product has its largest magnitude, along a row that is longer than one sum may be."""
    k = 100_000
    q = eqq.quantize(jnp.full((3, k), -1.0), "int8")
    y = product(jnp.full((m, k), -128, jnp.int8), q, x_scale=jnp.ones((m, 1)), dtype=jnp.float32)
    np.testing.assert_allclose(y, np.full((m, 3), 128.0 * k), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 33])
def test_the_kernel_quantizes_rows(getkey, m, dtype):
    x = weights(getkey(), (m, 300)).astype(dtype).at[0, 3].set(0)
    q = eqq.quantize(weights(getkey(), (24, 300)), "int4")
    floats = np.asarray(x.astype(jnp.float32))
    x_scale = np.abs(floats).max(-1, keepdims=True) / np.float32(127)
    y = product(x, q)
    assert y.dtype == x.dtype
    check(y, np.rint(floats / x_scale), x_scale, q)


@pytest.mark.parametrize("weight", ["int8", "int4", "int4_odd", "ternary"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("m", [1, 4, 33])
def test_the_kernel_quantizes_rows_with_zero_points(getkey, m, dtype, weight):
    """A range of 255 units has codes without a tie, so that the last bit of its scale changes none of them."""
    whole = jr.randint(getkey(), (m, 300), -64, 192).at[:, 5].set(-64).at[:, 7].set(191)
    x = (whole / 8).astype(dtype)
    rows = DynamicRows(x, eqq.Int8(symmetric=False)).quantize()
    q = eqq.quantize(weights(getkey(), (24, 300)), FORMATS[weight])
    y = product(x, q, affine=True)
    assert y.dtype == x.dtype
    check(y, whole, jnp.full((m, 1), 1 / 8), q)
    check(product(rows.codes, q, x_scale=rows.scale, x_zero=rows.zero_point, dtype=x.dtype), whole, rows.scale, q)


@pytest.mark.parametrize("scale", [0.02, 1 / 3, 1e-12, 3e-38, 1e37])
@pytest.mark.parametrize("zero", [None, 0, 131, 255])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kernel_quantizes_rows_by_static_scales(getkey, dtype, zero, scale):
    """As it multiplies codes by NumPy's division: with ties, values that are clipped, and rows that are not finite."""
    scale, most = np.float32(scale), float(jnp.finfo(dtype).max)
    q = eqq.quantize(weights(getkey(), (24, 300)) / 1e6, "int4")
    for m, column_major in ((1, False), (4, False), (35, False), (35, True)):
        units = np.array(300 * weights(getkey(), (m, 300)))
        units[0, :150] = np.arange(150) - 75.5  # ties
        with np.errstate(over="ignore"):
            x = jnp.asarray(np.clip(units * scale, -most, most)).astype(dtype)
        x = x.at[m - 1, :3].set(jnp.asarray([0, most, -most]).astype(dtype))
        floats = np.asarray(x.astype(jnp.float32))
        with np.errstate(over="ignore"):
            whole = np.rint(floats / scale + np.float32(zero or 0))
        codes = np.clip(whole, *((-128, 127) if zero is None else (0, 255))) + (128 if zero is None else 0)
        x_scale, x_zero = jnp.full((m, 1), scale), None if zero is None else jnp.full((m, 1), zero, jnp.uint8)
        given = {"x_scale": x_scale, "x_zero": x_zero, "column_major": (column_major, False)}
        wanted = product(jnp.asarray(codes.astype(np.uint8)), q, dtype=x.dtype, **given).astype(jnp.float32)
        y = product(x, q, **given)
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y.astype(jnp.float32), wanted)
        for odd in (jnp.nan, jnp.inf, -jnp.inf):
            y = product(x.at[m // 2, 299].set(odd), q, **given)
            np.testing.assert_array_equal(y.astype(jnp.float32), wanted.at[m // 2].set(jnp.nan))


def test_zero_points_at_the_ends(getkey):
    """Codes less zero points have nine bits."""
    x = jnp.stack([jnp.zeros(500, jnp.uint8), jnp.full(500, 255, jnp.uint8)])
    w = jnp.full((3, 500), 127.0).at[1].set(-127)
    x_zero = jnp.array([[255], [0]], jnp.uint8)
    y = product(x, eqq.quantize(w, "int8"), x_scale=jnp.ones((2, 1)), x_zero=x_zero, dtype=jnp.float32)
    most = 255 * 127 * 500
    np.testing.assert_array_equal(y, [[-most, most, -most], [most, -most, most]])


def test_rows_that_are_zero_or_not_finite(getkey):
    q = eqq.quantize(weights(getkey(), (24, 300)), "int8")
    for m in (4, 30):
        x = weights(getkey(), (m, 300)).at[0].set(0).at[1, 7].set(jnp.nan).at[2, 9].set(jnp.inf)
        for affine in (False, True):
            y = np.asarray(product(x, q, affine=affine))
            assert (y[0] == 0).all() and np.isnan(y[1:3]).all() and np.isfinite(y[3:]).all()
    assert np.isnan(np.asarray(product(jnp.full((1, 300), -jnp.inf), q))).all()


@pytest.mark.parametrize("m", [1, 40])
def test_batches_and_orders(getkey, m):
    q = eqq.quantize(weights(getkey(), (2, 3, 24, 130)), "int4")
    x, x_scale = unpack_codes(getkey(), (2, 3, m, 130)), jnp.abs(weights(getkey(), (2, 3, m, 1)))
    y = product(x, q, x_scale=x_scale, dtype=jnp.float32)
    check(y, x, x_scale, q)
    options = dict(x_scale=x_scale, dtype=jnp.float32)
    packed, layout = dispatch.as_stored_weight(q), make_layout(q.format, 130)
    np.testing.assert_array_equal(cpu_int8.matmul(x, packed, layout, column_major=(True, False), **options), y)
    np.testing.assert_array_equal(cpu_int8.matmul(x, packed, layout, column_major=(False, True), **options), y)


def test_non_integer_operands_are_refused(getkey):
    for format, why in (("nf4", "integers of at most eight bits"), ("fp8", "consecutive"), ("dynamic8", "consecutive")):
        layout = make_layout(eqq.quantize(weights(getkey(), (8, 256)), format).format, 256)
        assert why in (cpu_int8.refusal(layout, 2, 8, jnp.float32) or "")
    layout = make_layout(eqq.Int8(), 256)
    assert "not float64" in (cpu_int8.refusal(layout, 2, 8, jnp.dtype("float64")) or "")
    assert "nothing" in (cpu_int8.refusal(layout, 0, 8, jnp.float32) or "")


def test_wrong_operands_do_not_crash(getkey):
    q = eqq.quantize(weights(getkey(), (8, 256)), "int8")
    layout, packed = make_layout(q.format, 256), dispatch.as_stored_weight(q)
    x, ones, one = unpack_codes(getkey(), (2, 256)), jnp.ones((2, 1)), jnp.ones((2, 1), jnp.uint8)
    for args, options, why in (
        ((x[:, :255], packed, layout), {"x_scale": ones}, "x and the weight do not fit"),
        ((x, packed, layout), {}, "differ in number"),
        ((x, packed, layout), {"x_scale": ones[:1]}, "scales of x"),
        ((x, packed, layout._replace(table=tuple(np.arange(256.0) / 2))), {"x_scale": ones}, "not integers"),
        ((x, packed._replace(codes=packed.codes[:, :100]), layout), {"x_scale": ones}, "bytes"),
        ((x.astype(jnp.float16), packed, layout), {"x_scale": ones}, "int8, uint8 or of the type of the result"),
        ((x, packed, layout), {"x_scale": ones, "x_zero": one}, "must be uint8"),
        ((x.astype(jnp.float32), packed, layout), {"x_scale": ones[:1]}, "scales of x"),
        ((x.astype(jnp.float32), packed, layout), {"x_scale": ones, "affine": True}, "differ in number"),
    ):
        with pytest.raises(Exception, match=why):
            jax.block_until_ready(cpu_int8.matmul(*args, dtype=jnp.float32, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", native.instruction_sets())
def test_each_instruction_set(name):
    code = """
import jax, jax.numpy as jnp, numpy as np, eqquant as eqq
from eqquant._matmul import dispatch
from eqquant._native import library as native
from eqquant._matmul.kernels import cpu_int8
from eqquant._matmul.problem import make_layout
import os
assert native.isa() == os.environ["EQQUANT_CPU_ISA"]
for m in (1, 4, 40):
    w = jax.random.randint(jax.random.key(m), (50, 700), -127, 128, jnp.int8).at[:, 0].set(127)
    x = jax.random.randint(jax.random.key(9), (m, 700), -127, 128, jnp.int8)
    q = eqq.quantize(w.astype(jnp.float32), "int8")
    options = dict(x_scale=jnp.ones((m, 1)), dtype=jnp.float32)
    y = cpu_int8.matmul(x, dispatch.as_stored_weight(q), make_layout(q.format, 700), **options)
    np.testing.assert_array_equal(y, np.asarray(x, np.int64) @ np.asarray(w, np.int64).T)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "EQQUANT_CPU_ISA": name})
