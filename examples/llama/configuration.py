"""What a checkpoint says of its model: `config.json` of a Hugging Face folder, or the metadata of a GGUF file."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import eqquant as eqq


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model of the Llama family, and its differences from Llama.

    - `windows`: for each layer, how many tokens back attention sees; 0 for all.
    - `rotary`: how many numbers of each head are rotated; `theta`, `scaling` and `divisors` give the frequencies.
    - `local_theta`: the theta of layers with a window, which then have no scaling; 0 if all layers are alike.
    - `experts`: 0 if each layer has one MLP, and then `experts_per_token` and `sum_to_one` mean nothing.
    - `shared`: the size of an MLP that every token has beside its experts; 0 for none.
    - `offset`: what norms add to their weights.
    - `attention_cap`, `logit_cap`: bounds, by `cap * tanh(x / cap)`; 0 for none.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    positions: int
    tied: bool
    windows: tuple[int, ...]
    rotary: int
    theta: float = 10000.0
    scaling: tuple[tuple[str, Any], ...] = ()
    divisors: tuple[float, ...] = ()
    local_theta: float = 0.0
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    offset: float = 0.0
    embedding_scale: float = 1.0
    query_scale: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    sum_to_one: bool = True
    shared: int = 0

    def frequencies(self, context: int = 0, *, local: bool = False) -> np.ndarray:
        """The angle by which each pair of numbers turns from one position to the next.

        `context`: for how many tokens; `local`: of layers with a window.
        """
        pairs = np.arange(self.rotary // 2)
        f = (self.local_theta if local else self.theta) ** -(2 * pairs / self.rotary)
        scaling = {"rope_type": "default"} if local else dict(self.scaling)
        if self.divisors:
            f = f / np.array(self.divisors)
        elif scaling["rope_type"] == "linear":
            f = f / scaling["factor"]
        elif scaling["rope_type"] == "longrope":
            # By the context and not by the text so far, so that the keys of one text are all turned alike.
            kind = "long" if context > scaling["original_max_position_embeddings"] else "short"
            f = f / np.array(scaling[f"{kind}_factor"])
        elif scaling["rope_type"] == "yarn":
            # As for Llama 3, but the mix is linear in the number of the pair.
            waves = scaling["original_max_position_embeddings"] / (2 * np.pi)
            pair_of = lambda turns: self.rotary * np.log(waves / turns) / (2 * np.log(self.theta))
            low, high = pair_of(scaling.get("beta_fast") or 32), pair_of(scaling.get("beta_slow") or 1)
            if scaling.get("truncate", True):
                low, high = np.floor(low), np.ceil(high)
            low, high = max(low, 0), min(high, self.rotary - 1)
            stretch = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
            f = (1 - stretch) * f + stretch * f / scaling["factor"]
        elif scaling["rope_type"] == "llama3":
            # Waves that are short beside the original context stay, long ones are stretched, and between them both mix.
            turns = scaling["original_max_position_embeddings"] * f / (2 * np.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            keep = np.clip((turns - low) / (high - low), 0, 1)
            f = keep * f + (1 - keep) * f / scaling["factor"]
        return f.astype(np.float32)

    @property
    def rotary_factor(self) -> float:
        """The factor of rotated queries and keys in layers without a window, by the scaling of positions."""
        scaling = dict(self.scaling)
        if scaling["rope_type"] not in ("yarn", "longrope"):
            return 1.0
        factor = scaling["factor"]
        if scaling.get("attention_factor") is not None or factor <= 1:
            return scaling.get("attention_factor") or 1.0
        if scaling["rope_type"] == "longrope":
            return float(np.sqrt(1 + np.log(factor) / np.log(scaling["original_max_position_embeddings"])))
        grown = lambda scale: 0.1 * scale * np.log(factor) + 1
        numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
        return float(grown(numerator) / grown(denominator) if numerator and denominator else grown(1))


_GEMMA = {"activation": "gelu", "offset": 1.0}
ROTARY_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")
# Differences of families that config.json does not tell.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "post_norms": True},
    "gemma3_text": {**_GEMMA, "post_norms": True, "qk_norm": True},
    "phi3": {},
    "mixtral": {},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3_moe": {"qk_norm": True},
}


def config_of(checkpoint: eqq.io.Checkpoint) -> Config:
    """The configuration of a checkpoint. Raises a `ValueError` for an unsupported setting."""
    if checkpoint.dialect == "gguf":
        return _from_gguf(checkpoint)
    if not checkpoint.config:
        raise ValueError(f"{checkpoint.path} must have a config.json, in its folder. Got none. Copy it there.")
    try:
        return from_json(checkpoint.config, head="lm_head.weight" in checkpoint)
    except KeyError as e:
        raise ValueError(f"The config.json of {checkpoint.path} must say {e.args[0]!r}. It does not.") from None


def from_json(c: Mapping[str, Any], *, head: bool) -> Config:
    """From a `config.json`, of old and new releases of transformers. `head`: whether the file has a head of its own."""
    family = c["model_type"]
    _check_family(family)
    layers, heads, hidden = c["num_hidden_layers"], c["num_attention_heads"], c["hidden_size"]
    head_size = c.get("head_dim") or hidden // heads
    rope = {**(c.get("rope_parameters") or c.get("rope_scaling") or {})}
    local = rope.pop("sliding_attention", {}).get("rope_theta") or c.get("rope_local_base_freq", 0.0)
    rope = rope.pop("full_attention", rope)
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.pop("rope_theta", None) or c.get("rope_theta", 10000.0)
    partial = rope.pop("partial_rotary_factor", None) or c.get("partial_rotary_factor") or 1.0
    if rope["rope_type"] not in ROTARY_SCALINGS:
        known = ", ".join(map(repr, ROTARY_SCALINGS))
        raise ValueError(
            f"The rotary scaling must be one of {known}. Got {rope['rope_type']!r}. `Config.frequencies` in "
            "configuration.py is where to add it."
        )
    positions = c.get("max_position_embeddings", 2048)
    if rope["rope_type"] in ("yarn", "longrope"):
        original = rope.get("original_max_position_embeddings") or c.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original = original or positions
        rope["factor"] = rope.get("factor") or positions / original
    if c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1:
        raise ValueError("All layers must have experts, or none. Got `mlp_only_layers` or `decoder_sparse_step`.")
    activation = c.get("hidden_act", "silu")
    experts = c.get("num_local_experts", c.get("num_experts", 0))
    traits = {
        "activation": {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "swish": "silu"}.get(activation, activation),
        "qkv_bias": c.get("attention_bias", False),
        "output_bias": c.get("attention_bias", False) and family == "llama",
        "mlp_bias": c.get("mlp_bias", False),
        **FAMILIES[family],
    }
    if traits["activation"] not in ("silu", "gelu"):
        raise ValueError(f"The activation must be 'silu', or 'gelu' by tanh. Got {activation!r}.")
    return Config(
        vocabulary=c["vocab_size"],
        hidden=hidden,
        intermediate=c.get("moe_intermediate_size") or c["intermediate_size"],
        layers=layers,
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_size=head_size,
        eps=c.get("rms_norm_eps", 1e-6),
        positions=positions,
        tied=c.get("tie_word_embeddings", not head),
        windows=_windows(c, family, layers),
        rotary=int(head_size * partial),
        theta=theta,
        scaling=tuple(sorted((key, tuple(x) if isinstance(x, list) else x) for key, x in rope.items())),
        local_theta=local,
        embedding_scale=hidden**0.5 if family.startswith("gemma") else 1.0,
        query_scale=(c.get("query_pre_attn_scalar") or head_size) ** -0.5,
        attention_cap=c.get("attn_logit_softcapping") or 0.0,
        logit_cap=c.get("final_logit_softcapping") or 0.0,
        experts=experts,
        experts_per_token=c.get("num_experts_per_tok", 0) if experts else 0,
        sum_to_one=c.get("norm_topk_prob", family != "qwen2_moe"),
        shared=c.get("shared_expert_intermediate_size", 0),
        **traits,
    )


def _windows(c: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    size = c.get("sliding_window") or 0
    if not c.get("use_sliding_window", not family.startswith("qwen")):
        size = 0
    if types := c.get("layer_types"):
        return tuple(size if kind == "sliding_attention" else 0 for kind in types)
    # Before there was `layer_types`.
    if family == "gemma3_text":
        slides = lambda n: (n + 1) % c.get("sliding_window_pattern", 6) != 0
    else:
        slides = lambda n: n % 2 == 0 if family == "gemma2" else n >= c.get("max_window_layers", 0)
    return tuple(size if slides(n) else 0 for n in range(layers))


# Architectures whose name in config.json differs from llama.cpp's.
_GGUF_FAMILIES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
# The number of layers of the 27B models, which scale queries by the width per head instead of the head size.
_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}


def _from_gguf(checkpoint: eqq.io.Checkpoint) -> Config:
    metadata = checkpoint.metadata
    architecture = metadata.get("general.architecture")
    family = _GGUF_FAMILIES.get(architecture, architecture)
    _check_family(family)
    need = lambda key: _field(checkpoint, f"{architecture}.{key}")
    get = lambda key, default: metadata.get(f"{architecture}.{key}", default)
    hidden, heads, layers = need("embedding_length"), need("attention.head_count"), need("block_count")
    head_size = get("attention.key_length", hidden // heads)
    experts = get("expert_count", 0)
    positions = get("context_length", 2048)
    # The scaling of Llama 3 is an array of the file.
    divisors = checkpoint["rope_freqs.weight"] if "rope_freqs.weight" in checkpoint else ()
    window, pattern = get("attention.sliding_window", 0), get("attention.sliding_window_pattern", 6)
    slides = {
        "gemma2": lambda n: n % 2 == 0,
        "gemma3": lambda n: (n + 1) % pattern != 0 if isinstance(pattern, int) else pattern[n],
    }.get(architecture, lambda n: True)
    query_size = hidden // heads if layers == _LARGE_GEMMA.get(architecture) else head_size
    biases = {"qkv_bias": "attn_q", "output_bias": "attn_output", "mlp_bias": "ffn_up"}
    traits = {trait: f"blk.0.{name}.bias" in checkpoint for trait, name in biases.items()} | FAMILIES[family]
    return Config(
        vocabulary=checkpoint.items_by_name["token_embd.weight"].entry.shape[0],
        hidden=hidden,
        intermediate=get("expert_feed_forward_length", need("feed_forward_length")),
        layers=layers,
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_size=head_size,
        eps=need("attention.layer_norm_rms_epsilon"),
        positions=positions,
        tied="output.weight" not in checkpoint,
        windows=tuple(window if slides(n) else 0 for n in range(layers)),
        rotary=get("rope.dimension_count", head_size),
        theta=get("rope.freq_base", 10000.0),
        scaling=_gguf_scaling(checkpoint, architecture, positions),
        divisors=tuple(float(x) for x in divisors),
        local_theta=get("rope.freq_base_swa", 10000.0) if architecture == "gemma3" else 0.0,
        embedding_scale=hidden**0.5 if family.startswith("gemma") else 1.0,
        query_scale=query_size**-0.5,
        attention_cap=get("attn_logit_softcapping", 0.0),
        logit_cap=get("final_logit_softcapping", 0.0),
        experts=experts,
        experts_per_token=get("expert_used_count", 0),
        sum_to_one=family != "qwen2_moe",
        shared=get("expert_shared_feed_forward_length", need("feed_forward_length")) if family == "qwen2_moe" else 0,
        **traits,
    )


def _gguf_scaling(checkpoint: eqq.io.Checkpoint, architecture: Any, positions: int) -> tuple[tuple[str, Any], ...]:
    """The rotary scaling of a GGUF file, in the terms of config.json."""
    get = lambda key, default: checkpoint.metadata.get(f"{architecture}.rope.scaling.{key}", default)
    kind, factor = get("type", "linear"), get("factor", 0.0) or 1.0
    scaling: dict[str, Any] = {"rope_type": "default"}
    if "rope_factors_long.weight" in checkpoint:  # files do not always name its type
        factors = (np.asarray(checkpoint[f"rope_factors_{length}.weight"]).tolist() for length in ("long", "short"))
        scaling = {"rope_type": "longrope", **dict(zip(("long_factor", "short_factor"), map(tuple, factors)))}
    elif kind == "yarn" or (kind == "linear" and factor != 1):
        scaling = {"rope_type": kind, "factor": factor}
    elif kind not in ("linear", "none"):
        raise ValueError(
            f"The rotary scaling of {checkpoint.path} must be 'linear', 'yarn' or by factors. Got {kind!r}."
        )
    if scaling["rope_type"] in ("longrope", "yarn"):
        scaling["original_max_position_embeddings"] = original = get("original_context_length", positions)
        scaling.setdefault("factor", positions / original)
        scaling["attention_factor"] = get("attn_factor", 1.0)
    if kind == "yarn":
        scaling |= {"beta_fast": get("yarn_beta_fast", 32.0), "beta_slow": get("yarn_beta_slow", 1.0)}
        grown = lambda scale: 0.1 * scale * float(np.log(max(factor, 1.0))) + 1
        scaling["attention_factor"] *= grown(1) / grown(get("yarn_log_multiplier", 0.0))
    return tuple(sorted(scaling.items()))


def _field(checkpoint: eqq.io.Checkpoint, key: str) -> Any:
    if key not in checkpoint.metadata:
        raise ValueError(f"The metadata of {checkpoint.path} must say {key!r}. They do not.")
    return checkpoint.metadata[key]


def _check_family(family: Any) -> None:
    if family not in FAMILIES:
        raise ValueError(
            f"The architecture must be one of {', '.join(FAMILIES)}. Got {family!r}. If it differs from these in what "
            "`Config` has, add it to `FAMILIES` in configuration.py."
        )


_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
)


def stop_tokens(checkpoint: eqq.io.Checkpoint) -> frozenset[int]:
    """The tokens after which generation ends, as the checkpoint says."""
    if checkpoint.dialect == "gguf":
        metadata = checkpoint.metadata
        found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        # Files do not always name the tokens that end a turn, but these texts do end one.
        kinds = metadata.get("tokenizer.ggml.token_type", ())
        for i, (token, kind) in enumerate(zip(metadata.get("tokenizer.ggml.tokens", ()), kinds, strict=False)):
            if kind == 3 and token in _END_OF_TURN:
                found.append(i)
        found = [token for token in found if isinstance(token, int)]
    else:
        path = Path(checkpoint.path)
        file = (path if path.is_dir() else path.parent) / "generation_config.json"
        generation = json.loads(file.read_text()) if file.exists() else {}
        found = generation.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    return frozenset(found if isinstance(found, list) else () if found is None else (found,))
