"""Reads weights beside their scales, as compressed-tensors and others store them.

See https://github.com/vllm-project/compressed-tensors (vLLM, llm-compressor).

    pack-quantized         P_packed int32 (out, ceil(in * bits / 32)): codes plus 2**(bits - 1), the first in the low
                           bits, without gaps between words; P_scale (out, groups); P_shape int64 (2,); optionally
                           P_zero_point int32, packed along out: (ceil(out * bits / 32), groups), and P_g_idx int32
                           (in,), the group of each input, which makes it a `PermutedArray`
    mxfp4-pack-quantized   P_packed uint8 (out, in / 2), the first code in the low bits; P_scale uint8, E8M0
    mxfp8-quantized        P float8_e4m3, P_scale uint8, E8M0 (out, in / 32)
    nvfp4-pack-quantized   P_packed as MXFP4; P_scale float8_e4m3 (out, in / 16); P_global_scale float32, which scales
                           are divided by
    int-quantized          P int8, P_scale (out, groups) or one for all, optionally P_zero_point int8 and P_g_idx
    float-quantized        P float8_e4m3, P_scale as before, or one for each tile, such as of 128 x 128 values;
                           optionally P_shape or P_shape_original int64 (2,), without the padding of the last tiles

P is such as `layers.0.weight`. Experts have a third axis in front. One scale for all goes with zero points that are not
packed, int8. A weight has the dtype of its scales.

Other libraries store the last two with other names of scales (`_SCALES`). All multiply by them:

    P_scale_inv, P_scales_inv          Hugging Face's fp8, P may be `experts.down_proj`
    L.scale or P.scale                 DeepSeek, where int8 or uint8 (out, in / 2) with scales (out, in / 32) is MXFP4
    L.qscale_weight                    Mistral
    L.scale_weight                     ComfyUI; optionally L.comfy_quant, JSON with the format
    P_scale with P_scale_2 float32     ModelOpt's NVFP4: P uint8 (out, in / 2), scales are multiplied by `P_scale_2`.
                                       Experts may have one each. L.pre_quant_scale, of inputs, is not read
"""

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..._formats import Int8, MXFP4, MXFP8, NVFP4
from .._bits import unpack_low_first
from .._files import Files
from .._repack import act_order, Unpacked
from .._tensors import parse_json, SMALL_FLOATS, StoredTensor
from ._item import as_format, find_weights, group, INTEGERS, Item, Parts, read_items, unreadable_item, weight
from ._scaled import as_float32, crop, find_scale_grid, float_kind, microscaled_item, scale_dtype, scaled_item
from ._settings import find_settings, weights_of_groups


NAME = "compressed-tensors"

_PACKED = ("weight_packed", "weight_scale", "weight_scale_inv")
# The scales of a weight whose codes are a tensor of its own name.
_SCALES = (
    *("weight_scale", "weight_scale_inv", "weight_scales_inv"),
    *("weight.scale", "scale", "qscale_weight", "scale_weight"),
)
_COMFY = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
_MAX_COMFY = 10_000


class _Settings(NamedTuple):
    """The settings of weights in `config.json`.

    - `bits`: widths of codes.
    - `integers`: whether small blocks hold integers, and not floats.
    - `tile`: the rows and columns of a tile, if there are tiles.
    """

    bits: frozenset[int]
    integers: bool
    tile: tuple[int, int] | None


def recognizes(files: Files, method: str | None = None) -> bool:
    """Returns whether files have such weights, of this `quant_method` if given."""
    return method in (None, find_settings(files).get("quant_method")) and bool(_groups(files))


def items(files: Files) -> dict[str, Item]:
    settings = _settings(find_settings(files))
    read = lambda _, parts: _packed_item(parts, settings) if "weight_packed" in parts else _whole(parts, settings)
    return read_items(files, _groups(files), read)


def _groups(files: Files) -> dict[str, Parts]:
    """Returns the tensors of each weight.

    A name without the word `weight` must have a scale and be codes.
    """
    named = {name: True for name in find_weights(files, *_PACKED) if name.endswith("weight")}
    codes = {name: False for name, t in files.tensors.items() if t.dtype in ("I8", "U8", *SMALL_FLOATS)}
    found = codes | named
    scaled = lambda parts: any(scale in parts for scale in _SCALES)
    return {name: parts for name, parts in group(files, found).items() if found[name] or scaled(parts)}


def _settings(settings: Mapping[str, object]) -> _Settings:
    weights = weights_of_groups(settings)
    bits = frozenset(n for w in weights if isinstance(n := w.get("num_bits"), int))
    # AutoRound has integers in the place of MXFP4, under the same names.
    kinds = {str(w.get("type")) for w in weights} or {str(settings.get("data_type"))[:6]}
    tiles = [settings.get("weight_block_size"), *(w.get("block_structure") for w in weights)]
    found = {
        tuple(x) for x in tiles if isinstance(x, list) and len(x) == 2 and all(type(n) is int and n > 0 for n in x)
    }
    return _Settings(bits, kinds in ({"int"}, {"mx_int"}), found.pop() if len(found) == 1 else None)


