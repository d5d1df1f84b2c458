"""One error for all leaves without statistics, with the rule that leaves them in float."""

import collections
import fnmatch
import glob
import re
import warnings
from collections.abc import Collection, Iterable, Mapping

from .._methods import AbstractMethod
from .._methods.statistics import InputsError
from .leaves import abbreviate_list


def join_errors(errors: Mapping[str, InputsError], quantized: Collection[str]) -> ValueError:
    """Returns one error for several leaves, with a rule that leaves them in float.

    - `errors`: the error of each leaf, by path.
    - `quantized`: the paths of all leaves to quantize. If all of them have errors, there is no rule.
    """
    by_rule: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for error in errors.values():
        by_rule[error.rule, error.remedy].append(error.got)
    texts = [str(InputsError(rule, abbreviate_list(got), remedy)) for (rule, remedy), got in by_rule.items()]
    return ValueError(" ".join(texts) + _leave_in_float(errors, quantized))


def warn_of_unused(
    notes: Mapping[str, str], quantized: Collection[str], stacklevel: int, outcome: str = "quantized without them"
) -> None:
    """Warns of weights without statistics because no product used them.

    - `notes`: the reason for each, by path.
    """
    if notes:
        named = abbreviate_list(f"{path} ({note})" for path, note in notes.items())
        warnings.warn(
            f"A method with statistics needs the inputs of a weight. Got none for {named}: {outcome}."
            + _leave_in_float(notes, quantized),
            stacklevel=stacklevel + 1,
        )


def find_unused_note(method: AbstractMethod, path: str) -> str | None:
    """Returns why a leaf is quantized without statistics, for a plan, or `None`."""
    seen = method.statistics_for(path)
    return seen.note if seen is not None and seen.axis is None else None


def _leave_in_float(paths: Iterable[str], quantized: Collection[str]) -> str:
    """Returns a sentence with the rule that leaves these leaves in float."""
    others = set(quantized).difference(paths)
    if not others:
        return ""
    patterns = dict.fromkeys(_make_glob(path, others) for path in paths)
    rules = ", ".join(f'"{pattern}": None' for pattern in patterns)
    return f' To leave {"it" if len(patterns) == 1 else "them"} in float: `{{{rules}, "*": ...}}`.'


def _make_glob(path: str, others: Iterable[str]) -> str:
    """Returns a glob for a path, and for the same leaf of other layers if none is in `others`."""
    exact = glob.escape(path)
    wide = re.sub(r"(?<![^.])\d+(?![^.])", "*", exact)
    return exact if any(fnmatch.fnmatchcase(other, wide) for other in others) else wide
