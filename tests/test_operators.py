"""A quantized array as an array: operators, methods, structure, indexing and sharding, against the dense array."""

import dataclasses
import itertools as it
import operator
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
import quax
from jax.sharding import PartitionSpec

import eqquant as eqq
from eqquant._wrappers.scaled import ScaledArray

from .helpers import assert_same, weights


@pytest.fixture
def q(getkey):
    return eqq.quantize(weights(getkey(), (6, 70)), "nf4")


@pytest.fixture
def conv(getkey):
    return eqq.quantize(weights(getkey(), (4, 3, 2, 5)), "int8", axis=(-3, -2, -1))


def equal(actual, expected, dense=True):
    """The same values, shape and dtype, bit for bit; and dense, or still quantized."""
    assert eqq.is_quantized(actual) != dense
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


# Operators

BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


@pytest.mark.parametrize("op", [*BINARY, *COMPARISONS], ids=lambda op: op.__name__)
def test_binary(q, getkey, op):
    dense = q.dequantize()
    x = weights(getkey(), q.shape)
    for other in (2.5, 3, x, np.asarray(x), jnp.float32(0.5), x[:1]):
        equal(op(q, other), op(dense, other))
        equal(op(other, q), op(other, dense))
    p = eqq.quantize(x, "int8")
    equal(op(q, p), op(dense, p.dequantize()))
    equal(op(q.T, p.T), op(dense.T, p.dequantize().T))


def test_power(q):
    dense = q.dequantize()
    equal(q**2, dense**2)
    equal(2.0**q, 2.0**dense)
    equal(abs(q) ** abs(q), abs(dense) ** abs(dense))


def test_result_types():
    """Type checkers infer the results of operators."""
    for name in ("add", "radd", "rsub", "pow", "lt", "neg", "matmul"):
        assert typing.get_type_hints(getattr(eqq.QuantizedArray, f"__{name}__"))["return"] is jax.Array


@pytest.mark.parametrize("op", [operator.neg, operator.pos, abs], ids=lambda op: op.__name__)
def test_unary(q, op):
    equal(op(q), op(q.dequantize()))
    equal(op(q.T), op(q.dequantize().T))


METHODS = [
    *(("sum", ()), ("mean", (0,)), ("max", ()), ("min", (1,)), ("std", ()), ("var", (0,)), ("prod", (1,))),
    *(("all", ()), ("any", (0,)), ("argmax", (1,)), ("argmin", ()), ("argsort", (0,)), ("clip", (-0.5, 0.5))),
    *(("cumsum", (0,)), ("cumprod", (1,)), ("diagonal", ()), ("flatten", ()), ("ravel", ()), ("round", (1,))),
    *(("sort", (0,)), ("trace", ()), ("repeat", (2, 0)), ("take", (3,)), ("dot", (2.0,)), ("__round__", (1,))),
    *(("argpartition", (2,)), ("ptp", (0,)), ("view", (jnp.uint32,)), ("compress", (np.array([True, False, True]), 0))),
]


@pytest.mark.parametrize("name, args", METHODS, ids=lambda x: x if isinstance(x, str) else "")
def test_method(q, name, args):
    equal(getattr(q, name)(*args), getattr(q.dequantize(), name)(*args))
    equal(getattr(q.T, name)(*args), getattr(q.dequantize().T, name)(*args))


def test_other_methods(q):
    dense = q.dequantize()
    assert q.tolist() == dense.tolist()
    assert q.sum(axis=1, keepdims=True).shape == (6, 1)
    for a, e in zip(q.nonzero(), dense.nonzero(), strict=True):
        equal(a, e)
    equal(q[None].squeeze(0), dense)


def test_divmod(q):
    dense = q.dequantize()
    for actual, expected in ((divmod(q, 0.3), divmod(dense, 0.3)), (divmod(0.3, abs(q)), divmod(0.3, abs(dense)))):
        for a, e in zip(actual, expected, strict=True):
            equal(a, e)
    equal(round(q, 2), round(dense, 2))


def test_as_a_complex_array(q):
    equal(q.real, q.dequantize(), dense=False)
    equal(q.conj(), q.dequantize(), dense=False)
    equal(q.imag, q.dequantize().imag)


def test_memory(q):
    assert q.itemsize == 4 and q.astype(jnp.bfloat16).itemsize == 2
    assert q.devices() == q.codes.devices() and q.device == q.codes.device
    same = q.copy()
    assert_same(same, q)
    q.delete()
    assert q.is_deleted() and not same.is_deleted()
    same.dequantize()
    np.testing.assert_array_equal(np.from_dlpack(same), np.asarray(same.dequantize()))


