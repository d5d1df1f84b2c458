"""`xla` on CPU: `x(m, k) . w(n, k)^T` in the form that XLA for CPU runs fastest.

XLA for CPU never fuses a decode into a product, so a loop decodes and multiplies a few rows at a time, and decoded rows
stay in the cache. It decodes each plane of the packing of a large weight on its own, and multiplies it by the matching
columns of `x`: putting the values in order would take longer than multiplying them. Codes that stand for several values
decode row by row.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.lax import PrecisionLike
from jaxtyping import Array, DTypeLike, Float, Float32

from ..._native.weight import Layout
from ..._numerics import packing
from ..._numerics.blocks import dequantize_values
from ..._types import PyTree
from .packed import decode_columns, decode_scale, look_up, PackedWeight
from .xla import accumulator


# The bytes of a plane to decode at a time. Without a loop over rows, XLA may decode several layers before it multiplies
# any, and decoded rows leave the cache.
ROWS_BYTES = 2**21


def matmul(
    x: Float[Array, "*batch rows inner"],
    weight: PackedWeight,
    layout: Layout,
    dtype: DTypeLike,
    *,
    transpose: bool,
    precision: PrecisionLike,
) -> Float[Array, "*batch rows outer"]:
    """Computes `x(m, k) . w(n, k)^T`, or with `transpose` `x(m, n) . w(n, k)`.

    **Arguments:**

    - `dtype`: the dtype of the weight. Its values are rounded to this dtype if `x` has a wider one.
    """
    wide = accumulator(x.dtype)
    # Values that are rounded to 16 bits must be scaled first. Otherwise it is cheaper to scale the results or `x`.
    round_to = jnp.dtype(dtype) if jnp.dtype(dtype).itemsize < x.dtype.itemsize else None
    apply_scale = not layout.per_channel or round_to is not None or wide.itemsize > 4 or layout.offsets
    decoder = _PlaneDecoder(layout, wide, round_to, apply_scale, _is_small(weight, layout.length, wide))
    return _multiply_by_rows(x, weight, decoder, transpose=transpose, precision=precision)


def matmul_vectors(
    x: Float[Array, "*batch rows inner"],
    weight: PyTree,
    decode: Callable[[PyTree], Array],
    length: int,
    *,
    transpose: bool,
    precision: PrecisionLike,
) -> Float[Array, "*batch rows outer"]:
    """As `matmul`, for a weight whose codes stand for several values each.

    **Arguments:**

    - `weight`: a tree with an array `codes`. All its arrays are `(*batch, n, _)`.
    - `decode`: a function that returns the values of rows, `length` of each.
    """
    decoder = _RowDecoder(decode, length, accumulator(x.dtype))
    return _multiply_by_rows(x, weight, decoder, transpose=transpose, precision=precision)


def _multiply_by_rows(
    x: Float[Array, "*batch rows inner"],
    weight: PyTree,
    decoder: "_Decoder",
    *,
    transpose: bool,
    precision: PrecisionLike,
) -> Float[Array, "*batch rows outer"]:
    *batch, n, _ = weight.codes.shape
    count, row_bytes = math.prod(batch), max(decoder.length * decoder.wide.itemsize, 1)
    whole = _is_small(weight, decoder.length, decoder.wide)
    rows = n if whole else min(max(ROWS_BYTES * decoder.parts_of_row // row_bytes, 1), n)
    product = ft.partial(_transposed_product if transpose else _product, decoder, rows, precision)

    def multiply_one(operands: tuple[Array, PyTree]) -> Array:
        x, weight = operands
        return product(x.astype(decoder.wide), weight).astype(x.dtype)

    if not batch:
        return multiply_one((x, weight))
    flat = jtu.tree_map(lambda a: a.reshape(count, *a.shape[len(batch) :]), (x, weight))
    y = jax.vmap(multiply_one)(flat) if whole else jax.lax.map(multiply_one, flat)
    return y.reshape(*batch, *y.shape[1:])


def _is_small(weight: PyTree, length: int, wide: np.dtype) -> bool:
    """Returns whether a weight is decoded as a whole. Its rows have `length` values."""
    lengths = weight.codes.shape[:-1]
    if not all(isinstance(n, int) for n in lengths):
        return True  # symbolic: a loop needs to know how many rows there are
    return math.prod(lengths) * length * wide.itemsize <= ROWS_BYTES


class _RowDecoder(NamedTuple):
    """Decodes rows as a whole, by a function. Has the methods of `_PlaneDecoder`."""

    decode_rows: Callable[[PyTree], Array]
    length: int
    wide: np.dtype
    parts_of_row: int = 1

    def decode(self, weight: PyTree) -> list[Float[Array, "rows length"]]:
        return [self.decode_rows(weight).astype(self.wide)]

    def split(self, x: Float[Array, "m k"]) -> list[Float[Array, "m k"]]:
        return [x]

    def concatenate(self, parts: list[Float[Array, "m k"]]) -> Float[Array, "m k"]:
        return parts[0]

    def load_row_scale(self, weight: PyTree) -> None:
        del weight


class _PlaneDecoder(NamedTuple):
    """Decodes planes of whole packed segments, which are the body of a row, then the remainder.

    For a small weight, the planes are joined, and values are gathered from a table: the product compiles in half the
    time, and runs about as fast or faster. For a large weight it would run slower, above all with one row of `x`.
    """

    layout: Layout
    wide: np.dtype  # the dtype of values and sums
    round_to: np.dtype | None  # the dtype that values are rounded to first, or `None`
    apply_scale: bool  # if not, the caller multiplies by `load_row_scale`
    is_small: bool

    @property
    def length(self) -> int:
        return self.layout.length

    @property
    def parts_of_row(self) -> int:
        return self.layout.planes

    @property
    def run(self) -> int:
        """The number of consecutive bytes that hold consecutive codes."""
        layout = self.layout
        return packing.PLANE if layout.bits < 8 else max(layout.block_size, 1)

    @property
    def body(self) -> int:
        """The number of codes of a row in whole segments."""
        segment = self.run * self.layout.planes
        return self.layout.length // segment * segment

    def decode(self, weight: PackedWeight) -> list[Float[Array, "rows _"]]:
        layout, body, run = self.layout, self.body, self.run
        rows, parts = weight.codes.shape[0], []
        # The values of a unit share a scale.
        unit = run if layout.per_channel else math.gcd(run, layout.block_size)
        packed = weight.codes[:, : packing.packed_length(body, layout.bits)]
        count = body // layout.planes // run  # whole segments
        codes = packed.reshape(rows, count, packed.shape[1] // (max(count, 1) * run), run // unit, unit)
        scale = self._per_unit(self._scale(weight), unit) if self.apply_scale else None
        zero = None if weight.zero_point is None else self._per_unit(weight.zero_point.astype(jnp.float32), unit)
        offset = None if weight.offset is None else self._per_unit(weight.offset, unit)
        for plane in range(layout.planes if body else 0):
            values = look_up(packing.unpack_plane(codes, plane, layout.bits), layout, gather=self.is_small)
            each = [a if a is None else jnp.broadcast_to(a[plane], values.shape) for a in (scale, zero, offset)]
            values = dequantize_values(values, *each)
            parts.append(self._round(values).reshape(rows, body // layout.planes))
        parts = [self._join(parts)] if body and self.is_small else parts
        if body == layout.length:
            return parts
        remainder = decode_columns(weight, layout, body, jnp.float32, scaled=self.apply_scale, gather=self.is_small)
        return [*parts, self._round(remainder)]

    def split(self, x: Float[Array, "m k"]) -> list[Float[Array, "m _"]]:
        """Splits the columns of `x` like the parts of a row."""
        m, body, planes = x.shape[0], self.body, self._parts_of_body
        parts = [x[:, :body]] * planes
        if planes > 1:
            runs = parts[0].reshape(m, body // planes // self.run, planes, self.run)
            parts = [runs[:, :, plane].reshape(m, body // planes) for plane in range(planes)]
        return parts if body == self.layout.length else [*parts, x[:, body:]]

    def concatenate(self, parts: list[Float[Array, "m _"]]) -> Float[Array, "m k"]:
        """Concatenates parts to columns: the inverse of `split`."""
        planes = self._parts_of_body
        body = [self._join(parts[:planes])] if planes > 0 else []
        whole = [*body, *parts[planes:]]
        return jnp.concatenate(whole, axis=1) if len(whole) > 1 else whole[0]

    @property
    def _parts_of_body(self) -> int:
        return 0 if self.body == 0 else 1 if self.is_small else self.layout.planes

    def _join(self, planes: list[Float[Array, "rows _"]]) -> Float[Array, "rows body"]:
        """Joins planes to columns in their order."""
        if len(planes) == 1:
            return planes[0]
        rows = planes[0].shape[0]
        runs = [plane.reshape(rows, plane.shape[1] // self.run, 1, self.run) for plane in planes]
        return jnp.concatenate(runs, axis=2).reshape(rows, self.body)

    def load_row_scale(self, weight: PackedWeight) -> Float32[Array, " n"] | None:
        return None if self.apply_scale else self._scale(weight)[:, 0]

    def _scale(self, weight: PackedWeight) -> Float32[Array, "rows blocks"]:
        scale = decode_scale(weight.scale, self.layout.scale)
        return scale if weight.row_scale is None else scale * jnp.broadcast_to(weight.row_scale, scale.shape)

    def _per_unit(self, per_block: Float32[Array, "rows blocks"], unit: int) -> list[Float32[Array, "rows _ units 1"]]:
        """Returns one number per unit, for each plane."""
        layout, (rows, blocks) = self.layout, per_block.shape
        if layout.per_channel:
            return [per_block[:, :, None, None]] * layout.planes
        repeated = jnp.broadcast_to(per_block[:, :, None], (rows, blocks, layout.block_size // unit))
        units = repeated.reshape(rows, blocks * repeated.shape[2])[:, : self.body // unit]
        units = units.reshape(rows, self.body // layout.planes // self.run, layout.planes, self.run // unit, 1)
        return [units[:, :, plane] for plane in range(layout.planes)]

    def _round(self, values: Float32[Array, "*shape"]) -> Float[Array, "*shape"]:
        if self.round_to is not None or self.layout.zero_points or self.layout.offsets:
            # As `dequantize` does: the outermost level may lie beyond the finite range.
            limit = float(min(jnp.finfo(self.round_to or self.wide).max, jnp.finfo(jnp.float32).max))
            values = jnp.clip(values, -limit, limit)
        return (values if self.round_to is None else values.astype(self.round_to)).astype(self.wide)


_Decoder = _PlaneDecoder | _RowDecoder


def _product(
    decoder: _Decoder, rows: int, precision: PrecisionLike, x: Float[Array, "m k"], weight: PyTree
) -> Float[Array, "m n"]:
    dot = ft.partial(jax.lax.dot_general, precision=precision, preferred_element_type=x.dtype)
    columns = decoder.split(x)

    def multiply(weight: PyTree) -> Float[Array, "rows m"]:
        # With the weight on the left, products with few rows of `x` are faster.
        dnums = (((1,), (1,)), ((), ()))
        return ft.reduce(jnp.add, [dot(w, x, dnums) for w, x in zip(decoder.decode(weight), columns, strict=True)])

    looped, remainder = _split_steps(weight, rows)
    y = []
    if looped is not None:
        _, y_steps = jax.lax.scan(lambda _, weight: (None, multiply(weight)), None, looped)
        y.append(y_steps.reshape(looped.codes.shape[0] * rows, x.shape[0]))
    if remainder is not None:
        y.append(multiply(remainder))
    y = jnp.concatenate(y) if len(y) > 1 else y[0]
    scale = decoder.load_row_scale(weight)
    return jnp.transpose(y if scale is None else y * jnp.broadcast_to(scale[:, None], y.shape))


def _transposed_product(
    decoder: _Decoder, rows: int, precision: PrecisionLike, x: Float[Array, "m n"], weight: PyTree
) -> Float[Array, "m k"]:
    dot = ft.partial(jax.lax.dot_general, precision=precision, preferred_element_type=x.dtype)
    scale = decoder.load_row_scale(weight)
    x = x if scale is None else x * jnp.broadcast_to(scale, x.shape)

    def multiply(x: Float[Array, "m rows"], weight: PyTree) -> list[Float[Array, "m _"]]:
        return [dot(x, w, (((1,), (0,)), ((), ()))) for w in decoder.decode(weight)]

    looped, remainder = _split_steps(weight, rows)
    if looped is None:
        return decoder.concatenate(multiply(x, weight))
    looped_rows = looped.codes.shape[0] * rows
    steps = jnp.moveaxis(x[:, :looped_rows].reshape(x.shape[0], looped_rows // rows, rows), 1, 0)
    total = [jnp.zeros_like(part) for part in decoder.split(jnp.zeros((x.shape[0], decoder.length), x.dtype))]
    add = lambda total, step: ([t + y for t, y in zip(total, multiply(*step), strict=True)], None)
    total = multiply(x[:, looped_rows:], remainder) if remainder is not None else total
    total, _ = jax.lax.scan(add, total, (steps, looped))
    return decoder.concatenate(total)


def _split_steps(weight: PyTree, rows: int) -> tuple[PyTree, PyTree]:
    """Splits a weight into steps of `rows` rows, if there are several, and a remainder."""
    n = weight.codes.shape[0]
    steps = n // max(rows, 1)
    if steps <= 1:
        return None, weight
    looped = jtu.tree_map(lambda a: a[: steps * rows].reshape(steps, rows, *a.shape[1:]), weight)
    return looped, jtu.tree_map(lambda a: a[steps * rows :], weight) if steps * rows < n else None
