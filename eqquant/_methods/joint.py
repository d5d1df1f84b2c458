"""The method of least squared error for scales that come in two levels, and for offsets."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from .._formats.base import AbstractFormat, AbstractOffsetFormat, has_offsets
from .._numerics.blocks import divide, num_blocks
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .base import AbstractMethod, by_chunks, choose_by_blocks, encode_rows, encode_stored, Encoded
from .mse import MSE


# Scales or offsets of one level: codes, and the floats that these are multiplied by.
Part = tuple[Array, Array]

_SHRINK_OFFSET = (1.0, 0.85, 0.7)
_OUTER = np.linspace(0.8, 1.15, 15, dtype=np.float32)
_ROUNDS = 4
_STEPS = np.array([(s, o) for s in (-1, 0, 1) for o in (-1, 0, 1) if s or o], np.float32)


class JointMSE(AbstractMethod):
    r"""Like [`eqquant.MSE`][], but also finds offsets and both levels of quantized scales, together with the codes.

    For GGUF's K-quants ([`eqquant.Q4_K`][] and its relatives) and for other formats with offsets. The scales and
    offsets of a K-quant are small integers times floats that 256 weights share. Rounding a scale to such an integer
    moves it far from the best one. So this method improves the integers, the floats and the codes in turn, each by
    least squares, while the squared error of a block, or of the blocks that share a float, falls. For a format with
    neither offsets nor quantized scales it does what `MSE` does.

    !!! Example

        ```python
        q = eqq.quantize(w, "q4_k", method=eqq.JointMSE())
        ```
    """

    def quantize_rows(
        self,
        rows: Float[Array, "*batch length"],
        format: AbstractFormat,
        *,
        key: PRNGKeyArray | None = None,
        chunk: int | None = None,
    ) -> Encoded:
        scale, offset = choose_by_blocks(_by_block, rows, format, chunk=chunk)
        nested = format.scale_format
        if nested is None or not isinstance(nested.block_size, int) or nested.scale_format is not None:
            return encode_rows(rows, scale, offset, format, key=key, chunk=chunk)
        two_levels = lambda _, rows, scale, offset: _two_levels(rows, scale, offset, format)
        stored, stored_offset = by_chunks(two_levels, chunk, rows, scale, offset)
        return encode_stored(rows, stored, stored_offset, format, key, chunk)


JointMSE.__init__.__doc__ = "**Arguments:** none."


def _by_block(
    blocks: Float32[Array, "*batch blocks block"], format: AbstractFormat
) -> tuple[Float32[Array, "*batch blocks"], Any]:
    """Chooses the scale of each block, and its offset or its zero point, before scales are quantized."""
    if isinstance(format, AbstractOffsetFormat):
        return _with_offsets(blocks, format)
    return MSE().choose_scales(blocks, format)


def _with_offsets(
    blocks: Float32[Array, "*batch blocks block"], format: AbstractOffsetFormat
) -> tuple[Float32[Array, "*batch blocks"], Float32[Array, "*batch blocks"]]:
    """Chooses the scale and the offset of each block: of a grid, each fitted to its codes by least squares."""
    top = 2**format.bits - 1
    factors = np.concatenate([np.linspace(top / (top + 1.5), top / (top - 0.5), 12), [0.9, 0.8, 0.7]])
    first = format.choose_scale(blocks)
    start = (first, format.choose_offset(blocks, first))
    n = blocks.shape[-1]

    def errors(scale: Array, offset: Array) -> tuple[Array, Array]:
        levels = _levels(blocks, scale, offset, format)
        values = levels * scale[..., None] + offset[..., None]
        return levels, jnp.sum(jnp.square(blocks - values), axis=-1)

    def try_one(best: Any, factor: Array) -> tuple[Any, None]:
        scale, offset = start[0] * factor[0], start[1] * factor[1]
        for _ in range(2):
            levels, error = errors(scale, offset)
            best = _lower(best, (scale, offset), error)
            sums = levels.sum(-1), jnp.square(levels).sum(-1), blocks.sum(-1), (levels * blocks).sum(-1)
            determinant = n * sums[1] - sums[0] ** 2
            fitted = divide(n * sums[3] - sums[0] * sums[2], determinant)
            moved = divide(sums[1] * sums[2] - sums[0] * sums[3], determinant)
            if format.scale_format is not None:  # codes of one sign, that of the format's own choice
                one_sided = start[1] * moved <= 0
                fitted = jnp.where(one_sided, divide(sums[3], sums[1]), fitted)
                moved = jnp.where(one_sided, 0, moved)
            keeps = fitted * start[0] > 0
            scale, offset = jnp.where(keeps, fitted, scale), jnp.where(keeps, moved, offset)
        return _lower(best, (scale, offset), errors(scale, offset)[1]), None

    grid = jnp.asarray([(f, g) for f in factors for g in _SHRINK_OFFSET], jnp.float32)
    ((scale, offset), _), _ = jax.lax.scan(try_one, (start, errors(*start)[1]), grid)
    return scale, offset


def _lower(best: Any, candidate: Any, error: Array) -> Any:
    """Returns the candidate where its error is lower than that of the best. All arrays share their leading axes."""
    improved = error < best[1]  # never for a NaN
    where = lambda new, old: jnp.where(improved.reshape(*improved.shape, *[1] * (new.ndim - improved.ndim)), new, old)
    return jax.tree.map(where, candidate, best[0]), where(error, best[1])


def _levels(blocks: Array, scale: Array, offset: Array, format: AbstractFormat) -> Array:
    """Returns what the nearest codes decode to."""
    units = divide(blocks - offset[..., None], jnp.broadcast_to(scale[..., None], blocks.shape))
    return format.decode(format.encode(units))


def _two_levels(
    rows: Float[Array, "*batch length"],
    scale: Float32[Array, "*batch blocks"],
    offset: Float32[Array, "*batch blocks"] | None,
    format: AbstractFormat,
) -> tuple[Encoded, Encoded | None]:
    """Returns scales and offsets as the format stores them, near the given ones, of the least error found."""
    nested: Any = format.scale_format
    block, share = format.block_size if isinstance(format.block_size, int) else rows.shape[-1], nested.block_size
    blocks = num_blocks(rows.shape[-1], format.block_size)
    groups = math.ceil(blocks / share)
    # Whole groups; what is added counts for nothing.
    pad = lambda x, size: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    grouped = lambda x, *shape: pad(x, groups * math.prod(shape)).reshape(*x.shape[:-1], groups, *shape)
    values = grouped(rows.astype(jnp.float32), share, block)
    counts = grouped(jnp.ones(rows.shape, jnp.float32), share, block)
    wanted = [grouped(x, share) for x in (scale, offset) if x is not None]

    def floats(part: Part) -> Array:
        return nested.decode(part[0]) * part[1][..., None]

    def levels_of(parts: list[Part]) -> tuple[Array, Array, Array]:
        s, o = floats(parts[0]), floats(parts[1]) if len(parts) > 1 else jnp.zeros_like(wanted[0])
        return _levels(values, s, o, format), s[..., None], o[..., None]

    def error(parts: list[Part]) -> Array:
        levels, s, o = levels_of(parts)
        return jnp.sum(counts * jnp.square(values - levels * s - o), axis=-1)

    def stored(outer: Array) -> Array:
        return bits_to_scale(scale_to_bits(outer, nested.scale_dtype), nested.scale_dtype)

    def part_of(wanted: Array, outer: Array) -> Part:
        outer = stored(outer)
        return nested.encode(divide(wanted, jnp.broadcast_to(outer[..., None], wanted.shape))), outer

    # A group with a block that is not finite has a float of NaN, which no candidate replaces.
    own = [jnp.where(jnp.isfinite(x).all(axis=-1), nested.choose_scale(x), jnp.nan) for x in wanted]
    best = [part_of(x, outer) for x, outer in zip(wanted, own, strict=True)]
    best = best, error(best).sum(-1)
    for n in range(len(wanted)):

        def try_outer(best: Any, factor: Array, n: int = n) -> tuple[Any, None]:
            parts = [*best[0]]
            parts[n] = part_of(wanted[n], own[n] * factor)
            return _lower(best, parts, error(parts).sum(-1)), None

        best, _ = jax.lax.scan(try_outer, best, jnp.asarray(_OUTER))

    def fit_outer(parts: list[Part]) -> list[Part]:
        """Fits the floats of each group to its codes."""
        levels, _, _ = levels_of(parts)
        sums = lambda x: jnp.sum(counts * x, axis=(-2, -1))
        u = nested.decode(parts[0][0])[..., None] * levels
        if len(parts) == 1:
            return [(parts[0][0], _usable(stored(divide(sums(u * values), sums(u * u))), parts[0][1]))]
        v = nested.decode(parts[1][0])[..., None]
        uu, uv, vv, ux, vx = sums(u * u), sums(u * v), sums(v * v), sums(u * values), sums(v * values)
        determinant = uu * vv - uv * uv
        outers = divide(ux * vv - vx * uv, determinant), divide(uu * vx - uv * ux, determinant)
        return [(codes, _usable(stored(new), old)) for (codes, old), new in zip(parts, outers, strict=True)]

    def one_round(_: Any, parts: list[Part]) -> list[Part]:
        def move(best: Any, step: Array) -> tuple[Any, None]:
            codes = [nested.encode(nested.decode(c) + d) for c, d in zip(best[0], step, strict=False)]
            return _lower(best, codes, error([(c, p[1]) for c, p in zip(codes, parts, strict=True)])), None

        (codes, _), _ = jax.lax.scan(move, ([c for c, _ in parts], error(parts)), jnp.asarray(_STEPS))
        parts = [(c, p[1]) for c, p in zip(codes, parts, strict=True)]
        return _lower((parts, error(parts).sum(-1)), fit_outer(parts), error(fit_outer(parts)).sum(-1))[0]

    parts = jax.lax.fori_loop(0, _ROUNDS, one_round, best[0])
    merge = lambda x: x.reshape(*x.shape[:-2], -1)[..., :blocks]
    encoded = [Encoded(merge(codes), scale_to_bits(outer, nested.scale_dtype)) for codes, outer in parts]
    return encoded[0], encoded[1] if has_offsets(format) else None


def _usable(new: Array, old: Array) -> Array:
    return jnp.where((new != 0) & jnp.isfinite(new), new, old)
