"""Every promise of `QuantizedArray`, for every format of `helpers.FORMATS`, and under settings of JAX."""

import contextlib
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jaxtyping import Float

import eqquant as eqq
from eqquant._formats.base import AbstractVectorFormat

from .helpers import assert_close, assert_same, FORMATS, KINDS, primitives, sqnr, TILES, weights


SETTINGS = {
    "debug_nans": lambda: jax.debug_nans(True),
    "x64": lambda: jax.enable_x64(True),
    "no_jit": jax.disable_jit,
    "promotion": lambda: jax.numpy_dtype_promotion("standard"),  # all other tests run under strict promotion
}


def cases():
    """Every format; and under each setting those of `KINDS`, most of them only in a sweep."""
    quick = (*KINDS, "int4_tiles", "nvfp4_tiles")
    for name in (*FORMATS, *TILES):
        yield pytest.param(name, None, marks=() if name in quick else pytest.mark.slow, id=name)
    few = ("fp8_e4m3", "int4_affine", "nf4_double", "nvfp4")  # without programs all is slow
    for setting in SETTINGS:
        quick = few[:1] if setting == "no_jit" else few[:2]
        for name in few if setting == "no_jit" else KINDS:
            yield pytest.param(name, setting, marks=() if name in quick else pytest.mark.slow, id=f"{name}-{setting}")


pytestmark = pytest.mark.parametrize("name, setting", [*cases()])

SHAPES = [((2, 3, 70), 1), ((6, 128), -1), ((128, 6), 0), ((4, 3, 3, 3), (-3, -2, -1)), ((77,), 0), ((5, 100), -1)]


@pytest.fixture(autouse=True)
def _setting(setting):
    with SETTINGS.get(setting, contextlib.nullcontext)():
        yield


@pytest.fixture
def row(name):
    return {**FORMATS, **TILES}[name]


@pytest.fixture
def q(row, getkey):
    """A ragged array: 200 is a multiple of no block size."""
    return eqq.quantize(weights(getkey(), (6, 200)), row.format)


# Storage


def test_bits_per_weight(row, q):
    long = jax.eval_shape(lambda x: eqq.quantize(x, row.format), jax.ShapeDtypeStruct((3, 4096), jnp.float32))
    assert 8 * long.nbytes / long.size == pytest.approx(row.bits, abs=1e-9)
    assert q.nbytes == sum(np.asarray(leaf).nbytes for leaf in jtu.tree_leaves(q))


def test_every_leaf_is_an_unsigned_integer(q):
    assert all(jnp.issubdtype(leaf.dtype, jnp.unsignedinteger) for leaf in jtu.tree_leaves(q))


