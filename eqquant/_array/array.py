"""`QuantizedArray`. The file to read first.

A quantized array stands for the float array `decode(codes) * scale`, or `(codes - zero_point) * scale` with a zero
point, or `decode(codes) * scale + offset` with an offset, in blocks along its *quantized axis*. In memory the quantized
axis is always last; `axis` is its position in the logical shape.
"""

import contextlib
import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any, Generic

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import wadler_lindig as wl
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, Float
from typing_extensions import TypeVar

from .._formats.base import AbstractFormat
from .._mesh import as_named, as_names, explicit_mesh, fit_spec, full_spec, in_auto_mode, permute_spec, place
from .._numerics.axes import as_axes, as_axis, logical_order
from .._types import ShardingLike
from .codes import AbstractCodes, check_leaves, is_in_order, row_length, spread_tiles
from .contraction import AbstractOperand, Constraints, MatrixAxes, Options
from .dense import allow_dense, check_dense
from .dequantize import bind_dequantize, dequantize_rows, in_memory_order
from .moves import CannotMove, Move
from .primitive import bind_matmul
from .sharding import leaf_shardings, logical_sharding
from .straight_through import value_of
from .value import AbstractArrayValue, as_permutation, flatten_arguments, Index


_Format = TypeVar("_Format", bound="AbstractFormat", covariant=True, default="AbstractFormat")


