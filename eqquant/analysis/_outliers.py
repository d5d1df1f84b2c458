"""Measures the effect of outliers on the values that share their scale."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from .._array.quantize import quantize
from .._formats import Int8
from .._formats.base import AbstractFormat
from .._formats.names import as_format
from .._methods import AbstractMethod
from .._report import Report, report_table
from ._error import measure_error, quantization_mse, Real, to_numpy, Values


@dataclasses.dataclass(frozen=True, repr=False)
class OutlierImpact(Report):
    """The error with all values, and with clipped outliers.

    [`eqquant.reference.outlier_impact`][] makes it. Magnitudes are clipped at `threshold`, a percentile of the
    magnitudes. `clipped_mse` compares with the clipped values, `total_mse` with the original ones, so it includes the
    error of clipping itself. `ratio` is `mse / clipped_mse`.
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
    """Returns how much outliers increase the error of the values that share their scale.

    !!! Example

        ```python
        eqquant.reference.outlier_impact(w, 99.9).ratio
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
    measure_error(values, values, ("`x`", "`x`"))
    magnitudes = np.sort(np.abs(values), axis=None)
    threshold = magnitudes[min(int(percentile / 100 * magnitudes.size), magnitudes.size - 1)]
    clipped = np.clip(values, -threshold, threshold)
    chosen_format = Int8("tensor") if format is None else as_format(format)
    mse = quantization_mse(values, quantize(values, chosen_format, axis=axis, method=method))
    q = quantize(clipped, chosen_format, axis=axis, method=method)
    clipped_mse, total = quantization_mse(clipped, q), quantization_mse(values, q)
    ratio = mse / clipped_mse if clipped_mse > 0 else (math.inf if mse > 0 else 1.0)
    return OutlierImpact(float(percentile), float(threshold), mse, clipped_mse, total, ratio)
