"""Layers between which a factor for each channel, or a rotation, can move: what makes channels, and what takes them."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from .._array.array import is_quantized
from .._array.checks import check_finite
from .._mesh import on_device
from .._types import PyTree
from .._wrappers.mapped import beside
from .leaves import as_batches, Leaf, some
from .patterns import compile_pattern
from .weights import ineligible_reason, is_embedding, unmappable_reason


class Into(NamedTuple):
    """Where the outputs of a layer go, for the `fold` of [`eqquant.smooth`][] and of [`eqquant.rotate`][].

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
        attention with grouped queries. A rotation stays within a head, so it needs this for every attention.
    - `offset`: what the layer adds to its weight before it multiplies by it: 1 for the norms of Gemma.
    """

    weights: tuple[str, ...]
    head_size: int | None = None
    offset: float | int = 0


Folds = Mapping[str, str | Into]


class Residual(NamedTuple):
    """What takes the sum of a residual stream, for the `fold` of [`eqquant.rotate`][]: norms, and weights after them.

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
        model = eqq.rotate(model, fold={writers: eqq.Residual(readers)})
        ```

    **Arguments:**

    - `norms`: from patterns of the gains of norms to patterns of the weights that take what these return.
    - `offset`: what norms add to their gains before they multiply by them: 1 for those of Gemma.
    """

    norms: Mapping[str, str]
    offset: float | int = 0


Rotations = Mapping[str | tuple[str, ...], str | Into | Residual]


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


class Stream(NamedTuple):
    """A residual stream, by numbers among the leaves.

    - `writers`: what is added to it, and the axis of its channels.
    - `norms`: a gain each, and the weights after it.
    """

    name: str
    writers: Mapping[int, int]
    norms: Mapping[int, Sequence[int]]
    offset: float | int


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
        _check_alone((*fold.producers, *fold.consumers), leaves)
    return found


def _check_alone(numbers: Iterable[int], leaves: Sequence[Leaf]) -> None:
    for n in numbers:
        other = [leaf.path for m, leaf in enumerate(leaves) if leaf.value is leaves[n].value and m != n]
        if other:
            raise ValueError(
                f"`fold` must change arrays that stand in one place. Got {leaves[n].path}, which is the same array "
                f"as {some(other)}. Leave this pair out, or copy the array."
            )


def find_stream(writers: tuple[str, ...], into: Residual, leaves: Sequence[Leaf], axes: Mapping[int, int]) -> Stream:
    """Returns the residual stream that a rule describes. Raises if rotating it would change the model."""
    texts = [text for pair in into.norms.items() for text in pair] if isinstance(into.norms, Mapping) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            "`eqq.Residual` must map the pattern of each norm to one pattern of the weights after it, such as "
            f"'{{x:up|gate}}.weight'. Got {into.norms!r}."
        )
    norms: dict[int, list[int]] = {}
    for gain, weights in into.norms.items():
        found, taking = _matching_some(gain, leaves), _matching_some(weights, leaves)
        for n, groups in found:
            _check_norm(leaves[n], leaves)
            shared = groups.keys() & taking[0][1].keys()
            norms[n] = [m for m, of in taking if all(of[name] == groups[name] for name in shared)]
            if not norms[n]:
                raise ValueError(f"`fold` must name the weights that take what {leaves[n].path} returns. Got none.")
    channels: dict[int, int] = {}
    for text in writers:
        matched = _matching_some(text, leaves)
        # A pattern matches weights with their biases, which have an axis less.
        ndim = max(np.ndim(leaves[n].value) for n, _ in matched)
        for n, _ in matched:
            if (reason := ineligible_reason(leaves[n].value)) is not None:
                raise ValueError(f"`fold` needs floats. Got {leaves[n].path}: {reason}. Rotate before you quantize.")
            is_vector = np.ndim(leaves[n].value) < ndim or ndim == 1 or is_embedding(leaves[n])
            if not is_vector and n not in axes:
                raise ValueError(f"`fold` needs weights. Got {leaves[n].path}: {unmappable_reason(leaves[n])}.")
            channels[n] = -1 if is_vector else -3 - axes[n]
    consumers = collections.Counter(n for weights in norms.values() for n in weights)
    for n, times in consumers.items():
        if n not in axes or times > 1:
            reason = unmappable_reason(leaves[n]) if n not in axes else "it takes what several norms return"
            raise ValueError(f"`fold` needs weights of linear layers after a norm. Got {leaves[n].path}: {reason}.")
    along = [*((n, -1) for n in norms), *channels.items(), *((n, axes[n]) for n in consumers)]
    size = leaves[next(iter(norms))].value.shape[-1]
    others = [f"{leaves[n].path} of {leaves[n].value.shape}" for n, a in along if leaves[n].value.shape[a] != size]
    if others:
        raise ValueError(
            f"What writes to a residual stream, and what reads it, must have the {size} channels of its norms. Got "
            f"{some(others)}."
        )
    _check_alone((*channels, *norms, *consumers), leaves)
    return Stream(some(writers), channels, norms, into.offset)


def _check_norm(norm: Leaf, leaves: Sequence[Leaf]) -> None:
    """Raises unless a rotation passes through a norm, as far as its type and its parameters tell."""
    beside = [leaf for leaf in leaves if leaf.keys[:-1] == norm.keys[:-1]]
    biases = [leaf.path for leaf in beside if leaf.name in ("bias", "beta", "b")]
    # The whole name: a `T5LayerNorm` subtracts no mean.
    centres = any(base.__name__ == "LayerNorm" for base in type(norm.layer).__mro__)
    reason = "subtracts the mean of its channels" if centres else None
    reason = f"adds {some(biases)}" if reason is None and biases else reason
    if reason is not None:
        raise ValueError(
            f"A rotation passes through norms that only divide by the root of the mean square. Got {norm.path}, whose "
            f"layer {reason}. Leave the residual stream out of `fold`: each product then rotates its operand."
        )


def _of_rule(key: str, into: str | Into, leaves: Sequence[Leaf], axes: Mapping[int, int]) -> Iterator[Fold]:
    if isinstance(into, str):
        into = Into((into,))
    if not isinstance(key, str) or not isinstance(into, Into):
        raise TypeError(
            "`fold` must map the path of what makes channels to the paths of weights that take them, such as "
            f"{{'layers.{{n}}.norm.{{p}}': 'layers.{{n}}.up.weight'}}. Got {key!r}: {into!r}."
        )
    producing = _matching_some(key, leaves)
    taking = [m for text in into.weights for m in _matching_some(text, leaves)]
    shared = sorted(producing[0][1].keys() & taking[0][1].keys())
    of = lambda groups: tuple(groups[name] for name in shared)
    for values in dict.fromkeys(of(groups) for _, groups in producing):
        producers = [n for n, groups in producing if of(groups) == values]
        consumers = [n for n, groups in taking if of(groups) == values]
        name = some(leaves[n].path for n in producers)
        if not consumers:
            raise ValueError(f"`fold` must name the weights that take the outputs of {name}. Got none in {into}.")
        yield Fold(name, producers, consumers, _heads(name, producers, consumers, into, leaves, axes), into.offset)


def _matching_some(text: str, leaves: Sequence[Leaf]) -> list[tuple[int, dict[str, str]]]:
    if not (matched := _matching(text, leaves)):
        raise ValueError(
            f"Each pattern of `fold` must match a leaf. Got {text!r}, which matches none of: "
            f"{some(leaf.path for leaf in leaves)}."
        )
    return matched


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
    size = into.head_size
    if size_in == size_out and size is None:
        return 1, 1, size_out
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


def check_changed(leaves: Sequence[Leaf], numbers: Iterable[int]) -> None:
    """Raises if a leaf that changes holds a NaN or an infinity, which would spread."""
    for leaf in (leaves[n] for n in sorted(numbers)):
        if not isinstance(leaf.value, jax.ShapeDtypeStruct):
            check_finite(on_device(jnp.asarray(leaf.value)), leaf.path)


def check_outputs(
    model: PyTree,
    values_of: Callable[[Iterable[int]], Sequence[Any]],
    names: Sequence[str],
    batches: Iterable[PyTree] | None,
    apply: Callable[[Any, Any], Any] | None,
    remedy: str,
) -> None:
    """Raises if the folded model computes something else, and names the pairs that do. Without batches it may.

    `values_of` returns the leaves of the model with pairs folded, by their numbers in `names`.
    """
    if batches is None:
        return
    treedef = jtu.tree_structure(model, is_leaf=is_quantized)
    run = eqx.filter_jit((lambda model, batch: jax.vmap(model)(batch)) if apply is None else apply)
    data = list(as_batches(batches))
    if not data:
        raise ValueError(
            "`batches` must hold at least one batch. Got none. A generator can be used only once: pass a list."
        )

    model_of = lambda numbers: jtu.tree_unflatten(treedef, values_of(numbers))
    folded = model_of(range(len(names)))
    for batch in data:
        wanted = run(model, batch)
        outputs = [y for y in jtu.tree_leaves(wanted) if eqx.is_inexact_array(y)]
        if not any(bool((jnp.isfinite(y) & (y != 0)).any()) for y in outputs):
            raise ValueError(
                "`batches` must give outputs to compare. Got none that are finite and not zero: look for a NaN in the "
                "model and in the batches."
            )
        if not _alike(run(folded, batch), wanted):
            wrong = [name for n, name in enumerate(names) if not _alike(run(model_of([n]), batch), wanted)]
            raise ValueError(
                f"Each pair of `fold` must leave the outputs of the model unchanged. Got others with "
                f"{some(wrong or names)}: something stands between the two that is not linear in each channel, or "
                f"something else takes the outputs too, such as a residual sum. {remedy}"
            )


def _alike(found: PyTree, wanted: PyTree) -> bool:
    for a, b in zip(jtu.tree_leaves(found), jtu.tree_leaves(wanted), strict=True):
        if eqx.is_inexact_array(b):
            tolerance = 1e-4 if jnp.finfo(b.dtype).bits >= 32 else 5e-2
            largest = jnp.max(jnp.abs(jnp.where(jnp.isfinite(b), b, 0).astype(jnp.float32)), initial=0)
            if not jnp.allclose(a, b, rtol=0, atol=float(tolerance * largest) + 1e-12, equal_nan=True):
                return False
    return True
