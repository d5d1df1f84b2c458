"""`cpu`, the native kernels, against the dense product; and products without the native package."""

import concurrent.futures
import contextlib
import dataclasses
import itertools as it
import os
import re
import subprocess
import sys
import time
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._formats.layout import make_layout
from eqquant._matmul import dispatch
from eqquant._matmul.kernels import cpu
from eqquant._native import library as native

from .bounds import assert_within_bounds
from .helpers import FORMATS, KINDS, primitives, relative_error, SCALARS, temp_bytes, weights


needs_native = pytest.mark.skipif(native.refusal() is not None, reason=str(native.refusal()))
TOLERANCES = {"float32": 1e-6, "bfloat16": 4e-3, "float16": 6e-4}


def check(x, q, transpose=False, tol=None, **options):
    """One product against float64."""
    layout = make_layout(q.format, q.shape[-1])
    dtype = jnp.dtype(x.dtype)
    assert cpu.refusal(layout, x.shape[-2], q.shape[-2], dtype, transpose=transpose, precision="default") is None
    y = cpu.matmul(x, dispatch.as_stored_weight(q), layout, transpose=transpose, precision="default", **options)
    dense = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (dense if transpose else np.swapaxes(dense, -1, -2))
    assert y.dtype == dtype and y.shape == expected.shape
    assert relative_error(y, expected) < (tol or TOLERANCES[dtype.name])


