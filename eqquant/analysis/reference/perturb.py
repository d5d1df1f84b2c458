"""Measures how the error depends on the scale, the outliers and the number of bits."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from ..._array.array import QuantizedArray
from ..._array.quantize import quantize
from ..._formats.any_width import integer_format, Rounding
from ..._formats.base import AbstractFormat, as_format
from ..._methods import AbstractMethod
from ..._numerics.blocks import divide
from ..._report import Report, report_table
from .._error import measure, quantization_mse, Real, rows_of, to_numpy, Values
from .._plots import draw_bars
from .comparison import compare_bit_widths


@dataclasses.dataclass(frozen=True, repr=False)
class ScaleSensitivity(Report):
    """The error before and after all scales change by the share `change`, and its relative change per `change`."""

    change: float
    mse: float
    changed_mse: float
    sensitivity: float

    def __rich__(self) -> Table:
        table = report_table("scales", "mse")
        table.add_row("as chosen", f"{self.mse:.6g}")
        table.add_row(f"{self.change:+.1%}", f"{self.changed_mse:.6g}")
        table.add_row("growth of the mse per change", f"{self.sensitivity:.6g}")
        return table


def scale_sensitivity(x: Values, q: QuantizedArray, change: Real = 0.1) -> ScaleSensitivity:
    r"""Measures how the error changes if all scales are a little too large or too small.

    With mean squared errors $e_0$ before and $e_1$ after, the sensitivity is $|e_1 - e_0| / (|\delta| e_0)$.

    !!! Example

        ```python
        eqq.analysis.scale_sensitivity(w, eqq.quantize(w, "int4"), -0.1)   # clips the largest values
        ```

    **Arguments:**

    - `x`: the original values.
    - `q`: their quantized array, whose format and scales are used.
    - `change`: the share $\delta$ by which all scales change: above -1, and not zero.

    **Returns:**

    A report with `mse`, `changed_mse` and `sensitivity`.

    **Raises:**

    `ValueError` if `change` is zero or not above -1, and as [`eqquant.analysis.analyze_error`][].
    """
    if not (-1 < change < math.inf) or change == 0:
        raise ValueError(f"`change` must be above -1 and not zero. Got {change}. It is a share: 0.1 for 10 % more.")
    before = quantization_mse(x, q)
    rows, scale, zero = rows_of(x, q)
    scale = scale * (1 + change)
    codes = q.format.encode(divide(rows, scale) + zero)
    after = quantization_mse(rows, ((q.format.decode(codes) - zero) * scale).astype(q.dtype))
    growth = abs(after - before) / abs(change)
    ratio = growth / before if before > 0 else (math.inf if growth > 0 else 0.0)
    return ScaleSensitivity(float(change), before, after, ratio)


@dataclasses.dataclass(frozen=True, repr=False)
class OutlierImpact(Report):
    """The error with all values, and with magnitudes clipped at `threshold`, a percentile of the magnitudes.

    `clipped_mse` compares with the clipped values, `total_mse` with the original ones, so it includes the error of
    clipping itself. `ratio` is `mse / clipped_mse`.
    """

    percentile: float
    threshold: float
    mse: float
    clipped_mse: float
    total_mse: float
    ratio: float

    def __rich__(self) -> Table:
        table = report_table("values", "mse")
        table.add_row("all", f"{self.mse:.6g}")
        table.add_row(f"clipped at {self.threshold:.4g}, percentile {self.percentile:g}", f"{self.clipped_mse:.6g}")
        table.add_row("mse, clipping included", f"{self.total_mse:.6g}")
        table.add_row("all over clipped", f"{self.ratio:.6g}")
        return table


def outlier_impact(
    x: Values,
    percentile: Real = 99,
    format: AbstractFormat | str | None = None,
    *,
    axis: int | Sequence[int] = -1,
    method: AbstractMethod | None = None,
) -> OutlierImpact:
    """Measures how much the largest values increase the error of all values that share their scale.

    !!! Example

        ```python
        eqq.analysis.outlier_impact(w, 99.9).ratio
        ```

    **Arguments:**

    - `x`: the values.
    - `percentile`: the share of magnitudes, in percent, that stays unchanged. Larger magnitudes are clipped.
    - `format`: a format, or its lower-case name. Eight-bit integers with one scale by default.
    - `axis`: the axis along which blocks run.
    - `method`: the method that chooses scales and codes; [`eqquant.AbsMax`][] by default.

    **Returns:**

    A report with `threshold`, `mse`, `clipped_mse`, `total_mse` and `ratio`.

    **Raises:**

    `ValueError` for a percentile that is not between 0 and 100, and as [`eqquant.quantize`][].
    """
    if not 0 < percentile < 100:
        raise ValueError(f"`percentile` must be between 0 and 100. Got {percentile}. 99 clips the largest hundredth.")
    if percentile <= 1:
        raise ValueError(
            f"`percentile` must be in percent, not a fraction. Got {percentile}. Write "
            f"`percentile={100 * percentile:g}`."
        )
    values = to_numpy(x, "`x`")
    measure(values, values, ("`x`", "`x`"))
    magnitudes = np.sort(np.abs(values), axis=None)
    threshold = magnitudes[min(int(percentile / 100 * magnitudes.size), magnitudes.size - 1)]
    clipped = np.clip(values, -threshold, threshold)
    picked = integer_format(8) if format is None else as_format(format)
    before = quantization_mse(values, quantize(values, picked, axis=axis, method=method))
    q = quantize(clipped, picked, axis=axis, method=method)
    after, total = quantization_mse(clipped, q), quantization_mse(values, q)
    ratio = before / after if after > 0 else (math.inf if before > 0 else 1.0)
    return OutlierImpact(float(percentile), float(threshold), before, after, total, ratio)


@dataclasses.dataclass(frozen=True)
class WidthRow:
    """The error of integers of one width. `lost_db` is the loss of SQNR compared with the widest integers."""

    bits: int
    mse: float
    sqnr_db: float
    compression: float
    lost_db: float


@dataclasses.dataclass(frozen=True, repr=False)
class BitWidthDegradation(Report):
    """The error of integers of several widths. Prints as a table."""

    rows: tuple[WidthRow, ...]

    def __rich__(self) -> Table:
        table = report_table("bits", "mse", "SQNR, dB", "lost, dB", "compression", text=0)
        for row in self.rows:
            numbers = (f"{row.mse:.3e}", f"{row.sqnr_db:.2f}", f"{row.lost_db:.2f}", f"{row.compression:.2f}x")
            table.add_row(str(row.bits), *numbers)
        return table

    def plot(self, ax: Any = None) -> Any:
        """Plots the SQNR of each width as a bar. Returns Matplotlib's axes."""
        names = [f"{row.bits} bits" for row in self.rows]
        labels = ("What each bit is worth", "SQNR, dB")
        return draw_bars(ax, names, [row.sqnr_db for row in self.rows], labels)


