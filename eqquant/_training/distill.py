"""A short training of a quantized model against the float model that it was."""

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
from .._formats.base import AbstractFormat, AbstractVectorFormat, levels_of
from .._numerics import packing
from .._numerics.axes import as_axes, logical_order
from .._numerics.blocks import dequantize_blocks
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .._tree.change import Apply
from .._tree.leaves import abbreviate_list, float_leaves, Leaf, named_leaves, replace_leaves
from .._tree.weights import place_reason
from .._types import PyTree


if TYPE_CHECKING:
    import optax  # imported on first use: it takes as long to import as this package

Loss = Callable[[PyTree, PyTree], Float[Array, ""]]

# A code may move by so many steps between levels while a scale changes by all of itself.
_CODES = 10.0


def distill(
    model: PyTree,
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
) -> PyTree:
    """Trains a quantized model to compute what the float model does, and returns the best model that it found.

    Trains the scales of quantized arrays, biases and the parameters of normalisation layers; with `train="codes"` the
    codes too, which start where they are and may move to the next level and further. Other leaves stay as they are. The
    result has the formats, the shapes and the tree structure of `model`.

    After each pass over the data it computes the loss on the held-out batches, prints it, and keeps the best model. So
    the result is never worse than the start there.

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
    - `batches`: a list of batches, each any pytree of arrays. Batches of one shape share a program.
    - `held_out`: batches to choose the best model by. By default every fifth of `batches`, which are not trained on.
    - `apply`: a function `(model, batch) -> outputs`. By default, `jax.vmap(model)(batch)`.
    - `loss`: a function `(outputs, wanted) -> scalar`. By default the squared error of all outputs, relative to the
        square of the wanted ones.
    - `train`: `"scales"` or `"codes"`.
    - `passes`: how often to go over the data at most.
    - `patience`: after how many passes without a better model to stop.
    - `optimizer`: an optax optimizer of *relative* changes: of a scale by its size, of a bias by the mean size of its
        array, of a code by ten levels. By default Adam, whose learning rate falls from 0.003 to 0 along a cosine.
    - `progress`: whether to print the loss after each pass.

    **Returns:**

    The best model.

    **Raises:**

    `ValueError` if `model` has no quantized arrays, if `float_model` has another structure, without enough batches,
    `passes` or `patience`, or if the loss of the start is not finite.
    """
    data = _split(model, float_model, batches, held_out, train)
    trainer = _Trainer(apply, loss, optimizer, passes, patience, len(data.train_on))
    pairs = _Halves(*([(x, trainer.outputs(float_model, x)) for x in half] for half in data))
    console = Console(quiet=not progress, soft_wrap=True)
    return trainer.train(model, pairs, train == "codes", lambda text: console.print(f"distill: {text}"))


def distill_blocks(
    model: PyTree,
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
) -> PyTree:
    """Trains a quantized model as [`eqquant.distill`][] does, one block after the other.

    Each block learns to return what the same block of the float model returns, given the outputs of the trained blocks
    before it. Only one block is differentiated and trained at a time: that takes less memory than the whole model, and
    the loss says more about the weights of the block. Blocks that are alike, with the same function, share a compiled
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
        `(part, x) -> x`. The first of these receives a batch, each other what the one before it returned.
    - `loss`: a function `(outputs, wanted) -> scalar` for the outputs of a block. By default the squared error of all
        floats, relative to the square of the wanted ones.
    - `train`, `passes`, `patience`, `optimizer`: as for [`eqquant.distill`][], for each block.
    - `after_each`: called after each block with the model, as far as it is trained.
    - `progress`: whether to print the loss after each pass.

    **Returns:**

    The model. No block has a larger loss on the held-out batches than before, for the same inputs.

    **Raises:**

    As [`eqquant.distill`][].
    """
    data = _split(model, float_model, batches, held_out, train)
    inputs, wanted = data, data
    trainers: dict[Apply, _Trainer] = {}
    console = Console(quiet=not progress, soft_wrap=True)
    for n, (part_of, apply) in enumerate(blocks):
        if apply not in trainers:
            trainers[apply] = _Trainer(apply, loss, optimizer, passes, patience, len(data.train_on))
        trainer, part, float_part = trainers[apply], part_of(model), part_of(float_model)
        wanted = _Halves(*([trainer.outputs(float_part, x) for x in half] for half in wanted))
        if any(is_quantized(leaf.value) for leaf in named_leaves(part)):
            pairs = _Halves(*(list(zip(x, y, strict=True)) for x, y in zip(inputs, wanted, strict=True)))
            say = lambda text, n=n: console.print(f"distill: block {n + 1} of {len(blocks)}, {text}")
            part = trainer.train(part, pairs, train == "codes", say)
            model = eqx.tree_at(part_of, model, part, is_leaf=is_quantized)
        inputs = _Halves(*([trainer.outputs(part, x) for x in half] for half in inputs))
        if after_each is not None:
            after_each(model)
    return model