def test_conversions(q):
    dense = q.dequantize()
    assert isinstance(np.asarray(q), np.ndarray)
    np.testing.assert_array_equal(np.asarray(q), np.asarray(dense))
    assert np.asarray(q, np.float64).dtype == np.float64
    equal(jnp.asarray(q), dense)
    assert len(q) == 6 and len(q.T) == 70
    for a, e in zip(q, dense, strict=True):
        equal(a, e)
    one = eqq.quantize(jnp.full((1, 1), 2.5), "int8")
    assert bool(one) and not bool(eqq.quantize(jnp.zeros((1, 1)), "int8"))
    assert one.item() == pytest.approx(2.5)
    for f in (bool, float, int, hash):
        with pytest.raises((TypeError, ValueError)):
            f(q)


def test_updates_are_dense(q):
    dense = q.dequantize()
    equal(q.at[2].set(1.0), dense.at[2].set(1.0))
    equal(q.at[:, 3].add(1.0), dense.at[:, 3].add(1.0))


# Structure


@pytest.mark.parametrize("axis", [-1, 1, (-2, -1), (0, 2), (-1, -3, 0)], ids=str)
def test_transpose_by_every_permutation(getkey, axis):
    q = eqq.quantize(weights(getkey(), (2, 3, 4, 6)), eqq.Int8(), axis=axis)
    dense = np.asarray(q.dequantize())
    for order in it.permutations(range(4)):
        t = q.transpose(order)
        assert t.shape == dense.transpose(order).shape
        equal(t, dense.transpose(order), dense=False)
        assert {leaf.dtype for leaf in jtu.tree_leaves(t)} == {leaf.dtype for leaf in jtu.tree_leaves(q)}
    assert_same(q.transpose(2, 0, 3, 1).transpose(1, 3, 0, 2), q)
    assert_same(q.T.T, q)
    assert_same(q.mT.mT, q)
    equal(q.transpose(*(-1, 0, -2, 1)), dense.transpose(-1, 0, -2, 1), dense=False)
    equal(q.T, dense.T, dense=False)
    equal(q.mT, np.swapaxes(dense, -1, -2), dense=False)
    equal(q.swapaxes(0, 2), np.swapaxes(dense, 0, 2), dense=False)
    equal(q.transpose(None), dense.T, dense=False)


def test_transposing_two_axes_moves_no_bytes(q):
    assert all(a is b for a, b in zip(jtu.tree_leaves(q), jtu.tree_leaves(q.T), strict=True))


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 2), (0, 1, 2), (-3, 0), (1, -1)])
def test_a_wrong_permutation_is_an_error(q, order):
    with pytest.raises(ValueError, match="permutation of the 2 axes"):
        q.transpose(order)


@pytest.mark.parametrize(
    "shape, new, dense",
    [
        ((2, 3, 70), (6, 70), False),
        ((6, 70), (2, 3, 70), False),
        ((6, 70), (1, 6, 1, 70), False),
        ((6, 70), (6, 7, 10), False),
        ((6, 70), (3, 2, 2, 35), False),
        ((6, 70), (-1, 70), False),
        ((6, 70), (3, -1, 70), False),
        ((6, 70), (6, -1), False),
        ((6, 70), (420,), True),
        ((6, 70), (-1,), True),
        ((6, 70), (10, 42), True),
        ((6, 70), (70, 6), True),
        ((1, 70), (70,), False),
    ],
)
def test_reshape(getkey, shape, new, dense):
    q = eqq.quantize(weights(getkey(), shape), "int8")
    expected = q.dequantize().reshape(new)
    for out in (q.reshape(new), q.reshape(*new), q.reshape(list(new))):
        equal(out, expected, dense=dense)
    equal(jnp.reshape(q, new), expected, dense=dense)
    assert dense or [a.dtype for a in jtu.tree_leaves(q)] == [a.dtype for a in jtu.tree_leaves(q.reshape(new))]


def test_reshape_of_other_axes(q, conv):
    equal(q.T.reshape(7, 10, 6), q.dequantize().T.reshape(7, 10, 6), dense=True)
    equal(q.reshape(70, 6, order="F"), q.dequantize().reshape(70, 6, order="F"))
    merged = conv.reshape(4, 30)  # the quantized axes of a convolution are one in memory
    equal(merged, conv.dequantize().reshape(4, 30), dense=False)
    assert_same(merged.reshape(4, 3, 2, 5), conv)
    equal(conv.reshape(2, 2, 30), conv.dequantize().reshape(2, 2, 30), dense=False)
    equal(conv.reshape(12, 10), conv.dequantize().reshape(12, 10))
    with pytest.raises((TypeError, ValueError)):
        q.reshape(7, 7)


