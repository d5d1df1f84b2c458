"""`eqq.io.open`: a checkpoint of any library as a mapping from names to arrays."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from .._errors import did_you_mean
from .._formats.base import AbstractFormat
from .._report import escape_text, Name, Report, report_table, show_bytes
from ._dialects import bitsandbytes, fp8, gguf, gpt_oss, gptq, mlx, modelopt, own, safetensors, scaled_tensors, torchao
from ._dialects._item import Item
from ._files import find_files


_MAX_PROBLEMS = 10  # to print below a table
# The first that recognizes a checkpoint reads it.
DIALECTS = (gguf, own, torchao, bitsandbytes, gptq, mlx, gpt_oss, modelopt, fp8, scaled_tensors, safetensors)


@dataclasses.dataclass(frozen=True)
class CheckpointRow:
    """A row of a `Checkpoint`: one array. `bits` are per value, in the file."""

    derived: ClassVar[tuple[str, ...]] = ("bits",)

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored_as: str
    format: AbstractFormat | None
    nbytes: int
    problem: str | None

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / max(math.prod(self.shape), 1)


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Checkpoint(Report, Mapping[str, Any]):
    """A mapping from names to arrays, which are read when you ask for them.

    The result of [`eqquant.io.open`][].

    A quantized weight is one [`eqquant.QuantizedArray`][] under one name, whatever tensors it is stored in. Other
    arrays are JAX arrays, or NumPy arrays if JAX is not set to hold their dtype. It prints as a table, and has
    `.to_dict()`.

    - `path`: the file or folder.
    - `dialect`: whose layout it is, such as `"gguf"`.
    - `metadata`: the key-value pairs of the file.
    - `config`: `config.json` of the folder, or an empty dictionary.
    - `rows`: for each array, known without reading it, its `name`, logical `shape` and `dtype`; `stored_as`, the type
        in the file; the `format` that it is read as, `None` for floats; `nbytes` and `bits` per value in the file; and
        the `problem` if it cannot be read, or `None`.
    - `nbytes`, `bits`: of all arrays together.
    """

    derived: ClassVar[tuple[str, ...]] = ("nbytes", "bits")

    path: str
    dialect: str
    rows: tuple[CheckpointRow, ...]
    metadata: Mapping[str, object] = dataclasses.field(repr=False)
    config: Mapping[str, object] = dataclasses.field(repr=False)
    items_by_name: Mapping[str, Item] = dataclasses.field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def bits(self) -> float:
        """Bits per value over all arrays."""
        return 8 * self.nbytes / max(sum(math.prod(row.shape) for row in self.rows), 1)

    def __getitem__(self, name: str) -> Any:
        """Reads an array.

        Raises `KeyError` for a name that it does not have, and `ValueError` if the array is damaged, or if this
        package has no format for it.
        """
        item = self.items_by_name.get(name)
        if item is None:
            raise KeyError(f"{self.path} has no {name!r}. {did_you_mean(str(name), self.items_by_name)}".rstrip())
        return item.read()

    # The methods of `Mapping` itself would read arrays, to look for a name or to compare.
    def __contains__(self, name: object) -> bool:
        return name in self.items_by_name

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_name)

    def __len__(self) -> int:
        return len(self.items_by_name)

    def __rich__(self) -> Group:
        table = report_table("array", "shape", "stored as", "read as", "bits", "size", text=4)
        for column in table.columns[1:3]:
            column.no_wrap = True
        for row in self.rows:
            reads = row.problem and "cannot be read" or (row.dtype if row.format is None else repr(row.format))
            shape = " x ".join(map(str, row.shape)) or "scalar"
            sizes = (f"{row.bits:.2f}", show_bytes(row.nbytes))
            style = "red" if row.problem else "dim" if row.format is None else None
            table.add_row(Name(row.name), shape, escape(escape_text(row.stored_as)), Name(reads), *sizes, style=style)
        quantized = sum(row.format is not None for row in self.rows)
        head = f"{len(self.rows)} arrays, {quantized} of them quantized, {show_bytes(self.nbytes)}"
        problems = dict.fromkeys(escape_text(row.problem) for row in self.rows if row.problem)
        notes = [Text(f"Cannot be read: {problem}", style="red") for problem in list(problems)[:_MAX_PROBLEMS]]
        # A line for the path, which may be long.
        return Group(Name(self.path), f"{self.dialect}, {head}, {self.bits:.3f} bits per value", table, *notes)


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint of any library that this package knows, without reading its arrays.

    !!! Example

        ```python
        checkpoint = eqq.io.open("model.gguf")
        print(checkpoint)                           # a table: names, shapes, formats, bits per weight, bytes
        w = checkpoint["blk.0.attn_q.weight"]       # a QuantizedArray, in our own packing
        ```

    [Files](../files.md) lists the libraries. No pickle is ever opened.

    **Arguments:**

    - `path`: a `.safetensors` or `.gguf` file, a folder that holds one, or an index of several with the index. One part
        of several, such as `model-00001-of-00002.gguf`, stands for all.

    **Returns:**

    A [`eqquant.io.Checkpoint`][].

    **Raises:**

    `FileNotFoundError` if there is no such file. `ValueError` if a file is damaged, of another kind, or a part without
    the others; the message names the file, and the tensor. An array that cannot be read is listed with its `problem`,
    and raises when it is read.
    """
    files = find_files(path)
    dialect = next(d for d in DIALECTS if d.recognizes(files))
    items = dialect.items(files)
    rows = tuple(_row(name, item) for name, item in items.items())
    return Checkpoint(str(path), dialect.NAME, rows, files.metadata, files.config, items)


def _row(name: str, item: Item) -> CheckpointRow:
    entry = item.entry
    return CheckpointRow(name, entry.shape, entry.dtype, item.stored_as, entry.format, item.nbytes, item.problem)
