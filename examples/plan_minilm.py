"""A format for each weight of a sentence embedder, at several budgets of bits, against one format for all of them.

Measures sensitivities on some sentences, and compares embeddings on others. `--smoke` takes fewer of both.
Needs the weights, see `minilm.py`.
"""

# %% Imports
import argparse
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import minilm
import numpy as np
import quantize_minilm as sentences_and_scores
from jaxtyping import Array, Bool, Float, Int
from rich import box
from rich.console import Console
from rich.table import Table

import eqquant as eqq
from eqquant import analysis


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="fewer sentences, formats and budgets")
parser.add_argument("--plan", action="store_true", help="show the plan of each budget in full")
args = parser.parse_args()
measured_on, compared_on = (8, 64) if args.smoke else (64, 256)
console = Console(width=120)

# %% One format for all weights, near each budget. Those with one scale per channel take a little more than their codes.
uniform: Mapping[float, Sequence[eqq.extend.AbstractFormat | eqq.QuantConfig]] = {
    3: (eqq.QuantConfig(eqq.Int2(block_size=32), eqq.MSE()), eqq.Int2(block_size=32)),
    3.5: (eqq.QuantConfig(eqq.Int2(block_size=24), eqq.MSE()), eqq.QuantConfig(eqq.Int2(block_size=20), eqq.MSE())),
    4: (eqq.QuantConfig(eqq.NF4(block_size=None), eqq.MSE()), eqq.NF4(block_size=None)),
    4.5: (eqq.QuantConfig("nf4", eqq.MSE()), eqq.NF4(), eqq.formats.Q4_0()),
    6: (eqq.QuantConfig(eqq.NF4(block_size=16), eqq.MSE()), eqq.NF4(block_size=16)),
    8: (eqq.Int8(), eqq.FP8()),
}
# The formats offered to each weight. Float is always one more choice.
offered = [
    *(eqq.QuantConfig(eqq.Int2(block_size=size), eqq.MSE()) for size in (64, 32, 16)),
    eqq.NF4(block_size=None),
    *(eqq.NF4(block_size=size, double_quant=True) for size in (128, 64)),
    *(eqq.QuantConfig(eqq.NF4(block_size=size), eqq.MSE()) for size in (None, 64, 32, 16)),
    eqq.Int8(),
    eqq.formats.Q8_0(),
]
if args.smoke:
    # Without a search for scales, which takes longer to compile than everything else.
    uniform = {3: [eqq.Int2(block_size=32)], 4.5: [eqq.NF4()]}
    offered = [eqq.Int2(), eqq.NF4(block_size=None), eqq.NF4(double_quant=True), eqq.Int8()]

# %% Sentences: every other one is held out
sentences = sentences_and_scores.english_sentences()
spaced = sentences_and_scores.select_evenly
ids, mask = minilm.tokenize(spaced(sentences[0::2], measured_on), 32)
held_out_ids, held_out_mask = minilm.tokenize(spaced(sentences[1::2], compared_on), 32 if args.smoke else 64)
model = minilm.load_model()
reference = sentences_and_scores.embed_all(model, held_out_ids, held_out_mask)
nearest = sentences_and_scores.neighbors(reference)


# %% The effect of each weight on the similarities of all pairs of sentences
def loss(
    model: minilm.Encoder,
    batch: tuple[Int[Array, "batch length"], Bool[Array, "batch length"], Float[Array, "batch batch"]],
) -> Float[Array, ""]:
    ids, mask, similarities = batch
    embeddings = minilm.embed(model, ids, mask)
    return jnp.mean((embeddings @ embeddings.T - similarities) ** 2)


embeddings = minilm.embed(model, ids, mask)
start = time.perf_counter()
sensitivities = analysis.sensitivity(model, loss, (ids, mask, embeddings @ embeddings.T), offered)
seconds = time.perf_counter() - start
count = len(sensitivities.leaves) * len(offered)
console.print(f"{len(sensitivities.leaves)} weights in {len(offered)} formats: {count} losses in {seconds:.0f} s")


# %% Each plan beside the uniform formats
def score(format: Any) -> tuple[float, float]:
    """The mean cosine with the embeddings of the float model, and the share of the ten nearest that are the same."""
    # Dense weights of the same values run faster on CPU.
    rounded = eqq.dequantize_tree(eqq.quantize_tree(model, format))
    found = sentences_and_scores.embed_all(rounded, held_out_ids, held_out_mask)
    cosine = float(np.sum(found * reference, axis=1).mean())
    return cosine, sentences_and_scores.agreement(sentences_and_scores.neighbors(found), nearest)


def count_bits(format: eqq.extend.AbstractFormat) -> float:
    """Bits per weight with one format for all weights."""
    leaves = [leaf for leaf in eqq.plan_tree(model, format).leaves if leaf.format is not None]
    return 8 * sum(leaf.nbytes for leaf in leaves) / sum(math.prod(leaf.shape) for leaf in leaves)


def ingredients(plan: Any) -> str:
    """The shares of codes of each width, by weights."""
    total, shares = sum(math.prod(leaf.shape) for leaf in plan.leaves), {}
    for leaf in plan.leaves:
        kind = "float" if leaf.format is None else f"{leaf.format.bits}-bit"
        shares[kind] = shares.get(kind, 0) + math.prod(leaf.shape) / total
    return ", ".join(f"{kind} {share:.1%}" for kind, share in sorted(shares.items()))


table = Table(box=box.SIMPLE_HEAD, title=f"all-MiniLM-L6-v2, {compared_on} held-out sentences")
table.add_column("budget", justify="right")
table.add_column("weights", no_wrap=True)
for header in ("bits", "mean\ncosine", "same 10\nnearest"):
    table.add_column(header, justify="right")
table.add_column("codes of the mix, by weights")
for budget, formats in uniform.items():
    bits = {format: count_bits(format) for format in formats}
    # If no uniform format fits the budget, the mix gets as many bits as the smallest.
    plan = analysis.plan_bits(model, sensitivities, max(budget, min(bits.values())))
    if args.plan:
        console.print(plan)
    cosine, same = score(plan)
    table.add_row(
        f"{budget:g}", "mix", f"{plan.bits:.3f}", f"{cosine:.4f}", f"{same:.3f}", ingredients(plan), style="bold"
    )
    for format in formats:
        uniform_cosine, uniform_same = score(format)
        table.add_row("", repr(format), f"{bits[format]:.3f}", f"{uniform_cosine:.4f}", f"{uniform_same:.3f}", "")
        assert cosine > uniform_cosine and same > uniform_same, f"the mix must beat {format!r}"
    table.add_section()
console.print(table)
