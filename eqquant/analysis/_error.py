"""Measures the error of one array."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Shaped
from rich.table import Table

from .._array.array import QuantizedArray
from .._array.value import AbstractArrayValue
from .._formats.base import AbstractFormat, find_levels
from .._numerics.axes import as_axes, memory_order
from .._numerics.blocks import divide, expand
from .._report import Report, report_table
from ._plots import Axes, draw_histogram


Real = float | int
Values = AbstractArrayValue | Shaped[ArrayLike, "..."]
_CHUNK = 1 << 17  # values at a time, so that the float64 copies stay in cache


_LABELS = {
    "sqnr_db": "signal-to-noise ratio (SQNR), dB",
    "relative_l2": "relative error (L2)",
    "cosine": "cosine",
    "mse": "mean squared error",
    "rmse": "root mean squared error",
    "mae": "mean absolute error",
    "max_error": "largest error",
    "outlier_rate": "share of errors above {0.threshold:.4g}",
}


@dataclasses.dataclass(frozen=True, repr=False)
class ErrorReport(Report):
    r"""The error of a quantized array compared with the original.

    `sqnr_db` is $10 \log_{10}$ of the mean square of the values over the mean square of the error, `relative_l2` the
    norm of the error over the norm of the values, and `outlier_rate` the share of errors above `threshold`. `rms` is
    the root mean square of the values themselves.
    """

    size: int
    rms: float
    mse: float
    rmse: float
    mae: float
    max_error: float
    sqnr_db: float
    relative_l2: float
    cosine: float
    outlier_rate: float
    threshold: float
    arrays: tuple[Values, Values] | None = dataclasses.field(default=None, repr=False, compare=False)

    def __rich__(self) -> Table:
        table = report_table("error", "value")
        for name, label in _LABELS.items():
            table.add_row(label.format(self), f"{getattr(self, name):,.6g}")
        table.add_section()
        table.add_row("values", f"{self.size:,}")
        table.add_row("root mean square of the values", f"{self.rms:.6g}")
        return table

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plots the histogram of the values on the grid of levels. Returns Matplotlib's axes."""
        if self.arrays is None:
            raise ValueError(
                "`plot` needs the values. Got a report of a whole model. Call `analyze_error` for one leaf."
            )
        x, q = self.arrays
        if not isinstance(q, QuantizedArray):
            values, levels = to_numpy(x, "`x`").ravel(), np.unique(to_numpy(q, "`q`"))
            labels = ("Values before and after quantization", "values", "quantized values", "value")
            return draw_histogram(ax, values, levels[:256], labels)
        in_codes, levels = _scale_to_codes(x, q)
        labels = (f"Values on the grid of {q.format!r}", "values", "codes", "value over its scale")
        return draw_histogram(ax, in_codes, levels, labels)


def analyze_error(x: Values, q: Values, *, threshold: Real | None = None) -> ErrorReport:
    r"""Returns the error of a quantized array compared with the original.

    Sums run in float64, so they do not overflow or underflow for any float32 magnitudes.

    !!! Example

        ```python
        print(eqq.analysis.analyze_error(w, eqq.quantize(w, "nf4")))
        ```

    **Arguments:**

    - `x`: the original values: any floating point array, a quantized one too.
    - `q`: a quantized array, or any floating point array of the same shape.
    - `threshold`: the absolute error above which a value counts as an outlier. By default, a tenth of the root mean
        square of `x`.

    **Returns:**

    A report, which prints as a table. It has

    - `sqnr_db`: $10 \log_{10}$ of the mean square of the values over the mean square of the error, in dB.
    - `relative_l2`: the norm of the error over the norm of the values.
    - `cosine`: the cosine between values and quantized values.
    - `mse`, `rmse`, `mae`, `max_error`: the mean squared, the root mean squared, the mean absolute and the largest
        error, in the unit of `x` or its square.
    - `outlier_rate`: the share of errors above `threshold`, from 0 to 1; and the `threshold`.
    - `size`, `rms`: the number of values, and their root mean square.
    - `.plot(ax=None)`: draws the histogram of the values on the grid of the codes; returns Matplotlib's axes.
    - `.to_dict()`, `.to_json(indent=None)`: the same as plain Python, and as JSON. All numbers are floats of Python.

    **Raises:**

    `TypeError` if an array is not floating point; `ValueError` if the arrays differ in shape, are empty, or hold
    values that are not finite.
    """
    report = measure_error(to_numpy(x, "`x`"), to_numpy(q, "`q`"), ("`x`", "`q`"), threshold)
    return dataclasses.replace(report, arrays=(x, q))


