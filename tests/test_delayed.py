"""Delayed scaling: several steps against a NumPy model of it, where magnitudes come from, and who may not see them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq

from .helpers import weights
from .test_low_precision import close, loss, Network, relative


@pytest.fixture
def operands(getkey):
    return weights(getkey(), (20, 40)), weights(getkey(), (24, 40)), weights(getkey(), (20, 24))


def magnitudes(*arrays):
    return np.array([np.abs(np.asarray(a)).max() for a in arrays], np.float32)


def delayed(w, format="fp8", largest=None, **options):
    model = eqq.low_precision_training({"w": w}, format, delayed=True, **{"stochastic": False, **options})
    return model if largest is None else eqx.tree_at(lambda m: m["w"].amax, model, jnp.asarray(largest))


def observe_amax(function, model, *args):
    """What a step saw: the gradient of the largest magnitudes."""
    return eqx.filter_jit(eqx.filter_grad(function))(model, *args)["w"].amax


def product(model, x, dy):
    return jnp.sum(x @ model["w"].T * dy)


gradient = jax.jit(jax.grad(product))


# Values


def round_by_amax(x, kind, largest):
    """The values of an array that is scaled by a largest magnitude, in float64."""
    x = np.asarray(x, np.float32)
    end, dtype = {
        "int8": (127, None),
        "e4m3": (448, ml_dtypes.float8_e4m3fn),
        "e5m2": (57344, ml_dtypes.float8_e5m2),
    }[kind]
    scale = np.float32(largest) / np.float32(end)
    codes = np.clip(x / scale, -end, end)
    return (np.round(codes) if dtype is None else codes.astype(dtype)).astype(np.float64) * np.float64(scale)


@pytest.mark.long
@pytest.mark.parametrize(("format", "kinds"), [("fp8", ("e4m3", "e4m3", "e5m2")), ("int8", ("int8",) * 3)])
def test_steps_equal_numpy(operands, format, kinds):
    """The three products of each step, whose operands grow and shrink, and the history; with a margin."""
    x, w, dy = operands
    model, lr = delayed(w, format), 0.01
    optim = eqq.delayed_scaling(optax.sgd(lr), history=2, margin=0.5)
    state = optim.init(model)

    @jax.jit
    def step(model, state, x, dy):
        product = lambda model, x: jax.vmap(lambda row: model["w"] @ row)(x)
        y, pull = jax.vjp(product, model, x)
        grads, dx = pull(dy)
        updates, state = optim.update(grads, state, model)
        return optax.apply_updates(model, updates), state, (y, dx, grads)

    history = np.zeros((2, 3), np.float32)
    for n, factor in enumerate((1.0, 3.0, 1.5, 0.1, 0.1, 0.05)):
        factors, before = (factor, 1 / factor), np.asarray(model["w"].array)
        scaled = x * factors[0], dy * factors[1]
        now = magnitudes(scaled[0], before, scaled[1])
        largest = np.where(history.max(0) > 0, history.max(0) * np.float32(2**0.5), now)
        model, state, (y, dx, grads) = step(model, state, *scaled)
        rounded_x, rounded_w, rounded_dy = (
            round_by_amax(*a) for a in zip((scaled[0], before, scaled[1]), kinds, largest, strict=True)
        )
        close(y, rounded_x, rounded_w)
        close(dx, rounded_dy, rounded_w.T)
        close(grads["w"].array, rounded_dy.T, rounded_x.T)
        np.testing.assert_array_equal(grads["w"].amax, now)
        history = np.stack([now, history[0]])
        np.testing.assert_array_equal(np.asarray(state.history["['w']"]), history.T)
        np.testing.assert_allclose(model["w"].amax, history.max(0) * np.float32(2**0.5), rtol=1e-6)
        np.testing.assert_allclose(model["w"].array, before - lr * np.asarray(grads["w"].array), rtol=1e-5, atol=1e-6)
        assert n == 0 or (np.abs(rounded_x).max() < now[0] * 0.99) == (factor == 3.0)  # clipped where it grew


def test_values_above_the_amax_are_clipped(operands):
    x, w, dy = operands
    model = delayed(w, "fp8", magnitudes(x, w, dy))
    for factor in (4, 1e30):
        y = (factor * x) @ model["w"].T
        close(y, round_by_amax(factor * x, "e4m3", magnitudes(x)[0]), round_by_amax(w, "e4m3", magnitudes(w)[0]))
        assert jnp.isfinite(gradient(model, x, factor * dy)["w"].array).all()


def test_stochastic_rounding(operands):
    x, w, dy = operands
    largest = magnitudes(x, w, dy)
    one, other = (gradient(delayed(w, "int8", largest, stochastic=s), x, dy)["w"].array for s in (True, False))
    assert not (one == other).all() and relative(one, other) < 0.02


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_not_finite(operands, format, bad):
    """One value spoils its product, and the step's magnitude; the history takes it for none, and the next is well."""
    x, w, dy = operands
    model = delayed(w, format, magnitudes(x, w, dy))
    optim = eqq.delayed_scaling(optax.sgd(0.0), history=2)
    state = optim.init(model)
    y, pull = jax.vjp(lambda m, x: x @ m["w"].T, model, x.at[3, 5].set(bad))
    grads, dx = pull(dy.at[2, 7].set(bad))
    assert not jnp.isfinite(y).any() and not jnp.isfinite(dx).any() and not jnp.isfinite(grads["w"].array).any()
    np.testing.assert_array_equal(jnp.isfinite(grads["w"].amax), [False, True, False])
    for _ in range(2):
        grads["w"] = eqx.tree_at(lambda w: w.array, grads["w"], jnp.zeros_like(w))
        updates, state = optim.update(grads, state, model)
        model = eqx.apply_updates(model, updates)
    np.testing.assert_array_equal(model["w"].amax, [0, magnitudes(w)[0], 0])
    np.testing.assert_array_equal(observe_amax(product, model, x, dy), magnitudes(x, w, dy))
    assert jnp.isfinite(x @ model["w"].T).all()


