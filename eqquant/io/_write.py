"""`eqq.io.write`: arrays as a file that another library opens."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from .._array.codes import spread_tiles
from .._errors import did_you_mean, Message
from .._tree.leaves import abbreviate_list, Leaf, named_leaves
from .._types import PyTree
from ._entry import AnyArray, is_packed
from ._imatrix import IMATRIX, write_imatrix
from ._lazy import keep_latest
from ._save import checked_entry, replace_weights, write_folder
from ._tensors import NewTensor
from ._writers import bitsandbytes, compressed_tensors, fp8, gguf, gptq, mlx, modelopt
from ._writers._layout import dense, Scheme, WrittenArray


WRITERS = {writer.NAME: writer for writer in (gguf, bitsandbytes, compressed_tensors, fp8, gptq, mlx, modelopt)}
CONFIG = "config.json"
Renaming = Callable[[str], str | None] | Mapping[str, str | None] | None


def write(
    path: str | os.PathLike[str],
    arrays: Mapping[str, object] | PyTree,
    dialect: str,
    *,
    names: Renaming = None,
    config: Mapping[str, object] | None = None,
    metadata: Mapping[str, object] | None = None,
    types: Mapping[str, str] | None = None,
    shard_nbytes: int | None = None,
) -> None:
    """Writes arrays for another library to open: llama.cpp, MLX, or transformers.

    Transformers needs a package for quantization.

    !!! Example

        ```python
        eqq.io.write("model.gguf", arrays, "gguf", metadata={"general.architecture": "llama", ...})
        eqq.io.write("folder", arrays, "compressed-tensors", config=json.loads(Path("config.json").read_text()))
        ```

    The bits do not change, so the other library computes the same values. Nothing is quantized again: an array in a
    format that the library does not have is an error. [Files](../files.md#write-for-other-libraries) lists the formats
    of each.

    Reads and writes one array after another. The output appears when it is whole; a process that dies leaves the old
    file as it was.

    **Arguments:**

    - `path`: for GGUF the file to write. For the others a folder, which gets `model.safetensors` and `config.json`.
    - `arrays`: arrays by the names that the other library gives them, such as an [`eqquant.io.Checkpoint`][]. Or a
        model, whose arrays have the names of their leaves, such as `layers.0.weight`; leaves that are no arrays are
        left out.
    - `dialect`: whose layout to write: `"gguf"`, `"bitsandbytes"`, `"compressed-tensors"`, `"fp8"` (Hugging Face's),
        `"gptq"`, `"mlx"` or `"modelopt"`. Or `"imatrix"`, an importance matrix for llama.cpp: `arrays` is then the
        result of [`eqquant.calibrate.collect_stats`][] or of [`eqquant.io.read_imatrix`][].
    - `names`: the names in the file, by the names in `arrays`: a function, or a mapping that has them all. `None` as a
        name leaves an array out.
    - `config`: the model's part of `config.json`. The part about quantization is added to it. GGUF has none.
    - `metadata`: the key-value pairs of GGUF: text, numbers, booleans, and lists of one of them. Whole numbers become
        uint32, or the next larger type that holds them, and others float32; NumPy's keep their type. For the others,
        text by text.
    - `types`: for GGUF, by globs for names in the file, types other than the namesake of a format: `{"blk.*": "TQ1_0"}`
        stores `TQ2_0` in 1.69 bits for each weight. It is the only one.
    - `shard_nbytes`: divides the tensors of a folder among files of at most this size, as far as single tensors allow,
        with a `model.safetensors.index.json` that lists them.

    **Returns:**

    Nothing.

    **Raises:**

    `ValueError` for an array that the file cannot hold exactly; the message names it, its format, and formats that fit.
    So for names that repeat, and for a folder with other weights. `TypeError` for values that no such file can hold. In
    all these cases nothing is written.
    """
    options = WriteOptions(names, config, metadata or {}, types or {}, shard_nbytes)
    write_arrays(Path(path), arrays, dialect, options)


class WriteOptions(NamedTuple):
    """The options of `write`.

    - `companions`: files that a folder gets copies of, by their names.
    """

    names: Renaming = None
    config: Mapping[str, object] | None = None
    metadata: Mapping[str, object] = {}
    types: Mapping[str, str] = {}
    shard_nbytes: int | None = None
    companions: Mapping[str, Path] = {}


def write_arrays(path: Path, arrays: PyTree, dialect: str, options: WriteOptions) -> None:
    if dialect == IMATRIX:
        _refuse_for_one_file(options)
        if options.types:
            raise ValueError("`types` are for weights. Got some for an importance matrix.")
        inputs = {name: read().value for name, read in _sources(arrays, options.names).items()}
        write_imatrix(path, inputs, options.metadata)
        return
    writer = _writer(dialect)
    sources = _sources(arrays, options.names)
    kinds = _kinds(writer, sources, options.types)
    tensors, schemes = _plan(writer, sources, kinds)
    if writer is gguf:
        _refuse_for_one_file(options)
        with replace_weights(path) as new:
            gguf.write(new, tensors, options.metadata)
        return
    metadata: PyTree = {"format": "mlx" if writer is mlx else "pt", **options.metadata}
    if not all(isinstance(text, str) for text in (*metadata, *metadata.values())):
        raise TypeError(f"`metadata` of safetensors must map text to text. Got {dict(options.metadata)!r}.")
    try:
        text = json.dumps(describe_model(options.config or {}) | _settings(writer, schemes), indent=2)
    except TypeError as e:
        raise TypeError(f"`config` must hold values that JSON can hold. {e}") from None
    files = {CONFIG: text.encode(), **{name: file.read_bytes() for name, file in options.companions.items()}}
    write_folder(path, tensors, options.shard_nbytes, metadata=metadata, files=files)


def _refuse_for_one_file(options: WriteOptions) -> None:
    if options.config is not None:
        raise ValueError("`config` is for folders. Got one for a GGUF file, whose key-value pairs are `metadata`.")
    if options.shard_nbytes is not None:
        raise ValueError("`shard_nbytes` is for folders. A GGUF file is one file.")


def describe_model(config: Mapping[str, object]) -> dict[str, object]:
    """Returns the part of a `config.json` that describes the model."""
    quantization = ("quantization_config", "quantization", "compression_config")
    model = {key: value for key, value in config.items() if key not in quantization}
    text = model.get("text_config")  # of a model for text and images
    return {**model, "text_config": describe_model(text)} if isinstance(text, dict) else model


def check_layouts(dialect: str, arrays: Iterable[tuple[str, AnyArray]]) -> None:
    """Raises unless the layout of a library can hold arrays, one beside another."""
    writer = _writer(dialect)
    _settings(writer, {name: _layout(writer, name, x).scheme for name, x in arrays})


def _writer(dialect: str) -> ModuleType:
    writer = WRITERS.get(dialect)
    if writer is None:
        near = did_you_mean(dialect.lower(), WRITERS)
        raise ValueError(f"`dialect` must be one of {', '.join(WRITERS)}. Got {dialect!r}. {near}".rstrip())
    return writer


def _layout(writer: ModuleType, name: str, x: AnyArray, kind: str | None = None) -> WrittenArray:
    x = x if writer.HOLDS_TILES else spread_tiles(x)
    if writer is gguf:
        return gguf.layout(name, x, kind)
    return writer.layout(name, x) if is_packed(x) else dense(name, x)


def _settings(writer: ModuleType, schemes: Mapping[str, Scheme | None]) -> dict[str, object]:
    """Returns the settings of quantization for `config.json`."""
    quantized = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    return writer.settings(quantized, [name for name in schemes if name not in quantized]) if quantized else {}


def _sources(arrays: PyTree, names: Renaming) -> dict[str, Callable[[], Leaf]]:
    """Returns the reader of each array, by the names in the file."""
    if isinstance(arrays, Mapping):
        found = {str(name): (lambda name=name: Leaf(name, arrays[name], (), ())) for name in arrays}
    else:
        found = {leaf.path: (lambda leaf=leaf: leaf) for leaf in named_leaves(arrays, is_packed) if _is_array(leaf)}
    if isinstance(names, Mapping) and (missing := [path for path in found if path not in names]):
        raise ValueError(
            f"`names` must have all arrays; `None` leaves one out. Got none for {abbreviate_list(missing)}."
        )
    sources: dict[str, Callable[[], Leaf]] = {}
    before: dict[str, str] = {}
    for path, read in found.items():
        name = path if names is None else names[path] if isinstance(names, Mapping) else names(path)
        if name is None:
            continue
        if not isinstance(name, str) or not name or name == "__metadata__" or not _is_text(name):
            raise ValueError(f"A name in the file must be text, and not '__metadata__'. Got {name!r} for {path!r}.")
        if name in sources:
            raise ValueError(f"Names in the file must differ. Got {name!r} for {before[name]!r} and for {path!r}.")
        sources[name], before[name] = read, path
    return sources


def _is_text(name: str) -> bool:
    """Returns whether every library can read a name.

    None takes half of a surrogate pair, and C ends text at a zero.
    """
    return "\0" not in name and name.encode(errors="replace").decode() == name


def _is_array(leaf: Leaf) -> bool:
    entry = checked_entry(leaf)
    return entry is not None and entry.kind != "scalar"


def _array(name: str, leaf: Leaf, dialect: str) -> AnyArray:
    """Returns the array that a leaf is."""
    entry = checked_entry(leaf)
    if entry is None or entry.kind in ("scalar", "key"):
        raise TypeError(f"{name!r} must be an array of numbers. Got {type(leaf.value).__name__}.")
    if entry.within is not None:
        raise ValueError(
            f"{name!r} must stand alone. Got a part of {entry.within}. Merge or quantize that array first, so that "
            "one array is left."
        )
    if entry.order is not None and dialect != gptq.NAME:
        raise ValueError(
            Message(
                f"{name!r} must have its inputs in order. Got {entry} (act-order), which only GPTQ's files can hold.",
                "act-order",
            )
        )
    if entry.format is not None and leaf.value.size == 0:
        raise ValueError(f"{name!r} must have values. Got {entry}.")
    return leaf.value


def _kinds(writer: ModuleType, names: Iterable[str], types: Mapping[str, str]) -> dict[str, str]:
    """Returns the wanted types of GGUF by name. The first glob that matches holds."""
    if not isinstance(types, Mapping):
        raise TypeError(f'`types` must map names in the file to types: `{{"blk.*": "TQ1_0"}}`. Got {types!r}.')
    if types and writer is not gguf:
        raise ValueError(f"`types` are for GGUF. Got some for {writer.NAME!r}.")
    if unknown := [kind for kind in types.values() if kind not in gguf.OTHER_TYPES]:
        raise ValueError(f"`types` must be {' or '.join(gguf.OTHER_TYPES)}. Got {unknown[0]!r}.")
    kinds = {name: kind for glob, kind in reversed(list(types.items())) for name in names if fnmatchcase(name, glob)}
    if idle := [glob for glob in types if not any(fnmatchcase(name, glob) for name in names)]:
        raise ValueError(f"`types` must match names in the file. Got {idle[0]!r}, which matches none.")
    return kinds


def _plan(
    writer: ModuleType, sources: Mapping[str, Callable[[], Leaf]], kinds: Mapping[str, str]
) -> tuple[list[NewTensor], dict[str, Scheme | None]]:
    """Returns the tensors to write, and the settings of each array in the configuration.

    Every array is read now, for its layout, and again when its tensors are: only one is in memory at a time.
    """
    layout = lambda name: _layout(writer, name, _array(name, sources[name](), writer.NAME), kinds.get(name))
    latest = keep_latest(layout)
    tensors, schemes, owner = [], {}, {}
    for name in sources:
        found = layout(name)
        schemes[name] = found.scheme
        for n, t in enumerate(found.tensors):
            if t.name in owner:
                raise ValueError(
                    f"Names in the file must differ. Got {t.name!r} as a part of {name!r} and of {owner[t.name]!r}."
                )
            owner[t.name] = name
            array = lambda name=name, n=n: latest(name).tensors[n].array()
            tensors.append(dataclasses.replace(t, array=array))
    return tensors, schemes
