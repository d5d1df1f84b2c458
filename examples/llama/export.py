"""Write a model for others: as a folder of Hugging Face's layout, or as a GGUF file for llama.cpp."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array
from llama import Llama
from tokenizers import Tokenizer

import eqquant as eqq


# What the arrays are called, by the last parts of their paths: by us, by Hugging Face, and by llama.cpp.
_NAMES = (
    ("attention.q", "self_attn.q_proj", "attn_q"),
    ("attention.k", "self_attn.k_proj", "attn_k"),
    ("attention.v", "self_attn.v_proj", "attn_v"),
    ("attention.output", "self_attn.o_proj", "attn_output"),
    ("attention_norm", "input_layernorm", "attn_norm"),
    ("mlp.gate", "mlp.gate_proj", "ffn_gate"),
    ("mlp.up", "mlp.up_proj", "ffn_up"),
    ("mlp.down", "mlp.down_proj", "ffn_down"),
    ("mlp_norm", "post_attention_layernorm", "ffn_norm"),
    ("embedding", "model.embed_tokens", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("head", "lm_head", "output"),
)


def arrays_of(model: Llama, *, gguf: bool = False) -> dict[str, Any]:
    """The arrays, packed ones too, by the names of Hugging Face or of llama.cpp. For Llama with layers in a list."""
    theirs = {names[0]: names[1 + gguf] for names in _NAMES}
    arrays, layers = {}, "blk" if gguf else "model.layers"
    for path, x in jtu.tree_leaves_with_path(eqx.filter(model, eqx.is_array), is_leaf=eqq.is_quantized):
        name, last = jtu.keystr(path, simple=True, separator=".").rsplit(".", 1)
        in_layer = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
        new = theirs[name] if in_layer is None else f"{layers}.{in_layer[1]}.{theirs[in_layer[2]]}"
        arrays[f"{new}.{last}"] = x
    return arrays


def write_folder(folder: Path, model: Llama, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Writes a float model, its `config.json` and its tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(jax.tree.map(np.asarray, arrays_of(model)), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
    tokenizer.save(str(folder / "tokenizer.json"))


def write_gguf(path: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Writes a Llama, float or in formats that GGUF has."""
    arrays = arrays_of(model, gguf=True)
    for name, x in arrays.items():
        if "attn_q." in name or "attn_k." in name:
            arrays[name] = _for_llama_cpp(x, model.config.head_size)
    eqq.io.write(path, arrays, "gguf", metadata=_metadata(model, tokenizer))


def _for_llama_cpp(x: Any, size: int) -> Any:
    """Its rotary embedding turns neighbors, and ours the halves of a head. Rows move, and so do packed ones."""
    rows: Array = np.arange(x.shape[0]).reshape(-1, 2, size // 2).swapaxes(1, 2).reshape(-1)
    return jtu.tree_map(lambda leaf: leaf[rows], x)


def _metadata(model: Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    config, described = model.config, json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(described["vocab"], key=described["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["merges"]]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return {
        "general.architecture": "llama",
        "llama.vocab_size": config.vocabulary,
        "llama.context_length": config.positions,
        "llama.embedding_length": config.hidden,
        "llama.feed_forward_length": config.intermediate,
        "llama.block_count": config.layers,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.eps,
        "llama.rope.dimension_count": config.rotary,
        "llama.rope.freq_base": config.theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": np.array([3 if token in special else 1 for token in vocabulary], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
