"""Quantized activations: products of codes with codes against a float64 model, and models that quantize inputs."""

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
import optax
import pytest

import eqquant as eqq
from eqquant._array.contraction import matmul_with, Options
from eqquant._formats.layout import make_layout
from eqquant._matmul import dispatch
from eqquant._matmul.kernels import xla_codes
from eqquant._matmul.kernels.target import TargetDevice
from eqquant._matmul.problem import describe_matmul
from eqquant._matmul.rows import DynamicRows
from eqquant._native import library as native
from eqquant._numerics import packing
from eqquant._wrappers.permuted import PermutedArray
from eqquant._wrappers.rotated import RotatedArray
from eqquant._wrappers.scaled import ScaledArray

from .helpers import interpreted, outputs, weights


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


@pytest.mark.parametrize(
    ("x_format", "w_format", "dtype"),
    [("nvfp4", "nvfp4", jnp.float32), ("mxfp8", "mxfp4", jnp.bfloat16), ("int8", "mxfp4", jnp.float32)],
)
def test_few_rows_multiply_the_packed_weight(getkey, monkeypatch, x_format, w_format, dtype):
    """Kernels take the values of small floats, which are exact in the few bits that a GPU multiplies."""
    x, w = (eqq.quantize(weights(getkey(), (n, 256)), FORMATS[of]) for n, of in ((4, x_format), (24, w_format)))
    x, w, seen = x.astype(dtype), w.astype(dtype), []
    kernel = dispatch._wrap_kernel("cuda", interpreted(dispatch._import_pallas_gpu))
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


def test_nvfp4_examples_share_no_scale(getkey):
    a = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weights(getkey(), (24, 64)), "nvfp4"), "nvfp4")
    x = weights(getkey(), (4, 64)) * jnp.asarray([[1e-3], [1.0], [1e3], [0.0]])
    y = jax.vmap(lambda x: a @ x)(x)
    np.testing.assert_allclose(y, jnp.stack([a @ row for row in x]), rtol=1e-5)
    np.testing.assert_allclose(y[0] / 1e-3, jnp.stack([a @ (row / 1e-3) for row in x])[0], rtol=1e-3)


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
    assert relative(dense, jnp.stack([(x @ w.mT).real, (x @ w.mT).imag])) < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(getkey, dtype):
    a = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weights(getkey(), (24, 96)).astype(dtype), "int8"), AFFINE)
    x = weights(getkey(), (4, 96)).astype(dtype)
    y = x @ a.T
    assert y.dtype == dtype
    values = DynamicRows(x.astype(jnp.float32), AFFINE).dequantize()
    np.testing.assert_allclose(y.astype(jnp.float32), values @ a.astype("float32").dequantize().T, rtol=1e-2, atol=1e-2)


# Models


@pytest.fixture
def model(getkey):
    return eqx.nn.MLP(32, 8, 64, 2, key=getkey())


def relative(y, z):
    y, z = np.asarray(y), np.asarray(z)
    return float(np.linalg.norm(y - z) / np.linalg.norm(y))


def test_a_whole_model(getkey, model, tmp_path):
    x = weights(getkey(), (16, 32))
    q = eqq.quantize_tree(model, "int8", activations="int8")
    y = eqx.filter_jit(lambda q, x: jax.vmap(q)(x))(q, x)
    assert 0 < relative(outputs(model, x), y) < 0.03
    assert relative(y, jax.vmap(eqq.quantize_tree(model, "int8"))(x)) > 1e-4
    row = eqq.summary(q).leaves[0]
    assert (row.path, row.format, row.activations) == ("layers.0.weight", eqq.Int8(), eqq.Int8())
    assert "Int8() x Int8()" in str(eqq.summary(q))
    planned = eqq.plan_tree(model, {"layers.0.*": eqq.QuantConfig("int4", activations="fp8"), "*": "int8"}).leaves
    assert [row.activations for row in planned if row.format] == [eqq.FP8(), None, None]
    dense = eqq.dequantize_tree(q).layers[0].weight
    np.testing.assert_array_equal(dense, q.layers[0].weight.dequantize())
    eqq.save(tmp_path / "model.safetensors", q)
    loaded = eqq.load(tmp_path / "model.safetensors", like=eqx.filter_eval_shape(lambda: q))
    np.testing.assert_array_equal(outputs(loaded, x), outputs(q, x))
    with pytest.raises(ValueError, match="activations"):  # another format of activations
        eqq.load(tmp_path / "model.safetensors", like=eqq.quantize_tree(model, "int8", activations="fp8"))


def test_weights_without_products_get_no_activations(getkey):
    table = eqx.nn.Embedding(16, 32, key=getkey())
    q = eqq.quantize_tree([table, eqx.nn.Linear(32, 8, key=getkey())], "int8", activations="int8")
    assert eqq.is_quantized(q[0].weight) and isinstance(q[1].weight, eqq.arrays.ActivationQuantizedArray)
    plan = eqq.plan_tree([table, eqx.nn.Linear(8, 4, key=getkey())], {"*": eqq.QuantConfig("int8", activations="int8")})
    assert "no activations" in plan.leaves[0].reason
    with pytest.raises(ValueError, match="looked up"):
        eqq.quantize_tree(table, "int8", activations="int8")
    with pytest.raises(ValueError, match="must be one of"):
        eqq.quantize_tree(table, "int8", activations="int88")


