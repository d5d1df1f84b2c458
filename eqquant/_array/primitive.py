"""The two things that JAX is told about quantization: the quantized matmul, and a value with another's gradient.

The quantized matmul is a primitive. Here are its name and its call; `_matmul.py` gives it its rules. The primitive
stands below the array class so that the class can call it; the rules stand above the class because they need it. A
primitive is an open table, which is what lets the two be apart without a cycle.
"""

import functools as ft
import math
from typing import Any

import jax
import jax.extend
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, PyTree

from .. import _compat
from .._mesh import as_spec, explicit_mesh, in_auto_mode, Names, names_in


quantized_matmul_p = jax.extend.core.Primitive("quantized_matmul")


def bind_matmul(
    x: Float[Array, "*batch rows inner"],
    w: PyTree,
    *,
    transpose: bool = False,
    precision: Any = None,
    implementation: str | None = None,
) -> Float[Array, "*batch rows outer"]:
    """`x(*batch, m, k) . w(*batch, n, k)^T`, or with `transpose` `x(*batch, m, n) . w(*batch, n, k)`.

    **Arguments:**

    - `x`: floats, whose dtype is also the result's.
    - `w`: a `QuantizedArray` in memory order, `(*batch, n, k)`, with the same batch axes as `x`, or with none.
    - `transpose`: which of the two axes of `w` is contracted. Each product is the other's gradient.
    - `precision`: as in `jax.lax.dot_general`; `None` takes `jax.default_matmul_precision`.
    - `implementation`: as in [`eqquant.matmul`][].
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    # Inside `shard_map` the types of arrays also say along which axes they vary. The product varies along those of
    # both operands, and saying so before it gives the gradient its sum.
    x, w = _compat.vary_alike((x, w))
    product = ft.partial(_bind, transpose=transpose, precision=precision, implementation=implementation)
    mesh = explicit_mesh(x, w)
    if mesh is not None:
        product = in_auto_mode(product, _result_sharding(mesh, x, w.codes, transpose))
    return product(x, w)


def _bind(x: Array, w: PyTree, **params: Any) -> Array:
    leaves, treedef = jtu.tree_flatten(w)
    if w.ndim == 2 and x.ndim != 2:  # one weight for all: examples are rows
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return _bind(rows, w, **params).reshape(*x.shape[:-1], w.shape[-1 if params["transpose"] else -2])
    return quantized_matmul_p.bind(x, *leaves, treedef=treedef, **params)


def _result_sharding(mesh: Any, x: Array, codes: Array, transpose: bool) -> NamedSharding:
    """What the product is divided by where types say so: by what divides `x`, and by what else divides the weight."""
    *batch, rows, _ = _names(x)
    kept = _names(codes)[-1 if transpose else -2]
    taken = {name for names in (*batch, rows) for name in names}
    kept = tuple(name for name in kept if name not in taken)
    return NamedSharding(mesh, as_spec((*batch, rows, kept)))


def _names(x: Array) -> tuple[Names, ...]:
    return names_in(jax.typeof(x).sharding.spec, x.ndim)
