"""`QuantizedArray`. The file to read first.

A quantized array stands for the float array `decode(codes) * scale`, or `(codes - zero_point) * scale` with a zero
point, or `decode(codes) * scale + offset` with an offset, in blocks along its *quantized axis*. In memory the quantized
axis is always last; `axis` is its logical place.
"""

import dataclasses
import functools as ft
import math
import warnings
from collections.abc import Sequence
from typing import Any, Generic

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import wadler_lindig as wl
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Float32, UInt, UInt8
from typing_extensions import TypeVar

from .. import _compat
from .._formats.base import AbstractFormat
from .._mesh import as_named, as_names, explicit_mesh, fit_spec, full_spec, in_auto_mode, permute_spec, place
from .._numerics import packing
from .._numerics.blocks import BlockSize, dequantize_blocks, num_blocks
from .._numerics.scale_bits import bits_to_scale, clip_finite
from .axes import as_axis, logical_order
from .primitive import bind_dequantize
from .product import matmul
from .sharding import leaf_shardings, logical_sharding
from .straight_through import value_of
from .value import AbstractArrayValue, as_permutation, flatten_arguments, multiply


_Format = TypeVar("_Format", bound="AbstractFormat", covariant=True, default="AbstractFormat")


class QuantizedArray(AbstractArrayValue, Generic[_Format]):
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
    - All leaves share their leading axes. A scale for the whole tensor is stored once per row.
    - Every leaf is an unsigned integer; scales are stored as the bits of their floats. So gradient filters, optimizers,
        weight decay and mixed-precision casts leave it untouched, and additive updates are exact. (Inside a function
        that [`eqquant.filter_grad`][] differentiates, an extra float leaf receives the gradient.)
    - `nbytes` counts the stored bytes.
    """

    codes: UInt8[Array, "*batch bytes"]
    scale_bits: "UInt[Array, '*batch blocks'] | QuantizedArray"
    # Packed as the codes are.
    zero_point_bits: UInt8[Array, "*batch bytes_of_blocks"] | None
    format: AbstractFormat
    axis: int | tuple[int, ...] = eqx.field(static=True)
    lengths: tuple[int, ...] = eqx.field(static=True)
    logical_dtype: np.dtype = eqx.field(static=True)
    logical_sharding: NamedSharding | PartitionSpec | None = eqx.field(static=True, default=None)
    # As `scale_bits`, for a format with offsets.
    offset_bits: "UInt[Array, '*batch blocks'] | QuantizedArray | None" = None
    # Only in training: floats in memory order. Values come from the codes; gradients go to these floats.
    gradient_of: Float[Array, "*batch length"] | None = None

    # Makes `isinstance`, beartype and jaxtyping check `QuantizedArray[NF4]`; at run time they ignore a plain `Generic`
    # subscript.
    def __class_getitem__(cls, format: Any) -> Any:
        narrow = isinstance(format, type) and format is not Any  # `Any` is a class since Python 3.11
        return _narrowed(format) if narrow else super().__class_getitem__(format)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, derived from the stored arrays, so it is right under every transformation."""
        self._check_leaves()
        if self.ndim < -min(self._axes):
            raise ValueError(
                f"The quantized axis must not be mapped over. Got `axis={self.axis}` of an array of {self.ndim} "
                "dimensions. `vmap`, `scan` and `tree_map` map over the first axes in memory, which are those before "
                "the quantized one: transpose or dequantize first."
            )
        if self.codes.shape[-1] != packing.packed_length(self._length, self.format.bits):
            raise ValueError(
                f"The quantized axis must be whole inside `shard_map`. Got {self.codes.shape[-1]} bytes of the "
                f"{self._length} codes of a row. Divide another axis, or multiply outside it."
            )
        shape = list(self.codes.shape[:-1])
        for axis, length in sorted(zip(self._axes, self.lengths, strict=True)):
            shape.insert(len(self.codes.shape) - 1 + len(self.lengths) + axis, length)
        return tuple(shape)

    @property
    def dtype(self) -> np.dtype:
        """The logical dtype: the dtype of `dequantize()`."""
        return self.logical_dtype

    @property
    def ndim(self) -> int:
        """The number of logical axes."""
        return self.codes.ndim - 1 + len(self.lengths)

    @property
    def block_size(self) -> BlockSize:
        return self.format.block_size

    @property
    def scale(self) -> Float32[Array, "*batch blocks"]:
        """The scales as floats, one per block, with the quantized axis last."""
        self._check_leaves()
        return self._floats(self.scale_bits)

    @property
    def zero_point(self) -> UInt8[Array, "*batch blocks"] | None:
        """The codes of zero, one per block, with the quantized axis last; `None` if the format has none."""
        self._check_leaves()
        if self.zero_point_bits is None:
            return None
        return packing.unpack(self.zero_point_bits, self.format.bits, num_blocks(self._length, self.block_size))

    @property
    def offset(self) -> Float32[Array, "*batch blocks"] | None:
        """The offsets as floats, one per block, with the quantized axis last; `None` if the format has none."""
        self._check_leaves()
        return None if self.offset_bits is None else self._floats(self.offset_bits)

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
        self._check_leaves()
        if explicit_mesh(self.codes) is not None:
            return in_auto_mode(_dequantize, logical_sharding(self))(self)
        return _dequantize(self)

    def transpose(self, *axes: int | Sequence[int] | None) -> "QuantizedArray":
        """Permutes the logical axes. Only relabels the quantized axes; permutes the others in memory."""
        order = as_permutation(axes, self.ndim)
        quantized = [a + self.ndim for a in self._axes]
        batch = [a for a in range(self.ndim) if a not in quantized]
        batch_order = tuple(batch.index(a) for a in order if a not in quantized)
        out = self
        if batch_order != tuple(range(len(batch))):
            out = jtu.tree_map(lambda leaf: jnp.transpose(leaf, (*batch_order, leaf.ndim - 1)), self)
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
        """Reshapes. Stays quantized unless that mixes a quantized axis with another axis; then the result is dense."""
        new = tuple(int(d) for d in flatten_arguments(shape))
        if new.count(-1) == 1 and math.prod(d for d in new if d != -1) > 0:
            new = tuple(self.size // math.prod(d for d in new if d != -1) if d == -1 else d for d in new)
        # `jnp.reshape` calls this method with keywords that only a dense array supports.
        plain = order == "C" and all(v is None for v in kwargs.values())
        split = self._split_of(new) if plain else None
        if split is None:
            return self.dequantize().reshape(new, order=order, **kwargs)
        out = jtu.tree_map(lambda leaf: leaf.reshape(*new[:split], leaf.shape[-1]), self)
        lengths = new[split:]
        return dataclasses.replace(
            out, axis=as_axis(tuple(range(-len(lengths), 0))), lengths=lengths, logical_sharding=None
        )

    def __getitem__(self, index: Any) -> Array:
        """Returns dense values. Dequantizes only the selected rows if the index keeps the quantized axes whole."""
        index = index if isinstance(index, tuple) else (index,)
        split = self._split_index(index)
        if split is None:
            return self.dequantize()[index]
        rows, within = split
        selected = jtu.tree_map(lambda leaf: leaf[rows], self)
        return dataclasses.replace(selected, logical_sharding=None).dequantize()[(..., *within)]

    def with_sharding(self, sharding: Any) -> "QuantizedArray":
        """Moves the array to `sharding`, a sharding of the logical array; under `jit`, constrains it.

        The shardings of codes, scales and zero points follow from it. The quantized axis can be divided only between
        blocks and packed segments: of 128 codes of 4 bits, 256 of 2 bits, 512 of 1 bit. A scale that covers more than
        one part is replicated.

        !!! Example

            ```python
            q = q.with_sharding(NamedSharding(mesh, P("model", None)))
            ```

        **Arguments:**

        - `sharding`: a `NamedSharding`; or a `PartitionSpec`, on the mesh of the array, or else that of `jax.set_mesh`.
            `None` forgets the sharding, and moves nothing.

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
        """Frees the memory of the array now. Neither it nor any array that shares the memory can be used afterwards."""
        for leaf in jtu.tree_leaves(self):
            leaf.delete()

    def _matmul(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        other: "ArrayLike | QuantizedArray",
        *,
        left: bool,
        implementation: str | None = None,
        precision: Any = None,
        activations: Any = None,
    ) -> Array:
        """Returns `self @ other` if `left`, else `other @ self`, with the shapes of `jnp.matmul`."""
        options = {"implementation": implementation, "precision": precision, "activations": activations}
        if isinstance(other, QuantizedArray) and left:
            if self.axis == -1 and other.axis == -min(other.ndim, 2):  # the sum runs along the blocks of both
                return other._matmul(self, left=False, **options)
            other = other.dequantize()
        x, product = other if isinstance(other, QuantizedArray) else jnp.asarray(other), None
        if isinstance(x, QuantizedArray) or jnp.isrealobj(x):
            self._check_closure(x)
            product = matmul(x.astype(jnp.result_type(x.dtype, self.dtype)), self, left=left, **options)
        if product is not None:
            return product
        x = x.dequantize() if isinstance(x, QuantizedArray) else x
        if implementation is not None:
            raise ValueError(
                "`implementation` is for products over or along the quantized axis. Got "
                f"{implementation!r}, {self!r} and {x.dtype}{list(x.shape)}. Without it the product is dense."
            )
        return multiply(self.dequantize(), x, left=left, precision=precision, activations=activations)

    def _check_closure(self, x: Any) -> None:
        """Warns if a `scan` goes over the biases of stacked layers, but not over their weights."""
        if isinstance(x, jax.Array) and x.ndim == 1 and self.ndim > 2 and _compat.is_constant_of_trace(self.codes, x):
            warnings.warn(
                f"A stack of quantized weights, of shape {self.shape}, is multiplied by one vector inside a function "
                "that closes over the stack. If a `scan` was to take it layer by layer, split the model with "
                "`eqx.partition(model, eqx.is_array)`: codes are integers, and `eqx.is_inexact_array` leaves them "
                "behind. If the product with the whole stack is what you want, pass the stack as an argument.",
                stacklevel=4,
            )

    def _check_leaves(self) -> None:
        """Raises if a leaf is no longer an unsigned integer. Dtypes are static, so this costs nothing in `jit`."""
        of_blocks = {"scale": self.scale_bits, "zero point": self.zero_point_bits, "offset": self.offset_bits}
        for name, leaf in {"codes": self.codes, **of_blocks}.items():
            dtype = getattr(leaf, "dtype", None)
            if isinstance(leaf, QuantizedArray):
                leaf._check_leaves()
            elif dtype == jax.dtypes.float0:
                raise TypeError(
                    "A quantized array has no gradient with respect to its codes. Got a tree of float0, as `jax.grad` "
                    "returns it with `allow_int=True`. Differentiate with `eqq.filter_grad`."
                )
            elif dtype is not None and not jnp.issubdtype(dtype, jnp.unsignedinteger):
                raise TypeError(
                    f"The leaves of a quantized array must be unsigned integers. Got {name} of {dtype}: they were "
                    "averaged or cast as if they were numbers. Average the float model, or the masters, and quantize "
                    "the result. To change what it dequantizes to, call `q.astype(dtype)` on the array as a whole."
                )
        ranks = {jnp.ndim(leaf) for leaf in (self.codes, self.gradient_of) if isinstance(leaf, jax.Array)}
        if len(ranks) > 1:
            raise ValueError(
                f"The leaves of a quantized array must be mapped over together. Got codes of shape {self.codes.shape} "
                f"and a `gradient_of` of shape {getattr(self.gradient_of, 'shape', None)}: a `scan` or `vmap` took "
                "only one of them apart. Split the model with `eqx.partition(model, eqx.is_array)`, not with "
                "`eqx.is_inexact_array`, which leaves codes behind."
            )

    def _floats(self, stored: "Array | QuantizedArray") -> Array:
        """Returns scales or offsets as floats."""
        if isinstance(stored, QuantizedArray):
            return stored.dequantize()
        return bits_to_scale(stored, self.format.scale_dtype)

    @property
    def _axes(self) -> tuple[int, ...]:
        """`axis` as a tuple, in memory order."""
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def _length(self) -> int:
        """The number of values in a row of codes."""
        return math.prod(self.lengths)

    @property
    def _trailing(self) -> bool:
        """Whether the quantized axes are the last ones, in order, so that memory and logical order agree."""
        return self._axes == tuple(range(-len(self.lengths), 0))

    def _split_of(self, new: tuple[int, ...]) -> int | None:
        """Returns where the shape `new` divides into batch and quantized axes without moving memory, or `None`."""
        batch = self.codes.shape[:-1]
        if not self._trailing or math.prod(new) != self.size:
            return None
        for split in reversed(range(len(new))):
            if math.prod(new[split:]) == self._length and math.prod(new[:split]) == math.prod(batch):
                return split
        return None

    def _split_index(self, index: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
        """Splits an index into a part for the batch axes and slices for the quantized ones, or returns `None`."""
        if not self._trailing:
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

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        try:
            what = f"{self.dtype.name}[{','.join(map(str, self.shape))}]"
        except (AttributeError, TypeError, ValueError):  # mid-surgery, or mapped over a wrong axis
            what = f"{self.dtype.name}, codes={self.codes!r}"
        return wl.TextDoc(f"QuantizedArray({what}, {self.format!r}, axis={self.axis})")


@ft.partial(jax.jit, inline=True)
def _dequantize(q: QuantizedArray) -> Array:
    # XLA on CPU fuses the decoding of bytes with what follows, so there kernels gain nothing.
    dense = dense_rows(q) if q.format.bits == 8 else bind_dequantize(_in_memory_order(q))
    if q.gradient_of is not None:
        dense = value_of(dense, gradient_of=q.gradient_of.astype(q.dtype))
    return logical_order(dense, q._axes, q.lengths)


def _in_memory_order(q: QuantizedArray) -> QuantizedArray:
    return dataclasses.replace(q, axis=-1, lengths=(q._length,), logical_sharding=None, gradient_of=None)


def clips(q: QuantizedArray) -> bool:
    """Returns whether dequantizing clips to the finite range of the dtype."""
    shifts = q.zero_point_bits is not None or q.offset_bits is not None
    return shifts or q.format.scale_format is not None or q.dtype == jnp.float16


def dense_rows(q: QuantizedArray) -> Float[Array, "*batch length"]:
    """Dequantizes by operations of XLA, and leaves the quantized axis last."""
    values = q.format.decode(packing.unpack(q.codes, q.format.bits, q._length))
    dense = dequantize_blocks(values, q.scale, q.zero_point, q.offset, q.format.block_size)
    if clips(q):
        # The outermost level may lie half a step beyond the range, and rounding may enlarge a scale; both may overflow.
        dense = clip_finite(dense, q.dtype)
    return dense.astype(q.dtype)


@ft.cache
def _narrowed(format_type: type[AbstractFormat]) -> type:
    class Narrowed(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, QuantizedArray) and isinstance(instance.format, format_type)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return False

    return Narrowed(f"QuantizedArray[{format_type.__name__}]", (), {"__doc__": QuantizedArray.__doc__})


def _index_rank(index: Any) -> int:
    """Returns how many axes one element of an index consumes."""
    dtype = getattr(index, "dtype", None)
    return np.ndim(index) if dtype is not None and dtype == bool else 1


def is_quantized(x: Any) -> bool:
    """Returns whether `x` is a [`eqquant.QuantizedArray`][]. Pass it as `is_leaf`.

    **Arguments:**

    - `x`: anything.

    **Returns:**

    A boolean; `False` for a tree that holds quantized arrays.
    """
    return isinstance(x, QuantizedArray)


# Annotates arguments that may be either: `Float[ArrayOrQuantized, "out in"]`.
ArrayOrQuantized = jax.Array | QuantizedArray
