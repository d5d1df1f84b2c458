"""Runs a program stage by stage. Each stage goes on from the one before."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from .._program.cut import CompiledPart, cut, Node, PartCompiler, Stage, Turn
from ._dataflow import find_records, flatten
from ._observe_primitive import compute_moments, Record
from ._observers import Sums, WeightObserver


class WeightStage(NamedTuple):
    """Weights to quantize together, by index of a leaf, or one layer of stacks."""

    indices: Sequence[int]
    layer: int | None = None


class Weight(NamedTuple):
    """A weight of a program.

    - `leaves`: the indices of the leaves that are this array.
    - `once`: whether the program uses it in one place.
    """

    observer: WeightObserver
    leaves: Collection[int]
    once: bool


class Values(NamedTuple):
    """The arguments of a program.

    - `read_leaf`: returns a leaf of the model, by index.
    - `batch`: the leaves of the batch.
    - `active`: the indices of the weights to observe.
    """

    read_leaf: Callable[[int], Array]
    batch: Sequence[Array]
    active: Collection[int] = ()


class StagedProgram:
    """A traced program of observed products, cut into one part for each stage.

    - `stale`: for each stage, whether quantizing its weights makes kept values stale, because the program used them
        before, such as an embedding that is also the head.
    """

    def __init__(
        self,
        program: ClosedJaxpr,
        leaves: Sequence[int],
        batch: int,
        weights: Mapping[int, Weight],
        stages: Sequence[WeightStage],
        compile_part: PartCompiler,
    ) -> None:
        """**Arguments:**

        - `program`: its arguments are leaves of the model, then the batch, then the layer indices of each observer.
        - `leaves`: for each argument that is a leaf, the index of the leaf.
        - `batch`: how many arguments the batch has.
        - `weights`: the weights to observe, by index.
        """
        self._leaves, self._start, self._stop = leaves, len(leaves), len(leaves) + batch
        self._weights, self._stages, self._compile = weights, stages, compile_part
        by_axes = [(n, axes) for n, weight in weights.items() for axes in sorted(weight.observer.by_axes)]
        self._indices = dict(enumerate(by_axes, self._stop))
        sums = {name: weights[n].observer.by_axes[axes] for name, (n, axes) in self._indices.items()}
        self._owners: dict[Record, int] = {sums[name]: n for name, (n, _) in self._indices.items()}
        layers = {name: jnp.arange(x.num_layers, dtype=jnp.float32) for name, x in sums.items()}
        self._idle = {name: jnp.full_like(x, -1) for name, x in layers.items()}
        self._flat, self._layers = flatten(program, lambda name: self._start <= name < self._stop, layers)
        is_of = lambda record, stage: self._owners.get(record) in stage.indices
        is_in = lambda layer, stage: stage.layer in (None, layer) or layer is None
        products = list(zip(self._flat.marks, self._layers, strict=True))
        self._products = [
            [mark for mark, layer in products if is_of(mark.equation.params["record"], stage) and is_in(layer, stage)]
            for stage in stages
        ]
        inner = {n: find_records(node.equation) for n, node in enumerate(self._flat.nodes)}
        loops = [[n for n in inner if any(is_of(record, stage) for record in inner[n])] for stage in stages]
        names = [[name for mark in marks for name in mark.names] for marks in self._products]
        self._parts = cut(self._flat, list(map(Stage, names, loops)))
        self._compiled: dict[int, CompiledPart] = {}
        self.stale = list(self._find_stale())

    def run(self, number: int, values: Values, kept: Mapping[int, Array]) -> dict[int, Array]:
        """Runs one part, and observes its products. Returns what later parts need.

        **Arguments:**

        - `kept`: what the part before returned.
        """
        part = self._parts[number]
        if number not in self._compiled:
            self._compiled[number] = self._compile(self._flat, part, self._find_equal(self._stages[number]))
        function, names, results = self._compiled[number]

        def read(name: int) -> Array:
            if name < self._start:
                return values.read_leaf(self._leaves[name])
            if name < self._stop:
                return values.batch[name - self._start]
            if name in self._indices:
                n, axes = self._indices[name]
                return self._weights[n].observer.layer_indices()[axes] if n in values.active else self._idle[name]
            return self._flat.constants[name] if name in self._flat.constants else kept[name]

        found = jax.block_until_ready(function(list(map(read, names))))  # then all callbacks have run
        groups: dict[Hashable, list[Node]] = {}
        for node in self._products[number]:
            if (n := self._owners[node.equation.params["record"]]) in values.active:
                at = tuple(results[name] for name in node.names)
                groups.setdefault(at if self._weights[n].once else (n, id(node)), []).append(node)
        for first, *others in groups.values():
            params = first.equation.params
            sums = _observe(params, *(found[results[name]] for name in first.names))
            for node in others:  # weights with the same inputs share the sums
                node.equation.params["record"].total = sums.total
        return {name: found[results[name]] if name in results else kept[name] for name in part.kept}

    def _find_equal(self, stage: WeightStage) -> dict[int, int]:
        """Maps each layer-index argument of a stage to the first one of the same value."""
        first: dict[Hashable, int] = {}
        chosen = {name: n for name, (n, _) in self._indices.items() if n in stage.indices and self._weights[n].once}
        return {name: first.setdefault(len(self._idle[name]), name) for name in chosen}

    def _find_stale(self) -> Iterator[bool]:
        """Yields for each stage whether a part up to it uses one of its weights."""
        flat, used = self._flat, set[tuple[int, Turn]]()
        layers = {
            (self._owners.get(mark.equation.params["record"]), mark.turn): layer
            for mark, layer in zip(flat.marks, self._layers, strict=True)
        }
        owners = {name: n for n, weight in self._weights.items() for name in self._names_of(weight)}
        for stage, part in zip(self._stages, self._parts, strict=True):
            for node in (flat.nodes[n] for n in part.computed):
                if not flat.varying.isdisjoint(node.outputs):
                    before = flat.find_needed(node.names, flat.varying)
                    names = {*node.names, *(name for n in before for name in flat.nodes[n].names)}
                    used |= {(owners[name], node.turn) for name in names if name in owners}
            yield any(
                n in stage.indices
                and (stage.layer is None or layers.get((n, turn), stage.layer) in (None, stage.layer))
                for n, turn in used
            )

    def _names_of(self, weight: Weight) -> list[int]:
        return [name for name, leaf in enumerate(self._leaves) if leaf in weight.leaves]


def _observe(params: Mapping[str, Any], rows: Array, index: Array, row_mask: Array | None = None) -> Sums:
    """Adds the moments of rows, or records rows of the reference model."""
    sums = params["record"]
    keep = sums.reference_rows is not None
    moments = compute_moments(rows, row_mask, params["threshold"], params["gram"] and not sums.recording, keep)
    sums(index, moments)
    return sums
