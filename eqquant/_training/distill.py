"""Distillation: a short training of a quantized model to match its float model."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float
from rich.console import Console

from .._array.array import is_quantized, QuantizedArray
from .._array.codes import row_length
from .._array.straight_through import value_of
from .._formats.base import AbstractVectorFormat, decode_packed, find_levels
from .._numerics import packing
from .._numerics.axes import as_axes, logical_order
from .._numerics.blocks import dequantize_blocks
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .._tree.batches import Apply, as_apply
from .._tree.leaves import abbreviate_list, float_leaves, Leaf, named_leaves, replace_leaves
from .._tree.weights import place_reason
from .._types import Model, PyTree


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
    loss: Loss | None = None,
    train: Literal["scales", "codes"] = "scales",
    passes: int = 10,
    patience: int = 3,
    optimizer: "optax.GradientTransformation | None" = None,
    progress: bool = True,
) -> Model:
    """Returns a quantized model, trained to match the outputs of the float model.

    Trains the scales of quantized arrays, biases and the parameters of normalization layers; with `train="codes"` the
    codes too, which start at their values and may move by one level or more. Other leaves stay unchanged. The result
    has the formats, the shapes and the tree structure of `model`.

    After each pass over the data it computes the loss on the held-out batches, prints it, and keeps the best model. So
    the result is never worse than the start on these batches.

    !!! Example

        ```python
        q = eqq.quantize_sequentially(model, batches, "int2", eqq.GPTQ())
        q = eqq.distill(q, model, batches)
        ```

    ??? cite

        Codes that are trained in units of their steps, from the nearest ones:
        [Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs](https://arxiv.org/abs/2309.05516)

    **Arguments:**

    - `model`: the quantized model.
    - `float_model`: the float model, of the same structure. Its outputs are computed once and kept.
    - `batches`: a list of batches, each any pytree of arrays. Batches of the same shape share a compiled program.
    - `held_out`: batches to choose the best model by. By default every fifth of `batches`, which are not trained on.
    - `apply`: a function `(model, batch) -> outputs`. By default, `jax.vmap(model)(batch)`.
    - `loss`: a function `(outputs, wanted) -> scalar`. By default the squared error of all outputs, relative to the
        square of the outputs of the float model.
    - `train`: `"scales"` or `"codes"`.
    - `passes`: the maximal number of passes over the data (epochs).
    - `patience`: how many passes without a better model to allow before stopping.
    - `optimizer`: an optax optimizer of *relative* changes: of a scale by its size, of a bias by the mean size of its
        array, of a code by ten levels. By default Adam, whose learning rate falls from 0.003 to 0 along a cosine.
    - `progress`: whether to print the loss after each pass.

    **Returns:**

    The best model.

    **Raises:**

    `ValueError` if `model` has no quantized arrays, if `float_model` has another structure, without enough batches,
    `passes` or `patience`, or if the loss of the start is not finite.
    """
    data = _split_data(model, float_model, batches, held_out, train)
    trainer = _Trainer(apply, loss, optimizer, passes, patience, len(data.train))
    pairs = _DataSplit(*([(x, trainer.outputs(float_model, x)) for x in side] for side in data))
    console = Console(quiet=not progress, soft_wrap=True)
    return trainer.train(model, pairs, train == "codes", lambda text: console.print(f"distill: {text}"))


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
) -> Model:
    """Returns a quantized model, trained as by [`eqquant.distill`][], one block at a time.

    Each block learns to match the outputs of the same block of the float model, given the outputs of the trained blocks
    before it. Only one block is differentiated and trained at a time: that takes less memory than the whole model, and
    the loss says more about the weights of the block. Blocks of the same structure and function share a compiled
    program.

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

    **Returns:**

    The model. No block has a larger loss on the held-out batches than before, for the same inputs.

    **Raises:**

    As [`eqquant.distill`][].
    """
    data = _split_data(model, float_model, batches, held_out, train)
    inputs, wanted = data, data
    trainers: dict[Apply, _Trainer] = {}
    console = Console(quiet=not progress, soft_wrap=True)
    for n, (select, apply) in enumerate(blocks):
        if apply not in trainers:
            trainers[apply] = _Trainer(apply, loss, optimizer, passes, patience, len(data.train))
        trainer, part, float_part = trainers[apply], select(model), select(float_model)
        wanted = _DataSplit(*([trainer.outputs(float_part, x) for x in side] for side in wanted))
        if any(is_quantized(leaf.value) for leaf in named_leaves(part)):
            pairs = _DataSplit(*(list(zip(x, y, strict=True)) for x, y in zip(inputs, wanted, strict=True)))
            log = lambda text, n=n: console.print(f"distill: block {n + 1} of {len(blocks)}, {text}")
            part = trainer.train(part, pairs, train == "codes", log)
            model = eqx.tree_at(select, model, part, is_leaf=is_quantized)
        inputs = _DataSplit(*([trainer.outputs(part, x) for x in side] for side in inputs))
        if after_each is not None:
            after_each(model)
    return model


class _DataSplit(NamedTuple):
    """Batches, or pairs of inputs and wanted outputs, split into training and validation."""

    train: Sequence[PyTree]
    validation: Sequence[PyTree]


class _Trainer:
    """Compiled training steps for one function of a model, or of blocks of equal structure."""

    def __init__(
        self,
        apply: Apply | None,
        loss: Loss | None,
        optimizer: "optax.GradientTransformation | None",
        passes: int,
        patience: int,
        batches: int,
    ) -> None:
        import optax

        for name, count in (("passes", passes), ("patience", patience)):
            if not count >= 1:
                raise ValueError(f"`{name}` must be at least 1. Got {count}.")
        run, loss_fn = as_apply(apply), loss or _relative_error
        optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, passes * batches)) if optimizer is None else optimizer
        self._optimizer, self._passes, self._patience = optimizer, passes, patience
        self.outputs = eqx.filter_jit(run)

        def compute_loss(changes: PyTree, trained: Sequence[PyTree], model: PyTree, *pair: PyTree) -> Array:
            batch, wanted = pair
            values = [None if part is None else part.value(c) for part, c in zip(trained, changes, strict=True)]
            return loss_fn(run(_replace_trained(model, values), batch), wanted)

        def step(changes: PyTree, state: PyTree, *args: PyTree) -> tuple[PyTree, PyTree, Array]:
            value, grads = eqx.filter_value_and_grad(compute_loss)(changes, *args)
            with jax.numpy_dtype_promotion("standard"):  # optimizers mix dtypes
                updates, state = optimizer.update(grads, state, changes)
            return eqx.apply_updates(changes, updates), state, value

        self._loss, self._step = eqx.filter_jit(compute_loss), eqx.filter_jit(step)

    def train(self, model: PyTree, pairs: _DataSplit, codes: bool, log: Callable[[str], None]) -> PyTree:
        """Returns the best model, and logs the loss of each pass."""
        trained: list[PyTree] = [_make_trainable(leaf, codes) for leaf in named_leaves(model)]
        start: PyTree = [None if part is None else part.start() for part in trained]

        def held_out_loss(changes: PyTree) -> float:
            return float(np.mean([float(self._loss(changes, trained, model, *pair)) for pair in pairs.validation]))

        changes, state = start, self._optimizer.init(start)
        best, best_loss, passes_since_best = start, held_out_loss(start), 0
        if not np.isfinite(best_loss):
            raise ValueError(f"The loss must be finite at the start. Got {best_loss} on the held-out batches.")
        log(f"held-out loss {best_loss:.4g} at the start")
        order = np.random.default_rng(0)
        for n in range(self._passes):
            total = 0.0
            for index in order.permutation(len(pairs.train)):
                changes, state, value = self._step(changes, state, trained, model, *pairs.train[index])
                total += float(value)
            now, passes_since_best = held_out_loss(changes), passes_since_best + 1
            if now < best_loss:
                best, best_loss, passes_since_best = changes, now, 0
            log(f"pass {n + 1} of {self._passes}, loss {total / len(pairs.train):.4g}, held-out {now:.4g}")
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
    leaves, before = float_leaves(model), float_leaves(float_model)
    if not any(map(is_quantized, leaves.values())):
        raise ValueError("`model` must hold quantized arrays. Got none. Quantize it first, with `eqq.quantize_tree`.")
    ours, theirs = ({path: getattr(x, "shape", None) for path, x in tree.items()} for tree in (leaves, before))
    if ours != theirs:
        different = abbreviate_list(path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path))
        raise ValueError(f"`float_model` must have the structure of `model`. Got another at {different}.")
    return _DataSplit(data, validation)


class _TrainableFloats(eqx.Module):
    """A trainable bias, or a trainable parameter of a normalization layer."""

    x: Array

    def start(self) -> Array:
        return jnp.zeros(self.x.shape, jnp.float32)

    def value(self, change: Array) -> Array:
        size = jnp.sqrt(jnp.mean(jnp.square(self.x.astype(jnp.float32))))
        size = jnp.where(size > 0, size, 0.01)
        return (self.x.astype(jnp.float32) + change * size).astype(self.x.dtype)

    finalize = value


class _TrainableQuantized(eqx.Module):
    """A trainable quantized array: its scales, and perhaps its codes."""

    q: QuantizedArray
    trains_codes: bool = eqx.field(static=True)

    def start(self) -> dict[str, Array]:
        changes, format = {}, self.q.format
        if format.scale_format is None and format.scale_dtype in ("float32", "float16", "bfloat16"):
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


def _make_trainable(leaf: Leaf, codes: bool) -> _TrainableFloats | _TrainableQuantized | None:
    """Returns the trainable form of a leaf, or `None` for a leaf that is not trained."""
    x = leaf.value
    if is_quantized(x) and isinstance(x.format, AbstractVectorFormat) and codes:
        raise ValueError(
            f'{leaf.path}: `train` must be "scales" for {x.format!r}, whose codes stand for several values and have no '
            'neighbors. Got "codes". `eqq.quantize_tree` finds its codes, best with `method=eqq.GPTQ(stats)`.'
        )
    if is_quantized(x):
        part = _TrainableQuantized(x, codes)
        return part if part.start() else None
    if eqx.is_inexact_array(x) and place_reason(leaf) is not None:
        return _TrainableFloats(x)
    return None


def _relative_error(outputs: PyTree, wanted: PyTree) -> Float[Array, ""]:
    pairs = zip(jtu.tree_leaves(outputs), jtu.tree_leaves(wanted), strict=True)
    pairs = [(a, b) for a, b in pairs if eqx.is_inexact_array(a)]
    square = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)))
    error = sum((square(a - b) for a, b in pairs), jnp.zeros(()))
    return error / sum((square(b) for _, b in pairs), jnp.zeros(()))
