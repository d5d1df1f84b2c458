"""The protocol of the statistics that `calibrate` collects, for the rooms below it."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array

from .._formats.base import AbstractFormat
from .._methods.statistics import Statistics


@runtime_checkable
class InputStatistics(Statistics, Protocol):
    """Statistics of the inputs of one weight, from [`eqquant.calibrate.collect_stats`][]."""

    @property
    def looked_up(self) -> bool: ...
    @property
    def rows(self) -> np.ndarray: ...
    @property
    def min(self) -> np.ndarray | None: ...
    @property
    def max(self) -> np.ndarray | None: ...
    @property
    def mean_abs(self) -> np.ndarray | None: ...

    def activations(self) -> tuple[AbstractFormat, Array, Array | None]:
        """Returns the format of the inputs, one scale for all of them, and the zero point."""
        ...
