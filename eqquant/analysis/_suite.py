"""The benchmark suite: integers on four kinds of weights, then every format on one of them."""

import math

import numpy as np
from jaxtyping import Float

from .._scaling import BlockSize
from ._benchmark import Benchmark, Comparison, run_benchmark
from ._comparison import FORMATS
from ._generators import lcg_channels, lcg_gaussian, lcg_outliers, lcg_uniform
from ._integers import integer_format


_GROUP = 32
_CHANNELS = 16


def run_suite(size: int = 4096) -> Comparison:
    """A fixed set of benchmarks, the same on every machine: eleven of symmetric integers, then one of each format.

    Integers of four and eight bits run on normally distributed values, and of eight bits on uniform ones, on ones with
    outliers and on sixteen channels of growing spread; with one scale, one for each channel, and one for each group of
    32. Here an array of `n` values has channels of the length of its square root, rounded, so that the last may be
    shorter. Ties are rounded away from zero. The formats run on the normally distributed values.

    !!! Example

        ```python
        report = eqq.analysis.run_suite(4096)
        report.best_by_sqnr.name, report["gaussian, NF4()"].error.sqnr_db
        ```

    **Arguments:**

    - `size`: how many values each array holds.

    **Returns:**

    A report with `best_by_sqnr`, `best_by_mse` and `best_by_quality`. It prints as a table.

    **Raises:**

    `ValueError` for a size below 256.
    """
    if size < 256:
        raise ValueError(f"`size` must be at least 256, sixteen channels of sixteen values. Got {size}.")
    gaussian = lcg_gaussian(size, seed=42)
    outliers = lcg_outliers(size, 0.01, 10.0, seed=44)
    channels = lcg_channels(_CHANNELS, size // _CHANNELS, 5.0, seed=45).ravel()
    sizes: dict[str, BlockSize] = {"tensor": "tensor", "channel": size // math.isqrt(size), "group": _GROUP}
    rows = [_row("gaussian", gaussian, bits, kind, block) for bits in (4, 8) for kind, block in sizes.items()]
    rows += [
        _row("uniform", lcg_uniform(size, -1.0, 1.0, seed=43), 8, "tensor", "tensor"),
        _row("outliers", outliers, 8, "tensor", "tensor"),
        _row("outliers", outliers, 8, "group", _GROUP),
        _row("channels", channels, 8, "tensor", "tensor"),
        _row("channels", channels, 8, "channel", size // math.isqrt(size)),
    ]
    rows += [run_benchmark(gaussian, format, name=f"gaussian, {format!r}") for format in FORMATS]
    return Comparison(tuple(rows))


def _row(data: str, x: Float[np.ndarray, " size"], bits: int, kind: str, block_size: BlockSize) -> Benchmark:
    format = integer_format(bits, block_size=block_size, rounding="away")
    return run_benchmark(x, format, name=f"{data}, {bits} bits, {kind}", threshold=0.1)
