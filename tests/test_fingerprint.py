"""Statistics know the weight whose inputs they are, and refuse another one."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._methods.fingerprint import _signs, fingerprint, SUMS
from eqquant.calibrate import collect_stats

from .helpers import weights


CHANGED = r"now\. Got statistics of other values of .*, which has changed by about .* since.*without_fingerprints"


@pytest.fixture(scope="module")
def model():
    return eqx.nn.MLP(32, 32, 64, 2, key=jr.key(0))


@pytest.fixture(scope="module")
def batches():
    return [weights(jr.key(n), (64, 32)) for n in range(2)]


@pytest.fixture(scope="module")
def stats(model, batches):
    return collect_stats(model, batches, gram=True)


def rotated(model):
    wheel = lambda w: w @ jnp.linalg.qr(weights(jr.key(5), (w.shape[-1], w.shape[-1])))[0]
    return eqx.tree_at(lambda m: [layer.weight for layer in m.layers], model, [wheel(la.weight) for la in model.layers])


def perturb(model, size):
    """A model whose weights moved by a share `size` of their length."""
    change = lambda n, w: w + size * jnp.std(w) * weights(jr.key(n), w.shape)
    values = [change(n, layer.weight) for n, layer in enumerate(model.layers)]
    return eqx.tree_at(lambda m: [layer.weight for layer in m.layers], model, values)


OTHERS = {
    "checkpoint": lambda model: eqx.nn.MLP(32, 32, 64, 2, key=jr.key(1)),
    "rotated": rotated,
    "scaled": lambda model: jax.tree.map(lambda x: x * 1.2 if eqx.is_array(x) else x, model),
    "trained": lambda model: perturb(model, 0.2),
}
USES = {
    "gptq": lambda model, stats: eqq.quantize_tree(model, "int4", method=eqq.GPTQ(stats)),
    "of a rule": lambda model, stats: eqq.quantize_tree(model, {"*": eqq.QuantConfig("int4", eqq.MSE(stats))}),
    "inner": lambda model, stats: eqq.quantize_tree(model, "int4", method=eqq.GPTQ(stats, method=eqq.MSE(stats))),
    "learned": lambda model, stats: eqq.quantize_tree(model, "int4", method=eqq.LearnedRounding(stats)),
    "activations": lambda model, stats: eqq.quantize_tree(model, "int8", activations=stats),
    "smooth": lambda model, stats: eqq.transforms.smooth(model, eqq.transforms.SmoothQuant(stats)),
    "one array": lambda model, stats: eqq.quantize(
        model.layers[0].weight, "int4", method=eqq.GPTQ(stats["layers.0.weight"])
    ),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("use", USES)
def test_another_weight(model, stats, use, other):
    with pytest.raises(ValueError, match=CHANGED) as e:
        USES[use](OTHERS[other](model), stats)
    assert ("`x`" if use == "one array" else "layers.0.weight") in str(e.value)
    USES[use](OTHERS[other](model), stats.without_fingerprints())


@pytest.mark.parametrize("transform", ["smooth", "rotate"])
def test_from_before_a_transform(model, stats, transform):
    """The path of a weight changes with its inputs, if these are transformed in the product."""
    transforms = {"smooth": lambda: eqq.transforms.smooth(model, eqq.transforms.SmoothQuant(stats))}
    changed = transforms.get(transform, lambda: eqq.transforms.rotate(model))()
    with pytest.raises(ValueError, match="Got statistics of layers.0.weight from before `smooth` or `rotate`.*again"):
        eqq.quantize_tree(changed, "int4", method=eqq.GPTQ(stats))


@pytest.mark.parametrize("use", USES)
def test_the_same_weight(model, stats, use):
    USES[use](model, stats)
    USES[use](model, pickle.loads(pickle.dumps(stats)))
    USES[use](perturb(model, 0.01), stats)
    for dtype in (jnp.bfloat16, jnp.float16):
        USES[use](jax.tree.map(lambda x, dtype=dtype: x.astype(dtype) if eqx.is_array(x) else x, model), stats)


@pytest.mark.long
def test_statistics_of_a_transformed_model_are_accepted(model, batches, stats):
    smoothed = eqq.transforms.smooth(model, eqq.transforms.SmoothQuant(stats))
    again = collect_stats(smoothed, batches, gram=True)
    eqq.quantize_tree(smoothed, "int4", method=eqq.GPTQ(again))
    turned = eqq.transforms.rotate(model)
    eqq.quantize_tree(turned, "int4", method=eqq.GPTQ(collect_stats(turned, batches, gram=True)))


@pytest.mark.long
def test_under_transformations(model, stats):
    w, method = model.layers[0].weight, eqq.GPTQ(stats["layers.0.weight"])
    wanted = eqq.quantize(w, "int4", method=method).dequantize()
    for q in (
        jax.jit(lambda w: eqq.quantize(w, "int4", method=method))(w),
        jax.vmap(lambda w: eqq.quantize(w, "int4", method=method))(w[None]),
        jax.lax.map(lambda w: eqq.quantize(w, "int4", method=method), w[None]),
    ):
        np.testing.assert_allclose(q.dequantize().reshape(w.shape), wanted, atol=1e-6)
    shapes = jax.eval_shape(lambda: model.layers[0].weight)
    jax.eval_shape(lambda w: eqq.quantize(w, "int4", method=method), shapes)


@pytest.mark.long
def test_stacks(batches):
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, key=key))(jr.split(jr.key(0), 3))
    run = lambda layers, x: jax.lax.scan(lambda x, w: (x @ w.T, None), x, layers.weight)[0]
    stats = collect_stats(layers, batches, apply=run, gram=True)
    eqq.quantize_tree(layers, "int4", method=eqq.GPTQ(stats))
    swapped = eqx.tree_at(lambda la: la.weight, layers, layers.weight[::-1])
    with pytest.raises(ValueError, match=CHANGED):
        eqq.quantize_tree(swapped, "int4", method=eqq.GPTQ(stats))


def test_quantized_weights_have_none(model, batches):
    stats = collect_stats(eqq.quantize_tree(model, "int4"), batches, gram=True)
    assert all(leaf.fingerprint is None for leaf in stats.leaves)
    eqq.quantize_tree(model, "int4", method=eqq.GPTQ(stats))


def test_signs_of_fingerprints_do_not_depend_on_each_other():
    signs = np.asarray(jax.jit(lambda: jnp.concatenate([_signs(2000, 0), _signs(2000, 1)], axis=1))())
    assert set(signs.ravel()) == {-1, 1}
    np.testing.assert_allclose(signs.T @ signs / 2000, np.eye(2 * SUMS), atol=5 / 2000**0.5)  # five deviations


@pytest.mark.parametrize("shape", [(64, 64), (3, 40, 64), (8, 3, 5, 5), (1, 100)])
def test_fingerprints_preserve_distances(getkey, shape):
    """Distances of fingerprints equal distances of weights within three standard deviations."""
    w, change = weights(getkey(), shape), weights(getkey(), shape)
    apart = jnp.linalg.norm(fingerprint(w + 0.1 * change) - fingerprint(w)) / jnp.linalg.norm(0.1 * change.ravel())
    assert 16**0.5 * 0.3 < apart < 16**0.5 * 2
    np.testing.assert_array_equal(fingerprint(np.asarray(w)), fingerprint(w))
