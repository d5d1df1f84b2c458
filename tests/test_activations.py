"""Quantized activations: products of codes with codes, against a float64 model."""

import dataclasses
import functools as ft
import itertools
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant import _compat
from eqquant._array.codes import spread_tiles
from eqquant._array.contraction import matmul_with, Options
from eqquant._formats.layout import make_layout
from eqquant._matmul import dispatch
from eqquant._matmul.kernels import xla_codes
from eqquant._matmul.kernels.target import TargetDevice
from eqquant._matmul.problem import describe_matmul
from eqquant._matmul.rows import DynamicRows
from eqquant._native import library as native
from eqquant._native.weight import Layout
from eqquant._numerics import packing

from .helpers import interpreted, relative_error, weights


AFFINE = eqq.Int8(symmetric=False)
FORMATS = {
    "int8": eqq.Int8(),
    "int8_affine": AFFINE,
    "int8_blocks": eqq.Int8(block_size=32),
    "int4": eqq.Int4(),
    "int4_affine": eqq.Int4(block_size=32, symmetric=False),
    "int2": eqq.Int2(),
    "ternary": eqq.Ternary(),
    "binary": eqq.Binary(),
    "fp8": eqq.FP8(),
    "e5m2": eqq.FP8("e5m2"),
    "mxfp8": eqq.MXFP8(),
    "mxfp4": eqq.MXFP4(),
    "nvfp4": eqq.NVFP4(),
    "nf4": eqq.NF4(),
}
PAIRS = [
    *(("int8", "int8"), ("int8_affine", "int4_affine"), ("int4", "int4_affine"), ("fp8", "fp8"), ("int8", "ternary")),
    *(("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"), ("int8", "nf4")),
]
slow = ft.partial(pytest.param, marks=pytest.mark.slow)
PAIRS += [slow(*pair) for pair in itertools.product(FORMATS, FORMATS) if pair not in PAIRS]


