"""Rotates the inputs of weights: in the weights before them, or online, where each product transforms its operand."""

import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from .._array.array import is_quantized
from .._numerics import hadamard
from .._types import PyTree
from .._wrappers.rotated import RotatedArray
from .folds import (
    check_changed,
    check_outputs,
    find_folds,
    find_stream,
    Fold,
    multiplied,
    output_axis,
    Residual,
    Rotations,
    Stream,
)
from .leaves import Leaf, some
from .select import select_leaves, Selection, Where
from .weights import check_axis, mapped_axis, unmappable_reason, unmapped_reason


Change = Callable[[Array], Array]


def rotate(
    model: PyTree,
    *,
    fold: Rotations | None = None,
    where: Where | None = None,
    axis: int | None = None,
    seed: int = 0,
    online: bool = True,
    batches: Iterable[PyTree] | None = None,
    apply: Callable[[Any, Any], Any] | None = None,
) -> PyTree:
    r"""Rotates the inputs of weights by a randomised Hadamard transform, so that no input and no weight is far larger
    than the others. Call it before you quantize.

    Each weight $W$ becomes a [`eqquant.RotatedArray`][], which stores $V = W R^T$ and computes $V (R x)$: the same
    model up to rounding in float32. Then quantize it as any other: formats and methods see $V$,
    [`eqquant.calibrate.collect_stats`][] sees the rotated inputs, and so do quantized activations. That is what makes
    two and three bits work with one scale for each row, and activations of four bits. Weights in small blocks gain
    little, because a large value affects only its own block.

    !!! Example

        ```python
        model = eqq.rotate(model)
        stats = eqq.calibrate.collect_stats(model, batches, gram=True)
        model = eqq.quantize_tree(model, "int4", method=eqq.GPTQ(stats))
        ```

    Costs $O(K \log K)$ for each $x$ of $K$ inputs. Under `jit`, weights that are multiplied by the same $x$ share it.
    [`eqquant.dequantize_tree`][] returns the dense weights $W$.

    It costs nothing where the layers before can return rotated outputs. You name these as `fold`: a residual stream,
    with what writes to it and what reads it, and pairs of layers such as the values and the output of attention. Their
    weights stay plain arrays, and all others rotate online.

    !!! Example

        ```python
        model = eqq.rotate(model, fold=eqq.io.names.llama_rotations(head_size=128), batches=batches)
        ```

    ??? cite

        [QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs](https://arxiv.org/abs/2404.00456)

    **Arguments:**

    - `model`: any pytree of floats.
    - `fold`: from patterns of what makes channels to what takes them: an [`eqquant.Residual`][], or for a pair of
        layers an [`eqquant.Into`][] or the pattern of a weight, as in [`eqquant.smooth`][]. In a pair nothing but sums
        over tokens may stand between the two. `eqq.io.names` has those of some families of models.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`, whose inputs are rotated. By default, every
        weight that [`eqquant.quantize_tree`][] would quantize, except embeddings and convolutions.
    - `axis`: the axis of the inputs of every weight, if it is not known: -2 for weights that are used as `x @ w`.
    - `seed`: of the random signs. It is part of the structure of the result, which has no more leaves than `model`.
    - `online`: whether weights that `fold` does not reach rotate their operands. Otherwise they stay as they are.
    - `batches`, `apply`: data on which to compare the result with the model before, and a function
        `(model, batch) -> outputs`, as for [`eqquant.smooth`][].

    **Returns:**

    The model, with rotated weights. An array that appears in several places stays shared.

    **Raises:**

    `ValueError` if nothing is selected, for another `axis`, or if `seed` is not a whole number, or negative; if a leaf
    that changes is not finite; if `fold` does not fit: a pattern matches nothing, shapes differ, an array stands in
    several places, a norm subtracts a mean or adds a bias, only some of the weights that take the same channels are
    selected, or the outputs on `batches` change. `TypeError` if `where` selects a leaf that is not a floating point
    weight, is quantized, or belongs to a convolution. The message names the leaf.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(
            f"`seed` must be a whole number, not negative. Got {seed!r}. It is a number and no key, so that it can be "
            "part of the structure of the model."
        )
    check_axis(axis)
    selections = select_leaves(
        model, where, ineligible=unmappable_reason, skip=unmapped_reason, kind="float weights of linear layers"
    )
    leaves = [leaf for leaf, _ in selections]
    axes = {n: a for n, leaf in enumerate(leaves) if (a := mapped_axis(leaf, axis)) is not None}
    chosen = {n for n, (_, reason) in enumerate(selections) if reason is None and n in axes}
    turns = _turns(fold or {}, leaves, axes, seed)
    for turn in turns:
        _check_together(turn, selections, chosen)
    turns = [turn for turn in turns if chosen.issuperset(turn.readers)]
    alone = sorted(chosen.difference(*(turn.readers for turn in turns))) if online else []
    if not turns and chosen and not online:
        raise ValueError(
            "With `online=False`, `rotate` changes only what `fold` names. Got "
            f"{'no weight of `fold` among those that `where` selects' if fold else 'no `fold`'}."
        )
    if not turns and not alone:
        left_out = (f"{leaf.path}: {reason or 'the axis of its inputs is not known'}" for leaf, reason in selections)
        raise ValueError(
            f"`rotate` needs weights in float. Got none among the leaves ({some(left_out) or 'none'}). Rotate before "
            "you quantize."
        )
    check_changed(leaves, {*alone, *(n for turn in turns for n, _ in turn.changes)})
    before = [leaf.value for leaf in leaves]
    treedef = jtu.tree_structure(model, is_leaf=is_quantized)

    def turned(numbers: Iterable[int]) -> list[Any]:
        values = list(before)
        changes: dict[int, list[Change]] = {}
        for number in numbers:
            for n, change in turns[number].changes:
                changes.setdefault(n, []).append(change)
        for n, of_leaf in changes.items():
            values[n] = _changed(values[n], of_leaf)
        return values

    values = turned(range(len(turns)))
    remedy = "Leave it out of `fold`: each product then rotates its operand."
    check_outputs(model, turned, [turn.name for turn in turns], batches, apply, remedy)
    done, plain = {}, list(values)
    for n in alone:
        key = id(plain[n]), axes[n]
        if key not in done:
            done[key] = _rotated(plain[n], seed, axes[n])
        values[n] = done[key]
    return jtu.tree_unflatten(treedef, values)


def _check_together(turn: "_Turn", selections: Sequence[Selection], chosen: set[int]) -> None:
    """Raises if only some of what reads the same channels is selected: it changes together, or not at all."""
    left_out = sorted(turn.readers - chosen)
    if 0 < len(left_out) < len(turn.readers):
        raise ValueError(
            "`rotate` must select all weights that take the same channels, or none of them. Got the outputs of "
            f"{turn.name}, and of the weights that take them not "
            f"{some(f'{leaf.path}: {reason}' for leaf, reason in (selections[n] for n in left_out))}. Select these by "
            "`where` too, or leave the entry out of `fold`: each product then rotates its operand."
        )


def _rotated(x: Any, seed: int, axis: int) -> RotatedArray:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: RotatedArray.of(x, seed, axis), x)
    return _of(jnp.asarray(x), seed, axis)


_of = jax.jit(RotatedArray.of, static_argnums=(1, 2))


class _Turn(NamedTuple):
    """A rotation that `fold` describes: the weights that read its channels, and the changes of leaves, by number."""

    name: str
    readers: frozenset[int]
    changes: Sequence[tuple[int, Change]]


def _turns(fold: Rotations, leaves: Sequence[Leaf], axes: Mapping[int, int], seed: int) -> list[_Turn]:
    streams = {key: into for key, into in fold.items() if isinstance(into, Residual)}
    if any(not isinstance(key, str) for key in fold.keys() - streams.keys()):
        raise TypeError("`fold` must map several patterns at once to an `eqq.Residual`. Give each pair its own entry.")
    pairs: dict[Any, Any] = {key: into for key, into in fold.items() if key not in streams}
    several = lambda key: (key,) if isinstance(key, str) else tuple(key)
    found = [_of_stream(find_stream(several(k), into, leaves, axes), leaves, axes, seed) for k, into in streams.items()]
    found += [_of_pair(pair, leaves, axes, seed) for pair in find_folds(pairs, leaves, axes)]
    readers = [n for turn in found for n in turn.readers]
    if twice := {leaves[n].path for n in readers if readers.count(n) > 1}:
        raise ValueError(f"`fold` must rotate the inputs of each weight once. Got several for {some(sorted(twice))}.")
    return found


def _of_stream(stream: Stream, leaves: Sequence[Leaf], axes: Mapping[int, int], seed: int) -> _Turn:
    changes: list[tuple[int, Change]] = []
    for norm, weights in stream.norms.items():
        gain = leaves[norm].value
        gain = jnp.ones(gain.shape) if isinstance(gain, jax.ShapeDtypeStruct) else jnp.asarray(gain, jnp.float32)
        changes += [(n, ft.partial(multiplied, by=gain + stream.offset, axis=axes[n])) for n in weights]
        changes.append((norm, lambda x: jnp.full_like(x, 1 - stream.offset)))
    readers = frozenset(n for weights in stream.norms.values() for n in weights)
    channels = [*stream.writers.items(), *((n, axes[n]) for n in readers)]
    changes += [(n, _turning(axis, None, seed)) for n, axis in channels]
    return _Turn(stream.name, readers, changes)


def _of_pair(pair: Fold, leaves: Sequence[Leaf], axes: Mapping[int, int], seed: int) -> _Turn:
    size, first = pair.heads[2], leaves[pair.consumers[0]]
    outputs = [(n, output_axis(leaves[n], first, axes.get(n))) for n in pair.producers]
    if all(leaves[n].value.ndim < first.value.ndim for n in pair.producers):
        raise ValueError(
            f"A pair of `fold` must begin with a weight, whose outputs can be rotated. Got {pair.name}. Name norms in "
            "an `eqq.Residual`."
        )
    channels = [*outputs, *((n, axes[n]) for n in pair.consumers)]
    return _Turn(pair.name, frozenset(pair.consumers), [(n, _turning(axis, size, seed)) for n, axis in channels])


def _turning(axis: Any, size: int | None, seed: int) -> Change:
    """Rotates along an axis, in blocks of some size."""

    def turn(x: Array) -> Array:
        rows = jnp.moveaxis(x, axis, -1)
        blocks = rows.reshape(*rows.shape[:-1], -1, size or rows.shape[-1])
        return jnp.moveaxis(hadamard.rotate(blocks, -1, seed).reshape(rows.shape), -1, axis)

    return turn


def _changed(x: Any, changes: Sequence[Change]) -> Any:
    """Returns a leaf after all its changes, which are computed in float32 and rounded once."""

    def change(x: Array) -> Array:
        y = x.astype(jnp.float32)
        for of_leaf in changes:
            y = of_leaf(y)
        return y.astype(x.dtype)

    return jax.eval_shape(change, x) if isinstance(x, jax.ShapeDtypeStruct) else change(jnp.asarray(x))
