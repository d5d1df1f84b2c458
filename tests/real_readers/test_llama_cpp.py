"""GGUF files that we write, opened by llama.cpp."""

import ctypes
import importlib
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import llama_cpp
import numpy as np
import pytest
import torch
from llama_cpp import _ggml
from tokenizers import decoders, models, pre_tokenizers, Tokenizer, trainers
from transformers import AutoConfig, AutoModelForCausalLM

import eqquant as eqq

from . import llama


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def get_name(name):
    for theirs, ggml in NAMES.items():
        name = name.replace(theirs, ggml)
    return name


def metadata():
    """What llama.cpp needs of a Llama: its numbers, and a tokenizer of bytes and a few letters."""
    config = llama.CONFIG
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581a", "ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *letters]
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(n) for n in range(len(tokens))],
        "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 256, *[1] * len(letters)], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def for_llama_cpp(name, x):
    """The rows of queries and keys in the order of llama.cpp, whose rotary embedding turns neighbors."""
    if not any(part in name for part in ("q_proj", "k_proj")):
        return x
    order = np.arange(x.shape[0]).reshape(-1, 2, llama.CONFIG.head_dim // 2).swapaxes(1, 2).reshape(-1)
    return jtu.tree_map(lambda leaf: leaf[order], x)  # a quantized array too: all its leaves have rows


def write(path, arrays):
    arrays = {name: for_llama_cpp(name, x) for name, x in arrays.items()}
    eqq.io.write(path, arrays, "gguf", names=get_name, metadata=metadata())
    return path


def load(path, context=64):
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return llama_cpp.Llama(str(path), n_ctx=context, logits_all=True, verbose=False, n_threads=2, **exact)


def compute_logits(model):
    model.eval(llama.TOKENS)
    return np.array(model.scores[: len(llama.TOKENS)])


def test_float32(tmp_path):
    arrays = llama.weights()
    model = load(write(tmp_path / "model.gguf", arrays))
    llama.assert_near(compute_logits(model), llama.expected_logits(arrays), 1e-4)
    assert model.tokenize(b"ab", add_bos=True) == [1, 286, 261] and model.metadata["general.name"] == "tiny"


# llama.cpp quantizes activations to eight bits, in blocks of 32 or 256.
@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q5_1", "mxfp4", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"])
def test_quantized(tmp_path, format):
    arrays = llama.quantize_model(format, eqq.JointMSE())
    model = load(write(tmp_path / "model.gguf", arrays))
    llama.assert_near(compute_logits(model), llama.expected_logits(arrays), 0.3)


def test_greedy_text(tmp_path, monkeypatch):
    """64 tokens by our example, from the same file."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "llama")
    ours, generate = importlib.import_module("llama"), importlib.import_module("generate")
    path = write(tmp_path / "model.gguf", llama.weights())
    generator = generate.Generator(ours.joined(ours.load(eqq.io.open(path))), 96, generate.Sampling())
    with jax.numpy_rank_promotion("allow"):  # an example is written as users write
        expected = [ids[0] for ids in generator([llama.TOKENS], 64)]
    model = load(path, 96)
    model.eval(llama.TOKENS)
    found = []
    for _ in expected:
        found.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(found[-1:])
    assert found == expected


LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "kind, more",
    [
        ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
        ("mistral", {"head_dim": 32, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),
    ],
)
def test_a_folder_of_hugging_face(tmp_path, kind, more):
    """`convert` alone makes a file that llama.cpp opens: its logits and its tokens are those of the folder."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {key: getattr(llama.CONFIG, key) for key in (*keys, "num_key_value_heads", "initializer_range")}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**sizes, "tie_word_embeddings": False, **more})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("bias"):
                x.normal_()
    model.save_pretrained(tmp_path / "folder")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<s>"])
    text = Path(__file__).read_text()
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(tmp_path / "folder" / "tokenizer.json"))
    eqq.io.convert(tmp_path / "folder", tmp_path / "model.gguf", dialect="gguf")
    opened = load(tmp_path / "model.gguf")
    llama.assert_near(compute_logits(opened), llama.compute_logits(model), 1e-4)
    for part in (text[:300], "naïve  déjà vu 12345 — 漢字\n\n\tx"):
        assert opened.tokenize(part.encode(), add_bos=False) == tokenizer.encode(part).ids
    assert opened.detokenize(tokenizer.encode("naïve 漢字").ids).decode() == "naïve 漢字"


