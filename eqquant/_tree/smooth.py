"""Scales the inputs of weights by one number each, so that quantizing them, or their inputs, costs less."""

import abc
import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Float32

from .._array.array import is_quantized
from .._array.checks import as_method
from .._array.quantize import quantize_array
from .._formats.base import AbstractFormat, as_format
from .._methods import AbstractMethod, AbstractScaleMethod
from .._methods.inputs import check_statistic
from .._types import PyTree
from .._wrappers.scaled import ScaledArray
from .folds import check_changed, check_outputs, divided, find_folds, Fold, Folds, multiplied
from .leaves import Leaf, some
from .select import select_leaves, Where
from .weights import check_axis, mapped_axis, unmappable_reason, unmapped_reason


class AbstractSmoothing(eqx.Module):
    """Chooses a factor for each input channel, for [`eqquant.smooth`][]. Subclass it for a choice of your own.

    - `inputs`: statistics of the inputs of weights, by path, as [`eqquant.calibrate.collect_stats`][] returns them.
    - `statistics`: the names of those that it reads, so that they are checked.
    """

    inputs: eqx.AbstractVar[Mapping[str, Any]]
    statistics: eqx.AbstractClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def choose(
        self,
        weights: Sequence[Float32[Array, "*stack _ inputs"]],
        stats: Any,
        pool: Callable[[Array, Callable[..., Array]], Array],
    ) -> Float32[Array, "*stack inputs"]:
        """Returns by what to multiply weights that share their inputs; the inputs are divided by it.

        **Arguments:**

        - `weights`: the weights.
        - `stats`: the statistics of their inputs.
        - `pool`: a function `(values, reduction)`. Inputs that come from one output must have one factor; it reduces
            their values to one, as in `pool(x, jnp.max)`.

        **Returns:**

        Positive factors, one for each input.
        """


class SmoothQuant(AbstractSmoothing):
    r"""Moves large values from the inputs to the weights: multiplies weights by
    $\max|x|^\alpha / \max|w|^{1 - \alpha}$ of each input. For quantized activations.

    !!! Example

        ```python
        stats = eqq.calibrate.collect_stats(model, batches)
        model = eqq.smooth(model, eqq.SmoothQuant(stats), fold=eqq.io.names.llama_pairs(head_size=128))
        ```

    ??? cite

        [SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models](https://arxiv.org/abs/2211.10438)
    """

    inputs: Mapping[str, Any]
    alpha: float = eqx.field(static=True)
    statistics = ("min", "max")

    def __init__(self, inputs: Mapping[str, Any], alpha: float | int = 0.5) -> None:
        """**Arguments:**

        - `inputs`: what [`eqquant.calibrate.collect_stats`][] returned.
        - `alpha`: how much moves: from 0, which makes weights alike, to 1, which makes inputs alike.

        **Raises:**

        `ValueError` for another `alpha`.
        """
        if not 0 <= alpha <= 1:
            raise ValueError(f"`alpha` must be between 0 and 1. Got {alpha}. The usual one is 0.5.")
        self.inputs, self.alpha = inputs, float(alpha)

    def choose(
        self,
        weights: Sequence[Float32[Array, "*stack _ inputs"]],
        stats: Any,
        pool: Callable[[Array, Callable[..., Array]], Array],
    ) -> Float32[Array, "*stack inputs"]:
        largest = pool(jnp.asarray(np.maximum(np.abs(stats.min), np.abs(stats.max)), jnp.float32), jnp.max)
        of_weights = pool(ft.reduce(jnp.maximum, [jnp.max(jnp.abs(w), axis=-2) for w in weights]), jnp.max)
        usable = (largest > 0) & (of_weights > 0)
        x, w = jnp.where(usable, largest, 1), jnp.where(usable, of_weights, 1)
        return x**self.alpha / w ** (1 - self.alpha)


