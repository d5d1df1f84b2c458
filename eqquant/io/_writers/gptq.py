"""Weights as GPTQModel saves them, in its checkpoint format `gptq_v2`: the layout of `_dialects/gptq.py`.

Codes are packed along the inputs, zero points along the outputs, which must both fill words of 32 bits. A symmetric
weight has the middle code as its zero point. The groups of an `eqquant.PermutedArray` are those of act-order.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import Int2, Int3, Int4, Int8
from ..._wrappers.permuted import PermutedArray
from .._safetensors import ToWrite
from .._stored import NAME_OF
from .layout import dense, each_part, Layout, narrow, pack_low_first, refuse, scales_of


NAME = "gptq"
FITS = (
    "Int2, Int3, Int4 or Int8, of two dimensions along the last axis, which must consist of whole blocks; both lengths "
    "must fill whole words of 32 bits, and the name must end with '.weight'"
)


def layout(name: str, x: Any) -> Layout:
    """Returns the tensors of an array."""
    order = None
    if isinstance(x, PermutedArray):
        if x.axis != -1 or x.order.ndim != 1:
            refuse(name, x.array, f"{FITS}; only its inputs may be in another order")
        x, order = x.array, np.asarray(x.order)
    if not isinstance(x, QuantizedArray):
        return dense(name, x)
    format, block = x.format, x.format.block_size
    plain = x.ndim == 2 and x.axis == -1 and name.endswith(".weight")
    if not isinstance(format, (Int2, Int3, Int4, Int8)) or not plain or (isinstance(block, int) and x.shape[1] % block):
        refuse(name, x, FITS)
    bits, (out, length) = format.bits, x.shape
    if length * bits % 32 or out * bits % 32:
        refuse(name, x, FITS)
    scale = np.ascontiguousarray(narrow(scales_of(name, x), x.dtype).T)
    if x.zero_point is None:
        zeros = np.full(scale.shape, 2 ** (bits - 1), np.uint8)
    else:
        zeros = np.asarray(x.zero_point).T
    zeros = np.ascontiguousarray(pack_low_first(zeros, bits)).view(np.int32)
    groups = np.arange(length, dtype=np.int32) // (length // len(scale))
    if order is not None:
        groups[order] = groups.copy()
    base = name.removesuffix("weight")
    tensors = (
        ToWrite(f"{base}qweight", "I32", (length * bits // 32, out), lambda: _codes(x, order)),
        ToWrite(f"{base}qzeros", "I32", zeros.shape, lambda: zeros),
        ToWrite(f"{base}scales", NAME_OF[scale.dtype.name], scale.shape, lambda: scale),
        ToWrite(f"{base}g_idx", "I32", groups.shape, lambda: groups),
    )
    size = block if isinstance(block, int) else -1
    return Layout(
        tensors, {"bits": bits, "group_size": size, "sym": x.zero_point is None, "desc_act": order is not None}
    )


def _codes(q: QuantizedArray, order: np.ndarray | None) -> np.ndarray:
    bits, (out, length) = q.format.bits, q.shape
    words = np.empty((length * bits // 32, out), np.int32)
    back = None if order is None else np.argsort(order)

    def pack(codes: np.ndarray) -> np.ndarray:
        codes = codes if back is None else codes.take(back, axis=1)
        return np.ascontiguousarray(pack_low_first(codes, bits)).view(np.int32)

    each_part(q, pack, words.T)
    return words


def settings(schemes: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Returns what `config.json` says."""
    quantized = [(name, scheme) for name, scheme in schemes.items() if scheme is not None]
    if not quantized:
        return {}
    (first, scheme), *others = quantized
    same = lambda scheme: {key: value for key, value in scheme.items() if key != "desc_act"}
    for name, other in others:
        if same(other) != same(scheme):
            raise ValueError(
                f"A model of GPTQ must have the same bits, block size and symmetry everywhere. Got {scheme} for "
                f"{first!r}, {other} for {name!r}."
            )
    common = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "lm_head": False}
    permuted = any(scheme["desc_act"] for _, scheme in quantized)
    return {"quantization_config": {**common, **scheme, "desc_act": permuted}}
