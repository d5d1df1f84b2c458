"""Types for signatures, where type checkers need another one than the checks at run time."""

from typing import Any, BinaryIO, TYPE_CHECKING, TypeAlias, TypeVar

from jax.sharding import NamedSharding, PartitionSpec


# A model that a function returns with other leaves.
Model = TypeVar("Model")

if TYPE_CHECKING:
    import typing_extensions

    # jaxtyping and JAX hide theirs from type checkers.
    _Leaf = typing_extensions.TypeVar("_Leaf", default=Any)
    PyTree: TypeAlias = _Leaf | Any
    PyTreeDef: TypeAlias = Any
    BinaryFile: TypeAlias = BinaryIO
    ShardingLike: TypeAlias = NamedSharding | PartitionSpec | None
else:
    from jax.tree_util import PyTreeDef as PyTreeDef
    from jaxtyping import PyTree as PyTree

    BinaryFile = object  # beartype's protocol of files rejects `io.BytesIO`
    ShardingLike = object  # another one is an error of ours, which names the remedy
