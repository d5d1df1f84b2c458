"""Rotations that move into the layers before: residual streams, and pairs of layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._numerics.hadamard import rotate as rotated
from eqquant._wrappers.rotated import RotatedArray

from .helpers import import_example, weights


SIZE, WIDE, HEAD, WORDS = 24, 32, 4, 11
WRITERS = ("embedding.weight", "layers.{n}.output.{p}", "layers.{n}.down.{p}")
READERS = {
    "layers.{n}.attention_norm.weight": "layers.{n}.{x:query|value}.weight",
    "layers.{n}.mlp_norm.weight": "layers.{n}.up.weight",
    "norm.weight": "head.weight",
}
FOLD = {
    WRITERS: eqq.transforms.ResidualStream(READERS),
    "layers.{n}.value.{p}": eqq.transforms.FoldInto(("layers.{n}.output.weight",), HEAD),
}


class Layer(eqx.Module):
    """Attention whose four heads share two heads of values, and a perceptron."""

    attention_norm: eqx.Module
    query: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    mlp_norm: eqx.Module
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, norm, key):
        keys = jr.split(key, 7)
        gained = lambda key: eqx.tree_at(lambda m: m.weight, norm(SIZE), jnp.exp(weights(key, (SIZE,))))
        self.attention_norm, self.mlp_norm = gained(keys[0]), gained(keys[1])
        self.query = eqx.nn.Linear(SIZE, 4 * HEAD, key=keys[2])
        self.value = eqx.nn.Linear(SIZE, 2 * HEAD, key=keys[3])
        self.output = eqx.nn.Linear(4 * HEAD, SIZE, key=keys[4])
        self.up = eqx.nn.Linear(SIZE, WIDE, key=keys[5])
        self.down = eqx.nn.Linear(WIDE, SIZE, key=keys[6])

    def __call__(self, x):
        y = jax.vmap(self.attention_norm)(x)
        query = jax.vmap(self.query)(y).reshape(-1, 4, HEAD)
        value = jnp.repeat(jax.vmap(self.value)(y).reshape(-1, 2, HEAD), 2, axis=1)
        shares = jax.nn.softmax(jnp.einsum("ihd,jhd->hij", query, query), axis=-1)
        x = x + jax.vmap(self.output)(jnp.einsum("hij,jhd->ihd", shares, value).reshape(len(x), -1))
        return x + jax.vmap(lambda x: self.down(jax.nn.silu(self.up(self.mlp_norm(x)))))(x)


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    layers: list | Layer
    norm: eqx.Module
    head: eqx.nn.Linear

    def __init__(self, norm=lambda size: eqx.nn.RMSNorm(size, use_bias=False), stacked=False):
        keys = jr.split(jr.key(0), 4)
        self.embedding = eqx.nn.Embedding(WORDS, SIZE, key=keys[0])
        layers = [Layer(norm, key) for key in keys[1:3]]
        stack = lambda *x: jnp.stack(x) if eqx.is_array(x[0]) else x[0]
        self.layers = jax.tree.map(stack, *layers) if stacked else layers
        self.norm = eqx.tree_at(lambda m: m.weight, norm(SIZE), jnp.linspace(0.2, 3, SIZE))
        self.head = eqx.nn.Linear(SIZE, WORDS, key=keys[3])

    def __call__(self, ids):
        x = jax.vmap(self.embedding)(ids)
        if isinstance(self.layers, list):
            for layer in self.layers:
                x = layer(x)
        else:
            x = jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]
        return jax.vmap(lambda x: self.head(self.norm(x)))(x)


IDS = np.random.default_rng(1).integers(0, WORDS, (3, 7), dtype=np.int32)


@eqx.filter_jit
def run(model):
    return jax.vmap(model)(IDS)


@pytest.fixture(scope="module")
def model():
    return Model()


def close(a, b, tolerance=1e-5):
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.long
def test_a_stream_and_a_pair_by_hand():
    """In NumPy: norms that add one to their gains, weights of both orders, and two heads of values for four heads."""
    rng = np.random.default_rng(0)
    random = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    model = {
        **{"embedding": random(7, 8), "norm": {"weight": random(8)}, "last": {"weight": random(8)}},
        **{"value": {"weight": random(6, 8), "bias": random(6)}, "output": {"kernel": random(12, 8)}},
        "head": {"weight": random(5, 8)},
    }

    def run(m):
        norm = lambda x, gain: x / np.sqrt(np.mean(x * x, -1, keepdims=True)) * (1 + np.asarray(gain))
        x = np.asarray(m["embedding"])
        values = norm(x, m["norm"]["weight"]) @ np.asarray(m["value"]["weight"]).T + np.asarray(m["value"]["bias"])
        heads = np.repeat(np.cumsum(values, 0).reshape(7, 2, 3), 2, 1)
        x = x + heads.reshape(7, 12) @ np.asarray(m["output"]["kernel"])
        return norm(x, m["last"]["weight"]) @ np.asarray(m["head"]["weight"]).T

    readers = {"norm.weight": "value.weight", "last.weight": "head.weight"}
    fold = {
        ("embedding", "output.{p}"): eqq.transforms.ResidualStream(readers, offset=1),
        "value.{p}": eqq.transforms.FoldInto(("output.kernel",), 3),
    }
    found = jax.jit(lambda m: eqq.transforms.rotate(m, fold=fold, seed=5, online=False))(model)
    np.testing.assert_allclose(run(found), run(model), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found["norm"]["weight"], np.zeros(8))  # and one that the layer adds
    r8, r3 = (np.asarray(rotated(jnp.eye(n), -1, 5)) for n in (8, 3))  # the seed is the one that was given
    gained = model["head"]["weight"] * (1 + model["last"]["weight"])
    np.testing.assert_allclose(found["head"]["weight"], gained @ r8, rtol=1e-4, atol=1e-5)
    online = eqq.transforms.rotate({"w": jax.ShapeDtypeStruct((8, 16), jnp.float32)}, seed=5, axis=-2)["w"]
    assert (online.seed, online.axis) == (5, -2)
    heads = np.einsum("hio,ij->hjo", model["output"]["kernel"].reshape(4, 3, 8), r3).reshape(12, 8)
    np.testing.assert_allclose(found["output"]["kernel"], heads @ r8, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_outputs_do_not_change(model):
    found = eqq.transforms.rotate(model, fold=FOLD, online=False, batches=[IDS], seed=3)
    assert jax.tree.structure(found) == jax.tree.structure(model)
    close(run(found), run(model))
    first, w = found.layers[0], model.layers[0]
    np.testing.assert_array_equal(first.mlp_norm.weight, 1)
    r = np.asarray(rotated(jnp.eye(SIZE), -1, 3)).T  # R x is this times x
    close(found.embedding.weight, np.asarray(model.embedding.weight) @ r.T)
    close(first.up.weight, np.asarray(w.up.weight * w.mlp_norm.weight[None]) @ r.T)
    close(first.down.weight, r @ np.asarray(w.down.weight))
    close(first.down.bias, r @ np.asarray(w.down.bias))
    h = np.asarray(rotated(jnp.eye(HEAD), -1, 3)).T
    close(first.value.bias, np.kron(np.eye(2), h) @ np.asarray(w.value.bias))
    close(first.output.weight, r @ np.asarray(w.output.weight) @ np.kron(np.eye(4), h).T)
    assert first.up.bias is w.up.bias


@pytest.mark.long
def test_stacks_and_unfolded_weights(model):
    rules = {
        tuple(text.replace(".{n}", "") for text in WRITERS): eqq.transforms.ResidualStream(
            {gain.replace(".{n}", ""): weights.replace(".{n}", "") for gain, weights in READERS.items()}
        ),
        "layers.value.{p}": eqq.transforms.FoldInto(("layers.output.weight",), HEAD),
    }
    stacked, wanted = Model(stacked=True), eqq.transforms.rotate(model, fold=FOLD)
    found = eqq.transforms.rotate(stacked, fold=rules)
    assert isinstance(found.layers.down.weight, RotatedArray) and eqx.is_array(found.layers.up.weight)
    for name in ("query", "value", "output", "up"):
        close(getattr(found.layers, name).weight[1], getattr(wanted.layers[1], name).weight)
    close(found.layers.down.weight.array[1], wanted.layers[1].down.weight.array)
    for rotated_model in (found, wanted):
        close(run(rotated_model), run(model))
        close(run(eqq.quantize_tree(rotated_model, "int8")), run(model), 0.1)
    structs = eqq.transforms.rotate(eqx.filter_eval_shape(lambda: model), fold=FOLD)
    assert jax.tree.map(lambda x: x.shape, structs) == jax.tree.map(lambda x: x.shape, wanted)


@pytest.mark.long
def test_pairs_alone_and_transposed_weights():
    keys = jr.split(jr.key(0), 3)
    model = {"up": {"w": weights(keys[0], (5, 12)), "b": jnp.ones(12)}, "down": {"w": weights(keys[1], (12, 3))}}
    x = weights(keys[2], (4, 5))
    apply = lambda m, x: (x @ m["up"]["w"] + m["up"]["b"][None]) @ m["down"]["w"]
    options = {"axis": -2, "online": False, "batches": [x], "apply": apply}
    found = eqq.transforms.rotate(model, fold={"up.{p}": "down.w"}, **options)
    close(apply(found, x), apply(model, x))
    close(found["up"]["w"], rotated(model["up"]["w"], -1, 0))
    with pytest.raises(ValueError, match=r"outputs of the model unchanged. Got others with up.b, up.w"):
        wrong = {**options, "apply": lambda m, x: jax.nn.relu(x @ m["up"]["w"]) @ m["down"]["w"]}
        eqq.transforms.rotate(model, fold={"up.{p}": "down.w"}, **wrong)
    # The producers of an unselected weight do not change.
    kept = eqq.transforms.rotate(model, fold={"up.{p}": "down.w"}, axis=-2, where=lambda m: m["up"]["w"])
    assert kept["down"]["w"] is model["down"]["w"] and isinstance(kept["up"]["w"], RotatedArray)


@pytest.mark.long
@pytest.mark.parametrize("experts, offset, stacked", [(0, 0.0, False), (2, 1.0, True)])
def test_models_of_the_examples(experts, offset, stacked):
    llama, configuration = (import_example("llama", name) for name in ("llama", "configuration"))
    sizes = {"vocabulary": WORDS, "hidden": 16, "intermediate": 24, "layers": 2, "heads": 4, "kv_heads": 2}
    sizes |= {"head_size": 4, "positions": 16, "windows": (0, 0), "rotary": 4, "experts": experts}
    config = configuration.Config(
        **sizes,
        eps=1e-5,
        tied=False,
        scaling=(("rope_type", "default"),),
        qkv_bias=True,
        offset=offset,
        query_scale=0.5,
        experts_per_token=1,
    )
    with jax.numpy_rank_promotion("allow"):
        model = llama.Llama(config, stacked=stacked, key=jr.key(0))
        uneven = lambda x: x + 0.2 * jnp.cos(jnp.arange(x.size)).reshape(x.shape)
        model = jax.tree.map(lambda x: uneven(x) if eqx.is_inexact_array(x) else x, model)
        cache = llama.Cache.empty(config, 3, 8, stacked=stacked)
        apply = lambda model, ids: model(ids, cache)[0]
        fold = eqq.transforms.llama_rotations(4, offset=offset, layers="layers" if stacked else "layers.{n}")
        apply = eqx.filter_jit(apply)
        close(apply(eqq.transforms.rotate(model, fold=fold, online=False), IDS), apply(model, IDS))


@pytest.mark.long
def test_a_norm_is_not_judged_by_part_of_its_name(model):
    """A `T5LayerNorm` subtracts no mean."""

    class T5LayerNorm(eqx.nn.RMSNorm):
        pass

    named = Model(lambda size: T5LayerNorm(size, use_bias=False))
    close(*(eqq.transforms.rotate(m, fold=FOLD, online=False).head.weight for m in (named, model)))


def test_all_readers_of_a_stream_must_be_selected(model):
    layers = lambda m: [m.layers[0], m.layers[1]]
    with pytest.raises(
        ValueError, match=r"outputs of embedding.weight, .* without some .*: head.weight: not selected by `where`"
    ):
        eqq.transforms.rotate(model, fold=FOLD, where=layers)
    with pytest.raises(ValueError, match=r"With `online=False`.* Got no `fold`\."):
        eqq.transforms.rotate(model, online=False)
    with pytest.raises(ValueError, match=r"With `online=False`.* Got no weight of `fold`"):
        eqq.transforms.rotate(
            model, fold={"layers.{n}.value.{p}": FOLD["layers.{n}.value.{p}"]}, where=lambda m: m.head, online=False
        )


PRODUCTS = {"@": lambda m, x: x @ m["w"].T, "einsum": lambda m, x: jnp.einsum("bi,oi->bo", x, m["w"])}


@pytest.mark.parametrize("collect", ["statistics", "gradients", "sequential"])
def test_einsum_has_the_statistics_of_the_rotated_inputs(collect):
    """Not those of the product by which a dense copy is rotated back."""
    model = eqq.transforms.rotate({"w": weights(jr.key(0), (16, 32))})
    batches = [weights(jr.key(n), (40, 32)) * jnp.arange(1.0, 33)[None] for n in (1, 2)]

    def compute(apply):
        if collect == "sequential":
            return eqq.quantize_sequentially(model, batches, "int3", eqq.GPTQ(), apply=apply)
        stats = eqq.calibrate.collect_stats(model, batches, apply=apply, gram=True, gradients=collect == "gradients")
        (leaf,) = stats.leaves
        assert leaf.note == "" and leaf.max.max() > 20
        return leaf.gram

    found, expected = (jax.tree.leaves(compute(apply)) for apply in PRODUCTS.values())
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-3)


def test_errors(model):
    with pytest.raises(ValueError, match=r"Got layers.0.attention_norm.weight, whose layer subtracts the mean"):
        eqq.transforms.rotate(Model(lambda size: eqx.nn.LayerNorm(size, use_bias=False)), fold=FOLD)
    with pytest.raises(ValueError, match=r"whose layer adds layers.0.attention_norm.bias"):
        eqq.transforms.rotate(Model(eqx.nn.RMSNorm), fold=FOLD)
    with pytest.raises(ValueError, match=r"Each pattern of `fold` must match a leaf. Got 'nothing.\*'"):
        eqq.transforms.rotate(model, fold={(*WRITERS, "nothing.*"): FOLD[WRITERS]})
    with pytest.raises(
        ValueError, match=r"must have the 24 channels of its norms. Got layers.0.up.weight of \(32, 24\)"
    ):
        eqq.transforms.rotate(model, fold={"layers.{n}.up.{p}": eqq.transforms.ResidualStream(READERS)})
    with pytest.raises(ValueError, match="unchanged. Got others with embedding.weight, layers"):
        eqq.transforms.rotate(model, fold={WRITERS[:2]: FOLD[WRITERS]}, batches=[IDS])
    with pytest.raises(ValueError, match="must begin with a weight.*Name norms in an `eqq.transforms.ResidualStream`"):
        eqq.transforms.rotate(model, fold={"norm.{p}": "head.weight"})
    with pytest.raises(ValueError, match="must rotate the inputs of each weight once. Got several for head.weight"):
        eqq.transforms.rotate(model, fold={**FOLD, "layers.1.down.{p}": "head.weight"})
    with pytest.raises(TypeError, match="must map the pattern of each norm.*Got {}"):
        eqq.transforms.rotate(model, fold={WRITERS: eqq.transforms.ResidualStream({})})
    with pytest.raises(TypeError, match="must map several patterns at once to an `eqq.transforms.ResidualStream`"):
        eqq.transforms.rotate(model, fold={WRITERS: "head.weight"})
    for path, where in (("embedding.weight", lambda m: m.embedding), ("norm.weight", lambda m: m.norm)):
        spoiled = eqx.tree_at(lambda m, where=where: where(m).weight, model, replace_fn=lambda x: x.at[0].set(jnp.nan))
        with pytest.raises(ValueError, match=f"^{path} must be finite in float32"):
            eqq.transforms.rotate(spoiled, fold=FOLD)
    eqq.transforms.rotate(spoiled, fold={}, where=lambda m: m.head)  # leaves that norm alone
    tied = eqx.tree_at(lambda m: m.head.weight, model, model.embedding.weight)
    with pytest.raises(ValueError, match=r"Got embedding.weight, which is the same array as head.weight"):
        eqq.transforms.rotate(tied, fold=FOLD)
    quantized = eqq.quantize_tree(model, {"embedding.*": "int8"})
    with pytest.raises(ValueError, match=r"`fold` needs floats. Got embedding.weight: already quantized"):
        eqq.transforms.rotate(quantized, fold=FOLD)


@pytest.mark.parametrize("size", [1, 6, 7, 12, 20, 24, 28, 96])
def test_back_is_the_transpose(size):
    """Some matrices of Paley are not symmetric, so that the order of a product with one would show."""
    there, back = (np.asarray(rotated(jnp.eye(size), -1, 5, back=back)) for back in (False, True))
    np.testing.assert_allclose(back, there.T, atol=1e-6)
    np.testing.assert_allclose(there @ back, np.eye(size), atol=1e-6)


@pytest.mark.parametrize(
    "size, expected",
    [(7, 2.89), (8, -2.225), (9, 3.561), (12, 0.853), (16, 5.715), (28, 3.271), (36, -11.298), (96, -67.85)],
)
def test_matrices_stay(size, expected):
    """A saved model has only the seed of its rotation."""
    entries = np.asarray(rotated(jnp.eye(size), -1, 5), np.float64) * np.sqrt(size)
    numbers = np.arange(size)
    assert abs((np.cos(numbers)[:, None] * np.sin(1 + 2 * numbers) * entries).sum() - expected) < 2e-3
