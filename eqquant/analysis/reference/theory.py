"""What theory says of an error: how small it can be, how large it may get."""

from numbers import Integral
from typing import Literal

import numpy as np

from ..._array.array import QuantizedArray
from .._error import analyze_error, Real, sorted_levels, Values


def theoretical_sqnr(bits: int, signal: Literal["uniform", "sine"] = "uniform") -> float:
    r"""The signal-to-noise ratio, in dB, of integers whose steps fill the range of the signal exactly.

    Two formulas go by this name. $6.02\,b$ is that of uniformly distributed values; $6.02\,b + 1.76$ is that of a sine,
    which spends more time near its peaks. Real weights have tails, and do worse than both.

    !!! Example

        ```python
        eqq.analysis.theoretical_sqnr(8)           # 48.16
        eqq.analysis.theoretical_sqnr(8, "sine")   # 49.92
        ```

    **Arguments:**

    - `bits`: the width of a code.
    - `signal`: `"uniform"` or `"sine"`.

    **Returns:**

    Decibels.

    **Raises:**

    `ValueError` for fewer bits than one, or another signal.

    ??? cite

        [Spectra of Quantized Signals](https://doi.org/10.1002/j.1538-7305.1948.tb01340.x)
    """
    if isinstance(bits, bool) or not isinstance(bits, Integral) or bits < 1:
        raise ValueError(f"`bits` must be an integer, at least 1. Got {bits!r}.")
    extra = {"uniform": 0.0, "sine": 1.76}
    if signal not in extra:
        raise ValueError(f'`signal` must be "uniform" or "sine". Got {signal!r}.')
    return 6.02 * bits + extra[signal]


def theoretical_max_error(q: QuantizedArray) -> float:
    """The largest error that rounding can make: half of the widest step between two codes, times the largest scale.

    For integers that is half the largest scale. It holds for formats whose codes span the range of their block: Int8,
    Int4, NF4 and every affine format. Those that clip, as Int2, Ternary and Binary do, may exceed it.

    !!! Example

        ```python
        eqq.analysis.theoretical_max_error(eqq.quantize(w, "int8"))
        ```

    **Arguments:**

    - `q`: a quantized array.

    **Returns:**

    An absolute error.
    """
    steps = np.diff(sorted_levels(q.format))
    return float(steps.max(initial=0) / 2 * np.abs(np.asarray(q.scale)).max(initial=0))


def error_within_bounds(x: Values, q: QuantizedArray, tolerance: Real = 0.01) -> bool:
    """Whether no error exceeds [`eqquant.analysis.theoretical_max_error`][].

    !!! Example

        ```python
        eqq.analysis.error_within_bounds(w, eqq.quantize(w, "int8"))
        ```

    **Arguments:**

    - `x`: the original values.
    - `q`: what they were quantized to.
    - `tolerance`: by what share an error may exceed the bound. It covers the rounding of float32.

    **Returns:**

    A boolean.

    **Raises:**

    As [`eqquant.analysis.analyze_error`][].
    """
    return analyze_error(x, q).max_error <= theoretical_max_error(q) * (1 + tolerance)


def accuracy_retention(before: Real, after: Real) -> float:
    """How alike two errors or two losses are, in percent: the smaller over the larger. 100 is no change.

    It does not say which of the two is better.

    !!! Example

        ```python
        eqq.analysis.accuracy_retention(0.010, 0.020)   # 50.0
        ```

    **Arguments:**

    - `before`: an error or a loss, not negative.
    - `after`: the same, after a change.

    **Returns:**

    From 0 to 100.

    **Raises:**

    `ValueError` if one is negative.
    """
    if not (before >= 0 and after >= 0):
        raise ValueError(f"`before` and `after` must not be negative. Got {before} and {after}. Give errors or losses.")
    largest = max(before, after)
    return 100.0 if largest == 0 else 100.0 * min(before, after) / largest
