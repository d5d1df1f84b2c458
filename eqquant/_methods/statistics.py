"""Statistics of the inputs of a weight: an array, or a result of `calibrate`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable, TypeGuard, TypeVar

import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float32


@runtime_checkable
class Statistics(Protocol):
    """The statistics of one weight that methods read: a `LeafStats` of `calibrate`."""

    # Read alone, so that classes may be frozen.
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axis(self) -> int | tuple[int, ...] | None: ...
    @property
    def note(self) -> str: ...
    @property
    def second_moment(self) -> np.ndarray | None: ...
    @property
    def gram(self) -> np.ndarray | None: ...


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
Inputs = Statistics | Mapping[str, Statistics | Array | np.ndarray] | Array | np.ndarray | None


def is_collected(inputs: object) -> TypeGuard[Statistics]:
    """Returns whether these are collected statistics, and not a bare array or `None`."""
    return inputs is not None and getattr(inputs, "second_moment", inputs) is not inputs


def statistic(inputs: object, name: str) -> ArrayLike | None:
    """Returns one of the collected statistics of a weight.

    An array stands for the statistic itself.
    """
    return getattr(inputs, name) if is_collected(inputs) else inputs  # pyright: ignore[reportReturnType]


_Collected = TypeVar("_Collected")

# Added to the weight of each column, in units of their mean.
_DAMPING = 0.01


def share_inputs(inputs: _Collected) -> _Collected:
    """Returns statistics where the mean of a stack fills in for inputs that experts lack.

    An expert needs as many inputs as it has features, or as another of the stack saw. With the share `n / needed` of
    them, its statistics count by that share, and the mean over all inputs of the stack by the rest. An expert that no
    input reached gets that mean.
    """
    rows, moments, gram = (getattr(inputs, name, None) for name in ("rows", "second_moment", "gram"))
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

    return dataclasses.replace(inputs, second_moment=shared(moments), gram=shared(gram))  # pyright: ignore[reportArgumentType]


def weigh_columns(inputs: Inputs) -> Float32[Array, "*stack length"]:
    """Returns the mean squares of inputs, divided by their mean, as weights of columns.

    So no weighted square overflows. A column whose inputs are zero counts a little.
    """
    moments = jnp.asarray(statistic(inputs, "second_moment"), jnp.float32)
    mean = jnp.mean(moments, axis=-1, keepdims=True)
    return jnp.where(mean > 0, moments / jnp.where(mean > 0, mean, 1), 1) + _DAMPING


def check_statistic(
    inputs: object, name: str, method: str, leaf: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """Raises if the statistics `inputs` are not for an array, quantized along its axes.

    Errors call the array `leaf`.

    **Arguments:**

    - `name`: the statistic that the method needs, such as `"gram"` or `"second_moment"`.
    - `method`: the name of the method.
    """
    if is_collected(inputs):
        _check_collected(inputs, method, leaf, shape, axes)
    value = statistic(inputs, name)
    if value is None:
        collect = is_collected(inputs)
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
    if not np.isfinite(values).all():
        raise InputsError(
            f"`inputs` of {method} must be finite",
            f"a NaN or an infinity for {leaf}",
            "Collect the statistics on data whose activations are finite.",
        )
    if np.iscomplexobj(values):
        raise InputsError(
            f"`inputs` of {method} must be statistics of real inputs",
            f"complex values for {leaf}",
            "Collect them on real data.",
        )
    if name == "gram":
        values = np.diagonal(values, axis1=-2, axis2=-1)
    if name in ("gram", "second_moment") and (values < 0).any():  # others may have any sign
        raise InputsError(
            f"`inputs` of {method} must be means of squares",
            f"negative ones for {leaf}",
            "Pass what `eqq.calibrate.collect_stats` returns.",
        )


def _check_collected(inputs: Statistics, method: str, leaf: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
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
