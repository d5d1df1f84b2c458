"""Tokenizers and chat templates, from a folder with `tokenizer.json` or from a GGUF file."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TYPE_CHECKING

import eqquant as eqq


if TYPE_CHECKING:  # both take a moment to import, and numbers of tokens need neither
    from jinja2 import Environment
    from tokenizers import Tokenizer

Message = Mapping[str, str]  # {"role": "user", "content": "Hi"}


class Text:
    """Tokens to text and back; without a tokenizer, numbers.

    - `chat_template`: a Jinja template that formats messages as text.
    - `names`: values of variables of the template, such as `bos_token`.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer | None" = None,
        chat_template: str | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer, self.chat_template, self.names = tokenizer, chat_template, dict(names or {})

    @property
    def first(self) -> int | None:
        """The token that begins every text (BOS), or `None`."""
        begin = self.encode("")[:1]
        return begin[0] if begin and self.encode("a")[:1] == begin else None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text, with BOS and EOS if the tokenizer adds them.

        `special`: text such as `</s>` is one token.
        """
        if self.tokenizer is not None:
            self.tokenizer.encode_special_tokens = not special
            return self.tokenizer.encode(text).ids
        if not all(word.isdecimal() for word in text.split()):
            raise ValueError(f"With `--ids`, a prompt must be numbers, such as '1 15 27'. Got {text!r}.")
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if self.tokenizer is None else self.tokenizer.decode(list(ids))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where an answer begins."""
        if self.tokenizer is None or self.chat_template is None:
            raise ValueError(
                "For `--chat`, the model must have a chat template, in its GGUF file, chat_template.jinja or "
                "tokenizer_config.json. Got none. Models without one continue texts: leave out `--chat`."
            )
        sandbox = _sandbox()
        try:
            template = sandbox.from_string(self.chat_template)
            text = template.render(messages=messages, add_generation_prompt=True, **self.names)
        except Exception as e:  # a template may raise anything
            raise ValueError(
                f"The chat template must be in the language of Jinja, and only format messages. Got {e}."
            ) from None
        first = self.first
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids if first is None or ids[:1] == [first] else [first, *ids]


def open_text(checkpoint: eqq.io.Checkpoint, vocabulary: int, file: Path | None = None) -> Text:
    """The tokenizer and the chat template of a checkpoint. `file`: another tokenizer.json."""
    path = Path(checkpoint.path)
    folder = path if path.is_dir() else path.parent
    if checkpoint.dialect == "gguf":
        template, names = _get(checkpoint, "tokenizer.chat_template", str), _special_names(checkpoint)
    else:
        template, names = _from_folder(folder)
        file = file or folder / "tokenizer.json"
    tokenizer = tokenizer_of_gguf(checkpoint) if file is None else _read(file)
    if (most := max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)) >= vocabulary:
        raise ValueError(f"{file or path} must fit the model, which has {vocabulary:,} tokens. Got the token {most}.")
    return Text(tokenizer, template, names)


def _read(file: Path) -> "Tokenizer":
    if not file.exists():
        raise FileNotFoundError(f"{file} must be the tokenizer. Got no such file. Set `--tokenizer`, or `--ids`.")
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as e:  # tokenizers raises no other class
        raise ValueError(f"{file} must be a tokenizer.json of the tokenizers library. Got: {e}.") from None


def _from_folder(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template of a folder of Hugging Face, and the texts of its special tokens."""
    own, file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    names = {key: token["content"] if isinstance(token, dict) else token for key, token in settings.items() if token}
    names = {key: token for key, token in names.items() if key.endswith("_token") and isinstance(token, str)}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {each["name"]: each["template"] for each in template}.get("default")
    return own.read_text() if own.exists() else template, names


#
# Chat templates
#


def _sandbox() -> "Environment":
    """A template comes with the model, from anyone: here it can only format what it is given."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ImportError("Chat templates need jinja2: pip install jinja2.") from None

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


#
# Tokenizers in GGUF files
#

# Kinds of tokens.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_LOWER, _UPPER = r"(?:(?=\p{L})[^A-Z])", r"(?:(?=\p{L})[^a-z])"  # also letters without case
_MORE_LETTERS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"


def _words(digits: str, letters: str = r"\p{L}", others: str = r"\s\p{L}\p{N}") -> str:
    return rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^{others}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, ending: str) -> str:
    before, after = r"[^\r\n\p{L}\p{N}]?", rf"{ending}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    return rf"{before}{_UPPER}*{_LOWER}+{ending}|{before}{_UPPER}+{_LOWER}*{after}"


