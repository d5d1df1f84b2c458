"""Weights that torchao saved: https://github.com/pytorch/ao, `torchao/prototype/safetensors`.

A weight `L.weight` is stored as `L._weight_qdata`, `L._weight_scale` and others; the metadata has JSON under
`L.weight`: its `_type`, its attributes as `_data`, and `_tensor_data_names`.

    Int8Tensor                 qdata int8 (out, in); scale (out, groups), or one
    IntxUnpackedToInt8Tensor   the same, of fewer bits, a byte each; zero_point int8 as the scale
    Float8Tensor               qdata float8 (out, in); scale float32 (out, groups), one, or one for each 128 x 128
    MXTensor                   qdata float8 (out, in), or 4-bit (out, in / 2), the first in the low bits; scale E8M0
    NVFP4Tensor                qdata 4-bit; _scale_e4m3 (out, in / 16), optionally _per_tensor_scale float32
    Int4Tensor                 qdata int8 (out, in / 2), two's complement, the first in the low bits; scale and
                               zero_point, floats, (groups, out): value = code * scale + zero_point

Scales of MXTensor and NVFP4Tensor may be in tiles (`is_swizzled_scales`). Layouts for one kernel are errors that name
the type.
"""

from typing import Any

import numpy as np

from ..._formats import MLX
from .._bits import unpack_low_first
from .._files import Files
from .._json import parse_json
from .._stored import DTYPES, Stored
from .._transcode import from_codes
from .item import expect, format_of, INTEGERS, Item, with_plain
from .microscaling import check_scales, mxfp4, mxfp8, nvfp4, scales_in_order
from .scaled import block_of, FLOATS, grouped, scaled


NAME = "torchao"

_DTYPES = ("float32", "float16", "bfloat16")


def recognizes(files: Files) -> bool:
    names = files.metadata.get("tensor_names")
    return (
        files.container == "safetensors"
        and isinstance(names, str)
        and '"_type"' in "".join(text for text in files.metadata.values() if isinstance(text, str))
    )


def items(files: Files) -> dict[str, Item]:
    found, used = {}, set()
    for name, text in files.metadata.items():
        layer, _, last = name.rpartition(".")
        prefix = f"{layer}._{last}_"
        of = {t.removeprefix(prefix): files.tensors[t] for t in files.tensors if t.startswith(prefix)}
        if not of or not isinstance(text, str):
            continue
        about = parse_json(text.encode(errors="replace"), files.file, f"the metadata of {name!r}")
        found[name] = _item(name, about, of, files)
        used |= {prefix + part for part in of}
    return with_plain(found, used, files)


def _item(name: str, about: dict[str, Any], of: dict[str, Stored], files: Files) -> Item:
    kind, attributes = str(about.get("_type"))[:80], about.get("_data")
    first, tensors = next(iter(of.values())), tuple(of.values())
    attributes = attributes if isinstance(attributes, dict) else {}
    codes, scale = of.get("qdata"), of.get("scale", of.get("_scale_e4m3"))
    if kind not in _KINDS:
        problem = f"eqquant does not read torchao's {kind}; it reads {', '.join(_KINDS)}"
        return Item(first.shape, first.dtype, None, kind, tensors, lambda: None, problem)
    if codes is None or scale is None or len(codes.shape) != 2:
        first.fail(f"It must belong to a {kind} with `qdata` of two dimensions and scales. Got {', '.join(of)}.")
    dtype = _dtype(attributes)
    blocked = attributes.get("is_swizzled_scales", attributes.get("_is_swizzled_scales")) is True
    if kind == "NVFP4Tensor":
        return nvfp4(codes, scale, of.get("_per_tensor_scale"), tensors, False, dtype or "bfloat16", blocked)
    if kind == "MXTensor":
        if codes.dtype in ("F8_E4M3", "F8_E5M2"):
            return mxfp8(codes, scale, tensors, dtype or "bfloat16", blocked)
        return _mxfp4(codes, scale, tensors, dtype or "bfloat16", blocked)
    if kind == "IntxUnpackedToInt8Tensor":
        return _few_bits(codes, scale, of.get("zero_point"), tensors, attributes, dtype)
    if kind == "Int4Tensor":
        return _int4(codes, scale, of)
    zero = of.get("zero_point")
    return scaled(codes, scale, zero, tensors, dtype)


_KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Float8Tensor", "MXTensor", "NVFP4Tensor")


