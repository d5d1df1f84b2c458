"""What stays packed under `quaxify`: a table of operations of JAX and of classes of arrays."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import eqquant as eqq
from eqquant._wrappers.permuted import PermutedArray
from eqquant._wrappers.rotated import RotatedArray
from eqquant._wrappers.scaled import ScaledArray

from .helpers import primitives, weights


def nf4(w):
    return eqq.quantize(w, "nf4")


def scaled(w):
    scale = 1 + jr.uniform(jr.key(7), (w.shape[0], w.shape[-1]))
    return ScaledArray(nf4(w / scale[:, None]), scale)


def permuted(w):
    order = jr.permutation(jr.key(7), w.shape[-1]).astype(jnp.uint32)
    stack = jnp.broadcast_to(order, (w.shape[0], w.shape[-1]))
    return PermutedArray(nf4(w[..., order]), stack)


def with_factors(w):
    b, a = weights(jr.key(7), (4, w.shape[1], 2)), weights(jr.key(8), (4, 2, w.shape[2]))
    return eqq.arrays.LoraArray(nf4(w), a, b, alpha=1.0, in_ndim=1)


# Stacks of matrices `(4, 48, 64)`.
ARRAYS = {
    "nf4": nf4,
    "double quantization": lambda w: eqq.quantize(w, eqq.NF4(double_quant=True)),
    "zero points": lambda w: eqq.quantize(w, eqq.Int4(symmetric=False)),
    "offsets": lambda w: eqq.quantize(w, "q4_1"),
    "rows": lambda w: eqq.quantize(w, "int8"),
    "tensor": lambda w: eqq.quantize(w, eqq.Int8("tensor")),
    "microscaling": lambda w: eqq.quantize(w, "mxfp4"),
    "columns": lambda w: eqq.quantize(w, eqq.NF4(16), axis=-2),
    "scaled": scaled,
    "rotated": lambda w: dataclass_with(RotatedArray.of(w), nf4),
    "permuted": permuted,
    "factors": with_factors,
    "simulated": lambda w: eqq.arrays.FakeQuantizedArray(w, eqq.NF4(), -1, w.dtype),
    "activations": lambda w: eqq.arrays.ActivationQuantizedArray(nf4(w), "int8"),
    "static activations": lambda w: eqq.arrays.ActivationQuantizedArray(nf4(w), "int8", 0.04),
    "static by layer": lambda w: eqq.arrays.ActivationQuantizedArray(nf4(w), "int8", jnp.linspace(0.03, 0.04, 4)),
}


ALIKE = ("rows", "tensor", "microscaling")  # move as NF4 does


def dataclass_with(w, quantize):
    return eqx.tree_at(lambda w: w.array, w, quantize(w.array))


def product(w, x):
    return jnp.einsum("bi,oi->bo", x, w)


def in_loop(w, x):
    return lax.fori_loop(0, 2, lambda _, y: jnp.tanh(product(w[0], x)) + y, jnp.zeros((2, 48)))


identity, own_jvp, own_vjp = jax.custom_jvp(lambda w: w), jax.custom_jvp(product), jax.custom_vjp(product)
# Their rules return three times the derivative.
identity.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))
own_jvp.defjvp(
    lambda primals, tangents: jax.jvp(
        lambda w, x: (y := product(w, x)) + 2 * (y - lax.stop_gradient(y)), primals, tangents
    )
)
own_vjp.defvjp(lambda w, x: (product(w, x), (w, x)), lambda saved, dy: jax.vjp(product, *saved)[1](3 * dy))


def in_checkpointed_loop(w, x):
    step = lambda carry: (jnp.tanh(product(w[1], x)) + carry[0], carry[1] + 1)
    more = lambda carry: carry[1] < 2
    return eqx.internal.while_loop(more, step, (jnp.zeros((2, 48)), 0), kind="checkpointed", max_steps=4)[0]


# Functions of a stack and of `x`, `(2, 64)`, whose every product can be packed.
PROGRAMS = {
    "times one": lambda w, x: product(w[0] * 1, x),
    "times a scalar": lambda w, x: product(2.5 * w[1], x),
    "times a traced scalar": lambda w, x: product(w[1] * x[0, 0], x),
    "divided": lambda w, x: product(w[1] / (x[0, 0] + 9), x),
    "negated": lambda w, x: product(-(-w[1] / 2), x),
    "split": lambda w, x: product(jnp.split(w[1], 3)[1], x),
    "slice": lambda w, x: product(w[1, 8:40:2], x),
    "dynamic slice": lambda w, x: product(lax.dynamic_slice_in_dim(w[1], 7, 20), x),
    "reversed": lambda w, x: product(w[1][::-1], x),
    "concatenated": lambda w, x: jnp.concatenate([product(part, x) for part in (w[1], w[2])]),
    "joined halves": lambda w, x: product(jnp.concatenate(jnp.split(w[1], 2)), x),
    "joined layers": lambda w, x: product(jnp.concatenate([w[1], w[2]]), x),
    "joined stacks": lambda w, x: jnp.einsum("bi,loi->lbo", x, jnp.concatenate([w[2:], w[:1]])),
    "pad": lambda w, x: product(jnp.pad(w[1], ((0, 3), (0, 0))), x),
    "pad on both sides": lambda w, x: product(jnp.pad(w[1], ((2, 3), (0, 0)), constant_values=0.0), x),
    "pad under jit": lambda w, x: product(jax.jit(lambda w: jnp.pad(w, ((1, 0), (0, 0))))(w[1]), x),
    "pad layers": lambda w, x: jnp.einsum("bi,loi->lbo", x, jnp.pad(w, ((1, 2), (0, 0), (0, 0)))),
    "stop_gradient": lambda w, x: product(lax.stop_gradient(w[1]), x),
    "checkpoint": lambda w, x: jax.checkpoint(product)(w[1], x),
    "checkpoint with a policy": lambda w, x: jax.checkpoint(
        product, policy=jax.checkpoint_policies.everything_saveable, prevent_cse=False
    )(w[1], x),
    "custom_jvp": lambda w, x: own_jvp(w[1], x),
    "custom_vjp": lambda w, x: own_vjp(w[1], x),
    "custom_jvp of a weight": lambda w, x: product(identity(w[1]), x),
    "checkpointed loop": in_checkpointed_loop,
    "name": lambda w, x: product(checkpoint_name(w[1], "w"), x),
    "jit": lambda w, x: jax.jit(product)(w[1], x),
    "take": lambda w, x: product(jnp.take(w, 2, axis=0), x),
    "take several": lambda w, x: jnp.einsum("bi,loi->lbo", x, jnp.take(w, jnp.array([2, 0]), axis=0)),
    "index": lambda w, x: product(w[x[0].argmax() % 4], x),
    "index by vmap": lambda w, x: jax.vmap(lambda n, x: w[n] @ x)(jnp.array([3, 1]), x),
    "stack": lambda w, x: jnp.einsum("bi,loi->lbo", x, jnp.stack([w[1], w[3]])),
    "broadcast": lambda w, x: jnp.einsum("bi,boi->bo", x, jnp.broadcast_to(w[1], (2, *w.shape[1:]))),
    "expand and squeeze": lambda w, x: product(jnp.squeeze(w[1][None, None], (0, 1)), x),
    "unstack": lambda w, x: product(jnp.unstack(w)[2], x),
    "tile": lambda w, x: product(jnp.tile(w[1], (2, 1)), x),
    "copy": lambda w, x: product(jnp.copy(w[1]), x),
    "barrier": lambda w, x: product(*lax.optimization_barrier((w[1], x))),
    "transposed": lambda w, x: jnp.matmul(x, w[1].T),
    "swapped": lambda w, x: jnp.einsum("bi,lio->lbo", x, jnp.swapaxes(w, 1, 2)),
    "select": lambda w, x: product(lax.select_n(x[0, 0] > 0, w[1], w[2]), x),
    "where": lambda w, x: product(jnp.where(x[0, 0] > 0, w[1], w[1]), x),
    "scan": lambda w, x: lax.scan(lambda y, w: (y + product(w, x), None), jnp.zeros((2, 48)), w)[0],
    "loop": in_loop,
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda: product(w[1], x), lambda: product(w[2], x)),
    "vmap": lambda w, x: jax.vmap(product, (0, None))(w, x),
    "ragged_dot": lambda w, x: lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), jnp.array([1, 0, 1, 0])),
    "experts": lambda w, x: jnp.einsum("te,eoi,ti->to", jnp.tanh(x[:, :4]), w, x),
    "all experts": lambda w, x: jnp.einsum("ti,eoi->teo", x, w),
    "experts of tokens": lambda w, x: jnp.einsum("eti,eoi->eto", jnp.stack([x] * 4), w),
}
# Not packed, because the values of an array would no longer be exact, or its class has no form for it.
DENSE = {("columns", name) for name in ("split", "slice", "dynamic slice", "reversed", "tile")}
DENSE |= {("columns", name) for name in ("joined halves", "joined layers")}  # blocks would end within one
DENSE |= {("columns", name) for name in ("pad", "pad on both sides", "pad under jit")}
# Scales and factors of layers are not zero.
WRAPPED = ("scaled", "rotated", "permuted", "factors", "simulated", "activations", "static activations")
DENSE |= {(array, "pad layers") for array in (*WRAPPED, "static by layer")}
# Each layer has a scale, an order or a factor of its own for the inputs, and a matrix has one.
DENSE |= {(array, "joined layers") for array in ("scaled", "permuted", "factors", "static by layer")}


@pytest.fixture
def arguments(getkey):
    x = weights(getkey(), (1, 64))
    return weights(getkey(), (4, 48, 64)), jnp.concatenate([x, -x])


@pytest.mark.filterwarnings("ignore:.*its products quantize no activations:UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("array", [pytest.param(a, marks=pytest.mark.slow if a in ALIKE else ()) for a in ARRAYS])
def test_results_stay_packed(arguments, name, array):
    w, x = ARRAYS[array](arguments[0]), arguments[1]
    program = PROGRAMS[name]
    run = eqq.quaxify(program)
    if (array, name) not in DENSE:
        with eqq.no_dense():
            names = primitives(run, w, x)
        assert "quantized_matmul" in names and "dequantize" not in names
    close = ft.partial(np.testing.assert_allclose, rtol=1e-3, atol=5e-4)
    if isinstance(w, eqq.arrays.ActivationQuantizedArray) and (array, name) not in DENSE:
        close(jax.jit(run)(w, x), with_rounded_inputs(name, w, x))
        return
    for found, expected in zip(with_gradient(run)(w, x), with_gradient(program)(w.dequantize(), x), strict=True):
        close(found, expected)


# Leaves besides the codes move by rules of their own.
MOVES = [*("slice", "reversed", "joined halves", "joined layers", "joined stacks", "pad", "pad layers", "take several")]
MOVES += ["stack", "broadcast", "expand and squeeze", "swapped", "select", "ragged_dot", "experts of tokens"]
BY_VALUE = ["pad", "pad layers"]  # whose rules read a value, which a trace hides


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*its products quantize no activations:UserWarning")
def test_moves_of_wrappers(arguments):
    """Values alone of each pair, of which a sample of cases would leave out most."""
    x = arguments[1]
    run_all = lambda w, x: {name: PROGRAMS[name](w, x) for name in MOVES}  # one program compiles sooner than many
    packed, dense = jax.jit(eqq.quaxify(run_all)), jax.jit(run_all)
    for array in ("scaled", "rotated", "permuted", "factors", "static by layer"):
        w = ARRAYS[array](arguments[0])
        found, expected = packed(w, x), dense(w.dequantize(), x)
        if isinstance(w, eqq.arrays.ActivationQuantizedArray):
            rounded = [name for name in MOVES if (array, name) not in DENSE]
            expected |= jax.jit(lambda w, x: {name: with_rounded_inputs(name, w, x) for name in rounded})(w, x)
        eager = {name: eqq.quaxify(PROGRAMS[name])(w, x) for name in BY_VALUE}
        for name, value in [*found.items(), *eager.items()]:
            np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=5e-4, err_msg=f"{array}, {name}")


@ft.cache  # one program for the dense values of all classes
def with_gradient(f):
    """A compiled function of the result of `f`, and a gradient with respect to `x`."""

    def total(w, x):
        y = f(w, x)
        return jnp.sum(jnp.sin(y)), y

    def run(w, x):
        (_, y), gradient = jax.value_and_grad(total, argnums=1, has_aux=True)(w, x)
        return y, gradient

    return jax.jit(run)


def with_rounded_inputs(name, w, x):
    """Returns the results of a program whose products round `x`, to the scale of each layer."""

    def round_inputs(x):  # `(..., layers, inputs)`
        if w.scale is None:
            scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
        else:
            scale = w.scale.reshape(*[1] * (x.ndim - 2), -1, 1)
        return jnp.clip(jnp.round(x / scale), -127, 127) * scale

    if name == "experts":  # `einsum` multiplies gates and inputs first, and rounds the products
        return jnp.einsum("eoi,tei->to", w.dequantize(), round_inputs(jnp.tanh(x[:, :4, None]) * x[:, None]))
    # The rows of `x` differ by their sign alone. So rounding multiplies each input of a layer by a ratio of its own.
    ratio = round_inputs(x[:1]) / x[:1]
    return PROGRAMS[name](w.dequantize() * ratio[:, None], x)


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit])
@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp", "checkpointed loop"])
def test_gradients_of_weights_take_the_rule_of_a_user(arguments, name, compile):
    q, x = nf4(arguments[0]), arguments[1]
    total = lambda f: lambda w: jnp.sum(jnp.sin(f(w, x)))
    gradient = eqx.filter_jit(eqq.filter_grad(total(compile(eqq.quaxify(PROGRAMS[name])))))(q)
    (found,) = jax.tree.leaves(eqx.filter(gradient, eqx.is_inexact_array))
    expected = eqx.filter_jit(jax.grad(total(PROGRAMS[name])))(q.dequantize())
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("prevent_cse", [True, False, (True, False)])
def test_checkpoint_keeps_prevent_cse(arguments, prevent_cse):
    """For each operand at most: the codes are several, so one that prevents it stands for all."""
    run = eqq.quaxify(jax.checkpoint(product, prevent_cse=prevent_cse))
    (equation,) = jax.make_jaxpr(run)(nf4(arguments[0][1]), arguments[1]).eqns
    assert equation.params["prevent_cse"] is (prevent_cse is not False)


def test_products_of_codes_and_codes(arguments):
    w, x = (eqq.quantize(a, "int8") for a in (arguments[0][1], arguments[1]))
    traced = jax.make_jaxpr(eqq.quaxify(product))(w, x)
    (found,) = [e for e in traced.eqns if e.primitive.name == "quantized_matmul"]
    assert "QuantizedArray" in str(found.params["x_tree"])


def test_custom_jvp_of_codes_and_floats(arguments):
    w, x, pair = nf4(arguments[0][1]), arguments[1], jax.custom_jvp(lambda w, x: (w, 2 * x))
    pair.defjvp(lambda primals, tangents: (pair(*primals), (tangents[0], 2 * tangents[1])))
    program = lambda w, x: product(*pair(w, x))
    with eqq.no_dense():
        y = eqq.quaxify(program)(w, x)
    np.testing.assert_allclose(y, program(w.dequantize(), x), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*its products quantize no activations:UserWarning")
@pytest.mark.parametrize("array", ARRAYS)
def test_pads_that_become_dense(arguments, array):
    """Other values than zero, a value that is traced, and other modes."""
    w, x = ARRAYS[array](arguments[0]), arguments[1]
    sides = ((0, 0), (1, 2), (0, 0))
    for pad in (
        lambda w, x: jnp.pad(w, sides, constant_values=2),
        lambda w, x: jnp.pad(w, sides, constant_values=x[0, 0]),
        lambda w, x: jnp.pad(w, sides, constant_values=jnp.nan),
        lambda w, x: jnp.pad(w, sides, mode="edge"),
        lambda w, x: jnp.pad(w * jnp.inf, sides),
    ):
        expected = np.asarray(pad(w.dequantize(), x))
        for run in (eqq.quaxify(pad), jax.jit(eqq.quaxify(pad))):
            np.testing.assert_allclose(np.asarray(run(w, x)), expected, rtol=1e-6)
