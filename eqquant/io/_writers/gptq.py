"""Writes weights as GPTQModel does, in its checkpoint format `gptq_v2`.

The layout of `_dialects/gptq.py`.

Codes are packed along the inputs, zero points along the outputs, which must both fill words of 32 bits. A symmetric
weight has the middle code as its zero point. The groups of a `PermutedArray` are written as act-order.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import Int2, Int3, Int4, Int8
from ..._wrappers.permuted import PermutedArray
from .._bits import pack_words
from .._tensors import NewTensor
from ._layout import as_tensor, common_scheme, finite_scales, narrow, pack_rows, refuse, Scheme, WrittenArray


NAME = "gptq"
HOLDS_TILES = False
FITS = (
    "Int2, Int3, Int4 or Int8, of two dimensions along the last axis, which must consist of whole blocks; both lengths "
    "must fill whole words of 32 bits, and the name must end with '.weight'"
)


def layout(name: str, x: QuantizedArray | PermutedArray) -> WrittenArray:
    """Returns the tensors of an array."""
    q, order = (x.array, np.asarray(x.order)) if isinstance(x, PermutedArray) else (x, None)
    if isinstance(x, PermutedArray) and (x.axis != -1 or x.order.ndim != 1):
        refuse(name, q, f"{FITS}; only its inputs may be in another order")
    bits, block = q.format.bits, q.format.block_size
    fits = isinstance(q.format, Int2 | Int3 | Int4 | Int8)
    plain = q.ndim == 2 and q.axis == -1 and name.endswith(".weight")
    if not fits or not plain or (isinstance(block, int) and q.shape[1] % block) or any(n * bits % 32 for n in q.shape):
        refuse(name, q, FITS)
    out, length = q.shape
    scale = np.ascontiguousarray(narrow(finite_scales(name, q), q.dtype).T)
    symmetric = q.zero_point is None
    zeros = np.full(scale.shape, 2 ** (bits - 1), np.uint8) if symmetric else np.asarray(q.zero_point).T
    back = slice(None) if order is None else np.argsort(order)
    groups = (np.arange(length, dtype=np.int32) // (length // len(scale)))[back]
    pack = lambda codes: pack_words(codes[:, back], bits)
    base = name.removesuffix("weight")
    tensors = (
        NewTensor(f"{base}qweight", "I32", (length * bits // 32, out), lambda: pack_rows(q, pack).T),
        as_tensor(f"{base}qzeros", pack_words(zeros, bits)),
        as_tensor(f"{base}scales", scale),
        as_tensor(f"{base}g_idx", groups),
    )
    size = block if isinstance(block, int) else -1
    return WrittenArray(tensors, {"bits": bits, "group_size": size, "sym": symmetric, "desc_act": order is not None})


def settings(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, object]:
    """Returns the settings for `config.json`."""
    what = "A model of GPTQ must have the same bits, block size and symmetry"
    scheme = common_scheme(schemes, what, free=("desc_act",))
    about = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "lm_head": False}
    permuted = any(scheme["desc_act"] for scheme in schemes.values())
    return {"quantization_config": {**about, **scheme, "desc_act": permuted}}