def test_bad_activations(getkey, model):
    for bad in ("int7", "float16"):
        for make in (
            lambda bad: eqq.quantize_tree(model, "int8", activations=bad),
            lambda bad: eqq.QuantConfig("int8", activations=bad),
            lambda bad: eqq.arrays.ActivationQuantizedArray(eqq.quantize(model.layers[0].weight), bad),
        ):
            with pytest.raises(ValueError, match="^`activations` must be one of"):
                make(bad)
    for bad in ({}, {"layers.0.*": "int8"}, {"*": eqq.Int8()}, {"*": eqq.QuantConfig("int8")}):
        with pytest.raises(
            TypeError, match=r'^`activations` must be one format.*Got \{.*eqq.QuantConfig\("int8", activations='
        ):
            eqq.quantize_tree(model, "int8", activations=bad)
    with pytest.raises(ValueError, match=r"no scales from calibration in formats with blocks: take `eqq.Int8\("):
        eqq.calibrate.collect_stats(model, [jnp.ones((4, 32))], calibrator=eqq.calibrate.MinMax("mxfp8"))
    for format in (eqq.Int8("tensor"), eqq.FP8()):  # the formats that the message suggests
        eqq.calibrate.collect_stats(model, [jnp.ones((4, 32))], calibrator=eqq.calibrate.MinMax(format))
    conv = eqq.quantize_tree(eqx.nn.Conv2d(3, 8, 3, key=getkey()), "int8", activations="int8")
    for w in (conv.weight, conv.weight.array):
        with pytest.raises(ValueError, match=r"matmuls alone.*\(4, 3, 16, 16\) @ \(8, 3, 3, 3\).*quaxify\(layer\)"):
            eqq.explain_matmul(jnp.ones((4, 3, 16, 16)), w)
    assert "conv_general_dilated" in str(jax.make_jaxpr(eqq.quaxify(conv))(jnp.ones((3, 16, 16))))


def test_a_model_that_is_quantized_already(getkey, model):
    x, tree = weights(getkey(), (16, 32)), {"mlp": model, "table": eqx.nn.Embedding(16, 32, key=getkey())}
    stats = eqq.calibrate.collect_stats(tree, [x], gram=True, apply=lambda m, x: jax.vmap(m["mlp"])(x))
    codes = eqq.quantize_tree(
        tree, {"mlp.layers.2.*": None, "table.*": "int8", "*": eqq.QuantConfig("int4", eqq.GPTQ(stats))}
    )
    for activations in ("int8", stats):
        q = eqq.quantize_activations(codes, activations)
        first, rest = q["mlp"].layers[0].weight, (q["mlp"].layers[2].weight, q["table"].weight)
        assert isinstance(first, eqq.arrays.ActivationQuantizedArray) and (first.scale is None) == (
            activations == "int8"
        )
        assert eqx.tree_equal(first.array, codes["mlp"].layers[0].weight)
        assert eqx.tree_equal(rest, (codes["mlp"].layers[2].weight, codes["table"].weight))
        assert 0 < relative(jax.vmap(codes["mlp"])(x), jax.vmap(q["mlp"])(x)) < 0.05
    planned = {row.path: row.activations for row in eqq.plan_tree(codes, None, activations="int8").leaves}
    assert planned["mlp.layers.0.weight"] == eqq.Int8() and planned["table.weight"] is None
    one = eqq.quantize_activations(codes, "fp8", where=lambda m: m["mlp"].layers[1].weight)
    two = eqq.quantize_activations(one, "int8")["mlp"].layers  # those that have activations keep them
    assert (two[0].weight.activations, two[1].weight.activations) == (eqq.Int8(), eqq.FP8())
    rotated = eqq.quantize_activations(eqq.quantize_tree(eqq.transforms.rotate(model), "int8"))
    assert isinstance(rotated.layers[0].weight.array, eqq.arrays.ActivationQuantizedArray)
    for tree_, message in (
        (model, r"Got none to take them \(layers.0.weight: not quantized.*Give a format"),
        (q["mlp"], r"layers.0.weight.array: part of an ActivationQuantizedArray.*QuantizedArray\(w.array, \"fp8\""),
        (eqq.loraify(codes["mlp"], key=getkey()), "part of a LoraArray.*before they are wrapped"),
        (codes["table"], "weights that products use. Got none among weight .*looked up"),
    ):
        with pytest.raises(ValueError, match=message):
            eqq.quantize_activations(tree_, "int8")
    with pytest.raises(TypeError, match="`where` must select quantized arrays"):
        eqq.quantize_activations(codes, "int8", where=lambda m: m["mlp"].layers[2].weight)
    whole = eqq.quantize_tree(model, "int8")
    with pytest.raises(ValueError, match=r"To quantize activations alone: `eqq.quantize_activations\(model, "):
        eqq.quantize_tree(whole, "int8", activations="int8")


def test_rules_that_reach_no_product(getkey, model):
    w8a8, linear = eqq.QuantConfig("int8", activations="int8"), eqx.nn.Linear(32, 8, key=getkey())
    tables, tree = (
        eqx.nn.Embedding(16, 32, key=getkey()),
        {"table": eqx.nn.Embedding(16, 32, key=getkey()), "x": linear},
    )
    for quantize in (eqq.quantize_tree, eqq.plan_tree):
        for tree_, rules, named in (
            (tables, w8a8, "weight .*looked up"),
            (tree, {"table.*": w8a8, "*": "int8"}, "table.weight .*looked up"),
            (tree, {"table.*": w8a8, "*": w8a8}, "table.weight .*looked up"),
            (tree, {"x.*": None, "*": w8a8}, "table.weight .*looked up"),
            (tables, lambda path, leaf: eqq.QuantConfig("int8", activations="int8"), "weight .*looked up"),
        ):
            with pytest.raises(ValueError, match=f"weights that products use. Got none among {named}.*wrap it"):
                quantize(tree_, rules)
    norms = {"norm": eqx.nn.LayerNorm((4, 32)), "x": linear}
    for tree_, where, named in (
        (model, lambda m: [m.layers[0].bias], r"layers.0.bias .*a bias"),
        (norms, lambda m: m["norm"].weight, r"norm.weight .*normalization"),
    ):
        for arguments, options in ((("int8",), {"activations": "int8"}), ((w8a8,), {})):
            with pytest.raises(ValueError, match=f"Got none among {named}"):
                eqq.quantize_tree(tree_, *arguments, where=where, **options)
    # One product is enough for a rule, and for the whole call.
    wrapped = lambda q: isinstance(q, eqq.arrays.ActivationQuantizedArray)
    for rules, options in (
        (w8a8, {}),
        ({"*": w8a8}, {}),
        ({"table.*": "int8", "*": w8a8}, {"activations": "fp8"}),
        ({"table.*": None, "*": "int8"}, {"activations": "int8"}),
        (lambda path, leaf: eqq.QuantConfig("int8", activations="int8"), {}),
    ):
        q = eqq.quantize_tree(tree, rules, **options)
        assert wrapped(q["x"].weight) and not wrapped(q["table"].weight)
    q = eqq.quantize_tree(model, "int8", activations="int8", where=lambda m: [m.layers[0].weight, m.layers[0].bias])
    assert wrapped(q.layers[0].weight) and eqq.is_quantized(q.layers[0].bias)


