"""Converts between logical order and memory order: quantized axes last, merged into one."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float


def as_axis(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    """Returns a single axis as an integer, several as a tuple."""
    return axes[0] if len(axes) == 1 else axes


def as_axes(axis: int | tuple[int, ...]) -> tuple[int, ...]:
    """The inverse of `as_axis`: returns the quantized axes as a tuple, in memory order."""
    return axis if isinstance(axis, tuple) else (axis,)


def memory_order(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "*batch length"]:
    """Moves the quantized axes of a logical array to the end, and merges them into one."""
    rows = jnp.moveaxis(x, axes, range(-len(axes), 0))
    return rows.reshape(*rows.shape[: x.ndim - len(axes)], math.prod(x.shape[a] for a in axes))


def logical_order(rows: Array, axes: tuple[int, ...], lengths: tuple[int, ...]) -> Array:
    """The inverse of `memory_order`, for an array of any dtype.

    `lengths` are the lengths of the quantized axes.
    """
    x = rows.reshape(*rows.shape[:-1], *lengths)
    return jnp.moveaxis(x, range(-len(axes), 0), axes)
