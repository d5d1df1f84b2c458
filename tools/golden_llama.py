"""Writes `tests/golden/llama/`: what `transformers` computes with tiny models of the Llama family.

    pip install torch transformers bitsandbytes compressed-tensors gguf && python -m tools.golden_llama

The weights of float models are not stored: `weights` makes them from names and shapes, here and in the tests. Names and
shapes are those of the files that `transformers` writes. Quantized models are whole files. The tests need only files.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np


GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "llama"
BATCH, LENGTH, VOCABULARY = 2, 10, 64

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 6.0],
    "rope_theta": 1e4,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# By name: the class of the configuration, and what differs from `SMALL`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama_linear": (
        "LlamaConfig",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 4, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
            "attn_implementation": "eager",
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 8, "partial_rotary_factor": 0.5}),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": {**YARN, "beta_fast": 2.0, "beta_slow": 0.5}, "head_dim": 16}),
    # The text is shorter than the original context, and then longer.
    "phi3_short": (
        "Phi3Config",
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16},
            "original_max_position_embeddings": 16,
        },
    ),
    "phi3_long": (
        "Phi3Config",
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 8},
            "original_max_position_embeddings": 8,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            "sliding_window": 4,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "mixtral": ("MixtralConfig", {**EXPERTS, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
}
# Blocks of 64 need wider rows.
WIDE = {**SMALL, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}


def weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Random weights that depend on names and shapes alone: NumPy promises that `RandomState` never changes."""
    out = {}
    for name, shape in shapes.items():
        x = np.random.RandomState(crc32(name.encode())).standard_normal(shape)
        if "norm" in name:
            x = 1 + 0.2 * x
        elif "embed" not in name:
            x *= 2 * x.shape[-1] ** -0.5
        out[name] = x.astype(np.float32)
    return out


def tokens() -> np.ndarray:
    return np.random.RandomState(0).randint(3, VOCABULARY, (BATCH, LENGTH))


def main() -> None:
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    torch.manual_seed(0)
    work = Path(tempfile.mkdtemp())
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir(parents=True)

    def logits(folder: Path, *, dequantize: bool = False, **options: Any) -> np.ndarray:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})
        model = model.dequantize() if dequantize else model
        with torch.no_grad():
            return model.eval()(torch.as_tensor(tokens())).logits.float().numpy()

    def written(folder: Path, cls: str, fields: dict[str, Any]) -> dict[str, list[int]]:
        """Writes a model as `transformers` does, with our weights."""
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, cls)(**fields))
        model.save_pretrained(folder)
        shapes = {name: list(x.shape) for name, x in load_file(folder / "model.safetensors").items()}
        save_file(weights(shapes), folder / "model.safetensors", {"format": "pt"})
        return shapes

    expected, described = {}, {}
    for name, (cls, fields) in MODELS.items():
        shapes = written(work / name, cls, {**SMALL, **fields})
        described[name] = {"config": json.loads((work / name / "config.json").read_text()), "shapes": shapes}
        expected[name] = logits(work / name, attn_implementation="eager")

    # Quantized by the library itself, from the same weights, and stored as a whole.
    written(work / "wide", "LlamaConfig", WIDE)
    nf4 = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        work / "wide", quantization_config=nf4, dtype=torch.float32
    )
    model.save_pretrained(GOLDEN / "bitsandbytes")
    # Dequantized by bitsandbytes: its products on CPU may compute in bfloat16, whatever `compute_dtype` says.
    expected["bitsandbytes"] = logits(GOLDEN / "bitsandbytes", dequantize=True)
    packed(work / "wide", GOLDEN / "compressed_tensors")
    expected["compressed_tensors"] = logits(GOLDEN / "compressed_tensors")
    as_gguf(work / "wide", GOLDEN / "model.gguf")
    expected["gguf"] = logits(GOLDEN, gguf_file="model.gguf")

    for left in [*GOLDEN.rglob("generation_config.json"), *GOLDEN.rglob("README.md")]:
        left.unlink()
    (GOLDEN / "models.json").write_text(json.dumps(described))
    np.savez_compressed(GOLDEN / "logits.npz", **expected)
    for name, x in expected.items():
        print(f"{name:20} {x.std():.3f} {x.argmax(-1)[0]}")
    print(sum(file.stat().st_size for file in GOLDEN.rglob("*") if file.is_file()), "bytes")


def packed(source: Path, target: Path) -> None:
    """Writes a model with weights of four bits in groups of 32, as compressed-tensors packs them."""
    import torch
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import apply_quantization_config, QuantizationConfig

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": scheme}},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="frozen",
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.data.unflatten(-1, (-1, 32))
            module.weight_scale.data = groups.abs().amax(-1) / 7.5
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(str(target))


def as_gguf(source: Path, target: Path) -> None:
    """Writes a model as llama.cpp's converter does: its names, its order of the rows of `q` and `k`, in Q4_0."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{n}>" for n in range(VOCABULARY)])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, x in load_file(source / "model.safetensors").items():
        for part, number in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                x = x.reshape(number, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)
        kind = gguf.GGMLQuantizationType.F32 if x.ndim == 1 else gguf.GGMLQuantizationType.Q4_0
        new = names.get_name(name, (".weight", ".bias"))
        assert new is not None, name
        writer.add_tensor(new, x if x.ndim == 1 else gguf.quants.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
