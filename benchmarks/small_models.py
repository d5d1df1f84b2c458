"""Small quantized models on this machine's CPU, where a call costs more than its arithmetic, against JAX's float32.

    python benchmarks/small_models.py [--smoke] [--widths 96 192] [--batches 1 32]
    EQQUANT_CPU_ISA=avx2 python benchmarks/small_models.py  # another instruction set

The model is an MLP of 25 layers under `jit`, as in a neural ODE. The compiled function takes its arrays in a list, so
what Python does with a model before the call is not timed. Models take turns. A figure is the median of the rounds'
ratios to float32: above 1 a model is slower.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array
from rich.console import Console
from rich.table import Table
from timing import machine, time_in_turns

import eqquant as eqq
from eqquant._native import library as native


LAYERS = 25
SETTINGS: dict[str, dict[str, str]] = {
    "nf4": {"format": "nf4"},
    "int4": {"format": "int4"},
    "int8": {"format": "int8"},
    "int8 x int8": {"format": "int8", "activations": "int8"},
}


def compiled(model: Any, x: Array) -> Callable[[], Array]:
    """Returns the call of a compiled model on a batch, whose arrays are flattened already."""
    arrays, static = eqx.partition(model, eqx.is_array)
    leaves, tree = jtu.tree_flatten(arrays)

    @jax.jit
    def run(leaves: list[Array], x: Array) -> Array:
        return jax.vmap(eqx.combine(jtu.tree_unflatten(tree, leaves), static))(x)

    return lambda: run(leaves, x)


def ratios(width: int, batch: int, rounds: int) -> dict[str, float]:
    """Of each model to float32; and the microseconds of that, under its own name."""
    mlp = eqx.nn.MLP(width, width, width, LAYERS - 1, key=jr.key(0))
    x = jr.normal(jr.key(1), (batch, width))
    models = {"float32": mlp, **{name: eqq.quantize_tree(mlp, **options) for name, options in SETTINGS.items()}}
    times = time_in_turns({name: compiled(model, x) for name, model in models.items()}, rounds)
    floats = times.pop("float32")
    return {"float32": 1e6 * float(np.median(floats)), **{n: float(np.median(t / floats)) for n, t in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one small size and few rounds")
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 96, 128, 192, 256, 384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.widths, arguments.batches, arguments.rounds = [96], [1], 3
    console = Console(width=120)
    if native.refusal() is not None:
        console.print(f"[red]{native.refusal()}")
        sys.exit(1)
    console.print(f"{machine()}; kernels {native.isa()}")
    table = Table("width", "batch", "float32, us", *SETTINGS, title=f"{LAYERS} layers: time relative to float32")
    for width in arguments.widths:
        for batch in arguments.batches:
            found = ratios(width, batch, arguments.rounds)
            cells = (f"{value:.0f}" if name == "float32" else f"{value:.2f}" for name, value in found.items())
            table.add_row(str(width), str(batch), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
