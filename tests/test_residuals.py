"""Residuals in few bits: exact results, gradients near the exact ones, and the bytes that are saved."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jaxtyping
import numpy as np
import pytest

import eqquant as eqq
from eqquant._training.residuals import _find_divisors

from .helpers import weights


class Block(eqx.Module):
    """A layer like a transformer's: a norm, two products, a mask, and an integer index."""

    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 2)
        self.norm = eqx.nn.LayerNorm(32)
        self.up = eqx.nn.Linear(32, 128, key=keys[0])
        self.down = eqx.nn.Linear(128, 32, key=keys[1])

    def __call__(self, x, which=0):
        h = jax.vmap(self.up)(jax.vmap(self.norm)(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(h)).at[which].set(0) @ (2 * self.down.weight @ self.up.weight)


DOTS = jax.checkpoint_policies.dots_saveable
WAYS = {"int8": ("int8", None), "int4": ("int4", None), "nf4": ("nf4", None), "dots": ("int8", DOTS)}
ERRORS = {"int8": 0.012, "int4": 0.15, "nf4": 0.15, "dots": 0.012}


def gradients(block, x, wrap, **options):
    loss = lambda pair: jnp.sum(jnp.sin(wrap(pair[0])(pair[1], **options)))
    return eqx.filter_jit(eqx.filter_value_and_grad(loss))((block, x))


@pytest.mark.long
@pytest.mark.parametrize(
    "way", ["dots", *(pytest.param(way, marks=pytest.mark.slow) for way in ("int8", "int4", "nf4"))]
)
def test_gradients(getkey, way):
    format, policy = WAYS[way]
    block, x = Block(getkey()), weights(getkey(), (24, 32))
    wrap = lambda f: eqq.checkpoint_quantized(f, format, policy=policy)
    (exact, expected), (value, got) = (gradients(block, x, f, which=jnp.asarray(3)) for f in (lambda f: f, wrap))
    assert float(value) == pytest.approx(float(exact), rel=1e-4)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        error = float(jnp.linalg.norm(x - y))
        assert error < ERRORS[way] * float(jnp.linalg.norm(y)) and (error > 0 or y.size < 130)


DIVIDING = {
    "log": jnp.log,
    "tanh": jax.jit(lambda x: jnp.log(jnp.tanh(x))),
    "softmax": lambda x: -jnp.log(jax.nn.softmax(4 * x)),
    "quotient": lambda x: jax.lax.scan(lambda c, x: (c, jnp.cos(x) / x), 0.0, x)[1],
    "power": lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x**-2.5, jnp.sin, x),
}


@pytest.mark.parametrize("policy", [None, DOTS])
@pytest.mark.parametrize("name", list(DIVIDING))
def test_divisors_are_not_rounded(name, policy):
    """Int8 sends the first of these numbers to zero."""
    x, f = jnp.linspace(1e-3, 1, 128).reshape(1, 128), DIVIDING[name]
    of = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))))(x)
    got, exact = of(eqq.checkpoint_quantized(f, policy=policy)), of(f)
    assert float(jnp.linalg.norm(got - exact)) < 0.05 * float(jnp.linalg.norm(exact))


ZERO_AT_ZERO = [jnp.abs, jax.lax.asin, jax.lax.atan, jax.lax.cbrt, jax.lax.erf, jnp.expm1, lambda x: x**3, jnp.log1p]
ZERO_AT_ZERO += [lambda x: x * jnp.cos(x), jnp.negative, jax.lax.optimization_barrier, jnp.ravel, jnp.copy, jnp.sin]
ZERO_AT_ZERO += [lambda x: jnp.broadcast_to(x, (2, 3, 4)), lambda x: jnp.concatenate([x, x]), lambda x: x[None]]
ZERO_AT_ZERO += [lambda x: x.astype(jnp.bfloat16), lambda x: jax.lax.reduce_precision(x, 5, 10), jnp.flip, jnp.sinh]
ZERO_AT_ZERO += [lambda x: jax.lax.select(x > 1, x, 2 * x), lambda x: jax.lax.slice(x, (0, 1), (3, 3)), jnp.sqrt]
ZERO_AT_ZERO += [jnp.square, lambda x: jnp.squeeze(x[None]), jnp.tan, jnp.tanh, jnp.transpose, jax.jit(jnp.tanh)]
ZERO_AT_ZERO += [lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.tanh, x), jax.checkpoint(lambda x: 2 * jnp.tan(x))]
ZERO_AT_ZERO += [lambda x: jax.lax.scan(lambda c, row: (c, jnp.sin(row)), 0.0, x)[1]]


