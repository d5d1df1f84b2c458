"""Rules that the primitives share."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad
from jaxtyping import Array

from .. import _compat


Tangent: TypeAlias = Array | ad.Zero
Primal: TypeAlias = Array | ad.UndefinedPrimal  # of a rule of transposition


def jit_impl(
    primitive: Primitive, compute: Callable[..., Array], static: Sequence[str], **fixed: object
) -> Callable[..., Array]:
    """Returns the implementation of a primitive outside of `jit`: a program of its own.

    Where `jit` is disabled, that is `compute`.

    `static` are the names of its parameters, and `fixed` the values that some of them take there.
    """

    # `jit` caches the compiled program, and JAX bounds that cache.
    def run(*args: Array, **params: object) -> Array:
        traced = any(isinstance(a, jax.core.Tracer) for a in args)  # not where `jit` is disabled
        return (primitive.bind if traced else compute)(*args, **{**params, **fixed})

    run.__name__ = primitive.name
    return jax.jit(run, static_argnames=static)


def batch_axis_size(args: Sequence[Array], dims: Sequence[int | None]) -> int:
    """Returns the length of the mapped axis."""
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)


def move_batch_axis(a: Array, dim: int | None, size: int, to: int = 0) -> Array:
    """Moves the mapped axis to place `to`, or broadcasts along a new one."""
    if dim is not None:
        return a if dim == to % a.ndim else jnp.moveaxis(a, dim, to)
    return jnp.moveaxis(jnp.broadcast_to(a, (size, *a.shape)), 0, to)


def zero_tangent_jvp(primitive: Primitive) -> Callable[..., tuple[Array, ad.Zero]]:
    """Returns the JVP rule of a primitive that takes integers alone, or gives integers."""

    def jvp(primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], **params: object) -> tuple[Array, ad.Zero]:
        del tangents
        y = primitive.bind(*primals, **params)
        return y, _compat.zero_tangent(y)

    return jvp


def leading_batching_rule(primitive: Primitive) -> Callable[..., tuple[Array, int]]:
    """Returns the batching rule of a primitive that maps over leading axes.

    Its operands have equal first axes, and it works along the last ones.
    """

    def batch(args: Sequence[Array], dims: Sequence[int | None], **params: object) -> tuple[Array, int]:
        size = batch_axis_size(args, dims)
        return primitive.bind(*(move_batch_axis(a, d, size) for a, d in zip(args, dims, strict=True)), **params), 0

    return batch
