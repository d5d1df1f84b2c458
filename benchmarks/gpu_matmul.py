"""The quantized matmul on an NVIDIA GPU, against cuBLAS: `python benchmarks/gpu_matmul.py`.

First it checks every kernel against float64. Then it times products with bfloat16 activations, the variants in turns.
A weight of 4096 x 4096 in four bits fits into the L2 cache, so the calls of a product cycle through copies of the
weight that do not fit together. Times are of the GPU, from the profiler, and medians: from the start of the first
operation of a call to the end of its last, such as the sum over parts. While it profiles, XLA launches operations one
by one, without command buffers.

`--docs` times what the tables of `docs/gpu_tpu.md` show, and prints them. `--tune` tries configurations and prints rows
for `_CONFIGS` in `eqquant/_matmul/kernels/triton/product.py`. `--smoke` tests the script on any machine: tiny sizes,
interpreted, with meaningless times.
"""

import argparse
import collections
import datetime
import functools as ft
import itertools as it
import os
import re
import sys
import tempfile
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from timing import time_in_turns

import eqquant as eqq
from eqquant import _compat
from eqquant._matmul import dispatch
from eqquant._matmul.kernels.triton import product as pallas_gpu
from eqquant._matmul.problem import MatmulProblem, TargetDevice


SHAPES = ((4096, 4096), (8192, 8192), (4096, 14336))  # (k, n)
ROWS = (1, 4, 16, 64, 256, 2048)
FORMATS = {
    "NF4": eqq.NF4(),
    "NF4, scales in 8 bits": eqq.NF4(double_quant=True),
    "Int4": eqq.Int4(),
    "Int8 per channel": eqq.Int8(),
    "Int8 in blocks of 128": eqq.Int8(block_size=128),
    "Ternary": eqq.Ternary(),
    "Ternary in blocks of 64": eqq.Ternary(block_size=64),
    "MXFP4": eqq.MXFP4(),
}
BLOCK_SCALED = {"MXFP8": eqq.MXFP8(), "NVFP4": eqq.NVFP4()}  # products of codes with codes, on Blackwell
CHECKED = {
    **FORMATS,
    **{
        repr(f): f
        for f in (
            *(eqq.Int4(symmetric=False), eqq.Int4(block_size=128), eqq.Int4(block_size=None), eqq.Int2()),
            *(eqq.Int2(symmetric=False), eqq.Binary(), eqq.Binary(block_size=64)),
            *(
                eqq.Int8(symmetric=False),
                eqq.FP8(),
                eqq.FP8("e5m2"),
                eqq.MXFP8(),
                eqq.NVFP4(),
                eqq.formats.Q4_0(),
                eqq.formats.Q8_0(),
            ),
            *(eqq.Dynamic8(), eqq.Codebook([-1, -0.5, -0.25, 0, 0.25, 0.5, 1])),
        )
    },
}
DOCS_ROWS = (1, 16, 64, 128, 256, 512, 2048)
DOCS_FORMATS = ("NF4", "Int4", "Int8 in blocks of 128", "MXFP4", "Ternary in blocks of 64")
MODULES = {"pallas_gpu": "triton.product", "mosaic_gpu": "mosaic_gpu"}
TIMED = (*MODULES, "scaled_matmul", "xla")
COPIES_BYTES = 256 * 2**20  # the copies of a weight take at least this together: several times an L2 cache
console = Console(width=130)


class MeasureOptions(NamedTuple):
    interpret: bool
    rounds: int


class TimedProduct(NamedTuple):
    """A function of `x` and a weight, to compile and time with several copies of the weight."""

    function: Callable[[Any, Any], Any]
    x: Any
    weights: list[Any]


