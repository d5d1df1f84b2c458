"""Statistics of the inputs of a weight, as methods take them: an array, or what `calibrate` collected."""

import math
from typing import Any

import jax.core
import numpy as np


def statistic(inputs: Any, name: str) -> Any:
    """Returns one statistic of what was collected for a weight; an array stands for the statistic itself."""
    return getattr(inputs, name) if _is_collected(inputs) else inputs


def _is_collected(inputs: Any) -> bool:
    """Whether these are collected statistics, and not a bare array or `None`."""
    return inputs is not None and getattr(inputs, "second_moment", inputs) is not inputs


def check_statistic(
    inputs: Any, name: str, method: str, of: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """Raises if the statistics `inputs` do not belong to an array, called `of`, quantized along its axes.

    **Arguments:**

    - `name`: the statistic that the method needs, `"gram"` or `"second_moment"`.
    - `method`: the name of the method.
    """
    collected = _is_collected(inputs)
    if collected and tuple(inputs.shape) != shape:
        raise ValueError(
            f"`inputs` of {method} must be statistics of the same weight. Got those of a weight of shape "
            f"{tuple(inputs.shape)} for {of}, of shape {shape}. Collect them on this model."
        )
    if collected and inputs.axis is None:
        raise ValueError(
            f"{method} needs the inputs of a weight, and none of {of} were seen: {inputs.note}. "
            "Collect statistics on data that reaches it, or give this leaf another method by a rule with `eqq.Use`."
        )
    if collected and inputs.axis is not None:
        observed = (inputs.axis,) if isinstance(inputs.axis, int) else tuple(inputs.axis)
        if observed != axes:
            raise ValueError(
                f"{method} needs blocks along the axis of the inputs. Got statistics along axis {inputs.axis} of {of}, "
                f"and blocks along {axes}. Pass `axis={inputs.axis}`."
            )
    value = statistic(inputs, name)
    if value is None:
        remedy = "Collect them with `gram=True`." if collected else "Pass what `eqq.calibrate.collect_stats` returns."
        raise ValueError(f"{method} needs statistics of the inputs of {of}, as `inputs.{name}`. Got none. {remedy}")
    length, batch = math.prod(shape[a] for a in axes), [n for i, n in enumerate(shape) if i - len(shape) not in axes]
    features = [length] * (2 if name == "gram" else 1)
    stack = np.shape(value)[: -len(features)]
    if list(np.shape(value)[len(stack) :]) != features or list(stack) != batch[: len(stack)]:
        what = "a Gram matrix" if name == "gram" else "second moments"
        raise ValueError(
            f"`inputs` of {method} must hold {what} of the {length} inputs of {of}: shape {tuple(features)}, after the "
            f"axes of a stack of layers. Got shape {np.shape(value)}. Collect them on this model, along this axis."
        )
    if isinstance(value, jax.core.Tracer):
        return
    values = np.asarray(value)
    if not np.isfinite(values).all():
        raise ValueError(
            f"`inputs` of {method} must be finite. Got a NaN or an infinity for {of}. Collect the statistics on data "
            "whose activations are finite."
        )
    if np.iscomplexobj(values):
        raise ValueError(f"`inputs` of {method} must be statistics of real inputs. Got complex values for {of}.")
    if name == "gram":
        values = np.diagonal(values, axis1=-2, axis2=-1)
    if name in ("gram", "second_moment") and (values < 0).any():  # others may have any sign
        raise ValueError(f"`inputs` of {method} must be means of squares. Got negative ones for {of}.")
