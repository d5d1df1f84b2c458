"""Weights of a traced program, followed to their products: every way to write a product gives the same statistics."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import eqquant as eqq
from eqquant._program import views
from eqquant._program.facts import combine_facts, Data, Parameter
from eqquant.calibrate import collect_stats

from .helpers import outputs, weights


def normal(*shape, seed=0):
    return weights(jr.key(seed), shape)


def gram(rows):
    rows = np.asarray(rows, np.float64).reshape(-1, rows.shape[-1])
    return rows.T @ rows / len(rows)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@functools.cache
def inputs():
    return normal(7, 12, seed=1)


def _concatenate(w, x):
    both = jnp.concatenate([w, w * 2], axis=0)
    return jnp.split(x @ both.T, 2, axis=-1)[0]


def _split(w, x):
    q, k = jnp.split(w, 2, axis=0)
    return x @ q.T, x @ k.T


def _loop(w, x):
    return lax.fori_loop(0, 1, lambda _, y: y + jnp.einsum("bi,oi->bo", x, w), jnp.zeros((7, 8)))


def _loop_until(w, row):
    """Each row of a batch says itself when to stop: here, after one step."""
    n = jnp.where(row[0] > 0, 0, 1)
    return lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1], w @ row), (n, n + 1, jnp.zeros(8)))[2]


# Each multiplies w(8, 12) by the rows of x(7, 12).
WAYS = {
    "matmul": lambda w, x: jnp.matmul(x, w.T),
    "einsum": lambda w, x: jnp.einsum("oi,bi->bo", w, x),
    "dot": lambda w, x: jnp.dot(x, w.T),
    "tensordot": lambda w, x: jnp.tensordot(x, w, axes=((1,), (1,))),
    "dot_general": lambda w, x: lax.dot_general(w, x, (((1,), (1,)), ((), ()))),
    "heads": lambda w, x: jnp.einsum("hdi,bi->bhd", w.reshape(2, 4, 12), x),
    "heads as a batch": lambda w, x: jnp.einsum("hdi,hbi->hbd", w.reshape(2, 4, 12), jnp.stack([x, x])),
    "inputs in two axes": lambda w, x: jnp.einsum("oij,bij->bo", w.reshape(8, 3, 4), x.reshape(7, 3, 4)),
    "inputs in another order": lambda w, x: jnp.einsum(
        "oij,bji->bo", w.reshape(8, 3, 4), x.reshape(7, 3, 4).swapaxes(1, 2)
    ),
    "inputs split twice": lambda w, x: jnp.einsum(
        "oijk,bijk->bo", w.reshape(8, 4, 3).reshape(8, 2, 2, 3), x.reshape(7, 2, 2, 3)
    ),
    "reversed": lambda w, x: x[:, ::-1] @ w[:, ::-1].T,
    "padded axes": lambda w, x: x @ w[None, :, None].squeeze((0, 2)).T,
    "broadcast": lambda w, x: jnp.matmul(jnp.broadcast_to(w, (7, 8, 12)), x[..., None])[..., 0],
    "pieces": _split,
    "joined": _concatenate,
    "split of inputs": lambda w, x: jnp.einsum("oi,bi->bo", jnp.flip(w, 0), x),
    "mask": lambda w, x: x @ jnp.where(jnp.tril(jnp.ones((8, 12))) > 0, w, 0).T,
    "factor": lambda w, x: jnp.einsum("oi,bi->bo", w * 0.5 / 3, x),
    "cast": lambda w, x: (x.astype(jnp.float16) @ w.astype(jnp.float16).T).astype(jnp.float32),
    "weight norm": lambda w, x: x @ (w / jnp.linalg.norm(w, axis=-1, keepdims=True)).T,
    "stop_gradient": lambda w, x: x @ lax.stop_gradient(w).T,
    "name": lambda w, x: x @ checkpoint_name(w, "w").T,
    "checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jnp.einsum("oi,bi->bo", w, x))(w, x),
    "jit": lambda w, x: jax.jit(lambda w, x: jnp.einsum("oi,bi->bo", w, x))(w, x),
    "vmap": lambda w, x: jax.vmap(lambda x: jnp.einsum("oi,i->o", w, x))(x),
    "vmap over rows of the weight": lambda w, x: jax.vmap(lambda row: x @ row)(w),
    "cond": lambda w, x: lax.cond(x[0, 0] > 1e3, lambda: x @ w.T + 1, lambda: jnp.einsum("oi,bi->bo", w, x)),
    "scan": lambda w, x: lax.scan(lambda c, row: (c, jnp.einsum("oi,i->o", w, row)), 0.0, x)[1],
    "while": _loop,
    "while under vmap": lambda w, x: jax.vmap(lambda row: _loop_until(w, row))(x),
    "linear_call": lambda w, x: jax.custom_derivatives.linear_call(lambda w, x: x @ w.T, lambda w, y: y @ w, w, x),
    "convolution": lambda w, x: lax.conv_general_dilated(x[:, :, None], w[:, :, None], (1,), "VALID"),
    "ragged_dot": lambda w, x: lax.ragged_dot(x, w.T[None], jnp.asarray([7])),
    "custom_jvp": lambda w, x: jax.nn.relu(jax.nn.relu(x @ w.T)) - 0,
}


@pytest.mark.parametrize("way", WAYS)
def test_statistics_do_not_depend_on_how_a_product_is_written(way):
    stats = collect_stats({"w": normal(8, 12)}, [inputs()], apply=lambda m, x: WAYS[way](m["w"], x), gram=True)["w"]
    assert stats.axis == -1, stats.note
    tolerant = inputs().astype(jnp.float16) if way == "cast" else inputs()
    close(stats.gram, gram(tolerant))
    # The norm of a weight is another use of it.
    assert ("not seen" in stats.note) == (way == "weight norm")


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("convolution", "cast")])
def test_observed_outputs_equal_the_model(way):
    seen = []

    def apply(m, x):
        y = WAYS[way](m["w"], x)
        jax.debug.callback(lambda y: seen.append(jax.tree.map(np.asarray, y)), y)
        return y

    collect_stats({"w": normal(8, 12)}, [inputs()], apply=apply)
    jax.effects_barrier()
    jax.tree.map(close, seen[-1], jax.tree.map(np.asarray, WAYS[way](normal(8, 12), inputs())))


@pytest.mark.long
def test_input_axes_are_the_contracted_axes():
    # (embed, heads, size), (heads, size, embed) and (heads, embed, size) as libraries with named axes store them.
    model = {"q": normal(12, 2, 3), "o": normal(2, 3, 12), "each": normal(2, 12, 5)}

    def apply(m, x):
        heads = jnp.einsum("be,ehd->bhd", x, m["q"])
        return jnp.einsum("bhd,hde->be", heads, m["o"]), jnp.einsum("hbe,hed->hbd", jnp.stack([x, 2 * x]), m["each"])

    stats = collect_stats(model, [inputs()], apply=apply, gram=True)
    heads = jnp.einsum("be,ehd->bhd", inputs(), model["q"])
    assert (stats["q"].axis, stats["o"].axis, stats["each"].axis) == (-3, (-3, -2), -2)
    close(stats["q"].gram, gram(inputs()))
    close(stats["o"].gram, gram(heads.reshape(7, 6)))
    assert stats["each"].rows.tolist() == [7, 7]
    close(stats["each"].gram, np.stack([gram(inputs()), 4 * gram(inputs())]))
    for name, w in model.items():
        leaf = stats[name]
        q = eqq.quantize(w, eqq.Int4(block_size=None), axis=leaf.axis, method=eqq.GPTQ(leaf))
        plain = eqq.quantize(w, eqq.Int4(block_size=None), axis=leaf.axis)
        assert jnp.abs(q.dequantize() - w).max() < 1 and q.format == plain.format


def test_statistics_of_layers_selected_by_index():
    stack = normal(4, 12, 12) / 4

    def loop(w, x):
        return lax.fori_loop(1, 4, lambda n, x: jnp.tanh(jnp.einsum("bi,oi->bo", x, w[n])), x)

    def scan(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w.T), None), x, w[1:])[0]

    def run_unrolled(w, x):
        for n in range(1, 4):
            x = jnp.tanh(jnp.matmul(x, w[n].T))
        return x

    wanted, x = [np.zeros((12, 12))], inputs()
    for n in range(1, 4):
        wanted.append(gram(x))
        x = jnp.tanh(x @ stack[n].T)
    for apply in (loop, scan, run_unrolled):
        leaf = collect_stats(stack, [inputs()], apply=apply, gram=True)["the array"]
        assert leaf.rows.tolist() == [0, 7, 7, 7]
        close(leaf.gram, np.stack(wanted))


@pytest.mark.long
def test_experts_see_the_tokens_that_reach_them():
    experts, chosen = normal(3, 5, 12), jnp.asarray([2, 0, 2, 2, 0, 0, 0])
    order = jnp.argsort(chosen)
    reached = [gram(inputs()[chosen == n]) if n != 1 else np.zeros((12, 12)) for n in range(3)]

    def multiply_ragged(w, x):
        return lax.ragged_dot(x[order], w.mT, jnp.bincount(chosen, length=3))

    def multiply_gathered(w, x):
        return jax.vmap(lambda w, x: w @ x)(w[chosen], x)

    def multiply_selected(w, x):
        return jax.vmap(lambda n, x: eqq.take_layer(w, n) @ x)(chosen, x)

    for apply in (multiply_ragged, multiply_gathered, multiply_selected):
        leaf = collect_stats(experts, [inputs()], apply=apply, gram=True)["the array"]
        assert leaf.rows.tolist() == [4, 0, 3] and "1 of 3 layers were not reached" in leaf.note
        close(leaf.gram, np.stack(reached))
        close(leaf.min[2], np.asarray(inputs()[chosen == 2]).min(axis=0))
        q = eqq.quantize(experts, "int4", method=eqq.GPTQ(leaf))
        assert jnp.isfinite(q.dequantize()).all()


def test_extremes_are_of_the_tokens_that_reach_an_expert():
    x = np.where(np.arange(12) < 6, 1, -1) * (1 + np.abs(inputs()))  # all inputs are far from zero
    run = lambda w, x: lax.ragged_dot(x, w, jnp.asarray([4, 3]))
    leaf, parts = collect_stats(normal(2, 12, 5), [x], apply=run)["the array"], (x[:4], x[4:])
    close(leaf.min, np.stack([part.min(axis=0) for part in parts]))
    close(leaf.max, np.stack([part.max(axis=0) for part in parts]))


def test_every_expert_for_every_token():
    leaf = collect_stats(
        normal(3, 12, 5), [inputs()], apply=lambda w, x: jnp.einsum("te,eio,ti->to", jnp.ones((7, 3)), w, x), gram=True
    )["the array"]
    assert leaf.axis == -2
    close(leaf.gram[0] if leaf.gram.ndim > 2 else leaf.gram, gram(inputs()))


@pytest.mark.long
def test_convolutions_of_every_kind():
    x = normal(3, 4, 9, seed=2)
    layers = {
        "plain": eqx.nn.Conv1d(4, 6, 3, key=jr.key(0)),
        "grouped": eqx.nn.Conv1d(4, 6, 3, groups=2, key=jr.key(0)),
        "depthwise": eqx.nn.Conv1d(4, 8, 3, groups=4, stride=2, padding=1, key=jr.key(0)),
        "one": eqx.nn.Conv1d(4, 6, 1, key=jr.key(0)),
        "transposed": eqx.nn.ConvTranspose1d(4, 6, 3, stride=2, key=jr.key(0)),
    }
    for name, layer in layers.items():
        leaf = collect_stats(layer, [x], gram=True)["weight"]
        assert leaf.axis == (-2, -1) and leaf.gram.shape == (np.prod(layer.weight.shape[1:]),) * 2, name
        # With one group, the Gram matrix gives the mean square of the outputs of a kernel.
        if getattr(layer, "groups", 1) == 1:
            plain = eqx.tree_at(lambda c: c.bias, layer, jnp.zeros_like(layer.bias))
            y = np.moveaxis(np.asarray(jax.vmap(plain)(x), np.float64), 1, 0).reshape(6, -1)
            w = np.asarray(layer.weight, np.float64).reshape(6, -1)
            close(np.einsum("oi,ij,oj->o", w, leaf.gram, w), np.square(y).mean(axis=1))


def test_products_over_some_features():
    def apply(w, x):
        return x[:, :4] @ w[:, :4].T + x[:, 4:] @ w[:, 4:].T

    leaf = collect_stats(normal(8, 12), [inputs()], apply=apply, gram=True)["the array"]
    wanted = gram(inputs()) / 2  # each of the two products counts as rows
    wanted[:4, 4:] = wanted[4:, :4] = 0
    close(leaf.gram, wanted)
    assert "multiplied in parts" in leaf.note
    whole = collect_stats(normal(8, 12), [inputs()], apply=lambda w, x: x @ w.T)["the array"]
    assert "in parts" not in whole.note
    # Behind others that are no weight.
    joined = lambda w, x: x @ jnp.concatenate([jnp.ones((8, 4)), w], axis=1).T
    leaf = collect_stats(normal(8, 8), [inputs()], apply=joined, gram=True)["the array"]
    close(leaf.gram, gram(inputs()[:, 4:]))


SUMS = {
    "complex": lambda a, b: a + b.astype(jnp.complex64) * jnp.asarray(1j, jnp.complex64),
    "lax.complex": lax.complex,
    "difference": lambda a, b: a - b,
    "joined": lambda a, b: jnp.concatenate([a + b, a]),
    "parts": lambda a, b: jnp.concatenate([a[:4] + b[:4], a[4:] - b[4:]]),
}


@pytest.mark.parametrize("way", SUMS)
def test_sums_of_weights(way):
    """Each term meets the inputs of the sum, as the real and the imaginary part of a spectral convolution do."""
    weights, x = (normal(8, 12), normal(8, 12, seed=1)), inputs()

    def apply(weights, x):
        return jnp.abs(jnp.einsum("bi,oi->bo", x, SUMS[way](*weights)))

    with jax.numpy_dtype_promotion("standard"):
        stats = collect_stats(weights, [x], apply=apply, gram=True)
    for leaf in stats.values():
        assert (leaf.axis, leaf.note) == (-1, "")
        close(leaf.gram, gram(x))


def _add_layers(x, pair):
    return jnp.tanh(x @ (pair[0] - pair[1]).T), None


def _unroll(pair, x):
    for n in range(len(pair[0])):
        x, _ = _add_layers(x, (pair[0][n], pair[1][n]))
    return x


def _scan_pairs(pair, x):
    merge = lambda w: w.reshape(2, 2, 12, 12).swapaxes(0, 1).reshape(4, 12, 12)
    return lax.scan(_add_layers, x, tuple(map(merge, pair)))[0]


SUMS_OF_LAYERS = {
    "scan": lambda pair, x: lax.scan(_add_layers, x, pair)[0],
    "reverse": lambda pair, x: lax.scan(_add_layers, x, pair, reverse=True)[0],
    "two scans": lambda pair, x: lax.scan(
        _add_layers, lax.scan(_add_layers, x, (pair[0][:3], pair[1][:3]))[0], (pair[0][3:], pair[1][3:])
    )[0],
    "two digits": _scan_pairs,
    "unrolled": _unroll,
}


@pytest.mark.parametrize("way", SUMS_OF_LAYERS)
def test_sums_of_layers(way):
    """A sum of two stacks is followed layer by layer."""
    pair, x = (normal(4, 12, 12) / 4, normal(4, 12, 12, seed=2) / 4), inputs()
    wanted = [None] * 4
    for n in {"reverse": (3, 2, 1, 0), "two digits": (0, 2, 1, 3)}.get(way, range(4)):
        wanted[n] = gram(x)
        x = _add_layers(x, (pair[0][n], pair[1][n]))[0]
    for leaf in collect_stats(pair, [inputs()], apply=SUMS_OF_LAYERS[way], gram=True).values():
        assert (leaf.axis, leaf.note) == (-1, "")
        close(leaf.gram, np.stack(wanted))


def test_sums_of_different_layers_are_not_followed():
    pair = normal(4, 12, 12), normal(4, 12, 12, seed=2)

    def apply(pair, x):
        return lax.scan(_add_layers, x, (pair[0], pair[1][::-1]))[0]

    first, second = collect_stats(pair, [inputs()], apply=apply).values()
    assert first.axis == -1 and second.axis is None, second.note


def test_a_weight_added_to_itself_counts_once():
    leaf = collect_stats(normal(8, 12), [inputs()], apply=lambda w, x: x @ (w + w).T, gram=True)["the array"]
    assert leaf.rows == len(inputs())


@pytest.mark.long
def test_an_einsum_model_without_quaxify():
    # A library that writes einsum, without a word of `quaxify`: statistics for every method.
    class Net(eqx.Module):
        w1: jax.Array
        w2: jax.Array

        def __call__(self, x):
            return jnp.einsum("i,io->o", jax.nn.gelu(jnp.einsum("i,oi->o", x, self.w1)), self.w2)

    x = normal(64, 16, seed=3) @ jnp.tril(jnp.ones((16, 16)))  # correlated
    model = Net(normal(32, 16), normal(32, 8))
    stats = collect_stats(model, [x], gram=True)
    assert {path: leaf.axis for path, leaf in stats.items()} == {"w1": -1, "w2": -2}
    wanted = outputs(model, x)
    error = lambda q: float(jnp.linalg.norm(jax.vmap(eqq.dequantize_tree(q))(x) - wanted))
    plain, gptq = (eqq.quantize_tree(model, {"w1": "int3", "*": None}, method=m) for m in (None, eqq.GPTQ(stats)))
    assert error(gptq) < 0.8 * error(plain)
    one_by_one = eqq.quantize_sequentially(model, [x], {"w1": "int3", "*": None}, eqq.GPTQ())
    assert error(one_by_one) < 0.8 * error(plain)


# Views


def find_places(view, weight_shape, shape):
    """The place in the flat weight of each value of an array, by the digits of its view."""
    strides = [math.prod(weight_shape[axis + 1 :]) for axis in range(len(weight_shape))]
    places = np.array(sum(digit.at * digit.stride * strides[digit.axis] for digit in view.fixed))
    for axis, digits in enumerate(view.axes):
        along = np.zeros(1, int)
        for digit in digits:
            step = digit.stride * strides[digit.axis]
            along = (along[:, None] + np.asarray(digit.values) * step).reshape(-1)
        places = places + along.reshape([-1 if n == axis else 1 for n in range(len(shape))])
    return np.broadcast_to(places, shape)


def move_at_random(rng, view, x):
    """An operation on an array, and on its view."""
    kind, axis = rng.integers(5), int(rng.integers(x.ndim))
    if kind == 0:
        order = [*map(int, rng.permutation(x.ndim))]
        return views.transpose(view, order), x.transpose(order)
    if kind == 1:  # one axis of two, or two of one
        length = next((n for n in (2, 3, 4, 5, 1) if x.shape[axis] % n == 0 and rng.random() < 0.5), 1)
        merged = x.shape[axis : axis + 2] if rng.random() < 0.5 else None
        middle = (math.prod(merged),) if merged else (length, x.shape[axis] // length)
        shape = (*x.shape[:axis], *middle, *x.shape[axis + (len(merged) if merged else 1) :])
        return views.reshape(view, x.shape, shape), x.reshape(shape)
    if kind == 2:
        entries = rng.permutation(x.shape[axis])[: rng.integers(1, x.shape[axis] + 1)]
        return views.take(view, {axis: lambda values: np.asarray(values)[entries]}), x.take(entries, axis)
    if kind == 3 and x.shape[axis] == 1:
        return views.squeeze(view, [axis]), x.squeeze(axis)
    if x.shape[axis] == 1:
        new = np.repeat(x, 3, axis)
        return views.broadcast(view, x.shape, new.shape, range(x.ndim)), new
    new = np.broadcast_to(np.expand_dims(x, axis), (*x.shape[:axis], 2, *x.shape[axis:]))
    return views.broadcast(view, x.shape, new.shape, [n + (n >= axis) for n in range(x.ndim)]), new


def test_views_say_where_values_are():
    """Of any sequence of operations, as NumPy moves the numbers of all places."""
    rng, known = np.random.default_rng(0), 0
    halves = views.transpose(views.reshape(views.view_weight(0, (6,)), (6,), (2, 3)), (1, 0))
    places = find_places(views.reshape(halves, (3, 2), (6,)), (6,), (6,))
    np.testing.assert_array_equal(places, np.arange(6).reshape(2, 3).T.reshape(6))
    for _ in range(1000):
        shape = tuple(map(int, rng.choice([1, 2, 3, 4, 6], rng.integers(1, 4))))
        x = np.arange(math.prod(shape)).reshape(shape)
        view = views.view_weight(0, shape)
        for _ in range(rng.integers(1, 8)):
            if x.ndim and x.size < 300:
                view, x = move_at_random(rng, view, x)
        if all(digits is not None for digits in view.axes):
            np.testing.assert_array_equal(find_places(view, shape, x.shape), x)
            known += 1
    assert known > 700


def test_results_that_depend_on_data():
    """Of data, and of weights among whose values data selects; also of one part of a concatenation."""
    view = views.view_weight(0, (3, 4))
    looked_up = view._replace(looked_up=True)
    join = lambda *parts: views.Concatenated(0, tuple((part, 3) for part in parts))
    for facts, expected in (
        *(([], Parameter), ([Parameter, view], Parameter), ([join(view, None)], Parameter)),
        *(([view, Data], Data), ([Parameter, looked_up], Data), ([join(None, view, looked_up)], Data)),
    ):
        assert combine_facts(facts) is expected
