"""Collects statistics of the inputs of every weight of a model, over batches of data."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._array.value import AbstractArrayValue
from .._methods.fingerprint import fingerprint
from .._methods.statistics import LeafStats
from .._quax.quaxify import quaxify
from .._tree.batches import Apply, as_apply, as_batches
from .._tree.leaves import abbreviate_list, Leaf
from .._tree.select import check_selected, select_leaves, Where
from .._tree.weights import ineligible_reason, place_reason
from .._types import PyTree
from .._wrappers.mapped import AbstractMappedArray
from ._calibrator import AbstractCalibrator
from ._gradients import Gradients
from ._observers import ObservedFunction, Sums, WeightObserver
from ._result import CalibrationResult
from ._stats import ActivationStats


Observers: TypeAlias = Sequence[tuple[Leaf, WeightObserver]]


def collect_stats(
    model: PyTree,
    batches: Iterable[PyTree],
    *,
    apply: Apply | None = None,
    where: Where | None = None,
    threshold: float | int = 6.0,
    gram: bool = False,
    lookups: bool = False,
    gradients: bool = False,
    calibrator: AbstractCalibrator | None = None,
) -> ActivationStats:
    r"""Runs a model on data and collects statistics of the inputs of each weight.

    Runs the model unchanged, and follows each weight through the traced program to the products that it takes part in:
    `@`, `jnp.einsum`, `jax.lax.dot_general`, convolutions and `jax.lax.ragged_dot`; transposed, reshaped, divided,
    masked or scaled; under `jit`, `vmap`, `scan`, `cond` and `jax.checkpoint`. Quantized weights are decoded first. It
    does not observe an embedding lookup, which is not a product; the report says so.

    It counts everything that the model computes, including padding and, under `vmap`, both branches of a `cond`.

    !!! Example

        ```python
        stats = eqq.calibrate.collect_stats(eqx.nn.inference_mode(model), batches)
        print(stats)
        stats["layers.0.weight"].second_moment      # one per input feature
        ```

    ??? cite

        The default threshold is from
        [LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale](https://arxiv.org/abs/2208.07339).

    **Arguments:**

    - `model`: an Equinox model, or any pytree of weights.
    - `batches`: an iterable of batches, each any pytree of arrays. A single array counts as one batch.
    - `apply`: a function `(model, batch) -> outputs`, which runs under `equinox.filter_jit` and returns at least one
        array. By default, `jax.vmap(model)(batch)`.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`; only these are observed. By default, every weight
        that [`eqquant.quantize_tree`][] would quantize, and every quantized weight.
    - `threshold`: the magnitude above which a value counts as an outlier.
    - `gram`: whether to keep the Gram matrix of the inputs of each weight: `features**2` numbers of float64.
    - `lookups`: whether to measure how much the outputs depend on weights that are looked up, such as embeddings, by
        one backward pass for each batch. Then methods treat them as they treat weights with inputs.
    - `gradients`: whether inputs count by how much the outputs depend on their products, by one backward pass for each
        batch. Then methods choose codes for a small error of the outputs of the model. `second_moment` and `gram` are
        of the gradients of the rows of each weight, in random directions of the outputs; with `gram=True` there is an
        `output_gram` of the columns too. A weight of fewer gradients than features keeps the moments of its inputs.
    - `calibrator`: finds the range of all values of the inputs of each weight, for `activations=` of
        [`eqquant.quantize_tree`][]: [`eqquant.calibrate.MSERange`][]`("int8")`, for instance, with one scale. By
        default the whole range.

    **Returns:**

    A mapping from paths, which prints as a table. Methods and `activations=` take it as it is.
    `stats["layers.0.weight"]` has

    - `path`, `shape`: of the weight.
    - `axis`: the contracted axis, along which to quantize: `-1` for `w @ x`, `-2` for `x @ w`, all input axes for a
        convolution; `None` for a weight that no product used, and then the statistics are `None`.
    - `note`: remarks, or why there are no statistics.
    - `rows`: the number of observed inputs, int64 `(*stack,)`: the axes before the last two, as in a stack of layers.
    - `min`, `max`, `mean`, `mean_abs`, `second_moment`: of each input feature, float64 `(*stack, features)`. The second
        moment is the mean square. The features of a convolution are the values of the patch under the kernel, in the
        order of its axes; the groups of a grouped convolution are pooled. Zero for a layer without observed inputs.
    - `outlier_rate`: the share of values whose magnitude exceeds `threshold`, from 0 to 1.
    - `gram`: with `gram=True`, the mean of $x x^T$: float64 `(*stack, features, features)`. The Hessian of GPTQ is
        twice this matrix.
    - `output_gram`: with `gram=True` and `gradients=True`, the sum of $d d^T$ over the gradients $d$ of the columns:
        float64 `(*stack, rows, rows)`. `None` for more than 32,768 rows.
    - `calibrated`: with a `calibrator`, its result for all values of the inputs: `(*stack,)`.
    - `looked_up`: whether the weight was only indexed, as an embedding. With `lookups=True` its `second_moment` and
        `gram` are moments of the gradients of its entries, in random directions of the outputs, and `rows` counts them.
    - `fingerprint`: a few sums of the values of the weight, by which methods recognize it; `None` if it was quantized.

    Besides `leaves` (all of these in the order of the model), `batches` and `threshold` it has `.to_dict()`,
    `.to_json(indent=None)`, and `.without_fingerprints()`: the same statistics for other values of the weights. Methods
    raise for a weight that differs by 5 % or more from the observed one, as after [`eqquant.transforms.rotate`][],
    [`eqquant.transforms.smooth`][] or training.

    **Raises:**

    `ValueError` without batches, for an empty batch, if the inputs of a weight are NaN or infinite or their squares
    overflow float32 (the message names the weight and the batch), if `threshold` is not positive, if the model has no
    weights, or if no product uses them; `TypeError` if `where` selects a leaf that is not a weight, or if `batches` is
    a dictionary.
    """
    threshold = float(threshold)
    if not threshold > 0:
        raise ValueError(f"`threshold` must be positive. Got {threshold}. It is a magnitude, 6.0 unless given.")
    if calibrator is not None and (calibrator.shape or calibrator.format.block_size not in (None, "tensor")):
        raise ValueError(
            "`calibrator` must find one range for all values. Got one for "
            f"{calibrator.format!r} and shape {calibrator.shape}. Make it without a shape, for a format of one "
            'scale: `eqq.Int8("tensor")` or `eqq.FP8()`. Formats with blocks have no scales from calibration.'
        )
    make = lambda leaf: WeightObserver(leaf.path, tuple(leaf.value.shape), threshold, gram, calibrator=calibrator)
    selections = select_leaves(
        model, where, ineligible=_ineligible_reason, skip=_skip_reason, kind="weights", is_leaf=is_weight
    )
    check_selected(selections, "weights")
    observers = make_observers([leaf for leaf, reason in selections if reason is None], make)
    run = multiply_mapped(as_apply(apply), model)
    sums = Gradients(eqx.filter_jit(run), model, observers, lookups, gradients)
    data = sums.after_each(as_batches(batches))
    count = observe_batches(ObservedFunction(run, observers, is_weight), model, data, observers)
    found = [(leaf, _add_gradients(make_stats(leaf, observer), sums, gram)) for leaf, observer in observers]
    leaves = tuple(_add_fingerprint(stats, leaf) for leaf, stats in found)
    if all(leaf.axis is None for leaf in leaves):
        notes = abbreviate_list(f"{leaf.path}: {leaf.note}" for leaf in leaves)
        raise ValueError(f"A weight must be multiplied with data to be observed. Got none that was ({notes}).")
    return ActivationStats(leaves, count, threshold)


def _add_fingerprint(stats: LeafStats, leaf: Leaf) -> LeafStats:
    return stats if is_weight(leaf.value) else dataclasses.replace(stats, fingerprint=fingerprint(leaf.value))


def _add_gradients(stats: LeafStats, gradients: Gradients, gram: bool) -> LeafStats:
    """Returns statistics with moments of gradients for those of inputs, if there are enough."""
    axes = (stats.axis,) if isinstance(stats.axis, int) else stats.axis
    key = stats.path, axes, stats.rows.shape
    if key not in gradients.rows or (axes is None and not stats.looked_up):  # a later batch may have multiplied a table
        return stats
    rows, total = gradients.rows[key], gradients.gram[key]
    if rows.min() < (features := total.shape[-1]):
        # Errors in directions without a gradient would count as zero.
        few = f"{rows.min():.0f} gradients are too few for {features} features"
        return dataclasses.replace(stats, note=f"{stats.note}, and {few}" if stats.note else few)
    mean = total / np.maximum(rows, 1)[..., None, None]
    if axes is None:
        note = f"{stats.note}, but the outputs depend on it"
        stats = dataclasses.replace(stats, axis=-1, note=note, rows=np.asarray(rows, np.int64))
    return dataclasses.replace(
        stats,
        second_moment=np.diagonal(mean, axis1=-2, axis2=-1).copy(),
        gram=mean if gram else None,
        output_gram=gradients.output_gram.get(key) if gram else None,
    )


def observe_batches(observed: ObservedFunction, model: PyTree, batches: Iterable[PyTree], observers: Observers) -> int:
    """Runs the observed model on each batch, and returns the number of batches."""
    count = 0
    for batch in batches:
        check_batch(batch, count)
        out = [x for x in jtu.tree_leaves(observed(model, batch)) if eqx.is_array(x)]
        check_outputs(out)
        jax.block_until_ready(out)  # the outputs depend on every callback, so all statistics are complete now
        check_observed(observers, count)
        for sums in (sums for _, observer in observers for sums in observer.by_axes.values()):
            sums.calibrate()
        count += 1
    if count == 0:
        raise ValueError("`batches` must hold data. Got no batch. A generator can be used only once: make a new one.")
    return count


def check_batch(batch: PyTree, count: int) -> None:
    """Raises if a batch is empty."""
    shapes = [np.shape(x) for x in jtu.tree_leaves(batch)]
    if any(0 in shape for shape in shapes):
        raise ValueError(
            f"A batch must not be empty. Got shape {abbreviate_list(map(str, shapes))} in batch {count}. Leave it out."
        )


def check_outputs(outputs: Sequence[object]) -> None:
    """Raises if a function returns no array."""
    if not outputs:
        raise ValueError("`apply` must return the outputs of the model. Got no array.")


def multiply_mapped(run: Apply, model: PyTree) -> Apply:
    """Returns the function with products of the arrays inside input transforms.

    `einsum` would see a dense copy of such an array, which is a product of its own: with the matrix of a rotation.
    """
    is_mapped = lambda x: isinstance(x, AbstractMappedArray)
    return quaxify(run) if any(map(is_mapped, jtu.tree_leaves(model, is_leaf=is_mapped))) else run


def is_weight(x: object) -> TypeGuard[AbstractArrayValue]:
    """Whether a node of a model is an array of ours that is observed as one weight."""
    # Not an input transform: the array inside it gets the transformed inputs.
    return isinstance(x, AbstractArrayValue) and not isinstance(x, AbstractMappedArray)


def make_observers(chosen: Sequence[Leaf], make: Callable[[Leaf], WeightObserver]) -> list[tuple[Leaf, WeightObserver]]:
    """Returns each leaf with its observer. A shared array has one observer."""
    by_array: dict[int, WeightObserver] = {}
    for leaf in chosen:
        if id(leaf.value) not in by_array:
            by_array[id(leaf.value)] = make(leaf)
    return [(leaf, by_array[id(leaf.value)]) for leaf in chosen]


def _ineligible_reason(leaf: Leaf) -> str | None:
    reason = None if is_weight(leaf.value) else ineligible_reason(leaf.value)
    if reason is None and leaf.value.ndim < 2:
        reason = "fewer than two dimensions, so it has no inputs"
    return reason


def _skip_reason(leaf: Leaf) -> str | None:
    return None if is_weight(leaf.value) else place_reason(leaf)


def check_observed(observers: Observers, batch: int) -> None:
    """Raises if the inputs of a weight were not finite."""
    for leaf, observer in observers:
        for total in (sums.total for sums in observer.by_axes.values() if sums.total):
            means = [value[total["rows"] > 0] for name, value in total.items() if name not in ("gram", "cross")]
            if not all(np.isfinite(value).all() for value in means):
                raise ValueError(
                    f"The inputs of {leaf.path} must be finite, and so must their squares in float32. Got NaN, "
                    f"infinity or too large a value in batch {batch}, counted from 0. Find where they arise, for "
                    "instance with `jax.debug_nans`, or leave this batch out."
                )


def make_stats(leaf: Leaf, observer: WeightObserver) -> LeafStats:
    path, shape = leaf.path, tuple(leaf.value.shape)
    observed_axes = [axes for axes, sums in observer.by_axes.items() if sums.total]
    notes = [] if path == observer.path else [f"the same array as {observer.path}"]
    if not observed_axes:
        notes.append(explain_unseen(observer))
        looked_up = observer.looked_up and not observer.used
        return LeafStats(path, shape, None, "; ".join(notes), np.zeros(observer.stack, np.int64), looked_up=looked_up)
    if observer.used:
        notes.append("also used in another way than as a product, which was not seen")
    if observer.in_parts:
        notes.append("multiplied in parts: the inputs of one part count as zero in the others")
    if len(observed_axes) > 1:
        notes.append("also multiplied along its other axis, which is not counted")
    axes = observer.axes if observer.axes in observed_axes else observed_axes[0]
    total, stack = observer.by_axes[axes].total, observer.observed_stack(axes)
    rows = total["rows"]
    missed = int(np.sum(rows == 0))
    if missed:
        notes.append(f"{missed} of {rows.size} layers were not reached")
    enough = min(total["second_moment"].shape[-1], int(rows.max()))
    if few := int(np.sum((rows > 0) & (rows < enough))):
        notes.append(f"{few} of {rows.size} layers saw fewer than {enough} inputs")
    # Means over rows; zero for layers without rows.
    means = {}
    for name in total.keys() - {"rows", "cross", "outlier_rate"}:
        value = total[name]
        counts = np.maximum(rows, 1).reshape(-1, *[1] * (value.ndim - 1))
        value = np.where(rows[:, None] > 0, value, 0) if name in ("min", "max") else value / counts
        means[name] = value.reshape(*stack, *value.shape[1:])
    rate = float(np.sum(total["outlier_rate"]) / (np.sum(rows) * total["outlier_rate"].shape[-1]))
    counted, calibrated = rows.astype(np.int64).reshape(stack), _stack_results(observer.by_axes[axes], stack)
    axis = axes[0] if len(axes) == 1 else axes
    return LeafStats(path, shape, axis, "; ".join(notes), counted, outlier_rate=rate, calibrated=calibrated, **means)


def _stack_results(sums: Sums, stack: tuple[int, ...]) -> CalibrationResult | None:
    """Returns the stacked results of the calibrators; scales of unreached layers are zero."""
    if sums.calibrators is None:
        return None
    results = [None if int(c.batches) == 0 else c.result() for c in sums.calibrators]
    zeros = jtu.tree_map(jnp.zeros_like, next(result for result in results if result is not None))
    results = [zeros if result is None else result for result in results]
    return jtu.tree_map(lambda *leaves: jnp.stack(leaves).reshape(stack), *results)


def explain_unseen(observer: WeightObserver) -> str:
    if observer.used:
        return "used, but not as a product, so it has no inputs"
    if observer.looked_up:
        return "looked up, not multiplied: a lookup has no inputs"
    return "no batch reached it"
