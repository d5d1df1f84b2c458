"""Statistics of the inputs of the weights of a model."""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array
from rich.markup import escape
from rich.table import Table

from .._formats import Int8
from .._formats.base import AbstractFormat
from .._report import as_plain, Name, Report, report_table
from .._tree.leaves import abbreviate_list
from .._types import PyTree
from ._result import CalibrationResult, choose_qparams


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LeafStats:
    """Statistics of the inputs of one weight.

    - `path`, `shape`: the path and the shape of the weight.
    - `axis`: the contracted axis of the weight, which is the axis to quantize along: `-1` for `w @ x`, `-2` for
        `x @ w`, all input axes for a convolution. `None` for a weight that no product used.
    - `note`: remarks, or why the weight has no statistics.
    - `rows`: the number of observed inputs: int64, with the shape of the axes before the last two, a stack of layers
        (for a convolution, the axes before its kernel).
    - `min`, `max`, `mean`, `mean_abs`, `second_moment`: statistics of each input feature: float64,
        `(*stack, features)`. The second moment is the mean square. The features of a convolution are the values of the
        patch under the kernel, in the order of its axes; the groups of a grouped convolution are pooled.
    - `outlier_rate`: the share of values whose magnitude exceeds the threshold.
    - `gram`: with `gram=True`, the mean of $x x^T$: float64, `(*stack, features, features)`. The Hessian of GPTQ is
        twice this matrix.
    - `output_gram`: with `gram=True` and `gradients=True`, the sum of $d d^T$ over the gradients $d$ of the columns:
        float64, `(*stack, rows, rows)`. `None` for more than 32,768 rows.
    - `calibrated`: with a `calibrator`, its `CalibrationResult` for all values of the inputs, one
        for each layer of a stack: `(*stack,)`.
    - `looked_up`: whether the weight was only indexed, as an embedding, so that it has no inputs. With `lookups=True`
        it has a `second_moment` and a `gram` nevertheless, of the gradients of its entries: they say how much an error
        of an entry changes the outputs, in random directions. `rows` counts the gradients; a table with fewer of them
        than features has no statistics.
    - `fingerprint`: a few sums of the values of the weight, by which methods recognize it; `None` if it was quantized.

    The statistics are `None` for a weight without observed inputs. In a stack, they are zero (like `rows`) for each
    layer without observed inputs.
    """

    path: str
    shape: tuple[int, ...]
    axis: int | tuple[int, ...] | None
    note: str
    rows: np.ndarray
    min: np.ndarray | None = None
    max: np.ndarray | None = None
    mean: np.ndarray | None = None
    mean_abs: np.ndarray | None = None
    second_moment: np.ndarray | None = None
    outlier_rate: float | None = None
    gram: np.ndarray | None = dataclasses.field(default=None, repr=False)
    output_gram: np.ndarray | None = dataclasses.field(default=None, repr=False)
    looked_up: bool = False
    calibrated: CalibrationResult | None = dataclasses.field(default=None, repr=False)
    fingerprint: np.ndarray | None = dataclasses.field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain Python values, without the Gram matrices."""
        return as_plain(self)

    def activations(self) -> tuple[AbstractFormat, Array, Array | None]:
        """Returns the format of activations, with one scale (per tensor) and the zero point.

        By default eight-bit integers with a zero point, over the whole range. A layer of a stack that no input reached
        gets the whole range of the others; with a calibrator, the largest scale among them.
        """
        missed = self.rows == 0
        if self.calibrated is not None:
            scale, zero_point = self.calibrated.scale, self.calibrated.zero_point
            if missed.any():
                widest = lambda x: jnp.where(missed, x.ravel()[jnp.argmax(scale)], x)
                scale, zero_point = widest(scale), None if zero_point is None else widest(zero_point)
            return self.calibrated.format, scale, zero_point
        if self.min is None or self.max is None:
            raise ValueError(f"{self.path} must have observed inputs. Got none: {self.note}.")
        low, high = self.min.min(axis=-1), self.max.max(axis=-1)
        low, high = np.where(missed, low[~missed].min(), low), np.where(missed, high[~missed].max(), high)
        low, high = jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32)
        format = Int8(block_size="tensor", symmetric=False)
        return format, *choose_qparams(jnp.minimum(low, 0), jnp.maximum(high, 0), format)


# The statistics with an entry for each layer of a stack.
PER_LAYER = ("rows", "min", "max", "mean", "mean_abs", "second_moment", "gram", "output_gram")
_STATISTICS = (*PER_LAYER, "outlier_rate")


def _flatten_stats(stats: LeafStats) -> tuple[tuple[PyTree, ...], tuple[Hashable, ...]]:
    return tuple(getattr(stats, name) for name in _STATISTICS), (stats.shape, stats.axis)


def _unflatten_stats(static: tuple[Hashable, ...], arrays: Iterable[PyTree]) -> LeafStats:
    stats = object.__new__(LeafStats)  # JAX also unflattens with leaves that are not arrays
    fields = {"path": "", "shape": static[0], "axis": static[1], "note": "", "looked_up": False}
    fields |= {"calibrated": None, "fingerprint": None}
    for name, value in (*fields.items(), *zip(_STATISTICS, arrays, strict=True)):
        object.__setattr__(stats, name, value)
    return stats


# A method may hold statistics, and methods are arguments of compiled functions. The pytree leaves out the path and the
# note, so that weights of one shape share a program.
jtu.register_pytree_node(LeafStats, _flatten_stats, _unflatten_stats)


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ActivationStats(Report, Mapping[str, LeafStats]):
    """The statistics of each weight of a model: a mapping from its path to a `LeafStats`.

    [`eqquant.calibrate.collect_stats`][] returns it. `stats["layers.0.weight"]` are the statistics of that weight. Pass
    it as the `inputs` of a method that needs statistics. Prints as a table.

    - `leaves`: the statistics of each weight, in the order of the model.
    - `batches`: the number of observed batches.
    - `threshold`: the magnitude above which a value counts as an outlier.
    """

    leaves: tuple[LeafStats, ...]
    batches: int
    threshold: float | int

    def __getitem__(self, path: str) -> LeafStats:
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(
            f"No weight {path!r} was watched. The weights are {abbreviate_list(leaf.path for leaf in self.leaves)}."
        )

    def without_fingerprints(self) -> "ActivationStats":
        """Returns the statistics for use with changed weights whose inputs did not change.

        Methods raise for a weight that differs by 5 % or more from the observed one, since statistics of another weight
        silently make results worse: from before [`eqquant.transforms.rotate`][], [`eqquant.transforms.smooth`][] or
        training, or from another checkpoint.
        """
        leaves = tuple(dataclasses.replace(leaf, fingerprint=None) for leaf in self.leaves)
        return dataclasses.replace(self, leaves=leaves)

    def __iter__(self) -> Iterator[str]:
        return (leaf.path for leaf in self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def __rich__(self) -> Table:
        columns = ("rows", "min", "max", "rms", f"above {self.threshold:g}")
        table = report_table("parameter", "shape", *columns, "note", text=2)
        table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
        for leaf in self.leaves:
            shape = " x ".join(map(str, leaf.shape))
            if leaf.min is None or leaf.max is None or leaf.second_moment is None:
                table.add_row(Name(leaf.path), shape, "0", "", "", "", "", escape(leaf.note), style="dim")
                continue
            # In a stack, each layer is weighted by its rows.
            rms = math.sqrt(np.average(leaf.second_moment.mean(axis=-1), weights=leaf.rows))
            cells = (f"{leaf.min.min():.4g}", f"{leaf.max.max():.4g}", f"{rms:.4g}", f"{leaf.outlier_rate:.4%}")
            table.add_row(Name(leaf.path), shape, f"{leaf.rows.sum():,}", *cells, escape(leaf.note))
        return table
