"""`pallas_tpu`: the quantized matmul for TPUs, in Pallas-Mosaic.

A tile is several whole rows of packed bytes. The kernel decodes them in VMEM, 128 bytes of a row at a time: two packed
segments, which fill the lanes of a vector register. Plane `p` of these bytes is two runs of 64 codes. XLA puts `x` in
the same order first, so the kernel decodes a plane in place (`vpu.py`) and multiplies it by a plane of `x`. No code
ever moves across lanes.

- **Scales** do not multiply the weight, since broadcasting them along lanes is slow. Instead the kernel stacks several
  copies of `x`, each zero outside one block. One product gives the partial sums of all blocks, and the kernel scales
  these. The transposed product scales the copies of `x`, and selects the lanes of one block from each result.
- **Zero points.** `sum(x * (code - zero) * scale)` is the product with codes, minus the sum of `x` over each block
  times `zero * scale`. The second term is a small product, in float32.

A row is whole pairs of segments and a remainder, which XLA decodes and multiplies.
"""

import functools as ft
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, DTypeLike, Float, Float32

from ... import _compat
from ..._native.weight import Layout
from ..._numerics import packing
from .packed import alignment_refusal, decode_scale, PackedWeight, pallas_refusal
from .target import TargetDevice
from .vpu import decode_float16, Decoder, LANES, needs_lookup
from .xla import add_remainder


VMEM_BYTES = 48 * 2**20  # v7x has 64 MiB, others have more

Refs = dict[str, jax.Ref | Array]  # the operands of a kernel by name; some depend on the layout


class Config(NamedTuple):
    """The sizes of tiles, which shrink if rows are too long for VMEM."""

    tile_m: int  # an upper bound; with more rows of `x`, the weight is decoded several times
    tile_n: int
    unroll: int  # how many chunks of 128 bytes of every row a step of the loop decodes


# By device (a part of its name, "any" for others), bits and shape class. Chosen by the number of compiled instructions,
# not yet by time. Larger tiles need slightly fewer, but the kernel computes nothing while it loads the first tile.
CONFIGS: dict[tuple[str, int, Literal["blocks", "per_channel"]], Config] = {
    **{("any", bits, "blocks"): Config(tile_m=64, tile_n=256, unroll=2 * bits) for bits in (1, 2, 4, 8)},
    **{("any", bits, "per_channel"): Config(tile_m=256, tile_n=256, unroll=2 * bits) for bits in (1, 2, 4, 8)},
}


def tune(device: str, layout: Layout) -> Config:
    """Returns the configuration for a device, given its name."""
    shape = "per_channel" if layout.per_channel else "blocks"
    known = (name for name, *rest in CONFIGS if name in device and rest == [layout.bits, shape])
    return CONFIGS[next(known, "any"), layout.bits, shape]


