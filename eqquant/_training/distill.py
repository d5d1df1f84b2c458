"""A short training of a quantized model against the float model that it was."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PyTree
from rich.console import Console

from .._array.array import is_quantized, QuantizedArray
from .._array.axes import logical_order
from .._array.straight_through import value_of
from .._formats.base import AbstractFormat, levels_of
from .._numerics import packing
from .._numerics.blocks import expand
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .._tree.leaves import Leaf, named_leaves, some
from .._tree.weights import default_skip_reason


if TYPE_CHECKING:
    import optax  # imported on first use: it takes as long to import as this package

# A code may move by so many steps between levels while a scale changes by all of itself.
_CODES = 10.0


def distill(
    model: PyTree,
    float_model: PyTree,
    batches: Iterable[PyTree],
    *,
    held_out: Iterable[PyTree] | None = None,
    apply: Callable[[Any, Any], Any] | None = None,
    loss: Callable[[Any, Any], Float[Array, ""]] | None = None,
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

    `ValueError` if `model` has no quantized arrays, if `float_model` has another structure, without enough batches, or
    if the loss of the start is not finite.
    """
    import optax

    if train not in ("scales", "codes"):
        raise ValueError(f'`train` must be "scales" or "codes". Got {train!r}.')
    data = list(batches)
    if held_out is None:
        held_out, data = data[::5], [batch for n, batch in enumerate(data) if n % 5]
    chosen_by = list(held_out)
    if not data or not chosen_by:
        raise ValueError(
            f"`distill` needs batches to train on and others to choose by. Got {len(data)} and {len(chosen_by)}. Pass "
            "more batches, or some as `held_out`."
        )
    leaves = list(named_leaves(model))
    if not any(is_quantized(leaf.value) for leaf in leaves):
        raise ValueError("`model` must hold quantized arrays. Got none. Quantize it first, with `eqq.quantize_tree`.")
    _check_structure(leaves, list(named_leaves(float_model)))
    run = _default_apply if apply is None else apply
    measure = _relative_error if loss is None else loss
    treedef = jtu.tree_structure(model, is_leaf=is_quantized)
    fixed: list[Any] = [_fixed(leaf, train == "codes") for leaf in leaves]
    start: Any = [None if part is None else part.start() for part in fixed]
    steps = passes * len(data)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps)) if optimizer is None else optimizer

    wanted_of = eqx.filter_jit(run)
    wanted = [wanted_of(float_model, batch) for batch in data]
    wanted_held_out = [wanted_of(float_model, batch) for batch in chosen_by]
    values = [leaf.value for leaf in leaves]

    def loss_of(changes: Any, fixed: Any, values: Any, batch: Any, wanted: Any) -> Array:
        filled = [x if c is None else part.value(c) for x, part, c in zip(values, fixed, changes, strict=True)]
        return measure(run(jtu.tree_unflatten(treedef, filled), batch), wanted)

    @eqx.filter_jit
    def step(changes: Any, state: Any, fixed: Any, values: Any, batch: Any, wanted: Any) -> tuple[Any, Any, Array]:
        value, grads = eqx.filter_value_and_grad(loss_of)(changes, fixed, values, batch, wanted)
        with jax.numpy_dtype_promotion("standard"):  # optimizers mix dtypes
            updates, state = optimizer.update(grads, state, changes)
        return eqx.apply_updates(changes, updates), state, value

    evaluate = eqx.filter_jit(loss_of)

    def held_out_loss(changes: Any) -> float:
        losses = [evaluate(changes, fixed, values, b, w) for b, w in zip(chosen_by, wanted_held_out, strict=True)]
        return float(np.mean([float(x) for x in losses]))

    changes, state = start, optimizer.init(start)
    best, least, since = start, held_out_loss(start), 0
    if not np.isfinite(least):
        raise ValueError(f"The loss must be finite at the start. Got {least} on the held-out batches.")
    console = Console(quiet=not progress)
    console.print(f"distill: held-out loss {least:.4g} at the start")
    order = np.random.default_rng(0)
    for n in range(passes):
        total = 0.0
        for index in order.permutation(len(data)):
            changes, state, value = step(changes, state, fixed, values, data[index], wanted[index])
            total += float(value)
        now, since = held_out_loss(changes), since + 1
        if now < least:
            best, least, since = changes, now, 0
        console.print(f"distill: pass {n + 1} of {passes}, loss {total / len(data):.4g}, held-out {now:.4g}")
        if since >= patience:
            break
    # What did not become better stays as it was, to the bit.
    if best is start:
        return model
    found = [x if c is None else part.final(c) for x, part, c in zip(values, fixed, best, strict=True)]
    return jtu.tree_unflatten(treedef, found)


class _Floats(eqx.Module):
    """A bias, or a parameter of a normalisation layer."""

    x: Array

    def start(self) -> Array:
        return jnp.zeros(self.x.shape, jnp.float32)

    def value(self, change: Array) -> Array:
        size = jnp.sqrt(jnp.mean(jnp.square(self.x.astype(jnp.float32))))
        size = jnp.where(size > 0, size, 0.01)
        return (self.x.astype(jnp.float32) + change * size).astype(self.x.dtype)

    final = value


class _Quantized(eqx.Module):
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
        size, length = q.format.block_size, self.codes.shape[-1]
        if q.zero_point is not None:
            values = values - expand(q.zero_point.astype(jnp.float32), size, length)
        dense = values * expand(self._scale(changes), size, length)
        if q.offset is not None:
            dense = dense + expand(q.offset, size, length)
        return logical_order(dense, q._axes, q.lengths).astype(q.dtype)

    def final(self, changes: dict[str, Array]) -> QuantizedArray:
        codes = packing.pack(self._levels(changes)[0], self.q.format.bits)
        if "scale" not in changes:
            return dataclasses.replace(self.q, codes=codes)
        bits = scale_to_bits(self._scale(changes), self.q.format.scale_dtype)
        return dataclasses.replace(self.q, codes=codes, scale_bits=bits)


def _fixed(leaf: Leaf, codes: bool) -> _Floats | _Quantized | None:
    """Returns what is fixed of a leaf that is trained, or `None` for any other leaf."""
    x = leaf.value
    if is_quantized(x):
        part = _Quantized(x, packing.unpack(x.codes, x.format.bits, x._length), codes)
        return part if part.start() else None
    if eqx.is_inexact_array(x) and default_skip_reason(leaf) is not None:
        return _Floats(x)
    return None


def _has_float_scales(format: AbstractFormat) -> bool:
    return format.scale_format is None and format.scale_dtype in ("float32", "float16", "bfloat16")


def _check_structure(leaves: Sequence[Leaf], before: Sequence[Leaf]) -> None:
    shape = lambda leaf: getattr(leaf.value, "shape", None)
    ours, theirs = ({leaf.path: shape(leaf) for leaf in of} for of in (leaves, before))
    if ours != theirs:
        different = [path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path)]
        raise ValueError(f"`float_model` must have the structure of `model`. Got another at {some(different)}.")


def _default_apply(model: Any, batch: PyTree) -> Any:
    return jax.vmap(model)(batch)


def _relative_error(outputs: PyTree, wanted: PyTree) -> Float[Array, ""]:
    pairs = [(a, b) for a, b in zip(jtu.tree_leaves(outputs), jtu.tree_leaves(wanted), strict=True) if eqx.is_array(a)]
    square = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)))
    error = sum((square(a - b) for a, b in pairs), jnp.zeros(()))
    return error / sum((square(b) for _, b in pairs), jnp.zeros(()))
