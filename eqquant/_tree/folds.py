"""Pairs of layers between which a factor for each channel can move: what makes the channels, and what takes them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._array.mapped import beside
from .leaves import Leaf, some
from .patterns import compile_pattern
from .rotate import unmappable_reason


class Into(NamedTuple):
    """Where the outputs of a layer go, for the `fold` of [`eqquant.smooth`][].

    !!! Example

        ```python
        fold = {
            "layers.{n}.mlp_norm.{p}": "layers.{n}.mlp.{x:gate|up}.weight",     # text is `Into((text,))`
            "layers.{n}.attention.v.{p}": eqq.Into(("layers.{n}.attention.output.weight",), head_size=64),
        }
        ```

    **Arguments:**

    - `weights`: patterns of the weights that take the outputs.
    - `head_size`: the channels of one head, where each head of the producer feeds several heads of the consumer, as in
        attention with grouped queries.
    - `offset`: what the layer adds to its weight before it multiplies by it: 1 for the norms of Gemma.
    """

    weights: tuple[str, ...]
    head_size: int | None = None
    offset: float | int = 0


Folds = Mapping[str, str | Into]


class Fold(NamedTuple):
    """Arrays that make channels, by their numbers among the leaves, and weights that take them.

    - `heads`: `(heads of the producer, heads of the consumer for each, channels of a head)`.
    """

    name: str
    producers: Sequence[int]
    consumers: Sequence[int]
    heads: tuple[int, int, int]
    offset: float | int

    def pooled(self, v: Any, pool: Callable[..., Any]) -> Any:
        """Makes numbers of the consumers' inputs equal where these are one output of the producer."""
        kv, times, size = self.heads
        by_heads = v.reshape(*v.shape[:-1], kv, times, size)
        return jnp.broadcast_to(pool(by_heads, axis=-2, keepdims=True), by_heads.shape).reshape(v.shape)

    def of_outputs(self, v: Array) -> Array:
        """Returns the numbers of the producer's outputs, of those of the consumers' inputs."""
        kv, times, size = self.heads
        return v.reshape(*v.shape[:-1], kv, times, size)[..., 0, :].reshape(*v.shape[:-1], kv * size)


def find_folds(folds: Folds, leaves: Sequence[Leaf], axes: Mapping[int, int]) -> list[Fold]:
    """Returns the pairs that rules describe. Raises if one is not foldable, by its shapes.

    `axes` are those of the inputs of all leaves that are weights, by their numbers.
    """
    found = [fold for key, into in folds.items() for fold in _of_rule(key, into, leaves, axes)]
    consumed: dict[int, str] = {}
    for fold in found:
        for n in fold.consumers:
            if n in consumed:
                raise ValueError(
                    f"`fold` must give each weight one producer. Got {consumed[n]} and {fold.name} for "
                    f"{leaves[n].path}."
                )
            consumed[n] = fold.name
        for n in (*fold.producers, *fold.consumers):
            other = [leaf.path for m, leaf in enumerate(leaves) if leaf.value is leaves[n].value and m != n]
            if other:
                raise ValueError(
                    f"`fold` must change arrays that stand in one place. Got {leaves[n].path}, which is the same array "
                    f"as {some(other)}. Leave this pair out, or copy the array."
                )
    return found


