"""`mosaic_gpu` on the CPU: its kernel, as Pallas interprets it, against the dense product; and its PTX, emulated."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._formats.layout import make_layout
from eqquant._matmul import dispatch
from eqquant._matmul.kernels.target import TargetDevice

from .helpers import FORMATS, IN_KERNELS, kernel_cases, KINDS_IN_KERNELS, mark_slow, relative_error, weights
from .ptx import emulate, groups_of_bytes, halves


if jax.__version_info__ < (0, 12):
    pytest.skip("the kernel needs JAX 0.12", allow_module_level=True)

from eqquant._matmul.kernels import mosaic_decode, mosaic_gpu


K = 1024  # whole segments for every number of bits
HOPPER, BLACKWELL = (TargetDevice("cuda", capability=capability) for capability in (9.0, 10.0))
ROWS = {HOPPER: 136, BLACKWELL: 264}  # of the weight: a whole and a partial tile
WITHOUT = ("dynamic8", "codebook_256")  # their tables are too large
on_both = pytest.mark.parametrize("gpu", ROWS, ids=["hopper", "blackwell"])


def operands(getkey, gpu, name, m, dtype=jnp.bfloat16):
    q = eqq.quantize(weights(getkey(), (ROWS[gpu], K)), FORMATS[name].format)
    if gpu == BLACKWELL and make_layout(q.format, K).bits == 1:
        pytest.skip("it takes no codes of one bit")
    x = weights(getkey(), (m, K)).astype(dtype)
    return x, q, np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64).T


def run(gpu, x, q, interpret=True, **options):
    layout = make_layout(q.format, K)
    problem = {"transpose": False, "precision": "default", "target": gpu}
    assert mosaic_gpu.refusal(layout, len(x), len(q), x.dtype, **problem) is None
    return mosaic_gpu.matmul(x, dispatch.as_packed_weight(q), layout, interpret=interpret, **problem, **options)


@on_both
@pytest.mark.parametrize("name, m", kernel_cases(WITHOUT))
def test_product(getkey, gpu, name, m):
    x, q, expected = operands(getkey, gpu, name, m)
    y = run(gpu, x, q)
    assert y.dtype == x.dtype and relative_error(y, expected) < 6e-3


@on_both
@pytest.mark.parametrize("name", mark_slow(4, [name for name in KINDS_IN_KERNELS if name not in WITHOUT]))
def test_float16(getkey, gpu, name):
    x, q, expected = operands(getkey, gpu, name, 5, jnp.float16)
    assert relative_error(run(gpu, x, q), expected) < 1e-3


@pytest.mark.parametrize("levels", [np.linspace(-1e-6, 2e-6, 16), np.linspace(-1e6, 2e6, 16)])
def test_values_beyond_float16(getkey, levels):
    """With more rows than those for which the kernel scales sums."""
    q, x = eqq.quantize(weights(getkey(), (136, K)), eqq.Codebook(levels)), weights(getkey(), (64, K)).astype("float16")
    expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64).T
    assert relative_error(run(HOPPER, x, q), expected) < 1e-3
    for gpu, size in ((HOPPER, 32), (BLACKWELL, 64)):
        layout = make_layout(eqq.Codebook(levels, block_size=size), K)
        why = mosaic_gpu.refusal(layout, 1, 512, x.dtype, target=gpu, transpose=False, precision="default")
        assert "float16 might not hold the weights" in why


@on_both
@pytest.mark.parametrize("m", [7, 64])
@pytest.mark.parametrize("name", mark_slow(12, [name for name in IN_KERNELS if name not in WITHOUT]))
def test_no_races(getkey, gpu, name, m):
    """With parts of sums, and tiles that are loaded while others are in use."""
    x, q, expected = operands(getkey, gpu, name, m)
    config = mosaic_gpu.tune(make_layout(q.format, K), m, len(q), x.dtype, gpu)
    config = config._replace(segments=1, parts=2, stages=2)
    interpret = mosaic_gpu.plgpu.InterpretGPUParams(detect_races=True, on_race="raise")
    assert relative_error(run(gpu, x, q, interpret, config=config), expected) < 6e-3


def test_unsupported_products():
    layout = lambda format, k=K: make_layout(eqq.quantize(jnp.ones((1, k)), format).format, k)
    options = {"m": 1, "n": 136, "dtype": jnp.bfloat16, "transpose": False, "precision": "default"}
    why = ft.partial(mosaic_gpu.refusal, **options, target=HOPPER)
    assert why(layout("nf4")) is None
    assert "sums across" in why(layout("nf4"), transpose=True)
    assert "float32" in why(layout("nf4"), dtype=jnp.float32)
    assert "256 values" in why(layout(eqq.Dynamic8()))
    assert why(layout("binary")) is None and "codes of one bit" in why(layout("binary"), target=BLACKWELL)
    assert "lie in several" in why(layout("int3"))
    assert "whole segments of 128" in why(layout("nf4", 576))
    assert "blocks of 48" in why(layout(eqq.Int4(block_size=48)))
    for n in (0, 120, 137):
        assert f"the weight has {n} rows; it takes a multiple of 8, 128 or more" in why(layout("nf4"), n=n)
    assert "the weight has 136 rows; it takes a multiple of 8, 256 or more" in why(layout("nf4"), target=BLACKWELL)


# PTX


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "name", ["nf4", "int4", "mxfp4", "codebook_16", "int2", "ternary", "binary", "int8", "int8_affine"]
)
def test_decode_in_assembly(name, dtype):
    layout = mosaic_gpu._stretched(make_layout(FORMATS[name].format, K), dtype)
    expected = np.asarray(layout.table).astype(dtype)
    separate, memory, lane = False, (), 5
    if mosaic_decode.needs_pairs(layout):
        asm, memory = mosaic_decode.lookup_asm(layout), mosaic_decode.make_pairs(layout, dtype).reshape(-1)
    elif layout.bits == 8:
        asm = mosaic_decode.integer_asm(layout, dtype)
    else:
        asm, separate = mosaic_decode.small_integer_asm(layout, dtype), True
    count = 2 * layout.planes
    for four in groups_of_bytes():
        words = emulate(asm, {count: four.view(np.uint32)[0], count + 1: 4 * lane}, count, memory)
        for plane in range(layout.planes):
            codes = four >> (layout.bits * plane) & (2**layout.bits - 1)
            codes = codes[[0, 2, 1, 3]] if separate else codes
            np.testing.assert_array_equal(halves(words[2 * plane : 2 * plane + 2], dtype), expected[codes])
