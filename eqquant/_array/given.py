"""Whether scales that a caller gives suit a format and an array."""

import functools as ft

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .._formats.base import AbstractFormat, levels_of
from .._methods.given import GivenScales
from .._numerics.blocks import divide, expand
from .._numerics.scale_bits import bits_to_scale, scale_to_bits


# A scale dtype rounds by less: bfloat16 by 1/256. A power of two for another scale is off by up to a half.
_STORED = 1 / 64
# Who clips on purpose loses less. An eight-bit scale in a four-bit format clips at a twentieth of the range: more.
_CLIPPED = 0.75


def check_suits(given: GivenScales, rows: Float[Array, "*batch length"], format: AbstractFormat) -> None:
    """Refuses scales that a format cannot store, and those that were surely meant for another one."""
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
    """The largest relative error of scales as they are stored; of tiny ones it is of no matter."""
    if format.scale_format is not None:
        return jnp.float32(0)
    stored = bits_to_scale(scale_to_bits(scale, format.scale_dtype), format.scale_dtype)
    return jnp.max(jnp.abs(stored - scale) / jnp.maximum(jnp.abs(scale), 1e-30), initial=0)


@ft.partial(jax.jit, static_argnums=2)
def _clip_error(given: GivenScales, rows: Float[Array, "*batch length"], format: AbstractFormat) -> Float32[Array, ""]:
    """The relative error (L2) that clipping makes."""
    rows = rows.astype(jnp.float32)
    size = jnp.max(jnp.abs(rows), initial=0)  # in units of it no square overflows
    units = lambda x: divide(x, jnp.broadcast_to(size, x.shape))
    levels, used = levels_of(format)
    zero = jnp.float32(0) if given.zero_point is None else given.zero_point.astype(jnp.float32)
    ends = [(jnp.float32(end) - zero) * units(given.scale) for end in (levels[used].min(), levels[used].max())]
    low, high = (expand(f(*ends), format.block_size, rows.shape[-1]) for f in (jnp.minimum, jnp.maximum))
    power = lambda x: jnp.sum(jnp.square(x))
    return jnp.sqrt(divide(power(units(rows) - jnp.clip(units(rows), low, high)), power(units(rows))))