# By llama.cpp's names of pre-tokenizers: the expressions that split text, one after another, before BPE.
_CUTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): (
        _words(r"\p{N}{1,3}"),
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"): (_words(r"\p{N}{1,3}"),),
    ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"): (_words(r"\p{N}"),),
    ("qwen35",): (_words(r"\p{N}", r"\p{L}\p{M}", r"\s\p{L}\p{M}\p{N}"),),
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "mellum", "exaone4"): (_GPT_2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): (
        r"\p{N}",
        _GPT_2,
    ),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]"),
    ("tekken",): (_cased(r"\p{N}", ""),),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): (_cased(r"\p{N}{1,3}", f"{_ANY_CASE}?"),),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        rf"{_MORE_LETTERS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    ),
    ("bloom", "poro-chat", "gpt3-finnish"): (" ?[^(\\s|.,!?…。，、।۔،)]+",),
    ("viking",): (" ?[^(\\s|.,!?…。，、।۔،)]+", r"\p{N}"),
}
_PRE_TOKENIZERS = {name: cuts for names, cuts in _CUTS.items() for name in names}
# These take a word that is a token as it is, without merges.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
_WHOLE_WORDS |= {"glm4", "glm5", "tekken"}
_BEGIN = _WHOLE_WORDS - {"glm4", "glm5"}  # these add BOS, unless the file says otherwise

# BOS and EOS by kind of tokenizer, unless the file says otherwise.
_DEFAULT_ENDS = {"gpt2": (11, 11), "llama": (1, 2), "t5": (None, 1)}


def tokenizer_of_gguf(checkpoint: eqq.io.Checkpoint) -> "Tokenizer":
    """The tokenizer of a GGUF file, with its special tokens, BOS and EOS."""
    from tokenizers import AddedToken, processors

    model = _get(checkpoint, "tokenizer.ggml.model", str)
    if model in (None, "none", "no_vocab"):
        _refuse(checkpoint, "hold a tokenizer", "none")
    makers = {"gpt2": _byte_level, "llama": _sentence_piece, "t5": _unigram}
    if model not in makers:
        _refuse(checkpoint, f"hold a tokenizer of the kind {', '.join(makers)}", repr(model))
    tokens = _tokens(checkpoint)
    try:
        tokenizer = makers[model](checkpoint, tokens)
    except (ValueError, TypeError, OSError):
        raise
    except Exception as e:  # tokenizers raises no other class
        _refuse(checkpoint, "hold a whole tokenizer", str(e))
    kinds = _list(checkpoint, "tokenizer.ggml.token_type", len(tokens))
    # Phi-3's special tokens take the spaces after them.
    strips = "phi-3" in (name := str(checkpoint.metadata.get("general.name", "")).lower()) or "phi3" in name
    keeps = ("<unk>", "<s>", "<|endoftext|>")
    added = lambda token, special: AddedToken(
        token, special=special, normalized=False, rstrip=strips and token not in keeps
    )
    marked = [(token, kind) for token, kind in zip(tokens, kinds or (), strict=False) if token]
    tokenizer.add_special_tokens([added(token, True) for token, kind in marked if kind in (_UNKNOWN, _CONTROL)])
    tokenizer.add_tokens([added(token, False) for token, kind in marked if kind == _USER_DEFINED])
    pre = checkpoint.metadata.get("tokenizer.ggml.pre")
    begins = _flag(checkpoint, "add_bos_token", model == "llama" or (model == "gpt2" and pre in _BEGIN))
    ends = _flag(checkpoint, "add_eos_token", model == "t5")
    first, last = _DEFAULT_ENDS[model]
    before = [_end(checkpoint, "bos", tokens, first)] * begins
    after = [_end(checkpoint, "eos", tokens, last)] * ends
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)],
        special_tokens=[(tokens[i], i) for i in {*before, *after}],
    )
    return tokenizer