def check_terms(y, x, w):
    """The errors are small relative to the terms of the sums, which may cancel where there are few results."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    assert np.abs(np.asarray(y) - x @ w).max() < 3e-7 * (np.abs(x) @ np.abs(w)).max()


@needs_native
@pytest.mark.parametrize(
    "dtype, precision, coarse",
    [("float32", None, "false"), ("float32", "tensorfloat32", "true"), ("bfloat16", "highest", "true")],
)
def test_which_products_may_round_inputs(dtype, precision, coarse):
    multiply = lambda x, q: eqq.matmul(x, q.T, precision=precision, implementation="cpu")
    q = eqq.quantize(jnp.ones((8, 64), dtype), "nf4")
    assert f"coarse = {coarse}" in jax.jit(multiply).lower(jnp.ones((2, 64), dtype), q).as_text()


@needs_native
def test_few_calls_from_matmul_to_the_kernel(getkey, monkeypatch):
    """A reader passes twelve functions from `x @ q` to the call of a kernel; `docs/design.md` names them."""
    found, original = [], jax.ffi.ffi_call

    def ffi_call(*args, **kwargs):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(os.path.dirname(eqq.__file__)):
                found.append(frame.f_code.co_name)
            frame = frame.f_back
        return original(*args, **kwargs)

    q, x = eqq.quantize(weights(getkey(), (24, 72)), "nf4"), weights(getkey(), (3, 72))
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    x @ q.T
    assert found[0] == "multiply" and found[-1] == "__rmatmul__" and len(found) <= 12


@needs_native
@pytest.mark.parametrize("m", [1, 7, 16, 64, 300])
@pytest.mark.parametrize("name", SCALARS)
def test_product(getkey, name, m):
    q = eqq.quantize(weights(getkey(), (72, 582)), FORMATS[name].format)
    check(weights(getkey(), (m, 582)), q)
    check(weights(getkey(), (m, 72)), q, transpose=True)


@needs_native
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", KINDS)
def test_dtypes(getkey, name, dtype):
    q = eqq.quantize(weights(getkey(), (40, 520)), FORMATS[name].format)
    for m in (1, 3, 40):
        check(weights(getkey(), (m, 520)).astype(dtype), q)
        check(weights(getkey(), (m, 40)).astype(dtype), q, transpose=True)


@needs_native
@pytest.mark.parametrize("m", [1, 16, 300])
@pytest.mark.parametrize(
    "format", ["q4_1", "q5_1", "q4_k", "q5_k", "q2_k", *map(eqq.formats.MLX, (2, 3, 4, 6, 8))], ids=str
)
def test_offsets(getkey, format, m):
    q = eqq.quantize(weights(getkey(), (3, 40, 512)), format)
    # With a mean, the large sums of codes and of offsets cancel.
    x, z = weights(getkey(), (3, m, 512)) + 0.5, weights(getkey(), (3, m, 40)) + 0.5
    check(x, q)
    check(z, q, transpose=True)
    check(x.astype("bfloat16"), q)
    # An infinity has the sign of its weight, though codes and offsets apart may have both.
    dense = np.asarray(q.dequantize(), np.float64)
    y = eqq.matmul(x.at[1, :, 5].set(jnp.inf), q.mT, implementation="cpu")[1]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y, np.broadcast_to(np.inf * dense[1, :, 5], y.shape))
        y = eqq.matmul(z.at[1, 0, 3].set(jnp.inf), q, implementation="cpu")[1, 0]
        np.testing.assert_array_equal(y, np.inf * dense[1, 3])
    picked = jax.jit(lambda q, n: (x[0] @ eqq.take_layer(q, n).T, z[0] @ eqq.take_layer(q, n)))(q, 2)
    layer = jax.tree.map(lambda a: a[2], q)
    assert_within_bounds(np.matmul, picked[0], x[0], layer, "cpu", transpose=False)
    assert_within_bounds(np.matmul, picked[1], z[0], layer, "cpu", transpose=True)


@needs_native
@pytest.mark.parametrize("m", [2, 3, 9])
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "ternary", eqq.Int4(32), eqq.Int4(symmetric=False)])
def test_short_rows(getkey, format, size, m):
    """Of a cache: heads, places, and numbers of each place; scores are the product, the mix is its transpose."""
    q = eqq.quantize(weights(getkey(), (3, 70, size)), format)
    check(weights(getkey(), (3, m, size)), q)
    check(weights(getkey(), (3, m, 70)), q, transpose=True)


@needs_native
@pytest.mark.parametrize("k", [1, 9, 63, 64, 65, 127, 130, 784, 1030])
@pytest.mark.parametrize(
    "name", ["nf4", "int8", "int2_affine", "binary", "mxfp4", "nf4_double", "q8_0", "int5_affine", "q3_k"]
)
def test_ragged_lengths(getkey, name, k):
    for n in (1, 7, 50):
        q = eqq.quantize(weights(getkey(), (n, k)), FORMATS[name].format)
        for m in (1, 2, 33):
            x, dense = weights(getkey(), (m, k)), q.dequantize()
            check_terms(eqq.matmul(x, q.T, implementation="cpu"), x, dense.T)
            x = weights(getkey(), (m, n))
            check_terms(eqq.matmul(x, q, implementation="cpu"), x, dense)


@needs_native
@pytest.mark.parametrize("block_size", [4, 12, 16, 32, 48, 64, 96, 100, 192, 1000])
@pytest.mark.parametrize("format", [eqq.Int4, eqq.Int8, eqq.Int2, eqq.Int6], ids=lambda f: f.__name__)
@pytest.mark.parametrize("symmetric", [False, True])
def test_every_block_size(getkey, format, block_size, symmetric):
    q = eqq.quantize(weights(getkey(), (20, 700)), format(block_size=block_size, symmetric=symmetric))
    for m in (1, 4, 20):
        check(weights(getkey(), (m, 700)), q)
        check(weights(getkey(), (m, 20)), q, transpose=True)


@needs_native
@pytest.mark.parametrize("name", KINDS)
def test_a_batch_is_one_call(getkey, name):
    q = eqq.quantize(weights(getkey(), (2, 3, 24, 130)), FORMATS[name].format)
    x = weights(getkey(), (2, 3, 5, 130))
    f = jax.jit(lambda x, q: eqq.matmul(x, q.mT, implementation="cpu"))
    assert f.lower(x, q).as_text().count("stablehlo.custom_call @eqquant_cpu_matmul") == 1
    expected = np.asarray(x, np.float64) @ np.swapaxes(np.asarray(q.dequantize(), np.float64), -1, -2)
    assert relative_error(f(x, q), expected) < 1e-6


@needs_native
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("m", [1, 4, 40])
def test_both_orders_of_x_and_y(getkey, m, transpose):
    q = eqq.quantize(weights(getkey(), (2, 72, 582)), "nf4")
    inner = 72 if transpose else 582
    x = weights(getkey(), (2, m, inner))
    for column_major in ((True, False), (False, True), (True, True)):
        check(x, q, transpose, column_major=column_major)


def operations(f, *args):
    """What a compiled program does beside calling kernels and looking at memory in another way."""
    text = jax.jit(f).lower(*args).compile().as_text()
    assert "eqquant_cpu_matmul" in text
    found = re.findall(r"= \S+ ([\w-]+)\(", text[text.index("ENTRY") :])
    return set(found) - {"parameter", "constant", "custom-call", "bitcast"}


LAYOUTS = {
    "x @ q.T": (lambda x, q: x @ q.T, (48, 256)),
    "q @ x": (lambda x, q: q @ x, (256, 48)),
    "x @ q": (lambda x, q: x @ q, (48, 72)),
    "q.T @ x": (lambda x, q: q.T @ x, (72, 48)),
    "nk, km -> mn": (lambda x, q: eqq.quaxify(lambda x, q: jnp.einsum("nk,km->mn", q, x))(x, q), (256, 48)),
    "nk, mk -> nm": (lambda x, q: eqq.quaxify(lambda x, q: jnp.einsum("nk,mk->nm", q, x))(x, q), (48, 256)),
    "nk, kab -> nab": (lambda x, q: eqq.quaxify(lambda x, q: jnp.tensordot(q, x, 1))(x, q), (256, 4, 12)),
    "vmap": (lambda x, q: jax.vmap(lambda x: q @ x)(x), (48, 256)),
    "vmap of vmap": (lambda x, q: jax.vmap(jax.vmap(lambda x: q @ x))(x), (4, 12, 256)),
}


@needs_native
@pytest.mark.skipif(native.isa() == "generic", reason="these products take xla")
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_transpose_is_written(getkey, name):
    """Of the activations, the result and their gradients: the kernel takes and gives them as they lie."""
    f, shape = LAYOUTS[name]
    q, x = eqq.quantize(weights(getkey(), (72, 256)), "nf4"), weights(getkey(), shape)
    assert operations(f, x, q) == set()
    y, expected = f(x, q), f(x, q.dequantize())
    assert relative_error(y, expected) < 1e-6 and relative_error(jax.jit(f)(x, q), expected) < 1e-6
    pull = lambda dy, q: jax.linear_transpose(lambda x: f(x, q), x)(dy)[0]
    dx = jax.vjp(lambda x: f(x, q.dequantize()), x)[1](y)[0]
    assert operations(pull, y, q) == set() and relative_error(pull(y, q), dx) < 1e-6
    along = jax.jvp(lambda x: f(x, q), (x,), (x,))[1]
    assert relative_error(along, expected) < 1e-6
    batch = jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), q)
    assert relative_error(batch, jnp.stack([y, 2 * y])) < 1e-6


@needs_native
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("name", ["nf4", "int8", "binary", "mxfp4", "q4_k", "q2_k"])
@pytest.mark.parametrize("m", [1, 2, 4, 64])
def test_as_accurate_as_float32(getkey, name, m, precision):
    """The errors are at most twice the errors of XLA's product."""
    q = eqq.quantize(weights(getkey(), (256, 4096)), FORMATS[name].format)
    x = weights(getkey(), (m, 4096)) + 0.25
    dense = q.dequantize()
    expected = np.asarray(x, np.float64) @ np.asarray(dense, np.float64).T
    ours = relative_error(eqq.matmul(x, q.T, implementation="cpu", precision=precision), expected)
    assert ours < 2 * relative_error(jax.jit(lambda x, w: x @ w.T)(x, dense), expected)


