"""What one array becomes in a file of another library."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from ..._array.array import QuantizedArray
from ..._numerics.packing import unpack
from .._safetensors import ToWrite
from .._stored import NAME_OF


# The number of codes to take at a time.
_CHUNK = 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The tensors of an array, and what a configuration says of it: a mapping that JSON can hold, or `None`."""

    tensors: tuple[ToWrite, ...]
    scheme: Mapping[str, Any] | None = None


def dense(name: str, x: Any, dtypes: Mapping[str, str] = NAME_OF) -> Layout:
    """The layout of an array that is not quantized. `dtypes` maps dtypes to their names in the file."""
    dtype = np.dtype(x.dtype).name
    if dtype not in dtypes:
        raise TypeError(f"{name!r} must be of a dtype that the file can hold: {', '.join(dtypes)}. Got {dtype}.")
    little = lambda a: a.astype(a.dtype.newbyteorder("="), copy=False)
    return Layout((ToWrite(name, dtypes[dtype], tuple(x.shape), lambda: little(np.asarray(x))),))


def refuse(name: str, q: QuantizedArray, why: str) -> NoReturn:
    """Raises a `ValueError` about an array that the file cannot hold."""
    axis = "" if q.axis == -1 else f", along axis {q.axis}"
    raise ValueError(
        f"{name!r} must be an array that the file can hold exactly: {why}. Got {q.dtype}{list(q.shape)} in "
        f"{q.format!r}{axis}. Quantize the float array to a format that fits, or write `q.dequantize()`."
    )


def scales_of(name: str, q: QuantizedArray) -> np.ndarray:
    """Returns the scales, of `(*batch, blocks)`. Raises unless they are finite."""
    scale = np.asarray(q.scale)
    if not np.isfinite(scale).all():
        refuse(name, q, "all its scales must be finite")
    return scale


def narrow(scale: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns scales in the dtype of the weight, which readers expect, if that holds them exactly."""
    with np.errstate(over="ignore"):
        cast = scale.astype(dtype)
    return cast if np.array_equal(cast.astype(np.float32), scale) else scale


def rows_of(q: QuantizedArray) -> Callable[[int, int], np.ndarray]:
    """Returns a function that returns the codes of some rows, from one to another: `uint8` of `(rows, length)`.

    Rows are all axes but the quantized one, merged, in the order of memory.
    """
    packed = np.asarray(q.codes).reshape(-1, q.codes.shape[-1])
    return lambda start, stop: np.asarray(_unpack(packed[start:stop], q.format.bits, q._length))


def each_part(q: QuantizedArray, of: Callable[[np.ndarray], np.ndarray], out: np.ndarray, multiple: int = 1) -> None:
    """Fills `out`, one entry for each row, with what `of` makes of the codes of some rows, a few rows at a time.

    `multiple`: the number of rows to take at a time is a multiple of it.
    """
    rows = rows_of(q)
    step = max(_CHUNK // max(q._length, 1) // multiple, 1) * multiple
    for start in range(0, len(out), step):
        stop = min(start + step, len(out))
        out[start:stop] = of(rows(start, stop))


def pack_low_first(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes along the last axis, of whole bytes, without gaps, the first code of a byte in its low bits."""
    if bits == 8:
        return codes
    if 8 % bits:
        each_bit = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
        return np.packbits(each_bit.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    grouped = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    return np.bitwise_or.reduce(grouped << shifts, axis=-1)


def pad_last(x: np.ndarray, multiple: int) -> np.ndarray:
    """Pads the last axis with zeros to a multiple."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % multiple)])


def _unpack(packed: np.ndarray, bits: int, length: int) -> Any:
    return packed if bits == 8 else _unpack_jitted(packed, bits, length)


_unpack_jitted = jax.jit(unpack, static_argnums=(1, 2))
