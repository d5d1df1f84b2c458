"""`eqq.io.convert`: rewrites a checkpoint for eqquant or another library, array by array."""

from __future__ import annotations

import contextlib
import dataclasses
import functools as ft
import glob
import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from .._array.array import QuantizedArray
from .._array.checks import check_finite
from .._array.quantize import quantize_array
from .._array.value import AbstractArrayValue
from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._methods.names import as_method, MethodLike
from .._tree.decide import decide, Decision, FormatRules
from .._tree.leaves import named_leaves
from .._tree.report import LeafReport, TreeReport
from .._tree.summary import make_quantized_row, make_rows
from .._types import PyTree
from .._wrappers.permuted import PermutedArray
from ._atomic import make_scratch
from ._checkpoint import Checkpoint, open
from ._entry import AnyArray, is_packed
from ._files import check_place, FILE
from ._lazy import LazyArray, LazyMapping
from ._llama_cpp import Arrays, for_llama_cpp
from ._load import nest
from ._safetensors import write as write_safetensors
from ._save import describe_tree, find_head, save, write_folder
from ._write import check_layouts, CONFIG, describe_model, write_arrays, WriteOptions
from ._writers import gguf


Axis = int | Sequence[int] | None
Each = Callable[[str, AnyArray, AnyArray], object]  # takes the name of an array, the array, and the result


def skeleton(checkpoint: Checkpoint) -> PyTree:
    """Returns the arrays of a checkpoint without values, as `jax.ShapeDtypeStruct`s.

    They are nested by the dots of their names.

    Quantized arrays appear as the float arrays that they stand for. The path of each leaf is its name in the
    checkpoint. Arrays that cannot be read are left out.
    """
    return _nest(
        {row.name: jax.ShapeDtypeStruct(row.shape, jnp.dtype(row.dtype)) for row in checkpoint.rows if not row.problem}
    )


def convert(
    checkpoint: Checkpoint | str | os.PathLike[str],
    path: str | os.PathLike[str],
    format: FormatRules | None = None,
    *,
    axis: Axis = None,
    method: MethodLike | None = None,
    dialect: str | None = None,
    shard_nbytes: int | None = None,
    each: Each | None = None,
) -> TreeReport:
    """Quantizes a checkpoint of any library one array at a time, and saves it.

    As [`eqquant.save`][] does, or as [`eqquant.io.write`][] does for another library.

    At its peak this takes the memory of one array, before and after, so the checkpoint may be larger than memory.
    For another library, it first writes the quantized arrays to a file of ours beside the output.

    !!! Example

        ```python
        print(eqq.io.convert("model.safetensors", "model.nf4.safetensors", {"*embed*": "int8", "*": "nf4"}))
        eqq.io.convert("folder", "folder-nf4", {"*_proj.weight": "nf4"}, dialect="bitsandbytes")
        eqq.io.convert("folder", "model.gguf", {"*_proj.weight": "q4_k"}, dialect="gguf")    # for llama.cpp
        ```

    **Arguments:**

    - `checkpoint`: a result of [`eqquant.io.open`][], or a path for it. Arrays that are quantized there are dequantized
        first if `format` selects them, which rounds them twice.
    - `path`: the file to write; with `shard_nbytes`, or for a library other than llama.cpp, a folder.
    - `format`: formats for weights, as for [`eqquant.quantize_tree`][]. `None` quantizes nothing.
    - `axis`: the axis along which blocks run, as for [`eqquant.quantize_tree`][].
    - `method`: the method that chooses scales and codes.
    - `dialect`: whose layout to write, as for [`eqquant.io.write`][]; by default our own. Names stay as they are, but
        for GGUF from a folder of Llama, Mistral, Qwen2 or Qwen3, which get the names of llama.cpp, the numbers of the
        model and its tokenizer. A folder gets the `config.json` and the files of the tokenizer that lie beside the
        checkpoint, and a GGUF file the key-value pairs of another.
    - `shard_nbytes`: as for [`eqquant.save`][] and [`eqquant.io.write`][].
    - `each`: is called with the name of each array, the array of the checkpoint, and the result. For progress, or to
        measure errors.

    **Returns:**

    A report with a row for each array. It prints as a table, as the report of [`eqquant.plan_tree`][].

    **Raises:**

    As [`eqquant.io.open`][], [`eqquant.quantize_tree`][], [`eqquant.save`][] and [`eqquant.io.write`][]; `ValueError`
    if an array of the checkpoint cannot be read, or for llama.cpp, if `config.json` or the tokenizer does not agree
    with the arrays. Then `path` is as it was.
    """
    opened, path = checkpoint if isinstance(checkpoint, Checkpoint) else open(checkpoint), Path(path)
    decisions, leaves, report = _plan(opened, format, axis, method, dialect, each)
    check_place(path, find_head(shard_nbytes, is_folder=dialect not in (None, gguf.NAME)))
    if dialect is None:
        save(path, _nest(leaves), shard_nbytes=shard_nbytes)
    elif not decisions:
        arrays = LazyMapping({name: leaf.make for name, leaf in leaves.items()})
        _write(opened, arrays, path, dialect, shard_nbytes, leaves)
    else:
        # An array is laid out twice, for the header and when it is written, and should be quantized once.
        with make_scratch(path) as scratch:
            made = scratch / FILE
            write_safetensors(made, *describe_tree(leaves))
            _write(opened, open(made), path, dialect, shard_nbytes, leaves.keys() - decisions.keys())
    return report


