"""The method of least squared error."""

from typing import ClassVar

from .._formats.base import AbstractFormat, Blocks, Scales
from .base import AbstractScaleMethod
from .choose import ZeroPoints
from .search import search_least_squares, start_search
from .statistics import Inputs


class MSE(AbstractScaleMethod):
    r"""Chooses the scale of least squared error $\sum (x - \hat x)^2$ in each block.

    Clips where that helps.

    Searches a grid of factors of the format's own scale, then fits the scale to the codes by least squares. The error
    is never larger than with [`eqquant.AbsMax`][]. Works with every format.

    With statistics of the inputs, the squared error of a column is weighted by the mean square of its input.

    !!! Example

        ```python
        q = eqq.quantize(w, "int4", method=eqq.MSE())
        model = eqq.quantize_tree(model, "int4", method=eqq.MSE(eqq.calibrate.collect_stats(model, batches)))
        ```

    **Arguments:**

    - `inputs`: the result of [`eqquant.calibrate.collect_stats`][]; for one array, the statistics of its weight, or the
        mean squares of its inputs, `(*stack, features)`. `None` if all columns have equal weight.
    """

    inputs: Inputs = None
    statistic: ClassVar[str | None] = "second_moment"

    def choose_scales(self, blocks: Blocks, format: AbstractFormat) -> tuple[Scales, ZeroPoints]:
        return self.choose_weighted(blocks, None, format)

    def choose_weighted(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, blocks: Blocks, weights: Blocks | None, format: AbstractFormat
    ) -> tuple[Scales, ZeroPoints]:
        search = start_search(blocks, format, weights)
        return search.result(search_least_squares(search))
