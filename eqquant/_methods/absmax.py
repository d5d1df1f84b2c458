"""What the format says."""

from jaxtyping import Array, Float32

from .._formats.base import AbstractAffineFormat, AbstractFormat
from .base import AbstractScaleMethod, Scales, ZeroPoints


class AbsMax(AbstractScaleMethod):
    r"""Takes the scales that the format chooses itself: mostly, the largest magnitude of a block takes the last level.

    It is the default, and looks at nothing but the extremes of a block. [`eqquant.Ternary`][] and [`eqquant.Binary`][]
    take the mean magnitude, GGUF's formats and those of OCP the rule of their specification.
    """

    def choose_scales(
        self, blocks: Float32[Array, "*batch blocks block"], format: AbstractFormat
    ) -> tuple[Scales, ZeroPoints]:
        scale = format.choose_scale(blocks)
        if isinstance(format, AbstractAffineFormat) and format.has_zero_points:
            return scale, format.choose_zero_point(blocks, scale)
        return scale, None


AbsMax.__init__.__doc__ = "**Arguments:** none."
