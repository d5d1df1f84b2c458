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

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._formats import Int8
from ..._wrappers.permuted import permuted
from .._bits import unpack_low_first
from .._files import Files
from .._stored import Stored
from .item import act_order, format_of, INTEGERS, Item, with_plain
from .microscaling import mxfp4, mxfp8, nvfp4
from .scaled import block_of, grouped, scaled, scales_of


NAME = "compressed-tensors"

_COMPANIONS = ("_packed", "_scale", "_scale_inv", "_shape", "_zero_point", "_g_idx", "_global_scale")


def recognizes(files: Files) -> bool:
    return any(name.endswith(("weight_packed", "weight_scale", "weight_scale_inv")) for name in files.tensors)


def items(files: Files) -> dict[str, Item]:
    found, used, widths = {}, set(), _widths(files.config)
    for name in files.tensors:
        base = next((name.removesuffix(s) for s in ("_packed", "_scale", "_scale_inv") if name.endswith(s)), "")
        if not base.endswith("weight") or base in found:
            continue
        of = {s: files.tensors[base + s] for s in _COMPANIONS if base + s in files.tensors}
        found[base] = _packed(of, widths) if "_packed" in of else _whole(files.tensors.get(base), of)
        used |= {base, *(base + s for s in of)}
    return with_plain(found, used, files)


def _unreadable(t: Stored, of: dict[str, Stored], problem: str) -> Item:
    return Item(t.shape, t.dtype, None, NAME, tuple(of.values()), lambda: None, problem)


def _widths(config: Mapping[str, Any]) -> list[int]:
    """Returns widths of codes: those that `config.json` names, then the others, the common ones first."""
    settings = config.get("quantization_config", config.get("compression_config"))
    groups = settings.get("config_groups") if isinstance(settings, dict) else None
    weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    named = {w.get("num_bits") for w in weights if isinstance(w, dict) and isinstance(w.get("num_bits"), int)}
    return sorted((8, 4, 2, 6, 5, 3, 7), key=lambda bits: bits not in named)


def _packed(of: dict[str, Stored], widths: Sequence[int]) -> Item:
    t, scale = of["_packed"], of.get("_scale")
    if scale is None or len(t.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != t.shape[0]:
        t.fail("It must have two dimensions and a scale for each row. Got others.")
    out = t.shape[0]
    if t.dtype == "U8" and "_global_scale" in of:
        return nvfp4(t, scale, of["_global_scale"], tuple(of.values()), divides=True)
    if t.dtype == "U8" and scale.dtype == "U8":
        shape = (out, 2 * t.shape[1])
        if scale.shape[1] != -(-shape[1] // 32):
            scale.fail(f"It must have a scale for every 32 of {shape[1]} values. Got {scale.shape[1]}.")
        return mxfp4(t, scale, shape, (t, scale), lambda start, stop: unpack_low_first(t.array()[start:stop], 4))
    if t.dtype != "I32" or "_shape" not in of or of["_shape"].dtype != "I64" or of["_shape"].shape != (2,):
        return _unreadable(t, of, f"it is neither integers nor MXFP4: {t.dtype} with scales of {scale.dtype}")
    rows, length = (int(n) for n in of["_shape"].array())
    if rows != out or length < 1:
        of["_shape"].fail(f"It must have {out} rows. Got {(rows, length)}.")
    # Rows of a few values fit several widths.
    bits = next((b for b in widths if -(-length * b // 32) == t.shape[1]), None)
    if bits is None:
        return _unreadable(t, of, "eqquant reads 2 to 8 bits of compressed-tensors")
    zero = of.get("_zero_point")
    if zero is not None and (zero.dtype != "I32" or zero.shape != (-(-out * bits // 32), scale.shape[1])):
        zero.fail(f"It must be packed along the rows, I32. Got {zero.dtype} of {list(zero.shape)}.")
    order = act_order(of.get("_g_idx"), length, scale.shape[1])
    # Int8 holds codes of seven bits too, with the zero where its own is.
    cls, shift = INTEGERS.get(bits, Int8), 0 if bits in INTEGERS else 128 - 2 ** (bits - 1)
    format = format_of(scale, cls, block_of(scale, scale.shape[1], length), zero is None)

    def codes(start: int, stop: int) -> np.ndarray:
        words = np.ascontiguousarray(t.array()[start:stop])
        found = unpack_low_first(words.view(np.uint8), bits)[:, :length] + np.uint8(shift)
        return found if order is None else found.take(order, axis=1)

    def zeros() -> np.ndarray | None:
        if zero is None:
            return None
        along_rows = np.ascontiguousarray(zero.array().T).view(np.uint8)
        return np.ascontiguousarray(unpack_low_first(along_rows, bits)[:, :out].T) + np.uint8(shift)

    others = tuple(of.values())
    scales = lambda: scales_of(scale)
    item = grouped(t, scale, others, format, (out, length), scales, zeros, codes, f"{bits} bits, packed")
    if order is None:
        return item
    return dataclasses.replace(item, read=lambda: permuted(item.read(), order), permuted=True)


def _whole(t: Stored | None, of: dict[str, Stored]) -> Item:
    scale = of.get("_scale") or of["_scale_inv"]
    if t is None:
        scale.fail("It must be the scale of a weight of the same file. Got none.")
    if scale.dtype == "U8" and t.dtype in ("F8_E4M3", "F8_E5M2") and len(t.shape) == 2:
        return mxfp8(t, scale, tuple(of.values()))
    return scaled(t, scale, of.get("_zero_point"), tuple(of.values()))
