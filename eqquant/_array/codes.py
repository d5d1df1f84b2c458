"""The fields of `QuantizedArray`, and the properties that follow from them."""

import math

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, UInt, UInt8

from .._formats.base import AbstractFormat
from .._numerics import packing
from .._numerics.axes import as_axes
from .._numerics.blocks import BlockSize, num_blocks
from .._numerics.scale_bits import bits_to_scale
from .dense import allow_dense
from .value import AbstractArrayValue


class AbstractCodes(AbstractArrayValue):
    """An array of codes in blocks along its quantized axis, which is last in memory.

    `QuantizedArray` is the only one.
    """

    codes: UInt8[Array, "*batch bytes"]
    scale_bits: "UInt[Array, '*batch blocks'] | AbstractCodes"
    # Packed as the codes are.
    zero_point_bits: UInt8[Array, "*batch bytes_per_block"] | None
    format: AbstractFormat
    axis: int | tuple[int, ...] = eqx.field(static=True)
    lengths: tuple[int, ...] = eqx.field(static=True)
    logical_dtype: np.dtype = eqx.field(static=True)
    logical_sharding: NamedSharding | PartitionSpec | None = eqx.field(static=True, default=None)
    # As `scale_bits`, for a format with offsets.
    offset_bits: "UInt[Array, '*batch blocks'] | AbstractCodes | None" = None
    # Only in training: floats in memory order. Values come from the codes; gradients go to these floats.
    gradient_of: Float[Array, "*batch length"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, derived from the stored arrays.

        So it is right under every transformation.
        """
        check_leaves(self)
        codes, axes, lengths = self.codes, as_axes(self.axis), self.lengths  # reading a field of a Module takes long
        ndim, row = codes.ndim - 1 + len(lengths), math.prod(lengths)
        if ndim < -min(axes):
            raise ValueError(
                f"The quantized axis must not be mapped over. Got `axis={self.axis}` of an array of {ndim} "
                "dimensions. `vmap`, `scan` and `tree_map` map over the first axes in memory, which are those before "
                "the quantized one: transpose or dequantize first."
            )
        if codes.shape[-1] != packing.packed_length(row, self.format.bits):
            raise ValueError(
                f"The quantized axis must be whole inside `shard_map`. Got {codes.shape[-1]} bytes of the {row} codes "
                "of a row. Divide another axis, or multiply outside it."
            )
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
        return self.format.block_size

    @property
    def scale(self) -> Float32[Array, "*batch blocks"]:
        """The scales as floats, one per block, with the quantized axis last."""
        check_leaves(self)
        return self._floats(self.scale_bits)

    @property
    def zero_point(self) -> UInt8[Array, "*batch blocks"] | None:
        """The zero point of each block, with the quantized axis last; `None` if there are none."""
        check_leaves(self)
        if self.zero_point_bits is None:
            return None
        return packing.unpack(self.zero_point_bits, self.format.bits, num_blocks(row_length(self), self.block_size))

    @property
    def offset(self) -> Float32[Array, "*batch blocks"] | None:
        """The offset of each block as a float, with the quantized axis last, or `None`."""
        check_leaves(self)
        return None if self.offset_bits is None else self._floats(self.offset_bits)

    def _floats(self, stored: "Array | AbstractCodes") -> Array:
        """Returns scales or offsets as floats."""
        if isinstance(stored, AbstractCodes):
            with allow_dense():
                return stored.dequantize()
        return bits_to_scale(stored, self.format.scale_dtype)


def check_leaves(q: AbstractCodes) -> None:
    """Raises if a leaf is no longer an unsigned integer.

    Dtypes are static, so this costs nothing in `jit`.
    """
    codes, gradient_of = q.codes, q.gradient_of
    if codes is None:
        raise ValueError(
            "A quantized array must hold its codes. Got one without: a filter for floats, such as "
            "`eqx.filter(model, eqx.is_inexact_array)`, has taken them away. To train quantized arrays, write "
            "`optim = eqq.float_masters(optimizer)` and `optim.init(model)`. To use the model, `eqx.combine` its "
            "parts again."
        )
    per_block = {"scale": q.scale_bits, "zero point": q.zero_point_bits, "offset": q.offset_bits}
    for name, leaf in {"codes": codes, **per_block}.items():
        dtype = getattr(leaf, "dtype", None)
        if isinstance(leaf, AbstractCodes):
            check_leaves(leaf)
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
    ranks = {leaf.ndim for leaf in (codes, gradient_of) if isinstance(leaf, jax.Array)}
    if len(ranks) > 1:
        raise ValueError(
            f"The leaves of a quantized array must be mapped over together. Got codes of shape {codes.shape} "
            f"and a `gradient_of` of shape {getattr(gradient_of, 'shape', None)}: a `scan` or `vmap` took "
            "only one of them apart. Split the model with `eqx.partition(model, eqx.is_array)`, not with "
            "`eqx.is_inexact_array`, which leaves codes behind."
        )


def row_length(q: AbstractCodes) -> int:
    """Returns the number of values in a row of codes."""
    return math.prod(q.lengths)


def is_in_order(q: AbstractCodes) -> bool:
    """Returns whether memory order is logical order: the quantized axes are the last ones."""
    return as_axes(q.axis) == tuple(range(-len(q.lengths), 0))
