"""Weights of compressed-tensors (vLLM, llm-compressor): https://github.com/vllm-project/compressed-tensors.

    pack-quantized         P_packed int32 (out, ceil(in * bits / 32)): codes plus 2**(bits - 1), the first in the low
                           bits; P_scale (out, groups); P_shape int64 (2,); optionally P_zero_point int32, packed
                           along out: (ceil(out * bits / 32), groups)
    mxfp4-pack-quantized   P_packed uint8 (out, in / 2), the first code in the low bits; P_scale uint8, E8M0
    int-quantized          P int8, P_scale (out, groups) or one for all, optionally P_zero_point int8
    float-quantized        P float8_e4m3, P_scale as before, or one for each 128 x 128 values
    Hugging Face's fp8     the same with the name P_scale_inv, which values are multiplied by too

P is such as `layers.0.weight`. A scale of a block in two dimensions is stored once for each row. A weight has the
dtype of its scales.
"""

import math
from collections.abc import Callable

import numpy as np

from ..._formats import FP8, Int8
from ..._formats.base import AbstractFormat
from ..._numerics.blocks import BlockSize
from .._files import Files
from .._stored import DTYPES, Stored
from .._transcode import from_codes, unpack_low_first
from .item import format_of, INTEGERS, Item, with_plain
from .microscaling import mxfp4


NAME = "compressed-tensors"

_COMPANIONS = ("_packed", "_scale", "_scale_inv", "_shape", "_zero_point", "_g_idx", "_global_scale")
_FLOATS = ("F32", "F16", "BF16")


def recognizes(files: Files) -> bool:
    return any(name.endswith(("weight_packed", "weight_scale", "weight_scale_inv")) for name in files.tensors)


def items(files: Files) -> dict[str, Item]:
    found, used = {}, set()
    for name in files.tensors:
        base = next((name.removesuffix(s) for s in ("_packed", "_scale", "_scale_inv") if name.endswith(s)), "")
        if not base.endswith("weight") or base in found:
            continue
        of = {s: files.tensors[base + s] for s in _COMPANIONS if base + s in files.tensors}
        found[base] = _packed(of) if "_packed" in of else _whole(files.tensors.get(base), of)
        used |= {base, *(base + s for s in of)}
    return with_plain(found, used, files)


def _unreadable(t: Stored, of: dict[str, Stored], problem: str) -> Item:
    return Item(t.shape, t.dtype, None, NAME, tuple(of.values()), lambda: None, problem)


