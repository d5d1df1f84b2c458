"""From the codes of other libraries to our own packing, a few rows at a time, so that only packed codes are whole."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._array.array import QuantizedArray
from .._formats.base import AbstractFormat
from .._numerics.packing import pack
from ._assemble import parts_of, structure
from ._stored import Stored


# The number of codes to take at a time.
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
) -> QuantizedArray:
    """Makes a quantized array from unpacked codes.

    **Arguments:**

    - `codes`: a function that returns the codes of some rows, from one to another, as `uint8` of `(rows, length)`.
        Rows are all batch axes, merged.
    - `scale`, `zero_point`, `offset`: one for each block, of `(*batch, blocks)`; scale and offset have the dtype of the
        format's scales, or are `Nested`.
    - `shape`, `dtype`, `axes`: those of the result; the axes are the last ones.
    - `source`: the tensor that an error names.
    """
    if any(shape[a] == 0 for a in axes):
        source.fail(f"It must have values along the quantized axis. Got the shape {list(shape)}.")
    like = structure(format, axes, shape, jnp.dtype(dtype))
    parts = parts_of(like)
    packed = np.empty(parts["codes"].shape, np.uint8).reshape(-1, parts["codes"].shape[-1])
    step = max(_CHUNK // max(like._length, 1), 1)
    for start in range(0, len(packed), step):
        stop = min(start + step, len(packed))
        packed[start:stop] = np.asarray(_pack(codes(start, stop), format.bits))
    given = {"codes": packed, "zero_point": zero_point}
    for name, stored in (("scale", scale), ("offset", offset)):
        given |= {} if stored is None else _stored_floats(f"{name}_bits", name, stored, format, source)
    leaves = [jnp.array(given[name]).reshape(part.shape) for name, part in parts.items()]
    return jtu.tree_unflatten(jtu.tree_structure(like), leaves)


def _stored_floats(
    part: str, name: str, stored: np.ndarray | Nested, format: AbstractFormat, source: Stored
) -> dict[str, Any]:
    """Returns scales or offsets as the leaves of an array, by name."""
    if isinstance(stored, Nested):
        if format.scale_format is None:
            raise TypeError(f"Only a format that quantizes its scales has nested ones. Got {format!r}.")
        codes = {f"{part}.codes": _pack(np.ascontiguousarray(stored.codes), format.scale_format.bits)}
        return codes | _stored_floats(f"{part}.scale_bits", name, stored.scale, format.scale_format, source)
    if not np.isfinite(stored.astype(np.float32)).all():
        source.fail(f"Got {'an' if name == 'offset' else 'a'} {name} that is not finite.")
    return {part: np.ascontiguousarray(stored).view(f"u{stored.dtype.itemsize}")}


def unpack_low_first(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks bytes along the last axis, where the first code is in the low bits of the first byte.

    Codes have no gaps: those of 3, 5, 6 and 7 bits lie across bytes, and eight of them fill as many bytes.
    Little-endian words are read so too, viewed as bytes.
    """
    if bits == 8:
        return packed
    if 8 % bits:
        return _unpack_straddling(packed, bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def _unpack_straddling(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks codes that straddle bytes: 8 codes in `bits` bytes."""
    *batch, length = packed.shape
    whole = np.pad(packed, [(0, 0)] * len(batch) + [(0, -length % bits)]).reshape(*batch, -1, bits)
    codes = np.empty((*whole.shape[:-1], 8), np.uint8)
    for n in range(8):
        byte, shift = divmod(n * bits, 8)
        code = whole[..., byte] >> shift
        if shift + bits > 8:
            code |= whole[..., byte + 1] << (8 - shift)
        codes[..., n] = code & (2**bits - 1)
    return codes.reshape(*batch, -1)[..., : length * 8 // bits]


def _pack(codes: np.ndarray, bits: int) -> Any:
    return codes if bits == 8 else _pack_jitted(codes, bits)


@ft.partial(jax.jit, static_argnums=1)
def _pack_jitted(codes: Any, bits: int) -> Any:
    return pack(codes, bits)