@pytest.mark.long
def test_training(getkey, model):
    x, loss = weights(getkey(), (16, 32)), lambda m, x: jnp.mean(jnp.square(jax.vmap(m)(x) - 1))
    simulated = eqq.quantize_tree(model, "int4", activations="int8", simulate=True)
    q = eqq.finalize(simulated)
    np.testing.assert_allclose(outputs(simulated, x), outputs(q, x), rtol=1e-5, atol=1e-6)
    master_grad = eqx.filter_jit(eqx.filter_grad(loss))(simulated, x).layers[0].weight.array.master
    np.testing.assert_allclose(
        master_grad, eqx.filter_jit(eqq.filter_grad(loss))(q, x).layers[0].weight.array, rtol=1e-4, atol=1e-6
    )
    optim = eqq.float_masters(optax.sgd(0.1))
    state, start = optim.init(q), loss(q, x)

    @eqx.filter_jit
    def step(q, state):
        updates, state = optim.update(eqq.filter_grad(loss)(q, x), state, q)
        return eqq.apply_updates(q, updates), state

    for _ in range(10):
        q, state = step(q, state)
    assert isinstance(q.layers[0].weight, eqq.arrays.ActivationQuantizedArray)
    assert loss(q, x) < 0.7 * start


def test_low_rank_factors_on_top(getkey, model):
    x = weights(getkey(), (16, 32))
    q = eqq.quantize_tree(model, "int8", activations="int8")
    adapted = eqq.loraify(q, 4, key=getkey())
    np.testing.assert_allclose(outputs(adapted, x), outputs(q, x), rtol=1e-6)
    grads = eqx.filter_jit(eqq.filter_grad(lambda m: jnp.sum(jnp.square(jax.vmap(m)(x)))))(adapted)
    shapes = {leaf.shape for leaf in jax.tree.leaves(grads.layers[0])}
    assert shapes == {(64, 4), (4, 32)}  # only the factors
    assert isinstance(eqq.merge_lora(adapted).layers[0].weight, eqq.arrays.ActivationQuantizedArray)
    outside = eqq.arrays.LoraArray(q.layers[0].weight, jnp.ones((4, 32)), jnp.ones((64, 4)), 4.0, 1)
    expected = q.layers[0].weight @ x[0] + jnp.ones((64, 4)) @ (jnp.ones((4, 32)) @ x[0])
    np.testing.assert_allclose(outside @ x[0], expected, rtol=1e-5)


@pytest.mark.long
def test_dense_products_keep_their_options(getkey):
    """Of a float base, of a stack of maps, and of factors of a convolution."""
    w, x = weights(getkey(), (2, 24, 32)), weights(getkey(), (5, 32))
    conv = eqq.arrays.LoraArray(
        weights(getkey(), (4, 3, 32)), weights(getkey(), (2, 3, 32)), weights(getkey(), (4, 2)), 1.0, 2
    )
    arrays = {
        "base": eqq.arrays.LoraArray(w[0], weights(getkey(), (4, 32)), weights(getkey(), (24, 4)), 4.0, 1),
        "map": RotatedArray.of(w[0]),
        "maps": ScaledArray(w, 1 + jnp.abs(w[:, 0])),
        "convolution": conv,
    }
    steps = lambda rows: DynamicRows(rows, eqq.Int4())
    for name, array in arrays.items():
        with pytest.raises(ValueError, match="`implementation` is for quantized operands. Got 'xla'"):
            eqq.matmul(array, x.T, implementation="xla")
        text = str(jax.make_jaxpr(lambda array: eqq.matmul(array, x.T, precision="highest"))(array))
        dots = text.count("dot_general[")
        assert dots and text.count("Precision.HIGHEST, Precision.HIGHEST") + (name == "convolution") == dots
        is_map = name.startswith("map")
        x_mapped = array.map_inputs(jnp.broadcast_to(x.T, (*array.shape[:-2], 32, 5)), -2) if is_map else x.T
        rounded = steps(x_mapped.mT).dequantize().mT
        quantizing = eqq.arrays.ActivationQuantizedArray(array, "int4")
        y = quantizing @ x.T
        stored = array.array if is_map else array.base if name == "base" else array.dequantize()
        low = array.scaling * array.b @ (array.a @ x.T) if name == "base" else 0
        np.testing.assert_allclose(y, stored @ rounded + low, rtol=1e-4, atol=1e-4)
        flipped = quantizing @ x.T[:, 0]
        np.testing.assert_allclose(flipped, y[..., 0], rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_functions_of_quax_round_both_operands(getkey, model):
    """Also where the weight is simulated, has factors, maps its inputs, or has a scale for each layer."""
    x, w = weights(getkey(), (6, 32)), weights(getkey(), (8, 32))
    simulated = eqq.quantize_tree({"w": w}, "int4", simulate=True)["w"]
    factors = eqq.arrays.LoraArray(w, jnp.ones((2, 32)), jnp.ones((8, 2)), 1.0, 1)
    dense = jax.jit(eqq.quaxify(lambda w: jnp.einsum("oi,bi->bo", w, x)))
    transposed = jax.jit(eqq.quaxify(lambda w: jnp.matmul(x, w.T)))
    for inner in (eqq.quantize(w, "int4"), simulated, factors, RotatedArray.of(w)):
        a = eqq.arrays.ActivationQuantizedArray(inner, "int4")
        expected = DynamicRows(x, eqq.Int4()).dequantize() @ a.dequantize().T
        if isinstance(inner, (eqq.arrays.LoraArray, RotatedArray)):  # rounded as the weight within sees them
            expected = x @ a.T
        for product in (dense, transposed):
            np.testing.assert_allclose(product(a), expected, rtol=1e-4, atol=1e-4)
    loss = lambda m: jnp.mean(jnp.square(jax.vmap(m)(x)))
    trained = eqq.quantize_tree(model, "int4", activations="int8", simulate=True)
    grads, dense_grads = (eqx.filter_jit(eqx.filter_grad(f))(trained) for f in (eqq.quaxify(loss), loss))
    for quax_grad, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(dense_grads), strict=True):
        np.testing.assert_allclose(quax_grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [RotatedArray, ScaledArray, PermutedArray])