def _packed(of: dict[str, Stored]) -> Item:
    t, scale = of["_packed"], of.get("_scale")
    if scale is None or len(t.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != t.shape[0]:
        t.fail("It must have two dimensions and a scale for each row. Got others.")
    if "_global_scale" in of or "_g_idx" in of:
        return _unreadable(t, of, "eqquant does not read NVFP4 or act-order weights of compressed-tensors yet")
    out = t.shape[0]
    if t.dtype == "U8" and scale.dtype == "U8":
        shape = (out, 2 * t.shape[1])
        if scale.shape[1] != -(-shape[1] // 32):
            scale.fail(f"It must have a scale for every 32 of {shape[1]} values. Got {scale.shape[1]}.")
        return mxfp4(t, scale, shape, (t, scale), lambda start, stop: unpack_low_first(t.array()[start:stop], 4))
    if t.dtype != "I32" or "_shape" not in of or of["_shape"].dtype != "I64" or of["_shape"].shape != (2,):
        return _unreadable(t, of, f"it is neither integers nor MXFP4: {t.dtype} with scales of {scale.dtype}")
    rows, length = (int(n) for n in of["_shape"].array())
    bits = next((b for b in INTEGERS if length > 0 and -(-length * b // 32) == t.shape[1]), None)
    if rows != out or length < 1:
        of["_shape"].fail(f"It must have {out} rows. Got {(rows, length)}.")
    if bits is None:
        return _unreadable(t, of, "eqquant reads 2, 4 and 8 bits of compressed-tensors")
    zero = of.get("_zero_point")
    if zero is not None and (zero.dtype != "I32" or zero.shape != (-(-out * bits // 32), scale.shape[1])):
        zero.fail(f"It must be packed along the rows, I32. Got {zero.dtype} of {list(zero.shape)}.")
    format = format_of(scale, INTEGERS[bits], _block(scale, scale.shape[1], length), zero is None)

    def codes(start: int, stop: int) -> np.ndarray:
        return unpack_low_first(np.ascontiguousarray(t.array()[start:stop]).view(np.uint8), bits)[:, :length]

    def zeros() -> np.ndarray | None:
        if zero is None:
            return None
        along_rows = np.ascontiguousarray(zero.array().T).view(np.uint8)
        return np.ascontiguousarray(unpack_low_first(along_rows, bits)[:, :out].T)

    return _item(t, of, format, (out, length), lambda: _scales(scale), zeros, codes, f"{bits} bits, packed")


def _whole(t: Stored | None, of: dict[str, Stored]) -> Item:
    scale = of.get("_scale") or of["_scale_inv"]
    if t is None:
        scale.fail("It must be the scale of a weight of the same file. Got none.")
    if t.dtype not in ("I8", "F8_E4M3", "F8_E5M2") or len(t.shape) != 2:
        return _unreadable(t, of, f"eqquant does not know scales of {t.dtype}{list(t.shape)}")
    out, length = t.shape
    rows, blocks = scale.shape if len(scale.shape) == 2 else (math.prod(scale.shape), 1)
    if rows == out or rows == blocks == 1:
        block: BlockSize = "tensor" if rows == 1 < out else _block(scale, blocks, length)
        repeats = out // rows if rows else 1
    elif (rows, blocks) == (-(-out // 128), -(-length // 128)):
        block, repeats = (None if blocks == 1 else 128), 128
    else:
        scale.fail(
            f"It must have a scale for each row, or each 128 x 128 values, of {list(t.shape)}. Got {list(scale.shape)}."
        )
    zero = of.get("_zero_point") if t.dtype == "I8" else None
    if zero is not None and (zero.dtype != "I8" or math.prod(zero.shape) != rows * blocks):
        zero.fail(f"It must have the shape of the scale, in I8. Got {zero.dtype} of {list(zero.shape)}.")
    spread = lambda x: np.repeat(x.reshape(rows, blocks), repeats, axis=0)[:out]
    signed = t.dtype == "I8"
    kind = "e4m3" if t.dtype == "F8_E4M3" else "e5m2"
    format = format_of(scale, Int8, block, zero is None) if signed else format_of(scale, FP8, kind, block)

    def codes(start: int, stop: int) -> np.ndarray:
        raw = t.array()[start:stop].view(np.uint8)
        return raw ^ np.uint8(128) if signed else raw

    zeros = lambda: None if zero is None else spread(zero.array().view(np.uint8) ^ np.uint8(128))
    return _item(t, of, format, t.shape, lambda: spread(_scales(scale)), zeros, codes, t.dtype)


def _scales(t: Stored) -> np.ndarray:
    return t.array().astype(np.float32)


def _block(scale: Stored, blocks: int, length: int) -> BlockSize:
    if blocks == 1:
        return None
    if blocks < 1 or length < 1 or length % blocks:
        scale.fail(f"It must divide {length} values into equal groups. Got {blocks} scales.")
    return length // blocks


def _item(
    t: Stored,
    of: dict[str, Stored],
    format: AbstractFormat,
    shape: tuple[int, ...],
    scales: Callable[[], np.ndarray],
    zeros: Callable[[], np.ndarray | None],
    codes: Callable[[int, int], np.ndarray],
    stored_as: str,
) -> Item:
    scale = of.get("_scale") or of["_scale_inv"]
    if scale.dtype not in (*_FLOATS, "F8_E8M0"):
        scale.fail(f"It must be floating point. Got {scale.dtype}.")
    dtype = DTYPES[scale.dtype][1] if scale.dtype in _FLOATS else "float32"
    tensors = tuple(dict.fromkeys((t, *of.values())))
    read = lambda: from_codes(codes, scales(), zeros(), format, shape, dtype, t)
    return Item(shape, str(dtype), format, stored_as, tensors, read)
