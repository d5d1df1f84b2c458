"""The choice of an implementation, with its reasons; and every kernel against the same tests."""

import functools as ft
import itertools as it
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import eqquant as eqq
from eqquant._matmul import dispatch
from eqquant._matmul.problem import describe_matmul, MatmulProblem, TargetDevice
from eqquant._native import library as native

from .helpers import assert_close, FORMATS, interpreted, KINDS, NEWEST, weights


N, K = 40, 1030  # two segments of four bits or more for every kernel, and a rest
MODULES = {"pallas_gpu": "triton.product", "pallas_tpu": "pallas_tpu"}
KERNELS = {name: ft.partial(dispatch.import_kernel, module) for name, module in MODULES.items()}
NATIVE = native.refusal() is None


@pytest.fixture(params=[*KERNELS, *["cpu"] * NATIVE])
def kernel(request, monkeypatch):
    """A kernel that runs on the CPU, interpreted unless it is made for it."""
    if request.param == "cpu":
        return "cpu"
    implementation = dispatch._wrap_kernel(interpreted(KERNELS[request.param]), dispatch._Needs("cpu"))
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, request.param, implementation)
    return request.param


def product(kernel):
    return ft.partial(eqq.matmul, implementation=kernel, precision="highest")


@pytest.fixture(params=["nf4", "int8"] if NEWEST else ["nf4"])
def q(request, getkey):
    return eqq.quantize(weights(getkey(), (N, K)), request.param)


# Transformations


@pytest.mark.long
def test_jit_and_both_sides(kernel, q, getkey):
    matmul, dense = product(kernel), q.dequantize()
    for f, g, x in (
        (lambda w, x: matmul(w, x), lambda w, x: w @ x, weights(getkey(), (K, 3))),
        (lambda w, x: matmul(x, w), lambda w, x: x @ w, weights(getkey(), (3, N))),
        (lambda w, x: matmul(w.T, x), lambda w, x: w.T @ x, weights(getkey(), (N,))),
        (lambda w, x: matmul(x, w.T), lambda w, x: x @ w.T, weights(getkey(), (2, 3, K))),
    ):
        assert_close(f(q, x), g(dense, x), tol=2e-6)
        assert_close(jax.jit(f)(q, x), g(dense, x), tol=2e-6)


@pytest.mark.parametrize(
    "transform",
    {
        "vmap": lambda f: jax.vmap(f),
        "vmap_of_vmap": lambda f: lambda x: jax.vmap(jax.vmap(f))(jnp.stack([x, 2 * x])),
        "grad": lambda f: lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(jax.vmap(f)(x))))(x),
        "vmap_of_grad": lambda f: jax.vmap(jax.grad(lambda x: jnp.sum(f(x) ** 2))),
        "jvp": lambda f: lambda x: jax.jvp(jax.vmap(f), (x,), (jnp.cos(x),)),
        "linearize": lambda f: lambda x: jax.linearize(jax.vmap(f), x)[1](jnp.cos(x)),
        "checkpoint": lambda f: lambda x: jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(jax.vmap(f)(x)))))(x),
    }.items(),
    ids=lambda item: item[0],
)
def test_transformations(kernel, q, getkey, transform):
    x, transform = weights(getkey(), (3, K)) / 30, transform[1]
    # The weight is an argument, since XLA for CPU in JAX 0.10.2 folds bit operations on constants wrongly.
    f = jax.jit(lambda q, x: transform(ft.partial(product(kernel), q))(x))
    g = transform(ft.partial(jnp.matmul, q.dequantize(), precision="highest"))
    assert_close(f(q, x), g(x), tol=1e-5)


def test_vmap_is_one_call(kernel, q, getkey, monkeypatch):
    called = []
    original = dispatch.run_implementation
    monkeypatch.setattr(
        dispatch, "run_implementation", lambda x, w, *args: called.append((x.shape, args[-1])) or original(x, w, *args)
    )
    jax.jit(jax.vmap(ft.partial(product(kernel), q))).lower(weights(getkey(), (5, K)))
    assert called == [((5, K), kernel)]