def compile_all(products: dict[Hashable, TimedProduct]) -> dict[Hashable, Any]:
    """Compiles products in as many threads as there are cores. Prints why one does not compile, and leaves it out."""

    def compile_one(key: Hashable, index: int) -> Any:
        product = products[key]
        run = lambda x, w: product.function(x, w)
        run.__name__ = f"product_{index}_"  # the profiler reports it
        return jax.jit(run).lower(product.x, product.weights[0]).compile()

    compiled = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {key: pool.submit(compile_one, key, index) for index, key in enumerate(products)}
        for key, future in track(futures.items(), "compiling", console=console, transient=True):
            try:
                compiled[key] = future.result()
            except Exception as error:  # more shared memory or registers than there are
                console.print(f"{key}: {error!r:.120}", style="dim", markup=False)
    return compiled


#
# Correctness
#


def relative_error(y: Any, x: Any, dense: np.ndarray, transpose: bool) -> float:
    expected = np.asarray(x, np.float64) @ (dense if transpose else dense.T)
    return float(np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected))


def this_device() -> TargetDevice:
    device = jax.devices()[0]
    return TargetDevice("cuda", device.device_kind, _compat.compute_capability(device))


def is_taken(kernel: str, m: int, n: int, k: int, dtype: Any, format: Any, transpose: bool = False) -> bool:
    """Whether an implementation takes a product on this device: `scaled_matmul` one of codes with codes."""
    activations = format if kernel == "scaled_matmul" else None
    problem = MatmulProblem(m, n, k, jnp.dtype(dtype), format, transpose, activations=activations)
    return dispatch.find_refusal(this_device(), problem, kernel) is None


def run_kernel(
    x: Any,
    q: Any,
    transpose: bool,
    options: MeasureOptions,
    precision: str = "default",
    config: Any = None,
    kernel: str = "pallas_gpu",
) -> Any:
    layout = MatmulProblem(*(x.shape[0], *q.shape), x.dtype, q.format, transpose).layout
    run = ft.partial(
        dispatch.import_kernel(MODULES[kernel]).matmul,
        layout=layout,
        transpose=transpose,
        precision=precision,
        config=config,
        target=this_device(),
        interpret=options.interpret,
    )
    return run(x, dispatch.as_packed_weight(q))


def check(options: MeasureOptions) -> bool:
    """Checks each kernel, format, product and dtype, with ragged sizes, at rows that select each configuration."""
    # `mosaic_gpu` takes whole segments: 512 codes of one bit.
    sizes = {"pallas_gpu": (1000, 4196), "mosaic_gpu": (1000, 4096)}
    rows = (1, 7, 16, 32, 64, 128, 300)
    if options.interpret:
        sizes, rows = {"pallas_gpu": (72, 600), "mosaic_gpu": (136, 512)}, (1, 7)
    # Errors of float32 sums grow at most with the root of their length: 4196 ** 0.5 * 2**-24 is 4e-6.
    tolerance = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 4e-6}
    right = True
    for kernel, (n, k) in sizes.items():
        title = f"{kernel}, W({n}, {k}): the largest relative error, against float64"
        table = Table("format", "cases", "", *tolerance, title=title)
        formats = dict(it.islice(CHECKED.items(), 2)) if options.interpret else CHECKED
        quantized = {name: eqq.quantize(jr.normal(jr.key(0), (n, k)), format) for name, format in formats.items()}
        products: dict[Hashable, TimedProduct] = {}
        for case in it.product(formats, tolerance, rows, (False, True)):
            name, dtype, m, transpose = case
            if kernel == "mosaic_gpu" and not is_taken(kernel, m, n, k, dtype, formats[name], transpose):
                continue  # `pallas_gpu` takes all of them
            x = jr.normal(jr.key(1), (m, n if transpose else k)).astype(dtype)
            run = ft.partial(run_kernel, transpose=transpose, options=options, precision="highest", kernel=kernel)
            products[case] = TimedProduct(run, x, [quantized[name]])
        compiled = compile_all(products)
        right = right and len(compiled) == len(products)
        for name in formats:
            dense, worst = np.asarray(quantized[name].dequantize(), np.float64), dict[str, float]()
            cases = [case for case in compiled if case[0] == name]
            for case in cases:
                _, dtype, _, transpose = case
                y = compiled[case](products[case].x, quantized[name])
                error = relative_error(y, products[case].x, dense, transpose)
                worst[dtype] = max(worst.get(dtype, 0.0), error)
            bad = any(not error < tolerance[dtype] for dtype, error in worst.items())
            right = right and not bad
            cells = [f"{worst[dtype]:.1e}" if dtype in worst else "-" for dtype in tolerance]
            table.add_row(name, str(len(cases)), "[red]too large" if bad else "passes", *cells)
        console.print(table)
    return right


