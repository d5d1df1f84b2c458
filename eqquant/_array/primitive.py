"""The quantized matmul and the product of rounded floats as JAX primitives.

The array class imports the primitives, to call them. Their rules are in `_matmul`, in `rules.py` and
`rounded_rules.py`, because they import the array class. Rules register themselves, so the imports have no cycle.
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
    """Returns `x(*batch, m, k) . w(*batch, n, k)^T`.

    With `transpose`, `x(*batch, m, n) . w(*batch, n, k)`.

    Both operands are trees: the primitive takes the leaves of `x`, then the leaves of `w`. An array of floats is a
    tree of one leaf.

    **Arguments:**

    - `x`: floats; or with codes, a `QuantizedArray` in memory order, or a `DynamicRows`, whose rows the product
        quantizes. The result has their dtype.
    - `w`: a `QuantizedArray` in memory order, `(*batch, n, k)`, with the same batch axes as `x`; or a `SelectedArray`
        of such a shape, from a stack `(arrays, n, k)`.
    - `options`: with `by_columns`, `x` and the result are matrices that memory holds by columns, as after
        `swapaxes(-1, -2)`. This changes no value: a kernel that takes either order then reads and writes matrices as
        they lie, and XLA removes the transposes.
    - `transpose`: contracts `n` instead of `k`. Each of the two products is the gradient of the other.
    """
    if options.quantize_x is not None and not isinstance(x, AbstractOperand):
        x = options.quantize_x(x)
    # Inside `shard_map`, types also hold the axes that arrays vary along. The product varies along the axes of both
    # operands. Casting the operands to these first makes the gradient sum over the right axes.
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
        by_columns=options.by_columns,
    )


def _precision(precision: PrecisionLike) -> PrecisionLike:
    return jax.config.jax_default_matmul_precision if precision is None else precision  # pyright: ignore[reportAttributeAccessIssue]


# Where the largest magnitudes of the three arrays that a layer rounds stand in an array of them.
X_PLACE, W_PLACE, GRADIENT_PLACE = 0, 1, 2


class Rounding(NamedTuple):
    """How a product rounds an operand.

    - `format`: to which format.
    - `stochastic`: whether at random, so that the mean is the value.
    - `largest`: with delayed scaling, which of the largest magnitudes (amax) belongs to this operand.
    """

    format: AbstractFormat
    stochastic: bool = False
    largest: int | None = None


def bind_rounded_matmul(
    x: Float[Array, "*batch rows inner"],
    w: Float[Array, "*batch outer inner"],
    largest: Float32[Array, "*lead 3"] | None = None,
    *,
    x_rounding: Rounding | None,
    w_rounding: Rounding | None,
    gradient_rounding: Rounding,
    precision: PrecisionLike = None,
    implementation: str | None = None,
) -> Float[Array, "*batch rows outer"]:
    """Returns `x . w^T` of floats that are first rounded along `k`.

    Shapes are `(*batch, m, k)` and `(*batch, n, k)`, of equal dtype.

    The products of its gradient use this primitive too, and round the incoming gradient.

    **Arguments:**

    - `x`, `w`: floats.
    - `largest`: with delayed scaling, the amax of `x`, `w` and the gradient of the result, by which they are scaled;
        not positive while it is unknown. `lead` are the last axes of `batch`, or fewer. Their gradient is the current
        amax of each, as this product saw it.
    - `x_rounding`, `w_rounding`: how each is rounded; `None` for a tangent, which is not rounded.
    - `gradient_rounding`: how the gradient of the result is rounded, in the products of the backward pass.
    - `precision`, `implementation`: as in `bind_matmul`; the latter is of the forward pass.
    """
    return rounded_matmul_p.bind(
        x,
        w,
        *([] if largest is None else [largest]),
        x_rounding=x_rounding,
        w_rounding=w_rounding,
        gradient_rounding=gradient_rounding,
        precision=_precision(precision),
        implementation=implementation,
    )


def operands_of(args: Sequence[object], x_tree: PyTreeDef, w_tree: PyTreeDef) -> tuple[PyTree, PyTree]:
    """Returns the two operands of the primitive.

    They come from its arguments, or from a sequence with one entry for each.
    """
    count = x_tree.num_leaves
    return jtu.tree_unflatten(x_tree, args[:count]), jtu.tree_unflatten(w_tree, args[count:])
