"""Writes weights as compressed-tensors does: layouts of `_dialects/scaled_tensors.py`.

    Int2 to Int6   pack-quantized; codes of 3, 5 and 6 bits lie across words, without gaps
    Int8           int-quantized
    FP8("e4m3")    float-quantized; scales of tiles, also of 128 x 128 values where they are equal for each 128 rows
    MXFP4          mxfp4-pack-quantized
    NVFP4          nvfp4-pack-quantized. Scales are divided by one number for the tensor, the reciprocal of ours: so
                   values are equal up to rounding in float32

Each combination of bits, groups and symmetry is a group of the configuration, which lists its layers by name.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from ..._array.array import QuantizedArray
from ..._array.codes import spread_tiles
from ..._formats import FP8, Int2, Int3, Int4, Int5, Int6, Int8, MXFP4, NVFP4
from ..._formats.base import has_zero_points
from ..._numerics.blocks import BlockSize
from .._bits import pack_low_first, pack_words
from .._tensors import NewTensor
from ._layout import as_tensor, finite_scales, narrow, pack_rows, refuse, Scheme, unpack_rows, WrittenArray


NAME = "compressed-tensors"
HOLDS_TILES = True
FITS = (
    "Int2 to Int6, Int8, FP8('e4m3'), MXFP4 or NVFP4, of two dimensions along the last axis, which must consist of "
    "whole blocks (the last tiles may be cut), under a name that ends with '.weight'"
)


def layout(name: str, q: QuantizedArray) -> WrittenArray:
    """Returns the tensors of an array."""
    q = q if isinstance(q.format, FP8) else spread_tiles(q)
    format, block = q.format, q.format.block_size
    kinds = (Int2, Int3, Int4, Int5, Int6, Int8, FP8, MXFP4, NVFP4)
    fits = isinstance(format, kinds) and getattr(format, "kind", "e4m3") == "e4m3"
    plain = q.ndim == 2 and q.axis == -1 and name.endswith(".weight")
    if not fits or not plain or (isinstance(block, int) and q.shape[1] % block):
        refuse(name, q, FITS)
    scale = finite_scales(name, q)
    if isinstance(format, MXFP4 | NVFP4):
        return _small_floats(name, q)
    groups: Scheme = {"strategy": "group", "group_size": block} if isinstance(block, int) else {"strategy": "channel"}
    if isinstance(format, FP8):
        scale, groups = _tiles(scale, block, groups)
    narrowed = as_tensor(f"{name}_scale", narrow(scale, q.dtype))
    weights: dict[str, object] = {"num_bits": format.bits, "type": "float" if isinstance(format, FP8) else "int"}
    weights |= {"symmetric": not has_zero_points(format), "dynamic": False, **groups}
    signed = lambda codes: (codes ^ np.uint8(128)).view(np.int8)
    pack = lambda codes: pack_words(codes, format.bits)
    if isinstance(format, FP8):
        kind, tensors = "float-quantized", [NewTensor(name, "F8_E4M3", q.shape, lambda: unpack_rows(q)), narrowed]
    elif isinstance(format, Int8):
        kind, tensors = "int-quantized", [NewTensor(name, "I8", q.shape, lambda: signed(unpack_rows(q))), narrowed]
    else:
        words = (q.shape[0], -(-q.shape[1] * format.bits // 32))
        packed = NewTensor(f"{name}_packed", "I32", words, lambda: pack_rows(q, pack))
        kind, tensors = "pack-quantized", [packed, narrowed, as_tensor(f"{name}_shape", np.array(q.shape, np.int64))]
    if q.zero_point is not None:
        zeros = np.asarray(q.zero_point)
        stored = signed(zeros) if isinstance(format, Int8) else np.ascontiguousarray(pack(zeros.T).T)  # along the rows
        tensors.append(as_tensor(f"{name}_zero_point", stored))
    return WrittenArray(tuple(tensors), {"format": kind, "weights": weights})


def _tiles(scale: np.ndarray, block: BlockSize, groups: Scheme) -> tuple[np.ndarray, Scheme]:
    """Returns the scales of fp8 without repeats.

    One for all, or one for each 128 x 128 values.
    """
    tiles = scale[::128]
    if block == "tensor" and (scale == scale[0]).all():  # not after a reshape of several matrices
        return scale[0], {"strategy": "tensor"}
    if isinstance(block, tuple):
        return scale[:: block[0]], {"strategy": "block", "block_structure": [*block]}
    # With one row or column of them the shape could mean something else.
    if block == 128 and min(scale.shape) > 1 and (scale == np.repeat(tiles, 128, axis=0)[: len(scale)]).all():
        return tiles, {"strategy": "block", "block_structure": [128, 128]}
    return scale, groups


def _small_floats(name: str, q: QuantizedArray) -> WrittenArray:
    shape, inner = (q.shape[0], q.shape[1] // 2), q.scale_bits
    codes = NewTensor(f"{name}_packed", "U8", shape, lambda: pack_rows(q, lambda codes: pack_low_first(codes, 4)))
    weights: dict[str, object] = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    if not isinstance(inner, QuantizedArray):
        weights |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        scales = as_tensor(f"{name}_scale", np.asarray(inner))
        return WrittenArray((codes, scales), {"format": "mxfp4-pack-quantized", "weights": weights})
    outer = np.unique(np.asarray(inner.scale))
    with np.errstate(divide="ignore", over="ignore"):
        whole = np.float32(1) / outer
    if len(outer) != 1 or not np.isfinite(whole).all():
        refuse(name, q, "its scales must share one scale for the tensor, which must have a reciprocal")
    weights |= {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    shape = (q.shape[0], q.shape[1] // 16)
    scales = NewTensor(f"{name}_scale", "F8_E4M3", shape, lambda: unpack_rows(inner))
    tensors = (codes, scales, as_tensor(f"{name}_global_scale", whole))
    return WrittenArray(tensors, {"format": "nvfp4-pack-quantized", "weights": weights})


def settings(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, object]:
    """Returns the settings for `config.json`."""
    groups: dict[str, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(json.dumps(scheme), []).append(name.removesuffix(".weight"))
    described = [{"targets": layers, **json.loads(scheme)} for scheme, layers in groups.items()]
    formats = {group["format"] for group in described}
    common = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{n}": group for n, group in enumerate(described)},
        "ignore": [],
    }
    return {"quantization_config": common}