def close(y, x, w, tol=1e-6):
    """Compares with the product of the same values in float64, relative to the sum of magnitudes."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    assert y.shape == (x @ w.T).shape
    assert (np.abs(np.asarray(y, np.float64) - x @ w.T) <= tol * (np.abs(x) @ np.abs(w).T) + 1e-30).all()


@pytest.mark.parametrize(("x_format", "w_format"), PAIRS)
def test_pairs(getkey, x_format, w_format):
    w = eqq.quantize(weights(getkey(), (24, 200)), FORMATS[w_format])

    @jax.jit
    def products(x, w):
        rows = DynamicRows(x, FORMATS[x_format])
        q = dataclasses.replace(rows.quantize(), gradient_of=None)
        product = lambda implementation: matmul_with(x, w.T, Options(None, implementation, lambda _: rows))
        return q.dequantize(), product(None), product("xla"), q @ w.T

    values, *found = products(weights(getkey(), (5, 200)) + 0.1, w)
    for y in found:
        close(y, values, w.dequantize())


@pytest.mark.long
@pytest.mark.parametrize(
    ("x_format", "w_format", "looped"), [("int8_affine", "int4_affine", False), ("int4", "int8_affine", True)]
)
def test_equals_integers_of_numpy(getkey, x_format, w_format, looped):
    """Sums are integers: with scales of one, products are exact."""
    k, formats = 192, (FORMATS[x_format], FORMATS[w_format])
    operands = []
    for rows, format in zip((3, 40), formats, strict=True):
        blocks = -(-k // (format.block_size or k))
        half = 2 ** (format.bits - 1)
        low, high = (1 - half, half) if format.symmetric else (0, 2 * half)
        values = jr.randint(getkey(), (rows, k), low, high).astype(jnp.float32)
        zero = None if format.symmetric else jnp.zeros((rows, blocks), jnp.uint8)
        operands.append(eqq.quantize(values, format, scale=jnp.ones((rows, blocks)), zero_point=zero))
        np.testing.assert_array_equal(operands[-1].dequantize(), values)
        if zero is not None:  # then zero points, without which the codes could not be given
            zero = jr.randint(getkey(), zero.shape, 0, 2**format.bits).astype(jnp.uint8)
            packed = packing.pack(zero, format.bits)
            operands[-1] = dataclasses.replace(operands[-1], zero_point_bits=packed)
    layouts = [make_layout(f, k) for f in formats]
    packed = [dispatch.as_packed_weight(q) for q in operands]
    y = jax.jit(lambda x, w: xla_codes.matmul(x, w, *layouts, "int8", looped=looped))(*packed)
    whole = [np.asarray(q.dequantize(), np.int64) for q in operands]
    np.testing.assert_array_equal(np.asarray(y, np.int64), whole[0] @ whole[1].T)
    np.testing.assert_array_equal(operands[0] @ operands[1].T, y)


@pytest.mark.long
def test_only_a_scale_that_clips_reaches_the_lowest_code(getkey):
    """Codes of int8 are from -127 where the scale is of the row's own largest, and from -128 where one is given."""
    x = jnp.array([[-300.0, -128, -127.4, 5, 126.6, 300]])
    q = eqq.quantize(weights(getkey(), (3, 6)), "int8")
    w = eqq.arrays.ActivationQuantizedArray(q, "int8", 1.0)
    clipped = jnp.array([[-128.0, -128, -127, 5, 127, 127]])
    np.testing.assert_array_equal(w.quantize_rows(x).dequantize(), clipped)
    np.testing.assert_allclose(x @ w.T, clipped @ q.dequantize().T, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(eqq.unpack(DynamicRows(x, eqq.Int8()).quantize())[0, [0, 5]], [1, 255])


def test_the_longest_sums_do_not_overflow():
    """Partial sums fit 32 bits, however long the row."""
    k = 70_000
    x, w = eqq.quantize(jnp.full((2, k), -1.0), AFFINE), eqq.quantize(jnp.ones((3, k)), AFFINE)
    np.testing.assert_allclose(eqq.matmul(x, w.T, implementation="xla"), np.full((2, 3), -k), rtol=1e-6)


@pytest.mark.parametrize(("format", "k"), [(eqq.Int8(block_size=32), 224), (eqq.Int8(block_size=3 * 2**14), 3 * 2**15)])
def test_blocks_of_sums(getkey, monkeypatch, format, k):
    """Three of seven blocks at a time; and blocks longer than sums, which must end where blocks do."""
    monkeypatch.setattr(xla_codes, "_PARTIAL_BYTES", 3 * 4 * 5 * 24)
    x, w = (weights(getkey(), (rows, k)) * jnp.linspace(0.1, 9, k)[None] for rows in (5, 24))
    x, w = eqq.quantize(x, format), eqq.quantize(w, format)
    for x in (x, jax.tree.map(lambda a: a[:1], x)):
        close(eqq.matmul(x, w.T, implementation="xla"), x.dequantize(), w.dequantize())


def test_which_tables_are_integers():
    layout = lambda *table: Layout(64, 2, 64, table)
    assert xla_codes.is_integer(layout(-127.0, 0.0, 5.0, 127.0))
    assert not xla_codes.is_integer(layout(-128.0, 0.0, 5.0, 127.0))
    assert not xla_codes.is_integer(layout(-127.0, 0.0, 0.5, 127.0))


@pytest.mark.parametrize(
    ("x_format", "w_format", "kind"),
    [
        ("int8", "int8", "int8"),
        ("int4", "ternary", "int8"),
        ("fp8", "e5m2", "float8"),
        ("mxfp8", "mxfp4", "bfloat16"),
        ("nvfp4", "nvfp4", "bfloat16"),
        ("int8", "fp8", "bfloat16"),
        ("int8", "nf4", None),
    ],
)
def test_types_on_accelerators(getkey, x_format, w_format, kind):
    x, w = (eqq.quantize(weights(getkey(), (n, 200)), FORMATS[of]) for n, of in ((4, x_format), (24, w_format)))
    layouts, target = [make_layout(q.format, 200) for q in (x, w)], TargetDevice("cuda")
    assert xla_codes.choose_operand_type(*layouts, target) == kind
    shown = "float32 x float32 (decoded)" if kind is None else {"float8": "float8_e4m3fn"}.get(kind, kind)
    many = eqq.quantize(jnp.ones((512, 200)), FORMATS[x_format])
    assert shown in eqq.explain_matmul(many, w.T, platform="cuda").types
    if kind is not None:
        y = xla_codes.matmul(*map(dispatch.as_packed_weight, (x, w)), *layouts, kind, looped=False)
        close(y, x.dequantize(), w.dequantize())
    if kind == "float8":
        assert xla_codes.choose_operand_type(*layouts, TargetDevice("cuda", "A100", 8.0)) is None
        assert xla_codes.choose_operand_type(*layouts, TargetDevice("cuda", "L4", 8.9)) == kind


@pytest.mark.long
@pytest.mark.parametrize(
    ("x_format", "w_format", "dtype"),
    [("nvfp4", "nvfp4", jnp.float32), ("mxfp8", "mxfp4", jnp.bfloat16), ("int8", "mxfp4", jnp.float32)],
)
def test_few_rows_multiply_the_packed_weight(getkey, monkeypatch, x_format, w_format, dtype):
    """Kernels take the values of small floats, which are exact in the few bits that a GPU multiplies."""
    x, w = (eqq.quantize(weights(getkey(), (n, 256)), FORMATS[of]) for n, of in ((4, x_format), (24, w_format)))
    x, w, seen = x.astype(dtype), w.astype(dtype), []
    kernel = dispatch._wrap_kernel(
        interpreted(ft.partial(dispatch.import_kernel, "triton.product")), dispatch._Needs("cuda")
    )
    spied = kernel._replace(run=lambda x, *rest: seen.append(x) or kernel.run(x, *rest))
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "pallas_gpu", spied)
    problem, target = describe_matmul(x, w, False, None), TargetDevice("cuda")
    name, _ = dispatch.choose(target, problem, None)
    y = dispatch.run_implementation(x, w, problem, target, name)
    assert name == eqq.explain_matmul(x, w.T, platform="cuda").implementation == "pallas_gpu"
    assert y.dtype == seen[0].dtype == dtype
    np.testing.assert_array_equal(seen[0], seen[0].astype(jnp.bfloat16).astype(dtype))
    exact = [a.astype(jnp.float32).dequantize() for a in (x, w)]
    close(y, *exact, tol=1e-6 if dtype == jnp.float32 else 2**-7)
    assert dispatch.choose(target, problem._replace(m=512), None)[0] == "xla"


