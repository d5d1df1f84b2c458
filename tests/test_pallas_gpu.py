"""`pallas_gpu` on the CPU: its kernels, as Pallas interprets them, against the dense product; and its PTX, emulated."""

import functools as ft
import itertools as it

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._formats.layout import make_layout
from eqquant._matmul import dispatch
from eqquant._matmul.kernels.target import TargetDevice
from eqquant._matmul.kernels.triton import product as pallas_gpu, ptx

from .helpers import FORMATS, kernel_cases, KINDS_IN_KERNELS, mark_slow, relative_error, weights
from .ptx import emulate, groups_of_bytes, halves


N, K = 72, 582  # a whole and a partial tile of rows; for every number of bits, segments and a remainder


def operands(getkey, format, m, dtype, transpose):
    q = eqq.quantize(weights(getkey(), (N, K)), format)
    x = weights(getkey(), (m, N if transpose else K)).astype(dtype)
    dense = np.asarray(q.dequantize(), np.float64)
    return x, q, np.asarray(x, np.float64) @ (dense if transpose else dense.T)


def run_interpreted(x, q, transpose, **options):
    layout = make_layout(q.format, K)
    options = {"transpose": transpose, "precision": "default", **options}
    problem = {"transpose": transpose, "precision": "default", "target": TargetDevice("cuda")}
    assert pallas_gpu.refusal(layout, x.shape[0], N, x.dtype, **problem) is None
    return pallas_gpu.matmul(x, dispatch.as_packed_weight(q), layout, interpret=True, **options)


@pytest.mark.parametrize("name, m", kernel_cases())
def test_product(getkey, name, m):
    x, q, expected = operands(getkey, FORMATS[name].format, m, jnp.bfloat16, False)
    y = run_interpreted(x, q, False)
    assert y.dtype == x.dtype and relative_error(y, expected) < 4e-3


@pytest.mark.long
@pytest.mark.parametrize("m", [64])
@pytest.mark.parametrize("name", mark_slow(3, KINDS_IN_KERNELS))
def test_transposed_product(getkey, name, m):
    x, q, expected = operands(getkey, FORMATS[name].format, m, jnp.bfloat16, True)
    assert relative_error(run_interpreted(x, q, True), expected) < 4e-3


@pytest.mark.parametrize("name", ["nf4", "dynamic8"])
@pytest.mark.parametrize("dtype, tol", [(jnp.bfloat16, 4e-3), (jnp.float16, 5e-4)])
def test_rounding_the_table_does_not_add_up(getkey, name, dtype, tol):
    """Where `x` has a mean, errors of one sign would grow with the length of a row: to 1.3e-2 for NF4 in bfloat16."""
    k = 4096
    q = eqq.quantize(weights(getkey(), (72, k)), FORMATS[name].format)
    x = (weights(getkey(), (4, k)) + 0.5).astype(dtype)
    layout = make_layout(q.format, k)
    y = pallas_gpu.matmul(x, dispatch.as_packed_weight(q), layout, transpose=False, precision="default", interpret=True)
    assert relative_error(y, np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64).T) < tol


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("name", mark_slow(4, KINDS_IN_KERNELS))
@pytest.mark.parametrize("dtype, tol", [("float32", 1e-6), ("float16", 6e-4)])
def test_dtypes(getkey, name, dtype, tol, transpose):
    x, q, expected = operands(getkey, FORMATS[name].format, 5, dtype, transpose)
    y = run_interpreted(x, q, transpose, precision="highest")
    assert y.dtype == x.dtype and relative_error(y, expected) < tol


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("levels", [np.linspace(-1e-6, 2e-6, 16), np.linspace(-1e6, 2e6, 16), 10**6 + np.arange(16)])
def test_values_beyond_float16(getkey, levels, transpose):
    """With more rows than those for which the kernel scales partial sums."""
    x, q, expected = operands(getkey, eqq.Codebook(levels), 64, jnp.float16, transpose)
    assert relative_error(run_interpreted(x, q, transpose), expected) < 6e-4


