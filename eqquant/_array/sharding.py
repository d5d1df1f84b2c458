"""Converts between the sharding of a quantized array and the shardings of its leaves.

The quantized axis is last in memory, and so in the sharding of every leaf. It can be divided only between blocks and
packed segments.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._mesh import as_spec, explicit_mesh, full_spec, Names, names_in
from .._numerics.blocks import num_blocks
from .._numerics.packing import segment_length
from .value import AbstractArrayValue


def can_divide(length: int, format: Any, names: Names, sizes: Mapping[str, int]) -> bool:
    """Returns whether mesh axes divide an axis evenly, and with a `format`, only between blocks and packed segments."""
    parts = math.prod(sizes[name] for name in names)
    if parts == 1 or length % parts != 0:
        return parts == 1
    return format is None or (length // parts) % smallest_part(length, format) == 0


def smallest_part(length: int, format: Any) -> int:
    """Returns how many values of a quantized axis must stay together: those packed together, or sharing a scale.

    A scale for the whole axis keeps nothing together: it is replicated. So are the codes of scales that cannot be cut.
    """
    unit, size = segment_length(format.bits), format.block_size
    return math.lcm(unit, size) if num_blocks(length, size) > 1 else unit


def leaf_specs(q: Any, names: Sequence[Names], sizes: Mapping[str, int]) -> list[PartitionSpec]:
    """Returns the specs of the leaves of a quantized array whose memory, `(*batch, length)`, is divided by `names`.

    A scale that covers more than one part, such as a scale per channel, is not divided along the quantized axis.
    """
    *batch, quantized = names
    parts = math.prod(sizes[name] for name in quantized)
    return [as_spec([*batch, quantized if divided else ()]) for divided in divided_leaves(q, parts)]


def divided_leaves(q: Any, parts: int) -> list[bool]:
    """Returns for each leaf whether it is divided along the quantized axis when the codes are."""
    blocks, size = num_blocks(q._length, q.block_size), q.block_size
    scales = blocks > 1 and q._length % parts == 0 and (q._length // parts) % size == 0

    def packed_by(format: Any) -> bool:
        return scales and q._length // parts // size % segment_length(format.bits) == 0

    def of(stored: Any) -> list[bool]:
        if isinstance(stored, AbstractArrayValue):
            cut = packed_by(stored.format)  # pyright: ignore[reportAttributeAccessIssue]
            return [cut and divided for divided in divided_leaves(stored, parts)]
        return [scales] * (stored is not None)

    zero_points = [packed_by(q.format)] * (q.zero_point_bits is not None)
    rest = [*of(q.offset_bits), *[True] * (q.gradient_of is not None)]
    return [True, *of(q.scale_bits), *zero_points, *rest]


def leaf_shardings(q: Any, sharding: NamedSharding, name: str = "The array") -> Any:
    """Returns the shardings of the leaves, given the logical one; raises if they cannot be divided so."""
    spec, sizes, shape = tuple(sharding.spec), sharding.mesh.shape, q.shape
    if len(spec) > len(shape):
        raise ValueError(
            f"{name} has {len(shape)} dimensions, {shape}, and its spec must not have more. Got {sharding.spec}. "
            "Remove the additional entries."
        )
    names = names_in(spec, len(shape))
    quantized = [a % len(shape) for a in q._axes]
    for axis, divided_by in enumerate(names):
        major, of_weight = axis == quantized[0], axis in quantized
        length = q._length if major else shape[axis]
        fits = can_divide(shape[axis], None, divided_by, sizes)
        if fits and major:
            fits = can_divide(length, q.format, divided_by, sizes)
        if not fits or (of_weight and not major and math.prod(sizes[n] for n in divided_by) > 1):
            raise ValueError(_cannot(name, q, axis, divided_by, sizes, of_weight and not major))
    memory = [names[a] for a in range(len(shape)) if a not in quantized] + [names[quantized[0]]]
    specs = leaf_specs(q, memory, sizes)
    return jtu.tree_unflatten(jtu.tree_structure(q), [NamedSharding(sharding.mesh, s) for s in specs])


def _cannot(name: str, q: Any, axis: int, names: Names, sizes: Mapping[str, int], minor: bool) -> str:
    parts = math.prod(sizes[n] for n in names)
    by = " and ".join(f"{n!r} ({sizes[n]})" for n in names)
    if minor:
        why = f"only the first of its quantized axes {q.axis} can be divided"
    elif q.shape[axis] % parts != 0:
        why = f"{q.shape[axis]} is not a multiple of {parts}"
    else:
        unit = smallest_part(q._length, q.format)
        why = f"of {q._length} values in {q.format!r}, {unit} are packed together or share a scale"
    return (
        f"{name}, of shape {q.shape}, cannot be divided along axis {axis}, of length {q.shape[axis]}, by the mesh axes "
        f"{by}: {why}. Divide another axis, or into fewer parts; or quantize along another one."
    )


def logical_sharding(q: Any) -> NamedSharding | None:
    """Returns the logical sharding, from the sharding of the codes; `None` if that is unknown, as under tracing."""
    codes = q.codes
    traced = isinstance(codes, jax.core.Tracer)
    sharding = None if traced else getattr(codes, "sharding", None)
    if traced and explicit_mesh(codes) is not None:
        sharding = jax.typeof(codes).sharding
    if not isinstance(sharding, NamedSharding) or q.ndim < -min(q._axes):
        return None
    *batch, quantized = full_spec(sharding, codes.ndim).spec
    axes = [a % q.ndim for a in q._axes]
    rest = iter(batch)
    spec = [quantized if a == axes[0] else None if a in axes else next(rest) for a in range(q.ndim)]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
