"""The JAX primitives `quantized_matmul` and `rounded_matmul`, and how they are bound.

The array class imports this file. The rules of the primitives import the array class, so they are in `_matmul`:
`rules.py` and `rounded_rules.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.extend
import jax.tree_util as jtu
from jax.lax import PrecisionLike
from jaxtyping import Array, Float, Float32

from .. import _compat
from .._formats.base import AbstractFormat
from .._types import PyTree, PyTreeDef
from .contraction import AbstractOperand, Options


quantized_matmul_p = jax.extend.core.Primitive("quantized_matmul")
rounded_matmul_p = jax.extend.core.Primitive("rounded_matmul")


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
    x, w = _compat.vary_alike((x, w))
    x_leaves, x_tree = jtu.tree_flatten(x)
    w_leaves, w_tree = jtu.tree_flatten(w)
    return quantized_matmul_p.bind(
        *x_leaves,
        *w_leaves,
        x_tree=x_tree,
        w_tree=w_tree,
        transpose=transpose,
        precision=_precision(options.precision),
        implementation=options.implementation,
        column_major=options.column_major,
    )


def _precision(precision: PrecisionLike) -> PrecisionLike:
    return jax.config.jax_default_matmul_precision if precision is None else precision  # pyright: ignore[reportAttributeAccessIssue]


# The indices of an array of three amax values: of `x`, of the weight, and of the gradient of the result.
X_AMAX, W_AMAX, GRADIENT_AMAX = 0, 1, 2


class Rounding(NamedTuple):
    """How a product rounds an operand.

    - `format`: the format to round to.
    - `stochastic`: whether to round stochastically.
    - `amax_index`: with delayed scaling, the index of the amax of this operand.
    """

    format: AbstractFormat
    stochastic: bool = False
    amax_index: int | None = None


def bind_rounded_matmul(
    x: Float[Array, "*batch rows inner"],
    w: Float[Array, "*batch outer inner"],
    amax: Float32[Array, "*lead 3"] | None = None,
    *,
    x_rounding: Rounding | None,
    w_rounding: Rounding | None,
    gradient_rounding: Rounding,
    precision: PrecisionLike = None,
    implementation: str | None = None,
) -> Float[Array, "*batch rows outer"]:
    """Returns `x . w^T` of floats rounded along `k`, as the primitive `rounded_matmul`.

    Shapes are `(*batch, m, k)` and `(*batch, n, k)`, of equal dtype. The products of its gradient bind the primitive
    too, and round the incoming gradient.

    **Arguments:**

    - `x`, `w`: floats.
    - `amax`: with delayed scaling, the amax of `x`, `w` and the gradient of the result, by which they are scaled; not
        positive while it is unknown. `lead` are the last axes of `batch`, or fewer. Its gradient is the current amax
        of each, as this product saw it.
    - `x_rounding`, `w_rounding`: how each is rounded; `None` for a tangent, which is not rounded.
    - `gradient_rounding`: how the gradient of the result is rounded, in the products of the backward pass.
    - `precision`, `implementation`: as in `bind_matmul`; the latter is of the forward pass.
    """
    return rounded_matmul_p.bind(
        x,
        w,
        *([] if amax is None else [amax]),
        x_rounding=x_rounding,
        w_rounding=w_rounding,
        gradient_rounding=gradient_rounding,
        precision=_precision(precision),
        implementation=implementation,
    )


def unflatten_operands(args: Sequence[object], x_tree: PyTreeDef, w_tree: PyTreeDef) -> tuple[PyTree, PyTree]:
    """Unflattens the two operands from the arguments of the primitive, or from their tangents."""
    count = x_tree.num_leaves
    return jtu.tree_unflatten(x_tree, args[:count]), jtu.tree_unflatten(w_tree, args[count:])