def test_what_a_backward_pass_divides_by():
    """Operands of divisions, and whatever these are zero with; not numerators, exponents and cosines."""
    x, one = jnp.ones((3, 4)), lambda x: jnp.ones_like(x)

    def finds(f, x=x):
        jaxpr = jax.make_jaxpr(f)(x).jaxpr
        return jaxpr.invars[0] in _find_divisors(jaxpr, set())

    for f in ZERO_AT_ZERO:
        name = jax.make_jaxpr(f)(x)
        assert finds(lambda x, f=f: 1 / f(x)), name
        assert finds(lambda x, f=f: jnp.log(f(x) * f(x))), name
        assert not finds(lambda x, f=f: f(x) / 2), name
    for f in (lambda x: jax.lax.rem(one(x), x), jnp.log, jax.lax.rsqrt, lambda x: x**0.3, lambda x: x**-2):
        assert finds(f)
    for f in (lambda x: jax.lax.rem(x, one(x)), lambda x: 2.0**x, lambda x: x**2, jnp.exp, lambda x: 1 / jnp.cos(x)):
        assert not finds(f)


def residual_nbytes(f, x):
    """The bytes that a function saves for its backward pass, besides its argument and what it closes over."""
    jaxpr = jax.make_jaxpr(lambda x: jax.tree.leaves(jax.vjp(f, x)[1]))(x).jaxpr
    known = {*jaxpr.invars, *jaxpr.constvars}
    saved = {v for v in jaxpr.outvars if not isinstance(v, jax.extend.core.Literal) and v not in known}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in saved)


def test_saved_bytes(getkey):
    block, x = Block(getkey()), weights(getkey(), (24, 32))
    count = lambda f: residual_nbytes(f, x)
    in_float = count(block)
    assert count(eqq.checkpoint_quantized(block)) < 0.35 * in_float
    assert count(eqq.checkpoint_quantized(block, "int4")) < 0.25 * in_float
    rows = 24 * (32 + 4)  # codes and a scale of each row
    product_bytes = 24 * (128 + 4) + 2 * rows
    assert count(eqq.checkpoint_quantized(block, policy=DOTS)) < 2 * (rows + product_bytes)
    assert count(jax.checkpoint(lambda x: block(x))) == 0 and residual_nbytes(lambda x: 2 * x, x) <= 4


def test_parameters_are_not_rounded(getkey):
    """A function that is linear in its argument needs only parameters, however they are computed, and so is exact."""
    w, x, dy = weights(getkey(), (32, 64)), weights(getkey(), (8, 64)), weights(getkey(), (8, 32))

    @jax.jit
    def both(w, x):
        f = lambda x: x @ jnp.tanh(w).T
        return jax.vjp(eqq.checkpoint_quantized(f, "int4"), x)[1](dy)[0], jax.vjp(f, x)[1](dy)[0]

    np.testing.assert_allclose(*both(w, x), rtol=1e-6, atol=1e-6)


@pytest.mark.long
def test_under_transformations(getkey):
    """`scan` over a stack, and `vmap` over examples around it."""
    keys, x = jr.split(getkey(), 3), weights(getkey(), (4, 6, 32))
    blocks = eqx.filter_vmap(Block)(keys)

    def loss(blocks, x, wrap):
        arrays, static = eqx.partition(blocks, eqx.is_array)
        body = lambda x, arrays: (wrap(eqx.combine(arrays, static))(x), None)
        return jnp.sum(jnp.sin(jax.vmap(lambda x: jax.lax.scan(body, x, arrays)[0])(x)))

    grad = lambda wrap: eqx.filter_jit(eqx.filter_grad(lambda b: loss(b, x, wrap)))(blocks)
    for got, exact in zip(*(jax.tree.leaves(grad(f)) for f in (eqq.checkpoint_quantized, lambda f: f)), strict=True):
        assert float(jnp.linalg.norm(got - exact)) < 0.02 * float(jnp.linalg.norm(exact))


@pytest.mark.slow
def test_forward_mode(getkey):
    block, x = Block(getkey()), weights(getkey(), (2, 6, 32))
    y, dy = jax.jvp(eqq.checkpoint_quantized(block), (x[0],), (x[1],))
    exact, expected = jax.jvp(block, (x[0],), (x[1],))
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
    assert float(jnp.linalg.norm(dy - expected)) < 0.02 * float(jnp.linalg.norm(expected))


def test_with_quantized_weights(getkey):
    """Codes of a weight are parameters: gradients pass through to the dense weight, and factors train."""
    block, x = eqq.quantize_tree(Block(getkey()), "int4"), weights(getkey(), (24, 32))
    loss = lambda wrap: lambda block: jnp.sum(jnp.sin(wrap(lambda x: jax.vmap(block.up)(x))(x)))
    got, exact = (
        eqx.filter_jit(eqq.filter_grad(loss(f)))(block).up.weight for f in (eqq.checkpoint_quantized, lambda f: f)
    )
    assert 0 < float(jnp.linalg.norm(got - exact)) < 0.02 * float(jnp.linalg.norm(exact))


def test_bad_format():
    with pytest.raises((TypeError, jaxtyping.TypeCheckError), match="Got 'int8'|'fun'"):
        eqq.checkpoint_quantized("int8")
    with pytest.raises((TypeError, jaxtyping.TypeCheckError), match="Got 'dots'|'policy'"):
        eqq.checkpoint_quantized(lambda x: x, policy="dots")
    with pytest.raises(ValueError, match="int9"):
        eqq.checkpoint_quantized(jnp.sin, "int9")
