"""`cond`, `scan` and `while_loop` under `quaxify`, whose branches and steps return other structures than they get."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant._wrappers.permuted import PermutedArray
from eqquant._wrappers.rotated import RotatedArray
from eqquant._wrappers.scaled import ScaledArray

from .helpers import primitives, weights
from .test_quax_packed import ARRAYS


def choose(which, *branches):
    return lambda w, x: x @ lax.switch(jnp.argmax(x[0, which]), branches, w)


def loop(step, start=lambda w: w, steps=3):
    """Returns a program that carries a weight and multiplies by it."""

    def run(w, x):
        body = lambda n, carry: (step(carry[0], w), carry[1] + 0.1 * jnp.tanh(carry[1] @ carry[0]))
        return lax.fori_loop(0, steps, body, (start(w), x))[1]

    return run


def while_loop(step):
    def run(w, x):
        body = lambda carry: (step(carry[0]), carry[1] + 0.1 * jnp.tanh(carry[1] @ carry[0]), carry[2] + 1)
        more = lambda carry: (carry[2] < 3) & (jnp.max(carry[1] @ carry[0]) < 1e6)
        return lax.while_loop(more, body, (w, x, 0))[1]

    return run


same, transposed, changed = lambda w: w, lambda w: w.T, lambda w: jnp.tanh(w)
# Functions of a square weight and of `x`; the structures that its branches or steps return differ.
DENSE = {
    "cond, one branch dense": lambda w, x: x @ lax.cond(x[0, 0] > 0, same, changed, w),
    "cond, the other dense": lambda w, x: x @ lax.cond(x[0, 0] > 0, changed, same, w),
    "cond, one branch transposed": lambda w, x: x @ lax.cond(x[0, 0] > 0, same, transposed, w),
    "switch": choose(slice(3), same, transposed, changed),
    "one of two outputs": lambda w, x: sum(
        x @ w for w in lax.cond(x[0, 0] > 0, lambda w: (w, w), lambda w: (w, w.T), w)
    ),
    "fori_loop, dense after a step": loop(lambda w, _: jnp.tanh(w)),
    "fori_loop, transposed": loop(lambda w, _: w.T),
    "fori_loop, a factor": loop(lambda w, _: w * 0.5),
    "fori_loop, dense before": loop(lambda _, w: w, lambda w: jnp.zeros(w.shape)),
    "fori_loop, no step": loop(lambda w, _: w.T, steps=0),
    "scan, two carries that swap": lambda w, x: lax.scan(
        lambda carry, _: ((carry[1], carry[0]), x @ carry[0]), (w, jnp.ones(w.shape)), length=3
    )[1],
    "while_loop, dense": while_loop(changed),
    "while_loop, transposed": while_loop(transposed),
    "while_loop, constants": lambda w, x: lax.while_loop(
        lambda y: jnp.max(y @ w) + jnp.max(x) < 9, lambda y: 2 * y @ jnp.tanh(w.T), jnp.abs(x) / 99
    ),
    "a loop in a branch": lambda w, x: lax.cond(x[0, 0] > 0, loop(lambda w, _: w.T), lambda w, x: x @ w, w, x),
    "a branch in a loop": loop(lambda w, _: lax.cond(jnp.sum(w[0]) > 0, same, transposed, w)),
}
PACKED = {
    "cond": lambda w, x: x @ lax.cond(x[0, 0] > 0, same, same, w),
    "cond, the same factor": lambda w, x: x @ lax.cond(x[0, 0] > 0, lambda w: w * 2, lambda w: w * 3, w),
    "fori_loop": loop(lambda w, _: w),
    "fori_loop, transposed twice": loop(lambda w, _: w.T.T),
    "while_loop": while_loop(same),
    "scan, results": lambda w, x: x @ lax.scan(lambda n, _: (n, w), 2.0, length=3)[1],
    "cond, factors": lambda w, x: x @ lax.cond(x[0, 0] > 0, lambda w: w * 2, lambda w: w / 3, w),
    "scan, factors": lambda w, x: x @ lax.scan(lambda n, _: (n, w * n), 2.0, length=3)[1],
}


@pytest.fixture
def square(getkey):
    return weights(getkey(), (64, 64)) / 16, weights(getkey(), (3, 64))


def check(program, w, x):
    close = ft.partial(np.testing.assert_allclose, rtol=5e-4, atol=5e-4)
    run, expected = eqq.quaxify(program), program(w.dequantize(), x)
    close(run(w, x), expected)
    close(run(w, x), expected)  # from the cache
    close(jax.jit(run)(w, x), expected)
    total = lambda f, w: lambda x: jnp.sum(jnp.sin(f(w, x)))
    differentiate = jax.grad if "while" not in primitives(run, w, x) else lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]
    close(differentiate(total(run, w))(x), differentiate(total(program, w.dequantize()))(x))
    close(jax.vmap(run, (None, 0))(w, x[None]), expected[None])


@pytest.mark.parametrize("name", DENSE)
def test_values_that_differ_become_dense(square, name):
    check(DENSE[name], eqq.quantize(square[0], "nf4"), square[1])


@pytest.mark.parametrize("name", PACKED)
def test_values_that_agree_stay_packed(square, name):
    w, x = eqq.quantize(square[0], "nf4"), square[1]
    with eqq.no_dense():
        assert "dequantize" not in primitives(eqq.quaxify(PACKED[name]), w, x)
    check(PACKED[name], w, x)


def test_others_stay_packed(square):
    w, x = eqq.quantize(square[0], "nf4"), square[1]
    both = lambda w, v, x: sum(x @ w for w in lax.cond(x[0, 0] > 0, lambda *w: w, lambda w, v: (w, v.T), w, v))
    found = eqq.explain(eqq.quaxify(both), w, w, x).weights
    assert [weight.roles[0] for weight in found] == ["packed", "decoded"]


@pytest.mark.parametrize("name", DENSE)
def test_nothing_becomes_dense_in_silence(square, name):
    w, x = eqq.quantize(square[0], "nf4"), square[1]
    run = eqq.quaxify(DENSE[name])
    run(w, x)  # what was traced before raises nevertheless
    with eqq.no_dense(w), pytest.raises(RuntimeError, match=r"`(cond|scan|while|tanh)` has no packed form"):
        run(w, x)
    assert eqq.explain(run, w, x).decoded


def test_warns_of_lost_activations(square):
    w, x = eqq.arrays.ActivationQuantizedArray(eqq.quantize(square[0], "int8"), "int8"), square[1]
    with pytest.warns(UserWarning, match="`cond`.*quantize no activations"):
        eqq.quaxify(DENSE["cond, one branch transposed"])(w, x)


@pytest.mark.parametrize("array", ARRAYS)
def test_every_class(getkey, array):
    w, x = ARRAYS[array](weights(getkey(), (4, 48, 64))), weights(getkey(), (2, 64))
    program = lambda w, x: jnp.einsum("bi,loi->lbo", x, lax.cond(x[0, 0] > 0, same, lambda w: w + 1, w))
    if not isinstance(w, eqq.arrays.ActivationQuantizedArray):
        check(program, w, x)
    each = lambda w, x: lax.scan(lambda n, w: (n, jnp.einsum("bi,oi->bo", x, w)), 0, w)[1]
    with eqq.no_dense():
        scanned = eqq.quaxify(each)(w, x)
    layers = eqq.quaxify(lambda w, x: jnp.stack([jnp.einsum("bi,oi->bo", x, w[n]) for n in range(4)]))
    np.testing.assert_allclose(scanned, layers(w, x), rtol=1e-5, atol=1e-5)


def add_product(y, w):
    return y + jnp.tanh(w @ y), w


def add_products(carry):
    return (*add_product(*carry[:2]), carry[2] + 1)


@pytest.mark.long
def test_one_body_for_several_structures(getkey):
    """JAX keeps a body that it has traced. So what belongs to the structure of a weight may not be kept with it."""
    stack, x = weights(getkey(), (3, 64, 64)) / 8, weights(getkey(), (64,))
    arrays = [eqq.quantize(stack, format) for format in (eqq.NF4(64), eqq.Int4(64))]  # leaves of the same shapes
    arrays += [eqq.quantize(stack, eqq.NF4(64), axis=-2), *(RotatedArray(arrays[0], seed) for seed in (0, 1))]
    for program in (
        lambda w: lax.scan(add_product, x, w)[0],
        lambda w: lax.cond(x[0] < 0, add_product, add_product, x, w[0])[0],
        lambda w: lax.while_loop(lambda carry: carry[2] < 2, add_products, (x, w[1], 0))[0],
    ):
        for w in arrays:
            np.testing.assert_allclose(eqq.quaxify(program)(w), program(w.dequantize()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [3, 16])
def test_layers_that_share_a_vector(getkey, layers):
    """Also where there are as many layers as inputs."""
    stack, x = eqq.quantize(weights(getkey(), (layers, 16, 16)) / 4, "int8"), weights(getkey(), (16,))
    factors = weights(getkey(), (layers, 2, 16)), weights(getkey(), (layers, 16, 2))
    permuted = PermutedArray(stack, jnp.roll(jnp.arange(16), 3).astype(jnp.uint32))
    program = lambda w: lax.scan(add_product, x, w)[0]
    arrays = [permuted, ScaledArray(stack, jnp.linspace(0.5, 2, 16)), eqq.arrays.LoraArray(permuted, *factors, 0.1, 1)]
    for w in arrays:
        np.testing.assert_allclose(eqq.quaxify(program)(w), program(w.dequantize()), rtol=1e-4, atol=1e-4)


def test_factors_of_two_ranks(square, getkey):
    factors = lambda rank: (weights(getkey(), (rank, 64)), weights(getkey(), (64, rank)))
    w, v = (eqq.arrays.LoraArray(eqq.quantize(square[0], "nf4"), *factors(n), alpha=1.0, in_ndim=1) for n in (2, 4))
    program = lambda w, v, x: x @ lax.cond(x[0, 0] > 0, lambda w, v: w, lambda w, v: v, w, v)
    expected = program(w.dequantize(), v.dequantize(), square[1])
    np.testing.assert_allclose(eqq.quaxify(program)(w, v, square[1]), expected, rtol=1e-4, atol=1e-4)


def test_a_stack_of_products_with_a_factor(getkey):
    w, x = eqq.quantize(weights(getkey(), (4, 48, 64)), "nf4"), weights(getkey(), (2, 64))
    program = lambda w, x: lax.scan(lambda n, w: (n, x @ w.T), 0, w * 2)[1]
    with eqq.no_dense():
        y = eqq.quaxify(program)(w, x)
    np.testing.assert_allclose(y, program(w.dequantize(), x), rtol=1e-4, atol=1e-4)


def test_a_stack_whose_layers_share_an_array(getkey):
    w = ScaledArray(eqq.quantize(weights(getkey(), (4, 48, 64)), "nf4"), 1 + jnp.arange(64.0))
    x, program = weights(getkey(), (2, 64)), lambda w, x: lax.scan(lambda n, w: (n, x @ w.T), 0, w)[1]
    np.testing.assert_allclose(eqq.quaxify(program)(w, x), program(w.dequantize(), x), rtol=1e-4, atol=1e-3)


@pytest.mark.long
def test_functions_with_rules_of_their_own(square):
    w, x = eqq.quantize(square[0], "nf4"), square[1]
    call = jax.custom_derivatives.linear_call(lambda w, x: x @ w, lambda w, y: y @ w.T, w.dequantize(), x)
    linear = lambda w, x: jax.custom_derivatives.linear_call(lambda w, x: x @ w, lambda w, y: y @ w.T, w, x)
    np.testing.assert_allclose(eqq.quaxify(linear)(w, x), call, rtol=1e-5, atol=1e-5)
    for program in (
        lambda w, x: jax.jit(lambda w: jnp.tanh(w), inline=False)(w) @ x.T,
        lambda w, x: x @ jax.nn.relu(w),
        lambda w, x: jnp.linalg.solve(w, x.T),
    ):
        check(program, w, x)