@needs_native
@pytest.mark.parametrize("precision", ["tensorfloat32", "bfloat16", jax.lax.Precision.DEFAULT, "highest"], ids=str)
@pytest.mark.parametrize("name", ["int8", "int4", "ternary", "nf4", "fp8_e4m3", "q4_k", "int4_affine"])
def test_precision(getkey, name, precision):
    """Fewer bits of `x` only where the precision allows them, and there fewer digits, which take less time."""
    q = eqq.quantize(weights(getkey(), (48, 1024)), FORMATS[name].format)
    x = weights(getkey(), (40, 1024))
    expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64).T
    error = relative_error(eqq.matmul(x, q.T, implementation="cpu", precision=precision), expected)
    coarse = isinstance(precision, str) and precision != "highest"
    assert error < (1e-4 if coarse else 1e-6)
    if coarse and name in ("int8", "int4", "ternary") and native.isa() in ("avx512vnni", "avx512vbmi", "amx"):
        assert error > 1e-6


@needs_native
def test_a_last_row_alone(getkey):
    """Many rows are multiplied in parts, and no part is a few rows, which another kernel would add in another order."""
    if native.isa() == "amx":
        pytest.skip("rows of `x` that lie side by side share an exponent, so last bits depend on the neighbors")
    q, x = eqq.quantize(weights(getkey(), (130, 520)), "nf4"), weights(getkey(), (513, 520))
    many = eqq.matmul(jnp.concatenate([x, x]), q.T, implementation="cpu")
    assert (many[:513] == eqq.matmul(x, q.T, implementation="cpu")).all() and (many[513:] == many[:513]).all()


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["int8", "int4", "nf4", "mxfp4"])
@pytest.mark.parametrize("kind", ["outlier", "half", "tenth", "blocks", "mean", "ordinary"])
def test_results_of_16_bits(getkey, name, kind, dtype):
    """Rounding `x` to 16 bits, parts of the largest number, shows in no result of 16 bits."""
    w, x = weights(getkey(), (40, 1024)), weights(getkey(), (17, 1024))
    if kind == "outlier":
        w, x = w.at[:, 5].set(0), x.at[:, 5].set(3e3)
    elif kind == "half":
        w, x = w.at[:, ::2].set(0), x.at[:, ::2].multiply(1e3)
    elif kind == "tenth":
        small = np.arange(1024) % 10 == 0
        w, x = w.at[:, ~small].set(0), x.at[:, small].multiply(1e-3)
    elif kind == "blocks":
        w, x = w.at[:, 64:].set(0), x.at[:, :64].multiply(1e-2)
    elif kind == "mean":
        x = x + 4
    check(x.astype(dtype), eqq.quantize(w, FORMATS[name].format))


