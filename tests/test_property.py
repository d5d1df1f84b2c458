"""What holds for any array: of any shape, dtype, axis and values, for every format."""

import contextlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._formats.base import find_levels, has_offsets

from .helpers import assert_same, FORMATS, SCALARS, SWEPT_SCALARS


# The largest error of a value, relative to the largest magnitude of its block: half the widest gap between levels, or
# the clipping error. An affine range may be off by half a step more, since zero is one of its codes.
BOUNDS = {
    "nf4": 0.152,
    "nf4_double": 0.19,
    "nf4_channel": 0.152,
    "nf4_tensor": 0.152,
    "int8": 1 / 254,
    "int8_tensor": 1 / 254,
    "int8_affine": 2 / 255,
    "int8_block": 1 / 254,
    "int4": 1 / 14,
    "int4_affine": 2 / 15,
    "int4_channel": 1 / 14,
    "int2": 1 / 2,
    "int2_affine": 2 / 3,
    "fp8_e4m3": 16 / 448,
    "fp8_e5m2": 4096 / 57344,
    "mxfp8": 1 / 8,
    "mxfp8_e5m2": 1 / 8,
    "mxfp4": 1 / 4,
    "nvfp4": 0.2,
    "q4_0": 0.1265,
    "q8_0": 1 / 254 + 2**-11,
    "codebook": 1 / 4,
    "codebook_256": 1 / 254,
}
# The error by the smallest scale that is a small float, relative to the amax of the tensor.
SMALLEST_SCALE = {
    "nf4_double": 2**-12 / 248,
    "nvfp4": 2**-10 / 448,
    "q4_k": 1.5 / 63,
    "q5_k": 1.5 / 63,
    "q2_k": 1.5 / 15,
}

# Few compilations: every shape comes with one dtype.
ARRAYS = [
    ((3, 70), 0, "bfloat16"),
    ((2, 3, 40), 1, "float16"),
    ((2, 1, 3, 3), (-3, -2, -1), "float64"),
    ((0, 8), -1, "float32"),
    ((4, 0), -1, "bfloat16"),
    ((1,), 0, "float32"),
]
VALUES = ["normal", "zeros", "denormal", "large", "constant", "mixed", "sparse"]
# Where a format fails on values near the largest of their dtype. Each is an expected failure: mend it, and take it out.
KNOWN = {
    (
        "nf4_tensor",
        "float32",
    ): "XLA multiplies by the reciprocal of a single scale, which some processors flush to zero",
}


def draw(values, shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if values == "zeros":
        return np.zeros(shape)
    if values == "denormal":
        return x * 1e-40
    if values in ("large", "huge"):
        largest = 6e4 if dtype == "float16" else 3e38
        return np.clip(x, -1, 1) * largest / (8 if values == "large" else 1)
    if values == "constant":
        return np.broadcast_to(rng.standard_normal((*shape[:-1], 1)), shape)
    if values == "mixed":
        return x * np.exp2(rng.integers(-12, 4, shape))
    if values == "sparse":
        return x * (rng.random(shape) < 0.1)
    return x


def to_rows(x, axes):
    x = np.moveaxis(x, axes, range(-len(axes), 0))
    return x.reshape(*x.shape[: x.ndim - len(axes)], int(np.prod(x.shape[x.ndim - len(axes) :])))


def per_block(rows, block_size, reduce):
    """`reduce` of the magnitudes of the block that each value is in."""
    out = np.zeros(rows.shape)
    if rows.size == 0:
        return out
    if block_size == "tensor":
        return out + reduce(np.abs(rows))
    step = block_size or rows.shape[-1]
    for start in range(0, rows.shape[-1], step):
        block = np.abs(rows[..., start : start + step])
        out[..., start : start + step] = reduce(block, axis=-1, keepdims=True)
    return out


@pytest.mark.parametrize("name", SWEPT_SCALARS)
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True, database=None)
@hypothesis.given(array=st.sampled_from(ARRAYS), values=st.sampled_from(VALUES), seed=st.integers(0, 9))
def test_any_array(name, array, values, seed):
    check(name, *array, values, seed)


@pytest.mark.parametrize("name", SWEPT_SCALARS)
def test_jit_equals_eager(name):
    run = jax.jit(lambda x: eqq.quantize(x, FORMATS[name].format))
    for values in VALUES:
        q = check(name, (3, 70), -1, "float32", values)
        assert_same(run(jnp.asarray(draw(values, (3, 70), "float32"), jnp.float32)), q)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", SCALARS)
def test_the_largest_floats_stay_finite(request, name, dtype):
    if (name, dtype) in KNOWN:
        request.applymarker(pytest.mark.xfail(reason=KNOWN[name, dtype], strict=False, raises=AssertionError))
    for seed in range(4):
        check(name, (3, 70), -1, dtype, "huge", seed)


def check(name, shape, axis, dtype, values, seed=0):
    format = FORMATS[name].format
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        x = jnp.asarray(draw(values, shape, dtype, seed), dtype)
        q = eqq.quantize(x, format, axis=axis)
        dense = q.dequantize()
        assert q.shape == dense.shape == shape and q.dtype == dense.dtype == x.dtype == jnp.dtype(dtype)

    axes = (axis,) if isinstance(axis, int) else axis
    rows, decoded = (to_rows(np.asarray(a).astype(np.float64), axes) for a in (x, dense))
    assert np.isfinite(decoded).all()
    absmax = per_block(rows, format.block_size, np.max)
    # A block of zeros is exact, and so is each zero, but for formats that have no code for it.
    has_zero = 0 in find_levels(format)[0] and not has_offsets(format)
    zeros = rows == 0 if has_zero else absmax == 0
    assert not decoded[zeros].any()

    bound = BOUNDS.get(name, 1) * absmax
    if isinstance(format, (eqq.Ternary, eqq.Binary)):
        # The scale is a mean, so values far above it are clipped.
        mean = per_block(rows, format.block_size, np.mean)
        bound = np.maximum(absmax - mean, mean if isinstance(format, eqq.Binary) else mean / 2)
    if format.scale_dtype == "float16":
        # Beyond the largest scale values saturate, and below the smallest they are lost.
        bound = np.where(absmax / 2 ** (format.bits - 1) > 65504, absmax, bound) + 2.0**-20
    bound = bound + SMALLEST_SCALE.get(name, 0) * np.abs(rows).max(initial=0)
    bound = bound + 2 * float(jnp.finfo(dtype if dtype != "float64" else "float32").eps) * absmax
    bound = bound + 512 * 2.0**-126  # float32 scales below the smallest normal number are zero
    assert (np.abs(rows - decoded) - bound).max(initial=-np.inf) <= 0
    return q
