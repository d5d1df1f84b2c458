"""The fields of `QuantizedArray`, and the properties that follow from them."""

import dataclasses
import functools as ft
import math
from typing import TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, UInt, UInt8

from .._formats.base import AbstractFormat, packed_length
from .._numerics import packing
from .._numerics.axes import as_axes
from .._numerics.blocks import BlockSize, num_blocks, tile_height
from .._numerics.scale_bits import bits_to_scale
from .dense import allow_dense
from .value import AbstractArrayValue


_T = TypeVar("_T")
_Codes = TypeVar("_Codes", bound="AbstractCodes")
_UNSIGNED = frozenset(np.dtype(name) for name in ("uint8", "uint16", "uint32"))


class AbstractCodes(AbstractArrayValue):
    """The fields of `QuantizedArray`, its only subclass. The quantized axis is last in memory."""

    codes: UInt8[Array, "*batch bytes"]
    """The packed codes: uint8 of shape `(*batch, bytes)`, the quantized axis last. Codes of 4, 2 or 1 bits share bytes;
    [`eqquant.unpack`][] returns one for each value."""
    scale_bits: "UInt[Array, '*tiles blocks'] | AbstractCodes"
    """The bits of the scales: unsigned integers `(*batch, blocks)`, with one row for each row of tiles if there are
    any; or an array of codes where the scales are quantized too. `scale` shows floats."""
    zero_point_bits: UInt8[Array, "*tiles bytes_per_block"] | None
    """The zero points, packed as codes are: uint8 `(*batch, bytes)`, or `None`. `zero_point` shows one per block."""
    format: AbstractFormat
    """The format: what codes mean, how many bits they have, and how many values share a scale. For example `NF4()`."""
    axis: int | tuple[int, ...] = eqx.field(static=True)
    """The quantized axis, along which blocks run: a negative integer, -1 for `w @ x`. A tuple for several axes that are
    quantized as one, as the input axes of a convolution."""
    lengths: tuple[int, ...] = eqx.field(static=True)
    """The logical lengths of the quantized axes: a tuple of integers, one for each entry of `axis`."""
    logical_dtype: np.dtype = eqx.field(static=True)
    """The dtype that the array dequantizes to: a NumPy dtype of floats."""
    logical_sharding: NamedSharding | PartitionSpec | None = eqx.field(static=True, default=None)
    """The last sharding that was given to the logical array, or `None`. `sharding` shows the current one."""
    offset_bits: "UInt[Array, '*tiles blocks'] | AbstractCodes | None" = None
    """The bits of the offsets, as `scale_bits`; `None` for a format without offsets. `offset` shows floats."""
    gradient_of: Float[Array, "*batch length"] | None = None
    """Only in training: floats in memory order that receive the gradient, and whose values are never read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, derived from the stored arrays, so that transformations keep it right."""
        check_leaves(self)
        codes, axes, lengths = self.codes, as_axes(self.axis), self.lengths  # reading a field of a Module takes long
        ndim, row = codes.ndim - 1 + len(lengths), math.prod(lengths)
        if ndim < -min(axes):
            raise ValueError(
                f"The quantized axis must not be mapped over. Got `axis={self.axis}` of an array of {ndim} "
                "dimensions. `vmap`, `scan` and `tree_map` map over the first axes in memory, which are those before "
                "the quantized one: transpose or dequantize first."
            )
        if codes.shape[-1] != packed_length(self.format, row):
            raise ValueError(
                f"The quantized axis must be whole inside `shard_map`. Got {codes.shape[-1]} bytes of the {row} codes "
                "of a row. Divide another axis, or multiply outside it."
            )
        if axes == (-1,) and len(lengths) == 1:
            return (*codes.shape[:-1], row)
        shape = list(codes.shape[:-1])
        for axis, length in sorted(zip(axes, lengths, strict=True)):
            shape.insert(ndim + axis, length)
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The number of logical axes."""
        return self.codes.ndim - 1 + len(self.lengths)

    @property
    def block_size(self) -> BlockSize:
        """How many values along the quantized axis share a scale, as in `format`.

        An integer; `None` for one scale per channel (row), `"tensor"` for one for each matrix, a pair for a tile.
        """
        return self.format.block_size

    @property
    def scale(self) -> Float32[Array, "*batch blocks"]:
        """The scale of each block: float32 `(*batch, blocks)`, with the quantized axis last.

        In tiles each row has them; `scale_bits` holds one for each tile.
        """
        check_leaves(self)
        return self._floats(spread_tiles(self).scale_bits)

    @property
    def zero_point(self) -> UInt8[Array, "*batch blocks"] | None:
        """The zero point of each block: uint8 `(*batch, blocks)`, or `None`."""
        check_leaves(self)
        packed = spread_tiles(self).zero_point_bits
        if packed is None:
            return None
        return packing.unpack(packed, self.format.bits, num_blocks(row_length(self), self.block_size))

    @property
    def offset(self) -> Float32[Array, "*batch blocks"] | None:
        """The offset of each block: float32 `(*batch, blocks)`, or `None`."""
        check_leaves(self)
        offset = spread_tiles(self).offset_bits
        return None if offset is None else self._floats(offset)

    def _floats(self, stored: "Array | AbstractCodes") -> Array:
        """Returns scales or offsets as floats."""
        if isinstance(stored, AbstractCodes):
            with allow_dense():
                return stored.dequantize()
        return bits_to_scale(stored, self.format.scale_dtype)


def check_leaves(q: AbstractCodes) -> None:
    """Raises if a leaf has another dtype or shape than it was stored with.

    Dtypes and shapes are static, so this costs nothing in `jit`.
    """
    codes, gradient_of = q.codes, q.gradient_of
    if codes is None:
        raise ValueError(
            "A quantized array must hold its codes. Got one without: a filter for floats, such as "
            "`eqx.filter(model, eqx.is_inexact_array)`, has taken them away. To train quantized arrays, write "
            "`optim = eqq.float_masters(optimizer)` and `optim.init(model)`. To use the model, `eqx.combine` its "
            "parts again."
        )
    leaves = codes, q.scale_bits, q.zero_point_bits, q.offset_bits
    for name, leaf in zip(("codes", "scale", "zero point", "offset"), leaves, strict=True):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or dtype in _UNSIGNED:  # first, since this runs several times for each product that is traced
            continue
        if isinstance(leaf, AbstractCodes):
            check_leaves(leaf)
        elif dtype == jax.dtypes.float0:
            raise TypeError(
                "A quantized array has no gradient with respect to its codes. Got a tree of float0, as `jax.grad` "
                "returns it with `allow_int=True`. Differentiate with `eqq.filter_grad`."
            )
        elif not jnp.issubdtype(dtype, jnp.unsignedinteger):
            raise TypeError(
                f"The leaves of a quantized array must be unsigned integers. Got {name} of {dtype}: they were "
                "averaged or cast as if they were numbers. Average the float model, or the masters, and quantize "
                "the result. To change its dtype, call `q.astype(dtype)` on the array as a whole."
            )
    _check_shapes(q, *leaves)
    if gradient_of is None:
        return
    ranks = {leaf.ndim for leaf in (codes, gradient_of) if isinstance(leaf, jax.Array)}
    if len(ranks) > 1:
        raise ValueError(
            f"The leaves of a quantized array must be mapped over together. Got codes of shape {codes.shape} "
            f"and a `gradient_of` of shape {getattr(gradient_of, 'shape', None)}: a `scan` or `vmap` took "
            "only one of them apart. Split the model with `eqx.partition(model, eqx.is_array)`, not with "
            "`eqx.is_inexact_array`, which leaves codes behind."
        )


def _check_shapes(q: AbstractCodes, codes: object, *leaves: object) -> None:
    """Raises if scales, zero points or offsets are not those of the blocks of the codes."""
    format, row = q.format, row_length(q)
    shape = getattr(codes, "shape", None)  # which shardings in place of arrays lack
    if shape is None or shape[-1:] != (packed_length(format, row),):  # the property `shape` refuses these
        return
    blocks, batch = num_blocks(row, format.block_size), batch_of_scales(format, shape[:-1])
    for name, leaf in zip(("scale_bits", "zero_point_bits", "offset_bits"), leaves, strict=True):
        if leaf is None:
            continue
        length = packing.packed_length(blocks, format.bits) if name == "zero_point_bits" else blocks
        expected, found = (*batch, length), getattr(leaf, "shape", None)
        if found not in (None, expected):
            raise ValueError(
                f"The leaves of a quantized array must share their leading axes. Got codes of shape {shape} and {name} "
                f"of shape {found} instead of {expected}. Change all leaves alike, as "
                "`jax.tree.map(lambda leaf: leaf[i], q)` does."
            )


def batch_of_scales(format: AbstractFormat, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the batch axes of stored scales, from those of the codes.

    They differ for tiles alone. Raises where one row alone cannot say of which tile it is.
    """
    if not isinstance(format.block_size, tuple):
        return batch
    if not batch:
        raise ValueError(
            f"Tiles need two axes, of which neither is mapped over. Got a row alone in {format!r}. Take matrices, or "
            f"blocks of a row: `block_size={format.block_size[1]}`."
        )
    return (*batch[:-1], -(-batch[-1] // tile_height(format.block_size)))


def spread_tiles(x: _T) -> _T:
    """Returns an array in tiles as an array in blocks, and anything else as it is.

    Each row gets the scales of its tile, as kernels and moves of rows take them.
    """
    if not isinstance(x, AbstractCodes) or not isinstance(x.format.block_size, tuple):
        return x
    height, width = x.format.block_size
    scale, zero_point, offset = jax.tree.map(
        lambda leaf: repeat_rows(leaf, height, x.codes.shape[-2]), (x.scale_bits, x.zero_point_bits, x.offset_bits)
    )
    format = dataclasses.replace(x.format, block_size=width)
    return dataclasses.replace(x, format=format, scale_bits=scale, zero_point_bits=zero_point, offset_bits=offset)


def spread_tiles_along(q: _Codes, axis: int) -> _Codes:
    """Returns an array whose entries along a batch axis of its leaves stand alone.

    Tiles span the last of these axes.
    """
    return q if axis < q.codes.ndim - 2 else spread_tiles(q)


@ft.partial(jax.jit, static_argnums=(1, 2), inline=True)
def repeat_rows(x: Array, height: int, count: int) -> Array:
    """Repeats each row, and returns the first `count`."""
    return jnp.repeat(x, height, axis=-2)[..., :count, :]


def row_length(q: AbstractCodes) -> int:
    """Returns the number of values in a row of codes."""
    return math.prod(q.lengths)


def is_in_order(q: AbstractCodes) -> bool:
    """Returns whether memory order is logical order: the quantized axes come last."""
    return as_axes(q.axis) == tuple(range(-len(q.lengths), 0))
