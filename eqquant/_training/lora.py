"""Low-rank adaptation (LoRA): small trainable factors for frozen weights, quantized or not."""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax.core
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from .._array.array import is_quantized, QuantizedArray
from .._array.checks import check_finite
from .._array.quantize import requantize_like
from .._errors import suggest_keywords
from .._mesh import full_spec, place
from .._methods.names import as_method, MethodLike
from .._methods.statistics import LeafStats
from .._numerics.axes import as_axes
from .._tree.leaves import float_leaves, identity_key, Leaf
from .._tree.placement import current_sharding
from .._tree.select import (
    check_rules,
    check_selected,
    find_rule,
    Pattern,
    replace_selected,
    select_leaves,
    select_nodes,
    Selection,
    show_pattern,
    Where,
)
from .._tree.weights import convolved_axes, default_skip_reason, is_embedding, no_matrix_reason, part_reason
from .._types import Model, PyTree
from .._wrappers.base import AbstractWrapper
from .._wrappers.lora import LoraArray
from .._wrappers.low_precision import LowPrecisionArray
from .._wrappers.simulated import FakeQuantizedArray
from .compensate import find_factors


# The key type of `Mapping` is invariant, so the union needs each kind of key.
Ranks = int | Mapping[str, int | None] | Mapping[re.Pattern[str], int | None] | Mapping[Pattern, int | None]

# Warn if a merge retains less than this share of the change by the factors.
_MIN_RETAINED = 0.25

_BY_PATH = 'Write ranks by path: `rank={"*.attention.*": 8, "head": None}`.'


@suggest_keywords(
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern"), _BY_PATH
    ),
    **dict.fromkeys(("r", "lora_rank"), "It is called `rank`."),
    lora_alpha="It is called `alpha`.",
    modules_to_save="Train more than the factors with the mask: see `eqq.trainable_mask`.",
    lora_dropout="It drops nothing: put a dropout layer into the model.",
)
def loraify(
    model: Model,
    rank: Ranks = 8,
    alpha: float | int = 16,
    *,
    where: Where | None = None,
    key: PRNGKeyArray | None = None,
    init: PyTree | None = None,
    inputs: Mapping[str, LeafStats] | None = None,
) -> Model:
    r"""Returns a model with trainable low-rank factors (LoRA) beside frozen weights.

    The model keeps its class. Each weight $W$ becomes a [`eqquant.arrays.LoraArray`][], with the value $W +
    \frac{\alpha}{r} B A$. $A$ starts with uniform values of variance $1 / 3n$ for $n$ inputs, and $B$ with zeros, so
    the outputs of the model do not change at first. For a model quantized with `NF4(double_quant=True)`, this is QLoRA.
    All other leaves are frozen too, including biases and norms, unless you set them in the mask
    ([`eqquant.trainable_mask`][]).

    !!! Example

        ```python
        model = eqq.quantize_tree(model, eqq.NF4(double_quant=True))
        model = eqq.loraify(model, rank=8, key=key)
        optim = eqq.train_only(optax.adamw(1e-3), eqq.trainable_mask(model))
        state = optim.init(model)
        loss, grads = eqq.filter_value_and_grad(loss_fn)(model, x, y)  # gradients of the factors only
        updates, state = optim.update(grads, state, model)
        model = eqq.apply_updates(model, updates)
        ```

        ```python
        model = eqq.loraify(model, {"*.attention.*": 16, "head": None, "*": 8}, key=key)
        ```

    With `init`, the float model, the factors help before any training: $\frac{\alpha}{r} B A$ starts as the best
    approximation of the quantization error. With `inputs`, it minimizes the error of the outputs of each weight.

    !!! Example

        ```python
        stats = eqq.calibrate.collect_stats(float_model, batches, gram=True)
        q = eqq.quantize_tree(float_model, "int3", method=eqq.GPTQ(stats))
        q = eqq.loraify(q, rank=32, init=float_model, inputs=stats)
        ```

    ??? cite

        [QLoRA: Efficient Finetuning of Quantized LLMs](https://arxiv.org/abs/2305.14314)

        Quantization errors, weighted by inputs: [LQER](https://arxiv.org/abs/2402.02446),
        [EoRA](https://arxiv.org/abs/2410.21271)

    **Arguments:**

    - `model`: any pytree.
    - `rank`: $r$, the number of columns of $B$ and of rows of $A$. It is at most the number of inputs and of outputs of
        a weight, with the same scale $\alpha / r$. Or a mapping `{pattern: rank or None}`, where the first pattern that
        matches the path of a weight, or of a layer that holds it, wins; `None` gives a weight no factors, and so does
        no match. Patterns are as for [`eqquant.quantize_tree`][].
    - `alpha`: $\alpha$, the numerator of the scale.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`; a node selects every weight inside it. By
        default, every quantized array; or, if the model has none, every weight that [`eqquant.quantize_tree`][] would
        quantize. Skips embeddings, unless `where` selects the leaf.
    - `key`: initializes $A$. Not with `init`.
    - `init`: a model with other values of the same weights, such as the float model. The factors
        approximate the difference.
    - `inputs`: with `init`, the result of [`eqquant.calibrate.collect_stats`][]: errors are weighted by the Gram matrix
        of the inputs, or without `gram=True` by their mean squares. By default all inputs count alike.

    **Returns:**

    The model with factors, in float32 whatever the dtype of the weight. A weight that appears in several places gets
    one pair of factors.

    **Raises:**

    `ValueError` if nothing is selected, if a rank is not a whole number of at least 1, if a pattern matches nothing,
    with both or neither of `key` and `init`, with `inputs` alone, if `init` lacks a weight, or if `inputs` belong to
    another weight;
    `TypeError` if `where` selects an array that is not floating point, has fewer than two dimensions, is simulated, or
    already has factors. The message names the leaf.
    """
    is_leaf = lambda x: is_quantized(x) or isinstance(x, LoraArray)
    selections = select_leaves(
        model,
        where,
        ineligible=_ineligible_reason,
        skip=_make_default_skip(model) if where is None else lambda leaf: None,
        kind="weights of two or more dimensions",
        is_leaf=is_leaf,
    )
    selections, ranks = _choose_ranks(rank, selections)
    check_selected(selections, "weights that can have factors")
    if init is None and inputs is not None:
        raise ValueError(
            "`inputs` weight the errors of quantization, so they need `init`. Got none. Pass the float model."
        )
    if init is not None and key is None:
        if alpha == 0:
            raise ValueError("`alpha` must not be 0 with `init`. Got 0, which would take the factors away.")
        weights = float_leaves(init)
        find = lambda leaf, rank, in_ndim: find_factors(leaf, weights, inputs, rank, in_ndim, alpha / ranks[leaf.path])
    elif key is not None and init is None:
        keys = {leaf.path: k for (leaf, _), k in zip(selections, jr.split(key, len(selections)), strict=True)}
        find = lambda leaf, rank, in_ndim: _draw_factors(leaf, rank, in_ndim, keys[leaf.path])
    else:
        raise ValueError(
            "`loraify` needs either a `key`, or the float model as `init`. "
            f"Got {'neither. Pass `key=jax.random.key(0)`' if key is None else 'both. Leave one out'}."
        )
    add_factors = lambda leaf: _add_factors(leaf, ranks[leaf.path], alpha, find)
    group_key = lambda leaf: (identity_key(leaf.value), convolved_axes(leaf))
    return replace_selected(model, selections, add_factors, is_leaf, group_key)


