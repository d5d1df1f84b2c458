"""Leaves whose values are made when they are written, so that a tree need not fit into memory."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.tree_util as jtu
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """A leaf of a tree that is saved: what it is, and a function that makes it.

    - `struct`: a `jax.ShapeDtypeStruct`, or a `QuantizedArray` of them.
    """

    struct: Any
    make: Callable[[], Any]


class Latest:
    """Makes leaves, and keeps only the latest: its tensors are written one after another."""

    def __init__(self) -> None:
        self._of: Deferred | None = None
        self._parts: Mapping[str, Any] = {}

    def part(self, leaf: Deferred, name: str, parts_of: Callable[[Any], Mapping[str, Any]]) -> Any:
        """Returns a part of a leaf. Raises a `TypeError` if `make` did not make what `struct` says."""
        if self._of is not leaf:
            self._of, self._parts = None, {}  # freed before the next one is made
            made = leaf.make()
            if _shapes(made) != _shapes(leaf.struct):
                raise TypeError(f"A deferred leaf must be what it was said to be, {leaf.struct!r}. Got {made!r}.")
            self._of, self._parts = leaf, parts_of(made)
        return self._parts[name]


def _shapes(x: Any) -> Any:
    leaves, treedef = jtu.tree_flatten(x)
    return [(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves], treedef