def quantization_mse(x: Values, q: Values) -> float:
    """Returns the mean squared difference of two arrays."""
    return analyze_error(x, q).mse


def to_numpy(x: Values, name: str) -> np.ndarray:
    """Returns a dense array on the host, in its own dtype."""
    values = np.asarray(x.dequantize() if isinstance(x, AbstractArrayValue) else x)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating point array. Got dtype {values.dtype}. Convert it first.")
    return values


def measure_error(x: np.ndarray, y: np.ndarray, names: tuple[str, str], threshold: Real | None = None) -> ErrorReport:
    if x.shape != y.shape:
        raise ValueError(
            f"{names[0]} and {names[1]} must have the same shape. Got {x.shape} and {y.shape}. Compare an array with "
            "its own quantized version."
        )
    if x.size == 0:
        raise ValueError(f"{names[0]} must hold at least one value. Got shape {x.shape}. An empty array has no error.")
    flat = x.reshape(-1), y.reshape(-1)
    pieces = [[a[n : n + _CHUNK] for a in flat] for n in range(0, x.size, _CHUNK)]
    signal, approximation = (sum(map(_sum_of_squares, parts)) for parts in zip(*pieces, strict=True))
    for name, total, values in ((names[0], signal, x), (names[1], approximation, y)):
        if not math.isfinite(total):
            raise ValueError(
                f"{name} must be finite. Got {np.count_nonzero(~np.isfinite(values))} of {values.size} values that are "
                "not. Replace them, for instance with `jnp.nan_to_num`."
            )
    rms = math.sqrt(signal / x.size)
    threshold = 0.1 * rms if threshold is None else float(threshold)
    noise = absolute = product = max_error = outliers = 0.0
    for a, b in pieces:
        a, b = a.astype(np.float64), b.astype(np.float64)
        error = np.abs(a - b)
        noise += _dot(error, error)
        product += _dot(a, b)
        absolute += float(error.sum())
        max_error = max(max_error, float(error.max()))
        outliers += np.count_nonzero(error > threshold)
    both = signal > 0 and approximation > 0
    cosine = product / math.sqrt(signal) / math.sqrt(approximation) if both else float(noise == 0)
    return ErrorReport(
        size=x.size,
        rms=rms,
        mse=noise / x.size,
        rmse=math.sqrt(noise / x.size),
        mae=absolute / x.size,
        max_error=max_error,
        sqnr_db=compute_decibels(signal, noise),
        relative_l2=math.sqrt(noise / signal) if signal > 0 else (math.inf if noise > 0 else 0.0),
        cosine=cosine,
        outlier_rate=outliers / x.size,
        threshold=threshold,
    )


def compute_decibels(signal: float, noise: float) -> float:
    """Returns the ratio of two powers in dB: infinite without noise, even for a zero signal."""
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 else 10 * (math.log10(signal) - math.log10(noise))


def _sum_of_squares(x: np.ndarray) -> float:
    x = x.astype(np.float64)
    return _dot(x, x)


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    # Not `a @ b`: for short chunks the threads of BLAS cost more than they save.
    return float(np.einsum("i,i->", a, b))


def list_levels(format: AbstractFormat) -> np.ndarray:
    """Returns the sorted levels of a format, before scale and zero point."""
    levels, used = find_levels(format)
    return np.unique(levels[used].astype(np.float64))


def compute_bits(q: QuantizedArray) -> float:
    """Returns the bits per value, including scales."""
    return 8 * q.nbytes / max(q.size, 1)


def align_rows(x: Values, q: QuantizedArray) -> tuple[Array, Array, Array]:
    """Returns the values in the memory order of `q`, with the scale and zero point of each."""
    axes = as_axes(q.axis)
    rows = memory_order(jnp.asarray(to_numpy(x, "`x`"), jnp.float32), axes)
    spread = lambda per_block: expand(per_block, q.format.block_size, rows.shape[-1])
    zero = jnp.zeros_like(q.scale) if q.zero_point is None else q.zero_point.astype(jnp.float32)
    zero = zero if q.offset is None else -divide(q.offset, q.scale)
    return rows, spread(q.scale), spread(zero)


def _scale_to_codes(x: Values, q: QuantizedArray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `values / scale + zero_point`, and the levels in the range of these."""
    rows, scale, zero = align_rows(x, q)
    values, levels = np.asarray(divide(rows, scale) + zero).ravel(), list_levels(q.format)
    step = np.diff(levels).max(initial=0)
    return values, levels[(levels >= values.min() - step) & (levels <= values.max() + step)]
