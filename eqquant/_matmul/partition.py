"""Divides the quantized matmul among the devices of a mesh.

XLA cannot look inside a kernel or a loop over rows, and would gather every operand. So the product is one operation
with its own rule, which says how shardings pass through it, and what each device computes of its shards.

For `x(m, k) . w(n, k)^T`, with these dimensions divided:

| | `x` | `w` | communication |
| --- | --- | --- | --- |
| data parallel | `m` | | none |
| column parallel | | `n` | none |
| row parallel | `k` | `k` | sums partial products: all-reduce, or reduce-scatter where the result is divided |
| fully sharded | `m` | `n` or `k`, by the axes of `m` | gathers the packed weight, never the dense one |

Scales go with their codes. A scale that covers more than the shard of a device is replicated.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from .. import _compat
from .._array.array import QuantizedArray
from .._array.codes import AbstractCodes, row_length
from .._array.sharding import can_divide, divided_leaves, leaf_specs, smallest_part
from .._mesh import as_spec, Names, names_in
from .._numerics import packing
from .._numerics.blocks import expand, num_blocks
from .._numerics.scale_bits import scale_to_bits


Compute = Callable[[Array, QuantizedArray], Array]


def divide_product(
    compute: Compute, x: Float[Array, "*batch rows inner"], w: QuantizedArray, *, transpose: bool
) -> Float[Array, "*batch rows outer"]:
    """Returns `compute(x, w)`; each device computes its shards.

    **Arguments:**

    - `compute`: an implementation of the product.
    - `x`, `w`, `transpose`: as for `bind_matmul`; `w` without `gradient_of`.
    """
    leaves = jtu.tree_leaves(w)

    @custom_partitioning
    def product(x: Array, *leaves: Array) -> Array:
        # JAX uses only the shape. `partition` returns the computation.
        del leaves
        return jnp.zeros((*x.shape[:-1], w.shape[-1 if transpose else -2]), x.dtype)

    def partition(
        mesh: Mesh, operands: Sequence[jax.ShapeDtypeStruct], result: jax.ShapeDtypeStruct
    ) -> tuple[Mesh, Callable[..., Array], NamedSharding, tuple[NamedSharding, ...]]:
        x, *leaves = operands
        codes = leaves[0]
        names = lambda of: _names(of, mesh)
        division = _divide(mesh.shape, w, names(x), names(codes), names(result), transpose)
        quantized = division.weight(transpose)[1]
        parts = math.prod(mesh.shape[name] for name in quantized)
        on_mesh = lambda *names: NamedSharding(mesh, as_spec(names))
        specs = leaf_specs(w, (*division.batch, *division.weight(transpose)), mesh.shape)
        in_shardings = (
            on_mesh(*division.batch, division.rows, division.contracted),
            *[NamedSharding(mesh, s) for s in specs],
        )

        def local(x: Array, *leaves: Array) -> Array:
            return _sum(compute(x, _local(w, leaves, quantized, parts)), division)

        return mesh, local, on_mesh(*division.batch, *division.result), in_shardings

    rule, sizes = _rule(x.shape, w, transpose)
    product.def_partition(partition, decode_shardings=False, sharding_rule=rule, **sizes)
    return product(x, *leaves)


class _Division(NamedTuple):
    """The mesh axes that divide each dimension."""

    batch: tuple[Names, ...]
    rows: Names
    kept: Names  # the other dimension of the result
    contracted: Names
    scattered: tuple[Names, Names]  # those of `contracted` that divide the rows and the columns of the sum

    def weight(self, transpose: bool) -> tuple[Names, Names]:
        return (self.contracted, self.kept) if transpose else (self.kept, self.contracted)

    @property
    def result(self) -> tuple[Names, Names]:
        return self.rows + self.scattered[0], self.kept + self.scattered[1]


def _divide(
    sizes: Mapping[str, int],
    w: QuantizedArray,
    x: tuple[Names, ...],
    codes: tuple[Names, ...],
    result: tuple[Names, ...],
    transpose: bool,
) -> _Division:
    """Chooses the division, from the shardings of the operands and the wanted sharding of the result."""
    n, k = w.shape[-2:]
    *batch, rows, kept = result
    contracting = codes[-2] if transpose else codes[-1]
    # Each device sums over its part of the weight; except along mesh axes that also divide the examples, as in fully
    # sharded training, where the weight is divided only to store it.
    taken = {name for names in (*batch, *result[-2:]) for name in names}
    contracted = tuple(name for name in contracting if name in x[-1] or name not in taken)
    if not can_divide(n if transpose else k, None if transpose else w.format, contracted, sizes):
        contracted = ()
    (rows, dealt_rows), (kept, dealt_kept) = _deal(rows, contracted), _deal(kept, contracted)
    if not can_divide(k if transpose else n, w.format if transpose else None, kept, sizes):
        kept, dealt_kept = (), ()
    return _Division(tuple(batch), rows, kept, contracted, (dealt_rows, dealt_kept))


def _deal(names: Names, contracted: Names) -> tuple[Names, Names]:
    """Splits the mesh axes of a dimension of the result: those that divide partial sums, and those to scatter over."""
    plain = tuple(name for name in names if name not in contracted)
    # `psum_scatter` deals out parts in order, so their mesh axes must be the minor ones.
    return plain, names[len(plain) :] if names[: len(plain)] == plain else ()


def _sum(y: Array, division: _Division) -> Array:
    """Sums partial products; each device keeps its part."""
    dealt = division.scattered[0] + division.scattered[1]
    whole = tuple(name for name in division.contracted if name not in dealt)
    y = jax.lax.psum(y, whole) if whole else y
    for axis, names in zip((y.ndim - 2, y.ndim - 1), division.scattered, strict=True):
        y = jax.lax.psum_scatter(y, names, scatter_dimension=axis, tiled=True) if names else y
    return y


def _local(w: QuantizedArray, leaves: Sequence[Array], names: Names, parts: int) -> QuantizedArray:
    """Returns the array of one device's leaves. The mesh axes `names` divide its rows into `parts`."""
    mine = jtu.tree_unflatten(jtu.tree_structure(w), leaves)
    if parts == 1:
        return mine
    blocks = num_blocks(row_length(w) // parts, w.block_size)

    def decode_own(stored: Array | AbstractCodes | None) -> Array | None:
        """Decodes scales or offsets of this device's blocks, since a scale of scales may cover more than one part."""
        if not isinstance(stored, AbstractCodes):
            return stored
        # Codes that cannot be cut between the blocks of devices are whole on each.
        length = row_length(stored)
        if length > blocks and stored.codes.shape[-1] == packing.packed_length(length, stored.format.bits):
            first = jax.lax.axis_index(names) * blocks
            whole_scale = stored.dequantize()
            return scale_to_bits(
                jax.lax.dynamic_slice_in_dim(whole_scale, first, blocks, axis=-1), mine.format.scale_dtype
            )
        values = stored.format.decode(packing.unpack(stored.codes, stored.format.bits, blocks))
        whole = stored.scale.shape[-1] == num_blocks(row_length(stored), stored.block_size)
        first = jax.lax.axis_index(names) * blocks if whole and row_length(stored) > blocks else 0
        whole_scale = expand(stored.scale, stored.block_size, row_length(stored) if whole else blocks)
        scale = values * jax.lax.dynamic_slice_in_dim(whole_scale, first, blocks, axis=-1)
        return scale_to_bits(scale, mine.format.scale_dtype)

    def own_zero_point(packed: Array | None) -> Array | None:
        """Takes the zero points of this device's blocks, where they are packed with those of other devices."""
        count, bits = num_blocks(row_length(w), w.block_size), w.format.bits
        if packed is None or count == blocks or packed.shape[-1] != packing.packed_length(count, bits):
            return packed
        first = jax.lax.axis_index(names) * blocks
        own = jax.lax.dynamic_slice_in_dim(packing.unpack(packed, bits, count), first, blocks, axis=-1)
        return packing.pack(own, bits)

    return dataclasses.replace(
        mine,
        scale_bits=decode_own(mine.scale_bits),
        zero_point_bits=own_zero_point(mine.zero_point_bits),
        offset_bits=decode_own(mine.offset_bits),
        lengths=(row_length(w) // parts,),
    )


def _names(struct: jax.ShapeDtypeStruct, mesh: Mesh) -> tuple[Names, ...]:
    """Returns the mesh axes that divide each dimension."""
    return names_in(_compat.spec_on_mesh(struct.sharding, mesh), len(struct.shape))


def _rule(shape: tuple[int, ...], w: QuantizedArray, transpose: bool) -> tuple[str, dict[str, int | tuple[str, ...]]]:
    """Returns the sharding rule of the product, as an einsum. It divides the quantized axis only into whole parts."""
    batch = [f"batch{i}" for i in range(len(shape) - 2)]
    length = row_length(w)
    unit = smallest_part(length, w.format)
    parts = max(length // unit, 1) if length % unit == 0 else 1
    sizes: dict[str, int | tuple[str, ...]] = {}

    def along(count: int, name: str) -> str:
        """Names a dimension of `count` entries along the quantized axis: parts, of some entries each."""
        if parts == 1 or count % parts != 0:
            return name
        if count == parts:
            return "parts"
        sizes[name] = count // parts
        return f"(parts {name})"

    k, lasts = along(length, "within"), []
    for number, (leaf, divided) in enumerate(zip(jtu.tree_leaves(w), divided_leaves(w, parts), strict=True)):
        lasts.append(along(leaf.shape[-1], f"within{number}") if divided else f"shared{number}")
    if parts > 1 and "parts" not in (k, *lasts):
        sizes["parts"] = parts  # a factor that is never a whole dimension must have its size
    leaves = [" ".join([*batch, "n", last]) for last in lasts]
    inner, outer = ("n", k) if transpose else (k, "n")
    x, y = (" ".join([*batch, "m", last]) for last in (inner, outer))
    sizes["reduction_factors"] = ("n",) if transpose else tuple(k.strip("()").split())
    return f"{', '.join([x, *leaves])} -> {y}", sizes
