"""Reads the experts of GPT-OSS: `integrations/mxfp4.py` of transformers.

See https://github.com/huggingface/transformers.

    P_blocks   uint8 (experts, rows, in / 32, 16), the first code of a byte in its low bits
    P_scales   uint8 (experts, rows, in / 32), E8M0

The weight that the model uses is (experts, in, rows): its blocks run along the second axis.
"""

import dataclasses

from ..._formats import MXFP4
from .._files import Files
from ._item import find_weights, Item, Parts, read_items, weight
from ._scaled import microscaled_item


NAME = "gpt-oss"


def recognizes(files: Files) -> bool:
    return any(f"{name}_scales" in files.tensors for name in find_weights(files, "weight_blocks"))


def items(files: Files) -> dict[str, Item]:
    return read_items(files, find_weights(files, "weight_blocks"), _experts)


def _experts(base: str, parts: Parts) -> Item:
    t, scale = parts.pop("weight_blocks"), parts.pop("weight_scales", None)
    if scale is None:
        t.fail(f"It must have a companion '{base}_scales'. Got none.")
    t.expect("U8", (None, None, None, 16))
    scale.expect("U8", t.shape[:-1])
    experts, rows, blocks, _ = t.shape
    item = microscaled_item(dataclasses.replace(t, shape=(experts, rows, blocks * 16)), scale, MXFP4())
    return dataclasses.replace(item, entry=weight(MXFP4(), (experts, blocks * 32, rows), "bfloat16", axes=(-2,)))
