"""Writes a checkpoint of Hugging Face for llama.cpp: names, sizes and the tokenizer.

https://github.com/ggml-org/llama.cpp (`convert_hf_to_gguf.py`, `gguf-py/gguf/constants.py`)
"""

import functools as ft
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax.numpy as jnp
import numpy as np

from .._array.array import is_quantized
from .._array.value import AbstractArrayValue
from .._errors import Message
from .._types import PyTree
from .._wrappers.concatenate import take
from ._checkpoint import Checkpoint
from ._entry import AnyArray
from ._files import read_json
from ._lazy import LazyMapping


Json = Mapping[str, Any]  # an object of JSON from a file that is not checked field by field
Arrays = Checkpoint | LazyMapping
T = TypeVar("T", int, float)

# The architecture of llama.cpp, by `model_type`.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Architectures for which llama.cpp rotates neighbors, where Hugging Face rotates the halves of a head.
ROTATES_NEIGHBORS = ("llama",)

# The lengths of axes, by their names in `config.json`.
_VOCABULARY, _HIDDEN, _INNER, _HEAD = "vocab_size", "hidden_size", "intermediate_size", "head_dim"
_QUERIES, _KEYS = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"

# By the name of an array: its name in llama.cpp, and the lengths of its axes.
_WHOLE = {
    "embed_tokens.weight": ("token_embd.weight", _VOCABULARY, _HIDDEN),
    "norm.weight": ("output_norm.weight", _HIDDEN),
    "lm_head.weight": ("output.weight", _VOCABULARY, _HIDDEN),
}
_PARTS = {
    "input_layernorm": ("attn_norm", _HIDDEN),
    "self_attn.q_proj": ("attn_q", _QUERIES, _HIDDEN),
    "self_attn.k_proj": ("attn_k", _KEYS, _HIDDEN),
    "self_attn.v_proj": ("attn_v", _KEYS, _HIDDEN),
    "self_attn.q_norm": ("attn_q_norm", _HEAD),
    "self_attn.k_norm": ("attn_k_norm", _HEAD),
    "self_attn.o_proj": ("attn_output", _HIDDEN, _QUERIES),
    "post_attention_layernorm": ("ffn_norm", _HIDDEN),
    "mlp.gate_proj": ("ffn_gate", _INNER, _HIDDEN),
    "mlp.up_proj": ("ffn_up", _INNER, _HIDDEN),
    "mlp.down_proj": ("ffn_down", _HIDDEN, _INNER),
}
# The largest values that llama.cpp holds: it has 32-bit integers, and float32.
_MOST = {int: 2**31 - 1, float: 3e38}


def for_llama_cpp(checkpoint: Checkpoint, arrays: Arrays) -> tuple[Arrays, Mapping[str, object]]:
    """Returns arrays by the names of llama.cpp, and the key-value pairs of their file.

    Arrays and pairs are as they are if the checkpoint is a GGUF file, or of a family that is not known here.

    **Arguments:**

    - `checkpoint`: a checkpoint, with its `config.json`.
    - `arrays`: its arrays, or quantized ones, by the same names. They are read when they are asked for.

    **Raises:**

    `ValueError` if `config.json`, the shapes of the arrays and the files of the tokenizer do not agree, or hold
    settings that cannot be converted.
    """
    architecture = _ARCHITECTURES.get(str(checkpoint.config.get("model_type")))
    if checkpoint.dialect == "gguf" or architecture is None:
        return arrays, checkpoint.metadata if checkpoint.dialect == "gguf" else {}
    model = _Model(checkpoint, architecture)
    return _rename_arrays(arrays, model), model.metadata | _tokenizer(model)


