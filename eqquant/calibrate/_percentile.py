"""The calibrator that clips values outside two percentiles."""

import equinox as eqx
from jaxtyping import Array, Float32

from ._sketch import AbstractSketched


class Percentile(AbstractSketched):
    r"""Finds the range between two percentiles of all data.

    Keeps counts of the data in logarithmic bins: 24 KiB per scale, however much data it observes. A percentile is the
    order statistic at rank $p n / 100$, computed in float32, to within 1/64 of its magnitude; 0 and 100 are exact.
    Magnitudes below $2^{-24}$ of the largest count as zero. Updates and merges commute: whatever the order, the result
    is the same, bit for bit.

    !!! Example

        ```python
        cal = eqq.calibrate.Percentile("int8", (768,), axis=-2, lower=0.1, upper=99.9)
        for x in batches:
            cal = cal.update(x)
        q = cal.result().quantize(x)
        ```

    ??? cite

        [DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error Guarantees](https://arxiv.org/abs/1908.10693)

    **Arguments:**

    - `format`, `shape`, `axis`, `name`: as for [`eqquant.calibrate.AbstractCalibrator`][].
    - `lower`, `upper`: the percentiles, from 0 to 100 (not fractions).
    """

    lower: float | int = eqx.field(static=True, default=0.01, kw_only=True)
    upper: float | int = eqx.field(static=True, default=99.99, kw_only=True)

    def __check_init__(self) -> None:
        if 0 <= self.lower < self.upper <= 1:
            raise ValueError(
                f"`lower` and `upper` must be percentiles, from 0 to 100, not fractions. Got upper={self.upper}. Write "
                f"`upper={100 * self.upper:g}`."
            )
        if not 0 <= self.lower < self.upper <= 100:
            raise ValueError(
                f"`lower` and `upper` must be percentiles, 0 <= lower < upper <= 100. Got lower={self.lower} and "
                f"upper={self.upper}. `lower=0.1, upper=99.9` clips one value in 500."
            )

    def range(self) -> tuple[Float32[Array, "*blocks"], Float32[Array, "*blocks"]]:
        low = self.seen.low if self.lower == 0 else self.seen.quantile(self.lower / 100)
        high = self.seen.high if self.upper == 100 else self.seen.quantile(self.upper / 100)
        return low, high
