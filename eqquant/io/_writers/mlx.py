"""Weights as MLX saves them: the layout of `_dialects/mlx.py`.

The settings of the first quantized layer stand for all in the configuration, and those of each that differs under its
name.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import MLX, MXFP4, MXFP8, NVFP4
from .._safetensors import ToWrite
from .._stored import NAME_OF
from .layout import dense, each_part, Layout, pack_low_first, refuse, rows_of, scales_of


NAME = "mlx"
FITS = (
    "MLX in blocks of 32, 64 or 128, MXFP4, MXFP8('e4m3'), or NVFP4 without a scale for the tensor, of two dimensions "
    "or more along the last axis, which must consist of whole blocks, under a name that ends with '.weight'"
)

_MODES = (("mxfp4", MXFP4()), ("mxfp8", MXFP8()), ("nvfp4", NVFP4()))
_GROUPS = (32, 64, 128)


def layout(name: str, x: Any) -> Layout:
    """Returns the tensors of an array."""
    if not isinstance(x, QuantizedArray):
        return dense(name, x)
    format, block = x.format, x.format.block_size
    affine = isinstance(format, MLX) and block in _GROUPS
    mode = "affine" if affine else next((mode for mode, of_mode in _MODES if format == of_mode), None)
    rows = x.ndim >= 2 and x.axis == -1 and name.endswith(".weight")
    if mode is None or not rows or not isinstance(block, int) or x.shape[-1] % block:
        refuse(name, x, FITS)
    scales_of(name, x)
    base, bits = name.removesuffix("weight"), format.bits
    tensors = [ToWrite(name, "U32", (*x.shape[:-1], x.shape[-1] * bits // 32), lambda: _codes(x))]
    shape, inner = (*x.shape[:-1], x.shape[-1] // block), x.scale_bits
    if isinstance(format, MLX):
        for part, stored in (("scales", inner), ("biases", x.offset_bits)):
            read = lambda stored=stored: np.asarray(stored).view(np.dtype(format.scale_dtype))
            tensors.append(ToWrite(f"{base}{part}", NAME_OF[format.scale_dtype], shape, read))
    elif isinstance(inner, QuantizedArray):
        if (inner.scale != 1).any():
            refuse(name, x, "MLX has no scale of a tensor, so here it must be one")
        codes = lambda: rows_of(inner)(0, x.size // x.shape[-1]).reshape(shape)
        tensors.append(ToWrite(f"{base}scales", "U8", shape, codes))
    else:
        tensors.append(ToWrite(f"{base}scales", "U8", shape, lambda: np.asarray(inner)))
    return Layout(tuple(tensors), {"group_size": block, "bits": bits, "mode": mode})


def _codes(q: QuantizedArray) -> np.ndarray:
    words = q.shape[-1] * q.format.bits // 32
    out = np.empty((q.size // q.shape[-1], words), np.uint32)
    pack = lambda codes: np.ascontiguousarray(pack_low_first(codes, q.format.bits)).view(np.uint32)
    each_part(q, pack, out)
    return out.reshape(*q.shape[:-1], words)


def settings(schemes: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Returns what `config.json` says."""
    quantized = {name.removesuffix(".weight"): scheme for name, scheme in schemes.items() if scheme is not None}
    if not quantized:
        return {}
    first = next(iter(quantized.values()))
    own = {name: scheme for name, scheme in quantized.items() if scheme != first}
    return {"quantization": {**first, **own}}
