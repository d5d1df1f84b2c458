"""Gram matrices of the gradients of weights, which methods take for those of inputs."""

from collections.abc import Hashable, Iterable, Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, PRNGKeyArray

from .._numerics.axes import memory_order
from .._tree.batches import Apply
from .._tree.leaves import Leaf
from .._types import PyTree
from ._observers import WeightObserver


# The axes of the inputs of a weight; `None` for a table, such as an embedding, whose entries are looked up.
Axes = tuple[int, ...] | None
# The path of a weight, its axes, and the stack of its layers.
Key = tuple[str, Axes, tuple[int, ...]]
# The sums over rows and over columns, and how many rows are not zero.
_Moments = tuple[
    Float32[Array, "*stack features features"], Float32[Array, "*stack rows rows"] | None, Int32[Array, "*stack"]
]
# The Gram matrix of more rows would take too much memory: of so many, 8 GiB in float64.
_MOST_ROWS = 2**15


class Gradients:
    r"""Sums $g g^T$ over the gradients $g$ of the rows of weights, and of their columns.

    These are the factors of a Kronecker-factored Hessian, as in YAQA (https://arxiv.org/abs/2505.22988). Sums are
    float64. Rows of tables are their entries; their columns have no sums.

    Each gradient is of the outputs projected on a random direction of signs (Hutchinson's estimator). So the mean of
    $g g^T$ is the mean of $J^T J$, where $J$ holds the derivatives of all outputs by one row: an error $e$ of the row
    changes the outputs by $J e$, whose square is $e^T J^T J e$.

    - `tables`, `products`: whether to take gradients of weights that are looked up, and of weights with inputs.
    - `gram`, `output_gram`: by weight, the sums over rows `(*stack, features, features)` and over columns
        `(*stack, rows, rows)`.
    - `rows`: by weight, how many gradients of rows are not zero, `(*stack,)`.
    """

    def __init__(
        self, run: Apply, model: PyTree, observers: Sequence[tuple[Leaf, WeightObserver]], tables: bool, products: bool
    ) -> None:
        self.run, self.model, self.observers, self.tables, self.products = run, model, observers, tables, products
        self.gram: dict[Key, np.ndarray] = {}
        self.output_gram: dict[Key, np.ndarray] = {}
        self.rows: dict[Key, np.ndarray] = {}

    def after_each(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Yields batches, and adds the gradients of each after its inputs were observed."""
        for n, batch in enumerate(batches):
            yield batch
            self._add(n, batch)

    def _add(self, n: int, batch: PyTree) -> None:
        chosen = {leaf.keys: (leaf, observer) for leaf, observer in self.observers if self._takes(leaf, observer)}
        if not chosen:
            return
        # A shared weight is one argument, with the gradient of all its places.
        unique = {id(leaf.value): (leaf.value, observer.axes, observer.stack) for leaf, observer in chosen.values()}
        places = tuple((keys, list(unique).index(id(leaf.value))) for keys, (leaf, _) in chosen.items())
        option = "gradients" if self.products else "lookups"
        weights, axes, stacks = zip(*unique.values(), strict=True)
        try:
            found = _compute_moments(self.run, self.model, batch, weights, axes, stacks, places, jr.key(n))
        except (ValueError, NotImplementedError) as e:
            if "ifferentiation" not in str(e):  # as JAX says where a program has no reverse mode
                raise
            raise ValueError(
                f"`{option}=True` needs a model that JAX can differentiate. Got {str(e).splitlines()[0]!r}. Pass "
                f"`{option}=False`."
            ) from e
        by_weight = dict(zip(unique, found, strict=True))
        for leaf, observer in chosen.values():
            gram, output_gram, rows = by_weight[id(leaf.value)]
            if not jnp.isfinite(gram).all():
                raise ValueError(
                    f"The gradients of {leaf.path} must be finite, and so must their squares in float32. Got NaN, "
                    f"infinity or too large a value in batch {n}, counted from 0. Leave this batch out, or pass "
                    f"`{option}=False`."
                )
            key = leaf.path, observer.axes, observer.stack
            for sums, value in ((self.gram, gram), (self.output_gram, output_gram), (self.rows, rows)):
                if value is not None:
                    sums[key] = sums.get(key, 0) + np.asarray(value, np.float64)

    def _takes(self, leaf: Leaf, observer: WeightObserver) -> bool:
        """Returns whether to take gradients of a leaf, after its inputs were observed."""
        if not eqx.is_inexact_array(leaf.value):
            return False
        if any(sums.total for sums in observer.by_axes.values()):
            return self.products
        return self.tables and observer.looked_up and not observer.used


def _real_parts(x: Array) -> list[Array]:
    """Returns outputs as float32; complex ones in two parts."""
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return [part.astype(jnp.float32) for part in parts]


@eqx.filter_jit
def _compute_moments(
    run: Apply,
    model: PyTree,
    batch: PyTree,
    weights: Sequence[Float[Array, "..."]],
    axes: Sequence[Axes],
    stacks: Sequence[tuple[int, ...]],
    places: Sequence[tuple[tuple[Hashable, ...], int]],
    key: PRNGKeyArray,
) -> list[_Moments]:
    """Returns the moments of the gradients of each weight, for one batch.

    - `places`: the keys of each leaf that holds a weight, and the index of that weight in `weights`.
    """
    at = dict(places)

    def project_outputs(weights: Sequence[Array]) -> Float32[Array, ""]:
        place = lambda keys, x: weights[at[keys]] if keys in at else x
        outputs = run(jtu.tree_map_with_path(place, model), batch)
        floats = [part for x in jtu.tree_leaves(outputs) if eqx.is_inexact_array(x) for part in _real_parts(x)]
        keys = jr.split(key, len(floats))
        project = lambda x, key: jnp.vdot(x, jr.rademacher(key, x.shape, jnp.float32))
        return sum((project(x, k) for x, k in zip(floats, keys, strict=True)), jnp.zeros((), jnp.float32))

    square = lambda g: jnp.matmul(jnp.swapaxes(g, -1, -2), g, precision=jax.lax.Precision.HIGHEST)

    def compute_moments(g: Array, axes: Axes, stack: tuple[int, ...]) -> _Moments:
        rows = g.astype(jnp.float32)
        if axes is not None:
            rows = memory_order(rows, axes)
            rows = rows.reshape(*stack, -1, rows.shape[-1])
        has_outputs = axes is not None and rows.shape[-2] <= _MOST_ROWS
        outputs = square(jnp.swapaxes(rows, -1, -2)) if has_outputs else None
        return square(rows), outputs, jnp.sum((rows != 0).any(axis=-1), axis=-1, dtype=jnp.int32)

    gradients = jax.grad(project_outputs)(list(weights))
    return [compute_moments(*args) for args in zip(gradients, axes, stacks, strict=True)]