def test_input_transforms_keep_integer_products(getkey, kind):
    """The other operand is mapped, then quantized: by `@`, by functions of Quax, and in stacks."""
    q, x = eqq.quantize(weights(getkey(), (2, 24, 32)), "int8"), weights(getkey(), (5, 32))
    order, scale = (
        jnp.stack([jr.permutation(getkey(), 32)] * 2).astype(jnp.uint32),
        1 + jnp.abs(weights(getkey(), (2, 32))),
    )
    of = {ScaledArray: scale, PermutedArray: order}
    make = lambda n: kind(jax.tree.map(lambda a: a[n], q), *((of[kind][n],) if kind in of else ()))
    layers = [eqq.arrays.ActivationQuantizedArray(make(n), "int8") for n in range(2)]
    stack = eqq.arrays.ActivationQuantizedArray(make(slice(None)), "int8")
    expected = jnp.stack([layer @ x.T for layer in layers])
    dense = jnp.stack([layer.dequantize() @ x.T for layer in layers])
    assert relative(dense, expected) < 0.02
    einsum = eqq.quaxify(lambda w, x: jnp.einsum("bi,oi->ob", x, w))
    np.testing.assert_allclose(einsum(layers[0], x), expected[0], rtol=1e-5, atol=1e-5)
    xs = jnp.broadcast_to(x.T, (2, 32, 5))
    for found in (stack @ x.T, stack @ xs, jnp.moveaxis(stack.swapaxes(1, 2).__rmatmul__(x), 1, 2)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stack @ x[0], expected[..., 0], rtol=1e-5, atol=1e-5)
    for f, w in ((einsum, layers[0]), (lambda w, x: w @ x.T, stack)):
        program = jax.jit(f).trace(w, x).lower(lowering_platforms=("cuda",)).as_text()
        dots = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
        assert any("xi8>" in line and "xi32>" in line for line in dots)


def test_functions_of_quax_with_a_scale_for_each_layer(getkey):
    q, x = eqq.quantize(weights(getkey(), (3, 8, 32)), "int8"), weights(getkey(), (6, 32))
    w = eqq.arrays.ActivationQuantizedArray(q, "int8", jnp.array([0.01, 0.03, 0.1]))
    layers = [jax.tree.map(lambda a, n=n: a[n], w) for n in range(3)]
    alone = jnp.stack([layer @ x.T for layer in layers])
    xs = weights(getkey(), (6, 3, 32))
    paired = jnp.stack([layer @ xs[:, n].T for n, layer in enumerate(layers)])
    for equation, operand, expected in (
        ("loi,bi->lob", x, alone),
        ("bi,loi->bol", x, alone.transpose(2, 1, 0)),
        ("loi,bli->lob", xs, paired),
        ("bli,loi->bol", xs, paired.transpose(2, 1, 0)),
        ("loi,bli->ob", xs, paired.sum(0)),
    ):
        product = lambda w, equation=equation, x=operand: jnp.einsum(
            equation, *((w, x) if equation.startswith("loi") else (x, w))
        )
        np.testing.assert_allclose(eqq.quaxify(product)(w), expected, rtol=1e-4, atol=1e-5)


def test_low_rank_factors_are_not_merged(getkey):
    """Factors dequantize as around a plain weight: also inside other wrappers, in any dtype."""
    w, factors = weights(getkey(), (8, 32)), (weights(getkey(), (2, 32)), weights(getkey(), (8, 2)))
    bare = eqq.arrays.LoraArray(eqq.quantize(w, "int8"), *factors, 1.0, 1)
    quantizing = eqq.arrays.ActivationQuantizedArray(bare, "int8")
    found = eqq.dequantize_tree([bare, quantizing], "bfloat16")
    mapped = eqq.dequantize_tree([RotatedArray(bare), RotatedArray(quantizing)], "bfloat16")
    for x in (*found, *(array.array for array in mapped)):
        assert isinstance(x, eqq.arrays.LoraArray) and x.base.dtype == jnp.bfloat16 and x.a.dtype == jnp.float32
        np.testing.assert_array_equal(x.base, bare.base.dequantize().astype("bfloat16"))
    plain = eqq.dequantize_tree(eqq.arrays.ActivationQuantizedArray(bare.base, "int8"), "bfloat16")
    np.testing.assert_array_equal(plain, found[0].base)


# Scales from calibration


