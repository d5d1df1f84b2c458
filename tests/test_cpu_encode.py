"""Quantizing by native code on CPU: the bits of XLA's operations, under every transformation."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._formats.steps import find_steps
from eqquant._methods.encode import quantize_packed
from eqquant._methods.given import GivenScales
from eqquant._native import library as native
from eqquant._native.encoding import float_order, order_to_float

from .helpers import FORMATS, SCALARS, weights


pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=str(native.refusal()))

CALLS = ("@eqquant_cpu_encode", "@eqquant_cpu_reduce")
KINDS = (
    "nf4",
    "nf4_double",
    "int4_affine",
    "int5",
    "int3",
    "ternary",
    "binary",
    "mxfp4",
    "q4_0",
    "q8_0",
    "q4_k",
    "iq4_nl",
)


def quantize_both(w, format, **options):
    """Quantizes inside `jit`, where values are not checked, by a program of its own."""
    return jax.jit(lambda w: eqq.quantize(w, format, **options))(w)


@pytest.fixture
def by_xla(monkeypatch):
    """As `quantized`, without native code."""

    def quantize(w, format, **options):
        with monkeypatch.context() as patch:
            patch.setattr(native, "refusal", lambda: "off")
            return quantize_both(w, format, **options)

    return quantize


def calls(f, *args):
    text = jax.jit(f).lower(*args).as_text()
    return tuple(text.count(name) for name in CALLS)


def hostile(key, shape, dtype=jnp.float32):
    """Rows of zeros of both signs, ties, equal values, values that underflow or overflow, NaN and infinity."""
    w = np.array(weights(key, shape), np.float32)
    w[0], w[1] = w[0] * 1e-38, np.clip(w[1], -3, 3) * 1e38
    w[2], w[3], w[3, ::2] = 0, 0.0, -0.0
    w[4], w[5] = np.round(w[4] * 4) / 2, -1.5
    w[6, 3 % shape[1]], w[7, -1], w[7, 0] = np.nan, np.inf, -np.inf
    w[8] = w[8] * 1e-42
    w[9], w[10] = w[9] * 1e-6, w[10] * 1e-7  # where scales of float16 vanish
    return jnp.asarray(w).astype(dtype)


def assert_same_bits(a, b):
    """All must be equal, except the sign of a scale that is zero, and rows with blocks whose scale is NaN."""
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    ours, theirs = (np.asarray(q.dequantize(), np.float32) for q in (a, b))
    np.testing.assert_array_equal(ours, theirs)
    keep = np.isfinite(theirs).all(axis=-1)
    for field in ("codes", "scale", "zero_point", "offset"):
        x, y = getattr(a, field), getattr(b, field)
        if y is not None:
            np.testing.assert_array_equal(np.asarray(x)[keep], np.asarray(y)[keep])


def check_bits(getkey, by_xla, name, shape, dtype=jnp.float32):
    format = FORMATS[name].format
    w = hostile(getkey(), shape, dtype)
    assert_same_bits(quantize_both(w, format), by_xla(w, format))


@pytest.mark.parametrize("name", KINDS)
def test_same_bits(getkey, by_xla, name):
    check_bits(getkey, by_xla, name, (12, 1030))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize("length", [1, 9, 130, 784, 4999])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_same_bits_of_every_shape(getkey, by_xla, name, length, dtype):
    check_bits(getkey, by_xla, name, (11, length), dtype)


def test_sixteen_bits(getkey, by_xla):
    check_bits(getkey, by_xla, "nf4", (11, 200), jnp.bfloat16)
    check_bits(getkey, by_xla, "int4", (11, 200), jnp.float16)


@pytest.mark.parametrize(
    "name", ["nf4", "int4", "int4_affine", "q4_0", "q5_0", "mxfp4", "ternary", "binary", "fp8_e5m2"]
)
def test_steps(name):
    """The steps of a format give the codes of its `encode`, for floats of all magnitudes and around every step."""
    format = FORMATS[name].format
    steps = find_steps(format)
    bits = np.random.default_rng(0).integers(0, 2**32, 2**14, dtype=np.uint32).view(np.float32)
    near = order_to_float((steps.thresholds[:, None] + np.arange(-2, 3)).ravel().astype(np.int32))
    x = np.concatenate([bits, near, np.array([0.0, -0.0, np.inf, -np.inf], np.float32)])
    x = x[~np.isnan(x)]
    found = steps.codes[np.searchsorted(steps.thresholds, float_order(x), side="right")]
    np.testing.assert_array_equal(found, jax.jit(format.encode)(x))


def test_native_formats(getkey):
    w = weights(getkey(), (4, 256))
    count = lambda f: calls(lambda w: eqq.quantize(w, f), w)[0]
    assert [count(f) for f in (eqq.NF4(), eqq.Int4(), eqq.formats.Q4_0(), eqq.Int8(), eqq.FP8())] == [1, 1, 1, 0, 0]

    class Own(eqq.Int4):
        def encode(self, values):
            return super().encode(values) ^ 1

    assert count(Own()) == 0  # it may do anything
    own, plain = quantize_both(w, Own()), quantize_both(w, eqq.Int4())
    np.testing.assert_array_equal(eqq.unpack(own) ^ 1, eqq.unpack(plain))
    assert calls(lambda w: eqq.quantize(w, "nf4", method=eqq.MSE()), w)[0] == 1
    assert calls(lambda w: eqq.quantize(w, "nf4", key=jax.random.key(0)), w)[0] == 0
    exported = jax.export.export(jax.jit(lambda w: eqq.quantize(w, "nf4")))(w)
    assert not any(name in exported.mlir_module() for name in CALLS)


def test_vmap_and_axes(getkey):
    w = weights(getkey(), (3, 5, 70))
    expected = eqq.quantize(w, "int4")
    assert_same_bits(jax.vmap(lambda w: eqq.quantize(w, "int4"))(w), expected)
    assert_same_bits(eqx.filter_vmap(lambda w: eqq.quantize(w, "int4"), in_axes=1, out_axes=1)(w), expected)
    assert calls(jax.vmap(lambda w: eqq.quantize(w, "int4")), w)[0] == 1
    assert_same_bits(eqq.quantize(jnp.moveaxis(w, 2, 0), "int4", axis=0).transpose(1, 2, 0), expected)
    one = eqq.quantize(w[0, 0], "int4")
    np.testing.assert_array_equal(one.dequantize(), expected.dequantize()[0, 0])


@pytest.mark.parametrize("kind", ["amax", "signed_amax", "low", "high", "not_finite"])
def test_gradients_of_reductions(getkey, kind):
    from eqquant._numerics.reduce import by_xla, reduce_blocks

    x = weights(getkey(), (4, 3, 16))
    ours = jax.jit(jax.value_and_grad(lambda x: (reduce_blocks(x, kind) ** 2).sum()))(x)
    theirs = jax.jit(jax.value_and_grad(lambda x: (by_xla(x, kind=kind) ** 2).sum()))(x)
    jtu.tree_map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def test_gradients(getkey):
    w = weights(getkey(), (4, 128))
    scaled = lambda w: eqq.quantize(w, "nf4").dequantize().sum() + (w**2).sum()
    np.testing.assert_array_equal(jax.jit(jax.grad(scaled))(w), 2 * w)


def test_sharded(getkey):
    devices = jax.devices()[:2]
    if len(devices) < 2:
        pytest.skip("one device")
    w = weights(getkey(), (4, 256))
    mesh = Mesh(np.array(devices), ("a",))
    sharded = eqq.quantize(jax.device_put(w, NamedSharding(mesh, P("a"))), "nf4")
    np.testing.assert_array_equal(sharded.dequantize(), eqq.quantize(w, "nf4").dequantize())
    alone = jax.jit(
        jax.shard_map(lambda w: eqq.quantize(w, "nf4").dequantize(), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    )
    np.testing.assert_array_equal(alone(w), eqq.quantize(w, "nf4").dequantize())
    assert calls(alone, w)[0] == 1


def test_methods_that_choose_codes_are_not_replaced(getkey):
    """A method that finds codes itself is not replaced."""
    method = GivenScales(jnp.ones((2, 1)), None)
    program = jax.make_jaxpr(lambda rows: quantize_packed(method, rows, eqq.NF4())[:2])(weights(getkey(), (2, 64)))
    assert " encode[" not in str(program)


_FORK = """
import os, signal, warnings
import jax, jax.numpy as jnp, numpy as np
import eqquant as eqq

warnings.simplefilter("ignore")  # JAX warns of every fork
q, x = eqq.quantize(jnp.ones((512, 512)), "nf4"), jnp.ones((16, 512))
multiply = jax.jit(lambda x, q: x @ q.T)
y = np.asarray(multiply(x, q))
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that hangs
        os._exit(0 if np.array_equal(multiply(x, q), y) else 3)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork():
    """A child process runs programs that its parent compiled: no kernel waits for a thread that a fork left behind."""
    subprocess.run([sys.executable, "-c", _FORK], check=True, timeout=300)