def _of_rule(key: str, into: str | Into, leaves: Sequence[Leaf], axes: Mapping[int, int]) -> Iterator[Fold]:
    if isinstance(into, str):
        into = Into((into,))
    if not isinstance(key, str) or not isinstance(into, Into):
        raise TypeError(
            "`fold` must map the path of what makes channels to the paths of weights that take them, such as "
            f"{{'layers.{{n}}.norm.{{p}}': 'layers.{{n}}.up.weight'}}. Got {key!r}: {into!r}."
        )
    producing, taking = _matching(key, leaves), [m for text in into.weights for m in _matching(text, leaves)]
    for text, matched in ((key, producing), *((text, _matching(text, leaves)) for text in into.weights)):
        if not matched:
            raise ValueError(
                f"Each pattern of `fold` must match a leaf. Got {text!r}, which matches none of: "
                f"{some(leaf.path for leaf in leaves)}."
            )
    shared = sorted(producing[0][1].keys() & taking[0][1].keys())
    of = lambda groups: tuple(groups[name] for name in shared)
    for values in dict.fromkeys(of(groups) for _, groups in producing):
        producers = [n for n, groups in producing if of(groups) == values]
        consumers = [n for n, groups in taking if of(groups) == values]
        name = some(leaves[n].path for n in producers)
        if not consumers:
            raise ValueError(f"`fold` must name the weights that take the outputs of {name}. Got none in {into}.")
        yield Fold(name, producers, consumers, _heads(name, producers, consumers, into, leaves, axes), into.offset)


def _matching(text: str, leaves: Sequence[Leaf]) -> list[tuple[int, dict[str, str]]]:
    pattern = compile_pattern(text, "fold")
    matched = [(n, pattern.fullmatch(leaf.path)) for n, leaf in enumerate(leaves) if np.ndim(leaf.value)]
    return [(n, match.groupdict()) for n, match in matched if match is not None]


def _heads(
    name: str,
    producers: Sequence[int],
    consumers: Sequence[int],
    into: Into,
    leaves: Sequence[Leaf],
    axes: Mapping[int, int],
) -> tuple[int, int, int]:
    for n in consumers:
        if n not in axes:
            raise ValueError(
                "`fold` needs weights whose inputs can be scaled. Got "
                f"{leaves[n].path}: {unmappable_reason(leaves[n])}."
            )
    inputs = {leaves[n].path: leaves[n].value.shape[axes[n]] for n in consumers}
    first = leaves[consumers[0]]
    outputs = {}
    for n in producers:
        if (axis := output_axis(leaves[n], first, axes.get(n))) is None:
            raise ValueError(f"`fold` needs vectors and matrices. Got {leaves[n].path} of {leaves[n].value.shape}.")
        outputs[leaves[n].path] = leaves[n].value.shape[axis]
    size_in, size_out = next(iter(inputs.values())), next(iter(outputs.values()))
    if len({*inputs.values()}) > 1 or len({*outputs.values()}) > 1 or size_in % size_out:
        raise ValueError(
            f"The outputs of {name} must be the inputs of its weights. Got {outputs} outputs and {inputs} inputs. "
            "Leave this pair out of `fold`."
        )
    if size_in == size_out:
        return 1, 1, size_out
    size = into.head_size
    if size is None or size_out % size:
        raise ValueError(
            f"{name} has {size_out} outputs, and {some(inputs)} has {size_in} inputs. Several heads share an output: "
            f"pass `eqq.Into(..., head_size=...)`, which must divide {size_out}. Got {size}."
        )
    return size_out // size, size_in // size_out, size


def output_axis(leaf: Leaf, consumer: Leaf, axis: int | None) -> int | None:
    """Returns the axis of the outputs of a vector, as in a norm or a bias, or of a weight, whose inputs have `axis`.

    A stack has as many axes more as a weight that takes the outputs.
    """
    ndim = np.ndim(leaf.value) - (consumer.value.ndim - 2)
    if ndim == 1:
        return -1
    return None if ndim != 2 or axis is None else -3 - axis


def divided(x: Array, by: Array, axis: int | None, offset: float | int) -> Array:
    """Returns an array whose outputs are divided by one number each; `axis` is that of the inputs of a weight."""
    if x.ndim > by.ndim:
        by, offset = by[..., None] if axis == -1 else by[..., None, :], 0
    return (((x.astype(jnp.float32) + offset) / by) - offset).astype(x.dtype)


def multiplied(x: Array, by: Array, axis: int) -> Array:
    """Returns a weight whose inputs, along an axis, are multiplied by one number each."""
    by = beside(by, x.ndim, axis)
    return (x.astype(jnp.float32) * by).astype(x.dtype)
