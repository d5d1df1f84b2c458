"""Weights of MLX: https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html.

    P.weight   uint32 (..., out, in * bits / 32): codes without gaps, the first in the low bits, across words too
    P.scales   (..., out, in / group_size): in mode affine floats; in mxfp4 and mxfp8 uint8, E8M0; in nvfp4 uint8, e4m3
    P.biases   only in mode affine: floats of the shape of the scales; value = code * scale + bias

`quantization` of config.json has `mode`, `bits` and `group_size`, for all layers and under the name of a layer for that
one. A weight has the dtype of its scales, or bfloat16.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..._formats import MLX, MXFP4, MXFP8, NVFP4
from .._bits import unpack_low_first
from .._files import Files
from .._stored import DTYPES, Stored
from .._transcode import from_codes, Nested
from .item import companions, expect, format_of, Item, plain


NAME = "mlx"

# The bits and the group size of each mode, where the configuration says neither.
_MODES = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
_BITS = (2, 3, 4, 5, 6, 8)
_NAMES = ("weight", "scales", "biases")
_FLOATS = ("F16", "BF16", "F32")


def recognizes(files: Files) -> bool:
    return any(_is_packed(files, base) for base in companions(files.tensors, ".scales"))


def _is_packed(files: Files, base: str) -> bool:
    weight = files.tensors.get(f"{base}.weight")
    return weight is not None and weight.dtype == "U32"


def items(files: Files) -> dict[str, Item]:
    settings = files.config.get("quantization", files.config.get("quantization_config"))
    settings = settings if isinstance(settings, dict) else {}
    found, used = {}, set()
    for base in companions(files.tensors, ".scales"):
        if _is_packed(files, base):
            of = {n: files.tensors[f"{base}.{n}"] for n in _NAMES if f"{base}.{n}" in files.tensors}
            own = settings.get(base)
            found[f"{base}.weight"] = _item(of, settings | own if isinstance(own, dict) else settings)
            used |= {f"{base}.{n}" for n in of}
    return found | {name: plain(t) for name, t in files.tensors.items() if name not in used}


def _item(of: dict[str, Stored], settings: Mapping[str, Any]) -> Item:
    t, scale, bias, tensors = of["weight"], of["scales"], of.get("biases"), tuple(of.values())
    mode = settings.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _MODES:
        problem = f"eqquant reads the modes {', '.join(_MODES)} of MLX, not {str(mode)[:40]!r}"
        return Item(t.shape, t.dtype, None, str(mode)[:40], tensors, lambda: None, problem)
    bits, group = (settings.get(name, value) for name, value in zip(("bits", "group_size"), _MODES[mode], strict=True))
    if type(bits) is not int or type(group) is not int or bits not in _BITS or group < 1:
        got = f"{str(bits)[:40]} and {str(group)[:40]}"
        t.fail(f"It must have {', '.join(map(str, _BITS))} bits and a group size. Got {got}.")
    if len(t.shape) < 2 or t.shape[-1] * 32 % bits:
        t.fail(f"It must hold rows of whole codes of {bits} bits. Got the shape {list(t.shape)}.")
    length = t.shape[-1] * 32 // bits
    if length % group:
        t.fail(f"It must hold rows of whole groups of {group}. Got {length} values.")
    shape, of_groups = (*t.shape[:-1], length), (*t.shape[:-1], length // group)
    codes = lambda start, stop: unpack_low_first(t.bytes().reshape(-1, t.shape[-1] * 4)[start:stop], bits)
    stored_as = f"{mode}, {bits} bits"
    if mode == "affine":
        if bias is None:
            t.fail("It must have a companion 'biases'. Got none.")
        expect(scale, _FLOATS, of_groups)
        expect(bias, (scale.dtype,), of_groups)
        dtype = str(DTYPES[scale.dtype][1])
        format = format_of(t, MLX, bits, group, dtype)
        read = lambda: from_codes(codes, scale.array(), None, format, shape, dtype, t, offset=bias.array())
        return Item(shape, dtype, format, stored_as, tensors, read)
    if (bits, group) != _MODES[mode]:
        t.fail(f"It must have {_MODES[mode]} bits and values in a group in the mode {mode}. Got {(bits, group)}.")
    expect(scale, ("U8",), of_groups)
    format = {"mxfp4": MXFP4(), "mxfp8": MXFP8(), "nvfp4": NVFP4()}[mode]

    def read_floats() -> Any:
        scales = scale.array()
        if (scales & 127 == 127 if mode == "nvfp4" else scales == 255).any():
            scale.fail("Got a scale that is not a number.")
        ones = np.ones((*t.shape[:-1], 1), np.float32)
        stored = Nested(scales, ones) if mode == "nvfp4" else scales
        return from_codes(codes, stored, None, format, shape, "bfloat16", t)

    return Item(shape, "bfloat16", format, stored_as, tensors, read_floats)
