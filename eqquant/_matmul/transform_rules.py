"""Quax rules of transformations that Quax has none for: `jax.checkpoint` keeps what it gets packed."""

from typing import Any

import jax.tree_util as jtu
import quax
from jaxtyping import ArrayLike

from .. import _compat
from .._array.value import AbstractArrayValue
from .._types import PyTree


_compat.support_custom_vjp_in_quax()


@quax.register(_compat.remat_p)
def _checkpoint(
    *operands: AbstractArrayValue | ArrayLike, jaxpr: Any, prevent_cse: bool | tuple[bool, ...], **params: Any
) -> PyTree:
    leaves, tree = jtu.tree_flatten(operands)
    out_tree = None

    def on_leaves(*leaves: ArrayLike) -> list[ArrayLike]:
        nonlocal out_tree
        out = quax.quaxify(_compat.make_function(jaxpr))(*jtu.tree_unflatten(tree, leaves))
        flat, out_tree = jtu.tree_flatten(out)
        return flat

    # One for each operand; constants of the new jaxpr come first, and may be recomputed.
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    y = _compat.bind_checkpoint(on_leaves, leaves, {"prevent_cse": prevent_cse, **params})
    return jtu.tree_unflatten(out_tree, y)
