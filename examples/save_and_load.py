"""Save a quantized model in the middle of training, load it in three ways, and go on to the same bits.

A file says what it holds, so it loads without a template too, and a template that does not fit is an error.
"""

# %% Imports
import argparse
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

import eqquant as eqq


parser = argparse.ArgumentParser()
parser.add_argument("--smoke", action="store_true", help="a smaller model")
width = 64 if parser.parse_args().smoke else 1024
folder = Path(tempfile.mkdtemp())


# %% A model, and a step of training
def make_model():
    return eqx.nn.MLP(32, 8, width, 2, key=jr.key(0))


def loss_fn(model, x):
    return jnp.mean(jnp.square(jax.vmap(model)(x) - jnp.sin(x[:, :8])))


optim = eqq.float_masters(optax.adamw(1e-3))


@eqx.filter_jit
def train(model, state, x):
    loss, grads = eqq.filter_value_and_grad(loss_fn)(model, x)
    updates, state = optim.update(grads, state, model)
    return eqq.apply_updates(model, updates), state, loss


model = eqq.quantize_tree(make_model(), {"layers.0.*": "int8", "*": "nf4"})
state = optim.init(model)
x = jr.normal(jr.key(1), (64, 32))
for step in range(5):
    model, state, loss = train(model, state, x)

# %% Save the model, and the whole training state
eqq.save(folder / "model.safetensors", model)
eqq.save(folder / "state.safetensors", (model, state, step))
print(eqq.io.open(folder / "model.safetensors"))

# %% Load it: with a template, with a skeleton that takes no memory, or with none
loaded = eqq.load(folder / "model.safetensors", make_model())
skeleton = eqx.filter_eval_shape(make_model)
assert eqx.tree_equal(loaded, model)
assert eqx.tree_equal(eqq.load(folder / "model.safetensors", skeleton), model)

arrays = eqq.load(folder / "model.safetensors")
print("layers.0.weight:", arrays["layers"]["0"]["weight"])
assert eqx.tree_equal(eqq.io.assign(make_model(), arrays), model)

# %% Resume: the next step gives the same bits
resumed, resumed_state, step = eqq.load(folder / "state.safetensors", (model, optim.init(model), 0))
assert step == 4
assert eqx.tree_equal(train(resumed, resumed_state, x), train(model, state, x))
print("Resumed after step", step, "with the same bits.")

# %% Write it for other programs: GGUF for llama.cpp, or a folder for transformers and bitsandbytes
eqq.io.write(folder / "model.gguf", eqq.quantize_tree(make_model(), "q8_0"), "gguf", metadata={"general.name": "mlp"})
print(eqq.io.open(folder / "model.gguf"))
names = {f"layers.{n}.{part}": f"mlp.{n}.{part}" for n in range(3) for part in ("weight", "bias")}
eqq.io.write(folder / "nf4", eqq.quantize_tree(make_model(), "nf4", axis=(-2, -1)), "bitsandbytes", names=names)
print(eqq.io.open(folder / "nf4"))

# %% A template that does not fit
try:
    eqq.load(folder / "model.safetensors", eqq.quantize_tree(make_model(), "int4"))
except ValueError as e:
    print("An error, as it should be:", str(e)[:300])
