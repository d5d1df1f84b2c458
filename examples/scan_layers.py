"""Layers stacked into one module, quantized in one call, and run with `jax.lax.scan`.

A quantized array has no static full shape, so a stack of layers is quantized, sliced and scanned like a stack of float
layers. The weights stay packed in memory: at any time only one layer is decoded.
"""

# %% Imports
import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float, PRNGKeyArray

import eqquant as eqq


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="a smaller model")
args = parser.parse_args()
depth, width = (4, 64) if args.smoke else (12, 512)


# %% A residual layer, and a stack of them
class Layer(eqx.Module):
    """`x + down(gelu(up(norm(x))))`."""

    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray) -> None:
        up_key, down_key = jr.split(key)
        self.norm = eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, 4 * width, key=up_key)
        self.down = eqx.nn.Linear(4 * width, width, key=down_key)

    def __call__(self, x: Float[Array, " width"]) -> Float[Array, " width"]:
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


layers = eqx.filter_vmap(lambda key: Layer(key=key))(jr.split(jr.key(0), depth))
print("stacked weights:", layers.up.weight.shape)

# %% Quantize the stack
quantized = eqq.quantize_tree(layers, "nf4")
print(eqq.summary(quantized))


# %% Run it: one compiled layer, scanned over the stack
@eqx.filter_jit
def run_scan(layers: Layer, x: Float[Array, "batch width"]) -> Float[Array, "batch width"]:
    arrays, static = eqx.partition(layers, eqx.is_array)

    def step(x: Float[Array, "batch width"], arrays: Layer) -> tuple[Float[Array, "batch width"], None]:
        return jax.vmap(eqx.combine(arrays, static))(x), None

    return jax.lax.scan(step, x, arrays)[0]


# %% The same, but each layer is selected by its number
# On a CPU with native kernels this is the fast way: no product copies its weight out of the stack.
@eqx.filter_jit
def run_selected(layers: Layer, x: Float[Array, "batch width"]) -> Float[Array, "batch width"]:
    step = lambda x, n: (jax.vmap(eqq.take_layer(layers, n))(x), None)
    return jax.lax.scan(step, x, jnp.arange(depth))[0]


# %% The same as a Python loop, in which a layer is a slice of every leaf
def run_loop(layers: Layer, x: Float[Array, "batch width"]) -> Float[Array, "batch width"]:
    arrays, static = eqx.partition(layers, eqx.is_array)
    for n in range(depth):
        layer = eqx.combine(jtu.tree_map(lambda leaf: leaf[n], arrays), static)
        x = jax.vmap(layer)(x)
    return x


x = jr.normal(jr.key(1), (8, width))
y, expected, exact = run_scan(quantized, x), run_loop(quantized, x), run_scan(layers, x)
print(f"largest difference between scan and loop: {jnp.max(jnp.abs(y - expected)):.1e}")
print(f"relative error against float32: {jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact):.2%}")
assert jnp.allclose(y, expected, atol=1e-4) and jnp.allclose(run_selected(quantized, x), expected, atol=1e-4)

# %% Memory stays packed
# The bytes of the compiled program's arguments, and of its temporaries: the two weights of one layer.
one_weight = 4 * layers.up.weight[0].size
for name, model in {"float32": layers, "nf4": quantized}.items():
    memory = run_scan.lower(model, x).compile().compiled.memory_analysis()
    held, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    print(f"{name:8} arguments {held:>12,} bytes, temporaries {temporary / one_weight:.1f} dense weights")
