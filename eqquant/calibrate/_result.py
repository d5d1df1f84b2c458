"""The result of calibration: a range, with its scale and zero point."""

import functools as ft

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32, PRNGKeyArray, UInt8

from .._array.array import QuantizedArray
from .._array.quantize import quantize
from .._formats.base import AbstractFormat, has_offsets
from .._methods import AbsMax
from .._methods.statistics import AbstractRange


class CalibrationResult(AbstractRange):
    r"""A range of values, and the scales and zero points that a format chooses for it.

    The format would choose the same scales for data with this range. The range always includes zero; if it is only
    zero, the scale is zero.

    !!! Example

        ```python
        result = eqq.calibrate.MSERange("int4", w).update(w).result()
        q = result.quantize(w)
        ```

    **Arguments:**

    - `scale`: the scales in float32, with the quantized axis last: shape `()` for one scale, `(out, 1)` for one per row
        of a matrix, `(out, blocks)` for blocks along its last axis.
    - `zero_point`: the zero points in uint8, of the same shape; `None` for a format without zero points.
    - `min`, `max`: the range, widened to include zero: float32, of the same shape.
    - `format`: the format that was calibrated.
    - `axis`: the axis, or axes, along which blocks run, negative.
    """

    scale: Float32[Array, "*scales"]
    zero_point: UInt8[Array, "*scales"] | None
    min: Float32[Array, "*scales"]
    max: Float32[Array, "*scales"]
    format: AbstractFormat = eqx.field(static=True)
    axis: int | tuple[int, ...] = eqx.field(static=True)

    @property
    def axes(self) -> tuple[int, ...]:
        """`axis` as a tuple."""
        return (self.axis,) if isinstance(self.axis, int) else self.axis

    def quantize(self, x: Float[ArrayLike, "..."], *, key: PRNGKeyArray | None = None) -> QuantizedArray:
        """Returns an array quantized with these scales, to the calibrated format and axis.

        **Arguments:**

        - `x`: floats whose shape ends in the `shape` of the calibrator.
        - `key`: for stochastic rounding.

        **Returns:**

        A [`eqquant.QuantizedArray`][]. Values outside the range are clipped.

        **Raises:**

        As [`eqquant.quantize`][].
        """
        return quantize(x, self.format, axis=self.axis, key=key, scale=self.scale, zero_point=self.zero_point)


@ft.lru_cache
def check_range_format(format: AbstractFormat) -> None:
    """Raises unless the scale of a format depends only on the extremes, without offsets."""
    if has_offsets(format):
        raise ValueError(
            f"`format` must have no offsets, which `quantize` does not take. Got {format!r}. Quantize with its own: "
            "`eqq.quantize(x, format)`."
        )
    with jax.ensure_compile_time_eval():
        extremes, others = jnp.array([[-2.0, 1.0]]), jnp.array([[0.5, -2.0, 0.0, 1.0, -1.0]])
        same = np.array_equal(format.choose_scale(extremes), format.choose_scale(others))
    if not same:
        raise ValueError(
            f"`format` must take its scale from the extremes of a block. Got {format!r}, which looks at all values. "
            "Quantize with its own scales: `eqq.quantize(x, format)`."
        )


def choose_qparams(
    low: Float32[Array, "*scales"], high: Float32[Array, "*scales"], format: AbstractFormat
) -> tuple[Float32[Array, "*scales"], UInt8[Array, "*scales"] | None]:
    """Returns the scale and the zero point of a format for blocks with these extremes."""
    scale, zero_point = AbsMax().choose_scales(jnp.stack([low, high], axis=-1)[None], format)
    return scale[0], None if zero_point is None else zero_point[0]