@pytest.mark.long
@pytest.mark.parametrize(
    "calibrator",
    [
        None,
        lambda: eqq.calibrate.MSERange(eqq.Int8("tensor", symmetric=False)),
        slow(lambda: eqq.calibrate.MinMax("int8")),
        slow(lambda: eqq.calibrate.Percentile("fp8")),
        slow(lambda: eqq.calibrate.MovingAverage("int8")),
    ],
)
def test_static_scales(getkey, model, calibrator):
    calibrator = calibrator and calibrator()
    x = weights(getkey(), (32, 32))
    stats = eqq.calibrate.collect_stats(model, [x[:16], x[16:]], calibrator=calibrator)
    q = eqq.quantize_tree(model, "int8", activations=stats)
    assert relative(outputs(model, x), outputs(q, x)) < 0.08
    w, inputs = q.layers[0].weight, x
    if calibrator is None:
        step = (inputs.max() - inputs.min()) / 255
        np.testing.assert_allclose(w.scale, step, rtol=1e-6)
        np.testing.assert_allclose(w.zero_point, jnp.round(-inputs.min() / step))
        zero = w.zero_point.astype(jnp.float32)
        values = (jnp.clip(jnp.round(x / w.scale) + zero, 0, 255) - zero) * w.scale
        close(x @ w.T, values, w.dequantize())
    assert "from calibration" in eqq.summary(q).leaves[0].reason
    grads = eqx.filter_jit(eqq.filter_grad(lambda m: jnp.sum(jax.vmap(m)(x))))(q)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_static_scales_of_a_stack(getkey):
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, key=key))
    layers, x = make(jr.split(getkey(), 3)), weights(getkey(), (8, 32))

    def run(layers, x):
        arrays, static = eqx.partition(layers, eqx.is_array)
        return jax.lax.scan(lambda x, a: (jnp.tanh(eqx.combine(a, static)(x)), None), x, arrays)[0]

    apply = lambda m, x: jax.vmap(ft.partial(run, m))(x)
    stats = eqq.calibrate.collect_stats(layers, [x], apply=apply)
    q = eqq.quantize_tree(layers, "int8", activations=stats)
    assert q.weight.scale.shape == (3,)
    assert relative(apply(layers, x), apply(q, x)) < 0.05
    second_layer = jax.tree.map(lambda a: a[1], q.weight)
    assert second_layer.scale == q.weight.scale[1]
    np.testing.assert_allclose((q.weight @ x.T)[1], second_layer @ x.T, rtol=1e-6)


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


@pytest.mark.parametrize("format", [eqq.Int8("tensor"), AFFINE])
def test_static_scales_quantize_inside_the_kernel(getkey, format):
    """The product quantizes rows itself: under `jit`, `vmap`, `scan` and `grad`, in stacks, and on every platform."""
    w, x = eqq.quantize(weights(getkey(), (3, 24, 64)), "int8"), weights(getkey(), (3, 6, 64))
    zero = None if format.symmetric else jnp.array([0, 120, 255], jnp.uint8)
    stack = eqq.arrays.ActivationQuantizedArray(w, format, jnp.array([0.01, 0.03, 1e-3]), zero)
    layers = [jax.tree.map(lambda a, n=n: a[n], stack) for n in range(3)]

    def rounded(layer, x):
        start = 0 if layer.zero_point is None else np.float32(layer.zero_point)
        whole = np.rint(np.asarray(x) / np.asarray(layer.scale) + start)
        return (np.clip(whole, *((-128, 127) if format.symmetric else (0, 255))) - start) * np.asarray(layer.scale)

    wanted = [rounded(layer, x[n]) @ layer.dequantize().T for n, layer in enumerate(layers)]
    near = ft.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    alone = jnp.stack([jax.jit(lambda layer, x: x @ layer.T)(layer, x[n]) for n, layer in enumerate(layers)])
    near(alone, wanted)
    same = ft.partial(np.testing.assert_array_equal, alone)
    product = lambda layer, x: x @ layer.T
    same(jax.vmap(product)(stack, x))
    same(jax.vmap(lambda layer, x: jax.vmap(lambda x: layer @ x)(x))(stack, x))
    same(jax.lax.scan(lambda _, of: (None, product(*of)), None, (stack, x))[1])
    same(jnp.stack([(layer @ x[n].T).T for n, layer in enumerate(layers)]))
    same((stack @ x.mT).mT)
    shared = jax.vmap(product, (0, None))(stack, x[0])  # one operand, a scale for each layer
    near(shared, [rounded(layer, x[0]) @ layer.dequantize().T for layer in layers])

    clipped = eqx.filter_jit(jax.grad(lambda x: jnp.sum(product(layers[0], x))))(x[0])
    levels = np.array([-128.5, 127.5] if format.symmetric else [-0.5, 255.5]) * 0.01
    inside = (np.asarray(x[0]) >= levels[0]) & (np.asarray(x[0]) <= levels[1])
    assert 0 < inside.mean() < 1
    near(clipped, np.where(inside, np.asarray(layers[0].dequantize()).sum(0), 0))

    text = jax.jit(product).trace(layers[1], x[0]).lower(lowering_platforms=("cpu",)).as_text()
    if native.refusal() is None and native.isa() != "generic":
        assert "eqquant_cpu_matmul_int8" in text and "eqquant_cpu_encode" not in text
        assert "rows of floats are quantized inside" in str(eqq.explain_matmul(x[0], layers[1].T).verdicts)
    text = jax.jit(product).trace(layers[1], x[0]).lower(lowering_platforms=("tpu",)).as_text()
    assert any("xi8>" in line and "xi32>" in line for line in text.splitlines() if "stablehlo.dot_general" in line)