def check_block_scaled() -> bool:
    """Checks `scaled_matmul` against the product of the same codes, where this device takes it."""
    right, (m, n, k) = True, (128, 1024, 4096)
    for name, format in BLOCK_SCALED.items():
        if is_taken("scaled_matmul", m, n, k, "float32", format):
            x, w = (eqq.quantize(jr.normal(jr.key(rows), (rows, k)), format) for rows in (m, n))
            y = jax.jit(ft.partial(eqq.matmul, implementation="scaled_matmul"))(x, w.T)
            error = relative_error(y, x.dequantize(), np.asarray(w.dequantize(), np.float64), False)
            console.print(f"scaled_matmul, {name} x {name}, W({n}, {k}): relative error {error:.1e}")
            right = right and error < 1e-3
    return right


#
# Time
#


def time_on_device(
    products: dict[Hashable, TimedProduct], compiled: dict[Hashable, Any], options: MeasureOptions
) -> dict[Hashable, np.ndarray]:
    """The seconds that each call of a product takes on the GPU. Leaves out products with missing events."""
    calls = {
        key: [ft.partial(program, products[key].x, w) for w in products[key].weights]
        for key, program in compiled.items()
    }
    if options.interpret:
        return time_in_turns({key: each[0] for key, each in calls.items()}, options.rounds)
    for each in calls.values():
        jax.block_until_ready(each[0]())
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(options.rounds):
                for each in calls.values():
                    jax.block_until_ready([call() for call in each])
        (path,) = Path(directory).rglob("*.xplane.pb")
        operations = read_operations(path)
    seconds = {}
    for index, key in enumerate(products):
        if key in compiled:
            count, events = options.rounds * len(calls[key]), operations.get(index, [])
            if not events or len(events) % count:
                console.print(f"{key}: {len(events)} events of {count} calls", style="dim", markup=False)
                continue
            spans = np.array(events).reshape(count, -1, 2)  # a call starts after the end of the one before
            seconds[key] = (spans[:, :, 1].max(axis=1) - spans[:, 0, 0]) / 1e9
    return seconds


def read_operations(path: Path) -> dict[int, list[tuple[float, float]]]:
    """The start and the end in nanoseconds of each operation on the GPU, in order, by the index of its product."""
    operations = collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if line.name.startswith("Stream") else ():
                module = str(dict(event.stats).get("hlo_module", ""))
                if found := re.search(r"product_(\d+)_", module):
                    operations[int(found[1])].append((event.start_ns, event.start_ns + event.duration_ns))
    return {index: sorted(each) for index, each in operations.items()}


