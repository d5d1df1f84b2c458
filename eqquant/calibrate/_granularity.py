"""Which values of the data share a scale: all of them, those of a channel, or those of a group."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Num


@dataclasses.dataclass(frozen=True)
class Granularity:
    """Which values share a scale. The default is one scale for all: per tensor.

    !!! Example

        ```python
        Granularity()                                              # one scale
        Granularity(axes=(-1,), lengths=(64,))                     # one per feature, of any batch
        Granularity(axes=(-1,), lengths=(64,), group_size=16)      # one per 16 features
        Granularity.of(w, axes=(0, 1), group_size=32)              # one per row and 32 inputs of a weight
        ```

    It is static: two that are equal are the same to `jit`. Scales have the shape that broadcasts against the data: its
    last axes, with length one where values share a scale and the number of groups where there are groups.

    **Arguments:**

    - `axes`: the axes that scales differ along, counted from the end (`-1` is the last), since batches come in front.
    - `lengths`: how long these axes are.
    - `group_size`: how many neighbours along the last of `axes` share a scale. The last group may be shorter.
    """

    axes: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    group_size: int | None = None

    def __post_init__(self) -> None:
        if len(set(self.axes)) != len(self.axes) or any(a >= 0 for a in self.axes):
            raise ValueError(
                f"`axes` must be different and negative, counted from the end. Got {self.axes}. "
                "`Granularity.of(x, axes)` takes any axes of a given array."
            )
        if len(self.lengths) != len(self.axes) or any(length < 1 for length in self.lengths):
            raise ValueError(
                f"`lengths` must be positive, one for each of the {len(self.axes)} `axes`. Got {self.lengths}. "
                "`Granularity.of(x, axes)` takes them from an array."
            )
        if self.group_size is not None and not (self.axes and 1 <= self.group_size <= self.lengths[-1]):
            length = self.lengths[-1] if self.axes else "no axis"
            raise ValueError(
                f"`group_size` must be from 1 to the length of the last of `axes`, {length}. Got {self.group_size}. "
                "Without it there is one scale per channel."
            )

    @staticmethod
    def of(x: Any, axes: int | Sequence[int] = (), group_size: int | None = None) -> "Granularity":
        """The granularity for arrays that end like `x`, along any of its axes.

        **Arguments:**

        - `x`: an array, or anything with a shape.
        - `axes`: an axis or several, counted from either end; groups run along the last one named.
        - `group_size`: as above.

        **Returns:**

        A `Granularity`.

        **Raises:**

        `ValueError` for an axis out of range, one named twice, or a group size larger than its axis.
        """
        axes, ndim = (axes,) if isinstance(axes, int) else tuple(axes), len(x.shape)
        if any(not -ndim <= a < ndim for a in axes):
            raise ValueError(f"`axes` must be axes of the data, from {-ndim} to {ndim - 1}. Got {axes}.")
        negative = tuple(a % ndim - ndim for a in axes)
        return Granularity(negative, tuple(x.shape[a] for a in negative), group_size)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The shape of one number per scale, in the order of `axes`."""
        if self.group_size is None:
            return self.lengths
        return (*self.lengths[:-1], -(-self.lengths[-1] // self.group_size))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scales, which broadcasts against the data (groups aside)."""
        ndim = max((-a for a in self.axes), default=0)
        blocks = dict(zip(self.axes, self.blocks, strict=True))
        return tuple(blocks.get(a, 1) for a in range(-ndim, 0))

    def check(self, shape: tuple[int, ...], name: str) -> None:
        """Refuses data of another shape, naming it."""
        if len(shape) < len(self.shape) or tuple(shape[a] for a in self.axes) != self.lengths:
            raise ValueError(
                f"`axes` {self.axes} of {name} must have lengths {self.lengths}. Got shape {shape}. "
                "`Granularity.of(x, axes)` takes the lengths from an array."
            )

    def reduce(self, f: Callable[[Array], Array], x: Num[Array, "..."]) -> Num[Array, "..."]:
        """`f` of the values of each block, which it takes as `(*, values)` and returns as `(*, ...)`.

        Whole groups and the shorter last one are taken apart, so `f` never sees padding.
        """
        kept = len(self.axes)
        x = jnp.moveaxis(x, self.axes, range(kept))
        x = x.reshape(*self.lengths, -1)
        if self.group_size is None:
            return f(x)
        *outer, length, values = x.shape
        whole = length // self.group_size * self.group_size
        axis = (slice(None),) * len(outer)
        parts = [x[(*axis, slice(whole))].reshape(*outer, whole // self.group_size, self.group_size * values)]
        if whole < length:
            parts.append(x[(*axis, slice(whole, None))].reshape(*outer, 1, (length - whole) * values))
        return jnp.concatenate([f(part) for part in parts], axis=kept - 1)

    def to_shape(self, per_block: Num[Array, "*blocks"]) -> Num[Array, "*shape"]:
        """From the order of `axes` to `shape`."""
        order = sorted(range(len(self.axes)), key=lambda n: self.axes[n])
        return per_block.transpose(order).reshape(self.shape)

    def expand(self, per_scale: Num[Array, "..."], shape: tuple[int, ...]) -> Num[Array, "..."]:
        """One value per scale as one per element of data of `shape`."""
        if self.group_size is not None:
            axis, length = self.axes[-1], self.lengths[-1]
            per_scale = jnp.repeat(per_scale, self.group_size, axis=axis)
            per_scale = jnp.take(per_scale, jnp.arange(length), axis=axis)
        return jnp.broadcast_to(per_scale, shape)