def test_astype(q):
    for dtype in (jnp.bfloat16, "float16", np.float32):
        equal(q.astype(dtype), q.dequantize().astype(dtype), dense=False)
        assert all(a is b for a, b in zip(jtu.tree_leaves(q), jtu.tree_leaves(q.astype(dtype)), strict=True))
    assert_same(q.astype(jnp.bfloat16).astype(jnp.float32), q)
    equal(q.astype(jnp.int32), q.dequantize().astype(jnp.int32))
    equal(q.astype(bool), q.dequantize().astype(bool))


# Indexing: one array of rows, one of columns, one whose trailing axes are quantized as one

I = np.s_
ROWS = np.array([0, 3, 3])
TWO = [
    *(0, -1, np.int32(2), I[:], I[1:4], I[::-1], I[4:1:-2], None, ..., (), True),
    *(I[2, 3], I[-1, -2], I[:, 5], I[:, -5:], I[1, :], I[1, ::2], I[1:3, 4:60:7], I[::-1, ::-1], I[2:2]),
    *(I[None, 2], I[2, None], I[..., 3], I[..., None], I[None, ..., 1:5], I[3, ...], I[:, None, 1:], I[..., 1, :]),
    *(ROWS, [ROWS], I[ROWS, 1], I[ROWS, ROWS], I[1:3, ROWS], I[ROWS, 2:9], I[ROWS[:, None], ROWS], I[..., ROWS]),
    *(ROWS.reshape(3, 1), I[None, ROWS], I[-ROWS], np.array([9, -9]), I[ROWS, None, 1:3], np.zeros((0,), int)),
    *(np.arange(6) % 2 == 0, I[np.arange(6) > 2, 1:5], I[:, np.arange(70) > 60], np.ones((6, 70), bool)),
    *(I[np.arange(6) > 2, 3], I[np.arange(6) > 3, ROWS[:2]]),
]
FOUR = [
    *(0, I[-1, 2], I[1:, :2], I[..., 1], I[0, ..., 2:], I[:, None, 1], I[:, :, 1, ::2], I[2, 1:, :, ::-1]),
    *(ROWS, I[ROWS, 1], I[ROWS, :, 1], I[:, ROWS % 3], I[..., ROWS], I[ROWS, :, :, ROWS], I[ROWS, 1:, :, 2:]),
    *(np.arange(4) > 1, I[np.arange(4) > 1, ..., 0], I[0, 1, 1, 4], I[None], I[::2, None, ..., 1:2]),
]


def as_index(index):
    return tuple(index) if isinstance(index, list) else index


def test_indices_equal_numpy():
    """A few of each kind, of a stack, with blocks along its rows or across its layers."""
    mask, ids = np.arange(6) % 2 == 0, np.array([2, 0, 2])
    indices = [-1, I[1:, ::-2], I[..., 3], I[2, 4, -3], ids, I[0, ROWS], I[ids, ROWS], I[:, mask, 1:4], I[ids, :, ids]]
    indices += [I[None, 1, ..., 2:4], I[:, np.array([[1], [3]]), np.array([0, 5])], I[jnp.array(1), 2:3]]
    w = np.random.default_rng(0).integers(-100, 100, (3, 6, 8)).astype(np.float32)

    @jax.jit
    def run(w):
        qs = [eqq.quantize(w, "int8", axis=axis) for axis in (-1, 0)]
        return [(q.dequantize(), [q[index] for index in indices]) for q in qs]

    for dense, found in jax.tree.map(np.asarray, run(w)):
        assert np.abs(dense - w).max() < 0.5
        for index, values in zip(indices, found, strict=True):
            np.testing.assert_array_equal(values, dense[index], err_msg=str(index))


@pytest.mark.long
@pytest.mark.parametrize("axis", [-1, 0, (-2, -1)], ids=str)
def test_indexing(getkey, axis):
    q = eqq.quantize(weights(getkey(), (6, 70)), "int4" if axis == -1 else "int8", axis=axis)
    dense = q.dequantize()
    arrays = (jnp.array([1, 2]), I[jnp.array(3), 1:4], jnp.array(4))
    for index in map(as_index, (*TWO, *arrays)):
        equal(q[index], dense[index])


@pytest.mark.long
@pytest.mark.parametrize("axis", [(-3, -2, -1), -1, 1, (-1, -2)], ids=str)
def test_indexing_of_four_axes(getkey, axis):
    q = eqq.quantize(weights(getkey(), (4, 3, 2, 5)), "int8", axis=axis)
    for index in FOUR:
        equal(q[index], q.dequantize()[index])


@pytest.mark.parametrize("index", [I[0, 0, 0], I[..., ...], 1.5, "a", I[:, :, None, 0]], ids=str)
def test_bad_index(q, index):
    with pytest.raises((IndexError, TypeError)):
        q.dequantize()[index]
    with pytest.raises((IndexError, TypeError)):
        q[index]


