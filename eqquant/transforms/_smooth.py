"""Scales the input channels of weights to reduce quantization errors: SmoothQuant and AWQ."""

import abc
import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from .._array.checks import as_jax_array
from .._array.quantize import quantize_array
from .._errors import name_type
from .._formats.base import AbstractFormat
from .._formats.names import as_format
from .._methods import AbstractMethod, AbstractScaleMethod
from .._methods.fingerprint import check_same_weight
from .._methods.names import as_method
from .._methods.statistics import check_statistic, InputsError, LeafStats
from .._tree.batches import Apply
from .._tree.leaves import DenseArray
from .._tree.missing import InputsErrors, warn_of_unused
from .._tree.select import show_refusals, Where
from .._types import Model, PyTree
from .._wrappers.scaled import ScaledArray
from ._change import change_model, divide_outputs, FoldChanges, multiply_inputs, select_weights
from ._folds import find_folds, Folds, Weights


Matrices = Sequence[Float32[Array, "*stack _ inputs"]]
# Reduces the values of inputs that come from one output to one value.
Pool = Callable[[Array, Callable[..., Array]], Array]


class AbstractSmoothing(eqx.Module):
    """A choice of a factor for each input channel, for [`eqquant.transforms.smooth`][].

    Subclass it for your own choice.

    - `inputs`: statistics of the inputs of weights, by path, as [`eqquant.calibrate.collect_stats`][] returns them.
    - `statistics`: the names of the statistics that it reads, so that they are checked.
    """

    inputs: eqx.AbstractVar[Mapping[str, LeafStats]]
    statistics: eqx.AbstractClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def choose(self, weights: Matrices, stats: LeafStats, pool: Pool) -> Float32[Array, "*stack inputs"]:
        """Returns the factors of weights that share their inputs.

        Weights are multiplied by them, and the inputs are divided by them.

        **Arguments:**

        - `weights`: the weights.
        - `stats`: the statistics of their inputs.
        - `pool`: a function `(values, reduction)`. Inputs that come from one output must have one factor; it reduces
            their values to one, as in `pool(x, jnp.max)`.

        **Returns:**

        Positive factors, one for each input.
        """


class SmoothQuant(AbstractSmoothing):
    r"""Moves large values from the inputs to the weights, for quantized activations.

    Multiplies the weights of each input channel by $\max|x|^\alpha / \max|w|^{1 - \alpha}$.

    !!! Example

        ```python
        stats = eqq.calibrate.collect_stats(model, batches)
        pairs = eqq.transforms.llama_pairs(head_size=128)
        model = eqq.transforms.smooth(model, eqq.transforms.SmoothQuant(stats), fold=pairs)
        ```

    ??? cite

        [SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models](https://arxiv.org/abs/2211.10438)
    """

    inputs: Mapping[str, LeafStats]
    alpha: float = eqx.field(static=True)
    statistics = ("min", "max")

    def __init__(self, inputs: Mapping[str, LeafStats], alpha: float | int = 0.5) -> None:
        """**Arguments:**

        - `inputs`: the statistics that [`eqquant.calibrate.collect_stats`][] returned.
        - `alpha`: the migration strength: from 0, which equalizes the weights, to 1, which equalizes the inputs.

        **Raises:**

        `ValueError` for another `alpha`.
        """
        if not 0 <= alpha <= 1:
            raise ValueError(f"`alpha` must be between 0 and 1. Got {alpha}. The usual one is 0.5.")
        self.inputs, self.alpha = inputs, float(alpha)

    def choose(self, weights: Matrices, stats: LeafStats, pool: Pool) -> Float32[Array, "*stack inputs"]:
        x_amax = pool(jnp.maximum(*(jnp.abs(jnp.asarray(x, jnp.float32)) for x in (stats.min, stats.max))), jnp.max)
        w_amax = pool(ft.reduce(jnp.maximum, [jnp.max(jnp.abs(w), axis=-2) for w in weights]), jnp.max)
        usable = (x_amax > 0) & (w_amax > 0)
        x, w = jnp.where(usable, x_amax, 1), jnp.where(usable, w_amax, 1)
        return x**self.alpha / w ** (1 - self.alpha)


