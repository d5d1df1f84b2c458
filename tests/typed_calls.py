"""Calls as users write them, for type checkers alone: `nox -s types` reads this file, and nothing runs it."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr

import eqquant as eqq


model = eqx.nn.MLP(4, 4, 8, 2, key=jr.key(0))
stats = eqq.calibrate.collect_stats(model, [jnp.ones((2, 4))], gram=True, gradients=True)
for method in (
    eqq.GPTQ(stats),
    eqq.GPTQ(stats, method=eqq.MSE(stats)),
    eqq.GPTQ(gram=jnp.eye(4)),
    eqq.MSE(stats),
    eqq.JointMSE(stats),
    eqq.LearnedRounding(stats["layers.0.weight"]),
):
    model = eqq.quantize_tree(model, {"layers.0.*": eqq.formats.Trellis(2), "*": "int4"}, method=method)
model = eqq.transforms.smooth(model, eqq.transforms.SmoothQuant(stats))
model = eqq.transforms.smooth(model, eqq.transforms.AWQ(stats, "int4"))
model = eqq.quantize_tree(model, "int8", activations=stats)
y = jnp.ones((2, 4)) @ eqq.quantize(jnp.ones((4, 4)), "nf4").T
eqq.save("model.safetensors", model)
eqq.io.write("imatrix.gguf", stats, "imatrix")
