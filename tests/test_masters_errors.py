"""Errors of float masters: each names the leaf, the value and the remedy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
import pytest

import eqquant as eqq

from .helpers import arrays, assert_same, loss, mlp, weights


lr = 1e-2


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        yield


@pytest.fixture
def setting(getkey):
    model = eqq.quantize_tree(mlp(getkey()), {"layers.0.*": "int8", "layers.1.*": None})
    optim = eqq.float_masters(optax.adam(lr))
    return model, optim, optim.init(model), eqx.filter_jit(eqq.filter_grad(loss))(model, jnp.ones((2, 20)))


def test_no_parameters(setting):
    model, optim, state, grads = setting
    with pytest.raises(ValueError, match=r"needs the parameters. Got none. Call `optim.update\(grads, state, model\)`"):
        optim.update(grads, state)


@pytest.mark.parametrize("wrapper", ["float_masters", "train_only"])
def test_multi_steps_outside(setting, wrapper):
    """It would add up codes, and end in an error about pytrees."""
    params = eqx.filter(setting[0], eqx.is_array)
    mask = eqq.trainable_mask(params)
    wrap = eqq.float_masters if wrapper == "float_masters" else lambda optimizer: eqq.train_only(optimizer, mask)
    with pytest.raises(ValueError, match=rf"MultiSteps` must be inside.*Write `eqq.{wrapper}\(optax.MultiSteps\("):
        optax.MultiSteps(wrap(optax.sgd(lr)), 2).init(params)
    wrap(optax.MultiSteps(optax.sgd(lr), 2)).init(params)


def test_gradients_of_equinox(setting):
    model, optim, state, _ = setting
    grads = eqx.filter_jit(eqx.filter_grad(loss))(model, jnp.ones((2, 20)))
    with pytest.raises(ValueError, match=r"Got none for layers\.0\.weight. Differentiate with `eqq.filter_value"):
        optim.update(grads, state, model)
    with pytest.raises(ValueError, match="To freeze it, wrap the optimizer in `eqq.train_only`"):
        optim.update(grads, state, model)


def test_a_missing_gradient(setting):
    model, optim, state, grads = setting
    grads = eqx.tree_at(lambda g: g.layers[1].bias, grads, None)
    with pytest.raises(ValueError, match=r"Got none for layers\.1\.bias"):
        optim.update(grads, state, model)


def test_gradients_of_another_shape_or_structure(setting):
    model, optim, state, grads = setting
    wrong = eqx.tree_at(lambda g: g.layers[0].weight, grads, jnp.ones((3, 3)))
    with pytest.raises(ValueError, match=r"Got \(3, 3\) for layers\.0\.weight, \(40, 20\)"):
        optim.update(wrong, state, model)
    with pytest.raises(ValueError, match="Gradients must have the structure of the parameters"):
        optim.update({"weight": jnp.ones(3)}, state, model)


def test_nothing_quantized(getkey):
    with pytest.raises(ValueError, match=r"needs quantized parameters to train. Got none among .*layers\.0\.weight"):
        eqq.float_masters(optax.sgd(lr)).init(mlp(getkey()))
    with pytest.raises(ValueError, match=r"\(none\)"):
        eqq.float_masters(optax.sgd(lr)).init({"ids": jnp.arange(3)})


def test_parameters_without_codes(setting):
    model, optim, state, grads = setting
    with pytest.raises(ValueError, match=r"Got layers\.0\.weight without its codes"):
        optim.init(eqx.filter(model, eqx.is_inexact_array))
    with pytest.raises(ValueError, match=r"Got layers\.0\.weight without its codes"):
        optim.update(grads, state, eqx.filter(model, eqx.is_inexact_array))


def test_a_state_of_another_optimizer(setting, getkey):
    model, optim, state, grads = setting
    params = arrays(model)
    with pytest.raises(ValueError, match="needs the state that its `init` returns. Got a tuple"):
        optim.update(grads, optax.adam(lr).init(params), model)
    other = eqq.quantize_tree(mlp(getkey()), "int8")
    with pytest.raises(ValueError, match=r"Got None for layers\.1\.weight, whose master is of shape \(3, 40\)"):
        eqq.float_masters(optax.adam(lr)).update(eqq.filter_grad(loss)(other, jnp.ones((2, 20))), state, other)
    with pytest.raises(ValueError, match="Got masters of another structure"):
        optim.update(grads, state._replace(masters=()), model)


@pytest.mark.parametrize("wrap", [eqq.float_masters, eqq.quantize_state])
def test_an_optimizer_that_is_not_called(wrap):
    with pytest.raises(TypeError, match=r"Got `adamw`. A function that makes one must be called"):
        wrap(optax.adamw)


@pytest.mark.long
def test_masters_of_another_model(getkey):
    float_model, other = mlp(getkey()), mlp(getkey())
    for format in ("int8", "int4", "ternary", "binary"):
        model = eqq.quantize_tree(float_model, format)
        with pytest.raises(ValueError, match=r"Got another array for layers\.0\.weight: it is further"):
            eqq.float_masters(optax.sgd(lr), masters=other).init(model)
        half = jtu.tree_map(lambda a: a.astype(jnp.bfloat16) if eqx.is_array(a) else a, float_model)
        stochastic = eqq.quantize_tree(float_model, format, key=getkey())
        for q, masters in ((model, half), (stochastic, float_model)):
            eqq.float_masters(optax.sgd(lr), masters=masters).init(q)


def test_masters_that_do_not_fit(setting, getkey):
    model, *_ = setting
    for masters, message in [
        (model, r"Got a quantized array for layers\.0\.weight"),
        ({"layers": ()}, r"Got nothing for layers\.0\.weight"),
        (eqx.nn.MLP(21, 3, 40, 2, key=getkey()), r"Got \(40, 21\) for layers\.0\.weight, of \(40, 20\)"),
        (eqx.tree_at(lambda m: m.layers[0].weight, mlp(getkey()), jnp.ones((40, 20), int)), r"layers\.0\.weight"),
    ]:
        with pytest.raises(ValueError, match=message):
            eqq.float_masters(optax.sgd(lr), masters=masters).init(model)


def test_dense_updates_are_refused(setting):
    model, _, _, grads = setting
    with pytest.raises(ValueError, match=r"Got a .* for layers\.0\.weight. Wrap the optimizer in `eqq.float_masters`"):
        eqq.apply_updates(model, grads)
    with pytest.raises(ValueError, match="`updates` must have the structure of the model"):
        eqq.apply_updates(model, {"w": jnp.ones(2)})


@pytest.mark.parametrize("whole", [True, False])
def test_a_plain_optimizer_on_floats_alone(whole, setting):
    """A quantized array without its codes is an error with a remedy."""
    q, _, _, grads = setting
    x = jnp.ones((2, 20))
    floats = eqx.filter(q, eqx.is_inexact_array)
    optim, params = optax.adamw(1e-3), q if whole else floats
    state = optim.init(floats)
    with pytest.raises(ValueError, match=r"must hold its codes.*`optim = eqq.float_masters\(optimizer\)`"):
        optim.update(grads, state, params)
    updates, _ = optim.update(eqx.filter_jit(eqx.filter_grad(loss))(q, x), state, params)
    with pytest.raises(ValueError, match=r"Got none for layers\.0\.weight. Differentiate with `eqq.filter_value_and"):
        eqq.apply_updates(q, updates)
    moved = eqx.apply_updates(q, updates)  # floats alone
    assert_same(moved.layers[0].weight, q.layers[0].weight)
    assert jnp.any(moved.layers[0].bias != q.layers[0].bias)
    assert_same(eqq.apply_updates(floats, updates).layers[0].bias, moved.layers[0].bias)


def test_scaled_updates_are_refused(setting):
    model, _, _, grads = setting
    model, optim = arrays(model), optax.chain(eqq.float_masters(optax.scale_by_adam()), optax.scale(-lr))
    updates, _ = optim.update(arrays(grads), optim.init(model), model)
    with pytest.raises(ValueError, match=r"Got float32 for layers\.0\.weight. Nothing that scales updates may come"):
        eqq.apply_updates(model, updates)


def test_updates_of_another_shape_or_dtype(getkey):
    q = eqq.quantize(weights(getkey(), (4, 8)), "int8")
    for x, by in (
        (jnp.ones(3), jnp.ones((2, 3))),
        (jnp.ones(3), jnp.ones(3, complex)),
        (q, jtu.tree_map(lambda a: a[:1], q)),
    ):
        with pytest.raises(ValueError, match=r"An update must have the shape of its parameter, and be real .* for w,"):
            eqq.apply_updates({"w": x}, {"w": by})
    assert eqq.apply_updates({"a": 1.0}, {"a": 1.0}) == {"a": 2.0}


def test_apply_updates_keeps_leaves_without_an_update(setting):
    model, *_ = setting
    assert_same(
        arrays(eqq.apply_updates(model, jtu.tree_map(lambda _: None, model, is_leaf=eqq.is_quantized))), arrays(model)
    )
