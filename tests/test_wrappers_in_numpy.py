"""Wrappers of weights against NumPy: their products, and what moves of their stacks leave of them. Quick tests."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant._quax.convolution import _convolve_integers
from eqquant._wrappers.concatenate import concatenate, split, take
from eqquant._wrappers.permuted import PermutedArray
from eqquant._wrappers.rotated import RotatedArray
from eqquant._wrappers.scaled import ScaledArray


LAYERS, OUT, IN = 3, 4, 8
close = ft.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def whole(*shape):
    """Whole numbers that `int8` holds exactly with scales of one."""
    return np.random.default_rng(shape).integers(-100, 100, shape).astype(np.float32)


def exact(w, axis=-1):
    shape = tuple(1 if n == axis % w.ndim else length for n, length in enumerate(w.shape))
    return eqq.quantize(jnp.asarray(w), "int8", axis=axis, scale=jnp.ones((*np.delete(shape, axis % w.ndim), 1)))


V, B, A = whole(LAYERS, OUT, IN), whole(LAYERS, OUT, 2), whole(LAYERS, 2, IN)
draw = np.random.default_rng(0)
SCALES = draw.uniform(0.5, 2, (LAYERS, IN)).astype(np.float32)
ORDER = np.stack([draw.permutation(IN) for _ in range(LAYERS)])
HADAMARD = ft.reduce(np.kron, [np.array([[1, 1], [1, -1]])] * 3)
SIGNS = 1 - 2.0 * np.unpackbits(np.random.PCG64(5).random_raw(1).astype("<u8").view(np.uint8))[:IN]
STACKS = {
    "scaled": lambda v: (ScaledArray(v, jnp.asarray(SCALES)), V * SCALES[:, None]),
    "permuted": lambda v: (PermutedArray(v, jnp.asarray(ORDER, jnp.uint32)), in_logical_order(V)),
    "rotated": lambda v: (RotatedArray(v, 5), V @ (HADAMARD * SIGNS / 8**0.5)),
    "factors": lambda v: (eqq.arrays.LoraArray(v, jnp.asarray(A), jnp.asarray(B), 3.0, 1), V + 3 / 2 * B @ A),
}


def in_logical_order(v):
    w = np.empty_like(v)
    for layer, order in enumerate(ORDER):
        w[layer][:, order] = v[layer]
    return w


@pytest.mark.parametrize("name", STACKS)
def test_products_of_stacks(name):
    """Of a stack of several layers, and of one of a single layer, from both sides."""
    w, dense = STACKS[name](exact(V))
    x, y = whole(LAYERS, IN, 2), whole(LAYERS, 2, OUT)

    @jax.jit
    def run(w, x, y):
        one = jax.tree.map(lambda leaf: leaf[1:2], w)
        with eqq.no_dense():
            products = w @ x, y @ w, one @ x, w @ x[0]
        return products, w.mT.dequantize()

    products, transposed = run(w, jnp.asarray(x), jnp.asarray(y))
    close(transposed, dense.mT, atol=1e-3)
    wanted = (dense @ x, y @ dense, dense[1] @ x, dense @ x[0])
    for product, expected in zip(products, wanted, strict=True):
        close(product, expected, atol=0.1, rtol=1e-5)


# Of a stack, in JAX and in NumPy alike.
MOVES = {
    "reversed layers": lambda w, np: w[::-1],
    "rows": lambda w, np: w[:, 1:4:2],
    "layers again": lambda w, np: np.concatenate([w[2:], w, w[:1]]),
    "rows again": lambda w, np: np.concatenate([w[:, 2:], w[:, :1]], 1),
    "divided": lambda w, np: np.split(w, [1], 1)[1],
    "rows twice": lambda w, np: np.tile(w, (1, 2, 1)),
    "new stack": lambda w, np: np.stack([w[2], w[0]]),
    "broadcast": lambda w, np: np.broadcast_to(w[1], (2, OUT, IN)),
    "more rows": lambda w, np: np.pad(w, ((0, 0), (1, 2), (0, 0))),
    "some layers": lambda w, np: np.take(w, np.array([2, 0, 2]), axis=0),
    "transposed": lambda w, np: np.swapaxes(w, 1, 2),
}


@pytest.mark.parametrize("name", ["scaled", "factors", "activations"])
def test_moves_of_stacks(name):
    if name == "activations":
        scale = np.array([0.5, 1, 2], np.float32)
        w, dense = eqq.arrays.ActivationQuantizedArray(exact(V), "int8", scale), V
    else:
        w, dense = STACKS[name](exact(V))

    @jax.jit
    def run(w):
        with eqq.no_dense():
            moved = {move: eqq.quaxify(ft.partial(f, np=jnp))(w) for move, f in MOVES.items()}
        assert all(type(m) is type(w) for m in moved.values())
        scales = {move: m.scale for move, m in moved.items()} if name == "activations" else {}
        return {move: m.dequantize() for move, m in moved.items()}, scales

    found, scales = run(w)
    for move, f in MOVES.items():
        close(found[move], f(dense, np), atol=1e-3, err_msg=move)
    for move, moved in scales.items():  # layers keep their own
        wanted = MOVES[move](np.broadcast_to(scale[:, None, None], V.shape), np)[..., 1, 1]
        np.testing.assert_array_equal(moved, wanted, err_msg=move)


def test_products_round_activations():
    """To the scale of each layer: rounded, clipped, shifted by the zero point and multiplied."""
    scale, zero = np.array([0.5, 1, 2], np.float32), np.array([3, 128, 255], np.uint8)
    make = ft.partial(eqq.arrays.ActivationQuantizedArray, exact(V), eqq.Int8(symmetric=False), scale, zero)
    w = make(learn_scale=True)
    assert repr(w).endswith("scale from calibration, learned)") and repr(make()).endswith("scale from calibration)")
    x = 3 * whole(LAYERS, IN, 5) + 0.3

    @jax.jit
    def run(w, x):
        with eqq.no_dense():
            products = w @ x, w @ x[0], jax.tree.map(lambda leaf: leaf[2], w) @ x[2]
        return products, jax.vjp(lambda x: w @ x, x)[1](jnp.ones((LAYERS, OUT, 5)))[0]

    found, gradient = run(w, jnp.asarray(x))
    by, offset = scale[:, None, None], zero[:, None, None].astype(np.float32)
    inside = lambda x: (np.round(x / by) + offset >= 0) & (np.round(x / by) + offset <= 255)
    rounded = lambda x: (np.clip(np.round(x / by) + offset, 0, 255) - offset) * by
    wanted = (V @ rounded(x), V @ rounded(x[:1]), V[2] @ rounded(x)[2])
    for product, expected in zip(found, wanted, strict=True):
        close(product, expected, atol=0.05)
    assert 0 < inside(x).mean() < 1
    close(gradient, np.where(inside(x), V.sum(1)[..., None], 0), atol=1e-3)


def test_multiples():
    """A scalar factor and a divisor stay apart from codes, and train."""
    v, x = V[0], whole(IN)
    functions = {
        "times": lambda w, s: ((w * s) @ x, jnp.take(s * w, 2, axis=0), x @ (w * s)[::-1].T),
        "divided": lambda w, s: ((w / s) @ x, jnp.take(w / s, 2, axis=0), x @ (w / s)[::-1].T),
        "negated": lambda w, s: ((-w) @ x, jnp.take(-w, 2, axis=0), x @ -w[::-1].T),
    }

    @jax.jit
    def run(w, s):
        with eqq.no_dense():
            found = {name: eqq.quaxify(f)(w, s) for name, f in functions.items()}
            sums = lambda s: jnp.stack([jnp.sum(eqq.quaxify(f)(w, s)[0]) for f in functions.values()])
            return found, jax.jacfwd(sums)(s)

    found, gradients = run(exact(v), jnp.float32(1.5))
    for name, by in (("times", 1.5), ("divided", 1 / 1.5), ("negated", -1)):
        for value, wanted in zip(found[name], (by * v @ x, by * v[2], by * v[::-1] @ x), strict=True):
            close(value, wanted, atol=1e-2)
    total = np.sum(v @ x)
    close(gradients, [total, -total / 1.5**2, 0], atol=0.1)


def test_lookups():
    """Rows by one index, or by several of which those out of bounds are filled."""
    v, ids = V[0], np.array([[2, 0], [9, 1]])
    arrays = {
        "codes": (exact(v), v),
        "factors": (
            eqq.arrays.LoraArray(exact(v), jnp.asarray(A[0]), jnp.asarray(B[0]), 3.0, 1),
            v + 3 / 2 * B[0] @ A[0],
        ),
        "scaled": (ScaledArray(exact(v), jnp.asarray(SCALES[0])), v * SCALES[0]),
        "permuted": (PermutedArray(exact(v), jnp.asarray(ORDER[0], jnp.uint32)), v[:, np.argsort(ORDER[0])]),
    }
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0, 1))
    gather = lambda w, at: lax.gather(w, at, numbers, (1, IN), mode="fill")

    @jax.jit
    def run(arrays):
        at = jnp.array([[3, 0], [1, 2], [4, 0]])  # whole rows begin at zero
        with eqq.no_dense():
            found = {name: (w[1:], w[ids[0]], eqq.quaxify(jnp.take)(w, ids, axis=0)) for name, w in arrays.items()}
            return found, eqq.quaxify(gather)(arrays["codes"], at)

    found, gathered = run({name: w for name, (w, _) in arrays.items()})
    for name, (_, dense) in arrays.items():
        filled = np.stack([dense[[2, 0]], [np.full(IN, np.nan), dense[1]]])
        for rows, wanted in zip(found[name], (dense[1:], dense[[2, 0]], filled), strict=True):
            close(rows, wanted, atol=1e-3, err_msg=name)
    np.testing.assert_array_equal(gathered, [v[3], *np.full((2, IN), np.nan)])


def test_rows_of_experts():
    """Each row is multiplied by the weight of its group; rows beyond all groups are zero."""
    x, sizes, w = whole(9, IN, 2), np.array([2, 0, 5]), whole(IN, LAYERS, OUT)
    dims = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), [0], [1])
    product = eqq.quaxify(lambda x, w: lax.ragged_dot_general(x, w, jnp.asarray(sizes), dims))
    with eqq.no_dense():
        y = jax.jit(product)(x, exact(w, 0))
    expected = np.zeros((9, 2, OUT))
    for row, expert in enumerate(np.repeat(np.arange(LAYERS), sizes)):
        expected[row] = x[row].T @ w[:, expert]
    np.testing.assert_array_equal(y, expected)


def test_pointwise_convolutions():
    """A window of one is a product, channels first or last; any other window is none, as are padding and dilation."""
    x, w, wide = whole(2, 3, 5, 4), whole(6, 3), whole(6, 3, 1, 2)
    kernel = lambda w: eqq.quantize(jnp.asarray(w), "int8", axis=(1, 2, 3), scale=jnp.ones((6, 1)))
    operands = exact(w.T.reshape(1, 1, 3, 6), -2), kernel(w.reshape(6, 3, 1, 1)), kernel(wide)

    def convolve(x, w, strides=(1, 1), padding=((0, 0), (0, 0)), names=("NCHW", "OIHW", "NCHW")):
        return eqq.quaxify(lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=names))(x, w)

    @jax.jit
    def run(x, last, first, wide):
        with eqq.no_dense():
            strided = convolve(jnp.moveaxis(x, 1, -1), last, (2, 3), names=("NHWC", "HWIO", "NHWC"))
        padded = convolve(x, first, padding=((0, 0), (1, 0)))
        dilated = eqq.quaxify(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), [(0, 0)] * 2, (1, 2)))
        return strided, padded, convolve(x, wide), dilated(x, first)

    sums = lambda kernel, x: np.einsum("oi,nihw->nohw", kernel, x)
    y = sums(w, x)
    expected = (
        np.moveaxis(y[:, :, ::2, ::3], 1, -1),
        np.pad(y, ((0, 0), (0, 0), (0, 0), (1, 0))),
        sums(wide[..., 0, 0], x[..., :-1]) + sums(wide[..., 0, 1], x[..., 1:]),
        np.insert(y, (1, 2, 3), 0, axis=-1),
    )
    (packed, *dense), (wanted, *others) = run(x, *operands), expected
    # Native kernels may round `x` to 24 bits: a sum of three products errs by up to 3 * 127 * max(x) / 2**24.
    np.testing.assert_allclose(packed, wanted, atol=3 * 127 * np.abs(x).max() / 2**24, rtol=2**-23)
    for found, wanted in zip(dense, others, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_convolutions_of_integers_subtract_zero_points():
    """As GPU and TPU compute them, in int32: less of the zero point at a border, where a window sees fewer values."""
    a, b = whole(2, 3, 4, 5).astype(np.int8), whole(6, 3, 3, 1).astype(np.int8)
    zero = np.array([-7, 100], np.int32).reshape(2, 1, 1, 1)
    trace = jax.make_jaxpr(lambda a, b: lax.conv_general_dilated(a, b, (1, 1), "SAME"))(a, b)
    params = trace.eqns[-1].params
    found = jax.jit(ft.partial(_convolve_integers, params=params, b_zero=None))(a, b, a_zero=zero)
    shifted = np.pad(a.astype(np.int64) - zero, ((0, 0), (0, 0), (1, 1), (0, 0)))
    expected = sum(
        np.einsum("oi,nihw->nohw", b[..., n, 0].astype(np.int64), shifted[:, :, n : n + 4]) for n in range(3)
    )
    np.testing.assert_array_equal(found, expected)


def test_joined_and_divided_weights():
    """Along rows, and along the quantized axis where no block is cut."""
    w = jnp.asarray(whole(6, 352))
    quantize = lambda w, format=eqq.Int4(32, symmetric=False): eqq.quantize(w, format)

    @jax.jit
    def run(w):
        q = quantize(w)
        left, middle, right = columns = split(q, (128, 128, 96), axis=1)
        rows = split(q, (1, 2, 3))
        assert [part.shape for part in rows] == [(1, 352), (2, 352), (3, 352)]
        joined = concatenate([middle, left, right], axis=-1), concatenate(rows[::-1])
        sliced = eqq.quaxify(lambda w: (w[:, 128:], w[:, :256:2], w[1:3, 128:]))(q)
        assert [eqq.is_quantized(array) for array in sliced] == [True, False, False]
        packed = q, *columns, *joined, take(q, np.array([4, 0])), sliced[0]
        return [*(array.dequantize() for array in packed), *sliced[1:]]

    dense, *found = map(np.asarray, run(w))
    wanted = [dense[:, :128], dense[:, 128:256], dense[:, 256:]]
    wanted += [np.hstack([wanted[1], wanted[0], wanted[2]]), dense[[3, 4, 5, 1, 2, 0]], dense[[4, 0]]]
    wanted += [dense[:, 128:], dense[:, :256:2], dense[1:3, 128:]]
    for array, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(array, expected)
    q, p = (jax.eval_shape(quantize, w), jax.eval_shape(ft.partial(quantize, format=eqq.Int4(None)), w))
    for parts, axis, message in (
        ([p, p], 1, "has one scale, and would have several along axis -1"),
        ([q, p], 0, "their formats differ"),
        ([q, np.asarray(w)], 0, "some are quantized and others are not"),
    ):
        with pytest.raises(ValueError, match=message):
            concatenate(parts, axis)
    with pytest.raises(ValueError, match="cannot be divided into 1 [+] 6"):
        split(q, (1, 6))
    with pytest.raises(ValueError, match="96 is no multiple"):
        split(q, (96, 256), 1)
