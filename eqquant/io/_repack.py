"""Repacks the codes of other libraries, a few rows at a time.

So only packed codes are whole in memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._array.array import QuantizedArray
from .._array.codes import row_length
from .._formats.base import AbstractFormat
from .._numerics.packing import packed_length
from .._wrappers.permuted import PermutedArray, wrap_permuted
from ._bits import pack_codes
from ._entry import Entry, named_parts
from ._memory import aligned_empty, copy_in_parallel, in_threads
from ._tensors import StoredTensor


# The number of codes to take at a time: few enough for a cache, many enough for Python, which runs in one thread, not
# to matter.
_CHUNK = 2**20


class Nested(NamedTuple):
    """Scales or offsets that are quantized: a code for each block, and their own scales.

    All have the batch axes.
    """

    codes: np.ndarray
    scale: np.ndarray


class Unpacked(NamedTuple):
    """The parts of a quantized weight, as another library stores them.

    - `codes`: a function that returns the codes of some rows, from one to another, as `uint8` of `(rows, length)`. Rows
        are all batch axes, merged.
    - `scale`, `zero_point`, `offset`: one for each block, of `(*batch, blocks)`; scale and offset have the dtype of the
        format's scales, or are `Nested`.
    - `order`: the order in which the last axis is stored, or `None` for the order of the weight.
    - `least_rows`: rows are taken in multiples of this, where fewer do not lie side by side in the file.
    - `pack`: packs the result of `codes`. A function other than `pack_codes` may take codes in another order.
    """

    codes: Callable[[int, int], np.ndarray]
    scale: np.ndarray | Nested
    zero_point: np.ndarray | None = None
    offset: np.ndarray | Nested | None = None
    order: np.ndarray | None = None
    least_rows: int = 1
    pack: Callable[[np.ndarray, int, np.ndarray], None] = pack_codes


def act_order(t: StoredTensor | None, length: int, groups: int) -> np.ndarray | None:
    """Returns the permutation that sorts inputs by group, from the group of each input.

    `None` if they are in order already.
    """
    if t is None:
        return None
    t.expect("I32", (length,))
    group, size = t.array(), -(-length // groups)
    expected = np.arange(length) // size
    if np.array_equal(group, expected) or (group == -1).all():  # compressed-tensors: not set
        return None
    order = np.argsort(group, kind="stable")
    if not np.array_equal(group[order], expected):
        t.fail(f"It must give each of {groups} groups {size} inputs. Got others.")
    return order


def repack(parts: Unpacked, entry: Entry, source: StoredTensor) -> QuantizedArray | PermutedArray:
    """Makes the quantized array that `entry` describes. Errors name the tensor `source`."""
    if any(entry.shape[a] == 0 for a in entry.axes):
        source.fail(f"It must have values along the quantized axis. Got the shape {list(entry.shape)}.")
    like = entry.packed_struct()
    structs, format = named_parts(like), like.format
    packed = aligned_empty(structs["codes"].shape, np.uint8)
    rows = packed.reshape(-1, packed.shape[-1])
    step = -(-_CHUNK // (row_length(like) * parts.least_rows)) * parts.least_rows

    def pack(start: int) -> None:
        stop = min(start + step, len(rows))
        parts.pack(parts.codes(start, stop), format.bits, rows[start:stop])

    in_threads(pack, range(0, len(rows), step))
    given = {"codes": packed}
    if parts.zero_point is not None:
        highest = int(parts.zero_point.max(initial=0))
        if highest >= 2**format.bits:
            source.fail(f"Its zero points must be below {2**format.bits}. Got {highest}.")
        given["zero_point_bits"] = _pack(parts.zero_point, format.bits)
    for name, stored in (("scale", parts.scale), ("offset", parts.offset)):
        if stored is not None:
            given |= _stored_floats(f"{name}_bits", stored, format, source)
    # Scales may be views of the file, which another program may change.
    ours = lambda name: jax.device_put(given[name] if name == "codes" else copy_in_parallel(given[name]))
    leaves = [ours(name).reshape(struct.shape) for name, struct in structs.items()]
    return wrap_permuted(jtu.tree_unflatten(jtu.tree_structure(like), leaves), parts.order)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    packed = np.empty((*codes.shape[:-1], packed_length(codes.shape[-1], bits)), np.uint8)
    pack_codes(codes, bits, packed)
    return packed


def _stored_floats(
    part: str, stored: np.ndarray | Nested, format: AbstractFormat, source: StoredTensor
) -> dict[str, np.ndarray]:
    """Returns scales or offsets as the leaves of an array, by name."""
    if isinstance(stored, Nested):
        if format.scale_format is None:
            raise TypeError(f"Only a format that quantizes its scales has nested ones. Got {format!r}.")
        codes = {f"{part}.codes": _pack(stored.codes, format.scale_format.bits)}
        return codes | _stored_floats(f"{part}.scale_bits", stored.scale, format.scale_format, source)
    if not np.isfinite(stored).all():
        wrong = "an offset" if part.startswith("offset") else "a scale"
        source.fail(f"Got {wrong} that is not finite. Quantize it again from floats.")
    return {part: np.ascontiguousarray(stored).view(f"u{stored.dtype.itemsize}")}
