"""Products with quantized weights at the widths that models have, on this machine's CPU, against JAX's float32.

    python benchmarks/widths.py [--smoke] [--formats q4_1 int4_affine] [--widths 576 960] [--rows 1 128]
    python benchmarks/widths.py --activations int8 --isa avx2

A width is the length of the rows of the weight, which is square unless `--outputs` is given. A figure is the
time relative to float32, the median of the rounds' ratios: of a chain of products in one compiled function, each of the
result of the one before. The chain of each format has as many copies of the weight as exceed the caches; formats take
turns in one process. With one row of `x`, float32 is `w @ x` of a vector. `--formats` takes any name of a format, and
`int4_affine` for one with zero points.

After all figures come the worst ten, and the cliffs: products that take more than 1.25 times as long for each weight as
those of the next multiple of 1,024.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from cpu_matmul import rounds_for
from jaxtyping import Array
from rich.console import Console
from rich.table import Table
from timing import machine, time_in_turns

import eqquant as eqq
from eqquant._native import library as native


FORMATS = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq3_s", "iq2_xxs"),
    *("mlx4", "nf4", "int2", "int3", "int4", "int8", "int4_affine", "int8_affine", "ternary"),
    *("mxfp4", "nvfp4", "fp8", "mxfp8", "trellis2"),
)
WIDTHS = (384, 576, 768, 896, 960, 1024, 1536, 2048, 2304, 2560, 2880, 3072, 4096, 4864, 11008)
CHAIN_BYTES = 2**26  # more than the caches hold
LONGEST = 512  # products in a chain, so that it compiles in seconds
MOST_OUTPUTS = 2048  # rows of a weight: with as many as columns, the widest would take minutes
CLIFF = 1.25


class Found(NamedTuple):
    """The time per weight in ns, and the time relative to float32, of a product."""

    format: str
    width: int
    rows: int
    time: float
    ratio: float


def next_multiple(width: int) -> int:
    return -(-width // 1024) * 1024


def make_format(name: str) -> eqq.extend.AbstractFormat:
    format: Any = eqq.QuantConfig(name.removesuffix("_affine")).format
    return dataclasses.replace(format, symmetric=False) if name.endswith("_affine") else format


def make_chain(weight: Any, x: Array, product: Callable[[Any, Array], Array], smoke: bool) -> tuple[Any, int]:
    """Returns the call of a chain of products, compiled, and how many there are."""
    leaves, tree = jtu.tree_flatten(weight)
    count = 2 if smoke else min(LONGEST, max(2, -(-CHAIN_BYTES // sum(leaf.nbytes for leaf in leaves))))
    flat = [jnp.copy(leaf) for _ in range(count) for leaf in leaves]

    @jax.jit
    def run(flat: list[Array], x: Array) -> Array:
        for n in range(0, len(flat), len(leaves)):
            # Outputs are the next inputs: cut where there are more, and otherwise the other inputs stay.
            y = product(jtu.tree_unflatten(tree, flat[n : n + len(leaves)]), x)
            y = y[tuple(map(slice, x.shape))]
            x = y if y.shape == x.shape else jax.lax.dynamic_update_slice(x, y, [0] * x.ndim)
        return x

    return lambda: run(flat, x), count


def measure(width: int, rows: int, arguments: argparse.Namespace) -> list[Found]:
    n = arguments.outputs or min(width, MOST_OUTPUTS)
    w = jr.normal(jr.key(0), (n, width)) / width**0.5
    x = jr.normal(jr.key(1), (rows, width))
    # XLA is slow at `x @ w.T`.
    chains = {"float32": make_chain(w, x[0] if rows == 1 else x.T, lambda w, x: w @ x, arguments.smoke)}
    for name in arguments.formats:
        q: Any = eqq.quantize(w, make_format(name))
        if arguments.activations:
            q = eqq.arrays.ActivationQuantizedArray(q, arguments.activations)
        chains[name] = make_chain(q, x, lambda q, x: eqq.matmul(x, q.T), arguments.smoke)
    times = time_in_turns({name: run for name, (run, _) in chains.items()}, rounds_for(rows, arguments.rounds))
    each = {name: times[name] / count for name, (_, count) in chains.items()}
    return [
        Found(name, width, rows, 1e9 * float(np.median(t)) / w.size, float(np.median(t / each["float32"])))
        for name, t in each.items()
    ]


def find_cliffs(found: list[Found]) -> list[tuple[float, Found]]:
    """Products whose time per weight is more than `CLIFF` times that of the next multiple of 1,024, the worst first."""
    times = {(f.format, f.width, f.rows): f.time for f in found}
    cliffs = [(f.time / times[f.format, next_multiple(f.width), f.rows], f) for f in found]
    return sorted((cliff for cliff in cliffs if cliff[0] > CLIFF), reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--rounds", type=int, default=15, help="of products with one row of x; of others fewer")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 32, 128, 512))
    parser.add_argument(
        "--outputs", type=int, help=f"rows of each weight; by default the width, at most {MOST_OUTPUTS}"
    )
    parser.add_argument("--activations", help="the format of quantized activations, such as int8; by default floats")
    parser.add_argument("--isa", help="the instruction set; by default the best of this machine")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.formats, arguments.widths = arguments.formats[:2], arguments.widths[:1]
        arguments.rows, arguments.rounds = arguments.rows[:1], 2
    if arguments.isa:
        os.environ["EQQUANT_CPU_ISA"] = arguments.isa  # before the first product, which loads the kernels
    console = Console(width=120)
    if native.refusal() is not None:
        console.print(f"[red]{native.refusal()}")
        sys.exit(1)
    console.print(f"{machine()}; kernels {native.isa()}; activations {arguments.activations or 'float32'}")
    found: list[Found] = []
    for width in sorted({*arguments.widths, *map(next_multiple, arguments.widths)}):
        for rows in arguments.rows:
            new = measure(width, rows, arguments)
            print(f"{width}, {rows} rows:", ", ".join(f"{f.format} {f.ratio:.2f}" for f in new[1:]), flush=True)
            found += new
    show(found, arguments.rows, console)


def show(found: list[Found], rows: Sequence[int], console: Console) -> None:
    by_key = {f[:3]: f for f in found}
    table = Table("width", "weight", *(f"M = {m}" for m in rows), title="time relative to float32")
    for name, width in dict.fromkeys(key[:2] for key in by_key):
        cells = [by_key[name, width, m] for m in rows]
        figures = (f"{1e3 * f.time:.0f} ps a weight" if name == "float32" else f"{f.ratio:.2f}" for f in cells)
        table.add_row(str(width), name, *figures)
    quantized = [f for f in found if f.format != "float32"]
    worst = [(f.ratio, f) for f in sorted(quantized, key=lambda f: f.ratio, reverse=True)[:10]]
    for title, rated in (("the worst", worst), (f"cliffs above {CLIFF}", find_cliffs(quantized))):
        console.print(table)
        table = Table("weight", "width", "M", "ratio", title=title)
        for ratio, f in rated:
            table.add_row(f.format, str(f.width), str(f.rows), f"{ratio:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
