"""Weights of compressed-tensors (vLLM, llm-compressor): https://github.com/vllm-project/compressed-tensors.

    pack-quantized         P_packed int32 (out, ceil(in * bits / 32)): codes plus 2**(bits - 1), the first in the low
                           bits, without gaps between words; P_scale (out, groups); P_shape int64 (2,); optionally
                           P_zero_point int32, packed along out: (ceil(out * bits / 32), groups), and P_g_idx int32
                           (in,), the group of each input, which makes it an `eqquant.PermutedArray`
    mxfp4-pack-quantized   P_packed uint8 (out, in / 2), the first code in the low bits; P_scale uint8, E8M0
    mxfp8-quantized        P float8_e4m3, P_scale uint8, E8M0 (out, in / 32)
    nvfp4-pack-quantized   P_packed as MXFP4; P_scale float8_e4m3 (out, in / 16); P_global_scale float32, which scales
                           are divided by
    int-quantized          P int8, P_scale (out, groups) or one for all, optionally P_zero_point int8
    float-quantized        P float8_e4m3, P_scale as before, or one for each 128 x 128 values
    Hugging Face's fp8     the same with the name P_scale_inv, which values are multiplied by too

P is such as `layers.0.weight`. A scale of a block in two dimensions is stored once for each row. A weight has the
dtype of its scales.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..._formats import Int8, MXFP4, MXFP8, NVFP4
from .._bits import unpack_low_first
from .._files import Files
from .._repack import Unpacked
from .item import act_order, as_format, group, INTEGERS, Item, Parts, settings_of, unreadable, weight, with_plain
from .scaled import as_float32, float_kind, group_size, microscaled, read_outer, scale_dtype, scaled


NAME = "compressed-tensors"

_ANCHORS = ("_packed", "_scale", "_scale_inv")
_PARTS = (*_ANCHORS, "_shape", "_zero_point", "_g_idx", "_global_scale", "")


def recognizes(files: Files) -> bool:
    return any(base.endswith("weight") for base in group(files.tensors, _ANCHORS, ()))


def items(files: Files) -> dict[str, Item]:
    groups = group(files.tensors, _ANCHORS, _PARTS)
    widths = _widths(settings_of(files, "quantization_config", "compression_config"))
    read = lambda _, parts: _packed(parts, widths) if "_packed" in parts else _whole(parts)
    return with_plain(files, {name: parts for name, parts in groups.items() if name.endswith("weight")}, read)


def _widths(settings: Mapping[str, object]) -> list[int]:
    """Returns widths of codes: those that `config.json` names, then the others, the common ones first."""
    groups = settings.get("config_groups")
    weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    named = {w.get("num_bits") for w in weights if isinstance(w, dict) and isinstance(w.get("num_bits"), int)}
    return sorted((8, 4, 2, 6, 5, 3, 7), key=lambda bits: bits not in named)


def _packed(parts: Parts, widths: Sequence[int]) -> Item:
    t, scale, tensors = parts["_packed"], parts.get("_scale"), tuple(parts.values())
    if scale is None or len(t.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != t.shape[0]:
        t.fail("It must have two dimensions and a scale for each row. Got others.")
    if t.dtype == "U8" and "_global_scale" in parts:
        outer = read_outer(parts["_global_scale"], scale, divides=True)
        return microscaled(t, scale, tensors, NVFP4(), outer=outer)
    if t.dtype == "U8" and scale.dtype == "U8":
        return microscaled(t, scale, (t, scale), MXFP4())
    size = parts.get("_shape")
    if t.dtype != "I32" or size is None or size.dtype != "I64" or size.shape != (2,):
        problem = f"it is neither integers nor MXFP4: {t.dtype} with scales of {scale.dtype}"
        return unreadable(t, tensors, NAME, problem)
    out, length = (int(n) for n in size.array())
    if out != t.shape[0] or length < 1:
        size.fail(f"It must have {t.shape[0]} rows. Got {(out, length)}.")
    # Rows of a few values fit several widths.
    bits = next((b for b in widths if -(-length * b // 32) == t.shape[1]), None)
    if bits is None:
        return unreadable(t, tensors, NAME, "eqquant reads 2 to 8 bits of compressed-tensors")
    zero = parts.get("_zero_point")
    if zero is not None and (zero.dtype != "I32" or zero.shape != (-(-out * bits // 32), scale.shape[1])):
        zero.fail(f"It must be packed along the rows, I32. Got {zero.dtype} of {list(zero.shape)}.")
    order = act_order(parts.get("_g_idx"), length, scale.shape[1])
    # Int8 holds codes of seven bits too, with the zero where its own is.
    cls, shift = INTEGERS.get(bits, Int8), np.uint8(0 if bits in INTEGERS else 128 - 2 ** (bits - 1))
    format = as_format(scale, cls, group_size(scale, scale.shape[1], length), zero is None)

    def unpack(words: np.ndarray, count: int) -> np.ndarray:
        return unpack_low_first(np.ascontiguousarray(words).view(np.uint8), bits)[:, :count] + shift

    def codes(start: int, stop: int) -> np.ndarray:
        found = unpack(t.array()[start:stop], length)
        return found if order is None else found.take(order, axis=1)

    def load() -> Unpacked:
        zeros = None if zero is None else np.ascontiguousarray(unpack(zero.array().T, out).T)
        return Unpacked(codes, as_float32(scale), zeros, order=order)

    entry = weight(format, (out, length), scale_dtype(scale), permuted=order is not None)
    return Item(entry, f"{bits} bits, packed", tensors, load)


def _whole(parts: Parts) -> Item:
    t, scale, tensors = parts.get(""), parts.get("_scale") or parts["_scale_inv"], tuple(parts.values())
    if t is None:
        scale.fail("It must be the scale of a weight of the same file. Got none.")
    if scale.dtype == "U8" and t.dtype in ("F8_E4M3", "F8_E5M2") and len(t.shape) == 2:
        return microscaled(t, scale, tensors, MXFP8(float_kind(t)))
    return scaled(t, scale, parts.get("_zero_point"), tensors)
