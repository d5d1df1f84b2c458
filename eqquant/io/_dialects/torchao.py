"""Reads weights that torchao saved, as `torchao/prototype/safetensors` says.

See https://github.com/pytorch/ao.

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

import dataclasses
from collections.abc import Mapping

import numpy as np

from ..._formats import MLX, MXFP4, MXFP8, NVFP4
from .._bits import unpack_low_first
from .._files import Files
from .._repack import Unpacked
from .._tensors import DTYPES, FLOAT_NAMES, FLOATS, parse_json, StoredTensor
from ._item import as_format, group, INTEGERS, Item, Parts, read_items, unreadable_item, weight
from ._scaled import float_kind, microscaled_item, scaled_item


NAME = "torchao"


def recognizes(files: Files) -> bool:
    texts = [text for text in files.metadata.values() if isinstance(text, str)]
    named = files.container == "safetensors" and isinstance(files.metadata.get("tensor_names"), str)
    return named and any('"_type"' in text for text in texts)


def items(files: Files) -> dict[str, Item]:
    groups = {}
    for name, text in files.metadata.items():
        layer, _, last = name.rpartition(".")
        prefix = f"{layer}._{last}_"
        parts = {f"_weight_{t.removeprefix(prefix)}": files.tensors[t] for t in files.tensors if t.startswith(prefix)}
        parts.pop("_weight_act_per_tensor_scale", None)  # of activations
        if parts and isinstance(text, str):
            groups[name] = parts
    groups = {name: parts | groups[name] for name, parts in group(files, groups).items()}

    def read(name: str, parts: Parts) -> Item:
        text = str(files.metadata[name]).encode(errors="replace")
        return _item(parse_json(text, files.file, f"the metadata of {name!r}"), parts)

    return read_items(files, groups, read)


def _item(about: Mapping[str, object], parts: Parts) -> Item:
    kind, attributes = str(about.get("_type"))[:80], about.get("_data")
    first, names = next(iter(parts.values())), ", ".join(part.removeprefix("_weight_") for part in parts)
    attributes = attributes if isinstance(attributes, dict) else {}
    if kind not in _KINDS:
        return unreadable_item(first, kind, f"eqquant does not read torchao's {kind}; it reads {', '.join(_KINDS)}")
    take = lambda part: parts.pop(f"_weight_{part}", None)
    t, scale = take("qdata"), take("_scale_e4m3" if kind == "NVFP4Tensor" else "scale")
    if t is None or scale is None or len(t.shape) != 2:
        first.fail(f"It must belong to a {kind} with `qdata` of two dimensions and scales. Got {names}.")
    dtype = _dtype(attributes)
    tiled = attributes.get("is_swizzled_scales", attributes.get("_is_swizzled_scales")) is True
    if kind == "NVFP4Tensor":
        return microscaled_item(t, scale, NVFP4(), dtype or "bfloat16", tiled, take("_per_tensor_scale"))
    if kind == "MXTensor":
        small = t.dtype in ("F8_E4M3", "F8_E5M2")
        if not small and t.dtype not in ("U8", "F4"):
            t.fail(f"It must be U8, F4 or float8. Got {t.dtype}.")
        return microscaled_item(t, scale, MXFP8(float_kind(t)) if small else MXFP4(), dtype or "bfloat16", tiled)
    zero = take("zero_point")
    if kind == "IntxUnpackedToInt8Tensor":
        return _few_bits(t, scale, zero, attributes)
    if kind == "Int4Tensor":
        return _int4(t, scale, zero)
    return scaled_item(t, scale, zero, dtype)


_KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Float8Tensor", "MXTensor", "NVFP4Tensor")


def _dtype(attributes: Mapping[str, object]) -> str | None:
    for key in ("dtype", "orig_dtype", "_orig_dtype"):
        value = attributes.get(key)
        if isinstance(value, dict) and value.get("_data") in FLOAT_NAMES:
            return value["_data"]
    return None


def _int4(t: StoredTensor, scale: StoredTensor, zero: StoredTensor | None) -> Item:
    """Reads codes from -8 to 7.

    Ours count from zero, so that the offset of a group is its lowest value.
    """
    out, half = t.shape
    if t.dtype not in ("I8", "U8") or zero is None:
        t.fail(f"It must be I8 or U8 with `zero_point`. Got {t.dtype}{' without' if zero is None else ''}.")
    scale.expect(FLOATS, (None, out))
    zero.expect(scale.dtype, scale.shape)
    groups, length = scale.shape[0], 2 * half
    if groups < 1 or length < 1 or length % groups:
        scale.fail(f"It must divide {length} inputs into equal groups. Got {groups}.")
    format = as_format(scale, MLX, 4, length // groups, "float32")

    def load() -> Unpacked:
        scales, zeros = (np.ascontiguousarray(part.array().T, np.float32) for part in (scale, zero))
        codes = lambda start, stop: unpack_low_first(t.bytes().reshape(out, half)[start:stop], 4) ^ np.uint8(8)
        return Unpacked(codes, scales, offset=zeros - np.float32(8) * scales)

    return Item(weight(format, (out, length), str(DTYPES[scale.dtype][1])), "Int4Tensor", (t,), load)


def _few_bits(
    t: StoredTensor, scale: StoredTensor, zero: StoredTensor | None, attributes: Mapping[str, object]
) -> Item:
    """Integers of fewer than eight bits, one in each byte."""
    target = attributes.get("target_dtype")
    name = str(target.get("_data")) if isinstance(target, dict) else ""
    bits = next((n for n in INTEGERS if name == f"int{n}"), 8)
    if t.dtype != "I8" or len(scale.shape) != 2 or scale.shape[0] != t.shape[0]:
        t.fail(f"It must be I8, with scales of two dimensions. Got {t.dtype} and {list(scale.shape)}.")
    if zero is not None:
        zero.expect("I8", scale.shape)
    zero = zero if zero is not None and zero.array().any() else None
    return dataclasses.replace(scaled_item(t, scale, zero, _dtype(attributes), bits=bits), stored_as=f"{bits} bits")
