"""Converts between the sharding of a quantized array and the shardings of its leaves.

The quantized axis is last in memory, and so in the sharding of every leaf. It can be divided only between blocks and
packed segments.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.core
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._formats.base import AbstractFormat, segment_length
from .._mesh import as_spec, explicit_mesh, full_spec, Names, names_in
from .._numerics.axes import as_axes
from .._numerics.blocks import block_length, has_blocks, num_blocks, tile_height
from .._types import PyTree
from .codes import AbstractCodes, row_length


def can_divide(length: int, format: AbstractFormat | None, names: Names, sizes: Mapping[str, int]) -> bool:
    """Returns whether mesh axes divide an axis evenly, between blocks and packed segments."""
    parts = math.prod(sizes[name] for name in names)
    if parts == 1 or length % parts != 0:
        return parts == 1
    return format is None or (length // parts) % smallest_part(length, format) == 0


def cuts_no_tile(count: int, format: AbstractFormat, names: Names, sizes: Mapping[str, int]) -> bool:
    """Returns whether mesh axes divide rows between tiles."""
    parts = math.prod(sizes[name] for name in names)
    return parts == 1 or count % (parts * tile_height(format.block_size)) == 0


def smallest_part(length: int, format: AbstractFormat) -> int:
    """Returns how many values of a quantized axis share a scale or bytes.

    A per-channel scale is replicated instead. So are the codes of scales that cannot be divided.
    """
    unit, size = segment_length(format), format.block_size
    return math.lcm(unit, block_length(size, length)) if has_blocks(size) and num_blocks(length, size) > 1 else unit


def leaf_specs(q: AbstractCodes, names: Sequence[Names], sizes: Mapping[str, int]) -> list[PartitionSpec]:
    """Returns the specs of the leaves for memory `(*batch, length)`, divided by `names`.

    A scale that covers more than one part, such as a per-channel scale, is not divided along the quantized axis.
    """
    *batch, quantized = names
    parts = math.prod(sizes[name] for name in quantized)
    return [as_spec([*batch, quantized if divided else ()]) for divided in mark_divided_leaves(q, parts)]


def mark_divided_leaves(q: AbstractCodes, parts: int) -> list[bool]:
    """Returns for each leaf whether it is divided along the quantized axis as the codes are."""
    blocks = num_blocks(row_length(q), q.block_size)
    size = block_length(q.block_size, row_length(q))
    scales = blocks > 1 and row_length(q) % parts == 0 and (row_length(q) // parts) % size == 0

    def divides_packed(format: AbstractFormat) -> bool:
        return scales and row_length(q) // parts // size % segment_length(format) == 0

    def mark(stored: PyTree) -> list[bool]:
        if isinstance(stored, AbstractCodes):
            divides = divides_packed(stored.format)
            return [divides and divided for divided in mark_divided_leaves(stored, parts)]
        return [scales] * (stored is not None)

    zero_points = [divides_packed(q.format)] * (q.zero_point_bits is not None)
    rest = [*mark(q.offset_bits), *[True] * (q.gradient_of is not None)]
    return [True, *mark(q.scale_bits), *zero_points, *rest]


def leaf_shardings(q: AbstractCodes, sharding: NamedSharding, name: str = "The array") -> PyTree:
    """Returns the shardings of the leaves for a logical sharding. Raises if it does not fit."""
    spec, sizes, shape = tuple(sharding.spec), sharding.mesh.shape, q.shape
    if len(spec) > len(shape):
        raise ValueError(
            f"{name} has {len(shape)} dimensions, {shape}, and its spec must not have more. Got {sharding.spec}. "
            "Remove the additional entries."
        )
    names = names_in(spec, len(shape))
    quantized = [a % len(shape) for a in as_axes(q.axis)]
    rows = max((a for a in range(len(shape)) if a not in quantized), default=None)
    for axis, divided_by in enumerate(names):
        first, quantized_here = axis == quantized[0], axis in quantized
        length = row_length(q) if first else shape[axis]
        fits = can_divide(shape[axis], None, divided_by, sizes)
        if fits and first:
            fits = can_divide(length, q.format, divided_by, sizes)
        if fits and axis == rows:
            fits = cuts_no_tile(shape[axis], q.format, divided_by, sizes)
        if not fits or (quantized_here and not first and math.prod(sizes[n] for n in divided_by) > 1):
            raise ValueError(_explain_misfit(name, q, axis, divided_by, sizes, quantized_here and not first))
    memory = [names[a] for a in range(len(shape)) if a not in quantized] + [names[quantized[0]]]
    specs = leaf_specs(q, memory, sizes)
    return jtu.tree_unflatten(jtu.tree_structure(q), [NamedSharding(sharding.mesh, s) for s in specs])


def _explain_misfit(name: str, q: AbstractCodes, axis: int, names: Names, sizes: Mapping[str, int], later: bool) -> str:
    parts = math.prod(sizes[n] for n in names)
    by = " and ".join(f"{n!r} ({sizes[n]})" for n in names)
    if later:
        why = f"only the first of its quantized axes {q.axis} can be divided"
    elif q.shape[axis] % parts != 0:
        why = f"{q.shape[axis]} is not a multiple of {parts}"
    elif axis not in [a % q.ndim for a in as_axes(q.axis)]:
        why = f"its tiles have {tile_height(q.block_size)} rows each, of one scale"
    else:
        unit = smallest_part(row_length(q), q.format)
        why = f"of {row_length(q)} values in {q.format!r}, {unit} are packed together or share a scale"
    return (
        f"{name}, of shape {q.shape}, cannot be divided along axis {axis}, of length {q.shape[axis]}, by the mesh axes "
        f"{by}: {why}. Divide another axis, or into fewer parts; or quantize along another one."
    )


def logical_sharding(q: AbstractCodes) -> NamedSharding | None:
    """Returns the logical sharding, read from the codes; `None` if unknown, as under tracing."""
    codes = q.codes
    traced = isinstance(codes, jax.core.Tracer)
    sharding = None if traced else getattr(codes, "sharding", None)
    if traced and explicit_mesh(codes) is not None:
        sharding = jax.typeof(codes).sharding
    if not isinstance(sharding, NamedSharding) or q.ndim < -min(as_axes(q.axis)):
        return None
    *batch, quantized = full_spec(sharding, codes.ndim).spec
    axes = [a % q.ndim for a in as_axes(q.axis)]
    rest = iter(batch)
    spec = [quantized if a == axes[0] else None if a in axes else next(rest) for a in range(q.ndim)]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
