"""Says for all leaves at once which statistics are missing, and which rule leaves them in float."""

import collections
import fnmatch
import glob
import re
import warnings
from collections.abc import Collection, Iterable, Mapping

from .._methods import AbstractMethod
from .._methods.inputs import InputsError, Statistics
from .leaves import abbreviate_list


def join_errors(errors: Mapping[str, InputsError], quantized: Collection[str]) -> ValueError:
    """Returns one error for the errors of several leaves, by path, with a rule that leaves them in float.

    `quantized` are the paths of all leaves to quantize. If all of them are concerned, there is no such rule.
    """
    alike: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for error in errors.values():
        alike[error.rule, error.remedy].append(error.got)
    texts = [str(InputsError(rule, abbreviate_list(got), remedy)) for (rule, remedy), got in alike.items()]
    return ValueError(" ".join(texts) + _leave_in_float(errors, quantized))


def warn_of_unused(
    notes: Mapping[str, str], quantized: Collection[str], stacklevel: int, what: str = "quantized without them"
) -> None:
    """Warns of weights, by path with the reason, that no product used, so that a method has no statistics of them."""
    if notes:
        named = abbreviate_list(f"{path} ({note})" for path, note in notes.items())
        warnings.warn(
            f"A method with statistics needs the inputs of a weight. Got none for {named}: {what}."
            + _leave_in_float(notes, quantized),
            stacklevel=stacklevel + 1,
        )


def unused_note(method: AbstractMethod, path: str) -> str | None:
    """Returns why a leaf is quantized without its statistics, for a plan, or `None`."""
    seen = method.statistics_for(path)
    return seen.note if seen is not None and seen.axis is None else None


def is_lookup(seen: Statistics) -> bool:
    return bool(getattr(seen, "looked_up", False))


def _leave_in_float(concerned: Iterable[str], quantized: Collection[str]) -> str:
    """Returns the sentence with the rule that leaves some leaves in float, and quantizes all others."""
    others = set(quantized).difference(concerned)
    if not others:
        return ""
    patterns = dict.fromkeys(_pattern(path, others) for path in concerned)
    rules = ", ".join(f'"{pattern}": None' for pattern in patterns)
    return f' To leave {"it" if len(patterns) == 1 else "them"} in float: `{{{rules}, "*": ...}}`.'


def _pattern(path: str, others: Iterable[str]) -> str:
    """Returns a glob that matches a path, and the same leaf of other layers unless that is one of the others."""
    exact = glob.escape(path)
    wide = re.sub(r"(?<![^.])\d+(?![^.])", "*", exact)
    return exact if any(fnmatch.fnmatchcase(other, wide) for other in others) else wide
