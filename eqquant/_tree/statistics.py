"""The protocol of the statistics that `calibrate` collects, for the rooms below it."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array

from .._formats.base import AbstractFormat


@runtime_checkable
class InputStatistics(Protocol):
    """Statistics of the inputs of one weight, from [`eqquant.calibrate.collect_stats`][]."""

    shape: tuple[int, ...]
    axis: int | tuple[int, ...] | None
    note: str
    looked_up: bool
    rows: np.ndarray
    min: np.ndarray | None
    max: np.ndarray | None
    mean_abs: np.ndarray | None
    second_moment: np.ndarray | None
    gram: np.ndarray | None

    def activations(self) -> tuple[AbstractFormat, Array, Array | None]:
        """Returns the format of the inputs, one scale for all of them, and the zero point."""
        ...
