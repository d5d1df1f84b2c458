"""Rotates the inputs of weights, online: each product transforms its operand."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array.array import is_quantized
from .._array.rotated import RotatedArray
from .leaves import is_mapped, Leaf, some
from .select import select_leaves, Where
from .weights import convolved_axes, default_skip_reason, ineligible_reason, input_axis, is_embedding


def rotate(model: PyTree, *, where: Where | None = None, axis: int | None = None, seed: int = 0) -> PyTree:
    r"""Rotates the inputs of weights by a randomised Hadamard transform, so that no input and no weight is far larger
    than the others. Call it before you quantize.

    Each weight $W$ becomes a [`eqquant.RotatedArray`][], which stores $V = W R^T$ and computes $V (R x)$: the same
    model up to rounding in float32. Then quantize it as any other: formats and methods see $V$,
    [`eqquant.calibrate.collect_stats`][] sees the rotated inputs, and so do quantized activations. That is what makes
    two and three bits work with one scale for each row, and activations of four bits. Weights in small blocks gain
    little, because a block already keeps what is large to itself.

    !!! Example

        ```python
        model = eqq.rotate(model)
        stats = eqq.calibrate.collect_stats(model, batches, gram=True)
        model = eqq.quantize_tree(model, "int4", method=eqq.GPTQ(stats))
        ```

    Costs $O(K \log K)$ for each $x$ of $K$ inputs. Under `jit`, weights that are multiplied by the same $x$ share it.
    [`eqquant.dequantize_tree`][] returns the dense weights $W$.

    ??? cite

        [QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs](https://arxiv.org/abs/2404.00456)

    **Arguments:**

    - `model`: any pytree of floats.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`. By default, every weight that
        [`eqquant.quantize_tree`][] would quantize, except embeddings and convolutions.
    - `axis`: the axis of the inputs of every weight, if it is not known: -2 for weights that are used as `x @ w`.
    - `seed`: of the random signs. It is part of the structure of the result, which has no more leaves than `model`.

    **Returns:**

    The model, with rotated weights. An array that appears in several places stays shared.

    **Raises:**

    `ValueError` if nothing is selected, for another `axis`, or if `seed` is no whole number or negative; `TypeError` if
    `where` selects a leaf that is no floating point weight, is quantized, or belongs to a convolution. The message
    names the leaf.
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
    values, done = [leaf.value for leaf, _ in selections], {}
    for n, (leaf, reason) in enumerate(selections):
        of_leaf, x = mapped_axis(leaf, axis), leaf.value
        if reason is None and of_leaf is not None:
            if (id(x), of_leaf) not in done:
                done[id(x), of_leaf] = _rotated(x, seed, of_leaf)
            values[n] = done[id(x), of_leaf]
    if not done:
        raise ValueError(
            "`rotate` needs weights in float. Got none among the leaves "
            f"({some(f'{leaf.path}: {reason}' for leaf, reason in selections) or 'none'}). Rotate before you quantize."
        )
    return jtu.tree_unflatten(jtu.tree_structure(model, is_leaf=is_quantized), values)


def _rotated(x: Any, seed: int, axis: int) -> RotatedArray:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: RotatedArray.of(x, seed, axis), x)
    return _of(jnp.asarray(x), seed, axis)


_of = jax.jit(RotatedArray.of, static_argnums=(1, 2))


def check_axis(axis: Any) -> None:
    """Raises unless `axis` may be the axis of the inputs of every weight, or `None`."""
    if axis not in (None, -1, -2):
        raise ValueError(
            f"`axis` must be -1, for weights that are used as `w @ x`, or -2, for `x @ w`. Got {axis!r}. Leave it out "
            "for the axis that each layer has."
        )


def unmappable_reason(leaf: Leaf) -> str | None:
    """Returns why the inputs of a leaf cannot be mapped, or `None`."""
    if (reason := ineligible_reason(leaf.value)) is not None:
        return reason
    if convolved_axes(leaf) is not None:
        return "a convolution, whose inputs have several axes"
    if leaf.value.ndim < 2:
        return "fewer than two dimensions, so it has no inputs"
    return None if input_axis(leaf)[0] in (-1, -2) else "its inputs are not one of its last two axes"


def mapped_axis(leaf: Leaf, axis: int | None = None) -> int | None:
    """Returns the axis of the inputs of a weight, the given one or its own; `None` if there is no such axis."""
    if ineligible_reason(leaf.value) is not None or leaf.value.ndim < 2 or convolved_axes(leaf) is not None:
        return None
    found = input_axis(leaf)[0] if axis is None else axis
    return found if found in (-1, -2) else None  # pyright: ignore[reportReturnType]


def unmapped_reason(leaf: Leaf) -> str | None:
    """Returns why the inputs of a weight are not mapped by default, or `None`."""
    if is_mapped(leaf):
        return "its inputs are mapped already"
    return "an embedding" if is_embedding(leaf) else default_skip_reason(leaf)
