"""Checkpoints in several files that count themselves: `model-00001-of-00002.gguf`.

GGUF says it in each file too: `split.no` (from zero), `split.count`, and `split.tensors.count` of all files together.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ._tensors import MappedFile, StoredTensor


_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})((?:-[0-9a-f]{8})?\.(?:gguf|safetensors))")
_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


class PartName(NamedTuple):
    """The name of a file that is one of a `total` of parts.

    Names differ only in the `number`, from one on.
    """

    start: str
    number: int
    total: int
    end: str

    def paths(self, folder: Path) -> list[Path]:
        """Returns where the parts must be."""
        return [folder / f"{self.start}-{n:05}-of-{self.total:05}{self.end}" for n in range(1, self.total + 1)]


class Part(NamedTuple):
    """The tensors and the metadata of a file."""

    file: MappedFile
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, object]


def part_name(path: Path) -> PartName | None:
    """Returns the name of a part, or `None` for one of a whole checkpoint."""
    found = _NAME.fullmatch(path.name)
    name = found and PartName(found[1], int(found[2]), int(found[3]), found[4])
    return name if name and 1 <= name.number <= name.total and name.total > 1 else None


def other_parts(part: Part, is_gguf: bool) -> list[Path]:
    """Returns the paths of all parts, or none if a file is whole. Raises if a part is missing."""
    path, name = part.file.path, part_name(part.file.path)
    count = part.metadata.get(_COUNT, 1) if is_gguf else name.total if name else 1
    if count in (0, 1):
        return []
    if name is None or name.total != count:
        part.file.fail(
            f"must have a name such as model-00001-of-00002.gguf, since it is one of several files: `{_COUNT}` is "
            f"{str(count)[:20]}. Got one that does not lead to the others."
        )
    paths = name.paths(path.parent)
    if missing := [p.name for p in paths if not p.is_file()]:
        part.file.fail(
            f"must have the other parts in its folder. Got part {name.number} of {count}, and no {missing[0]}."
        )
    return paths


def join(parts: Sequence[Part], is_gguf: bool) -> tuple[dict[str, StoredTensor], dict[str, object]]:
    """Returns the tensors and the metadata of a checkpoint.

    Raises unless the parts make a whole.
    """
    tensors: dict[str, StoredTensor] = {}
    for n, part in enumerate(parts):
        counted = part.metadata.get(_NO), part.metadata.get(_COUNT)
        if is_gguf and counted != (n, len(parts)):
            part.file.fail(f"must say that it is part {n} of {len(parts)}, from zero. Got {str(counted)[:80]}.")
        if both := tensors.keys() & part.tensors:
            part.file.fail(f"must not hold tensors of another part. Got {min(both)!r} in both.")
        tensors |= part.tensors
    first = parts[0]
    total = first.metadata.get(_TENSORS, len(tensors)) if is_gguf else len(tensors)
    if total != len(tensors):
        first.file.fail(f"says that all parts together hold {str(total)[:20]} tensors. Got {len(tensors)}.")
    return tensors, {key: value for key, value in first.metadata.items() if key not in (_NO, _COUNT, _TENSORS)}