def _dtype(attributes: dict[str, Any]) -> str | None:
    for key in ("dtype", "orig_dtype", "_orig_dtype"):
        value = attributes.get(key)
        if isinstance(value, dict) and value.get("_data") in _DTYPES:
            return value["_data"]
    return None


def _int4(t: Stored, scale: Stored, of: dict[str, Stored]) -> Item:
    """Codes from -8 to 7. Ours count from zero, so that the offset of a group is its lowest value."""
    (out, half), zero, tensors = t.shape, of.get("zero_point"), tuple(of.values())
    if t.dtype not in ("I8", "U8") or zero is None:
        t.fail(f"It must be I8 or U8 with `zero_point`. Got {t.dtype} and {', '.join(of)}.")
    if scale.dtype not in FLOATS or len(scale.shape) != 2 or scale.shape[1] != out:
        scale.fail(f"It must be floats of (groups, {out}). Got {scale.dtype} of {list(scale.shape)}.")
    expect(zero, (scale.dtype,), scale.shape)
    groups, length, dtype = scale.shape[0], 2 * half, str(DTYPES[scale.dtype][1])
    if groups < 1 or length < 1 or length % groups:
        scale.fail(f"It must divide {length} inputs into equal groups. Got {groups}.")
    format = format_of(scale, MLX, 4, length // groups, "float32")
    if "act_pre_scale" in of:
        problem = "eqquant does not read `act_pre_scale` of torchao's Int4Tensor"
        return Item((out, length), dtype, format, "Int4Tensor", tensors, lambda: None, problem)

    def read() -> Any:
        scales, zeros = (np.ascontiguousarray(part.array().T, np.float32) for part in (scale, zero))
        codes = lambda start, stop: unpack_low_first(t.bytes().reshape(out, half)[start:stop], 4) ^ np.uint8(8)
        return from_codes(codes, scales, None, format, (out, length), dtype, t, offset=zeros - np.float32(8) * scales)

    return Item((out, length), dtype, format, "Int4Tensor", tensors, read)


def _mxfp4(t: Stored, scale: Stored, tensors: tuple[Stored, ...], dtype: str, blocked: bool) -> Item:
    out, length = t.shape[0], t.nbytes * 2 // max(t.shape[0], 1)
    scales = (out, -(-length // 32))
    if t.dtype not in ("U8", "F4"):
        t.fail(f"It must be U8, F4 or float8. Got {t.dtype}.")
    check_scales(scale, ("U8", "F8_E8M0"), scales, blocked)
    codes = lambda start, stop: unpack_low_first(t.bytes().reshape(out, -1)[start:stop], 4)
    exponents = lambda: scales_in_order(scale, scales, blocked)
    return mxfp4(t, scale, (out, length), tensors, codes, exponents=exponents, dtype=dtype)


def _few_bits(
    t: Stored,
    scale: Stored,
    zero: Stored | None,
    tensors: tuple[Stored, ...],
    attributes: dict[str, Any],
    dtype: str | None,
) -> Item:
    """Integers of fewer than eight bits, one in each byte."""
    target = attributes.get("target_dtype")
    name = str(target.get("_data")) if isinstance(target, dict) else ""
    bits = int(name.removeprefix("int")) if name in {f"int{n}" for n in range(1, 9)} else 8
    bits = bits if bits in INTEGERS else 8
    if t.dtype != "I8" or len(scale.shape) != 2 or scale.shape[0] != t.shape[0]:
        t.fail(f"It must be I8, with scales of two dimensions. Got {t.dtype} and {list(scale.shape)}.")
    if zero is not None and (zero.dtype != "I8" or zero.shape != scale.shape):
        zero.fail(f"It must be I8 of {list(scale.shape)}. Got {zero.dtype} of {list(zero.shape)}.")
    half = np.uint8(2 ** (bits - 1))
    given = None if zero is None else zero.array()
    symmetric = given is None or not given.any()
    format = format_of(scale, INTEGERS[bits], block_of(scale, scale.shape[1], t.shape[1]), symmetric)

    def codes(start: int, stop: int) -> np.ndarray:
        found = t.array()[start:stop].view(np.uint8) + half
        if (found >= 2 * int(half)).any():
            t.fail(f"Got a code that is no integer of {bits} bits.")
        return found

    zeros = lambda: None if symmetric or given is None else given.view(np.uint8) + half
    scales = lambda: scale.array().astype(np.float32)
    return grouped(t, scale, tensors, format, t.shape, scales, zeros, codes, f"{bits} bits", dtype)
