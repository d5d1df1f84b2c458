"""Statistics of the inputs of the weights of a model."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np
from rich.markup import escape
from rich.table import Table

from .._methods.statistics import LeafStats
from .._report import Name, Report, report_table
from .._tree.leaves import abbreviate_list


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
