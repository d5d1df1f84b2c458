"""`jax.export` of functions with our arrays: written by one process, read by another."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._export import _deserialize
from eqquant._matmul.selected import SelectedArray
from eqquant._wrappers.low_precision import LowPrecisionArray
from eqquant._wrappers.permuted import PermutedArray
from eqquant._wrappers.scaled import ScaledArray

from .helpers import FORMATS, weights


pytest.importorskip("flatbuffers")  # what JAX serializes with


@functools.cache
def weight():
    return weights(jax.random.key(0), (128, 64))


@functools.cache
def inputs():
    return weights(jax.random.key(1), (5, 64))


def arrays():
    """One of each class, and of each kind of field."""
    q = eqq.quantize(weight(), "int8")
    return {
        "quantized": eqq.quantize(weight(), "nf4"),
        "nested": eqq.quantize(weight(), eqq.NF4(double_quant=True)),
        "offsets": eqq.quantize(weight(), "q4_k"),
        "zero points": eqq.quantize(weight(), eqq.Int4(32, symmetric=False, scale_dtype="bfloat16")),
        "codebook": eqq.quantize(weight(), eqq.Codebook([-1, -0.1, 0, 0.3])),
        "selected": eqq.take_layer(eqq.quantize(jnp.stack([weight(), -weight()]), "nf4"), 1),
        "activations": eqq.arrays.ActivationQuantizedArray(q, "int8"),
        "static activations": eqq.arrays.ActivationQuantizedArray(q, "int8", 0.02),
        "simulated": eqq.quantize_tree({"w": weight()}, "int4", simulate=True, method=eqq.MSE())["w"],
        "learned scales": eqq.quantize_tree({"w": weight()}, "int4", simulate=True, learn_scales=True)["w"],
        "low precision": LowPrecisionArray(weight(), "fp8", eqq.FP8("e5m2")),
        "factors": eqq.loraify({"w": q}, 4, key=jax.random.key(2))["w"],
        "rotated": eqq.quantize_tree(eqq.transforms.rotate({"w": weight()}), "int8")["w"],
        "scaled": ScaledArray(q, scale=jnp.arange(1.0, 65.0)),
        "permuted": PermutedArray(q, order=jnp.arange(64, dtype=jnp.uint32)[::-1]),
    }


READER = """
import pickle, sys
import jax, jax.export, jax.numpy as jnp, numpy as np
sys.path.insert(0, {root!r})
from tests.test_export import arrays, inputs
written = pickle.loads(open({path!r}, "rb").read())
for name, array in arrays().items():
    exported = jax.export.deserialize(bytearray(written[name]))
    assert exported.in_tree == jax.tree.structure(((array, inputs()), {{}})), name
    np.testing.assert_array_equal(exported.call(array, inputs()), jax.jit(lambda w, x: x @ w.T)(array, inputs()), name)
print("read", len(written))
"""


def export_and_serialize(array):
    return jax.export.export(jax.jit(lambda w, x: x @ w.T))(array, inputs()).serialize()


@pytest.mark.long
def test_another_process_reads_every_class(tmp_path):
    import pickle

    found = arrays()
    classes = {cls for x in found.values() for cls in type(x).__mro__ if cls.__name__.endswith("Array")}
    assert {
        eqq.QuantizedArray,
        SelectedArray,
        eqq.arrays.LoraArray,
        PermutedArray,
        eqq.arrays.FakeQuantizedArray,
    } <= classes
    path = tmp_path / "written"
    path.write_bytes(pickle.dumps({name: bytes(export_and_serialize(array)) for name, array in found.items()}))
    program = READER.format(root=str(Path(__file__).parents[1]), path=str(path))
    env = {**os.environ, "EQQUANT_CPU_ISA": "none"}  # exported programs hold no native kernel, whose sums differ
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == f"read {len(found)}", done.stderr[-3000:]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name):
    q = eqq.quantize(weights(jax.random.key(0), (6, 200)), FORMATS[name].format)
    exported = jax.export.deserialize(jax.export.export(jax.jit(lambda q: (q, q.dequantize())))(q).serialize())
    again, dense = exported.call(q)
    assert jax.tree.structure(again) == jax.tree.structure(q) and repr(again.format) == repr(q.format)
    np.testing.assert_array_equal(dense, q.dequantize())


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("format", ["nf4", "q4_k", eqq.formats.Trellis(2)])
def test_weights_of_unknown_size(format):
    """One program for stacks and rows of every length, exported for another machine, where XLA computes."""
    lengths = jax.export.symbolic_shape("stack, rows")
    unknown = lambda a: jax.ShapeDtypeStruct((*lengths, *a.shape[2:]), a.dtype)
    q = eqq.quantize(jnp.stack([weight(), 1 - weight()]), format)
    x = weights(jax.random.key(2), (2, 3, 64))
    product = jax.jit(lambda q, x: (x @ q.mT) @ q)
    rows = jax.ShapeDtypeStruct((lengths[0], *x.shape[1:]), x.dtype)
    y = jax.export.export(product)(jax.tree.map(unknown, q), rows).call(q, x)
    dense = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ dense.swapaxes(1, 2) @ dense
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_unserializable_fields_are_an_error():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    q = dataclasses.replace(eqq.quantize(weight(), "nf4"), logical_sharding=sharding)
    with pytest.raises(TypeError, match=r"`logical_sharding` of QuantizedArray must be .*Got a NamedSharding"):
        export_and_serialize(q)
    export_and_serialize(dataclasses.replace(q, logical_sharding=None))
    export_and_serialize(dataclasses.replace(q, logical_sharding=jax.sharding.PartitionSpec(None, ("x", "y"))))


def test_other_versions_are_refused():
    good = {"version": 1, "fields": {"block_size": 64, "double_quant": False, "scale_dtype": "float32"}}
    assert _deserialize(eqq.NF4, json.dumps(good).encode()) == good["fields"]
    with pytest.raises(ValueError, match="serialized NF4 must be of version 1. Got 2"):
        _deserialize(eqq.NF4, json.dumps({**good, "version": 2}).encode())
    with pytest.raises(ValueError, match="must have the static fields"):
        _deserialize(eqq.NF4, json.dumps({"version": 1, "fields": {"block_size": 64}}).encode())
