"""Integer calibration in one call, with unpacked codes: the interface of the systems that reference values come from.

A thin layer over the calibrators and [`eqquant.quantize`][]; new code should call those.
"""

import functools as ft
import inspect
import itertools as it
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32, Int8, UInt8

from .._array.checks import check_finite
from .._array.value import AbstractArrayValue
from .._formats.any_width import check_rounding, code_width, integer_format, Rounding
from .._numerics.axes import logical_order
from .._numerics.blocks import divide, expand, num_blocks
from .._numerics.integers import code_offset
from ._calibrator import AbstractCalibrator
from ._percentile import Percentile
from ._ranges import MinMax
from ._result import CalibrationResult, check_real


_SHARED = """
    - `data`: an array of floats of any shape, which is one batch, or an iterable of batches.
    - `bits`: the integer width, from 2 to 8.
    - `symmetric`: whether zero is the middle code. Otherwise the result has zero points.
"""
_RETURNS = """
    **Returns:**

    A [`eqquant.calibrate.CalibrationResult`][].

    **Raises:**

    `ValueError` without data, for an empty batch, for NaN or infinity (outside `jit`), for an axis out of range, or for
    a group size larger than the axis.
"""


def calibrate_min_max(
    data: Float[ArrayLike, "..."] | Iterable[Any], bits: int = 8, symmetric: bool = True, *, name: str = "the data"
) -> CalibrationResult:
    """Finds the range from the smallest to the largest value, with one scale for all values.

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_min_max([x1, x2, x3], bits=8, symmetric=False)
        ```

    **Arguments:**

    {shared}
    - `name`: what errors call the data.
    {returns}
    """
    return _run(MinMax(integer_format(bits, symmetric=symmetric), name=name), _batches(data))


def calibrate_percentile(
    data: Float[ArrayLike, "..."] | Iterable[Any],
    bits: int = 8,
    symmetric: bool = True,
    lower: float | int = 0.01,
    upper: float | int = 99.99,
    *,
    name: str = "the data",
) -> CalibrationResult:
    """Finds the range between two percentiles, to within 1/64 of their magnitude. See
    [`eqquant.calibrate.Percentile`][].

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_percentile(batches, lower=1, upper=99)
        ```

    **Arguments:**

    {shared}
    - `lower`, `upper`: the percentiles, from 0 to 100.
    - `name`: what errors call the data.
    {returns}
    """
    format = integer_format(bits, symmetric=symmetric)
    return _run(Percentile(format, name=name, lower=lower, upper=upper), _batches(data))


def calibrate_per_tensor(
    data: Float[ArrayLike, "..."] | Iterable[Any], bits: int = 8, symmetric: bool = True
) -> CalibrationResult:
    """Finds one scale for all values, from the smallest to the largest.

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_per_tensor(w, bits=4)
        ```

    **Arguments:**

    {shared}
    {returns}
    """
    return calibrate_min_max(data, bits, symmetric)


def calibrate_per_channel(
    data: Float[ArrayLike, "..."] | Iterable[Any], axis: int | Sequence[int] = 0, bits: int = 8, symmetric: bool = True
) -> CalibrationResult:
    """Finds one scale for each index along an axis, from its smallest to its largest value.

    !!! Example

        ```python
        q = eqq.calibrate.calibrate_per_channel(w, axis=0).quantize(w)     # one scale per row: shape (out, 1)
        ```

    **Arguments:**

    {shared}
    - `axis`: the axis, or axes, of the channels; each channel has its own scale. Blocks run along all other axes.
    {returns}
    """

    def calibrator(x: Array) -> MinMax:
        channels = _negative(x, axis)
        others = tuple(a for a in range(-x.ndim, 0) if a not in channels)
        # If all axes are channel axes, each value has its own scale.
        format = integer_format(bits, block_size=None if others else 1, symmetric=symmetric)
        return MinMax(format, x, others or -1)

    return _run_by(calibrator, data)


def calibrate_per_group(
    data: Float[ArrayLike, "..."] | Iterable[Any],
    group_size: int,
    axis: int = -1,
    bits: int = 8,
    symmetric: bool = True,
) -> CalibrationResult:
    """Finds one scale for each group of neighbours along an axis, at each index of all other axes.

    !!! Example

        ```python
        q = eqq.calibrate.calibrate_per_group(w, 32, bits=4).quantize(w)   # scales of shape (out, ceil(in / 32))
        ```

    **Arguments:**

    {shared}
    - `group_size`: the number of neighbours that share a scale: the block size. The last group may be shorter.
    - `axis`: the axis along which groups run.
    {returns}
    """

    def calibrator(x: Array) -> MinMax:
        length = x.shape[_negative(x, axis)[0]]
        if not 1 <= group_size <= length:
            raise ValueError(
                f"`group_size` must be from 1 to the length of the axis, {length}. Got {group_size}. A group as long "
                "as the axis is a channel."
            )
        return MinMax(integer_format(bits, block_size=group_size, symmetric=symmetric), x, axis)

    return _run_by(calibrator, data)


for _function in (
    calibrate_min_max,
    calibrate_percentile,
    calibrate_per_tensor,
    calibrate_per_channel,
    calibrate_per_group,
):
    # Python 3.13 strips the indentation of docstrings, but not of other strings.
    _doc = inspect.cleandoc(_function.__doc__ or "").replace("{shared}", inspect.cleandoc(_SHARED))
    _function.__doc__ = _doc.replace("{returns}", f"\n{inspect.cleandoc(_RETURNS)}")