@needs_native
@pytest.mark.parametrize("size", [1e-36, 1e38])
@pytest.mark.parametrize("name", ["nf4", "int8", "mxfp4"])
def test_tiny_and_huge_numbers(getkey, name, size):
    """Tiles of AMX take subnormal terms for zero, and sums that are not scaled yet may overflow."""
    q = eqq.quantize(weights(getkey(), (40, 192)) / jnp.float32(size) ** 0.5, FORMATS[name].format)
    x = jax.random.uniform(getkey(), (16, 192), minval=-1, maxval=1) * size
    expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64).T
    assert relative_error(eqq.matmul(x, q.T, implementation="cpu"), expected) < 1e-6


@needs_native
@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("name", ["nf4", "int8", "mxfp4"])
def test_huge_weights_and_tiny_numbers(getkey, name, m):
    """What is added up has the size of the result."""
    check(weights(getkey(), (m, 192)) * 1e-10, eqq.quantize(weights(getkey(), (40, 192)) * 1e34, FORMATS[name].format))


@needs_native
@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("name", ["nf4", "int8", "ternary"])
def test_an_outlier_that_meets_zeros(getkey, name, m):
    """Numbers that are much smaller than another keep their bits."""
    w = weights(getkey(), (40, 192)).at[:, 5].set(0)
    q = eqq.quantize(w, FORMATS[name].format)
    x = weights(getkey(), (m, 192)).at[:, 5].set(1e7)
    assert np.asarray(q.dequantize()[:, 5] == 0).all()
    check(x, q)


@needs_native
@pytest.mark.parametrize(
    "kind, name",
    [
        *it.product(["one of eight", "one of ten that are not zero", "half"], ["nf4", "int8", "mxfp4"]),
        *it.product(["blocks of the weight"], ["nf4", "mxfp4"]),
    ],
)
def test_numbers_of_very_different_size(getkey, name, kind):
    """Kernels that take numbers as parts of the largest leave these to others, or take more digits."""
    k = 8 if kind == "one of eight" else 1024
    w, x = weights(getkey(), (40, k)), weights(getkey(), (17, k))
    if kind == "blocks of the weight":
        w, x = w.at[:, :64].multiply(1e6), x.at[:, :64].set(0)
    elif kind == "half":
        w, x = w.at[:, ::2].set(0), x.at[:, ::2].multiply(1e6)
    else:
        x = (x if k == 8 else x.at[:, 10:].set(0)).at[:, 5].set(1e9)
        w = w.at[:, 5].set(0)
    check(x, eqq.quantize(w, FORMATS[name].format))