def test_explain_matmul_names_both_formats(getkey):
    w = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weights(getkey(), (24, 64)), "int8"), "int8")
    found = eqq.explain_matmul(jnp.ones((4, 64)), w.T)
    assert found.types == "int8 x int8, sums in int32"
    assert found.implementation == ("xla" if native.refusal() or native.isa() == "generic" else "cpu_int8")
    assert "Int8() x Int8()" in str(found).replace("\n", " ")
    across = eqq.quantize(weights(getkey(), (4, 64)), "int8", axis=0)
    assert "both must have blocks along the sum" in str(eqq.explain_matmul(across, w.array.T).verdicts)
    with pytest.raises(ValueError, match="it multiplies codes with codes, and one operand is in float"):
        eqq.matmul(jnp.ones((4, 64)), w.array.T, implementation="cpu_int8")
    with pytest.raises(ValueError, match="eight-bit integers with one scale"):
        eqq.matmul(eqq.quantize(jnp.ones((4, 64)), "int4"), w.array.T, implementation="cpu_int8")


BLOCK_SCALED = {
    eqq.MXFP8(): "x256xf8E4M3FN>, tensor<1x5x8xf8E8M0FNU>, tensor<1x24x8xf8E8M0FNU>",
    eqq.MXFP8("e5m2"): "x256xf8E5M2>, tensor<1x5x8xf8E8M0FNU>, tensor<1x24x8xf8E8M0FNU>",
    eqq.NVFP4(): "x256xf4E2M1FN>, tensor<1x5x16xf8E4M3FN>, tensor<1x24x16xf8E4M3FN>",
    eqq.NVFP4((16, 16)): "x256xf4E2M1FN>, tensor<1x5x16xf8E4M3FN>, tensor<1x24x16xf8E4M3FN>",
}


@pytest.mark.parametrize("format", BLOCK_SCALED, ids=repr)
def test_block_scaled_products(getkey, monkeypatch, format):
    """For CUDA they are one operation of XLA, which computes it on the CPU as well."""
    x = eqq.quantize(weights(getkey(), (5, 256)), type(format)())
    w = spread_tiles(eqq.quantize(weights(getkey(), (24, 256)), format))
    if jax.__version_info__ >= (0, 12):  # older releases have no such operation on the CPU
        blackwell = TargetDevice("cuda", capability=10.0)
        y = dispatch.run_implementation(x, w, describe_matmul(x, w, False, None), blackwell, "scaled_matmul")
        close(y, x.dequantize(), w.dequantize())
        two = jax.tree_util.tree_map(lambda a: jnp.stack([a, a]), (x, w))
        batched = dispatch.run_implementation(*two, describe_matmul(*two, False, None), blackwell, "scaled_matmul")
        np.testing.assert_allclose(batched, jnp.stack([y, y]), rtol=1e-6)

    monkeypatch.setattr(_compat, "compute_capability", lambda device: 10.0)
    product = jax.jit(lambda x, w: eqq.matmul(x, w.T, implementation="scaled_matmul"))
    program = product.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "block_scaled_dot" in program and BLOCK_SCALED[format] in program
    assert eqq.explain_matmul(x, w.T, platform="cuda").verdicts["scaled_matmul"] == "possible"