def _byte_level(checkpoint: eqq.io.Checkpoint, tokens: list[str]) -> "Tokenizer":
    from tokenizers import decoders, models, pre_tokenizers, Regex, Tokenizer

    name = _get(checkpoint, "tokenizer.ggml.pre", str)
    if name not in _PRE_TOKENIZERS:
        _refuse(checkpoint, f"name a pre-tokenizer that is known here: {', '.join(_PRE_TOKENIZERS)}", repr(name))
    merges = [tuple(merge.split(" ", 1)) for merge in _list(checkpoint, "tokenizer.ggml.merges") or ()]
    tokenizer = Tokenizer(models.BPE(_vocabulary(tokens), merges, ignore_merges=name in _WHOLE_WORDS))
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _PRE_TOKENIZERS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(checkpoint: eqq.io.Checkpoint, tokens: list[str]) -> "Tokenizer":
    from tokenizers import decoders, models, normalizers, Tokenizer

    vocabulary, scores = _vocabulary(tokens), _list(checkpoint, "tokenizer.ggml.scores", len(tokens))
    if scores is None:
        _refuse(checkpoint, "hold the scores of its tokens", "none")
    cuts = ((token[:n], token[n:], i) for token, i in vocabulary.items() for n in range(1, len(token)))
    pairs = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
    pairs.sort(key=lambda pair: -scores[pair[2]])  # SentencePiece first merges the pair with the highest score
    unknown = tokens[_end(checkpoint, "unknown", tokens, 0)]
    merges = [pair[:2] for pair in pairs]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = _flag(checkpoint, "add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(back + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def _unigram(checkpoint: eqq.io.Checkpoint, tokens: list[str]) -> "Tokenizer":
    from tokenizers import decoders, models, normalizers, Regex, Tokenizer

    scores = _list(checkpoint, "tokenizer.ggml.scores", len(tokens))
    if scores is None:
        _refuse(checkpoint, "hold the scores of its tokens", "none")
    kinds = _list(checkpoint, "tokenizer.ggml.token_type", len(tokens)) or [1] * len(tokens)
    # Zero for tokens that are not text: the library scores unknown text below the least score, which theirs may lower.
    pieces = [(token, score if kind == 1 else 0.0) for token, score, kind in zip(tokens, scores, kinds, strict=False)]
    tokenizer = Tokenizer(models.Unigram(pieces, _end(checkpoint, "unknown", tokens, 2), False))
    steps = []
    if characters := checkpoint.metadata.get("tokenizer.ggml.precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(x % 256 for x in characters)))
    merges = _flag(checkpoint, "remove_extra_whitespaces", False)
    steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")] * merges
    prefix = _flag(checkpoint, "add_space_prefix", False) or merges
    before_words = normalizers.Replace(Regex(r"\A(?= *[^ ])"), " ")  # not in spaces alone
    steps += [before_words] * prefix + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    back = [decoders.Replace("▁", " "), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(back + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens) if token}


def _tokens(checkpoint: eqq.io.Checkpoint) -> list[str]:
    tokens = _list(checkpoint, "tokenizer.ggml.tokens")
    if not tokens or not all(isinstance(token, str) for token in tokens):
        _refuse(checkpoint, "hold the texts of its tokens", "none")
    return tokens


def _list(checkpoint: eqq.io.Checkpoint, key: str, length: int | None = None) -> list[Any] | None:
    found = checkpoint.metadata.get(key)
    if found is None:
        return None
    if isinstance(found, (str, int, float)) or (length is not None and len(found) < length):
        _refuse(checkpoint, f"hold a list of {length or 'texts'} for {key!r}", repr(found))
    return list(found)


def _get(checkpoint: eqq.io.Checkpoint, key: str, kind: type) -> Any:
    found = checkpoint.metadata.get(key)
    if found is not None and not isinstance(found, kind):
        _refuse(checkpoint, f"hold a {kind.__name__} for {key!r}", repr(found))
    return found


def _flag(checkpoint: eqq.io.Checkpoint, key: str, default: bool) -> bool:
    found = _get(checkpoint, f"tokenizer.ggml.{key}", bool)
    return default if found is None else found


def _end(checkpoint: eqq.io.Checkpoint, name: str, tokens: Sequence[str], default: int | None) -> int:
    key = f"tokenizer.ggml.{name}_token_id"
    found = checkpoint.metadata.get(key, default)
    if not isinstance(found, int) or not 0 <= found < len(tokens):
        _refuse(checkpoint, f"hold a number below {len(tokens):,}, its tokens, for {key!r}", repr(found))
    return found


def _special_names(checkpoint: eqq.io.Checkpoint) -> dict[str, str]:
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens", ())
    ids = {name: checkpoint.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _refuse(checkpoint: eqq.io.Checkpoint, must: str, got: str) -> NoReturn:
    raise ValueError(
        f"{checkpoint.path} must {must}. Got {got}. Set `--tokenizer` to the tokenizer.json of the model, or `--ids`."
    )
