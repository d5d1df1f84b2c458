"""GGUF files of llama.cpp: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c.

A row is a sequence of blocks, each of these fields. `d`, `m` and `dmin` are float16. `planes(bits, run)` are groups of
`run` bytes: code `i` of a byte belongs to the value that is `i * run` after that of code 0.

    Q4_0    32 values: d; planes(4, 16)
    Q4_1    32 values: d, m; planes(4, 16)
    Q5_0    32 values: d; 32 high bits, in order; planes(4, 16)
    Q5_1    32 values: d, m; 32 high bits, in order; planes(4, 16)
    Q8_0    32 values: d; 32 signed bytes
    Q2_K    256 values: 16 bytes, the scale (low bits) and the minimum of 16 values; planes(2, 32); d, dmin
    Q3_K    256 values: high bits, planes(1, 32); planes(2, 32); 16 scales of 6 bits in 12 bytes; d
    Q4_K    256 values: d, dmin; 8 scales and minima of 6 bits in 12 bytes; planes(4, 32)
    Q5_K    256 values: d, dmin; 8 scales and minima of 6 bits in 12 bytes; high bits, planes(1, 32); planes(4, 32)
    Q6_K    256 values: planes(4, 64); high bits, planes(2, 32); 16 scales, signed bytes; d
    IQ4_NL  32 values: d; planes(4, 16)
    IQ4_XS  256 values: d; 8 scales of 6 bits, as 16 high bits and 4 bytes; planes(4, 16)
    TQ1_0   256 values: 48 bytes of five trits, 4 bytes of four; d
    TQ2_0   256 values: planes(2, 32); d
    MXFP4   32 values: the exponent, E8M0; planes(4, 16) of e2m1
    NVFP4   64 values: 4 scales, unsigned e4m3; planes(4, 8) of e2m1

These are our formats of the same names; TQ1_0 is read as TQ2_0. Every other quantized type is an error that names it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..._formats import (
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TQ2_0,
)
from ..._formats.base import AbstractFormat
from .._bits import flip, join, take_field, unpack_low_first, unpack_planes
from .._files import Files
from .._gguf import TYPES
from .._stored import DTYPES, Stored
from .._transcode import from_codes, Nested
from .item import Item, plain


NAME = "gguf"


class _Layout(NamedTuple):
    """How to read blocks, the bytes along the last axis: one code per value, and a scale or several per block."""

    format: AbstractFormat
    codes: Callable[[np.ndarray], np.ndarray]
    scale: Callable[[np.ndarray], Any]
    offset: Callable[[np.ndarray], Any] | None = None


def recognizes(files: Files) -> bool:
    return files.container == "gguf"


def items(files: Files) -> dict[str, Item]:
    return {name: plain(t) if t.dtype in DTYPES else _quantized(t) for name, t in files.tensors.items()}


def _quantized(t: Stored) -> Item:
    layout = _LAYOUTS.get(t.dtype)
    if layout is None:
        problem = f"eqquant has no format for GGUF's {t.dtype}; it reads {', '.join(_LAYOUTS)}"
        return Item(t.shape, "float32", None, t.dtype, (t,), lambda: None, problem)
    return Item(t.shape, "float32", layout.format, t.dtype, (t,), lambda: _read(t, layout))


def _read(t: Stored, layout: _Layout) -> Any:
    if 0 in t.shape:
        t.fail(f"It must have values. Got the shape {list(t.shape)}.")
    _, block, nbytes = next(kind for kind in TYPES.values() if kind[0] == t.dtype)
    blocks = t.bytes().reshape(*t.shape[:-1], t.shape[-1] // block, nbytes)
    rows = blocks.reshape(-1, *blocks.shape[-2:])
    codes = lambda start, stop: layout.codes(rows[start:stop]).reshape(stop - start, t.shape[-1])
    scale = _of_rows(layout.scale(blocks))
    offset = None if layout.offset is None else _of_rows(layout.offset(blocks))
    if t.dtype == "MXFP4" and (scale == 255).any():
        t.fail("Got a scale that is not a number.")
    return from_codes(codes, scale, None, layout.format, t.shape, np.float32, t, offset=offset)


def _of_rows(of_blocks: Any) -> Any:
    """Joins what the blocks of a row have: `(*batch, blocks, n)` to `(*batch, blocks * n)`."""
    if isinstance(of_blocks, Nested):
        return Nested(*map(_of_rows, of_blocks))
    return of_blocks.reshape(*of_blocks.shape[:-2], -1)


def _float16(at: int, sign: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that reads a float16 of each block, or its negative."""
    read = lambda blocks: take_field(blocks, at, at + 2).view(np.float16)
    return read if sign > 0 else lambda blocks: -read(blocks)


def _nibbles(at: int, run: int = 16) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: unpack_planes(blocks[..., at:], 4, run)


def _q5(at: int) -> Callable[[np.ndarray], np.ndarray]:
    high = lambda blocks: unpack_low_first(take_field(blocks, at, at + 4), 1)
    return lambda blocks: join(unpack_planes(blocks[..., at + 4 :], 4, 16), high(blocks), 4)


