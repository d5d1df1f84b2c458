"""Measures the loss of a model with one leaf at a time quantized."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Scalar
from rich.markup import escape
from rich.table import Table

from .._array.array import is_quantized, QuantizedArray
from .._array.quantize import quantize
from .._formats import Int2, Int3, Int5, Int8, IQ4_XS, NF4, Q3_K, Q5_K, Q6_K
from .._formats.base import AbstractFormat
from .._methods import AbstractMethod
from .._report import Name, Report, report_table
from .._tree.config import QuantConfig
from .._tree.decide import decide, FormatLike
from .._tree.leaves import abbreviate_list, array_nbytes, DenseArray, named_leaves
from .._tree.select import Where
from .._types import PyTree
from ._comparison import as_configs, show_format
from ._error import measure_error, to_numpy
from ._plots import Axes, draw_dots
from ._roles import estimate_role_factors


# From two to eight bits in small steps, with 16-bit or quantized scales.
ALL_WIDTHS: tuple[AbstractFormat, ...] = (
    Int2(64, scale_dtype="float16"),
    Int3(128, scale_dtype="float16"),
    Q3_K(),
    NF4(128, double_quant=True),
    IQ4_XS(),
    Int5(128, scale_dtype="float16"),
    Q5_K(),
    Q6_K(),
    Int8(),
)


@dataclasses.dataclass(frozen=True)
class LeafSensitivity:
    """The loss with one leaf or group quantized, and its bytes, in each format.

    `paths` has one entry, or several for an array that appears in several places, or for a group. A group is `arrays`
    of one shape, and `group` its name. Blocks run along `axes`.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dense_nbytes: int
    formats: tuple[AbstractFormat | QuantConfig, ...]
    nbytes: tuple[int, ...]
    losses: tuple[float, ...]
    arrays: int = 1
    group: str | None = None
    axes: tuple[int, ...] = (-1,)

    @property
    def name(self) -> str:
        return self.group or ", ".join(self.paths)

    @property
    def size(self) -> int:
        return self.arrays * math.prod(self.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class SensitivityReport(Report):
    """The loss of the float model, and with each leaf quantized to each format.

    Prints as a table of increases. `measured` says whether the losses are measured, or estimated from errors of
    weights.
    """

    loss: float
    leaves: tuple[LeafSensitivity, ...]
    measured: bool = True

    def __rich__(self) -> Table:
        table = report_table("parameter", *(escape(show_format(f)) for f in self.leaves[0].formats))
        table.title = f"increase of the loss, from {self.loss:.6g}" if self.measured else "error, weighed by role"
        for leaf in self.leaves:
            table.add_row(Name(leaf.name), *(f"{loss - self.loss:.3e}" for loss in leaf.losses))
        return table

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plots the loss increase of each leaf and format as a dot. Returns Matplotlib's axes.

        The axis is logarithmic, so a leaf that does not increase the loss has no dot.
        """
        names = [leaf.group or leaf.paths[0] for leaf in self.leaves]
        increases = np.array([leaf.losses for leaf in self.leaves]).T - self.loss
        dots = {show_format(f): row.tolist() for f, row in zip(self.leaves[0].formats, increases, strict=True)}
        labels = ("What quantizing each weight alone does to the loss", "increase of the loss")
        if not self.measured:
            labels = ("The relative squared error of each weight, weighed by its role", "error")
        return draw_dots(ax, names, dots, labels)


def sensitivity(
    model: PyTree,
    loss: Callable[[PyTree, PyTree], Scalar],
    batch: PyTree,
    formats: Sequence[FormatLike] | FormatLike = ALL_WIDTHS,
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    method: AbstractMethod | None = None,
    group: str | Sequence[str] = (),
) -> SensitivityReport:
    """Returns the loss of a model with one leaf at a time quantized, for each format.

    Evaluates the loss `1 + leaves x formats` times, and compiles it once, because its model always holds dense weights,
    one of them rounded (fake quantization). A good loss measures the distance to the outputs of the float model: it is
    zero for the float model, so it cannot decrease by accident, and its increases add up better than increases of a
    loss on labels.

    !!! Example

        ```python
        def loss(model, batch):
            x, y = batch                                     # y: the outputs of the float model
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        report = eqq.analysis.sensitivity(model, loss, (x, y))
        plan = eqq.analysis.plan_bits(model, report, target_bits=4.5, loss=loss, batch=(x, y))
        model = eqq.quantize_tree(model, plan)
        ```

    **Arguments:**

    - `model`: any pytree, in float.
    - `loss`: a function `(model, batch) -> scalar`. It runs under `equinox.filter_jit`.
    - `batch`: the second argument of the loss: any pytree of arrays, with examples along the first axis.
    - `formats`: formats, their lower-case names, [`eqquant.QuantConfig`][]s with a method, or one of these. The default
        is a choice of nine, from two to eight bits, that mix well. Fewer take less time, and make a worse plan where
        two neighbors are far apart.
    - `where`: selects leaves or nodes, as for [`eqquant.quantize_tree`][].
    - `axis`: the axis along which blocks run, as for [`eqquant.quantize_tree`][].
    - `method`: the method that chooses scales and codes, for each of `formats` that sets none.
    - `group`: patterns of the beginnings of paths, in which `*` is any one key: with `"layers.*"`, the arrays of one
        shape at `layers.0.up.weight`, `layers.1.up.weight` and so on get one format, and are measured at once.

    **Returns:**

    A report, which prints as a table. [`eqquant.analysis.plan_bits`][] makes a plan from it. It has

    - `loss`: the loss of the float model.
    - `leaves`: for each array or group its `paths`, `shape`, `dense_nbytes` (in float), and a tuple with an entry for
        each format of `formats`, `nbytes` and `losses`. `arrays` is the size of a group, `group` its name, and `axes`
        are those along which blocks run.
    - `.plot(ax=None)`: draws a dot for each leaf and format; returns Matplotlib's axes.
    - `.to_dict()`, `.to_json(indent=None)`: the same as plain Python, and as JSON.

    **Raises:**

    `ValueError` if `formats` or `batch` is empty, if the loss is not one finite number, if it does not depend on the
    weights, and as [`eqquant.quantize_tree`][].
    """
    configs = as_configs(formats, method)
    check_batch(batch)
    weights, compute = _find_candidates(model, where, axis), compile_loss(model, loss, batch)
    base = check_loss(compute({}), "the model as it is")
    weights_changed = False

    def compute_loss(context: str, members: Sequence[Candidate], quantized: Sequence[QuantizedArray]) -> float:
        nonlocal weights_changed
        replacements = {}
        for w, q in zip(members, quantized, strict=True):
            rounded = q.dequantize()
            replacements.update(dict.fromkeys(w.indices, rounded))
            weights_changed = weights_changed or not np.array_equal(rounded, w.value)
        return check_loss(compute(replacements), context)

    rows = _measure_rows(weights, group, configs, compute_loss)
    if weights_changed and all(loss == base for row in rows for loss in row.losses):
        # All losses are equal, either because rounding hardly changes them or because `loss` ignores the weights. Only
        # the latter returns the same for weights of NaN.
        nan_weights = {index: jnp.full_like(w.value, jnp.nan) for w in weights for index in w.indices}
        with jax.debug_nans(False):
            if float(np.asarray(compute(nan_weights))) == base:
                raise ValueError(
                    f"`loss` must use the model that it is given. Got the same value for every one, {base:.6g}, "
                    "although their weights differ. Does it close over another?"
                )
    return SensitivityReport(base, rows)


def weight_sensitivity(
    model: PyTree,
    formats: Sequence[FormatLike] | FormatLike = ALL_WIDTHS,
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    method: AbstractMethod | None = None,
    group: str | Sequence[str] = (),
    read: Callable[[str], Array | np.ndarray] | None = None,
) -> SensitivityReport:
    r"""Returns sensitivities estimated from the weights alone, without data.

    The loss of a weight is $r \lVert W - \hat W \rVert^2 / \lVert W \rVert^2$, so a large weight counts as much as a
    small one. The factor $r$ is a guess from its name: 0.15 for queries and keys, 1.5 for values, 2 for the embedding
    of patches, 0.5 for positions and types of tokens, 8 for the head (or for the table of tokens, if there is neither a
    head nor an encoder), and 1 for all others; twice as much in the first and the last layer. A stack of matrices
    counts as several, unless they are experts. [`eqquant.analysis.sensitivity`][] measures instead.

    !!! Example

        ```python
        report = eqq.analysis.weight_sensitivity(model)
        model = eqq.quantize_tree(model, eqq.analysis.plan_bits(model, report, target_bits=4.2))
        ```

    **Arguments:**

    - `model`: any pytree, in float.
    - `formats`: formats, their lower-case names, [`eqquant.QuantConfig`][]s with a method, or one of these. The
        default is a choice of nine, from two to eight bits, that mix well.
    - `where`: selects leaves or nodes, as for [`eqquant.quantize_tree`][].
    - `axis`: the axis along which blocks run, as for [`eqquant.quantize_tree`][].
    - `method`: the method that chooses scales and codes, for each of `formats` that sets none.
    - `group`: patterns of the beginnings of paths, in which `*` is any one key: with `"layers.*"`, the arrays of one
        shape at `layers.0.up.weight`, `layers.1.up.weight` and so on get one format, and are measured at once.
    - `read`: returns the array of a path. Then `model` may hold `jax.ShapeDtypeStruct`s, and one array at a time is in
        memory.

    **Returns:**

    A report as of [`eqquant.analysis.sensitivity`][], with these errors as losses.

    **Raises:**

    `ValueError` if `formats` is empty, and as [`eqquant.quantize_tree`][].
    """
    configs, weights = as_configs(formats, method), _find_candidates(model, where, axis)
    factors = estimate_role_factors(leaf.path for leaf in named_leaves(model) if isinstance(leaf.value, DenseArray))

    def compute_error(_: str, members: Sequence[Candidate], quantized: Sequence[QuantizedArray]) -> float:
        error = 0.0
        for w, q in zip(members, quantized, strict=True):
            path = w.paths[0]
            relative = measure_error(to_numpy(w.value, path), to_numpy(q, path), (path, path)).relative_l2
            error += factors[path] * _count_matrices(w) * min(relative, 1.0) ** 2
        return error

    return SensitivityReport(0.0, _measure_rows(weights, group, configs, compute_error, read), measured=False)


class Candidate(NamedTuple):
    """An array that `quantize_tree` would quantize.

    It has the indices and the paths of its leaves. The value is only a shape until it is read.
    """

    indices: list[int]
    paths: list[str]
    value: Array | np.ndarray
    axes: tuple[int, ...]


def _count_matrices(w: Candidate) -> int:
    """Returns the number of matrices of a weight: the layers of a stack."""
    is_stack = len(w.value.shape) == 3 and len(w.axes) == 1 and "expert" not in w.paths[0].lower()
    return w.value.shape[0] if is_stack and min(w.value.shape[1:]) >= 16 else 1  # else a convolution


def _find_candidates(model: PyTree, where: Where | None, axis: int | Sequence[int] | None) -> list[Candidate]:
    found: dict[int, Candidate] = {}
    for n, decision in enumerate(decide(model, "int8", where, axis)):
        if decision.format is not None:
            x = decision.leaf.value
            w = found.setdefault(id(x), Candidate([], [], x, decision.axes))
            w.indices.append(n)
            w.paths.append(decision.leaf.path)
    return list(found.values())


def _group_candidates(
    weights: Sequence[Candidate], group: str | Sequence[str]
) -> list[tuple[str | None, list[Candidate]]]:
    """Returns the name and the arrays of each group. An array without a group is alone."""
    patterns = [group] if isinstance(group, str) else list(group)
    matchers = {p: re.compile(r"[^.]*".join(re.escape(part) for part in p.split("*")) + r"(?=\.|$)") for p in patterns}
    found: dict[Hashable, tuple[str | None, list[Candidate]]] = {}
    used = set()
    for w in weights:
        path = w.paths[0]
        name, key = None, path
        for pattern, matcher in matchers.items():
            if match := matcher.match(path):
                name = pattern + path[match.end() :]
                key = name, w.value.shape, w.value.dtype
                used.add(pattern)
                break
        found.setdefault(key, (name, []))[1].append(w)
    if unused := [p for p in patterns if p not in used]:
        raise ValueError(
            f"`group` must match the beginning of a path. Got {unused[0]!r}, which matches none of "
            f"{abbreviate_list([w.paths[0] for w in weights])}."
        )
    return [(name if len(members) > 1 else None, members) for name, members in found.values()]


def _measure_rows(
    weights: Sequence[Candidate],
    group: str | Sequence[str],
    configs: Sequence[QuantConfig],
    compute_loss: Callable[[str, Sequence[Candidate], Sequence[QuantizedArray]], float],
    read: Callable[[str], Array | np.ndarray] | None = None,
) -> tuple[LeafSensitivity, ...]:
    """Returns the row of each array or group, quantized to each format."""
    formats = tuple(config if config.method is not None else config.format for config in configs)
    rows = []
    for name, members in _group_candidates(weights, group):
        if read is not None:
            members = [w._replace(value=read(w.paths[0])) for w in members]
        losses, nbytes = [], []
        for config in configs:
            quantized = [quantize_candidate(w, config) for w in members]
            losses.append(compute_loss(f"{name or members[0].paths[0]} in {config!r}", members, quantized))
            nbytes.append(sum(q.nbytes for q in quantized))
        paths, dense = tuple(path for w in members for path in w.paths), sum(array_nbytes(w.value) for w in members)
        shape, axes = tuple(members[0].value.shape), members[0].axes
        row = LeafSensitivity(paths, shape, dense, formats, tuple(nbytes), tuple(losses), len(members), name, axes)
        rows.append(row)
    return tuple(rows)


def compile_loss(
    model: PyTree, loss: Callable[[PyTree, PyTree], Scalar], batch: PyTree
) -> Callable[[Mapping[int, Array]], PyTree]:
    """Returns a function, compiled once, that computes the loss with some leaves replaced."""
    leaves, treedef = jtu.tree_flatten(model, is_leaf=is_quantized)
    compiled = eqx.filter_jit(loss)

    def compute(replacements: Mapping[int, Array]) -> PyTree:
        new_leaves = [replacements.get(n, leaf) for n, leaf in enumerate(leaves)]
        return compiled(jtu.tree_unflatten(treedef, new_leaves), batch)

    return compute


def check_loss(out: PyTree, context: str) -> float:
    """Returns a loss as a number. Raises an error with `context` unless it is finite."""
    if not isinstance(out, (jax.Array, np.ndarray, np.generic, float, int)):
        raise ValueError(f"`loss` must return one finite number. Got a {type(out).__name__}. Return a scalar.")
    value = np.asarray(out)
    if value.shape != () or jnp.iscomplexobj(value) or not math.isfinite(value):
        raise ValueError(
            f"`loss` must return one finite number. Got {f'shape {value.shape}' if value.shape else value} with "
            f"{context}. Reduce it to its mean, and look for a division by zero."
        )
    return float(value)


def quantize_candidate(w: Candidate, config: QuantConfig) -> QuantizedArray:
    """Returns `quantize` of a candidate, with the path in its errors."""
    path = w.paths[0]
    try:
        method = None if config.method is None else config.method.for_leaf(path)
        return quantize(w.value, config.format, axis=w.axes, method=method)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def check_batch(batch: object) -> None:
    """Raises for a batch without examples."""
    arrays = [x for x in jtu.tree_leaves(batch) if isinstance(x, (jax.Array, np.ndarray))]
    if not arrays or any(x.size == 0 for x in arrays):
        shapes = [tuple(x.shape) for x in arrays] or "no arrays"
        raise ValueError(f"`batch` must hold at least one example. Got {shapes}. Pass arrays of one example or more.")
