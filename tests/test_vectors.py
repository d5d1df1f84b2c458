"""Formats whose codes stand for several values: the `IQ` types of GGUF."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._formats.base import round_to_levels
from eqquant._formats.iq import IQ2_XS
from eqquant._native import library as native
from eqquant._wrappers.concatenate import concatenate, split
from eqquant.io import _gguf
from eqquant.io._tensors import MappedFile
from eqquant.io._vector_blocks import VECTOR_BLOCK_TYPES

from .bounds import assert_within_bounds
from .helpers import assert_close, assert_same, FORMATS, sqnr, temp_bytes, VECTORS, weights


GOLDEN = Path(__file__).parent / "golden"
every_vector = pytest.mark.parametrize("name", [name for name in VECTORS if name.startswith("iq")])
one = pytest.mark.parametrize("name", ["iq2_xs"])
needs_native = pytest.mark.skipif(native.refusal() is not None, reason=str(native.refusal()))


def random_array(name, shape, seed=0):
    """An array of any bytes, with finite scales."""
    format, rng = FORMATS[name].format, np.random.default_rng(seed)
    q = jax.eval_shape(lambda: eqq.quantize(jnp.zeros(shape), format))
    leaves, tree = jtu.tree_flatten(q)
    fill = lambda s: rng.integers(0, 256, s.shape, np.uint8) if s.dtype == np.uint8 else rng.normal(size=s.shape)
    floats = lambda x: x if x.dtype == np.uint8 else x.astype(np.float16).view(np.uint16)
    return jtu.tree_unflatten(tree, [jnp.asarray(floats(fill(s))) for s in leaves])


# Files


@every_vector
def test_values_of_gguf(name, tmp_path):
    """Blocks of any bytes dequantize to the values of gguf-py, bit for bit, and are written back."""
    name = name.upper()
    checkpoint = eqq.io.open(GOLDEN / "vectors.gguf")
    q, expected = checkpoint[f"blk.{name}.weight"], np.load(GOLDEN / "vectors_gguf.npz")[name]
    assert repr(q.format) == f"{name}()" and q.shape == expected.shape == (2, 512)
    np.testing.assert_array_equal(np.asarray(q.dequantize()).view(np.uint32), expected.view(np.uint32))
    (in_file,) = (row.bits for row in checkpoint.rows if row.name == f"blk.{name}.weight")
    assert 8 * q.nbytes / q.size == pytest.approx(in_file)
    stored = lambda path: np.asarray(_gguf.read(MappedFile(path))[0][f"blk.{name}.weight"].bytes())
    eqq.io.write(tmp_path / "a.gguf", {f"blk.{name}.weight": q}, "gguf")
    assert_same(eqq.io.open(tmp_path / "a.gguf")[f"blk.{name}.weight"], q)
    np.testing.assert_array_equal(stored(tmp_path / "a.gguf"), stored(GOLDEN / "vectors.gguf"))


def test_every_bit_of_a_block_has_one_place():
    for kind in VECTOR_BLOCK_TYPES.values():
        places = [place for run in kind.runs for place in run.places().ravel()]
        assert sorted(places) == list(range(8 * kind.nbytes))


# Encoding


def test_names_of_mixes():
    with pytest.raises(ValueError, match="Got 'IQ3_XS'. That names a mix of GGUF's formats.*write 'iq3_s'"):
        eqq.quantize(jnp.ones((2, 256)), "IQ3_XS")


def nearest_by_hand(format, values, weights):
    """The levels of least weighted error of 32 values, by trying every vector, sign and shift."""
    best, vectors = np.zeros(32), format.grid.vectors.astype(np.float64)
    size = vectors.shape[1]
    if format.grid.levels[0] < 0:
        found = []
        for shift in (-1, 1):
            parts = [nearest_of(8 * vectors + shift, values[n : n + 8], weights[n : n + 8]) for n in range(0, 32, 8)]
            found.append(np.concatenate(parts))
        step = format.together
        for n in range(0, 32, step):
            part = slice(n, n + step)
            best[part] = min((f[part] for f in found), key=lambda f: (weights[part] * (values[part] - f) ** 2).sum())
        return best
    for n in range(0, 32, 8):
        sign, magnitude = np.where(values[n : n + 8] < 0, -1, 1), np.abs(values[n : n + 8])
        if format.even and (sign < 0).sum() % 2:
            flipped = np.argmin(weights[n : n + 8] * magnitude)
            sign[flipped], magnitude[flipped] = -sign[flipped], -magnitude[flipped]
        for m in range(0, 8, size):
            part = slice(m, m + size)
            best[n + m : n + m + size] = sign[part] * nearest_of(vectors, magnitude[part], weights[n:][part])
    return best


def nearest_of(vectors, values, weights):
    return vectors[np.argmin((weights * (vectors - values) ** 2).sum(axis=1))]


@every_vector
def test_the_nearest_vector(name):
    format, rng = FORMATS[name].format, np.random.default_rng(0)
    values = (rng.normal(size=(3, 32)) * 1.25 * format.mean_level).astype(np.float32)
    for each in (np.ones((3, 32), np.float32), rng.exponential(size=(3, 32)).astype(np.float32)):
        expected = [nearest_by_hand(format, *row) for row in zip(values.astype(float), each.astype(float), strict=True)]
        found = round_to_levels(format, jnp.asarray(values), None if (each == 1).all() else jnp.asarray(each))
        np.testing.assert_array_equal(np.asarray(found), np.stack(expected))
    assert {*np.unique(found)} <= {*format.levels}


@pytest.mark.long
@one
def test_methods(name, getkey):
    w, format = weights(getkey(), (8, 512)), FORMATS[name].format
    error = lambda **kwargs: -sqnr(w, eqq.quantize(w, format, **kwargs))
    assert error(method=eqq.JointMSE()) <= error(method=eqq.MSE()) + 0.02 < error()
    assert error(method="hqq") < error()
    given = eqq.quantize(w, format, scale=jnp.ones((8, 1)) / format.mean_level)
    assert given.shape == w.shape
    for method in (eqq.GPTQ(gram=jnp.eye(512)), eqq.LearnedRounding(gram=jnp.eye(512))):
        with pytest.raises(ValueError, match=r"code for each value.*Got IQ2_XS\(\).*methods AbsMax, MSE"):
            eqq.quantize(w, format, method=method)
    with pytest.raises(ValueError, match=r"layer: .*code for each value"):
        eqq.quantize_tree({"layer": w}, format, method=eqq.GPTQ({"layer": jnp.eye(512)}))


@pytest.mark.long
@one
def test_weights_of_columns(name, getkey):
    w, format = weights(getkey(), (16, 512)), FORMATS[name].format
    moments = jnp.exp(2 * weights(getkey(), (512,)))
    loss = lambda q: float(jnp.sum(moments[None] * (w - q.dequantize()) ** 2))
    assert loss(eqq.quantize(w, format, method=eqq.MSE(moments))) < 0.9 * loss(eqq.quantize(w, format, method="mse"))


# Arrays


@every_vector
def test_range_of_the_codec(name):
    """Native kernels allow for values up to a power of two, the least above the levels."""
    codec, largest = FORMATS[name].format.codec, FORMATS[name].format.levels[-1]
    assert codec.lowest == -(2 ** (codec.bits - 1)) and codec.lowest < -largest <= codec.lowest / 2


@every_vector
def test_any_bytes_are_values(name):
    for length in (512, 300, 7, 1):
        q = random_array(name, (3, length))
        dense = np.asarray(q.dequantize())
        assert dense.shape == (3, length) and np.isfinite(dense).all()
        levels = {*(np.asarray(dense[0] / np.repeat(np.asarray(q.scale[0]), q.block_size)[:length]).round(3).tolist())}
        assert levels <= {*q.format.levels}
        np.testing.assert_array_equal(np.asarray(q[1]), dense[1])


@pytest.mark.long
@one
def test_products_stay_packed(name, getkey):
    q = random_array(name, (2048, 2048))
    x = weights(getkey(), (4, 2048))
    assert_close(x @ q.T, x @ q.dequantize().T, 1e-4)
    assert_close(x @ q, x @ q.dequantize(), 1e-4)
    assert temp_bytes(lambda x, q: x @ q.T, x, q) < q.size


class _Doubled(IQ2_XS):
    """A format of a user, which kernels do not know."""

    def decode_row(self, packed, length):
        return 2 * super().decode_row(packed, length)


@needs_native
def test_formats_of_others_take_xla(getkey):
    q = random_array("iq2_xs", (24, 512))
    doubled = dataclasses.replace(q, format=_Doubled())
    x = weights(getkey(), (4, 512))
    chosen = eqq.explain_matmul(x, doubled.T)
    assert chosen.implementation == "xla" and "stands for several values" in chosen.verdicts["cpu"]
    with pytest.raises(ValueError, match="`implementation='cpu'` cannot take this product: it looks each code up"):
        eqq.matmul(x, doubled.T, implementation="cpu")
    np.testing.assert_array_equal(doubled.dequantize(), 2 * q.dequantize())
    assert_close(x @ doubled.T, 2 * x @ q.dequantize().T, 1e-4)


# Native kernels


@needs_native
@every_vector
@pytest.mark.parametrize("m", [1, 5, 16, 64])
def test_native_products(name, m, getkey):
    """Products with any bytes, of a stack too."""
    for shape in ((72, 1030), (2, 40, 300), (3, 7)):
        q = random_array(name, shape)
        for transpose in (False, True):
            x = weights(getkey(), (*shape[:-2], m, shape[-2 if transpose else -1]))
            y = eqq.matmul(x, q if transpose else q.mT, implementation="cpu")
            assert_within_bounds(np.matmul, y, x, q, "cpu", transpose=transpose)
    q, x = random_array(name, (3, 24, 520)), weights(getkey(), (m, 520))
    y = jax.jit(lambda x, q, n: eqq.matmul(x, eqq.take_layer(q, n).T, implementation="cpu"))(x, q, 2)
    layer = jtu.tree_map(lambda a: a[2], q)
    assert_within_bounds(np.matmul, y, x, layer, "cpu", transpose=False)
    best = "cpu" if native.isa() != "generic" else "xla"
    assert eqq.explain_matmul(x, layer.T).implementation == best


@needs_native
@pytest.mark.skipif(native.isa() == "generic", reason="these products take xla")
@every_vector
def test_native_products_of_integers(name, getkey):
    q = random_array(name, (40, 600))
    for m in (1, 5, 40):
        rows = eqq.quantize(weights(getkey(), (m, 600)), "int8")
        assert eqq.explain_matmul(rows, q.T).implementation == "cpu_int8"
        w, x = np.asarray(q.dequantize(), np.float64), np.asarray(rows.dequantize(), np.float64)
        assert (np.abs(np.asarray(rows @ q.T) - x @ w.T) <= 2e-6 * (np.abs(x) @ np.abs(w).T)).all()


# Arrays and programs


@one
def test_with_quantized_activations(name, getkey):
    q = random_array(name, (24, 512))
    x = weights(getkey(), (4, 512))
    rows = eqq.quantize(x, "int8")
    assert_close(rows @ q.T, rows.dequantize() @ q.dequantize().T, 1e-4)


@pytest.mark.long
@one
@pytest.mark.parametrize("spec", [P("model"), P(None, "data"), P(None, "model"), P("data", "model")])
def test_products_on_a_mesh(name, getkey, spec):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    q, x = random_array(name, (16, 2048)), weights(getkey(), (6, 2048))
    moved = q.with_sharding(NamedSharding(mesh, spec))
    np.testing.assert_array_equal(np.asarray(moved.dequantize()), np.asarray(q.dequantize()))
    assert_close(jax.jit(lambda x, q: x @ q.T)(x, moved), x @ q.dequantize().T, 1e-4)
    assert_close(jax.jit(lambda x, q: x @ q)(x[:, :16], moved), x[:, :16] @ q.dequantize(), 1e-4)


@one
def test_split_and_concatenate(name):
    q = random_array(name, (6, 2560))
    parts = split(q, (2048, 512), axis=1)
    assert [part.shape for part in parts] == [(6, 2048), (6, 512)]
    np.testing.assert_array_equal(parts[1].dequantize(), q.dequantize()[:, 2048:])
    assert_same(concatenate(parts, axis=1), q)
    with pytest.raises(ValueError, match="packs 256 codes"):
        split(q, (128, 2432), axis=1)


@pytest.mark.long
@one
def test_masters(name, getkey):
    model = {"w": eqq.quantize(weights(getkey(), (4, 256)), FORMATS[name].format)}
    optim = eqq.float_masters(optax.sgd(0.5))
    state = optim.init(model)
    grads = jax.jit(eqq.filter_grad(lambda model: jnp.sum((model["w"] @ jnp.ones(256)) ** 2)))(model)
    updates, state = optim.update(grads, state, model)
    assert_same(jtu.tree_map(lambda a, b: a + b, model, updates)["w"].format, model["w"].format)


@every_vector
def test_values_of_any_size(name):
    """Scales beyond float16 saturate; nothing overflows, and a NaN stays in its group of 256 values."""
    format, rng = FORMATS[name].format, np.random.default_rng(0)
    x = rng.normal(size=(2, 600)).astype(np.float32)
    for size in (1e-40, 1e-6, 1e6, 1e37):
        dense = np.asarray(eqq.quantize(jnp.asarray(x * np.float32(size)), format).dequantize())
        assert np.isfinite(dense).all()
    broken = jnp.asarray(x).at[0, 300].set(jnp.nan)
    dense = np.asarray(jax.jit(lambda x: eqq.quantize(x, format).dequantize())(broken))
    assert np.isnan(dense[0, 256:512]).all() and np.isnan(dense).sum() == 256