def _packed_item(parts: Parts, settings: _Settings) -> Item:
    t, scale = parts.pop("weight_packed"), parts.pop("weight_scale", None)
    if scale is None or len(t.shape) < 2:
        t.fail("It must have two dimensions or more, and a scale. Got others.")
    if t.dtype == "U8" and settings.integers:
        return unreadable_item(t, NAME, "eqquant reads small blocks of floats, and `config.json` says integers")
    if t.dtype == "U8" and "weight_global_scale" in parts:
        if scale.dtype != "F8_E4M3":
            return unreadable_item(t, NAME, f"eqquant reads NVFP4 with scales of F8_E4M3, not {scale.dtype}")
        return microscaled_item(t, scale, NVFP4(), outer=parts.pop("weight_global_scale"), divides=True)
    if t.dtype == "U8" and scale.dtype == "U8":
        return microscaled_item(t, scale, MXFP4())
    size = parts.pop("weight_shape", None)
    if t.dtype != "I32" or size is None or size.dtype != "I64" or size.shape != (len(t.shape),):
        return unreadable_item(t, NAME, f"it is neither integers nor MXFP4: {t.dtype} with scales of {scale.dtype}")
    shape = tuple(int(n) for n in size.array())
    length = shape[-1]
    if shape[:-1] != t.shape[:-1] or length < 1:
        size.fail(f"It must be the shape of {list(t.shape[:-1])} rows. Got {shape}.")
    # Rows of a few values fit several widths.
    fitting = {b for b in (8, 4, 2, 6, 5, 3, 7) if -(-length * b // 32) == t.shape[-1]}
    if len(fitting) > 1:
        fitting &= settings.bits
    if len(fitting) != 1:
        problem = "eqquant reads 2 to 8 bits of compressed-tensors, and short rows if `config.json` says how many"
        return unreadable_item(t, NAME, problem)
    return _integers(parts, t, scale, shape, *fitting)


def _integers(parts: Parts, t: StoredTensor, scale: StoredTensor, shape: tuple[int, ...], bits: int) -> Item:
    *batch, out, length = shape
    layout = find_scale_grid(scale, shape).by_rows()
    blocks = layout.shape[-1]
    zero = parts.pop("weight_zero_point", None)
    whole = zero is not None and zero.dtype == "I8" and math.prod(zero.shape) == math.prod(layout.shape)
    if zero is not None and not whole:
        zero.expect("I32", (*batch, -(-out * bits // 32), blocks))
    order = act_order(parts.pop("weight_g_idx", None), length, blocks)
    # Int8 holds codes of seven bits too, with the zero where its own is.
    cls, shift = INTEGERS.get(bits, Int8), np.uint8(0 if bits in INTEGERS else 128 - 2 ** (bits - 1))
    format = as_format(scale, cls, layout.block, zero is None)

    def unpack(words: np.ndarray, count: int) -> np.ndarray:
        return unpack_low_first(np.ascontiguousarray(words).view(np.uint8), bits)[..., :count] + shift

    def codes(start: int, stop: int) -> np.ndarray:
        found = unpack(t.array().reshape(-1, t.shape[-1])[start:stop], length)
        return found if order is None else found.take(order, axis=1)

    def zeros() -> np.ndarray | None:
        if zero is None:
            return None
        if whole:
            middle = np.uint8(2 ** (bits - 1))
            return layout.spread(zero.array().view(np.uint8) + middle + shift, tuple(batch), out)
        return np.ascontiguousarray(unpack(zero.array().swapaxes(-1, -2), out).swapaxes(-1, -2))

    load = lambda: Unpacked(codes, layout.spread(as_float32(scale), tuple(batch), out), zeros(), order=order)
    entry = weight(format, shape, scale_dtype(scale), permuted=order is not None)
    return Item(entry, f"{bits} bits, packed", (t,), load)


def _whole(parts: Parts, settings: _Settings) -> Item:
    t, scale = parts.pop("weight", None), parts.pop(next(name for name in _SCALES if name in parts))
    if t is None:
        scale.fail("It must belong to a weight with a scale, of the same file. Got one of the two.")
    _check_comfy(parts)
    size = parts.pop("weight_shape_original" if "weight_shape_original" in parts else "weight_shape", None)
    return crop(_scaled(t, scale, parts, settings), size)


def _scaled(t: StoredTensor, scale: StoredTensor, parts: Parts, settings: _Settings) -> Item:
    half = t.dtype in ("U8", "I8", "F4") and len(t.shape) > 1
    length = t.nbytes * 2 // max(math.prod(t.shape[:-1]), 1)  # of a row whose codes share bytes
    if half and "weight_scale_2" in parts and scale.dtype == "F8_E4M3":
        return microscaled_item(t, scale, NVFP4(), outer=parts.pop("weight_scale_2"))
    if half and scale.dtype in ("U8", "F8_E8M0") and scale.shape == (*t.shape[:-1], -(-length // 32)):
        return microscaled_item(t, scale, MXFP4())
    if scale.dtype == "U8" and t.dtype in ("F8_E4M3", "F8_E5M2") and len(t.shape) > 1:
        return microscaled_item(t, scale, MXFP8(float_kind(t)))
    zero, groups = parts.pop("weight_zero_point", None), parts.pop("weight_g_idx", None)
    return scaled_item(t, scale, zero, tile=settings.tile, groups=groups)


def _check_comfy(parts: Parts) -> None:
    """Raises unless a weight of ComfyUI is stored by rows.

    It stores NVFP4 in tiles, and rotates some weights.
    """
    if (t := parts.pop("comfy_quant", None)) is not None:
        about = parse_json(t.bytes()[:_MAX_COMFY].tobytes(), t.file, repr(t.name))
        others = [key for key, value in about.items() if value and key not in ("format", "full_precision_matrix_mult")]
        if about.get("format") not in _COMFY or others:
            got = json.dumps(about)[:200]
            t.fail(f"eqquant reads {', '.join(_COMFY)} of ComfyUI, without other settings. Got {got}.")
