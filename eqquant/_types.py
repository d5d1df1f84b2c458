"""`PyTree` and `PyTreeDef` for signatures, which type checkers see.

jaxtyping and JAX hide theirs from type checkers.
"""

from typing import Any, TYPE_CHECKING, TypeAlias


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _Leaf = TypeVar("_Leaf", default=Any)
    PyTree: TypeAlias = _Leaf | Any
    PyTreeDef: TypeAlias = Any
else:
    from jax.tree_util import PyTreeDef as PyTreeDef
    from jaxtyping import PyTree as PyTree
