"""Quantization-aware training on scikit-learn's digits: a dense and a convolutional network, from eight bits to one.

Trains each network in float, quantizes it without further training, and then trains it further while quantized. The
table shows the accuracy that the first loses and the second wins back, and the bytes. More training helps in float as
well: the rows without quantization show how much. The end shows the time of a step, and the other way to do the same.
"""

# %% Imports
import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqquant as eqq


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="one seed, fewer steps, and two formats")
args = parser.parse_args()
seeds, steps, batch_size, rounds = (1, 250, 64, 5) if args.smoke else (3, 600, 64, 15)
formats = ("int4", "ternary") if args.smoke else ("int8", "int4", "ternary", "binary")

# %% Data: 1797 images of 8 x 8 pixels
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=0.3, random_state=0, stratify=labels)


# %% The networks: every weight will be quantized, also in the first and the last layer
def dense(key: PRNGKeyArray) -> eqx.nn.Sequential:
    keys = jr.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(64, 64, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(64, 64, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(64, 10, key=keys[2]),
        ]
    )


def convolutional(key: PRNGKeyArray) -> eqx.nn.Sequential:
    keys = jr.split(key, 4)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(16, 32, 3, padding=1, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(32, 32, 3, padding=1, key=keys[2]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(128, 10, key=keys[3]),
        ]
    )


# %% One recipe, for float and for every format. Its learning rate was chosen on a part of the training images.
optim = optax.adam(optax.cosine_decay_schedule(4e-3, steps))


def loss(model: eqx.nn.Sequential, x: Float[Array, "batch 1 8 8"], y: Int[Array, " batch"]) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


@eqx.filter_jit
def accuracy(model: eqx.nn.Sequential, x: Float[Array, "batch 1 8 8"], y: Int[Array, " batch"]) -> Float[Array, ""]:
    return jnp.mean(jnp.argmax(jax.vmap(model)(x), axis=-1) == y)


# %% Training, in float
@eqx.filter_jit
def step(
    model: eqx.nn.Sequential, state: PyTree, x: Float[Array, "batch 1 8 8"], y: Int[Array, " batch"]
) -> tuple[eqx.nn.Sequential, PyTree]:
    grads = eqx.filter_grad(loss)(model, x, y)
    updates, state = optim.update(grads, state)
    return eqx.apply_updates(model, updates), state


# %% Training, quantized: the same, but for two functions and a wrapper around the optimizer
qat_optim = eqq.float_masters(optim)
traces = Counter()


@eqx.filter_jit
def qat_step(
    model: eqx.nn.Sequential, state: PyTree, x: Float[Array, "batch 1 8 8"], y: Int[Array, " batch"]
) -> tuple[eqx.nn.Sequential, PyTree]:
    traces["qat_step"] += 1  # runs when the step is traced, to be compiled, and not when it runs
    grads = eqq.filter_grad(loss)(model, x, y)
    updates, state = qat_optim.update(grads, state, model)
    return eqq.apply_updates(model, updates), state


def fit(
    step: Callable[..., tuple[eqx.nn.Sequential, PyTree]], model: eqx.nn.Sequential, state: PyTree, key: PRNGKeyArray
) -> tuple[eqx.nn.Sequential, PyTree]:
    for rows in np.asarray(jr.randint(key, (steps, batch_size), 0, len(x_train))):
        model, state = step(model, state, x_train[rows], y_train[rows])
    return model, state


# %% Every network, format and seed
def has_drifted(model: eqx.nn.Sequential, state: PyTree, format: str) -> bool:
    """Whether the model is anything but its masters, quantized: bit for bit."""
    masters = eqx.combine(state.masters, model, is_leaf=eqq.is_quantized)
    return not eqx.tree_equal(eqq.quantize_tree(masters, format), model)


def spread(accuracies: Sequence[float]) -> str:
    return f"{100 * np.mean(accuracies):.2f} ({100 * min(accuracies):.1f} .. {100 * max(accuracies):.1f})"


