"""The layout of one array in a file of another library."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import jax
import numpy as np
from jax.typing import DTypeLike

from ..._array.array import QuantizedArray
from ..._array.codes import row_length
from ..._errors import Message
from ..._formats.base import AbstractVectorFormat
from ..._numerics.packing import unpack
from .._entry import AnyArray
from .._tensors import NAME_OF, NewTensor


# The number of codes to take at a time.
_CHUNK = 2**20

# The settings of an array in a configuration, as JSON.
Scheme = Mapping[str, object]


class WrittenArray(NamedTuple):
    """The tensors of an array, and its settings in a configuration, if any."""

    tensors: tuple[NewTensor, ...]
    scheme: Scheme | None = None


def dense(name: str, x: AnyArray, dtypes: Mapping[str, str] = NAME_OF) -> WrittenArray:
    """Returns the layout of a dense array.

    `dtypes` maps dtypes to their names in the file.
    """
    dtype = np.dtype(x.dtype).name
    if dtype not in dtypes:
        raise TypeError(f"{name!r} must be of a dtype that the file can hold: {', '.join(dtypes)}. Got {dtype}.")
    little = lambda a: a.astype(a.dtype.newbyteorder("="), copy=False)
    return WrittenArray((NewTensor(name, dtypes[dtype], tuple(x.shape), lambda: little(np.asarray(x))),))


def layers_of_weights(names: Sequence[str]) -> list[str]:
    """Returns the layers of those arrays that are weights."""
    return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]


def common_scheme(schemes: Mapping[str, Scheme], what: str, *, free: Collection[str] = ()) -> Scheme:
    """Returns the settings of all weights. Raises unless they agree, apart from `free` ones."""
    bound = lambda scheme: {key: value for key, value in scheme.items() if key not in free}
    (first, scheme), *others = schemes.items()
    for name, other in others:
        if bound(other) != bound(scheme):
            raise ValueError(f"{what} everywhere. Got {scheme} for {first!r}, {other} for {name!r}.")
    return scheme


def as_tensor(name: str, x: np.ndarray) -> NewTensor:
    """A tensor of values that are computed already."""
    return NewTensor(name, NAME_OF[x.dtype.name], x.shape, lambda: x)


def refuse(name: str, q: QuantizedArray, why: str) -> NoReturn:
    """Raises a `ValueError` about an array that the file cannot hold."""
    axis = "" if q.axis == -1 else f", along axis {q.axis}"
    raise ValueError(
        Message(
            f"{name!r} must be an array that the file can hold exactly: {why}. Got {q.dtype}{list(q.shape)} in "
            f"{q.format!r}{axis}.",
            "does not fit",
        )
    )


def finite_scales(name: str, q: QuantizedArray) -> np.ndarray:
    """Returns the scales, of `(*batch, blocks)`. Raises unless they are finite."""
    scale = np.asarray(q.scale)
    if not np.isfinite(scale).all():
        refuse(name, q, "all its scales must be finite")
    return scale


def narrow(scale: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Returns scales in the dtype of the weight, which readers expect, if that is exact."""
    with np.errstate(over="ignore"):
        cast = scale.astype(dtype)
    return cast if np.array_equal(cast.astype(np.float32), scale) else scale


def unpack_rows(q: QuantizedArray) -> np.ndarray:
    """Returns all codes: `uint8` of `(rows, length)`.

    Rows are all axes but the quantized one, merged, as in memory.
    """
    return next(row_parts(q, at_once=True))[1]


def row_parts(q: QuantizedArray, at_once: bool = False) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields the codes of all rows, a few rows at a time.

    Codes of a vector format stay packed.
    """
    packed = np.asarray(q.codes).reshape(-1, q.codes.shape[-1])
    step = len(packed) if at_once else max(_CHUNK // max(row_length(q), 1), 1)
    for start in range(0, len(packed), step):
        rows = slice(start, min(start + step, len(packed)))
        as_stored = q.format.bits == 8 or isinstance(q.format, AbstractVectorFormat)
        yield rows, packed[rows] if as_stored else np.asarray(_unpack(packed[rows], q.format.bits, row_length(q)))


def pack_rows(q: QuantizedArray, pack: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Returns the codes of all rows, packed by `pack` a few rows at a time.

    There is one entry for each row.
    """
    out = np.empty(0)
    for rows, codes in row_parts(q):
        part = pack(codes)
        if rows.start == 0:
            out = np.empty((q.codes.size // q.codes.shape[-1], *part.shape[1:]), part.dtype)
        out[rows] = part
    return out


_unpack = jax.jit(unpack, static_argnums=(1, 2))
