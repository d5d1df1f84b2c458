"""Quantized optimizer state."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._array.array import is_quantized
from .._array.quantize import quantize_array, requantize_like
from .._array.sharding import leaf_shardings
from .._formats import Dynamic8
from .._formats.base import AbstractFormat, check_no_tiles
from .._formats.names import as_format
from .._mesh import full_spec
from .._numerics.blocks import block_length
from .._tree.leaves import abbreviate_list
from .._tree.placement import current_sharding
from .._types import PyTree
from .masters import as_optimizer, FloatMastersState


if TYPE_CHECKING:
    import optax


# The moments in the states of optax's optimizers, and whether they are signed. By name, because not every version of
# optax has all of these. All other fields stay in float, because they may hold anything. (`ScaleByRStdDevState` is left
# out because it subtracts the square of one moment from another, and rounding can make the difference negative.)
_MOMENTS = {
    "EmaState": {"ema": True},
    "FactoredState": {"v": False},
    "MuonState": {"mu": True},
    "ScaleByAdamState": {"mu": True, "nu": False},
    "ScaleByAdanState": {"m": True, "v": True, "n": False},
    "ScaleByAdemamixState": {"m1": True, "m2": True, "nu": False},
    "ScaleByAmsgradState": {"mu": True, "nu": False, "nu_max": False},
    "ScaleByBeliefState": {"mu": True, "nu": False},
    "ScaleByLionState": {"mu": True},
    "ScaleByNovogradState": {"mu": True},
    "ScaleByRmsState": {"nu": False},
    "ScaleByRmsWithCountState": {"nu": False},
    "ScaleByRssState": {"sum_of_squares": False},
    "ScaleBySM3State": {"nu": True},
    "ScaleBySimplifiedAdEMAMixState": {"m": True, "n": False},
    "SophiaState": {"mu": True},
    "TraceState": {"trace": True},
}


def quantize_state(
    optimizer: "optax.GradientTransformation", format: AbstractFormat | str = "dynamic8", *, min_size: int = 4096
) -> "optax.GradientTransformationExtraArgs":
    """Returns an optimizer that keeps its moments quantized between steps (8-bit Adam).

    A step dequantizes the moments, runs the optimizer, and quantizes the new moments. With the default,
    [`eqquant.Dynamic8`][], a moment takes 8.125 bits per value instead of 32. It supports Adam and its relatives
    (AdamW, Nadam, AMSGrad, AdaBelief, Adan, AdEMAMix, ADOPT, the first moment of Sophia), SGD, Lion, Muon, RMSProp
    without centring, Adagrad, the unfactored moments of Adafactor, SM3 and NovoGrad, inside any of optax's wrappers.
    All other state, including the state of custom optimizers, stays in float. So do the second moments of Yogi, which
    change by steps too small for eight bits.

    !!! Example

        ```python
        optim = eqq.quantize_state(optax.adamw(1e-3))
        state = optim.init(eqx.filter(model, eqx.is_inexact_array))  # the parameters of a float model
        optim = eqq.float_masters(eqq.quantize_state(optax.adamw(1e-4)))  # with float masters, in this order
        ```

    ??? cite

        [8-bit Optimizers via Block-wise Quantization](https://arxiv.org/abs/2110.02861)

    **Arguments:**

    - `optimizer`: any optax optimizer that keeps moments.
    - `format`: the format of the moments, or its lower-case name. Optimizers divide by second moments, so these need an
        unsigned format that does not round small values to zero: the same format with `signed=False` if it has that
        field, otherwise `Dynamic8(signed=False)`. Blocks run along the last axis, and along several of the last axes if
        it is shorter than a block.
    - `min_size`: moments with fewer values stay in float, because they take little memory.

    **Returns:**

    An `optax.GradientTransformationExtraArgs`, whose state holds each moment as a [`eqquant.QuantizedArray`][].

    **Raises:**

    `TypeError` if `optimizer` is not an optax optimizer. `init` raises `ValueError` if the optimizer has no moments of
    at least `min_size` values, if its moments are already quantized, if the parameters are quantized and have no
    masters, or if it wraps [`eqquant.float_masters`][].
    """
    import optax

    signed = check_no_tiles(as_format(format), "format")
    has_unsigned = any(field.name == "signed" for field in dataclasses.fields(signed))
    unsigned = dataclasses.replace(signed, signed=False) if has_unsigned else Dynamic8(signed=False)
    inner = as_optimizer(optimizer)

    def init(params: PyTree) -> PyTree:
        state = inner.init(params)
        if not jtu.tree_leaves(params):  # from `optax.tree_map_params`, to find them in the state
            return state
        _check_float(state, params)
        float_fields = ("nu",) if _is_yogi(inner.init, params) else ()

        def quantize_fields(state: PyTree) -> PyTree:
            quantized = {}
            for field, is_signed in _moment_fields(state).items():
                if field not in float_fields:
                    quantize = ft.partial(_quantize_moment, format=signed if is_signed else unsigned, min_size=min_size)
                    quantized[field] = jtu.tree_map(quantize, getattr(state, field))
            return state._replace(**quantized) if quantized else state

        quantized = jtu.tree_map(quantize_fields, state, is_leaf=lambda x: bool(_moment_fields(x)))
        if not any(is_quantized(x) for x in jtu.tree_leaves(quantized, is_leaf=is_quantized)):
            names = [jtu.keystr(path) for path, x in jtu.tree_leaves_with_path(state) if jnp.size(x) > 1]
            raise ValueError(
                f"The optimizer must keep moments of at least {min_size} values, in a state that is known. Got none in "
                f"its state ({abbreviate_list(names) or 'which is empty'}). Lower `min_size`, or use the optimizer "
                "without the wrapper."
            )
        return quantized

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        dense = jtu.tree_map(lambda x: x.dequantize() if is_quantized(x) else x, state, is_leaf=is_quantized)
        updates, new = inner.update(updates, dense, params, **extra_args)
        requantize = lambda old, new: requantize_like(old, new) if is_quantized(old) else new
        return updates, jtu.tree_map(requantize, state, new, is_leaf=is_quantized)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_float(state: PyTree, params: PyTree) -> None:
    """Raises if moments are quantized already, by another wrapper or by their parameters."""
    is_leaf = lambda x: isinstance(x, FloatMastersState) or is_quantized(x)
    for path, x in jtu.tree_leaves_with_path(state, is_leaf=is_leaf):
        if isinstance(x, FloatMastersState):
            raise ValueError(
                "`quantize_state` must be inside `float_masters`. Got it outside. Write "
                "`eqq.float_masters(eqq.quantize_state(optimizer))`."
            )
        if is_quantized(x):
            remedy = (
                "So are the parameters, which need masters: `eqq.float_masters(eqq.quantize_state(optimizer))`."
                if any(is_quantized(p) for p in jtu.tree_leaves(params, is_leaf=is_quantized))
                else "Wrap the optimizer once."
            )
            raise ValueError(
                f"`quantize_state` needs an optimizer whose state is float. Got {jtu.keystr(path)}, which is "
                f"quantized. {remedy}"
            )


def _moment_fields(state: PyTree) -> dict[str, bool]:
    """Returns the fields of a state that are moments, and whether they are signed."""
    is_known = type(state).__module__.partition(".")[0] == "optax"
    return _MOMENTS.get(type(state).__name__, {}) if is_known else {}


def _is_yogi(init: Callable[[PyTree], PyTree], params: PyTree) -> bool:
    """Returns whether an optimizer is Yogi: second moments of an Adam state start above zero.

    Yogi changes them by so little that eight bits round most steps down to nothing, and the larger ones remain.
    """
    is_adam = lambda x: "mu" in _moment_fields(x) and type(x).__name__ == "ScaleByAdamState"
    # The first state depends neither on the values of the parameters nor on their lengths.
    one_value = lambda x: jnp.zeros([1] * jnp.ndim(x), jnp.result_type(x))
    with jax.ensure_compile_time_eval():
        state = init(jtu.tree_map(one_value, params))
        nodes = [x for x in jtu.tree_leaves(state, is_leaf=is_adam) if is_adam(x)]
        return any(float(jnp.max(x)) > 0 for node in nodes for x in jtu.tree_leaves(node.nu))


def _quantize_moment(x: PyTree, format: AbstractFormat, min_size: int) -> PyTree:
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    if jnp.size(x) < max(min_size, 1) or jnp.ndim(x) == 0:
        return x
    axes = _block_axes(x.shape, format)
    return quantize_array(x, format, axes, None, None, sharding=_resolve_sharding(x, format, axes))


def _resolve_sharding(x: PyTree, format: AbstractFormat, axes: tuple[int, ...]) -> NamedSharding | None:
    """Returns the sharding of a moment, replicated along axes whose shards would cut a block."""
    if (sharding := current_sharding(x)) is None:
        return None
    entries = full_spec(sharding, x.ndim).spec
    try:
        leaf_shardings(jax.eval_shape(lambda x: quantize_array(x, format, axes, None, None), x), sharding)
        return sharding
    except ValueError:
        return NamedSharding(sharding.mesh, PartitionSpec(*entries[: x.ndim - len(axes)], *[None] * len(axes)))


def _block_axes(shape: tuple[int, ...], format: AbstractFormat) -> tuple[int, ...]:
    """Returns the smallest number of last axes that hold a whole block."""
    block = block_length(format.block_size, 1)
    n = next((n for n in range(1, len(shape)) if math.prod(shape[-n:]) >= block), len(shape))
    return tuple(range(-n, 0))
