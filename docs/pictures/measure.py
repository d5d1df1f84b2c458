"""Measures all-MiniLM-L6-v2 for the pictures, and writes `benchmarks/pictures.json`: a minute on two cores.

Run `python docs/pictures/measure.py`. `examples/minilm.py` says where the weights are.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax


ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))
import minilm
import quantize_minilm as sentences_and_scores

import eqquant as eqq


FORMATS = ("int2", "int3", "nf4", "int8")
BUDGET = 4.5


def loss(model: minilm.Encoder, batch: Any) -> jax.Array:
    ids, mask, similarities = batch
    embeddings = minilm.embed(model, ids, mask)
    return jnp.mean((embeddings @ embeddings.T - similarities) ** 2)


def sensitivities(model: minilm.Encoder) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The effect of each weight on the similarities of sentences, in each format, and the plan that follows from it."""
    sentences = sentences_and_scores.select_evenly(sentences_and_scores.english_sentences()[0::2], 32)
    ids, mask = minilm.tokenize(sentences, 32)
    embeddings = minilm.embed(model, ids, mask)
    report = eqq.analysis.sensitivity(model, loss, (ids, mask, embeddings @ embeddings.T), FORMATS)
    increases = {leaf.paths[0]: [float(f"{x - report.loss:.3e}") for x in leaf.losses] for leaf in report.leaves}
    plan = [
        {"path": leaf.paths[0], "format": repr(leaf.format), "bits": 8 * leaf.nbytes / math.prod(leaf.shape)}
        for leaf in eqq.analysis.plan_bits(model, report, target_bits=BUDGET).leaves
    ]
    formats = [repr(format) for format in report.leaves[0].formats]
    return {"formats": formats, "increases": increases}, plan


def memory(model: minilm.Encoder) -> dict[str, dict[str, int]]:
    """The bytes that each way to train holds between steps, and its gradients: the last two from shapes."""
    optim, nf4 = optax.adam(1e-3), eqq.NF4(double_quant=True)
    quantized = eqq.quantize_tree(model, nf4)
    adapted = eqq.loraify(quantized, rank=8, key=jr.key(0))
    ways = {
        "float32": (model, optim),
        "float32, 8-bit Adam": (model, eqq.quantize_state(optim)),
        "QAT": (quantized, eqq.float_masters(optim)),
        "QAT, 8-bit Adam": (quantized, eqq.float_masters(eqq.quantize_state(optim))),
        "QLoRA": (adapted, eqq.train_only(optim, eqq.trainable_mask(adapted))),
    }
    ids, mask = minilm.tokenize(["A sentence."], 8)
    found = {}
    for name, (candidate, way) in ways.items():
        gradients = eqx.filter_eval_shape(eqq.filter_grad(lambda m: jnp.sum(minilm.embed(m, ids, mask))), candidate)
        state = eqx.filter_eval_shape(way.init, candidate)
        found[name] = {
            "weights": eqq.tree_nbytes(candidate),
            "gradients": eqq.tree_nbytes(gradients),
            "optimizer state": eqq.tree_nbytes(state),
        }
    return found


if __name__ == "__main__":
    model = minilm.load_model()
    weight = model.layers[0].up.weight
    found, plan = sensitivities(model)
    measured = {
        "machine": sentences_and_scores.machine(),
        "block": [round(float(x), 6) for x in np.asarray(weight[0, :16])],
        "sensitivity": found,
        "budget": BUDGET,
        "plan": plan,
        "memory": memory(model),
    }
    path = ROOT / "benchmarks" / "pictures.json"
    path.write_text(json.dumps(measured, indent=1) + "\n")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
