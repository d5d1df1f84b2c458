"""The language model of the examples, against the logits that `transformers` computes. See `tools/golden_llama.py`."""

import dataclasses
import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from tools.golden_llama import GOLDEN, tokens, weights

from .helpers import import_example


pytest.importorskip("safetensors")
from safetensors.numpy import save_file


MODELS = json.loads((GOLDEN / "models.json").read_text())
QUANTIZED = {"bitsandbytes": "NF4", "compressed_tensors": "Int4", "gguf": "Q4_0"}


pytestmark = pytest.mark.usefixtures("rank_promotion")


@pytest.fixture(scope="module")
def llama():
    return import_example("llama", "llama")


@pytest.fixture(scope="module")
def generate():
    return import_example("llama", "generate")


def write_checkpoint(name, folder, without=(), **changes):
    if name in QUANTIZED:
        return eqq.io.open(GOLDEN / ("model.gguf" if name == "gguf" else name))
    (folder / "config.json").write_text(json.dumps({**MODELS[name]["config"], **changes}))
    arrays = weights({key: shape for key, shape in MODELS[name]["shapes"].items() if key not in without})
    save_file(arrays, folder / "model.safetensors")
    return eqq.io.open(folder)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "llama_linear", "qwen2", "qwen3"])
def test_folders_become_gguf(llama, tmp_path, name):
    """A file with the names and numbers of llama.cpp is the same model."""
    checkpoint = write_checkpoint(name, tmp_path)
    rules = {"*down_proj*": None, "*_proj.weight": "q8_0"}  # 48 inputs are no whole blocks
    eqq.io.convert(checkpoint, tmp_path / "model.gguf", rules, dialect="gguf")
    converted = eqq.io.open(tmp_path / "model.gguf")
    assert converted.metadata["tokenizer.ggml.model"] == "no_vocab"
    found, expected = llama.load(converted), llama.load(checkpoint)
    leaves = lambda model: jax.tree.leaves(model, is_leaf=eqq.is_quantized)
    for x, y in zip(leaves(found), leaves(expected), strict=True):
        y = eqq.quantize(y, "q8_0").dequantize() if eqq.is_quantized(x) else y
        np.testing.assert_array_equal(x, y)
    assert sum(map(eqq.is_quantized, leaves(found))) == 12
    np.testing.assert_allclose(found.config.frequencies(), expected.config.frequencies(), rtol=1e-6)
    for field in ("heads", "kv_heads", "head_size", "hidden", "tied", "qkv_bias", "mlp_bias", "qk_norm"):
        assert getattr(found.config, field) == getattr(expected.config, field), field


@eqx.filter_jit
def run(model, *arguments):
    return model(*arguments)


# Short contexts of longrope are the same code as long ones.
CASES = [(name, True) for name in (*MODELS, *QUANTIZED) if name != "phi3_short"] + [("llama", False), ("gemma3", False)]


@pytest.mark.parametrize("name, stacked", [*CASES, pytest.param("phi3_short", True, marks=pytest.mark.slow)])
def test_logits_equal_those_of_transformers(llama, tmp_path, name, stacked):
    model = llama.load(write_checkpoint(name, tmp_path), stacked=stacked)
    formats = {type(leaf.format).__name__ for leaf in eqq.summary(model).leaves if leaf.format is not None}
    assert formats == ({QUANTIZED[name]} if name in QUANTIZED else set())
    ids, half = jnp.asarray(tokens()), tokens().shape[1] // 2
    # Layers with a window of 4 hold 4 tokens, unless they are stacked with others.
    cache, logits = llama.Cache.empty(model.config, 2, 16, stacked=stacked, ahead=0), []
    if (name, stacked) in (("mistral", True), ("gemma3", False)):
        assert eqq.tree_nbytes(cache) < eqq.tree_nbytes(llama.Cache.empty(model.config, 2, 16, stacked=stacked)) / 1.5
    # A prompt, and then tokens that see it in the cache: one by one, or as many again, which needs no second program.
    for n in (0, half) if stacked else (0, *range(half, 2 * half)):
        new = ids[:, n : n + (half if stacked or n == 0 else 1)]
        y, cache = run(model, new, cache)
        logits.append(y)
    expected = np.load(GOLDEN / "logits.npz")[name]
    bound = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, rtol=0, atol=bound)