class _Halves(NamedTuple):
    """Batches, or inputs with the outputs that are wanted: to train on, and to choose the best model by."""

    train_on: Sequence[PyTree]
    choose_by: Sequence[PyTree]


class _Trainer:
    """Compiled steps for one function of a model, or of parts of a model that are alike."""

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
        run, measure = apply or (lambda model, batch: jax.vmap(model)(batch)), loss or _relative_error
        optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, passes * batches)) if optimizer is None else optimizer
        self._optimizer, self._passes, self._patience = optimizer, passes, patience
        self.outputs = eqx.filter_jit(run)

        def measure_loss(changes: PyTree, trained: Sequence[PyTree], model: PyTree, *pair: PyTree) -> Array:
            batch, wanted = pair
            values = [None if part is None else part.value(c) for part, c in zip(trained, changes, strict=True)]
            return measure(run(_fill(model, values), batch), wanted)

        def step(changes: PyTree, state: PyTree, *args: PyTree) -> tuple[PyTree, PyTree, Array]:
            value, grads = eqx.filter_value_and_grad(measure_loss)(changes, *args)
            with jax.numpy_dtype_promotion("standard"):  # optimizers mix dtypes
                updates, state = optimizer.update(grads, state, changes)
            return eqx.apply_updates(changes, updates), state, value

        self._loss, self._step = eqx.filter_jit(measure_loss), eqx.filter_jit(step)

    def train(self, model: PyTree, pairs: _Halves, codes: bool, say: Callable[[str], None]) -> PyTree:
        """Returns the best model that it found, and says what it does."""
        trained: list[PyTree] = [_as_trained(leaf, codes) for leaf in named_leaves(model)]
        start: PyTree = [None if part is None else part.start() for part in trained]

        def held_out_loss(changes: PyTree) -> float:
            return float(np.mean([float(self._loss(changes, trained, model, *pair)) for pair in pairs.choose_by]))

        changes, state = start, self._optimizer.init(start)
        best, least, since = start, held_out_loss(start), 0
        if not np.isfinite(least):
            raise ValueError(f"The loss must be finite at the start. Got {least} on the held-out batches.")
        say(f"held-out loss {least:.4g} at the start")
        order = np.random.default_rng(0)
        for n in range(self._passes):
            total = 0.0
            for index in order.permutation(len(pairs.train_on)):
                changes, state, value = self._step(changes, state, trained, model, *pairs.train_on[index])
                total += float(value)
            now, since = held_out_loss(changes), since + 1
            if now < least:
                best, least, since = changes, now, 0
            say(f"pass {n + 1} of {self._passes}, loss {total / len(pairs.train_on):.4g}, held-out {now:.4g}")
            if since >= self._patience:
                break
        # What did not become better stays as it was, to the bit.
        if best is start:
            return model
        return _fill(model, [None if part is None else part.final(c) for part, c in zip(trained, best, strict=True)])


def _fill(model: PyTree, values: Sequence[PyTree]) -> PyTree:
    """Returns a model with other leaves, where there are any."""
    leaves = jtu.tree_leaves(model, is_leaf=is_quantized)
    return replace_leaves(model, [x if value is None else value for x, value in zip(leaves, values, strict=True)])


def _split(
    model: PyTree, float_model: PyTree, batches: Iterable[PyTree], held_out: Iterable[PyTree] | None, train: str
) -> _Halves:
    """Returns the batches to train on, and those to choose the best model by. Checks all arguments."""
    if train not in ("scales", "codes"):
        raise ValueError(f'`train` must be "scales" or "codes". Got {train!r}.')
    data = list(batches)
    if held_out is None:
        held_out, data = data[::5], [batch for n, batch in enumerate(data) if n % 5]
    choose_by = list(held_out)
    if not data or not choose_by:
        raise ValueError(
            f"`batches` must hold some to train on, and others to choose by. Got {len(data)} and {len(choose_by)}. "
            "Pass more batches, or some as `held_out`."
        )
    leaves, before = float_leaves(model), float_leaves(float_model)
    if not any(map(is_quantized, leaves.values())):
        raise ValueError("`model` must hold quantized arrays. Got none. Quantize it first, with `eqq.quantize_tree`.")
    ours, theirs = ({path: getattr(x, "shape", None) for path, x in tree.items()} for tree in (leaves, before))
    if ours != theirs:
        different = abbreviate_list(path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path))
        raise ValueError(f"`float_model` must have the structure of `model`. Got another at {different}.")
    return _Halves(data, choose_by)


