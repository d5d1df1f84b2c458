"""Rewrites every product with a quantized array as the primitive: `x(*batch, m, k) . w(*batch, n, k)^T`.

The shapes of `jnp.matmul` and the dimension numbers of `jax.lax.dot_general` both become names of axes, as in an
einsum. The role of an axis in the product then follows from where its name occurs. Only this file rearranges shapes.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from .. import _compat
from .._mesh import as_spec, explicit_mesh, in_auto_mode, names_in
from .primitive import bind_matmul
from .sharding import logical_sharding


Axes = Sequence[Hashable]  # the names of the axes of an array


def matmul(x: Any, q: Any, *, left: bool, **options: Any) -> Array | None:
    """Returns `q @ x` if `left`, else `x @ q`, with the shapes of `jnp.matmul`.

    **Arguments:**

    - `x`: floats, or a `QuantizedArray`; the result has their dtype.
    - `q`: a `QuantizedArray` or a `SelectedArray`.
    - `left`: whether `q` is the left operand.
    - `options`: `precision` and `implementation`, as in `bind_matmul`; and `activations`, a function from the rows of
        `x`, floats, to what the primitive takes in their place.

    **Returns:**

    The product, or `None` if the caller must compute it dense.

    **Raises:**

    `ValueError` if contracted lengths differ, or batch axes do not broadcast.
    """
    if x.ndim == 0:
        return None
    first, second = (q.shape, x.shape) if left else (x.shape, q.shape)
    inner = first[-1], second[-2 if len(second) > 1 else -1]
    if inner[0] != inner[1]:
        flipped = "q.T" if q.ndim == 2 else "q.mT"
        fits = q.ndim > 1 and (q.shape[-2] == inner[1] if left else q.shape[-1] == inner[0])
        remedy = f" `{f'{flipped} @ x' if left else f'x @ {flipped}'}` fits." if fits else ""
        raise ValueError(
            f"`matmul` contracts axes of equal length. Got lengths {inner[0]} and {inner[1]}, from {first} @ {second}."
            f"{remedy}"
        )
    batch = jnp.broadcast_shapes(first[:-2], second[:-2])
    # Batch axes broadcast from the end, so their names are their places from the end.
    named = lambda shape, last: (*range(-len(shape), -2), *last) if len(shape) > 1 else ("k",)
    of_first, of_second = named(first, "mk"), named(second, "kn")
    of_y = (*range(-len(batch) - 2, -2), *(name for name in "mn" if name in (*of_first, *of_second)))
    of_x, of_q = (of_second, of_first) if left else (of_first, of_second)
    return einsum(x, q, of_x, of_q, of_y, **options)


def dot_general(x: Any, q: Any, numbers: Any, *, left: bool, **options: Any) -> Array | None:
    """As `matmul`, for `jax.lax.dot_general(q, x, numbers)` if `left`, else `jax.lax.dot_general(x, q, numbers)`."""
    contract, batch = numbers
    pairs = [*zip(*batch, strict=True), *zip(*contract, strict=True)]
    # The two axes of a pair share a name; the name of a free axis is its side and place.
    named = lambda side, ndim: [
        next((pair for pair in pairs if pair[side] == axis), (side, axis, "free")) for axis in range(ndim)
    ]
    of_q, of_x = named(1 - left, q.ndim), named(int(left), x.ndim)
    free = sorted(name for name in (*of_q, *of_x) if len(name) == 3)
    of_y = [*pairs[: len(batch[0])], *free]  # free axes of the left operand come first
    return einsum(x, q, of_x, of_q, of_y, **options)


def einsum(x: Any, q: Any, of_x: Axes, of_q: Axes, of_y: Axes, **options: Any) -> Float[Array, "..."] | None:
    """Returns the sum of products over the axes that `of_y` leaves out, computed by the quantized matmul.

    **Arguments:**

    - `x`, `q`: a float array or a `QuantizedArray`, and a `QuantizedArray` or a `SelectedArray`.
    - `of_x`, `of_q`, `of_y`: the names of the axes of each and of the result. Axes of length one are broadcast.

    **Returns:**

    An array; or `None` if the quantized matmul cannot compute it: the sum runs over only part of the quantized axes, or
    over no axis; or that would take what a `SelectedArray` selects out of its stack.
    """
    form = _form_of(x, q, of_x, of_q, of_y)
    if form is None:
        return None
    if _is_coded(x) and (form.transpose or [of_x[axis] for axis in x._axes] != list(form.inner)):
        x = x.dequantize()  # the sum runs across the blocks of one of them
    # Inside `shard_map`, types also hold the axes that arrays vary along. The product varies along the axes of both
    # operands. Casting the operands to these first makes the gradient sum over the right axes.
    x, q = _compat.vary_alike((x, q))
    product = ft.partial(_product, form, **options)
    mesh = explicit_mesh(x, q)
    if mesh is not None:
        product = in_auto_mode(product, NamedSharding(mesh, _result_spec(form, x, q)))
    return product(x, q)


class _Form(NamedTuple):
    """The names of the axes of `x(*batch, *alone, rows, inner) . w(*batch, *alone, ...)`, by their role."""

    of_x: Axes
    of_q: Axes
    of_y: Axes
    size: Mapping[Hashable, Any]
    transpose: bool
    batch: Axes  # of both operands
    alone: Axes  # of the weight: one `x` for many weights
    rows: Axes  # of `x`
    inner: Axes  # contracted
    outer: Axes  # of the weight, neither batch nor alone


def _form_of(x: Any, q: Any, of_x: Axes, of_q: Axes, of_y: Axes) -> _Form | None:
    inside = [of_q[axis] for axis in q._axes]
    size: dict[Hashable, Any] = {}
    for name, length in (*zip(of_q, q.shape, strict=True), *zip(of_x, x.shape, strict=True)):
        size[name] = length if size.get(name, 1) == 1 else size[name]
    contracts = any(name in of_x and name not in of_y for name in of_q)
    # Drop axes of length one that are not quantized: the matching axis of `x`, if any, becomes rows.
    long_q = [name for name, n in zip(of_q, q.shape, strict=True) if name in inside or n != 1]
    long_x = [name for name, n in zip(of_x, x.shape, strict=True) if n == size[name]]
    shared = [name for name in long_q if name in of_x]
    batch = [name for name in shared if name in of_y and name in long_x]
    contracted = [name for name in shared if name not in of_y]
    free = [name for name in long_q if name not in batch and name not in contracted]
    rows = [name for name in long_x if name in of_y and name not in batch and name not in free]
    index = getattr(q, "index", None)  # of a `SelectedArray`
    chosen = of_q[: index.ndim] if index is not None else ()
    if index is not None and (
        q.ndim != index.ndim + 2 or not set(batch) <= set(chosen) or not set(chosen).isdisjoint(contracted)
    ):
        return None
    if set(inside) == set(contracted):
        # The sum runs along the blocks: x . W^T. Free axes of the weight are its rows, but what an index selects does
        # not lie in memory row by row.
        alone, outer = [name for name in free if name in chosen], [name for name in free if name not in chosen]
        return _Form(of_x, of_q, of_y, size, False, batch, alone, rows, inside, outer)
    if not contracts or any(name not in free for name in inside):
        return None
    # The sum runs across the blocks: x . W. Contracted axes are rows of the weight; `x` is copied along its other axes.
    alone = [name for name in free if name not in inside]
    copies, length = math.prod(size[name] for name in rows), math.prod(size[name] for name in inside)
    if alone and isinstance(copies, int) and copies > length:
        return None  # the copies would take more memory than a dense weight
    return _Form(of_x, of_q, of_y, size, True, batch, alone, rows, contracted, inside)


def _is_coded(x: Any) -> bool:
    return getattr(x, "codes", None) is not None


def _product(form: _Form, x: Any, q: Any, *, activations: Any = None, **options: Any) -> Float[Array, "..."]:
    size = lambda names: [form.size[name] for name in names]
    front = size((*form.batch, *form.alone))
    m, inner = math.prod(size(form.rows)), math.prod(size(form.inner))
    # A matrix whose rows lie last in memory is transposed by one `swapaxes`, which XLA can cancel against another.
    of_matrix = lambda names: [name for name in names if name in (*form.rows, *form.inner, *form.outer)]
    last_is_row = lambda names: bool(names) and names[-1] in form.rows
    by_columns = (not _is_coded(x) and last_is_row(of_matrix(form.of_x)), last_is_row(of_matrix(form.of_y)))
    turn = lambda a, by_columns: jnp.swapaxes(a, -1, -2) if by_columns else a

    if _is_coded(x):
        x = _in_rows(x, form.of_x, (*form.batch, *form.rows), (*size(form.batch), m))
    else:
        x_axes = (*form.inner, *form.rows) if by_columns[0] else (*form.rows, *form.inner)
        x = _ordered(x, form.of_x, (*form.batch, *x_axes))
        x = x.reshape(*size(form.batch), *[1] * len(form.alone), *((inner, m) if by_columns[0] else (m, inner)))
        x = turn(x, by_columns[0])
        x = jnp.broadcast_to(x, (*front, m, inner)) if form.alone else x
        x = x if activations is None else activations(x)

    w = _weight(form, q)
    y = turn(bind_matmul(x, w, transpose=form.transpose, by_columns=by_columns, **options), by_columns[1])
    of_y = (*form.batch, *form.alone, *((*form.outer, *form.rows) if by_columns[1] else (*form.rows, *form.outer)))
    return _ordered(y.reshape(size(of_y)), of_y, form.of_y).reshape(size(form.of_y))


def _weight(form: _Form, q: Any) -> Any:
    """Returns the weight as `(*batch, *alone, rows, length)`."""
    front, of_rows = (*form.batch, *form.alone), form.inner if form.transpose else form.outer
    size = lambda names: [form.size[name] for name in names]
    if (index := getattr(q, "index", None)) is not None:
        index = _ordered(index, form.of_q[: index.ndim], front).reshape(size(front))
        stack = dataclasses.replace(q.stack, axis=-1)
        return dataclasses.replace(q, stack=stack, index=index)
    return _in_rows(q, form.of_q, (*front, *of_rows), (*size(front), math.prod(size(of_rows))))


_LAST = object()


def _in_rows(q: Any, names: Axes, wanted: Iterable[Hashable], shape: Sequence[int]) -> Any:
    """Returns a quantized array as rows of codes, `(*shape, length)`."""
    memory = [name for axis, name in enumerate(names) if axis - q.ndim not in q._axes]
    wanted = [*wanted, _LAST]
    arrange = lambda leaf: _ordered(leaf, [*memory, _LAST], wanted).reshape(*shape, leaf.shape[-1])
    return dataclasses.replace(jtu.tree_map(arrange, q), axis=-1, lengths=(q._length,), logical_sharding=None)


def _ordered(x: Array, names: Axes, wanted: Iterable[Hashable]) -> Array:
    """Permutes axes to the order `wanted`. Unwanted axes, of length one, come first; ignores names that `x` lacks."""
    names, wanted = list(names), list(wanted)
    order = [axis for axis, name in enumerate(names) if name not in wanted]
    return jnp.transpose(x, (*order, *(names.index(name) for name in wanted if name in names)))


def _result_spec(form: _Form, x: Any, q: Any) -> jax.sharding.PartitionSpec:
    """Returns the spec of the product on an explicit mesh: the axes that divide `x`, then the remaining ones of `q`."""
    spec_of = lambda q: () if logical_sharding(q) is None else logical_sharding(q).spec  # pyright: ignore
    of_x = names_in(spec_of(x) if _is_coded(x) else jax.typeof(x).sharding.spec, x.ndim)
    of_q = names_in(spec_of(q), q.ndim)
    divided = {name: by for name, by in zip(form.of_x, of_x, strict=True) if name in form.of_y}
    taken = {axis for by in divided.values() for axis in by}
    for name, by in zip(form.of_q, of_q, strict=True):
        if not divided.get(name):
            divided[name] = tuple(axis for axis in by if axis not in taken)
    return as_spec([divided[name] for name in form.of_y])
