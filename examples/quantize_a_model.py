"""Quantizes an Equinox MLP and runs it: the tour of the library.

Shows `plan_tree`, `quantize_tree`, `summary`, the model under `filter_jit` and `vmap`, rules by pattern,
`explain_matmul`, the error of each format, and the way back with `dequantize_tree`.
"""

# %% Imports
import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float
from rich.console import Console
from rich.table import Table

import eqquant as eqq


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="a smaller model")
args = parser.parse_args()
console = Console(width=120)

# %% An ordinary model, and the plan
width = 128 if args.smoke else 1024
model_key, data_key = jr.split(jr.key(0))
model = eqx.nn.MLP(in_size=784, out_size=10, width_size=width, depth=2, key=model_key)
x = jr.normal(data_key, (64, 784))

print(eqq.plan_tree(model, "nf4"))  # a dry run, which computes nothing

# %% Quantize
# The class stays `eqx.nn.MLP`; each weight becomes a `QuantizedArray`. Biases stay float.
quantized = eqq.quantize_tree(model, eqq.NF4())
print(quantized.layers[0])
print(eqq.summary(quantized))


# %% Run
# Pass the model as an argument of the compiled function. In a closure its codes would be constants, and XLA may decode
# constants when it compiles: the program would then hold the dense weights.
@eqx.filter_jit
def predict(model: eqx.nn.MLP, x: Float[Array, "batch 784"]) -> Float[Array, "batch 10"]:
    return jax.vmap(model)(x)


def error(y: Float[Array, "*shape"], exact: Float[Array, "*shape"]) -> float:
    return float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact))


exact = predict(model, x)
print(f"relative error of the outputs: {error(predict(quantized, x), exact):.2%}")

# %% The trap, shown
weight = eqq.quantize(jr.normal(jr.key(1), (512, 512)), "int8")
rows = jr.normal(jr.key(2), (8, 512))
passed = jax.jit(lambda w, x: x @ w.T).lower(weight, rows).compile()
closed_over = jax.jit(lambda x: x @ weight.T).lower(rows).compile()
dense = "f32[512,512]{1,0} constant"
print(f"passed as an argument: dense weight in the program: {dense in passed.as_text()}")
print(f"closed over:           dense weight in the program: {dense in closed_over.as_text()}")

# %% Which implementation of the matmul runs, and why
print(eqq.explain_matmul(x, quantized.layers[0].weight.T))

# %% A different format for each layer
# The first pattern that matches a path wins; `None` leaves a leaf in float. A pattern that matches nothing is an error.
rules = {"layers.2.*": None, "layers.0.weight": eqq.Int8(), "*.weight": eqq.Int4(block_size=32)}
print(eqq.plan_tree(model, rules))
mixed = eqq.quantize_tree(model, rules)
print(f"relative error of the outputs: {error(predict(mixed, x), exact):.2%}")

# %% The error of each format
# These weights are untrained, so they are uniformly distributed, which suits evenly spaced levels. Trained weights look
# more like a normal distribution, for which NF4 was made.
table = Table("format", "bytes", "bits per value", "error of the outputs", title="One model, each format")
for name in ("int8", "fp8", "mxfp8", "q8_0", "nf4", "int4", "q4_0", "mxfp4", "nvfp4", "int2", "ternary", "binary"):
    candidate = eqq.quantize_tree(model, name)
    bits, nbytes = eqq.summary(candidate).bits, eqq.tree_nbytes(candidate)
    table.add_row(name, f"{nbytes:,}", f"{bits:.2f}", f"{error(predict(candidate, x), exact):.2%}")
table.add_row("float32", f"{eqq.tree_nbytes(model):,}", "32.00", "0.00%", style="dim")
console.print(table)

# %% And back
dense_model = eqq.dequantize_tree(quantized)
print(f"quantized {eqq.tree_nbytes(quantized):,} bytes, dequantized {eqq.tree_nbytes(dense_model):,} bytes")
difference = error(predict(dense_model, x), predict(quantized, x))
print(f"the outputs of the two differ by {difference:.1e}")
assert difference < 1e-5
