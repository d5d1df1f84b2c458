"""Programs that are cut into parts: each value is computed once, and equal parts share a compiled function."""

import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._program import cut as cutting
from eqquant.calibrate import collect_stats

from .helpers import weights


FORMAT = eqq.Int2(16)


class Counter:
    """Returns its argument, and counts how often a program computes it."""

    def __init__(self):
        self.count = 0

    def __call__(self, x):
        return jax.pure_callback(self.add, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def add(self, x):
        self.count += 1
        return np.asarray(x)


def run_layers(m, x, seen=lambda x: x, seen_head=lambda x: x):
    for layer in m["layers"]:
        q, k = jnp.tanh(x @ layer["q"]), x @ layer["k"]
        x = seen(x) + jax.nn.softmax(q * k) @ layer["o"]
    return seen_head(x @ m["head"])


def make_layers(depth):
    layer = lambda n: dict(zip("qko", weights(jr.key(n), (3, 16, 16)), strict=True))
    return {"layers": [layer(n) for n in range(depth)], "head": weights(jr.key(99), (16, 40))}


def test_each_layer_runs_once_and_equal_layers_share_their_programs(monkeypatch):
    """For each batch, in either model; the head is quantized, and never computed."""
    made, make = [], cutting._make_function
    monkeypatch.setattr(cutting, "_make_function", lambda *args: made.append(args) or make(*args))
    x = list(weights(jr.key(1), (2, 32, 16)))
    programs = []
    for depth in (2, 4):
        seen, seen_head = Counter(), Counter()
        apply = ft.partial(run_layers, seen=seen, seen_head=seen_head)
        q = eqq.quantize_sequentially(make_layers(depth), x, FORMAT, eqq.GPTQ(), apply=apply)
        assert eqq.is_quantized(q["head"]) and (seen.count, seen_head.count) == (2 * len(x) * depth, 0)
        programs.append(len(made))
        made.clear()
    assert programs == [programs[0]] * 2 and programs[0] <= 4  # `q` and `k` of the first layer, others; `o`; the head


def test_weights_with_the_same_input_share_their_gram_matrix(monkeypatch):
    from eqquant.calibrate import _sequential

    grams, make = {}, _sequential.make_stats
    monkeypatch.setattr(
        _sequential,
        "make_stats",
        lambda leaf, observer: grams.update({leaf.path: observer.by_axes[-2,].total["gram"]}) or make(leaf, observer),
    )
    eqq.quantize_sequentially(make_layers(1), [weights(jr.key(1), (32, 16))], FORMAT, eqq.GPTQ(), apply=run_layers)
    assert grams["layers.0.q"] is grams["layers.0.k"] is not grams["layers.0.o"]


def quantize_by_hand(model, x, groups, apply):
    """Runs the whole model for each group of weights."""
    for names in groups:
        where = lambda m, names=names: [m[name] for name in names]
        stats = collect_stats(model, x, apply=apply, gram=True, where=where)
        model = eqq.quantize_tree(model, FORMAT, where=where, method=eqq.GPTQ(stats), axis=-2)
    return model


def in_every_layer(m, x):
    for name in "abc":
        x = jnp.tanh((x + jnp.tanh(x @ m["s"])) @ m[name])
    return x


def looked_up(m, x):
    """The first weight gives rows to all layers, and is multiplied between them."""
    x = jnp.tanh((x + m["s"][:2].sum(0, keepdims=True)) @ m["a"])
    x = jnp.tanh(jnp.tanh(x @ m["s"].T) @ m["b"])
    return (x + m["s"][:2].sum(0, keepdims=True)) @ m["c"]


@pytest.mark.long
@pytest.mark.parametrize("apply, groups", [(in_every_layer, "sabc"), (looked_up, "asbc")])
def test_values_of_a_weight_that_was_used_before_it_was_quantized_are_computed_again(apply, groups):
    x = list(weights(jr.key(1), (2, 32, 16)))
    model = dict(zip("sabc", weights(jr.key(0), (4, 16, 16)), strict=True))
    q = eqq.quantize_sequentially(model, x, FORMAT, eqq.GPTQ(), apply=apply, correction=0)
    expected = model
    for name in groups:
        where = lambda m, name=name: m[name]
        stats = collect_stats(expected, x, apply=apply, gram=True, where=where)
        expected = eqq.quantize_tree(expected, FORMAT, where=where, method=eqq.GPTQ(stats), axis=stats[name].axis)
    for name in model:
        np.testing.assert_allclose(q[name].dequantize(), expected[name].dequantize(), atol=1e-5)


LOOPS = {
    "index": lambda m, x: jax.lax.scan(lambda x, n: (jnp.tanh(x @ m[n]), x[0]), x, jnp.arange(3)),
    "reverse": lambda m, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x[0]), x, m[::-1], reverse=True),
    "counter": lambda m, x: jax.lax.fori_loop(0, 3, lambda n, x: jnp.tanh(x @ m[n]), x),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_the_codes_of_its_layers(name, monkeypatch):
    x, w = list(weights(jr.key(1), (2, 32, 16))), weights(jr.key(0), (3, 16, 16))
    made, make = [], cutting._make_function
    monkeypatch.setattr(cutting, "_make_function", lambda *args: made.append(args) or make(*args))
    q = eqq.quantize_sequentially(w, x, FORMAT, eqq.GPTQ(), apply=LOOPS[name])
    assert len(made) == 2  # of the first layer and of the others
    apply = lambda m, x: ft.reduce(lambda x, w: jnp.tanh(x @ w), m, x)
    expected = eqq.quantize_sequentially(list(w), x, FORMAT, eqq.GPTQ(), apply=apply)
    for n in range(3):
        np.testing.assert_allclose(q[n], expected[n].dequantize(), atol=1e-5)


def test_what_is_kept_in_files_or_in_fewer_bits(tmp_path):
    x, model = list(weights(jr.key(1), (2, 32, 16))), make_layers(2)
    found = []
    run = lambda **options: eqq.quantize_sequentially(model, x, FORMAT, eqq.GPTQ(), apply=run_layers, **options)
    see = lambda m: found.append([file.stat().st_size for file in tmp_path.rglob("*-*") if file.is_file()])
    q = run()
    same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    same(run(keep_in=tmp_path, after_each=see), q)
    assert {size for sizes in found for size in sizes} == {32 * 16 * 4} and max(map(len, found)) >= 2 * len(x)
    assert not list(tmp_path.iterdir())
    rounded = run(keep_in=tmp_path, keep_dtype="bfloat16", after_each=see)
    assert found[-2][0] == 32 * 16 * 2
    dense = lambda q: jnp.concatenate([x.dequantize().ravel() for x in jax.tree.leaves(q, is_leaf=eqq.is_quantized)])
    assert 0.3 < jnp.mean(dense(q) == dense(rounded)) < 1  # one other code changes those after it
    with pytest.raises(ValueError, match="`keep_dtype` must be a floating-point dtype.*Got 'int8'"):
        run(keep_dtype="int8")
    with pytest.raises(ValueError, match="`keep_in` must be a folder. Got .*nowhere"):
        run(keep_in=tmp_path / "nowhere")
