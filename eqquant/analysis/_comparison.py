"""Compares formats on the same values."""

from collections.abc import Sequence

from .._formats import Binary, Dynamic8, FP8, Int2, Int4, Int8, MXFP4, MXFP8, NF4, NVFP4, Q4_0, Q8_0, Ternary
from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._tree.use import Use
from ._benchmark import Comparison, run_benchmark
from ._error import Values
from ._report import as_uses


# The default of `compare_formats`.
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
    formats: Sequence[AbstractFormat | str | Use] | AbstractFormat | str | Use = FORMATS,
    *,
    axis: int | Sequence[int] = -1,
    method: AbstractMethod | None = None,
) -> Comparison:
    """Measures the error and the size of several formats on the same values.

    !!! Example

        ```python
        report = eqq.analysis.compare_formats(w, ("nf4", "int4", eqq.Int4(block_size=32)))
        report.plot()       # error against bits
        ```

    **Arguments:**

    - `x`: the values.
    - `formats`: formats, their lower-case names, [`eqquant.Use`][]s with a method, or one of these. All formats of the
        library by default.
    - `axis`: the axis along which blocks run.
    - `method`: the method that chooses scales and codes, for each of `formats` that sets none.

    **Returns:**

    A report with a row for each format, `best_by_sqnr`, `best_by_mse` and `best_by_quality`.

    **Raises:**

    `ValueError` if `formats` is empty, and as [`eqquant.quantize`][].
    """
    if not formats:
        raise ValueError("`formats` must name at least one format. Got none. Leave it out for all of the library.")
    return Comparison(tuple(run_benchmark(x, use, axis=axis) for use in as_uses(formats, method)))
