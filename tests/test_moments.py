"""Optimizer state in eight bits."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqquant as eqq
from eqquant._training import moments

from .helpers import assert_close, assert_same, weights


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        yield


def list_quantized(state):
    """Path and array of every quantized leaf."""
    flat = jtu.tree_leaves_with_path(state, is_leaf=eqq.is_quantized)
    return {jtu.keystr(path): x for path, x in flat if eqq.is_quantized(x)}


def minimize(optim, steps=200):
    """The distance from the minimum of a quadratic, at each step. Its curvatures span four orders of magnitude within a
    block, so that second moments span eight."""
    target, curvature = weights(jax.random.key(1), (64, 128)), jnp.logspace(-2, 2, 128)[None]

    @jax.jit
    def step(w, state):
        grads = jax.grad(lambda w: jnp.sum(curvature * (w - target) ** 2))(w)
        updates, state = optim.update(grads, state, w)
        return optax.apply_updates(w, updates), state, jnp.sqrt(jnp.mean((w - target) ** 2))

    w, distances = jnp.zeros((64, 128)), []
    state = optim.init(w)
    for _ in range(steps):
        w, state, distance = step(w, state)
        distances.append(float(distance))
    return distances, state


@pytest.mark.long
def test_quantized_adam_is_near_float_adam():
    exact, state = minimize(optax.adam(2e-2))
    ours, quantized = minimize(eqq.quantize_state(optax.adam(2e-2)))
    assert exact[-1] < 0.1 and abs(ours[-1] - exact[-1]) < 0.05
    assert set(list_quantized(quantized)) == {"[0].mu", "[0].nu"}
    assert eqq.tree_nbytes(quantized) < eqq.tree_nbytes(state) * 0.26


@pytest.mark.long
def test_second_moments_are_never_in_even_levels():
    # Which would round small ones to zero, and be divided by.
    distances, state = minimize(eqq.quantize_state(optax.adam(2e-2), eqq.Int8(block_size=256)))
    assert distances[-1] < distances[0]
    assert {repr(x.format) for x in list_quantized(state).values()} == {
        "Int8(block_size=256)",
        "Dynamic8(signed=False)",
    }


@pytest.mark.long
def test_steps_stay_small_where_gradients_differ_widely():
    # Within a block, and over time: where a second moment became zero and the first did not, a step would be thousands.
    p, spread = jnp.zeros((64, 256)), jnp.exp(3 * weights(jax.random.key(1), (1, 256)))
    optim = eqq.quantize_state(optax.adam(1.0))
    state, update = optim.init(p), jax.jit(optim.update)
    for key in jax.random.split(jax.random.key(2), 40):
        updates, state = update(weights(key, p.shape) * spread, state, p)
        assert jnp.max(jnp.abs(updates)) < 10


def test_unsigned_formats_keep_small_values_above_zero():
    format = eqq.Dynamic8(signed=False)
    values = jnp.array([0.0, 1e-30, 1e-14, 1e-13, 1e-3, 1.0])
    assert format.encode(values).tolist()[:4] == [0, 1, 1, 1]
    assert eqq.Dynamic8().encode(values)[1] == eqq.Dynamic8().encode(values)[0]


class _OddlyNamed(eqx.Module):
    v: jax.Array
    nu: jax.Array


@pytest.mark.parametrize(
    "make, moments",
    [
        (lambda: optax.contrib.schedule_free_adamw(1e-2), {".nu.v", ".nu.nu"}),
        (lambda: optax.rprop(1e-2), None),
        (lambda: optax.contrib.prodigy(1e-2), None),
        (lambda: optax.rmsprop(1e-2, centered=True), None),
        (lambda: optax.adan(1e-2), {".m.v", ".m.nu", ".v.v", ".v.nu", ".n.v", ".n.nu"}),
        (lambda: optax.sm3(1e-2), {".nu.v", ".nu.nu"}),
    ],
)
def test_parameters_named_like_moments_are_not_quantized(make, moments, getkey):
    params = _OddlyNamed(weights(getkey(), (64, 64)), weights(getkey(), (64, 64)))
    optim = eqq.quantize_state(make())
    if moments is None:
        with pytest.raises(ValueError, match="must keep moments of at least 4096 values, in a state that is known"):
            optim.init(params)
        return
    state = optim.init(params)
    found = list_quantized(state)
    assert {next(m for m in moments if path.endswith(m)) for path in found} == moments and len(found) == len(moments)
    for _ in range(2):
        updates, state = jax.jit(optim.update)(jtu.tree_map(jnp.sin, params), state, params)
    exact, exact_state = make(), make().init(params)
    for _ in range(2):
        expected, exact_state = jax.jit(exact.update)(jtu.tree_map(jnp.sin, params), exact_state, params)
    assert_close(updates, expected, 0.2)


@pytest.mark.parametrize(
    "make, moments",
    [
        (lambda: optax.sgd(1e-3, momentum=0.9), {"trace"}),
        (lambda: optax.adamw(1e-3), {"mu", "nu"}),
        (lambda: optax.amsgrad(1e-3), {"mu", "nu", "nu_max"}),
        (lambda: optax.rmsprop(1e-3, momentum=0.9), {"nu", "trace"}),
        (lambda: optax.adagrad(1e-3), {"sum_of_squares"}),
        (lambda: optax.lion(1e-3), {"mu"}),
        (lambda: optax.adabelief(1e-3), {"mu", "nu"}),
        (lambda: optax.inject_hyperparams(optax.adam)(1e-3), {"mu", "nu"}),
        (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), {"mu", "nu"}),
        (lambda: optax.MultiSteps(optax.adam(1e-3), 2), {"mu", "nu"}),
        (lambda: optax.masked(optax.adam(1e-3), {"w": True, "mu": False}), {"mu", "nu"}),
    ],
)
def test_which_state_is_quantized(make, moments, getkey):
    # A parameter that is itself called `mu` is not mistaken for a moment.
    params = {"w": weights(getkey(), (64, 128)), "mu": jnp.ones(3)}
    optim = eqq.quantize_state(make())
    state = optim.init(params)
    found = list_quantized(state)
    assert {
        name for name in ("mu", "nu", "nu_max", "trace", "sum_of_squares") if any(f".{name}[" in p for p in found)
    } == moments
    assert all(p.endswith("['w']") for p in found) and not any("acc_grads" in p for p in found)
    second = {"nu", "nu_max", "sum_of_squares"}
    assert all(x.format.signed != any(f".{name}[" in p for name in second) for p, x in found.items())
    updates, after = jax.jit(optim.update)(jtu.tree_map(jnp.ones_like, params), state, params)
    assert jtu.tree_structure(after) == jtu.tree_structure(state)
    assert jtu.tree_structure(updates) == jtu.tree_structure(params)
    describe = lambda tree: [(x.shape, x.dtype) for x in jtu.tree_leaves(tree)]
    assert describe(after) == describe(state)


OPTIMIZERS = [optax.ema(0.9), optax.adafactor(0.1), optax.contrib.muon(0.1), optax.adam(0.1), optax.adan(0.1)]
OPTIMIZERS += [optax.amsgrad(0.1), optax.adabelief(0.1), optax.lion(0.1), optax.novograd(0.1), optax.rmsprop(0.1)]
OPTIMIZERS += [optax.adagrad(0.1), optax.sm3(0.1), optax.sgd(0.1, momentum=0.9)]
OPTIMIZERS += [optax.contrib.ademamix(0.1), optax.contrib.simplified_ademamix(0.1)]


def test_moments_that_may_be_negative_are_signed():
    """And no other moment, since squares that round to zero would be divided by."""
    params, names = jnp.asarray([[1.0, -2], [3, 4]]), []

    @jax.jit
    def run(params):
        least = []
        for optim in OPTIMIZERS:
            state = optim.init(params)
            for factor in (1.0, -3.0):
                _, state = optim.update(factor * params, state, params)
                for x in jtu.tree_leaves(state, is_leaf=lambda x: bool(moments._moment_fields(x))):
                    for field, signed in moments._moment_fields(x).items():
                        if isinstance(value := getattr(x, field), jax.Array):  # not where Muon uses Adam
                            names.append((type(x).__name__, field, signed))
                            least.append(jnp.min(value))
        return jnp.stack(least)

    found = {}
    for least, name in zip(run(params).tolist(), names, strict=True):
        found[name] = min(least, found.get(name, 0.0))
    assert len({name for name, *_ in found}) >= 13
    for (name, field, signed), least in found.items():
        assert (least < 0) == signed, f"{name}.{field}"


@pytest.mark.long
@pytest.mark.parametrize("init", [lambda optim: optim.init, lambda optim: jax.jit(optim.init)], ids=["eager", "jit"])
def test_second_moments_of_yogi_stay_in_float(init, getkey):
    """They change by differences that eight bits would round away, but for the large ones: they would only grow."""
    w, optim, exact = weights(getkey(), (64, 128)), eqq.quantize_state(optax.yogi(1e-3)), optax.yogi(1e-3)
    state, expected = init(optim)({"w": w}), exact.init({"w": w})
    assert [path for path in list_quantized(state) if ".nu" in path] == []
    assert any(".mu" in path for path in list_quantized(state))
    assert any(".nu" in path for path in list_quantized(init(eqq.quantize_state(optax.adam(1e-3)))({"w": w})))
    for key in jax.random.split(getkey(), 100):
        grads = {"w": weights(key, (64, 128))}
        _, state = jax.jit(optim.update)(grads, state)
        _, expected = jax.jit(exact.update)(grads, expected)
    assert_close(state[0].nu, expected[0].nu)


def test_state_between_steps_is_the_quantized_one_of_the_optimizer(getkey):
    params, grads = weights(getkey(), (64, 128)), weights(getkey(), (64, 128))
    inner, optim = optax.adam(1e-3), eqq.quantize_state(optax.adam(1e-3))
    updates, state = optim.update(grads, optim.init(params), params)
    exact_updates, exact = inner.update(grads, inner.init(params), params)
    np.testing.assert_array_equal(np.asarray(updates), np.asarray(exact_updates))
    # A row is shorter than a block, so both axes are quantized as one.
    assert_same(state[0].mu, eqq.quantize(exact[0].mu, eqq.Dynamic8(), axis=(-2, -1)))
    assert_same(state[0].nu, eqq.quantize(exact[0].nu, eqq.Dynamic8(signed=False), axis=(-2, -1)))


def test_small_moments_and_scalars_stay_in_float(getkey):
    params = {"large": weights(getkey(), (64, 64)), "small": jnp.ones(64), "scalar": jnp.float32(1)}
    state = eqq.quantize_state(optax.adam(1e-3)).init(params)
    assert set(list_quantized(state)) == {"[0].mu['large']", "[0].nu['large']"}
    all_of_them = eqq.quantize_state(optax.adam(1e-3), min_size=1).init(params)
    assert len(list_quantized(all_of_them)) == 4


@pytest.mark.long
def test_blocks_run_over_short_axes(getkey):
    params = {"conv": weights(getkey(), (64, 64, 3, 3)), "wide": weights(getkey(), (4, 4096)), "row": jnp.ones(5000)}
    state = eqq.quantize_state(optax.adam(1e-3)).init(params)[0].mu
    assert {name: x.axis for name, x in state.items()} == {"conv": (-3, -2, -1), "wide": -1, "row": -1}
    assert all(8 * x.nbytes / x.size < 8.3 for x in state.values())


def test_other_formats_and_dtypes(getkey):
    params = weights(getkey(), (64, 128))
    state = eqq.quantize_state(optax.adam(1e-3), "mxfp8").init(params)
    assert {repr(x.format) for x in list_quantized(state).values()} == {"MXFP8()", "Dynamic8(signed=False)"}
    state = eqq.quantize_state(optax.adam(1e-3, mu_dtype=jnp.bfloat16)).init(params)
    assert state[0].mu.dtype == jnp.bfloat16 and state[0].nu.dtype == jnp.float32


def test_state_is_saved_and_loaded(getkey):
    params = weights(getkey(), (64, 128))
    optim = eqq.quantize_state(optax.adam(1e-3))
    _, state = optim.update(params, optim.init(params), params)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    assert_same(eqx.tree_deserialise_leaves(file, optim.init(params))[0].nu, state[0].nu)


def test_errors(getkey):
    params = {"w": weights(getkey(), (64, 128))}
    with pytest.raises(ValueError, match=r"at least 4096 values, .* Got none in its state \(which is empty\)"):
        eqq.quantize_state(optax.sgd(1e-3)).init(params)
    with pytest.raises(ValueError, match=r"\[0\]\.mu\['b'\].*Lower `min_size`"):
        eqq.quantize_state(optax.adam(1e-3)).init({"b": jnp.ones(10)})
    model = {"w": eqq.quantize(params["w"], "int8")}
    with pytest.raises(ValueError, match=r"Write `eqq.float_masters\(eqq.quantize_state\(optimizer\)\)`"):
        eqq.quantize_state(eqq.float_masters(optax.adam(1e-3))).init(model)
    with pytest.raises(ValueError, match=r"Got \[0\]\.mu\['w'\], .* Wrap the optimizer once"):
        eqq.quantize_state(eqq.quantize_state(optax.adam(1e-3))).init(params)
    with pytest.raises(ValueError, match=r"the parameters, which need masters: `eqq.float_masters\(eqq.quantize_state"):
        eqq.quantize_state(optax.adam(1e-3)).init(model)
    with pytest.raises(ValueError, match="`format` must be one of"):
        eqq.quantize_state(optax.adam(1e-3), "dynamic9")


def test_levels():
    for signed in (True, False):
        levels = eqq.Dynamic8(signed=signed).codebook
        assert len(set(levels)) == 256 and max(levels) == 1 and 0 in levels
        assert (min(levels) < -0.99) == signed
    unsigned = np.array(eqq.Dynamic8(signed=False).codebook)
    # The paper's levels: the two smallest, and the ends of the topmost decade.
    np.testing.assert_allclose(np.sqrt(unsigned[1:3]), [3.25e-7, 7.75e-7], rtol=1e-6)
    np.testing.assert_allclose(np.sqrt(unsigned[[-130, -129, -2]]), [0.099296875, 0.103515625, 0.996484375], rtol=1e-6)


def test_optax_finds_the_parameters_in_the_state(getkey):
    params = weights(getkey(), (64, 128))
    optim = eqq.quantize_state(optax.adam(1e-3))
    shapes = optax.tree_map_params(optim, lambda x: x.shape, optim.init(params), is_leaf=eqq.is_quantized)
    assert shapes[0].mu == shapes[0].nu == (64, 128)
