"""Summarizes and dequantizes models, and counts their bytes and parameters."""

import dataclasses
from collections.abc import Collection

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import DTypeLike

from .._array.array import is_quantized, QuantizedArray
from .._formats.base import AbstractFormat
from .._numerics.axes import as_axes
from .._types import PyTree
from .._wrappers.activation import ActivationQuantizedArray
from .._wrappers.base import AbstractMatmulOverride, with_array
from .._wrappers.low_precision import LowPrecisionArray
from .._wrappers.mapped import AbstractMappedArray
from .._wrappers.simulated import FakeQuantizedArray
from .leaves import array_nbytes, DenseArray, is_mapped, Leaf, named_leaves
from .report import LeafReport, TreeReport
from .select import replace_selected, select_nodes
from .sizes import few_values_reason, no_smaller_reason
from .weights import default_skip_reason, ineligible_reason, input_axis


def summary(tree: PyTree) -> TreeReport:
    """Returns a report of a tree: the format, bytes and bits per value of each array.

    For float arrays it gives the reason, as [`eqquant.plan_tree`][] does; `left out by the call` means that a rule,
    `where=` or `axis=` excluded it.

    !!! Example

        ```python
        print(eqq.summary(model))
        ```

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    A report, which prints as a table, with the fields of the report of [`eqquant.plan_tree`][]: `leaves`, a row for
    each array, `nbytes`, `bits` and others.
    """
    rows, leaves = [], list(named_leaves(tree, _is_row))
    formats = {x.format for x in jtu.tree_leaves(tree, is_leaf=is_quantized) if is_quantized(x)}
    for leaf in leaves:
        if isinstance(leaf.value, AbstractMatmulOverride):
            rows.extend(_make_wrapper_rows(leaf))
        elif isinstance(leaf.value, FakeQuantizedArray):
            master = dataclasses.replace(leaf, value=leaf.value.master)
            rows.extend(make_rows(master, f"simulates {leaf.value.format!r}"))
        elif is_quantized(leaf.value):
            reason = f"quantized, in a {type(leaf.parent).__name__}" if is_mapped(leaf) else "quantized"
            rows.append(make_quantized_row(leaf.path, leaf.value, reason, leaf.value.size * leaf.value.dtype.itemsize))
        else:
            rows.extend(make_rows(leaf, _float_reason(leaf, formats)))
    return TreeReport(tuple(rows))


def _float_reason(leaf: Leaf, formats: Collection[AbstractFormat]) -> str:
    """Returns why a leaf is in float, in a tree with quantized arrays of some formats."""
    if (reason := ineligible_reason(leaf.value) or default_skip_reason(leaf)) is not None:
        return reason
    axes = as_axes(input_axis(leaf)[0])
    if not formats:
        return few_values_reason(leaf.value, axes) or "nothing is quantized yet"
    reasons = [no_smaller_reason(leaf.value, format, axes) for format in formats]
    return min(map(str, reasons)) if None not in reasons else "left out by the call"


def _is_row(x: PyTree) -> bool:
    return is_quantized(x) or isinstance(x, (FakeQuantizedArray, AbstractMatmulOverride))


def _make_wrapper_rows(leaf: Leaf) -> list[LeafReport]:
    """Returns the rows of a wrapped weight, and of the other arrays of its wrapper."""
    w = leaf.value
    if isinstance(w, ActivationQuantizedArray) and is_quantized(w.array):
        calibrated = "" if w.scale_bits is None else "; scale of activations from calibration"
        row = make_quantized_row(leaf.path, w.array, f"quantized{calibrated}", w.size * w.dtype.itemsize)
        return [row._replace(activations=w.activations, nbytes=w.nbytes)]
    inside = summary({"array": w.array}).leaves
    inside = [row._replace(reason=f"{row.reason}; its products {w.products}") for row in inside]
    others = [
        row for part in named_leaves(with_array(w, None)) for row in make_rows(part, f"a part of {type(w).__name__}")
    ]
    return [row._replace(path=f"{leaf.path}.{row.path}") for row in (*inside, *others)]


def make_rows(leaf: Leaf, reason: str) -> list[LeafReport]:
    x = leaf.value
    if is_quantized(x):
        return [make_quantized_row(leaf.path, x, reason, x.size * x.dtype.itemsize)]
    if not isinstance(x, DenseArray):
        return []
    nbytes = array_nbytes(x)
    return [LeafReport(leaf.path, tuple(x.shape), str(x.dtype), None, None, reason, nbytes, nbytes)]


def make_quantized_row(path: str, q: QuantizedArray, reason: str, dense_nbytes: int) -> LeafReport:
    return LeafReport(path, q.shape, str(q.dtype), q.format, q.axis, reason, q.nbytes, dense_nbytes)


def dequantize_tree(tree: PyTree, dtype: DTypeLike | None = None) -> PyTree:
    """Returns a tree with every quantized array dequantized to a dense array.

    Fake-quantized arrays become dense too, and rotations and other input transforms are undone. The inverse of
    [`eqquant.quantize_tree`][], up to rounding.

    !!! Example

        ```python
        float_model = eqq.dequantize_tree(model)
        half_model = eqq.dequantize_tree(model, "bfloat16")
        ```

    **Arguments:**

    - `tree`: any pytree.
    - `dtype`: the dtype of the dense arrays; by default, their logical dtype.

    **Returns:**

    The tree, with `jax.Array`s in the place of quantized arrays. An array that appears in several places stays shared.
    """

    def dequantize(leaf: Leaf) -> PyTree:
        x = leaf.value
        if isinstance(x, ActivationQuantizedArray | LowPrecisionArray):  # whose products only round
            return dequantize_tree(x.array, dtype)
        if isinstance(x, AbstractMatmulOverride):
            return with_array(x, dequantize_tree(x.array, dtype))
        if isinstance(x, AbstractMappedArray):
            inner = dequantize_tree(x.array)
            if not isinstance(inner, (jax.Array, np.ndarray)):  # low-rank factors stay separate
                return dataclasses.replace(x, array=dequantize_tree(x.array, dtype))
            x = dataclasses.replace(x, array=inner)
        return x.dequantize() if dtype is None else x.dequantize().astype(dtype)

    is_node = lambda x: _is_row(x) or isinstance(x, AbstractMappedArray)
    return replace_selected(tree, select_nodes(tree, is_node), dequantize, is_node)


def tree_nbytes(tree: PyTree) -> int:
    """Counts the bytes of the arrays of a tree, with packed codes at their packed size.

    An array that appears in several places counts once.

    !!! Example

        ```python
        print(eqq.tree_nbytes(model), eqq.tree_nbytes(eqq.quantize_tree(model, "nf4")))
        ```

    **Arguments:**

    - `tree`: any pytree, quantized or not.

    **Returns:**

    The number of bytes.
    """
    leaves = {id(x): x for x in jtu.tree_leaves(tree) if isinstance(x, DenseArray)}
    return sum(array_nbytes(x) for x in leaves.values())
