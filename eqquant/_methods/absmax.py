"""The default method: the scales that the format chooses."""

from typing import ClassVar

from .._formats.base import AbstractAffineFormat, AbstractFormat, AbstractOffsetFormat, Blocks, Scales
from .base import AbstractScaleMethod
from .choose import ZeroPoints


class AbsMax(AbstractScaleMethod):
    r"""Takes the scale of the format, which usually maps the amax to the outermost level.

    This is the default. [`eqquant.Ternary`][] and [`eqquant.Binary`][] take the mean magnitude; the GGUF and OCP
    formats follow their specifications.

    !!! Example

        ```python
        q = eqq.quantize(w, "int4", method=eqq.AbsMax())  # as without `method`
        ```

    **Arguments:** none.
    """

    only_reduces: ClassVar[bool] = True

    def choose_scales(self, blocks: Blocks, format: AbstractFormat) -> tuple[Scales, ZeroPoints]:
        scale = format.choose_scale(blocks)
        if isinstance(format, AbstractAffineFormat) and format.has_zero_points:
            return scale, format.choose_zero_point(blocks, scale)
        if isinstance(format, AbstractOffsetFormat):
            return scale, format.choose_offset(blocks, scale)
        return scale, None
