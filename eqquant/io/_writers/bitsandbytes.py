"""Weights as bitsandbytes saves them: the layout of `_dialects/bitsandbytes.py`.

    4 bits   P, P.absmax, P.quant_map, P.quant_state.bitsandbytes__nf4 or __fp4
             scales that are quantized themselves, where blocks of them fit: also P.nested_absmax, P.nested_quant_map
    8 bits   layer.weight, layer.SCB: LLM.int8 rows. SCB is the scale times 127, rounded to float32: so values are equal
             up to rounding, as they are for bitsandbytes, which multiplies by a rounded 1 / 127

Blocks follow each other over the ends of rows there, so rows must consist of whole blocks, or be one row. The table of
nested scales is our own: it stands in the file, and bitsandbytes uses the one that it finds.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..._array.array import QuantizedArray
from ..._formats import Codebook, Int8, NF4
from ..._formats.base import levels_of
from .._safetensors import ToWrite
from .layout import dense, each_part, Layout, refuse, rows_of, scales_of


NAME = "bitsandbytes"
FITS = (
    "NF4, or a `Codebook` of the values of FP4, with whole blocks in each row, or with all axes quantized as one; or "
    "Int8() of two dimensions"
)

# bitsandbytes divides in float32.
_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
_FP4 = np.concatenate([_FP4, -_FP4])
# The sizes of blocks for which bitsandbytes has kernels.
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = ("float32", "float16", "bfloat16")


def layout(name: str, x: Any) -> Layout:
    """Returns the tensors of an array."""
    if not isinstance(x, QuantizedArray):
        return dense(name, x)
    if isinstance(x.format, Int8) and x.format.symmetric and x.format.block_size is None:
        return _int8(name, x)
    order = _order(x)
    block = x.format.block_size
    all_axes = x.axis == tuple(range(-x.ndim, 0)) or (x.axis == -1 and x.size == x.shape[-1])
    whole = x.axis == -1 and isinstance(block, int) and x.shape[-1] % block == 0
    if order is None or block not in _BLOCKS or not (whole or all_axes) or x.dtype.name not in _DTYPES:
        refuse(name, x, FITS)
    scale = scales_of(name, x)
    kind = "nf4" if isinstance(x.format, NF4) else "fp4"
    table = np.asarray(x.format.codebook, np.float32) if isinstance(x.format, NF4) else _FP4
    state = {"quant_type": kind, "blocksize": block, "dtype": x.dtype.name, "shape": list(x.shape)}
    tensors = [ToWrite(name, "U8", (-(-x.size // 2), 1), lambda: _codes(x, order))]
    tensors.append(ToWrite(f"{name}.quant_map", "F32", (16,), lambda: table))
    if (outer := _outer(x)) is None:
        tensors.append(ToWrite(f"{name}.absmax", "F32", (scale.size,), lambda: scale.reshape(-1)))
    else:
        size, values, levels = outer
        state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": 0.0}
        inner: Any = x.scale_bits
        tensors.append(ToWrite(f"{name}.absmax", "U8", (scale.size,), lambda: np.asarray(inner.codes).reshape(-1)))
        tensors.append(ToWrite(f"{name}.nested_absmax", "F32", values.shape, lambda: values))
        tensors.append(ToWrite(f"{name}.nested_quant_map", "F32", (256,), lambda: levels))
    raw = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors.append(ToWrite(f"{name}.quant_state.bitsandbytes__{kind}", "U8", raw.shape, lambda: raw))
    return Layout(tuple(tensors), {"kind": kind, "nested": outer is not None})


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
    if q.size % 2:  # a single row, padded as bitsandbytes pads
        codes = np.append(order[rows_of(q)(0, 1)[0]], np.uint8(7))
        return (codes[::2] << 4 | codes[1::2])[:, None]
    # A row has an even number of codes, since blocks have.
    out = np.empty((q.size // q._length, q._length // 2), np.uint8)

    def pairs(codes: np.ndarray) -> np.ndarray:
        codes = order[codes]
        return codes[:, ::2] << 4 | codes[:, 1::2]

    each_part(q, pairs, out)
    return out.reshape(-1, 1)


def _outer(q: QuantizedArray) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Returns how many scales share an outer one, these, and the table of codes, if bitsandbytes can nest them."""
    inner = q.scale_bits
    if not isinstance(inner, QuantizedArray) or inner.format.bits != 8 or not isinstance(inner.format.block_size, int):
        return None
    outer, per_outer = np.asarray(inner.scale), inner.format.block_size
    rows, blocks = outer.size // outer.shape[-1], inner._length
    size = per_outer if rows == 1 else math.gcd(blocks, per_outer)
    if size not in _BLOCKS:
        return None
    values = outer[..., np.arange(0, blocks, size) // per_outer]
    return size, values.reshape(-1), np.asarray(levels_of(inner.format)[0], np.float32)


def _int8(name: str, q: QuantizedArray) -> Layout:
    if not name.endswith(".weight") or q.ndim != 2 or q.axis != -1:
        refuse(name, q, f"{FITS}; the name must end with '.weight'")
    with np.errstate(over="ignore"):
        absmax = scales_of(name, q)[:, 0] * np.float32(127)
    if not np.isfinite(absmax).all():
        refuse(name, q, "its largest magnitudes must be finite")

    def codes() -> np.ndarray:
        return (rows_of(q)(0, q.shape[0]) ^ np.uint8(128)).view(np.int8)

    tensors = (
        ToWrite(name, "I8", q.shape, codes),
        ToWrite(f"{name.removesuffix('.weight')}.SCB", "F32", absmax.shape, lambda: absmax),
    )
    return Layout(tensors, {"kind": "int8", "nested": False})


def settings(schemes: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Returns what `config.json` says."""
    quantized = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    if not quantized:
        return {}
    one_of = {scheme["kind"]: name for name, scheme in quantized.items()}
    kind, *others = one_of
    if others:
        raise ValueError(f"A model of bitsandbytes must be of one kind: nf4, fp4 or int8. Got {one_of}.")
    common = {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8"}
    # What has no scales: an embedding, which nothing replaces, or a layer that must stay as it is.
    plain = [name.removesuffix(".weight") for name in schemes if name not in quantized and name.endswith(".weight")]
    common["llm_int8_skip_modules"] = plain
    if kind == "int8":
        return {"quantization_config": common}
    more = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": any(s["nested"] for s in quantized.values())}
    return {"quantization_config": common | more | {"bnb_4bit_quant_storage": "uint8"}}