def test_indexing_inside_jit_and_vmap(q):
    ids = jnp.array([0, 5, 5, 77])
    equal(jax.jit(lambda q, i: q[i])(q, ids), q.dequantize()[ids])
    equal(jax.vmap(lambda i: q[i])(ids), q.dequantize()[ids])
    equal(jax.vmap(lambda r: r[2:9])(q), q.dequantize()[:, 2:9])
    equal(jax.jit(lambda q, i: q[i, 3])(q.T, ids), q.dequantize().T[ids, 3])


# Sharding


def test_sharding_is_static_and_follows_the_axes(getkey):
    spec = PartitionSpec("a", "b")
    q = eqq.quantize(weights(getkey(), (6, 70)), "int8")
    assert q.sharding is None
    q = dataclasses.replace(q, logical_sharding=spec)
    assert q.sharding == spec
    assert q.T.sharding == q.mT.sharding == PartitionSpec("b", "a")
    assert q.T.T.sharding == q.astype(jnp.bfloat16).sharding == spec
    assert jtu.tree_map(lambda x: x, q).sharding == jax.jit(lambda q: q)(q).sharding == spec
    assert jax.jit(lambda q: q.T)(q).sharding == PartitionSpec("b", "a")
    assert jtu.tree_structure(q) != jtu.tree_structure(dataclasses.replace(q, logical_sharding=None))
    stacked = jtu.tree_map(lambda a: jnp.stack([a, a]), q)
    assert stacked.sharding == PartitionSpec(None, "a", "b")
    assert stacked.transpose(2, 0, 1).sharding == PartitionSpec("b", None, "a")
    seen = []
    out = jax.vmap(lambda q: seen.append(q.sharding) or q.T)(stacked)
    assert seen == [spec] and out.sharding == PartitionSpec(None, "b", "a")
    assert jtu.tree_map(lambda a: a[0], stacked).sharding == spec


def test_what_quaxify_passes_and_returns():
    q = eqq.quantize(jnp.ones((8, 64)), "nf4")
    seen = []
    record = lambda w: seen.append(eqq.is_quantized(w)) or w.T
    for run in (eqq.quaxify(record), eqq.quaxify(record, filter_spec=False)):
        assert eqq.is_quantized(run(q))
    assert seen == [False, True]  # a tracer of Quax; the array itself
    assert isinstance(eqq.quaxify(lambda w: w * 2)(q), jax.Array)


def test_quax_alone_and_values_of_others(getkey):
    q, x = eqq.quantize(weights(getkey(), (16, 32)), "int8"), weights(getkey(), (3, 32))
    dense = q.dequantize()
    for program in (
        jax.jit(lambda w: x @ (w * 2).T),
        lambda w: jax.lax.scan(lambda c, _: (c, x @ w.T), 0.0, None, length=2)[1],
        lambda w: jax.lax.cond(x[0, 0] > 0, lambda w: x @ w.T, lambda w: -x @ w.T, w),
    ):
        np.testing.assert_allclose(quax.quaxify(program)(q), program(dense), rtol=1e-4, atol=1e-4)
    zero = quax.examples.zero.Zero((32, 5), jnp.float32)
    assert isinstance(eqq.quaxify(lambda w, z: w @ z)(q, zero), quax.examples.zero.Zero)
    rows = eqq.quaxify(lambda w: jax.lax.scan(lambda c, r: (c, r @ x[0]), 0, w * 2)[1])(q)
    np.testing.assert_allclose(rows, 2 * dense @ x[0], rtol=1e-4, atol=1e-4)


def test_arrays_that_quaxify_makes_hold_no_tracers(getkey):
    q, x = eqq.quantize(weights(getkey(), (16, 32)), "int8"), weights(getkey(), (3, 32))
    make = eqq.quaxify(lambda w, x: (w, eqq.quantize(x, "int8"), ScaledArray(w, x[0])))
    for same, made, scaled in (make(q, x), jax.jit(make)(q, x)):
        assert eqx.tree_equal(same, q) and eqx.tree_equal(made, eqq.quantize(x, "int8"))
        assert eqx.tree_equal(scaled, ScaledArray(q, x[0]))


def test_scalars_multiply_results(getkey):
    """Under `quaxify`, a weight times a scalar is multiplied packed, and its results by the scalar."""
    q, x = eqq.quantize(weights(getkey(), (5, 64)), "int8"), weights(getkey(), (3, 64))
    program = lambda w, x: (x @ (w * 3).T, x @ (w / 4).T, x @ (-w).T, x @ (x[0, 0] * w).T, x @ (w * 1).T)
    with eqq.no_dense():
        found = jax.jit(eqq.quaxify(program))(q, x)
    w = np.asarray(q.dequantize())
    for y, factor in zip(found, (3, 0.25, -1, x[0, 0], 1), strict=True):
        np.testing.assert_allclose(y, x @ (factor * w).T, rtol=1e-4, atol=1e-4)
