"""Work in parts: results do not depend on how large the parts are.

A part is larger than any other test's arrays, so that these never meet a second one, or a last one that is shorter.
"""

import importlib

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq

from .helpers import weights
from .test_gptq import compute_gram, inputs, loss


# The sizes of parts, and smaller ones: two parts and a shorter one of each array here. 40 columns end within a block.
SIZES = {
    "_methods.gptq.WIDTH": 40,
    "_methods.learned.WIDTH": 40,
    "_array.quantize._CHUNK_SIZE": 7 * 96,
    "_matmul.kernels.xla_codes._PARTIAL_BYTES": 2 * 4 * 5 * 17,
    "_matmul.kernels.xla_codes._ROWS_BYTES": 7 * 96,
    "_matmul.kernels.xla_codes._MAX_SUM_LENGTH": 40,
    "_matmul.kernels.xla_cpu.ROWS_BYTES": 4 * 3 * 96,
    "_quax.ragged._MAX_TILE_ROWS": 2,
    "analysis._error._CHUNK": 101,
    "io._repack._CHUNK": 7 * 96,
    "io._writers._layout._CHUNK": 7 * 96,
    "io._memory._PART": 64,
}


def weight(length=96):
    return weights(jr.key(1), (17, length)) * jnp.geomspace(0.1, 3, length)[None]


def multiply(format, activations=None, transpose=False):
    w, x = eqq.quantize(weight(), format), weights(jr.key(2), (5, 17 if transpose else 96))
    w = w if activations is None else eqq.arrays.ActivationQuantizedArray(w, activations)
    return eqq.matmul(x, w if transpose else w.T, implementation="xla" if activations is None else None)


def multiply_groups():
    w = eqq.quantize(weights(jr.key(1), (3, 8, 32)), "int8", axis=-2)
    product = lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([5, 0, 6]))
    return eqq.quaxify(product)(weights(jr.key(2), (11, 8)), w)


def analyze():
    x = weight()
    return np.asarray([*eqq.analysis.analyze_error(x, eqq.quantize(x, "int4")).to_dict().values()][:6], float)


def rewrite(path, dialect, format):
    q = eqq.quantize(weights(jr.key(1), (32, 96)), format)
    eqq.io.write(path / dialect, {"w.weight": q}, dialect)
    return eqq.io.open(path / dialect)["w.weight"].dequantize()


# Codes that are found one after the other may differ, as sums round: their errors are compared.
SEARCHED = {
    "GPTQ": lambda gram: eqq.GPTQ(gram=gram),
    "learned rounding": lambda gram: eqq.LearnedRounding(gram=gram, method=eqq.AbsMax()),
}
EXACT = {
    "amax": lambda _: eqq.quantize(weight(), "int4").dequantize(),
    "MSE": lambda _: eqq.quantize(weight(), eqq.Int4(32, symmetric=False), method=eqq.MSE()).dequantize(),
    "one scale for the tensor": lambda _: eqq.quantize(weight(), eqq.Int8("tensor"), method=eqq.MSE()).dequantize(),
    "bitsandbytes": lambda path: rewrite(path, "bitsandbytes", eqq.NF4(32)),
    "compressed-tensors": lambda path: rewrite(path, "compressed-tensors", eqq.Int3(32)),
    "gptq": lambda path: rewrite(path, "gptq", eqq.Int4(32, symmetric=False)),
    "mlx": lambda path: rewrite(path, "mlx", eqq.formats.MLX(4, 32)),
}
CLOSE = {
    "xla": lambda _: multiply(eqq.NF4(32)),
    "xla, transposed": lambda _: multiply("int8", transpose=True),
    "codes with one scale": lambda _: multiply("int8", "int8"),
    "codes with zero points": lambda _: multiply(eqq.Int4(32, symmetric=False), eqq.Int8(symmetric=False)),
    "groups": lambda _: multiply_groups(),
    "errors": lambda _: analyze(),
}


@pytest.mark.long
def test_results_do_not_depend_on_the_sizes_of_parts(tmp_path, monkeypatch):
    w, gram = weight(), compute_gram(inputs())

    def compute(folder):
        folder.mkdir()
        jax.clear_caches()
        found = {name: run(folder) for name, run in (EXACT | CLOSE).items()}
        return found | {
            name: loss(eqq.quantize(w, eqq.Int3(32), method=method(gram)), w, gram) for name, method in SEARCHED.items()
        }

    whole = compute(tmp_path / "whole")
    for path, size in SIZES.items():
        module, _, name = path.rpartition(".")
        module = importlib.import_module(f"eqquant.{module}")
        assert size < getattr(module, name)
        monkeypatch.setattr(module, name, size)
    parts = compute(tmp_path / "parts")
    jax.clear_caches()
    for name in EXACT:
        np.testing.assert_array_equal(parts[name], whole[name], err_msg=name)
    for name in CLOSE:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-4, atol=1e-4, err_msg=name)
    for name in SEARCHED:
        assert abs(parts[name] / whole[name] - 1) < 0.02, name
