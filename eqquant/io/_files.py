"""Finds the tensors of a checkpoint: in a file, in several, or in a folder.

Several have an index, or numbers.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from .._errors import did_you_mean
from .._tree.leaves import abbreviate_list
from . import _gguf, _safetensors
from ._parts import join, other_parts, Part, part_name
from ._tensors import MappedFile, parse_json, StoredTensor


FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS, _INDEX = (".safetensors", ".gguf"), ".safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_UNFINISHED = (".incomplete", ".part", ".crdownload", ".aria2")  # suffixes of files that programs are downloading
_MAX_CONFIG = 100_000_000
_MAX_NAME = 255  # of a file, in bytes; longer ones are errors of the system, which name no file here


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
    """The tensors of a checkpoint by name, before their layout is known.

    - `file`: the file whose name errors give if no other is concerned.
    - `metadata`: the metadata of safetensors, of an index, or the key-value pairs of GGUF.
    - `config`: `config.json` of the folder, or an empty dictionary.
    - `container`: `"safetensors"` or `"gguf"`.
    """

    file: MappedFile
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, object]
    config: Mapping[str, object]
    container: str


def find_files(path: str | os.PathLike[str]) -> Files:
    """Finds the tensors of a file, a folder or an `index.json`.

    **Raises:**

    `FileNotFoundError` if there is no such file. `ValueError` if a file is damaged, or neither safetensors nor GGUF.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} must be a file or folder that exists. Got neither. {_near(path)}".rstrip())
    if not path.is_dir():
        return _open_index(path) if path.name.endswith("index.json") else _open_file(path)
    indices = _list_files(path, _INDEX)
    if len(indices) > 1:
        raise ValueError(f"{path} must have one index. Got {', '.join(p.name for p in indices)}. Open one of them.")
    if indices:
        return _open_index(indices[0])
    found = _list_files(path, *_WEIGHTS)
    if len({(name := part_name(p)) and name._replace(number=1) or p for p in found}) == 1:
        return _open_file(found[0])
    if not found:
        pickles = [p.name for p in path.iterdir() if p.suffix in _PICKLES]
        unfinished = [p.name for p in path.iterdir() if p.suffix in _UNFINISHED]
        got = _pickles(pickles) if pickles else f"{unfinished[0]}, an unfinished download" if unfinished else "none"
        raise FileNotFoundError(f"{path} must hold a .safetensors or .gguf file. Got {got}.")
    names = ", ".join(p.name for p in found[:10])
    raise ValueError(f"{path} must hold one file, or an index of several. Got {names}. Open one of them.")


def _list_files(folder: Path, *ends: str) -> list[Path]:
    """Returns the files of a folder with these ends of names, without those that are hidden."""
    return sorted(p for p in folder.iterdir() if p.name.endswith(ends) and not p.name.startswith("."))


def check_place(path: Path, head: str | None = None) -> list[Path]:
    """Raises if other weights would be read where these are written.

    - `path`: the file to write; with `head`, a folder.
    - `head`: the file of the folder that a reader opens first, `FILE` or `INDEX`.

    Returns the shards that the new ones replace.
    """
    if head is None:
        if path.name.endswith("index.json") or (part_name(path) and path.suffix != ".gguf"):
            what = "one of several files" if part_name(path) else "an index of shards"
            raise ValueError(f"`path` must be a file of all tensors. Got {path}, which is the name of {what}.")
        for file in (path, Path(os.path.realpath(path))) if path.name.endswith(_WEIGHTS) else ():
            if file.parent.is_dir() and (indices := _list_files(file.parent, _INDEX)):
                raise ValueError(
                    f"{path} must be in a folder without an index, which would be read instead. Got {indices[0]}. "
                    "Name another folder, or remove the index and its shards."
                )
        return []
    if path.suffix in _WEIGHTS or (path.exists() and not path.is_dir()):
        raise ValueError(f"`path` must be a folder, which gets {head} and other files. Got {path}. Name another.")
    if not path.is_dir():
        return []
    there = [p for p in _list_files(path, *_WEIGHTS, _INDEX) if p.name != head]
    shards = [p for p in there if head == INDEX and p.match("model-?????-of-?????-????????.safetensors")]
    if others := [p.name for p in there if p not in shards]:
        raise ValueError(
            f"{path} must hold no other weights, which would be read instead. Got {abbreviate_list(others)}. Name "
            "another folder, or remove them."
        )
    return shards


