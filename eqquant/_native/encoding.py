"""`Steps` and `Scaling`: how native code encodes floats, without knowing their format."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float32


class Steps(NamedTuple):
    """The codes of a format in the order of their values, and the thresholds between them.

    Floats below `thresholds[0]` have the code `codes[0]`; floats from `thresholds[i]` on have `codes[i + 1]`.

    - `thresholds`: floats, as integers of the same order (`float_order`), in which zero is above minus zero.
    - `nan`: the code of NaN.
    - `rule`, `bias`: arithmetic that gives the same codes, if there is one: `"even"` rounds to whole numbers, ties to
        even, and adds the bias; `"up"` adds the bias and truncates. Both clip. Otherwise `"steps"`.
    """

    thresholds: np.ndarray
    codes: np.ndarray
    nan: int
    rule: str = "steps"
    bias: float = 0.0


class Scaling(NamedTuple):
    """The floats of each block by which values are scaled before encoding.

    Scaled values are `(values - offset) * factor / divisor + shift`. Where the divisor is zero they are `shift`. With
    factors, either the factor or the divisor of a block is one; with a divisor of one nothing is divided.
    """

    divisor: Float32[Array, "*batch blocks"]
    factor: Float32[Array, "*batch blocks"] | None
    offset: Float32[Array, "*batch blocks"] | None
    shift: Float32[Array, "*batch blocks"] | None


def float_order(x: np.ndarray) -> np.ndarray:
    """Returns integers in the same order as the floats."""
    bits = x.view(np.int32)
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def order_to_float(order: np.ndarray) -> np.ndarray:
    """Returns the floats of integers from `float_order`."""
    return float_order(order.view(np.float32)).view(np.float32)  # its own inverse
