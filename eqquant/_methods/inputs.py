"""Statistics of the inputs of a weight, as methods take them: an array, or what `calibrate` collected."""

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable, TypeGuard

import jax.core
import numpy as np
from jaxtyping import Array, ArrayLike


@runtime_checkable
class Statistics(Protocol):
    """What [`eqquant.calibrate.collect_stats`][] returns for one weight."""

    shape: tuple[int, ...]
    axis: int | tuple[int, ...] | None
    note: str
    second_moment: np.ndarray | None
    gram: np.ndarray | None


# Collected statistics, of one leaf or by path; or an array, which is the statistic itself.
Inputs = Statistics | Mapping[str, Statistics | Array | np.ndarray] | Array | np.ndarray | None


def is_collected(inputs: object) -> TypeGuard[Statistics]:
    """Returns whether these are collected statistics, and not a bare array or `None`."""
    return inputs is not None and getattr(inputs, "second_moment", inputs) is not inputs


def statistic(inputs: object, name: str) -> ArrayLike | None:
    """Returns one statistic of what was collected for a weight; an array stands for the statistic itself."""
    return getattr(inputs, name) if is_collected(inputs) else inputs  # pyright: ignore[reportReturnType]


def check_statistic(
    inputs: object, name: str, method: str, leaf: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """Raises if the statistics `inputs` do not belong to an array, called `leaf`, quantized along its axes.

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
        raise ValueError(f"{method} needs statistics of the inputs of {leaf}, as `inputs.{name}`. Got none. {remedy}")
    length, batch = math.prod(shape[a] for a in axes), [n for i, n in enumerate(shape) if i - len(shape) not in axes]
    features = [length] * (2 if name == "gram" else 1)
    stack = np.shape(value)[: -len(features)]
    if list(np.shape(value)[len(stack) :]) != features or list(stack) != batch[: len(stack)]:
        what = "a Gram matrix" if name == "gram" else "second moments"
        raise ValueError(
            f"`inputs` of {method} must hold {what} of the {length} inputs of {leaf}: shape {tuple(features)}, after "
            f"the axes of a stack of layers. Got shape {np.shape(value)}. Collect them on this model, along this axis."
        )
    if isinstance(value, jax.core.Tracer):
        return
    values = np.asarray(value)
    if not np.isfinite(values).all():
        raise ValueError(
            f"`inputs` of {method} must be finite. Got a NaN or an infinity for {leaf}. Collect the statistics on data "
            "whose activations are finite."
        )
    if np.iscomplexobj(values):
        raise ValueError(f"`inputs` of {method} must be statistics of real inputs. Got complex values for {leaf}.")
    if name == "gram":
        values = np.diagonal(values, axis1=-2, axis2=-1)
    if name in ("gram", "second_moment") and (values < 0).any():  # others may have any sign
        raise ValueError(f"`inputs` of {method} must be means of squares. Got negative ones for {leaf}.")


def _check_collected(inputs: Statistics, method: str, leaf: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Raises if statistics were collected for another weight, for none, or along another axis."""
    if tuple(inputs.shape) != shape:
        raise ValueError(
            f"`inputs` of {method} must be statistics of the same weight. Got those of a weight of shape "
            f"{tuple(inputs.shape)} for {leaf}, of shape {shape}. Collect them on this model."
        )
    if inputs.axis is None:
        raise ValueError(
            f"{method} needs the inputs of a weight, and none of {leaf} were seen: {inputs.note}. "
            "Collect statistics on data that reaches it, or give this leaf another method by a rule with `eqq.Use`."
        )
    observed = (inputs.axis,) if isinstance(inputs.axis, int) else tuple(inputs.axis)
    if observed != axes:
        raise ValueError(
            f"{method} needs blocks along the axis of the inputs. Got statistics along axis {inputs.axis} of {leaf}, "
            f"and blocks along {axes}. Pass `axis={inputs.axis}`."
        )
