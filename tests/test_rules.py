"""Quax rules: any `jax.lax` primitive of quantized operands is the dense result, and stays quantized where promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant._wrappers.low_precision import LowPrecisionArray
from eqquant._wrappers.permuted import PermutedArray

from .helpers import assert_close, assert_same, primitives, weights


def check(f, *args, quantized=False, tol=1e-5):
    """`f` of quantized operands is `f` of the dense ones, eagerly and inside `jit`, and is quantized or not."""
    expected = f(*(x.dequantize() if eqq.is_quantized(x) else x for x in args))
    for run in (eqq.quaxify(f), jax.jit(eqq.quaxify(f))):
        out = run(*args)
        if quantized is not None:
            assert eqq.is_quantized(out) == quantized, out
        out = out.dequantize() if eqq.is_quantized(out) else out
        assert out.dtype == expected.dtype
        assert_close(out, expected, tol=tol)


@pytest.fixture
def q(getkey):
    return eqq.quantize(weights(getkey(), (6, 70)), "nf4")


@pytest.fixture
def p(getkey):
    return eqq.quantize(weights(getkey(), (6, 70)), "int8")


@pytest.fixture
def conv(getkey):
    return eqq.quantize(weights(getkey(), (4, 3, 3, 3)), "int8", axis=(-3, -2, -1))


# Arithmetic

BINARY = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lambda x, y: lax.div(x, lax.add(lax.mul(y, y), jnp.ones_like(y))),
    "max": lax.max,
    "lt": lax.lt,
}
UNARY = {
    "exp": lax.exp,
    "log": lambda x: lax.log(lax.exp(x)),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "sqrt": lambda x: lax.sqrt(lax.abs(x)),
    "reduce_sum": lambda x: jnp.sum(x, axis=0),
    "reduce_max": lambda x: jnp.max(x, axis=1),
    "reduce_min": jnp.min,
    "reduce_prod": lambda x: jnp.prod(x, axis=0),
    "argmax": lambda x: lax.argmax(x, 1, jnp.int32),
    "sort": lambda x: lax.sort(x, dimension=0),
    "cumsum": lambda x: lax.cumsum(x, axis=1),
    "pad": lambda x: lax.pad(x, jnp.float32(0.5), ((0, 1, 0), (2, 0, 1))),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary(q, p, getkey, name):
    x = weights(getkey(), q.shape)
    for operands in ((q, x), (x, q), (q, p)):
        check(BINARY[name], *operands)


@pytest.mark.parametrize("name", UNARY)
def test_unary(q, name):
    check(UNARY[name], q)
    check(UNARY[name], q.T)


# Structure: moves of axes and rows


@pytest.mark.parametrize(
    "f, quantized",
    [
        (lambda x: lax.transpose(x, (1, 0)), True),
        (lambda x: x.astype(jnp.bfloat16), True),
        (lambda x: x.astype(jnp.int32), False),
        (lambda x: lax.reshape(x, (2, 3, 70)), True),
        (lambda x: lax.reshape(x, (6, 7, 10)), True),
        (lambda x: lax.reshape(x, (10, 42)), False),
        (lambda x: lax.reshape(x, (70, 6), (1, 0)), False),
        (lambda x: x[None], True),
        (lambda x: jnp.expand_dims(x, 1), True),
        (lambda x: jnp.squeeze(x[:, None], 1), True),
        (lambda x: lax.broadcast_in_dim(x, (4, 6, 70), (1, 2)), True),
        (lambda x: lax.broadcast_in_dim(x, (6, 70, 4), (0, 1)), True),
        (lambda x: lax.broadcast_in_dim(x, (6, 70, 4), (0, 1))[:, :, 1], True),
        (lambda x: lax.broadcast_in_dim(x, (6, 2, 70), (0, 2)), True),
        (lambda x: lax.slice(x, (1, 0), (5, 70), (2, 1)), True),
        (lambda x: lax.slice(x, (1, 3), (5, 70)), False),
        (lambda x: lax.dynamic_slice(x, (2, 0), (3, 70)), True),
        (lambda x: lax.dynamic_slice(x, (9, 5), (3, 70)), True),  # starts are clamped
        (lambda x: lax.dynamic_slice(x, (1, 5), (3, 60)), False),
        (lambda x: lax.rev(x, (0,)), True),
        (lambda x: lax.rev(x, (1,)), False),
        (lambda x: lax.pad(x, np.float32(0), ((1, 2, 1), (0, 0, 0))), True),
        (lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, 0, 0))), False),
        (lambda x: lax.stop_gradient(x), True),
        (lambda x: lax.optimization_barrier((x, x[0]))[0], True),
        (lambda x: jnp.copy(x), True),
        (lambda x: jnp.split(x, 3)[1], True),
        (lambda x: jnp.split(x, (3, 30), 1)[1], False),
        (lambda x: jax.checkpoint(lambda x: x[1:3])(x), True),
    ],
)
def test_structure(q, f, quantized):
    check(f, q, quantized=quantized)
    check(f, eqq.quantize(weights(jax.random.key(1), (6, 70)), "int8", axis=0), quantized=None)


def test_structure_is_exact(q):
    assert_same(eqq.quaxify(lambda x: x.T)(q), q.T)
    assert_same(eqq.quaxify(lambda x: lax.slice(x, (2, 0), (4, 70)))(q), eqq.quantize(q.dequantize()[2:4], "nf4"))


def test_concatenate_and_stack(q, p, getkey):
    other, x = eqq.quantize(weights(getkey(), (2, 70)), "nf4"), weights(getkey(), q.shape)
    rows, columns = (lambda *x: lax.concatenate(x, 0)), (lambda *x: lax.concatenate(x, 1))
    check(rows, q, other, quantized=True)
    check(rows, q, p)  # two formats
    check(rows, x, q)
    check(columns, q, q)
    check(columns, q, p, x)
    check(lambda *x: jnp.stack(x), q, q, quantized=None)
    check(lambda *x: jnp.stack(x, 2), q, p)


def test_select(q, p):
    mask = q.dequantize() > 0
    check(lambda x, y: jnp.where(mask, x, y), q, p)
    check(lambda x: jnp.where(mask, x, jnp.zeros_like(x)), q)
    check(lambda x, y: lax.select_n(jnp.bool_(True), x, y), q, p)
    check(lambda x, y: lax.select_n(jnp.bool_(True), x, y), q, q, quantized=True)


@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("axis", [0, 1])
def test_take(q, mode, axis):
    ids = jnp.array([[0, 5, 500], [3, 3, 1]])
    check(lambda x: jnp.take(x, ids, axis=axis, mode=mode), q)
    out = eqq.quaxify(lambda x: jnp.take(x, ids, axis=axis, mode=mode))(q)
    filled = np.isnan(np.asarray(out)).any()
    assert filled == (mode == "fill")
    np.testing.assert_array_equal(np.asarray(out), np.asarray(jnp.take(q.dequantize(), ids, axis=axis, mode=mode)))


def test_take_with_a_fill_value(q):
    check(lambda x: jnp.take(x, jnp.array([0, 9]), axis=0, mode="fill", fill_value=7.0), q)


@pytest.mark.long
def test_gather_by_indexing(q, conv):
    ids, rows = jnp.array([0, 5, 5]), jnp.array([1, 2, 3])
    for f in (lambda x: x[ids], lambda x: x[:, ids], lambda x: x[rows, ids], lambda x: x[ids[None], 3:9]):
        check(f, q)
    check(lambda x: x[ids].T, q.T)
    check(lambda x: x[2], q, quantized=None)
    check(lambda x: x[jnp.array([0, 3]), :, 1], conv)
    stacked = eqq.quantize(weights(jax.random.key(0), (2, 6, 70)), "int8")
    batched = jax.vmap(lambda x, i: x[i])
    check(batched, stacked, jnp.array([[0, 5], [3, 1]]))
    check(jax.vmap(lambda x, i: x[i], in_axes=(None, 0)), q, ids)


# Products


@pytest.mark.parametrize(
    "spec, left, right",
    [
        ("ok,bk->bo", (6, 70), (3, 70)),
        ("ok,bk->ob", (6, 70), (3, 70)),
        ("bk,nhk->bnh", (3, 70), (2, 4, 70)),
        ("oi,io->", (6, 70), (70, 6)),
        ("bij,bjk->bik", (2, 6, 70), (2, 70, 3)),
        ("bij,bkj->bki", (2, 6, 70), (2, 3, 70)),
        ("ij,jk", (6, 70), (70, 3)),
        ("ij,jk", (3, 6), (6, 70)),
        ("nhk,nhb->kb", (2, 4, 70), (2, 4, 3)),
        ("ab,cd->abcd", (2, 8), (3, 8)),
        ("ijk,jk->i", (4, 5, 8), (5, 8)),
        ("bi,bi->b", (3, 70), (3, 70)),
        ("bnk,mn->bmk", (3, 8, 70), (4, 8)),
        ("bnk,mn->kmb", (3, 8, 70), (4, 8)),
        ("bnk,cmk->bmcn", (3, 8, 70), (2, 4, 70)),
    ],
)
def test_einsum(getkey, spec, left, right):
    x, y = weights(getkey(), left), weights(getkey(), right)
    f = lambda x, y: jnp.einsum(spec, x, y)
    for axis in (-1, 0):
        qx, qy = eqq.quantize(x, "int8", axis=axis), eqq.quantize(y, "nf4", axis=axis)
        for operands in ((qx, y), (x, qy), (qx, qy)):
            assert_close(eqq.quaxify(f)(*operands), f(*map(eqq.dequantize, operands)))


DIMENSION_NUMBERS = [
    (((1,), (1,)), ((), ()), (6, 70), (3, 70)),
    (((0,), (0,)), ((), ()), (6, 70), (6, 3)),
    (((0, 1), (1, 0)), ((), ()), (6, 70), (70, 6)),
    (((1, 2), (0, 1)), ((), ()), (4, 5, 14), (5, 14, 3)),
    (((2, 1), (1, 0)), ((), ()), (4, 5, 14), (5, 14, 3)),
    (((2,), (1,)), ((0,), (0,)), (2, 6, 70), (2, 70, 3)),
    (((1,), (1,)), ((0,), (0,)), (2, 6, 70), (2, 6, 3)),
    (((3,), (0,)), ((1,), (1,)), (3, 2, 4, 70), (70, 2, 5)),
    (((), ()), ((), ()), (2, 6), (3, 5)),
]


@pytest.mark.parametrize("contract, batch, left, right", DIMENSION_NUMBERS)
def test_dot_general(getkey, contract, batch, left, right):
    x, y = weights(getkey(), left), weights(getkey(), right)
    f = lambda x, y: lax.dot_general(x, y, (contract, batch))
    swapped = (contract[::-1], batch[::-1])
    g = lambda y, x: lax.dot_general(y, x, swapped)
    for axis in (-1, contract[0] if contract[0] else 0):
        q = eqq.quantize(x, "int8", axis=axis)
        assert_close(eqq.quaxify(f)(q, y), f(q.dequantize(), y))
        assert_close(eqq.quaxify(g)(y, q), g(y, q.dequantize()))


@pytest.mark.parametrize("preferred", [jnp.float32, jnp.bfloat16, None])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_preferred_element_type(getkey, preferred, dtype):
    q, x = eqq.quantize(weights(getkey(), (6, 70), dtype), "int8"), weights(getkey(), (3, 70), dtype)
    numbers = (((1,), (1,)), ((), ()))
    low = jnp.bfloat16 in (preferred, dtype)
    f = lambda x, y: lax.dot_general(x, y, numbers, preferred_element_type=preferred)
    check(f, x, q, tol=1e-2 if low else 1e-5)
    check(f, q, x, tol=1e-2 if low else 1e-5)


@pytest.mark.parametrize("f", [lambda w, x: w @ x, jnp.dot, lambda w, x: jnp.einsum("ok,k->o", w, x)])
def test_products_use_the_quantized_matmul(q, getkey, f):
    for w, x in ((q, weights(getkey(), (70,))), (q.T, weights(getkey(), (6,)))):
        names = primitives(eqq.quaxify(f), w, x)
        assert "quantized_matmul" in names and "dot_general" not in names
    xs = weights(getkey(), (3, 70))
    batched = eqq.quaxify(jax.vmap(f, in_axes=(None, 0)))
    assert primitives(batched, q, xs).count("quantized_matmul") == 1
    assert_close(batched(q, xs), xs @ q.dequantize().T)


def test_one_input_for_stacked_weights_stays_quantized(getkey):
    w, x = eqq.quantize(weights(getkey(), (3, 8, 70)), "int8"), weights(getkey(), (4, 8))
    names = primitives(eqq.quaxify(lambda w, x: jnp.einsum("bnk,mn->bmk", w, x)), w, x)
    assert "quantized_matmul" in names and "dot_general" not in names


def test_convolution(conv, getkey):
    x = weights(getkey(), (2, 3, 8, 8))
    check(lambda x, w: lax.conv_general_dilated(x, w, (1, 2), "SAME"), x, conv)
    check(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "VALID"), eqq.quantize(x, "int8"), conv)
    pointwise = eqq.quantize(weights(getkey(), (5, 3, 1, 1)), "int8", axis=(-3, -2, -1))
    check(lambda x, w: lax.conv_general_dilated(x, w, (2, 1), "VALID"), x, pointwise)


# Control flow and transformations


@pytest.mark.long
def test_control_flow(q, getkey):
    x = weights(getkey(), (70,))
    square = eqq.quantize(weights(getkey(), (70, 70)) / 10, "int8")
    stacked = eqq.quantize(weights(getkey(), (3, 70, 70)) / 10, "int8")
    check(lambda w, x: lax.cond(x[0] < 9.0, lambda: w @ x, lambda: 2 * (w @ x)), q, x)
    check(lambda w, x: lax.scan(lambda x, _: (jnp.tanh(w @ x), None), x, None, length=3)[0], square, x)
    check(lambda w, x: lax.scan(lambda x, w: (jnp.tanh(w @ x), None), x, w)[0], stacked, x)
    check(lambda w, x: lax.fori_loop(0, 3, lambda _, x: jnp.tanh(w @ x), x), square, x)
    loop = lambda w, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(w @ c[1])), (0, x))[1]
    check(loop, square, x)


@pytest.mark.long
def test_transformations(q, getkey):
    x, xs = weights(getkey(), (70,)), weights(getkey(), (3, 70))
    loss = lambda w, x: jnp.sum(jnp.sin(w @ x) * jnp.mean(w) + jnp.max(w + x[None]))
    check(jax.grad(loss, argnums=1), q, x)
    check(jax.vmap(loss, in_axes=(None, 0)), q, xs)
    check(jax.vmap(jax.grad(loss, argnums=1), in_axes=(None, 0)), q, xs)
    check(jax.vmap(lambda w, x: w * x, in_axes=(0, None)), q, x)
    assert_close(eqq.quaxify(jax.jit(loss))(q, x), loss(q.dequantize(), x))
    assert_close(
        jax.jit(jax.grad(eqq.quaxify(loss), argnums=1))(q, x), jax.jit(jax.grad(loss, argnums=1))(q.dequantize(), x)
    )
    assert_close(jax.vmap(eqq.quaxify(lambda w, x: w @ x), (None, 0))(q, xs), xs @ q.dequantize().T)


# Without quaxify


def test_lax_and_numpy_functions_take_a_quantized_array(q, p, conv, getkey):
    image, x = weights(getkey(), (2, 3, 8, 8)), weights(getkey(), (3, 70))
    functions = [
        (lax.sin, q),
        (lambda w: lax.add(w, w), q),
        (lambda w: lax.conv_general_dilated(image, w, (1, 1), "SAME"), conv),
        (lambda w: lax.dot_general(x, w, (((1,), (1,)), ((), ()))), q),
        (lambda w: lax.dynamic_slice(w, (1, 2), (2, 3)), q),
        (jnp.sin, q),
        (lambda w: jnp.matmul(x, w), q.T),
        (lambda w: jnp.einsum("ok,bk->bo", w, x), q),
        (lambda w: jnp.stack([w, w]), q),
        (lambda w: jnp.concatenate([w, x]), q),
        (lambda w: jnp.where(x[:1] > 0, w, w), q),
        (jnp.linalg.norm, q),
        (jnp.zeros_like, q),
    ]
    for f, w in functions:
        for run in (f, jax.jit(f)):
            out = run(w)
            assert isinstance(out, jax.Array)
            assert_close(out, f(w.dequantize()))
    assert_close(lax.add(q, p), q.dequantize() + p.dequantize())


def test_slice_of_delayed_scales(getkey):
    """The magnitudes that scales follow from belong to a whole matrix, and rows of it share them."""
    low = lambda w: LowPrecisionArray(w, "fp8", eqq.FP8("e5m2"), False, jnp.array([3.0, 2.0, 1.0]))
    w, x = weights(getkey(), (6, 32)), weights(getkey(), (2, 32))
    rows = eqq.quaxify(lambda w: w[2:4])(low(w))
    assert_same(rows.amax, low(w).amax)
    assert_close(eqq.quaxify(lambda w, x: x @ w[2:4].T)(low(w), x), x @ low(w[2:4]).T)


def test_concatenation_of_different_formats(getkey):
    """Concatenated weights keep a leaf that all share, and are dense where their leaves differ."""
    w, order = eqq.quantize(weights(getkey(), (6, 64)), "nf4"), jnp.arange(64, dtype=jnp.uint32)
    first, second = PermutedArray(w, order), PermutedArray(w, order[::-1])
    join = eqq.quaxify(lambda *parts: jnp.concatenate(parts))
    assert isinstance(join(first, first), PermutedArray)
    assert_close(join(first, first).dequantize(), join(*[first.dequantize()] * 2))
    assert isinstance(join(first, second), jax.Array)
    assert_close(join(first, second), jnp.concatenate([first.dequantize(), second.dequantize()]))
    stack = eqq.quaxify(lambda *parts: jnp.stack(parts))
    assert stack(first, first).order.shape == (64,) and stack(first, second).order.shape == (2, 64)
    assert_close(stack(first, second).dequantize(), jnp.stack([first.dequantize(), second.dequantize()]))


def test_concatenation_of_low_rank_factors(getkey):
    w, a = eqq.quantize(weights(getkey(), (6, 64)), "nf4"), weights(getkey(), (2, 64))
    lora = lambda rank, a: eqq.arrays.LoraArray(w, a, weights(getkey(), (6, rank)), alpha=1.0, in_ndim=1)
    other = lora(2, weights(getkey(), (2, 64)))
    join = eqq.quaxify(lambda *parts: jnp.concatenate(parts))
    for parts, packed in (((lora(2, a), lora(2, a)), True), ((lora(2, a), other), False)):
        dense = jnp.concatenate([part.dequantize() for part in parts])
        joined = join(*parts)
        assert isinstance(joined, eqq.arrays.LoraArray) == packed
        assert_close(joined.dequantize() if packed else joined, dense)
    narrow = lora(1, a[:1])  # another rank is another factor of the product
    assert_close(
        eqq.quaxify(lambda *w: jnp.stack(w))(other, narrow), jnp.stack([other.dequantize(), narrow.dequantize()])
    )
