"""Weights as compressed-tensors saves them: the layouts of `_dialects/compressed_tensors.py`.

    Int2 to Int6   pack-quantized; codes of 3, 5 and 6 bits lie across words, without gaps
    Int8           int-quantized
    FP8("e4m3")    float-quantized; scales of 128 x 128 values where they are equal for each 128 rows
    MXFP4          mxfp4-pack-quantized
    NVFP4          nvfp4-pack-quantized. Scales are divided by one number for the tensor, the reciprocal of ours: so
                   values are equal up to rounding in float32

Each combination of bits, groups and symmetry is a group of the configuration, which lists its layers by name.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import FP8, Int2, Int3, Int4, Int5, Int6, Int8, MXFP4, NVFP4
from ..._formats.base import has_zero_points
from .._safetensors import ToWrite
from .._stored import NAME_OF
from .layout import dense, each_part, Layout, narrow, pack_low_first, pad_last, refuse, rows_of, scales_of


NAME = "compressed-tensors"
FITS = (
    "Int2 to Int6, Int8, FP8('e4m3'), MXFP4 or NVFP4, of two dimensions along the last axis, which must consist of "
    "whole blocks, under a name that ends with '.weight'"
)


def layout(name: str, x: Any) -> Layout:
    """Returns the tensors of an array."""
    if not isinstance(x, QuantizedArray):
        return dense(name, x)
    format, block = x.format, x.format.block_size
    kinds = (Int2, Int3, Int4, Int5, Int6, Int8, FP8, MXFP4, NVFP4)
    fits = isinstance(format, kinds) and getattr(format, "kind", "e4m3") == "e4m3"
    plain = x.ndim == 2 and x.axis == -1 and name.endswith(".weight")
    if not fits or not plain or (isinstance(block, int) and x.shape[1] % block):
        refuse(name, x, FITS)
    scale = scales_of(name, x)
    if isinstance(format, MXFP4):
        return _mxfp4(name, x)
    if isinstance(format, NVFP4):
        return _nvfp4(name, x)
    weights: dict[str, Any] = {"num_bits": format.bits, "type": "float" if isinstance(format, FP8) else "int"}
    weights |= {"symmetric": not has_zero_points(format), "dynamic": False}
    weights |= {"strategy": "group", "group_size": block} if isinstance(block, int) else {"strategy": "channel"}
    if isinstance(format, FP8):
        return _fp8(name, x, scale, weights)
    scale = narrow(scale, x.dtype)
    stored = ToWrite(f"{name}_scale", NAME_OF[scale.dtype.name], scale.shape, lambda: scale)
    return (_int8 if isinstance(format, Int8) else _packed)(name, x, stored, weights)


def _packed(name: str, q: QuantizedArray, scale: ToWrite, weights: dict[str, Any]) -> Layout:
    bits, (rows, length) = q.format.bits, q.shape

    def codes() -> np.ndarray:
        out = np.empty((rows, -(-length * bits // 32) * 4), np.uint8)
        each_part(q, lambda part: _words(part, bits), out)
        return out.view(np.int32)

    shape = np.array(q.shape, np.int64)
    tensors = [
        ToWrite(f"{name}_packed", "I32", (rows, -(-length * bits // 32)), codes),
        scale,
        ToWrite(f"{name}_shape", "I64", (2,), lambda: shape),
    ]
    if q.zero_point is not None:
        zeros = np.asarray(q.zero_point)
        packed = np.ascontiguousarray(_words(zeros.T, bits).view(np.int32).T)  # along the rows
        tensors.append(ToWrite(f"{name}_zero_point", "I32", packed.shape, lambda: packed))
    return Layout(tuple(tensors), {"format": "pack-quantized", "weights": weights})


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes along the last axis into the bytes of whole 32-bit words."""
    packed = pack_low_first(pad_last(codes, 32 // math.gcd(32, bits)), bits)
    return np.ascontiguousarray(packed[..., : -(-codes.shape[-1] * bits // 32) * 4])


def _int8(name: str, q: QuantizedArray, scale: ToWrite, weights: dict[str, Any]) -> Layout:
    tensors = [ToWrite(name, "I8", q.shape, lambda: _bytes(q, 128).view(np.int8)), scale]
    if q.zero_point is not None:
        zeros = (np.asarray(q.zero_point) ^ np.uint8(128)).view(np.int8)
        tensors.append(ToWrite(f"{name}_zero_point", "I8", zeros.shape, lambda: zeros))
    return Layout(tuple(tensors), {"format": "int-quantized", "weights": weights})


def _fp8(name: str, q: QuantizedArray, scale: np.ndarray, weights: dict[str, Any]) -> Layout:
    tiles = scale[::128]
    if q.format.block_size == "tensor":
        scale, weights = scale[0], weights | {"strategy": "tensor"}
    elif (
        q.format.block_size == 128
        and min(scale.shape) > 1  # otherwise the shape could mean something else
        and (scale == np.repeat(tiles, 128, axis=0)[: len(scale)]).all()
    ):
        scale = tiles
        weights = {k: v for k, v in weights.items() if k != "group_size"}
        weights |= {"strategy": "block", "block_structure": [128, 128]}
    scale = narrow(scale, q.dtype)
    tensors = (
        ToWrite(name, "F8_E4M3", q.shape, lambda: _bytes(q, 0)),
        ToWrite(f"{name}_scale", NAME_OF[scale.dtype.name], scale.shape, lambda: scale),
    )
    return Layout(tensors, {"format": "float-quantized", "weights": weights})


def _bytes(q: QuantizedArray, sign: int) -> np.ndarray:
    return rows_of(q)(0, q.shape[0]) ^ np.uint8(sign)


def _pairs(name: str, q: QuantizedArray) -> ToWrite:
    """Two codes in a byte, the first in the low bits."""
    shape = (q.shape[0], q.shape[1] // 2)

    def codes() -> np.ndarray:
        out = np.empty(shape, np.uint8)
        each_part(q, lambda part: pack_low_first(part, 4), out)
        return out

    return ToWrite(f"{name}_packed", "U8", shape, codes)


def _nvfp4(name: str, q: QuantizedArray) -> Layout:
    inner: Any = q.scale_bits
    outer = np.unique(np.asarray(inner.scale))
    with np.errstate(divide="ignore", over="ignore"):
        whole = np.float32(1) / outer
    if len(outer) != 1 or not np.isfinite(whole).all() or whole[0] == 0:
        refuse(name, q, "its scales must share one scale for the tensor, which must have a reciprocal")
    tensors = (
        _pairs(name, q),
        ToWrite(f"{name}_scale", "F8_E4M3", (q.shape[0], q.shape[1] // 16), lambda: rows_of(inner)(0, q.shape[0])),
        ToWrite(f"{name}_global_scale", "F32", (1,), lambda: whole),
    )
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor_group"}
    weights |= {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    return Layout(tensors, {"format": "nvfp4-pack-quantized", "weights": weights})


def _mxfp4(name: str, q: QuantizedArray) -> Layout:
    exponents = np.asarray(q.scale_bits)
    tensors = (
        _pairs(name, q),
        ToWrite(f"{name}_scale", "U8", exponents.shape, lambda: exponents),
    )
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "strategy": "group"}
    weights |= {"group_size": 32, "scale_dtype": "torch.uint8"}
    return Layout(tensors, {"format": "mxfp4-pack-quantized", "weights": weights})


def settings(schemes: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Returns what `config.json` says."""
    groups: list[dict[str, Any]] = []
    for name, scheme in schemes.items():
        if scheme is None:
            continue
        layer = name.removesuffix(".weight")
        same = next((g for g in groups if (g["format"], g["weights"]) == (scheme["format"], scheme["weights"])), None)
        if same is None:
            groups.append({"targets": [layer], **scheme})
        else:
            same["targets"].append(layer)
    if not groups:
        return {}
    formats = {g["format"] for g in groups}
    common = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{n}": group for n, group in enumerate(groups)},
        "ignore": [],
    }
    return {"quantization_config": common}
