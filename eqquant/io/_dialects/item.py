"""One array of a checkpoint, which may be stored in several tensors."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._formats import Int2, Int3, Int4, Int5, Int6, Int8
from ..._formats.base import AbstractFormat
from ..._wrappers.permuted import PermutedArray
from .._assemble import structure
from .._files import Files
from .._load import to_jax
from .._stored import DTYPES, Stored


# The formats of integers of a number of bits.
INTEGERS = {8: Int8, 6: Int6, 5: Int5, 4: Int4, 3: Int3, 2: Int2}


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """An array of a checkpoint.

    - `shape`, `dtype`: the logical ones.
    - `format`: the format that it is read in, or `None` for an array that is not quantized.
    - `stored_as`: what the file calls it: a dtype, or the name of a layout.
    - `tensors`: those that hold it.
    - `problem`: why it cannot be read, if that is known.
    - `axes`: the quantized axes.
    - `permuted`: whether the last axis is stored in another order.
    - `told`: what `read` returns, without values, where the other fields do not say all of it.
    """

    shape: tuple[int, ...]
    dtype: str
    format: AbstractFormat | None
    stored_as: str
    tensors: tuple[Stored, ...]
    read: Callable[[], Any]
    problem: str | None = None
    axes: tuple[int, ...] = (-1,)
    permuted: bool = False
    told: Any = None

    @property
    def struct(self) -> Any:
        """The array that `read` returns, without values."""
        if self.told is not None:
            return self.told
        if self.format is not None:
            q = structure(self.format, self.axes, self.shape, jnp.dtype(self.dtype))
            permuted = lambda q: PermutedArray(q, order=jnp.zeros(self.shape[-1], jnp.uint32))
            return jax.eval_shape(permuted, q) if self.permuted else q
        known = self.problem is None and not self.dtype.startswith("key<")  # neither has a dtype of NumPy's
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype if known else "uint8"))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def plain(t: Stored) -> Item:
    """An array that is stored as it is."""
    dtype = DTYPES[t.dtype][1]
    problem = None if dtype is not None else f"no library agrees about the order of packed {t.dtype}"
    return Item(t.shape, dtype or t.dtype, None, t.dtype, (t,), lambda: to_jax(t.array()), problem)


def with_plain(found: Mapping[str, Item], used: Set[str], files: Files) -> dict[str, Item]:
    """Returns the weights that a dialect found, and every tensor that it did not use as it is."""
    return {**found, **{name: plain(t) for name, t in files.tensors.items() if name not in used}}


def companions(tensors: Iterable[str], *suffixes: str) -> dict[str, list[str]]:
    """Returns the names that end with any of the suffixes, by what stands before."""
    found: dict[str, list[str]] = {}
    for name in tensors:
        for suffix in suffixes:
            if name.endswith(suffix):
                found.setdefault(name.removesuffix(suffix), []).append(name)
                break
    return found


def format_of(t: Stored, cls: Callable[..., AbstractFormat], *args: Any) -> AbstractFormat:
    """Makes the format of a weight. Raises an error that names `t` if no format has these fields."""
    try:
        return cls(*args)
    except ValueError as e:
        t.fail(f"Got a layout for which eqquant has no format. {e}")


def expect(t: Stored, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Raises unless a tensor is of one of the dtypes, and of the shape."""
    if t.dtype not in dtypes or t.shape != shape:
        t.fail(f"It must be {' or '.join(dtypes)} of {list(shape)}. Got {t.dtype} of {list(t.shape)}.")


def act_order(t: Stored | None, length: int, groups: int) -> np.ndarray | None:
    """Returns the order in which the groups of inputs lie side by side, from the group of each input.

    `None` if they do as they are.
    """
    if t is None:
        return None
    expect(t, ("I32",), (length,))
    group_of, size = t.array(), -(-length // groups)
    expected = np.arange(length) // size
    if np.array_equal(group_of, expected) or (group_of == -1).all():  # compressed-tensors: not set
        return None
    order = np.argsort(group_of, kind="stable")
    if not np.array_equal(group_of[order], expected):
        t.fail(f"It must give each of {groups} groups {size} inputs. Got others.")
    return order
