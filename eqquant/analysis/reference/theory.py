"""Theoretical bounds of the quantization error."""

from numbers import Integral
from typing import Literal

import numpy as np

from ..._array.array import QuantizedArray
from .._error import analyze_error, Real, sorted_levels, Values


def theoretical_sqnr(bits: int, signal: Literal["uniform", "sine"] = "uniform") -> float:
    r"""Computes the theoretical signal-to-noise ratio, in dB, of integers whose range is exactly that of the signal.

    Two formulas are common: $6.02\,b$ for uniformly distributed values, and $6.02\,b + 1.76$ for a sine, which spends
    more time near its peaks. Real weights have tails, and a lower ratio than both.

    !!! Example

        ```python
        eqq.analysis.theoretical_sqnr(8)           # 48.16
        eqq.analysis.theoretical_sqnr(8, "sine")   # 49.92
        ```

    **Arguments:**

    - `bits`: the width of a code.
    - `signal`: `"uniform"` or `"sine"`.

    **Returns:**

    The ratio in decibels.

    **Raises:**

    `ValueError` if `bits` is below 1, or for an unknown `signal`.

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
    """Computes the largest possible rounding error: half the widest step between two levels, times the largest scale.

    For integers, it is half the largest scale. The bound holds for formats whose levels span the range of their block:
    Int8, Int4, NF4 and every affine format. Formats that clip, such as Int2, Ternary and Binary, may exceed it.

    !!! Example

        ```python
        eqq.analysis.theoretical_max_error(eqq.quantize(w, "int8"))
        ```

    **Arguments:**

    - `q`: a quantized array.

    **Returns:**

    The bound, as an absolute error.
    """
    steps = np.diff(sorted_levels(q.format))
    return float(steps.max(initial=0) / 2 * np.abs(np.asarray(q.scale)).max(initial=0))


def error_within_bounds(x: Values, q: QuantizedArray, tolerance: Real = 0.01) -> bool:
    """Returns whether no error exceeds [`eqquant.analysis.theoretical_max_error`][].

    !!! Example

        ```python
        eqq.analysis.error_within_bounds(w, eqq.quantize(w, "int8"))
        ```

    **Arguments:**

    - `x`: the original values.
    - `q`: their quantized array.
    - `tolerance`: the share by which an error may exceed the bound, to allow for the rounding of float32.

    **Returns:**

    `True` if every error is within the bound.

    **Raises:**

    As [`eqquant.analysis.analyze_error`][].
    """
    return analyze_error(x, q).max_error <= theoretical_max_error(q) * (1 + tolerance)


def accuracy_retention(before: Real, after: Real) -> float:
    """Computes the ratio of two errors or losses in percent: the smaller over the larger. 100 means no change.

    It does not tell which of the two is better.

    !!! Example

        ```python
        eqq.analysis.accuracy_retention(0.010, 0.020)   # 50.0
        ```

    **Arguments:**

    - `before`: an error or a loss, not negative.
    - `after`: the same, after a change.

    **Returns:**

    A percentage from 0 to 100.

    **Raises:**

    `ValueError` if either is negative.
    """
    if not (before >= 0 and after >= 0):
        raise ValueError(f"`before` and `after` must not be negative. Got {before} and {after}. Give errors or losses.")
    largest = max(before, after)
    return 100.0 if largest == 0 else 100.0 * min(before, after) / largest
