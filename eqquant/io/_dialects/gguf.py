"""GGUF files of llama.cpp, whose tensors are sequences of blocks: see `_blocks.py`.

Every quantized type without a format of ours is an error that names it.
"""

import numpy as np

from .._bits import pack_codes
from .._blocks import BLOCK_TYPES
from .._files import Files
from .._gguf import SIZES
from .._repack import Nested, Unpacked
from .._tensors import DTYPES, StoredTensor
from .._vector_blocks import VectorBlockType
from ._item import Item, plain, unreadable_item, weight


NAME = "gguf"


def recognizes(files: Files) -> bool:
    return files.container == "gguf"


def items(files: Files) -> dict[str, Item]:
    return {name: plain(t) if t.dtype in DTYPES else _quantized_item(t) for name, t in files.tensors.items()}


def _quantized_item(t: StoredTensor) -> Item:
    if t.dtype not in BLOCK_TYPES:
        problem = f"eqquant has no format for GGUF's {t.dtype}; it reads {', '.join(BLOCK_TYPES)}"
        return unreadable_item(t, t.dtype, problem, "float32")
    return Item(weight(BLOCK_TYPES[t.dtype].format, t.shape, "float32"), t.dtype, (t,), lambda: _load(t))


def _load(t: StoredTensor) -> Unpacked:
    if 0 in t.shape:
        t.fail(f"It must have values. Got the shape {list(t.shape)}.")
    kind, (block, nbytes) = BLOCK_TYPES[t.dtype], SIZES[t.dtype]
    rows = t.bytes().reshape(-1, t.shape[-1] // block, nbytes)
    codes = lambda start, stop: kind.read("codes", rows[start:stop]).reshape(stop - start, -1)
    read = lambda part: kind.read(part, rows).reshape(*t.shape[:-1], -1)
    if t.dtype == "MXFP4":
        exponents = read("scale")
        if (exponents == 255).any():
            t.fail("Got a scale that is not a number.")
        return Unpacked(codes, exponents)
    if t.dtype == "NVFP4":  # ggml reads NaN as zero, and stores the scale of a tensor elsewhere
        inner = read("scales") & 127
        inner[inner == 127] = 0
        return Unpacked(codes, Nested(inner, np.ones((*t.shape[:-1], 1), np.float32)))
    scale = read("scale").view(np.float16)
    offset = read("offset").view(np.float16) if "offset" in kind.parts else None
    return Unpacked(
        codes,
        Nested(read("scales"), scale) if "scales" in kind.parts else scale,
        offset=Nested(read("offsets"), -offset) if "offsets" in kind.parts and offset is not None else offset,
        # Codes of a vector format are packed already.
        pack=(lambda codes, _, out: np.copyto(out, codes)) if isinstance(kind, VectorBlockType) else pack_codes,
    )
