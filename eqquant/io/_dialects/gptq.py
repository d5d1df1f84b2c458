"""Reads weights of GPTQ (AutoGPTQ, GPTQModel), of AWQ (AutoAWQ, GEMM) and of AutoRound.

AutoRound writes both.

    P.qweight   GPTQ: int32 (in * bits / 32, out), consecutive inputs in a word, the first in the low bits
                AWQ:  int32 (in, out / 8), outputs 0, 2, 4, 6, 1, 3, 5, 7 in a word
    P.qzeros    int32 (groups, out * bits / 32), packed along the outputs in the same order; of GPTQ minus one, or as
                they are
    P.scales    (groups, out)
    P.g_idx     int32 (in,): the group of each input; with act-order they are not in order, and the weight becomes an
                `PermutedArray`

`P.weight` is (out, in), as the layer's weight would be: value = (code - zero) * scale. Only `config.json` says how zero
points are stored:

    quant_method  gptq        checkpoint_format  gptq (the default): minus one; gptq_v2: as they are
                  awq         version            gemm (the default) or exllama
                  auto-round  packing_format     auto_round:auto_gptq: minus one; auto_round:auto_awq: AWQ; auto_round,
                                                 auto_round:gptqmodel and other kernels: as they are

https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ, https://github.com/intel/auto-round
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .._bits import in_each_byte, off_stride, pack_codes, pack_columns, unpack_columns, unpack_low_first
from .._files import Files, read_json
from .._repack import act_order, Unpacked
from .._tensors import DTYPES, FLOATS, StoredTensor
from ._item import as_format, find_weights, INTEGERS, Item, Parts, read_items, take, unreadable_item, weight
from ._settings import find_layer_settings, find_settings


NAME = "gptq"

_BITS = (2, 3, 4, 8)
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the eight outputs in the order of a word
_AWQ_ORDER = np.argsort(_AWQ_PLACES)  # the place in a word of each of eight outputs
_CHUNK = 128  # outputs to take at a time: whole words of AWQ, and 512 bytes of each line of GPTQ's


def recognizes(files: Files) -> bool:
    return bool(find_weights(files, "qweight"))


def items(files: Files) -> dict[str, Item]:
    settings = find_settings(files, "quantization_config") or _read_settings_file(files)
    layout = _layout(settings)
    read = lambda name, parts: _item(parts, layout, find_layer_settings(settings, settings.get("extra_config"), name))
    return read_items(files, find_weights(files, "qweight"), read, settings)


def _read_settings_file(files: Files) -> Mapping[str, object]:
    """Returns the settings in a file of their own, as AutoGPTQ once wrote them.

    Later ones are in `config.json`.
    """
    path = files.file.path.with_name("quantize_config.json")
    return {"quant_method": "gptq", **read_json(path)} if path.is_file() else {}


class _Layout(NamedTuple):
    """How zero points are stored: `gptq` (minus one), `gptq_v2` or `awq`; or why it is unknown."""

    name: str | None
    problem: str = ""


# The layout by what a configuration says, for each `quant_method`, and how an error names what can be read.
_SAID = {
    "gptq": ({None: "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}, "`checkpoint_format` gptq or gptq_v2"),
    "awq": ({None: "awq", "gemm": "awq", "exllama": "awq"}, "`version` gemm of AWQ"),
}


def _layout(settings: Mapping[str, object]) -> _Layout:
    """Finds the layout of all weights from the configuration."""
    method, names = str(settings.get("quant_method", "")).lower(), ("checkpoint_format", "format", "version")
    said = next((str(settings[name]).lower() for name in names if settings.get(name) is not None), None)
    marlin = settings.get("is_marlin_format") is True
    if "auto-round" in method or "auto_round" in method:  # `intel/auto-round` too
        said = settings.get("packing_format", settings.get("backend"))
        parts = str(said).lower().split(":")
        for layout in ("awq", "gptq"):
            if layout in parts or f"auto_{layout}" in parts:
                return _Layout(layout)
        if parts[0] in ("auto_round", "autoround", "auto-round"):
            return _Layout("gptq_v2")
        rule = "`packing_format` of AutoRound that begins with auto_round"
    elif method in _SAID:
        layouts, rule = _SAID[method]
        if said in layouts and not marlin:
            return _Layout(layouts[said])
    elif method:
        rule, said = "`quant_method` gptq, awq or auto-round", method
    else:
        return _Layout(
            None,
            "`config.json` must say `quant_method`, and for gptq `checkpoint_format`: gptq for zero points that are "
            "stored minus one, gptq_v2 for others",
        )
    return _Layout(None, f"eqquant reads the {rule}, not {'marlin' if marlin else str(said)[:40]!r}")


def _item(parts: Parts, declared: _Layout, settings: Mapping[str, object]) -> Item:
    t, g_idx = parts.pop("qweight"), parts.pop("g_idx", None)
    zeros, scale = take(parts, "qzeros", t), take(parts, "scales", t)
    for part in (zeros, scale):
        if len(part.shape) != 2:
            part.fail(f"It must have two dimensions. Got {list(part.shape)}.")
    groups, out = scale.shape
    if scale.dtype not in FLOATS or len(t.shape) != 2 or t.dtype != "I32":
        t.fail("It must be I32 of two dimensions, with floating point scales. Got others.")
    bits = zeros.shape[1] * 32 // out if out else 0
    awq = t.shape[1] != out
    if bits not in _BITS or (awq and bits != 4):
        return unreadable_item(t, f"{bits} bits", "eqquant reads 2, 3, 4 and 8 bits of GPTQ, and 4 bits of AWQ")
    # Without a configuration, shapes tell AWQ from GPTQ, and AWQ has one way to store zero points.
    layout = declared.name or ("awq" if awq and not settings else None)
    if layout is None:
        return unreadable_item(t, f"{bits} bits", declared.problem)
    if (layout == "awq") != awq:
        t.fail(f"It must have the shape of {layout}, as the configuration says. Got {list(t.shape)}.")
    length = t.shape[0] if awq else t.shape[0] * 32 // bits
    zeros.expect("I32", (groups, out * bits // 32))
    t.expect("I32", (length, out // 8) if awq else (length * bits // 32, out))
    if groups < 1 or length < 1 or length % groups:
        scale.fail(f"It must divide {length} inputs into equal groups. Got {groups}.")
    size, actual = settings.get("group_size"), length // groups
    # Rules for some layers may give them another size, and `g_idx` says which groups there are.
    rules = [rule for key in ("dynamic", "extra_config") for rule in _rules(settings.get(key))]
    if isinstance(size, int) and size > 0 and not rules and g_idx is None:
        if size < length if groups == 1 else size != actual:
            scale.fail(f"It must have the group size of the configuration, {size}. Got groups of {actual} inputs.")
    symmetric = settings.get("sym") is True and not awq and not any(rule.get("sym") is False for rule in rules)
    format = as_format(scale, INTEGERS[bits], None if groups == 1 else actual, symmetric)
    order = act_order(g_idx, length, groups)
    if awq and g_idx is not None and order is not None:
        g_idx.fail("AWQ stores inputs in the order of the weight. Got others.")
    version = _model_version(settings)

    def codes(start: int, stop: int) -> np.ndarray:
        part = t.array()[:, start // 8 : stop // 8] if awq else t.array()[:, start:stop]
        if order is not None:
            return unpack_columns(np.ascontiguousarray(part), bits, order)
        lines = off_stride(len(part), part.shape[1], np.uint32)
        lines[...] = part.view(np.uint32)
        words = np.ascontiguousarray(lines.T)
        return words if awq else unpack_low_first(words.view(np.uint8), bits)

    def load() -> Unpacked:
        stored = _outputs(zeros.array(), bits, awq)
        zero = _plus_one(zeros, bits, version) if layout == "gptq" else stored
        if symmetric:
            _check_symmetric(zeros, zero, stored, 2 ** (bits - 1), layout)
        scales = np.ascontiguousarray(scale.array().T.astype(np.float32))
        zero = None if symmetric else np.ascontiguousarray(zero.T)
        pack = _pack_awq if awq else pack_codes if order is None else pack_columns
        return Unpacked(codes, scales, zero, order=order, least_rows=_CHUNK, pack=pack)

    entry = weight(format, (out, length), str(DTYPES[scale.dtype][1]), permuted=order is not None)
    return Item(entry, layout if order is None else f"{layout}, act-order", (t,), load)


def _check_symmetric(zeros: StoredTensor, zero: np.ndarray, stored: np.ndarray, middle: int, layout: str) -> None:
    """Raises unless all zero points are the middle, or are stored so.

    Some programs say `gptq` of `gptq_v2`. With `sym` there is one value to store, and no doubt.
    """
    if (zero != middle).any() and (stored != middle).any():
        other = "gptq_v2" if layout == "gptq" else "gptq"
        zeros.fail(
            f"Got zero points other than the middle, and a configuration that says `sym`. If their layout is "
            f"{other}, `checkpoint_format` must say so; if the weight is not symmetric, `sym` must be false."
        )


def _rules(layers: object) -> list[Mapping[str, object]]:
    """Returns the settings of some layers in a configuration, by name or by pattern."""
    return [rule for rule in layers.values() if isinstance(rule, dict)] if isinstance(layers, dict) else []


def _model_version(settings: Mapping[str, object]) -> int | None:
    """Returns the major version of the GPTQModel that wrote a checkpoint, or `None`."""
    meta = settings.get("meta")
    found = re.search(r"gptqmodel:(\d{1,4})", str(meta.get("quantizer"))) if isinstance(meta, dict) else None
    return int(found[1]) if found else None


def _plus_one(zeros: StoredTensor, bits: int, version: int | None) -> np.ndarray:
    """Unpacks zero points and adds one to each. Word by word, with carries, as GPTQModel does."""
    if bits == 3 and (version is None or version >= 7):  # codes straddle words
        # AutoGPTQ's own reader does not wrap here, and so takes a zero point of 0 for 8.
        return _outputs(zeros.array(), bits, False) + np.uint8(1) & np.uint8(7)
    ones = sum(1 << at for at in range(0, 96, bits))
    # Before version 7 it took the words of a period of 96 bits in reverse, when it wrote and when it read.
    words = np.array([ones >> 32 * n & 0xFFFFFFFF for n in (2, 1, 0)], np.uint32)
    return _outputs((zeros.array().view(np.uint32) + np.resize(words, zeros.shape[1])).view(np.int32), bits, False)


def _outputs(words: np.ndarray, bits: int, awq: bool) -> np.ndarray:
    """Unpacks words along the last axis."""
    codes = unpack_low_first(np.ascontiguousarray(words).view(np.uint8), bits)
    return codes.reshape(*codes.shape[:-1], -1, 8)[..., _AWQ_ORDER].reshape(codes.shape) if awq else codes


def _pack_awq(words: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Packs words, `(out / 8, in)`, along the inputs, with a row for each of eight outputs."""
    rows = out.reshape(len(words), 8, -1)
    packed = np.empty((len(words), rows.shape[-1]), np.uint32)
    for high in (0, 1):
        codes = words >> np.uint32(4 * high)
        codes &= in_each_byte(15, codes)
        pack_codes(codes, bits, packed)
        for n in range(4):
            # Narrowing a whole array is faster than copying every fourth byte of it.
            np.copyto(rows[:, _AWQ_PLACES[2 * n + high]], packed >> np.uint32(8 * n), casting="unsafe")
