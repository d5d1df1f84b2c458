"""Optimizer state in eight bits."""

import dataclasses
import math
from typing import Any, TYPE_CHECKING

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import AbstractFormat, as_format
from .._leaves import some
from .._quantize import encode_array, is_quantized
from .masters import FloatMastersState


if TYPE_CHECKING:
    import optax


# How optax names the moments in its states. Second moments are never negative.
_FIRST = frozenset({"mu", "trace", "m", "ema"})
_SECOND = frozenset({"nu", "nu_max", "v", "sum_of_squares"})
# Below these names a model's own names begin, which may be any.
_OTHER = frozenset({"acc_grads", "masters", "params"})


def quantize_state(
    optimizer: "optax.GradientTransformation", format: AbstractFormat | str = "dynamic8", *, min_size: int = 4096
) -> "optax.GradientTransformationExtraArgs":
    """Keeps the first and second moments of an optimizer quantized between steps.

    A step dequantizes them, runs the optimizer, and quantizes what it returns. With the default,
    [`eqquant.Dynamic8`][], a moment takes 8.125 bits and not 32. Moments are what optax names so: `mu`, `nu`, `nu_max`,
    `trace`, `ema`, `m`, `v` and `sum_of_squares`. Second moments are quantized without a sign, if the format can do
    without.

    !!! Example

        ```python
        optim = eqq.quantize_state(optax.adamw(1e-3))
        optim = eqq.float_masters(eqq.quantize_state(optax.adamw(1e-4)))  # together with QAT, in this order
        ```

    ??? cite

        [8-bit Optimizers via Block-wise Quantization](https://arxiv.org/abs/2110.02861)

    **Arguments:**

    - `optimizer`: any optax optimizer that keeps moments.
    - `format`: what they are quantized to. Blocks run along the last axis, and along more of the last ones where it is
        shorter than a block.
    - `min_size`: moments of fewer values stay in float, as they weigh little.

    **Returns:**

    An `optax.GradientTransformationExtraArgs`, in whose state each moment is a [`eqquant.QuantizedArray`][].

    **Raises:**

    Its `init`: `ValueError` if the optimizer has no moments of at least `min_size` values, or if it wraps
    [`eqquant.float_masters`][], whose masters are no moments.
    """
    import optax

    signed = as_format(format)
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> PyTree:
        state = inner.init(params)
        flat, treedef = jtu.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, FloatMastersState))
        if any(isinstance(x, FloatMastersState) for _, x in flat):
            raise ValueError(
                "`quantize_state` must be inside of `float_masters`. Got it outside. Write "
                "`eqq.float_masters(eqq.quantize_state(optimizer))`."
            )
        done = [_quantize_moment(_moment_of(path), x, signed, min_size) for path, x in flat]
        if not any(is_quantized(x) for x in done):
            names = [jtu.keystr(path) for path, x in flat if jnp.size(x) > 1]
            raise ValueError(
                f"The optimizer must keep moments of at least {min_size} values. Got none in its state "
                f"({some(names) or 'which is empty'}). Lower `min_size`, or use the optimizer without the wrapper."
            )
        return jtu.tree_unflatten(treedef, done)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        dense = jtu.tree_map(lambda x: x.dequantize() if is_quantized(x) else x, state, is_leaf=is_quantized)
        updates, new = inner.update(updates, dense, params, **extra_args)
        return updates, jtu.tree_map(_like, state, new, is_leaf=is_quantized)

    return optax.GradientTransformationExtraArgs(init, update)


def _moment_of(path: tuple[Any, ...]) -> str | None:
    """The name of the moment that a leaf of the state belongs to: the first on its path that is one."""
    names = [key.name for key in path if isinstance(key, jtu.GetAttrKey)]
    return next((name for name in names if name in _FIRST | _SECOND | _OTHER), None)


def _quantize_moment(moment: str | None, x: Any, signed: AbstractFormat, min_size: int) -> Any:
    if moment is None or moment in _OTHER or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    if jnp.size(x) < max(min_size, 1) or jnp.ndim(x) == 0:
        return x
    format = signed
    if moment in _SECOND and any(field.name == "signed" for field in dataclasses.fields(signed)):
        format = dataclasses.replace(signed, signed=False)  # pyright: ignore[reportCallIssue]
    return encode_array(x, format, _blocked_axes(x.shape, format), None, None)


def _blocked_axes(shape: tuple[int, ...], format: AbstractFormat) -> tuple[int, ...]:
    """The fewest last axes that hold a whole block."""
    block = format.block_size if isinstance(format.block_size, int) else 1
    n = next((n for n in range(1, len(shape)) if math.prod(shape[-n:]) >= block), len(shape))
    return tuple(range(-n, 0))


def _like(old: Any, new: Any) -> Any:
    if not is_quantized(old):
        return new
    q = encode_array(new, old.format, old._axes, old.logical_dtype, None)
    return dataclasses.replace(q, logical_sharding=old.logical_sharding)
