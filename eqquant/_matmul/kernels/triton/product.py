"""`pallas_gpu`: the quantized matmul for NVIDIA GPUs, in Pallas-Triton.

It never writes the dense weight to memory.

    y(m, n) = sum_blocks scale(n, block) * (x(m, block) . table[codes(n, block)]^T)

It decodes codes in registers (`ptx.py`) to the dtype of `x`, and multiplies them on tensor cores; one row of `x`,
without them. With few rows, it scales partial sums in float32: one multiplication per result and block. With more rows
it is cheaper to scale weights. If `x` is bfloat16, that rounds scales to bfloat16.

Each iteration reads one step of each row of the weight: a packed segment (`packing.py`), 64 bytes, or up to 128 codes
of eight bits. It decodes a step in runs: the step, or a block if that is shorter. Plane `p` of a run has one scale per
row, and its codes are consecutive, so it is multiplied by a contiguous tile of `x`. If a row is not whole steps, XLA
multiplies the remainder (less than 512 codes).

The transposed product, `y(m, k) = sum_n x(m, n) * scale(n, block) * table[codes(n, block)]`, sums over rows with
different scales, so it scales weights before it multiplies.
"""

import functools as ft
import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.lax import PrecisionLike
from jaxtyping import Array, DTypeLike, Float, Float32

from .... import _compat
from ...._native.weight import Layout
from ...._numerics import packing
from ..packed import alignment_refusal, decode_scale, holds_weights, PackedWeight, pallas_refusal
from ..target import TargetDevice
from ..xla import add_remainder
from .ptx import decode, load_table, make_table, multiply_add, multiply_pairs, Table


class Config(NamedTuple):
    """The tiling of a product: each program computes `tile_m * tile_n` results.

    With a `tile_m` of 1, they use no tensor cores, and only `tile_n`, `num_warps`, `split` and `programs` matter.
    `split` programs share each sum (split-K); if `None`, as many as give each multiprocessor `programs` to run.
    `weight_left` makes the weight the left operand, for few rows of `x`: `wgmma` takes only its left operand from
    registers, and allows as few as 8 columns. `scale_weights` scales weights instead of partial sums, for many rows.
    """

    tile_m: int
    tile_n: int
    num_warps: int = 4
    num_stages: int = 3
    weight_left: bool = True
    scale_weights: bool = False
    split: int | None = None
    programs: float = 4


class _ConfigRow(NamedTuple):
    device: str  # part of the name of the device, "" for any
    transpose: bool
    bits: tuple[int, ...]
    itemsize: int  # the bytes of an element of `x`
    max_m: int  # the most rows of `x`
    config: Config


# The first row that matches wins. For bfloat16 and four bits on Hopper, the fastest on an H100 with JAX 0.11.2
# (`benchmarks/gpu_matmul.py --tune`); other formats use the best of these. For float32, those that spill no registers.
# For other devices, those that fit into the 99 KiB of shared memory of compute capability 8.6 and 8.9.
_ANY, _HOPPER = (1, 2, 4, 8), "NVIDIA H"
_CONFIGS = (
    # Kernels for float32 load values from a table in memory. Large tiles would spill.
    _ConfigRow("", False, _ANY, 4, 2**31, Config(16, 32, weight_left=False)),
    _ConfigRow("", False, (1, 2, 4), 2, 1, Config(1, 64, programs=16)),
    _ConfigRow(_HOPPER, False, (1,), 2, 16, Config(16, 64)),
    _ConfigRow("", False, (1,), 2, 16, Config(16, 64, num_stages=2)),
    _ConfigRow("", False, (2, 4), 2, 16, Config(16, 64)),
    _ConfigRow("", False, (8,), 2, 16, Config(16, 64, programs=8)),
    _ConfigRow("", False, (2, 4, 8), 2, 32, Config(32, 64)),
    # From about 64 rows on, scaling partial sums takes more time and registers than scaling weights.
    _ConfigRow(_HOPPER, False, (2, 4, 8), 2, 64, Config(64, 128, weight_left=False, scale_weights=True, programs=2)),
    _ConfigRow(_HOPPER, False, (4, 8), 2, 128, Config(128, 64, scale_weights=True, programs=2)),
    # With up to 256 rows there is one tile of rows, so the kernel decodes each weight once.
    _ConfigRow(_HOPPER, False, (4,), 2, 2**31, Config(256, 64, scale_weights=True, programs=1)),
    _ConfigRow(_HOPPER, False, (8,), 2, 2**31, Config(128, 64, scale_weights=True, programs=2)),
    # Fewer bits mean more planes, and the tiles of `x` of all planes are in shared memory together.
    _ConfigRow(_HOPPER, False, (2,), 2, 2**31, Config(128, 64, 4, 2, scale_weights=True, programs=2)),
    _ConfigRow("", False, (2, 4, 8), 2, 2**31, Config(64, 64, 4, 2, weight_left=False, scale_weights=True, programs=2)),
    _ConfigRow("", False, (1,), 2, 2**31, Config(32, 64, 4, 2, weight_left=False, scale_weights=True, programs=1)),
    _ConfigRow("", True, (2, 4, 8), 2, 16, Config(16, 64, weight_left=False)),
    _ConfigRow(_HOPPER, True, (4,), 2, 2**31, Config(64, 128, weight_left=False, programs=2)),
    _ConfigRow("", True, (2, 4, 8), 2, 2**31, Config(32, 64, weight_left=False, programs=2)),
    # One accumulator per plane: eight for codes of one bit.
    _ConfigRow("", True, _ANY, 4, 2**31, Config(16, 32, weight_left=False)),
    _ConfigRow("", True, (1,), 2, 2**31, Config(16, 64, weight_left=False)),
)
# The number of streaming multiprocessors (SMs) of each device.
_SMS = {"H100": 132, "H200": 132, "A100": 108, "": 108}