def test_which_products_are_not_block_scaled():
    problem = describe_matmul(*(eqq.quantize(jnp.ones((n, 256)), "mxfp8") for n in (5, 24)), False, None)
    refusal = lambda capability=10.0, **changes: dispatch.find_refusal(
        TargetDevice("cuda", capability=capability), problem._replace(**changes), "scaled_matmul"
    )
    assert refusal() is None and "the kernel needs 10.0" in refusal(9.0)
    assert "one operand is in float" in refusal(activations=None)
    assert "across the blocks" in refusal(transpose=True)
    assert "rows of 272 are not whole blocks of 32" in refusal(k=272)
    for other in (eqq.NVFP4(), eqq.MXFP4(), eqq.FP8(), eqq.Int8(32)):
        assert "MXFP8 by MXFP8, and NVFP4 by NVFP4" in refusal(format=other)


@pytest.mark.parametrize("x_format", [eqq.Int8(), eqq.Int8(symmetric=False)])
@pytest.mark.parametrize(
    "w_format", [eqq.Int8(), eqq.Int8(symmetric=False), eqq.Int4(None), eqq.Int4(64, symmetric=False)]
)
def test_a_single_row_does_not_widen_the_weight(getkey, x_format, w_format):
    w = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weights(getkey(), (512, 256)), w_format), x_format)
    product = jax.jit(ft.partial(eqq.matmul, implementation="xla"))
    text = product.lower(jnp.ones((1, 256)), w.T).compile().as_text()
    wide = re.findall(r"= [sf]32\[([\d,]+)\]", text)
    assert all(math.prod(map(int, shape.split(","))) < 512 * 256 for shape in wide)


