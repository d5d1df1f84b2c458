"""Quantizes activations too: dynamically, statically with scales from calibration, and in training.

Run `python examples/quantized_activations.py`.
"""

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from rich import print

import eqquant as eqq


model_key, input_key = jr.split(jr.key(0))
model = eqx.nn.MLP(64, 10, 256, 2, activation=jax.nn.gelu, key=model_key)
inputs = jr.normal(input_key, (512, 64))
wanted = jax.vmap(model)(inputs)


@eqx.filter_jit
def compute_error(model: eqx.nn.MLP) -> jax.Array:
    return jnp.linalg.norm(jax.vmap(model)(inputs) - wanted) / jnp.linalg.norm(wanted)


# %% Dynamic quantization: a scale per token
q = eqq.quantize_tree(model, "int8", activations="int8")
print(eqq.summary(q))
print(eqq.explain_matmul(inputs, q.layers[0].weight.T))

# %% From calibration: each weight holds the scale and the zero point of its inputs
stats = eqq.calibrate.collect_stats(model, [inputs[:256], inputs[256:]])
static = eqq.quantize_tree(model, "int8", activations=stats)

# %% Four bits for weights, and training that rounds both sides
q4 = eqq.quantize_tree(model, "int4", activations="int8")
trained = eqq.quantize_tree(model, "int4", activations="int8", simulate=True)
optim = optax.adam(1e-4)
state = optim.init(eqx.filter(trained, eqx.is_inexact_array))


@eqx.filter_jit
def step(model: eqx.nn.MLP, state: optax.OptState) -> tuple[eqx.nn.MLP, optax.OptState]:
    grads = eqx.filter_grad(lambda m: jnp.mean(jnp.square(jax.vmap(m)(inputs) - wanted)))(model)
    updates, state = optim.update(grads, state)
    return eqx.apply_updates(model, updates), state


for _ in range(100):
    trained, state = step(trained, state)
trained = eqq.finalize(trained)

# %%
models = {
    "int8 weights, float inputs": eqq.quantize_tree(model, "int8"),
    "int8 x int8": q,
    "int8 x int8, calibrated": static,
    "int4 x int8": q4,
    "int4 x int8, trained": trained,
}
for name, quantized in models.items():
    print(f"{name:30} relative error {float(compute_error(quantized)):.4f}")
assert compute_error(q) < 0.02 and compute_error(static) < 0.04 and compute_error(trained) < compute_error(q4)
