"""Dequantizing by native code on CPU: the bits of XLA's operations, under every transformation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._array.dequantize import dequantize_rows
from eqquant._formats.base import has_offsets
from eqquant._native import library as native

from .helpers import FORMATS, weights


pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=str(native.refusal()))

CALL = "eqquant_cpu_decode"
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
NARROW = [n for n in FORMATS if FORMATS[n].format.bits < 8 and not has_offsets(FORMATS[n].format)]
KINDS = ("nf4", "nf4_double", "int4_affine", "mxfp4", "nvfp4", "q4_0", "int2", "binary", "int5_affine", "q6_k")
VECTORS = ("iq2_xs", "iq3_s", "iq1_m", "trellis2")


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))  # of NaN, which bits is the processor's affair
    keep = ~np.isnan(a)
    assert a[keep].tobytes() == b[keep].tobytes()


def calls(f, *args):
    return jax.jit(f).lower(*args).as_text().count(f"@{CALL}")


@jax.jit
def hostile(key, shape_of):
    """Values whose magnitudes span the floats, so that scales and products overflow and underflow."""
    a, b = jax.random.split(key)
    spread = 10.0 ** jax.random.uniform(a, (*shape_of.shape[:-1], 1), minval=-37, maxval=37)
    return (jax.random.normal(b, shape_of.shape) * spread).clip(-3e38, 3e38)


@pytest.mark.parametrize("name", [*KINDS, *VECTORS])
def test_same_bits(getkey, name):
    check_bits(getkey, name, (6, 1030), DTYPES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("shape", [(1,), (3, 9), (2, 3, 130), (5, 784), (6, 1030), (3, 4999)])
def test_same_bits_of_every_shape(getkey, name, shape):
    check_bits(getkey, name, shape, DTYPES)


def check_bits(getkey, name, shape, dtypes):
    quantize = jax.jit(lambda w: eqq.quantize(w, FORMATS[name].format))
    # The values of all dtypes in one program, which compiles sooner than one for each.
    both = jax.jit(lambda q: [(q.astype(d).dequantize(), dequantize_rows(q.astype(d))) for d in dtypes])
    for w in (weights(getkey(), shape), hostile(getkey(), jnp.zeros(shape))):
        for ours, theirs in both(quantize(w)):
            same_bits(ours, theirs)
    assert calls(lambda q: q.dequantize(), quantize(w)) == 1


@pytest.mark.parametrize("block_size", [12, 16, 32, 48, 64, 192, None])
@pytest.mark.parametrize("symmetric", [False, True])
def test_every_block_size(getkey, block_size, symmetric):
    for format in (eqq.Int4, eqq.Int2) if block_size == 48 else (eqq.Int4,):
        q = eqq.quantize(weights(getkey(), (7, 700)), format(block_size=block_size, symmetric=symmetric))
        same_bits(q.dequantize(), jax.jit(dequantize_rows)(q))


def test_not_finite(getkey):
    w = weights(getkey(), (4, 256)).at[1, 3].set(jnp.nan).at[2, 100].set(jnp.inf)
    for format in (eqq.NF4(), eqq.NVFP4(), eqq.Int4(symmetric=False)):
        q = jax.jit(lambda w: eqq.quantize(w, format))(w)  # noqa: B023
        assert np.isnan(np.asarray(q.dequantize()[1, 3]))
        same_bits(q.dequantize(), jax.jit(dequantize_rows)(q))


def test_eight_bit_codes_use_xla(getkey):
    """XLA fuses their decoding with the consumer."""
    q = eqq.quantize(weights(getkey(), (4, 256)), "int8")
    assert calls(lambda q: q.dequantize(), q) == 0


def test_axes(getkey):
    w = weights(getkey(), (6, 5, 3, 70))
    for axis in (0, 1):
        q = eqq.quantize(w, "nf4", axis=axis)
        expected = eqq.quantize(jnp.moveaxis(w, axis, -1), "nf4").dequantize()
        same_bits(q.dequantize(), jnp.moveaxis(expected, -1, axis))
    q = eqq.quantize(w, "nf4", axis=(3, 0))
    expected = eqq.quantize(jnp.moveaxis(w, 0, -1).reshape(5, 3, 420), "nf4").dequantize()
    same_bits(q.dequantize(), jnp.moveaxis(expected.reshape(5, 3, 70, 6), -1, 0))


def test_vmap(getkey):
    q = eqq.quantize(weights(getkey(), (3, 4, 130)), "int4")
    same_bits(jax.vmap(lambda q: q.dequantize())(q), q.dequantize())
    same_bits(eqx.filter_vmap(lambda q: q.dequantize(), in_axes=1, out_axes=1)(q), q.dequantize())
    assert calls(jax.vmap(jax.vmap(lambda q: q.dequantize())), q) == 1
    scaled = jax.vmap(lambda s: eqx.tree_at(lambda q: q.scale_bits, q, q.scale_bits + s).dequantize())
    same_bits(scaled(jnp.zeros(2, jnp.uint32))[1], q.dequantize())


def test_scan_and_rows(getkey):
    q = eqq.quantize(weights(getkey(), (3, 40, 130)), "nf4")
    layers = jax.lax.scan(lambda c, q: (c, q.dequantize()), None, q)[1]
    same_bits(layers, q.dequantize())
    same_bits(q[1, jnp.array([7, 0, 39])], q.dequantize()[1, jnp.array([7, 0, 39])])


def test_gradients(getkey):
    model = eqq.quantize_tree({"w": weights(getkey(), (8, 64))}, "nf4")
    x = weights(getkey(), (8, 64))
    loss = lambda m, x: (m["w"].dequantize() * x).sum()
    same_bits(jax.jit(jax.grad(lambda x: loss(model, x)))(x), model["w"].dequantize())
    same_bits(eqx.filter_jit(eqq.filter_grad(loss))(model, x)["w"], x)
    same_bits(jax.jvp(lambda x: loss(model, x), (x,), (x,))[1], (model["w"].dequantize() * x).sum())


def test_exported_and_sharded_programs_have_no_native_call(getkey):
    q = eqq.quantize(weights(getkey(), (8, 256)), "nf4")
    exported = jax.export.export(jax.jit(lambda q: q.dequantize()))(q)
    assert CALL not in exported.mlir_module()
    same_bits(exported.call(q), q.dequantize())
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",))
    there = jax.device_put(q, NamedSharding(mesh, P("rows")))
    assert calls(lambda q: q.dequantize(), there) == 0
    dense = jax.jit(lambda q: q.dequantize())(there)
    assert dense.sharding.spec[0] == "rows"
    same_bits(dense, q.dequantize())
    local = jax.shard_map(lambda q: q.dequantize(), mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    same_bits(jax.jit(local)(there), q.dequantize())