# Where magnitudes come from


@pytest.mark.long
def test_amax_covers_all_examples(operands):
    """Where JAX sums the gradients of examples: under `vmap`, of a gradient too, and in functions with rules."""
    x, w, dy = operands
    model, expected = delayed(w), magnitudes(x, w, dy)
    np.testing.assert_array_equal(observe_amax(product, model, x, dy), expected)

    def by_examples(model, x, dy):
        return jnp.sum(jax.vmap(lambda x: model["w"] @ x)(x) * dy)

    def in_pieces(model, x, dy):
        return jnp.sum(jax.vmap(lambda x, dy: product(model, x, dy))(x.reshape(4, 5, 40), dy.reshape(4, 5, 24)))

    def with_a_rule(model, x, dy):
        pieces = lambda x: eqq.checkpoint_quantized(lambda x: x @ model["w"].T)(x)
        return jnp.sum(jax.vmap(pieces)(x.reshape(4, 5, 40)) * dy.reshape(4, 5, 24))

    for function in (by_examples, in_pieces, with_a_rule):
        np.testing.assert_array_equal(observe_amax(function, model, x, dy), expected)
    each_example = jax.vmap(lambda x, dy: observe_amax(product, model, x[None], dy[None]))(x, dy)
    np.testing.assert_array_equal(each_example, np.broadcast_to(expected, (20, 3)))


