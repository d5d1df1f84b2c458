"""What calibration gives: a range, the scale and zero point that follow from it, and codes made with them."""

import functools as ft
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32, Int8, UInt8

from .._array.quantize import check_finite
from .._numerics.blocks import divide
from .._numerics.rounding import round_half_away
from ._granularity import Granularity


Rounding = Literal["half_even", "half_away"]


class CalibrationResult(eqx.Module):
    r"""A range of values, and the scale and zero point of the integers that cover it.

    Symmetric: $s = \max(|\min|, |\max|) / (2^{b-1} - 1)$, codes $-2^{b-1} \ldots 2^{b-1} - 1$, no zero point.
    Otherwise $s = (\max - \min) / (2^b - 1)$, codes $0 \ldots 2^b - 1$, and the code of zero is
    $z = \mathrm{round}(-\min / s)$. A range always includes zero, so zero has a code. All zeros give a scale of zero.

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_per_channel(w, symmetric=False)
        q = eqq.quantize(w, eqq.Int8(symmetric=False), **result.for_quantize())
        ```

    **Arguments:**

    - `scale`: float32, of the shape `granularity.shape`: `()` for one scale, `(out, 1)` for one per row of a matrix,
        `(out, groups)` for groups along its last axis.
    - `zero_point`: uint8, of the same shape; `None` if symmetric.
    - `min`, `max`: the range, widened to include zero: float32, of the same shape.
    - `bits`: 2 to 8.
    - `symmetric`: whether zero is the middle code.
    - `granularity`: which values share a scale.
    """

    scale: Float32[Array, "*scales"]
    zero_point: UInt8[Array, "*scales"] | None
    min: Float32[Array, "*scales"]
    max: Float32[Array, "*scales"]
    bits: int = eqx.field(static=True)
    symmetric: bool = eqx.field(static=True)
    granularity: Granularity = eqx.field(static=True)

    def for_quantize(self, axis: int | Sequence[int] = -1) -> dict[str, Array | None]:
        """`scale` and `zero_point` as [`eqquant.quantize`][] takes them, which is with the quantized axis last.

        The format must have as many bits, the same symmetry, and blocks of the same size.

        !!! Example

            ```python
            result = eqq.calibrate.calibrate_per_channel(w, axis=1, bits=4)     # w is used as x @ w
            q = eqq.quantize(w, eqq.Int4(block_size=None), axis=-2, **result.for_quantize(axis=-2))
            ```

        **Arguments:**

        - `axis`: the quantized axis, or axes, counted from the end.

        **Returns:**

        A dictionary of the two.

        **Raises:**

        `ValueError` for an axis that is not negative, or if scales differ along several axes that are quantized as one.
        """
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        if any(a >= 0 for a in axes):
            raise ValueError(f"`axis` must be negative, since a result has no axes in front. Got {axis}.")
        ndim = max(self.scale.ndim, -min(axes))
        if len(axes) > 1 and any(self.scale.ndim >= -a and self.scale.shape[a] > 1 for a in axes):
            raise ValueError(
                f"Scales must not differ along axes that are quantized as one. Got scales of shape {self.scale.shape} "
                f"for `axis={axis}`. Calibrate along the other axes."
            )

        def arrange(x: Array) -> Array:
            x = x.reshape(*[1] * (ndim - x.ndim), *x.shape)
            x = jnp.moveaxis(x, axes, range(-len(axes), 0))
            return x.reshape(*x.shape[: ndim - len(axes)], -1)

        zero_point = None if self.zero_point is None else arrange(self.zero_point)
        return {"scale": arrange(self.scale), "zero_point": zero_point}


def check_bits(bits: Any) -> None:
    if isinstance(bits, bool) or not isinstance(bits, (int, np.integer)) or not 2 <= bits <= 8:
        raise ValueError(f"`bits` must be an integer from 2 to 8. Got {bits!r}. Formats store 2, 4 or 8.")


def check_real(x: Array, name: str) -> None:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"Data must be real. Got dtype {x.dtype} in {name}. Take its real and imaginary parts.")


@ft.partial(jax.jit, static_argnums=(2, 3))  # as formats compute them, to the last bit
def parameters(
    low: Float32[Array, "*blocks"], high: Float32[Array, "*blocks"], bits: int, symmetric: bool
) -> tuple[Float32[Array, "*blocks"], Float32[Array, "*blocks"]]:
    """Scale and zero point (zero if symmetric) of a range that includes zero, by the rules of the integer formats."""
    if symmetric:
        scale = jnp.maximum(-low, high) / (2 ** (bits - 1) - 1)
        return scale, jnp.zeros_like(scale)
    levels = 2**bits - 1
    scale = high / levels - low / levels
    return scale, jnp.clip(jnp.round(divide(-low, scale)), 0, levels)