def tune(device: str, bits: int, itemsize: int, m: int, *, transpose: bool) -> Config:
    """Returns the configuration for a device, given its name or "", and `m` rows of `x`."""
    for row in _CONFIGS:
        fits = row.device in device and row.transpose == transpose and row.itemsize == itemsize
        if fits and bits in row.bits and m <= row.max_m:
            return row.config
    raise LookupError(f"no configuration for {bits} bits")  # unreachable: the rows for any device take everything


def _split(config: Config, device: str, tiles: int, steps: int) -> int:
    if config.split is not None:
        return max(1, min(config.split, steps))
    sms = next(count for name, count in _SMS.items() if name in device)
    wanted = max(1, config.programs * sms / tiles)
    # A power of two, to compile few kernels; at least four steps per part, to pipeline loads.
    return max(1, min(1 << math.floor(math.log2(wanted)), steps // 4, 16))


def refusal(
    layout: Layout, m: int, n: int, dtype: DTypeLike, *, transpose: bool, precision: str, target: TargetDevice
) -> str | None:
    """Returns why the kernel cannot take the product, or `None` if it can."""
    del transpose, precision
    if target.compiles and target.platform == "cuda" and not _compat.pallas_knows_gpu("triton"):
        return "it is not known which GPU the program is for"
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"activations are {jnp.dtype(dtype)}; it takes bfloat16, float16 and float32"
    small_floats = layout.kind.startswith("float8") or layout.scale in ("e4m3", "e5m2")
    if small_floats and target.capability < 8.9:
        return f"GPUs of compute capability {target.capability} have no floats of 8 bits"
    if layout.zero_points and layout.kind != "integer":
        return "the format has zero points, but its codes are not integers"
    if m * n == 0:
        return "there is nothing to compute"
    # Pallas computes the offsets in arrays of at most 2**32 bytes with 32 bits and a sign.
    if 2**31 < n * packing.packed_length(layout.length, layout.bits) <= 2**32:
        return "the packed weight takes more than 2 GiB, and Pallas computes its offsets with 32 bits"
    if pallas_refusal(layout) is not None:
        return pallas_refusal(layout)
    if _kernel_length(layout) == 0:
        step = _step_bytes(layout) * layout.planes
        return f"rows of {layout.length} are shorter than the {step} that it takes at a time"
    return alignment_refusal(layout)


def _step_bytes(layout: Layout) -> int:
    """Returns the bytes of a row per step: 64, or 128 for codes of one byte if blocks allow."""
    wide = layout.bits == 8 and (layout.per_channel or layout.block_size % (2 * packing.PLANE) == 0)
    return packing.PLANE * (2 if wide and layout.length >= 2 * packing.PLANE else 1)


def _run_bytes(layout: Layout) -> int:
    """Returns the bytes of a row to decode at a time: in each plane, their codes share a scale."""
    return _step_bytes(layout) if layout.per_channel else min(_step_bytes(layout), layout.block_size)


def _kernel_length(layout: Layout) -> int:
    """Returns how many codes of a row the kernel multiplies: all but the remainder."""
    step = _step_bytes(layout) * layout.planes
    return layout.length // step * step


def _count_steps(layout: Layout) -> int:
    return _kernel_length(layout) // layout.planes // _step_bytes(layout)


class _Weight(NamedTuple):
    """References to a weight in memory, with methods that load and decode tiles."""

    codes: jax.Ref | Array
    scale: jax.Ref | Array
    row_scale: jax.Ref | Array | None
    zero_point: jax.Ref | Array | None
    table: jax.Ref | Array

    def load_row_scales(self, layout: Layout, n: Array, dtype: DTypeLike) -> Float32[Array, " rows"] | None:
        """Returns the product of all per-channel factors of the result, or `None`."""
        stretch = layout.stretch(dtype)
        factors = [decode_scale(self.scale[n, 0], layout.scale)] if layout.per_channel else []
        factors += [self.row_scale[n, 0]] if self.row_scale is not None else []
        factors += [jnp.full(n.shape, 1 / stretch, jnp.float32)] if stretch != 1 else []
        return ft.reduce(jnp.multiply, factors) if factors else None

    def load_tile(
        self,
        layout: Layout,
        table: Table,
        n: Array,
        step: Array,
        begin: int | Array,
        dtype: DTypeLike,
        interpret: bool,
    ) -> list[tuple[Array, Array | None]]:
        """Returns the values and scales of each plane, of the run at byte `begin` of a step."""
        byte = step * _step_bytes(layout) + begin
        codes = self.codes[n[:, None], (byte + jnp.arange(_run_bytes(layout), dtype=jnp.int32))[None, :]]
        planes = []
        for plane in range(layout.planes):
            block = jax.lax.div(_column(step, begin, plane, layout), jnp.int32(layout.block_size))
            zero = None if self.zero_point is None else self.zero_point[n, block].astype(jnp.int32)
            scale = None if layout.per_channel else decode_scale(self.scale[n, block], layout.scale)
            planes.append((decode(codes, zero, plane, layout, table, dtype, interpret), scale))
        return planes

    def load_step(
        self, layout: Layout, table: Table, n: Array, step: Array, dtype: DTypeLike, interpret: bool
    ) -> Iterator[tuple[Array, Array, Array | None]]:
        """Yields the columns, values and scales of each plane, of all runs of a step."""
        run = _run_bytes(layout)
        for begin in range(0, _step_bytes(layout), run):
            tiles = self.load_tile(layout, table, n, step, begin, dtype, interpret)
            for plane, (values, scale) in enumerate(tiles):
                yield _column(step, begin, plane, layout) + jnp.arange(run, dtype=jnp.int32), values, scale


def _column(step: Array, begin: int | Array, plane: int, layout: Layout) -> Array:
    """Returns the first column of a plane of the run at byte `begin` of a step.

    It does not divide: after a division, Triton would not know the alignment, and would not vectorize loads of `x`.
    """
    return (step * layout.planes + plane) * _step_bytes(layout) + begin


def _product(
    x_ref: jax.Ref,
    weight: _Weight,
    y_ref: jax.Ref,
    *,
    layout: Layout,
    config: Config,
    precision: PrecisionLike,
    interpret: bool,
) -> None:
    """Computes a tile of `y(part, m, n)`: a part of the sum over `k`."""
    (m_size, _), n_size, dtype = x_ref.shape, weight.codes.shape[0], x_ref.dtype
    m_tiles = pl.cdiv(m_size, config.tile_m)
    tile, part = pl.program_id(0), pl.program_id(1)
    m = tile % m_tiles * config.tile_m + jnp.arange(config.tile_m, dtype=jnp.int32)
    n = tile // m_tiles * config.tile_n + jnp.arange(config.tile_n, dtype=jnp.int32)
    rows = jnp.minimum(n, n_size - 1)  # rows past the last one are computed, but not stored
    first, last = _step_range(_count_steps(layout), part, y_ref.shape[0])
    table = load_table(weight.table, layout, dtype, interpret)

    def multiply(index: Array, total: Array) -> Array:
        for columns, values, scale in weight.load_step(layout, table, rows, index, dtype, interpret):
            x = _load(x_ref, m, columns, m < m_size)
            if scale is not None and config.scale_weights:
                values, scale = _apply_scale(values, scale, interpret), None
            left, right = (values, x) if config.weight_left else (x, values)
            sums = plgpu.dot(left, right, trans_b=True, precision=precision)
            if scale is None:
                total = total + sums
            else:
                total = multiply_add(sums, _expand_scale(scale, config.weight_left), total, interpret)
        return total

    shape = (config.tile_n, config.tile_m) if config.weight_left else (config.tile_m, config.tile_n)
    total = jax.lax.fori_loop(first, last, multiply, jnp.zeros(shape, jnp.float32))
    scale = weight.load_row_scales(layout, rows, dtype)
    if scale is not None:
        total = total * jnp.broadcast_to(_expand_scale(scale, config.weight_left), total.shape)
    index = (m[None, :], n[:, None]) if config.weight_left else (m[:, None], n[None, :])
    plgpu.store(y_ref.at[part, *index], total.astype(y_ref.dtype), mask=(index[0] < m_size) & (index[1] < n_size))


def _vector_product(
    x_ref: jax.Ref,
    weight: _Weight,
    y_ref: jax.Ref,
    *,
    layout: Layout,
    config: Config,
    precision: PrecisionLike,
    interpret: bool,
) -> None:
    """As `_product`, for one row of `x`.

    It uses no tensor cores, so threads need not exchange decoded weights in shared memory.
    """
    del precision
    (m_size, _), n_size, dtype = x_ref.shape, weight.codes.shape[0], x_ref.dtype
    tile, part = pl.program_id(0), pl.program_id(1)
    m, n = tile % m_size, tile // m_size * config.tile_n + jnp.arange(config.tile_n, dtype=jnp.int32)
    rows = jnp.minimum(n, n_size - 1)
    first, last = _step_range(_count_steps(layout), part, y_ref.shape[0])
    table = load_table(weight.table, layout, dtype, interpret)

    def multiply(index: Array, total: Array) -> Array:
        for columns, values, scale in weight.load_step(layout, table, rows, index, dtype, interpret):
            x = jnp.broadcast_to(x_ref[m, columns].astype(jnp.float32)[None, :], values.shape)
            sums = jnp.sum(values.astype(jnp.float32) * x, axis=1)
            total = total + (sums if scale is None else sums * scale)
        return total

    total = jax.lax.fori_loop(first, last, multiply, jnp.zeros(config.tile_n, jnp.float32))
    scale = weight.load_row_scales(layout, rows, dtype)
    total = total if scale is None else total * scale
    plgpu.store(y_ref.at[part, m, n], total.astype(y_ref.dtype), mask=n < n_size)


def _transposed_product(
    x_ref: jax.Ref,
    weight: _Weight,
    y_ref: jax.Ref,
    *,
    layout: Layout,
    config: Config,
    precision: PrecisionLike,
    interpret: bool,
) -> None:
    """Computes a tile of `y(part, m, k)`, of one run of bytes: a part of the sum over `n`."""
    (m_size, n_size), dtype = x_ref.shape, x_ref.dtype
    m_tiles = pl.cdiv(m_size, config.tile_m)
    tile, part = pl.program_id(0), pl.program_id(1)
    m = tile % m_tiles * config.tile_m + jnp.arange(config.tile_m, dtype=jnp.int32)
    run = _run_bytes(layout)
    runs = _step_bytes(layout) // run
    column_step, begin = tile // m_tiles // runs, tile // m_tiles % runs * run
    first, last = _step_range(pl.cdiv(n_size, config.tile_n), part, y_ref.shape[0])
    table = load_table(weight.table, layout, dtype, interpret)

    def multiply(index: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        n = index * config.tile_n + jnp.arange(config.tile_n, dtype=jnp.int32)
        rows = jnp.minimum(n, n_size - 1)
        x = _load(x_ref, m, n, m < m_size, n < n_size)
        sums, row_scale = [], weight.load_row_scales(layout, rows, dtype)
        for values, scale in weight.load_tile(layout, table, rows, column_step, begin, dtype, interpret):
            scale = ft.reduce(jnp.multiply, [s for s in (scale, row_scale) if s is not None])
            sums.append(plgpu.dot(x, _apply_scale(values, scale, interpret), precision=precision))
        return tuple(total + s for total, s in zip(totals, sums, strict=True))

    zeros = jnp.zeros((config.tile_m, run), jnp.float32)
    totals = jax.lax.fori_loop(first, last, multiply, (zeros,) * layout.planes)
    for plane, total in enumerate(totals):
        column = _column(column_step, begin, plane, layout) + jnp.arange(run, dtype=jnp.int32)
        mask = jnp.broadcast_to((m < m_size)[:, None], total.shape)
        plgpu.store(y_ref.at[part, m[:, None], column[None, :]], total.astype(y_ref.dtype), mask=mask)


def _apply_scale(
    values: Float[Array, "rows run"], scale: Float32[Array, " rows"], interpret: bool
) -> Float[Array, "rows run"]:
    if values.dtype == jnp.bfloat16:
        return multiply_pairs(values, scale.astype(jnp.bfloat16)[:, None], interpret)
    product = values.astype(jnp.float32) * jnp.broadcast_to(scale[:, None], values.shape)
    return product.astype(values.dtype)


def _step_range(steps: int | Array, part: Array, parts: int) -> tuple[Array, Array]:
    """Returns the first and the last step of one part of a sum."""
    each = pl.cdiv(steps, parts)
    return part * each, jnp.minimum((part + 1) * each, steps)


def _load(ref: jax.Ref, rows: Array, columns: Array, *masks: Array) -> Array:
    """Loads a tile of a matrix, with zeros where the masks are false."""
    shape = (rows.size, columns.size)
    mask = jnp.broadcast_to(masks[0][:, None], shape)
    if len(masks) == 2:
        mask = mask & jnp.broadcast_to(masks[1][None, :], shape)
    return plgpu.load(ref.at[rows[:, None], columns[None, :]], mask=mask, other=jnp.zeros((), ref.dtype))


def _expand_scale(scale: Array, rows: bool) -> Array:
    return scale[:, None] if rows else scale[None, :]


def matmul(
    x: Float[Array, "m inner"],
    weight: PackedWeight,
    layout: Layout,
    *,
    transpose: bool,
    precision: str,
    target: TargetDevice = TargetDevice("cuda"),
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "m outer"]:
    """Computes `x(m, k) . w(n, k)^T`, or with `transpose` `x(m, n) . w(n, k)`.

    Needs operands for which `refusal` returns `None`.

    **Arguments:**

    - `x`: bfloat16, float16 or float32.
    - `weight`, `layout`: the weight, of `n` rows.
    - `precision`: `"highest"` multiplies float32 as float32, any other as tfloat32.
    - `target`: the device, which selects the tuned configuration; `config` overrides it.
    - `interpret`: runs on any device, slowly.
    """
    # Users cannot act on this warning. JAX gives it when it lowers the kernel, perhaps in a callback of the compiler,
    # where a context manager has no effect.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    dot_precision = jax.lax.Precision.HIGHEST if precision == "highest" else None
    m, n, body = x.shape[0], weight.codes.shape[0], _kernel_length(layout)
    # Where weights must not be scaled, tile as for few rows.
    tuned_m = m if holds_weights(layout, x.dtype) else min(m, 16)
    config = config or tune(target.device, layout.bits, x.dtype.itemsize, tuned_m, transpose=transpose)
    m_tiles = pl.cdiv(m, config.tile_m)
    if transpose:
        kernel, outer, steps = _transposed_product, body, pl.cdiv(n, config.tile_n)
        tiles = m_tiles * (body // layout.planes // _run_bytes(layout))
    else:
        kernel = _vector_product if config.tile_m == 1 else _product
        outer, steps = n, _count_steps(layout)
        tiles = m_tiles * pl.cdiv(n, config.tile_n)
    parts = _split(config, target.device, tiles, steps)
    whole = parts == 1 and body == layout.length  # the kernel writes the final result
    y = pl.pallas_call(
        ft.partial(kernel, layout=layout, config=config, interpret=interpret, precision=dot_precision),
        out_shape=_compat.result_like(x, (parts, m, outer), x.dtype if whole else jnp.float32),
        grid=(tiles, parts),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="quantized_matmul_transposed" if transpose else "quantized_matmul",
    )(x, _Weight(*weight[:4], table=make_table(layout, x.dtype, interpret)))
    if whole:
        return y[0]
    y = add_remainder(jnp.sum(y, axis=0), x, weight, layout, body, transpose=transpose, precision=dot_precision)
    return y.astype(x.dtype)
