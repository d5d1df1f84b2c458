"""Weights as bitsandbytes saves them: the layout of `_dialects/bitsandbytes.py`.

    4 bits   P, P.absmax, P.quant_map, P.quant_state.bitsandbytes__nf4 or __fp4
             scales that are quantized themselves, where blocks of them fit: also P.nested_absmax, P.nested_quant_map
    8 bits   layer.weight, layer.SCB, layer.weight_format of 0: LLM.int8 rows. SCB is the scale times 127, rounded to
             float32: so values are equal up to rounding, as they are for bitsandbytes, which multiplies by a rounded
             1 / 127

Blocks follow each other over the ends of rows there, so rows must consist of whole blocks, or be one row. The table of
nested scales is our own: it stands in the file, and bitsandbytes uses the one that it finds.
"""

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..._array.array import QuantizedArray
from ..._array.codes import row_length
from ..._formats import Codebook, Int8, NF4
from ..._formats.base import find_levels
from .._tensors import FLOAT_NAMES, NewTensor
from ._layout import as_tensor, finite_scales, layers_of_weights, pack_rows, refuse, Scheme, unpack_rows, WrittenArray


NAME = "bitsandbytes"
HOLDS_TILES = False
FITS = (
    "NF4, or a `Codebook` of the values of FP4, with whole blocks in each row, or with all axes quantized as one; or "
    "Int8() of two dimensions"
)

# bitsandbytes divides in float32.
_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
_FP4 = np.concatenate([_FP4, -_FP4])
# The sizes of blocks for which bitsandbytes has kernels.
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def layout(name: str, q: QuantizedArray) -> WrittenArray:
    """Returns the tensors of an array."""
    format, block = q.format, q.format.block_size
    if isinstance(format, Int8) and format.symmetric and block is None:
        return _int8(name, q)
    order = _order(q)
    all_axes = q.axis == tuple(range(-q.ndim, 0)) or (q.axis == -1 and q.size == q.shape[-1])
    whole = q.axis == -1 and isinstance(block, int) and q.shape[-1] % block == 0
    if order is None or block not in _BLOCKS or not (whole or all_axes) or q.dtype.name not in FLOAT_NAMES:
        refuse(name, q, FITS)
    scale = finite_scales(name, q)
    kind, table = ("nf4", np.asarray(format.codebook, np.float32)) if isinstance(format, NF4) else ("fp4", _FP4)
    state = {"quant_type": kind, "blocksize": block, "dtype": q.dtype.name, "shape": list(q.shape)}
    codes = NewTensor(name, "U8", (-(-q.size // 2), 1), lambda: _codes(q, order))
    tensors = [codes, as_tensor(f"{name}.quant_map", table)]
    if (nested := _nest_scales(q)) is None:
        tensors.append(as_tensor(f"{name}.absmax", scale.reshape(-1)))
    else:
        size, inner, outer, levels = nested
        state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": 0.0}
        tensors.append(NewTensor(f"{name}.absmax", "U8", (scale.size,), lambda: np.asarray(inner.codes).reshape(-1)))
        tensors += [as_tensor(f"{name}.nested_absmax", outer), as_tensor(f"{name}.nested_quant_map", levels)]
    raw = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors.append(as_tensor(f"{name}.quant_state.bitsandbytes__{kind}", raw))
    return WrittenArray(tuple(tensors), {"kind": kind, "nested": nested is not None})


def _order(q: QuantizedArray) -> np.ndarray | None:
    """Returns the code of bitsandbytes for each of ours, or `None` if it has no such table."""
    if isinstance(q.format, NF4):
        return np.arange(16, dtype=np.uint8)
    if isinstance(q.format, Codebook) and np.array_equal(q.format.codebook, np.unique(_FP4)):
        # FP4 has two codes of zero, of which this takes the first.
        codes = [int(np.flatnonzero(_FP4 == level)[0]) for level in q.format.codebook]
        return np.array([*codes, codes[-1]], np.uint8)  # decoding clips the last code, too
    return None


def _codes(q: QuantizedArray, order: np.ndarray) -> np.ndarray:
    """Returns codes of four bits, the first of a byte in its high bits."""
    pairs = lambda codes: codes[..., ::2] << 4 | codes[..., 1::2]
    if q.size % 2:  # a single row, padded as bitsandbytes pads; others have an even number of codes, since blocks have
        return pairs(np.append(order[unpack_rows(q)[0]], np.uint8(7)))[:, None]
    return pack_rows(q, lambda codes: pairs(order[codes])).reshape(-1, 1)


def _nest_scales(q: QuantizedArray) -> tuple[int, QuantizedArray, np.ndarray, np.ndarray] | None:
    """Returns nested scales as bitsandbytes stores them, or `None` if it cannot.

    The number of scales that share an outer one, both, and the table of codes.
    """
    inner = q.scale_bits
    if not isinstance(inner, QuantizedArray) or inner.format.bits != 8 or not isinstance(inner.format.block_size, int):
        return None
    outer, per_outer = np.asarray(inner.scale), inner.format.block_size
    rows, blocks = outer.size // outer.shape[-1], row_length(inner)
    size = per_outer if rows == 1 else math.gcd(blocks, per_outer)
    if size not in _BLOCKS:
        return None
    values = outer[..., np.arange(0, blocks, size) // per_outer]
    return size, inner, values.reshape(-1), np.asarray(find_levels(inner.format)[0], np.float32)


def _int8(name: str, q: QuantizedArray) -> WrittenArray:
    if not name.endswith(".weight") or q.ndim != 2 or q.axis != -1:
        refuse(name, q, f"{FITS}; the name must end with '.weight'")
    with np.errstate(over="ignore"):
        absmax = finite_scales(name, q)[:, 0] * np.float32(127)
    if not np.isfinite(absmax).all():
        refuse(name, q, "its largest magnitudes must be finite")
    tensors = (
        NewTensor(name, "I8", q.shape, lambda: (unpack_rows(q) ^ np.uint8(128)).view(np.int8)),
        as_tensor(f"{name.removesuffix('.weight')}.SCB", absmax),
        as_tensor(f"{name}_format", np.array(0, np.uint8)),
    )
    return WrittenArray(tensors, {"kind": "int8", "nested": False})


def settings(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, object]:
    """Returns the settings for `config.json`."""
    example = {str(scheme["kind"]): name for name, scheme in schemes.items()}
    kind, *others = example
    if others:
        raise ValueError(f"A model of bitsandbytes must be of one kind: nf4, fp4 or int8. Got {example}.")
    about: dict[str, object] = {"quant_method": "bitsandbytes"}
    about |= {"load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8"}
    # Weights without scales: an embedding, which nothing replaces, or a layer that must stay dense.
    about["llm_int8_skip_modules"] = layers_of_weights(plain)
    if kind != "int8":
        about |= {"bnb_4bit_quant_type": kind}
        about |= {"bnb_4bit_use_double_quant": any(scheme["nested"] for scheme in schemes.values())}
        about |= {"bnb_4bit_quant_storage": "uint8"}
    return {"quantization_config": about}