def code_range(bits: int, symmetric: bool) -> tuple[int, int]:
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


def widen(
    low: Float32[Array, "*blocks"], high: Float32[Array, "*blocks"], by: Granularity
) -> tuple[Float32[Array, "*scales"], Float32[Array, "*scales"]]:
    """A range that includes zero, in the shape of the scales."""
    return by.to_shape(jnp.minimum(low, 0)), by.to_shape(jnp.maximum(high, 0))


def result_of(
    low: Float32[Array, "*scales"], high: Float32[Array, "*scales"], bits: int, symmetric: bool, by: Granularity
) -> CalibrationResult:
    """The result for a range that includes zero."""
    scale, zero_point = parameters(low, high, bits, symmetric)
    return CalibrationResult(scale, None if symmetric else zero_point.astype(jnp.uint8), low, high, bits, symmetric, by)


def quantize_with_params(
    x: Float[ArrayLike, "..."], result: CalibrationResult, *, rounding: Rounding = "half_even"
) -> Int8[Array, "..."] | UInt8[Array, "..."]:
    """The integer codes of values under a calibrated scale and zero point: $\\mathrm{round}(x / s + z)$, clipped.

    [`eqquant.quantize`][] with `scale=` gives the same codes in a quantized array, packed.

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_min_max(x, bits=8)
        codes = eqq.calibrate.quantize_with_params(x, result)
        ```

    **Arguments:**

    - `x`: floats, of a shape that ends as the calibrated data did.
    - `result`: what a calibrator returned.
    - `rounding`: what becomes of a value halfway between two codes: `"half_even"`, as everywhere in JAX, or
        `"half_away"` from zero, as C's `roundf` and Rust's `round`.

    **Returns:**

    Codes of the shape of `x`: int8 if symmetric, else uint8.

    **Raises:**

    `ValueError` if the shape does not fit the granularity, for an unknown `rounding`, and, outside of `jit`, for NaN
    and infinity; `TypeError` for complex values.
    """
    if rounding not in ("half_even", "half_away"):
        raise ValueError(f"`rounding` must be half_even or half_away. Got {rounding!r}.")
    x = jnp.asarray(x)
    check_real(x, "`x`")
    result.granularity.check(x.shape, "`x`")
    check_finite(x)
    return _quantize(x, result, rounding)


@ft.partial(jax.jit, static_argnums=2)
def _quantize(x: Array, result: CalibrationResult, rounding: Rounding) -> Array:
    round = jnp.round if rounding == "half_even" else round_half_away
    values = divide(x.astype(jnp.float32), result.granularity.expand(result.scale, x.shape))
    if result.zero_point is not None:
        values = values + result.granularity.expand(result.zero_point, x.shape).astype(jnp.float32)
    codes = jnp.clip(round(values), *code_range(result.bits, result.symmetric))
    return codes.astype(jnp.int8 if result.symmetric else jnp.uint8)


def dequantize_with_params(
    codes: Int8[ArrayLike, "..."] | UInt8[ArrayLike, "..."], result: CalibrationResult
) -> Float32[Array, "..."]:
    """The values that codes stand for: $(q - z)\\, s$. The way back from
    [`eqquant.calibrate.quantize_with_params`][].

    !!! Example

        ```python
        codes = eqq.calibrate.quantize_with_params(x, result)
        x_hat = eqq.calibrate.dequantize_with_params(codes, result)
        ```

    **Arguments:**

    - `codes`: int8 or uint8, of a shape that ends as the calibrated data did.
    - `result`: what they were quantized with.

    **Returns:**

    float32, of the shape of `codes`.

    **Raises:**

    `ValueError` if the shape does not fit the granularity.
    """
    codes = jnp.asarray(codes)
    result.granularity.check(codes.shape, "`codes`")
    return _dequantize(codes, result)


@jax.jit
def _dequantize(codes: Array, result: CalibrationResult) -> Float32[Array, "..."]:
    values = codes.astype(jnp.float32)
    if result.zero_point is not None:
        values = values - result.granularity.expand(result.zero_point, codes.shape).astype(jnp.float32)
    return values * result.granularity.expand(result.scale, codes.shape)
