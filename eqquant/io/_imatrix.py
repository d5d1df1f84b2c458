"""Importance matrices of llama.cpp: the mean squares of the inputs of each weight.

https://github.com/ggml-org/llama.cpp/tree/master/tools/imatrix

A GGUF file holds two tensors for a weight, `NAME.in_sum2` and `NAME.counts`: sums of squares, and the number of inputs.
Weights of experts have a row of each for every expert. The older binary format is

    number of weights: i32
    for each weight    length of the name: i32, name, number of calls: i32, number of values: i32, values: f32 each

A value is the mean square times the number of calls. Newer programs append the last chunk and the name of the text,
which are not read.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from .._methods.statistics import LeafStats
from ._atomic import replace
from ._gguf import Cursor, MAGIC, read
from ._tensors import MappedFile, NewTensor, StoredTensor
from ._writers import gguf


IMATRIX = "imatrix"
_SUMS, _COUNTS = ".in_sum2", ".counts"
# llama.cpp refuses a file without these, which it only prints.
_METADATA = {"imatrix.datasets": ["eqquant"], "imatrix.chunk_count": 1, "imatrix.chunk_size": 1}


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the importance matrix in a file of llama.cpp, for [`eqquant.MSE`][] and others.

    !!! Example

        ```python
        imatrix = eqq.io.read_imatrix("imatrix.gguf")
        weights = {name: checkpoint[name] for name in imatrix}  # a float checkpoint, in GGUF
        small = eqq.quantize_tree(weights, "iq2_xs", method=eqq.MSE(imatrix))
        ```

    **Arguments:**

    - `path`: the file, in GGUF or in the older binary format.

    **Returns:**

    A dictionary from the names of weights in GGUF files to float32 mean squares of their inputs, `(features,)`, or
    `(experts, features)`. An expert without inputs has zeros.

    **Raises:**

    `ValueError` if the file is damaged, or holds no importance matrix.
    """
    file = MappedFile(Path(path))
    found = _from_gguf(file) if file.buffer[:4] == MAGIC else _from_binary(file)
    for name, squares in found.items():
        if not (np.isfinite(squares) & (squares >= 0)).all():
            file.fail(f"must hold squares of the inputs of {name!r}. Got one that is negative, infinite or NaN.")
    if not found:
        file.fail("must hold an importance matrix. Got none. `llama-imatrix` writes one.")
    return found


def write_imatrix(path: Path, inputs: Mapping[str, object], metadata: Mapping[str, object]) -> None:
    """Writes statistics of inputs by the names of weights in GGUF files.

    They are results of `collect_stats`, or mean squares alone, as of one input. Weights without inputs are left out.
    """
    tensors: list[NewTensor] = []
    for name, x in inputs.items():
        if isinstance(x, LeafStats) and (x.axis is None or x.second_moment is None):
            continue
        given = x.second_moment if isinstance(x, LeafStats) else x
        if not isinstance(given, np.ndarray | jax.Array) or given.ndim not in (1, 2) or not given.size:
            raise TypeError(
                f"{name!r} must have mean squares of its inputs: (features,) or (experts, features). Got "
                f"{getattr(given, 'shape', given)!r}."
            )
        squares = np.atleast_2d(np.asarray(given, np.float64))
        counts = np.broadcast_to(getattr(x, "rows", 1), len(squares))[:, None]
        parts = {_SUMS: (squares * counts).astype(np.float32), _COUNTS: counts.astype(np.float32)}
        if not (np.isfinite(parts[_SUMS]) & (squares >= 0)).all():
            raise ValueError(
                f"{name!r} must have squares of inputs. Got one that is negative, infinite or NaN, or a sum "
                "that overflows float32. Pass what `eqq.calibrate.collect_stats` returns."
            )
        tensors += [part for end, values in parts.items() for part in gguf.layout(name + end, values).tensors]
    if not tensors:
        raise ValueError(
            "`arrays` must hold statistics of inputs. Got none. Pass what `eqq.calibrate.collect_stats` returns for "
            "batches that reach the weights."
        )
    with replace(path) as new:
        gguf.write(new, tensors, {"general.type": IMATRIX, **_METADATA, **metadata})


def _from_gguf(file: MappedFile) -> dict[str, np.ndarray]:
    tensors, _ = read(file)
    names = [name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)]
    return {name: _means(tensors[name + _SUMS], tensors.get(name + _COUNTS)) for name in names}


def _means(sums: StoredTensor, counts: StoredTensor | None) -> np.ndarray:
    if counts is None or sums.dtype != "F32" or counts.dtype != "F32":
        sums.fail("It must come with counts, both of float32.")
    squares = np.asarray(sums.array(), np.float32)
    squares = squares.reshape(-1, squares.shape[-1] if squares.ndim and squares.size else 1)
    rows = np.asarray(counts.array(), np.float32).reshape(-1)
    if len(rows) != len(squares):
        sums.fail(f"It must have a count for each row. Got {len(rows)} for {len(squares)} rows.")
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        means = np.where(rows[:, None] > 0, squares / rows[:, None], 0).astype(np.float32)
    return means[0] if len(means) == 1 else means


def _from_binary(file: MappedFile) -> dict[str, np.ndarray]:
    cursor, found = Cursor(file), {}
    count = cursor.number("<i", "the number of weights")
    if not 0 < count <= file.size // 12:
        file.fail(f"must be an importance matrix, in GGUF or binary. Got {count} weights in {file.size} bytes.")
    for _ in range(count):
        name = cursor.take(_size(cursor, "a name"), "a name").decode(errors="surrogateescape")
        calls, what = cursor.number("<i", f"the calls of {name!r}"), f"the values of {name!r}"
        values = np.frombuffer(cursor.take(4 * _size(cursor, what), what), "<f4")
        if name in found or calls < 0:
            file.fail(f"must name each weight once, with a number of calls. Got {name!r} and {calls}.")
        found[name] = (values / np.float32(max(calls, 1))).astype(np.float32)
    return found


def _size(cursor: Cursor, what: str) -> int:
    """Reads the number of bytes or values that follow."""
    size = cursor.number("<i", f"the length of {what}")
    if size < 0:
        cursor.fail(what)
    return size
