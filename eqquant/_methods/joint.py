"""The method of least squared error for nested scales (double quantization) and offsets."""

import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, PRNGKeyArray

from .._formats.base import AbstractFormat, AbstractOffsetFormat, Blocks, has_offsets, round_to_levels, Scales
from .._numerics.batching import Index, map_chunks
from .._numerics.blocks import block_length, divide, num_blocks
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .base import AbstractMethod
from .choose import broadcast_weights, choose_by_weights, Rows, ZeroPoints
from .grid import encode_by_chunks, encode_rows, EncodedRows, load_grid
from .mse import MSE
from .search import Best, keep_better
from .statistics import Inputs, weigh_columns


# The nested scales of all blocks, or their offsets: codes `(*batch, groups, blocks)`, and the float of each group that
# they are multiplied by, `(*batch, groups)`.
Part = tuple[Array, Array]

# Multiples of the format's own offset to try, and of the floats of groups.
_OFFSET_FACTORS = (1.0, 0.85, 0.7)
_GROUP_FACTORS = np.linspace(0.8, 1.15, 15, dtype=np.float32)
# How often codes and floats are improved in turn; the steps of the codes of a block's scale and offset.
_ROUNDS = 4
_STEPS = np.array([(s, o) for s in (-1, 0, 1) for o in (-1, 0, 1) if s or o], np.float32)


class JointMSE(AbstractMethod):
    r"""Finds scales, offsets and the scales of scales together with the codes.

    Like [`eqquant.MSE`][], with a smaller error for formats that have several of these.

    For GGUF's K-quants ([`eqquant.formats.Q4_K`][] and its relatives), its IQ types, and other formats with offsets.
    The scales and offsets of a K-quant are small integers times floats that 256 weights share. Rounding a scale to such
    an integer moves it far from the best one. So this method improves the integers, the floats and the codes in turn,
    each by least squares, while the squared error of a block, or of the blocks that share a float, falls. For a format
    with neither offsets nor quantized scales it equals `MSE`.

    With statistics of the inputs, the squared error of a column is weighted by the mean square of its input.

    !!! Example

        ```python
        q = eqq.quantize(w, "q4_k", method=eqq.JointMSE())
        weights = eqq.quantize_tree(weights, "q2_k", method=eqq.JointMSE(eqq.io.read_imatrix("imatrix.gguf")))
        ```

    **Arguments:**

    - `inputs`: as for `MSE`.
    """

    inputs: Inputs = None
    statistic: ClassVar[str | None] = "second_moment"

    def quantize_rows(
        self, rows: Rows, format: AbstractFormat, *, key: PRNGKeyArray | None = None, chunk: int | None = None
    ) -> EncodedRows:
        nested = _find_nested(format)
        if nested is None and not isinstance(format, AbstractOffsetFormat):
            return MSE(self.inputs).quantize_rows(rows, format, key=key, chunk=chunk)
        columns = jnp.ones(rows.shape[-1:], jnp.float32) if self.inputs is None else weigh_columns(self.inputs)
        scale, offset = choose_by_weights(_choose_scales, rows, columns, format, chunk)
        if nested is None:
            return encode_rows(rows, scale, offset, format, key=key, chunk=chunk)
        weights = broadcast_weights(columns, rows)
        choose = lambda _, rows, weights, scale, offset: _choose_nested(rows, weights, scale, offset, format, nested)
        scale_bits, offset_bits = map_chunks(choose, chunk, rows, weights, scale, offset)
        grid = load_grid(scale_bits, None, offset_bits, format)._replace(weights=weights)
        return encode_by_chunks(rows, scale_bits, offset_bits, grid, format, key, chunk)


def _find_nested(format: AbstractFormat) -> AbstractFormat | None:
    """Returns the format of nested scales, where groups of blocks share a float, or `None`."""
    nested = format.scale_format
    return nested if nested is not None and isinstance(nested.block_size, int) and nested.scale_format is None else None


def _choose_scales(blocks: Blocks, weights: Blocks, format: AbstractFormat) -> tuple[Scales, ZeroPoints]:
    """Chooses the scale and the offset of each block, not quantized yet."""
    if isinstance(format, AbstractOffsetFormat):
        return _choose_offsets(blocks, weights, format)
    return MSE().choose_weighted(blocks, weights, format)


