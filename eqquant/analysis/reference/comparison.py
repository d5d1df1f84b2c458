"""Compares integers of several widths, and scales for whole tensors, channels and blocks."""

from collections.abc import Sequence

from ..._array.checks import check_quantizable
from ..._formats.any_width import integer_format, Rounding
from .._benchmark import Comparison, run_benchmark
from .._error import to_numpy, Values


def compare_bit_widths(
    x: Values,
    bits: Sequence[int] = (4, 8),
    *,
    symmetric: bool = True,
    axis: int | Sequence[int] = -1,
    rounding: Rounding = "half_even",
) -> Comparison:
    """Compares integers of several widths on the same values, with one scale for all values.

    !!! Example

        ```python
        report = eqq.analysis.compare_bit_widths(w)
        report["4 bits"].error.mse / report["8 bits"].error.mse
        ```

    **Arguments:**

    - `x`: the values.
    - `bits`: the widths, from 2 to 8.
    - `symmetric`: whether zero is always the middle code.
    - `axis`: the axis along which blocks run.
    - `rounding`: how to round ties: `"half_even"`, or `"half_away"` from zero.

    **Returns:**

    A report with a row for each width, `"4 bits"` and so on.

    **Raises:**

    `ValueError` if `bits` is empty, for a width that is not from 2 to 8, or for an unknown `rounding`.
    """
    if not bits:
        raise ValueError("`bits` must name at least one width. Got none. For instance `(4, 8)`.")
    formats = {f"{b} bits": integer_format(b, symmetric=symmetric, rounding=rounding) for b in bits}
    return Comparison(tuple(run_benchmark(x, f, name=name, axis=axis) for name, f in formats.items()))


def compare_granularities(
    x: Values,
    bits: int = 8,
    *,
    block_size: int = 32,
    symmetric: bool = True,
    axis: int = -1,
    rounding: Rounding = "half_even",
) -> Comparison:
    """Compares integers with one scale for the whole array, one for each channel, and one for each block of values.

    !!! Example

        ```python
        report = eqq.analysis.compare_granularities(w, bits=4)
        report["tensor"].error.mse, report["channel"].error.mse, report["block"].error.mse
        ```

    **Arguments:**

    - `x`: the values.
    - `bits`: the width of a code, from 2 to 8.
    - `block_size`: the number of values along `axis` that share a scale. A shorter last block has its own scale.
    - `symmetric`: whether zero is always the middle code.
    - `axis`: the axis along which channels and blocks run.
    - `rounding`: how to round ties: `"half_even"`, or `"half_away"` from zero.

    **Returns:**

    A report with the rows `"tensor"`, `"channel"` and `"block"`.

    **Raises:**

    `ValueError` for a block larger than the axis, a width that is not from 2 to 8, or an unknown `rounding`.
    """
    values = to_numpy(x, "`x`")
    _, (axis,) = check_quantizable(values, axis)
    length = values.shape[axis]
    if not 1 <= block_size <= length:
        raise ValueError(
            f"`block_size` must be from 1 to the length of the axis, {length}. Got {block_size}. A block as "
            "long as the axis is a channel."
        )
    sizes = {"tensor": "tensor", "channel": None, "block": block_size}
    formats = {
        name: integer_format(bits, block_size=size, symmetric=symmetric, rounding=rounding)
        for name, size in sizes.items()
    }
    return Comparison(tuple(run_benchmark(values, f, name=name, axis=axis) for name, f in formats.items()))