def make_copies(nbytes: int, options: MeasureOptions) -> int:
    return 2 if options.interpret else max(2, -(-COPIES_BYTES // nbytes))


def dense_product(x: Any, w: Any) -> Any:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)


def xla_product(x: Any, q: Any) -> Any:
    return eqq.matmul(x, q.T, implementation="xla")


def scaled_product(x: Any, q: Any) -> Any:
    return eqq.matmul(eqq.quantize(x, q.format), q.T, implementation="scaled_matmul")


def benchmark(
    shapes: Any, rows: Any, formats: dict[str, Any], options: MeasureOptions, *, document: bool = False
) -> None:
    for k, n in shapes:
        float_weight = jr.normal(jr.key(0), (n, k), jnp.bfloat16)
        dense = [float_weight + jnp.bfloat16(i) for i in range(make_copies(float_weight.nbytes, options))]
        weights = {}
        for name, format in formats.items():
            q = jax.jit(lambda w, format=format: eqq.quantize(w, format))(float_weight)
            weights[name] = [jax.tree_util.tree_map(jnp.copy, q) for _ in range(make_copies(q.nbytes, options))]
        products: dict[Hashable, TimedProduct] = {}
        for m in rows:
            x = jr.normal(jr.key(1), (m, k), jnp.bfloat16)
            products[m, "cuBLAS"] = TimedProduct(dense_product, x, dense)
            for name, format in formats.items():
                for kernel in MODULES:
                    if is_taken(kernel, m, n, k, jnp.bfloat16, format):
                        run = ft.partial(run_kernel, transpose=False, options=options, kernel=kernel)
                        products[m, name, kernel] = TimedProduct(run, x, weights[name])
                if is_taken("scaled_matmul", m, n, k, jnp.bfloat16, format):
                    products[m, name, "scaled_matmul"] = TimedProduct(scaled_product, x, weights[name])
                products[m, name, "xla"] = TimedProduct(xla_product, x, weights[name])
        seconds = time_on_device(products, compile_all(products), options)
        micro = collections.defaultdict(lambda: np.nan, {key: 1e6 * float(np.median(s)) for key, s in seconds.items()})
        if document:
            print_docs(micro, rows, formats)
            continue
        table = Table(
            *("M", "weight", "chosen", *(f"{name} us" for name in TIMED), *(f"{name} x" for name in TIMED)),
            *("TB/s", "cuBLAS us"),
            title=f"x(M, {k}) . W({n}, {k})^T, bfloat16; x: times as fast as cuBLAS; TB/s: packed bytes / time",
        )
        for m in rows:
            for name, format in formats.items():
                cublas, taken = micro[m, "cuBLAS"], [micro[m, name, kernel] for kernel in TIMED]
                problem = MatmulProblem(m, n, k, jnp.dtype(jnp.bfloat16), format, False)
                table.add_row(
                    *(str(m), name, dispatch.choose(this_device(), problem, None)[0]),
                    *(f"{time:.1f}" for time in taken),
                    *(f"{cublas / time:.2f}" for time in taken),
                    *(f"{weights[name][0].nbytes / np.nanmin(taken) / 1e6:.2f}", f"{cublas:.1f}"),
                )
            table.add_section()
        console.print(table)


def print_docs(micro: Any, rows: Any, formats: dict[str, Any]) -> None:
    """Prints the table of `docs/gpu_tpu.md`: how many times as fast as cuBLAS."""
    row = lambda name, cells: print(f"| {' | '.join([name, *cells])} |")
    row("rows of `x`", map(str, rows))
    row("---", ["---:"] * len(rows))
    for name, kernel in it.product(formats, TIMED):
        times = [micro[m, "cuBLAS"] / micro[m, name, kernel] for m in rows]
        if not np.isnan(times).all():
            row(f"{name}, `{kernel}`", ["-" if np.isnan(time) else f"{time:.2f}" for time in times])
    row("cuBLAS, us", [f"{micro[m, 'cuBLAS']:.0f}" for m in rows])


#
# Tuning
#


def tune(shapes: Any, options: MeasureOptions) -> None:
    """For each number of bits and rows, prints the configuration with the least slowdown, summed over shapes."""
    formats = {8: eqq.Int8(block_size=128), 4: eqq.NF4(), 2: eqq.Ternary(block_size=64), 1: eqq.Binary(block_size=64)}
    choices = {
        "tile_m": (1, 16, 32, 64, 128, 256),
        "tile_n": (64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4),
        "weight_left": (False, True),
        "scale_weights": (False, True),
        "programs": (1, 2, 4, 8, 16),
    }
    if options.interpret:
        choices = {"tile_m": (16,), "tile_n": (64,), "programs": (1, 2)}
        formats = {4: eqq.NF4()}
    for transpose, (bits, format), m in it.product((False, True), formats.items(), (1, 16, 32, 64, 128, 256, 512)):
        configs = [
            config
            for values in it.product(*choices.values())
            if is_worthwhile(config := pallas_gpu.Config(**dict(zip(choices, values, strict=True))), m, transpose)
        ]
        if not configs:
            continue
        slowdown = np.zeros(len(configs))
        for k, n in shapes:
            w = jr.normal(jr.key(0), (n, k), jnp.bfloat16)
            q = jax.jit(lambda w, format=format: eqq.quantize(w, format))(w)
            copies = [jax.tree_util.tree_map(jnp.copy, q) for _ in range(make_copies(q.nbytes, options))]
            x = jr.normal(jr.key(1), (m, n if transpose else k), jnp.bfloat16)
            run = ft.partial(run_kernel, transpose=transpose, options=options)
            products: dict[Hashable, TimedProduct] = {
                c: TimedProduct(ft.partial(run, config=c), x, copies) for c in configs
            }
            seconds = time_on_device(products, compile_all(products), options._replace(rounds=3))
            each = np.array([np.median(seconds.get(config, np.inf)) for config in configs])
            slowdown += each / each.min() if seconds else np.inf
        if not np.isfinite(slowdown).any():
            console.print(f"no configuration of {bits} bits, {m} rows, transpose={transpose} runs for every shape")
            continue
        device = jax.devices()[0].device_kind
        row = f'_ConfigRow("{device}", {transpose}, ({bits},), 2, {m}, {configs[int(np.argmin(slowdown))]}),'
        console.print(row, soft_wrap=True, highlight=False)


def is_worthwhile(config: Any, m: int, transpose: bool) -> bool:
    """Whether to try a configuration: not if others like it were always faster, or if it repeats another."""
    if config.tile_m == 1:
        return m == 1 and not (transpose or config.weight_left or config.scale_weights) and config.num_stages == 2
    if config.tile_m > max(16, m) or config.tile_m < min(m, 256) // 2 or config.tile_m * config.tile_n > 2**15:
        return False
    if transpose and (config.weight_left or config.scale_weights):
        return False
    return config.scale_weights or config.tile_m <= 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, interpreted, on any machine")
    parser.add_argument("--docs", action="store_true", help="print the table of docs/gpu_tpu.md")
    parser.add_argument("--tune", action="store_true", help="search configurations in place of timing")
    parser.add_argument("--formats", nargs="*", choices=[*FORMATS, *BLOCK_SCALED], help="which of them to time")
    parser.add_argument("--rows", nargs="*", type=int, help="numbers of rows of x")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.smoke and jax.default_backend() != "gpu":
        sys.exit("There is no GPU. Run with --smoke to see whether the script works, or `nox -s aot`.")
    options = MeasureOptions(arguments.smoke, 2 if arguments.smoke else arguments.rounds)
    names, rows, shapes = tuple(FORMATS), ROWS, SHAPES
    if arguments.docs:
        names, rows, shapes = DOCS_FORMATS, DOCS_ROWS, ((8192, 8192),)
    if is_taken("scaled_matmul", 16, 8192, 8192, "bfloat16", eqq.MXFP8()):
        names = (*names, *BLOCK_SCALED)
    if arguments.smoke:
        rows, shapes = (1, 20), ((1024, 136),)
    formats = {name: (FORMATS | BLOCK_SCALED)[name] for name in arguments.formats or names}
    device = jax.devices()[0].device_kind
    console.print(f"{device}, {os.cpu_count()} cores; JAX {jax.__version__}; {datetime.date.today()}\n")
    if not arguments.skip_check and not (check(options) and check_block_scaled()):
        sys.exit("A kernel is wrong.")
    if arguments.tune:
        tune(shapes, options)
    else:
        benchmark(shapes, arguments.rows or rows, formats, options, document=arguments.docs)


if __name__ == "__main__":
    main()