def _choose_offsets(blocks: Blocks, weights: Blocks, format: AbstractOffsetFormat) -> tuple[Scales, Scales]:
    """Chooses the scale and the offset of each block.

    The best of a grid, each fitted to its codes by least squares.
    """
    top = 2**format.bits - 1
    factors = np.concatenate([np.linspace(top / (top + 1.5), top / (top - 0.5), 12), [0.9, 0.8, 0.7]])
    first = format.choose_scale(blocks)
    start = (first, format.choose_offset(blocks, first))
    n, total = weights.sum(-1), (weights * blocks).sum(-1)

    def errors(scale: Array, offset: Array) -> tuple[Array, Array]:
        levels = _levels(blocks, weights, scale, offset, format)
        values = levels * scale[..., None] + offset[..., None]
        return levels, jnp.sum(weights * jnp.square(blocks - values), axis=-1)

    def try_one(best: Best[tuple[Scales, Scales]], factor: Array) -> tuple[Best[tuple[Scales, Scales]], None]:
        scale, offset = start[0] * factor[0], start[1] * factor[1]
        for _ in range(2):
            levels, error = errors(scale, offset)
            best = keep_better(best, (scale, offset), error)
            weighted = weights * levels
            first, square, product = weighted.sum(-1), (weighted * levels).sum(-1), (weighted * blocks).sum(-1)
            determinant = n * square - first**2
            fitted = divide(n * product - first * total, determinant)
            moved = divide(square * total - first * product, determinant)
            if format.scale_format is not None:  # codes have the sign of the format's own scale
                one_sided = start[1] * moved <= 0
                fitted = jnp.where(one_sided, divide(product, square), fitted)
                moved = jnp.where(one_sided, 0, moved)
            keeps = fitted * start[0] > 0
            scale, offset = jnp.where(keeps, fitted, scale), jnp.where(keeps, moved, offset)
        return keep_better(best, (scale, offset), errors(scale, offset)[1]), None

    grid = jnp.asarray([(f, g) for f in factors for g in _OFFSET_FACTORS], jnp.float32)
    ((scale, offset), _), _ = jax.lax.scan(try_one, (start, errors(*start)[1]), grid)
    return scale, offset


def _levels(blocks: Blocks, weights: Blocks, scale: Array, offset: Array, format: AbstractFormat) -> Array:
    """Returns the values of the nearest codes."""
    units = divide(blocks - offset[..., None], jnp.broadcast_to(scale[..., None], blocks.shape))
    return round_to_levels(format, units, weights)


class _Groups(eqx.Module):
    """Groups of blocks: scales and offsets are codes of `nested` times a float of the group.

    A solution is a list of parts: the scales, and the offsets if the format has any.

    - `weights`: how much the squared error of each value counts; zero for padding.
    """

    values: Float32[Array, "*batch groups blocks block"]
    weights: Float32[Array, "*batch groups blocks block"]
    format: AbstractFormat
    nested: AbstractFormat

    def round(self, outer: Array) -> Array:
        """Rounds floats of groups to those that can be stored."""
        return bits_to_scale(scale_to_bits(outer, self.nested.scale_dtype), self.nested.scale_dtype)

    def encode(self, wanted: Array, outer: Array) -> Part:
        """Returns the part nearest to wanted scales or offsets, for given floats of groups."""
        outer = self.round(outer)
        return self.nested.encode(divide(wanted, jnp.broadcast_to(outer[..., None], wanted.shape))), outer

    def levels(self, parts: list[Part]) -> tuple[Array, Array, Array]:
        """Returns the levels of all values, and the scales and offsets of their blocks."""
        scale, *offsets = (self.nested.decode(codes) * outer[..., None] for codes, outer in parts)
        offset = offsets[0] if offsets else jnp.zeros_like(scale)
        return _levels(self.values, self.weights, scale, offset, self.format), scale[..., None], offset[..., None]

    def errors(self, parts: list[Part]) -> Array:
        """Returns the squared error of each block."""
        levels, scale, offset = self.levels(parts)
        return jnp.sum(self.weights * jnp.square(self.values - levels * scale - offset), axis=-1)

    def clear_worse(self, parts: list[Part]) -> list[Part]:
        """Sets the scales and offsets of blocks to zero where zeros have a lower error."""
        worse = self.errors(parts) > jnp.sum(self.weights * jnp.square(self.values), axis=-1)
        zero = self.nested.encode(jnp.zeros(worse.shape, jnp.float32))
        return [(jnp.where(worse, zero, codes), outer) for codes, outer in parts]

    def fit_floats(self, parts: list[Part]) -> list[Part]:
        """Fits the floats of each group to its codes."""
        levels, _, _ = self.levels(parts)
        sums = lambda x: jnp.sum(self.weights * x, axis=(-2, -1))
        u = self.nested.decode(parts[0][0])[..., None] * levels
        if len(parts) == 1:
            outers = (divide(sums(u * self.values), sums(u * u)),)
        else:
            v = self.nested.decode(parts[1][0])[..., None]
            uu, uv, vv, ux, vx = sums(u * u), sums(u * v), sums(v * v), sums(u * self.values), sums(v * self.values)
            determinant = uu * vv - uv * uv
            outers = divide(ux * vv - vx * uv, determinant), divide(uu * vx - uv * ux, determinant)
        return [(codes, _keep_usable(self.round(new), old)) for (codes, old), new in zip(parts, outers, strict=True)]

    def move_codes(self, parts: list[Part]) -> list[Part]:
        """Moves the codes of each block by one, where that lowers its error."""

        def move(best: Best[list[Array]], step: Array) -> tuple[Best[list[Array]], None]:
            decode, encode = self.nested.decode, self.nested.encode
            codes = [encode(decode(c) + d) for c, d in zip(best[0], step, strict=False)]
            return keep_better(best, codes, self.errors([(c, p[1]) for c, p in zip(codes, parts, strict=True)])), None

        (codes, _), _ = jax.lax.scan(move, ([c for c, _ in parts], self.errors(parts)), jnp.asarray(_STEPS))
        return [(c, p[1]) for c, p in zip(codes, parts, strict=True)]


