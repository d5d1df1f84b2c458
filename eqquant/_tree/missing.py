"""One error for all leaves without statistics, with the rule that leaves them in float."""

import collections
import contextlib
import fnmatch
import glob
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping

from .._methods.statistics import InputsError
from .leaves import abbreviate_list


class InputsErrors(dict[str, InputsError]):
    """The errors about the statistics of leaves, by path, to raise as one."""

    @contextlib.contextmanager
    def collect(self, path: str) -> Iterator[None]:
        """Keeps an error about a leaf for later."""
        try:
            yield
        except InputsError as e:
            self[path] = e

    def check(self, quantized: Collection[str]) -> None:
        """Raises one error for all leaves that have one, with a rule that leaves them in float.

        - `quantized`: the paths of all leaves to quantize. If all of them have errors, there is no rule.
        """
        by_rule: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        for error in self.values():
            by_rule[error.rule, error.remedy].append(error.got)
        texts = [str(InputsError(rule, abbreviate_list(got), remedy)) for (rule, remedy), got in by_rule.items()]
        if texts:
            raise ValueError(" ".join(texts) + _leave_in_float(self, quantized))


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
