"""How floats become codes, as numbers: the floats from which on each further code is taken."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float32


class Steps(NamedTuple):
    """The codes of all floats, ascending, and the floats at which they change.

    `codes[0]` stands below `starts[0]`, `codes[i + 1]` from `starts[i]` on.

    - `starts`: floats, as integers of the same order (`float_order`), in which zero is above minus zero.
    - `nan`: the code of NaN.
    - `rule`, `bias`: a shorter way to the same codes, if there is one: `"even"` rounds to whole numbers, ties to even,
        and adds the bias; `"up"` adds the bias and cuts the fraction off. Both clip. Otherwise `"steps"`.
    """

    starts: np.ndarray
    codes: np.ndarray
    nan: int
    rule: str = "steps"
    bias: float = 0.0


class Scaling(NamedTuple):
    """The numbers per block that turn values into levels.

    A level is `(values - offset) * factor / divisor + shift`.

    Where the divisor is zero, values are zero before the shift. Where it is one, and there are factors, nothing is
    divided; elsewhere factors are one.
    """

    divisor: Float32[Array, "*batch blocks"]
    factor: Float32[Array, "*batch blocks"] | None
    offset: Float32[Array, "*batch blocks"] | None
    shift: Float32[Array, "*batch blocks"] | None


def float_order(x: np.ndarray) -> np.ndarray:
    """Returns integers in the order of the floats."""
    bits = x.view(np.int32)
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def order_to_float(order: np.ndarray) -> np.ndarray:
    """Returns the floats of such integers."""
    return float_order(order.view(np.float32)).view(np.float32)  # its own inverse
