"""Rotates the inputs of weights: folded into the layers before, or online in each product."""

import functools as ft
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._array.checks import as_jax_array
from .._numerics import hadamard
from .._tree.batches import Apply
from .._tree.leaves import abbreviate_list, DenseArray
from .._tree.select import Selection, Where
from .._types import Model, PyTree
from .._wrappers.rotated import RotatedArray
from ._change import Change, change_model, FoldChanges, multiply_inputs, select_weights
from ._folds import find_folds, find_stream, Fold, ResidualStream, Rotations, Stream, Weights


def rotate(
    model: Model,
    *,
    fold: Rotations | None = None,
    where: Where | None = None,
    axis: int | None = None,
    seed: int = 0,
    online: bool = True,
    batches: Iterable[PyTree] | None = None,
    apply: Apply | None = None,
) -> Model:
    r"""Returns a model with the inputs of weights rotated by a randomized Hadamard transform.

    After it no input and no weight is far larger than the others. Call it before you quantize.

    Each weight $W$ becomes an array that stores $V = W R^T$ as `weight.array`, and computes $V (R x)$: the
    same model up to rounding in float32. Then quantize it as any other: formats and methods see $V$,
    [`eqquant.calibrate.collect_stats`][] sees the rotated inputs, and so do quantized activations. This makes two and
    three bits work with per-channel scales, and activations of four bits. Weights in small blocks gain little, because
    a large value affects only its own block.

    !!! Example

        ```python
        model = eqq.transforms.rotate(model)
        stats = eqq.calibrate.collect_stats(model, batches, gram=True)
        model = eqq.quantize_tree(model, "int4", method=eqq.GPTQ(stats))
        ```

    Costs $O(K \log K)$ for each $x$ of $K$ inputs. Under `jit`, weights that are multiplied by the same $x$ share it.
    [`eqquant.dequantize_tree`][] returns the dense weights $W$.

    It costs nothing where the layers before can return rotated outputs. You name these as `fold`: a residual stream,
    with its writers and readers, and pairs of layers such as the values and the output of attention. Their weights stay
    plain arrays, and all others rotate online.

    !!! Example

        ```python
        model = eqq.transforms.rotate(model, fold=eqq.transforms.llama_rotations(head_size=128), batches=batches)
        ```

    ??? cite

        [QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs](https://arxiv.org/abs/2404.00456)

    **Arguments:**

    - `model`: any pytree of floats.
    - `fold`: from patterns of producers of channels to their consumers: an [`eqquant.transforms.ResidualStream`][], or
        for a pair of layers an [`eqquant.transforms.FoldInto`][] or the pattern of a weight, as in
        [`eqquant.transforms.smooth`][]. In a pair nothing but sums over tokens may stand between the two.
        `eqq.transforms` has rotations for some families of models.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`, whose inputs are rotated. By default, every
        weight that [`eqquant.quantize_tree`][] would quantize, except embeddings and convolutions.
    - `axis`: the axis of the inputs of every weight, if it is not known: -2 for weights that are used as `x @ w`.
    - `seed`: the seed of the random signs. It is part of the structure of the result, which has no more leaves than
        `model`.
    - `online`: whether weights that `fold` does not reach rotate online. Otherwise they are left alone.
    - `batches`, `apply`: data on which to compare the result with the original model, and a function `(model, batch) ->
        outputs`, as for [`eqquant.transforms.smooth`][].

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
    selections, weights = select_weights(model, where, axis)
    chosen = {n for n, (_, reason) in enumerate(selections) if reason is None and n in weights.axes}
    rotations = _find_rotations(fold or {}, weights, seed)
    for rotation in rotations:
        _check_all_selected(rotation, selections, chosen)
    rotations = [rotation for rotation in rotations if chosen.issuperset(rotation.consumers)]
    online_weights = sorted(chosen.difference(*(rotation.consumers for rotation in rotations))) if online else []
    if not rotations and chosen and not online:
        raise ValueError(
            "With `online=False`, `rotate` changes only the weights that `fold` names. Got "
            f"{'no weight of `fold` that `where` selects' if fold else 'no `fold`'}."
        )
    if not rotations and not online_weights:
        left_out = (f"{leaf.path}: {reason or 'the axis of its inputs is not known'}" for leaf, reason in selections)
        raise ValueError(
            f"`rotate` needs weights in float. Got none among the leaves ({abbreviate_list(left_out) or 'none'}). "
            "Rotate before you quantize."
        )
    wrap = {n: ft.partial(_rotate_online, seed=seed, axis=weights.axes[n]) for n in online_weights}
    remedy = "Leave it out of `fold`: each product then rotates its operand."
    return change_model(model, weights, rotations, wrap, batches, apply, remedy)


def _check_all_selected(rotation: FoldChanges, selections: Sequence[Selection], chosen: set[int]) -> None:
    """Raises if only some of the weights that consume the same channels are selected."""
    left_out = sorted(rotation.consumers - chosen)
    if 0 < len(left_out) < len(rotation.consumers):
        reasons = abbreviate_list(f"{leaf.path}: {reason}" for leaf, reason in (selections[n] for n in left_out))
        raise ValueError(
            "`rotate` must select all weights that take the same channels, or none of them. Got the outputs of "
            f"{rotation.name}, without some of the weights that take them: {reasons}. Select these by "
            "`where` too, or leave the entry out of `fold`: each product then rotates its operand."
        )


def _rotate_online(x: DenseArray, *, seed: int, axis: int) -> RotatedArray:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: RotatedArray.of(x, seed, axis), x)
    return _jitted_rotate(as_jax_array(x), seed, axis)


_jitted_rotate = jax.jit(RotatedArray.of, static_argnums=(1, 2))


def _find_rotations(fold: Rotations, weights: Weights, seed: int) -> list[FoldChanges]:
    rotations, pairs = [], {}
    for key, into in fold.items():
        if isinstance(into, ResidualStream):
            patterns = (key,) if isinstance(key, str) else tuple(key)
            rotations.append(_rotate_stream(find_stream(patterns, into, weights), weights, seed))
        elif isinstance(key, str):
            pairs[key] = into
        else:
            raise TypeError(
                "`fold` must map several patterns at once to an `eqq.transforms.ResidualStream`. Give each pair its "
                "own entry."
            )
    rotations += [_rotate_pair(pair, weights, seed) for pair in find_folds(pairs, weights)]
    read = [n for rotation in rotations for n in rotation.consumers]
    if repeated := {weights.leaves[n].path for n in read if read.count(n) > 1}:
        raise ValueError(
            f"`fold` must rotate the inputs of each weight once. Got several for {abbreviate_list(sorted(repeated))}."
        )
    return rotations


def _rotate_stream(stream: Stream, weights: Weights, seed: int) -> FoldChanges:
    changes: list[tuple[int, Change]] = []
    for norm, after in stream.norms.items():
        gain = weights.leaves[norm].value
        is_struct = isinstance(gain, jax.ShapeDtypeStruct)
        gain = jnp.ones(gain.shape) if is_struct else as_jax_array(gain).astype(jnp.float32)
        changes += [(n, ft.partial(multiply_inputs, factor=gain + stream.offset, axis=weights.axes[n])) for n in after]
        changes.append((norm, lambda x: jnp.full_like(x, 1 - stream.offset)))
    readers = frozenset(n for after in stream.norms.values() for n in after)
    channels = [*stream.writers.items(), *((n, weights.axes[n]) for n in readers)]
    changes += [(n, ft.partial(_rotate_axis, axis=axis, size=None, seed=seed)) for n, axis in channels]
    return FoldChanges(stream.name, readers, changes)


def _rotate_pair(pair: Fold, weights: Weights, seed: int) -> FoldChanges:
    ndim = weights.leaves[pair.consumers[0]].value.ndim
    if all(weights.leaves[n].value.ndim < ndim for n in pair.producers):
        raise ValueError(
            f"A pair of `fold` must begin with a weight, whose outputs can be rotated. Got {pair.name}. Name norms in "
            "an `eqq.transforms.ResidualStream`."
        )
    channels = [*pair.producers.items(), *((n, weights.axes[n]) for n in pair.consumers)]
    changes = [(n, ft.partial(_rotate_axis, axis=axis, size=pair.heads[2], seed=seed)) for n, axis in channels]
    return FoldChanges(pair.name, frozenset(pair.consumers), changes)


def _rotate_axis(x: Array, axis: int, size: int | None, seed: int) -> Array:
    """Rotates along an axis, in blocks of some size."""
    rows = jnp.moveaxis(x, axis, -1)
    blocks = rows.reshape(*rows.shape[:-1], -1, size or rows.shape[-1])
    return jnp.moveaxis(hadamard.rotate(blocks, -1, seed).reshape(rows.shape), -1, axis)
