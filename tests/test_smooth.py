"""Factors for the inputs of weights: SmoothQuant and AWQ, folded into the layers before them or kept as vectors."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._methods.statistics import LeafStats
from eqquant._tree.leaves import named_leaves
from eqquant._wrappers.scaled import ScaledArray
from eqquant.transforms._folds import find_folds, Weights

from .helpers import outputs, weights


SIZE, WIDE = 16, 32
FOLD = {
    "layers.{n}.norm.{p}": "layers.{n}.{x:gate|up}.weight",
    "layers.{n}.up.{p}": "layers.{n}.down.weight",
}


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 4)
        self.norm = eqx.nn.LayerNorm(SIZE)
        scales = jnp.exp(1.5 * weights(keys[3], (2, SIZE)))
        self.norm = eqx.tree_at(lambda m: (m.weight, m.bias), self.norm, (scales[0], scales[1]))
        self.gate, self.up = (eqx.nn.Linear(SIZE, WIDE, key=k) for k in keys[:2])
        self.down = eqx.nn.Linear(WIDE, SIZE, key=keys[2])

    def __call__(self, x):
        y = self.norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Model(eqx.Module):
    layers: list

    def __init__(self, key):
        self.layers = [Block(k) for k in jr.split(key, 2)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Stacked(eqx.Module):
    layers: Block

    def __init__(self, key):
        stack = lambda *parts: jnp.stack(parts) if eqx.is_array(parts[0]) else parts[0]
        self.layers = jax.tree.map(stack, *Model(key).layers)

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda x, layer: (eqx.combine(layer, static)(x), None), x, arrays)[0]


@functools.cache
def inputs():
    return np.asarray(weights(jr.key(1), (64, SIZE)) * jnp.exp(weights(jr.key(2), (SIZE,)))[None])


@eqx.filter_jit
def run(model, xs):
    return outputs(model, xs)


@pytest.fixture(scope="module")
def model():
    return Model(jr.key(0))


@pytest.fixture(scope="module")
def stats(model):
    return eqq.calibrate.collect_stats(model, [inputs()], gram=True)


def close(a, b, tolerance=1e-5):
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def methods(stats):
    return {"smooth": eqq.transforms.SmoothQuant(stats, 0.7), "awq": eqq.transforms.AWQ(stats, eqq.Int4(16), grid=6)}


@pytest.mark.long
@pytest.mark.parametrize("name", ["smooth", "awq"])
def test_outputs_do_not_change(model, stats, name):
    method = methods(stats)[name]
    folded = eqq.transforms.smooth(model, method, fold=FOLD, batches=[inputs()])
    assert jax.tree_util.tree_structure(folded) == jax.tree_util.tree_structure(model)
    assert not np.allclose(folded.layers[0].norm.weight, model.layers[0].norm.weight)
    close(run(folded, inputs()), run(model, inputs()))
    kept = eqq.transforms.smooth(model, method)
    assert isinstance(kept.layers[1].down.weight, ScaledArray)
    close(run(kept, inputs()), run(model, inputs()))
    # Only the norm is folded: `down` keeps a vector, or stays as it was.
    some = {"layers.{n}.norm.{p}": FOLD["layers.{n}.norm.{p}"]}
    assert isinstance(eqq.transforms.smooth(model, method, fold=some).layers[0].down.weight, ScaledArray)
    # A producer may keep a vector for its own inputs.
    producer = {"layers.{n}.up.{p}": FOLD["layers.{n}.up.{p}"]}
    close(run(eqq.transforms.smooth(model, method, fold=producer), inputs()), run(model, inputs()))
    assert (
        eqq.transforms.smooth(model, method, fold=some, online=False).layers[0].down.weight
        is model.layers[0].down.weight
    )


@pytest.mark.long
def test_stacks(stats):
    stacked = Stacked(jr.key(0))
    stack_stats = eqq.calibrate.collect_stats(stacked, [inputs()], gram=True)
    rules = {key.replace(".{n}", ""): value.replace(".{n}", "") for key, value in FOLD.items()}
    model = Model(jr.key(0))
    for name in ("smooth", "awq"):
        both = (
            eqq.transforms.smooth(stacked, methods(stack_stats)[name], fold=rules),
            eqq.transforms.smooth(model, methods(stats)[name], fold=FOLD),
        )
        for n in range(2):
            close(both[0].layers.down.weight[n], both[1].layers[n].down.weight, 1e-4)
            close(both[0].layers.norm.bias[n], both[1].layers[n].norm.bias, 1e-4)
        close(run(both[0], inputs()), run(stacked, inputs()))
    kept = eqq.transforms.smooth(stacked, methods(stack_stats)["smooth"])
    close(run(kept, inputs()), run(stacked, inputs()))
    close(run(eqq.quantize_tree(kept, "int8"), inputs()), run(stacked, inputs()), 0.05)


@pytest.mark.long
def test_smoothquant_is_the_formula(model, stats):
    w, x = np.asarray(model.layers[0].down.weight), stats["layers.0.down.weight"]
    largest = np.maximum(-x.min, x.max)
    factor = largest**0.7 / np.abs(w).max(axis=0) ** 0.3
    kept = eqq.transforms.smooth(model, eqq.transforms.SmoothQuant(stats, 0.7)).layers[0].down.weight
    close(kept.scale, 1 / factor)
    close(kept.array, w * factor)
    # A weight of the other order, with an input that it does not use.
    seen = dataclasses.replace(x, axis=-2, shape=(WIDE, SIZE), fingerprint=None)
    other = {"w": model.layers[0].down.weight.T.at[3].set(0)}
    kept = eqq.transforms.smooth(other, eqq.transforms.SmoothQuant({"w": seen}, 0.7))["w"]
    factor[3] = 1
    assert kept.axis == -2
    close(kept.scale, 1 / factor)
    close(kept.array, np.asarray(other["w"]) * factor[:, None])
    # Inputs so small that float16 cannot hold the inverse of their factors.
    small = dataclasses.replace(seen, min=1e-9 * seen.min, max=1e-9 * seen.max)
    half = {"w": other["w"].astype(jnp.float16)}
    assert float(eqq.transforms.smooth(half, eqq.transforms.SmoothQuant({"w": small}, 0.7))["w"].scale.max()) == 1e4


def test_several_weights_share_their_factors(model, stats):
    """Of weights of different sizes in either order, the larger one counts."""
    for larger in ("gate", "up"):
        weight_of = lambda m, larger=larger: getattr(m.layers[0], larger).weight
        grown = eqx.tree_at(weight_of, model, 9 * weight_of(model))
        both = [np.asarray(getattr(grown.layers[0], name).weight) for name in ("gate", "up")]
        x = stats["layers.0.up.weight"]
        known = stats.without_fingerprints()
        folded = eqq.transforms.smooth(grown, eqq.transforms.SmoothQuant(known, 0.7), fold=FOLD, online=False)
        factor = np.maximum(-x.min, x.max) ** 0.7 / np.abs(both).max(axis=(0, 1)) ** 0.3
        close(folded.layers[0].gate.weight, both[0] * factor)
        close(folded.layers[0].norm.weight, np.asarray(grown.layers[0].norm.weight) / factor)
        method = eqq.transforms.AWQ(known, eqq.Int2(16), grid=6)
        folded = eqq.transforms.smooth(grown, method, fold=FOLD, online=False)
        found = np.asarray(grown.layers[0].norm.weight) / np.asarray(folded.layers[0].norm.weight)

        def error(factor, both=both):
            scaled = [eqq.quantize(jnp.asarray(w * factor, jnp.float32), eqq.Int2(16)) for w in both]
            changes = [np.asarray(q.dequantize(), np.float64) / factor - w for q, w in zip(scaled, both, strict=True)]
            return sum(np.einsum("oi,ij,oj->", change, x.gram, change) for change in changes)

        powers = [x.mean_abs ** float(beta) for beta in method.exponents]
        close(found, min((p / np.sqrt(p.min() * p.max()) for p in powers), key=error), 1e-4)


def test_awq_takes_the_best_of_its_grid(model, stats):
    method = methods(stats)["awq"]
    kept = eqq.transforms.smooth(model, method).layers[1].up.weight
    w, x = np.asarray(model.layers[1].up.weight, np.float64), stats["layers.1.up.weight"]

    def error(factor):
        q = eqq.quantize(jnp.asarray(w * factor, jnp.float32), method.format)
        change = np.asarray(q.dequantize(), np.float64) / factor - w
        return np.einsum("oi,ij,oj->", change, x.gram, change)

    powers = [x.mean_abs ** float(beta) for beta in method.exponents]
    tried = [p / np.sqrt(p.min() * p.max()) for p in powers]
    best = min(tried, key=error)
    close(1 / kept.scale, best)
    assert error(best) < error(np.ones(SIZE))


@pytest.mark.long
def test_awq_helps(model, stats):
    error = lambda m: np.linalg.norm(run(eqq.quantize_tree(m, eqq.Int4(16)), inputs()) - run(model, inputs()))
    assert error(eqq.transforms.smooth(model, eqq.transforms.AWQ(stats, eqq.Int4(16)), fold=FOLD)) < 0.95 * error(model)


def test_inputs_without_data(model, stats):
    dead = {
        path: dataclasses.replace(s, mean_abs=s.mean_abs * 0, min=s.min * 0, max=s.max * 0, gram=s.gram * 0)
        for path, s in stats.items()
    }
    for method in methods(dead).values():
        close(run(eqq.transforms.smooth(model, method, fold=FOLD), inputs()), run(model, inputs()))


def test_channels_of_heads():
    """Two heads of four values, each for three heads of the consumer; the values are stored as `(in, out)`."""
    model = {"output": {"weight": jnp.ones((7, 24))}, "value": {"bias": jnp.ones(8), "weight": jnp.ones((5, 8))}}
    leaves = list(named_leaves(model))
    (fold,) = find_folds(
        {"value.{p}": eqq.transforms.FoldInto(("output.weight",), 4, 1)}, Weights(leaves, {0: -1, 2: -2})
    )
    assert (fold.producers, fold.consumers, fold.heads, fold.offset) == ({1: -1, 2: -1}, [0], (2, 3, 4), 1)
    v = np.random.default_rng(0).random(24).astype(np.float32)
    largest = v.reshape(2, 3, 4).max(1)
    pooled = fold.pool(jnp.asarray(v), jnp.max)
    np.testing.assert_array_equal(pooled, np.repeat(largest[:, None], 3, 1).reshape(-1))
    np.testing.assert_array_equal(fold.to_outputs(pooled), largest.reshape(-1))


@pytest.mark.long
def test_heads_and_stacks_by_hand():
    """In NumPy: heads that share values share factors, by their largest or their mean, and each layer has its own."""
    rng = np.random.default_rng(0)
    random = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    model = {"value": {"weight": random(6, 8), "bias": random(6)}, "output": {"weight": random(5, 12)}}
    high, stacked = rng.uniform(0.5, 4, 12), rng.uniform(0.5, 4, (2, 8))
    seen = LeafStats("output.weight", (5, 12), -1, "", np.array(9), -high / 2, high, second_moment=high**2)
    method = eqq.transforms.SmoothQuant({"output.weight": seen}, 0.7)
    fold = {"value.{p}": eqq.transforms.FoldInto(("output.weight",), head_size=3)}
    folded = eqq.transforms.smooth(model, method, fold=fold, where=lambda m: m["output"]["weight"])
    w, (v, bias) = model["output"]["weight"], model["value"].values()
    pool = lambda values: values.reshape(2, 2, 3).max(1)
    factor = pool(high) ** 0.7 / pool(np.abs(w).max(0)) ** 0.3
    close(folded["output"]["weight"], w * np.repeat(factor, 2, 0).reshape(-1))
    close(folded["value"]["weight"], v / factor.reshape(-1, 1))
    close(folded["value"]["bias"], bias / factor.reshape(-1))
    seen = dataclasses.replace(seen, mean_abs=high, gram=np.diag(high**4))
    method = eqq.transforms.AWQ({"output.weight": seen}, eqq.Int2(None), grid=2)  # takes all of the mean, or nothing
    folded = eqq.transforms.smooth(model, method, fold=fold, where=lambda m: m["output"]["weight"])
    factor = high.reshape(2, 2, 3).mean(1)
    factor /= np.sqrt(factor.min() * factor.max())
    close(folded["output"]["weight"], w * np.repeat(factor, 2, 0).reshape(-1))
    close(folded["value"]["bias"], bias / factor.reshape(-1))
    layers = {"w": random(2, 5, 8)}
    seen = LeafStats("w", (2, 5, 8), -1, "", np.array([9, 9]), -stacked, stacked / 2, second_moment=stacked**2)
    kept = eqq.transforms.smooth(layers, eqq.transforms.SmoothQuant({"w": seen}, 0.7))["w"]
    factor = stacked**0.7 / np.abs(layers["w"]).max(1) ** 0.3
    close(kept.scale, 1 / factor)
    close(kept.array, layers["w"] * factor[:, None])


@pytest.mark.long
def test_heads_that_share_values():
    value, output = weights(jr.key(0), (6, 8)), weights(jr.key(1), (5, 12))
    bias = weights(jr.key(2), (6,))

    def attend(model, x):
        v = (model["value"]["weight"] @ x + model["value"]["bias"]).reshape(2, 3)
        return model["output"]["weight"] @ jnp.repeat(v, 2, axis=0).reshape(-1)

    model = {"value": {"weight": value, "bias": bias}, "output": {"weight": output}}
    apply = lambda model, xs: jax.vmap(lambda x: attend(model, x))(xs)
    xs = weights(jr.key(3), (32, 8))
    stats = eqq.calibrate.collect_stats(model, [xs], apply=apply, gram=True)
    fold = {"value.{p}": eqq.transforms.FoldInto(("output.weight",), head_size=3)}
    for method in methods(stats).values():
        folded = eqq.transforms.smooth(
            model, method, fold=fold, batches=[xs], apply=apply, where=lambda m: m["output"]["weight"]
        )
        assert not np.allclose(folded["value"]["weight"], value)
        close(apply(folded, xs), apply(model, xs))
    with pytest.raises(ValueError, match="has 6 outputs.*12 inputs.*head_size"):
        eqq.transforms.smooth(model, method, fold={"value.{p}": "output.weight"})


def test_norms_with_an_offset():
    apply = lambda m, xs: (xs * (1 + m["norm"]["weight"])[None]) @ m["up"]["weight"].T
    model = {"norm": {"weight": weights(jr.key(0), (8,))}, "up": {"weight": weights(jr.key(1), (4, 8))}}
    xs = weights(jr.key(2), (32, 8))
    stats = eqq.calibrate.collect_stats(model, [xs], apply=apply)
    right, wrong = eqq.transforms.FoldInto(("up.weight",), offset=1), "up.weight"
    folded = eqq.transforms.smooth(
        model, eqq.transforms.SmoothQuant(stats), fold={"norm.{p}": right}, batches=[xs], apply=apply
    )
    close(apply(folded, xs), apply(model, xs))
    with pytest.raises(ValueError, match="must leave the outputs of the model unchanged. Got others with norm.weight"):
        eqq.transforms.smooth(
            model, eqq.transforms.SmoothQuant(stats), fold={"norm.{p}": wrong}, batches=[xs], apply=apply
        )


def test_pairs_that_do_not_fold(model, stats):
    method = eqq.transforms.SmoothQuant(stats)
    smooth = lambda fold, **kwargs: eqq.transforms.smooth(model, method, fold=fold, **kwargs)
    with pytest.raises(
        ValueError, match="Got others with layers.0.gate.weight, layers.0.gate.bias.*between the two is not linear"
    ):
        right = {"layers.{n}.norm.{p}": FOLD["layers.{n}.norm.{p}"]}
        smooth({**right, "layers.{n}.gate.{p}": "layers.{n}.down.weight"}, batches=[inputs()])
    for nothing in (0.0, jnp.nan):  # which no fold changes
        with pytest.raises(ValueError, match="none that are finite and not zero"):
            smooth(FOLD, batches=[inputs()], apply=lambda model, x, nothing=nothing: nothing * jax.vmap(model)(x))
    with pytest.raises(TypeError, match="to one pattern of the weights after it"):
        eqq.transforms.rotate({"w": jnp.ones((8, 8))}, fold={"w": eqq.transforms.ResidualStream({"w": ("a", "b")})})
    with pytest.raises(ValueError, match="Each pattern of `fold`.*Got 'layers.{n}.nrm"):
        smooth({"layers.{n}.nrm.{p}": "layers.{n}.up.weight"})
    with pytest.raises(ValueError, match="outputs of layers.0.norm.weight.* must be the inputs"):
        smooth({"layers.{n}.norm.{p}": "layers.{n}.{x:up|down}.weight"})
    with pytest.raises(ValueError, match="one producer.*layers.0.up.weight"):
        smooth({**FOLD, "layers.0.norm.weight": "layers.0.up.weight"})
    with pytest.raises(ValueError, match="the same inputs.*layers.1.up.weight than for layers.0.up.weight"):
        smooth({"layers.0.norm.{p}": "layers.{n}.up.weight"})
    with pytest.raises(ValueError, match="whose inputs can be scaled. Got layers.0.up.bias"):
        smooth({"layers.{n}.norm.{p}": "layers.{n}.up.bias"})
    tied = {"a": model.layers[0].up.weight, "b": model.layers[0].up.weight, "norm": jnp.ones(SIZE)}
    with pytest.raises(ValueError, match="the same array as b"):
        eqq.transforms.smooth(tied, method, fold={"norm": "a"})


def test_statistics_that_do_not_fit(model, stats):
    with pytest.raises(ValueError, match="none for layers.0.gate.weight, none for layers.0.up.*Collect them"):
        eqq.transforms.smooth(model, eqq.transforms.SmoothQuant({}))
    wrong = dataclasses.replace(stats["layers.0.up.weight"], shape=(3, SIZE))
    with pytest.raises(ValueError, match="statistics of the same weight.*layers.0.up.weight"):
        eqq.transforms.smooth(model, eqq.transforms.SmoothQuant({**stats, "layers.0.up.weight": wrong}))
    spoiled = dataclasses.replace(stats["layers.0.up.weight"], gram=np.full((SIZE, SIZE), np.nan))
    with pytest.raises(ValueError, match="must be finite.*layers.0.up.weight"):
        eqq.transforms.smooth(model, eqq.transforms.AWQ({**stats, "layers.0.up.weight": spoiled}))
    for leaf in ("up", "norm"):  # multiplied, divided
        spoiled = eqx.tree_at(
            lambda m, leaf=leaf: getattr(m.layers[0], leaf).weight, model, replace_fn=lambda x: x.at[0].set(jnp.inf)
        )
        with pytest.raises(ValueError, match=f"^layers.0.{leaf}.weight must be finite in float32"):
            eqq.transforms.smooth(spoiled, eqq.transforms.SmoothQuant(stats), fold=FOLD)
    no_gram = {path: dataclasses.replace(s, gram=None) for path, s in stats.items()}
    with pytest.raises(ValueError, match="inputs.gram"):
        eqq.transforms.smooth(model, eqq.transforms.AWQ(no_gram))
    with pytest.raises(ValueError, match="`smooth` needs weights to scale.*already quantized"):
        eqq.transforms.smooth(eqq.quantize_tree(model), eqq.transforms.SmoothQuant(stats))


def test_arguments(stats, model):
    with pytest.raises(ValueError, match="`axis` must be -1, for weights"):
        eqq.transforms.smooth(model, eqq.transforms.SmoothQuant(stats), axis=1)
    with pytest.raises(ValueError, match="`alpha` must be between 0 and 1"):
        eqq.transforms.SmoothQuant(stats, 2)
    with pytest.raises(ValueError, match="`grid`"):
        eqq.transforms.AWQ(stats, grid=1)
    with pytest.raises(TypeError, match="`method` of AWQ must choose scales without statistics"):
        eqq.transforms.AWQ(stats, method=eqq.GPTQ(stats))