class AWQ(AbstractSmoothing):
    r"""Protects the weights that meet large inputs: multiplies weights by $\operatorname{mean}|x|^\beta$ of each input,
    with the $\beta$ for which quantizing changes the outputs least.

    The error is $\operatorname{tr}\, (W - \hat W)\, G\, (W - \hat W)^T$ with the mean $G$ of $x x^T$, so the search
    needs no data besides statistics. It tries `grid` values from 0, which changes nothing, to 1.

    !!! Example

        ```python
        stats = eqq.calibrate.collect_stats(model, batches, gram=True)
        model = eqq.smooth(model, eqq.AWQ(stats, "int4"), fold=eqq.io.names.llama_pairs(head_size=128))
        model = eqq.quantize_tree(model, "int4")
        ```

    ??? cite

        [AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration](https://arxiv.org/abs/2306.00978)
    """

    inputs: Mapping[str, Any]
    format: AbstractFormat
    method: AbstractScaleMethod
    grid: int = eqx.field(static=True)
    statistics = ("mean_abs", "gram")

    def __init__(
        self,
        inputs: Mapping[str, Any],
        format: AbstractFormat | str = "int4",
        *,
        method: AbstractMethod | None = None,
        grid: int = 20,
    ) -> None:
        """**Arguments:**

        - `inputs`: what [`eqquant.calibrate.collect_stats`][] returned with `gram=True`.
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

    def choose(
        self,
        weights: Sequence[Float32[Array, "*stack _ inputs"]],
        stats: Any,
        pool: Callable[[Array, Callable[..., Array]], Array],
    ) -> Float32[Array, "*stack inputs"]:
        mean_abs = pool(jnp.asarray(stats.mean_abs, jnp.float32), jnp.mean)
        gram = jnp.asarray(stats.gram, jnp.float32)
        search = ft.partial(_search, jnp.asarray(self.exponents), self.format, self.method)
        for _ in range(gram.ndim - 2):
            search = jax.vmap(search)
        return search(tuple(weights), mean_abs, gram)


@jax.jit
def _search(
    exponents: Array, format: AbstractFormat, method: AbstractScaleMethod, weights: Any, mean_abs: Array, gram: Array
) -> Array:
    factors = jax.vmap(lambda beta: awq_factors(mean_abs, beta))(exponents)

    def error(factor: Array) -> Array:
        # One at a time: each takes the memory of a dense weight.
        of = lambda w: scaled_error(w, factor, gram, format, method)
        return sum((of(w) for w in weights), jnp.zeros((), jnp.float32))

    return factors[jnp.argmin(jax.lax.map(error, factors))]


def awq_factors(mean_abs: Float[Array, " inputs"], beta: Any) -> Float[Array, " inputs"]:
    """Returns a power of the mean magnitudes, about one; one where there was no input."""
    live = mean_abs > 0
    powers = jnp.where(live, mean_abs, 1) ** beta
    low, high = jnp.min(powers, where=live, initial=jnp.inf), jnp.max(powers, where=live, initial=0)
    middle = jnp.sqrt(low) * jnp.sqrt(high)
    # A channel a thousand times smaller than others would only make its weights too small to count.
    powers = jnp.clip(powers / jnp.where(live.any(), middle, 1), 1e-3, 1e3)
    return jnp.where(live, powers, 1)


def scaled_error(
    w: Float[Array, "outputs inputs"], factor: Array, gram: Array, format: AbstractFormat, method: AbstractMethod
) -> Float[Array, ""]:
    """Returns the error of the outputs of a weight that is quantized after its inputs' weights are multiplied."""
    q = quantize_array(w * factor[None], format, (-1,), jnp.float32, None, method)
    change = q.dequantize() / factor[None] - w
    return jnp.sum(jnp.matmul(change, gram, precision=jax.lax.Precision.HIGHEST) * change)


