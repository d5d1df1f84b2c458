"""What every calibrator is: a pytree that is updated with data, merged with others, and asked for a range."""

import abc
import dataclasses
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32, Int32, PyTree

from .._array.quantize import all_finite
from ._granularity import Granularity
from ._result import CalibrationResult, check_bits, check_real, result_of, widen


_Calibrator = TypeVar("_Calibrator", bound="AbstractCalibrator")


class AbstractCalibrator(eqx.Module):
    """A calibrator: `cal = cal.update(x)` for each batch, then `cal.result()`.

    Calibrators are immutable pytrees of fixed structure, so they are carries of `scan`, arguments of `jit`, and can be
    stacked and mapped over. Two that saw different data are merged by `cal.merge(other)`.

    **Arguments:**

    - `bits`: of the integers, 2 to 8.
    - `symmetric`: whether zero is the middle code. Otherwise there is a zero point.
    - `granularity`: which values share a scale; all of them unless given.
    - `name`: what errors call the data, for instance the path of a leaf.
    """

    bits: int = eqx.field(static=True, default=8)
    symmetric: bool = eqx.field(static=True, default=True)
    granularity: Granularity = eqx.field(static=True, default=Granularity())
    name: str = eqx.field(static=True, default="the data")
    # What is kept of the data: nothing yet, unless given.
    seen: Any = eqx.field(default=None, kw_only=True)
    batches: Int32[Array, ""] = eqx.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.seen is not None:
            return
        self.seen = self._start()
        self.batches = jnp.zeros((), jnp.int32)

    # What a calibrator defines

    @abc.abstractmethod
    def _start(self) -> PyTree[Array]:
        """What is kept of no data."""

    @abc.abstractmethod
    def _add(self, x: Float32[Array, "..."]) -> PyTree[Array]:
        """What is kept of the data so far and of one more batch."""

    @abc.abstractmethod
    def _join(self, other: Any) -> PyTree[Array]:
        """What is kept of the data of both."""

    @abc.abstractmethod
    def range(self) -> tuple[Float32[Array, "*blocks"], Float32[Array, "*blocks"]]:
        """The smallest and the largest value that shall not be clipped, as found so far.

        **Returns:**

        Two float32 arrays of shape `granularity.blocks`.
        """

    # What follows

    def update(self: _Calibrator, x: Float[ArrayLike, "..."]) -> _Calibrator:
        """The calibrator after one more batch.

        **Arguments:**

        - `x`: floats of any dtype and any shape that ends as the granularity says, not empty.

        **Returns:**

        A calibrator of the same structure.

        **Raises:**

        `ValueError` for an empty batch, another shape, and, outside of `jit`, for NaN and infinity; `TypeError` for
        complex values.
        """
        return dataclasses.replace(self, seen=_add(self, self._check(x)), batches=self.batches + 1)

    def merge(self: _Calibrator, other: _Calibrator) -> _Calibrator:
        """The calibrator of the data of both.

        **Arguments:**

        - `other`: a calibrator of the same kind and settings, from another device or worker.

        **Returns:**

        A calibrator of the same structure.

        **Raises:**

        `ValueError` if they differ in kind or settings.
        """
        if jtu.tree_structure(self) != jtu.tree_structure(other):
            raise ValueError(
                "`merge` takes a calibrator of the same kind and settings. Got "
                f"{_settings(other)} for {_settings(self)}. Make both with the same arguments."
            )
        return dataclasses.replace(self, seen=_join(self, other), batches=self.batches + other.batches)

    def result(self) -> CalibrationResult:
        """The scale and zero point for the data so far.

        **Returns:**

        A [`eqquant.calibrate.CalibrationResult`][].

        **Raises:**

        Outside of `jit`, `ValueError` if nothing was observed, or if the data held NaN or infinity. Inside of it the
        scale is then zero, NaN or infinite.
        """
        low, high = _range(self)
        if not isinstance(self.batches, jax.core.Tracer) and np.any(np.asarray(self.batches) == 0):
            raise ValueError(f"`result` needs data. Got none for {self.name}. Call `update` with at least one batch.")
        if not isinstance(low, jax.core.Tracer) and not (all_finite(low) and all_finite(high)):
            raise ValueError(_not_finite(self.name))
        return result_of(low, high, self.bits, self.symmetric, self.granularity)

    def _check(self, x: Any) -> Float32[Array, "..."]:
        """A batch as float32, or an error."""
        x = jnp.asarray(x)
        check_real(x, self.name)
        if x.size == 0:
            raise ValueError(f"A batch must not be empty. Got shape {x.shape} for {self.name}. Leave it out.")
        self.granularity.check(x.shape, self.name)
        if not isinstance(x, jax.core.Tracer) and not all_finite(x):
            raise ValueError(_not_finite(self.name))
        return x.astype(jnp.float32)


# One program each, where the operations one by one would be dozens.
_add = jax.jit(lambda calibrator, x: calibrator._add(x))
_join = jax.jit(lambda calibrator, other: calibrator._join(other))


@jax.jit
def _range(calibrator: AbstractCalibrator) -> tuple[Float32[Array, "*scales"], Float32[Array, "*scales"]]:
    low, high = calibrator.range()
    return widen(low, high, calibrator.granularity)


def extremes(x: Float[Array, "..."], by: Granularity) -> tuple[Float32[Array, "*blocks"], Float32[Array, "*blocks"]]:
    """The smallest and the largest value of each block."""
    return by.reduce(lambda v: jnp.min(v, axis=-1), x), by.reduce(lambda v: jnp.max(v, axis=-1), x)


def _settings(calibrator: Any) -> str:
    static = [f for f in dataclasses.fields(calibrator) if f.metadata.get("static", False)]
    return f"{type(calibrator).__name__}({', '.join(f'{f.name}={getattr(calibrator, f.name)!r}' for f in static)})"


def _not_finite(name: str) -> str:
    return (
        f"Data must be finite in float32. Got NaN or infinity in {name}. Find where they arise, for instance with "
        "`jax.debug_nans`, or leave this batch out."
    )
