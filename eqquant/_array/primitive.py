"""The JAX primitive `quantized_matmul`, and how it is bound.

The array class imports this file. The rules of the primitive import the array class: `_matmul/primitive_rules.py`.
"""

from collections.abc import Sequence

import jax
import jax.extend
import jax.tree_util as jtu
from jax.lax import PrecisionLike
from jaxtyping import Array, Float

from .. import _compat
from .._types import PyTree, PyTreeDef
from .codes import spread_tiles
from .contraction import AbstractOperand, Options


quantized_matmul_p = jax.extend.core.Primitive("quantized_matmul")


def bind_matmul(
    x: PyTree, w: PyTree, options: Options = Options(), *, transpose: bool = False
) -> Float[Array, "*batch rows outer"]:
    """Returns `x(*batch, m, k) . w(*batch, n, k)^T`, as the primitive `quantized_matmul`.

    With `transpose`, returns `x(*batch, m, n) . w(*batch, n, k)`.

    Both operands are trees: the primitive takes the leaves of `x`, then the leaves of `w`. An array of floats is a
    tree of one leaf.

    **Arguments:**

    - `x`: floats; a `QuantizedArray` in memory order; or a `DynamicRows` or `StaticRows`, which the product quantizes.
        The result has their dtype.
    - `w`: a `QuantizedArray` in memory order, `(*batch, n, k)`, with the same batch axes as `x`; or a `SelectedArray`
        of such a shape, from a stack `(arrays, n, k)`.
    - `options`: with `column_major`, `x` and the result are matrices that memory holds by columns, as after
        `swapaxes(-1, -2)`. Values do not change, but a kernel that takes either order then reads and writes
        matrices without a copy, and XLA removes the transposes.
    - `transpose`: contracts `n` instead of `k`. Each of the two products is the gradient of the other.
    """
    if options.quantize_x is not None and not isinstance(x, AbstractOperand):
        x = options.quantize_x(x)
    # Inside `shard_map`, types also hold the mesh axes that arrays vary along. The product varies along the axes of
    # both operands. Casting the operands to these first makes the gradient sum over the right ones.
    x, w = _compat.vary_alike((spread_tiles(x), spread_tiles(w)))
    x_leaves, x_tree = jtu.tree_flatten(x)
    w_leaves, w_tree = jtu.tree_flatten(w)
    return quantized_matmul_p.bind(
        *x_leaves,
        *w_leaves,
        x_tree=x_tree,
        w_tree=w_tree,
        transpose=transpose,
        precision=with_default(options.precision),
        implementation=options.implementation,
        column_major=options.column_major,
    )


def with_default(precision: PrecisionLike) -> PrecisionLike:
    """Returns a precision; for `None` that of JAX's configuration."""
    return jax.config.jax_default_matmul_precision if precision is None else precision  # pyright: ignore[reportAttributeAccessIssue]


def unflatten_operands(args: Sequence[object], x_tree: PyTreeDef, w_tree: PyTreeDef) -> tuple[PyTree, PyTree]:
    """Unflattens the two operands from the arguments of the primitive, or from their tangents."""
    count = x_tree.num_leaves
    return jtu.tree_unflatten(x_tree, args[:count]), jtu.tree_unflatten(w_tree, args[count:])