@pytest.mark.long
@pytest.mark.parametrize("static", [False, True])
def test_paths_equal_the_float_model(getkey, static):
    """The weights have the paths that they have in the float model."""
    model, x = eqx.nn.MLP(32, 8, 64, 1, key=getkey()), [weights(getkey(), (16, 32)) for _ in range(5)]
    activations = eqq.calibrate.collect_stats(model, x) if static else "int8"
    q = eqq.quantize_tree(model, eqq.Int2(), activations=activations)
    rows = eqq.analysis.compare_trees(model, q).leaves
    assert [row.path for row in rows] == ["layers.0.weight", "layers.1.weight"]
    plain = eqq.analysis.compare_trees(model, eqq.quantize_tree(model, eqq.Int2())).leaves
    assert [row.error for row in rows] == [row.error for row in plain]

    optimizer = optax.adam(3e-3)
    found = eqq.distill(q, model, x, held_out=x, train="codes", passes=3, optimizer=optimizer, progress=False)
    wanted = outputs(model, x[0])
    assert relative(wanted, outputs(found, x[0])) < 0.95 * relative(wanted, outputs(q, x[0]))
    assert jax.tree.structure(found) == jax.tree.structure(q)
    if static:
        np.testing.assert_array_equal(found.layers[0].weight.scale, q.layers[0].weight.scale)
    blocks = [(lambda m, n=n: m.layers[n], lambda layer, x: jax.vmap(layer)(x)) for n in range(2)]
    by_blocks = eqq.distill_blocks(q, model, x, blocks, passes=1, progress=False)
    assert jax.tree.structure(by_blocks) == jax.tree.structure(q)

    masters = eqq.float_masters(optax.sgd(0.1), masters=model).init(q).masters
    np.testing.assert_array_equal(masters.layers[1].weight.array, model.layers[1].weight)
    on_mesh = jax.sharding.NamedSharding(jax.make_mesh((1,), ("d",)), jax.sharding.PartitionSpec())
    given = eqq.tree_shardings(eqx.filter(q, eqx.is_array), {"*.weight": on_mesh})
    assert given.layers[0].weight.array.codes.mesh == on_mesh.mesh


def test_distillation_rounds_both_operands(getkey):
    """The initial loss is the loss of the model, though floats replace its weights."""
    model, x = eqx.nn.Linear(32, 8, key=getkey()), [weights(getkey(), (16, 32)) for _ in range(2)]
    q = eqq.quantize_tree(model, "int8", activations="int2")
    losses = []

    def apply(m, x):
        y = x @ m.weight.T
        jax.debug.callback(losses.append, y)
        return y

    eqq.distill(q, model, x[:1], held_out=x[1:], apply=apply, passes=1, optimizer=optax.sgd(0.0), progress=False)
    jax.effects_barrier()
    expected = x[1] @ q.weight.T
    assert any(np.allclose(y, expected, rtol=1e-4, atol=1e-4) for y in losses)
    assert not np.allclose(expected, x[1] @ q.weight.dequantize().T, rtol=1e-2, atol=1e-2)


@pytest.mark.long
def test_each_layer_of_a_stack_multiplies_its_operand(getkey):
    q = eqq.quantize(weights(getkey(), (3, 8, 32)), "int8")
    w = eqq.arrays.ActivationQuantizedArray(q, "int8", jnp.array([0.01, 0.03, 0.1]))
    layers = [jax.tree.map(lambda a, n=n: a[n], w) for n in range(3)]

    def multiply(n, x):
        return np.stack([multiply(n, part) for part in x]) if x.ndim > 2 else np.asarray(layers[n] @ x)

    for shape in ((3, 3, 32, 5), (4, 3, 32, 5), (4, 1, 32, 5), (3, 32, 5), (1, 32, 5), (32, 5), (32,)):
        x = np.asarray(weights(getkey(), shape))
        take_layer = lambda n, x=x: x if x.ndim < 3 else x[..., n % x.shape[-3], :, :]
        expected = np.stack([multiply(n, take_layer(n)) for n in range(3)], -2 if x.ndim < 2 else -3)
        np.testing.assert_allclose(w @ jnp.asarray(x), expected, rtol=1e-5, atol=1e-5)
        if x.ndim > 1:
            np.testing.assert_allclose(jnp.asarray(x.mT) @ w.mT, expected.mT, rtol=1e-5, atol=1e-5)
    one, x = jax.tree.map(lambda a: a[1:2], w), weights(getkey(), (3, 32, 5))
    np.testing.assert_allclose(one @ x, layers[1] @ x, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError):
        w @ weights(getkey(), (2, 32, 5))


def test_unreached_layers_are_an_error(getkey):
    """An expert that the gate never chose gets the range of the others."""
    model, x = {"experts": weights(getkey(), (3, 8, 32))}, weights(getkey(), (16, 32))
    gate = lambda x: jnp.where(x[0] > 1e6, 2, jnp.where(x[0] > 0, 1, 0))
    apply = lambda model, x: jax.lax.map(lambda x: jax.tree.map(lambda a: a[gate(x)], model["experts"]) @ x, x)
    stats = eqq.calibrate.collect_stats(model, [x], apply=apply)
    assert (stats["experts"].rows > 0).tolist() == [True, True, False]
    assert "1 of 3 layers were not reached" in stats["experts"].note
    static = eqq.quantize_tree(model, "int8", activations=stats)["experts"]
    assert static.scale[2] >= static.scale[:2].max() and jnp.isfinite(static @ x.T).all()
    calibrator = eqq.calibrate.MSERange(eqq.Int8("tensor", symmetric=False))
    ranges = eqq.calibrate.collect_stats(model, [x], apply=apply, calibrator=calibrator)
    _, scale, zero_point = ranges["experts"].activations()
    widest = int(scale[:2].argmax())
    assert scale[2] == scale[widest] and zero_point[2] == zero_point[widest]
    q = eqq.quantize_tree(model, "int8", activations="int8")["experts"]
    assert (jnp.abs(q @ x.T) > 0).any(axis=(1, 2)).all()


