"""Writes weights as ModelOpt (NVIDIA) does: layouts of `_dialects/scaled_tensors.py`.

    NVFP4                   P uint8 (..., out, in / 2), the first code in the low bits; P_scale float8_e4m3; P_scale_2
                            float32, which multiplies these: one, or one for each matrix
    FP8("e4m3", "tensor")   P float8_e4m3, P_scale float32: one, or one for each matrix

Values are ours bit for bit, since readers multiply by the same scales. Activations stay as the reader has them.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import FP8, NVFP4
from .._bits import pack_low_first
from .._tensors import NewTensor
from ._layout import as_tensor, finite_scales, layers_of_weights, pack_rows, refuse, Scheme, unpack_rows, WrittenArray


NAME = "modelopt"
HOLDS_TILES = False
FITS = (
    "NVFP4 or FP8('e4m3', 'tensor'), of two dimensions or more along the last axis, which must consist of whole "
    "blocks, with one scale for each matrix, under a name that ends with '.weight'"
)


def layout(name: str, q: QuantizedArray) -> WrittenArray:
    """Returns the tensors of an array."""
    small, inner = isinstance(q.format, NVFP4), q.scale_bits
    fits = small or q.format == FP8("e4m3", "tensor")
    if not fits or q.ndim < 2 or q.axis != -1 or not name.endswith(".weight") or (small and q.shape[-1] % 16):
        refuse(name, q, FITS)
    finite_scales(name, q)
    scale = np.asarray(inner.scale if isinstance(inner, QuantizedArray) else q.scale)
    outer = scale[..., 0, 0]  # of each matrix
    if (scale != outer[..., None, None]).any():
        refuse(name, q, FITS)
    outer = outer.flat[0] if (outer == outer.flat[0]).all() else outer
    if not isinstance(inner, QuantizedArray):
        codes = NewTensor(name, "F8_E4M3", q.shape, lambda: unpack_rows(q).reshape(q.shape))
        return WrittenArray((codes, as_tensor(f"{name}_scale", np.asarray(outer))), {"quant_algo": "FP8"})
    shape, blocks = (*q.shape[:-1], q.shape[-1] // 2), (*q.shape[:-1], q.shape[-1] // 16)
    tensors = (
        NewTensor(name, "U8", shape, lambda: pack_rows(q, lambda codes: pack_low_first(codes, 4)).reshape(shape)),
        NewTensor(f"{name}_scale", "F8_E4M3", blocks, lambda: unpack_rows(inner).reshape(blocks)),
        as_tensor(f"{name}_scale_2", np.asarray(outer)),
    )
    return WrittenArray(tensors, {"quant_algo": "W4A16_NVFP4", "group_size": 16})


def settings(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, object]:
    """Returns the settings for `config.json`."""
    layers = {name.removesuffix(".weight"): scheme for name, scheme in schemes.items()}
    first, *others = {tuple(scheme.items()) for scheme in schemes.values()}
    about: dict[str, object] = {"quant_method": NAME, "producer": {"name": NAME}}
    about |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers} if others else dict(first)
    about["ignore"] = layers_of_weights(plain)
    return {"quantization_config": about}
