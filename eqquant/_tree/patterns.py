"""Patterns with groups, such as `layers.{n}.{x:q|k}.{p}`, compiled to regular expressions."""

import re


GROUP = re.compile(r"\{(\w+)\}")
_TOKEN = re.compile(r"\{(\w+)(?::([^{}]*))?\}|(\*)")


def compile_pattern(key: str, argument: str) -> re.Pattern[str]:
    """Returns the regular expression of a pattern.

    `{n}` matches a part of a name without dots, `{x:a|b}` matches `a` or `b`, and `*` matches anything.
    """
    if "{" in (rest := _TOKEN.sub("", key)) or "}" in rest:
        raise ValueError(f"The patterns of `{argument}` must have groups such as {{n}} or {{x:q|k|v}}. Got {key!r}.")
    out, at, seen = "", 0, set()
    for token in _TOKEN.finditer(key):
        out += re.escape(key[at : token.start()])
        at = token.end()
        group, choices, star = token.groups()
        if star:
            out += ".*"
        elif group in seen:
            out += f"(?P={group})"
        else:
            seen.add(group)
            if choices is not None and not all(choices.split("|")):
                raise ValueError(f"The choices of a group in `{argument}` must have letters. Got {key!r}.")
            within = "[^.]+" if choices is None else "|".join(map(re.escape, choices.split("|")))
            out += f"(?P<{group}>{within})"
    try:
        return re.compile(out + re.escape(key[at:]))
    except re.error as e:
        raise ValueError(
            f"The patterns of `{argument}` must have groups such as {{n}} or {{x:q|k|v}}. Got {key!r}: {e}."
        ) from None
