"""Finds producers and consumers of channels, between which factors or rotations can move."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._tree.leaves import abbreviate_list, Leaf
from .._tree.patterns import compile_pattern
from .._tree.weights import ineligible_reason, is_embedding, unmappable_reason


class FoldInto(NamedTuple):
    """The weights that consume the outputs of a layer: an entry of `fold`.

    For [`eqquant.transforms.smooth`][] and [`eqquant.transforms.rotate`][].

    !!! Example

        ```python
        fold = {
            "layers.{n}.mlp_norm.{p}": "layers.{n}.mlp.{x:gate|up}.weight",     # text is `FoldInto((text,))`
            "layers.{n}.attn.v.{p}": eqq.transforms.FoldInto(("layers.{n}.attn.output.weight",), head_size=64),
        }
        ```

    **Arguments:**

    - `weights`: patterns of the weights that consume the outputs.
    - `head_size`: the channels of one head, where each head of the producer feeds several heads of the consumer, as in
        attention with grouped queries. A rotation stays within a head, so it needs this for every attention.
    - `offset`: a constant that the layer adds to its weight before it multiplies by it: 1 for the norms of Gemma.
    """

    weights: tuple[str, ...]
    head_size: int | None = None
    offset: float | int = 0


Folds = Mapping[str, str | FoldInto]


class ResidualStream(NamedTuple):
    """The readers of a residual stream, an entry of `fold`: norms, and the weights after them.

    For [`eqquant.transforms.rotate`][].

    Norms must divide by the root of the mean square alone, as `equinox.nn.RMSNorm` does without a bias. Their gains
    move into the weights after them.

    !!! Example

        ```python
        writers = ("embedding.weight", "layers.{n}.attention.output.{p}", "layers.{n}.mlp.down.{p}")
        readers = {
            "layers.{n}.attention_norm.weight": "layers.{n}.attention.{x:q|k|v}.weight",
            "layers.{n}.mlp_norm.weight": "layers.{n}.mlp.{x:gate|up}.weight",
            "norm.weight": "head.weight",
        }
        model = eqq.transforms.rotate(model, fold={writers: eqq.transforms.ResidualStream(readers)})
        ```

    **Arguments:**

    - `norms`: from patterns of the gains of norms to patterns of the weights after each.
    - `offset`: a constant that norms add to their gains before they multiply by them: 1 for Gemma.
    """

    norms: Mapping[str, str]
    offset: float | int = 0


Rotations = Mapping[str | tuple[str, ...], str | FoldInto | ResidualStream]


class Weights(NamedTuple):
    """The leaves of a model, and the input axis of each weight, by the index of the leaf."""

    leaves: Sequence[Leaf]
    axes: Mapping[int, int]

    def match(self, text: str) -> list[tuple[int, dict[str, str]]]:
        """Returns the index of each leaf that a pattern of `fold` matches, with its groups.

        Raises if the pattern matches none.
        """
        pattern = compile_pattern(text, "fold")
        found = [(n, pattern.fullmatch(leaf.path)) for n, leaf in enumerate(self.leaves) if np.ndim(leaf.value)]
        if not any(match for _, match in found):
            raise ValueError(
                f"Each pattern of `fold` must match a leaf. Got {text!r}, which matches none of: "
                f"{abbreviate_list(leaf.path for leaf in self.leaves)}."
            )
        return [(n, match.groupdict()) for n, match in found if match is not None]

    def length(self, n: int, axis: int) -> int:
        return self.leaves[n].value.shape[axis]

    def check_alone(self, indices: Iterable[int]) -> None:
        """Raises if one of these arrays stands in several places of the model."""
        for n in indices:
            leaf = self.leaves[n]
            if other := [x.path for m, x in enumerate(self.leaves) if x.value is leaf.value and m != n]:
                raise ValueError(
                    f"`fold` must change arrays that stand in one place. Got {leaf.path}, which is the same array "
                    f"as {abbreviate_list(other)}. Leave this pair out, or copy the array."
                )


class Fold(NamedTuple):
    """The producers and the consumers of some channels, by their indices among the leaves.

    - `producers`: the output axis of each.
    - `heads`: `(heads of the producer, heads of the consumer for each, channels of a head)`.
    """

    name: str
    producers: Mapping[int, int]
    consumers: Sequence[int]
    heads: tuple[int, int, int]
    offset: float | int

    def pool(self, v: Array, reduce: Callable[..., Array]) -> Array:
        """Reduces the values of all inputs that one output of the producer feeds to one value."""
        by_heads = self._by_heads(v)
        return jnp.broadcast_to(reduce(by_heads, axis=-2, keepdims=True), by_heads.shape).reshape(v.shape)

    def to_outputs(self, v: Array) -> Array:
        """Returns one value per output of the producer, from one value per input of the consumers."""
        return self._by_heads(v)[..., 0, :].reshape(*v.shape[:-1], -1)

    def _by_heads(self, v: Array) -> Array:
        return v.reshape(*v.shape[:-1], *self.heads)


class Stream(NamedTuple):
    """A residual stream, by indices among the leaves.

    - `writers`: the leaves that write to it, each with the axis of its channels.
    - `norms`: the gain of each norm, with the weights after it.
    """

    name: str
    writers: Mapping[int, int]
    norms: Mapping[int, Sequence[int]]
    offset: float | int


def find_folds(folds: Folds, weights: Weights) -> list[Fold]:
    """Returns the folds that the rules describe. Raises if the shapes of one do not fit."""
    found = [fold for key, into in folds.items() for fold in _find_pair_folds(key, into, weights)]
    consumed: dict[int, str] = {}
    for fold in found:
        for n in fold.consumers:
            if n in consumed:
                raise ValueError(
                    f"`fold` must give each weight one producer. Got {consumed[n]} and {fold.name} for "
                    f"{weights.leaves[n].path}."
                )
            consumed[n] = fold.name
        weights.check_alone((*fold.producers, *fold.consumers))
    return found


def _find_pair_folds(key: str, into: str | FoldInto, weights: Weights) -> Iterator[Fold]:
    if isinstance(into, str):
        into = FoldInto((into,))
    if not isinstance(key, str) or not isinstance(into, FoldInto):
        raise TypeError(
            "`fold` must map the path of a producer of channels to the paths of the weights that consume them, such as "
            f"{{'layers.{{n}}.norm.{{p}}': 'layers.{{n}}.up.weight'}}. Got {key!r}: {into!r}."
        )
    producer_matches = weights.match(key)
    consumer_matches = [match for text in into.weights for match in weights.match(text)]
    shared = sorted(producer_matches[0][1].keys() & consumer_matches[0][1].keys())
    values = lambda groups: tuple(groups[name] for name in shared)
    for same in dict.fromkeys(values(groups) for _, groups in producer_matches):
        producers = [n for n, groups in producer_matches if values(groups) == same]
        consumers = [n for n, groups in consumer_matches if values(groups) == same]
        name = abbreviate_list(weights.leaves[n].path for n in producers)
        if not consumers:
            raise ValueError(f"`fold` must name the weights that take the outputs of {name}. Got none in {into}.")
        yield _make_fold(name, producers, consumers, into, weights)


def _make_fold(name: str, producers: Sequence[int], consumers: Sequence[int], into: FoldInto, weights: Weights) -> Fold:
    leaves, axes = weights
    for n in consumers:
        if n not in axes:
            reason = unmappable_reason(leaves[n])
            raise ValueError(f"`fold` needs weights whose inputs can be scaled. Got {leaves[n].path}: {reason}.")
    output_axes = {}
    for n in producers:
        # A stacked producer has the same extra axes as its consumers.
        ndim = np.ndim(leaves[n].value) - (leaves[consumers[0]].value.ndim - 2)
        if ndim not in (1, 2) or (ndim == 2 and n not in axes):
            raise ValueError(f"`fold` needs vectors and matrices. Got {leaves[n].path} of {leaves[n].value.shape}.")
        output_axes[n] = -1 if ndim == 1 else -3 - axes[n]
    inputs = {leaves[n].path: weights.length(n, axes[n]) for n in consumers}
    outputs = {leaves[n].path: weights.length(n, axis) for n, axis in output_axes.items()}
    size_in, size_out = next(iter(inputs.values())), next(iter(outputs.values()))
    if len({*inputs.values()}) > 1 or len({*outputs.values()}) > 1 or size_in % size_out:
        raise ValueError(
            f"The outputs of {name} must be the inputs of its weights. Got {outputs} outputs and {inputs} inputs. "
            "Leave this pair out of `fold`."
        )
    size = size_out if into.head_size is None and size_in == size_out else into.head_size
    if size is None or size_out % size:
        raise ValueError(
            f"{name} has {size_out} outputs, and {abbreviate_list(inputs)} has {size_in} inputs. Several heads share "
            f"an output: pass `eqq.transforms.FoldInto(..., head_size=...)`, which must divide {size_out}. Got {size}."
        )
    return Fold(name, output_axes, consumers, (size_out // size, size_in // size_out, size), into.offset)


def find_stream(writers: tuple[str, ...], into: ResidualStream, weights: Weights) -> Stream:
    """Returns the residual stream of a rule. Raises if a rotation would change the model."""
    texts = [text for pair in into.norms.items() for text in pair] if isinstance(into.norms, Mapping) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            "`eqq.transforms.ResidualStream` must map the pattern of each norm to one pattern of the weights after "
            f"it, such as '{{x:up|gate}}.weight'. Got {into.norms!r}."
        )
    leaves, axes = weights
    norms = _find_norms(into.norms, weights)
    channels = {n: axis for text in writers for n, axis in _find_writers(text, weights)}
    consumers = collections.Counter(n for after in norms.values() for n in after)
    for n, times in consumers.items():
        if n not in axes or times > 1:
            reason = unmappable_reason(leaves[n]) if n not in axes else "it is after several norms"
            raise ValueError(f"`fold` needs weights of linear layers after a norm. Got {leaves[n].path}: {reason}.")
    along = [*((n, -1) for n in norms), *channels.items(), *((n, axes[n]) for n in consumers)]
    size = weights.length(next(iter(norms)), -1)
    if others := [f"{leaves[n].path} of {leaves[n].value.shape}" for n, a in along if weights.length(n, a) != size]:
        raise ValueError(
            f"Writers and readers of a residual stream must have the {size} channels of its norms. Got "
            f"{abbreviate_list(others)}."
        )
    weights.check_alone((*channels, *norms, *consumers))
    return Stream(abbreviate_list(writers), channels, norms, into.offset)


def _find_norms(patterns: Mapping[str, str], weights: Weights) -> dict[int, list[int]]:
    """Returns the weights after each norm."""
    norms: dict[int, list[int]] = {}
    for gain, after in patterns.items():
        found, consumer_matches = weights.match(gain), weights.match(after)
        for n, groups in found:
            _check_norm(weights.leaves[n], weights.leaves)
            shared = groups.keys() & consumer_matches[0][1].keys()
            norms[n] = [m for m, other in consumer_matches if all(other[name] == groups[name] for name in shared)]
            if not norms[n]:
                raise ValueError(f"`fold` must name the weights after {weights.leaves[n].path}. Got none.")
    return norms


def _find_writers(text: str, weights: Weights) -> Iterator[tuple[int, int]]:
    """Yields each leaf that a pattern matches, with the axis of its channels."""
    matched = [(n, weights.leaves[n]) for n, _ in weights.match(text)]
    # A pattern matches weights and their biases, which have one axis less.
    ndim = max(np.ndim(leaf.value) for _, leaf in matched)
    for n, leaf in matched:
        if (reason := ineligible_reason(leaf.value)) is not None:
            raise ValueError(f"`fold` needs floats. Got {leaf.path}: {reason}. Rotate before you quantize.")
        is_vector = np.ndim(leaf.value) < ndim or ndim == 1 or is_embedding(leaf)
        if not is_vector and n not in weights.axes:
            raise ValueError(f"`fold` needs weights. Got {leaf.path}: {unmappable_reason(leaf)}.")
        yield n, -1 if is_vector else -3 - weights.axes[n]


def _check_norm(norm: Leaf, leaves: Sequence[Leaf]) -> None:
    """Raises unless a norm commutes with rotations, judged by its type and its parameters."""
    siblings = [leaf for leaf in leaves if leaf.keys[:-1] == norm.keys[:-1]]
    biases = [leaf.path for leaf in siblings if leaf.name in ("bias", "beta", "b")]
    # Compare the whole name: a `T5LayerNorm` subtracts no mean.
    centers = any(base.__name__ == "LayerNorm" for base in type(norm.layer).__mro__)
    if centers or biases:
        reason = "subtracts the mean of its channels" if centers else f"adds {abbreviate_list(biases)}"
        raise ValueError(
            f"A rotation passes through norms that only divide by the root of the mean square. Got {norm.path}, whose "
            f"layer {reason}. Leave the residual stream out of `fold`: each product then rotates its operand."
        )