class _TrainedFloats(eqx.Module):
    """A bias, or a parameter of a normalisation layer."""

    x: Array

    def start(self) -> Array:
        return jnp.zeros(self.x.shape, jnp.float32)

    def value(self, change: Array) -> Array:
        size = jnp.sqrt(jnp.mean(jnp.square(self.x.astype(jnp.float32))))
        size = jnp.where(size > 0, size, 0.01)
        return (self.x.astype(jnp.float32) + change * size).astype(self.x.dtype)

    final = value


class _TrainedQuantized(eqx.Module):
    """A quantized array as its codes and scales, one for each value and block."""

    q: QuantizedArray
    codes: Array
    trains_codes: bool = eqx.field(static=True)

    def start(self) -> dict[str, Array]:
        changes = {}
        if _has_float_scales(self.q.format):
            changes["scale"] = jnp.zeros(self.q.scale.shape, jnp.float32)
        if self.trains_codes:
            changes["codes"] = jnp.zeros(self.codes.shape, jnp.float32)
        return changes

    def _scale(self, changes: dict[str, Array]) -> Array:
        """Returns scales as they will be stored."""
        if "scale" not in changes:
            return self.q.scale
        scale = self.q.scale * (1 + changes["scale"])
        dtype = self.q.format.scale_dtype
        return value_of(bits_to_scale(scale_to_bits(jax.lax.stop_gradient(scale), dtype), dtype), gradient_of=scale)

    def _levels(self, changes: dict[str, Array]) -> tuple[Array, Array]:
        """Returns the codes, and their values without zero points, which have the gradient of the changes."""
        format, levels = self.q.format, self.q.format.decode(self.codes)
        if "codes" not in changes:
            return self.codes, levels
        table, reached = levels_of(format)
        gap = (table[reached].max() - table[reached].min()) / (reached.sum() - 1)
        units = levels + changes["codes"] * float(gap * _CODES)
        codes = format.encode(jax.lax.stop_gradient(units))
        return codes, value_of(format.decode(codes), gradient_of=units)

    def value(self, changes: dict[str, Array]) -> Array:
        q, (_, values) = self.q, self._levels(changes)
        dense = dequantize_blocks(values, self._scale(changes), q.zero_point, q.offset, q.format.block_size)
        return logical_order(dense, as_axes(q.axis), q.lengths).astype(q.dtype)

    def final(self, changes: dict[str, Array]) -> QuantizedArray:
        codes = packing.pack(self._levels(changes)[0], self.q.format.bits)
        if "scale" not in changes:
            return dataclasses.replace(self.q, codes=codes)
        bits = scale_to_bits(self._scale(changes), self.q.format.scale_dtype)
        return dataclasses.replace(self.q, codes=codes, scale_bits=bits)


def _as_trained(leaf: Leaf, codes: bool) -> _TrainedFloats | _TrainedQuantized | None:
    """Returns a leaf that is trained, or `None` for any other leaf."""
    x = leaf.value
    if is_quantized(x) and isinstance(x.format, AbstractVectorFormat):
        return x.format.refuse(leaf.path) if codes else None
    if is_quantized(x):
        part = _TrainedQuantized(x, packing.unpack(x.codes, x.format.bits, row_length(x)), codes)
        return part if part.start() else None
    if eqx.is_inexact_array(x) and place_reason(leaf) is not None:
        return _TrainedFloats(x)
    return None


def _has_float_scales(format: AbstractFormat) -> bool:
    return format.scale_format is None and format.scale_dtype in ("float32", "float16", "bfloat16")


def _relative_error(outputs: PyTree, wanted: PyTree) -> Float[Array, ""]:
    pairs = zip(jtu.tree_leaves(outputs), jtu.tree_leaves(wanted), strict=True)
    pairs = [(a, b) for a, b in pairs if eqx.is_inexact_array(a)]
    square = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)))
    error = sum((square(a - b) for a, b in pairs), jnp.zeros(()))
    return error / sum((square(b) for _, b in pairs), jnp.zeros(()))
