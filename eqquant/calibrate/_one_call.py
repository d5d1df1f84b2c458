"""Calibration in one call, over data that is at hand."""

import itertools as it
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from .._array.value import AbstractArrayValue
from .._docs import fill_doc
from ._calibrator import AbstractCalibrator
from ._granularity import Granularity
from ._percentile import Percentile
from ._ranges import MinMax
from ._result import CalibrationResult


_ARGUMENTS = """
    - `data`: an array of floats of any shape, or an iterable of such, its batches. An array is one batch.
    - `bits`: of the integers, 2 to 8.
    - `symmetric`: whether zero is the middle code. Otherwise there is a zero point.
"""
_RETURNS = """
    **Returns:**

    A [`eqquant.calibrate.CalibrationResult`][].

    **Raises:**

    `ValueError` without data, for an empty batch, for NaN or infinity (outside of `jit`), for an axis out of range or a
    group size larger than its axis.
"""


@fill_doc(arguments=_ARGUMENTS, returns=_RETURNS)
def calibrate_min_max(
    data: Float[ArrayLike, "..."] | Iterable[Any],
    bits: int = 8,
    symmetric: bool = True,
    granularity: Granularity = Granularity(),
    name: str = "the data",
) -> CalibrationResult:
    """The range from the smallest to the largest value.

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_min_max([x1, x2, x3], bits=8, symmetric=False)
        ```

    **Arguments:**

    {arguments}
    - `granularity`: which values share a scale; all of them unless given.
    - `name`: what errors call the data.

    {returns}
    """
    return _run(MinMax(bits, symmetric, granularity, name), _batches(data))


@fill_doc(arguments=_ARGUMENTS, returns=_RETURNS)
def calibrate_percentile(
    data: Float[ArrayLike, "..."] | Iterable[Any],
    bits: int = 8,
    symmetric: bool = True,
    lower: float | int = 0.01,
    upper: float | int = 99.99,
    granularity: Granularity = Granularity(),
    name: str = "the data",
) -> CalibrationResult:
    """The range between two percentiles, to within 1/64 of their magnitude. See [`eqquant.calibrate.Percentile`][].

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_percentile(batches, lower=1, upper=99)
        ```

    **Arguments:**

    {arguments}
    - `lower`, `upper`: percentiles, from 0 to 100.
    - `granularity`: which values share a scale; all of them unless given.
    - `name`: what errors call the data.

    {returns}
    """
    return _run(Percentile(bits, symmetric, granularity, name, lower, upper), _batches(data))


@fill_doc(arguments=_ARGUMENTS, returns=_RETURNS)
def calibrate_per_tensor(
    data: Float[ArrayLike, "..."] | Iterable[Any], bits: int = 8, symmetric: bool = True
) -> CalibrationResult:
    """One scale for all values, from the smallest to the largest.

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_per_tensor(w, bits=4)
        ```

    **Arguments:**

    {arguments}

    {returns}
    """
    return calibrate_min_max(data, bits, symmetric)


@fill_doc(arguments=_ARGUMENTS, returns=_RETURNS)
def calibrate_per_channel(
    data: Float[ArrayLike, "..."] | Iterable[Any], axis: int | Sequence[int] = 0, bits: int = 8, symmetric: bool = True
) -> CalibrationResult:
    """One scale for each index along an axis, from the smallest to the largest value that it has.

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_per_channel(w, axis=0)     # one scale per row: shape (out, 1)
        q = eqq.quantize(w, eqq.Int8(), scale=result.scale)
        ```

    **Arguments:**

    {arguments}
    - `axis`: the axis, or axes, that scales differ along.

    {returns}
    """
    return _run_by(lambda x: Granularity.of(x, axis), data, bits, symmetric)


@fill_doc(arguments=_ARGUMENTS, returns=_RETURNS)
def calibrate_per_group(
    data: Float[ArrayLike, "..."] | Iterable[Any],
    group_size: int,
    axis: int = -1,
    bits: int = 8,
    symmetric: bool = True,
) -> CalibrationResult:
    """One scale for each group of neighbours along an axis, and for each index along every other axis.

    Groups along the last axis are the blocks of the formats. For groups that all rows of an activation share, give a
    calibrator a [`eqquant.calibrate.Granularity`][] instead.

    !!! Example

        ```python
        result = eqq.calibrate.calibrate_per_group(w, 32, bits=4)   # scales of shape (out, ceil(in / 32))
        q = eqq.quantize(w, eqq.Int4(block_size=32), scale=result.scale)
        ```

    **Arguments:**

    {arguments}
    - `group_size`: how many neighbours share a scale. The last group may be shorter.
    - `axis`: the axis along which groups run.

    {returns}
    """

    def by(x: Array) -> Granularity:
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(f"`axis` must be an axis of the data, from {-x.ndim} to {x.ndim - 1}. Got {axis}.")
        others = [a for a in range(x.ndim) if a != axis % x.ndim]
        return Granularity.of(x, (*others, axis), group_size)

    return _run_by(by, data, bits, symmetric)


def _run(calibrator: AbstractCalibrator, batches: Iterable[Array]) -> CalibrationResult:
    for x in batches:
        calibrator = calibrator.update(x)
    return calibrator.result()


def _run_by(by: Callable[[Array], Granularity], data: Any, bits: int, symmetric: bool) -> CalibrationResult:
    """With the granularity that the first batch gives."""
    batches = _batches(data)
    first = list(it.islice(batches, 1))
    granularity = by(first[0]) if first else Granularity()
    return _run(MinMax(bits, symmetric, granularity), it.chain(first, batches))


def _batches(data: Any) -> Iterator[Array]:
    one = isinstance(data, (jax.Array, np.ndarray, AbstractArrayValue, float, int))
    return (jnp.asarray(x) for x in ([data] if one else data))