def seconds(step: Callable[..., tuple[eqx.nn.Sequential, PyTree]], model: eqx.nn.Sequential, state: PyTree) -> float:
    """Of `timed` steps."""
    x, y = x_train[:batch_size], y_train[:batch_size]
    start = time.perf_counter()
    for _ in range(timed):
        model, state = step(model, state, x, y)
    jax.block_until_ready(jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    return time.perf_counter() - start


timed = 20  # steps at a time, when they are timed
test = lambda model: float(accuracy(model, x_test, y_test))
results = {}  # accuracies, by network and format
trained = {}  # model and optimizer state of the last seed, by network and format
title = f"Digits: test accuracy in percent, mean over seeds (worst .. best), number of seeds: {seeds}"
table = Table("network", "weights", "float", "post-training", "QAT", "bytes", "of float32", title=title)
costs = Table("network", "weights", "steps/s", "of float", "compiles", "drift", title="Training: steps and their cost")
for name, make in {"dense": dense, "convolutional": convolutional}.items():
    models, before = [], []
    for seed in range(seeds):
        model = make(jr.key(seed))
        model, _ = fit(step, model, optim.init(eqx.filter(model, eqx.is_inexact_array)), jr.key(100 + seed))
        models.append(model)
        before.append(test(model))

    # The control, in the row of float32 and the column of QAT: the same training, without quantization.
    nbytes, after = eqq.tree_nbytes(models[0]), []
    for seed, model in enumerate(models):
        init = optim.init(eqx.filter(model, eqx.is_inexact_array))
        model, state = fit(step, model, init, jr.key(200 + seed))
        after.append(test(model))
    table.add_row(name, "float32", spread(before), "", spread(after), f"{nbytes:,}", "100.0%")
    results[name, "float32"], trained[name, "float32"] = (before, before, after), (step, model, state)

    compiles, drift = {}, {}
    for format in formats:
        traced = traces["qat_step"]
        post, after, drift[format] = [], [], False
        for seed, model in enumerate(models):
            qmodel = eqq.quantize_tree(model, format)
            post.append(test(qmodel))
            # The masters start from the float model, not from its rounded values. Only `init` reads them, so
            # `qat_optim`, which has none, makes the steps, and is compiled once for all seeds.
            init = eqq.float_masters(optim, masters=model).init(qmodel)
            qmodel, state = fit(qat_step, qmodel, init, jr.key(200 + seed))
            after.append(test(qmodel))
            drift[format] |= has_drifted(qmodel, state, format)
        share = eqq.tree_nbytes(qmodel) / nbytes
        table.add_row("", format, "", spread(post), spread(after), f"{eqq.tree_nbytes(qmodel):,}", f"{share:.1%}")
        results[name, format], trained[name, format] = (before, post, after), (qat_step, qmodel, state)
        compiles[format] = traces["qat_step"] - traced

    # In turns, so that other work on the machine slows all of them alike.
    clock = {format: [] for format in ("float32", *formats)}
    for _ in range(rounds):
        for format in clock:
            clock[format].append(seconds(*trained[name, format]))
    for format, times in clock.items():
        ratio = np.median(np.divide(clock["float32"], times))
        checks = ("", "") if format == "float32" else (str(compiles[format]), "yes" if drift[format] else "none")
        costs.add_row(name, format, f"{timed / np.median(times):.0f}", f"{ratio:.2f}", *checks)
    assert set(compiles.values()) == {1}
    assert not any(drift.values())
Console(width=120).print(table, costs)

# %% The other way: simulate, train like a float model, and finalize. Here, the last of the float models.
simulated = eqq.quantize_tree(models[-1], "ternary", simulate=True)
simulated, _ = fit(step, simulated, optim.init(eqx.filter(simulated, eqx.is_inexact_array)), jr.key(200 + seeds - 1))
final = eqq.finalize(simulated)
_, qmodel, _ = trained["convolutional", "ternary"]
print(f"convolutional, ternary, the last seed: {test(final):.2%} simulated, {test(qmodel):.2%} with float masters")
print(f"the two are the same, bit for bit: {eqx.tree_equal(final, qmodel)}")

# %% Checks
means = {run: tuple(np.mean(accuracies) for accuracies in columns) for run, columns in results.items()}
for (name, format), (before, post, after) in means.items():
    assert before > (0.9 if args.smoke else 0.96)
    if format in ("int8", "int4"):
        assert after > before - (0.02 if args.smoke else 0.005)
    elif format in ("ternary", "binary"):
        assert after > post + 0.03
assert traces["qat_step"] == 2 * len(formats)  # once for each network and format: all seeds and all timing included
assert test(final) == test(simulated)  # finalizing changes no value
assert eqq.tree_nbytes(final) == eqq.tree_nbytes(qmodel)
assert abs(test(final) - test(qmodel)) < 0.02
