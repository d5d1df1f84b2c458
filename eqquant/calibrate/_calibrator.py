"""The base class of calibrators: pytrees that observe data, merge, and return a range."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int32

from .._array.checks import is_known_not_finite
from .._array.value import AbstractArrayValue
from .._formats import Int8
from .._formats.base import AbstractFormat
from .._formats.names import as_format
from .._numerics.axes import as_axis
from .._types import PyTree
from ._blocks import as_shape, Blocks, make_blocks
from ._result import CalibrationResult, check_range_format, choose_qparams


_Calibrator = TypeVar("_Calibrator", bound="AbstractCalibrator")
Range = tuple[Float32[Array, "*scales"], Float32[Array, "*scales"]]


class AbstractCalibrator(eqx.Module):
    """Finds the range of data for a format.

    Call `cal = cal.update(x)` for each batch, then `cal.result()`.

    Calibrators are immutable pytrees of fixed structure, so you can carry them through `scan`, pass them to `jit`, and
    stack them for `vmap`. `cal.merge(other)` merges two that observed different data.

    !!! Example

        ```python
        eqq.calibrate.MinMax("int8", w)                         # a weight: one scale per row
        eqq.calibrate.MinMax(eqq.Int4(block_size=32), w)        # one per row and 32 inputs
        eqq.calibrate.MinMax("int8", (768,), axis=-2)           # activations (..., 768): one scale per feature
        eqq.calibrate.MinMax(eqq.Int8(block_size="tensor"))     # one scale for everything
        ```

    **Arguments:**

    - `format`: the format to calibrate for, or its lower-case name. Its `block_size` sets how many values along `axis`
        share a scale. Eight-bit integers with one scale by default.
    - `shape`: the shape that every batch ends in, or an array of that shape. All axes before it are pooled: all
        examples of a batch, and all batches, share scales. Not needed for a format with one scale.
    - `axis`: the axis along which blocks run, or several that are quantized as one, as for [`eqquant.quantize`][]. An
        axis before `shape` is pooled, and every index of `shape` has its own scale.
    - `name`: the name of the data in error messages, for instance the path of a leaf.
    """

    format: AbstractFormat = eqx.field(static=True, default=Int8(block_size="tensor"), converter=as_format)
    shape: tuple[int, ...] = eqx.field(static=True, default=(), converter=as_shape)
    axis: int | Sequence[int] = eqx.field(static=True, default=-1)
    name: str = eqx.field(static=True, default="the data", kw_only=True)
    # The state, empty at first: `dataclasses.replace` passes it on.
    seen: PyTree = eqx.field(default=None, kw_only=True)
    finite: Bool[Array, "*scales"] = eqx.field(default=None, kw_only=True)
    batches: Int32[Array, ""] = eqx.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        # Converters run after this, which needs their results.
        self.format, self.shape = as_format(self.format), as_shape(self.shape)
        check_range_format(self.format)
        blocks = make_blocks(self.format.block_size, self.shape, self.axis)
        self.shape, self.axis = blocks.shape, as_axis(blocks.axes)
        if self.seen is not None:
            return
        self.seen = self._start()
        self.finite = jnp.ones(blocks.scale_shape, bool)
        self.batches = jnp.zeros((), jnp.int32)

    @abc.abstractmethod
    def _start(self) -> PyTree[Array]:
        """Returns the state before any data."""

    @abc.abstractmethod
    def _add(self, x: Float32[Array, "..."]) -> PyTree[Array]:
        """Returns the state after one more batch."""

    @abc.abstractmethod
    def _join(self, other: "AbstractCalibrator") -> PyTree[Array]:
        """Returns the state for the data of both."""

    @abc.abstractmethod
    def range(self) -> Range:
        """Returns the smallest and the largest value that must not be clipped, for the data so far.

        **Returns:**

        Two float32 arrays of the shape of the scales. They are undefined if the data was not finite.
        """

    def update(self: _Calibrator, x: Float[ArrayLike, "..."]) -> _Calibrator:
        """Returns the calibrator after one more batch.

        **Arguments:**

        - `x`: floats of any dtype, not empty, whose shape ends in the `shape` of the calibrator.

        **Returns:**

        A calibrator of the same structure.

        **Raises:**

        `ValueError` for an empty batch, another shape, and, outside `jit`, for NaN and infinity; `TypeError` for
        complex values.
        """
        seen, finite = _add(self, self._check(x))
        return dataclasses.replace(self, seen=seen, finite=finite, batches=_add_saturating(self.batches, 1))

    def merge(self: _Calibrator, other: _Calibrator) -> _Calibrator:
        """Returns one calibrator for the data of two.

        **Arguments:**

        - `other`: a calibrator of the same kind and settings, from another device or worker.

        **Returns:**

        A calibrator of the same structure.

        **Raises:**

        `ValueError` if the two differ in kind or settings.
        """
        if jtu.tree_structure(self) != jtu.tree_structure(other):
            raise ValueError(
                "`merge` takes a calibrator of the same kind and settings. Got "
                f"{_describe_settings(other)} for {_describe_settings(self)}. Make both with the same arguments."
            )
        seen, batches = _join(self, other), _add_saturating(self.batches, other.batches)
        return dataclasses.replace(self, seen=seen, finite=self.finite & other.finite, batches=batches)

    def result(self) -> CalibrationResult:
        """Returns the scale and zero point for the data so far.

        **Returns:**

        A pytree with

        - `scale`: float32, with the quantized axis last: `()` for one scale, `(out, 1)` for one per row of a matrix,
            `(out, blocks)` for blocks along its last axis.
        - `zero_point`: uint8 of the same shape; `None` for a format without zero points.
        - `min`, `max`: the range, widened to include zero: float32 of the same shape.
        - `format`, `axis`: the calibrated format, and the axis, or axes, along which blocks run, negative.
        - `.quantize(x, key=None)`: quantizes an array that ends in the `shape` of the calibrator, with these scales;
            clips values outside the range. Returns a [`eqquant.QuantizedArray`][].

        **Raises:**

        Outside `jit`, `ValueError` if there was no data, or if it held NaN or infinity. Inside `jit`, the scale is zero
        without data, and NaN for each block that held NaN or infinity.
        """
        if not isinstance(self.batches, jax.core.Tracer) and np.any(np.asarray(self.batches) == 0):
            raise ValueError(f"`result` needs data. Got none for {self.name}. Call `update` with at least one batch.")
        low, high, scale, zero_point = _compute_result(self)
        if is_known_not_finite(low) or is_known_not_finite(high):
            raise ValueError(_not_finite_message(self.name))
        axis = self.axis if isinstance(self.axis, int) else tuple(self.axis)
        return CalibrationResult(scale, zero_point, min=low, max=high, format=self.format, axis=axis)

    @property
    def _blocks(self) -> Blocks:
        return make_blocks(self.format.block_size, self.shape, self.axis)

    def _check(self, x: ArrayLike | AbstractArrayValue) -> Float32[Array, "..."]:
        """Returns a batch in float32. Raises if it is not valid."""
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(
                f"Data must be real. Got dtype {x.dtype} in {self.name}. Take its real and imaginary parts."
            )
        if x.size == 0:
            raise ValueError(f"A batch must not be empty. Got shape {x.shape} for {self.name}. Leave it out.")
        self._blocks.check(x.shape, self.name)
        if is_known_not_finite(x):
            raise ValueError(_not_finite_message(self.name))
        return x.astype(jnp.float32)


# Each step is compiled as one program. Eagerly it would run dozens of small ones.
@jax.jit
def _add(calibrator: AbstractCalibrator, x: Float32[Array, "..."]) -> tuple[PyTree[Array], Bool[Array, "*scales"]]:
    # XLA on CPU drops NaN in a vectorized `max` or `min` (https://github.com/openxla/xla/issues/21461), so the state of
    # the calibrator may look finite although the data was not.
    _check_state(calibrator)
    finite = calibrator._blocks.map(lambda v: jnp.all(jnp.isfinite(v), axis=-1), x)
    return calibrator._add(x), calibrator.finite & finite


@jax.jit
def _join(calibrator: AbstractCalibrator, other: AbstractCalibrator) -> PyTree[Array]:
    _check_state(calibrator)
    _check_state(other)
    return calibrator._join(other)


@jax.jit
def _compute_result(calibrator: AbstractCalibrator) -> tuple[Array, Array, Array, Array | None]:
    """Returns the range, widened to include zero, and its scales and zero points."""
    _check_state(calibrator)
    low, high = calibrator.range()
    # Before any data the extremes are infinite.
    low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
    scale, zero_point = choose_qparams(low, high, calibrator.format)
    mark = lambda x: jnp.where(calibrator.finite, x, jnp.nan)
    return mark(low), mark(high), mark(scale), zero_point


def _check_state(calibrator: AbstractCalibrator) -> None:
    """Raises unless the state has the shapes of a new one, after the axes of a stack."""
    names = ("seen", "finite", "batches")
    new = jax.eval_shape(lambda: dataclasses.replace(calibrator, seen=None))
    state = lambda x: jtu.tree_leaves_with_path({name: getattr(x, name) for name in names})
    stack = calibrator.batches.shape
    for (path, leaf), (_, start) in zip(state(calibrator), state(new), strict=True):
        if leaf.shape != (*stack, *start.shape) or leaf.dtype != start.dtype:
            name = jtu.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"`{name}` of {_describe_settings(calibrator)} must be {start.dtype} of shape "
                f"{(*stack, *start.shape)}. Got {leaf.dtype} of shape {leaf.shape}. `update` and `merge` change the "
                "state of a calibrator, together."
            )


def _add_saturating(batches: Int32[Array, "..."], new: Int32[Array, "..."] | int) -> Int32[Array, "..."]:
    """Returns the sum, saturated at the largest int32 instead of wrapped."""
    total = batches + new
    return jnp.where(total < batches, jnp.iinfo(jnp.int32).max, total)


def find_extremes(x: Float[Array, "..."], blocks: Blocks) -> Range:
    """Returns the smallest and the largest value of each block."""
    return blocks.map(lambda v: jnp.min(v, axis=-1), x), blocks.map(lambda v: jnp.max(v, axis=-1), x)


def _describe_settings(calibrator: AbstractCalibrator) -> str:
    static = [f for f in dataclasses.fields(calibrator) if f.metadata.get("static", False)]
    return f"{type(calibrator).__name__}({', '.join(f'{f.name}={getattr(calibrator, f.name)!r}' for f in static)})"


def _not_finite_message(name: str) -> str:
    return (
        f"Data must be finite in float32. Got NaN or infinity in {name}. Find where they arise, for instance with "
        "`jax.debug_nans`, or leave this batch out."
    )
