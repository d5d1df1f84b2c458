"""`eqq.io.convert` to the layouts of other libraries, in Python and from the command line."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqquant as eqq
from eqquant.io._convert import _nest
from eqquant_cli.main import main

from .helpers import weights
from .test_hostile_files import act_order, golden_gguf, gptq


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = {
        "embed.weight": weights(jr.key(0), (32, 64)),
        "layers.0.proj.weight": weights(jr.key(1), (64, 128)),
        "layers.1.proj.weight": weights(jr.key(2), (64, 128)),
        "norm.weight": jnp.ones(64),
    }
    save_file({name: np.asarray(w) for name, w in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "quantization_config": {"old": 1}}))
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt"):
        (folder / name).write_text(name)
    (folder / "secrets.txt").write_text("no")
    return folder


FORMATS = {
    "bitsandbytes": eqq.NF4(64),
    "compressed-tensors": eqq.Int4(32),
    "fp8": eqq.FP8(block_size=(16, 32)),
    "gptq": eqq.Int4(32, symmetric=False),
    "mlx": eqq.MXFP4(),
    "modelopt": eqq.FP8(block_size="tensor"),
    "gguf": eqq.formats.Q4_0(),
}


@pytest.mark.parametrize("dialect", FORMATS)
def test_quantize_for_other_libraries(dialect, source, tmp_path, monkeypatch):
    out, seen = tmp_path / ("out.gguf" if dialect == "gguf" else "out"), []
    rules = {"*proj.weight": FORMATS[dialect], "*": None}
    report = eqq.io.convert(source, out, rules, dialect=dialect, each=lambda name, *_: seen.append(name))
    checkpoint, floats = eqq.io.open(out), eqq.io.open(source)
    assert set(checkpoint) == set(floats) and sorted(seen) == sorted(floats)  # each is quantized once
    assert sum(row.format is not None for row in report.leaves) == 2
    for name in ("layers.0.proj.weight", "layers.1.proj.weight"):
        wanted = eqq.quantize(floats[name], FORMATS[dialect])
        np.testing.assert_array_equal(checkpoint[name].dequantize(), wanted.dequantize())
    np.testing.assert_array_equal(checkpoint["embed.weight"], floats["embed.weight"])
    if dialect != "gguf":
        names = {p.name for p in out.iterdir()}
        assert names == {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"}
        config = json.loads((out / "config.json").read_text())
        assert config["model_type"] == "mine" and "old" not in config.get("quantization_config", {})
    assert {p.name for p in tmp_path.iterdir()} == {"source", out.name}


class HalvedLayer(eqq.extend.AbstractScaleMethod):
    """Halves the scales of the second layer."""

    factor: float = eqx.field(static=True, default=1.0)

    def choose_scales(self, blocks, format):
        return self.factor * eqq.AbsMax().choose_scales(blocks, format)[0], None

    def for_leaf(self, path):
        return HalvedLayer(0.5) if "layers.1" in path else self

    def check_weight(self, name, x):
        if x[0, 0] == 7:
            raise ValueError(f"another {name}")


def test_methods_axes_and_errors_of_convert(source, tmp_path):
    """A method of a rule, which differs by leaf; and axes of a rule, and of the whole call."""
    rules = {"*.0.*": eqq.QuantConfig("int4", axis=-1), "*proj*": eqq.QuantConfig("int4", HalvedLayer()), "*": None}
    floats, out = eqq.io.open(source), tmp_path / "out.safetensors"
    eqq.io.convert(source, out, rules, axis=-2)
    found = eqq.io.open(out)
    assert (found["layers.0.proj.weight"].axis, found["layers.1.proj.weight"].axis) == (-1, -2)
    amax = jnp.abs(floats["layers.1.proj.weight"]).max(0)
    np.testing.assert_allclose(found["layers.1.proj.weight"].scale[:, 0], amax / 7 / 2, rtol=1e-6)
    eqq.io.convert(source, out, {"*.1.*": "int4", "*": None}, method=HalvedLayer(), axis=-2)
    np.testing.assert_array_equal(eqq.io.open(out)["layers.1.proj.weight"].scale, found["layers.1.proj.weight"].scale)
    for value, message in ((7, "another layers.1.proj.weight"), (np.nan, "layers.1.proj.weight.* finite")):
        tensors = load_file(source / "model.safetensors")
        tensors["layers.1.proj.weight"][0, 0] = value
        save_file(tensors, source / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            eqq.io.convert(source, tmp_path / "new.safetensors", rules, axis=-2)
    mixed = {
        "embed": {"weight": floats["embed.weight"]},
        "layers": [{"proj": {"weight": found["layers.1.proj.weight"]}}],
    }
    eqq.save(tmp_path / "mixed.safetensors", mixed)
    # What does not fit is known before anything is quantized, also of arrays that stay as they are.
    with pytest.raises(ValueError, match="'layers.0.proj.weight' must be an array that the file can hold exactly"):
        each = lambda name, *_: pytest.fail(f"quantized {name}")
        eqq.io.convert(
            tmp_path / "mixed.safetensors",
            tmp_path / "new.gguf",
            {"embed*": "q4_0", "*": None},
            dialect="gguf",
            each=each,
        )
    assert not list(tmp_path.glob("new*"))


SHAPES = {
    "model.embed_tokens.weight": (8, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    **{f"model.layers.0.self_attn.{part}_proj.weight": (64, 64) for part in "qkvo"},
    "model.layers.0.post_attention_layernorm.weight": (64,),
    "model.layers.0.mlp.gate_proj.weight": (32, 64),
    "model.layers.0.mlp.up_proj.weight": (32, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 32),
    "model.norm.weight": (64,),
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "bos_token_id": 1,
}
ADDED = [{"id": 0, "content": "<unk>", "special": True}, {"id": 1, "content": "<s>", "special": True}]
BYTES = {
    "added_tokens": [{"id": 6, "content": "<s>", "special": True}],
    "pre_tokenizer": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3, "abc": 4}, "merges": [["a", "b"], "ab c"]},
}
PIECES = {
    "added_tokens": ADDED,
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}]},
    "pre_tokenizer": None,
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}]},
    "model": {
        "type": "BPE",
        "byte_fallback": True,
        "unk_token": "<unk>",
        "vocab": {"<unk>": 0, "<s>": 1, "<0x00>": 2, "a": 3, "b": 4, "abb": 5, "ab": 6},
        "merges": ["a b", "ab b", "a bb"],  # two to one token
    },
}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    weights = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    weights["model.layers.0.self_attn.q_proj.weight"] = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    weights["model.norm.weight"] = np.ones(64, np.float16)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def to_gguf(folder):
    eqq.io.convert(folder, folder.with_name("out.gguf"), dialect="gguf")
    return eqq.io.open(folder.with_name("out.gguf"))


def test_tokenizers_for_llama_cpp(folder):
    out = to_gguf(folder)
    layer_names = (
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    )
    assert set(out) == {"token_embd.weight", "output_norm.weight", *(f"blk.0.{name}.weight" for name in layer_names)}
    assert out["output_norm.weight"].dtype == "float32" and out.metadata["llama.attention.head_count_kv"] == 2
    defaults = {"context_length": 2048, "attention.layer_norm_rms_epsilon": np.float32(1e-6), "rope.freq_base": 1e4}
    assert {key: out.metadata[f"llama.{key}"] for key in defaults} == defaults
    np.testing.assert_array_equal(out["blk.0.attn_q.weight"][:4, 0], np.array([0, 16, 1, 17]) * 64)
    (folder / "tokenizer.json").write_text(json.dumps(BYTES))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "chat_template": "{{ x }}"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "pad_token_id": -1}))
    about = {key.partition("ggml.")[2] or key: value for key, value in to_gguf(folder).metadata.items()}
    assert (about["model"], about["pre"], list(about["merges"])) == ("gpt2", "gpt-2", ["a b", "ab c"])
    assert list(about["tokens"]) == ["a", "b", "ab", "c", "abc", "[PAD5]", "<s>", "[PAD7]"]
    assert list(about["token_type"]) == [1, 1, 1, 1, 1, 5, 3, 5]
    assert about["bos_token_id"] == 1 and about["add_bos_token"] and about["tokenizer.chat_template"] == "{{ x }}"
    assert about["eos_token_id"] == 2 and "padding_token_id" not in about
    (folder / "tokenizer.json").write_text(json.dumps(PIECES))
    (folder / "tokenizer_config.json").unlink()
    about = {key.partition("ggml.")[2]: value for key, value in to_gguf(folder).metadata.items()}
    assert about["model"] == "llama" and about["add_space_prefix"] and about["add_bos_token"]
    assert list(about["token_type"]) == [2, 3, 6, 1, 1, 1, 1, 5] and about["unknown_token_id"] == 0
    assert list(about["scores"]) == [-3, -3, -3, -3, -3, -1, 0, -3]
    # A token that is not special, a space by a scheme, and a token at the end alone.
    added = [*ADDED, {"id": 7, "content": "x", "special": False}]
    ends = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}]}
    scheme = {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"}}
    (folder / "tokenizer.json").write_text(
        json.dumps({**PIECES, **scheme, "added_tokens": added, "post_processor": ends})
    )
    about = {key.partition("ggml.")[2]: value for key, value in to_gguf(folder).metadata.items()}
    assert list(about["token_type"]) == [2, 3, 6, 1, 1, 1, 1, 4]
    assert about["add_space_prefix"] and not about["add_bos_token"]


def test_qwen_for_llama_cpp(folder):
    """Qwen rotates halves there too, and Qwen 3 has norms of heads."""
    (folder / "config.json").write_text(json.dumps({**LLAMA, "model_type": "qwen2", "rope_theta": 5e5}))
    out, names = to_gguf(folder), eqq.io.open(folder)
    np.testing.assert_array_equal(out["blk.0.attn_q.weight"], names["model.layers.0.self_attn.q_proj.weight"])
    assert out.metadata["qwen2.rope.freq_base"] == 5e5
    own = {"rope_parameters": {"rope_theta": 3e5, "rope_type": "default"}}  # which holds before the other
    (folder / "config.json").write_text(json.dumps({**LLAMA, "model_type": "qwen2", "rope_theta": 5e5, **own}))
    assert to_gguf(folder).metadata["qwen2.rope.freq_base"] == 3e5
    (folder / "config.json").write_text(json.dumps({**LLAMA, "model_type": "qwen3"}))
    with pytest.raises(ValueError, match="hold 'model.layers.0.self_attn.q_norm.weight'"):
        to_gguf(folder)


def test_shared_keys_and_scaled_rotations_for_llama_cpp(folder):
    """Two heads of queries share the keys, and biases move as the rows of their weights.

    Frequencies of Llama 3 are divided as `transformers` scales them.
    """
    tensors, keys = load_file(folder / "model.safetensors"), np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    shared = {f"model.layers.0.self_attn.{part}_proj.weight": keys for part in "kv"}
    sizes = {"q": 64, "k": 32, "v": 32}
    biases = {f"model.layers.0.self_attn.{part}_proj.bias": np.arange(n, dtype=np.float32) for part, n in sizes.items()}
    save_file({**tensors, **shared, **biases}, folder / "model.safetensors")
    scaling = {**LLAMA3, "original_max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_key_value_heads": 1, "rope_scaling": scaling}))
    out = to_gguf(folder)
    np.testing.assert_array_equal(out["blk.0.attn_k.weight"][:4], keys[[0, 16, 1, 17]])
    np.testing.assert_array_equal(out["blk.0.attn_v.weight"], keys)
    np.testing.assert_array_equal(out["blk.0.attn_q.bias"][30:36], [15, 31, 32, 48, 33, 49])
    np.testing.assert_array_equal(out["blk.0.attn_k.bias"][:4], [0, 16, 1, 17])
    np.testing.assert_array_equal(out["blk.0.attn_v.bias"], np.arange(32))
    frequencies = 10_000.0 ** (-np.arange(0, 32, 2) / 32)
    turns = 512 * frequencies / (2 * np.pi)
    between = (turns - 1) / (4 - 1) * frequencies + (4 - turns) / (4 - 1) * frequencies / 8
    scaled = np.where(turns > 4, frequencies, np.where(turns < 1, frequencies / 8, between))
    np.testing.assert_allclose(out["rope_freqs.weight"], frequencies / scaled, rtol=1e-6)


def test_hyperparameters_for_llama_cpp(folder):
    """A window shorter than the context limits it."""
    config = {**LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 4096}
    config |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    for window, context in ((None, 4096), (1024, 1024), (8192, 4096)):
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
        pairs = to_gguf(folder).metadata
        assert {key.removeprefix("llama."): pairs[key] for key in pairs if key.startswith("llama.")} == pytest.approx(
            {
                **{"vocab_size": 8, "context_length": context, "embedding_length": 64, "block_count": 1},
                **{"feed_forward_length": 32, "attention.head_count": 2, "attention.head_count_kv": 2},
                **{"attention.key_length": 32, "attention.value_length": 32, "attention.layer_norm_rms_epsilon": 1e-5},
                **{"rope.dimension_count": 32, "rope.freq_base": 5e5},
                **{"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            }
        )


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("tokenizer.json", {**BYTES, "model": {"type": "Unigram"}}, "a model of Unigram"),
        ("tokenizer.json", {**BYTES, "pre_tokenizer": {"type": "Whitespace"}}, "it divides text by .*Whitespace"),
        ("tokenizer.json", {**BYTES, "added_tokens": [{"id": 8, "content": "x"}]}, "'x' with the id 8"),
        ("config.json", {**LLAMA, "num_attention_heads": None}, "for .num_attention_heads.\\. Got None"),
        ("config.json", {**LLAMA, "rope_scaling": {"type": "yarn"}}, "rotary scaling .* Got .yarn."),
        ("config.json", {**LLAMA, "rope_scaling": {"type": "linear"}}, "'factor'"),
    ],
)
def test_settings_that_gguf_cannot_express(folder, file, change, message):
    (folder / file).write_text(json.dumps(change))
    with pytest.raises(ValueError, match=message):
        to_gguf(folder)
    assert not folder.with_name("out.gguf").exists()


LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = [
    *(("'rms_norm_eps'", {"rms_norm_eps": found}) for found in (-1, 0, True, [1], "x", 10**400)),
    *(("'rope_theta'", {"rope_theta": found}) for found in (-5.0, 0, True, [1], "x", 10**400)),
    *((f"'{key}'", {key: None}) for key in ("rms_norm_eps", "rope_theta", "vocab_size", "max_position_embeddings")),
    *(("an object for 'rope_scaling'", {"rope_scaling": found}) for found in ("yarn", [1], "", 5)),
    *(("rotary scaling", {"rope_scaling": {"type": found}}) for found in ("yarn", ["linear"], 1)),
    *(("'factor'", {"rope_scaling": {"type": "linear", "factor": found}}) for found in (True, 0, "2", None)),
    ("'rope_type' of 'rope_scaling'", {"rope_scaling": {"factor": 4.0}}),
    ("'rope_type' of 'rope_parameters'", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
    ("'rope_theta'", {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}),
    ("'original_max_position_embeddings'", {"rope_scaling": LLAMA3}),
    (
        "low_freq_factor.* Got 4.0 and 4.0",
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4, "original_max_position_embeddings": 8}},
    ),
    ("'partial_rotary_factor'", {"partial_rotary_factor": 0.5}),
    ("'partial_rotary_factor'", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("even 'head_dim'", {"num_attention_heads": 3}),
    ("even 'head_dim'", {"num_attention_heads": 64}),
    ("'head_dim'", {"num_attention_heads": 128}),
    (
        "o_proj.* has the shape .64, 64.. Got .64, 128. from .hidden_size, num_attention_heads",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    ),
    ("k_proj.* has the shape .64, 64.. Got .32, 64.", {"num_key_value_heads": 1}),
    ("'num_key_value_heads' that divide .* Got 3 and 2", {"num_key_value_heads": 3}),
    ("embed_tokens.* Got .8, 32.", {"hidden_size": 32}),
    ("embed_tokens.* Got .30000000, 64.", {"vocab_size": 3 * 10**7}),
    ("down_proj.* Got .64, 48.", {"intermediate_size": 48}),
    *(("'intermediate_size'", {"intermediate_size": found}) for found in (2**70, 32.0, True)),
    *(("of 1 layers.* Got .* for 'num_hidden_layers'", {"num_hidden_layers": found}) for found in (2, 2**31 - 1)),
    ("'sliding_window'", {"model_type": "mistral", "sliding_window": "x"}),
    *(("below 8, .* for 'eos_token_id'", {"eos_token_id": found}) for found in (8, -2, "2", True, [], [9, 1], 1.0)),
    ("below 8, .* for 'pad_token_id'", {"pad_token_id": 32000}),
]
ADD = lambda number, content: {**BYTES, "added_tokens": [{"id": number, "content": content}]}
MODEL = lambda **more: {**BYTES, "model": {**BYTES["model"], **more}}
TOKENIZERS = [
    ("the id 0 for the tokens 'a' and 'z'", ADD(0, "z")),
    ("2 ids for the token 'a'", ADD(6, "a")),
    *(("'z' with the id", ADD(token_id, "z")) for token_id in (True, 1.5, -1, 8, None)),
    *(("where text must be", ADD(6, content)) for content in (5, None, ["z"])),
    ("no text of UTF-8", ADD(6, "\ud800")),
    *(("'merges'", MODEL(merges=merges)) for merges in ("ab", {}, [["a", "b", "c"]], ["ab"], [5], ["a b c"])),
    ("where text must be", MODEL(merges=[["a", 2]])),
    ("'vocab', which must be an object", MODEL(vocab=[["a", 0]])),
    ("'model', which must be an object", {**BYTES, "model": None}),
    ("'post_processor', which must be an object", {**BYTES, "post_processor": [1]}),
    ("another layout", {**BYTES, "post_processor": {"type": "TemplateProcessing", "single": [5]}}),
    ("'ac', which is no token", {**PIECES, "model": {**PIECES["model"], "merges": ["a c"]}}),
]
OTHERS = [
    *(("tokenizer_config.json", {"add_bos_token": found}, "'add_bos_token'") for found in ("false", 1)),
    ("tokenizer_config.json", {"chat_template": "\udcff"}, "UTF-8"),
    ("chat_template.jinja", b"\xff", "UTF-8"),
    ("generation_config.json", {"eos_token_id": [2**40]}, "'eos_token_id'. Got .1099511627776."),
]


ODD = [
    *(("config.json", {**LLAMA, **change}, message) for message, change in CONFIGS),
    *(("tokenizer.json", change, message) for message, change in TOKENIZERS),
    *((file, change, f"{file}.*{message}") for file, change, message in OTHERS),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared") / "folder"
    folder.mkdir()
    weights = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("file, change, message", ODD, ids=lambda x: str(x)[:40] if isinstance(x, str) else "")
def test_contradictory_metadata_is_refused(shared, file, change, message):
    for path in shared.glob("*.j*"):
        path.unlink()
    files = {"config.json": LLAMA, "tokenizer.json": BYTES, "tokenizer_config.json": {}, file: change}
    for name, content in files.items():
        (shared / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=message) as raised:
        to_gguf(shared)
    assert file in str(raised.value) and " must " in str(raised.value) and " Got " in str(raised.value)
    assert [p.name for p in shared.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("norm.weight", (64,), "one 'output_norm.weight'. Got .*'norm.weight'"),
        ("model.layers.00.mlp.up_proj.weight", (32, 64), "Got 'model.layers.00.mlp.up_proj.weight'"),
        ("model.layers.0.self_attn.q_proj.bias", (32,), "q_proj.bias' has the shape .32,.. Got .64,. from"),
        ("model.layers.0.mlp.up_proj.weight", (32 * 64,), "up_proj.weight' has the shape .2048,.. Got .32, 64."),
        ("model.layers.2.mlp.up_proj.weight", (32, 64), "of 2 layers up to index 2. Got 2 for 'num_hidden_layers'"),
        *((name, None, f"hold {name!r}") for name in SHAPES if "down_proj" in name or "embed" in name),
    ],
)
def test_arrays_that_do_not_agree_are_refused(tmp_path, name, shape, message):
    folder, shapes = tmp_path / "folder", {**SHAPES, name: shape}
    folder.mkdir()
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items() if shape}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2 if ".2." in name else 1}))
    made = []
    for rules in (None, {"*_proj.weight": "q8_0", "*": None}):
        with pytest.raises(ValueError, match=message):
            each = lambda *_: made.append(1)
            eqq.io.convert(folder, tmp_path / "out.gguf", rules, dialect="gguf", each=each)
    assert not made and [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_file_has_no_activations(source, tmp_path):
    use = eqq.QuantConfig("int8", activations="int8")
    with pytest.raises(ValueError, match="holds weights, and no format of activations"):
        eqq.io.convert(source, tmp_path / "out.safetensors", {"*": use})
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.long
def test_gguf_keeps_its_tokenizer(tmp_path):
    golden_gguf(tmp_path / "golden.gguf")
    golden = eqq.io.open(tmp_path / "golden.gguf")
    arrays = {name: golden[name] for name in golden if golden.items_by_name[name].problem is None}
    eqq.io.write(tmp_path / "in.gguf", arrays, "gguf", metadata=golden.metadata)
    eqq.io.convert(tmp_path / "in.gguf", tmp_path / "out.gguf", dialect="gguf")
    before, after = eqq.io.open(tmp_path / "in.gguf"), eqq.io.open(tmp_path / "out.gguf")
    assert {key: _value(v) for key, v in after.metadata.items()} == {
        key: _value(v) for key, v in before.metadata.items()
    }
    tokens = after.metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(list(tokens)) == 3 and all(isinstance(token, str) for token in tokens)
    assert eqx.tree_equal({**before}, {**after})


def _value(x):
    return x if isinstance(x, (str, int, float)) else list(x)


@pytest.mark.parametrize("make", [gptq, act_order])
def test_gptq_to_gptq(make, tmp_path):
    make(tmp_path / "in.safetensors")
    eqq.io.convert(tmp_path / "in.safetensors", tmp_path / "out", dialect="gptq")
    before, after = (eqq.io.open(p)["l.weight"] for p in (tmp_path / "in.safetensors", tmp_path / "out"))
    assert type(before) is type(after)
    np.testing.assert_array_equal(before.dequantize(), after.dequantize())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["desc_act"] is (make is act_order)


def test_act_order_is_refused_by_other_layouts(tmp_path):
    act_order(tmp_path / "in.safetensors")
    with pytest.raises(ValueError, match="'l.weight' must have its inputs in order.*only GPTQ"):
        eqq.io.convert(tmp_path / "in.safetensors", tmp_path / "out", dialect="mlx")
    assert not (tmp_path / "out").exists()


def test_three_bits_of_gptq(tmp_path):
    q = eqq.quantize(weights(jr.key(0), (64, 128)), eqq.Int3(32))
    eqq.io.write(tmp_path / "out", {"l.weight": q}, "gptq")
    seen, dense = [], np.asarray(q.dequantize())
    eqq.io.convert(tmp_path / "out", tmp_path / "again", dialect="gptq", each=lambda *args: seen.append(args))
    for folder in ("out", "again"):
        np.testing.assert_array_equal(eqq.io.open(tmp_path / folder)["l.weight"].dequantize(), dense)
    ((name, before, after),) = seen  # once, though an array is read for the header too
    assert name == "l.weight" and before is after


def test_names_are_nested_unless_one_begins_another():
    assert _nest({"a.0.b": 1, "a.0.c": 2, "d": 3}) == {"a": {"0": {"b": 1, "c": 2}}, "d": 3}
    for flat in ({"a": 1, "a.b": 2}, {"a..b": 1, "c.d": 2}, {"a.": 1}):
        assert _nest(flat) == flat


def test_nvfp4_of_compressed_tensors(tmp_path):
    w = weights(jr.key(0), (8, 64))
    q = eqq.quantize(w, "nvfp4")
    eqq.io.write(tmp_path / "out", {"l.weight": q.astype(jnp.bfloat16)}, "compressed-tensors")
    checkpoint = eqq.io.open(tmp_path / "out")
    again = checkpoint["l.weight"]
    (group,) = checkpoint.config["quantization_config"]["config_groups"].values()
    assert group["weights"] == {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    np.testing.assert_array_equal(again.codes, q.codes)
    np.testing.assert_array_equal(again.scale_bits.codes, q.scale_bits.codes)
    np.testing.assert_allclose(again.astype("float32").dequantize(), q.dequantize(), rtol=3e-7)
    rows = jax.vmap(lambda row: eqq.quantize(row, "nvfp4"))(w * jnp.arange(1.0, 9)[:, None])
    with pytest.raises(ValueError, match="must share one scale for the tensor"):
        eqq.io.write(tmp_path / "new", {"l.weight": rows}, "compressed-tensors")
    for bits, message in ((0, "must have a reciprocal"), (0x7F800000, "must be finite")):  # of zero, and infinity
        changed = eqx.tree_at(lambda q: q.scale_bits.scale_bits, q, jnp.full_like(q.scale_bits.scale_bits, bits))
        with pytest.raises(ValueError, match=message):
            eqq.io.write(tmp_path / "new", {"l.weight": changed}, "compressed-tensors")


def test_shards(source, tmp_path):
    tree = {name: eqq.io.open(source)[name] for name in eqq.io.open(source)}
    for nbytes, count in ((20_000, 4), (40_000, 3)):
        eqq.io.write(tmp_path / "out", tree, "mlx", shard_nbytes=nbytes)
        shards = list((tmp_path / "out").glob("*.safetensors"))
        assert len(shards) == count  # those of before are gone
        checkpoint = eqq.io.open(tmp_path / "out")
        assert eqx.tree_equal({name: checkpoint[name] for name in tree}, tree)
    with pytest.raises(ValueError, match="must hold no other weights"):
        eqq.io.write(tmp_path / "out", tree, "mlx")
    with pytest.raises(ValueError, match="`shard_nbytes` is for folders"):
        eqq.io.write(tmp_path / "out.gguf", tree, "gguf", shard_nbytes=1000)
    with pytest.raises(ValueError, match="`shard_nbytes` must be a number"):
        eqq.io.write(tmp_path / "new", tree, "mlx", shard_nbytes=0)


@pytest.fixture
def run(capsys):
    def run(*arguments, code=0):
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert stopped.value.code == code, (out, err)
        return out if code == 0 else err

    return run


@pytest.mark.long
def test_compare_with_the_file_for_llama_cpp(run, folder, tmp_path):
    run("quantize", folder, tmp_path / "out.gguf", "--dialect", "gguf", "--rule", "*_proj.*=q8_0", "--skip", "*embed*")
    for pair in ((folder, tmp_path / "out.gguf"), (tmp_path / "out.gguf", folder)):
        found = json.loads(run("compare", *pair, "--json"))
        errors = {row["name"]: row["relative_l2"] for row in found["arrays"]}
        assert 0 < errors["blk.0.attn_q.weight"] < 0.01  # rows are in llama.cpp's order
        assert found["only_in_one"] == [] and found["equal"] + len(errors) == len(eqq.io.open(folder))


def test_command_line(run, source, tmp_path):
    run("quantize", source, tmp_path / "nf4", "--dialect", "bitsandbytes")
    w = eqq.io.open(source)["layers.0.proj.weight"]
    checkpoint = eqq.io.open(tmp_path / "nf4")
    assert checkpoint.dialect == "bitsandbytes" and (tmp_path / "nf4" / "tokenizer.json").exists()
    assert eqx.tree_equal(checkpoint["layers.0.proj.weight"], eqq.quantize(w, "nf4"))
    assert not any(eqq.is_quantized(x) for name, x in checkpoint.items() if "embed" in name)  # its loader has none
    run("convert", tmp_path / "nf4", tmp_path / "ours.safetensors")
    run("convert", tmp_path / "ours.safetensors", tmp_path / "again", "--dialect", "bitsandbytes")
    again = eqq.io.open(tmp_path / "again")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), {**checkpoint}, {**again}))
    assert "must be a new folder" in run("convert", source, tmp_path / "again", "--dialect", "mlx", code=1)
    assert "--dialect must be gguf" in run("convert", source, tmp_path / "x", "--dialect", "onnx", code=2)
    assert "must end in .gguf" in run("convert", source, tmp_path / "x", "--dialect", "gguf", code=1)
    assert "folder of the input" in run(
        "convert", source / "model.safetensors", source, "--dialect", "mlx", "--force", code=1
    )
    assert "must be a folder" in run("convert", source, tmp_path / "ours.safetensors", "--dialect", "mlx", code=1)
