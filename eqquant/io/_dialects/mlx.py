"""Reads weights of MLX, as `mlx.core.quantize` makes them.

See https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html.

    P.weight   uint32 (..., out, in * bits / 32): codes without gaps, the first in the low bits, across words too
    P.scales   (..., out, in / group_size): in mode affine floats; in mxfp4 and mxfp8 uint8, E8M0; in nvfp4 uint8, e4m3
    P.biases   only in mode affine: floats of the shape of the scales; value = code * scale + bias

`quantization` of config.json has `mode`, `bits` and `group_size`, for all layers and under the name of a layer for that
one; other bits and groups would fit the same shapes. A weight has the dtype of its scales, or bfloat16.
"""

import dataclasses
from collections.abc import Mapping

from ..._formats import MLX, MXFP4, MXFP8, NVFP4
from .._bits import unpack_low_first
from .._files import Files
from .._repack import Unpacked
from .._tensors import DTYPES, FLOATS
from ._item import as_format, find_weights, Item, Parts, read_items, take, unreadable_item, weight
from ._scaled import microscaled_item
from ._settings import find_layer_settings, find_settings


NAME = "mlx"

# The format of each mode. In mode affine the configuration says bits and group size.
MODES = {"affine": None, "mxfp4": MXFP4(), "mxfp8": MXFP8(), "nvfp4": NVFP4()}
_BITS = (2, 3, 4, 5, 6, 8)


def recognizes(files: Files) -> bool:
    return bool(_weights(files))


def _weights(files: Files) -> list[str]:
    return [w for w in find_weights(files, "scales") if w in files.tensors and files.tensors[w].dtype == "U32"]


def items(files: Files) -> dict[str, Item]:
    common = find_settings(files, "quantization", "quantization_config")
    read = lambda name, parts: _item(parts, find_layer_settings(common, common, name))
    layers = [own for own in common.values() if isinstance(own, dict)]
    settings = {key: value for own in (common, *layers) for key, value in own.items() if not isinstance(value, dict)}
    return read_items(files, _weights(files), read, settings)


def _item(parts: Parts, settings: Mapping[str, object]) -> Item:
    t, scale = parts.pop("weight"), parts.pop("scales")
    mode = settings.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODES:
        problem = f"eqquant reads the modes {', '.join(MODES)} of MLX, not {str(mode)[:40]!r}"
        return unreadable_item(t, str(mode)[:40], problem)
    format = MODES[mode]
    only = format and (format.bits, format.block_size)
    bits, size = (settings.get(key, only and only[n]) for n, key in enumerate(("bits", "group_size")))
    if bits is None or size is None:
        problem = "`quantization` of `config.json` must say `bits` and `group_size`: several fit these shapes"
        return unreadable_item(t, mode, problem)
    if type(bits) is not int or type(size) is not int or bits not in _BITS or size < 1:
        got = f"{str(bits)[:40]} and {str(size)[:40]}"
        t.fail(f"It must have {', '.join(map(str, _BITS))} bits and a group size. Got {got}.")
    if len(t.shape) < 2 or t.shape[-1] * 32 % bits:
        t.fail(f"It must hold rows of whole codes of {bits} bits. Got the shape {list(t.shape)}.")
    length = t.shape[-1] * 32 // bits
    if length % size:
        t.fail(f"It must hold rows of whole groups of {size}. Got {length} values.")
    stored_as = f"{mode}, {bits} bits"
    if format is not None:
        if (bits, size) != only:
            t.fail(f"It must have {only} bits and values in a group in the mode {mode}. Got {(bits, size)}.")
        return dataclasses.replace(microscaled_item(t, scale, format), stored_as=stored_as)
    bias = take(parts, "biases", t)
    scale.expect(FLOATS, (*t.shape[:-1], length // size))
    bias.expect(scale.dtype, scale.shape)
    dtype = str(DTYPES[scale.dtype][1])
    codes = lambda start, stop: unpack_low_first(t.bytes().reshape(-1, t.shape[-1] * 4)[start:stop], bits)
    load = lambda: Unpacked(codes, scale.array(), offset=bias.array())
    return Item(weight(as_format(t, MLX, bits, size, dtype), (*t.shape[:-1], length), dtype), stored_as, (t,), load)
