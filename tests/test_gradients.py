"""Gradients with respect to quantized arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq

from .helpers import assert_close, assert_same, FORMATS, KINDS, primitives, weights


def mlp(key):
    return eqx.nn.MLP(20, 3, 40, 2, key=key)


def loss(model, x):
    return jnp.mean(jnp.sin(jax.vmap(model)(x)))


def dense_grads(f, model, *args, **kwargs):
    """What the same function's gradients are at the dense model."""
    return eqx.filter_grad(f, **kwargs)(eqq.dequantize_tree(model), *args)


@pytest.mark.parametrize("name", KINDS)
def test_equals_the_gradient_at_the_dense_model(name, getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), FORMATS[name].format), weights(getkey(), (7, 20))
    value, grads = eqx.filter_jit(eqq.filter_value_and_grad(loss))(model, x)
    np.testing.assert_array_equal(np.asarray(value), np.asarray(eqx.filter_jit(loss)(model, x)))
    assert_close(grads, dense_grads(loss, model, x), tol=1e-5)
    for grad, layer in zip(grads.layers, model.layers, strict=True):
        assert isinstance(grad.weight, jax.Array)
        assert (grad.weight.shape, grad.weight.dtype) == (layer.weight.shape, layer.weight.dtype)


USES = {
    "q @ x": lambda q, x: q @ x,
    "x @ q": lambda q, x: x.T @ q,
    "q.T @ x": lambda q, x: q.T @ x[:6],
    "q[i]": lambda q, x: q[jnp.array([0, 2, 2])] * 3.0,
    "q[i, j:]": lambda q, x: q[1, 3:] * 3.0,
    "q * 2": lambda q, x: q * 2.0,
    "jnp": lambda q, x: jnp.sin(q),
    "lax": lambda q, x: jax.lax.sin(q),
    "einsum": lambda q, x: jnp.einsum("oi,ib->bo", q, x),
    "quaxify": lambda q, x: eqq.quaxify(lambda q, x: jnp.einsum("oi,ib->bo", q, x))(q, x),
    "reshape": lambda q, x: q.reshape(2, 3, 70)[1],
    "astype": lambda q, x: q.astype(jnp.bfloat16).astype(jnp.int32).astype(jnp.float32) + eqq.dequantize(q) ** 2,
    "vmap": lambda q, x: jax.vmap(lambda row: row @ x)(q) if not eqq.is_quantized(q) else (q @ x),
    "tree_map": lambda q, x: jtu.tree_map(lambda leaf: leaf[2:4], q) @ x,
    "checkpoint": lambda q, x: jax.checkpoint(lambda q, x: jnp.sin(q @ x))(q, x),
    "cond": lambda q, x: jax.lax.cond(x[0, 0] > 0, lambda: q @ x, lambda: 2 * (q @ x)),
}


@pytest.mark.parametrize("use", USES)
def test_gradients_of_every_use(use, getkey):
    q, x = eqq.quantize(weights(getkey(), (6, 70)), "int8"), weights(getkey(), (70, 6))
    x = x if use != "x @ q" else x[:6]
    f = lambda q, x: jnp.sum(jnp.sin(USES[use](q, x)))
    assert_close(eqx.filter_jit(eqq.filter_grad(f))(q, x), jax.grad(f)(q.dequantize(), x), tol=1e-5)
    assert_close(eqq.filter_grad(f)(q, x), jax.grad(f)(q.dequantize(), x), tol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gradients_along_every_axis(axis, getkey):
    q, x = eqq.quantize(weights(getkey(), (3, 6, 70)), "nf4", axis=axis), weights(getkey(), (3, 70, 2))
    f = lambda q: jnp.sum(jnp.sin(q @ x))
    assert_close(eqq.filter_grad(f)(q), jax.grad(f)(q.dequantize()), tol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda key: eqx.nn.Conv2d(3, 4, 3, key=key), (3, 8, 8)),
        (lambda key: eqx.nn.ConvTranspose1d(3, 4, 3, key=key), (3, 8)),
        (lambda key: eqx.nn.GRUCell(8, 9, key=key), None),
    ],
)
def test_layers(make, shape, getkey):
    model = eqq.quantize_tree(make(getkey()), "int8")
    args = (weights(getkey(), shape),) if shape else (weights(getkey(), (8,)), weights(getkey(), (9,)))
    f = lambda model: jnp.sum(jnp.sin(model(*args)))
    assert_close(eqq.filter_grad(f)(model), dense_grads(f, model), tol=1e-5)


