"""Write a model for others: as a folder of Hugging Face's layout, or as a GGUF file for llama.cpp."""

import dataclasses
import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from configuration import Config
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
    ("attention.q_norm", "self_attn.q_norm", "attn_q_norm"),
    ("attention.k_norm", "self_attn.k_norm", "attn_k_norm"),
    ("attention_norm", "input_layernorm", "attn_norm"),
    ("attention_post_norm", "post_attention_layernorm", "post_attention_norm"),
    ("router", "mlp.gate", "ffn_gate_inp"),
    ("experts.gate", "", "ffn_gate_exps"),
    ("experts.up", "", "ffn_up_exps"),
    ("experts.down", "", "ffn_down_exps"),
    ("shared.gate", "mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("shared.up", "mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("shared.down", "mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("shared_gate", "mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp_post_norm", "post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate", "mlp.gate_proj", "ffn_gate"),
    ("mlp.up", "mlp.up_proj", "ffn_up"),
    ("mlp.down", "mlp.down_proj", "ffn_down"),
    ("mlp_norm", "post_attention_layernorm", "ffn_norm"),
    ("embedding", "model.embed_tokens", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("head", "lm_head", "output"),
)


def arrays_of(model: Llama, *, gguf: bool = False) -> dict[str, Any]:
    """The arrays, packed or not, by their names in Hugging Face (Llama only) or llama.cpp.

    The layers must be a list, and must not be joined.
    """
    leaves = jtu.tree_leaves_with_path(eqx.filter(model, eqx.is_array), is_leaf=eqq.is_quantized)
    return {name_of(jtu.keystr(path, simple=True, separator="."), gguf=gguf): x for path, x in leaves}


def name_of(path: str, *, gguf: bool) -> str:
    """The name of an array of a model in Hugging Face (Llama only) or llama.cpp."""
    theirs = {names[0]: names[1 + gguf] for names in _NAMES}
    name, last = path.rsplit(".", 1)
    in_layer = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
    layers = "blk" if gguf else "model.layers"
    new = theirs[name] if in_layer is None else f"{layers}.{in_layer[1]}.{theirs[in_layer[2]]}"
    return f"{new}.{last}"


def write_folder(folder: Path, model: Llama, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Writes a float model, its `config.json` and its tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(jax.tree.map(np.asarray, arrays_of(model)), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
    tokenizer.save(str(folder / "tokenizer.json"))


def write_gguf(
    path: Path, model: Llama, tokenizer: Tokenizer | None = None, *, metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes a model, float or in formats that GGUF has.

    `metadata`: what `metadata_of` returns for the source of the model. All of it is kept, except for the file type,
    which llama.cpp finds out itself. For a Llama, a `tokenizer` alone is enough.
    """
    if metadata is None:
        if tokenizer is None:
            raise ValueError(
                "`metadata` must be that of the model, by `metadata_of`, or `tokenizer` be given. Got none."
            )
        metadata = _metadata(model.config, tokenizer)
    architecture = metadata.get("general.architecture")
    if architecture == "phi3":
        raise ValueError("The architecture must be one whose products are apart. Got 'phi3', in which they are joined.")
    arrays = arrays_of(model, gguf=True)
    for name, x in arrays.items():
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            arrays[name] = _for_llama_cpp(x, model.config.head_size)
        elif "norm" in name:
            arrays[name] = x + model.config.offset
    arrays |= _rotary_arrays(model.config)
    kept = {key: value for key, value in metadata.items() if key != "general.file_type"}
    eqq.io.write(path, arrays, "gguf", metadata=kept)


def metadata_of(checkpoint: eqq.io.Checkpoint) -> Mapping[str, Any]:
    """The metadata of a GGUF file, or what a Hugging Face folder gets when converted to one."""
    if checkpoint.dialect == "gguf":
        return checkpoint.metadata
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        eqq.io.convert(checkpoint, path, None, dialect="gguf")
        pairs = eqq.io.open(path).metadata
        return {key: value if isinstance(value, (str, int, float)) else _read(value) for key, value in pairs.items()}


def _read(values: Any) -> Any:
    """Reads an array of the metadata now, because its file will be deleted."""
    items = list(values)
    if any(isinstance(x, (str, bool)) for x in items):
        return items
    return np.array(items, np.int32 if all(isinstance(x, int) for x in items) else np.float32)


def _rotary_arrays(config: Config) -> dict[str, np.ndarray]:
    """The divisors of rotary frequencies, which llama.cpp stores as arrays."""
    scaling = dict(config.scaling)
    divisors = np.array(config.divisors)
    if scaling["rope_type"] == "llama3":
        plain = dataclasses.replace(config, scaling=(("rope_type", "default"),))
        divisors = plain.frequencies() / config.frequencies()
    arrays = {"rope_freqs.weight": divisors} if len(divisors) else {}
    if scaling["rope_type"] == "longrope":
        arrays |= {f"rope_factors_{kind}.weight": np.array(scaling[f"{kind}_factor"]) for kind in ("long", "short")}
    return {name: x.astype(np.float32) for name, x in arrays.items()}


# The types with blocks shorter than 256: the block length, and the bits per weight.
_BLOCKS = {"Q1_0": (128, 1.125), "Q2_0": (64, 2.25), "MXFP4": (32, 4.25), "NVFP4": (64, 4.5), "IQ4_NL": (32, 4.5)}
_BLOCKS |= {"Q4_0": (32, 4.5), "Q4_1": (32, 5), "Q5_0": (32, 5.5), "Q5_1": (32, 6), "Q8_0": (32, 8.5)}
_FALLBACKS = ("Q1_0", "Q2_0", "IQ4_NL", "Q5_0", "Q5_1", "Q8_0")


def fitting_types(model: Llama) -> list[str]:
    """Types of two to eight bits whose blocks fill the rows of all weights."""
    widths = {row.shape[-1] for row in eqq.plan_tree(model, "int8").leaves if row.format is not None}
    k_quants = dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), 256)
    blocks = k_quants | {name: block for name, (block, bits) in _BLOCKS.items() if bits > 2}
    return [name for name, block in blocks.items() if not any(width % block for width in widths)]


def fit_to_gguf(
    model: Llama, format: Any, **options: Any
) -> tuple[dict[str, eqq.extend.AbstractFormat | None], list[str]]:
    """Returns rules with types that fit each weight, and sentences about what changed.

    The rules are for `eqq.plan_tree` and `eqq.quantize_tree`. Where rows are not whole blocks, a weight gets the
    smallest type of no fewer bits that fits, or stays float if there is none. `format`, `options`: as for
    `eqq.plan_tree`.
    """
    rules: dict[str, eqq.extend.AbstractFormat | None] = {}
    changes: Counter[tuple[str, int, str]] = Counter()
    for row in eqq.plan_tree(model, format, **options).leaves:
        wanted = row.format
        rules[row.path] = wanted
        if wanted is None:
            continue
        name, width = type(wanted).__name__, row.shape[-1]
        block, bits = _BLOCKS.get(name, (256, 0.0))
        if width % block == 0:
            continue
        bits = bits or eqq.plan_tree({"w": jax.ShapeDtypeStruct((256, 256), np.float32)}, wanted).bits
        fitting = (other for other in _FALLBACKS if width % _BLOCKS[other][0] == 0 and _BLOCKS[other][1] >= bits)
        other = next(fitting, None)
        rules[row.path] = None if other is None else getattr(eqq.formats, other)()
        changes[name, width, other or "float"] += 1
    said = [
        f"Rows of {width:,} ({count} arrays) are {other}: {name} needs a multiple of {_BLOCKS.get(name, (256,))[0]}."
        for (name, width, other), count in changes.items()
    ]
    return rules, said


def write_tiny_gguf(path: Path) -> Path:
    """A tiny random model with a tokenizer of bytes and a chat template, to try programs on."""
    from generate import random_model
    from tokenizers import pre_tokenizers

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    model = random_model("tiny", vocabulary=len(tokens))
    chat = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    metadata = _sizes(model.config) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3, 3] + [1] * 256, np.int32),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": chat + "{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    }
    write_gguf(path, model, metadata=metadata)
    return path


def _for_llama_cpp(x: Any, size: int) -> Any:
    """Its rotary embedding turns neighbors, and ours the halves of a head. Rows move, and so do packed ones."""
    rows: Array = np.arange(x.shape[0]).reshape(-1, 2, size // 2).swapaxes(1, 2).reshape(-1)
    return jtu.tree_map(lambda leaf: leaf[rows], x)


def _sizes(config: Config) -> dict[str, Any]:
    """The sizes of a Llama, as metadata of a GGUF file."""
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
    }


def _metadata(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    described = json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(described["vocab"], key=described["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["merges"]]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return _sizes(config) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": np.array([3 if token in special else 1 for token in vocabulary], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