class Tiling(NamedTuple):
    """The static parameters of a kernel."""

    layout: Layout
    n: int
    row_bytes: int  # the bytes of a row that the kernel reads
    dtype: DTypeLike  # the dtype of the operands of products
    tile_m: int
    tile_n: int
    unroll: int
    transpose: bool

    @property
    def columns(self) -> int:
        return self.row_bytes * self.layout.planes

    @property
    def decoder(self) -> Decoder:
        return Decoder(self.layout, self.dtype)

    @property
    def has_shift(self) -> bool:
        """Whether the product with decoded codes needs a correction by sums of `x`."""
        return self.layout.zero_points or self.decoder.offset != 0

    @property
    def planes_share_scales(self) -> bool:
        """Whether the planes of a segment share a scale."""
        return self.layout.per_channel or self.layout.block_size % (packing.PLANE * self.layout.planes) == 0

    @property
    def copies(self) -> int:
        """The number of copies of `x`: the number of blocks in the lanes of a plane."""
        if self.layout.per_channel or self.layout.block_size % (2 * packing.PLANE * self.layout.planes) == 0:
            return 1
        return LANES // min(packing.PLANE, self.layout.block_size)

    @property
    def vmem_bytes(self) -> int:
        """The approximate bytes of two tiles, since the next one loads meanwhile."""
        blocks = 0 if self.layout.per_channel else pl.cdiv(self.layout.length, self.layout.block_size)
        weight = self.tile_n * (self.row_bytes + 8 * (pl.cdiv(blocks, LANES) * LANES))
        rows = self.tile_m * self.columns  # a tile of the result if transposed, else of copies of `x`
        x = rows * 4 if self.transpose else rows * self.copies * jnp.dtype(self.dtype).itemsize
        return 2 * (weight + x) + 8 * 2**20  # with room for intermediate results

    @property
    def scales_are_transposed(self) -> bool:
        """Whether scales are (blocks, n), as XLA stores them to avoid padding to 128 lanes."""
        return pl.cdiv(self.layout.length, self.layout.block_size) % LANES != 0

    def block(self, chunk: Array, plane: int, copy: int) -> Array:
        """Returns the block number of one copy, in a plane of the `chunk`-th 128 bytes."""
        first = copy * (LANES // self.copies)  # the first lane of the copy
        run = (2 * chunk + first // packing.PLANE) * self.layout.planes + plane
        if self.layout.block_size < packing.PLANE:
            return run * (packing.PLANE // self.layout.block_size) + first % packing.PLANE // self.layout.block_size
        return jax.lax.div(run, jnp.int32(self.layout.block_size // packing.PLANE))


def refusal(
    layout: Layout, m: int, n: int, dtype: DTypeLike, *, transpose: bool, precision: str, target: TargetDevice
) -> str | None:
    """Returns why the kernel cannot take the product, or `None` if it can."""
    del target
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"{jnp.dtype(dtype).name} is not native to TPUs"
    if m == 0 or n == 0:
        return "there is nothing to multiply"
    if pallas_refusal(layout) is not None:
        return pallas_refusal(layout)
    if _whole_bytes(layout) == 0:
        return f"rows of {layout.length} codes are less than the {LANES} bytes that it takes at a time"
    if layout.bits == 8 and needs_lookup(layout):
        return "256 values are too many to look up"
    if alignment_refusal(layout) is not None:
        return alignment_refusal(layout)
    smallest = _tiling(layout, 1, n, dtype, transpose, precision, Config(1, LANES, 1))
    return f"rows of {layout.length} codes do not fit into VMEM" if smallest.vmem_bytes > VMEM_BYTES else None


def matmul(
    x: Float[Array, "m inner"],
    weight: PackedWeight,
    layout: Layout,
    *,
    transpose: bool,
    precision: str,
    target: TargetDevice = TargetDevice("tpu"),
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "m outer"]:
    """Computes `x . w^T`, or with `transpose` `x . w`, with float32 sums."""
    tiling = _tiling(
        layout, x.shape[0], weight.codes.shape[0], x.dtype, transpose, precision, config or tune(target.device, layout)
    )
    y = (_multiply_transposed if transpose else _multiply_forward)(x, weight, tiling, interpret)
    dot_precision = jax.lax.Precision.HIGHEST if tiling.dtype == jnp.float32 else None
    operand = x.astype(tiling.dtype)
    y = add_remainder(y, operand, weight, layout, tiling.columns, transpose=transpose, precision=dot_precision)
    return y.astype(x.dtype)


def _tiling(
    layout: Layout, m: int, n: int, dtype: DTypeLike, transpose: bool, precision: str, config: Config
) -> Tiling:
    dtype = jnp.float32 if dtype == jnp.float32 and precision == "highest" else jnp.bfloat16
    tiling = Tiling(layout, n, _whole_bytes(layout), dtype, 8, config.tile_n, config.unroll, transpose)
    # Two copies of 8 rows fill the 16 sublanes of a bfloat16 register.
    if m > 8 or tiling.copies == 1:
        tiling = tiling._replace(tile_m=min(pl.cdiv(config.tile_m, 16), pl.cdiv(m, 16)) * 16)
    while tiling.vmem_bytes > VMEM_BYTES and (tiling.tile_m > 16 or tiling.tile_n > LANES):
        if tiling.tile_m > 16:
            tiling = tiling._replace(tile_m=pl.cdiv(tiling.tile_m, 32) * 16)
        else:
            tiling = tiling._replace(tile_n=max(tiling.tile_n // 2, LANES))
    return tiling


def _whole_bytes(layout: Layout) -> int:
    """Returns how many bytes of a row the kernel reads: whole pairs of segments."""
    return layout.length // (layout.planes * LANES) * LANES


def _multiply_forward(
    x: Float[Array, "m k"], weight: PackedWeight, tiling: Tiling, interpret: bool
) -> Float32[Array, "m n"]:
    m, layout = x.shape[0], tiling.layout
    tiles = pl.cdiv(m, tiling.tile_m)
    x = jnp.pad(x[:, : tiling.columns].astype(tiling.dtype), [(0, tiles * tiling.tile_m - m), (0, 0)])
    planes = x.reshape(-1, tiling.row_bytes // packing.PLANE, layout.planes, packing.PLANE)
    planes = planes.transpose(2, 0, 1, 3).reshape(layout.planes, 1, tiles, tiling.tile_m, tiling.row_bytes)
    # A copy for each block of a plane, zero outside it.
    in_block = np.arange(LANES) // (LANES // tiling.copies) == np.arange(tiling.copies)[:, None]
    in_block = np.tile(in_block, tiling.row_bytes // LANES)[:, None, None, :]
    shape = (layout.planes, tiling.copies, *planes.shape[2:])
    in_block = jnp.broadcast_to(jnp.asarray(in_block)[None], shape)
    copies = jnp.where(in_block, jnp.broadcast_to(planes, shape), jnp.zeros(shape, x.dtype))
    copies = copies.transpose(2, 0, 1, 3, 4).reshape(
        tiles, layout.planes, tiling.copies * tiling.tile_m, tiling.row_bytes
    )

    operands, specs = _weight_operands(weight, tiling)
    operands["x"], specs["x"] = copies, pl.BlockSpec((None, *copies.shape[1:]), lambda i, j: (i, 0, 0, 0))
    row, shift = _row_factors(weight, tiling)
    by_row = pl.BlockSpec((1, tiling.tile_n), lambda i, j: (0, j))
    if row is not None:
        operands["row"], specs["row"] = row, by_row
    if shift is not None:
        operands["shift"], specs["shift"] = shift, by_row
    if tiling.has_shift:
        blocks = weight.scale.shape[1]
        size = tiling.columns if layout.per_channel else layout.block_size
        sums = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, blocks * size - tiling.columns)])
        operands["sums"] = sums.reshape(-1, blocks, size).sum(axis=2)
        specs["sums"] = pl.BlockSpec((tiling.tile_m, blocks), lambda i, j: (i, 0))

    return pl.pallas_call(
        ft.partial(_forward_kernel, tiling),
        out_shape=_compat.result_like(x, (m, tiling.n), jnp.float32),
        grid=(tiles, pl.cdiv(tiling.n, tiling.tile_n)),
        in_specs=[specs],
        out_specs=pl.BlockSpec((tiling.tile_m, tiling.tile_n), lambda i, j: (i, j)),
        scratch_shapes=_scratch(weight, tiling),
        compiler_params=_compiler_params("parallel"),
        interpret=interpret,
        name="quantized_matmul",
    )(operands)


def _multiply_transposed(
    x: Float[Array, "m n"], weight: PackedWeight, tiling: Tiling, interpret: bool
) -> Float32[Array, "m k"]:
    m, layout = x.shape[0], tiling.layout
    tiles, steps = pl.cdiv(m, tiling.tile_m), pl.cdiv(tiling.n, tiling.tile_n)
    x = x.astype(jnp.float32)
    row, shift = _row_factors(weight, tiling)
    scaled = x if row is None else x * jnp.broadcast_to(row, x.shape)
    operands, specs = _weight_operands(weight, tiling)
    # Rows past the last one of the weight are undefined, so multiply them by zero.
    operands["x"] = jnp.pad(scaled, [(0, tiles * tiling.tile_m - m), (0, steps * tiling.tile_n - tiling.n)])
    specs["x"] = pl.BlockSpec((tiling.tile_m, tiling.tile_n), lambda i, j: (i, j))

    shape = (layout.planes, tiling.tile_m, tiling.row_bytes)
    y = pl.pallas_call(
        ft.partial(_transposed_kernel, tiling),
        out_shape=_compat.result_like(x, (tiles, *shape), jnp.float32),
        grid=(tiles, steps),
        in_specs=[specs],
        out_specs=pl.BlockSpec((None, *shape), lambda i, j: (i, 0, 0, 0)),
        scratch_shapes=_scratch(weight, tiling),
        compiler_params=_compiler_params("arbitrary"),
        interpret=interpret,
        name="quantized_matmul_transposed",
    )(operands)

    y = y.reshape(tiles, layout.planes, tiling.tile_m, -1, packing.PLANE)
    y = y.transpose(0, 2, 3, 1, 4).reshape(-1, tiling.columns)[:m]
    if shift is not None:
        # Round `x` as for the product with codes: otherwise the two terms would not cancel.
        rounded = scaled.astype(tiling.dtype).astype(jnp.float32)
        y = y + jnp.broadcast_to((rounded * jnp.broadcast_to(shift, x.shape)).sum(axis=1, keepdims=True), y.shape)
    return y


def _weight_operands(weight: PackedWeight, tiling: Tiling) -> tuple[dict[str, Array], dict[str, pl.BlockSpec]]:
    """Returns the operands of a weight for either kernel, and their `BlockSpec`s."""
    layout, tile_n = tiling.layout, tiling.tile_n
    operands: dict[str, Array] = {"codes": weight.codes}
    specs = {"codes": pl.BlockSpec((tile_n, tiling.row_bytes), lambda i, j: (j, 0))}
    if not layout.per_channel:
        blocks = weight.scale.shape[1]
        by_block = pl.BlockSpec((tile_n, blocks), lambda i, j: (j, 0))
        arrange = lambda a: a
        if tiling.scales_are_transposed:
            by_block, arrange = pl.BlockSpec((blocks, tile_n), lambda i, j: (0, j)), jnp.transpose
        operands["scale"], specs["scale"] = arrange(weight.scale), by_block
        if weight.zero_point is not None:
            operands["zero"], specs["zero"] = arrange(weight.zero_point), by_block
    if tiling.decoder.uses_lookup:
        table = tiling.decoder.table()
        operands["table"] = jnp.asarray(np.broadcast_to(table[:, None], (len(table), LANES)))
        specs["table"] = pl.BlockSpec((len(table), LANES), lambda i, j: (0, 0))
    return operands, specs


def _row_factors(
    weight: PackedWeight, tiling: Tiling
) -> tuple[Float32[Array, "1 n"] | None, Float32[Array, "1 n"] | None]:
    """Returns the per-channel scale and shift of decoded codes, or `None`."""
    row_scale = None if weight.row_scale is None else weight.row_scale.T
    if not tiling.layout.per_channel:
        return row_scale, None
    scale = decode_scale(weight.scale, tiling.layout.scale).T
    scale = scale if row_scale is None else scale * row_scale
    shift = None
    if tiling.has_shift:
        zero = 0 if weight.zero_point is None else weight.zero_point.astype(jnp.float32).T
        shift = jnp.broadcast_to((tiling.decoder.offset - zero) / tiling.decoder.step, scale.shape)
    return scale * tiling.decoder.step, shift


def _scratch(weight: PackedWeight, tiling: Tiling) -> dict[str, pl.MemoryRef]:
    if tiling.layout.per_channel:
        return {}
    by_block = pltpu.VMEM((weight.scale.shape[1], tiling.tile_n), jnp.float32)
    shift = {"shift_ref": by_block} if tiling.transpose and tiling.has_shift else {}
    return {"scale_ref": by_block, **shift}


def _compiler_params(rows: Literal["parallel", "arbitrary"]) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=("parallel", rows), vmem_limit_bytes=VMEM_BYTES)


def _forward_kernel(tiling: Tiling, refs: Refs, y_ref: jax.Ref, scale_ref: jax.Ref | None = None) -> None:
    tile_m = tiling.tile_m
    y_ref[...] = jnp.zeros(y_ref.shape, y_ref.dtype)
    if scale_ref is not None:
        scale_ref[...], shift = _scales(tiling, refs)
        if tiling.has_shift:
            y_ref[...] = _dot(refs["sums"][...], scale_ref[...] * shift)

    def accumulate(start: Array, count: int) -> None:
        """Adds the products of `count` chunks of 128 bytes of every row."""
        total = jnp.zeros(y_ref.shape, jnp.float32)
        for chunk in range(count):
            lanes = _lanes(start + chunk)
            planes = tiling.decoder.decode(refs["codes"][:, lanes], refs.get("table"))
            partial = [_dot(refs["x"][p, :, lanes], w, transpose_b=True) for p, w in enumerate(planes)]
            if tiling.planes_share_scales:
                partial = [sum(partial[1:], partial[0])]
            for p, both in enumerate(partial):
                for copy in range(tiling.copies):
                    part = both[copy * tile_m : (copy + 1) * tile_m]
                    if scale_ref is not None:
                        row = scale_ref[pl.ds(tiling.block(start + chunk, p, copy), 1), :]
                        part = part * jnp.broadcast_to(row, part.shape)
                    total = total + part
        y_ref[...] += total

    _loop(tiling, accumulate)
    if "row" in refs:
        y_ref[...] *= jnp.broadcast_to(refs["row"][...], y_ref.shape)
    if "shift" in refs:
        y_ref[...] += refs["sums"][...] * (refs["row"][...] * refs["shift"][...])


def _transposed_kernel(
    tiling: Tiling, refs: Refs, y_ref: jax.Ref, scale_ref: jax.Ref | None = None, shift_ref: jax.Ref | None = None
) -> None:
    layout, tile_m = tiling.layout, tiling.tile_m

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        y_ref[...] = jnp.zeros(y_ref.shape, y_ref.dtype)

    refs = {**refs, "first_row": pl.program_id(1) * tiling.tile_n}  # `program_id` must not be called inside a loop
    x = refs["x"][...]
    if scale_ref is not None:
        scale_ref[...], shift = _scales(tiling, refs)
        if shift_ref is not None:
            shift_ref[...] = shift
    copy_of_lane = jax.lax.broadcasted_iota(jnp.int32, (tile_m, LANES), 1) >> (LANES // tiling.copies).bit_length() - 1

    def scale_copies(chunk: Array, plane: int) -> Array:
        """Returns copies of `x`, each scaled for one block."""
        if scale_ref is None:
            return x.astype(tiling.dtype)
        rows = [scale_ref[pl.ds(tiling.block(chunk, plane, copy), 1), :] for copy in range(tiling.copies)]
        return jnp.concatenate([x * jnp.broadcast_to(row, x.shape) for row in rows]).astype(tiling.dtype)

    def accumulate(start: Array, count: int) -> None:
        for chunk in range(count):
            lanes = _lanes(start + chunk)
            copies = [scale_copies(start + chunk, p) for p in range(1 if tiling.planes_share_scales else layout.planes)]
            for p, w in enumerate(tiling.decoder.decode(refs["codes"][:, lanes], refs.get("table"))):
                if not np.isfinite(layout.table).all():
                    w = _mask_rows(tiling, refs, w, axis=0)
                x_of_block = copies[0 if tiling.planes_share_scales else p]
                partial = _dot(x_of_block, w)
                part = jnp.zeros((tile_m, LANES), jnp.float32)
                for copy in range(tiling.copies):
                    rows = slice(copy * tile_m, (copy + 1) * tile_m)
                    copy_sum = partial[rows]
                    if shift_ref is not None:
                        shift = shift_ref[pl.ds(tiling.block(start + chunk, p, copy), 1), :]
                        added = x_of_block[rows].astype(jnp.float32) * jnp.broadcast_to(shift, x.shape)
                        copy_sum += jnp.broadcast_to(added.sum(axis=1, keepdims=True), copy_sum.shape)
                    part = jnp.where(copy_of_lane == copy, copy_sum, part)
                y_ref[p, :, lanes] += part

    _loop(tiling, accumulate)


def _loop(tiling: Tiling, accumulate: Callable[[Array, int], None]) -> None:
    """Calls `accumulate(first, count)` for all chunks of a row."""
    unroll = tiling.unroll
    steps, rest = divmod(tiling.row_bytes // LANES, unroll)
    jax.lax.fori_loop(jnp.int32(0), jnp.int32(steps), lambda i, _: accumulate(i * unroll, unroll), None)
    accumulate(jnp.int32(steps * unroll), rest)


def _lanes(chunk: Array) -> slice | pl.Slice:
    return pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)


def _scales(tiling: Tiling, refs: Refs) -> tuple[Float32[Array, "blocks tile_n"], Float32[Array, "blocks tile_n"]]:
    """Returns the scales of the decoded codes of a tile, and the shifts to add before."""
    bits = refs["scale"][...]
    # TPUs have no float16.
    scale = decode_float16(bits) if tiling.layout.scale == "float16" else decode_scale(bits, tiling.layout.scale)
    offset = jnp.full(scale.shape, tiling.decoder.offset, jnp.float32)
    if "zero" in refs:
        offset -= refs["zero"][...].astype(jnp.int32).astype(jnp.float32)
    if not tiling.scales_are_transposed:
        scale, offset = scale.T, offset.T
    scale = _mask_rows(tiling, refs, scale, axis=1)
    return scale * tiling.decoder.step, offset / tiling.decoder.step


def _mask_rows(tiling: Tiling, refs: Refs, values: Float[Array, "_ _"], axis: int) -> Float[Array, "_ _"]:
    """Sets values past the last row of the weight, along `axis`, to zero: they may be NaN."""
    if not tiling.transpose or tiling.n % tiling.tile_n == 0:
        return values
    row = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis) + refs["first_row"]  # pyright: ignore[reportOperatorIssue]
    return jnp.where(row < tiling.n, values, jnp.zeros_like(values))


def _dot(a: Float[Array, "m inner"], b: Float[Array, "_ _"], transpose_b: bool = False) -> Float32[Array, "m outer"]:
    """Computes a product with float32 sums, at full precision for float32 operands."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transpose_b else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
