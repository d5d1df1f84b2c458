"""Low-precision training: float weights whose products multiply codes, also backward."""

from collections.abc import Sequence

import jax.numpy as jnp

from .._formats import FP8, NVFP4
from .._formats.base import AbstractFormat, has_offsets, has_one_scale, has_zero_points
from .._formats.names import as_format
from .._mesh import move_to_mesh
from .._tree.leaves import key_name, Leaf
from .._tree.placement import current_sharding, replicated_sharding
from .._tree.select import check_selected, replace_selected, select_leaves, Selection, Where
from .._tree.weights import convolved_axes, default_skip_reason, is_embedding, no_matrix_reason, part_reason
from .._types import Model
from .._wrappers.activation import ActivationQuantizedArray
from .._wrappers.lora import LoraArray
from .._wrappers.low_precision import LowPrecisionArray
from .._wrappers.simulated import FakeQuantizedArray


# The share of layers that the recipe of NVFP4 leaves as they are.
_SHARE_OF_LAST = 0.15


def low_precision_training(
    model: Model,
    forward: AbstractFormat | str = "int8",
    gradient: AbstractFormat | str | None = None,
    *,
    where: Where | None = None,
    stochastic: bool = True,
    delayed: bool = False,
) -> Model:
    r"""Returns a model whose products run in low precision, forward and backward.

    The weights stay floats, and train as before, in any loop: the optimizer changes these floats. But each of the three
    products of a layer, $x W^\top$, $\mathrm d y\, W$ and $\mathrm d y^\top x$, rounds both operands, and multiplies
    codes with codes. Each product computes its own scales (current scaling) along the axis that it sums over; with
    `delayed`, it takes one per operand from earlier steps.

    !!! Example

        ```python
        model = eqq.low_precision_training(model)                    # int8, gradients rounded stochastically
        model = eqq.low_precision_training(model, "fp8")             # e4m3 forward, e5m2 for gradients
        model = eqq.low_precision_training(model, eqq.MXFP8())       # blocks of 32 along each sum
        model = eqq.low_precision_training(model, "fp8", delayed=True)       # scales of earlier steps
        model = eqq.low_precision_training(model, "nvfp4")           # the recipe of four bits
        grads = eqx.filter_grad(loss)(model, x, y)          # no other change to the training loop
        ...
        model = eqq.dequantize_tree(model)                  # the float model again
        ```

    ??? cite

        [FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433)

        [Deep Learning with Limited Numerical Precision](https://arxiv.org/abs/1502.02551)

        [Pretraining Large Language Models with NVFP4](https://arxiv.org/abs/2509.25149)

    **Arguments:**

    - `model`: any pytree.
    - `forward`: the format of inputs and weights, or its lower-case name. With `block_size=None` scales are per token
        and per channel; with `"tensor"` per tensor; with a number per group along the sum. [`eqquant.NVFP4`][] follows
        its [recipe](../low_precision.md#four-bits): weights in tiles, and gradients of weights by rotated operands.
    - `gradient`: the format of the gradients of outputs. By default the same as `forward`; for e4m3 it is e5m2, which
        has more range.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`; a node selects every weight inside it. By default
        every weight that [`eqquant.quantize_tree`][] would quantize, except embeddings and convolutions; and with NVFP4
        except the last 15 percent of these in the order of the tree, where a stack counts as one. A quantized weight
        is dequantized and rounded again; of a weight with low-rank factors, the base is rounded. Select the table of an
        embedding only if the model multiplies by it too: lookups stay unchanged.
    - `stochastic`: whether gradients are rounded at random, up or down, so that their mean is exact. The randomness
        comes from the bits of the gradient itself: no key is needed, and runs repeat bit for bit. `False` rounds to
        the nearest code, which takes less time.
    - `delayed`: whether scales follow from the amax of earlier steps: *delayed scaling*. Wrap the optimizer in
        [`eqquant.delayed_scaling`][], which keeps the history. Each operand has one scale, whether the block size is
        `"tensor"` or `None`; formats with blocks or zero points have no delayed scales.

    **Returns:**

    A model of the same classes, in which each weight is an array around the float array, `weight.array`, that rounds
    both operands of each product. An array that appears in several places stays shared.

    **Raises:**

    `ValueError` if nothing is selected, for an unknown format name, or for a format that has no delayed scales;
    `TypeError` if `where` selects an array that is not floating point, has fewer than two dimensions, belongs to a
    convolution, or is in a wrapper that changes its products. The message names the leaf.
    """
    forward = as_format(forward, "forward")
    if gradient is not None:
        gradient = as_format(gradient, "gradient")
    else:
        gradient = FP8("e5m2", forward.block_size) if isinstance(forward, FP8) and forward.kind == "e4m3" else forward
    selections = select_leaves(
        model, where, ineligible=_ineligible_reason, skip=_skip_reason, kind="weights of matmuls"
    )
    if where is None and isinstance(forward, NVFP4):
        selections = _leave_last(selections)
    check_selected(selections, "weights that products use")
    for format in (forward, gradient) if delayed else ():
        if not has_one_scale(format) or has_zero_points(format) or has_offsets(format):
            raise ValueError(
                f"`delayed` needs formats of one scale, without blocks, zero points or offsets. Got {format!r}. Take "
                "'fp8' or 'int8', or leave `delayed` out: each product then computes its own scales."
            )

    def wrap(leaf: Leaf) -> LowPrecisionArray:
        x = leaf.value
        # Zeros mean no amax yet: the first products use the current one.
        amax = jnp.zeros((*x.shape[:-2], 3), jnp.float32) if delayed else None
        # On the mesh of the weight, or the second step would compile again.
        amax = move_to_mesh(amax, replicated_sharding(current_sharding(x)))
        return LowPrecisionArray(x, forward, gradient, stochastic, amax)

    return replace_selected(model, selections, wrap)


def _leave_last(selections: Sequence[Selection]) -> list[Selection]:
    """Leaves the last of the selected weights as they are, as the recipe of NVFP4 does."""
    chosen = [n for n, (_, reason) in enumerate(selections) if reason is None]
    last = {*chosen[len(chosen) - round(_SHARE_OF_LAST * len(chosen)) :]}
    reason = "one of the last layers, which NVFP4 leaves as they are: see `where`"
    return [s._replace(reason=reason) if n in last else s for n, s in enumerate(selections)]


def _ineligible_reason(leaf: Leaf) -> str | None:
    if isinstance(leaf.parent, LowPrecisionArray):
        return "its products run in low precision already: `dequantize_tree` first"
    if isinstance(leaf.parent, (ActivationQuantizedArray, FakeQuantizedArray)):
        return f"{part_reason(leaf)}, whose products round already: `dequantize_tree` first"
    if (reason := no_matrix_reason(leaf.value)) is not None:
        return reason
    return None if convolved_axes(leaf) is None else "a convolution, which is computed in float"


def _skip_reason(leaf: Leaf) -> str | None:
    if isinstance(leaf.parent, LoraArray):
        is_base = key_name(leaf.keys[-1]) == "base" and leaf.parent.in_ndim == 1
        return None if is_base else part_reason(leaf)
    if is_embedding(leaf):
        return "an embedding, which is looked up"
    return default_skip_reason(leaf)