@pytest.mark.long
def test_generation(llama, generate, tmp_path):
    """Greedy generation for prompts of different lengths: each token is the most likely one."""
    model = llama.load(write_checkpoint("llama", tmp_path), stacked=True)
    prompts, n = [[5, 6, 7], [8, 9, 10, 11, 12]], 6
    generator = generate.Generator(model, 16, generate.Sampling())
    new = [list(ids) for ids in zip(*generator(prompts, n), strict=True)]
    whole = np.zeros((2, 16), int)
    for row, prompt, ids in zip(whole, prompts, new, strict=True):
        row[: len(prompt) + n] = prompt + ids
    logits, _ = run(model, jnp.asarray(whole), llama.Cache.empty(model.config, 2, 16, stacked=True))
    for prompt, ids, likeliest in zip(prompts, new, np.argmax(logits, axis=-1), strict=True):
        assert ids == likeliest[len(prompt) - 1 : len(prompt) + n - 1].tolist()
    assert generator._step._cache_size() == generator._read._cache_size() == 1
    # However many steps a call makes, the tokens are the same, also random ones.
    # Steps beyond the last token find the cache full.
    make = lambda steps: generate.Generator(model, 5 + n, generate.Sampling(1.0), steps=steps)
    texts = [list(make(steps)(prompts, n, seed=1)) for steps in (1, 4, 16)]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == n
    # A row that has stopped gives no more, and when all have, that is the end.
    stopped = list(generator(prompts, n, stop=frozenset((new[0][1], new[1][3]))))
    assert [ids[0] for ids in stopped][1:] == [None] * (len(stopped) - 1) and stopped[-1] == [None, None]


@pytest.mark.long
def test_a_conversation_reads_again_what_rings_have_lost(llama, generate, tmp_path):
    model = llama.load(write_checkpoint("gemma3", tmp_path))
    one = lambda: generate.Generator(model, 60, generate.Sampling(), steps=2, turns=True)
    generator, prompt = one(), [5, 6, 7]
    text = prompt + [ids[0] for ids in generator([prompt], 40)]
    assert generator.kept(41) == 41 and generator.kept(9) == 0
    assert generate.Generator(model, 60, generate.Sampling()).cache_nbytes(1) < generator.cache_nbytes(1)
    for same in (41, 9):
        kept, ids = generator.kept(same), [*text[:same], 8, 9]
        assert list(generator([ids[kept:]], 6, after=kept)) == list(one()([ids], 6))


@pytest.mark.long
def test_a_draft_changes_no_token(llama, generate):
    """Rows accept more and fewer tokens: all of the model itself, some of its int4 codes, few of another model."""
    model, prompts, n = generate.random_model("tiny"), [[5, 6, 7], [8, 9, 10, 11, 12]], 20
    other = llama.Llama(model.config, key=jr.key(1))
    alone, made = generate.Generator(model, 48, generate.Sampling()), []
    expected = list(alone(prompts, n))
    stop = frozenset((expected[3][0], expected[9][1]))
    stopped = list(alone(prompts, n, stop=stop))
    likeliest = generate.Sampling(), generate.Sampling(0.5, top_k=1), generate.Sampling()
    for draft, sampling in zip((model, eqq.quantize_tree(model, "int4"), other), likeliest, strict=True):
        generator = generate.Generator(model, 48, sampling, draft=draft, drafted=3)
        assert list(generator(prompts, n)) == expected
        made.append(np.mean(generator.made))
        assert list(generator(prompts, n, stop=stop)) == stopped
    assert 4 == made[0] > made[1] > made[2] >= 1
    with pytest.raises(ValueError, match="`--draft` must have the vocabulary of the model. Got 50 and 96 tokens"):
        generate.Generator(model, 8, generate.Sampling(), draft=generate.random_model("tiny", vocabulary=50))
    with pytest.raises(ValueError, match="`--drafted` must be at least 1. Got 0"):
        generate.Generator(model, 8, generate.Sampling(), draft=model, drafted=0)