def convert_into(
    checkpoint: Checkpoint,
    folder: Path,
    format: FormatRules | None = None,
    *,
    axis: Axis = None,
    method: MethodLike | None = None,
    each: Each | None = None,
) -> TreeReport:
    """As `convert`, to a file of eqquant in a folder.

    The folder also gets `config.json` and the files of the tokenizer.
    """
    _, leaves, report = _plan(checkpoint, format, axis, method, None, each)
    files = {name: p.read_bytes() for name, p in _companions(checkpoint, folder).items()}
    if checkpoint.config:
        files[CONFIG] = json.dumps(describe_model(checkpoint.config), indent=2).encode()
    tensors, manifest = describe_tree(_nest(leaves))
    write_folder(folder, tensors, None, head_metadata=manifest, files=files)
    return report


def plan(
    checkpoint: Checkpoint, format: FormatRules | None, axis: Axis, method: MethodLike | None, dialect: str | None
) -> TreeReport:
    """Returns the report of `convert` without quantizing, and raises the same errors."""
    return dataclasses.replace(_plan(checkpoint, format, axis, method, dialect, None)[2], planned=True)


def find_fitting(checkpoint: Checkpoint, format: AbstractFormat, axis: Axis, dialect: str) -> set[str]:
    """Returns the names of the weights that the layout of another library holds in a format."""
    found = set()
    for name, decision in _decisions(checkpoint, format, axis).items():
        with contextlib.suppress(ValueError):
            if decision.format is not None:
                check_layouts(dialect, [(name, _sample(decision))])
                found.add(name)
    return found


def _plan(
    opened: Checkpoint,
    format: FormatRules | None,
    axis: Axis,
    method: MethodLike | None,
    dialect: str | None,
    each: Each | None,
) -> tuple[dict[str, Decision], dict[str, LazyArray], TreeReport]:
    """Returns decisions, all arrays, and the report.

    Raises every error that can be known before hours of quantizing.
    """
    for row in opened.rows:
        if row.problem:
            opened[row.name]  # raises, with the name of the file
    default, all_decisions = as_method(method), _decisions(opened, format, axis)
    decisions = {name: d for name, d in all_decisions.items() if d.format is not None}
    if dialect is not None and decisions:
        kept = (row.name for row in opened.rows if row.format is not None and row.name not in decisions)
        made = ((name, _sample(decision)) for name, decision in decisions.items())
        try:
            check_layouts(dialect, itertools.chain(made, ((name, opened[name]) for name in kept)))
        except ValueError:
            for name, decision in decisions.items():  # the message should have the shape of the weight
                check_layouts(dialect, [(name, _sample(decision, rows=None))])
            raise
        if dialect == gguf.NAME:
            for_llama_cpp(opened, opened)
    told: set[str] = set()

    def tell(name: str, before: AnyArray, after: AnyArray) -> None:
        if each is not None and name not in told:  # an array is read twice for another library
            told.add(name)
            each(name, before, after)

    leaves, rows = {}, []
    for name, item in opened.items_by_name.items():
        if name in decisions:
            leaves[name] = _quantize_lazily(opened, name, decisions[name], default, tell)
        else:
            leaves[name] = LazyArray(item.struct, ft.partial(_read, opened, name, tell))
        rows += _rows(name, leaves[name].struct, all_decisions.get(name))
    return decisions, leaves, TreeReport(tuple(rows))