class QuantizedArray(AbstractCodes, Generic[_Format]):
    """An array that stores each value in a few bits, and behaves like a `jax.Array` of floats.

    Make one with [`eqquant.quantize`][]; for a whole model, call [`eqquant.quantize_tree`][].

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.NF4())          # w: Float[Array, "out in"]
        y = q @ x                               # the quantized matmul; no dense copy of the weight
        row = q[3]                              # dequantizes one row
        z = jnp.sin(q)                          # any jax.numpy function, most of jax.lax; the result is dense
        def f(w: Float[eqq.QuantizedArray[eqq.NF4], "out in"]): ...
        ```

    A few functions of `jax.lax` do not take it. `expand_dims`, `broadcast`, `broadcast_in_dim`, `reduce`, `split` and
    `associative_scan` raise an error: use `jax.numpy`, or [`eqquant.quaxify`][]. Collectives work on the leaves, not on
    the array: `jax.lax.psum(q, name)` and `pmax` add and compare *codes*, without an error. Write
    `jax.lax.psum(q.dequantize(), name)`.

    For every format:

    - `shape` is derived from the stored arrays, so `vmap`, `scan` over stacked layers, `tree_map(lambda a: a[i])` and
        stacking by `tree_map` just work.
    - All leaves share their leading axes. A scale for a whole matrix is stored once per row, and
        one for a tile once per row of tiles.
    - Every leaf is an unsigned integer; scales are stored as the bits of their floats. So gradient filters, optimizers,
        weight decay and mixed-precision casts leave it untouched, and additive updates are exact. (Inside a function
        that [`eqquant.filter_grad`][] differentiates, an extra float leaf receives the gradient.)
    - `nbytes` counts the stored bytes.
    """

    holds_codes = True

    # Makes `isinstance`, beartype and jaxtyping check `QuantizedArray[NF4]`; at run time they ignore a plain `Generic`
    # subscript.
    def __class_getitem__(cls, format: object) -> type:
        narrow = isinstance(format, type) and format is not Any  # `Any` is a class since Python 3.11
        return _narrow(format) if narrow else super().__class_getitem__(format)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def dtype(self) -> np.dtype:
        """The logical dtype: the dtype of `dequantize()`."""
        return self.logical_dtype

    @property
    def sharding(self) -> NamedSharding | PartitionSpec | None:
        """The sharding of the logical array, or `None` if it has none.

        Read from the codes; for traced codes, the last one given, aligned with the last axes.
        """
        return logical_sharding(self) or fit_spec(self.logical_sharding, self.ndim)

    @property
    def is_sharded(self) -> bool:
        """Whether the array is divided among devices."""
        sharding = self.sharding
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding or ()
        return any(as_names(entry) for entry in spec)

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the dense array, of `shape` and `dtype`."""
        check_leaves(self)
        check_dense(self)
        if explicit_mesh(self.codes) is not None:
            return in_auto_mode(_dequantize, logical_sharding(self))(self)
        return _dequantize(self)

    def transpose(self, *axes: int | Sequence[int] | None) -> "QuantizedArray":
        """Permutes the logical axes.

        Relabels the quantized axes without moving them; permutes the others in memory.
        """
        order = as_permutation(axes, self.ndim)
        quantized = [a + self.ndim for a in as_axes(self.axis)]
        batch = [a for a in range(self.ndim) if a not in quantized]
        batch_order = tuple(batch.index(a) for a in order if a not in quantized)
        out = self if batch_order[-1:] == tuple(range(len(batch)))[-1:] else spread_tiles(self)
        if batch_order != tuple(range(len(batch))):
            out = jtu.tree_map(lambda leaf: jnp.transpose(leaf, (*batch_order, leaf.ndim - 1)), out)
        return dataclasses.replace(
            out,
            axis=as_axis(tuple(order.index(a) - self.ndim for a in quantized)),
            logical_sharding=permute_spec(self.logical_sharding, self.ndim, order),
        )

    def astype(self, dtype: DTypeLike) -> "QuantizedArray | Array":
        """Changes the logical dtype. Returns a dense array if `dtype` is not floating point."""
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.dequantize().astype(dtype)
        return dataclasses.replace(self, logical_dtype=jax.dtypes.canonicalize_dtype(dtype))

    def reshape(self, *shape: int | Sequence[int], order: str = "C", **kwargs: Any) -> "QuantizedArray | Array":
        """Reshapes the logical array.

        Stays quantized unless that mixes a quantized axis with another axis; then the result is dense.
        """
        new = tuple(int(d) for d in flatten_arguments(shape))
        if new.count(-1) == 1 and math.prod(d for d in new if d != -1) > 0:
            new = tuple(self.size // math.prod(d for d in new if d != -1) if d == -1 else d for d in new)
        # `jnp.reshape` calls this method with keywords that only a dense array supports.
        plain = order == "C" and all(v is None for v in kwargs.values())
        split = self._find_split(new) if plain else None
        if split is None:
            return self.dequantize().reshape(new, order=order, **kwargs)
        out = jtu.tree_map(lambda leaf: leaf.reshape(*new[:split], leaf.shape[-1]), spread_tiles(self))
        lengths = new[split:]
        return dataclasses.replace(
            out, axis=as_axis(tuple(range(-len(lengths), 0))), lengths=lengths, logical_sharding=None
        )

    def __getitem__(self, index: Index) -> Array:
        """Returns dense values.

        Dequantizes only the selected rows if the index keeps the quantized axes whole.
        """
        parts = index if isinstance(index, tuple) else (index,)
        split = self._split_index(parts)
        if split is None:
            return self.dequantize()[parts]
        rows, within = split
        selected = jtu.tree_map(lambda leaf: leaf[rows], spread_tiles(self))
        # `no_dense` allows lookups of rows, but not decoding a matrix of a stack.
        is_matrix = bool(rows) and isinstance(rows[-1], slice) and rows[-1] == slice(None)
        with contextlib.nullcontext() if is_matrix else allow_dense():
            return dataclasses.replace(selected, logical_sharding=None).dequantize()[(..., *within)]

    def with_sharding(self, sharding: ShardingLike) -> "QuantizedArray":
        """Moves the array to a sharding of the logical array; under `jit`, constrains it.

        The shardings of codes, scales and zero points follow from it. The quantized axis can be divided only between
        blocks and packed segments: of 128 codes of 4 bits, 256 of 2 bits, 512 of 1 bit. A scale that covers more than
        one part is replicated.

        !!! Example

            ```python
            q = q.with_sharding(NamedSharding(mesh, P("model", None)))
            ```

        **Arguments:**

        - `sharding`: a `NamedSharding`; or a `PartitionSpec`, on the mesh of the array, or else on the mesh of
            `jax.set_mesh`. `None` forgets the sharding, and moves nothing.

        **Returns:**

        The same array, with that sharding.

        **Raises:**

        `ValueError` if the spec does not fit; the message names the axis, its length, its blocks and the mesh axes.
        """
        if sharding is None:
            return dataclasses.replace(self, logical_sharding=None)
        named = full_spec(as_named(sharding, self.sharding), self.ndim)
        placed = place(self, leaf_shardings(self, named))
        return dataclasses.replace(placed, logical_sharding=named)

    def reshard(self, sharding: NamedSharding | PartitionSpec | None) -> "QuantizedArray":
        """The same as `with_sharding`."""
        return self.with_sharding(sharding)

    def with_mesh_and_axis(self, mesh_and_axis: Any) -> "QuantizedArray":
        """As `with_sharding`, but takes a mesh and a spec.

        **Arguments:**

        - `mesh_and_axis`: a pair of a mesh and a spec. The spec is a `PartitionSpec`; a tuple of its entries; the name
            of the mesh axis that divides the first dimension; or `None`, to replicate the array on every device.

        **Returns:**

        The same array, with that sharding.

        **Raises:**

        The errors of `with_sharding`, and `TypeError` if `mesh_and_axis` is not a pair.
        """
        if not isinstance(mesh_and_axis, tuple) or len(mesh_and_axis) != 2:
            raise TypeError(f"`mesh_and_axis` must be a pair of a mesh and a spec. Got {mesh_and_axis!r}.")
        mesh, spec = mesh_and_axis
        entries = () if spec is None else tuple(spec) if isinstance(spec, (tuple, list, PartitionSpec)) else (spec,)
        return self.with_sharding(as_named(PartitionSpec(*entries), NamedSharding(mesh, PartitionSpec())))

    def delete(self) -> None:
        """Frees the memory of the array now.

        Neither it nor any array that shares the memory can be used afterwards.
        """
        for leaf in jtu.tree_leaves(self):
            leaf.delete()

    @property
    def constraints(self) -> Constraints:
        """For products: the quantized axes stay whole."""
        return Constraints(tuple(axis % self.ndim for axis in as_axes(self.axis)))

    def as_matrices(self, axes: MatrixAxes) -> "QuantizedArray":
        """For products: the array as matrices, with the quantized axes as rows or columns."""
        contracts_blocks = axes.columns == self.constraints.packed_axes
        batch = [axis for axis in range(self.ndim) if axis - self.ndim not in as_axes(self.axis)]
        chosen = (*axes.front, *(axes.rows if contracts_blocks else axes.columns))
        order = [batch.index(axis) for axis in (*(a for a in batch if a not in chosen), *chosen)]
        *front, rows, columns = axes.shape(self.shape)
        shape = (*front, rows if contracts_blocks else columns)
        arrange = lambda leaf: jnp.transpose(leaf, (*order, leaf.ndim - 1)).reshape(*shape, leaf.shape[-1])
        in_place = order == sorted(order) and shape == self.codes.shape[:-1]
        out = self if in_place else jtu.tree_map(arrange, spread_tiles(self))
        axis = -1 if contracts_blocks else -2
        if out.axis == axis and len(out.lengths) == 1 and out.logical_sharding is None:
            return out  # `replace` takes as long as the rest
        return dataclasses.replace(out, axis=axis, lengths=(row_length(self),), logical_sharding=None)

    def linear(self, x: Array | AbstractOperand, options: Options) -> Float[Array, "*batch m n"]:
        """For products: `x . self^T` of matrices, by the primitive."""
        w = self if self.axis == -1 else dataclasses.replace(self, axis=-1)
        return bind_matmul(x, w, options, transpose=self.axis == -2)

    def move(self, spec: Move, *others: "QuantizedArray") -> AbstractArrayValue:
        if spec.move_codes is not None:
            return spec.move_codes(self, *others)
        quantized = [axis % self.ndim for axis in as_axes(self.axis)]
        kept = [n for n, axis in enumerate(quantized) if axis in spec.source_axes]
        if not kept or not spec.changed_axes.isdisjoint(quantized):
            raise CannotMove
        axes = (*(axis for axis in range(self.ndim) if axis not in quantized), None)
        rest = [axis for axis in spec.source_axes if axis not in quantized]
        keeps_tiles = rest[-1:] == [*axes[:-1]][-1:] and spec.changed_axes.isdisjoint(rest[-1:])
        arrays = (self, *others) if keeps_tiles else map(spread_tiles, (self, *others))
        out = jtu.tree_map(ft.partial(spec.move_leaf, axes), *arrays)
        return dataclasses.replace(
            out,
            axis=as_axis(tuple(spec.source_axes.index(quantized[n]) - len(spec.source_axes) for n in kept)),
            lengths=tuple(self.lengths[n] for n in kept),
            logical_sharding=None,
        )

    def _find_split(self, new: tuple[int, ...]) -> int | None:
        """Returns how many axes of `new` are batch axes, or `None` if memory would move."""
        batch = self.codes.shape[:-1]
        if not is_in_order(self) or math.prod(new) != self.size:
            return None
        for split in reversed(range(len(new))):
            if math.prod(new[split:]) == row_length(self) and math.prod(new[:split]) == math.prod(batch):
                return split
        return None

    def _split_index(self, index: tuple[Index, ...]) -> tuple[tuple[Index, ...], tuple[Index, ...]] | None:
        """Splits an index between batch axes and slices of quantized axes; `None` if it cannot."""
        if not is_in_order(self):
            return None
        consumed = [0 if i is None or i is Ellipsis else _index_rank(i) for i in index]
        if sum(i is Ellipsis for i in index) > 1 or sum(consumed) > self.ndim:
            return None
        if not any(i is Ellipsis for i in index):
            index, consumed = (*index, ...), [*consumed, 0]
        where = next(n for n, i in enumerate(index) if i is Ellipsis)
        fill = self.ndim - sum(consumed)
        index = (*index[:where], *[slice(None)] * fill, *index[where + 1 :])
        consumed = [*consumed[:where], *[1] * fill, *consumed[where + 1 :]]
        for n in range(len(index) + 1):
            if sum(consumed[:n]) == self.ndim - len(self.lengths) and all(isinstance(i, slice) for i in index[n:]):
                return index[:n], index[n:]
        return None

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        try:
            what = f"{self.dtype.name}[{','.join(map(str, self.shape))}]"
        except (AttributeError, TypeError, ValueError):  # mid-surgery, or mapped over a wrong axis
            what = f"{self.dtype.name}, codes={self.codes!r}"
        return wl.TextDoc(f"QuantizedArray({what}, {self.format!r}, axis={self.axis})")


@ft.partial(jax.jit, inline=True)
def _dequantize(q: QuantizedArray) -> Array:
    q = spread_tiles(q)
    # XLA on CPU fuses the decoding of bytes into the next operation, so kernels gain nothing there.
    dense = dequantize_rows(q) if q.format.bits == 8 else bind_dequantize(in_memory_order(q))
    if q.gradient_of is not None:
        dense = value_of(dense, gradient_of=q.gradient_of.astype(q.dtype))
    return logical_order(dense, as_axes(q.axis), q.lengths)


@ft.cache
def _narrow(format_type: type[AbstractFormat]) -> type:
    class Narrowed(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, QuantizedArray) and isinstance(instance.format, format_type)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return False

    return Narrowed(f"QuantizedArray[{format_type.__name__}]", (), {"__doc__": QuantizedArray.__doc__})


def _index_rank(index: Index) -> int:
    """Returns how many axes one element of an index consumes."""
    return index.ndim if isinstance(index, (jax.Array, np.ndarray, np.generic)) and index.dtype == bool else 1


def is_quantized(x: object) -> bool:
    """Returns whether `x` is a [`eqquant.QuantizedArray`][]. Pass it as `is_leaf`.

    !!! Example

        ```python
        weights = jax.tree.leaves(model, is_leaf=eqq.is_quantized)
        ```

    **Arguments:**

    - `x`: anything.

    **Returns:**

    A boolean; `False` for a tree that holds quantized arrays.
    """
    return isinstance(x, QuantizedArray)


# For annotations: `Float[ArrayOrQuantized, "out in"]`.
ArrayOrQuantized = jax.Array | AbstractArrayValue
