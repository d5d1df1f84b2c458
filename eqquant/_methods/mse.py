"""The method of least squared error."""

from jaxtyping import Array, Float32

from .._formats.base import AbstractFormat
from .base import AbstractScaleMethod, Scales, ZeroPoints
from .search import least_squared, Search


class MSE(AbstractScaleMethod):
    r"""Chooses the scale of least squared error $\sum (x - \hat x)^2$ in each block, and clips where that helps.

    Searches a grid of factors of the format's own scale, then fits the scale to the codes by least squares. The error
    is never larger than with [`eqquant.AbsMax`][]. Works with every format.

    !!! Example

        ```python
        q = eqq.quantize(w, "int4", method=eqq.MSE())
        ```
    """

    def choose_scales(
        self, blocks: Float32[Array, "*batch blocks block"], format: AbstractFormat
    ) -> tuple[Scales, ZeroPoints]:
        search = Search.of(blocks, format)
        return search.result(least_squared(search))


MSE.__init__.__doc__ = "**Arguments:** none."