@pytest.mark.long
@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_weights(kernel, getkey, transposed):
    stacked = eqq.quantize(weights(getkey(), (3, N, K)), "nf4")
    inner = N if transposed else K
    f = (lambda w, x: product(kernel)(x, w)) if transposed else product(kernel)
    g = (lambda w, x: x @ w) if transposed else (lambda w, x: w @ x)
    dense = stacked.dequantize()
    x = weights(getkey(), (3, inner)) / 30
    assert_close(jax.vmap(f)(stacked, x), jax.vmap(g)(dense, x), tol=1e-5)
    assert_close(jax.vmap(f, in_axes=(0, None))(stacked, x[0]), jax.vmap(g, in_axes=(0, None))(dense, x[0]), tol=1e-5)
    x = weights(getkey(), (2, 3, inner)) / 30
    both = lambda f: jax.vmap(jax.vmap(f), in_axes=(None, 0))
    assert_close(both(f)(stacked, x), both(g)(dense, x), tol=1e-5)


@pytest.mark.long
def test_scan_over_layers_forward_and_reverse(kernel, getkey):
    layers = eqq.quantize(weights(getkey(), (3, K, K)) / 30, "int8")
    x = weights(getkey(), (2, K))

    def loss(matmul, w, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(matmul(x, w.mT)), None))
        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    f, g = ft.partial(loss, product(kernel), layers), ft.partial(loss, jnp.matmul, layers.dequantize())
    assert_close(eqx.filter_jit(jax.value_and_grad(f))(x), eqx.filter_jit(jax.value_and_grad(g))(x), tol=1e-5)


@pytest.mark.long
def test_shard_map(kernel, getkey):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    q = eqq.quantize(weights(getkey(), (N, K)), "nf4")
    x = weights(getkey(), (4, K)) / 30
    in_specs, out_specs = (P("model"), P("data")), P("data", "model")

    # Pallas' interpreter forgets along which axes scratch memory varies. `nox -s aot` compiles one with the check.
    shard = ft.partial(jax.shard_map, mesh=mesh, in_specs=in_specs, check_vma=kernel != "pallas_tpu")
    f = shard(lambda q, x: product(kernel)(x, q.T), out_specs=out_specs)

    dense = q.dequantize()
    assert_close(jax.jit(f)(q, x), x @ dense.T, tol=1e-5)
    loss = lambda x: jnp.sum(jnp.sin(f(q, x)))
    assert_close(
        jax.jit(jax.grad(loss))(x), eqx.filter_jit(jax.grad(lambda x: jnp.sum(jnp.sin(x @ dense.T))))(x), tol=1e-5
    )


@pytest.mark.long
def test_a_whole_model(kernel, getkey, monkeypatch):
    """Where a kernel is preferred, a model needs no change to run on it."""
    preference = dispatch._Preference("cpu", kernel, lambda p, target: True, "for this test")
    monkeypatch.setattr(dispatch, "_PREFERENCES", (preference, *dispatch._PREFERENCES))
    model = eqx.nn.MLP(1024, 3, 1024, 1, key=getkey())
    x = weights(getkey(), (4, 1024))
    small = eqq.quantize_tree(model, "int4")
    with jax.default_matmul_precision("highest"):
        y = eqx.filter_jit(lambda m, x: jax.vmap(m)(x))(small, x)
        assert_close(y, jax.vmap(eqq.dequantize_tree(small))(x), tol=1e-5)


# What broke once


def close(kernel, q, x, transpose=False, tol=1e-2):
    """One product against float64, relative to the largest result."""
    y = eqq.matmul(x, q if transpose else q.T, implementation=kernel)
    dense = np.asarray(q.dequantize(), np.float64)
    assert_close(y, np.asarray(x, np.float64) @ (dense if transpose else dense.T), tol=tol)


TABLE = np.array([-1, -0.3, -0.1, -0.03, 0, 0.01, 0.03, 0.2, 1])


