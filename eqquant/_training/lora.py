"""Low-rank adaptation (LoRA): small trainable factors for frozen weights, quantized or not."""

import math
from collections.abc import Callable

import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from .._array.array import is_quantized, QuantizedArray
from .._array.checks import as_method, check_finite
from .._array.quantize import requantize_like
from .._mesh import full_spec, place
from .._methods import AbstractMethod
from .._tree.leaves import identity, Leaf
from .._tree.placement import current_sharding
from .._tree.select import replace_selected, select_leaves, select_nodes, show_refusals, Where
from .._tree.weights import convolved_axes, default_skip_reason, ineligible_reason, is_embedding, part_reason
from .._types import PyTree
from .._wrappers.base import AbstractArrayAround
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
            f"({show_refusals(selections)}). `where=` selects others."
        )
    keys = {leaf.path: k for (leaf, _), k in zip(selections, jr.split(key, len(selections)), strict=True)}
    adapt = lambda leaf: _adapt(leaf, rank, alpha, keys[leaf.path])
    same = lambda leaf: (identity(leaf.value), convolved_axes(leaf))
    return replace_selected(model, selections, adapt, is_leaf, same)


def _default_skip(model: PyTree) -> Callable[[Leaf], str | None]:
    """Returns a function that says why a leaf gets no factors by default, or `None` for a leaf that does.

    By default quantized weights get factors, or every weight if none is quantized.
    """
    has_quantized = any(is_quantized(x) for x in jtu.tree_leaves(model, is_leaf=is_quantized))

    def skip(leaf: Leaf) -> str | None:
        if is_embedding(leaf):
            return "an embedding"
        if is_quantized(leaf.value):
            return None
        return "not quantized, as others are" if has_quantized else default_skip_reason(leaf)

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
    is_adapted = lambda x: isinstance(x, LoraArray)
    selections = select_nodes(model, is_adapted)
    if all(reason is not None for _, reason in selections):
        raise ValueError("`merge_lora` needs a model with factors. Got none. `loraify` makes them.")

    def merge(leaf: Leaf) -> Array | QuantizedArray:
        merged, base = leaf.value.dequantize(), leaf.value.base
        check_finite(merged, leaf.path)
        if dense or not isinstance(base, QuantizedArray):
            return merged
        new = requantize_like(base, merged, method=as_method(method).for_leaf(leaf.path))
        # Factors that add nothing leave every code as it was: formats may round their own values to others.
        changes = (leaf.value.delta() != 0).any()
        return jtu.tree_map(lambda new, old: jnp.where(changes, new, old), new, base)

    return replace_selected(model, selections, merge, is_adapted)


def _ineligible_reason(leaf: Leaf) -> str | None:
    """Returns why a leaf cannot have factors, or `None`."""
    if isinstance(leaf.value, LoraArray):
        return "it has factors already: `merge_lora` first"
    if isinstance(leaf.parent, SimulatedArray):
        return "it is simulated: `finalize` first"
    if isinstance(leaf.parent, LowPrecisionArray):
        return "its products run in low precision: call `loraify` first, and `low_precision` then"
    if (reason := part_reason(leaf, AbstractArrayAround)) is not None:
        return reason
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
    if (sharding := current_sharding(w)) is not None:
        # Each factor is sharded like its side of the weight.
        entries = full_spec(sharding, w.ndim).spec
        batch_entries, out_entry, in_entries = entries[: len(batch)], entries[len(batch)], entries[len(batch) + 1 :]
        on_mesh = lambda *entries: NamedSharding(sharding.mesh, PartitionSpec(*entries))
        a, b = place((a, b), (on_mesh(*batch_entries, None, *in_entries), on_mesh(*batch_entries, out_entry, None)))
    return LoraArray(w, a, b, float(alpha), in_ndim)