@pytest.mark.long
def test_embedding(getkey):
    model = eqq.quantize_tree(eqx.nn.Embedding(10, 64, key=getkey()), "nf4")
    f = lambda model: jnp.sum(jnp.sin(jax.vmap(model)(jnp.array([1, 3, 3]))))
    grads = eqq.filter_grad(f)(model)
    assert_close(grads, dense_grads(f, model), tol=1e-5)
    assert jnp.flatnonzero(jnp.any(grads.weight != 0, axis=-1)).tolist() == [1, 3]


def stack_weights(key):
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(jr.split(key, 3))

    def run(stack, x):
        arrays, static = eqx.partition(stack, eqx.is_array)
        layer = lambda x, a: (jnp.tanh(jax.vmap(eqx.combine(a, static))(x)), None)
        return jnp.sum(jax.lax.scan(layer, x, arrays)[0] ** 2)

    return stack, run


@pytest.mark.long
def test_scan_over_layers(getkey):
    stack, run = stack_weights(getkey())
    model, x = eqq.quantize_tree(stack, "nf4"), weights(getkey(), (5, 16))
    assert_close(eqq.filter_grad(run)(model, x), dense_grads(run, model, x), tol=1e-5)


@pytest.mark.long
def test_vmap_over_models_and_over_inputs(getkey):
    models, x = eqq.quantize_tree(eqx.filter_vmap(mlp)(jr.split(getkey(), 2)), "int8"), weights(getkey(), (4, 7, 20))
    over_models = eqx.filter_vmap(eqq.filter_grad(loss), in_axes=(eqx.if_array(0), None))(models, x[0])
    one = jtu.tree_map(lambda a: a[1] if eqx.is_array(a) else a, models)
    assert_close(jtu.tree_map(lambda a: a[1], over_models), dense_grads(loss, one, x[0]), tol=1e-5)
    over_inputs = jax.vmap(lambda x: eqq.filter_grad(loss)(one, x))(x)
    assert_close(jtu.tree_map(lambda a: a[2], over_inputs), dense_grads(loss, one, x[2]), tol=1e-5)


@pytest.mark.long
def test_second_derivatives(getkey):
    q, x, v = eqq.quantize(weights(getkey(), (4, 64)), "int8"), weights(getkey(), (64,)), weights(getkey(), (4, 64))
    f = lambda q, x: jnp.sum(jnp.sin(q @ x))

    def penalty(q, x):  # of the gradient with respect to the input, as in adversarial training
        return jnp.sum(jax.grad(f, argnums=1)(q, x) ** 2)

    assert_close(eqq.filter_grad(penalty)(q, x), jax.grad(penalty)(q.dequantize(), x), tol=1e-5)
    mixed = jax.jacfwd(lambda x: eqq.filter_grad(f)(q, x))(x)
    assert_close(mixed, jax.jacfwd(lambda x: jax.grad(f)(q.dequantize(), x))(x), tol=1e-5)
    inner = lambda q: jnp.sum(eqq.filter_grad(f)(q, x) * v)
    assert_close(eqq.filter_grad(inner)(q), jax.grad(lambda w: jnp.sum(jax.grad(f)(w, x) * v))(q.dequantize()), 1e-5)


@pytest.mark.long
def test_mixed_models_and_dtypes(getkey):
    model = eqq.quantize_tree(mlp(getkey()), {"layers.1.*": "int4", "layers.2.*": "nf4"}, dtype=jnp.bfloat16)
    x = weights(getkey(), (7, 20))
    with jax.numpy_dtype_promotion("standard"):
        grads = eqq.filter_grad(loss)(model, x)
    assert [layer.weight.dtype for layer in grads.layers] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]


