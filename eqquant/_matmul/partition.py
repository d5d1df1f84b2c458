"""Partitions the quantized matmul among the devices of a mesh.

XLA cannot look inside a kernel or a loop over rows, and would gather every operand. So the product is one opaque
operation with a partitioning rule, which says how shardings propagate and which shard each device computes.

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
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Float

from .. import _compat
from .._array.array import QuantizedArray
from .._array.codes import AbstractCodes, row_length
from .._array.sharding import can_divide, leaf_specs, mark_divided_leaves, smallest_part
from .._mesh import as_spec, Names, names_in
from .._numerics import packing
from .._numerics.blocks import expand, num_blocks
from .._numerics.scale_bits import scale_to_bits


Run = Callable[[Array, QuantizedArray], Array]


def partition_matmul(
    run: Run, x: Float[Array, "*batch rows inner"], w: QuantizedArray, *, transpose: bool
) -> Float[Array, "*batch rows outer"]:
    """Returns `run(x, w)`, of which each device computes a shard.

    **Arguments:**

    - `run`: an implementation of the product.
    - `x`, `w`, `transpose`: as for `bind_matmul`; `w` without `gradient_of`.
    """
    leaves = jtu.tree_leaves(w)

    @custom_partitioning
    def product(x: Array, *leaves: Array) -> Array:
        # JAX uses only the shape of the result. `partition` returns the computation.
        del leaves
        return jnp.zeros((*x.shape[:-1], w.shape[-1 if transpose else -2]), x.dtype)

    def partition(
        mesh: Mesh, operands: Sequence[jax.ShapeDtypeStruct], result: jax.ShapeDtypeStruct
    ) -> tuple[Mesh, Callable[..., Array], NamedSharding, tuple[NamedSharding, ...]]:
        x, *leaves = operands
        codes = leaves[0]
        names = lambda struct: _mesh_axes(struct, mesh)
        partitioning = _choose_partitioning(mesh.shape, w, names(x), names(codes), names(result), transpose)
        w_names = partitioning.weight(transpose)
        parts = math.prod(mesh.shape[name] for name in w_names[1])
        on_mesh = lambda *names: NamedSharding(mesh, as_spec(names))
        specs = leaf_specs(w, (*partitioning.batch, *w_names), mesh.shape)
        in_shardings = (
            on_mesh(*partitioning.batch, partitioning.rows, partitioning.contracted),
            *[NamedSharding(mesh, s) for s in specs],
        )

        def run_shard(x: Array, *leaves: Array) -> Array:
            # Arrays are shards here. On the explicit mesh of `jax.set_mesh`, JAX would annotate them with shardings.
            # Kernels compiled without a GPU read the device from the mesh.
            device = jax.sharding.get_abstract_mesh().abstract_device
            with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
                return _reduce(run(x, _make_shard(w, leaves, w_names[1], parts)), partitioning)

        return mesh, run_shard, on_mesh(*partitioning.batch, *partitioning.result), in_shardings

    rule, sizes = _sharding_rule(x.shape, w, transpose)
    product.def_partition(partition, decode_shardings=False, sharding_rule=rule, **sizes)
    return product(x, *leaves)


class _Partitioning(NamedTuple):
    """The mesh axes that divide each dimension of the product."""

    batch: tuple[Names, ...]
    rows: Names
    outer: Names  # the columns of the result
    contracted: Names
    scattered: tuple[Names, Names]  # contracted mesh axes that divide the rows and the columns of the sum

    def weight(self, transpose: bool) -> tuple[Names, Names]:
        return (self.contracted, self.outer) if transpose else (self.outer, self.contracted)

    @property
    def result(self) -> tuple[Names, Names]:
        return self.rows + self.scattered[0], self.outer + self.scattered[1]


def _choose_partitioning(
    sizes: Mapping[str, int],
    w: QuantizedArray,
    x: tuple[Names, ...],
    codes: tuple[Names, ...],
    result: tuple[Names, ...],
    transpose: bool,
) -> _Partitioning:
    """Chooses the mesh axes of each dimension, from the shardings of operands and result."""
    n, k = w.shape[-2:]
    *batch, rows, outer = result
    contracting = codes[-2] if transpose else codes[-1]
    # Each device sums over its shard of the weight, except along mesh axes that also divide the examples: in fully
    # sharded training these divide the weight only to store it.
    in_result = {name for names in (*batch, *result[-2:]) for name in names}
    contracted = tuple(name for name in contracting if name in x[-1] or name not in in_result)
    if not can_divide(n if transpose else k, None if transpose else w.format, contracted, sizes):
        contracted = ()
    rows, scattered_rows = _split_scattered(rows, contracted)
    outer, scattered_outer = _split_scattered(outer, contracted)
    if not can_divide(k if transpose else n, w.format if transpose else None, outer, sizes):
        outer, scattered_outer = (), ()
    return _Partitioning(tuple(batch), rows, outer, contracted, (scattered_rows, scattered_outer))


def _split_scattered(names: Names, contracted: Names) -> tuple[Names, Names]:
    """Splits mesh axes into axes that divide partial sums, and axes to scatter over."""
    plain = tuple(name for name in names if name not in contracted)
    # `psum_scatter` scatters parts in order, so its mesh axes must be the minor ones.
    return plain, names[len(plain) :] if names[: len(plain)] == plain else ()


def _reduce(y: Array, partitioning: _Partitioning) -> Array:
    """Sums partial products over devices: an all-reduce, or a reduce-scatter."""
    scattered = partitioning.scattered[0] + partitioning.scattered[1]
    reduced = tuple(name for name in partitioning.contracted if name not in scattered)
    y = jax.lax.psum(y, reduced) if reduced else y
    for axis, names in zip((y.ndim - 2, y.ndim - 1), partitioning.scattered, strict=True):
        y = jax.lax.psum_scatter(y, names, scatter_dimension=axis, tiled=True) if names else y
    return y


def _make_shard(w: QuantizedArray, leaves: Sequence[Array], names: Names, parts: int) -> QuantizedArray:
    """Returns one device's shard of a weight, whose rows mesh axes divide into `parts`."""
    shard = jtu.tree_unflatten(jtu.tree_structure(w), leaves)
    if parts == 1:
        return shard
    blocks = num_blocks(row_length(w) // parts, w.block_size)

    def decode_shard(stored: Array | AbstractCodes | None) -> Array | None:
        """Decodes the scales or offsets of a shard: a scale of scales may cover several shards."""
        if not isinstance(stored, AbstractCodes):
            return stored
        # Where the blocks of two devices share bytes, each device holds all codes.
        length = row_length(stored)
        if length > blocks and stored.codes.shape[-1] == packing.packed_length(length, stored.format.bits):
            first = jax.lax.axis_index(names) * blocks
            whole_scale = stored.dequantize()
            return scale_to_bits(
                jax.lax.dynamic_slice_in_dim(whole_scale, first, blocks, axis=-1), shard.format.scale_dtype
            )
        values = stored.format.decode(packing.unpack(stored.codes, stored.format.bits, blocks))
        whole = stored.scale.shape[-1] == num_blocks(row_length(stored), stored.block_size)
        first = jax.lax.axis_index(names) * blocks if whole and row_length(stored) > blocks else 0
        whole_scale = expand(stored.scale, stored.block_size, row_length(stored) if whole else blocks)
        scale = values * jax.lax.dynamic_slice_in_dim(whole_scale, first, blocks, axis=-1)
        return scale_to_bits(scale, shard.format.scale_dtype)

    def slice_zero_points(packed: Array | None) -> Array | None:
        """Returns the zero points of a shard, which may share bytes with other shards'."""
        count, bits = num_blocks(row_length(w), w.block_size), w.format.bits
        if packed is None or count == blocks or packed.shape[-1] != packing.packed_length(count, bits):
            return packed
        first = jax.lax.axis_index(names) * blocks
        codes = jax.lax.dynamic_slice_in_dim(packing.unpack(packed, bits, count), first, blocks, axis=-1)
        return packing.pack(codes, bits)

    return dataclasses.replace(
        shard,
        scale_bits=decode_shard(shard.scale_bits),
        zero_point_bits=slice_zero_points(shard.zero_point_bits),
        offset_bits=decode_shard(shard.offset_bits),
        lengths=(row_length(w) // parts,),
    )


def _mesh_axes(struct: jax.ShapeDtypeStruct, mesh: Mesh) -> tuple[Names, ...]:
    """Returns the mesh axes that divide each dimension of an array."""
    return names_in(_compat.spec_on_mesh(struct.sharding, mesh), len(struct.shape))


def _sharding_rule(
    shape: tuple[int, ...], w: QuantizedArray, transpose: bool
) -> tuple[str, dict[str, int | tuple[str, ...]]]:
    """Returns the sharding rule of the product as an einsum, and the sizes of its factors."""
    batch = [f"batch{i}" for i in range(len(shape) - 2)]
    length = row_length(w)
    unit = smallest_part(length, w.format)
    parts = max(length // unit, 1) if length % unit == 0 else 1
    sizes: dict[str, int | tuple[str, ...]] = {}

    def name_dimension(count: int, name: str) -> str:
        """Names a dimension of `count` entries along the quantized axis, as parts of equal length."""
        if parts == 1:
            return name
        if count == parts:
            return "parts"
        sizes[name] = count // parts
        return f"(parts {name})"

    k, lasts = name_dimension(length, "within"), []
    for n, (leaf, divided) in enumerate(zip(jtu.tree_leaves(w), mark_divided_leaves(w, parts), strict=True)):
        lasts.append(name_dimension(leaf.shape[-1], f"within{n}") if divided else f"shared{n}")
    if parts > 1 and "parts" not in (k, *lasts):
        sizes["parts"] = parts  # JAX needs the size of a factor that is never a dimension of its own
    leaves = [" ".join([*batch, "n", last]) for last in lasts]
    inner, outer = ("n", k) if transpose else (k, "n")
    x, y = (" ".join([*batch, "m", last]) for last in (inner, outer))
    sizes["reduction_factors"] = ("n",) if transpose else tuple(k.strip("()").split())
    return f"{', '.join([x, *leaves])} -> {y}", sizes