@pytest.mark.long
def test_each_model_has_its_own_amax(operands):
    """An ensemble, and a stack of layers in a `scan`, with `jax.checkpoint` and without."""
    x, _, _ = operands
    stack = weights(jr.key(7), (3, 40, 40)) / 6

    def model_loss(model, x):
        return jnp.sum(jnp.tanh(jax.vmap(lambda x: model["w"] @ x)(x)) ** 2)

    models = delayed(stack)
    together = jax.vmap(jax.grad(model_loss), (0, None))(models, x)["w"].amax
    gradient = jax.jit(jax.grad(model_loss))
    each = [gradient(delayed(w), x)["w"].amax for w in stack]
    np.testing.assert_allclose(together, np.stack(each), rtol=1e-6)

    def scan_loss(models, x, wrap=lambda f: f):
        layer = lambda x, model: (jnp.tanh(wrap(lambda x: jax.vmap(lambda x: model["w"] @ x)(x))(x)), None)
        return jnp.sum(jax.lax.scan(layer, x, models)[0] ** 2)

    def run_unrolled(models, x):
        for model in models:
            x = jnp.tanh(x @ model["w"].T)
        return jnp.sum(x**2)

    separate = jax.jit(jax.grad(run_unrolled))([delayed(w) for w in stack], x)
    expected = np.stack([model["w"].amax for model in separate])
    for wrap in (lambda f: f, jax.checkpoint):
        np.testing.assert_allclose(observe_amax(scan_loss, models, x, wrap), expected, rtol=1e-5)
        in_parts = lambda models, x: jnp.sum(jax.vmap(lambda x: scan_loss(models, x, wrap))(x.reshape(4, 5, 40)))
        np.testing.assert_allclose(observe_amax(in_parts, models, x), expected, rtol=1e-5)


@pytest.mark.long
def test_stacks_in_one_product(operands):
    x, _, _ = operands
    stack = weights(jr.key(7), (3, 24, 40))
    models, w_amax = delayed(stack), magnitudes(*stack)
    expected = np.stack([np.broadcast_to(magnitudes(x), 3), w_amax, np.ones(3)], axis=-1)
    np.testing.assert_array_equal(observe_amax(lambda m: jnp.sum(x @ m["w"].mT), models), expected)
    np.testing.assert_array_equal(observe_amax(lambda m: jnp.sum(m["w"] @ x.T), models), expected)
    einsum = lambda m: jnp.sum(eqq.quaxify(lambda w: jnp.einsum("lok,bk->blo", w, x))(m["w"]))
    np.testing.assert_array_equal(observe_amax(einsum, models), expected)
    # One product of all, which share a scale.
    shared = np.broadcast_to(magnitudes(x, w_amax, 1), (3, 3))
    merged = lambda m: jnp.sum(x @ m["w"].transpose(2, 0, 1).reshape(40, -1))
    np.testing.assert_array_equal(observe_amax(merged, models), shared)


def test_some_of_a_stack_are_not_known_yet(operands):
    """Each matrix has its own amax: a known one, and the current one where it is zero."""
    x, _, _ = operands
    stack = weights(jr.key(7), (3, 24, 40))
    known = jnp.asarray([[2.0, 3, 1], [0, 0, 0], [4, 0, 0]])
    y = x @ delayed(stack, largest=known)["w"].mT
    for n, w in enumerate(stack):
        np.testing.assert_array_equal(y[n], x @ delayed(w, largest=known[n])["w"].T)


def test_amax_of_several_uses_adds_up(operands):
    x, w, dy = operands
    twice = lambda model: product(model, x, dy) + product(model, 2 * x, dy)
    np.testing.assert_allclose(observe_amax(twice, delayed(w)), magnitudes(3 * x, 2 * w, 2 * dy), rtol=1e-6)


@pytest.mark.long
def test_forward_mode_and_second_order(operands):
    x, w, dy = operands
    model = delayed(w, "int8", magnitudes(x, w, dy))
    np.testing.assert_array_equal(jax.jit(jax.jacfwd(product))(model, x, dy)["w"].amax, 0)
    along = lambda x: jnp.sum(jnp.tanh(x @ model["w"].T) * dy)
    slope = jax.jvp(jax.grad(along), (x,), (x,))[1]
    assert jnp.isfinite(slope).all() and jnp.any(slope != 0)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes(operands, kind):
    x, w, dy = operands
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        model = delayed(place(w, "model"))
        np.testing.assert_array_equal(
            observe_amax(product, model, place(x, "data"), place(dy, "data", "model")), magnitudes(x, w, dy)
        )


