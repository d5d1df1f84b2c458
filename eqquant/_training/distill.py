"""Distillation: a short training of a quantized model to match its float model."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, DTypeLike, Float
from rich.console import Console

from .._array.array import is_quantized, QuantizedArray
from .._array.codes import row_length
from .._array.straight_through import value_of
from .._array.value import AbstractArrayValue
from .._formats.base import AbstractVectorFormat, decode_packed, find_levels
from .._numerics import packing
from .._numerics.axes import as_axes, logical_order
from .._numerics.blocks import dequantize_blocks
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .._tree.batches import Apply, as_apply
from .._tree.kept import Kept
from .._tree.leaves import abbreviate_list, float_leaves, Leaf, named_leaves, replace_leaves
from .._tree.weights import place_reason
from .._types import Model, PyTree
from .._wrappers.base import AbstractWrapper
from .._wrappers.low_precision import LowPrecisionArray
from .divergence import compare_logits, Criterion
from .mask import trainable_mask


if TYPE_CHECKING:
    import optax  # imported on first use: it takes as long to import as this package

Loss = Callable[[PyTree, PyTree], Float[Array, ""]]

# The levels that a code moves for a relative change of one.
_LEVELS_PER_UNIT = 10.0


def distill(
    model: Model,
    float_model: PyTree,
    batches: Iterable[PyTree],
    *,
    held_out: Iterable[PyTree] | None = None,
    apply: Apply | None = None,
    loss: Loss | Literal["kl"] | None = None,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    head: Apply | None = None,
    train: Literal["scales", "codes"] = "scales",
    passes: int = 10,
    patience: int = 3,
    optimizer: "optax.GradientTransformation | None" = None,
    progress: bool = True,
) -> Model:
    r"""Returns a quantized model, trained to match the outputs of the float model.

    Trains the scales of quantized arrays, biases and the parameters of normalization layers; with `train="codes"` the
    codes too, which start at their values and may move by one level or more. Of simulated weights
    (`quantize_tree(..., simulate=True)`) it trains the floats, and learned scales: [`eqquant.finalize`][] the result.
    Of a model with low-rank factors ([`eqquant.loraify`][]) it trains the factors alone. Other leaves stay unchanged.
    The result has the formats, the shapes and the tree structure of `model`.

    After each pass over the data it computes the loss on the held-out batches, prints it, and keeps the best model. So
    the result is never worse than the start on these batches.

    !!! Example

        ```python
        q = eqq.quantize_sequentially(model, batches, "int2", eqq.GPTQ())
        q = eqq.distill(q, model, batches)
        q = eqq.distill(q, model, batches, apply=compute_logits, loss="kl", top_k=64)
        ```

    **Language models.** `loss="kl"` is the Kullback-Leibler divergence of the next token, from logits `(...,
    vocabulary)`. The logits of all batches would not fit in memory, so the float model runs again in each step. With
    `top_k` it runs once, and only its `top_k` most likely tokens of each position are kept. With `head`, not even the
    logits of one batch are in memory: `apply` returns the inputs of the head, those of the float model are kept, and
    `head` computes the logits of 256 positions at a time, and again for the gradients.

    ??? cite

        Temperature: [Distilling the Knowledge in a Neural Network](https://arxiv.org/abs/1503.02531)

        Codes that are trained in units of their steps, from the nearest ones:
        [Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs](https://arxiv.org/abs/2309.05516)

    **Arguments:**

    - `model`: the quantized model; its weights may be simulated, or have low-rank factors.
    - `float_model`: the float model, of the same structure. Its outputs are computed once and kept,
        except with `loss="kl"`.
    - `batches`: a list of batches, each any pytree of arrays. Batches of the same shape share a compiled program.
    - `held_out`: batches to choose the best model by. By default every fifth of `batches`, which are not trained on.
    - `apply`: a function `(model, batch) -> outputs`. By default, `jax.vmap(model)(batch)`.
    - `loss`: a function `(outputs, wanted) -> scalar`. By default the squared error of all outputs, relative to the
        square of the outputs of the float model. Or `"kl"`, the mean of $T^2 \sum_i p_i \log (p_i / q_i)$ over all
        positions, with the probabilities $p$ of the float model and $q$ of the other.
    - `temperature`: $T$, by which `"kl"` divides the logits.
    - `top_k`: how many of the most likely tokens of the float model `"kl"` compares. The others count as one token.
    - `head`: for `"kl"`, a function `(model, x) -> logits` of inputs `(positions, features)`. Then `apply` returns the
        inputs of the head, `(..., features)`.
    - `train`: `"scales"` or `"codes"`. Floats of simulated weights and low-rank factors train in any case.
    - `passes`: the maximal number of passes over the data (epochs).
    - `patience`: how many passes without a better model to allow before stopping.
    - `optimizer`: an optax optimizer of *relative* changes: of a scale by its size, of other floats by the mean size of
        their array, of a code by ten levels. The low-rank factor that begins at zero is changed by the number itself.
        By default Adam, whose learning rate falls from 0.003 to 0 along a cosine.
    - `progress`: whether to print the loss after each pass.

    **Returns:**

    The best model.

    **Raises:**

    `ValueError` if `model` has no quantized arrays, or with `train="codes"` low-rank factors, if `float_model` has
    another structure, without enough batches, `passes` or `patience`, if the loss at the start is not finite, if
    `temperature` or `top_k` is not positive, or if these or `head` are given without `loss="kl"`.
    """
    if loss == "kl":
        criterion = compare_logits(temperature, top_k, head)
    else:
        criterion = _compare_outputs(loss)
        if (temperature, top_k, head) != (1, None, None):
            raise ValueError('`temperature`, `top_k` and `head` must come with `loss="kl"`. Got another loss.')
    data = _split_data(model, float_model, batches, held_out, train)
    trainer = _Trainer(apply, criterion, optimizer, passes, patience, len(data.train))
    find_pair = lambda x: (x, trainer.summarize(float_model, trainer.outputs(float_model, x)))
    compute = [_Pairs(len(side), lambda n, side=side: find_pair(side[n])) for side in data]
    keep = lambda pairs: _Pairs(pairs.size, list(map(pairs.read, range(pairs.size))).__getitem__)
    train_pairs, validation = map(keep, compute) if criterion.keeps else compute
    console = Console(quiet=not progress, soft_wrap=True)
    log = lambda text: console.print(f"distill: {text}")
    trained = _list_trained(model, trainable_mask(model), train)
    return trainer.train(model, float_model, train_pairs, validation, trained, log)


def distill_blocks(
    model: Model,
    float_model: PyTree,
    batches: Iterable[PyTree],
    blocks: Sequence[tuple[Callable[[PyTree], PyTree], Apply]],
    *,
    held_out: Iterable[PyTree] | None = None,
    loss: Loss | None = None,
    train: Literal["scales", "codes"] = "codes",
    passes: int = 10,
    patience: int = 3,
    optimizer: "optax.GradientTransformation | None" = None,
    after_each: Callable[[PyTree], object] | None = None,
    progress: bool = True,
    keep_dtype: DTypeLike | None = None,
    keep_in: str | Path | None = None,
) -> Model:
    """Returns a quantized model, trained as by [`eqquant.distill`][], one block at a time.

    Each block learns to match the outputs of the same block of the float model, given the outputs of the trained blocks
    before it. Only one block is differentiated and trained at a time: that takes less memory than the whole model, and
    the loss says more about the weights of the block. Each block of either model runs once over the data; those after
    the last quantized one do not run. Blocks of the same structure and function share a compiled program.

    !!! Example

        ```python
        blocks = [
            (lambda m: m.embed, lambda embed, ids: jax.vmap(jax.vmap(embed))(ids)),
            *((lambda m, n=n: m.layers[n], run_layer) for n in range(len(model.layers))),
        ]
        q = eqq.distill_blocks(q, model, batches, blocks)
        ```

    ??? cite

        [Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs](https://arxiv.org/abs/2309.05516)

    To continue after an interruption, save the models that `after_each` receives, and call this with the last of them.

    **Arguments:**

    - `model`, `float_model`, `batches`, `held_out`: as for [`eqquant.distill`][].
    - `blocks`: for each block a function that returns its part of a model, as for `equinox.tree_at`, and a function
        `(part, x) -> x`. The first function receives a batch, each other one the result of the function before it.
    - `loss`: a function `(outputs, wanted) -> scalar` for the outputs of a block. By default the squared error of all
        floats, relative to the square of the floats of the float model.
    - `train`, `passes`, `patience`, `optimizer`: as for [`eqquant.distill`][], for each block.
    - `after_each`: a function that is called with the model after each block.
    - `progress`: whether to print the loss after each pass.
    - `keep_dtype`, `keep_in`: how and where to keep the inputs and outputs of a block, as for
        [`eqquant.quantize_sequentially`][].

    **Returns:**

    The model. No block has a larger loss on the held-out batches than before, for the same inputs.

    **Raises:**

    As [`eqquant.distill`][], and for `keep_dtype` and `keep_in` as [`eqquant.quantize_sequentially`][].
    """
    data, kept = _split_data(model, float_model, batches, held_out, train), Kept(keep_dtype, keep_in)
    trainers: dict[Apply, _Trainer] = {}
    console = Console(quiet=not progress, soft_wrap=True)
    places = [(side, n) for side, batches in enumerate(data) for n in range(len(batches))]
    mask = trainable_mask(model)
    is_trained = [_is_trained(select(model), select(mask)) for select, _ in blocks]
    last = max((n for n, trained in enumerate(is_trained) if trained), default=-1)

    def load(is_float: bool, side: int, n: int) -> PyTree:
        return kept[is_float, side, n] if (is_float, side, n) in kept else data[side][n]

    for n, (select, apply) in enumerate(blocks):
        part, float_part = select(model), select(float_model)
        if apply not in trainers:
            trainers[apply] = _Trainer(apply, _compare_outputs(loss), optimizer, passes, patience, len(data.train))
        trainer = trainers[apply]
        for place in places if n <= last else ():
            kept[True, *place] = trainer.outputs(float_part, load(True, *place))
        if is_trained[n]:
            load_pair = lambda side, k: (load(False, side, k), load(True, side, k))
            pairs, validation = (_Pairs(len(data[side]), ft.partial(load_pair, side)) for side in range(2))
            log = lambda text, n=n: console.print(f"distill: block {n + 1} of {len(blocks)}, {text}")
            part = trainer.train(part, float_part, pairs, validation, _list_trained(part, select(mask), train), log)
            model = eqx.tree_at(select, model, part, is_leaf=is_quantized)
        for place in places if n < last else ():
            kept[False, *place] = trainer.outputs(part, load(False, *place))
        if after_each is not None:
            after_each(model)
    return model


class _Pairs(NamedTuple):
    """Batches, each with the outputs to match, or a summary of them.

    - `read`: returns a pair by index. It may compute or load it at each call.
    """

    size: int
    read: Callable[[int], tuple[PyTree, PyTree]]


class _DataSplit(NamedTuple):
    """Batches, split into training and validation."""

    train: Sequence[PyTree]
    validation: Sequence[PyTree]


class _Trainer:
    """Compiled training steps for one function of a model, or of blocks of equal structure."""

    def __init__(
        self,
        apply: Apply | None,
        criterion: Criterion,
        optimizer: "optax.GradientTransformation | None",
        passes: int,
        patience: int,
        batches: int,
    ) -> None:
        import optax

        for name, count in (("passes", passes), ("patience", patience)):
            if not count >= 1:
                raise ValueError(f"`{name}` must be at least 1. Got {count}.")
        run = as_apply(apply)
        optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, passes * batches)) if optimizer is None else optimizer
        self._optimizer, self._passes, self._patience = optimizer, passes, patience
        self.outputs, self.summarize = eqx.filter_jit(run), eqx.filter_jit(criterion.summarize)

        def compute_loss(
            changes: PyTree, trained: Sequence[PyTree], model: PyTree, float_model: PyTree, *pair: PyTree
        ) -> Array:
            batch, wanted = pair
            values = [None if part is None else part.value(c) for part, c in zip(trained, changes, strict=True)]
            model = _replace_trained(model, values)
            return criterion.loss(model, run(model, batch), float_model, wanted)

        def step(changes: PyTree, state: PyTree, *args: PyTree) -> tuple[PyTree, PyTree, Array]:
            value, grads = eqx.filter_value_and_grad(compute_loss)(changes, *args)
            with jax.numpy_dtype_promotion("standard"):  # optimizers mix dtypes
                updates, state = optimizer.update(grads, state, changes)
            return eqx.apply_updates(changes, updates), state, value

        self._loss, self._step = eqx.filter_jit(compute_loss), eqx.filter_jit(step)

    def train(
        self,
        model: PyTree,
        float_model: PyTree,
        pairs: _Pairs,
        held_out: _Pairs,
        trained: Sequence[PyTree],
        log: Callable[[str], None],
    ) -> PyTree:
        """Returns the best model, and logs the loss of each pass."""
        start: PyTree = [None if part is None else part.start() for part in trained]

        def compute_loss(changes: PyTree, n: int) -> float:
            return float(self._loss(changes, trained, model, float_model, *held_out.read(n)))

        def held_out_loss(changes: PyTree) -> float:
            return float(np.mean([compute_loss(changes, n) for n in range(held_out.size)]))

        changes, state = start, self._optimizer.init(start)
        best, best_loss, passes_since_best = start, held_out_loss(start), 0
        if not np.isfinite(best_loss):
            raise ValueError(f"The loss must be finite at the start. Got {best_loss} on the held-out batches.")
        log(f"held-out loss {best_loss:.4g} at the start")
        order = np.random.default_rng(0)
        for n in range(self._passes):
            total = 0.0
            for index in order.permutation(pairs.size):
                pair = pairs.read(int(index))
                changes, state, value = self._step(changes, state, trained, model, float_model, *pair)
                total += float(value)
            now, passes_since_best = held_out_loss(changes), passes_since_best + 1
            if now < best_loss:
                best, best_loss, passes_since_best = changes, now, 0
            log(f"pass {n + 1} of {self._passes}, loss {total / pairs.size:.4g}, held-out {now:.4g}")
            if passes_since_best >= self._patience:
                break
        # Without an improvement, return the model itself, bit for bit.
        if best is start:
            return model
        return _replace_trained(
            model, [None if part is None else part.finalize(c) for part, c in zip(trained, best, strict=True)]
        )


def _replace_trained(model: Model, values: Sequence[PyTree]) -> Model:
    """Returns a model with the values that are not `None` in the place of its leaves."""
    leaves = jtu.tree_leaves(model, is_leaf=is_quantized)
    return replace_leaves(model, [x if value is None else value for x, value in zip(leaves, values, strict=True)])


def _split_data(
    model: PyTree, float_model: PyTree, batches: Iterable[PyTree], held_out: Iterable[PyTree] | None, train: str
) -> _DataSplit:
    """Checks all arguments, and returns the batches to train on and to validate on."""
    if train not in ("scales", "codes"):
        raise ValueError(f'`train` must be "scales" or "codes". Got {train!r}.')
    data = list(batches)
    if held_out is None:
        held_out, data = data[::5], [batch for n, batch in enumerate(data) if n % 5]
    validation = list(held_out)
    if not data or not validation:
        raise ValueError(
            f"`batches` must hold some to train on, and others to choose by. Got {len(data)} and {len(validation)}. "
            "Pass more batches, or some as `held_out`."
        )
    leaves, before = float_leaves(model, _is_array), float_leaves(float_model, _is_array)
    if not any(map(_is_array, leaves.values())):
        raise ValueError("`model` must hold quantized arrays. Got none. Quantize it first, with `eqq.quantize_tree`.")
    if train == "codes" and any(_is_array(x) and x.frozen for x in leaves.values()):
        raise ValueError(
            '`train="codes"` needs a model without low-rank factors, beside which codes are frozen. Got some. Merge '
            "them first, with `eqq.merge_lora`, or leave `train` out."
        )
    ours, theirs = ({path: getattr(x, "shape", None) for path, x in tree.items()} for tree in (leaves, before))
    if ours != theirs:
        different = abbreviate_list(path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path))
        raise ValueError(f"`float_model` must have the structure of `model`. Got another at {different}.")
    return _DataSplit(data, validation)


def _is_array(x: object) -> bool:
    """Whether a node is a quantized array, a simulated one, or one with low-rank factors."""
    return isinstance(x, AbstractArrayValue) and not isinstance(x, AbstractWrapper)


def _is_trained(block: PyTree, mask: PyTree[bool]) -> bool:
    return any(map(_is_array, jtu.tree_leaves(block, is_leaf=_is_array))) and any(jtu.tree_leaves(mask))


class _TrainableFloats(eqx.Module):
    """Trainable floats: a bias, a parameter of a norm, or a part of another array."""

    x: Array
    size: float | None = eqx.field(static=True, default=None)

    def start(self) -> Array:
        return jnp.zeros(self.x.shape, jnp.float32)

    def value(self, change: Array) -> Array:
        size = jnp.sqrt(jnp.mean(jnp.square(self.x.astype(jnp.float32))))
        size = jnp.where(size > 0, size, 0.01) if self.size is None else self.size
        return (self.x.astype(jnp.float32) + change * size).astype(self.x.dtype)

    finalize = value


class _TrainableQuantized(eqx.Module):
    """A trainable quantized array: its scales, and perhaps its codes."""

    q: QuantizedArray
    trains_codes: bool = eqx.field(static=True)

    def start(self) -> dict[str, Array]:
        changes, format = {}, self.q.format
        plain = format.scale_format is None and not isinstance(format.block_size, tuple)
        if plain and format.scale_dtype in ("float32", "float16", "bfloat16"):
            changes["scale"] = jnp.zeros(self.q.scale.shape, jnp.float32)
        if self.trains_codes:
            changes["codes"] = jnp.zeros((*self.q.codes.shape[:-1], row_length(self.q)), jnp.float32)
        return changes

    def _scale(self, changes: dict[str, Array]) -> Array:
        """Returns the scales, rounded to the dtype in which they are stored."""
        if "scale" not in changes:
            return self.q.scale
        scale = self.q.scale * (1 + changes["scale"])
        dtype = self.q.format.scale_dtype
        return value_of(bits_to_scale(scale_to_bits(jax.lax.stop_gradient(scale), dtype), dtype), gradient_of=scale)

    def _decode_codes(self, changes: dict[str, Array]) -> tuple[Array | None, Array]:
        """Returns the codes if they change, and the values, with a straight-through gradient."""
        format, levels = self.q.format, decode_packed(self.q.format, self.q.codes, row_length(self.q))
        if "codes" not in changes:
            return None, levels
        table, used = find_levels(format)
        gap = (table[used].max() - table[used].min()) / (used.sum() - 1)
        units = levels + changes["codes"] * float(gap * _LEVELS_PER_UNIT)
        codes = format.encode(jax.lax.stop_gradient(units))
        return codes, value_of(format.decode(codes), gradient_of=units)

    def value(self, changes: dict[str, Array]) -> Array:
        q, (_, values) = self.q, self._decode_codes(changes)
        dense = dequantize_blocks(values, self._scale(changes), q.zero_point, q.offset, q.format.block_size)
        return logical_order(dense, as_axes(q.axis), q.lengths).astype(q.dtype)

    def finalize(self, changes: dict[str, Array]) -> QuantizedArray:
        codes = self._decode_codes(changes)[0]
        codes = self.q.codes if codes is None else packing.pack(codes, self.q.format.bits)
        if "scale" not in changes:
            return dataclasses.replace(self.q, codes=codes)
        bits = scale_to_bits(self._scale(changes), self.q.format.scale_dtype)
        return dataclasses.replace(self.q, codes=codes, scale_bits=bits)


def _list_trained(model: PyTree, mask: PyTree[bool], train: str) -> list[PyTree]:
    """Returns the trainable form of each leaf, `None` for one that is not trained."""
    pairs = zip(named_leaves(model), jtu.tree_leaves(mask), strict=True)
    return [_make_trainable(leaf, train == "codes") if selected else None for leaf, selected in pairs]


def _make_trainable(leaf: Leaf, codes: bool) -> _TrainableFloats | _TrainableQuantized | None:
    x = leaf.value
    if is_quantized(x) and isinstance(x.format, AbstractVectorFormat) and codes:
        raise ValueError(
            f'{leaf.path}: `train` must be "scales" for {x.format!r}, whose codes stand for several values and have no '
            'neighbors. Got "codes". `eqq.quantize_tree` finds its codes, best with `method=eqq.GPTQ(stats)`.'
        )
    if is_quantized(x):
        part = _TrainableQuantized(x, codes)
        return part if part.start() else None
    if not eqx.is_inexact_array(x) or isinstance(leaf.parent, LowPrecisionArray) or place_reason(leaf) is None:
        return None
    # The logarithm of a learned scale, and the low-rank factor that begins at zero.
    has_unit = isinstance(leaf.parent, AbstractArrayValue) and leaf.name in ("log_factor", "b")
    return _TrainableFloats(x, 1.0 if has_unit else None)


def _compare_outputs(loss: Loss | None) -> Criterion:
    if isinstance(loss, str):
        raise ValueError(f'`loss` must be a function, or None; "kl" is for `eqq.distill`. Got {loss!r}.')
    compute = loss or _relative_error
    return Criterion(lambda _, outputs, __, wanted: compute(outputs, wanted), lambda _, outputs: outputs, keeps=True)


def _relative_error(outputs: PyTree, wanted: PyTree) -> Float[Array, ""]:
    pairs = zip(jtu.tree_leaves(outputs), jtu.tree_leaves(wanted), strict=True)
    pairs = [(a, b) for a, b in pairs if eqx.is_inexact_array(a)]
    square = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)))
    error = sum((square(a - b) for a, b in pairs), jnp.zeros(()))
    return error / sum((square(b) for _, b in pairs), jnp.zeros(()))