def _near(path: Path) -> str:
    """Returns "Did you mean ...?" with the nearest name in the folder of a path, or ""."""
    try:
        return did_you_mean(path.name, os.listdir(path.parent))
    except OSError:  # no such folder either, or no permission to list it
        return ""


def _pickles(names: list[str]) -> str:
    return f"{', '.join(names[:10])}: pickles can run code, and are never opened; convert them to safetensors"


def _open_file(path: Path) -> Files:
    if index := _find_index(path):
        return _open_index(index)
    file = MappedFile(path)
    if os.path.exists(f"{path}.aria2"):
        file.fail(f"must be whole. Got an unfinished download: {path.name}.aria2 lies beside it.")
    if path.suffix not in _WEIGHTS and not _is_known(file):
        if path.suffix in _PICKLES:
            file.fail(f"must be a .safetensors or .gguf file. Got {_pickles([path.name])}.")
        file.fail(f"must be a .safetensors or .gguf file. Got another kind, which begins with {file.buffer[:8]!r}.")
    is_gguf = file.buffer[:4] == _gguf.MAGIC or path.suffix == ".gguf"
    read = lambda file: Part(file, *(_gguf.read(file) if is_gguf else _safetensors.read(file)))
    part = read(file)
    tensors, metadata = part.tensors, part.metadata
    if paths := other_parts(part, is_gguf):
        tensors, metadata = join([read(MappedFile(p)) for p in paths], is_gguf)
    return Files(file, tensors, metadata, read_json(path.parent / "config.json"), "gguf" if is_gguf else "safetensors")


def _find_index(path: Path) -> Path | None:
    """Returns the index that lists a file whose name says that it is one of several."""
    for index in sorted(path.parent.glob("*.safetensors.index.json")) if part_name(path) else ():
        where = read_json(index).get("weight_map")
        if isinstance(where, dict) and path.name in where.values():
            return index
    return None


def _is_known(file: MappedFile) -> bool:
    """Returns whether a file with another suffix begins like a file that can be read."""
    length = int.from_bytes(file.buffer[:8], "little")
    return file.buffer[:4] == _gguf.MAGIC or (8 + length <= file.size and file.buffer[8:9] == b"{")


def read_json(path: Path) -> dict[str, object]:
    """Reads a file that is one object: empty if there is no file.

    Raises a `ValueError` that names it.
    """
    return _parse(MappedFile(path)) if path.is_file() else {}


def _parse(file: MappedFile) -> dict[str, object]:
    if file.size > _MAX_CONFIG:
        file.fail(f"must have at most {_MAX_CONFIG} bytes. Got {file.size}.")
    return parse_json(bytes(file.buffer), file, "it")


def _open_index(path: Path) -> Files:
    while True:
        before = path.stat()
        try:
            return _open_shards(MappedFile(path))
        except (FileNotFoundError, ValueError):
            # A save puts a new index in place of this one, and then removes the shards that this one lists.
            if os.path.samestat(before, path.stat()):
                raise


def _open_shards(file: MappedFile) -> Files:
    path, index = file.path, _parse(file)
    where, metadata = index.get("weight_map"), index.get("metadata") or {}
    if not isinstance(where, dict) or not isinstance(metadata, dict):
        file.fail("must have a `weight_map` from tensors to files. Got none.")
    shards: dict[str, Mapping[str, StoredTensor]] = {}
    tensors = {}
    for name, shard in where.items():
        if (
            not isinstance(shard, str)
            or Path(shard).name != shard
            or shard in ("", ".", "..")
            or "\\" in shard
            or len(shard.encode(errors="replace")) > _MAX_NAME
        ):
            file.fail(f"must name files of its own folder. Got {str(shard)[:80]!r} for {name!r}.")
        if shard not in shards:
            if not (path.parent / shard).is_file():
                file.fail(f"lists the file {shard!r}, for {name!r}, which the folder must have. Got none.")
            shards[shard] = _safetensors.read(MappedFile(path.parent / shard))[0]
        if name not in shards[shard]:
            file.fail(f"lists {name!r} in the file {shard!r}, which must have it. Got another content.")
        tensors[name] = shards[shard][name]
    return Files(file, tensors, metadata, read_json(path.parent / "config.json"), "safetensors")