def test_shard_map(operands):
    """Each device sees some examples; all get the largest, not the sum."""
    x, w, dy = operands
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    model = delayed(w, "int8", magnitudes(x, w, dy))
    each = jax.shard_map(jax.grad(product), mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    got, expected = jax.jit(each)(model, x, dy), gradient(model, x, dy)
    np.testing.assert_array_equal(got["w"].amax, magnitudes(x, w, dy))
    np.testing.assert_allclose(got["w"].array, expected["w"].array, rtol=1e-5, atol=1e-5)


# The optimizer


def bare(tree):
    return {"w": tree["w"].array}


def test_the_wrapped_optimizer_gets_no_amax(operands):
    """Neither norm, moments nor weight decay see it: weights train as without delayed scaling."""
    x, w, dy = operands
    model = delayed(w, "int8")
    chain = lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))
    optim, alone = eqq.delayed_scaling(chain()), chain()
    state, alone_state = optim.init(model), alone.init({"w": w})
    with jax.numpy_dtype_promotion("standard"):
        for factor in (1, 10):
            grads = gradient(model, factor * x, dy)
            updates, state = optim.update(grads, state, model)
            expected, alone_state = alone.update(bare(grads), alone_state, bare(model))
            model = optax.apply_updates(model, updates)
            np.testing.assert_array_equal(updates["w"].array, expected["w"])
    np.testing.assert_allclose(model["w"].amax[0], 10 * magnitudes(x)[0], rtol=1e-6)
    sizes = [jnp.size(leaf) for leaf in jax.tree.leaves(state.inner_state)]
    assert sorted(sizes) == [1, w.size, w.size]


def test_without_the_wrapper_scaling_is_current(operands):
    """An optimizer lowers amax like a parameter. Below zero, amax counts as unknown."""
    x, w, dy = operands
    model, optim = delayed(w, "fp8"), optax.adam(1e-3)
    state = optim.init(model)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):
            updates, state = optim.update(gradient(model, x, dy), state, model)
            model = optax.apply_updates(model, updates)
    assert (model["w"].amax < 0).all()
    now = eqq.low_precision_training({"w": model["w"].array}, eqq.FP8("e4m3", "tensor"))
    np.testing.assert_array_equal(x @ model["w"].T, x @ now["w"].T)
    # With the wrapper again, all is well.
    optim = eqq.delayed_scaling(optax.sgd(0.0))
    updates, _ = optim.update(gradient(model, x, dy), optim.init(model), model)
    after = optax.apply_updates(model, updates)["w"].amax
    np.testing.assert_allclose(after, magnitudes(x, model["w"].array, dy), rtol=1e-6)


def test_a_new_state_keeps_the_amax_of_the_model(operands):
    """The amax of a trained model has the margin already."""
    x, w, dy = operands
    amax = 4 * magnitudes(x, w, dy)
    model, optim = delayed(w, largest=amax), eqq.delayed_scaling(optax.sgd(0.0), margin=1.0)
    updates, _ = optim.update(gradient(model, x, dy), optim.init(model), model)
    np.testing.assert_array_equal(eqx.apply_updates(model, updates)["w"].amax, amax)