def _choose_ranks(rank: Ranks, selections: Sequence[Selection]) -> tuple[list[Selection], dict[str, int]]:
    """Returns the selection without leaves that get no rank, and the rank of each, by path."""
    rules = rank if isinstance(rank, Mapping) else {}
    for r in rules.values() if rules else [rank]:
        if r is not None and (isinstance(r, bool) or not isinstance(r, int) or r < 1):
            raise ValueError(f"`rank` must be a whole number, at least 1. Got {r}.")
    eligible = [leaf for leaf, reason in selections if reason is None]
    rules = check_rules(rules, [leaf for leaf, _ in selections], eligible, "rank")
    chosen, ranks = [], {}
    for leaf, reason in selections:
        pattern, wanted = (None, rank) if isinstance(rank, int) else find_rule(rules, leaf)
        if reason is None and wanted is None:
            reason = "no rule matches" if pattern is None else f"rule {show_pattern(pattern)!r}"
        elif wanted is not None:
            ranks[leaf.path] = wanted
        chosen.append(Selection(leaf, reason))
    return chosen, ranks


def _make_default_skip(model: PyTree) -> Callable[[Leaf], str | None]:
    """Returns a function from a leaf to the reason why it gets no factors by default.

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


def merge_lora(model: Model, *, dense: bool = False, method: MethodLike | None = None) -> Model:
    """Returns a model with low-rank factors merged into their weights.

    The inverse of [`eqquant.loraify`][].

    !!! Example

        ```python
        model = eqq.merge_lora(model)
        ```

        ```python
        dense = eqq.merge_lora(model, dense=True)
        stats = eqq.calibrate.collect_stats(dense, batches, gram=True)
        merged = eqq.merge_lora(model, method=eqq.GPTQ(stats))  # keeps more of what short training gained
        merged = eqq.distill(merged, dense, batches)  # and nearly all of it
        ```

    A code changes only if the factors change its value by about half a step. After a short training few do, and
    rounding loses most of the change: a warning says how much of it remains.

    **Arguments:**

    - `model`: any pytree with factors.
    - `dense`: whether to return dense arrays for quantized weights. Otherwise quantizes the sum to the same format,
        which rounds again.
    - `method`: the method that chooses the codes of the sum, by default [`eqquant.AbsMax`][]. Pass the method that
        quantized the base, or one with statistics, as above. Statistics are found by the path of the weight.

    **Returns:**

    The model with a plain or quantized array in the place of each [`eqquant.arrays.LoraArray`][].

    **Raises:**

    `ValueError` if the model has no factors, if `method` lacks the statistics of a weight, or, outside `jit`, if a sum
    is not finite. Warns, outside `jit`, if rounding keeps less than a quarter of the change by the factors, unless
    `method` has statistics.
    """
    chosen_method = as_method(method)
    projections: list[tuple[float, float]] = []
    has_factors = lambda x: isinstance(x, LoraArray)
    selections = select_nodes(model, has_factors)
    if all(reason is not None for _, reason in selections):
        raise ValueError("`merge_lora` needs a model with factors. Got none. `loraify` makes them.")

    def merge(leaf: Leaf) -> Array | QuantizedArray:
        merged, base = leaf.value.dequantize(), leaf.value.base
        check_finite(merged, leaf.path)
        if dense or not isinstance(base, QuantizedArray):
            return merged
        leaf_method = chosen_method.for_leaf(leaf.path)
        leaf_method.check(leaf.path, base.shape, as_axes(base.axis))
        new = requantize_like(base, merged, method=leaf_method)
        # Zero factors leave every code unchanged: a format may not round its own values to themselves.
        changes = (leaf.value.delta() != 0).any()
        new = jtu.tree_map(lambda new, old: jnp.where(changes, new, old), new, base)
        if chosen_method.inputs is None and not isinstance(changes, jax.core.Tracer) and changes:
            projections.append(_project_merge(new.dequantize(), base.dequantize(), merged))
        return new

    result = replace_selected(model, selections, merge, has_factors)
    if projections:
        share = sum(part for part, _ in projections) / sum(whole for _, whole in projections)
        if share < _MIN_RETAINED:
            warnings.warn(
                f"Rounding keeps {max(share, 0):.0%} of the change by the factors, so the merged model is near its "
                "base. Keep the factors apart, merge with `dense=True`, or collect statistics of the dense merge, "
                "`stats = eqq.calibrate.collect_stats(eqq.merge_lora(model, dense=True), batches, gram=True)`, and "
                "call `eqq.merge_lora(model, method=eqq.GPTQ(stats))`.",
                stacklevel=2,
            )
    return result


def _project_merge(merged: Array, base: Array, exact: Array) -> tuple[float, float]:
    """Returns the dot products of the factors' change with the merged change, and with itself."""
    merged, base, exact = (x.astype(jnp.float32) for x in (merged, base, exact))
    added = exact - base
    return float(jnp.vdot(merged - base, added)), float(jnp.vdot(added, added))


