"""Quax rules of `jax.checkpoint` and `custom_vjp`, which keep quantized arrays packed."""

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

    def call_on_leaves(*leaves: ArrayLike) -> list[ArrayLike]:
        nonlocal out_tree
        out = quax.quaxify(_compat.make_function(jaxpr))(*jtu.tree_unflatten(tree, leaves))
        flat, out_tree = jtu.tree_flatten(out)
        return flat

    # A tuple has an entry for each operand, but the new jaxpr has more: its constants come first.
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    y = _compat.bind_checkpoint(call_on_leaves, leaves, {"prevent_cse": prevent_cse, **params})
    return jtu.tree_unflatten(out_tree, y)