def test_composes_with_other_wrappers(operands):
    x, w, dy = operands
    expected = magnitudes(x, w, dy)
    for inner in (optax.MultiSteps(optax.sgd(0.1), 2), eqq.quantize_state(optax.trace(0.9), min_size=1)):
        model = delayed(w)
        optim = eqq.delayed_scaling(inner)
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = optim.update(gradient(model, x, dy), optim.init(model), model)
        np.testing.assert_array_equal(eqx.apply_updates(model, updates)["w"].amax, expected)
    model = eqq.low_precision_training(eqq.quantize_tree({"w": w}, "int8"), "fp8", delayed=True)
    optim = eqq.delayed_scaling(eqq.float_masters(optax.sgd(0.1), masters={"w": w}))
    updates, state = optim.update(eqx.filter_jit(eqq.filter_grad(product))(model, x, dy), optim.init(model), model)
    after = eqq.apply_updates(model, updates)
    np.testing.assert_allclose(after["w"].amax, expected, rtol=0.02)
    (master,) = jax.tree.leaves(state.inner_state.masters)
    np.testing.assert_array_equal(after["w"].array.dequantize(), eqq.quantize(master, "int8").dequantize())


def test_low_rank_factors(operands):
    """The base is frozen, but its amax is not, with a mask inside or outside the wrapper."""
    x, w, dy = operands
    model = eqq.low_precision_training(eqq.loraify({"w": w}, rank=2, key=jr.key(2)), "fp8", delayed=True)
    mask = eqq.trainable_mask(model)
    assert jax.tree.leaves(mask) == [False, True, True, True]
    for optim in (
        eqq.delayed_scaling(optax.masked(optax.sgd(0.1), mask)),
        optax.masked(eqq.delayed_scaling(optax.sgd(0.1)), mask),
    ):
        grads = eqx.filter_jit(eqq.filter_grad(product))(model, x, dy)
        updates, _ = optim.update(grads, optim.init(model), model)
        after = eqx.apply_updates(model, updates)
        np.testing.assert_array_equal(after["w"].base.array, w)
        np.testing.assert_array_equal(after["w"].base.amax, magnitudes(x, w, dy))
        assert not eqx.tree_equal(after["w"].b, model["w"].b)


def test_16_bits(operands):
    """A model that is cast for a step sees magnitudes in 16 bits, which come back in 32."""
    x, w, dy = operands
    cast = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
    got = observe_amax(lambda model: product(cast(model), cast(x), cast(dy)).astype(jnp.float32), delayed(w))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [float(jnp.max(jnp.abs(cast(a)))) for a in (x, w, dy)])


def test_64_bits(operands):
    """What a model of 64 bits expects has 32, and so has the history, from the first step on."""
    with jax.enable_x64(True):
        x, w, dy = (jnp.asarray(a, jnp.float64) for a in operands)
        model, optim = delayed(w), eqq.delayed_scaling(optax.sgd(0.1))
        start = optim.init(model)
        updates, state = optim.update(gradient(model, x, dy), start, model)
        after = eqx.apply_updates(model, updates)["w"]
    assert after.array.dtype == jnp.float64 and after.amax.dtype == jnp.float32
    assert {a.dtype.name for s in (start, state) for a in s.history.values()} == {"float32"}


def test_optax_finds_the_parameters_in_the_state(operands):
    """Those of the wrapped optimizer; the history is none."""
    _, w, _ = operands
    optim = eqq.delayed_scaling(optax.adam(1e-3))
    state = optim.init(delayed(w))
    specs = optax.tree_map_params(optim, lambda x: x.shape, state, transform_non_params=lambda _: "other")
    assert specs.history == "other" and specs.inner_state[0].mu["w"].array == w.shape
    np.testing.assert_array_equal(optax.tree_map_params(optim, jnp.shape, state).history["['w']"], np.zeros((3, 16)))


