"""Tokens per second of a transformer on this machine's CPU, one token at a time: float32, bfloat16 and quantized.

    python benchmarks/cpu_model.py [--smoke] [--layers 24] [--width 2048] [--formats nf4 int8]

The weights are random. Each token passes blocks of attention over a cache of fixed length and an MLP of four times the
width, by the same Equinox code for every model. Models take turns; a figure is the median of the rounds.
"""

import argparse
import datetime
import gc
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from rich.console import Console
from rich.table import Table
from timing import time_in_turns

import eqquant as eqq
from eqquant._native import library as native


HEAD = 64
CONTEXT = 256


class DecoderBlock(eqx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, for one token."""

    norms: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 6)
        linear = lambda i, o, k: eqx.nn.Linear(i, o, use_bias=False, key=k)
        self.norms = (eqx.nn.RMSNorm(width), eqx.nn.RMSNorm(width))
        self.query, self.key, self.value, self.output = (linear(width, width, k) for k in keys[:4])
        self.up, self.down = linear(width, 4 * width, keys[4]), linear(4 * width, width, keys[5])

    def __call__(
        self, x: Float[Array, " width"], cache: Float[Array, "2 context width"]
    ) -> tuple[Float[Array, " width"], Float[Array, "2 context width"]]:
        y = self.norms[0](x)
        # The oldest token makes room for this one.
        new = jnp.stack([self.key(y), self.value(y)])[:, None].astype(cache.dtype)
        cache = jnp.concatenate([cache[:, 1:], new], axis=1)
        keys, values = cache.reshape(2, CONTEXT, -1, HEAD)
        scores = jnp.einsum("hd,chd->hc", self.query(y).reshape(-1, HEAD), keys) / HEAD**0.5
        mixed = jnp.einsum("hc,chd->hd", jax.nn.softmax(scores.astype(jnp.float32)).astype(values.dtype), values)
        x = x + self.output(mixed.reshape(-1).astype(x.dtype))
        return x + self.down(jax.nn.silu(self.up(self.norms[1](x)))), cache


@eqx.filter_jit
def step(blocks: list[DecoderBlock], x: Array, caches: list[Array]) -> tuple[Array, list[Array]]:
    new = []
    for block, cache in zip(blocks, caches, strict=True):
        x, cache = block(x, cache)
        new.append(cache)
    return x, new


def model(layers: int, width: int, convert: Callable[[DecoderBlock], Any]) -> list[Any]:
    """Copies of one converted block: a billion random numbers would take longer than all that is timed."""
    block = convert(DecoderBlock(width, jr.key(0)))
    return [jtu.tree_map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, block) for _ in range(layers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small model and few rounds")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--formats", nargs="+", default=["nf4", "int8", "q4_0", "ternary"])
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.layers, arguments.width, arguments.rounds = 2, 128, 2
    layers, width = arguments.layers, arguments.width

    to_bf16 = lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf
    converts: dict[str, Callable[[DecoderBlock], Any]] = {
        "float32": lambda block: block,
        "bfloat16": lambda block: jtu.tree_map(to_bf16, block),
    }
    converts |= {name: lambda block, name=name: eqq.quantize_tree(block, name) for name in arguments.formats}
    console = Console(width=120)
    kernels = native.isa() or "without native kernels"
    console.print(f"{os.cpu_count()} cores, {kernels}; JAX {jax.__version__}; {datetime.date.today()}")

    variants, sizes = {}, {}
    for name, convert in converts.items():
        blocks = model(layers, width, convert)
        gc.collect()
        sizes[name] = eqq.tree_nbytes(blocks)
        dtype = jnp.bfloat16 if name == "bfloat16" else jnp.float32
        x, caches = jr.normal(jr.key(1), (width,), dtype), [jnp.zeros((2, CONTEXT, width), dtype)] * layers
        variants[name] = lambda blocks=blocks, x=x, caches=caches: step(blocks, x, caches)[0]
    seconds = time_in_turns(variants, arguments.rounds)
    table = Table(
        "weights", "MB", "tokens per s", "time beside float32", title=f"{layers} layers of {width}, one token"
    )
    for name, by_round in seconds.items():
        ratio = np.median(by_round / seconds["float32"])
        table.add_row(name, f"{sizes[name] / 1e6:.0f}", f"{1 / np.median(by_round):.1f}", f"{ratio:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