def _sample(decision: Decision, rows: int | None = 32) -> QuantizedArray:
    """Returns an array of ones that a layout can hold if it can hold the weight.

    Its blocks are as long, and its rows are few.

    Layouts ask whether lengths fill words of 32 bits, so the remainder by `rows` stays the same.
    """
    leaf, axes = decision.leaf.value, decision.axes
    along = {a % len(leaf.shape) for a in axes}
    fewer = lambda n: n if rows is None or n <= rows else rows + n % rows
    shape = tuple(n if a in along else fewer(n) for a, n in enumerate(leaf.shape))
    ones = jnp.ones(shape, leaf.dtype)
    return quantize_array(ones, decision.format, axes, None, None, as_method(None))  # pyright: ignore


# Files that loaders look for beside the weights.
_COMPANIONS = (
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("generation_config.json", "preprocessor_config.json", "processor_config.json"),
)


def _write(
    source: Checkpoint, arrays: Arrays, path: Path, dialect: str, shard_nbytes: int | None, kept: Collection[str]
) -> None:
    options = WriteOptions(shard_nbytes=shard_nbytes)
    if dialect == gguf.NAME:
        arrays, metadata = for_llama_cpp(source, arrays)
        stored = {row.name: row.stored_as for row in source.rows if source.dialect == gguf.NAME and row.name in kept}
        types = {glob.escape(name): kind for name, kind in stored.items() if kind in gguf.OTHER_TYPES}
        options = options._replace(metadata=metadata, types=types)
    else:
        options = options._replace(config=source.config, companions=_companions(source, path))
    write_arrays(path, arrays, dialect, options)


def _companions(source: Checkpoint, path: Path) -> dict[str, Path]:
    """Returns the files to copy into the folder `path`, by their names."""
    folder = Path(source.path) if Path(source.path).is_dir() else Path(source.path).parent
    found = {p.name: p for pattern in _COMPANIONS for p in folder.glob(pattern)} if source.config else {}
    is_other = lambda p: p.is_file() and p.resolve() != (path / p.name).resolve()
    return {name: p for name, p in sorted(found.items()) if is_other(p)}


def _decisions(checkpoint: Checkpoint, format: FormatRules | None, axis: Axis) -> dict[str, Decision]:
    """Returns a decision for each array, by its name; none if all stay as they are."""
    if format is None:
        return {}
    decisions = decide(skeleton(checkpoint), format, None, axis)
    if dropped := [d.leaf.path for d in decisions if d.activations is not None]:
        raise ValueError(
            f"A file holds weights, and no format of activations. Got `activations` for {dropped[0]}. "
            "Leave it out here, and call `eqq.quantize_tree(model, ..., activations=)` on the model that is loaded."
        )
    return {d.leaf.path: d for d in decisions}


def _read(checkpoint: Checkpoint, name: str, tell: Each) -> AnyArray:
    x = checkpoint[name]
    tell(name, x, x)
    return x


def _quantize_lazily(
    checkpoint: Checkpoint, name: str, decision: Decision, default: AbstractMethod, tell: Each
) -> LazyArray:
    method = (decision.method or default).for_leaf(name)

    def quantize(x: jax.Array) -> QuantizedArray:
        return quantize_array(x, decision.format, decision.axes, None, None, method)  # pyright: ignore

    def make() -> QuantizedArray:
        before = checkpoint[name]
        values = jnp.asarray(before.dequantize() if isinstance(before, AbstractArrayValue) else before)
        check_finite(values, name)
        method.check_weight(name, values)
        after = jax.block_until_ready(quantize(values))
        tell(name, before, after)
        return after

    return LazyArray(jax.eval_shape(quantize, decision.leaf.value), make)


def _rows(name: str, struct: PyTree, decision: Decision | None) -> list[LeafReport]:
    if is_packed(struct):
        q = struct.array if isinstance(struct, PermutedArray) else struct
        reason = "as in the checkpoint" if decision is None or decision.format is None else decision.reason
        return [make_quantized_row(name, q, reason, math.prod(struct.shape) * struct.dtype.itemsize)]
    return make_rows(next(named_leaves({name: struct})), "left as it is" if decision is None else decision.reason)


def _nest(values: Mapping[str, object]) -> PyTree:
    """Returns nested dictionaries, one level for each dot of a name.

    Flat if a name is also the start of another.
    """
    whole = not any("" in name.split(".") for name in values)
    nested = nest((tuple(name.split(".")), value) for name, value in values.items()) if whole else None
    return dict(values) if nested is None else nested