@pytest.mark.long
def test_tokens_of_a_draft_have_the_distribution_of_the_model(generate):
    logits = 2 * jr.normal(jr.key(0), (1, 3, 6))
    guesses = logits[:, :2] + jr.normal(jr.key(1), (1, 2, 6))
    logits = logits.at[..., 4].set(-jnp.inf)  # as beyond `top_k`
    sampling, accept = generate.Sampling(1.0), import_example("llama", "draft").accept

    def once(key):
        drawing, checking = jr.split(key)
        return accept(sampling.draw(guesses, drawing), guesses, logits, checking, sampling)[0]

    tokens = np.asarray(jax.jit(jax.vmap(once))(jr.split(jr.key(2), 20_000)))
    for made, wanted in zip(tokens.T, jax.nn.softmax(logits[0]), strict=True):
        made = made[made >= 0]
        np.testing.assert_allclose(np.bincount(made, minlength=6) / len(made), wanted, atol=2 / len(made) ** 0.5)
    assert len(made) > 2000


@pytest.mark.long
@pytest.mark.parametrize(
    "format, values, per_channel, bound",
    [("int8", None, False, 1e-4), ("int4", None, True, 1e-3), (eqq.Int4(32, symmetric=False), "int8", True, 3e-4)],
)
def test_a_quantized_cache_changes_little(llama, generate, format, values, per_channel, bound):
    """The divergence from the logits with a float cache: of a prompt of 140 tokens, and of 12 that follow."""
    model = generate.random_model("tiny", stacked=True)
    ids = jr.randint(jr.key(0), (1, 152), 0, model.config.vocabulary)

    def logits(**cache):
        cache = llama.Cache.empty(model.config, 1, 256, stacked=True, **cache)
        parts = []
        for new in (ids[:, :140], *jnp.split(ids[:, 140:], 12, axis=1)):
            y, cache = run(model, new, cache)
            parts.append(jax.nn.log_softmax(y))
        return jnp.concatenate(parts, axis=1)

    expected, cache = logits(), {"format": format, "values": values, "per_channel": per_channel}
    divergence = jnp.sum(jnp.exp(expected) * (expected - logits(**cache)), axis=-1)
    assert 0 < divergence.mean() < bound


@pytest.mark.long
def test_fused_products_and_sharded_heads(llama, generate):
    model, prompts = eqq.quantize_tree(generate.random_model("tiny"), "int8"), [[5, 6, 7], [8, 9]]
    mesh = generate._mesh(2)
    texts = [
        list(generate.Generator(each, 32, generate.Sampling(), "int8", on)(prompts, 6))
        for each, on in ((model, None), (llama.joined(model), None), (llama.on_mesh(model, mesh), mesh))
    ]
    assert texts[0] == texts[1] == texts[2]
    layer = llama.joined(model).layers[0]
    assert layer.attention.k is None and layer.mlp.up is None and eqq.is_quantized(layer.attention.q.weight)
    parts = llama.on_mesh(model, mesh).layers[0].attention
    assert parts.q.weight.codes.sharding.spec[0] == "model" == parts.output.weight.codes.sharding.spec[1]