@pytest.mark.parametrize("values", [TABLE * 1e6, TABLE * 5e-9], ids=["large", "small"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tables_that_overflow_16_bits(kernel, getkey, values, dtype):
    if (kernel, dtype) == ("pallas_tpu", "float16"):
        return  # which it does not take
    q = eqq.quantize(weights(getkey(), (N, K)), eqq.Codebook(values), dtype=dtype)
    close(kernel, q, weights(getkey(), (3, K)).astype(dtype))
    close(kernel, q, weights(getkey(), (3, N)).astype(dtype), transpose=True)


def test_padding_after_the_last_row_is_ignored(kernel, getkey):
    class Odd4(eqq.extend.AbstractFormat):
        block_size: int | None = eqx.field(static=True, default=64)
        bits = 4

        def choose_scale(self, blocks):
            return jnp.max(jnp.abs(blocks), axis=-1, initial=0) / 15

        def encode(self, values):
            return jnp.clip(jnp.round(jnp.abs(values)), 1, 15).astype(jnp.uint8)

        def decode(self, codes):  # no weight has code 0
            return jnp.where(codes == 0, jnp.nan, codes.astype(jnp.float32) ** 1.5)

    q = eqq.quantize(weights(getkey(), (N, K)), Odd4())
    close(kernel, q, weights(getkey(), (3, N)), transpose=True)


@pytest.mark.long
@pytest.mark.parametrize("format", [eqq.Int8(symmetric=False), eqq.Int4(symmetric=False)], ids=repr)
def test_zero_points_cancel(kernel, getkey, format):
    """Most weights are near the least one, so the sum with zero points is far smaller than that without."""
    w = jnp.abs(weights(getkey(), (300, 1024))) * 0.02
    q = eqq.quantize(w.at[:, ::64].set(1.0), format, dtype="bfloat16")
    x = (weights(getkey(), (4, 300)) + 1).astype("bfloat16")
    y = eqq.matmul(x, q, implementation=kernel)
    expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64)
    small = np.arange(1024) % 64 != 0
    error = (np.asarray(y, np.float64) - expected)[:, small]
    assert np.sqrt((error**2).mean() / (expected[:, small] ** 2).mean()) < 1e-2


@pytest.mark.long
def test_scales_that_another_class_decodes(kernel, getkey):
    class Doubled(eqq.FP8):
        def decode(self, codes):
            return 2 * eqq.FP8.decode(self, codes)

        def encode(self, values):
            return eqq.FP8.encode(self, values / 2)

    class Nested(eqq.NF4):
        @property
        def scale_format(self):
            return Doubled("e4m3", block_size=256)

    close(kernel, eqq.quantize(weights(getkey(), (N, K)), Nested()), weights(getkey(), (3, K)))


def test_empty_batch(kernel, getkey):
    stacked = eqq.quantize(weights(getkey(), (2, N, K)), "nf4")
    none = jax.tree_util.tree_map(lambda a: a[:0], stacked)
    assert product(kernel)(jnp.ones((0, 2, N)), none).shape == (0, 2, K)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("name", ["nf4", "int8_block", "int4_affine"])
@pytest.mark.parametrize("x64", [False, True])
def test_export(getkey, platform, name, x64):
    """From here, for static and symbolic numbers of rows."""
    with jax.enable_x64(x64):
        q = eqq.quantize(weights(getkey(), (N, K)), FORMATS[name].format)
        rows = jax.export.symbolic_shape("rows")[0]
        for m in (2, rows):
            x = jax.ShapeDtypeStruct((m, K), jnp.float32)
            exported = jax.export.export(jax.jit(lambda x, q: x @ q.T), platforms=[platform])(x, q)
            assert exported.out_avals[0].shape == (m, N)
            kernel = "tpu_custom_call" in exported.mlir_module()
            assert kernel == (platform == "tpu" and m == 2)


# Which, and why


PROBLEM = MatmulProblem(16, 4096, 4096, jnp.dtype(jnp.bfloat16), eqq.NF4(), False)


@pytest.mark.parametrize(
    "platform, changes, expected, reason",
    [
        ("cuda", {}, "pallas_gpu", "few rows"),
        ("cuda", {"m": 256}, "pallas_gpu", "few rows"),
        ("cuda", {"m": 257}, "xla", "many rows"),
        ("cuda", {"format": eqq.NVFP4()}, "pallas_gpu", "few rows"),
        ("cuda", {"format": eqq.MXFP4()}, "pallas_gpu", "few rows"),
        ("cuda", {"transpose": True}, "pallas_gpu", "few rows"),
        ("cuda", {"format": eqq.Int8()}, "xla", "fuses the one conversion"),
        ("cuda", {"format": eqq.Int8(), "transpose": True}, "xla", "fuses the one conversion"),
        ("cuda", {"format": eqq.FP8()}, "xla", "fuses the one conversion"),
        ("cuda", {"format": eqq.Int8(block_size=128)}, "pallas_gpu", "few rows"),
        ("cuda", {"format": eqq.Int8(symmetric=False)}, "pallas_gpu", "few rows"),
        ("cuda", {"format": eqq.Int4(block_size=48)}, "xla", "pallas_gpu would be better, but: blocks of 48"),
        ("cuda", {"format": eqq.Int8(), "dtype": jnp.dtype(jnp.float16), "transpose": True}, "pallas_gpu", "few rows"),
        ("tpu", {"format": eqq.Ternary(), "m": 256}, "pallas_tpu", "few rows"),
        ("tpu", {"format": eqq.Ternary(), "m": 257}, "xla", "many rows"),
        ("tpu", {"format": eqq.Dynamic8()}, "xla", "pallas_tpu would be better, but: 256 values"),
        ("tpu", {"m": 64}, "pallas_tpu", "few rows"),
        ("tpu", {"m": 65}, "xla", "many rows"),
        ("tpu", {"format": eqq.Int8()}, "xla", "fuses the one conversion"),
        ("cpu", {}, "cpu", "decoded in registers") if NATIVE else ("cpu", {}, "xla", "cpu would be better"),
        ("cpu", {"dtype": jnp.dtype(jnp.float64)}, "xla", "cpu would be better, but: it multiplies float32"),
        ("rocm", {}, "xla", "fuses the decode"),
    ],
)
def test_preferences(platform, changes, expected, reason):
    name, why = dispatch.choose(TargetDevice(platform), PROBLEM._replace(**changes), None)
    assert name == expected and reason in why


@pytest.mark.parametrize(
    "pair, platform, expected",
    [
        ((eqq.NF4(), eqq.Int8()), "cpu", "cpu has no type that multiplies the codes of both: the levels of NF4() are"),
        ((eqq.NF4(), eqq.FP8()), "cuda", "the levels of NF4() and FP8() are not integers"),
        ((eqq.Int8(8), eqq.Int8()), "cuda", "too few codes share both scales"),
        ((eqq.Int8(), eqq.Int8()), "cuda", None),
    ],
)
def test_reasons_for_decoding_activations(pair, platform, expected):
    w, x = eqq.quantize(jnp.ones((64, 128)), pair[0]), jax.ShapeDtypeStruct((4, 128), jnp.float32)
    how = eqq.explain_matmul(x, eqq.arrays.ActivationQuantizedArray(w, pair[1]).T, platform=platform)
    said = how.verdicts[how.implementation]
    assert ("decoded" in how.types) == (expected is not None) == ("Activations are decoded" in said)
    assert "cpu_int8 would be better" not in said and (expected is None or expected in said)


FLOAT64, CODES = jnp.dtype(jnp.float64), {"format": eqq.Int8(), "activations": eqq.Int8()}


@pytest.mark.parametrize(
    "changes, types, reason",
    [
        ({}, "bfloat16 x bfloat16 (decoded), sums in float32", None),
        ({"dtype": FLOAT64}, "float64 x float64 (decoded), sums in float64", None),
        (CODES, "int8 x int8, sums in int32", None),
        (CODES | {"transpose": True}, "float32 x float32 (decoded), sums in float32", "the sum runs across the blocks"),
        (CODES | {"dtype": FLOAT64}, "float64 x float64 (decoded), sums in float64", "float64 holds more than codes"),
        (CODES | {"format": eqq.NF4()}, "float32 x float32 (decoded), sums in float32", "the levels of NF4() are not"),
        (CODES | {"activations": eqq.formats.Trellis(2)}, "float32 x float32 (decoded), sums in float32", "Trellis"),
        (CODES | {"format": eqq.Int8(8)}, "float32 x float32 (decoded), sums in float32", "too few codes share both"),
        (
            {"format": eqq.FP8(), "activations": eqq.FP8("e5m2")},
            "float8_e5m2 x float8_e4m3fn, sums in float32",
            None,
        ),
        ({"format": eqq.MXFP4(), "activations": eqq.NVFP4()}, "bfloat16 x bfloat16, sums in float32", None),
    ],
    ids=str,
)
def test_types_that_xla_multiplies(changes, types, reason):
    problem, target = PROBLEM._replace(**changes), TargetDevice("cuda")
    assert dispatch.describe_types(problem, target, "xla") == types
    told = dispatch.decode_reason(problem, target, "xla")
    assert told is None if reason is None else reason in told
    assert dispatch.describe_types(problem, target, "cpu_int8") == "int8 x int8, sums in int32"


@pytest.mark.parametrize(
    "platform, name, changes, why",
    [
        ("cpu", "cpu_int8", {}, "one operand is in float"),
        ("cpu", "cpu_int8", CODES | {"transpose": True}, "the sum runs across"),
        ("cpu", "cpu_int8", CODES | {"activations": eqq.Int4(None)}, "one scale for each row of activations, not Int4"),
        ("cpu", "cpu_int8", CODES | {"activations": eqq.Int8(64)}, "one scale for each row of activations, not Int8"),
        ("cpu", "cpu_int8", CODES | {"activations": eqq.FP8()}, "one scale for each row of activations, not FP8"),
        ("cuda", "cpu_int8", CODES, "it is for cpu, and this is cuda"),
        ("cuda", "pallas_gpu", {"m": "rows"}, "the number of rows is symbolic"),
        ("cuda", "pallas_gpu", {"format": eqq.formats.Trellis(2)}, "stands for several values"),
        ("tpu", "xla", {"m": "rows", "dtype": FLOAT64}, None),
    ],
    ids=str,
)
def test_refusals(platform, name, changes, why):
    told = dispatch.find_refusal(TargetDevice(platform), PROBLEM._replace(**changes), name)
    assert told is None if why is None else why in told


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"capability": 7.5}, "the GPU has compute capability 7.5, and the kernel needs 8.0"),
        ({"exported": True}, "an exported program may not hold kernels for GPUs"),
        ({"kernel_refusal": "not of this computer"}, "not of this computer"),
    ],
    ids=str,
)
def test_what_kernels_need(changes, why):
    target = TargetDevice("cuda", **changes)
    name, reason = dispatch.choose(target, PROBLEM, None)
    assert name == "xla" and f"pallas_gpu would be better, but: {why}" in reason