class _Model:
    """The hyperparameters of a model, from its `config.json`."""

    def __init__(self, checkpoint: Checkpoint, architecture: str) -> None:
        self.checkpoint, self.architecture, self.path = checkpoint, architecture, Path(checkpoint.path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        # `null` for these says that they follow from the others.
        may_be_null = ("num_key_value_heads", _HEAD)
        self.config = {k: v for k, v in checkpoint.config.items() if v is not None or k not in may_be_null}
        self.heads, self.hidden = self.read_positive("num_attention_heads"), self.read_positive(_HIDDEN)
        self.kv_heads = self.read_positive("num_key_value_heads", self.heads)
        self.layers, self.vocabulary = self.read_positive("num_hidden_layers"), self.read_positive(_VOCABULARY)
        self.head_size, self.inner = self.read_positive(_HEAD, self.hidden // self.heads), self.read_positive(_INNER)
        if self.head_size % 2:
            self.fail("have an even 'head_dim', which is 'hidden_size' by heads if it is absent", str(self.head_size))
        if self.heads % self.kv_heads:
            must = "have 'num_key_value_heads' that divide 'num_attention_heads'"
            self.fail(must, f"{self.kv_heads} and {self.heads}")
        self.sizes = {
            **{_VOCABULARY: self.vocabulary, _HIDDEN: self.hidden, _INNER: self.inner, _HEAD: self.head_size},
            **{_QUERIES: self.heads * self.head_size, _KEYS: self.kv_heads * self.head_size},
        }
        self.epsilon = self.read_positive("rms_norm_eps", 1e-6, float)
        key = "rope_parameters" if self.config.get("rope_parameters") is not None else "rope_scaling"
        rope = self.config.get(key)
        if not isinstance(rope, dict | None):
            self.fail(f"have an object for {key!r}", repr(rope))
        self.rope: Json = rope or {}
        self.scaling = self.rope.get("rope_type", self.rope.get("type"))
        if self.scaling is None and not self.rope.keys() <= {"rope_theta", "partial_rotary_factor"}:
            self.fail(f"name the 'rope_type' of {key!r}", repr(self.rope))
        if self.scaling not in (None, "default", "linear", "llama3"):
            self.fail("have a rotary scaling that is converted: 'linear' or 'llama3'", f"{self.scaling!r}")
        theta = self.read_positive("rope_theta", 10000.0, float)
        self.theta = self.read_positive("rope_theta", theta, float, self.rope)
        for part in (self.config, self.rope):
            if part.get("partial_rotary_factor") not in (None, 1):
                self.fail("rotate whole heads: 'partial_rotary_factor' 1", repr(part["partial_rotary_factor"]))

    def fail(self, must: str, got: str, file: str = "config.json") -> NoReturn:
        raise ValueError(Message(f"For llama.cpp, {self.folder / file} must {must}. Got {got[:200]}.", "llama.cpp"))

    def read_positive(
        self, key: str, default: int | float | None = None, kind: type[T] = int, settings: Json | None = None
    ) -> T:
        """Returns a number above 0 that llama.cpp can hold, from `config.json` or a part of it."""
        found: PyTree = (self.config if settings is None else settings).get(key, default)
        if type(found) not in (int, kind) or not 0 < found <= _MOST[kind]:
            what = "a whole number" if kind is int else "a number"
            self.fail(f"have {what} above 0, of at most {_MOST[kind]}, for {key!r}", repr(found))
        return kind(found)

    @property
    def metadata(self) -> dict[str, object]:
        name = self.path.resolve()
        pairs = {
            "vocab_size": self.vocabulary,
            "context_length": self._context(),
            "embedding_length": self.hidden,
            "block_count": self.layers,
            "feed_forward_length": self.inner,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "attention.layer_norm_rms_epsilon": self.epsilon,
            "rope.dimension_count": self.head_size,
            "rope.freq_base": self.theta,
        }
        if self.scaling == "linear":
            pairs |= {"rope.scaling.type": "linear", "rope.scaling.factor": self._read_scaling("factor")}
        title = name.stem if name.suffix else name.name
        about: dict[str, object] = {"general.architecture": self.architecture, "general.name": title}
        return about | {f"{self.architecture}.{key}": value for key, value in pairs.items()}

    def _read_scaling(self, key: str) -> float:
        return self.read_positive(key, None, float, self.rope)

    def _context(self) -> int:
        """Returns how many tokens the model may see.

        With a sliding window that is its length, since llama.cpp has none for these families.
        """
        positions = self.read_positive("max_position_embeddings", 2048)
        slides = self.config.get("use_sliding_window", not self.architecture.startswith("qwen"))
        has_window = slides and self.config.get("sliding_window") is not None
        return min(positions, self.read_positive("sliding_window")) if has_window else positions

    @property
    def divisors(self) -> np.ndarray | None:
        """The divisors of the rotary frequencies: how llama.cpp stores the scaling of Llama 3."""
        if self.scaling != "llama3":
            return None
        turns = self.theta ** -(np.arange(0, self.head_size, 2) / self.head_size) / (2 * math.pi)
        turns *= self._read_scaling("original_max_position_embeddings")
        low, high = self._read_scaling("low_freq_factor"), self._read_scaling("high_freq_factor")
        if low >= high:
            self.fail("have a 'low_freq_factor' below the 'high_freq_factor'", f"{low} and {high}")
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return (1 / (keep + (1 - keep) / self._read_scaling("factor"))).astype(np.float32)

    def sources(self) -> dict[str, str]:
        """Returns the name of each array by its name in llama.cpp.

        Raises unless their shapes agree with the hyperparameters.
        """
        names: dict[str, str] = {}
        for row in self.checkpoint.rows:
            if row.name.endswith(".rotary_emb.inv_freq"):
                continue
            name, sizes = self._rename(row.name)
            if name in names:
                self.fail(f"hold one {name!r}", f"{names[name]!r} and {row.name!r}, which are both called so", "")
            wanted = tuple(self.sizes[size] for size in sizes)
            if tuple(row.shape) != wanted:
                must = f"agree with the arrays: {row.name!r} has the shape {tuple(row.shape)}"
                self.fail(must, f"{wanted} from ({', '.join(sizes)})")
            names[name] = row.name
        layers = {int(name.split(".")[1]) for name in names if name.startswith("blk.")}
        if len(layers) != self.layers or max(layers) != self.layers - 1:
            must = f"agree with the arrays, of {len(layers)} layers up to index {max(layers, default=None)}"
            self.fail(must, f"{self.layers} for 'num_hidden_layers'")
        parts = [part for part in _PARTS if self.architecture == "qwen3" or not part.endswith(("q_norm", "k_norm"))]
        inner = [f"layers.{n}.{part}.weight" for n in range(self.layers) for part in parts]
        for name in ("embed_tokens.weight", "norm.weight", *inner):
            if self._rename(name)[0] not in names:
                self.fail(f"hold 'model.{name}'", "arrays without it", "")
        return names

    def _rename(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Returns the name of an array in llama.cpp, and its sizes."""
        inner = name.removeprefix("model.")
        if inner in _WHOLE:
            return _WHOLE[inner][0], _WHOLE[inner][1:]
        found = re.fullmatch(r"layers\.(0|[1-9][0-9]{0,8})\.(.+)\.(weight|bias)", inner)
        if found is None or found[2] not in _PARTS:
            self.fail(f"hold only arrays that its {self.architecture!r} has a name for", repr(name), "")
        part, *sizes = _PARTS[found[2]]
        return f"blk.{found[1]}.{part}.{found[3]}", tuple(sizes[:1] if found[3] == "bias" else sizes)


def _rename_arrays(arrays: Arrays, model: _Model) -> LazyMapping:
    """Returns the arrays of a checkpoint, by the names of llama.cpp."""
    heads = {"q": model.heads, "k": model.kv_heads} if model.architecture in ROTATES_NEIGHBORS else {}

    def read(name: str, source: str) -> AnyArray:
        x = arrays[source]
        if isinstance(x, AbstractArrayValue) and not is_quantized(x):
            return x  # the writer refuses it
        if (found := re.search(r"\.attn_([qk])\.", name)) and found[1] in heads:
            x = neighbors(heads[found[1]])(x)
        # llama.cpp adds and multiplies vectors in float32 alone.
        return jnp.asarray(x).astype(jnp.float32) if x.ndim == 1 and not is_quantized(x) else x

    readers: dict[str, Callable[[], AnyArray]] = {
        name: ft.partial(read, name, source) for name, source in model.sources().items()
    }
    if (divisors := model.divisors) is not None:
        readers["rope_freqs.weight"] = lambda: divisors
    return LazyMapping(readers)


def neighbors(heads: int) -> Callable[[PyTree], PyTree]:
    """Returns the inverse of `names.rotary_halves`, for the rows of a head.

    Rows `i` and `i + size / 2` become neighbors.
    """
    return lambda x: take(x, np.arange(x.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1))


# Tokenizers

# llama.cpp's ids of kinds of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# llama.cpp's names of pre-tokenizers, by the regular expressions that split text before bytes are merged.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS = {(): "gpt-2", (_WORDS + "{1,3}" + _OTHERS,): "llama-bpe", (_WORDS + _OTHERS,): "qwen2"}


def _tokenizer(model: _Model) -> dict[str, object]:
    folder = model.folder
    files = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    described, settings, generation = (read_json(folder / name) for name in files)
    if not described:
        return {"tokenizer.ggml.model": "no_vocab"}
    try:
        pairs = _vocabulary(described, model)
        begins = _begins(described)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as e:
        got = str(e) if type(e) is ValueError else f"another layout ({type(e).__name__}: {e})"
        raise ValueError(
            f"For llama.cpp, {folder / 'tokenizer.json'} must merge bytes or pieces, in the layout of the tokenizers "
            f"library. Got {got[:200]}. Without that file the tokenizer is left out."
        ) from None
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        file, given = "config.json", model.config.get(key)
        if given is None:
            file, given = "generation_config.json", generation.get(key)
        found = given[0] if isinstance(given, list) and given else given
        if found is None or (found == -1 and type(found) is int):  # both say that there is none
            continue
        if type(found) is not int or not 0 <= found < model.vocabulary:
            model.fail(f"have a token below {model.vocabulary}, the 'vocab_size', for {key!r}", repr(given), file)
        pairs[f"tokenizer.ggml.{name}_token_id"] = found
    given = settings.get("add_bos_token")
    if not isinstance(given, bool | None):
        model.fail("have true or false for 'add_bos_token'", repr(given), "tokenizer_config.json")
    pairs["tokenizer.ggml.add_bos_token"] = begins if given is None else given
    chat = _chat_template(model, settings)
    return pairs | ({} if chat is None else {"tokenizer.chat_template": chat})


def _chat_template(model: _Model, settings: Mapping[str, object]) -> str | None:
    own = model.folder / "chat_template.jinja"
    file = own.name if own.is_file() else "tokenizer_config.json"
    try:
        chat = own.read_bytes().decode(errors="surrogateescape") if own.is_file() else settings.get("chat_template")
        return _text(chat) if isinstance(chat, str) else None
    except ValueError as e:
        model.fail("have a chat template of UTF-8", str(e), file)


def _vocabulary(described: Json, model: _Model) -> dict[str, object]:
    bpe = _object(described, "model")
    if bpe.get("type", "BPE") != "BPE":
        raise ValueError(f"a model of {bpe['type']}")
    tokens: list[str | None] = [None] * model.vocabulary
    kinds = np.full(model.vocabulary, _UNUSED, np.int32)
    pieces, vocab = bool(bpe.get("byte_fallback")), _object(bpe, "vocab")
    if not isinstance(bpe["merges"], list):
        raise ValueError(f"{bpe['merges']!r} for 'merges', which must be a list")
    merges = [_pair(merge) for merge in bpe["merges"]]

    def put(text: object, token_id: object, kind: int) -> None:
        token = _text(text)
        if type(token_id) is not int or not 0 <= token_id < model.vocabulary:
            raise ValueError(f"the token {token!r} with the id {token_id!r}, and the model has {model.vocabulary}")
        if tokens[token_id] not in (None, token):
            raise ValueError(f"the id {token_id} for the tokens {tokens[token_id]!r} and {token!r}")
        tokens[token_id], kinds[token_id] = token, kind

    for token, token_id in vocab.items():
        put(token, token_id, _BYTE if pieces and re.fullmatch("<0x[0-9A-F]{2}>", token) else _NORMAL)
    for added in described.get("added_tokens", ()):
        unknown = pieces and added["content"] == bpe.get("unk_token")
        kind = _UNKNOWN if unknown else _CONTROL if added.get("special") else _USER
        put(added["content"], added["id"], kind)
    names = [f"[PAD{n}]" if token is None else token for n, token in enumerate(tokens)]
    token, times = Counter(names).most_common(1)[0]
    if times > 1:  # at which llama.cpp ends the process
        raise ValueError(f"{times} ids for the token {token!r}")
    pairs: dict[str, object] = {"tokenizer.ggml.tokens": names, "tokenizer.ggml.token_type": kinds}
    if not pieces:
        before = {"tokenizer.ggml.pre": _find_pre_tokenizer(_object(described, "pre_tokenizer"))}
        merged = {"tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
        return {"tokenizer.ggml.model": "gpt2"} | before | pairs | merged
    # llama.cpp first merges the pair whose token has the highest score.
    scores = np.full(model.vocabulary, -float(len(merges)), np.float32)
    for rank, pair in reversed(list(enumerate(merges))):
        if "".join(pair) not in vocab:
            raise ValueError(f"a merge to {''.join(pair)!r}, which is no token")
        scores[vocab["".join(pair)]] = -float(rank)
    if bpe.get("unk_token") in vocab:
        pairs["tokenizer.ggml.unknown_token_id"] = vocab[bpe["unk_token"]]
    pairs["tokenizer.ggml.add_space_prefix"] = _begins_with_space(described)
    return {"tokenizer.ggml.model": "llama"} | pairs | {"tokenizer.ggml.scores": scores}


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise ValueError(f"{found!r} where text must be")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{found[:80]!r}, which is no text of UTF-8") from None
    return found


def _pair(merge: object) -> list[str]:
    pair = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(pair, list) or len(pair) != 2 or "" in pair:
        raise ValueError(f"{merge!r} among 'merges', which must be pairs")
    return [_text(piece) for piece in pair]


def _object(parent: Json, key: str, default: object = None) -> Json:
    """Returns an object of an object: the default if it is absent or `null`."""
    found = default if parent.get(key) is None else parent[key]
    if not isinstance(found, dict):
        raise ValueError(f"{found!r} for {key!r}, which must be an object")
    return found


def _find_pre_tokenizer(before: Json) -> str:
    steps = before.get("pretokenizers", [before])
    expressions = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    expressions += ["" for step in steps if step["type"] == "ByteLevel" and expressions and step.get("use_regex", True)]
    if tuple(expressions) not in _PRE_TOKENIZERS or any(step["type"] not in ("Split", "ByteLevel") for step in steps):
        raise ValueError(f"it divides text by {steps}")
    return _PRE_TOKENIZERS[tuple(expressions)]


def _begins_with_space(described: Json) -> bool:
    normalizer, before = _object(described, "normalizer", {}), _object(described, "pre_tokenizer", {})
    prepends = any(step["type"] == "Prepend" for step in normalizer.get("normalizers", [normalizer]) if step)
    return prepends or before.get("prepend_scheme") in ("first", "always")


def _begins(described: Json) -> bool:
    """Whether the tokenizer puts a special token first."""
    after = _object(described, "post_processor", {})
    for step in (after, *after.get("processors", ())):
        if step.get("type") == "TemplateProcessing" and step.get("single"):
            return "SpecialToken" in step["single"][0]
    return False