def test_joined_products_are_those_of_one_format(llama, generate):
    """As in files of several formats, whose `v` often has more bits."""
    model = eqq.quantize_tree(generate.random_model("tiny"), {"*.v.weight": "int8", "embedding*": None, "*": "int4"})
    joined, x = llama.joined(llama.with_activations(model, "int8")), jr.normal(jr.key(0), (1, 2, 64))
    q, k, v = (getattr(joined.layers[0].attention, name) for name in "qkv")
    assert k is None and (q.out_features, v.out_features) == (96, 32)
    assert q.weight.activations == v.weight.activations == eqq.Int8()
    apart = llama.with_activations(model, "int8").layers[0].attention
    expected = llama._outputs(x, apart.q, apart.k, apart.v)
    np.testing.assert_array_equal(llama._outputs(x, q, k, v), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_activations(llama, generate, tied):
    """Of all products with packed weights, the head too, if it is the embedding."""
    config = dataclasses.replace(generate.random_model("tiny").config, tied=tied)
    model = eqq.quantize_tree(llama.Llama(config, key=jr.key(0)), "int8")
    fast = llama.with_activations(model, "int8")
    head = fast.embedding.weight if tied else fast.head.weight
    assert isinstance(head, eqq.arrays.ActivationQuantizedArray)
    assert eqq.is_quantized(fast.embedding.weight) != tied
    ids = jnp.array([[5, 6, 7]])
    logits, other = (run(m, ids, llama.Cache.empty(config, 1, 4))[0] for m in (model, fast))
    assert 0 < jnp.abs(logits - other).max() < 0.05 * jnp.abs(logits).max()


def test_sampling(generate):
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]))
    expected = {
        generate.Sampling(): [{0}, {3}],
        generate.Sampling(1.0): [{0, 1, 2, 3}] * 2,
        generate.Sampling(1.0, top_k=2): [{0, 1}, {2, 3}],
        generate.Sampling(1.0, top_p=0.81): [{0, 1, 2}, {1, 2, 3}],
        generate.Sampling(1.0, top_p=0.79): [{0, 1}, {2, 3}],
        generate.Sampling(0.01): [{0}, {3}],
    }
    rows = jnp.repeat(logits, 200, axis=0)
    drawn = jax.jit(lambda key: [sampling(rows, key) for sampling in expected])(jr.key(0))
    for new, sets in zip(drawn, expected.values(), strict=True):
        assert [set(row) for row in np.reshape(new, (2, 200)).tolist()] == sets
    # Of equal ones the first; NaN is the largest, so that it gives a token and no number beyond the vocabulary.
    odd = jnp.array([[1.0, 3, 3, 0], [1.0, jnp.nan, 3, 0], [-jnp.inf] * 4])
    assert generate.Sampling()(odd, jr.key(0)).tolist() == [1, 0, 0]


@pytest.mark.long
def test_the_command(generate, tmp_path, capsys):
    write_checkpoint("llama", tmp_path, eos_token_id=[2, 3])
    folder = str(tmp_path)
    generate.main([folder, "5 6 7", "--ids", "--tokens", "3", "--scan"])
    out, err = capsys.readouterr()
    assert out.startswith("5 6 7 ") and len(out.split()) == 6 and "tokens/s" in err
    assert re.search(r"cache of 64 tokens 16\.4 KB, at most [\d,.]+ MB", err)  # 2 layers, 2 heads of 8, keys and values
    for arguments, message in [
        ([folder, "5", "--ids", "--context", "8"], r"8 places.*Got 1 \+ 64"),
        ([folder, "5", "--ids", "--context", "80"], "at most 64 tokens, for which the model was made. Got 80"),
        ([folder, "5", "--ids", "--context", "-5"], "at least 1 token.* Got -5"),
        ([folder, "5", "--ids", "--context", "0"], "at least 1 token.* Got 0"),
        ([folder, "5", "--ids", "--tokens", "4", "--steps", "0"], "--steps` must be at least 1.* Got 0"),
        ([folder, "5", "--ids", "--temperature", "-1"], "--temperature` must be a number from 0 on. Got -1.0"),
        ([folder, "5", "--ids", "--temperature", "nan"], "--temperature` must be a number from 0 on. Got nan"),
        ([folder, "5", "--ids", "--top-p", "0"], "--top-p` must be above 0, and at most 1.* Got 0.0"),
        ([folder, "5", "--ids", "--top-p", "1.5"], "--top-p` must be above 0, and at most 1.* Got 1.5"),
        ([folder, "5", "--ids", "--top-k", "-5"], "--top-k` must be at least 0.* Got -5"),
        ([folder, "64", "--ids", "--tokens", "4"], "must be below 64, the vocabulary. Got 64"),
        ([folder, "a", "--ids"], "must be numbers.*Got 'a'"),
        ([folder, "5", "--ids", "--fast"], "are for packed weights. Got floats. Set `--format` too"),
        ([folder, "a"], "tokenizer.json must be the tokenizer. Got no such file"),
        ([folder, "5", "--ids", "--chat"], "the model must have a chat template"),
        ([str(tmp_path / "none"), "a"], "none"),
        ([], "MODEL must be"),
    ]:
        with pytest.raises(SystemExit, match=message) as e:
            generate.main(arguments)
        assert str(e.value.code).startswith("Error: ")


