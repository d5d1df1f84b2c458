"""Small floats in small blocks, which several libraries lay out alike."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..._formats import MXFP4, MXFP8, NVFP4
from .._bits import unpack_low_first
from .._stored import Stored
from .._transcode import from_codes, Nested
from .item import expect, Item


def mxfp4(
    t: Stored,
    scale: Stored,
    shape: tuple[int, ...],
    tensors: tuple[Stored, ...],
    codes: Callable[[int, int], np.ndarray],
    finish: Callable[[Any], Any] = lambda q: q,
    exponents: Callable[[], np.ndarray] | None = None,
    dtype: Any = "bfloat16",
) -> Item:
    """An array of OCP MXFP4. `exponents` reads the bytes of its scales, if they are not as they are in `scale`."""

    def read() -> Any:
        found = scale.array() if exponents is None else exponents()
        if (found == 255).any():
            scale.fail("Got a scale that is not a number.")
        return finish(from_codes(codes, found, None, MXFP4(), shape, dtype, t))

    return Item(shape, str(dtype), MXFP4(), "mxfp4", tensors, read)


def mxfp8(
    t: Stored, scale: Stored, tensors: tuple[Stored, ...], dtype: Any = "bfloat16", blocked: bool = False
) -> Item:
    """An array of OCP MXFP8, `(out, in)`, with E8M0 scales `(out, in / 32)`."""
    out, length = t.shape
    format = MXFP8("e4m3" if t.dtype == "F8_E4M3" else "e5m2")
    check_scales(scale, ("U8", "F8_E8M0"), (out, -(-length // 32)), blocked)

    def read() -> Any:
        exponents = scales_in_order(scale, (out, -(-length // 32)), blocked)
        if (exponents == 255).any():
            scale.fail("Got a scale that is not a number.")
        codes = lambda start, stop: t.bytes().reshape(t.shape)[start:stop]
        return from_codes(codes, exponents, None, format, t.shape, dtype, t)

    return Item(t.shape, str(dtype), format, "mxfp8", tensors, read)


def nvfp4(
    t: Stored,
    scale: Stored,
    outer: Stored | None,
    tensors: tuple[Stored, ...],
    divides: bool,
    dtype: Any = "bfloat16",
    blocked: bool = False,
) -> Item:
    """An array of NVFP4: codes `(out, in / 2)`, the first in the low bits; e4m3 scales `(out, in / 16)`.

    The outer scale, one for the tensor, divides or multiplies them.
    """
    out, length = t.shape[0], t.nbytes * 2 // max(t.shape[0], 1)
    check_scales(scale, ("F8_E4M3",), (out, -(-length // 16)), blocked)
    if outer is not None and (outer.dtype != "F32" or outer.nbytes != 4):
        outer.fail(f"It must be one F32 number. Got {outer.dtype} of {list(outer.shape)}.")

    def read() -> Any:
        one = np.float32(1) if outer is None else outer.array().reshape(-1)[0]
        if not np.isfinite(one) or (divides and one == 0):
            (outer or scale).fail(f"Got {one} as the scale of the tensor.")
        inner = scales_in_order(scale, (out, -(-length // 16)), blocked)
        if ((inner & 127) == 127).any():
            scale.fail("Got a scale that is not a number.")
        with np.errstate(over="ignore"):
            rows = np.full((out, 1), 1 / one if divides else one, np.float32)
        codes = lambda start, stop: unpack_low_first(t.bytes().reshape(out, -1)[start:stop], 4)
        return from_codes(codes, Nested(inner, rows), None, NVFP4(), (out, length), dtype, t)

    return Item((out, length), str(dtype), NVFP4(), "nvfp4", tensors, read)


def check_scales(t: Stored, dtypes: tuple[str, ...], shape: tuple[int, ...], blocked: bool) -> None:
    """Raises unless a tensor holds scales of this shape, or whole tiles of 128 x 4 of them."""
    if not blocked:
        expect(t, dtypes, shape)
    elif t.dtype not in dtypes or t.nbytes != -(-shape[0] // 128) * -(-shape[1] // 4) * 512:
        t.fail(f"It must hold tiles of 128 x 4 of {list(shape)} scales. Got {t.dtype} of {list(t.shape)}.")


def scales_in_order(t: Stored, shape: tuple[int, int], blocked: bool) -> np.ndarray:
    """Returns the bytes of scales row by row.

    Tensor cores take them in tiles of 128 x 4, each as 32 times 16 bytes: row `32 i + j` and column `k` of a tile are
    at `16 j + 4 i + k`. https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout
    """
    if not blocked:
        return t.bytes().reshape(shape)
    rows, columns = -(-shape[0] // 128), -(-shape[1] // 4)
    tiles = t.bytes().reshape(rows, columns, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles.reshape(rows * 128, columns * 4)[: shape[0], : shape[1]])
