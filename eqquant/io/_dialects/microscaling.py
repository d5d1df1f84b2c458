"""Small floats in small blocks, which several libraries lay out alike."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..._formats import MXFP4
from .._stored import Stored
from .._transcode import from_codes
from .item import Item


def mxfp4(
    t: Stored,
    scale: Stored,
    shape: tuple[int, ...],
    tensors: tuple[Stored, ...],
    codes: Callable[[int, int], np.ndarray],
    finish: Callable[[Any], Any] = lambda q: q,
) -> Item:
    """An array of OCP MXFP4."""

    def read() -> Any:
        exponents = scale.array()
        if (exponents == 255).any():
            scale.fail("Got a scale that is not a number.")
        return finish(from_codes(codes, exponents, None, MXFP4(), shape, "bfloat16", t))

    return Item(shape, "bfloat16", MXFP4(), "mxfp4", tensors, read)
