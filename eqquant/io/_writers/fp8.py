"""Writes weights as fp8 of Hugging Face, such as of DeepSeek.

A layout of `_dialects/scaled_tensors.py`:

    FP8("e4m3", (rows, columns))   P float8_e4m3 (out, in); P_scale_inv float32, which multiplies: one for each tile

A model has tiles of one size. Activations are quantized by those who open the file, a scale for each group of columns.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import FP8
from .._tensors import NewTensor
from ._layout import (
    as_tensor,
    common_scheme,
    finite_scales,
    layers_of_weights,
    refuse,
    Scheme,
    unpack_rows,
    WrittenArray,
)


NAME = "fp8"
HOLDS_TILES = True
FITS = (
    "FP8('e4m3', (128, 128)) or other tiles, of two dimensions along the last axis, under a name that ends with "
    "'.weight'"
)


def layout(name: str, q: QuantizedArray) -> WrittenArray:
    """Returns the tensors of an array."""
    tile = q.format.block_size if isinstance(q.format, FP8) and q.format.kind == "e4m3" else None
    if not isinstance(tile, tuple) or q.ndim != 2 or q.axis != -1 or not name.endswith(".weight"):
        refuse(name, q, FITS)
    scale = np.ascontiguousarray(finite_scales(name, q)[:: tile[0]])
    codes = NewTensor(name, "F8_E4M3", q.shape, lambda: unpack_rows(q))
    return WrittenArray((codes, as_tensor(f"{name}_scale_inv", scale)), {"weight_block_size": [*tile]})


def settings(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, object]:
    """Returns the settings for `config.json`."""
    scheme = common_scheme(schemes, "A model of fp8 must have the same tiles")
    about = {"quant_method": NAME, "activation_scheme": "dynamic", "fmt": "e4m3"}
    return {"quantization_config": {**about, **scheme, "modules_to_not_convert": layers_of_weights(plain)}}
