"""Writes `tokens.json` of `tests/golden/llama`: tiny vocabularies, and the tokens of a text by llama.cpp.

    pip install llama-cpp-python && python -m tools.golden_tokens

The tests need only the file.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import models, normalizers, pre_tokenizers, Tokenizer, trainers

import eqquant as eqq


GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "llama" / "tokens.json"
TEXT = (
    "It's  HERE's the McDonald's, don't I'LL 12345 1,234.5 x==y; foo_bar(a+b)//c $5|~\n\n\n  \t next\r\nline <0x41> "
    "Привет, мир! 你好，世界 こんにちは カタカナ 한국어 नमस्ते שלום "
    "e\u0301\u0308 ǅ ½ Ⅷ ٣٤ 🙂👩\u200d👧 \u00a0\u2003 end \n a</s>b <|x|>  "
)
CONTROL, USER_DEFINED = ("<unk>", "<s>", "</s>"), ("<|x|>",)


def byte_level() -> dict[str, Any]:
    """Merges that know no words, so that only cuts keep them apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, max_token_length=6, show_progress=False)
    tokenizer.train_from_iterator([TEXT[n:] for n in range(0, len(TEXT), 3)], trainer)
    described = json.loads(tokenizer.to_str())["model"]
    tokens = [*CONTROL, *USER_DEFINED, *sorted(described["vocab"], key=described["vocab"].get)]
    return {"tokens": tokens, "merges": [" ".join(pair) for pair in described["merges"]]}


def pieces(model: Any, trainer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator([TEXT[n:] for n in range(0, len(TEXT), 3)], trainer)
    return tokenizer


def sentence_piece() -> dict[str, Any]:
    trainer = trainers.BpeTrainer(vocab_size=120, limit_alphabet=50, max_token_length=6, show_progress=False)
    described = json.loads(pieces(models.BPE(), trainer).to_str())["model"]
    found = sorted(described["vocab"], key=described["vocab"].get)
    tokens = [*CONTROL, *USER_DEFINED, *(f"<0x{n:02X}>" for n in range(256)), *found]
    return {"tokens": tokens, "scores": [0.0] * 260 + [-float(n) for n in range(len(found))]}


def unigram() -> dict[str, Any]:
    trainer = trainers.UnigramTrainer(vocab_size=110, max_piece_length=6, show_progress=False, unk_token="<unk>")
    found = [pair for pair in json.loads(pieces(models.Unigram(), trainer).to_str())["model"]["vocab"] if pair[1]]
    found = [pair for pair in found if pair[0] not in "你好界"]  # so that something is unknown
    names = [*CONTROL, *USER_DEFINED, *(token for token, _ in found)]
    return {"tokens": names, "scores": [0.0] * 4 + [round(score, 4) for _, score in found]}


def metadata(vocabulary: dict[str, Any], **tokenizer: Any) -> dict[str, Any]:
    """The key-value pairs of a file with a vocabulary."""
    kinds = [2, 3, 3, 4, *(6 if token.startswith("<0x") else 1 for token in vocabulary["tokens"][4:])]
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    pairs = {**vocabulary, "token_type": np.array(kinds, np.int32), **ids, **tokenizer}
    return {"general.architecture": "llama", **{f"tokenizer.ggml.{key}": value for key, value in pairs.items()}}


def main() -> None:
    import llama_cpp

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama"))
    from tokenization import _CUTS

    cases: list[tuple[str, dict[str, Any]]] = [
        *(("byte level", {"model": "gpt2", "pre": names[0]}) for names in _CUTS),
        ("byte level", {"model": "gpt2", "pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}),
        ("SentencePiece", {"model": "llama"}),
        ("SentencePiece", {"model": "llama", "add_space_prefix": False, "add_bos_token": False}),
        ("unigram", {"model": "t5", "add_space_prefix": True, "remove_extra_whitespaces": True}),
        ("unigram", {"model": "t5", "add_space_prefix": True, "add_eos_token": False}),
    ]
    vocabularies = {"byte level": byte_level(), "SentencePiece": sentence_piece(), "unigram": unigram()}
    found = []
    for n, (name, settings) in enumerate(cases):
        # Whether text such as `</s>` is one token. With a unigram model the tokenizers library always finds it.
        special = n % 2 == 0 or name == "unigram"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocabulary.gguf"
            eqq.io.write(
                path, {"w": np.zeros(32, np.float32)}, "gguf", metadata=metadata(vocabularies[name], **settings)
            )
            model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            tokens = model.tokenize(TEXT.encode(), True, special)
        found.append({"vocabulary": name, "settings": settings, "special": special, "tokens": tokens})
    lines = [json.dumps(case, separators=(",", ":")) for case in found]
    about = json.dumps({"text": TEXT, "vocabularies": vocabularies}, separators=(",", ":"))
    GOLDEN.write_text(f'{about[:-1]}, "cases": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
