"""A transformer on a mesh of eight devices: quantized in place, tensor-parallel and fully sharded.

The devices are virtual ones of the CPU. For real devices, delete the line that makes them; the rest stays the same.
"""

# %% Imports, and eight devices before JAX looks for any
import argparse
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray
from rich.console import Console
from rich.table import Table

import eqquant as eqq


jax.config.update("jax_num_cpu_devices", 8)
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="a smaller model")
args = parser.parse_args()
depth, width, heads, length, batch = (1, 512, 4, 64, 16) if args.smoke else (2, 1024, 8, 128, 16)
console = Console(width=120)


# %% The model: plain Equinox
class Block(eqx.Module):
    norms: list[eqx.nn.RMSNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 3)
        self.norms = [eqx.nn.RMSNorm(width), eqx.nn.RMSNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, use_bias=False, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, use_bias=False, key=keys[2])

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(lambda x: self.down(jax.nn.gelu(self.up(self.norms[1](x)))))(x)


class Transformer(eqx.Module):
    blocks: list[Block]

    def __init__(self, *, key: PRNGKeyArray) -> None:
        self.blocks = [Block(key=key) for key in jr.split(key, depth)]

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        for block in self.blocks:
            x = block(x)
        return x


# %% A mesh, and where the weights go
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
on = lambda *spec: NamedSharding(mesh, P(*spec))
tensor_parallel = {  # outputs are divided, then inputs, so that one sum is needed for each pair
    "*.up.weight": on("model"),
    "*.down.weight": on(None, "model"),
    "*.query_proj.weight": on("model"),
    "*.key_proj.weight": on("model"),
    "*.value_proj.weight": on("model"),
    "*.output_proj.weight": on(None, "model"),
    "*": on(),
}
fully_sharded = {"*.weight": on(("data", "model"))}  # in parts, wherever they are; gathered when they are needed

float_model = Transformer(key=jr.key(0))
x = jax.device_put(jr.normal(jr.key(1), (batch, length, width)), on("data"))
parallel = eqq.quantize_tree(float_model, eqq.NF4(), shardings=tensor_parallel)
norms_apart = lambda path, leaf: None if "norm" in path else fully_sharded["*.weight"]
in_parts = eqq.quantize_tree(float_model, eqq.NF4(), shardings=norms_apart)
weight = parallel.blocks[0].up.weight
print(f"{weight.shape}, divided as {weight.sharding.spec}. Its codes and its scales:")
jax.debug.visualize_array_sharding(weight.codes)
jax.debug.visualize_array_sharding(weight.scale_bits)


# %% The same function runs all of them. The compiled program shows the collectives.
def run(model: Transformer, x: Float[Array, "batch length width"]) -> Float[Array, "batch length width"]:
    return jax.lax.with_sharding_constraint(jax.vmap(model)(x), on("data"))


SIZES = {"f32": 4, "u32": 4, "u8": 1}


def collectives(function: Callable[..., Any], model: Transformer) -> str:
    """The transfers of a compiled program: how many of which kind, and their bytes on each device."""
    arrays, static = eqx.partition(model, eqx.is_array)
    text = jax.jit(lambda arrays, x: function(eqx.combine(arrays, static), x)).lower(arrays, x).compile().as_text()
    pattern = r"= (\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
    count, nbytes = Counter(), Counter()
    for dtype, dims, kind in re.findall(pattern, text):
        count[f"{kind} of {dtype}"] += 1
        nbytes[f"{kind} of {dtype}"] += SIZES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
    return "\n".join(f"{n} {what}: {nbytes[what] / 2**20:.2f} MiB" for what, n in count.items()) or "none"


def per_device(model: Transformer) -> int:
    """The bytes of the arrays of a model on the first device."""
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def place(model: Transformer, shardings: Any) -> Transformer:
    arrays, static = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, eqq.tree_shardings(arrays, shardings)), static)


models = {
    "float32, tensor parallel": place(float_model, tensor_parallel),
    "NF4, tensor parallel": parallel,
    "float32, fully sharded": place(float_model, lambda path, leaf: norms_apart(path, leaf) or on()),
    "NF4, fully sharded": in_parts,
}
size = sum(x.size for x in jax.tree.leaves(eqx.filter(float_model, eqx.is_array)))
title = f"{size:,} parameters on 8 devices, {batch} sequences of {length}"
table = Table("model", "MiB on each device", "what moves in a forward pass", title=title, show_lines=True)
expected = eqx.filter_jit(run)(eqq.quantize_tree(float_model, eqq.NF4()), x)
moved = {}
for name, model in models.items():
    moved[name] = collectives(run, model)
    table.add_row(name, f"{per_device(model) / 2**20:.2f}", moved[name])
    if name.startswith("NF4"):  # as on one device, but for the order of sums
        assert jnp.allclose(eqx.filter_jit(run)(model, x), expected, atol=1e-3)
console.print(table)

# %% Training: masters and moments have the sharding of the model
optim = eqq.float_masters(optax.adamw(1e-3), masters=float_model)
state = optim.init(parallel)


@eqx.filter_jit
def step(
    model: Transformer, state: optax.OptState, x: Float[Array, "batch length width"]
) -> tuple[Transformer, optax.OptState, Float[Array, ""]]:
    loss = lambda model, x: jnp.mean((run(model, x) - jnp.roll(x, 1, axis=1)) ** 2)
    value, grads = eqq.filter_value_and_grad(loss)(model, x)
    updates, state = optim.update(grads, state, model)
    return eqq.apply_updates(model, updates), state, value


losses = []
for _ in range(3):
    parallel, state, value = step(parallel, state, x)
    losses.append(float(value))
print(f"losses: {', '.join(f'{value:.4f}' for value in losses)}")
codes, master = parallel.blocks[0].up.weight, state.masters.blocks[0].up.weight
print(f"codes of `up`: {codes.sharding.spec}, their master: {master.sharding.spec}")

# %% Checks
assert losses[-1] < losses[0]
assert codes.sharding == weight.sharding
assert "all-gather" not in moved["NF4, tensor parallel"]
assert "all-gather of f32" not in moved["NF4, fully sharded"]
