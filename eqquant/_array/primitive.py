"""The quantized matmul and dequantizing as JAX primitives.

The array class imports the primitives, to call them. Their rules are in `_matmul/rules.py` and in
`_matmul/decode_rules.py`, because they import the array class. Rules register themselves, so the imports have no cycle.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from .. import _compat


quantized_matmul_p = jax.extend.core.Primitive("quantized_matmul")
dequantize_p = jax.extend.core.Primitive("dequantize")


def bind_matmul(
    x: PyTree,
    w: PyTree,
    *,
    transpose: bool,
    precision: Any = None,
    implementation: str | None = None,
    by_columns: tuple[bool, bool] = (False, False),
) -> Float[Array, "*batch rows outer"]:
    """`x(*batch, m, k) . w(*batch, n, k)^T`, or with `transpose` `x(*batch, m, n) . w(*batch, n, k)`.

    Both operands are trees: the primitive takes the leaves of `x`, then the leaves of `w`. An array of floats is a
    tree of one leaf.

    **Arguments:**

    - `x`: floats; or with codes, a `QuantizedArray` in memory order, or a `DynamicRows`, whose rows the product
        quantizes. The result has their dtype.
    - `w`: a `QuantizedArray` in memory order, `(*batch, n, k)`, with the same batch axes as `x`; or a `SelectedArray`
        of such a shape, from a stack `(arrays, n, k)`.
    - `transpose`: contracts `n` instead of `k`. Each of the two products is the gradient of the other.
    - `precision`: as in `jax.lax.dot_general`; `None` takes `jax.default_matmul_precision`.
    - `implementation`: as in [`eqquant.matmul`][].
    - `by_columns`: whether `x`, and the result, are matrices that memory holds by columns, as after `swapaxes(-1, -2)`.
        Changes no value: a kernel that takes either order then reads and writes matrices as they lie, and XLA
        removes the transposes.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    of_x, x_tree = jtu.tree_flatten(x)
    of_w, w_tree = jtu.tree_flatten(w)
    return quantized_matmul_p.bind(
        *of_x,
        *of_w,
        x_tree=x_tree,
        w_tree=w_tree,
        transpose=transpose,
        precision=precision,
        implementation=implementation,
        by_columns=by_columns,
    )


def operands_of(args: Sequence[Any], x_tree: Any, w_tree: Any) -> tuple[Any, Any]:
    """Returns the two operands, from the arguments of the primitive or from a sequence with one entry for each."""
    count = x_tree.num_leaves
    return jtu.tree_unflatten(x_tree, args[:count]), jtu.tree_unflatten(w_tree, args[count:])


def bind_dequantize(q: PyTree) -> Float[Array, "*batch length"]:
    """Returns the values of a `QuantizedArray` in memory order: its last axis is the only quantized one."""
    leaves, tree = jtu.tree_flatten(_compat.vary_alike(q))
    return dequantize_p.bind(*leaves, tree=tree)
