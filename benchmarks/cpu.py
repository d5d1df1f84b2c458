"""What quantization costs and saves in time, on this machine.

Every table is measured in one run: the variants take turns within each round, and a ratio is the median of the rounds'
ratios. Figures below 1 are faster than float32.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from rich.console import Console
from rich.table import Table
from timing import machine, time_in_turns

import eqquant as eqq


console = Console(width=120)


def matmul(size: int, rounds: int) -> None:
    w = jr.normal(jr.key(0), (size, size))
    formats = {"NF4": eqq.NF4(), "Int4": eqq.Int4(), "Int8": eqq.Int8()}
    table = Table(
        "M",
        "weight",
        "ms",
        "x float32",
        "x dequantize-then-dot",
        "temp MiB",
        "of dense",
        title=f"q @ x, {size} x {size}",
    )
    dot = jax.jit(lambda w, x: w @ x)
    dense = jax.jit(lambda q, x: jax.lax.optimization_barrier(q.dequantize()) @ x)
    for m in (1, 16, 128):
        x = jr.normal(jr.key(1), (size, m))
        quantized = {name: eqq.quantize(w, f) for name, f in formats.items()}
        variants: dict[str, Callable[[], Any]] = {"float32": lambda x=x: dot(w, x)}
        for name, q in quantized.items():
            variants[name] = lambda q=q, x=x: dot(q, x)
            variants[f"{name} dense"] = lambda q=q, x=x: dense(q, x)
        seconds = time_in_turns(variants, rounds)
        table.add_row(str(m), "float32", f"{1e3 * np.median(seconds['float32']):.2f}", "1.00", "", "", "", style="dim")
        for name, q in quantized.items():
            temp = [f.lower(q, x).compile().memory_analysis().temp_size_in_bytes / 2**20 for f in (dot, dense)]
            table.add_row(
                str(m),
                name,
                f"{1e3 * np.median(seconds[name]):.2f}",
                f"{np.median(seconds[name] / seconds['float32']):.2f}",
                f"{np.median(seconds[name] / seconds[f'{name} dense']):.2f}",
                f"{temp[0]:.1f}",
                f"{temp[1]:.1f}",
            )
    console.print(table)


def throughput(size: int, rounds: int) -> None:
    w = jr.normal(jr.key(0), (size, size))
    table = Table("format", "quantize ms", "dequantize ms", title=f"{size} x {size} float32, under jit")
    formats = [
        *(eqq.NF4(), eqq.NF4(double_quant=True), eqq.Int8(), eqq.Int8(symmetric=False), eqq.Int4()),
        *(eqq.Int4(symmetric=False), eqq.Int2(), eqq.Ternary(), eqq.Binary(), eqq.FP8(), eqq.FP8("e5m2")),
        *(eqq.MXFP8(), eqq.MXFP4(), eqq.NVFP4(), eqq.formats.Q4_0(), eqq.formats.Q8_0()),
    ]
    for format in formats:
        quantize = jax.jit(lambda w, format=format: eqq.quantize(w, format))
        dequantize = jax.jit(lambda q: q.dequantize())
        q = quantize(w)
        seconds = time_in_turns({"q": lambda: quantize(w), "d": lambda: dequantize(q)}, rounds)
        table.add_row(repr(format), *(f"{1e3 * np.median(seconds[k]):.1f}" for k in "qd"))
    console.print(table)


def compile_time(depth: int, rounds: int) -> None:
    model = eqx.nn.MLP(64, 64, 256, depth, key=jr.key(0))
    models = {"float32": model, "NF4": eqq.quantize_tree(model, "nf4"), "Int8": eqq.quantize_tree(model, "int8")}
    x = jnp.ones((32, 64))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    microseconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, m in models.items():
            leaves, treedef = jtu.tree_flatten(eqx.filter(m, eqx.is_array))
            static = eqx.filter(m, eqx.is_array, inverse=True)

            @jax.jit
            def run(leaves: Any, x: Any, treedef: Any = treedef, static: Any = static) -> Any:
                return jax.vmap(eqx.combine(jtu.tree_unflatten(treedef, leaves), static))(x)

            jax.clear_caches()
            start = time.perf_counter()
            lowered = run.lower(leaves, x)
            traced = time.perf_counter()
            compiled = lowered.compile()
            seconds[name].append((traced - start, time.perf_counter() - traced))
            calls = time_in_turns({"call": lambda compiled=compiled, leaves=leaves: compiled(leaves, x)}, 50)["call"]
            microseconds[name].append(1e6 * float(np.median(calls)))
    table = Table("model", "trace s", "compile s", "both, of float32", "call us")
    table.title = f"MLP of {depth + 1} layers of 256, batch 32; medians of {rounds}"
    totals = {name: np.sum(found, axis=1) for name, found in seconds.items()}
    for name, found in seconds.items():
        trace, build = np.median(found, axis=0)
        ratio, call = np.median(totals[name] / totals["float32"]), np.median(microseconds[name])
        table.add_row(name, f"{trace:.3f}", f"{build:.3f}", f"{ratio:.2f}", f"{call:.0f}")
    console.print(table)


def import_time(rounds: int) -> None:
    table = Table("import", "ms, median", title="Import time, in a new process")
    code = "import time; s = time.perf_counter(); import {}; print(time.perf_counter() - s)"
    for first, second in (("jax", ""), ("jax, equinox, quax", ""), ("jax, equinox, quax", "eqquant")):
        prelude = f"import {first}; " if second else ""
        source = prelude + code.format(second or first)
        runs = [subprocess.run([sys.executable, "-c", source], capture_output=True, text=True) for _ in range(rounds)]
        label = f"{second}, after {first}" if second else first
        table.add_row(label, f"{1e3 * np.median([float(r.stdout) for r in runs]):.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes and few rounds")
    smoke = parser.parse_args().smoke
    console.print(machine())
    matmul(512 if smoke else 4096, 3 if smoke else 25)
    throughput(512 if smoke else 4096, 2 if smoke else 7)
    compile_time(4 if smoke else 24, 1 if smoke else 11)
    import_time(1 if smoke else 5)


if __name__ == "__main__":
    main()
