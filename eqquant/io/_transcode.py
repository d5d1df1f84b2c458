"""From the codes of other libraries to our own packing, a few rows at a time, so that only packed codes are whole."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._array.array import QuantizedArray
from .._formats.base import AbstractFormat
from .._numerics.packing import packed_length
from ._assemble import parts_of, structure
from ._bits import pack_codes
from ._memory import aligned_empty, copied, in_threads, own
from ._stored import Stored


# The number of codes to take at a time: few enough for a cache, many enough for Python, which runs in one thread, not
# to matter.
_CHUNK = 2**20


class Nested(NamedTuple):
    """Scales or offsets that are quantized: a code for each block, and the scales of these, all with the batch axes."""

    codes: np.ndarray
    scale: np.ndarray


def from_codes(
    codes: Callable[[int, int], np.ndarray],
    scale: np.ndarray | Nested,
    zero_point: np.ndarray | None,
    format: AbstractFormat,
    shape: tuple[int, ...],
    dtype: Any,
    source: Stored,
    axes: tuple[int, ...] = (-1,),
    offset: np.ndarray | Nested | None = None,
    least_rows: int = 1,
    pack: Callable[[np.ndarray, int, np.ndarray], None] = pack_codes,
) -> QuantizedArray:
    """Makes a quantized array from unpacked codes.

    **Arguments:**

    - `codes`: a function that returns the codes of some rows, from one to another, as `uint8` of `(rows, length)`.
        Rows are all batch axes, merged.
    - `scale`, `zero_point`, `offset`: one for each block, of `(*batch, blocks)`; scale and offset have the dtype of the
        format's scales, or are `Nested`.
    - `shape`, `dtype`, `axes`: those of the result; the axes are the last ones.
    - `source`: the tensor that an error names.
    - `least_rows`: rows are taken in multiples of this, where fewer do not lie side by side in the file.
    - `pack`: packs what `codes` returns. Another one than `pack_codes` may take codes in another order.
    """
    if any(shape[a] == 0 for a in axes):
        source.fail(f"It must have values along the quantized axis. Got the shape {list(shape)}.")
    like = structure(format, axes, shape, jnp.dtype(dtype))
    parts = parts_of(like)
    packed = aligned_empty(parts["codes"].shape, np.uint8)
    rows = packed.reshape(-1, packed.shape[-1])
    step = -(-_CHUNK // (like._length * least_rows)) * least_rows

    def transcode(start: int) -> None:
        stop = min(start + step, len(rows))
        pack(codes(start, stop), format.bits, rows[start:stop])

    in_threads(transcode, range(0, len(rows), step))
    given = {"codes": packed, "zero_point_bits": _packed_zero_points(zero_point, format, source)}
    for name, stored in (("scale", scale), ("offset", offset)):
        given |= {} if stored is None else _stored_floats(f"{name}_bits", name, stored, format, source)
    # Scales may be views of the file, which another program may change.
    ours = lambda name: own(given[name] if name == "codes" else copied(given[name]))
    leaves = [ours(name).reshape(part.shape) for name, part in parts.items()]
    return jtu.tree_unflatten(jtu.tree_structure(like), leaves)


def _packed_zero_points(zero_point: np.ndarray | None, format: AbstractFormat, source: Stored) -> np.ndarray | None:
    if zero_point is None:
        return None
    if zero_point.size and (highest := int(zero_point.max())) >= 2**format.bits:
        source.fail(f"Its zero points must be below {2**format.bits}. Got {highest}.")
    packed = np.empty((*zero_point.shape[:-1], packed_length(zero_point.shape[-1], format.bits)), np.uint8)
    pack_codes(zero_point, format.bits, packed)
    return packed


def _stored_floats(
    part: str, name: str, stored: np.ndarray | Nested, format: AbstractFormat, source: Stored
) -> dict[str, Any]:
    """Returns scales or offsets as the leaves of an array, by name."""
    if isinstance(stored, Nested):
        if format.scale_format is None:
            raise TypeError(f"Only a format that quantizes its scales has nested ones. Got {format!r}.")
        bits = format.scale_format.bits
        packed = np.empty((*stored.codes.shape[:-1], packed_length(stored.codes.shape[-1], bits)), np.uint8)
        pack_codes(stored.codes, bits, packed)
        return {f"{part}.codes": packed} | _stored_floats(
            f"{part}.scale_bits", name, stored.scale, format.scale_format, source
        )
    if not np.isfinite(stored).all():
        source.fail(f"Got {'an' if name == 'offset' else 'a'} {name} that is not finite.")
    return {part: np.ascontiguousarray(stored).view(f"u{stored.dtype.itemsize}")}
