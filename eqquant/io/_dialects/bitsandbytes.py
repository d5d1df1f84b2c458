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
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._formats import Codebook, Int8, NF4
from ..._formats.base import AbstractFormat
from .._bits import unpack_high_first
from .._files import Files
from .._json import parse_json
from .._stored import num_bytes, Stored
from .._transcode import from_codes
from .item import companions, expect, Item, with_plain


NAME = "bitsandbytes"

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_DTYPES = ("float32", "float16", "bfloat16")
_MAX_STATE = 100_000


def recognizes(files: Files) -> bool:
    return bool(companions(files.tensors, *_STATES)) or bool(_int8_rows(files))


def items(files: Files) -> dict[str, Item]:
    found, used = {}, set()
    for name, (state, *others) in companions(files.tensors, *_STATES).items():
        if others or name not in files.tensors:
            files.tensors[state].fail(f"It describes {name!r}, and must alone do so. Got {others or 'no such tensor'}.")
        parts = {state}
        parts.update(p for p in (f"{name}.{part}" for part in _PARTS) if p in files.tensors)
        found[name] = _four_bits(name, files, state, parts)
        used |= {name, *parts}
    for name, (scb, *rest) in _int8_rows(files).items():
        found[name] = _int8(files.tensors[name], files.tensors[scb])
        used |= {name, scb, *rest}
    return with_plain(found, used, files)


_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def _int8_rows(files: Files) -> dict[str, list[str]]:
    """Returns the companions of each weight of LLM.int8."""
    rows = {}
    for layer, (scb,) in companions(files.tensors, ".SCB").items():
        if (name := f"{layer}.weight") in files.tensors:
            rows[name] = [scb, *(n for n in (f"{layer}.weight_format",) if n in files.tensors)]
    return rows


def _int8(t: Stored, scb: Stored) -> Item:
    if t.dtype != "I8" or len(t.shape) != 2:
        t.fail(f"It must be int8 of two dimensions. Got {t.dtype} of {list(t.shape)}.")
    expect(scb, ("F32",), t.shape[:1])

    def read():
        scale = (scb.array() / np.float32(127))[:, None]
        codes = lambda start, stop: t.array()[start:stop].view(np.uint8) ^ 128
        return from_codes(codes, scale, None, Int8(), t.shape, np.float16, t)

    return Item(t.shape, "float16", Int8(), "LLM.int8", (t, scb), read)


def _four_bits(name: str, files: Files, state_name: str, parts: set[str]) -> Item:
    t, of = files.tensors[name], {p.rpartition(".")[2]: files.tensors[p] for p in parts}
    state_tensor = files.tensors[state_name]
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
    if dtype not in _DTYPES:
        state_tensor.fail(f"It must have a dtype, one of {', '.join(_DTYPES)}. Got {str(dtype)[:80]!r}.")
    size = math.prod(shape)
    expect(t, ("U8",), (-(-size // 2), 1))
    scales = -(-size // block)
    for part in ("absmax", "quant_map"):
        if part not in of:
            t.fail(f"It must have a companion {part!r}. Got none.")
    expect(of["quant_map"], ("F32",), (16,))
    format, order = _format(of["quant_map"], block)
    nested = "nested_absmax" in of
    expect(of["absmax"], ("U8",) if nested else ("F32",), (scales,))
    inner, offset = _nested(of, state, state_tensor, scales) if nested else (1, 0.0)
    shape = tuple(shape)
    rows = shape[-1] % block == 0
    axes = (-1,) if rows else tuple(range(-len(shape), 0))
    length = shape[-1] if rows else size

    def read():
        scale = of["absmax"].array()
        if nested:
            outer = np.repeat(of["nested_absmax"].array(), inner)[:scales]
            scale = of["nested_quant_map"].array()[scale] * outer + np.float32(offset)
        raw = t.bytes()

        def codes(start: int, stop: int) -> np.ndarray:
            # Rows of odd length exist only alone: elsewhere blocks, which are even, divide them.
            part = raw[start * length // 2 : -(-stop * length // 2)]
            found = unpack_high_first(part)[: (stop - start) * length]
            return (found if order is None else order[found]).reshape(stop - start, length)

        batch = shape[:-1] if rows else ()
        return from_codes(
            codes, scale.reshape(*batch, -(-length // block)), None, format, shape, jnp.dtype(dtype), t, axes
        )

    layout = state_name.rpartition("__")[2]
    layout = f"{layout}, nested" if nested else layout
    return Item(shape, dtype, format, layout, (t, *(of[p] for p in of)), read, axes=axes)


def _nested(of: dict[str, Stored], state: dict[str, Any], state_tensor: Stored, scales: int) -> tuple[int, float]:
    """Returns how many scales share an outer one, and what is added to all of them."""
    inner: Any = state.get("nested_blocksize")
    offset: Any = state.get("nested_offset")
    if type(inner) is not int or inner < 1 or type(offset) not in (int, float) or not abs(offset) < 2**127:
        state_tensor.fail("It must have a block size and an offset for nested scales.")
    if "nested_quant_map" not in of:
        state_tensor.fail("It must have a companion 'nested_quant_map'. Got none.")
    inner = min(inner, max(scales, 1))  # a number alone must not allocate
    expect(of["nested_absmax"], ("F32",), (-(-scales // inner),))
    expect(of["nested_quant_map"], ("F32",), (256,))
    return inner, float(offset)


def _format(quant_map: Stored, block: int) -> tuple[AbstractFormat, np.ndarray | None]:
    """Returns the format of a table of values, and the code of each of its entries, if they are not the same."""
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
