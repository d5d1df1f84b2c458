"""Formats, widths and granularities side by side on the same values."""

from collections.abc import Sequence

from .._array.quantize import check_quantizable
from .._formats import Binary, Dynamic8, FP8, Int2, Int4, Int8, MXFP4, MXFP8, NF4, NVFP4, Q4_0, Q8_0, Ternary
from .._formats.base import AbstractFormat
from ._benchmark import Comparison, run_benchmark
from ._error import to_numpy, Values
from ._integers import integer_format, Rounding
from ._report import as_formats


# What is compared where nothing else is asked for.
FORMATS: tuple[AbstractFormat, ...] = (
    Int8(),
    Int8(symmetric=False),
    FP8(),
    FP8("e5m2"),
    MXFP8(),
    MXFP8("e5m2"),
    Dynamic8(),  # pyright: ignore[reportCallIssue]
    Q8_0(),
    NF4(),
    NF4(double_quant=True),
    Int4(),
    Int4(symmetric=False),
    MXFP4(),
    NVFP4(),
    Q4_0(),
    Int2(),
    Int2(symmetric=False),
    Ternary(),
    Binary(),
)


def compare_formats(
    x: Values,
    formats: Sequence[AbstractFormat | str] | AbstractFormat | str = FORMATS,
    *,
    axis: int | Sequence[int] = -1,
) -> Comparison:
    """The error and the size of several formats on the same values.

    !!! Example

        ```python
        report = eqq.analysis.compare_formats(w, ("nf4", "int4", eqq.Int4(block_size=32)))
        report.plot()       # error against bits
        ```

    **Arguments:**

    - `x`: the values.
    - `formats`: formats, or their lower-case names, or one of these. All of the library unless given.
    - `axis`: the axis along which blocks run.

    **Returns:**

    A report with a row for each format, `best_by_sqnr`, `best_by_mse` and `best_by_quality`.

    **Raises:**

    `ValueError` for no formats, and as [`eqquant.quantize`][].
    """
    if not formats:
        raise ValueError("`formats` must name at least one format. Got none. Leave it out for all of the library.")
    return Comparison(tuple(run_benchmark(x, format, axis=axis) for format in as_formats(formats)))


def compare_bit_widths(
    x: Values,
    bits: Sequence[int] = (4, 8),
    *,
    symmetric: bool = True,
    axis: int | Sequence[int] = -1,
    rounding: Rounding = "half_even",
) -> Comparison:
    """Integers of several widths on the same values, with one scale for all of them.

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
    - `rounding`: where ties go, `"half_even"` or `"half_away"` from zero.

    **Returns:**

    A report with a row for each width, `"4 bits"` and so on.

    **Raises:**

    `ValueError` for no widths, one that is not from 2 to 8, or an unknown `rounding`.
    """
    if not bits:
        raise ValueError("`bits` must name at least one width. Got none. For instance `(4, 8)`.")
    formats = {f"{b} bits": integer_format(b, symmetric=symmetric, rounding=rounding) for b in bits}
    return Comparison(tuple(run_benchmark(x, f, name=name, axis=axis) for name, f in formats.items()))


def compare_granularities(
    x: Values,
    bits: int = 8,
    *,
    group_size: int = 32,
    symmetric: bool = True,
    axis: int = -1,
    rounding: Rounding = "half_even",
) -> Comparison:
    """Integers with one scale for the whole array, one for each channel, and one for each group of values.

    !!! Example

        ```python
        report = eqq.analysis.compare_granularities(w, bits=4)
        report["tensor"].error.mse, report["channel"].error.mse, report["group"].error.mse
        ```

    **Arguments:**

    - `x`: the values.
    - `bits`: the width of a code, from 2 to 8.
    - `group_size`: how many values along `axis` are a group. A last group that is shorter has a scale of its own.
    - `symmetric`: whether zero is always the middle code.
    - `axis`: the axis that a channel runs along.
    - `rounding`: where ties go, `"half_even"` or `"half_away"` from zero.

    **Returns:**

    A report with the rows `"tensor"`, `"channel"` and `"group"`.

    **Raises:**

    `ValueError` for a group larger than the axis, bits that are not from 2 to 8, or an unknown `rounding`.
    """
    values = to_numpy(x, "`x`")
    _, (axis,) = check_quantizable(values, axis)
    length = values.shape[axis]
    if not 1 <= group_size <= length:
        raise ValueError(
            f"`group_size` must be from 1 to the length of the axis, {length}. Got {group_size}. A group as "
            "long as the axis is a channel."
        )
    sizes = {"tensor": "tensor", "channel": None, "group": group_size}
    formats = {
        name: integer_format(bits, block_size=size, symmetric=symmetric, rounding=rounding)
        for name, size in sizes.items()
    }
    return Comparison(tuple(run_benchmark(values, f, name=name, axis=axis) for name, f in formats.items()))