def bit_width_degradation(
    x: Values,
    bits: Sequence[int] = (2, 3, 4, 5, 6, 7, 8),
    *,
    axis: int | Sequence[int] = -1,
    rounding: Rounding = "half_even",
) -> BitWidthDegradation:
    """Measures how much SQNR symmetric integers with one scale lose with each bit. Theory predicts 6.02 dB.

    !!! Example

        ```python
        print(eqq.analysis.bit_width_degradation(w))
        ```

    **Arguments:**

    - `x`: the values.
    - `bits`: the widths, from 2 to 8.
    - `axis`: the axis along which blocks run.
    - `rounding`: how to round ties: `"half_even"`, or `"half_away"` from zero.

    **Returns:**

    A report with `bits`, `mse`, `sqnr_db`, `lost_db` and `compression` (32 over the bits of a code, without scales) for
    each width.

    **Raises:**

    As [`eqquant.analysis.compare_bit_widths`][].
    """
    report = compare_bit_widths(x, bits, axis=axis, rounding=rounding)
    errors = [row.error for row in report.rows]
    widest = errors[int(np.argmax(bits))].sqnr_db
    # Without any error both ratios are infinite, and their difference would be NaN.
    lost = [0.0 if error.sqnr_db == widest else widest - error.sqnr_db for error in errors]
    rows = zip(bits, errors, lost, strict=True)
    return BitWidthDegradation(tuple(WidthRow(b, e.mse, e.sqnr_db, 32 / b, d) for b, e, d in rows))