@needs_native
@pytest.mark.parametrize("name", ["ternary", "nf4", "fp8_e4m3"])
@pytest.mark.parametrize("m", [16, 17, 33])
def test_a_row_whose_scale_is_infinite(getkey, name, m):
    """Results equal XLA's, also for a last row that is alone in its tile."""
    q = eqq.quantize(weights(getkey(), (20, 512)), FORMATS[name].format)
    infinite = jax.lax.bitcast_convert_type(jnp.float32(jnp.inf), q.scale_bits.dtype)
    q = eqx.tree_at(lambda q: q.scale_bits, q, q.scale_bits.at[3].set(infinite))
    x = weights(getkey(), (m, 512))
    y = eqq.matmul(x, q.T, implementation="cpu")
    assert jnp.isnan(y[:, 3]).all() and jnp.isfinite(jnp.delete(y, 3, 1)).all()


@needs_native
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_infinities(getkey, dtype):
    """Of `x` and of the weight, with few rows of `x` and with many. None becomes NaN where no zero meets it."""
    q = eqq.quantize(weights(getkey(), (40, 64)).astype(dtype), eqq.NF4())
    x = jnp.ones((16, 64), dtype).at[1, 3].set(jnp.inf)
    y = eqq.matmul(x, q.T, implementation="cpu")
    column = np.asarray(q.dequantize(), np.float32)[:, 3]
    infinite = np.where(column == 0, np.nan, np.copysign(np.inf, column))
    assert np.array_equal(np.asarray(y[1], np.float32), infinite, equal_nan=True)
    assert np.isfinite(np.asarray(y[jnp.arange(16) != 1], np.float32)).all()
    q = eqq.quantize(weights(getkey(), (40, 64)).astype(dtype), eqq.FP8("e5m2"))
    q = dataclasses.replace(q, codes=q.codes.at[5, 7].set(0x7C))
    y = np.asarray(eqq.matmul(jnp.full((16, 64), 1.5, dtype), q.T, implementation="cpu"), np.float32)
    assert (y[:, 5] == np.inf).all() and np.isfinite(np.delete(y, 5, axis=1)).all()


@needs_native
def test_no_dense_weight(getkey):
    q = eqq.quantize(weights(getkey(), (1024, 1024)), "nf4")
    f = lambda q, x: eqq.matmul(x, q.T, implementation="cpu")
    assert temp_bytes(f, q, weights(getkey(), (4, 1024))) < 2**17
    layers = eqq.quantize(weights(getkey(), (3, 1024, 1024)) / 32, "nf4")
    g = lambda w, x: jax.lax.scan(lambda x, w: (f(w, x), None), x, w)[0]
    assert temp_bytes(g, layers, weights(getkey(), (4, 1024))) < 2**20  # a copy of the codes of one layer: 2^19
    assert "pure_callback" not in primitives(f, q, weights(getkey(), (4, 1024)))


@needs_native
@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=(pytest.mark.slow, pytest.mark.long))])
def test_threads_at_once(getkey, seconds):
    """Products that share XLA's threads, called from eight threads, on four devices, small and large."""
    q = eqq.quantize(weights(getkey(), (600, 900)), "nf4")
    f = jax.jit(lambda x, q: eqq.matmul(x, q.T, implementation="cpu"))
    xs = [weights(getkey(), (m, 900)) for m in (1, 5, 70, 600)]
    expected = [np.asarray(f(x, q)) for x in xs]
    until = time.monotonic() + seconds

    def work(seed):
        device = jax.devices()[seed % len(jax.devices())]
        there, operands = jax.device_put(q, device), [jax.device_put(x, device) for x in xs]
        calls = 0
        while time.monotonic() < until:
            i = (seed + calls) % len(xs)
            np.testing.assert_array_equal(np.asarray(f(operands[i], there)), expected[i])
            calls += 1
        return calls

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert min(pool.map(work, range(8))) > 0