class AWQ(AbstractSmoothing):
    r"""Protects salient weights: the weights of input channels with large activations.

    Multiplies the weights of each input channel by $\operatorname{mean}|x|^\beta$, with the $\beta$ that minimizes the
    error of the outputs.

    The error is $\operatorname{tr}\, (W - \hat W)\, G\, (W - \hat W)^T$ with the mean $G$ of $x x^T$, so the search
    needs only statistics. It tries `grid` values from 0, which changes nothing, to 1.

    !!! Example

        ```python
        stats = eqq.calibrate.collect_stats(model, batches, gram=True)
        pairs = eqq.transforms.llama_pairs(head_size=128)
        model = eqq.transforms.smooth(model, eqq.transforms.AWQ(stats, "int4"), fold=pairs)
        model = eqq.quantize_tree(model, "int4")
        ```

    ??? cite

        [AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration](https://arxiv.org/abs/2306.00978)
    """

    inputs: Mapping[str, LeafStats]
    format: AbstractFormat
    method: AbstractScaleMethod
    grid: int = eqx.field(static=True)
    statistics = ("mean_abs", "gram")

    def __init__(
        self,
        inputs: Mapping[str, LeafStats],
        format: AbstractFormat | str = "int4",
        *,
        method: AbstractMethod | None = None,
        grid: int = 20,
    ) -> None:
        """**Arguments:**

        - `inputs`: the statistics that [`eqquant.calibrate.collect_stats`][] returned with `gram=True`.
        - `format`, `method`: how the weights will be quantized. The method must choose scales alone, without
            statistics, as [`eqquant.AbsMax`][] and [`eqquant.MSE`][] do.
        - `grid`: how many exponents to try.

        **Raises:**

        `ValueError` for a grid of less than two; `TypeError` for another method.
        """
        method = as_method(method)
        if not isinstance(method, AbstractScaleMethod) or method.inputs is not None:
            raise TypeError(
                f"`method` of AWQ must choose scales without statistics, such as `eqq.MSE()`. Got {method!r}."
            )
        if isinstance(grid, bool) or not isinstance(grid, int) or grid < 2:
            raise ValueError(f"`grid` must be a whole number, at least 2. Got {grid}.")
        self.inputs, self.format, self.method, self.grid = inputs, as_format(format), method, grid

    @property
    def exponents(self) -> np.ndarray:
        """The exponents that are tried."""
        return np.linspace(0, 1, self.grid, dtype=np.float32)

    def choose(self, weights: Matrices, stats: LeafStats, pool: Pool) -> Float32[Array, "*stack inputs"]:
        mean_abs = pool(jnp.asarray(stats.mean_abs, jnp.float32), jnp.mean)
        gram = jnp.asarray(stats.gram, jnp.float32)
        search = ft.partial(_search, jnp.asarray(self.exponents), self.format, self.method)
        for _ in range(gram.ndim - 2):
            search = jax.vmap(search)
        return search(tuple(weights), mean_abs, gram)


@jax.jit
def _search(
    exponents: Array,
    format: AbstractFormat,
    method: AbstractScaleMethod,
    weights: tuple[Array, ...],
    mean_abs: Array,
    gram: Array,
) -> Array:
    factors = jax.vmap(lambda beta: compute_awq_factors(mean_abs, beta))(exponents)

    def error(factor: Array) -> Array:
        # Sequentially, since each takes the memory of a dense weight.
        errors = [compute_scaled_error(w, factor, gram, format, method) for w in weights]
        return sum(errors, jnp.zeros((), jnp.float32))

    return factors[jnp.argmin(jax.lax.map(error, factors))]


def compute_awq_factors(mean_abs: Float[Array, " inputs"], beta: Array) -> Float[Array, " inputs"]:
    """Returns a power of the mean magnitudes, normalized to about one; one for zero inputs."""
    live = mean_abs > 0
    powers = jnp.where(live, mean_abs, 1) ** beta
    low, high = jnp.min(powers, where=live, initial=jnp.inf), jnp.max(powers, where=live, initial=0)
    middle = jnp.sqrt(low) * jnp.sqrt(high)
    # Clip, so that the weights of a channel with tiny inputs do not vanish.
    powers = jnp.clip(powers / jnp.where(live.any(), middle, 1), 1e-3, 1e3)
    return jnp.where(live, powers, 1)