def _choose_nested(
    rows: Rows, weights: Rows, scale: Scales, offset: Scales | None, format: AbstractFormat, nested: AbstractFormat
) -> tuple[EncodedRows, EncodedRows | None]:
    """Returns stored scales and offsets near the given ones, of the least error found."""
    block, blocks = block_length(format.block_size, rows.shape[-1]), num_blocks(rows.shape[-1], format.block_size)
    share = block_length(nested.block_size, blocks)
    count = math.ceil(blocks / share)
    # Pad to whole groups; padding has no weight in the error.
    pad = lambda x, size: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    grouped = lambda x, *shape: pad(x, count * math.prod(shape)).reshape(*x.shape[:-1], count, *shape)
    values, weights = (grouped(x, share, block) for x in (rows.astype(jnp.float32), weights))
    groups = _Groups(values, weights, format, nested)
    wanted = [grouped(x, share) for x in (scale, offset) if x is not None]
    # A group with a block that is not finite has a float of NaN, which no candidate replaces.
    own = [jnp.where(jnp.isfinite(x).all(axis=-1), nested.choose_scale(x), jnp.nan) for x in wanted]
    parts = [groups.encode(x, outer) for x, outer in zip(wanted, own, strict=True)]
    best = parts, groups.errors(parts).sum(-1)
    for n in range(len(wanted)):

        def try_outer(best: Best[list[Part]], factor: Array, n: int = n) -> tuple[Best[list[Part]], None]:
            parts = [*best[0]]
            parts[n] = groups.encode(wanted[n], own[n] * factor)
            return keep_better(best, parts, groups.errors(parts).sum(-1)), None

        best, _ = jax.lax.scan(try_outer, best, jnp.asarray(_GROUP_FACTORS))

    def improve(_: Index, parts: list[Part]) -> list[Part]:
        parts = groups.move_codes(parts)
        fitted = groups.fit_floats(parts)
        return keep_better((parts, groups.errors(parts).sum(-1)), fitted, groups.errors(fitted).sum(-1))[0]

    parts = groups.clear_worse(jax.lax.fori_loop(0, _ROUNDS, improve, best[0]))
    merge = lambda x: x.reshape(*x.shape[:-2], count * share)[..., :blocks]
    scale_bits, *offset_bits = (EncodedRows(merge(c), scale_to_bits(outer, nested.scale_dtype)) for c, outer in parts)
    return scale_bits, offset_bits[0] if has_offsets(format) else None


def _keep_usable(new: Array, old: Array) -> Array:
    """Returns new floats of groups, or the old ones where the new ones are zero or not finite."""
    return jnp.where((new != 0) & jnp.isfinite(new), new, old)
