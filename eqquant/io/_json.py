"""JSON from files that nobody vouches for."""

import json
from typing import Any, NoReturn

from ._stored import MappedFile


# No file that this package reads nests deeper, and code that walks a shallow tree needs no guard against recursion.
_MAX_DEPTH = 16


def parse_json(text: bytes, file: MappedFile, what: str) -> dict[str, Any]:
    """Parses an object. Raises a `ValueError` that names the file for anything that is not plainly one.

    JSON itself allows an object to repeat a name, and Python allows NaN: here neither can hide a second meaning.
    """
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        deep = _deeper_than(parsed, _MAX_DEPTH)
    except RecursionError:
        deep, parsed = True, {}
    except (ValueError, UnicodeError) as e:
        file.fail(f"must have valid JSON in {what}. Got an error: {e}.")
    if deep:
        file.fail(f"must have valid JSON in {what}. Got one that is nested more than {_MAX_DEPTH} times.")
    if not isinstance(parsed, dict):
        file.fail(f"must have a JSON object in {what}. Got a {type(parsed).__name__}.")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {twice!r} stands there twice")
    return out


def _deeper_than(x: Any, depth: int) -> bool:
    if not isinstance(x, (dict, list)):
        return False
    return depth == 0 or any(_deeper_than(item, depth - 1) for item in (x.values() if isinstance(x, dict) else x))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