def compute_scaled_error(
    w: Float[Array, "outputs inputs"], factor: Array, gram: Array, format: AbstractFormat, method: AbstractMethod
) -> Float[Array, ""]:
    """Returns the squared error of the outputs if a weight is scaled and then quantized."""
    q = quantize_array(w * factor[None], format, (-1,), jnp.float32, None, method)
    change = q.dequantize() / factor[None] - w
    return jnp.sum(jnp.matmul(change, gram, precision=jax.lax.Precision.HIGHEST) * change)


def smooth(
    model: Model,
    method: AbstractSmoothing,
    *,
    fold: Folds | None = None,
    where: Where | None = None,
    axis: int | None = None,
    online: bool = True,
    batches: Iterable[PyTree] | None = None,
    apply: Apply | None = None,
) -> Model:
    """Returns an equivalent model with weights scaled per input channel, to quantize better.

    Multiplies the weights of each input channel by a factor, and divides the inputs by it. Call it before you quantize.

    Where a norm or a linear layer produces the inputs, and nothing else takes its outputs, this divides the weights of
    that layer instead: exact, and free at run time. You name such pairs as `fold`. Everywhere else the weight becomes
    an array that multiplies its inputs by a vector: `weight.array`, with `weight.scale`, floats `(*stack, inputs)`.

    Statistics change with it: collect them again before you use a method that needs them, such as [`eqquant.GPTQ`][].

    !!! Example

        ```python
        fold = {
            "layers.{n}.norm.{p}": "layers.{n}.{x:gate|up}.weight",
            "layers.{n}.up.{p}": "layers.{n}.down.weight",
        }
        model = eqq.transforms.smooth(model, eqq.transforms.AWQ(stats, "int4"), fold=fold, batches=batches)
        ```

    **Arguments:**

    - `model`: any pytree of floats.
    - `method`: an [`eqquant.transforms.AWQ`][] or [`eqquant.transforms.SmoothQuant`][], with statistics of this model.
    - `fold`: from patterns of producers of channels, such as the weight and the bias of a norm, to patterns of the
        weights that consume them. `{n}` matches a part of a path, and the same one on both sides; `{x:q|k}` matches
        either. An [`eqquant.transforms.FoldInto`][] says more. `eqq.transforms` has the pairs of some families of
        models.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`, that get factors. By default, every weight that
        [`eqquant.quantize_tree`][] would quantize, except convolutions and embeddings.
    - `axis`: the axis of the inputs of every weight, if it is not known: -2 for weights that are used as `x @ w`.
    - `online`: whether weights without a producer in `fold` get their own vector. Otherwise they are left alone.
    - `batches`: data on which to compare the folded model with the original, as for
        [`eqquant.calibrate.collect_stats`][].
    - `apply`: a function `(model, batch) -> outputs`, as there.

    **Returns:**

    The model. Outputs are the same up to rounding.

    **Raises:**

    `ValueError` if statistics are missing, not finite or of another weight; if a leaf that changes is not finite;
    if a pair is not foldable: its shapes differ, its weights see different inputs, an array stands in several places,
    or the outputs on `batches` change; if a pattern matches nothing, or nothing is selected; for another `axis`. The
    message names the leaf, and nothing is changed.
    """
    if not isinstance(method, AbstractSmoothing):
        got = repr(method) if isinstance(method, str) else getattr(method, "__name__", name_type(method))
        raise TypeError(
            "`method` must be an `eqq.transforms.AWQ` or an `eqq.transforms.SmoothQuant`, with statistics. Got "
            f"{got}. Write `stats = eqq.calibrate.collect_stats(model, batches, gram=True)`, then "
            "`eqq.transforms.AWQ(stats)`."
        )
    selections, weights = select_weights(model, where, axis)
    leaves = enumerate(weights.leaves)
    seen = {n: stats for n, leaf in leaves if isinstance(stats := method.inputs.get(leaf.path), LeafStats)}
    if axis is None:
        # A model may have weights of both orders.
        observed = {n: stats.axis for n, stats in seen.items() if n in weights.axes and stats.axis in (-1, -2)}
        weights = weights._replace(axes={**weights.axes, **observed})
    axes = weights.axes
    # The note of each weight that no product used; "" for embeddings.
    unused = {n: "" if x.looked_up else x.note for n, x in seen.items() if x.looked_up or x.axis is None}
    chosen = {n for n, (_, reason) in enumerate(selections) if reason is None}.difference(unused)
    # All consumers of a channel must change with it, so a pair with an unselected weight is left alone.
    folds = [f for f in find_folds(fold or {}, weights) if chosen.issuperset(f.consumers)]
    online_weights = sorted(chosen.difference(*(f.consumers for f in folds))) if online else []
    if not folds and not online_weights:
        raise ValueError(
            "`smooth` needs weights to scale. Got none among the leaves "
            f"({show_refusals(selections)}). Name pairs in `fold`, or pass `online=True`."
        )
    _check_statistics(method, weights, sorted({*online_weights, *(n for f in folds for n in f.consumers)}))
    skipped = {weights.leaves[n].path: note for n, note in unused.items() if selections[n].reason is None and note}
    if online:
        warn_of_unused(skipped, [weights.leaves[n].path for n in chosen], 2, "they stay as they are")
    entries = []
    for f in folds:
        factor = _choose_factors(method, weights, f.consumers, f.pool)
        divide = ft.partial(divide_outputs, factor=f.to_outputs(factor), offset=f.offset)
        changes = [(n, ft.partial(divide, axis=axis)) for n, axis in f.producers.items()]
        changes += [(n, ft.partial(multiply_inputs, factor=factor, axis=axes[n])) for n in f.consumers]
        entries.append(FoldChanges(f.name, frozenset(f.consumers), changes))
    online_factors = {n: _choose_factors(method, weights, [n], lambda v, reduce: v) for n in online_weights}
    wrap = {n: ft.partial(_scale_online, factor=factor, axis=axes[n]) for n, factor in online_factors.items()}
    remedy = "Leave the pair out: its weights then keep a vector."
    return change_model(model, weights, entries, wrap, batches, apply, remedy)


