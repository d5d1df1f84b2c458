"""What llama.cpp needs of a checkpoint of Hugging Face: names of its own, numbers of the model, and a tokenizer.

https://github.com/ggml-org/llama.cpp (`convert_hf_to_gguf.py`, `gguf-py/gguf/constants.py`)
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from .._array.array import is_quantized
from .._array.pieces import take
from .._array.value import AbstractArrayValue
from ._checkpoint import Checkpoint
from ._files import read_json
from ._stored import MappedFile


# The architecture of llama.cpp, by `model_type`.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# It turns neighbours by rotary embedding, and Hugging Face the halves of a head.
_NEIGHBOURS = ("llama",)

_WHOLE = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
_PARTS = {
    "input_layernorm": "attn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def for_llama_cpp(checkpoint: Checkpoint, arrays: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns arrays by the names of llama.cpp, and the key-value pairs of their file.

    Arrays and pairs are as they are if the checkpoint is a GGUF file, or of a family that is not known here.

    **Arguments:**

    - `checkpoint`: a checkpoint, with its `config.json`.
    - `arrays`: its arrays, or what was made of them, by the same names. They are read when they are asked for.
    """
    architecture = _ARCHITECTURES.get(str(checkpoint.config.get("model_type")))
    if checkpoint.dialect == "gguf" or architecture is None:
        return arrays, checkpoint.metadata if checkpoint.dialect == "gguf" else {}
    model = _Model(checkpoint, architecture)
    return _Renamed(arrays, model), model.metadata | _tokenizer(checkpoint, model)