def quantize_with_params(
    x: Float[ArrayLike, "..."], result: CalibrationResult, *, rounding: Rounding = "half_even"
) -> Int8[Array, "..."] | UInt8[Array, "..."]:
    """Quantizes values to integer codes with a calibrated scale and zero point: $\\mathrm{round}(x / s + z)$, clipped.

    [`CalibrationResult.quantize`][eqquant.calibrate.CalibrationResult.quantize] returns the same codes, packed in a
    quantized array.

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_min_max(x, bits=8)
        codes = eqq.calibrate.quantize_with_params(x, result)
        ```

    **Arguments:**

    - `x`: floats, whose shape ends like that of the calibrated data.
    - `result`: the result of a calibrator, for an integer format.
    - `rounding`: how to round a value halfway between two codes: `"half_even"`, as everywhere in JAX, or `"half_away"`
        from zero, as in C's `roundf` and Rust's `round`.

    **Returns:**

    Codes with the shape of `x`: int8 if symmetric, otherwise uint8.

    **Raises:**

    `ValueError` if the shape does not fit, for an unknown `rounding`, and, outside `jit`, for NaN and infinity;
    `TypeError` for complex values.
    """
    check_rounding(rounding)
    x = jnp.asarray(x)
    check_real(x, "`x`")
    _check_fits(x, result, "`x`")
    check_finite(x)
    return _quantize(x, result, rounding)


@ft.partial(jax.jit, static_argnums=2)
def _quantize(x: Array, result: CalibrationResult, rounding: Rounding) -> Array:
    values = divide(x.astype(jnp.float32), _per_value(result.scale, x, result))
    symmetric = result.zero_point is None
    if result.zero_point is not None:
        values = values + _per_value(result.zero_point, x, result).astype(jnp.float32)
    format, width = result.format, code_width(result.format)
    if rounding != "half_even":
        format = integer_format(width, block_size=format.block_size, symmetric=symmetric, rounding=rounding)
    codes = format.encode(values)
    return (codes.astype(jnp.int32) - code_offset(width, True)).astype(jnp.int8) if symmetric else codes


def dequantize_with_params(
    codes: Int8[ArrayLike, "..."] | UInt8[ArrayLike, "..."], result: CalibrationResult
) -> Float32[Array, "..."]:
    """Dequantizes codes to the values $(q - z)\\, s$. The inverse of
    [`eqquant.calibrate.quantize_with_params`][], up to rounding.

    !!! Example

        ```python
        codes = eqq.calibrate.quantize_with_params(x, result)
        x_hat = eqq.calibrate.dequantize_with_params(codes, result)
        ```

    **Arguments:**

    - `codes`: int8 or uint8 codes, whose shape ends like that of the calibrated data.
    - `result`: the result that they were quantized with.

    **Returns:**

    The values in float32, with the shape of `codes`.

    **Raises:**

    `ValueError` if the shape does not fit.
    """
    codes = jnp.asarray(codes)
    _check_fits(codes, result, "`codes`")
    return _dequantize(codes, result)


@jax.jit
def _dequantize(codes: Array, result: CalibrationResult) -> Float32[Array, "..."]:
    values = codes.astype(jnp.float32)
    if result.zero_point is not None:
        values = values - _per_value(result.zero_point, codes, result).astype(jnp.float32)
    return values * _per_value(result.scale, codes, result)


def _per_value(per_block: Array, x: Array, result: CalibrationResult) -> Array:
    """Expands one number per scale to one per element of `x`."""
    axes, size = result.axes, result.format.block_size
    batch = [n for a, n in zip(range(-x.ndim, 0), x.shape, strict=True) if a not in axes]
    lengths = tuple(x.shape[a] for a in axes)
    blocks = jnp.broadcast_to(per_block, (*batch, num_blocks(math.prod(lengths), size)))
    return logical_order(expand(blocks, size, math.prod(lengths)), axes, lengths)


def _check_fits(x: Array, result: CalibrationResult, name: str) -> None:
    try:
        jax.eval_shape(lambda scale: _per_value(scale, x, result), result.scale)
    except (ValueError, IndexError):
        raise ValueError(
            f"{name} must end as the calibrated data did, whose scales have shape {result.scale.shape} with blocks "
            f"along `axis={result.axis}`. Got shape {x.shape}."
        ) from None


def _negative(x: Array, axis: int | Sequence[int]) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) != len(axes):
        raise ValueError(f"`axis` must name different axes of the data, from {-x.ndim} to {x.ndim - 1}. Got {axis}.")
    return tuple(a % x.ndim - x.ndim for a in axes)


def _run(calibrator: AbstractCalibrator, batches: Iterable[Array]) -> CalibrationResult:
    for x in batches:
        calibrator = calibrator.update(x)
    return calibrator.result()


def _run_by(make: Callable[[Array], AbstractCalibrator], data: Any) -> CalibrationResult:
    """Runs the calibrator that `make` returns for the first batch."""
    batches = _batches(data)
    first = list(it.islice(batches, 1))
    return _run(make(first[0]) if first else MinMax(), it.chain(first, batches))


def _batches(data: Any) -> Iterator[Array]:
    one = isinstance(data, (jax.Array, np.ndarray, AbstractArrayValue, float, int))
    return (jnp.asarray(x) for x in ([data] if one else data))
