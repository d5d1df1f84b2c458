"""A format of your own: four bits that hold a sign and a power of two.

A format is one class. The library adds the rest: packing, blocks, whole models, the quantized matmul, `jit` and `vmap`.
The end compares this format with `Int4` and `NF4` on weights with thin and with heavy tails.
"""

# %% Imports

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Float32, UInt8
from rich.console import Console
from rich.table import Table

import eqquant as eqq


# %% The format: levels 0 and +-2**-k for k from 0 to 6, times the largest magnitude of the block
class Log4(eqq.extend.AbstractFormat):
    """Bit 3 is the sign. Bits 0 to 2 are the exponent `k`, where 7 stands for zero."""

    block_size: int | None = eqx.field(static=True, default=64)
    bits = 4

    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        return jnp.max(jnp.abs(blocks), axis=-1, initial=0)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        # The midpoint of two neighbors is at k + 0.415, as -log2(0.75) is 0.415. The logarithm of zero is clipped.
        exponent = jnp.clip(jnp.round(0.085 - jnp.log2(jnp.abs(values))), 0, 7)
        return exponent.astype(jnp.uint8) | (values < 0).astype(jnp.uint8) << 3

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        exponent, sign = codes & 7, 1 - 2 * (codes >> 3).astype(jnp.float32)
        return jnp.where(exponent == 7, 0, sign * 2.0 ** -exponent.astype(jnp.float32))


# %% One array
w = jr.normal(jr.key(0), (256, 1024))
q = eqq.quantize(w, Log4())
print(q, f"{8 * q.nbytes / q.size} bits per weight")
print("levels:", sorted({float(v) for v in q.format.decode(eqq.unpack(q)).ravel()}))
print("a type of its own:", isinstance(q, Float[eqq.QuantizedArray[Log4], "out in"]))

# %% A whole model, by the lower-case name of the class
model = eqx.nn.MLP(in_size=64, out_size=8, width_size=128, depth=2, key=jr.key(1))
quantized = eqq.quantize_tree(model, "log4")
print(eqq.summary(quantized))


# %% Under jit and vmap, on the quantized matmul; and quantizing inside jit
@eqx.filter_jit
def predict(model: eqx.nn.MLP, x: Float[Array, "batch 64"]) -> Float[Array, "batch 8"]:
    return jax.vmap(model)(x)


x = jr.normal(jr.key(2), (32, 64))
dense = predict(eqq.dequantize_tree(quantized), x)
assert jnp.allclose(predict(quantized, x), dense, atol=1e-5)
print(eqq.explain_matmul(x, quantized.layers[0].weight.T))

stacked = jax.jit(jax.vmap(lambda w: eqq.quantize(w, "log4")))(w.reshape(4, 64, 1024))
assert jnp.array_equal(stacked.dequantize().reshape(w.shape), q.dequantize())

# %% Compare it with other formats of four bits
# A normal distribution wastes its fine levels near zero. With heavy tails the largest value of a block sets a coarse
# scale for all others: then the fine levels beat evenly spaced ones.
tails = {"normal": w, "heavy tails": jr.t(jr.key(3), 3.0, w.shape)}
table = Table("format", *tails, title="Signal to quantization noise, in dB")
for format in (Log4(), eqq.Int4(), eqq.NF4()):
    noise = {name: jnp.mean((eqq.quantize(x, format) - x) ** 2) / jnp.mean(x**2) for name, x in tails.items()}
    table.add_row(repr(format), *(f"{-10 * jnp.log10(n):.1f}" for n in noise.values()))
Console(width=120).print(table)
