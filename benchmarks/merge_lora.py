"""What is left of a QLoRA run after `merge_lora`: digits, upside down, for a model that learned them upright.

`python benchmarks/merge_lora.py` prints the loss on test images with factors and after each merge, for three runs.
"""

import argparse
import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from sklearn.datasets import load_digits

import eqquant as eqq


RUNS = ((3e-4, 30), (1e-3, 60), (1e-3, 300))  # the learning rate, and the steps
Images = Float[Array, "images 64"]
Labels = Int[Array, " images"]


def cross_entropy(model: eqx.nn.MLP, x: Images, y: Labels) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


def train(
    model: eqx.nn.MLP, x: Images, y: Labels, optimizer: optax.GradientTransformation, steps: int, grad: Callable
) -> eqx.nn.MLP:
    @eqx.filter_jit
    def step(model, state):
        gradient = grad(cross_entropy)(model, x, y)
        updates, state = optimizer.update(gradient, state, model)
        return eqq.apply_updates(model, updates), state

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array) if grad is eqx.filter_grad else model)
    for _ in range(steps):
        model, state = step(model, state)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of merges that lose what the factors learned: they are the point
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    x, y = jnp.asarray(digits.data[order] / 16, jnp.float32), jnp.asarray(digits.target[order])
    turned = x.reshape(-1, 8, 8)[:, ::-1].reshape(-1, 64)
    print("| learning rate, steps | seed | base | factors | merged | merged, MSE | merged, GPTQ | distilled |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for rate, steps in RUNS:
        for seed in range(args.seeds):
            model = eqx.nn.MLP(64, 10, 128, 2, key=jr.key(seed))
            model = train(model, x[:1400], y[:1400], optax.adam(3e-3), 300, eqx.filter_grad)
            base = eqq.quantize_tree(model, "nf4")
            adapted = eqq.loraify(base, 4, key=jr.key(9))
            optimizer = eqq.train_only(optax.adam(rate), eqq.trainable_mask(adapted))
            adapted = train(adapted, turned[:1400], y[:1400], optimizer, steps, eqq.filter_grad)
            dense = eqq.merge_lora(adapted, dense=True)
            batches = [turned[start : start + 200] for start in range(0, 1400, 200)]
            stats = eqq.calibrate.collect_stats(dense, batches, gram=True)
            merged = [eqq.merge_lora(adapted, method=method) for method in (None, eqq.MSE(), eqq.GPTQ(stats))]
            models = (base, adapted, *merged, eqq.distill(merged[-1], dense, batches, progress=False))
            losses = " | ".join(f"{cross_entropy(m, turned[1400:], y[1400:]):.3f}" for m in models)
            print(f"| {rate:g}, {steps} | {seed} | {losses} |", flush=True)


if __name__ == "__main__":
    main()
