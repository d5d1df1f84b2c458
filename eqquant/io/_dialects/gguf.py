"""GGUF files of llama.cpp: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c.

    Q4_0    32 values: the scale d, float16; 16 bytes, byte j holds the codes j (low bits) and j + 16
    Q8_0    32 values: the scale d, float16; 32 signed bytes
    MXFP4   32 values: the exponent, E8M0; 16 bytes as in Q4_0, with codes of e2m1

These are our formats of the same names. Every other quantized type is an error that names it.
"""

import numpy as np

from ..._formats import MXFP4, Q4_0, Q8_0
from .._files import Files
from .._gguf import TYPES
from .._stored import DTYPES, Stored
from .._transcode import from_codes
from .item import Item, plain


NAME = "gguf"

_FORMATS = {"Q4_0": Q4_0(), "Q8_0": Q8_0(), "MXFP4": MXFP4()}
_BYTES = {name: nbytes for name, _, nbytes in TYPES.values()}


def recognizes(files: Files) -> bool:
    return files.container == "gguf"


def items(files: Files) -> dict[str, Item]:
    return {name: plain(t) if t.dtype in DTYPES else _quantized(t) for name, t in files.tensors.items()}


def _quantized(t: Stored) -> Item:
    format = _FORMATS.get(t.dtype)
    problem = f"eqquant has no format for GGUF's {t.dtype}; it reads {', '.join(_FORMATS)}" if format is None else None
    return Item(t.shape, "float32", format, t.dtype, (t,), lambda: _read(t), problem)


def _read(t: Stored):
    format, length = _FORMATS[t.dtype], t.shape[-1]
    blocks = t.bytes().reshape(-1, length // 32, _BYTES[t.dtype])
    head = 1 if t.dtype == "MXFP4" else 2
    scale = np.ascontiguousarray(blocks[..., :head]).reshape(*t.shape[:-1], length // 32, head)
    if t.dtype == "MXFP4":
        scale = scale[..., 0]
        if (scale == 255).any():
            t.fail("Got a scale that is not a number.")
    else:
        scale = scale.view(np.float16)[..., 0]

    def codes(start: int, stop: int) -> np.ndarray:
        body = blocks[start:stop, :, head:]
        if t.dtype == "Q8_0":
            return (body ^ 128).reshape(stop - start, length)  # signed bytes plus 128
        halves = np.stack([body & 15, body >> 4], axis=-2)
        return halves.reshape(stop - start, length)

    return from_codes(codes, scale, None, format, t.shape, np.float32, t)
