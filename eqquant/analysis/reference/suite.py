"""The benchmark suite: integers on four kinds of weights, every format on one of them, methods on heavy tails."""

import math

import numpy as np
from jaxtyping import Float

from ..._formats import Int2, Int4, Int8, NF4
from ..._formats.any_width import integer_format
from ..._methods import AbsMax, HQQ, MSE
from ..._numerics.blocks import BlockSize
from ..._tree.use import Use
from .._benchmark import Benchmark, Comparison, run_benchmark
from .._comparison import FORMATS
from .generators import lcg_channels, lcg_gaussian, lcg_outliers, lcg_student, lcg_uniform


_GROUP = 32
_CHANNELS = 16


def run_suite(size: int = 4096) -> Comparison:
    """Runs a fixed set of benchmarks, the same on every machine.

    - Eleven benchmarks of symmetric integers: four and eight bits on normally distributed values; eight bits on uniform
        values, on values with outliers and on sixteen channels of growing spread; with one scale, one for each channel,
        and one for each group of 32. An array of `n` values has channels of about the length of its square root, and
        the last may be shorter. Ties round away from zero.
    - One benchmark of each format, on the normally distributed values.
    - One benchmark of each method for `Int8`, `Int4`, `Int2` and `NF4` in blocks of 64, on Student's t distribution
        with three degrees of freedom, which has heavy tails.

    !!! Example

        ```python
        report = eqq.analysis.run_suite(4096)
        report.best_by_sqnr.name, report["gaussian, NF4()"].error.sqnr_db
        ```

    **Arguments:**

    - `size`: the number of values of each array.

    **Returns:**

    A report with `best_by_sqnr`, `best_by_mse` and `best_by_quality`. It prints as a table.

    **Raises:**

    `ValueError` for a size below 256.
    """
    if size < 256:
        raise ValueError(f"`size` must be at least 256, sixteen channels of sixteen values. Got {size}.")
    return Comparison((*integer_rows(size), *_format_rows(size), *_rule_rows(size)))


def integer_rows(size: int) -> list[Benchmark]:
    gaussian = lcg_gaussian(size, seed=42)
    outliers = lcg_outliers(size, 0.01, 10.0, seed=44)
    channels = lcg_channels(_CHANNELS, size // _CHANNELS, 5.0, seed=45).ravel()
    sizes: dict[str, BlockSize] = {"tensor": "tensor", "channel": size // math.isqrt(size), "group": _GROUP}
    rows = [_integer_row("gaussian", gaussian, bits, kind, block) for bits in (4, 8) for kind, block in sizes.items()]
    return rows + [
        _integer_row("uniform", lcg_uniform(size, -1.0, 1.0, seed=43), 8, "tensor", "tensor"),
        _integer_row("outliers", outliers, 8, "tensor", "tensor"),
        _integer_row("outliers", outliers, 8, "group", _GROUP),
        _integer_row("channels", channels, 8, "tensor", "tensor"),
        _integer_row("channels", channels, 8, "channel", size // math.isqrt(size)),
    ]


def _integer_row(data: str, x: Float[np.ndarray, " size"], bits: int, kind: str, block_size: BlockSize) -> Benchmark:
    format = integer_format(bits, block_size=block_size, rounding="half_away")
    return run_benchmark(x, format, name=f"{data}, {bits} bits, {kind}", threshold=0.1)


def _format_rows(size: int) -> list[Benchmark]:
    gaussian = lcg_gaussian(size, seed=42)
    return [run_benchmark(gaussian, format, name=f"gaussian, {format!r}") for format in FORMATS]


def _rule_rows(size: int) -> list[Benchmark]:
    heavy = lcg_student(size, seed=46)
    uses = [Use(kind(block_size=64), method) for kind in (Int8, Int4, Int2, NF4) for method in (AbsMax(), MSE(), HQQ())]
    name = lambda use: f"heavy tails, {type(use.format).__name__} by {type(use.method).__name__}"
    return [run_benchmark(heavy, use, name=name(use)) for use in uses]