def test_half_precision(tmp_path):
    arrays = {name: x.astype(np.float16) if "proj" in name else x for name, x in llama.weights().items()}
    model = load(write(tmp_path / "model.gguf", arrays))
    expected = llama.expected_logits({name: x.astype(np.float32) for name, x in arrays.items()})
    llama.assert_near(compute_logits(model), expected, 1e-2)


def data(kind):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 1024)) if kind == "normal" else rng.standard_t(4, (64, 1024))
    return x.astype(np.float32)


def read_bytes(path, q):
    eqq.io.write(path, {"w": q}, "gguf")
    return gguf.GGUFReader(path).tensors[0].data


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0"])
def test_the_bytes_of_its_own_quantizer(tmp_path, name):
    x = data("student")
    q = eqq.quantize(jnp.asarray(x), getattr(eqq.formats, name)())
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(read_bytes(tmp_path / "x.gguf", q), theirs)


@pytest.mark.parametrize("name, number", [("Q1_0", 41), ("Q2_0", 42)])
def test_the_bytes_of_ggml(tmp_path, name, number):
    """Of types that llama.cpp's Python package only names."""
    x = data("student")
    q = eqq.quantize(jnp.asarray(x), getattr(eqq.formats, name)())
    eqq.io.write(tmp_path / "x.gguf", {"w": q}, "gguf")
    (stored,) = eqq.io.open(tmp_path / "x.gguf").items_by_name["w"].tensors
    theirs = np.zeros(stored.nbytes, np.uint8)
    quantize = _ggml.libggml.ggml_quantize_chunk
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    quantize(number, x.ctypes.data, theirs.ctypes.data, 0, *x.shape, None)
    np.testing.assert_array_equal(stored.bytes().reshape(-1), theirs)


SCALARS = ("Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
VECTORS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


@pytest.mark.parametrize("kind", ["normal", "student"])
@pytest.mark.parametrize("name, weighted", [*((n, False) for n in SCALARS), *((n, True) for n in SCALARS + VECTORS)])
def test_our_search_finds_no_larger_errors_than_that_of_ggml(tmp_path, name, weighted, kind):
    """Without an importance matrix, and with one."""
    x = data(kind)
    squares = np.exp(np.random.default_rng(1).standard_normal(x.shape[1]) if weighted else np.zeros(x.shape[1]))
    squares = squares.astype(np.float32)
    method = eqq.JointMSE(squares if weighted else None)
    q = eqq.quantize(jnp.asarray(x), getattr(eqq.formats, name)(), method=method)
    number = gguf.GGMLQuantizationType[name]
    ours = gguf.quants.dequantize(read_bytes(tmp_path / "x.gguf", q), number)
    np.testing.assert_array_equal(ours, q.dequantize())
    block, size = gguf.GGML_QUANT_SIZES[number]
    packed = np.zeros((len(x), x.shape[1] // block * size), np.uint8)
    quantize = _ggml.libggml.ggml_quantize_chunk
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    quantize(int(number), x.ctypes.data, packed.ctypes.data, 0, *x.shape, squares.ctypes.data if weighted else None)
    theirs = gguf.quants.dequantize(packed, number)
    sqnr = lambda y: 10 * np.log10(np.sum(squares * x**2) / np.sum(squares * (x - y) ** 2))
    print(f"{name}, {kind}{', weighted' * weighted}: ours {sqnr(ours):.2f} dB, ggml {sqnr(theirs):.2f} dB")
    assert sqnr(ours) >= sqnr(theirs)
