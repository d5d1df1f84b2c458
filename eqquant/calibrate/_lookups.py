"""Statistics of embeddings: Gram matrices of gradients, in the place of inputs."""

from collections.abc import Hashable, Iterable, Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from .._tree.batches import Apply
from .._tree.leaves import Leaf
from .._types import PyTree
from ._observers import WeightObserver


Table = Float[Array, "*stack entries features"]


class Lookups:
    r"""Sums $g g^T$ over the gradients $g$ of the entries of tables, in float64.

    Each gradient is of the outputs projected on a random direction. So the mean of $g g^T$ is the mean of $J^T J$,
    where $J$ holds the derivatives of all outputs by one entry: its error $e$ changes the outputs by $e^T J^T J e$.
    """

    def __init__(self, run: Apply, model: PyTree, observers: Sequence[tuple[Leaf, WeightObserver]]) -> None:
        self.run, self.model, self.observers = run, model, observers
        self.gram: dict[str, np.ndarray] = {}
        self.rows: dict[str, np.ndarray] = {}

    def after_each(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Yields batches, and adds the gradients of each after its lookups were observed."""
        for n, batch in enumerate(batches):
            yield batch
            self._add(n, batch)

    def _add(self, n: int, batch: PyTree) -> None:
        tables = {leaf.keys: leaf.value for leaf, observer in self.observers if _is_only_looked_up(leaf, observer)}
        if not tables:
            return
        # A shared table is one argument, with the gradient of all its places.
        unique_tables = {id(x): x for x in tables.values()}
        places = {keys: list(unique_tables).index(id(x)) for keys, x in tables.items()}
        try:
            found = _compute_moments(
                self.run, self.model, batch, list(unique_tables.values()), tuple(places.items()), jr.key(n)
            )
        except (ValueError, NotImplementedError) as e:
            if "ifferentiation" not in str(e):
                raise
            raise ValueError(
                f"`lookups=True` needs a model that JAX can differentiate. Got {str(e).splitlines()[0]!r}. Pass "
                "`lookups=False`."
            ) from e
        by_table = dict(zip(unique_tables, found, strict=True))
        for leaf, observer in self.observers:
            if leaf.keys not in tables:
                continue
            gram, rows = (np.asarray(x, np.float64) for x in by_table[id(leaf.value)])
            if not np.isfinite(gram).all():
                raise ValueError(
                    f"The gradients of {leaf.path} must be finite, and so must their squares in float32. Got NaN, "
                    f"infinity or too large a value in batch {n}, counted from 0. Leave this batch out, or pass "
                    "`lookups=False`."
                )
            self.gram[leaf.path] = self.gram.get(leaf.path, 0) + gram
            self.rows[leaf.path] = self.rows.get(leaf.path, 0) + rows


def _is_only_looked_up(leaf: Leaf, observer: WeightObserver) -> bool:
    multiplied = any(sums.total for sums in observer.by_axes.values())
    return eqx.is_inexact_array(leaf.value) and observer.looked_up and not observer.used and not multiplied


def _real_parts(x: Array) -> list[Array]:
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return [part.astype(jnp.float32) for part in parts]


@eqx.filter_jit
def _compute_moments(
    run: Apply,
    model: PyTree,
    batch: PyTree,
    tables: Sequence[Table],
    places: Sequence[tuple[tuple[Hashable, ...], int]],
    key: Array,
) -> list[tuple[Float32[Array, "*stack features features"], Int32[Array, "*stack"]]]:
    """Returns the sum of $g g^T$ for each table, and the number of gradients that are not zero."""
    at = dict(places)

    def project_outputs(tables: Sequence[Table]) -> Float32[Array, ""]:
        place = lambda keys, x: tables[at[keys]] if keys in at else x
        outputs = run(jtu.tree_map_with_path(place, model), batch)
        floats = [part for x in jtu.tree_leaves(outputs) if eqx.is_inexact_array(x) for part in _real_parts(x)]
        keys = jr.split(key, len(floats))
        project = lambda x, key: jnp.vdot(x, jr.rademacher(key, x.shape, jnp.float32))
        return sum((project(x, k) for x, k in zip(floats, keys, strict=True)), jnp.zeros((), jnp.float32))

    def compute_moments(gradient: Table) -> tuple[Array, Array]:
        g = gradient.astype(jnp.float32)
        gram = jnp.matmul(jnp.swapaxes(g, -1, -2), g, precision=jax.lax.Precision.HIGHEST)
        return gram, jnp.sum((g != 0).any(axis=-1), axis=-1, dtype=jnp.int32)

    return [compute_moments(g) for g in jax.grad(project_outputs)(list(tables))]
