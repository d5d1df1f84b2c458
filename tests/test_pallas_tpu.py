"""`pallas_tpu` against the dense product, on the CPU, as Pallas interprets it."""

import functools as ft

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._formats.layout import make_layout
from eqquant._matmul import dispatch
from eqquant._matmul.kernels import pallas_tpu, vpu
from eqquant._matmul.kernels.target import TargetDevice
from eqquant._native.weight import Layout

from .helpers import FORMATS, kernel_cases, KINDS_IN_KERNELS, mark_slow, relative_error, weights


N, K = 140, 1094  # a tile and a part of one; for every number of bits whole pairs of segments, and a rest
REFUSED = ("dynamic8", "codebook_256")  # 256 values are too many to look up
TAKEN = [*(name for name in KINDS_IN_KERNELS if name not in REFUSED), "int8_affine"]


def product(getkey, name, m, dtype, transpose, precision):
    """The result, and its relative error."""
    format = FORMATS[name].format
    q = eqq.quantize(weights(getkey(), (N, K)), format)
    x = weights(getkey(), (m, N if transpose else K)).astype(dtype)
    layout = make_layout(format, K)
    options = {"transpose": transpose, "precision": precision}
    assert pallas_tpu.refusal(layout, m, N, x.dtype, target=TargetDevice("tpu"), **options) is None
    y = pallas_tpu.matmul(x, dispatch.as_packed_weight(q), layout, interpret=True, **options)
    dense = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (dense if transpose else dense.T)
    return y, relative_error(y, expected)


@pytest.mark.long
@pytest.mark.parametrize("name, m", kernel_cases(without=REFUSED))
def test_product(getkey, name, m):
    y, error = product(getkey, name, m, jnp.bfloat16, False, "default")
    assert y.dtype == jnp.bfloat16 and error < 4e-3


@pytest.mark.long
@pytest.mark.parametrize("m", [64])
@pytest.mark.parametrize("name", mark_slow(3, TAKEN))
def test_transposed_product(getkey, name, m):
    _, error = product(getkey, name, m, jnp.bfloat16, True, "default")
    assert error < 4e-3


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("name", mark_slow(4, TAKEN))
@pytest.mark.parametrize("precision, tol", [("highest", 1e-6), ("default", 4e-3)])
def test_float32(getkey, name, precision, tol, transpose):
    y, error = product(getkey, name, 5, jnp.float32, transpose, precision)
    assert y.dtype == jnp.float32 and error < tol


@pytest.mark.long
def test_unsupported_products():
    layout = lambda format, k=K: make_layout(eqq.quantize(jnp.ones((1, k)), format).format, k)
    why = ft.partial(
        pallas_tpu.refusal,
        m=1,
        n=8,
        dtype=jnp.bfloat16,
        transpose=False,
        precision="default",
        target=TargetDevice("tpu"),
    )
    assert why(layout("nf4")) is None
    assert "blocks of 48" in why(layout(eqq.Int4(block_size=48)))
    assert "rows of 255 codes" in why(layout("nf4", 255))
    assert "256 values" in why(layout("dynamic8"))
    assert "lie in several" in why(layout("int3"))
    for dtype in (jnp.float16, jnp.float64):
        assert "not native" in why(layout("nf4"), dtype=dtype)
    assert "nothing" in why(layout("nf4"), m=0) and "nothing" in why(layout("nf4"), n=0)
    assert "do not fit into VMEM" in why(layout("int8", 2**22))


def test_config_of_a_device(monkeypatch):
    layouts = {bits: make_layout(format, 128) for bits, format in ((4, eqq.NF4()), (8, eqq.Int8()))}
    own = pallas_tpu.Config(8, 128, 1)
    monkeypatch.setitem(pallas_tpu.CONFIGS, ("v9", 4, "blocks"), own)
    assert pallas_tpu.tune("TPU v9 lite", layouts[4]) == own != pallas_tpu.tune("TPU v5", layouts[4])
    assert pallas_tpu.tune("TPU v9 lite", layouts[8]) == pallas_tpu.CONFIGS["any", 8, "per_channel"]


def test_tiles_shrink_until_they_fit():
    def tiling(length, transpose, config=pallas_tpu.CONFIGS["any", 4, "blocks"]):
        layout = make_layout(eqq.NF4(), length)
        return pallas_tpu._tiling(layout, 999, 8, jnp.bfloat16, transpose, "default", config)

    # The bytes of two tiles: codes and scales, twice and of a multiple of 128 lanes; then copies of `x`, or results.
    for transpose, rows in ((False, 64 * 8320 * 2 * 2), (True, 64 * 8320 * 4)):
        found = tiling(130 * 64, transpose)
        assert (found.tile_m, found.tile_n, found.copies) == (64, 256, 2)
        assert found.vmem_bytes == 2 * (256 * (4160 - 64 + 8 * 256) + rows // 8320 * 8192) + 2**23
    for length, tiles in ((2**16, (32, 256)), (2**17, (16, 128))):
        found = tiling(length, False)
        assert (found.tile_m, found.tile_n) == tiles and found.vmem_bytes <= pallas_tpu.VMEM_BYTES
    assert tiling(2**17, False, pallas_tpu.Config(64, 192, 8)).tile_n == 128


def test_float16_from_its_bits():
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(np.float16).astype(np.float32)
    found = np.asarray(vpu.decode_float16(jnp.asarray(bits)))
    number = ~np.isnan(values)
    assert (np.isnan(found) != number).all()
    np.testing.assert_array_equal(found.view(np.uint32)[number], values.view(np.uint32)[number])  # and signs of zero


def test_both_halves_of_a_table_share_registers():
    """A zero in the first half may meet a negative value in the second."""
    table = (0.0, 3.0, 0.5, 1.0, -2.0, 0.25, 7.0, 5.0, -1.0, 2.0, -0.5, 0.0, -4.0, 9.0, -6.0, 8.0)
    decoder = vpu.Decoder(Layout(128, 4, 64, table), jnp.bfloat16)
    first, second = np.split((np.asarray(table, np.float32) / np.float32(decoder.step)).astype(jnp.bfloat16), 2)
    pairs = jnp.asarray(decoder.table()[:8])
    as_float = lambda bits: np.asarray(bits).view(np.float32)
    np.testing.assert_array_equal(as_float(pairs << 16), second.astype(np.float32))
    found = as_float(pairs).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(found, first.astype(np.float32), rtol=0, atol=1e-38)