@pytest.mark.parametrize("capability", [8.9, 9.0, 10.0, 12.0])
def test_the_kernel_for_hopper_and_blackwell(monkeypatch, capability):
    """It is for two generations of GPUs, and for JAX that has what it calls."""
    refusal = ft.partial(dispatch.find_refusal, TargetDevice("cuda", capability=capability), PROBLEM, "mosaic_gpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    needs = "it needs JAX 0.12" if 9 <= capability <= 10 else "and the kernel needs 9.0 or newer, and older than 11.0"
    assert needs in refusal()
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert NEWEST is False or (refusal() is None) == (9 <= capability <= 10)


def test_symbolic_rows_take_xla():
    assert dispatch.choose(TargetDevice("cuda"), PROBLEM._replace(m="rows", format=eqq.Int8()), None)[0] == "xla"
    name, why = dispatch.choose(TargetDevice("cpu"), PROBLEM._replace(m="rows"), None)
    assert name == "xla" and ("never fuses a decode" in why or native.isa() == "generic")


@pytest.mark.long
@pytest.mark.parametrize("x_format, w_format", [("nvfp4", "mxfp4"), ("fp8", "fp8")])
def test_activations_in_small_floats(getkey, x_format, w_format):
    """The factor of a row multiplies results, where codes are exact in bfloat16 without it."""
    x, w = eqq.quantize(weights(getkey(), (3, 64)), x_format), eqq.quantize(weights(getkey(), (5, 64)), w_format)
    problem = MatmulProblem(3, 5, 64, jnp.dtype(jnp.float32), w.format, False, activations=x.format)
    y = dispatch.run_implementation(x, w, problem, TargetDevice("cuda"), None)
    expected = np.asarray(x.dequantize(), np.float64) @ np.asarray(w.dequantize(), np.float64).T
    assert y.dtype == jnp.float32
    assert_close(y, expected, tol=1e-5)


def test_every_platform_supports_every_format():
    for platform in ("cuda", "tpu", "cpu", "rocm", "default"):
        for row in FORMATS.values():
            for dtype, transpose in ((jnp.bfloat16, False), (jnp.float64, True)):
                problem = MatmulProblem(0, 5, 7, jnp.dtype(dtype), row.format, transpose, "bfloat16_3x")
                assert dispatch.choose(TargetDevice(platform), problem, None)[0] == "xla"


def test_a_forced_implementation():
    assert dispatch.choose(TargetDevice("cuda"), PROBLEM._replace(m=4096), "pallas_gpu")[0] == "pallas_gpu"
    with pytest.raises(ValueError, match="cannot take this product: it is for tpu, and this is cuda"):
        dispatch.choose(TargetDevice("cuda"), PROBLEM, "pallas_tpu")
    with pytest.raises(
        ValueError,
        match="one of cpu, cpu_int8, mosaic_gpu, pallas_gpu, pallas_tpu, scaled_matmul, xla, or None. Got 'fast'",
    ):
        dispatch.choose(TargetDevice("cuda"), PROBLEM, "fast")
    for format in (eqq.MXFP8(), eqq.NVFP4()):  # the weights, or their scales
        small = PROBLEM._replace(format=format)
        assert dispatch.choose(TargetDevice("cuda", capability=8.0), small, None)[0] == "xla"
        with pytest.raises(ValueError, match="capability 8.0 have no floats of 8 bits"):
            dispatch.choose(TargetDevice("cuda", capability=8.0), small, "pallas_gpu")
    for changes, why in (
        ({"dtype": jnp.dtype(jnp.float64)}, "float64"),
        ({"format": eqq.Int4(block_size=48)}, "blocks of 48"),
        ({"k": 100}, "rows of 100 are shorter"),
        ({"dtype": jnp.dtype(jnp.float32), "precision": "BF16_BF16_F32_X9"}, "precision is BF16"),
        ({"precision": "garbage"}, "precision is garbage"),
    ):
        with pytest.raises(ValueError, match=rf"`implementation='pallas_gpu'` cannot take .*{why}.* Use \"xla\""):
            dispatch.choose(TargetDevice("cuda"), PROBLEM._replace(**changes), "pallas_gpu")
    with pytest.raises(ValueError, match=r"cannot take .* of this computer\."):
        dispatch.choose(TargetDevice("cuda", kernel_refusal="not of this computer"), PROBLEM, "pallas_gpu")
    with pytest.raises(ValueError, match="it is for cuda, and this is cpu"):
        eqq.matmul(jnp.ones((2, 256)), eqq.quantize(jnp.ones((8, 256)), "nf4").T, implementation="pallas_gpu")


@pytest.mark.parametrize(
    "precision, expected",
    {None: "default", "high": "highest", ("highest", "highest"): "highest", "tensorfloat32": "fastest"}.items(),
)
def test_precision(precision, expected):
    wide = PROBLEM._replace(dtype=jnp.dtype(jnp.float32), precision=precision)
    assert dispatch._precision(wide) == expected
    narrow = "fastest" if expected == "fastest" else "default"
    assert dispatch._precision(wide._replace(dtype=PROBLEM.dtype)) == narrow
    assert dispatch._precision(wide._replace(precision=("high", "default"))) is None


def test_explanations_know_the_default_precision():
    q, x = eqq.quantize(jnp.ones((64, 256)), "nf4"), jnp.ones((2, 256))
    with jax.default_matmul_precision("BF16_BF16_F32_X9"):
        told = eqq.explain_matmul(x, q.T, platform="cuda")
    assert told.implementation == "xla" and "the precision is" in told.verdicts["pallas_gpu"]


@pytest.fixture
def no_triton(monkeypatch):
    """JAX without Pallas-Triton, and this package without its code for it."""
    for name in [name for name in sys.modules if name.startswith("eqquant._matmul.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("jax.experimental.pallas.triton", "eqquant._matmul.kernels.triton"):
        monkeypatch.setitem(sys.modules, name, None)
    dispatch._warn_of_missing_backend.cache_clear()


def test_the_day_jax_drops_triton(getkey, no_triton):
    """XLA computes every product, and warns once."""
    target = TargetDevice("cuda", compiles=True)
    with pytest.warns(
        UserWarning, match="slow on this device: JAX .* has no `jax.experimental.pallas.triton`"
    ) as caught:
        for name, m, transpose in zip(KINDS, it.cycle((1, 3, 16)), it.cycle((False, True)), strict=False):
            x, q = weights(getkey(), (m, 1024)), eqq.quantize(weights(getkey(), (1024, 1024)), FORMATS[name].format)
            y = dispatch.run_implementation(x, q, describe_matmul(x, q, transpose, None), target, None)
            dense = q.dequantize()
            expected = np.asarray(dense if transpose else dense.T, np.float64)
            assert_close(y, np.asarray(x, np.float64) @ expected, tol=1e-5)
    (warning,) = caught
    assert ("or use `implementation='mosaic_gpu'`" in str(warning.message)) == (jax.__version_info__ >= (0, 12))
    told = eqq.explain_matmul(jnp.ones((16, 1024)), eqq.quantize(jnp.ones((8, 1024)), "nf4").T, platform="cuda")
    assert told.implementation == "xla" and "has no `jax.experimental.pallas.triton`" in told.verdicts["pallas_gpu"]
    with pytest.raises(ValueError, match='has no `jax.experimental.pallas.triton`. Use "xla", or None'):
        dispatch.choose(target, PROBLEM, "pallas_gpu")


def test_a_program_for_an_unknown_gpu_has_no_kernels(getkey):
    q, x = eqq.quantize(weights(getkey(), (64, 256)), "nf4"), jnp.ones((2, 256))
    text = jax.jit(lambda q, x: x @ q.T).trace(q, x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("triton" in text) == (jax.__version_info__ < (0, 11))  # which needs not know


# What XLA is given on GPU and TPU


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["int8", "int8_affine", "fp8_e5m2", *KINDS])
def test_xla_on_gpu(getkey, name, dtype, transpose):
    q = eqq.quantize(weights(getkey(), (2, 24, 130)), FORMATS[name].format, dtype=dtype)
    x = weights(getkey(), (2, 5, 24 if transpose else 130)).astype(dtype)
    problem = MatmulProblem(5, 24, 130, x.dtype, q.format, transpose)
    y = dispatch.run_implementation(x, q, problem, TargetDevice("cuda"), "xla")
    dense = np.asarray(q.dequantize(), np.float64)
    assert y.dtype == x.dtype
    assert_close(y, np.asarray(x, np.float64) @ (dense if transpose else np.swapaxes(dense, 1, 2)), tol=1e-2)


def test_bytes_are_converted_once():
    """XLA on GPU fuses one conversion of the weight with the product; with two, it writes the weight to memory."""
    q = eqq.quantize(jnp.ones((8, 256)), "fp8")
    problem = MatmulProblem(4, 8, 256, jnp.dtype(jnp.bfloat16), q.format, False)
    run = lambda x, q: dispatch.run_implementation(x, q, problem, TargetDevice("cuda"), "xla")
    found = jax.make_jaxpr(run)(jnp.ones((4, 256), jnp.bfloat16), q).jaxpr
    assert not [e for e in found.eqns if e.outvars[0].aval.shape == (8, 256) and e.outvars[0].aval.dtype == jnp.float32]