@needs_native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_use():
    """The kernels have no threads and no locks: a forked child runs the compiled program."""
    code = """
import os, warnings
import jax, jax.numpy as jnp, numpy as np, eqquant as eqq

q, x = eqq.quantize(jax.random.normal(jax.random.key(0), (300, 512)), "nf4"), jnp.ones((40, 512))
f = jax.jit(lambda x, q: eqq.matmul(x, q.T, implementation="cpu"))
expected = np.asarray(f(x, q))
warnings.simplefilter("ignore")
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(7 if (np.asarray(f(x, q)) == expected).all() else 8)
    assert (np.asarray(f(x, q)) == expected).all()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_native
def test_sharded(getkey):
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    q = eqq.quantize(weights(getkey(), (64, 1024)), "nf4")
    x = weights(getkey(), (8, 1024))
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    f = jax.jit(lambda x, q: eqq.matmul(x, q.T, implementation="cpu"))
    expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64).T
    assert relative_error(f(put(x, P()), jax.device_put(q, NamedSharding(mesh, P("model")))), expected) < 1e-6


@needs_native
def test_random_operands_do_not_crash(getkey):
    """XLA passes any operands; a call with wrong operands is an error with a message."""
    q = eqq.quantize(weights(getkey(), (8, 256)), "nf4")
    layout, packed = make_layout(q.format, 256), dispatch.as_stored_weight(q)
    x = weights(getkey(), (2, 256))
    run = lambda x, packed, layout: cpu.matmul(x, packed, layout, transpose=False, precision="default")
    for wrong, why in (
        ((x[:, :255], packed, layout), "x and the weight do not fit"),
        ((x, packed._replace(codes=packed.codes[:, :100]), layout), "bytes"),
        ((x, packed._replace(scale=packed.scale[:, :3]), layout), "blocks"),
        ((x, packed._replace(scale=packed.scale[:7]), layout), "differ in their rows"),
        ((x, packed._replace(scale=packed.scale.astype(jnp.uint16)), layout), "unsigned integers of the width"),
        ((x, packed, layout._replace(block_size=0)), "at least one code"),
        ((x, packed, layout._replace(bits=3)), "a value for each code"),
        ((x, packed, layout._replace(bits=9)), "1 to 8 bits"),
        ((x, packed, layout._replace(bits=3, table=layout.table[:8])), "bytes"),
        ((x, packed, layout._replace(nested=layout)), "codes of scales|blocks"),
        ((x, packed._replace(scale_codes=packed.scale.astype(jnp.uint8)), layout), "codes of scales"),
        ((x, packed._replace(offset=packed.scale[:, :2]), layout), "offsets"),
        ((x, packed, layout._replace(table=layout.table[:5])), "a value for each code"),
        ((x.astype(jnp.float8_e4m3fn), packed, layout), "float32, bfloat16 or float16"),
        ((x, packed._replace(row_scale=jnp.ones((7, 1))), layout), "scales of rows"),
        ((x, packed._replace(zero_point=jnp.ones((8, 3), jnp.uint8)), layout), "zero points"),
    ):
        with pytest.raises(Exception, match=why):
            jax.block_until_ready(run(*wrong))


@needs_native
@pytest.mark.parametrize("name", native.instruction_sets())
def test_each_instruction_set(name):
    """A process of its own for each, since it is chosen when the library is loaded."""
    code = f"""
import jax, numpy as np, eqquant as eqq
from eqquant._native import library as native
assert native.refusal() is None and native.isa() == {name!r}, (native.refusal(), native.isa())
for format in ("nf4", "int8", eqq.NVFP4(), "q4_k", "q6_k", eqq.Int5(32)):
    for m, k in ((1, 768), (40, 1030)):
        w = jax.random.normal(jax.random.key(m), (100, k))
        x = jax.random.normal(jax.random.key(k), (m, k))
        q = eqq.quantize(w, format)
        e = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64).T
        y = eqq.matmul(x, q.T, implementation="cpu")
        assert np.linalg.norm(y - e) < 1e-6 * np.linalg.norm(e), (format, m, k)
told = eqq.explain_matmul(x, q.T)
if native.isa() == "generic":
    assert told.implementation == "xla" and "plain C++" in told.verdicts["xla"] and told.verdicts["cpu"] == "possible"
else:
    assert told.implementation == "cpu"
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "EQQUANT_CPU_ISA": name})


