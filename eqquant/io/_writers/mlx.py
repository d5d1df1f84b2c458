"""Weights as MLX saves them: the layout of `_dialects/mlx.py`.

The settings of the first quantized layer stand for all in the configuration, and the settings of each that differs
under its name.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import MLX
from .._bits import pack_words
from .._dialects.mlx import MODES
from .._tensors import NewTensor
from ._layout import as_tensor, finite_scales, pack_rows, refuse, Scheme, unpack_rows, WrittenArray


NAME = "mlx"
HOLDS_TILES = False
FITS = (
    "MLX in blocks of 32, 64 or 128, MXFP4, MXFP8('e4m3'), or NVFP4 without a scale for the tensor, of two dimensions "
    "or more along the last axis, which must consist of whole blocks, under a name that ends with '.weight'"
)

_GROUPS = (32, 64, 128)


def layout(name: str, q: QuantizedArray) -> WrittenArray:
    """Returns the tensors of an array."""
    format, block = q.format, q.format.block_size
    affine = isinstance(format, MLX) and block in _GROUPS
    mode = "affine" if affine else next((mode for mode, other in MODES.items() if format == other), None)
    rows = q.ndim >= 2 and q.axis == -1 and name.endswith(".weight")
    if mode is None or not rows or not isinstance(block, int) or q.shape[-1] % block:
        refuse(name, q, FITS)
    finite_scales(name, q)
    base, bits, inner = name.removesuffix("weight"), format.bits, q.scale_bits
    shape, blocks = (*q.shape[:-1], q.shape[-1] * bits // 32), (*q.shape[:-1], q.shape[-1] // block)
    pack = lambda codes: pack_words(codes, bits).view(np.uint32)
    tensors = [NewTensor(name, "U32", shape, lambda: pack_rows(q, pack).reshape(shape))]
    if isinstance(format, MLX):
        floats = lambda bits: np.asarray(bits).view(np.dtype(format.scale_dtype))
        tensors += [as_tensor(f"{base}scales", floats(inner)), as_tensor(f"{base}biases", floats(q.offset_bits))]
    elif isinstance(inner, QuantizedArray):
        if (inner.scale != 1).any():
            refuse(name, q, "MLX has no scale of a tensor, so here it must be one")
        tensors.append(NewTensor(f"{base}scales", "U8", blocks, lambda: unpack_rows(inner).reshape(blocks)))
    else:
        tensors.append(as_tensor(f"{base}scales", np.asarray(inner)))
    return WrittenArray(tuple(tensors), {"group_size": block, "bits": bits, "mode": mode})


def settings(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, object]:
    """Returns the settings for `config.json`."""
    layers = {name.removesuffix(".weight"): scheme for name, scheme in schemes.items()}
    first = next(iter(layers.values()))
    return {"quantization": {**first, **{name: scheme for name, scheme in layers.items() if scheme != first}}}
