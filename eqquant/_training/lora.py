"""Low-rank adaptation (LoRA): small trainable factors for frozen weights, quantized or not."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from .._array.array import is_quantized, QuantizedArray
from .._array.checks import as_method, check_finite
from .._array.quantize import requantize_like
from .._array.value import AbstractArrayValue
from .._errors import a_type
from .._mesh import full_spec, place
from .._methods import AbstractMethod
from .._tree.leaves import identity, is_mapped, Leaf, named_leaves, some
from .._tree.select import select_leaves, Where
from .._tree.weights import convolved_axes, default_skip_reason, ineligible_reason, is_embedding
from .._types import PyTree
from .._wrappers.base import AbstractWrappedArray
from .._wrappers.lora import LoraArray
from .._wrappers.low_precision import LowPrecisionArray
from .._wrappers.simulated import SimulatedArray


def loraify(
    model: PyTree,
    rank: int = 8,
    alpha: float | int = 16,
    *,
    where: Where | None = None,
    key: PRNGKeyArray,
) -> PyTree:
    r"""Adds trainable low-rank factors to the weights of a model, and freezes the weights. The model keeps its class.

    Each weight $W$ becomes a [`eqquant.LoraArray`][], with the value $W + \frac{\alpha}{r} B A$. $A$ starts with
    uniform values of variance $1 / 3n$ for $n$ inputs, and $B$ with zeros, so the outputs of the model do not change at
    first. For a model quantized with `NF4(double_quant=True)`, this is QLoRA. All other leaves are frozen too,
    including biases and norms, unless you set them in the mask ([`eqquant.trainable_mask`][]).

    !!! Example

        ```python
        model = eqq.quantize_tree(model, eqq.NF4(double_quant=True))
        model = eqq.loraify(model, rank=8, key=key)
        optim = optax.masked(optax.adamw(1e-3), eqq.trainable_mask(model))
        state = optim.init(model)
        loss, grads = eqq.filter_value_and_grad(loss_fn)(model, x, y)  # gradients of the factors only
        updates, state = optim.update(grads, state, model)
        model = eqq.apply_updates(model, updates)
        ```

    ??? cite

        [QLoRA: Efficient Finetuning of Quantized LLMs](https://arxiv.org/abs/2305.14314)

    **Arguments:**

    - `model`: any pytree.
    - `rank`: $r$, the number of columns of $B$ and of rows of $A$.
    - `alpha`: $\alpha$, the numerator of the scale.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`; a node selects every weight inside it. By
        default, every quantized array; or, if the model has none, every weight that [`eqquant.quantize_tree`][] would
        quantize. Skips embeddings, unless `where` selects the leaf.
    - `key`: initialises $A$.

    **Returns:**

    The model with factors, in float32 whatever the dtype of the weight. A weight that appears in several places gets
    one pair of factors.

    **Raises:**

    `ValueError` if nothing is selected, or if `rank` is not a whole number from 1 to the number of a weight's inputs or
    outputs, whichever is smaller; `TypeError` if `where` selects an array that is not floating point, has fewer than
    two dimensions, is simulated, or already has factors. The message names the leaf.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"`rank` must be a whole number, at least 1. Got {rank}.")
    is_leaf = lambda x: is_quantized(x) or isinstance(x, LoraArray)
    selections = select_leaves(
        model,
        where,
        ineligible=_ineligible_reason,
        skip=_default_skip(model) if where is None else lambda leaf: None,
        kind="weights of two or more dimensions",
        is_leaf=is_leaf,
    )
    if all(reason is not None for _, reason in selections):
        raise ValueError(
            "The model must hold weights that can have factors. Got none among its leaves "
            f"({some(f'{leaf.path}: {reason}' for leaf, reason in selections) or 'none'}). `where=` selects others."
        )
    keys = jr.split(key, len(selections))
    done: dict[Any, LoraArray] = {}  # an array that appears twice is adapted once
    values = [leaf.value for leaf, _ in selections]
    for n, (leaf, reason) in enumerate(selections):
        if reason is None:
            same = (identity(leaf.value), convolved_axes(leaf))
            if same not in done:
                done[same] = _adapt(leaf, rank, alpha, keys[n])
            values[n] = done[same]
    return jtu.tree_unflatten(jtu.tree_structure(model, is_leaf=is_leaf), values)


def _default_skip(model: PyTree) -> Callable[[Leaf], str | None]:
    """Returns a function that says why a leaf gets no factors by default, or `None` for a leaf that does.

    By default quantized weights get factors, or every weight if none is quantized.
    """
    some_quantized = any(is_quantized(x) for x in jtu.tree_leaves(model, is_leaf=is_quantized))

    def skip(leaf: Leaf) -> str | None:
        if is_embedding(leaf):
            return "an embedding"
        if is_quantized(leaf.value):
            return None
        return "not quantized, as others are" if some_quantized else default_skip_reason(leaf)

    return skip


def merge_lora(model: PyTree, *, dense: bool = False, method: AbstractMethod | None = None) -> PyTree:
    """Merges low-rank factors into their weights. The inverse of [`eqquant.loraify`][].

    !!! Example

        ```python
        model = eqq.merge_lora(model)
        ```

    **Arguments:**

    - `model`: any pytree with factors.
    - `dense`: whether to return dense arrays for quantized weights. Otherwise quantizes the sum to the same format,
        which rounds again.
    - `method`: how the codes of the sum are found: [`eqquant.AbsMax`][] unless given. Pass the one that the base was
        quantized with.

    **Returns:**

    The model with a plain or quantized array in the place of each [`eqquant.LoraArray`][].

    **Raises:**

    `ValueError` if the model has no factors, or, outside `jit`, if a sum is not finite.
    """
    is_leaf = lambda x: isinstance(x, LoraArray)
    leaves = list(named_leaves(model, is_leaf))
    if not any(is_leaf(leaf.value) for leaf in leaves):
        raise ValueError("`merge_lora` needs a model with factors. Got none. `loraify` makes them.")
    values = [leaf.value for leaf in leaves]
    done: dict[Any, Any] = {}  # an array that appears twice is merged once
    for n, leaf in enumerate(leaves):
        if is_leaf(leaf.value):
            same = identity(leaf.value)
            if same not in done:
                done[same] = _merge(leaf.path, leaf.value, dense, as_method(method).for_leaf(leaf.path))
            values[n] = done[same]
    return jtu.tree_unflatten(jtu.tree_structure(model, is_leaf=is_leaf), values)


def _merge(path: str, x: LoraArray, dense: bool, method: AbstractMethod) -> Array | QuantizedArray:
    merged, base = x.dequantize(), x.base
    check_finite(merged, path)
    if dense or not isinstance(base, QuantizedArray):
        return merged
    return requantize_like(base, merged, method=method)


def _ineligible_reason(leaf: Leaf) -> str | None:
    """Returns why a leaf cannot have factors, or `None`."""
    if isinstance(leaf.value, LoraArray):
        return "it has factors already: `merge_lora` first"
    if isinstance(leaf.parent, SimulatedArray):
        return "it is simulated: `finalize` first"
    if isinstance(leaf.parent, LowPrecisionArray):
        return "its products run in low precision: call `loraify` first, and `low_precision` then"
    whole = is_mapped(leaf) or isinstance(leaf.parent, AbstractWrappedArray)
    if isinstance(leaf.parent, AbstractArrayValue) and not whole:
        return f"part of {a_type(leaf.parent)}"
    if not is_quantized(leaf.value) and (reason := ineligible_reason(leaf.value)) is not None:
        return reason
    return "it has one dimension" if leaf.value.ndim < 2 else None


def _adapt(leaf: Leaf, rank: int, alpha: float | int, key: PRNGKeyArray) -> LoraArray:
    w = leaf.value
    # The input axes are those of the layer, one or for a convolution several, whichever axes blocks run along.
    in_ndim = len(convolved_axes(leaf) or (-1,))
    *batch, out = w.shape[: w.ndim - in_ndim]
    inputs = w.shape[w.ndim - in_ndim :]
    if rank > min(out, math.prod(inputs)):
        raise ValueError(
            f"`rank` must be at most the inputs and outputs of a weight. Got {rank} for {leaf.path}, which has "
            f"{math.prod(inputs)} inputs and {out} outputs. Lower it, or leave this weight out with `where=`."
        )
    bound = 1 / math.sqrt(math.prod(inputs))
    a = jr.uniform(key, (*batch, rank, *inputs), jnp.float32, -bound, bound)
    b = jnp.zeros((*batch, out, rank), jnp.float32)
    sharding = None if isinstance(w, jax.core.Tracer) else getattr(w, "sharding", None)
    if isinstance(sharding, NamedSharding):
        # Each factor is sharded like its side of the weight.
        entries = full_spec(sharding, w.ndim).spec
        of_batch, of_out, of_inputs = entries[: len(batch)], entries[len(batch)], entries[len(batch) + 1 :]
        on_mesh = lambda *entries: NamedSharding(sharding.mesh, PartitionSpec(*entries))
        a, b = place((a, b), (on_mesh(*of_batch, None, *of_inputs), on_mesh(*of_batch, of_out, None)))
    return LoraArray(w, a, b, float(alpha), in_ndim)