def _q3_k_codes(blocks: np.ndarray) -> np.ndarray:
    return join(unpack_planes(blocks[..., 32:96], 2, 32), unpack_planes(blocks[..., :32], 1, 32), 2)


def _q3_k_scales(blocks: np.ndarray) -> np.ndarray:
    return join(unpack_planes(blocks[..., 96:104], 4, 8), unpack_planes(blocks[..., 104:108], 2, 4), 4)


def _eight(at: int, shift: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that reads the 8 scales of Q4_K and Q5_K, or the 8 minima: four whole, of the others parts."""

    def read(blocks: np.ndarray) -> np.ndarray:
        first, low = take_field(blocks, at, at + 4), take_field(blocks, 12, 16)
        halves = first & np.uint8(63), low >> np.uint8(shift) & np.uint8(15) | first >> np.uint8(2) & np.uint8(48)
        out = np.empty((*first.shape[:-1], 2), "V4")
        for n, half in enumerate(halves):
            out[..., n] = half.view("V4")[..., 0]
        return out.view(np.uint8)

    return read


def _q5_k_codes(blocks: np.ndarray) -> np.ndarray:
    return join(unpack_planes(blocks[..., 48:], 4, 32), unpack_planes(blocks[..., 16:48], 1, 32), 4)


def _q6_k_codes(blocks: np.ndarray) -> np.ndarray:
    return join(unpack_planes(blocks[..., :128], 4, 64), unpack_planes(blocks[..., 128:192], 2, 32), 4)


def _iq4_xs_scales(blocks: np.ndarray) -> np.ndarray:
    high, low = take_field(blocks, 2, 4), take_field(blocks, 4, 8)
    return join(unpack_low_first(low, 4), unpack_low_first(high, 2), 4)


def _trits(blocks: np.ndarray) -> np.ndarray:
    """Returns the codes of TQ1_0. A byte is a fraction of 256, whose digits to base three are the codes."""
    parts = []
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        shifted = blocks[..., None, start:stop] * (3 ** np.arange(digits, dtype=np.uint8))[:, None]  # modulo 256
        parts.append((shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*blocks.shape[:-1], -1))
    return np.concatenate(parts, axis=-1)


def _nvfp4_scales(blocks: np.ndarray) -> Nested:
    codes = blocks[..., :4] & 127
    # ggml takes what is not a number for zero. It stores the scale of a tensor elsewhere, if there is one.
    return Nested(np.where(codes == 127, np.uint8(0), codes), np.ones((*blocks.shape[:-2], 1, 1), np.float32))


_LAYOUTS = {
    "Q4_0": _Layout(Q4_0(), _nibbles(2), _float16(0)),
    "Q4_1": _Layout(Q4_1(), _nibbles(4), _float16(0), _float16(2)),
    "Q5_0": _Layout(Q5_0(), _q5(2), _float16(0)),
    "Q5_1": _Layout(Q5_1(), _q5(4), _float16(0), _float16(2)),
    "Q8_0": _Layout(Q8_0(), lambda b: flip(take_field(b, 2, 34)), _float16(0)),
    "Q2_K": _Layout(
        Q2_K(),
        lambda b: unpack_planes(b[..., 16:80], 2, 32),
        lambda b: Nested(b[..., :16] & 15, _float16(80)(b)),
        lambda b: Nested(b[..., :16] >> 4, _float16(82, -1)(b)),
    ),
    "Q3_K": _Layout(Q3_K(), _q3_k_codes, lambda b: Nested(_q3_k_scales(b), _float16(108)(b))),
    "Q4_K": _Layout(
        Q4_K(),
        _nibbles(16, 32),
        lambda b: Nested(_eight(4, 0)(b), _float16(0)(b)),
        lambda b: Nested(_eight(8, 4)(b), _float16(2, -1)(b)),
    ),
    "Q5_K": _Layout(
        Q5_K(),
        _q5_k_codes,
        lambda b: Nested(_eight(4, 0)(b), _float16(0)(b)),
        lambda b: Nested(_eight(8, 4)(b), _float16(2, -1)(b)),
    ),
    "Q6_K": _Layout(Q6_K(), _q6_k_codes, lambda b: Nested(b[..., 192:208] ^ 128, _float16(208)(b))),
    "IQ4_NL": _Layout(IQ4_NL(), _nibbles(2), _float16(0)),
    "IQ4_XS": _Layout(IQ4_XS(), _nibbles(8), lambda b: Nested(_iq4_xs_scales(b), _float16(0)(b))),
    "TQ1_0": _Layout(TQ2_0(), _trits, _float16(52)),
    "TQ2_0": _Layout(TQ2_0(), lambda b: unpack_planes(b[..., :64], 2, 32), _float16(64)),
    "MXFP4": _Layout(MXFP4(), _nibbles(1), lambda b: b[..., :1]),
    "NVFP4": _Layout(NVFP4(), _nibbles(4, 8), _nvfp4_scales),
}

# The format of each quantized type. There is none of ours for TQ1_0 alone.
FORMATS = {name: layout.format for name, layout in _LAYOUTS.items()}
