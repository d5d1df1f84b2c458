"""Batches of data, and the function that runs a model on one."""

from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np

from .._types import PyTree


Apply = Callable[[PyTree, PyTree], PyTree]


def as_apply(apply: Apply | None) -> Apply:
    """Returns the function of a model and a batch; by default the model takes one example."""
    return _map_model if apply is None else apply


def _map_model(model: PyTree, batch: PyTree) -> PyTree:
    return jax.vmap(model)(batch)


def as_batches(batches: PyTree | Iterable[PyTree]) -> Iterable[PyTree]:
    """Returns an iterable of batches. A single array is one batch."""
    if isinstance(batches, Mapping):
        raise TypeError("`batches` must be an iterable of batches. Got a dict. Pass a list of batches: `[batch]`.")
    return [batches] if isinstance(batches, (jax.Array, np.ndarray)) else batches


def list_batches(batches: PyTree | Iterable[PyTree]) -> list[PyTree]:
    """Returns a list of batches. Raises if it is empty."""
    data = list(as_batches(batches))
    if not data:
        raise ValueError("`batches` must hold data. Got no batch. A generator can be used only once: make a new one.")
    return data
