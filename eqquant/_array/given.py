"""Checks that the scales of a caller suit the format and the array."""

import functools as ft

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .._formats.base import AbstractFormat, levels_of
from .._methods.given import GivenScales
from .._numerics.blocks import divide, expand
from .._numerics.scale_bits import bits_to_scale, scale_to_bits


# Every float dtype rounds by less: bfloat16 by 1/256. Rounding to a power of two is off by up to a half.
_STORED = 1 / 64
# Clipping on purpose loses less. An eight-bit scale in a four-bit format clips at a twentieth of the range: more.
_CLIPPED = 0.75


def check_suits(given: GivenScales, rows: Float[Array, "*batch length"], format: AbstractFormat) -> None:
    """Raises for scales that the format cannot store, or that were surely meant for another format."""
    with jax.ensure_compile_time_eval():
        unstored, clipped = float(_store_error(given.scale, format)), float(_clip_error(given, rows, format))
    if unstored > _STORED:
        kind = "a power of two" if format.scale_dtype == "e8m0" else f"in the range of {format.scale_dtype}"
        raise ValueError(
            f"`scale` must be {kind}, as {format!r} stores it. Got one that would be off by {unstored:.1%}. Calibrate "
            "for this format, or round the scale first."
        )
    if clipped > _CLIPPED:
        raise ValueError(
            f"`scale` must suit the values and {format!r}. Got one whose clipping alone makes a relative error of "
            f"{clipped:.3f}. Calibrate for this format: a scale for one of more bits is smaller."
        )


@ft.partial(jax.jit, static_argnums=1)
def _store_error(scale: Float32[Array, "*batch blocks"], format: AbstractFormat) -> Float32[Array, ""]:
    """Returns the largest relative error of storing the scales; ignores scales below 1e-30."""
    if format.scale_format is not None:
        return jnp.float32(0)
    stored = bits_to_scale(scale_to_bits(scale, format.scale_dtype), format.scale_dtype)
    return jnp.max(jnp.abs(stored - scale) / jnp.maximum(jnp.abs(scale), 1e-30), initial=0)


@ft.partial(jax.jit, static_argnums=2)
def _clip_error(given: GivenScales, rows: Float[Array, "*batch length"], format: AbstractFormat) -> Float32[Array, ""]:
    """Returns the relative error (L2) of clipping."""
    rows = rows.astype(jnp.float32)
    size = jnp.max(jnp.abs(rows), initial=0)  # as a unit, it keeps squares from overflowing
    units = lambda x: divide(x, jnp.broadcast_to(size, x.shape))
    levels, used = levels_of(format)
    zero = jnp.float32(0) if given.zero_point is None else given.zero_point.astype(jnp.float32)
    ends = [(jnp.float32(end) - zero) * units(given.scale) for end in (levels[used].min(), levels[used].max())]
    low, high = (expand(f(*ends), format.block_size, rows.shape[-1]) for f in (jnp.minimum, jnp.maximum))
    power = lambda x: jnp.sum(jnp.square(x))
    return jnp.sqrt(divide(power(units(rows) - jnp.clip(units(rows), low, high)), power(units(rows))))