def _scale_online(x: DenseArray, *, factor: Array, axis: int) -> ScaledArray:
    x = as_jax_array(x)
    scaled = multiply_inputs(x.astype(jnp.float32), factor, axis).astype(x.dtype)
    return ScaledArray(scaled, scale=(1 / factor).astype(x.dtype), axis=axis)


def _check_statistics(method: AbstractSmoothing, weights: Weights, indices: Sequence[int]) -> None:
    """Raises one error for all weights whose statistics are missing or of another weight."""
    name, errors = type(method).__name__, InputsErrors()
    for n in indices:
        leaf = weights.leaves[n]
        with errors.collect(leaf.path):
            if not isinstance(method.inputs.get(leaf.path), LeafStats):
                raise InputsError(
                    f"`inputs` of {name} must hold statistics of every weight that gets factors",
                    f"none for {leaf.path}",
                    "Collect them on this model, or leave these out by `where`.",
                )
            for statistic in method.statistics:
                axes = (weights.axes[n],)
                check_statistic(method.inputs[leaf.path], statistic, name, leaf.path, tuple(leaf.value.shape), axes)
            check_same_weight(method.inputs[leaf.path], f"`inputs` of {name}", leaf.path, leaf.value)
    errors.check(())


def _choose_factors(method: AbstractSmoothing, weights: Weights, consumers: Sequence[int], pool: Pool) -> Array:
    leaves = [weights.leaves[n] for n in consumers]
    stats = [method.inputs[leaf.path] for leaf in leaves]
    values = [
        jnp.swapaxes(as_jax_array(leaf.value).astype(jnp.float32), weights.axes[n], -1)
        for n, leaf in zip(consumers, leaves, strict=True)
    ]
    for leaf, other in zip(leaves, stats, strict=True):
        first, second = np.asarray(stats[0].second_moment), np.asarray(other.second_moment)
        if not np.allclose(second, first, rtol=1e-3, atol=1e-12):
            raise ValueError(
                f"The weights of a pair must be multiplied by the same inputs. Got others for {leaf.path} than "
                f"for {leaves[0].path}. Give each its own pair, or none."
            )
    factors = method.choose(values, stats[0], pool)
    has_float16 = any(as_jax_array(leaf.value).dtype == jnp.float16 for leaf in leaves)
    return jnp.clip(factors, 1e-4, 1e4) if has_float16 else factors  # so that factors and their inverses are finite
