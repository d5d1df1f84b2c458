"""Statistics of the inputs of a weight: an array, or a result of `calibrate`."""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float32

from .._formats.base import AbstractFormat
from .._formats.integer import Int8
from .._report import as_plain


class Activations(NamedTuple):
    """The format of activations: dynamic without `scale`, static with it."""

    format: AbstractFormat
    scale: Array | None = None
    zero_point: Array | None = None


class AbstractRange(eqx.Module):
    """What a calibrator finds: a `CalibrationResult`, which needs arrays of ours."""

    scale: eqx.AbstractVar[Array]
    zero_point: eqx.AbstractVar[Array | None]
    format: eqx.AbstractVar[AbstractFormat]


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LeafStats:
    """Statistics of the inputs of one weight.

    - `path`, `shape`: the path and the shape of the weight.
    - `axis`: the contracted axis of the weight, which is the axis to quantize along: `-1` for `w @ x`, `-2` for
        `x @ w`, all input axes for a convolution. `None` for a weight that no product used.
    - `note`: remarks, or why the weight has no statistics.
    - `rows`: the number of observed inputs: int64, with the shape of the axes before the last two, a stack of layers
        (for a convolution, the axes before its kernel).
    - `min`, `max`, `mean`, `mean_abs`, `second_moment`: statistics of each input feature: float64,
        `(*stack, features)`. The second moment is the mean square. The features of a convolution are the values of the
        patch under the kernel, in the order of its axes; the groups of a grouped convolution are pooled.
    - `outlier_rate`: the share of values whose magnitude exceeds the threshold.
    - `gram`: with `gram=True`, the mean of $x x^T$: float64, `(*stack, features, features)`. The Hessian of GPTQ is
        twice this matrix.
    - `output_gram`: with `gram=True` and `gradients=True`, the sum of $d d^T$ over the gradients $d$ of the columns:
        float64, `(*stack, rows, rows)`. `None` for more than 32,768 rows.
    - `calibrated`: with a `calibrator`, its `CalibrationResult` for all values of the inputs, one
        for each layer of a stack: `(*stack,)`.
    - `looked_up`: whether the weight was only indexed, as an embedding, so that it has no inputs. With `lookups=True`
        it has a `second_moment` and a `gram` nevertheless, of the gradients of its entries: they say how much an error
        of an entry changes the outputs, in random directions. `rows` counts the gradients; a table with fewer of them
        than features has no statistics.
    - `fingerprint`: a few sums of the values of the weight, by which methods recognize it; `None` if it was quantized.

    The statistics are `None` for a weight without observed inputs. In a stack, they are zero (like `rows`) for each
    layer without observed inputs.
    """

    path: str
    shape: tuple[int, ...]
    axis: int | tuple[int, ...] | None
    note: str
    rows: np.ndarray
    min: np.ndarray | None = None
    max: np.ndarray | None = None
    mean: np.ndarray | None = None
    mean_abs: np.ndarray | None = None
    second_moment: np.ndarray | None = None
    outlier_rate: float | None = None
    gram: np.ndarray | None = dataclasses.field(default=None, repr=False)
    output_gram: np.ndarray | None = dataclasses.field(default=None, repr=False)
    looked_up: bool = False
    calibrated: AbstractRange | None = dataclasses.field(default=None, repr=False)
    fingerprint: np.ndarray | None = dataclasses.field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain Python values, without the Gram matrices."""
        return as_plain(self)

    def activations(self) -> Activations:
        """Returns static activations: one scale for all of the inputs, and the zero point.

        By default eight-bit integers with a zero point, over the whole range. A layer of a stack that no input reached
        gets the whole range of the others; with a calibrator, the largest scale among them.
        """
        missed = self.rows == 0
        if self.calibrated is not None:
            scale, zero_point = self.calibrated.scale, self.calibrated.zero_point
            if missed.any():
                widest = lambda x: jnp.where(missed, x.ravel()[jnp.argmax(scale)], x)
                scale, zero_point = widest(scale), None if zero_point is None else widest(zero_point)
            return Activations(self.calibrated.format, scale, zero_point)
        if self.min is None or self.max is None:
            raise ValueError(f"{self.path} must have observed inputs. Got none: {self.note}.")
        low, high = self.min.min(axis=-1), self.max.max(axis=-1)
        low, high = np.where(missed, low[~missed].min(), low), np.where(missed, high[~missed].max(), high)
        ends = jnp.stack([jnp.minimum(jnp.float32(low), 0), jnp.maximum(jnp.float32(high), 0)], axis=-1)[None]
        format = Int8(block_size="tensor", symmetric=False)
        scale = format.choose_scale(ends)
        return Activations(format, scale[0], format.choose_zero_point(ends, scale)[0])


# The statistics with an entry for each layer of a stack.
PER_LAYER = ("rows", "min", "max", "mean", "mean_abs", "second_moment", "gram", "output_gram")
_STATISTICS = (*PER_LAYER, "outlier_rate")


def _flatten_stats(stats: LeafStats) -> tuple[tuple[Any, ...], tuple[Hashable, ...]]:
    return tuple(getattr(stats, name) for name in _STATISTICS), (stats.shape, stats.axis)


def _unflatten_stats(static: tuple[Hashable, ...], arrays: Iterable[Any]) -> LeafStats:
    stats = object.__new__(LeafStats)  # JAX also unflattens with leaves that are not arrays
    fields = {"path": "", "shape": static[0], "axis": static[1], "note": ""}
    for name, value in (*fields.items(), *zip(_STATISTICS, arrays, strict=True)):
        object.__setattr__(stats, name, value)
    return stats


# A method may hold statistics, and methods are arguments of compiled functions. The pytree leaves out the path and the
# note, so that weights of one shape share a program.
jtu.register_pytree_node(LeafStats, _flatten_stats, _unflatten_stats)


class InputsError(ValueError):
    """An error about the statistics of one leaf.

    It has three parts, so that errors of several leaves can be merged into one.

    - `rule`: the condition. It names no leaf.
    - `got`: the state of the leaf, which it names.
    - `remedy`: a sentence that names no leaf.
    """

    def __init__(self, rule: str, got: str, remedy: str) -> None:
        super().__init__(rule, got, remedy)
        self.rule, self.got, self.remedy = rule, got, remedy

    def __str__(self) -> str:
        return f"{self.rule}. Got {self.got}. {self.remedy}"


# Collected statistics, of one leaf or by path; or an array, which is the statistic itself.
Inputs = LeafStats | Mapping[str, LeafStats | Array | np.ndarray] | Array | np.ndarray | None


def statistic(inputs: Inputs, name: str) -> Any:
    """Returns one of the collected statistics of a weight.

    An array stands for the statistic itself.
    """
    return getattr(inputs, name) if isinstance(inputs, LeafStats) else inputs


# Added to the weight of each column, in units of their mean.
_DAMPING = 0.01


def share_inputs(inputs: LeafStats) -> LeafStats:
    """Returns statistics where the mean of a stack fills in for inputs that experts lack.

    An expert needs as many inputs as it has features, or as another of the stack saw. With the share `n / needed` of
    them, its statistics count by that share, and the mean over all inputs of the stack by the rest. An expert that no
    input reached gets that mean.
    """
    rows, moments, gram = inputs.rows, inputs.second_moment, inputs.gram
    if not isinstance(rows, np.ndarray) or rows.ndim == 0 or moments is None or rows.max() == rows.min():
        return inputs
    share = rows / min(moments.shape[-1], rows.max())
    if share.min() >= 1:
        return inputs

    def shared(value: np.ndarray | None) -> np.ndarray | None:
        if value is None:
            return None
        mean = np.tensordot(rows / rows.sum(), value, rows.ndim)
        part = share.reshape(*share.shape, *[1] * (value.ndim - share.ndim))
        return np.where(part < 1, part * value + (1 - part) * mean, value)

    return dataclasses.replace(inputs, second_moment=shared(moments), gram=shared(gram))


def weigh_columns(inputs: Inputs) -> Float32[Array, "*stack length"]:
    """Returns the mean squares of inputs, divided by their mean, as weights of columns.

    So no weighted square overflows. A column whose inputs are zero counts a little.
    """
    moments = jnp.asarray(statistic(inputs, "second_moment"), jnp.float32)
    mean = jnp.mean(moments, axis=-1, keepdims=True)
    return jnp.where(mean > 0, moments / jnp.where(mean > 0, mean, 1), 1) + _DAMPING


def check_statistic(
    inputs: Inputs, name: str, method: str, leaf: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """Raises if the statistics `inputs` are not for an array, quantized along its axes.

    Errors call the array `leaf`.

    **Arguments:**

    - `name`: the statistic that the method needs, such as `"gram"` or `"second_moment"`.
    - `method`: the name of the method.
    """
    if isinstance(inputs, LeafStats):
        _check_collected(inputs, method, leaf, shape, axes)
    value = statistic(inputs, name)
    if value is None:
        collect = isinstance(inputs, LeafStats)
        remedy = "Collect them with `gram=True`." if collect else "Pass what `eqq.calibrate.collect_stats` returns."
        raise InputsError(f"{method} needs statistics of inputs, as `inputs.{name}`", f"none for {leaf}", remedy)
    length, batch = math.prod(shape[a] for a in axes), [n for i, n in enumerate(shape) if i - len(shape) not in axes]
    features = [length] * (2 if name == "gram" else 1)
    stack = np.shape(value)[: -len(features)]
    if list(np.shape(value)[len(stack) :]) != features or list(stack) != batch[: len(stack)]:
        what = "a Gram matrix" if name == "gram" else "second moments"
        raise InputsError(
            f"`inputs` of {method} must hold {what} of the inputs of each leaf, after the axes of a stack of layers",
            f"shape {np.shape(value)} for {leaf}, which needs {tuple(features)}",
            "Collect them on this model, along this axis.",
        )
    if isinstance(value, jax.core.Tracer):
        return
    values = np.asarray(value)
    squares = np.diagonal(values, axis1=-2, axis2=-1) if name == "gram" else values
    is_negative = name in ("gram", "second_moment") and (squares < 0).any()  # others may have any sign
    for is_wrong, rule, got, remedy in (
        (not np.isfinite(values).all(), "finite", "a NaN or an infinity", "Collect them on data that gives none."),
        (np.iscomplexobj(values), "statistics of real inputs", "complex values", "Collect them on real data."),
        (is_negative, "means of squares", "negative ones", "Pass what `eqq.calibrate.collect_stats` returns."),
    ):
        if is_wrong:
            raise InputsError(f"`inputs` of {method} must be {rule}", f"{got} for {leaf}", remedy)


def _check_collected(inputs: LeafStats, method: str, leaf: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Raises if statistics were collected for another weight, for none, or along another axis."""
    if tuple(inputs.shape) != shape:
        raise InputsError(
            f"`inputs` of {method} must be statistics of the same weight",
            f"statistics of a weight of shape {tuple(inputs.shape)} for {leaf}, of shape {shape}",
            "Collect them on this model.",
        )
    if inputs.axis is None:
        raise InputsError(
            f"{method} needs the inputs of a weight",
            f"none for {leaf}: {inputs.note}",
            "Collect statistics on data that reaches it, or quantize it by a method without inputs.",
        )
    observed = (inputs.axis,) if isinstance(inputs.axis, int) else tuple(inputs.axis)
    if observed != axes:
        raise InputsError(
            f"{method} needs blocks along the axis of the inputs",
            f"blocks along {_show_axes(axes)} of {leaf}, whose inputs lie along {_show_axes(observed)}",
            "Leave `axis` out of `quantize_tree` and of its rules: it follows from the statistics. For one array pass "
            "the axis of its inputs.",
        )


def _show_axes(axes: tuple[int, ...]) -> str:
    return f"axis {axes[0]}" if len(axes) == 1 else f"axes {axes}"