class _Model:
    """The numbers of a model, as its `config.json` says them."""

    def __init__(self, checkpoint: Checkpoint, architecture: str) -> None:
        self.checkpoint, self.config, self.architecture = checkpoint, checkpoint.config, architecture
        self.heads, self.hidden = self.number("num_attention_heads"), self.number("hidden_size")
        self.kv_heads = self.number("num_key_value_heads", self.heads)
        self.layers, self.vocabulary = self.number("num_hidden_layers"), self.number("vocab_size")
        self.head_size = self.number("head_dim", self.hidden // self.heads)
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        self.rope: dict[str, Any] = dict(rope) if isinstance(rope, dict) else {}
        self.scaling = self.rope.get("rope_type") or self.rope.get("type") or "default"
        if self.scaling not in ("default", "linear", "llama3"):
            self.fail(f"the rotary scaling {self.scaling!r}, which is neither 'linear' nor 'llama3'")
        self.theta = self.rope.get("rope_theta") or self.config.get("rope_theta") or 10000.0

    def fail(self, what: str) -> NoReturn:
        raise ValueError(
            f"The config.json of {self.checkpoint.path} must describe a model that llama.cpp runs. Got {what}. "
            "`eqq.io.write` takes names and metadata of your own."
        )

    def number(self, key: str, default: int | None = None) -> int:
        found = self.config.get(key)
        found = default if found is None else found
        if type(found) is not int or found < 1:
            self.fail(f"{found!r} for {key!r}")
        return found

    @property
    def metadata(self) -> dict[str, Any]:
        name = Path(self.checkpoint.path).resolve()
        pairs = {
            "vocab_size": self.vocabulary,
            "context_length": self._context(),
            "embedding_length": self.hidden,
            "block_count": self.layers,
            "feed_forward_length": self.number("intermediate_size"),
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "attention.layer_norm_rms_epsilon": float(self.config.get("rms_norm_eps", 1e-6)),
            "rope.dimension_count": self.head_size,
            "rope.freq_base": float(self.theta),
        }
        if self.scaling == "linear":
            pairs |= {"rope.scaling.type": "linear", "rope.scaling.factor": self._of_scaling("factor")}
        about = {"general.architecture": self.architecture, "general.name": name.stem if name.suffix else name.name}
        return about | {f"{self.architecture}.{key}": value for key, value in pairs.items()}

    def _of_scaling(self, key: str) -> float:
        found = self.rope.get(key)
        if not isinstance(found, int | float) or found <= 0:
            self.fail(f"{found!r} for {key!r} of the rotary scaling")
        return float(found)

    def _context(self) -> int:
        """Returns the tokens that the model may see: those of a window, since llama.cpp has none for these families."""
        positions, window = self.number("max_position_embeddings", 2048), self.config.get("sliding_window")
        slides = self.config.get("use_sliding_window", not self.architecture.startswith("qwen"))
        return min(positions, window) if slides and type(window) is int and window > 0 else positions

    @property
    def divisors(self) -> np.ndarray | None:
        """The divisors of the rotary frequencies, by which llama.cpp has the scaling of Llama 3."""
        if self.scaling != "llama3":
            return None
        turns = self.theta ** -(np.arange(0, self.head_size, 2) / self.head_size) / (2 * math.pi)
        turns *= self._of_scaling("original_max_position_embeddings")
        low, high = self._of_scaling("low_freq_factor"), self._of_scaling("high_freq_factor")
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return (1 / (keep + (1 - keep) / self._of_scaling("factor"))).astype(np.float32)


class _Renamed(Mapping[str, Any]):
    """The arrays of a checkpoint, by the names of llama.cpp."""

    def __init__(self, arrays: Mapping[str, Any], model: _Model) -> None:
        self._arrays, self._sources = arrays, {}
        for name in arrays:
            if not name.endswith(".rotary_emb.inv_freq"):
                self._sources[_renamed(name, model)] = name
        self._extra = {} if model.divisors is None else {"rope_freqs.weight": model.divisors}
        self._heads = {"q": model.heads, "k": model.kv_heads} if model.architecture in _NEIGHBOURS else {}

    def __getitem__(self, name: str) -> Any:
        if name in self._extra:
            return self._extra[name]
        x = self._arrays[self._sources[name]]
        if isinstance(x, AbstractArrayValue) and not is_quantized(x):
            return x  # the writer refuses it
        if (found := re.search(r"\.attn_([qk])\.", name)) and found[1] in self._heads:
            x = neighbours(self._heads[found[1]])(x)
        # It adds and multiplies vectors in float32 alone.
        return jnp.asarray(x).astype(jnp.float32) if x.ndim == 1 and not is_quantized(x) else x

    def __iter__(self) -> Iterator[str]:
        return iter((*self._sources, *self._extra))

    def __len__(self) -> int:
        return len(self._sources) + len(self._extra)


def neighbours(heads: int) -> Callable[[Any], Any]:
    """Returns what `names.rotary_halves` undoes: rows `i` and `i + size / 2` of a head become neighbours."""
    return lambda x: take(x, np.arange(x.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1))


def _renamed(name: str, model: _Model) -> str:
    if name == "lm_head.weight":
        return "output.weight"
    inner = name.removeprefix("model.")
    if inner in _WHOLE:
        return _WHOLE[inner]
    found = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", inner)
    if found is None or found[2] not in _PARTS:
        model.fail(f"the array {name!r}, which has no name in llama.cpp's {model.architecture!r}")
    return f"blk.{found[1]}.{_PARTS[found[2]]}.{found[3]}"


# Tokenizers

# The numbers that llama.cpp gives to kinds of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# The names that it has for regular expressions, by which text is divided before bytes are merged.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIVIDERS = {(): "gpt-2", (_WORDS + "{1,3}" + _OTHERS,): "llama-bpe", (_WORDS + _OTHERS,): "qwen2"}


def _tokenizer(checkpoint: Checkpoint, model: _Model) -> dict[str, Any]:
    folder = Path(checkpoint.path) if Path(checkpoint.path).is_dir() else Path(checkpoint.path).parent
    read = lambda name: read_json(MappedFile(folder / name)) if (folder / name).is_file() else {}
    described, settings, generation = (
        read("tokenizer.json"),
        read("tokenizer_config.json"),
        read("generation_config.json"),
    )
    if not described:
        return {"tokenizer.ggml.model": "no_vocab"}
    try:
        pairs = _vocabulary(described, model)
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(
            f"The tokenizer.json beside {checkpoint.path} must describe a tokenizer that llama.cpp has, which merges "
            f"bytes or pieces. Got another: {e}. Without that file the tokenizer is left out."
        ) from None
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        found = model.config.get(key)
        found = generation.get(key) if found is None else found
        found = found[0] if isinstance(found, list) and found else found
        if type(found) is int and 0 <= found < model.vocabulary:
            pairs[f"tokenizer.ggml.{name}_token_id"] = found
    begins = settings.get("add_bos_token")
    pairs["tokenizer.ggml.add_bos_token"] = _begins(described) if begins is None else bool(begins)
    template = folder / "chat_template.jinja"
    chat = template.read_text() if template.is_file() else settings.get("chat_template")
    return pairs | ({"tokenizer.chat_template": chat} if isinstance(chat, str) else {})


def _vocabulary(described: Mapping[str, Any], model: _Model) -> dict[str, Any]:
    bpe = described["model"]
    if bpe.get("type", "BPE") != "BPE":
        raise ValueError(f"a model of {bpe['type']}")
    tokens = [f"[PAD{n}]" for n in range(model.vocabulary)]
    kinds = np.full(model.vocabulary, _UNUSED, np.int32)
    pieces = bool(bpe.get("byte_fallback"))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]

    def put(token: str, number: int, kind: int) -> None:
        if not 0 <= number < model.vocabulary:
            raise ValueError(f"the token {token!r} has the number {number}, and the model has {model.vocabulary}")
        tokens[number], kinds[number] = token, kind

    for token, number in bpe["vocab"].items():
        put(token, number, _BYTE if pieces and re.fullmatch("<0x[0-9A-F]{2}>", token) else _NORMAL)
    for added in described.get("added_tokens", ()):
        unknown = pieces and added["content"] == bpe.get("unk_token")
        kind = _UNKNOWN if unknown else _CONTROL if added.get("special") else _USER
        put(added["content"], added["id"], kind)
    pairs: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if not pieces:
        about = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _divider(described["pre_tokenizer"])}
        return about | pairs | {"tokenizer.ggml.merges": merges}
    # Of two pairs it merges the one first whose token has the higher score.
    scores = np.full(model.vocabulary, -float(len(merges)), np.float32)
    for rank, pair in reversed(list(enumerate(merges))):
        scores[bpe["vocab"][pair.replace(" ", "", 1)]] = -float(rank)
    if (unknown := bpe["vocab"].get(bpe.get("unk_token"))) is not None:
        pairs["tokenizer.ggml.unknown_token_id"] = unknown
    pairs["tokenizer.ggml.add_space_prefix"] = _begins_with_space(described)
    return {"tokenizer.ggml.model": "llama"} | pairs | {"tokenizer.ggml.scores": scores}


def _divider(before: Mapping[str, Any]) -> str:
    steps = before.get("pretokenizers", [before])
    expressions = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    expressions += ["" for step in steps if step["type"] == "ByteLevel" and expressions and step.get("use_regex", True)]
    if tuple(expressions) not in _DIVIDERS or any(step["type"] not in ("Split", "ByteLevel") for step in steps):
        raise ValueError(f"it divides text by {steps}")
    return _DIVIDERS[tuple(expressions)]


def _begins_with_space(described: Mapping[str, Any]) -> bool:
    normalizer, before = described.get("normalizer") or {}, described.get("pre_tokenizer") or {}
    prepends = any(step["type"] == "Prepend" for step in normalizer.get("normalizers", [normalizer]) if step)
    return prepends or before.get("prepend_scheme") in ("first", "always")


def _begins(described: Mapping[str, Any]) -> bool:
    """Whether the tokenizer puts a special token first."""
    after = described.get("post_processor") or {}
    for step in (after, *after.get("processors", ())):
        if step.get("type") == "TemplateProcessing" and step.get("single"):
            return "SpecialToken" in step["single"][0]
    return False