@pytest.mark.long
@pytest.mark.parametrize("whole", [False, True])
def test_training_a_model(whole):
    """An ordinary loop, which passes the optimizer the parameters, or the model with its functions."""
    tokens = jr.randint(jr.key(1), (8, 33), 0, 11)
    low = {"network": Network(jr.key(0)), "function": jax.nn.gelu}
    low = eqq.low_precision_training(low, "fp8", delayed=True)
    optim = eqq.delayed_scaling(optax.adamw(1e-2))

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(model, state):
        value, grads = eqx.filter_value_and_grad(lambda model: loss(model["network"], tokens))(model)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optim.update(grads, state, model if whole else eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    state, values = optim.init(low if whole else eqx.filter(low, eqx.is_inexact_array)), []
    for _ in range(20):
        low, state, value = step(low, state)
        values.append(float(value))
    assert values[-1] < 0.9 * values[0]
    largest = low["network"].layers.weight.amax
    assert largest.shape == (3, 3) and bool((largest > 0).all())
    assert {path: x.shape for path, x in state.history.items()} == {
        "['network'].layers.weight": (3, 3, 16),
        "['network'].head.weight": (3, 16),
    }


# Models


@pytest.mark.long
def test_models(operands, tmp_path):
    _, w, _ = operands
    model = Network(jr.key(0))
    low = eqq.low_precision_training(model, "fp8", delayed=True)
    assert "delayed scales" in repr(low.head.weight) and "delayed scales" in str(eqq.summary(low)).replace("\n", " ")
    assert low.layers.weight.amax.shape == (3, 3) and low.head.weight.amax.shape == (3,)
    assert eqx.tree_equal(eqq.dequantize_tree(low), model)
    only = eqq.low_precision_training(model, "fp8", where=lambda m: m.head, delayed=True)
    assert only.head.weight.amax is not None and only.layers.weight is model.layers.weight
    shared = eqq.low_precision_training({"a": w, "b": w}, delayed=True)
    assert shared["a"] is shared["b"]
    trained = eqx.tree_at(lambda m: m.head.weight.amax, low, jnp.arange(3.0))
    eqq.save(tmp_path / "low.safetensors", trained)
    assert eqx.tree_equal(eqq.load(tmp_path / "low.safetensors", low), trained)
    eqx.tree_serialise_leaves(tmp_path / "low.eqx", trained)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(tmp_path / "low.eqx", low), trained)
    stacked = eqq.quantize_tree(
        {"low": eqq.low_precision_training({"w": jnp.stack([w] * 3)}, delayed=True), "w": w}, "int8"
    )
    assert isinstance(stacked["low"]["w"].amax, jax.Array)


def test_bad_input(operands):
    x, w, dy = operands
    for format in (eqq.MXFP8(), eqq.Int8(symmetric=False), eqq.NVFP4(), eqq.Int8(64), "mlx"):
        with pytest.raises(ValueError, match="`delayed` needs formats of one scale"):
            eqq.low_precision_training({"w": w}, format, delayed=True)
    with pytest.raises(ValueError, match="`delayed` needs formats of one scale"):
        eqq.low_precision_training({"w": w}, "fp8", eqq.MXFP8(), delayed=True)
    with pytest.raises(TypeError, match="`optimizer` must be an optax optimizer"):
        eqq.delayed_scaling(optax.adam)
    for history in (0, True):
        with pytest.raises(ValueError, match="`history` must be a number of steps"):
            eqq.delayed_scaling(optax.sgd(0.1), history=history)
    eqq.delayed_scaling(optax.sgd(0.1), history=1)
    for margin in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="`margin` must be a finite number"):
            eqq.delayed_scaling(optax.sgd(0.1), margin=margin)
    optim = eqq.delayed_scaling(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs weights with delayed scales"):
        optim.init(eqq.low_precision_training({"w": w}))
    model = delayed(w)
    state, grads = optim.init(model), gradient(model, x, dy)
    with pytest.raises(ValueError, match="`delayed_scaling` needs the parameters"):
        optim.update(grads, state)
    for wrong in (state.inner_state, optim.init({"other": model["w"]})):
        with pytest.raises(ValueError, match="needs the state that its `init` returns"):
            optim.update(grads, wrong, model)