@pytest.mark.long
def test_transformations(getkey):
    x, w = weights(getkey(), (6, 96)), weights(getkey(), (24, 96))
    a = eqq.arrays.ActivationQuantizedArray(eqq.quantize(w, "int8"), AFFINE)
    expected = jnp.stack([a @ row for row in x])
    np.testing.assert_allclose(jax.jit(jax.vmap(lambda x: a @ x))(x), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose((a @ x.T).T, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(x @ a.T, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(x @ a.T.T.T, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(eqq.quaxify(lambda w: jnp.einsum("oi,bi->bo", w, x))(a), expected, rtol=1e-6, atol=1e-6)
    # Across the blocks of the weight, the values of the quantized operand.
    rows = DynamicRows(weights(getkey(), (2, 24)), AFFINE)
    np.testing.assert_allclose(rows.rows @ a, rows.dequantize() @ a.dequantize(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(a[3], a.array[3])


@pytest.mark.long
def test_nvfp4_examples_share_no_scale(getkey):
    a = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weights(getkey(), (24, 64)), "nvfp4"), "nvfp4")
    x = weights(getkey(), (4, 64)) * jnp.asarray([[1e-3], [1.0], [1e3], [0.0]])
    y = jax.vmap(lambda x: a @ x)(x)
    np.testing.assert_allclose(y, jnp.stack([a @ row for row in x]), rtol=1e-5)
    np.testing.assert_allclose(y[0] / 1e-3, jnp.stack([a @ (row / 1e-3) for row in x])[0], rtol=1e-3)
    both = DynamicRows(jnp.stack([x, x[::-1]]), eqq.NVFP4()).dequantize()
    np.testing.assert_array_equal(both[0], both[1, ::-1])


@pytest.mark.long
def test_gradients_pass_straight_through(getkey):
    x, w, t = weights(getkey(), (6, 96)), eqq.quantize(weights(getkey(), (24, 96)), "int4"), weights(getkey(), (6, 96))
    a = eqq.arrays.ActivationQuantizedArray(w, "int8")
    f = lambda x: jnp.sum(jnp.sin(x @ a.T))
    y, dy = jax.jvp(f, (x,), (t,))
    expected = jnp.cos(x @ a.T) @ w.dequantize()
    np.testing.assert_allclose(eqx.filter_jit(jax.grad(f))(x), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dy, jnp.sum(expected * t), rtol=1e-4)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: jnp.sum(jnp.sin(a @ x))))(x), expected, rtol=1e-4, atol=1e-5)
    # The gradient of the weight is the one for the inputs that it was multiplied with.
    w_grad = eqx.filter_jit(eqq.filter_grad(lambda a: jnp.sum(jnp.sin(x @ a.T))))(a).array
    inputs = DynamicRows(x, eqq.Int8()).dequantize()
    np.testing.assert_allclose(w_grad, jnp.cos(x @ a.T).T @ inputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("x_format", ["int8", "fp8"])
def test_nan_and_infinity_in_rows(getkey, x_format, static):
    q = eqq.quantize(weights(getkey(), (24, 96)), "int8")
    a = eqq.arrays.ActivationQuantizedArray(q, x_format, *([0.1] if static else []))
    x = weights(getkey(), (4, 96)).at[0, 3].set(jnp.nan).at[1, 4].set(jnp.inf).at[2].set(0)
    y = np.asarray(x @ a.T)
    assert np.isnan(y[:2]).all() and (y[2] == 0).all() and np.isfinite(y[3]).all()


@pytest.mark.long
def test_complex_operands(getkey):
    """Their real and imaginary parts are quantized apart."""
    q, x = eqq.quantize(weights(getkey(), (3, 8, 32)), "int8"), weights(getkey(), (2, 4, 32))
    x = jax.lax.complex(x[0], x[1])
    for w in (
        eqq.arrays.ActivationQuantizedArray(q, "int8"),
        eqq.arrays.ActivationQuantizedArray(q, "int8", jnp.full(3, 0.03)),
        eqq.quantize_tree(q.dequantize(), "int8", activations="int8", simulate=True),
    ):
        for y, parts in ((x @ w.mT, (x.real @ w.mT, x.imag @ w.mT)), (w @ x.T, (w @ x.real.T, w @ x.imag.T))):
            np.testing.assert_array_equal(y, jax.lax.complex(*parts))
    dense = jnp.stack([part @ w.dequantize().mT for part in (x.real, x.imag)])
    assert relative_error(jnp.stack([(x @ w.mT).real, (x @ w.mT).imag]), dense) < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(getkey, dtype):
    a = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weights(getkey(), (24, 96)).astype(dtype), "int8"), AFFINE)
    x = weights(getkey(), (4, 96)).astype(dtype)
    y = x @ a.T
    assert y.dtype == dtype
    values = DynamicRows(x.astype(jnp.float32), AFFINE).dequantize()
    np.testing.assert_allclose(y.astype(jnp.float32), values @ a.astype("float32").dequantize().T, rtol=1e-2, atol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("size", [None, "tensor"])
def test_nan_in_one_row_leaves_other_rows_finite(getkey, size):
    """A static per-tensor scale applies to every row. NaN or infinity affects one row only."""
    w, x = eqq.quantize(weights(getkey(), (8, 32)), "int8"), weights(getkey(), (4, 32))
    x = x.at[1, 3].set(jnp.nan).at[2, 5].set(-jnp.inf)
    for format, zero in ((eqq.Int8(size), None), (eqq.Int8(size, symmetric=False), 120)):
        a = eqq.arrays.ActivationQuantizedArray(w, format, 0.02, zero)
        for implementation in (None, "xla"):
            y = eqq.matmul(a, x.T, implementation=implementation)
            np.testing.assert_array_equal(jnp.isnan(y).any(0), [False, True, True, False])


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(
    ("x_format", "w_format", "wanted"), [("int8", "int8", "i8"), ("fp8", "fp8", "f8E4M3FN"), ("mxfp8", "mxfp4", "bf16")]
)
def test_programs_for_accelerators(platform, x_format, w_format, wanted):
    """Without the hardware: the program multiplies small types, and holds no float copy of the weight."""
    shapes = jax.ShapeDtypeStruct((1024, 256), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32)
    x, w = (
        jax.eval_shape(ft.partial(eqq.quantize, format=FORMATS[of]), s)
        for of, s in zip((x_format, w_format), shapes, strict=True)
    )
    text = jax.jit(lambda x, w: x @ w.T).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) == 1 and dots[0].count(f"x{wanted}>") >= 2
    assert wanted == "bf16" or "512x256xf32" not in text