def _ineligible_reason(leaf: Leaf) -> str | None:
    """Returns why a leaf cannot have factors, or `None`."""
    if isinstance(leaf.value, LoraArray):
        return "it has factors already: `merge_lora` first"
    if isinstance(leaf.parent, FakeQuantizedArray):
        return "it is simulated: `finalize` first"
    if isinstance(leaf.parent, LowPrecisionArray):
        return "its products run in low precision: call `loraify` first, and `low_precision_training` then"
    return part_reason(leaf, AbstractWrapper) or no_matrix_reason(leaf.value)


def _draw_factors(leaf: Leaf, rank: int, in_ndim: int, key: PRNGKeyArray) -> tuple[Array, Array]:
    """Returns `b` of zeros and a random `a`."""
    *batch, out = leaf.value.shape[: leaf.value.ndim - in_ndim]
    inputs = leaf.value.shape[leaf.value.ndim - in_ndim :]
    bound = 1 / math.sqrt(math.prod(inputs))
    a = jr.uniform(key, (*batch, rank, *inputs), jnp.float32, -bound, bound)
    return jnp.zeros((*batch, out, rank), jnp.float32), a


def _add_factors(
    leaf: Leaf, rank: int, alpha: float | int, find: Callable[[Leaf, int, int], tuple[Array, Array]]
) -> LoraArray:
    """Adds the factors that `find` returns for a leaf, a rank and a number of input axes."""
    w = leaf.value
    # The input axes of the layer, several for a convolution, whichever axes blocks run along.
    in_ndim = len(convolved_axes(leaf) or (-1,))
    ahead = w.ndim - in_ndim - 1
    leaf_rank = min(rank, w.shape[ahead], math.prod(w.shape[ahead + 1 :]))
    b, a = find(leaf, leaf_rank, in_ndim)
    if (sharding := current_sharding(w)) is not None:
        # Each factor is sharded like its side of the weight.
        entries = full_spec(sharding, w.ndim).spec
        on_mesh = lambda *entries: NamedSharding(sharding.mesh, PartitionSpec(*entries))
        in_sharding, out_sharding = (
            on_mesh(*entries[:ahead], None, *entries[ahead + 1 :]),
            on_mesh(*entries[: ahead + 1], None),
        )
        a, b = place((a, b), (in_sharding, out_sharding))
    return LoraArray(w, a, b, float(alpha * leaf_rank / rank), in_ndim)  # the scale stays `alpha / rank`