@pytest.mark.parametrize("n, k", mark_slow(3, [(65, 128), (1, 129), (200, 1000)]))
@pytest.mark.parametrize("split", [1, 7])
@pytest.mark.parametrize(
    "tile_m, weight_left, transpose", [(16, False, False), (16, True, False), (1, False, False), (16, False, True)]
)
def test_tiles_and_parts(getkey, n, k, split, tile_m, weight_left, transpose):
    """The result does not depend on tiles, some of which end beyond it, and parts, of which there may be too many."""
    q, m = eqq.quantize(weights(getkey(), (n, k)), "nf4"), 17
    x = weights(getkey(), (m, n if transpose else k))
    config = pallas_gpu.Config(tile_m, 64, weight_left=weight_left, split=split)
    layout = make_layout(q.format, k)
    y = pallas_gpu.matmul(
        x, dispatch.as_packed_weight(q), layout, transpose=transpose, precision="highest", config=config, interpret=True
    )
    dense = np.asarray(q.dequantize(), np.float64)
    assert relative_error(y, np.asarray(x, np.float64) @ (dense if transpose else dense.T)) < 1e-6


def test_unsupported_products():
    layout = lambda format, k=K: make_layout(eqq.quantize(jnp.ones((1, k)), format).format, k)
    why = ft.partial(
        pallas_gpu.refusal,
        m=1,
        n=8,
        dtype=jnp.bfloat16,
        transpose=False,
        precision="default",
        target=TargetDevice("cuda"),
    )
    assert why(layout("nf4")) is None
    assert "blocks of 48" in why(layout(eqq.Int4(block_size=48)))
    assert "rows of 127 are shorter than the 128" in why(layout("nf4", 127))
    assert "float64" in why(layout("nf4"), dtype=jnp.float64)
    assert "nothing" in why(layout("nf4"), m=0) and "nothing" in why(layout("nf4"), n=0)
    wide = layout("nf4", 2**16)  # rows of 32 KiB
    assert why(wide, n=2**16) is None and why(wide, n=2**17 + 1) is None and "2 GiB" in why(wide, n=2**16 + 1)


def test_every_product_has_a_configuration():
    for bits, itemsize, m, transpose in it.product((1, 2, 4, 8), (2, 4), (1, 16, 17, 64, 10**6), (False, True)):
        for device in ("", "NVIDIA H100 80GB HBM3"):
            config = pallas_gpu.tune(device, bits, itemsize, m, transpose=transpose)
            sizes = (config.tile_m, config.tile_n, config.num_warps)
            assert all(size & (size - 1) == 0 for size in sizes)  # Triton requires powers of two


# PTX


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["nf4", "int4", "mxfp4", "codebook_16", "int2", "ternary", "binary"])
def test_codes_of_few_bits_by_permutation(name, dtype):
    layout = make_layout(FORMATS[name].format, K)
    table = np.asarray(ptx.make_table(layout, dtype, False)).astype(np.uint32)
    expected = (np.asarray(layout.table) * layout.stretch(dtype)).astype(dtype)
    for plane, four in it.product(range(layout.planes), groups_of_bytes()):
        asm = ptx.small_code_asm(layout, plane, dtype)
        operands = {2: four.view(np.uint32)[0], **{3 + 4 * i: word for i, word in enumerate(table)}}
        codes = four >> (layout.bits * plane) & (2**layout.bits - 1)
        np.testing.assert_array_equal(halves(emulate(asm, operands, 2), dtype), expected[codes])


def test_products_of_pairs():
    """Each half is rounded once; zeros keep their sign, and infinities stay."""
    special = np.array([0.0, -0.0, np.inf, 1.0, -3.0], jnp.bfloat16)
    a, b = (np.concatenate([special, np.random.default_rng(i).normal(size=251).astype(jnp.bfloat16)]) for i in (0, 1))
    b[:5] = np.array([2.0, 3.0, -1.0, 1e-3, 1e30], jnp.bfloat16)
    pairs = zip(a.view(np.uint32), b.view(np.uint32), strict=True)
    words = [emulate(ptx.PRODUCT_ASM, {1: x, 2: y}, 1)[0] for x, y in pairs]
    np.testing.assert_array_equal(halves(words, np.uint16), (a * b).view(np.uint16))


@pytest.mark.parametrize("offset", [0, -128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_integers_by_permutation(dtype, offset):
    outputs = 4 if dtype == jnp.float32 else 2
    bias = np.float32(2**23 - offset).view(np.uint32)
    for four in groups_of_bytes():
        operands = {outputs: four.view(np.uint32)[0], **{outputs + 1 + i: bias for i in range(4)}}
        words = emulate(ptx.integer_asm(dtype), operands, outputs)
        values = np.array(words, np.uint32).view(np.float32) if outputs == 4 else halves(words, dtype)
        np.testing.assert_array_equal(values.astype(np.float32), four.astype(np.float32) + offset)
