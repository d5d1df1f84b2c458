"""What is observed of the inputs of weights: against the same model run by hand."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.calibrate import _gradients, collect_stats

from .helpers import weights


def close(actual, expected, tol=1e-5):
    scale = np.abs(np.asarray(expected)).max(initial=1e-30)
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=tol * scale)


def check(leaf, rows, *, threshold=6.0):
    """Checks the statistics of one leaf against `rows`, all of its inputs."""
    rows = np.asarray(rows, np.float64)
    assert leaf.rows.dtype == np.int64 and int(leaf.rows) == len(rows)
    close(leaf.min, rows.min(axis=0))
    close(leaf.max, rows.max(axis=0))
    close(leaf.mean, rows.mean(axis=0))
    close(leaf.mean_abs, np.abs(rows).mean(axis=0))
    close(leaf.second_moment, np.square(rows).mean(axis=0))
    close(leaf.outlier_rate, (np.abs(rows) > threshold).mean())
    if leaf.gram is not None:
        close(leaf.gram, rows.T @ rows / len(rows))


def normal(*shape, seed=0):
    return weights(jr.key(seed), shape)


def batches(*shape):
    # Of different lengths, scales and means: means over batches are not means over rows.
    return [normal(8, *shape, seed=1) * 4, normal(3, *shape, seed=2) + 1, normal(8, *shape, seed=3)]


# Layers


@pytest.mark.long
@pytest.mark.parametrize("format", [None, "int8", "nf4"])
def test_linear_layers(format):
    model = eqx.nn.MLP(6, 3, 16, 2, key=jr.key(0))
    model = model if format is None else eqq.quantize_tree(model, format)
    data = batches(6)
    stats = collect_stats(model, data, gram=True, threshold=2)
    assert [leaf.path for leaf in stats.leaves] == [f"layers.{n}.weight" for n in range(3)]
    assert (stats.batches, stats.threshold) == (3, 2)
    x = jnp.concatenate(data)
    for n, leaf in enumerate(stats.leaves):
        assert (leaf.axis, leaf.note, leaf.shape) == (-1, "", model.layers[n].weight.shape)
        check(leaf, x, threshold=2)
        close(np.diagonal(leaf.gram), leaf.second_moment)
        x = jax.nn.relu(jax.vmap(model.layers[n])(x))
    assert collect_stats(model, data).leaves[0].gram is None


def test_the_model_is_not_changed():
    model = eqx.nn.MLP(6, 3, 16, 2, key=jr.key(0))
    before, types = jtu.tree_leaves(model), jtu.tree_structure(model)
    outputs = []

    def apply(m, x):
        outputs.append(jax.eval_shape(jax.vmap(m), x))
        return jax.vmap(m)(x)

    collect_stats(model, [normal(4, 6)], apply=apply)
    assert jtu.tree_structure(model) == types
    assert all(a is b for a, b in zip(jtu.tree_leaves(model), before, strict=True))
    assert (outputs[0].shape, outputs[0].dtype) == ((4, 3), jnp.float32)


CONVOLUTIONS = {
    "one": (eqx.nn.Conv1d, (4, 6, 3), {}, (4, 9)),
    "two": (eqx.nn.Conv2d, (4, 6, (3, 2)), {"stride": 2, "padding": ((1, 0), (2, 1))}, (4, 8, 7)),
    "same": (eqx.nn.Conv2d, (4, 6, 3), {"padding": "SAME", "use_bias": False}, (4, 5, 5)),
    "three": (eqx.nn.Conv3d, (2, 3, 2), {"dilation": 2}, (2, 4, 5, 4)),
    "grouped": (eqx.nn.Conv2d, (4, 8, 3), {"groups": 2}, (4, 6, 6)),
    "circular": (eqx.nn.Conv2d, (4, 6, 3), {"padding": 1, "padding_mode": "CIRCULAR"}, (4, 5, 5)),
    "transposed": (eqx.nn.ConvTranspose2d, (4, 6, 3), {"stride": 2, "padding": 1, "output_padding": 1}, (4, 5, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    cls, arguments, keywords, shape = CONVOLUTIONS[name]
    layer = cls(*arguments, **keywords, key=jr.key(0))
    data = [normal(3, *shape, seed=1) * 4, normal(3, *shape, seed=2) + 1]
    stats = collect_stats(layer, data, gram=True)
    leaf = stats["weight"]
    assert leaf.axis == tuple(range(-layer.weight.ndim + 1, 0))
    assert leaf.shape == layer.weight.shape and leaf.min.shape == (layer.weight[0].size,)
    # The Gram matrix knows every product: the energy of the outputs follows from it.
    outputs = jnp.concatenate([jax.vmap(layer)(x) for x in data])
    linear = np.asarray(outputs, np.float64) - (0 if layer.bias is None else np.asarray(layer.bias, np.float64))
    positions = outputs[0, 0].size * len(outputs)
    assert int(leaf.rows) == positions * layer.groups
    if layer.groups == 1:
        kernels = np.asarray(layer.weight, np.float64).reshape(layer.weight.shape[0], -1)
        energy = np.einsum("of,fg,og->o", kernels, leaf.gram, kernels) * positions
        rest = (0, *range(2, linear.ndim))
        close(energy, np.square(linear).sum(axis=rest), 1e-4)
        close(kernels @ leaf.mean * positions, linear.sum(axis=rest), 1e-4)


@pytest.mark.long
def test_the_patches_of_a_convolution():
    # By hand: every window of every example.
    layer, data = eqx.nn.Conv1d(2, 5, 3, key=jr.key(0)), batches(2, 9)
    rows = [x[:, n : n + 3].reshape(-1) for batch in data for x in batch for n in range(7)]
    check(collect_stats(layer, data, gram=True)["weight"], rows)
    grouped = eqx.nn.Conv1d(2, 4, 3, groups=2, key=jr.key(0))
    rows = [x[c, n : n + 3] for batch in data for x in batch for n in range(7) for c in range(2)]
    check(collect_stats(grouped, data, gram=True)["weight"], rows)


@pytest.mark.long
def test_a_network_of_convolutions():
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 4, 3, key=jr.key(0)),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(4, 4, 3, key=jr.key(1)),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(4 * 4 * 4, 3, key=jr.key(2)),
        ]
    )
    data = [normal(5, 1, 8, 8, seed=n) + n for n in range(3)]
    for model in (model, eqq.quantize_tree(model, "int8")):
        stats = collect_stats(model, data)
        assert [leaf.path for leaf in stats.leaves] == ["layers.0.weight", "layers.2.weight", "layers.4.weight"]
        assert [int(leaf.rows) for leaf in stats.leaves] == [15 * 36, 15 * 16, 15]
        check(stats["layers.4.weight"], jnp.concatenate([jax.vmap(model[:4])(x) for x in data]))


@pytest.mark.long
def test_attention_and_recurrent_cells():
    attention = eqx.nn.MultiheadAttention(2, 8, key=jr.key(0))
    data = [normal(4, 5, 8), normal(2, 5, 8, seed=1)]
    stats = collect_stats(attention, data, apply=lambda m, x: jax.vmap(lambda x: m(x, x, x))(x))
    for name in ("query_proj", "key_proj", "value_proj"):
        check(stats[f"{name}.weight"], np.concatenate([x.reshape(-1, 8) for x in data]))
    assert int(stats["output_proj.weight"].rows) == 30

    cell, xs = eqx.nn.GRUCell(3, 4, key=jr.key(1)), normal(6, 7, 3)

    def run(cell, x):
        return jax.lax.scan(lambda h, x: (cell(x, h), h), jnp.zeros(4), x)

    stats = collect_stats(cell, [xs], apply=lambda m, xs: jax.vmap(lambda x: run(m, x)[0])(xs))
    check(stats["weight_ih"], xs.reshape(-1, 3))
    check(stats["weight_hh"], jax.vmap(lambda x: run(cell, x)[1])(xs).reshape(-1, 4))


# Ways to use a weight


@pytest.mark.long
def test_both_sides_of_the_product():
    w, data = normal(6, 4), [normal(5, 6, seed=1), normal(2, 6, seed=2)]
    rows = np.concatenate(data)
    uses = {
        "x @ w": (w, lambda w, x: x @ w, -2),
        "x @ w.T": (w.T, lambda w, x: x @ w.T, -1),
        "w.mT @ x": (w, lambda w, x: w.mT @ x.T, -2),
        "w @ x": (w.T, lambda w, x: w @ x.T, -1),
        "w @ vector": (w.T, lambda w, x: jax.vmap(lambda x: w @ x)(x), -1),
        "vector @ w": (w, lambda w, x: jax.vmap(lambda x: x @ w)(x), -2),
        "blocks @ w": (w, lambda w, x: x[:, None] @ w, -2),
        "astype": (w, lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), -2),
        "numpy": (np.asarray(w), lambda w, x: x @ w, -2),
    }
    for use, (weight, apply, axis) in uses.items():
        leaf = collect_stats({"w": weight}, data, apply=lambda m, x, f=apply: f(m["w"], x))["w"]
        exact = rows if use != "astype" else jnp.asarray(rows).astype(jnp.bfloat16)
        assert leaf.axis == axis, use
        check(leaf, exact)
    assert collect_stats(w, data, apply=lambda w, x: x @ w)["the array"].axis == -2


def test_outputs_are_unchanged():
    for w in (normal(6, 4), eqq.quantize(normal(6, 4), "int8"), normal(3, 6, 4)):
        for x in (normal(6), normal(5, 6), normal(3, 2, 6)):
            if w.ndim == 3 and x.ndim == 2:
                continue
            seen = []
            collect_stats(
                w, [x], apply=lambda w, x: jax.debug.callback(lambda y: seen.append(np.asarray(y)), x @ w) or x
            )
            jax.effects_barrier()
            np.testing.assert_allclose(seen[0], x @ w, rtol=1e-5, atol=1e-5)


def test_along_both_axes():
    # Tied, as in an autoencoder.
    apply = lambda w, x: jax.vmap(lambda x: w.T @ jnp.tanh(w @ x))(x)
    leaf = collect_stats(normal(3, 5), [normal(4, 5)], apply=apply)["the array"]
    check(leaf, normal(4, 5))
    assert leaf.axis == -1 and "along its other axis" in leaf.note


class Reader(eqx.Module):
    embedding: eqx.nn.Embedding
    linear: eqx.nn.Linear

    def __call__(self, i):
        return self.linear(self.embedding(i))


def test_lookups_are_not_observed_as_products():
    model = Reader(eqx.nn.Embedding(10, 8, key=jr.key(0)), eqx.nn.Linear(8, 2, key=jr.key(1)))
    ids = jnp.arange(6) % 3
    for model in (model, eqq.quantize_tree(model, "int8")):
        stats = collect_stats(model, [ids])
        leaf = stats["embedding.weight"]
        assert (leaf.axis, leaf.min, leaf.rows.tolist()) == (None, None, 0)
        assert "looked up, not multiplied" in leaf.note
        check(stats["linear.weight"], model.embedding.weight[ids])
    # As the head of a language model it is multiplied too.
    tied = collect_stats(model, [ids], apply=lambda m, i: jax.vmap(m.embedding)(i) @ m.embedding.weight.T)
    check(tied["embedding.weight"], model.embedding.weight[ids])
    assert tied["linear.weight"].note == "no batch reached it"


def test_how_outputs_depend_on_lookups():
    model = Reader(eqx.nn.Embedding(10, 4, key=jr.key(0)), eqx.nn.Linear(4, 1, key=jr.key(1)))
    data = [jnp.asarray([0, 1, 2]), jnp.asarray([3, 3, 4, 5])]
    both = lambda m: (m.embedding.weight, m.linear.weight)
    few = collect_stats(model, data[:1], where=both, lookups=True)["embedding.weight"]
    assert few.axis is None and "3 gradients are too few for 4 features" in few.note
    leaf = collect_stats(model, data, gram=True, lookups=True)["embedding.weight"]
    # With one output, each gradient is the row of the linear layer, up to its sign, once for each lookup.
    outer = np.outer(*[np.asarray(model.linear.weight[0], np.float64)] * 2)
    assert leaf.looked_up and int(leaf.rows) in (5, 6) and "depend on it" in leaf.note
    three_layers = leaf.gram * int(leaf.rows) / outer
    assert np.ptp(three_layers) < 1e-4 and np.isclose(three_layers.mean(), [5, 9], atol=1e-4).any()  # 3 + (0 or 4) + 2
    close(leaf.second_moment, np.diagonal(leaf.gram))
    assert collect_stats(model, data, lookups=True)["embedding.weight"].gram is None


@pytest.mark.long
def test_lookups_count_for_methods():
    weights = {"table": normal(20, 32), "mix": normal(32, 32, seed=3) * jnp.exp(2 * normal(1, 32, seed=4))}
    data = [jnp.arange(20)] * 8  # more gradients than features
    apply = lambda m, i: jnp.tanh(m["table"][i] @ m["mix"].T / 32)
    known = collect_stats(weights, data, apply=apply, gram=True, lookups=True)
    assert int(known["table"].rows) == 160
    wanted, rules = apply(weights, data[0]), {"table": "int3", "mix": None}

    def error(method):
        q = eqq.quantize_tree(weights, rules, method=method)
        return float(jnp.sum(jnp.square(apply({**weights, "table": q["table"].dequantize()}, data[0]) - wanted)))

    assert error(eqq.GPTQ(known)) < 0.6 * error(None)
    # Tables that are quantized already have no gradient.
    done = {**weights, "table": eqq.quantize(weights["table"], "int8")}
    assert collect_stats(done, data, apply=apply, lookups=True)["table"].axis is None
    # A table that is looked up takes no activations.
    q = eqq.quantize_tree(weights, "int8", activations=known)
    quantizing = {name for name, x in q.items() if isinstance(x, eqq.arrays.ActivationQuantizedArray)}
    assert quantizing == {"mix"}


def test_a_table_that_only_some_batches_multiply():
    def apply(m, batch):
        i, x = batch
        return m["table"][i] @ m["mix"].T if x is None else x @ m["table"].T

    weights = {"table": normal(6, 4), "mix": normal(4, 4, seed=1)}
    looked_up, multiplied = (jnp.arange(6), None), (jnp.arange(6), normal(9, 4, seed=2))
    for data in ([looked_up, multiplied], [multiplied, looked_up]):
        leaf = collect_stats(weights, data, apply=apply, gram=True, lookups=True)["table"]
        check(leaf, multiplied[1])
        assert leaf.gram is not None and "depend" not in leaf.note


def test_lookups_of_complex_outputs():
    weights = {"table": normal(8, 4), "mix": normal(4, 4, seed=1)}
    data = [jnp.arange(8)]

    def imaginary(m, i):
        y = m["table"][i] @ m["mix"].T
        return jax.lax.complex(jnp.zeros_like(y), y)

    leaf = collect_stats(weights, data, apply=imaginary, gram=True, lookups=True)["table"]
    assert int(leaf.rows) == 8 and np.trace(leaf.gram) > 0


def test_lookups_in_a_loop_without_a_gradient():
    def apply(m, i):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 0, lambda x: x + 1, m["table"][i]) @ m["mix"].T

    weights = {"table": normal(8, 4), "mix": normal(4, 4, seed=1)}
    with pytest.raises(ValueError, match="can differentiate. Got 'Reverse-mode.*`lookups=False`") as e:
        collect_stats(weights, [jnp.arange(8)], apply=apply, lookups=True)
    assert e.value.__cause__ is not None
    assert collect_stats(weights, [jnp.arange(8)], apply=apply)["table"].looked_up


def one_output(m, x):
    return jnp.tanh(m["first"] @ x) @ m["second"] @ m["last"]


@pytest.mark.parametrize("most_rows, count", [(2**15, 5), (4, 6)])
def test_gradients_in_the_place_of_inputs(monkeypatch, most_rows, count):
    """With one output and one input in a batch, each gradient is exact, up to its sign."""
    monkeypatch.setattr(_gradients, "_MOST_ROWS", most_rows)
    weights = {"first": normal(count, 16) / 8, "second": normal(count, 3, seed=1), "last": normal(3, 1, seed=2)}
    data = [normal(16, seed=n) for n in range(3, 9)]
    stats = collect_stats(weights, data, apply=one_output, gram=True, gradients=True)
    gradients = [jax.grad(lambda m, x: one_output(m, x)[0])(weights, x) for x in data]
    for name, axis in (("first", -1), ("second", -2)):
        rows = [np.asarray(g[name] if axis == -1 else g[name].T, np.float64) for g in gradients]
        leaf = stats[name]
        assert (leaf.axis, int(leaf.rows), leaf.note) == (axis, 6, "")
        close(leaf.gram, sum(g.T @ g for g in rows) / sum(len(g) for g in rows))
        close(leaf.second_moment, np.diagonal(leaf.gram))
        if len(rows[0]) > most_rows:
            assert leaf.output_gram is None
        else:
            close(leaf.output_gram, sum(g @ g.T for g in rows))
    assert "output_gram" not in stats["first"].to_dict()
    # Ranges stay those of the inputs, and so do the moments with fewer gradients than features.
    close(stats["first"].max, jnp.max(jnp.stack(data), axis=0))
    few = collect_stats(weights, data[:2], apply=one_output, gram=True, gradients=True)["first"]
    assert few.note == f"{2 * count} gradients are too few for 16 features" and few.output_gram is None
    plain = collect_stats(weights, data[:2], apply=one_output, gram=True)["first"]
    for name in ("rows", "min", "second_moment", "gram"):
        np.testing.assert_array_equal(getattr(few, name), getattr(plain, name))
    assert collect_stats(weights, data, apply=one_output, gradients=True)["first"].gram is None


@pytest.mark.long
def test_gradients_of_stacks_and_shared_weights():
    layers, data = normal(2, 4, 4), [normal(4, seed=n) for n in range(3, 9)]

    def scanned(m, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(w @ x), None), x, m["layers"])[0] @ m["last"]

    def unrolled(m, x):
        return jnp.tanh(m["b"] @ jnp.tanh(m["a"] @ x)) @ m["last"]

    last = normal(4, 1, seed=2)
    known = {"gram": True, "gradients": True}
    stacked = collect_stats({"layers": layers, "last": last}, data, apply=scanned, **known)["layers"]
    apart = collect_stats({"a": layers[0], "b": layers[1], "last": last}, data, apply=unrolled, **known)
    for n, name in enumerate("ab"):
        close(stacked.gram[n], apart[name].gram)
        close(stacked.output_gram[n], apart[name].output_gram)
    # A weight in two places has the gradient of both.
    w = layers[0]
    both = collect_stats({"a": w, "b": w, "last": last}, data, apply=unrolled, **known)
    gradients = [jax.grad(lambda w, x: unrolled({"a": w, "b": w, "last": last}, x)[0])(w, x) for x in data]
    for name in "ab":
        close(both[name].output_gram, sum(np.asarray(g, np.float64) @ np.asarray(g, np.float64).T for g in gradients))


def test_gradients_of_a_model_that_has_none():
    apply = lambda m, x: jax.lax.while_loop(lambda y: jnp.sum(y) < 0, lambda y: y + 1, m["w"] @ x)
    with pytest.raises(ValueError, match="`gradients=True` needs a model that JAX can differentiate"):
        collect_stats({"w": normal(8, 4)}, [normal(4)], apply=apply, gradients=True)


def test_gradients_of_lookups_that_are_not_finite():
    apply = lambda m, i: jnp.sqrt(jnp.abs(m["table"][i])) @ m["mix"].T
    weights = {"table": jnp.zeros((3, 4)), "mix": normal(4, 4)}
    with pytest.raises(ValueError, match="gradients of table must be finite.*batch 0"):
        collect_stats(weights, [jnp.arange(3)], apply=apply, lookups=True)


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: jnp.tanh(w) @ x.T,
        lambda w, x: x[:4] + w,
        lambda w, x: jnp.sum(jnp.square(w)) * x,
        lambda w, x: jnp.sort(w) @ x.T,
    ],
)
def test_the_report_names_unobserved_weights(use):
    model = {"seen": normal(4, 6), "unseen": normal(4, 6, seed=1)}
    stats = collect_stats(model, [normal(5, 6)], apply=lambda m, x: (use(m["unseen"], x), x @ m["seen"].T))
    assert (stats["unseen"].axis, stats["unseen"].second_moment) == (None, None)
    assert "not as a product" in stats["unseen"].note and "write" not in stats["seen"].note
    check(stats["seen"], normal(5, 6))
    partly = collect_stats(model, [normal(5, 6)], apply=lambda m, x: (use(m["seen"], x), x @ m["seen"].T))
    assert "in another way than as a product, which was not seen" in partly["seen"].note


def test_a_custom_convolution():
    class Own(eqx.nn.Conv1d):
        def __call__(self, x, *, key=None):
            return eqx.nn.Conv1d.__call__(self, jnp.sin(x))

    model = [Own(2, 3, 2, key=jr.key(0)), eqx.nn.Linear(3, 2, key=jr.key(1))]
    apply = lambda m, x: jax.vmap(lambda x: m[1](m[0](x).sum(axis=-1)))(x)
    stats = collect_stats(model, [normal(4, 2, 5)], apply=apply)
    assert stats["0.weight"].axis == (-2, -1) and stats["1.weight"].axis == -1
    patches = [jnp.sin(normal(4, 2, 5))[:, :, n : n + 2].reshape(4, -1) for n in range(4)]
    close(stats["0.weight"].second_moment, np.square(np.concatenate(patches)).mean(axis=0))


# Transformations


@pytest.mark.long
def test_stacked_layers_under_scan():
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(jr.split(jr.key(0), 3))
    data = batches(8)

    def apply(stack, x):
        dynamic, static = eqx.partition(stack, eqx.is_array)
        step = lambda x, layer: (jnp.tanh(jax.vmap(eqx.combine(layer, static))(x)), None)
        return jax.lax.scan(step, x, dynamic)[0]

    for stack in (stack, eqq.quantize_tree(stack, "int8")):
        leaf = collect_stats(stack, data, apply=apply, gram=True)["weight"]
        assert (leaf.rows.tolist(), leaf.min.shape, leaf.gram.shape) == ([19] * 3, (3, 8), (3, 8, 8))
        x = jnp.concatenate(data)
        for n in range(3):
            rows = np.asarray(x, np.float64)
            close(leaf.mean[n], rows.mean(axis=0))
            close(leaf.gram[n], rows.T @ rows / 19)
            x = jnp.tanh(jax.vmap(jtu.tree_map(lambda a, n=n: a[n], stack))(x))


def test_groups_of_stacked_layers():
    """Six layers as two groups of three, in the program or in the weight."""
    w, data = normal(6, 8, 8), normal(5, 8, seed=1)
    step = lambda x, w: (jnp.tanh(x @ w.T), None)
    in_groups = lambda w, x: jax.lax.scan(lambda x, group: jax.lax.scan(step, x, group), x, w.reshape(2, 3, 8, 8))[0]
    at_once = lambda w, x: jax.lax.scan(step, x, w.reshape(6, 8, 8))[0]
    for shape, run in (((6, 8, 8), in_groups), ((2, 3, 8, 8), at_once)):
        leaf = collect_stats({"w": w.reshape(shape)}, [data], apply=lambda model, x, run=run: run(model["w"], x))["w"]
        assert leaf.rows.shape == shape[:-2] and (leaf.rows == 5).all()
        x = data
        for mean, layer in zip(leaf.mean.reshape(6, 8), w, strict=True):
            close(mean, x.mean(axis=0))
            x = step(x, layer)[0]


@pytest.mark.long
def test_ensembles():
    ensemble = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 2, 8, 1, key=key))(jr.split(jr.key(0), 3))
    data, each = batches(4), normal(3, 6, 4)
    x = jnp.concatenate(data)
    member = lambda n: jtu.tree_map(lambda a: a[n] if eqx.is_array(a) else a, ensemble)
    shared_input = lambda m, x: eqx.filter_vmap(lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None))(m, x)
    outer_batch = lambda m, x: jax.vmap(lambda x: eqx.filter_vmap(lambda m: m(x))(m))(x)
    for apply in (shared_input, outer_batch):
        stats = collect_stats(ensemble, data, apply=apply)
        for n in range(3):
            close(stats["layers.0.weight"].second_moment, np.square(x).mean(axis=0))  # the same for all members
            hidden = jax.nn.relu(jax.vmap(member(n).layers[0])(x))
            close(stats["layers.1.weight"].mean[n], hidden.mean(axis=0))
    # Each with inputs of its own.
    stats = collect_stats(ensemble, [each], apply=lambda m, x: eqx.filter_vmap(lambda m, x: jax.vmap(m)(x))(m, x))
    for n in range(3):
        close(stats["layers.0.weight"].mean[n], each[n].mean(axis=0))


@pytest.mark.long
def test_stacked_convolutions():
    stack = eqx.filter_vmap(lambda key: eqx.nn.Conv1d(2, 2, 3, padding=1, key=key))(jr.split(jr.key(0), 2))
    data = batches(2, 6)

    def apply(stack, x):
        dynamic, static = eqx.partition(stack, eqx.is_array)
        return jax.lax.scan(lambda x, layer: (jax.vmap(eqx.combine(layer, static))(x), None), x, dynamic)[0]

    leaf = collect_stats(stack, data, apply=apply)["weight"]
    assert (leaf.rows.tolist(), leaf.min.shape) == ([19 * 6] * 2, (2, 6))
    first = jtu.tree_map(lambda a: a[0], stack)
    inner = jnp.concatenate([jax.vmap(first)(x) for x in data])
    close(leaf.max[1].reshape(2, 3)[:, 1], inner.max(axis=(0, 2)))


def test_batched_weights_and_experts():
    # (experts, out, in) used at once, and one expert at a time by `tree_map`.
    w, x = normal(3, 4, 5), normal(3, 7, 5, seed=1)
    leaf = collect_stats(w, [x], apply=lambda w, x: x @ w.mT)["the array"]
    assert leaf.rows.tolist() == [7, 7, 7] and leaf.axis == -1
    close(leaf.mean, x.mean(axis=1))
    one = lambda w, x: x @ jtu.tree_map(lambda a: a[1], w).T
    leaf = collect_stats(w, [x[1]], apply=one)["the array"]
    assert leaf.rows.tolist() == [0, 7, 0] and "2 of 3 layers were not reached" in leaf.note
    close(leaf.mean, np.stack([np.zeros(5), x[1].mean(axis=0), np.zeros(5)]))
    json.loads(collect_stats(w, [x[1]], apply=one).to_json())


def test_one_vector_for_many_weights():
    w, x = normal(3, 4, 5), normal(5)
    shapes = []

    def apply(w, x):
        shapes.append((w @ x).shape)  # twice; but the program drops what it does not need
        return w @ x

    leaf = collect_stats(w, [x], apply=apply)["the array"]
    assert shapes == [(w @ x).shape] and leaf.rows == 1
    close(leaf.mean, x)


@pytest.mark.parametrize("around", ["jit", "checkpoint", "while", "cond", "grad", "jvp"])
def test_products_inside_transformations(around):
    w, x = normal(5, 5), normal(4, 5, seed=1)

    def layer(w, x):
        return jnp.tanh(x @ w.T)

    def apply(w, x):
        if around == "jit":
            return jax.jit(layer)(w, x)
        if around == "checkpoint":
            return eqx.filter_checkpoint(layer)(w, x)
        if around == "while":
            return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, layer(w, s[1])), (0, x))
        if around == "cond":
            return jax.lax.cond(x[0, 0] < 1e6, lambda x: layer(w, x), lambda x: layer(w, x + 100), x)
        if around == "grad":  # with respect to the input, as for a force or a score
            return jax.grad(lambda x: layer(w, x).sum())(x)
        return jax.jvp(lambda x: layer(w, x), (x,), (x,))

    leaf = collect_stats(w, [x], apply=apply)["the array"]
    rows = [x]
    if around == "jvp":
        rows += [x]  # the tangent, which is multiplied by the same weight
    if around == "while":
        rows += [layer(w, x), layer(w, layer(w, x))]
    check(leaf, jnp.concatenate(rows))


# Leaves


def test_shared_leaves():
    shared = normal(4, 4)
    model = {"a": shared, "b": shared, "c": normal(4, 4, seed=1)}
    data = [normal(3, 4)]
    stats = collect_stats(model, data, apply=lambda m, x: ((x + 1) @ m["a"], (x * 2) @ m["b"], x @ m["c"]))
    rows = jnp.concatenate([data[0] + 1, data[0] * 2])
    for name in ("a", "b"):
        check(stats[name], rows)
    assert stats["b"].note == "the same array as a"
    check(stats["c"], data[0])


def test_equinox_shared():
    class Model(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self):
            layers = [eqx.nn.Linear(4, 4, use_bias=False, key=jr.key(n)) for n in range(2)]
            self.shared = eqx.nn.Shared(layers, lambda m: m[1].weight, lambda m: m[0].weight)

        def __call__(self, x):
            first, second = self.shared()
            return second(first(x))

    model, x = Model(), normal(3, 4)
    leaf = collect_stats(model, [x])["shared.pytree.0.weight"]
    check(leaf, jnp.concatenate([x, jax.vmap(model.shared()[0])(x)]))


def test_adapters_and_simulated_weights():
    model, x = eqx.nn.Linear(8, 4, key=jr.key(0)), normal(5, 8)
    for model in (
        eqq.loraify(model, rank=2, key=jr.key(1)),
        eqq.loraify(eqq.quantize_tree(model, "nf4"), rank=2, key=jr.key(1)),
        eqq.quantize_tree(model, "int4", simulate=True),
    ):
        check(collect_stats(model, [x])["weight"], x)


def test_where():
    model = eqx.nn.MLP(6, 3, 16, 2, key=jr.key(0))
    stats = collect_stats(model, batches(6), where=lambda m: m.layers[1].weight)
    assert [leaf.path for leaf in stats.leaves] == ["layers.1.weight"]
    stats = collect_stats(model, batches(6), where=lambda m: (m.layers[0], m.layers[2]))
    assert [leaf.path for leaf in stats.leaves] == ["layers.0.weight", "layers.2.weight"]


def test_observed_leaves_are_quantized_leaves():
    model = {
        "conv": eqx.nn.Conv1d(4, 8, 2, key=jr.key(0)),
        "norm": eqx.nn.GroupNorm(4, 8, channelwise_affine=True),
        "linear": eqx.nn.Linear(8, 2, key=jr.key(1)),
    }
    apply = lambda m, x: jax.vmap(lambda x: m["linear"](m["norm"](m["conv"](x)).sum(axis=-1)))(x)
    stats = collect_stats(model, [normal(4, 4, 5)], apply=apply)
    planned = [leaf.path for leaf in eqq.plan_tree(model).leaves if leaf.format is not None]
    assert sorted(leaf.path for leaf in stats.leaves) == sorted(planned)


# Reports


def test_reports():
    model = eqx.nn.MLP(4, 2, 8, 1, key=jr.key(0))
    stats = collect_stats(model, [normal(5, 4).at[0, :2].set(jnp.asarray([50.0, 6]))])  # of which one is above 6
    text = str(stats)
    assert text == repr(stats)
    for expected in ("layers.0.weight", "8 x 4", "above 6", "50", "5.0000%"):
        assert expected in text
    loaded = json.loads(stats.to_json())
    assert loaded == stats.to_dict() and loaded["batches"] == 1
    assert loaded["leaves"][0]["path"] == "layers.0.weight" and loaded["leaves"][0]["rows"] == 5
    assert loaded["leaves"][0]["max"][0] == 50 and "gram" not in loaded["leaves"][0]
    with pytest.raises(KeyError, match=r"No weight 'layers\.7\.weight' was watched.*layers\.1\.weight"):
        stats["layers.7.weight"]


def test_one_array_is_one_batch():
    model, x = eqx.nn.Linear(4, 2, key=jr.key(0)), normal(5, 4)
    assert (
        collect_stats(model, x).to_dict()
        == collect_stats(model, [x]).to_dict()
        == collect_stats(model, iter([x])).to_dict()
    )
    stats = collect_stats(model, [{"x": x}], apply=lambda m, batch: jax.vmap(m)(batch["x"]))
    check(stats["weight"], x)


def test_compiled_once():
    traces = []

    def apply(m, x):
        traces.append(x.shape)
        return jax.vmap(m)(x)

    collect_stats(eqx.nn.Linear(4, 2, key=jr.key(0)), [normal(5, 4, seed=n) for n in range(4)], apply=apply)
    assert traces == [(5, 4)]


# Errors


def test_errors_of_data():
    model = eqx.nn.MLP(4, 2, 8, 1, key=jr.key(0))
    with pytest.raises(ValueError, match="`batches` must hold data. Got no batch. A generator can be used only once"):
        collect_stats(model, [])
    with pytest.raises(ValueError, match=r"must not be empty\. Got shape \(0, 4\) in batch 1\. Leave it out"):
        collect_stats(model, [normal(3, 4), normal(0, 4)])
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        with pytest.raises(ValueError, match=r"layers\.0\.weight must be finite.* in batch 1, counted from 0"):
            collect_stats(model, [normal(3, 4), normal(3, 4).at[1, 2].set(bad), normal(3, 4)])
    with pytest.raises(ValueError, match=r"layers\.0\.weight must be finite, and so must their squares"):
        collect_stats(model, [normal(3, 4) * 1e25])


def test_nan_from_within_names_the_first_leaf_it_reaches():
    model = eqx.tree_at(lambda m: m.layers[0].bias, eqx.nn.MLP(4, 2, 8, 2, key=jr.key(0)), replace_fn=lambda b: b / 0)
    with pytest.raises(ValueError, match=r"The inputs of layers\.1\.weight must be finite"):
        collect_stats(model, [normal(3, 4)])


def test_nan_in_a_convolution():
    layer = eqx.nn.Conv1d(2, 3, 2, key=jr.key(0))
    with pytest.raises(ValueError, match=r"inputs of weight must be finite"):
        collect_stats(layer, [normal(3, 2, 5).at[0, 0, 0].set(jnp.nan)])


def test_errors_of_models():
    with pytest.raises(ValueError, match=r"must hold weights\. Got none among its leaves \(weight: fewer than two"):
        collect_stats(eqx.nn.LayerNorm(4), [normal(3, 4)])
    with pytest.raises(ValueError, match=r"Got none among its leaves \(none\)"):
        collect_stats({}, [normal(3, 4)])
    model = {"used": normal(4, 4), "table": normal(4, 4)}
    with pytest.raises(ValueError, match=r"Got none that was \(table: looked up.*used: used, but not as a product"):
        collect_stats(
            model, [normal(3, 4)], apply=lambda m, x: x + m["used"][:3] + m["table"][x[0, 0].astype(int)][None]
        )
    with pytest.raises(ValueError, match="`apply` must return the outputs of the model. Got no array"):
        collect_stats(model, [normal(3, 4)], apply=lambda m, x: None)
    linear = eqx.nn.Linear(4, 2, key=jr.key(0))
    with pytest.raises(TypeError, match=r"`where` must select weights\. Got bias: fewer than two dimensions"):
        collect_stats(linear, [normal(3, 4)], where=lambda m: m.bias)
    with pytest.raises(TypeError, match=r"Got n: not floating point"):
        collect_stats({"n": jnp.arange(3)}, [normal(3, 4)], where=lambda m: m["n"])
    with pytest.raises(ValueError, match="`where` must return leaves or nodes"):
        collect_stats(linear, [normal(3, 4)], where=lambda m: m.nothing)
    # An error of the model is the model's.
    with pytest.raises(TypeError, match="contract|incompatible|shape"):
        collect_stats(linear, [normal(3, 5)])


def test_a_weight_that_is_mapped_over_by_rows():
    class Model(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.WeightNorm

        def __call__(self, x):
            return self.norm(self.first(x))

    model = Model(eqx.nn.Linear(6, 16, key=jr.key(0)), eqx.nn.WeightNorm(eqx.nn.Linear(16, 4, key=jr.key(1))))
    stats = collect_stats(model, [normal(8, 6)])
    check(stats["first.weight"], normal(8, 6))
    check(stats["norm.layer.weight"], jax.vmap(model.first)(normal(8, 6)))
    # What the model does wrong by itself stays as it is.
    with pytest.raises(TypeError, match="dot_general"):
        collect_stats(model, [normal(8, 7)])


def test_names_are_not_parsed_as_markup():
    model = {"[bold]w": normal(4, 6), "[/x]": normal(4, 6)}
    stats = collect_stats(model, [normal(8, 6)], apply=lambda m, x: [x @ w.T for w in m.values()])
    assert "[bold]w" in str(stats) and "[/x]" in str(stats)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_])
def test_integer_inputs(dtype):
    x = (normal(8, 6) * 3).astype(dtype)
    with jax.numpy_dtype_promotion("standard"):
        stats = collect_stats({"w": normal(4, 6)}, [x], apply=lambda m, x: x @ m["w"].T, gram=True, threshold=2)
    check(stats["w"], x, threshold=2)


def test_thresholds():
    model, x = eqx.nn.Linear(6, 4, key=jr.key(0)), normal(8, 6)
    for threshold in (0, -1.0, np.nan):
        with pytest.raises(ValueError, match="`threshold` must be positive. Got"):
            collect_stats(model, [x], threshold=threshold)
    stats = collect_stats(model, [x], threshold=np.inf)
    assert type(stats.threshold) is float and json.loads(stats.to_json())["threshold"] is None


def test_a_dict_of_batches_is_an_error():
    with pytest.raises(TypeError, match="Got a dict. Pass a list of batches"):
        collect_stats(eqx.nn.Linear(6, 4, key=jr.key(0)), {"x": normal(8, 6)})