@pytest.mark.long
def test_has_aux_and_keywords(getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), "int8"), weights(getkey(), (7, 20))

    @eqq.filter_value_and_grad(has_aux=True)
    def f(model, x, *, scale):
        """Its docstring."""
        return scale * loss(model, x), {"mean": x.mean(), "name": "aux"}

    (value, aux), grads = f(model, x, scale=2.0)
    assert f.__doc__ == "Its docstring." and aux["name"] == "aux"
    assert_close(value, 2 * loss(model, x))
    assert_close(grads, jtu.tree_map(lambda g: 2 * g, eqq.filter_grad(loss)(model, x)))
    grads, aux = eqq.filter_grad(lambda m, x: (loss(m, x), 3), has_aux=True)(model, x)
    assert aux == 3 and grads.layers[0].weight.shape == (40, 20)


@pytest.mark.long
def test_filter_spec(getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), "int8"), weights(getkey(), (7, 20))
    everything = eqq.filter_grad(loss)(model, x)
    # A tree of booleans, a prefix of one, and functions.
    nothing = jtu.tree_map(lambda _: False, model, is_leaf=eqq.is_quantized)
    for wanted in (True, lambda leaf: eqq.is_quantized(leaf) or eqx.is_array(leaf)):
        spec = eqx.tree_at(lambda m: m.layers[0], nothing, wanted)
        grads = eqq.filter_grad(loss, filter_spec=spec)(model, x)
        assert_close(grads.layers[0].weight, everything.layers[0].weight)
        assert grads.layers[1].weight is None and grads.layers[1].bias is None
    biases = eqq.filter_grad(loss, filter_spec=lambda leaf: not eqq.is_quantized(leaf))(model, x)
    assert biases.layers[0].weight is None and biases.layers[0].bias.shape == (40,)


def test_filter_spec_made_by_tree_map(getkey):
    # It goes inside of quantized arrays, whose parts must agree.
    model, x = eqq.quantize_tree(mlp(getkey()), "int8"), weights(getkey(), (7, 20))
    spec = eqx.tree_at(lambda m: m.layers[-1].bias, jtu.tree_map(lambda _: False, model), True)
    grads = eqq.filter_grad(loss, filter_spec=spec)(model, x)
    assert grads.layers[-1].bias is not None and grads.layers[0].weight is None
    everything = eqq.filter_grad(loss, filter_spec=jtu.tree_map(eqx.is_array, model))(model, x)
    assert_close(everything, eqq.filter_grad(loss)(model, x))
    spec = eqx.tree_at(lambda m: m.layers[0].weight.codes, spec, True)
    with pytest.raises(ValueError, match="`filter_spec` must select a quantized array as a whole"):
        eqq.filter_grad(loss, filter_spec=spec)(model, x)


def test_a_model_in_aux_is_the_model(getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), "int8"), weights(getkey(), (7, 20))
    _, aux = eqq.filter_grad(lambda m: (loss(m, x), {"model": m}), has_aux=True)(model)
    assert jtu.tree_structure(aux["model"]) == jtu.tree_structure(model)
    assert_same(aux["model"].layers[0].weight, model.layers[0].weight)
    # In a gradient of a gradient it carries the outer gradient.
    inner = lambda m: eqq.filter_grad(lambda m: (loss(m, x), m), has_aux=True)(m)[1]
    assert_close(eqq.filter_grad(lambda m: loss(inner(m), x))(model), eqq.filter_grad(loss)(model, x))


def test_partitioned_models(getkey):
    model, x = eqq.quantize_tree(mlp(getkey()), "int8"), weights(getkey(), (7, 20))
    trained, frozen = eqx.partition(model, eqq.trainable_mask(model))
    assert eqq.is_quantized(trained.layers[0].weight) and frozen.layers[0].weight.codes is None
    grads = eqq.filter_grad(lambda trained: loss(eqx.combine(trained, frozen), x))(trained)
    assert_close(grads, eqq.filter_grad(loss)(model, x))


