"""Two bits per weight, on scikit-learn's digits: rounding, GPTQ, and GPTQ with gradients.

A trellis has less error than `Int2` at two bits. GPTQ finds its codes for a small error of each layer's outputs, and
with gradients for a small error of the outputs of the model.
"""

# %% Imports
import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqquant as eqq


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="a smaller network, and the trellis alone")
trellis, int2 = eqq.formats.Trellis(2), eqq.Int2(None, scale_dtype="bfloat16")
width, depth, formats = (128, 1, [trellis]) if parser.parse_args().smoke else (256, 2, [int2, trellis])

# %% A network, trained in float on 64 pixels
images, labels = load_digits(return_X_y=True)
split = train_test_split(images.astype("float32") / 16, labels, test_size=0.3, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = (jnp.asarray(a) for a in split)
model = eqx.nn.MLP(64, 10, width, depth, key=jr.key(0))
optim = optax.adam(2e-3)


@eqx.filter_jit
def step(model, state, x, y):
    loss = lambda m: optax.softmax_cross_entropy_with_integer_labels(jax.vmap(m)(x), y).mean()
    updates, state = optim.update(eqx.filter_grad(loss)(model), state)
    return eqx.apply_updates(model, updates), state


state = optim.init(eqx.filter(model, eqx.is_inexact_array))
for key in jr.split(jr.key(1), 400):
    rows = jr.randint(key, (64,), 0, len(x_train))
    model, state = step(model, state, x_train[rows], y_train[rows])

# %% Statistics: the Gram matrix of the inputs of each weight, and of its gradients
batches = list(x_train[: 32 * 39].reshape(39, 32, 64))
stats = eqq.calibrate.collect_stats(model, batches, gram=True)
with_gradients = eqq.calibrate.collect_stats(model, batches, gram=True, gradients=True)

# %% Divergence from the float model, in nats, and accuracy, on images that nothing has seen
methods = {"rounding": None, "GPTQ": eqq.GPTQ(stats), "GPTQ with gradients": eqq.GPTQ(with_gradients)}
for format in formats:
    for name, method in methods.items():
        q = eqq.quantize_tree(model, format, method=method)
        divergence = eqq.analysis.output_divergence(model, q, x_test).kl
        accuracy = jnp.mean(jnp.argmax(jax.vmap(q)(x_test), -1) == y_test)
        print(f"{format!r}, {name}: {eqq.summary(q).bits:.2f} bits, {divergence:.4f} nats, {accuracy:.1%}")