@pytest.mark.long
def test_a_folder_of_ours_is_read(generate, tmp_path, capsys):
    from eqquant_cli.main import main

    (tmp_path / "model").mkdir()
    write_checkpoint("llama", tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    ours = "ours-3.2-1B"  # no suffix, though there is a dot
    for arguments in (["quantize", "model", ours], ["convert", ours, "again"]):
        with pytest.raises(SystemExit, match="0"):
            main([arguments[0], *(str(tmp_path / name) for name in arguments[1:])])
    capsys.readouterr()
    for name in (ours, "again"):
        generate.main([str(tmp_path / name), "5 6 7", "--ids", "--tokens", "3"])
        assert capsys.readouterr().out.startswith("5 6 7 ")
        names = ["config.json", "model.safetensors", "tokenizer_config.json"]
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == names
    assert any(row.format is not None for row in eqq.io.open(tmp_path / "again").rows)


def test_wrong_checkpoints_are_errors(llama, tmp_path):
    with pytest.raises(ValueError, match="must be one of llama, .* Got 'gpt_neox'"):
        llama.load(write_checkpoint("llama", tmp_path, model_type="gpt_neox"))
    with pytest.raises(ValueError, match="must be one of 'default', .*'longrope'. Got 'dynamic'.*configuration.py"):
        llama.load(write_checkpoint("llama", tmp_path, rope_parameters={"rope_type": "dynamic"}))
    with pytest.raises(ValueError, match="must say 'hidden_size'"):
        checkpoint = write_checkpoint("llama", tmp_path)
        config = {key: value for key, value in checkpoint.config.items() if key != "hidden_size"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        llama.load(eqq.io.open(tmp_path))
    with pytest.raises(ValueError, match=r"layers.1.mlp.up.weight: float32\[48, 32\] in the model, and no array"):
        llama.load(write_checkpoint("llama", tmp_path, without=("model.layers.1.mlp.up_proj.weight",)))
    tokenizers, open_text = pytest.importorskip("tokenizers"), import_example("llama", "tokenization").open_text
    checkpoint = write_checkpoint("llama", tmp_path)
    with pytest.raises(ValueError, match=r"config.json must be a tokenizer.json of the tokenizers library. Got: "):
        open_text(checkpoint, 64, tmp_path / "config.json")
    words = tokenizers.models.WordLevel({f"w{n}": n for n in range(70)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="must fit the model, which has 64 tokens. Got the token 69"):
        open_text(checkpoint, 64)
    assert open_text(checkpoint, 70).encode("w3 w5") == [3, 5]


@pytest.mark.long
@pytest.mark.parametrize("name, stacked", [("llama", False), ("gemma2", True)])
def test_pairs_of_layers(llama, tmp_path, name, stacked):
    """Factors for channels move between layers, and the logits stay."""
    checkpoint = write_checkpoint(name, tmp_path)
    model = llama.load(checkpoint, stacked=stacked)
    layers = "layers" if stacked else "layers.{n}"
    pairs = eqq.transforms.llama_pairs(model.config.head_size, offset=model.config.offset, layers=layers)

    def apply(model, ids):
        return model(ids, llama.Cache.empty(model.config, 2, ids.shape[1], stacked=stacked))[0]

    ids = jnp.asarray(tokens())
    stats = eqq.calibrate.collect_stats(model, [ids], apply=apply)
    folded = eqq.transforms.smooth(
        model, eqq.transforms.SmoothQuant(stats), fold=pairs, batches=[ids], apply=apply, online=False
    )
    first = lambda model: model.layers.mlp.down.weight if stacked else model.layers[0].mlp.down.weight
    assert not np.allclose(first(folded), first(model))
    wanted = np.asarray(eqx.filter_jit(apply)(model, ids))
    np.testing.assert_allclose(eqx.filter_jit(apply)(folded, ids), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_equivalent_configurations(llama, tmp_path):
    """Older releases of `transformers` write other fields, and llama.cpp the scaling of Llama 3 as divisors."""
    config = llama.config_of(write_checkpoint("llama", tmp_path))
    scaling = {key: value for key, value in MODELS["llama"]["config"]["rope_parameters"].items() if key != "rope_theta"}
    old = {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": 5e5, "head_dim": None}
    assert llama.config_of(write_checkpoint("llama", tmp_path, **old)) == config
    plain = dataclasses.replace(config, scaling=(("rope_type", "default"),))
    divisors = tuple((plain.frequencies() / config.frequencies()).tolist())
    assert divisors[0] < divisors[1] < 8.1
    by_divisors = dataclasses.replace(plain, divisors=divisors)
    np.testing.assert_allclose(by_divisors.frequencies(), config.frequencies(), rtol=1e-6)
    config = llama.config_of(write_checkpoint("qwen2", tmp_path))
    assert config.windows == (0, 4) == llama.config_of(write_checkpoint("qwen2", tmp_path, layer_types=None)).windows


# What llama.cpp calls the settings of `config.json`, and a few that it writes in another way.
_OF_GGUF = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_SCALED = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
_GGUF_ARCHITECTURES = {
    "gemma3": ("gemma3", _SCALED | {"attention.sliding_window_pattern": 3}),
    "qwen2_moe": ("qwen2moe", {}),
    "llama_yarn": ("llama", _YARN | {"rope.scaling.yarn_beta_fast": 2.0, "rope.scaling.yarn_beta_slow": 0.5}),
    "phi3_long": ("phi3", {"rope.scaling.original_context_length": 8, "rope.dimension_count": 4}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", _GGUF_ARCHITECTURES)
def test_architectures_from_gguf(llama, tmp_path, name):
    """With the metadata of llama.cpp they are the models that `transformers` has."""
    export = import_example("llama", "export")
    # llama.cpp scales queries of Gemma by the size of a head.
    changes = {"query_pre_attn_scalar": MODELS[name]["config"]["head_dim"]} if name == "gemma3" else {}
    model = llama.load(write_checkpoint(name, tmp_path, **changes))
    (architecture, settings), config = _GGUF_ARCHITECTURES[name], MODELS[name]["config"]
    metadata = {key: config[theirs] for key, theirs in _OF_GGUF.items() if config.get(theirs)} | settings
    if name == "phi3_long":
        factor = model.config.rotary_factor
        metadata["rope.scaling.attn_factor"] = factor
        assert factor > 1
    metadata = {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in metadata.items()}
    path = tmp_path / "model.gguf"
    if architecture == "phi3":  # whose products are joined in the file
        arrays = export.arrays_of(model, gguf=True) | export._rotary_arrays(model.config)
        for n in range(model.config.layers):
            gate_up = [arrays.pop(f"blk.{n}.ffn_{x}.weight") for x in ("gate", "up")]
            arrays[f"blk.{n}.ffn_up.weight"] = jnp.concatenate(gate_up)
        eqq.io.write(path, arrays, "gguf", metadata=metadata)
        with pytest.raises(ValueError, match="products are apart. Got 'phi3'"):
            export.write_gguf(path, model, metadata=metadata)
    else:
        export.write_gguf(path, model, metadata=metadata)
    found = llama.load(eqq.io.open(path))
    assert found.config.rotary_factor == pytest.approx(model.config.rotary_factor)
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=0, atol=1e-6)  # norms of Gemma are stored with one added
    logits_of = lambda model: run(model, jnp.asarray(tokens()), llama.Cache.empty(model.config, 2, 16))[0]
    logits, expected = logits_of(found), logits_of(model) if changes else np.load(GOLDEN / "logits.npz")[name]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_settings_of_gguf_that_are_not_known(llama, tmp_path):
    pairs = {f"llama.{key}": 8 for key in ("embedding_length", "block_count", "feed_forward_length")}
    pairs |= {"llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-6}
    for more, message in (
        ({"llama.rope.scaling.type": "dynamic"}, "must be 'linear', 'yarn' or by factors. Got 'dynamic'"),
        ({"general.architecture": "mamba"}, "must be one of llama, .* Got 'mamba'"),
    ):
        about = {"general.architecture": "llama"} | pairs | more
        eqq.io.write(tmp_path / "m.gguf", {"token_embd.weight": np.zeros((8, 8), np.float32)}, "gguf", metadata=about)
        with pytest.raises(ValueError, match=message):
            llama.config_of(eqq.io.open(tmp_path / "m.gguf"))


@pytest.mark.long
def test_gguf_of_a_gguf_keeps_everything(llama, tmp_path):
    """All metadata but the type of the file, and packed arrays byte by byte."""
    pytest.importorskip("tokenizers")
    export = import_example("llama", "export")
    checkpoint = eqq.io.open(GOLDEN / "model.gguf")
    more = {"tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": "{{ x }}", "tokenizer.ggml.bos_token_id": 1}
    more |= {"mine.numbers": np.array([1, 2], np.int8), "general.file_type": 2, "general.alignment": 64}
    arrays = {name: checkpoint[name] for name in checkpoint}
    eqq.io.write(tmp_path / "source.gguf", arrays, "gguf", metadata={**checkpoint.metadata, **more})
    source = eqq.io.open(tmp_path / "source.gguf")
    export.write_gguf(tmp_path / "again.gguf", llama.load(source), metadata=export.metadata_of(source))
    again = eqq.io.open(tmp_path / "again.gguf")
    plain = lambda pairs: {key: list(x) if hasattr(x, "__len__") else x for key, x in pairs.items()}
    assert plain(again.metadata) == {k: v for k, v in plain(source.metadata).items() if k != "general.file_type"}
    for row in source.rows:
        (old,), (new,) = (c.items_by_name[row.name].tensors for c in (source, again))
        assert old.dtype == new.dtype and old.bytes().tobytes() == new.bytes().tobytes(), row.name


@pytest.mark.long
def test_gguf_of_a_folder(llama, tmp_path):
    """With the metadata that `eqq.io.convert` writes, and the scaling of Llama 3 as divisors."""
    pytest.importorskip("tokenizers")
    export = import_example("llama", "export")
    (tmp_path / "model").mkdir()
    checkpoint = write_checkpoint("llama", tmp_path / "model")
    model = llama.load(checkpoint)
    export.write_gguf(tmp_path / "model.gguf", model, metadata=export.metadata_of(checkpoint))
    found = llama.load(eqq.io.open(tmp_path / "model.gguf"))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(found.config.frequencies(), model.config.frequencies(), rtol=1e-6)


def test_types_that_a_width_does_not_allow():
    pytest.importorskip("tokenizers")
    fit = import_example("llama", "export").fit_to_gguf
    model = {f"w{width}": jax.ShapeDtypeStruct((64, width), np.float32) for width in (48, 192, 256)}
    for format, fitting in (("q4_k", "IQ4_NL"), ("q6_k", "Q8_0"), ("iq2_xxs", "Q2_0")):
        rules, said = fit(model, format)
        wanted = type(eqq.QuantConfig(format).format).__name__
        names = {path: type(format).__name__ for path, format in rules.items()}
        assert names == {"w48": "NoneType", "w192": fitting, "w256": wanted}
        assert set(said) == {
            f"Rows of 48 (1 arrays) are float: {wanted} needs a multiple of 256.",
            f"Rows of 192 (1 arrays) are {fitting}: {wanted} needs a multiple of 256.",
        }
        report = eqq.plan_tree(model, rules)
        assert {row.path: type(row.format).__name__ for row in report.leaves} == names
    assert fit(model, {"w48": None, "*": "q8_0"})[1] == []


def test_layers_that_are_stacked_by_themselves(llama, tmp_path):
    """Packed in one way in all layers; floats only to be quantized afterwards."""
    w, b = jnp.ones((32, 32)), jnp.ones(32)
    q8, q4 = eqq.quantize(w, "q8_0"), eqq.quantize(w, "q4_0")
    for given, packed, expected in (
        ((q8, q8), True, True),
        ((q8, q4), True, False),
        ((q8, w), True, False),
        ((w, w), True, False),
        ((w, w), False, True),
        ((q8, w), False, False),
    ):
        arrays = {f"blk.{n}.x.{part}": x for n, w in enumerate(given) for part, x in (("weight", w), ("bias", b))}
        eqq.io.write(tmp_path / "m.gguf", arrays | {"e.weight": w}, "gguf")
        assert llama.layers_are_alike(eqq.io.open(tmp_path / "m.gguf"), packed=packed) == expected
