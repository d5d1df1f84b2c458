"""Guesses from names how much the output of a model depends on the error of each weight, where no data can tell.

Errors of weights that add to one sum count alike, whatever the sizes of the weights. Softmax forgives errors of queries
and keys. Nothing comes behind the head that could forgive its errors.
"""

import re
from collections.abc import Iterable, Sequence


_QUERY_OR_KEY = re.compile(r"(attn_|to_|w)?(q|k|query|key)(_proj|_lin)?")
_VALUE = re.compile(r"(attn_|to_|w)?(v|value)(_proj|_lin)?")
_HEAD = re.compile(r"lm_head|heads?|classifier|logits|score|unembed(ding)?|output|fc")
_PATCHES = re.compile(r".*patch.*|.*stem|conv_in")
_POSITION = re.compile(r"wpe|(.*_)?(pos|position|positional|segment|type)s?(_.*)?")
_TABLE = re.compile(r".*emb(ed|d).*|wte|shared")
# These are in encoders, which do not multiply by their table of tokens at the end.
_ENCODER = re.compile(r"encoder|.*token_type.*|pooler")
_DECODER = re.compile(r"decoder")

_AT_THE_END = 8.0


def weigh_roles(paths: Iterable[str]) -> dict[str, float]:
    """Returns a factor for the relative squared error of each weight, by its role and its depth."""
    words = {path: path.lower().replace("[", ".").replace("]", "").replace("'", "").split(".") for path in paths}
    has_head = any(_is_head(w) for w in words.values())
    every = [word for w in words.values() for word in w]
    encodes = any(map(_ENCODER.fullmatch, every)) and not any(map(_DECODER.fullmatch, every))
    table = 1.0 if has_head or encodes else _AT_THE_END  # without a head, the table of tokens is the head too
    ends = _ends_of_stacks(words.values())
    return {path: _factor(w, table) * (2.0 if _block(w) in ends else 1.0) for path, w in words.items()}


def _factor(words: Sequence[str], table: float) -> float:
    if _is_head(words):
        return _AT_THE_END
    kinds = ((_PATCHES, 2.0), (_POSITION, 0.5), (_QUERY_OR_KEY, 0.15), (_VALUE, 1.5), (_TABLE, table))
    return next((factor for kind, factor in kinds if any(map(kind.fullmatch, words))), 1.0)


def _is_head(words: Sequence[str]) -> bool:
    return _block(words) is None and any(map(_HEAD.fullmatch, words))


def _block(words: Sequence[str]) -> tuple[tuple[str, ...], int] | None:
    """Returns the name and the number of the layer that a weight is in: `layers` and 3 for `layers.3.up.weight`."""
    n = next((n for n, word in enumerate(words) if word.isdecimal()), None)
    return None if n is None else (tuple(words[:n]), int(words[n]))


def _ends_of_stacks(words: Iterable[Sequence[str]]) -> set[tuple[tuple[str, ...], int]]:
    """Returns the first and the last layer of each stack of layers."""
    numbers: dict[tuple[str, ...], set[int]] = {}
    for block in filter(None, map(_block, words)):
        numbers.setdefault(block[0], set()).add(block[1])
    return {(name, end) for name, found in numbers.items() for end in (min(found), max(found))}
