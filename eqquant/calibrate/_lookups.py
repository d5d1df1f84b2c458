"""How the outputs of a model depend on the tables that it looks up: what products have as the Gram matrix of inputs."""

from collections.abc import Hashable, Iterable, Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from .._tree.leaves import Leaf
from .._types import PyTree
from ._observers import Apply, Watch


Table = Float[Array, "*stack entries features"]


class Lookups:
    r"""Sums $g g^T$ over the gradients $g$ of the entries of tables, for each layer of a stack, in float64.

    Each gradient is that of the outputs in a random direction, so that the mean of $g g^T$ is that of $J^T J$, where
    $J$ holds the derivatives of all outputs by one entry: its error $e$ changes the outputs by $e^T J^T J e$.
    """

    def __init__(self, run: Apply, model: PyTree, watches: Sequence[tuple[Leaf, Watch]]) -> None:
        self.run, self.model, self.watches = run, model, watches
        self.gram: dict[str, np.ndarray] = {}
        self.rows: dict[str, np.ndarray] = {}

    def after_each(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Passes on batches, and adds each when the next is asked for: then its lookups were seen."""
        for number, batch in enumerate(batches):
            yield batch
            self._add(number, batch)

    def _add(self, number: int, batch: PyTree) -> None:
        tables = {leaf.keys: leaf.value for leaf, watch in self.watches if _only_looked_up(leaf, watch)}
        if not tables:
            return
        # A table that stands in several places is one argument, whose gradient is that of all places.
        own = {id(x): x for x in tables.values()}
        places = {keys: list(own).index(id(x)) for keys, x in tables.items()}
        try:
            found = _moments(self.run, self.model, batch, list(own.values()), tuple(places.items()), jr.key(number))
        except (ValueError, NotImplementedError) as e:
            if "ifferentiation" not in str(e):
                raise
            raise ValueError(
                f"`lookups=True` needs a model that JAX can differentiate. Got {str(e).splitlines()[0]!r}. Pass "
                "`lookups=False`."
            ) from e
        by_table = dict(zip(own, found, strict=True))
        for leaf, watch in self.watches:
            if leaf.keys not in tables:
                continue
            gram, rows = (np.asarray(x, np.float64) for x in by_table[id(leaf.value)])
            if not np.isfinite(gram).all():
                raise ValueError(
                    f"The gradients of {leaf.path} must be finite, and so must their squares in float32. Got NaN, "
                    f"infinity or too large a value in batch {number}, counted from 0. Leave this batch out, or pass "
                    "`lookups=False`."
                )
            self.gram[leaf.path] = self.gram.get(leaf.path, 0) + gram
            self.rows[leaf.path] = self.rows.get(leaf.path, 0) + rows


def _only_looked_up(leaf: Leaf, watch: Watch) -> bool:
    multiplied = any(sums.total for sums in watch.along.values())
    return eqx.is_inexact_array(leaf.value) and watch.looked_up and not watch.used and not multiplied


def _real_parts(x: Array) -> list[Array]:
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return [part.astype(jnp.float32) for part in parts]


@eqx.filter_jit
def _moments(
    run: Apply,
    model: PyTree,
    batch: PyTree,
    tables: Sequence[Table],
    places: Sequence[tuple[tuple[Hashable, ...], int]],
    key: Array,
) -> list[tuple[Float32[Array, "*stack features features"], Int32[Array, "*stack"]]]:
    """Returns for each table the sum of $g g^T$ over the gradients of its entries, and how many were not zero."""
    at = dict(places)

    def projected(tables: Sequence[Table]) -> Float32[Array, ""]:
        place = lambda keys, x: tables[at[keys]] if keys in at else x
        outputs = run(jtu.tree_map_with_path(place, model), batch)
        floats = [part for x in jtu.tree_leaves(outputs) if eqx.is_inexact_array(x) for part in _real_parts(x)]
        keys = jr.split(key, len(floats))
        project = lambda x, key: jnp.vdot(x, jr.rademacher(key, x.shape, jnp.float32))
        return sum((project(x, k) for x, k in zip(floats, keys, strict=True)), jnp.zeros((), jnp.float32))

    def moments(gradient: Table) -> tuple[Array, Array]:
        g = gradient.astype(jnp.float32)
        gram = jnp.matmul(jnp.swapaxes(g, -1, -2), g, precision=jax.lax.Precision.HIGHEST)
        return gram, jnp.sum((g != 0).any(axis=-1), axis=-1, dtype=jnp.int32)

    return [moments(g) for g in jax.grad(projected)(list(tables))]
