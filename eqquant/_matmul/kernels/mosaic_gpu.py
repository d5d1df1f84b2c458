"""`mosaic_gpu`: the quantized matmul for Hopper and Blackwell GPUs, in Pallas-Mosaic.

It never writes the dense weight to memory.

    y(n, m) = sum_blocks scale(n, block) * (table[codes(n, block)] . x(m, block)^T)

The weight is the left operand, which need not lie in shared memory, and the right one may have as few as 8 or 16 rows.
In each program, one warpgroup loads tiles of packed codes and of `x` to shared memory, by TMA, a few steps ahead. Two
others decode some rows of the weight each, in registers, and multiply:

- Hopper: 64 rows. `wgmma` takes them from registers.
- Blackwell: 128 rows. `tcgen05` takes them from tensor memory, where it also adds up the sums. It runs while the
  warpgroup decodes more.

A step is one or two packed segments (`packing.py`) of each row: 64 bytes each, whose codes in one plane are 64
consecutive columns. On Hopper, with few rows of `x`, it scales the product of each block, in float32. With more rows,
or blocks of 16 and 32, it is cheaper to scale weights, in the dtype of `x`.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float, Float32

from ... import _compat
from ..._native.weight import Layout
from ..._numerics import packing
from .mosaic_decode import decode, make_pairs, needs_pairs
from .packed import alignment_refusal, decode_scale, holds_weights, PackedWeight, pallas_refusal
from .target import TargetDevice


plgpu: Any = _compat.pallas_backend("mosaic_gpu")  # whose types differ between releases
Ref = Any
_SHARED = 160 * 1024  # bytes for the tiles of all steps that are loaded ahead
_SLOTS = 4  # operands in tensor memory, for each warpgroup


class Generation(NamedTuple):
    """What differs between Hopper and Blackwell."""

    rows: int  # of the weight, for each warpgroup: as many as an instruction multiplies
    least_m: int  # the fewest rows of `x` that it multiplies
    sms: int  # streaming multiprocessors, of an H100 or a B200
    layout: Any  # of values in the registers of a warpgroup
    bytes_layout: Any  # in which it reads them

    @property
    def tile_n(self) -> int:
        """Rows of the weight for each program, with two warpgroups that compute."""
        return 2 * self.rows


# On Hopper, threads read four bytes at a time, and then exchange pairs. On Blackwell, each thread has a row.
_HOPPER = Generation(64, 8, 132, plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_UPCAST_2X)
_NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE
_BLACKWELL = Generation(128, 16, 148, _NATIVE, _NATIVE(16))


def generation(target: TargetDevice) -> Generation:
    """Returns the generation of a GPU that the kernel takes."""
    return _HOPPER if target.capability < 10 else _BLACKWELL


class Config(NamedTuple):
    """The tiling of a product.

    Each program computes `tile_m` rows of the result, and 128 or 256 columns. It loads `segments` of the rows at a
    time, and `stages` times ahead. `parts` programs share each sum (split-K). `scale_weights` scales weights instead of
    the products of blocks.
    """

    tile_m: int
    segments: int
    stages: int
    parts: int
    scale_weights: bool


def tune(layout: Layout, m: int, n: int, dtype: DTypeLike, target: TargetDevice = TargetDevice("cuda")) -> Config:
    """Returns the configuration for `m` rows of `x` and `n` rows of the weight."""
    gpu = generation(target)
    # Each plane has values in registers, and a tile of `x` in shared memory.
    tile_m = min(max(gpu.least_m, 1 << (m - 1).bit_length()), 128, 1024 // layout.planes**2)
    count = layout.length // _segment(layout)
    segments = 2 if gpu is _HOPPER and tile_m <= 32 and count % 2 == 0 and layout.bits > 1 else 1
    step_bytes = segments * packing.PLANE * (gpu.tile_n + 2 * tile_m * layout.planes)
    steps, tiles = count // segments, pl.cdiv(n, gpu.tile_n) * pl.cdiv(m, tile_m)
    parts = 1
    while steps % (2 * parts) == 0 and steps // parts >= 8 and 2 * parts * tiles <= gpu.sms:
        parts *= 2
    many_rows = tile_m >= 64 and holds_weights(layout, dtype)
    cheaper = gpu is _BLACKWELL or many_rows or layout.block_size < packing.PLANE
    stages = max(2, min(8, _SHARED // step_bytes, steps // parts))
    return Config(tile_m, segments, stages, parts, not layout.per_channel and cheaper)


def refusal(
    layout: Layout, m: int, n: int, dtype: DTypeLike, *, transpose: bool, precision: str, target: TargetDevice
) -> str | None:
    """Returns why the kernel cannot take the product, or `None` if it can."""
    del precision
    gpu = generation(target)
    if transpose:
        return "it sums along the blocks of the weight, and this product sums across them"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"activations are {jnp.dtype(dtype)}; it takes bfloat16 and float16"
    if pallas_refusal(layout) is not None:
        return pallas_refusal(layout)
    if layout.bits == 8 and layout.kind == "table":
        return "a table of all pairs of 256 values is too large for shared memory"
    if layout.bits == 1 and gpu is _BLACKWELL:
        return "the values of a row of codes of one bit do not fit into the registers of a thread"
    if layout.zero_points and layout.kind != "integer":
        return "the format has zero points, but its codes are not integers"
    if m == 0 or n < gpu.tile_n or n % 8 != 0:
        return f"the weight has {n} rows; it takes a multiple of 8, {gpu.tile_n} or more"
    if layout.length % _segment(layout) != 0 or layout.length == 0:
        return f"rows of {layout.length} are not whole segments of {_segment(layout)} codes"
    if tune(layout, 1, n, dtype, target).scale_weights and not holds_weights(layout, dtype):
        return "float16 might not hold the weights, which blocks of less than 64, and Blackwell, must scale"
    return alignment_refusal(layout)


def _segment(layout: Layout) -> int:
    return packing.PLANE * layout.planes


def _stretched(layout: Layout, dtype: DTypeLike) -> Layout:
    """Returns the layout with the table of the kernel: stretched, and rounded to `dtype`."""
    if layout.kind != "table":
        return layout
    table = (np.asarray(layout.table) * layout.stretch(dtype)).astype(dtype)
    return layout._replace(table=tuple(table.astype(np.float64).tolist()))


class _Operands(NamedTuple):
    """Values of the weight, in registers, and a tile of `x`, in shared memory."""

    values: Float[Array, "rows run"]
    x: Ref  # `(m, run)`

    def start(self, acc: Ref) -> None:
        """Starts to add the product to `acc`."""
        plgpu.wgmma(acc, self.values, self.x.transpose((1, 0)))

    def interpret(self) -> Float32[Array, "rows m"]:
        """Returns the product. Pallas does not interpret `wgmma` with an operand in registers."""
        return jax.lax.dot_general(
            self.values, self.x[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )


def _multiply_each(operands: Sequence[_Operands], interpret: bool) -> list[Float32[Array, "rows m"]]:
    """Returns the product of each pair of operands."""
    if interpret:
        return [pair.interpret() for pair in operands]

    def run(*accs: Ref) -> list[Array]:
        for pair, acc in zip(operands, accs, strict=True):
            pair.start(acc)
        return [acc[...] for acc in accs]

    return pl.run_scoped(run, *(plgpu.ACC((_HOPPER.rows, pair.x.shape[0])) for pair in operands))


def _add_products(
    total: Float32[Array, "rows m"], operands: Sequence[_Operands], interpret: bool
) -> Float32[Array, "rows m"]:
    """Returns `total` and the products of all pairs of operands, in one sum."""
    if interpret:
        return sum((pair.interpret() for pair in operands), start=total)

    def run(acc: Ref) -> None:
        for pair in operands:
            pair.start(acc)

    return pl.run_state(run)(plgpu.ACC.init(total))


class _TensorMemory(NamedTuple):
    """The tensor memory of the two warpgroups that compute.

    Each has its own columns and barriers.
    """

    values: Ref  # `_SLOTS` left operands
    total: Ref
    done: Ref  # a barrier for each operand: `tcgen05` has read it

    @staticmethod
    def allocate(tile_m: int, dtype: DTypeLike) -> "_TensorMemory":
        return _TensorMemory(
            plgpu.TMEM((_BLACKWELL.rows, 2 * _SLOTS * packing.PLANE), dtype, packed=True),
            plgpu.TMEM((_BLACKWELL.rows, 2 * tile_m), jnp.float32),
            plgpu.Barrier(num_barriers=2 * _SLOTS, orders_tensor_core=True),
        )

    def total_of(self, warpgroup: Array) -> Ref:
        tile_m = self.total.shape[1] // 2
        return self.total.at[:, pl.ds(warpgroup * tile_m, tile_m)]

    def add_products(self, operands: Sequence[_Operands], warpgroup: Array, continues: Array) -> None:
        """Starts to add products to the total, or to a total of 0 unless it `continues` a sum.

        First waits, for each product, until the one before it in its slot is done.
        """
        for i, pair in enumerate(operands):
            slot = warpgroup * _SLOTS + i % _SLOTS
            wait = ft.partial(plgpu.barrier_wait, self.done.at[slot])
            wait() if i >= _SLOTS else pl.when(continues)(wait)
            values = self.values.at[:, pl.ds(slot * packing.PLANE, packing.PLANE)]
            plgpu.async_store_tmem(values, pair.values)
            plgpu.commit_tmem()
            total, x = self.total_of(warpgroup), pair.x.transpose((1, 0))
            plgpu.tcgen05_mma(total, values, x, self.done.at[slot], accumulate=continues if i == 0 else True)

    def read_total(self, warpgroup: Array, slots: int) -> Float32[Array, "rows m"]:
        """Returns the total, after the products that read the first `slots` slots."""
        for slot in range(slots):
            plgpu.barrier_wait(self.done.at[warpgroup * _SLOTS + slot])
        total = plgpu.async_load_tmem(self.total_of(warpgroup))
        plgpu.wait_load_tmem()
        return total


def _kernel(
    *refs: Ref,
    layout: Layout,
    config: Config,
    gpu: Generation,
    dtype: DTypeLike,
    interpret: bool,
    pairs_smem: Ref | None = None,
    pairs_barrier: Ref | None = None,
    tensor_memory: _TensorMemory | None = None,
) -> None:
    """Computes a tile of `y(part, n, m)`: a part of the sum over `k`."""
    x, codes, scale, *rest, y = refs
    zero_points = rest.pop(0) if layout.zero_points else None
    tile, m_tile, part = (jax.lax.axis_index(name) for name in ("n", "m", "part"))
    warpgroup = jax.lax.axis_index("warpgroup")
    steps, planes = layout.length // _segment(layout) // config.segments // config.parts, layout.planes
    run = min(packing.PLANE, layout.block_size)
    # The last tile begins early enough to be whole, so that no load needs a mask.
    first = jnp.minimum(tile * gpu.tile_n, codes.shape[0] - gpu.tile_n)
    rows = pl.ds(first + warpgroup * gpu.rows, gpu.rows)

    def load_row(ref: Ref, column: Array) -> Array:
        block = jax.lax.div(column, jnp.int32(layout.block_size))
        return plgpu.load(ref.at[rows, block], layout=gpu.layout.reduce(1), optimized=False)

    def broadcast(a: Array, columns: int) -> Array:
        return jax.lax.broadcast_in_dim(a, (gpu.rows, columns), (0,))

    def multiply_step(indices: tuple[Array], codes_smem: Ref, x_smem: Ref, total: Any) -> Any:
        """Adds to `total`, or to that in tensor memory, where `total` is `None`."""
        step = part * steps + indices[0]
        for segment in range(config.segments):
            begin = segment * packing.PLANE
            packed = codes_smem.at[pl.ds(warpgroup * gpu.rows, gpu.rows), pl.ds(begin, packing.PLANE)]
            bytes_ = plgpu.layout_cast(plgpu.load(packed, layout=gpu.bytes_layout), gpu.layout)
            operands, sum_scales = [], []
            for plane, values in enumerate(decode(bytes_, pairs_smem, layout, dtype, gpu.layout, interpret)):
                offset = (segment * planes + plane) * packing.PLANE
                begin = step * (config.segments * planes * packing.PLANE) + offset
                columns = [begin + jnp.int32(i) for i in range(0, packing.PLANE, run)]
                if zero_points is not None:
                    zero = [load_row(zero_points, column).astype(dtype) for column in columns]
                    values = values - _join([broadcast(z, run) for z in zero])
                scales = [] if layout.per_channel else [decode_scale(load_row(scale, c), layout.scale) for c in columns]
                if config.scale_weights:
                    wide = dtype if dtype == jnp.bfloat16 else jnp.float32  # float16 might not hold scales
                    factors = _join([broadcast(s.astype(wide), run) for s in scales])
                    values = (values.astype(wide) * factors).astype(dtype)
                sum_scales += scales
                operands.append(_Operands(values, x_smem.at[:, pl.ds(offset, packing.PLANE)]))
            if tensor_memory is not None:
                tensor_memory.add_products(operands, warpgroup, indices[0] + segment > 0)
            elif config.scale_weights or layout.per_channel:
                total = _add_products(total, operands, interpret)
            else:
                for i in range(0, planes, 4):  # more products at a time would take too many registers
                    products = _multiply_each(operands[i : i + 4], interpret)
                    for product, s in zip(products, sum_scales[i : i + 4], strict=True):
                        total = total + product * broadcast(s, config.tile_m)
        plgpu.commit_smem()  # orders the reads of codes before the next load by TMA to the same place
        return total

    if pairs_smem is not None:
        pl.when(warpgroup == 0)(ft.partial(plgpu.copy_gmem_to_smem, *rest, pairs_smem, pairs_barrier))

    def compute(run_pipeline: Callable[[Array | None], Array]) -> None:
        if pairs_smem is not None:
            plgpu.barrier_wait(pairs_barrier)
        if tensor_memory is None:
            total = run_pipeline(plgpu.layout_cast(jnp.zeros((gpu.rows, config.tile_m), jnp.float32), gpu.layout))
        else:
            run_pipeline(None)
            total = tensor_memory.read_total(warpgroup, min(planes, _SLOTS))
        out = pl.ds(tile * gpu.tile_n + warpgroup * gpu.rows, gpu.rows), pl.ds(m_tile * config.tile_m, config.tile_m)
        plgpu.store(y.at[part, *out], total, optimized=False)  # a row of it may be half a cache line

    code_bytes, columns = config.segments * packing.PLANE, config.segments * planes * packing.PLANE
    swizzle = lambda nbytes, count: (plgpu.TilingTransform((8, count)), plgpu.SwizzleTransform(nbytes))
    # After a step, its own products may still read `x`, but those of the step before are done.
    spec = ft.partial(plgpu.BlockSpec, delay_release=0 if tensor_memory is None else 1)
    plgpu.emit_pipeline_warp_specialized(
        multiply_step,
        grid=(steps,),
        memory_registers=48,
        in_specs=[
            spec((gpu.tile_n, code_bytes), lambda k: (0, part * steps + k), transforms=swizzle(64, 64)),
            spec((config.tile_m, columns), lambda k: (m_tile, part * steps + k), transforms=swizzle(128, 64)),
        ],
        wg_axis="warpgroup",
        num_compute_wgs=2,
        max_concurrent_steps=config.stages,
        compute_context=compute,
    )(codes.at[pl.ds(first, gpu.tile_n)], x)


def _join(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def matmul(
    x: Float[Array, "m inner"],
    weight: PackedWeight,
    layout: Layout,
    *,
    transpose: bool,
    precision: str,
    target: TargetDevice = TargetDevice("cuda"),
    config: Config | None = None,
    interpret: Any = False,
) -> Float[Array, "m outer"]:
    """Computes `x(m, k) . w(n, k)^T`.

    Needs operands for which `refusal` returns `None`.

    **Arguments:**

    - `x`: bfloat16 or float16.
    - `weight`, `layout`: the weight, of `n` rows.
    - `target`: its compute capability decides by which instructions to multiply.
    - `config`: overrides the tiling.
    - `interpret`: runs on any device, slowly; parameters may ask for the detection of races.
    """
    del transpose, precision
    m, n, gpu = x.shape[0], weight.codes.shape[0], generation(target)
    config = config or tune(layout, m, n, x.dtype, target)
    tiles, m_tiles = pl.cdiv(n, gpu.tile_n), pl.cdiv(m, config.tile_m)
    stretched = _stretched(layout, x.dtype)
    padded = jnp.pad(x, ((0, m_tiles * config.tile_m - m), (0, 0)))
    operands = [padded, weight.codes, weight.scale, *([] if weight.zero_point is None else [weight.zero_point])]
    scratch: dict[str, Any] = {}
    if needs_pairs(layout):
        operands.append(jnp.asarray(pairs := make_pairs(stretched, x.dtype)))
        scratch |= {"pairs_smem": plgpu.SMEM(pairs.shape, pairs.dtype), "pairs_barrier": plgpu.Barrier()}
    if gpu is _BLACKWELL:
        scratch["tensor_memory"] = _TensorMemory.allocate(config.tile_m, x.dtype)
    y = plgpu.kernel(
        ft.partial(_kernel, layout=stretched, config=config, gpu=gpu, dtype=x.dtype, interpret=bool(interpret)),
        out_type=_compat.result_like(x, (config.parts, tiles * gpu.tile_n, m_tiles * config.tile_m), jnp.float32),
        scratch_types=scratch,
        grid=(tiles, m_tiles, config.parts),
        grid_names=("n", "m", "part"),
        num_threads=3,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
        kernel_name="quantized_matmul",
    )(*operands)
    y = jnp.sum(y, axis=0)
    last = n - (tiles - 1) * gpu.tile_n  # rows of the last tile that are not in the one before
    y = jnp.concatenate([y[: (tiles - 1) * gpu.tile_n], y[tiles * gpu.tile_n - last :]])[:, :m].T
    factors = [decode_scale(weight.scale[:, 0], layout.scale)] if layout.per_channel else []
    factors += [weight.row_scale[:, 0]] if weight.row_scale is not None else []
    for factor in factors:
        y = y * factor[None, :]
    stretch = layout.stretch(x.dtype)
    y = y / stretch if stretch != 1 else y
    return y.astype(x.dtype)