def test_leaves_share_leading_axes(row, getkey):
    q = eqq.quantize(weights(getkey(), (3, 6, 200)), row.format)
    height = row.format.block_size[0] if isinstance(row.format.block_size, tuple) else 1
    codes, *scales = jtu.tree_leaves(q)
    assert codes.shape[:-1] == (3, 6) and {leaf.shape[:-1] for leaf in scales} == {(3, -(-6 // height))}
    assert {leaf.ndim for leaf in jtu.tree_leaves(q)} == {3}


# Numerics


def test_error_on_normal_weights(row, getkey):
    x = weights(getkey(), (64, 4096))
    assert sqnr(x, eqq.quantize(x, row.format)) > row.sqnr


def test_shape_and_axis(name, setting, row, getkey):
    """Formats with names of even length take half of the shapes, those of odd length the rest."""
    for shape, axis in SHAPES[len(name) % 2 :: 2] if setting is None else SHAPES[len(name) % len(SHAPES) :][:1]:
        if name in TILES and len(shape) == 1:
            with pytest.raises(ValueError, match=r"Tiles need two axes.* Got a row alone.* `block_size="):
                eqq.quantize(weights(getkey(), shape), row.format, axis=axis)
            continue
        check_shape_and_axis(row, weights(getkey(), shape), axis)


def check_shape_and_axis(row, x, axis):
    q = eqq.quantize(x, row.format, axis=axis)
    dense = q.dequantize()
    assert q.shape == dense.shape == x.shape
    assert q.dtype == dense.dtype == x.dtype
    assert q.ndim == x.ndim and q.size == x.size and q.block_size == row.format.block_size
    assert sqnr(x, dense) > min(row.sqnr - 6, 12)
    # Quantizing along an axis is moving it to the back and quantizing there.
    axes = (axis,) if isinstance(axis, int) else axis
    moved = np.moveaxis(np.asarray(x), axes, range(-len(axes), 0))
    flat = jnp.asarray(moved.reshape(*moved.shape[: x.ndim - len(axes)], -1))
    again = np.asarray(eqq.quantize(flat, row.format).dequantize()).reshape(moved.shape)
    np.testing.assert_array_equal(np.asarray(dense), np.moveaxis(again, range(-len(axes), 0), axes))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(row, getkey, dtype):
    x = weights(getkey(), (6, 200), dtype)
    q = eqq.quantize(x, row.format)
    assert q.dtype == q.dequantize().dtype == dtype
    assert_same(q.astype(jnp.float32), eqq.quantize(x.astype(jnp.float32), row.format))
    assert eqq.quantize(x, row.format, dtype=jnp.bfloat16).dequantize().dtype == jnp.bfloat16


def test_zeros_are_exact(row):
    assert not np.asarray(eqq.quantize(jnp.zeros((6, 200)), row.format).dequantize()).any()


def test_one_block_of_zeros_among_others(row, getkey):
    x = weights(getkey(), (2, 512)).at[:, 128:256].set(0.0)
    if isinstance(row.format, AbstractVectorFormat):
        pytest.skip("no scale is zero beside others, and no level")
    if row.format.block_size in (None, "tensor") and row.format.bits == 1:
        pytest.skip("one scale for the row, and no code for zero")
    if row.format.block_size is None and isinstance(row.format, eqq.extend.AbstractOffsetFormat):
        pytest.skip("one offset for the row, to which no multiple of the scale need be opposite")
    dense = np.asarray(eqq.quantize(x, row.format).dequantize())
    if row.format.block_size != "tensor" or row.format.bits > 1:
        assert not dense[:, 128:256].any()


def test_requantizing_is_idempotent_on_the_values(row, getkey):
    """What a format can represent, it represents: quantizing again moves no value by more than rounding."""
    x = eqq.quantize(weights(getkey(), (6, 200)), row.format).dequantize()
    if isinstance(row.format, (eqq.Ternary, eqq.formats.MLX, AbstractVectorFormat)):
        pytest.skip("its scale is the mean magnitude, which zeros lower; or rounded for the sake of zero")
    again = eqq.quantize(x, row.format).dequantize()
    # A float16 scale, an affine range or scales that are quantized themselves may each move by one step.
    assert sqnr(x, again) > 25 or np.array_equal(np.asarray(x), np.asarray(again))


def test_unpack(row, q):
    if isinstance(row.format, AbstractVectorFormat):
        with pytest.raises(ValueError, match="`q` must have a code for each value. Got .* codes stand for several"):
            eqq.unpack(q)
        return
    codes = eqq.unpack(q)
    assert codes.shape == q.shape and codes.dtype == jnp.uint8
    assert int(codes.max()) < 2**row.format.bits
    assert_same(eqq.unpack(q.T), codes.T)


def test_stochastic_rounding_is_unbiased(row, getkey):
    draws = 8000
    if isinstance(row.format, AbstractVectorFormat):
        with pytest.raises(ValueError, match="`format` must have a code for each value.*rounds to nearest"):
            eqq.quantize(weights(getkey(), (1, 64)), row.format, key=getkey())
        return
    x = jnp.broadcast_to(weights(getkey(), (1, 64)), (draws, 64))
    if row.format.block_size == "tensor" or isinstance(row.format.block_size, tuple):
        pytest.skip("as per channel, or as in blocks, here")
    q = eqq.quantize(x, row.format, key=getkey())
    one = jtu.tree_map(lambda leaf: leaf[0], q)
    zero = 0 if q.zero_point is None else _per_element(one.zero_point, row.format, 64).astype(np.float32)
    codes = jnp.arange(2**row.format.bits, dtype=jnp.uint8)
    ends = jax.jit(row.format.encode)(jnp.array([-1e30, 1e30], jnp.float32))  # not every code is used
    with jax.debug_nans(False):  # some codes mean NaN
        levels = np.asarray(jax.jit(row.format.decode)(codes))[:, None]
    lowest, highest = levels[np.asarray(ends), 0]
    levels = levels[(levels[:, 0] >= lowest) & (levels[:, 0] <= highest)]
    levels = (levels - zero) * _per_element(one.scale, row.format, 64)
    levels = levels if one.offset is None else levels + _per_element(one.offset, row.format, 64)
    value = np.asarray(x[0])
    inside = (levels.min(0) <= value) & (value <= levels.max(0))
    assert inside.mean() > 0.4
    gap = np.diff(np.sort(levels, axis=0), axis=0).max()
    # Draws lie within one gap between levels. By Hoeffding's inequality the probability that their mean is further off
    # than `z * gap / 2 / draws**0.5` is at most `2 * exp(-z**2 / 2)`: 2e-7 for 5.7, 6e-4 for 64 values of 50 formats.
    assert np.abs(np.asarray(q.dequantize()).mean(0) - value)[inside].max() < 5.7 * gap / 2 / draws**0.5


def _per_element(per_block, format, length):
    size = length if format.block_size is None else format.block_size
    return np.repeat(np.asarray(per_block), size)[:length]


# Transformations


def test_vmap_of_quantize(row, setting, getkey):
    x = weights(getkey(), (3, 6, 200))
    stacked = jax.vmap(lambda x: eqq.quantize(x, row.format))(x)
    assert stacked.shape == x.shape
    each = [eqq.quantize(x[i], row.format) for i in range(3)]
    if setting == "no_jit" and isinstance(row.format, eqq.NVFP4):
        # XLA divides a single number exactly, and several by the reciprocal of the divisor: the scale of a tensor may
        # differ by a unit in its last place, and its products by two.
        expected = np.stack([np.asarray(q.dequantize()) for q in each])
        return np.testing.assert_allclose(np.asarray(stacked.dequantize()), expected, rtol=2**-22)
    assert_same(stacked, jtu.tree_map(lambda *a: jnp.stack(a), *each))
    assert_same(jtu.tree_map(lambda a: a[1], stacked), each[1])


def test_jit_and_eval_shape_of_quantize(row, getkey):
    x = weights(getkey(), (6, 200))
    eager = eqq.quantize(x, row.format)
    assert_same(jax.jit(lambda x: eqq.quantize(x, row.format))(x), eager)
    struct = jax.eval_shape(lambda x: eqq.quantize(x, row.format), x)
    assert struct.shape == x.shape and struct.nbytes == eager.nbytes


def test_scan_over_stacked(row, getkey):
    stacked = eqq.quantize(weights(getkey(), (3, 100, 100)) / 10, row.format)
    x = weights(getkey(), (100,))
    scanned, _ = jax.lax.scan(lambda x, q: (q @ x, None), x, stacked)
    looped = np.asarray(x)
    for layer in np.asarray(stacked.dequantize()):
        looped = layer @ looped
    assert_close(scanned, looped)


def test_scan_carry_and_cond(row, q):
    same, _ = jax.lax.scan(lambda q, _: (q, None), q, None, length=3)
    assert_same(same, q)
    other = eqq.quantize(jnp.ones(q.shape, q.dtype), row.format)
    assert_same(jax.lax.cond(True, lambda: q, lambda: other), q)


def test_equal_formats_do_not_recompile(row, setting, getkey):
    if setting == "no_jit":
        pytest.skip("about compiled programs")
    compiles = []

    @jax.jit
    def f(q):
        compiles.append(None)
        return q.dequantize()

    f(eqq.quantize(weights(getkey(), (6, 200)), row.format))
    f(eqq.quantize(weights(getkey(), (6, 200)), pickle.loads(pickle.dumps(row.format))))
    assert len(compiles) == 1


def test_checkpoint_and_remat(q, getkey):
    x = weights(getkey(), (200,))
    f = lambda x: jnp.sum(jnp.sin(q @ x))
    assert_close(jax.grad(jax.checkpoint(f))(x), jax.grad(f)(x))


# The rest of JAX's world passes by


def test_no_gradient_and_no_update(q, getkey):
    x = weights(getkey(), (200,))
    grads = eqx.filter_grad(lambda q: jnp.sum(q @ x))(q)
    assert jtu.tree_leaves(grads) == []
    params = {"w": q, "b": jnp.ones(3)}
    optim = optax.adamw(0.1, weight_decay=0.1)
    trainable = eqx.filter(params, eqx.is_inexact_array)
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        updates, _ = optim.update(trainable, optim.init(trainable), trainable)
    assert_same(eqx.apply_updates(params, updates)["w"], q)


def test_additive_updates_are_exact(row, q, getkey):
    new = eqq.quantize(weights(getkey(), q.shape), row.format)
    difference = jtu.tree_map(lambda n, p: n - p, new, q)
    assert_same(optax.apply_updates(q, difference), new)
    assert_same(eqx.apply_updates(q, difference), new)


def test_mixed_precision_casts_pass_by(q):
    cast = jtu.tree_map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, q)
    assert_same(cast, q)


def test_serialize(tmp_path, q):
    eqx.tree_serialise_leaves(tmp_path / "q.eqx", q)
    assert_same(eqx.tree_deserialise_leaves(tmp_path / "q.eqx", q), q)
    assert_same(pickle.loads(pickle.dumps(q)), q)


def test_jaxtyping(row, q):
    assert isinstance(q, Float[eqq.QuantizedArray, "6 200"])
    assert not isinstance(q, Float[eqq.QuantizedArray, "200 6"])
    kind = type(row.format)
    assert isinstance(q, Float[eqq.QuantizedArray[kind], "6 200"])
    assert isinstance(q, eqq.QuantizedArray[eqq.extend.AbstractFormat])
    other = eqq.Int8 if kind is not eqq.Int8 else eqq.NF4
    assert not isinstance(q, Float[eqq.QuantizedArray[other], "6 200"])
    assert not isinstance(q.dequantize(), eqq.QuantizedArray[kind])


def test_repr(row, q):
    assert repr(row.format) in repr(q) and "float32[6,200]" in repr(q)


# Products


@pytest.mark.parametrize("axis", [-1, -2])
def test_matmul_both_sides(name, row, getkey, axis):
    q = eqq.quantize(weights(getkey(), (6 if axis == -1 else 96, 200)), row.format, axis=axis)
    dense = np.asarray(q.dequantize(), np.float64)
    for shape in ((200,), (200, 5) if len(name) % 2 else (2, 200, 5)):
        x = weights(getkey(), shape)
        y = jnp.asarray(np.swapaxes(x, -1, -2)) if x.ndim > 1 else x
        assert_close(q @ x, dense @ np.asarray(x, np.float64))
        assert_close(y @ q.T, np.asarray(y, np.float64) @ dense.T)
        assert "quantized_matmul" in primitives(lambda q, x: q @ x, q, x)
        assert "quantized_matmul" in primitives(lambda q, y: y @ q.T, q, y)


def test_no_transfers(row, setting, getkey):
    """To quantize, to dequantize, to multiply and all that is compiled moves no values between host and device."""
    if setting == "no_jit":
        pytest.skip("about compiled programs")
    w, x, ids = weights(getkey(), (6, 200)), weights(getkey(), (3, 200)), jnp.array([0, 5])
    has_vectors = isinstance(row.format, AbstractVectorFormat)  # without a code for each value
    unpack = (lambda q: q.dequantize()) if has_vectors else eqq.unpack
    with jax.transfer_guard("disallow"):
        q = eqq.quantize(w, row.format)
        dense, y = q.dequantize(), x @ q.T
        compiled = jax.jit(lambda w, x: x @ eqq.quantize(w, row.format).T)(w, x)
        rows, codes = jax.jit(lambda q: (q[ids], unpack(q)))(q)
        gradient = jax.jit(jax.grad(lambda x, q: jnp.sum(x @ q.T)))(x, q)
    assert dense.shape == codes.shape == w.shape and rows.shape == (2, 200) and gradient.shape == x.shape
    assert_close(compiled, y)


def test_embedding_lookup(q):
    ids = jnp.array([[0, 5], [3, 3]])
    np.testing.assert_array_equal(np.asarray(q[ids]), np.asarray(q.dequantize()[ids]))
