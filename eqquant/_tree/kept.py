"""Keeps arrays for the next step: in memory or in files, as they are or in another dtype."""

import itertools
import shutil
import tempfile
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, DTypeLike

from .._types import PyTree


class _KeptArray(NamedTuple):
    x: Array | Path
    kept_dtype: np.dtype
    dtype: np.dtype
    shape: tuple[int, ...]

    def load(self) -> Array:
        x = np.fromfile(self.x, self.kept_dtype).reshape(self.shape) if isinstance(self.x, Path) else self.x
        return jnp.asarray(x, self.dtype)


class Kept:
    """Pytrees by key. Floats may be kept in another dtype, or in files."""

    def __init__(self, dtype: DTypeLike | None = None, folder: str | Path | None = None) -> None:
        """**Arguments:**

        - `dtype`: the dtype of floats while they are kept; `None` keeps them as they are.
        - `folder`: where to put files, which are deleted with this object; `None` for memory.
        """
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f'`keep_dtype` must be a floating-point dtype, such as "bfloat16". Got {dtype!r}.')
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"`keep_in` must be a folder. Got {str(folder)!r}. Make it first.")
        self._dtype = dtype
        self._folder = None if folder is None else Path(tempfile.mkdtemp(prefix="eqquant-", dir=folder))
        if self._folder is not None:
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._trees: dict[Hashable, PyTree] = {}
        self._numbers: dict[Hashable, int] = {}

    def __setitem__(self, key: Hashable, tree: PyTree) -> None:
        number, count = self._numbers.setdefault(key, len(self._numbers)), itertools.count()

        def keep(x: Array) -> _KeptArray | Array:
            if not (eqx.is_inexact_array(x) and jnp.issubdtype(x.dtype, jnp.floating)):
                return x
            kept = x if self._dtype is None else x.astype(self._dtype)
            types = np.dtype(kept.dtype), np.dtype(x.dtype), x.shape
            if self._folder is None:
                return _KeptArray(kept, *types)
            path = self._folder / f"{number}-{next(count)}"
            np.asarray(kept).tofile(path)
            return _KeptArray(path, *types)

        self._trees[key] = jtu.tree_map(keep, tree)

    def __getitem__(self, key: Hashable) -> PyTree:
        is_kept = lambda x: isinstance(x, _KeptArray)
        return jtu.tree_map(lambda x: x.load() if is_kept(x) else x, self._trees[key], is_leaf=is_kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._trees