def test_bad_statistics(getkey, model):
    x = weights(getkey(), (8, 32))
    with pytest.raises(ValueError, match="layers.0.weight: `scale` must be positive"):
        eqq.quantize_tree(model, "int8", activations=eqq.calibrate.collect_stats(model, [jnp.zeros((8, 32))]))
    stats = eqq.calibrate.collect_stats(model, [x])
    with pytest.raises(ValueError, match="statistics of every weight. Got none of weight"):
        eqq.quantize_tree(eqx.nn.Linear(32, 8, key=getkey()), "int8", activations=stats)
    with pytest.raises(ValueError, match="statistics of this model.*shape"):
        eqq.quantize_tree(eqx.nn.MLP(32, 8, 16, 2, key=getkey()), "int8", activations=stats)
    with pytest.raises(ValueError, match="one range for all values"):
        eqq.calibrate.collect_stats(model, [x], calibrator=eqq.calibrate.MinMax(eqq.Int8(32), (32,)))
    q = eqq.quantize(weights(getkey(), (8, 32)), "int8")
    for arguments, message in (
        ((q, "int4", 0.1), "a format of one scale"),
        ((q, "int8", jnp.ones(8)), "one for each layer of a stack"),
        ((q, "int8", 0.1, 3), "`zero_point` must be given"),
        ((q, AFFINE, 0.1), "`zero_point` must be given"),
        ((q, AFFINE, 0.1, 256), "whole numbers from 0 to 255"),
        ((q, AFFINE, 0.1, -1), "whole numbers from 0 to 255"),
        ((q, AFFINE, 0.1, 3.5), "whole numbers from 0 to 255"),
        ((q, eqq.Int4(symmetric=False, block_size=None), 0.1, 16), "whole numbers from 0 to 15"),
        ((q, "int8", 0.0), "`scale` must be positive"),
        ((q, "int8", -0.1), "`scale` must be positive"),
        ((q, "int8", jnp.nan), "`scale` must be finite"),
        ((q, "int8", jnp.inf), "`scale` must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            eqq.arrays.ActivationQuantizedArray(*arguments)
    with pytest.raises(TypeError, match="`scale` must be floating point"):
        eqq.arrays.ActivationQuantizedArray(q, "int8", 1)
    jax.jit(lambda scale, zero: eqq.arrays.ActivationQuantizedArray(q, AFFINE, scale, zero))(
        jnp.float32(0), jnp.uint8(3)
    )
    with pytest.raises(TypeError, match="a quantized weight"):
        eqq.arrays.ActivationQuantizedArray(jnp.ones((3, 4)), "int8")


@pytest.mark.long
def test_quantize_sequentially_with_activations(getkey, model):
    x = weights(getkey(), (64, 32))
    q = eqq.quantize_sequentially(model, [x], "int4", eqq.GPTQ(), activations="int8")
    assert isinstance(q.layers[2].weight, eqq.arrays.ActivationQuantizedArray)
    assert relative(outputs(model, x), outputs(q, x)) < 0.2


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


# Convolutions


def convolve(x, w, groups=1):
    return jax.lax.conv_general_dilated(x, w, (1,) * (w.ndim - 2), "SAME", feature_group_count=groups)


def split_integers(q):
    """Returns the decoded values without zero points, and their scales."""
    rows = np.asarray(eqq.unpack(q)).astype(np.int64).reshape(q.scale.shape[0], -1)
    zero = np.full((len(rows), 1), 128) if q.zero_point is None else np.asarray(q.zero_point, np.int64)
    return (rows - zero).reshape(q.shape), np.asarray(q.scale, np.float64)


@pytest.mark.parametrize(
    "groups, channels, size, format",
    [(1, 4, 3, AFFINE), (2, 8, 3, eqq.Int8()), (6, 6, 3, AFFINE), (1, 96, 4, eqq.Int8()), (2, 160, 4, AFFINE)],
)
def test_convolutions_multiply_integers(groups, channels, size, format, getkey):
    """Equal to NumPy's integers, scaled once. Sums over 96 channels would not be exact in float32."""
    x = weights(getkey(), (2, channels, 7, 6)) + 0.5
    q = eqq.quantize(weights(getkey(), (6, channels // groups, size, size)), eqq.Int8(), axis=(1, 2, 3))
    f = jax.jit(eqq.quaxify(ft.partial(convolve, groups=groups)))
    y = f(x, eqq.arrays.ActivationQuantizedArray(q, format))
    a, s = split_integers(eqq.quantize(x.reshape(2, -1), format))
    b, t = split_integers(q)
    sides = ((size - 1) // 2, size // 2)
    a = np.pad(a.reshape(x.shape), ((0, 0), (0, 0), sides, sides))
    windows = np.lib.stride_tricks.sliding_window_view(a, (size, size), (2, 3))
    windows = windows.reshape(2, groups, channels // groups, 7, 6, size, size)
    b = b.reshape(groups, 6 // groups, channels // groups, size, size)
    sums = np.einsum("ngchwij,gocij->ngohw", windows, b).reshape(y.shape)
    np.testing.assert_allclose(y, sums * (s * t.T)[:, :, None, None], rtol=1e-6, atol=1e-9)


def test_explanation_of_convolutions(getkey):
    """On CPU codes are floats, elsewhere int8; with blocks or small floats the values are decoded."""
    x, weight = weights(getkey(), (2, 4, 8, 8)), weights(getkey(), (6, 4, 3, 3))
    f = eqq.quaxify(convolve)

    def integers(format, activations, platform):
        w = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weight, format, axis=(1, 2, 3)), activations)
        program = jax.jit(f).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
        lines = [line for line in program.splitlines() if "stablehlo.convolution" in line]
        return any(re.search(r": \(tensor<\w*xi8>, tensor<\w*xi8>\) -> tensor<\w*xi32>", line) for line in lines)

    assert integers(eqq.Int8(), "int8", "tpu") and integers(eqq.Int4(None), AFFINE, "cuda")
    assert not integers(eqq.Int8(), "int8", "cpu") and not integers(eqq.FP8(), "fp8", "cuda")
    w = eqq.arrays.ActivationQuantizedArray(eqq.quantize(weight, eqq.Int4(32), axis=(1, 2, 3)), "int8")
    rounded = eqq.quantize(x.reshape(2, -1), "int8").dequantize().reshape(x.shape)
    np.testing.assert_allclose(f(x, w), convolve(rounded, w.dequantize()), rtol=1e-5, atol=1e-5)


def test_models_with_convolutions(getkey):
    model = eqx.nn.Sequential([eqx.nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, key=getkey())])
    x = weights(getkey(), (3, 4, 6, 6))
    assert "multiplies codes under `eqq.quaxify`" in str(eqq.plan_tree(model, eqq.Int8(), activations="int8").to_dict())
    run = eqx.filter_jit(lambda m, x: jax.vmap(m)(x))
    expected = run(model, x)
    near = ft.partial(np.testing.assert_allclose, atol=0.03 * float(jnp.abs(expected).max()))
    stats = eqq.calibrate.collect_stats(model, [x], apply=lambda m, x: jax.vmap(m)(x))
    for activations in ("int8", stats):
        q = eqq.quantize_tree(model, eqq.Int8(), activations=activations)
        assert (q[0].weight.scale is None) == (activations == "int8")
        y = eqq.quaxify(run)(q, x)
        near(y, expected)
        with pytest.warns(UserWarning, match="quantize no activations.*call the function through `eqq.quaxify`"):
            floats = run(q, x)  # without it floats are convolved
        assert float(jnp.abs(floats - y).max()) > 0


def test_jax_functions_warn_about_float_activations(getkey):
    layer, x = eqx.nn.Linear(64, 64, key=getkey()), weights(getkey(), (8, 64))
    w = eqq.quantize_tree(layer, "int8", activations="int8").weight
    for f in (
        lambda w, x: jnp.matmul(x, w.T),
        lambda w, x: jnp.einsum("oi,bi->bo", w, x),
        lambda w, x: jnp.dot(x, w.T),
    ):
        with pytest.warns(UserWarning, match="the dense weight of an ActivationQuantizedArray of shape"):
            f(w, x)
        np.testing.assert_array_equal(eqq.quaxify(f)(w, x), x @ w.T)


@jax.custom_vjp
def with_own_gradient(w, x):
    return w @ x


with_own_gradient.defvjp(lambda w, x: (w @ x, (w, x)), lambda saved, g: (jnp.outer(g, saved[1]), saved[0].T @ g))


def in_checkpointed_loop(w, x):
    step = lambda carry: (jnp.tanh(w @ carry[0]), carry[1] + 1)
    return eqx.internal.while_loop(lambda carry: carry[1] < 3, step, (x, 0), kind="checkpointed", max_steps=4)[0]


@pytest.mark.parametrize(
    "f, operation",
    [
        (lambda w, x: jnp.sin(w) @ x, "sin"),
        (lambda w, x: jnp.sin(2 * w) @ x, "sin"),
    ],
)
def test_operations_without_a_rule_warn_about_float_activations(getkey, f, operation):
    q, x = eqq.quantize(weights(getkey(), (64, 64)), "int8"), weights(getkey(), (64,))
    w = eqq.arrays.ActivationQuantizedArray(q, "int8")
    quaxified = eqq.quaxify(f)
    match = rf"`{operation}`, at .*test_activations.py:\d+ in .*an? \w+ of shape \(64, 64\), so its products quantize"
    with pytest.warns(UserWarning, match=match):
        y = quaxified(w, x)
    np.testing.assert_array_equal(y, f(q.dequantize(), x))
    with pytest.warns(UserWarning, match=match):
        gradient = jax.grad(lambda x: jnp.sum(quaxified(w, x)))(x)
    expected = eqx.filter_jit(jax.grad(lambda x: jnp.sum(f(q.dequantize(), x))))(x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    with eqq.no_dense(), pytest.raises(RuntimeError, match=rf"`{operation}` has no packed form"):
        quaxified(q, x)


@pytest.mark.parametrize("f", [with_own_gradient, in_checkpointed_loop])
def test_gradients_by_the_rule_of_a_user_are_those_of_floats(getkey, f):
    q, x = eqq.quantize(weights(getkey(), (64, 64)) / 8, "int8"), weights(getkey(), (64,))
    w = eqq.arrays.ActivationQuantizedArray(q, "int8")
    quaxified = eqq.quaxify(f)
    with eqq.no_dense():
        y = jax.jit(quaxified)(w, x)
    dense = f(q.dequantize(), x)
    assert 1e-4 < jnp.abs(y - dense).max() < 0.03 * jnp.abs(dense).max()  # activations are rounded
    with pytest.warns(UserWarning, match=r"`custom_[jv]*p_call`, at .*test_activations.py:\d+ in"):
        gradient = jax.grad(lambda x: jnp.sum(quaxified(w, x)))(x)
    expected = eqx.filter_jit(jax.grad(lambda x: jnp.sum(f(q.dequantize(), x))))(x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", [eqq.Int8(), eqq.Int4(32)])  # codes are multiplied, or decoded
def test_gradients_of_convolutions(getkey, format):
    """Gradients equal those of a convolution of rounded values: of `x` in range, and of learned scales."""
    x, weight = weights(getkey(), (2, 4, 6, 6)), weights(getkey(), (6, 4, 3, 3))
    dy, scale = weights(getkey(), (2, 6, 6, 6)), np.float32(0.01)
    simulated = eqq.quantize_tree({"w": weight}, format, axis=(1, 2, 3), simulate=True)["w"]
    w = eqq.arrays.ActivationQuantizedArray(simulated, "int8", scale, learn_scale=True)
    f = lambda w, x: jnp.sum(eqq.quaxify(convolve)(x, w) * dy)
    w_grad, x_grad = eqx.filter_jit(jax.grad(f, (0, 1), allow_int=True))(w, x)
    inside = (x / scale >= -128.5) & (x / scale <= 127.5)
    rounded = jnp.clip(jnp.round(x / scale), -128, 127) * scale
    dw, dx = jax.vjp(lambda w, x: convolve(x, w), w.dequantize(), rounded)[1](dy)
    close = ft.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    assert not inside.all()
    close(w_grad.array.master, dw)
    close(x_grad, jnp.where(inside, dx, 0))
    slope = rounded - jnp.where(inside, x, 0)
    close(w_grad.log_factor, jnp.sum(dx * slope) / np.sqrt(4 * 36 * 128))