def smooth(
    model: PyTree,
    method: AbstractSmoothing,
    *,
    fold: Folds | None = None,
    where: Where | None = None,
    axis: int | None = None,
    online: bool = True,
    batches: Iterable[PyTree] | None = None,
    apply: Callable[[Any, Any], Any] | None = None,
) -> PyTree:
    """Multiplies weights by a factor for each of their inputs, and divides the inputs by it: the same model, which
    loses less when it is quantized. Call it before you quantize.

    Where a norm or a linear layer makes the inputs, and nothing else takes its outputs, this divides the weights of
    that layer instead: exact, and free at run time. You name such pairs as `fold`. Everywhere else the weight becomes a
    [`eqquant.ScaledArray`][], which multiplies its inputs by a vector.

    The result has other statistics: collect them again before you use a method that needs them, such as
    [`eqquant.GPTQ`][].

    !!! Example

        ```python
        fold = {
            "layers.{n}.norm.{p}": "layers.{n}.{x:gate|up}.weight",
            "layers.{n}.up.{p}": "layers.{n}.down.weight",
        }
        model = eqq.smooth(model, eqq.AWQ(stats, "int4"), fold=fold, batches=batches)
        ```

    **Arguments:**

    - `model`: any pytree of floats.
    - `method`: an [`eqquant.AWQ`][] or [`eqquant.SmoothQuant`][], with statistics of this model.
    - `fold`: from patterns of what makes channels, such as the weight and the bias of a norm, to patterns of the
        weights that take them. `{n}` matches a part of a path, and the same one on both sides; `{x:q|k}` matches
        either. An [`eqquant.Into`][] says more. `eqq.io.names` has the pairs of some families of models.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`, that get factors. By default, every weight that
        [`eqquant.quantize_tree`][] would quantize, except convolutions and what is only looked up.
    - `axis`: the axis of the inputs of every weight, if it is not known: -2 for weights that are used as `x @ w`.
    - `online`: whether weights without a producer in `fold` get a vector of their own. Otherwise they stay as they are.
    - `batches`: data on which to compare the folded model with the one before, as for
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
        raise TypeError(f"`method` must be an `eqq.AWQ` or an `eqq.SmoothQuant`, with statistics. Got {method!r}.")
    check_axis(axis)
    selections = select_leaves(
        model, where, ineligible=unmappable_reason, skip=unmapped_reason, kind="float weights of linear layers"
    )
    leaves = [leaf for leaf, _ in selections]
    axes = {n: a for n, x in enumerate(leaves) if (a := mapped_axis(x, axis)) is not None}
    folds = find_folds(fold or {}, leaves, axes)
    looked_up = lambda n: getattr(method.inputs.get(leaves[n].path), "looked_up", False)
    chosen = {n for n, (_, reason) in enumerate(selections) if reason is None and not looked_up(n)}
    # A pair with a weight that is not selected stays as it is: all that take a channel must change with it.
    folds = [f for f in folds if chosen.issuperset(f.consumers)]
    folded = {n for f in folds for n in f.consumers}
    alone = sorted(chosen - folded) if online else []
    if not folds and not alone:
        raise ValueError(
            "`smooth` needs weights to scale. Got none among the leaves "
            f"({some(f'{leaf.path}: {reason}' for leaf, reason in selections) or 'none'}). Name pairs in "
            "`fold`, or pass `online=True`."
        )
    check_changed(leaves, {*alone, *(n for f in folds for n in (*f.producers, *f.consumers))})
    factors = [_factors(method, leaves, axes, f.consumers, f.pooled) for f in folds]
    own = {n: _factors(method, leaves, axes, [n], lambda v, pool: v) for n in alone}
    treedef = jtu.tree_structure(model, is_leaf=is_quantized)
    before = [leaf.value for leaf in leaves]

    def with_folds(numbers: Iterable[int]) -> list[Any]:
        values = list(before)
        for number in numbers:
            _fold(values, axes, folds[number], factors[number])
        return values

    values = with_folds(range(len(folds)))
    remedy = "Leave the pair out: its weights then keep a vector."
    check_outputs(model, with_folds, [f.name for f in folds], batches, apply, remedy)
    done: dict[int, ScaledArray] = {}  # an array that appears twice is scaled once
    folded_values = list(values)
    for n, by in own.items():
        x = folded_values[n]  # a producer was changed already
        if id(x) not in done:
            scaled = multiplied(jnp.asarray(x), by, axes[n])
            done[id(x)] = ScaledArray(scaled, scale=(1 / by).astype(x.dtype), axis=axes[n])
        values[n] = done[id(x)]
    return jtu.tree_unflatten(treedef, values)


def _factors(
    method: AbstractSmoothing,
    leaves: Sequence[Leaf],
    axes: Mapping[int, int],
    consumers: Sequence[int],
    pool: Callable[..., Array],
) -> Array:
    name, weights, stats = type(method).__name__, [], []
    for n in consumers:
        leaf, axis = leaves[n], axes[n]
        if leaf.path not in method.inputs:
            raise ValueError(
                f"`inputs` of {name} must hold statistics of every weight that gets factors. Got none for {leaf.path}. "
                "Collect them on this model, or leave this weight out by `where`."
            )
        of_leaf = method.inputs[leaf.path]
        for statistic in method.statistics:
            check_statistic(of_leaf, statistic, name, leaf.path, tuple(leaf.value.shape), (axis,))
        weights.append(jnp.swapaxes(jnp.asarray(leaf.value, jnp.float32), axis, -1))
        stats.append(of_leaf)
    for n, other in zip(consumers[1:], stats[1:], strict=True):
        if not np.allclose(other.second_moment, stats[0].second_moment, rtol=1e-3, atol=1e-12):
            raise ValueError(
                f"The weights of a pair must be multiplied by the same inputs. Got others for {leaves[n].path} than "
                f"for {leaves[consumers[0]].path}. Give each its own pair, or none."
            )
    found = method.choose(weights, stats[0], pool)
    if all(jnp.asarray(leaves[n].value).dtype != jnp.float16 for n in consumers):
        return found
    return jnp.clip(found, 1e-4, 1e4)  # so that a factor and its inverse both have a value


def _fold(values: list[Any], axes: Mapping[int, int], fold: Fold, by: Array) -> None:
    """Changes the values of the leaves of a pair. A leaf may be changed by several: as producer, and as consumer."""
    for n in fold.producers:
        values[n] = divided(jnp.asarray(values[n]), fold.of_outputs(by), axes.get(n), fold.offset)
    for n in fold.consumers:
        values[n] = multiplied(jnp.asarray(values[n]), by, axes[n])
