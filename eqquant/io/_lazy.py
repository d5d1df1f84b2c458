"""Lazy arrays, read when asked for: trees and checkpoints need not fit into memory."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu

from ._entry import AnyArray


K = TypeVar("K")
V = TypeVar("V")


@dataclasses.dataclass(frozen=True, eq=False)
class LazyArray:
    """An array that is read, or made, when it is asked for.

    - `struct`: its shape and dtype: a `jax.ShapeDtypeStruct`, or a `QuantizedArray` of them.
    - `problem`: why it cannot be read, if that is known.
    """

    struct: AnyArray | jax.ShapeDtypeStruct
    make: Callable[[], AnyArray]
    problem: str | None = None

    def read(self) -> AnyArray:
        """Makes the array. Raises a `TypeError` if it differs from `struct`."""
        made = self.make()
        if _shapes(made) != _shapes(self.struct):
            raise TypeError(f"A lazy leaf must have the declared shape and dtype, {self.struct!r}. Got {made!r}.")
        return made


def _shapes(x: AnyArray | jax.ShapeDtypeStruct) -> tuple[list[tuple[tuple[int, ...], str]], object]:
    leaves, treedef = jtu.tree_flatten(x)
    return [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves], treedef


class LazyMapping(Mapping[str, Any]):
    """Arrays by name, each of which is read whenever it is asked for."""

    def __init__(self, readers: Mapping[str, Callable[[], AnyArray]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> Any:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def keep_latest(make: Callable[[K], V]) -> Callable[[K], V]:
    """Returns a function that makes a value for each key, and keeps the latest alone."""
    kept: dict[K, V] = {}

    def get(key: K) -> V:
        if key not in kept:
            kept.clear()  # freed before the next one is made
            kept[key] = make(key)
        return kept[key]

    return get
