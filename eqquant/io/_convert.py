"""`eqq.io.convert`: from a checkpoint to one of our files, an array at a time."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array.array import is_quantized
from .._array.quantize import as_method, check_finite, quantize_array
from .._methods import AbstractMethod
from .._tree.leaves import named_leaves
from .._tree.quantize import decide, Decision, Rules
from .._tree.report import LeafReport, TreeReport
from .._tree.summary import quantized_row, row_of
from ._checkpoint import Checkpoint, open
from ._deferred import Deferred
from ._save import save


def skeleton(checkpoint: Checkpoint) -> PyTree:
    """Returns what a checkpoint holds, without values: `jax.ShapeDtypeStruct`s, nested by the dots of their names.

    Quantized arrays appear as the float arrays that they stand for. Pass it to [`eqquant.plan_tree`][] to see what a
    rule would do, or to [`eqquant.analysis.plan_bits`][].

    !!! Example

        ```python
        checkpoint = eqq.io.open("model.safetensors")
        print(eqq.plan_tree(eqq.io.skeleton(checkpoint), {"*embed*": "int8", "*": "nf4"}))
        ```

    **Arguments:**

    - `checkpoint`: what [`eqquant.io.open`][] returned.

    **Returns:**

    Nested dictionaries. The path of each leaf is its name in the checkpoint. Arrays that cannot be read are left out.
    """
    return _nested(
        {row.name: jax.ShapeDtypeStruct(row.shape, jnp.dtype(row.dtype)) for row in checkpoint.rows if not row.problem}
    )


def convert(
    checkpoint: Checkpoint | str | os.PathLike[str],
    path: str | os.PathLike[str],
    format: Rules | None = None,
    *,
    axis: Any = None,
    method: AbstractMethod | None = None,
    shard_nbytes: int | None = None,
    each: Callable[[str, Any, Any], None] | None = None,
) -> TreeReport:
    """Quantizes a checkpoint of any library, and saves it as [`eqquant.save`][] does, an array at a time.

    At its peak this takes the memory of one array, before and after, so the checkpoint may be larger than memory.

    !!! Example

        ```python
        print(eqq.io.convert("model.safetensors", "model.nf4.safetensors", {"*embed*": "int8", "*": "nf4"}))
        ```

    **Arguments:**

    - `checkpoint`: what [`eqquant.io.open`][] returned, or a path for it. Arrays that are quantized there are
        dequantized first if `format` selects them, which rounds them twice.
    - `path`: the file to write; with `shard_nbytes`, a folder.
    - `format`: formats for weights, as for [`eqquant.quantize_tree`][]. `None` keeps every array as it is.
    - `axis`: the axis along which blocks run, as for [`eqquant.quantize_tree`][].
    - `method`: the method that chooses scales and codes.
    - `shard_nbytes`: as for [`eqquant.save`][].
    - `each`: is called with the name of each array, the array of the checkpoint, and what was made of it. For progress,
        or to measure errors.

    **Returns:**

    A report with a row for each array. It prints as a table, as that of [`eqquant.plan_tree`][].

    **Raises:**

    As [`eqquant.io.open`][], [`eqquant.quantize_tree`][] and [`eqquant.save`][]; `ValueError` if an array of the
    checkpoint cannot be read, or is stored with act-order and `format` does not select it. Then `path` is as it was.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open(checkpoint)
    for row in opened.rows:
        if row.problem:
            opened[row.name]  # raises, with the name of the file
    default, decisions = as_method(method), _decisions(opened, format, axis)
    leaves, rows = {}, []
    for row in opened.rows:
        leaves[row.name] = deferred = _deferred(opened, row, decisions.get(row.name), default, each)
        rows += _rows(row.name, deferred.struct, decisions.get(row.name))
    save(Path(path), _nested(leaves), shard_nbytes=shard_nbytes)
    return TreeReport(tuple(rows))


def _decisions(checkpoint: Checkpoint, format: Rules | None, axis: Any) -> dict[str, Decision]:
    """Returns a decision for each array to quantize, by its name."""
    if format is None:
        return {}
    return {d.leaf.path: d for d in decide(skeleton(checkpoint), format, None, axis) if d.format is not None}


def _deferred(
    checkpoint: Checkpoint,
    row: Any,
    decision: Decision | None,
    default: AbstractMethod,
    each: Callable[[str, Any, Any], None] | None,
) -> Deferred:
    name = row.name

    def quantized(x: Any) -> Any:
        return quantize_array(x, decision.format, decision.axes, None, None, method)  # pyright: ignore

    def make() -> Any:
        before = after = checkpoint[name]
        if decision is not None:
            values = jnp.asarray(before.dequantize() if is_quantized(before) else before)
            check_finite(values, name)
            after = jax.block_until_ready(quantized(values))
        if each is not None:
            each(name, before, after)
        return after

    if decision is not None:
        method = (decision.method or default).for_leaf(name)
        return Deferred(jax.eval_shape(quantized, jax.ShapeDtypeStruct(row.shape, jnp.dtype(row.dtype))), make)
    if row.format is None:
        return Deferred(jax.ShapeDtypeStruct(row.shape, jnp.dtype(row.dtype)), make)
    if checkpoint.items_by_name[name].permuted:
        raise ValueError(
            f"{name} must be one array, to be saved as it is. Got one whose inputs are stored in another order "
            "(act-order). Give it a format, which rounds it again; or save the model that `eqq.io.load_into` returns."
        )
    # Only the array itself says along which axis it is quantized.
    return Deferred(jtu.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), checkpoint[name]), make)


def _rows(name: str, struct: Any, decision: Decision | None) -> list[LeafReport]:
    if is_quantized(struct):
        reason = "as in the checkpoint" if decision is None else decision.reason
        return [quantized_row(name, struct, reason, math.prod(struct.shape) * struct.dtype.itemsize)]
    return row_of(next(named_leaves({name: struct})), "left as it is")


def _nested(values: Mapping[str, Any]) -> PyTree:
    """Returns nested dictionaries, one level for each dot of a name; flat if a name is also the start of another."""
    starts = {".".join(name.split(".")[:n]) for name in values for n in range(1, name.count(".") + 1)}
    if any(name in starts or "" in name.split(".") for name in values):
        return dict(values)
    out: dict[str, Any] = {}
    for name, value in values.items():
        *around, last = name.split(".")
        node = out
        for key in around:
            node = node.setdefault(key, {})
        node[last] = value
    return out
