"""A convolutional network on scikit-learn's digits: trained in float, then quantized without further training.

One call per format; the table shows the accuracy and the bytes of each. The weight of a convolution is quantized along
all its input axes, stays packed in memory, and is decoded when the convolution runs.
"""

# %% Imports
import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqquant as eqq


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="train for fewer steps")
args = parser.parse_args()
steps, batch_size = (300 if args.smoke else 600), 64

# %% Data: 1797 images of 8 x 8 pixels
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
x_train, x_test, y_train, y_test = (
    jnp.asarray(a) for a in train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
)


# %% The network
class CNN(eqx.Module):
    """Two convolutions, a pooling, a third convolution, and two dense layers."""

    layers: list

    def __init__(self, *, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 5)
        self.layers = [
            eqx.nn.Conv2d(1, 32, 3, padding=1, key=keys[0]),
            jax.nn.relu,
            eqx.nn.Conv2d(32, 64, 3, padding=1, key=keys[1]),
            jax.nn.relu,
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(64, 64, 3, padding=1, key=keys[2]),
            jax.nn.relu,
            eqx.nn.MaxPool2d(2, 2),
            jnp.ravel,
            eqx.nn.Linear(256, 128, key=keys[3]),
            jax.nn.relu,
            eqx.nn.Linear(128, 10, key=keys[4]),
        ]

    def __call__(self, x: Float[Array, "1 8 8"]) -> Float[Array, " 10"]:
        for layer in self.layers:
            x = layer(x)
        return x


model = CNN(key=jr.key(0))


# %% Training, in float
def loss(model: CNN, x: Float[Array, "batch 1 8 8"], y: Int[Array, " batch"]) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


optim = optax.adam(2e-3)


@eqx.filter_jit
def step(
    model: CNN, state: PyTree, x: Float[Array, "batch 1 8 8"], y: Int[Array, " batch"]
) -> tuple[CNN, PyTree, Float[Array, ""]]:
    value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
    updates, state = optim.update(grads, state)
    return eqx.apply_updates(model, updates), state, value


@eqx.filter_jit
def accuracy(model: CNN, x: Float[Array, "batch 1 8 8"], y: Int[Array, " batch"]) -> Float[Array, ""]:
    return jnp.mean(jnp.argmax(jax.vmap(model)(x), axis=-1) == y)


state = optim.init(eqx.filter(model, eqx.is_inexact_array))
for n, key in enumerate(jr.split(jr.key(1), steps), start=1):
    rows = jr.randint(key, (batch_size,), 0, len(x_train))
    model, state, value = step(model, state, x_train[rows], y_train[rows])
    if n % 150 == 0:
        print(f"step {n}: loss {value:.4f}, test accuracy {accuracy(model, x_test, y_test):.2%}")

# %% Post-training quantization: one call per format
quantized = {name: eqq.quantize_tree(model, name) for name in ("int8", "int4", "nf4", "ternary", "binary")}
print(eqq.summary(quantized["int4"]))

# %% Accuracy and bytes
table = Table("weights", "test accuracy", "bytes", "of float32", title="Digits, quantized after training")
for name, candidate in {"float32": model, **quantized}.items():
    nbytes, share = eqq.tree_nbytes(candidate), eqq.tree_nbytes(candidate) / eqq.tree_nbytes(model)
    table.add_row(name, f"{accuracy(candidate, x_test, y_test):.2%}", f"{nbytes:,}", f"{share:.1%}")
Console(width=120).print(table)
assert accuracy(model, x_test, y_test) > 0.95
