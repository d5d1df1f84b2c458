"""What each leaf does to the loss when it alone is quantized."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree, Scalar
from rich.markup import escape
from rich.table import Table

from .._array.array import is_quantized
from .._array.quantize import quantize
from .._formats.base import AbstractFormat
from .._report import Report, report_table
from .._tree.quantize import decide
from .._tree.select import Where
from .._tree.use import as_use, Use
from ._plots import draw_bars
from ._report import as_formats, show_format


@dataclasses.dataclass(frozen=True)
class LeafSensitivity:
    """The loss with one leaf quantized to each of the formats, and the bytes it takes in each.

    `paths` has one entry, or several for one array that stands in several places.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dense_nbytes: int
    formats: tuple[AbstractFormat | Use, ...]
    nbytes: tuple[int, ...]
    losses: tuple[float, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class SensitivityReport(Report):
    """The loss of the model in float, and with each leaf quantized to each format. Prints as a table of increases."""

    loss: float
    leaves: tuple[LeafSensitivity, ...]

    def __rich__(self) -> Table:
        formats = list(dict.fromkeys(f for leaf in self.leaves for f in leaf.formats))
        table = report_table("parameter", *(escape(show_format(f)) for f in formats))
        table.title = f"increase of the loss, from {self.loss:.6g}"
        for leaf in self.leaves:
            increase = {f: loss - self.loss for f, loss in zip(leaf.formats, leaf.losses, strict=True)}
            shown = (f"{increase[f]:.3e}" if f in increase else "" for f in formats)
            table.add_row(escape(", ".join(leaf.paths)), *shown)
        return table

    def plot(self, ax: Any = None) -> Any:
        """A bar for each leaf: the increase of the loss in the format that harms most. Returns Matplotlib's axes."""
        names = [leaf.paths[0] for leaf in self.leaves]
        worst = [max(zip(leaf.losses, map(repr, leaf.formats), strict=True)) for leaf in self.leaves]
        increases = [loss - self.loss for loss, _ in worst]
        return draw_bars(ax, names, increases, "increase of the loss", [format for _, format in worst])


def sensitivity(
    model: PyTree,
    loss: Callable[[Any, Any], Scalar],
    batch: PyTree,
    formats: Sequence[AbstractFormat | str] | AbstractFormat | str = ("int2", "nf4", "int8"),
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
) -> SensitivityReport:
    """The loss of a model when one leaf at a time is quantized, to each of several formats.

    The loss is compiled once in all: the model that it is given always holds dense weights, one of them rounded. That
    is `1 + leaves x formats` evaluations. A good loss measures the distance to what the float model computes: it is
    zero there, so it cannot fall by accident, and its increases add up better than those of a loss that labels decide.

    !!! Example

        ```python
        def loss(model, batch):
            x, y = batch                                     # y: what the float model computes
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        report = eqq.analysis.sensitivity(model, loss, (x, y), ("int2", "nf4", "int8"))
        plan = eqq.analysis.plan_bits(model, report, target_bits=4.5)
        model = eqq.quantize_tree(model, plan)
        ```

    **Arguments:**

    - `model`: any pytree, in float.
    - `loss`: a function `(model, batch) -> scalar`. It runs under `equinox.filter_jit`.
    - `batch`: what the loss takes besides the model: any pytree of arrays, with examples along the first axis.
    - `formats`: formats, or their lower-case names, or one of these.
    - `where`: selects leaves or nodes, as for [`eqquant.quantize_tree`][].
    - `axis`: the axis along which blocks run, as for [`eqquant.quantize_tree`][].

    **Returns:**

    A report with the loss for each leaf and format, and the bytes that the leaf takes. It prints as a table.
    [`eqquant.analysis.plan_bits`][] makes a plan of it.

    **Raises:**

    `ValueError` for no formats, an empty batch, a loss that is not one finite number or that is the same whatever the
    weights, and as [`eqquant.quantize_tree`][].
    """
    uses = tuple(as_use(f) for f in as_formats(formats))
    picked = tuple(use if use.method is not None else use.format for use in uses)
    if not picked:
        raise ValueError("`formats` must name at least one format. Got none. For instance `('int2', 'nf4', 'int8')`.")
    check_batch(batch)
    compiled = eqx.filter_jit(loss)
    leaves, treedef = jtu.tree_flatten(model, is_leaf=is_quantized)

    def loss_with(places: Sequence[int], w: Array | None, what: str) -> float:
        changed = list(leaves)
        for place in places:
            changed[place] = w
        out = compiled(jtu.tree_unflatten(treedef, changed), batch)
        if not isinstance(out, (jax.Array, np.ndarray, np.generic, float, int)):
            raise ValueError(f"`loss` must return one finite number. Got a {type(out).__name__}. Return a scalar.")
        value = np.asarray(out)
        if value.shape != () or jnp.iscomplexobj(value) or not math.isfinite(value):
            raise ValueError(
                f"`loss` must return one finite number. Got {f'shape {value.shape}' if value.shape else value} with "
                f"{what}. Reduce it to its mean, and look for a division by zero."
            )
        return float(value)

    def uses_weights() -> bool:
        """Whether the loss is another without weights. One that hardly changes looks like one that ignores them."""
        changed = list(leaves)
        for places, _, w, _ in _weights(model, where, axis):
            for place in places:
                changed[place] = jnp.full_like(w, jnp.nan)
        with jax.debug_nans(False):
            return float(np.asarray(compiled(jtu.tree_unflatten(treedef, changed), batch))) != base

    base = loss_with((), None, "the model as it is")
    rows, changed = [], False
    for places, paths, w, axes in _weights(model, where, axis):
        quantized = [quantize_named(w, f, axes, paths[0]) for f in uses]
        losses = []
        for q, f in zip(quantized, picked, strict=True):
            rounded = q.dequantize()
            losses.append(loss_with(places, rounded, f"{paths[0]} in {f!r}"))
            changed = changed or not np.array_equal(rounded, w)
        nbytes = tuple(q.nbytes for q in quantized)
        rows.append(LeafSensitivity(paths, tuple(w.shape), w.nbytes, picked, nbytes, tuple(losses)))
    if changed and all(loss == base for row in rows for loss in row.losses) and not uses_weights():
        raise ValueError(
            f"`loss` must use the model that it is given. Got the same value for every one, {base:.6g}, although their "
            "weights differ. Does it close over another?"
        )
    return SensitivityReport(base, tuple(rows))


def _weights(model: PyTree, where: Where | None, axis: Any) -> list[tuple[list[int], tuple[str, ...], Any, Any]]:
    """What `quantize_tree` would quantize: the places of each array among the leaves, its paths, itself, its axes."""
    found: dict[int, tuple[list[int], list[str], Any, Any]] = {}
    for n, (leaf, format, axes, *_) in enumerate(decide(model, "int8", where, axis)):
        if format is not None:
            places, paths, *_ = found.setdefault(id(leaf.value), ([], [], leaf.value, axes))
            places.append(n)
            paths.append(leaf.path)
    return [(places, tuple(paths), w, axes) for places, paths, w, axes in found.values()]


def quantize_named(w: Any, use: Use, axes: Any, path: str) -> Any:
    """`quantize`, with the leaf named in its errors."""
    try:
        return quantize(w, use.format, axis=axes, method=use.method)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def check_batch(batch: PyTree) -> None:
    """Refuses a batch without examples."""
    arrays = [x for x in jtu.tree_leaves(batch) if isinstance(x, (jax.Array, np.ndarray))]
    if not arrays or any(x.size == 0 for x in arrays):
        shapes = [tuple(x.shape) for x in arrays] or "no arrays"
        raise ValueError(f"`batch` must hold at least one example. Got {shapes}. Pass arrays of one example or more.")
