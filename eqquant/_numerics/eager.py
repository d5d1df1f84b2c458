"""Primitives outside of `jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
from jaxtyping import Array


def def_impl(primitive: jax.extend.core.Primitive, compute: Callable[..., Array], static: tuple[str, ...]) -> None:
    """Makes a call of a primitive outside of `jit` one compiled program, or `compute` where `jit` is disabled.

    **Arguments:**

    - `static`: the names of the primitive's parameters.
    """
    # `jit` caches the compiled program, and JAX bounds that cache.
    compiled = jax.jit(lambda *args, **params: primitive.bind(*args, **params), static_argnames=static)

    def impl(*args: Array, **params: Any) -> Array:
        disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        return (compute if disabled else compiled)(*args, **params)

    primitive.def_impl(impl)
