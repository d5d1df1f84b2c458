"""Measures the error and the size of formats on one array."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from rich.markup import escape
from rich.table import Table

from .._array.quantize import quantize
from .._formats import Binary, Dynamic8, FP8, Int2, Int4, Int8, MXFP4, MXFP8, NF4, NVFP4, Q4_0, Q8_0, Ternary
from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._report import Report, report_table
from .._tree.config import as_config, QuantConfig
from .._tree.decide import FormatLike
from ._error import compute_bits, ErrorReport, measure_error, Real, to_numpy, Values
from ._plots import Axes, draw_front


# The default of `compare_formats`.
FORMATS: tuple[AbstractFormat, ...] = (
    *(Int8(), Int8(symmetric=False), FP8(), FP8("e5m2"), MXFP8(), MXFP8("e5m2")),
    *(Dynamic8(), Q8_0()),
    *(NF4(), NF4(double_quant=True), Int4(), Int4(symmetric=False), MXFP4(), NVFP4(), Q4_0()),
    *(Int2(), Int2(symmetric=False), Ternary(), Binary()),
)


@dataclasses.dataclass(frozen=True, repr=False)
class Benchmark(Report):
    """The error and the size of one format on one array.

    `bits` are per value, including scales.
    """

    derived: ClassVar[tuple[str, ...]] = ("compression", "quality")

    name: str
    format: AbstractFormat
    bits: float
    error: ErrorReport

    @property
    def compression(self) -> float:
        """The ratio of the size in float32 to the quantized size."""
        return 32 / self.bits

    @property
    def quality(self) -> float:
        """The SQNR in dB, over the compression or 1. It favors accurate formats over small ones."""
        return self.error.sqnr_db / max(self.compression, 1.0)

    def __rich__(self) -> Table:
        return Comparison((self,)).__rich__()


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Report):
    """A comparison of formats. Prints as a table; `report["name"]` returns one row."""

    derived: ClassVar[tuple[str, ...]] = ("best_by_sqnr.name", "best_by_mse.name", "best_by_quality.name")

    rows: tuple[Benchmark, ...]

    def __getitem__(self, name: str) -> Benchmark:
        by_name = {row.name: row for row in self.rows}
        if name not in by_name:
            raise KeyError(f"`name` must be the name of a row. Got {name!r}. There are {', '.join(by_name)}.")
        return by_name[name]

    @property
    def best_by_sqnr(self) -> Benchmark:
        return max(self.rows, key=lambda row: row.error.sqnr_db)

    @property
    def best_by_mse(self) -> Benchmark:
        return min(self.rows, key=lambda row: row.error.mse)

    @property
    def best_by_quality(self) -> Benchmark:
        return max(self.rows, key=lambda row: row.quality)

    def __rich__(self) -> Table:
        table = report_table("", "bits", "compression", "SQNR, dB", "mse", "max error", "cosine", "quality")
        for row in self.rows:
            error = (f"{row.error.mse:.3e}", f"{row.error.max_error:.3e}", f"{row.error.cosine:.6f}")
            size = (f"{row.bits:.3f}", f"{row.compression:.2f}x", f"{row.error.sqnr_db:.2f}")
            table.add_row(escape(row.name), *size, *error, f"{row.quality:.3f}")
        return table

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plots the relative error of each row against its bits, with the Pareto front.

        Returns Matplotlib's axes.
        """
        errors = [row.error.relative_l2 for row in self.rows]
        bits = [row.bits for row in self.rows]
        labels = ("Error against size, with the Pareto front", "relative error (L2)")
        return draw_front(ax, [row.name for row in self.rows], bits, errors, labels)


def run_benchmark(
    x: Values,
    format: FormatLike,
    *,
    name: str | None = None,
    axis: int | Sequence[int] = -1,
    method: AbstractMethod | None = None,
    threshold: Real | None = None,
) -> Benchmark:
    """Returns a row of `compare_formats`: the error and the size of an array in one format."""
    (config,) = as_configs(format, method)
    values = to_numpy(x, "`x`")
    q = quantize(values, config.format, axis=axis, method=config.method)
    error = measure_error(values, to_numpy(q, "`q`"), ("`x`", "its quantized version"), threshold)
    return Benchmark(repr(config) if name is None else name, config.format, compute_bits(q), error)


def compare_formats(
    x: Values,
    formats: Sequence[FormatLike] | FormatLike = FORMATS,
    *,
    axis: int | Sequence[int] = -1,
    method: AbstractMethod | None = None,
) -> Comparison:
    """Returns the error and the size of several formats on the same values.

    !!! Example

        ```python
        report = eqq.analysis.compare_formats(w, ("nf4", "int4", eqq.Int4(block_size=32)))
        report.plot()       # error against bits
        ```

    **Arguments:**

    - `x`: the values.
    - `formats`: formats, their lower-case names, [`eqquant.QuantConfig`][]s with a method, or one of these. All
        formats of the library by default.
    - `axis`: the axis along which blocks run.
    - `method`: the method that chooses scales and codes, for each of `formats` that sets none.

    **Returns:**

    A report, which prints as a table. It has

    - `rows`: for each format its `name`, `format`, `bits` (per value, including scales), `error` (the report of
        [`eqquant.analysis.analyze_error`][]), `compression` (32 over the bits) and `quality` (the SQNR in dB over the
        compression). `report["Int4()"]` is the row of that name.
    - `best_by_sqnr`, `best_by_mse`, `best_by_quality`: the best row by each of these.
    - `.plot(ax=None)`: draws relative errors against bits, and the Pareto front; returns Matplotlib's axes.
    - `.to_dict()`, `.to_json(indent=None)`: the same as plain Python, and as JSON.

    **Raises:**

    `ValueError` if `formats` is empty, and as [`eqquant.quantize`][].
    """
    return Comparison(tuple(run_benchmark(x, config, axis=axis) for config in as_configs(formats, method)))


def as_configs(formats: Sequence[FormatLike] | FormatLike, method: AbstractMethod | None) -> tuple[QuantConfig, ...]:
    """Returns one or several formats as `QuantConfig`s, with a default method."""
    format_list = (formats,) if isinstance(formats, (AbstractFormat, str, type, QuantConfig)) else formats
    configs = [as_config(format) for format in format_list]
    if not configs:
        raise ValueError("`formats` must name at least one format. Got none. For instance `('int2', 'nf4', 'int8')`.")
    if any(config.activations is not None for config in configs):
        raise ValueError(
            "`formats` must leave `activations` out: losses are measured with quantized weights alone. Got some. Pass "
            "them to `quantize_tree`."
        )
    return tuple(QuantConfig(config.format, method) if config.method is None else config for config in configs)


def show_format(format: AbstractFormat | QuantConfig | None) -> str:
    return "float" if format is None else repr(format)
