"""`PyTree` for signatures. jaxtyping hides its own from type checkers, to which such functions have no known type."""

from typing import Any, TYPE_CHECKING, TypeAlias


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _Leaf = TypeVar("_Leaf", default=Any)
    PyTree: TypeAlias = _Leaf | Any
else:
    from jaxtyping import PyTree as PyTree
