"""Changes weights of a model and keeps its outputs: folds into other weights, or wrappers."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from .._array.checks import as_jax_array, check_finite
from .._mesh import on_device
from .._tree.batches import Apply, as_apply, list_batches
from .._tree.leaves import abbreviate_list, DenseArray, replace_leaves
from .._tree.select import select_leaves, Selection, Where
from .._tree.weights import mapped_axis, unmappable_reason, unmapped_reason
from .._types import Model, PyTree
from .._wrappers.mapped import AbstractMappedArray, reshape_along_axis
from ._folds import Weights


Change = Callable[[Array], Array]


class FoldChanges(NamedTuple):
    """The changes of leaves for one entry of `fold`.

    - `consumers`: the indices of the weights whose inputs are the changed channels.
    - `changes`: pairs of the index of a leaf and a change.
    """

    name: str
    consumers: frozenset[int]
    changes: Sequence[tuple[int, Change]]


def select_weights(model: PyTree, where: Where | None, axis: int | None) -> tuple[list[Selection], Weights]:
    """Returns the selection of weights whose inputs can be transformed, and their input axes."""
    if axis not in (None, -1, -2):
        raise ValueError(
            f"`axis` must be -1, for weights that are used as `w @ x`, or -2, for `x @ w`. Got {axis!r}. Leave it out "
            "for the axis that each layer has."
        )
    selections = select_leaves(
        model, where, ineligible=unmappable_reason, skip=unmapped_reason, kind="float weights of linear layers"
    )
    leaves = [leaf for leaf, _ in selections]
    axes = {n: a for n, leaf in enumerate(leaves) if (a := mapped_axis(leaf, axis)) is not None}
    return selections, Weights(leaves, axes)


def change_model(
    model: Model,
    weights: Weights,
    entries: Sequence[FoldChanges],
    wrap: Mapping[int, Callable[[DenseArray], AbstractMappedArray]],
    batches: Iterable[PyTree] | None,
    apply: Apply | None,
    remedy: str,
) -> Model:
    """Returns the model with all changes, and with some weights in wrappers.

    `wrap` returns the wrapper of each, which transforms the other operand of a product. Raises if a leaf that changes
    is not finite, or if the entries change the outputs on `batches`.
    """
    leaves = weights.leaves
    for n in sorted({*wrap, *(n for entry in entries for n, _ in entry.changes)}):
        if not isinstance(leaves[n].value, jax.ShapeDtypeStruct):
            check_finite(on_device(as_jax_array(leaves[n].value)), leaves[n].path)

    def apply_changes(entries: Iterable[FoldChanges]) -> list[PyTree]:
        by_leaf = collections.defaultdict(list)
        for entry in entries:
            for n, change in entry.changes:
                by_leaf[n].append(change)
        return [_apply_changes(leaf.value, by_leaf[n]) if n in by_leaf else leaf.value for n, leaf in enumerate(leaves)]

    values = apply_changes(entries)
    if batches is not None:
        run = eqx.filter_jit(as_apply(apply))
        _check_outputs(run, model, lambda part: replace_leaves(model, apply_changes(part)), entries, batches, remedy)
    wrapped: dict[tuple[int, int], AbstractMappedArray] = {}  # a shared array is wrapped once
    for n, wrap_leaf in wrap.items():
        key = id(values[n]), weights.axes[n]
        if key not in wrapped:
            wrapped[key] = wrap_leaf(values[n])
    return replace_leaves(model, [wrapped[id(x), weights.axes[n]] if n in wrap else x for n, x in enumerate(values)])


def _apply_changes(x: DenseArray, changes: Sequence[Change]) -> DenseArray:
    """Returns a leaf after all changes, computed in float32 and rounded once."""

    def change(x: Array) -> Array:
        y = x.astype(jnp.float32)
        for one in changes:
            y = one(y)
        return y.astype(x.dtype)

    return jax.eval_shape(change, x) if isinstance(x, jax.ShapeDtypeStruct) else change(as_jax_array(x))


def multiply_inputs(x: Array, factor: Array, axis: int) -> Array:
    """Returns a weight with each input, along an axis, multiplied by a factor."""
    return x * reshape_along_axis(factor, x.ndim, axis)


def divide_outputs(x: Array, factor: Array, axis: int, offset: float | int) -> Array:
    """Returns a weight or a vector with each output divided by a factor.

    - `offset`: a constant that the layer adds to a vector before it multiplies by it.
    """
    if x.ndim > factor.ndim:
        return x / reshape_along_axis(factor, x.ndim, axis)
    return (x + offset) / factor - offset


def _check_outputs(
    run: Apply,
    model: PyTree,
    apply_changes: Callable[[Sequence[FoldChanges]], PyTree],
    entries: Sequence[FoldChanges],
    batches: Iterable[PyTree],
    remedy: str,
) -> None:
    """Raises if the changed model has other outputs, and names the entries that change them."""
    data, folded = list_batches(batches), apply_changes(entries)
    for batch in data:
        wanted = run(model, batch)
        outputs = [y for y in jtu.tree_leaves(wanted) if eqx.is_inexact_array(y)]
        if not any(bool((jnp.isfinite(y) & (y != 0)).any()) for y in outputs):
            raise ValueError(
                "`batches` must give outputs to compare. Got none that are finite and not zero: look for a NaN in the "
                "model and in the batches."
            )
        if not _are_close(run(folded, batch), wanted):
            wrong = [entry.name for entry in entries if not _are_close(run(apply_changes([entry]), batch), wanted)]
            raise ValueError(
                f"Each pair of `fold` must leave the outputs of the model unchanged. Got others with "
                f"{abbreviate_list(wrong or [entry.name for entry in entries])}: an operation between the two is not "
                f"linear in each channel, or something else takes the outputs too, such as a residual sum. {remedy}"
            )


def _are_close(found: PyTree, wanted: PyTree) -> bool:
    for a, b in zip(jtu.tree_leaves(found), jtu.tree_leaves(wanted), strict=True):
        if eqx.is_inexact_array(b):
            tolerance = 1e-4 if jnp.finfo(b.dtype).bits >= 32 else 5e-2
            amax = jnp.max(jnp.abs(jnp.where(jnp.isfinite(b), b, 0).astype(jnp.float32)), initial=0)
            if not jnp.allclose(a, b, rtol=0, atol=float(tolerance * amax) + 1e-12, equal_nan=True):
                return False
    return True
