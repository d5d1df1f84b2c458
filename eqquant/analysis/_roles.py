"""Estimates the sensitivity of each weight from its name, without data.

Relative errors of weights count equally, whatever the sizes of the weights. Softmax reduces errors of queries and keys.
No layer after the head reduces its errors.
"""

import re
from collections.abc import Iterable, Sequence


_QUERY_OR_KEY = re.compile(r"(attn_|to_|w)?(q|k|query|key)(_proj|_lin)?")
_VALUE = re.compile(r"(attn_|to_|w)?(v|value)(_proj|_lin)?")
_HEAD = re.compile(r"lm_head|heads?|classifier|logits|score|unembed(ding)?|output|fc")
_PATCHES = re.compile(r".*patch.*|.*stem|conv_in")
_POSITION = re.compile(r"wpe|(.*_)?(pos|position|positional|segment|type)s?(_.*)?")
_TABLE = re.compile(r".*emb(ed|d).*|wte|shared")
# Names in encoders, which do not multiply by the token embedding at the end.
_ENCODER = re.compile(r"encoder|.*token_type.*|pooler")
_DECODER = re.compile(r"decoder")

_HEAD_FACTOR = 8.0


def estimate_role_factors(paths: Iterable[str]) -> dict[str, float]:
    """Returns the factor of the relative squared error of each weight, by role and depth."""
    words = {path: path.lower().replace("[", ".").replace("]", "").replace("'", "").split(".") for path in paths}
    has_head = any(_is_head(w) for w in words.values())
    all_words = [word for w in words.values() for word in w]
    is_encoder = any(map(_ENCODER.fullmatch, all_words)) and not any(map(_DECODER.fullmatch, all_words))
    table = 1.0 if has_head or is_encoder else _HEAD_FACTOR  # without a head, the token embedding is tied to it
    outer_layers = _find_outer_layers(words.values())
    return {
        path: _choose_factor(w, table) * (2.0 if _find_layer(w) in outer_layers else 1.0) for path, w in words.items()
    }


def _choose_factor(words: Sequence[str], table: float) -> float:
    if _is_head(words):
        return _HEAD_FACTOR
    kinds = ((_PATCHES, 2.0), (_POSITION, 0.5), (_QUERY_OR_KEY, 0.15), (_VALUE, 1.5), (_TABLE, table))
    return next((factor for kind, factor in kinds if any(map(kind.fullmatch, words))), 1.0)


def _is_head(words: Sequence[str]) -> bool:
    return _find_layer(words) is None and any(map(_HEAD.fullmatch, words))


def _find_layer(words: Sequence[str]) -> tuple[tuple[str, ...], int] | None:
    """Returns the stack and the index of a layer: `layers` and 3 for `layers.3.up.weight`."""
    n = next((n for n, word in enumerate(words) if word.isdecimal()), None)
    return None if n is None else (tuple(words[:n]), int(words[n]))


def _find_outer_layers(words: Iterable[Sequence[str]]) -> set[tuple[tuple[str, ...], int]]:
    """Returns the first and the last layer of each stack of layers."""
    stacks: dict[tuple[str, ...], set[int]] = {}
    for layer in filter(None, map(_find_layer, words)):
        stacks.setdefault(layer[0], set()).add(layer[1])
    return {(name, end) for name, indices in stacks.items() for end in (min(indices), max(indices))}
