"""The quantized matmul on an NVIDIA GPU, against cuBLAS: `python benchmarks/gpu_matmul.py`.

First every kernel is checked against float64. Then each product is timed: bfloat16 activations, every variant in the
same run, in turns. A weight of 4096 x 4096 in four bits fits into the L2 cache, so products go round several copies.
Times are medians of rounds, for one product with all of its operations (such as the sum of partial results).

`--tune` tries configurations and prints the rows for `eqquant/_matmul/kernels/pallas_gpu.py`. `--smoke` runs anywhere,
on tiny sizes and interpreted, to see that the script works; its times mean nothing.
"""

import argparse
import datetime
import functools as ft
import itertools as it
import os
import sys
from collections.abc import Callable
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
from eqquant._matmul import dispatch
from eqquant._matmul.kernels import pallas_gpu
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
    "MXFP4": eqq.MXFP4(),
}
CHECKED = {
    **FORMATS,
    **{
        repr(f): f
        for f in (
            *(eqq.Int4(symmetric=False), eqq.Int4(block_size=128), eqq.Int4(block_size=None), eqq.Int2()),
            *(eqq.Int2(symmetric=False), eqq.Ternary(block_size=64), eqq.Binary(), eqq.Binary(block_size=64)),
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
CACHE = 256 * 2**20  # copies of a weight take more than this together
console = Console(width=130)


class MeasureOptions(NamedTuple):
    interpret: bool
    rounds: int
    seconds: float  # that one measurement takes, about


#
# Correctness
#


def relative_error(y: Any, x: Any, dense: np.ndarray, transpose: bool) -> float:
    expected = np.asarray(x, np.float64) @ (dense if transpose else dense.T)
    return float(np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected))


def run_kernel(
    x: Any, q: Any, transpose: bool, options: MeasureOptions, precision: str = "default", config: Any = None
) -> Any:
    layout = MatmulProblem(*(x.shape[0], *q.shape), x.dtype, q.format, transpose).layout
    run = ft.partial(
        pallas_gpu.matmul,
        layout=layout,
        transpose=transpose,
        precision=precision,
        config=config,
        target=TargetDevice("cuda", jax.devices()[0].device_kind),
        interpret=options.interpret,
    )
    return run(x, dispatch.as_packed_weight(q))


def check(options: MeasureOptions) -> bool:
    """Every format, both products, all dtypes, ragged sizes, and a number of rows for each configuration."""
    n, k = (72, 600) if options.interpret else (1000, 4196)
    rows = (1, 7) if options.interpret else (1, 7, 16, 32, 64, 300)
    tolerance = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 1e-6}
    table = Table("format", "cases", "worst relative error", *tolerance, title=f"against float64, W({n}, {k})")
    right = True
    formats = dict(it.islice(CHECKED.items(), 2)) if options.interpret else CHECKED
    for name, format in track(formats.items(), "checking", console=console):
        worst = dict.fromkeys(tolerance, 0.0)
        q = eqq.quantize(jr.normal(jr.key(0), (n, k)), format)
        dense = np.asarray(q.dequantize(), np.float64)
        for dtype, m, transpose in it.product(tolerance, rows, (False, True)):
            x = jr.normal(jr.key(1), (m, n if transpose else k)).astype(dtype)
            run = jax.jit(ft.partial(run_kernel, transpose=transpose, options=options, precision="highest"))
            worst[dtype] = max(worst[dtype], relative_error(run(x, q), x, dense, transpose))
        bad = any(not worst[dtype] < limit for dtype, limit in tolerance.items())
        right = right and not bad
        cells = [f"{worst[dtype]:.1e}" for dtype in tolerance]
        table.add_row(name, str(6 * len(rows)), "[red]too large" if bad else "as it should be", *cells)
    console.print(table)
    return right


#
# Time
#


def repeat_product(product: Callable[[Any, Any], Any], rounds: int, times: int) -> Callable[[Any, list[Any]], Any]:
    """A program that does a product with every weight, `rounds` times in the body of a loop of `times`.

    All results are results of the program, and each round waits for the one before: else a compiler would leave out
    unused results, and compute equal ones once.
    """

    def run(x: Any, weights: list[Any]) -> Any:
        def body(carry: Any, _: Any) -> Any:
            x, results = carry[0], []
            for _ in range(rounds):
                results += [product(x, w) for w in weights]
                x, *results = jax.lax.optimization_barrier((x, *results))
            return (x, *results), None

        result = jax.eval_shape(product, x, weights[0])
        start = [jnp.zeros(result.shape, result.dtype)] * (rounds * len(weights))
        return jax.lax.scan(body, (x, *start), None, length=times)[0]

    return jax.jit(run)


def prepare(
    product: Callable[[Any, Any], Any], x: Any, weights: list[Any], options: MeasureOptions, seconds: float
) -> Any:
    """A call that takes long enough to be timed, given the seconds that a product takes about; and its products."""
    rounds = max(1, 8 // len(weights))
    count = rounds * len(weights)
    times = 1 if options.interpret else max(1, int(options.seconds / (seconds * count)))
    return ft.partial(repeat_product(product, rounds, times), x, weights), times * count


def make_copies(nbytes: int, options: MeasureOptions) -> int:
    return 2 if options.interpret else max(2, -(-CACHE // nbytes))


def copy_bandwidth(options: MeasureOptions) -> float:
    """Bytes per second, read and written, of copying arrays far larger than any cache."""
    size = 2**20 if options.interpret else 2**30
    x = jnp.zeros(size, jnp.uint8)
    flip = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, x: x ^ jnp.uint8(1), x))
    return 8 * 2 * size / float(np.median(time_in_turns({"copy": lambda: flip(x)}, options.rounds)["copy"]))


def dense_product(x: Any, w: Any) -> Any:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)


def xla_product(x: Any, q: Any) -> Any:
    return eqq.matmul(x, q.T, implementation="xla")


def benchmark(shapes: Any, rows: Any, formats: dict[str, Any], options: MeasureOptions) -> None:
    bandwidth = copy_bandwidth(options)
    console.print(f"copying moves {bandwidth / 1e12:.2f} TB/s, bytes read and written\n")
    for k, n in shapes:
        table = Table(
            *("M", "weight", "chosen", "kernel us", "x cuBLAS", "of copying", "XLA us", "x cuBLAS", "cuBLAS us"),
            title=f"x(M, {k}) . W({n}, {k})^T, bfloat16; x cuBLAS: how many times as fast",
        )
        float_weight = jr.normal(jr.key(0), (n, k), jnp.bfloat16)
        dense = [float_weight + jnp.bfloat16(i) for i in range(make_copies(float_weight.nbytes, options))]
        for m in rows:
            x = jr.normal(jr.key(1), (m, k), jnp.bfloat16)
            weights: dict[str, list[Any]] = {"cuBLAS": dense}
            products: dict[str, Callable[[Any, Any], Any]] = {"cuBLAS": dense_product}
            for name, format in formats.items():
                q = jax.jit(lambda w, format=format: eqq.quantize(w, format))(float_weight)
                count = make_copies(q.nbytes, options)
                weights[f"{name} kernel"] = weights[f"{name} XLA"] = [
                    jax.tree_util.tree_map(lambda a, i=i: a ^ jnp.asarray(i % 2, a.dtype), q) for i in range(count)
                ]
                products[f"{name} kernel"] = ft.partial(run_kernel, transpose=False, options=options)
                products[f"{name} XLA"] = xla_product
            about = 2 * m * n * k / 8e14 + n * k / 3e12  # a guess, for the length only
            ready = {name: prepare(f, x, weights[name], options, about) for name, f in products.items()}
            seconds = time_in_turns({name: program for name, (program, _) in ready.items()}, options.rounds)
            each = {name: s / ready[name][1] for name, s in seconds.items()}
            micro = lambda name, each=each: 1e6 * float(np.median(each[name]))
            ratio = lambda name, each=each: float(np.median(each["cuBLAS"] / each[name]))
            for name, format in formats.items():
                problem = MatmulProblem(m, n, k, x.dtype, format, False)
                chosen = dispatch.choose(TargetDevice("cuda"), problem, None)[0]
                q = weights[f"{name} kernel"][0]
                share = (q.nbytes + x.nbytes + 2 * m * n) / (micro(f"{name} kernel") / 1e6) / bandwidth
                table.add_row(
                    *(str(m), name, "kernel" if chosen == "pallas_gpu" else "XLA", f"{micro(f'{name} kernel'):.1f}"),
                    *(f"{ratio(f'{name} kernel'):.2f}", f"{100 * share:.0f}%", f"{micro(f'{name} XLA'):.1f}"),
                    *(f"{ratio(f'{name} XLA'):.2f}", f"{micro('cuBLAS'):.1f}"),
                )
            table.add_section()
        console.print(table)


#
# Tuning
#


def tune(shapes: Any, options: MeasureOptions) -> None:
    """Prints the best configuration for each number of bits and of rows: of the least slowdown, summed over shapes."""
    formats = {8: eqq.Int8(block_size=128), 4: eqq.NF4(), 2: eqq.Ternary(block_size=64), 1: eqq.Binary(block_size=64)}
    choices = {
        "tile_m": (16, 32, 64, 128),
        "tile_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
        "weight_left": (False, True),
        "scale_weights": (False, True),
        "programs": (1, 2, 4),
    }
    if options.interpret:
        choices = {"tile_m": (16,), "tile_n": (64,), "programs": (1, 2)}
        formats = {4: eqq.NF4()}
    for transpose, (bits, format), m in it.product((False, True), formats.items(), (16, 32, 64, 256)):
        configs = [
            config
            for values in it.product(*choices.values())
            if (config := pallas_gpu.Config(**dict(zip(choices, values, strict=True)))).tile_m <= max(16, m)
            and not (transpose and (config.weight_left and not options.interpret or config.scale_weights))
            and not (config.tile_m >= 64 and config.weight_left and not config.scale_weights)
        ]
        slowdown = np.zeros(len(configs))
        for k, n in shapes:
            w = jr.normal(jr.key(0), (n, k), jnp.bfloat16)
            q = jax.jit(lambda w, format=format: eqq.quantize(w, format))(w)
            copies = [jax.tree_util.tree_map(jnp.copy, q) for _ in range(make_copies(q.nbytes, options))]
            x = jr.normal(jr.key(1), (m, n if transpose else k), jnp.bfloat16)
            seconds = np.full(len(configs), np.inf)
            label = f"{bits} bits, {m} rows, {n} x {k}"
            for i, config in enumerate(track(configs, label, console=console, transient=True)):
                try:
                    product = ft.partial(run_kernel, transpose=transpose, options=options, config=config)
                    program, count = prepare(product, x, copies, options, n * k / 3e12)
                    seconds[i] = np.median(time_in_turns({"it": program}, 3)["it"]) / count
                except Exception as error:  # more shared memory or registers than there are
                    console.print(f"[dim]{config}: {str(error).splitlines()[0][:80]}")
            slowdown += seconds / seconds.min()
        device = jax.devices()[0].device_kind
        row = f'_ConfigRow("{device}", {transpose}, ({bits},), 2, {m}, {configs[int(np.argmin(slowdown))]}),'
        console.print(row, soft_wrap=True, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, interpreted, on any machine")
    parser.add_argument("--tune", action="store_true", help="search configurations, in hours, in place of timing")
    parser.add_argument("--formats", nargs="*", choices=[*FORMATS], help="which of them to time")
    parser.add_argument("--rows", nargs="*", type=int, help="numbers of rows of x")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--skip-check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.smoke and jax.default_backend() != "gpu":
        sys.exit("There is no GPU. Run with --smoke to see whether the script works, or `nox -s aot_gpu`.")
    options = MeasureOptions(arguments.smoke, 2 if arguments.smoke else arguments.rounds, 0.01)
    formats = {name: FORMATS[name] for name in arguments.formats or FORMATS}
    device = jax.devices()[0].device_kind
    console.print(f"{device}, {os.cpu_count()} cores; JAX {jax.__version__}; {datetime.date.today()}\n")
    if not arguments.skip_check and not check(options):
        sys.exit("A kernel is wrong.")
    shapes = ((600, 80),) if arguments.smoke else SHAPES
    if arguments.tune:
        tune(shapes, options)
    else:
        benchmark(shapes, arguments.rows or ((1, 20) if arguments.smoke else ROWS), formats, options)


if __name__ == "__main__":
    main()
