"""Weights that bitsandbytes saved: https://github.com/bitsandbytes-foundation/bitsandbytes.

    P                                    uint8 (ceil(n / 2), 1): code 2k is in the high bits of byte k, codes of the
                                         whole weight, row by row, so that blocks run over the ends of rows
    P.absmax                             float32, one for each block; with nested scales uint8, and then:
    P.nested_absmax, .nested_quant_map   float32; absmax = quant_map[u8] * nested_absmax[block // 256] + nested_offset
    P.quant_map                          float32 (16,): the value of each code
    P.quant_state.bitsandbytes__nf4      uint8: JSON with the block size, shape and dtype; or __fp4

    P, P's layer.SCB                     int8 (out, in) and float32 (out,): LLM.int8 rows, value = code * SCB / 127

Nested scales become float32, the ones that bitsandbytes itself computes from them. If blocks run over the ends of
rows, all axes are quantized as one.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from ..._formats import Codebook, Int8, NF4
from ..._formats.base import AbstractFormat
from .._bits import unpack_high_first
from .._files import Files
from .._repack import Unpacked
from .._tensors import FLOAT_NAMES, FLOATS, num_bytes, parse_json, StoredTensor
from ._item import find_weights, Item, Parts, read_items, take, weight


NAME = "bitsandbytes"

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_MAX_STATE = 100_000


def recognizes(files: Files) -> bool:
    return bool(_weights(files))


def _weights(files: Files) -> list[str]:
    return find_weights(files, *_STATES) + [w for w in find_weights(files, "SCB") if w in files.tensors]


def items(files: Files) -> dict[str, Item]:
    read = lambda name, parts: _int8(parts) if "SCB" in parts else _four_bits(name, parts)
    return read_items(files, _weights(files), read)


def _int8(parts: Parts) -> Item:
    t, scb, order = parts.pop("weight"), parts.pop("SCB"), parts.pop("weight_format", None)
    t.expect("I8", (None, None))
    if order is not None and order.bytes().any():
        order.fail(f"It must be 0, which says that the weight is stored by rows. Got {order.array().tolist()}.")
    scb.expect("F32", t.shape[:1])
    codes = lambda start, stop: t.array()[start:stop].view(np.uint8) ^ 128
    load = lambda: Unpacked(codes, (scb.array() / np.float32(127))[:, None])
    return Item(weight(Int8(), t.shape, "float16"), "LLM.int8", (t,), load)


def _four_bits(name: str, parts: Parts) -> Item:
    described = [part for part in _STATES if part in parts]
    state_tensor, t = parts.pop(described[0]), parts.pop("weight", None)
    if len(described) > 1 or t is None:
        got = [parts[part].name for part in described[1:]] or "no such tensor"
        state_tensor.fail(f"It describes {name!r}, and must alone do so. Got {got}.")
    shape, block, dtype, state = _state(name, t, state_tensor)
    size = math.prod(shape)
    if t.dtype not in ("U8", *FLOATS) or t.nbytes != -(-size // 2) or t.shape[1:] != (1,):
        t.fail(f"It must be U8 of {[-(-size // 2), 1]}, or floats of as many bytes. Got {t.dtype} of {list(t.shape)}.")
    scales = -(-size // block)
    absmax, table = take(parts, "weight.absmax", t), take(parts, "weight.quant_map", t)
    table.expect("F32", (16,))
    format, order = _format(table, block)
    nested = "weight.nested_absmax" in parts
    absmax.expect("U8" if nested else "F32", (scales,))
    read_scales = _read_nested_scales(parts, absmax, state, state_tensor) if nested else absmax.array
    rows = shape[-1] % block == 0
    axes = (-1,) if rows else tuple(range(-len(shape), 0))
    length = shape[-1] if rows else size

    def codes(start: int, stop: int) -> np.ndarray:
        # Rows of odd length exist only alone: elsewhere blocks, which are even, divide them.
        part = t.bytes()[start * length // 2 : -(-stop * length // 2)]
        found = unpack_high_first(part)[: (stop - start) * length]
        return (found if order is None else order[found]).reshape(stop - start, length)

    batch = shape[:-1] if rows else ()
    load = lambda: Unpacked(codes, read_scales().reshape(*batch, -(-length // block)))
    layout = described[0].rpartition("__")[2] + (", nested" if nested else "")
    return Item(weight(format, shape, dtype, axes), layout, (t,), load)


def _state(
    name: str, t: StoredTensor, state_tensor: StoredTensor
) -> tuple[tuple[int, ...], int, str, Mapping[str, object]]:
    """Returns the shape, the block size and the dtype of a weight, and its whole state."""
    if state_tensor.nbytes > _MAX_STATE:
        state_tensor.fail(f"It must take at most {_MAX_STATE} bytes. Got {state_tensor.nbytes}.")
    state = parse_json(state_tensor.bytes().tobytes(), t.file, f"the quantization state of {name!r}")
    shape, block, dtype = state.get("shape"), state.get("blocksize"), state.get("dtype")
    if not isinstance(shape, list) or not shape or not all(type(n) is int and n >= 1 for n in shape):
        state_tensor.fail(f"It must have a shape. Got {str(shape)[:80]}.")
    if num_bytes(tuple(shape), 8) is None:
        state_tensor.fail("It must have a shape that an array can have. Got more values or dimensions.")
    if type(block) is not int or not 2 <= block < 2**31 or block % 2:
        state_tensor.fail(f"It must have an even block size. Got {str(block)[:80]}.")
    if not isinstance(dtype, str) or dtype not in FLOAT_NAMES:
        state_tensor.fail(f"It must have a dtype, one of {', '.join(FLOAT_NAMES)}. Got {str(dtype)[:80]!r}.")
    return tuple(shape), block, dtype, state


def _read_nested_scales(
    parts: Parts, absmax: StoredTensor, state: Mapping[str, object], state_tensor: StoredTensor
) -> Callable[[], np.ndarray]:
    """Returns a function that computes scales from their codes.

    It looks values up in a table, multiplies by outer scales and adds one offset.
    """
    inner, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(inner) is not int or inner < 1 or not (type(offset) is int or type(offset) is float):
        state_tensor.fail("It must have a block size and an offset for nested scales.")
    if not abs(offset) < 2**127:
        state_tensor.fail("It must have a block size and an offset for nested scales.")
    outer, table = parts.pop("weight.nested_absmax"), take(parts, "weight.nested_quant_map", absmax)
    (scales,) = absmax.shape
    inner = min(inner, max(scales, 1))  # a number alone must not allocate
    outer.expect("F32", (-(-scales // inner),))
    table.expect("F32", (256,))
    return lambda: table.array()[absmax.array()] * np.repeat(outer.array(), inner)[:scales] + np.float32(offset)


def _format(quant_map: StoredTensor, block: int) -> tuple[AbstractFormat, np.ndarray | None]:
    """Returns the format of a table of values, and its codes if the order differs.

    There is one code for each entry.
    """
    table = quant_map.array()
    if not np.isfinite(table).all():
        quant_map.fail("Got a value that is not finite.")
    nf4 = NF4(block)
    if np.array_equal(table, np.asarray(nf4.codebook, np.float32)):
        return nf4, None
    # FP4 has two zeros, and is not sorted.
    levels, order = np.unique(table, return_inverse=True)
    if len(levels) < 9:  # fewer would take fewer bits
        quant_map.fail(f"It must have at least 9 different values. Got {len(levels)}.")
    return Codebook(levels, block), order.astype(np.uint8).reshape(-1)
