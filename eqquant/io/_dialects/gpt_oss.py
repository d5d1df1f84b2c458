"""The experts of GPT-OSS: https://github.com/huggingface/transformers, `integrations/mxfp4.py`.

    P_blocks   uint8 (experts, rows, in / 32, 16), the first code of a byte in its low bits
    P_scales   uint8 (experts, rows, in / 32), E8M0

The weight that the model uses is (experts, in, rows): its blocks run along the second axis.
"""

import numpy as np

from .._bits import unpack_low_first
from .._files import Files
from .item import companions, expect, Item, with_plain
from .microscaling import mxfp4


NAME = "gpt-oss"


def recognizes(files: Files) -> bool:
    return any(f"{base}_scales" in files.tensors for base in companions(files.tensors, "_blocks"))


def items(files: Files) -> dict[str, Item]:
    found, used = {}, set()
    for base in companions(files.tensors, "_blocks"):
        t, scale = files.tensors[f"{base}_blocks"], files.tensors.get(f"{base}_scales")
        if scale is None:
            t.fail(f"It must have a companion '{base}_scales'. Got none.")
        if t.dtype != "U8" or len(t.shape) != 4 or t.shape[-1] != 16:
            t.fail(f"It must be U8 of four dimensions, the last of 16. Got {t.dtype} of {list(t.shape)}.")
        expect(scale, ("U8",), t.shape[:-1])
        experts, rows, blocks, _ = t.shape

        def codes(start: int, stop: int, t=t) -> np.ndarray:
            raw = t.bytes().reshape(t.shape[0] * t.shape[1], -1)
            return unpack_low_first(raw[start:stop], 4)

        read = mxfp4(t, scale, (experts, rows, blocks * 32), (t, scale), codes, lambda q: q.swapaxes(-1, -2))
        shape = (experts, blocks * 32, rows)
        found[base] = Item(shape, read.dtype, read.format, "mxfp4", (t, scale), read.read, axes=(-2,))
        used |= {f"{base}_blocks", f"{base}_scales"}
    return with_plain(found, used, files)