def test_other_leaves_have_no_gradient(getkey):
    tree = {"q": eqq.quantize(weights(getkey(), (3, 64)), "int4"), "ids": jnp.arange(3), "key": getkey(), "f": jnp.sin}
    grads = eqq.filter_grad(lambda tree: jnp.sum(tree["q"] @ jnp.ones(64)))(tree)
    assert grads["ids"] is grads["key"] is grads["f"] is None and grads["q"].shape == (3, 64)


@pytest.mark.long
def test_forward_makes_no_dense_copy(getkey):
    # 4096 x 4096 in float32 is 64 MiB. The gradient itself is an output.
    q, x = eqq.quantize(weights(getkey(), (4096, 4096)), "nf4"), jnp.ones((4, 4096))
    layers = [q, q, q]

    def f(layers, x):
        for q in layers:
            x = jnp.sin(x @ q.T)
        return jnp.sum(x)

    def memory(f):
        return jax.jit(f).lower(layers, x).compile().memory_analysis()

    both = memory(eqq.filter_value_and_grad(f))
    assert both.output_size_in_bytes > 3 * 2**26 and both.temp_size_in_bytes < 2**24
    # Where the gradient of a weight is not asked for, none is made.
    last = memory(eqq.filter_value_and_grad(f, filter_spec=[False, False, True]))
    assert last.output_size_in_bytes < 2**26 + 2**16 and last.temp_size_in_bytes < 2**24


def test_runs_the_quantized_matmul_both_ways(getkey):
    model = eqq.quantize_tree(mlp(getkey()), "int4")
    # Three products forward and, as the input needs no gradient, two backward.
    assert primitives(eqq.filter_grad(loss), model, jnp.ones((7, 20))).count("quantized_matmul") == 5


@pytest.mark.long
def test_gradient_leaves_exist_only_while_differentiating(getkey):
    model = eqq.quantize_tree(mlp(getkey()), "int4")
    seen = []
    eqq.filter_grad(lambda model: (seen.append(model), loss(model, jnp.ones((2, 20))))[1])(model)
    assert seen[0].layers[0].weight.gradient_of is not None and model.layers[0].weight.gradient_of is None
    assert isinstance(seen[0].layers[0].weight, eqq.QuantizedArray)


def test_trainable_mask(getkey):
    model = eqq.quantize_tree(mlp(getkey()), {"layers.0.*": "int8"})
    mask = eqq.trainable_mask(model)
    assert mask.layers[0].weight is True and mask.layers[1].weight is True and mask.activation is False
    assert eqq.trainable_mask({"ids": jnp.arange(3), "w": np.ones(3, np.float32)}) == {"ids": False, "w": True}


def test_nothing_to_differentiate(getkey):
    with pytest.raises(ValueError, match="must hold something to differentiate"):
        eqq.filter_grad(lambda tree: jnp.float32(0))({"ids": jnp.arange(3)})
    with pytest.raises(ValueError, match="`mine` must hold something to differentiate"):

        def mine(model):
            return loss(model, jnp.ones((1, 20)))

        eqq.filter_grad(mine, filter_spec=False)(mlp(getkey()))


def test_spec_of_another_structure(getkey):
    with pytest.raises(ValueError):
        eqq.filter_grad(loss, filter_spec={"no": True})(mlp(getkey()), jnp.ones((1, 20)))


def test_inside_shard_map(getkey):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    q, x = eqq.quantize(weights(getkey(), (4, 64)), "int8"), weights(getkey(), (8, 64))

    def f(q, x):
        each = jax.shard_map(lambda q, x: jnp.sin(x @ q.T), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
        return jnp.sum(each(q, x))

    assert_close(eqq.filter_grad(f)(q, x), jax.grad(f)(q.dequantize(), x), tol=1e-5)
