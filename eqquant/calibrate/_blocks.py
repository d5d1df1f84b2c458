"""The blocks of calibration data: the values that share a scale."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num

from .._numerics.axes import memory_order
from .._numerics.blocks import BlockSize, num_blocks, split_blocks


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of data whose shape ends in `shape`.

    Axes before it are pooled: their values share the same blocks.

    - `block_size`: the block size of a format.
    - `axes`: the axes along which blocks run, negative. They may lie before `shape`, among the pooled axes.
    - `shape`: the trailing shape of the data; empty for a single scale.
    """

    block_size: BlockSize
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales, with the quantized axes last, merged into one."""
        if self.block_size == "tensor":
            return ()
        length = math.prod(self.shape[a] for a in self.axes) if isinstance(self.block_size, int) else 1
        return (*self._separate_axes.values(), num_blocks(length, self.block_size))

    def check(self, shape: tuple[int, ...], name: str) -> None:
        """Raises if data has another shape. The message names the data."""
        fixed = self._separate_axes
        if isinstance(self.block_size, int):
            fixed = fixed | {a: self.shape[a] for a in self.axes}
        long_enough = len(shape) >= max(len(self.shape), -min(self.axes))
        if self.block_size != "tensor" and (not long_enough or any(shape[a] != n for a, n in fixed.items())):
            raise ValueError(
                f"{name} must end in the shape that was calibrated, {self.shape}, with blocks along "
                f"`axis={self.axes}`. Got shape {shape}. Batches come in front."
            )

    def map(self, f: Callable[..., Array], x: Num[Array, "..."], *per_block: Array) -> Array:
        """Returns the results of `f` on the values of each block.

        `f` takes the values, of shape `(*scales, values)`, and arrays with one entry per block. Handles whole blocks
        and the shorter last blocks separately, so `f` never sees padding.
        """
        if self.block_size == "tensor":
            return f(x.reshape(-1), *per_block)
        rows = memory_order(x, self.axes)
        pooled = rows.ndim - 1 - len(self._separate_axes)
        start, results = 0, []
        for part in split_blocks(rows, self.block_size):
            part = jnp.moveaxis(part, range(pooled), range(-pooled, 0))
            part = part.reshape(*part.shape[: len(self.scale_shape)], -1)
            stop = start + part.shape[-2]
            entries = (jnp.take(b, jnp.arange(start, stop), axis=len(self.scale_shape) - 1) for b in per_block)
            results.append(f(part, *entries))
            start = stop
        return jnp.concatenate(results, axis=len(self.scale_shape) - 1)

    @property
    def _separate_axes(self) -> dict[int, int]:
        """The axes with a scale per index, and their lengths."""
        return {a: self.shape[a] for a in range(-len(self.shape), 0) if a not in self.axes}


def as_shape(like: object) -> tuple[int, ...]:
    """Returns the shape of an array, or a shape as a tuple."""
    return tuple(int(n) for n in np.atleast_1d(np.asarray(getattr(like, "shape", like), int)))


def make_blocks(block_size: BlockSize, shape: tuple[int, ...], axis: int | Sequence[int]) -> Blocks:
    """Returns the blocks along `axis` of data that ends in `shape`."""
    axes = tuple(np.atleast_1d(np.asarray(axis)).tolist())
    is_integer = np.asarray(axis).dtype.kind == "i" and len(axes) > 0
    if not is_integer or any(a >= len(shape) for a in axes):
        raise ValueError(
            f"`axis` must name axes of the data, from {-len(shape)} to {len(shape) - 1} for shape {shape}, or negative "
            f"ones before it. Got {axis!r}."
        )
    axes = tuple(a - len(shape) if a >= 0 else a for a in axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"`axis` must name different axes. Got {axis!r} for shape {shape}.")
    if any(n < 1 for n in shape):
        raise ValueError(f"`shape` must hold positive lengths. Got {shape}. Give the shape that every batch ends in.")
    if isinstance(block_size, int) and min(axes) < -len(shape):
        raise ValueError(
            f"`shape` must say how long `axis` is, for blocks of {block_size}. Got shape {shape} and `axis={axis!r}`. "
            "Give the array, or the shape that every batch ends in. Inputs of weights, for `collect_stats`, have no "
            'scales from calibration in formats with blocks: take `eqq.Int8("tensor")` or `eqq.FP8()`.'
        )
    return Blocks(block_size, axes, () if block_size == "tensor" else shape)