@needs_native
def test_an_instruction_set_that_is_not_there():
    code = """
import jax.numpy as jnp, eqquant as eqq
q, x = eqq.quantize(jnp.ones((8, 256)), "nf4"), jnp.ones((2, 256))
assert (x @ q.T == 256).all()
print(eqq.explain_matmul(x, q.T).to_dict())
"""
    env = {**os.environ, "EQQUANT_CPU_ISA": "abacus"}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True)
    problem = "EQQUANT_CPU_ISA is abacus, and this machine has generic"
    assert problem in done.stdout and "'implementation': 'xla'" in done.stdout
    assert done.stderr.count(f"UserWarning: {problem}") == 1 and "Native kernels are off." in done.stderr


# Where they are missing


@pytest.fixture
def fresh(monkeypatch):
    """As in a new process."""
    cached = (native.refusal, native._open, native.warn_of_slow_products)
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    for function in cached:
        function.cache_clear()


def falls_back(why, *, warns=True):
    with pytest.warns(match=re.escape(why)) if warns else contextlib.nullcontext():
        q, x = eqq.quantize(jnp.ones((8, 256)), "nf4"), jnp.ones((2, 256))
        told = eqq.explain_matmul(x, q.T, platform="cpu")
    assert told.implementation == "xla" and why in told.verdicts["cpu"]
    for text in (told.verdicts["cpu"], " ".join(str(told).split())):
        assert 'pip install "eqquant[cpu]"' in text.replace("--upgrade jax ", "")
    assert (np.asarray(x @ q.T) == 256).all()


def test_the_native_package_is_missing(fresh):
    """The first product that is slow without it warns. Small ones do not, nor where kernels are off."""
    fresh.setitem(sys.modules, "eqquant_cpu", None)
    falls_back("native kernels are not installed", warns=False)
    q, x = eqq.quantize(jnp.ones((1024, 1024)), "nf4"), jnp.ones((1, 1024))
    with pytest.warns(match="slow on this CPU: native kernels are not installed: run .*EQQUANT_CPU_ISA=none turns"):
        jax.jit(lambda x, q: x @ q.T).lower(x, q)
    jax.jit(lambda x, q: 2 * (x @ q.T)).lower(x, q)  # once


def test_kernels_that_are_off_warn_of_nothing(fresh):
    fresh.setitem(sys.modules, "eqquant_cpu", None)
    fresh.setenv("EQQUANT_CPU_ISA", "none")
    q, x = eqq.quantize(jnp.ones((1024, 1024)), "nf4"), jnp.ones((1, 1024))
    jax.jit(lambda x, q: x @ q.T).lower(x, q)
    told = eqq.explain_matmul(x, q.T, platform="cpu")
    assert told.verdicts["cpu"] == "native kernels are off: EQQUANT_CPU_ISA is none"


@pytest.mark.parametrize("code", ["raise RuntimeError('built for another system')", "import eqquant_missing"])
def test_a_package_that_fails(fresh, tmp_path, code):
    (tmp_path / "eqquant_cpu.py").write_text(code)
    fresh.delitem(sys.modules, "eqquant_cpu", raising=False)
    fresh.syspath_prepend(tmp_path)
    falls_back("`eqquant-cpu` does not load (")


def test_a_library_that_does_not_load(fresh, tmp_path):
    path = tmp_path / "kernels.lib"
    path.write_bytes(b"\x7fELF and no more")
    fresh.setitem(sys.modules, "eqquant_cpu", types.SimpleNamespace(LIBRARY=path))
    falls_back("does not load")


@needs_native
def test_a_library_of_another_version(fresh):
    fresh.setattr(native, "ABI", 99)
    falls_back("`eqquant-cpu` must be of version 99.*. Got ")


@needs_native
@pytest.mark.parametrize("version", [None, 2, 1000])
def test_a_library_for_another_jaxlib(fresh, version):
    fresh.setattr(native, "_api_version", lambda: version)
    falls_back("was built for another jaxlib")


@needs_native
def test_what_is_installed_has_a_name():
    q, x = eqq.quantize(jnp.ones((8, 256)), "nf4"), jnp.ones((2, 256))
    told = eqq.explain_matmul(x, q.T, platform="cpu").verdicts["cpu"]
    assert re.fullmatch(rf"chosen: .*\(eqquant-cpu {native.ABI}\.[\d.]+, {native.isa()}\)", told)
