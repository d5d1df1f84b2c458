"""Plans for budgets of 3 to 6 bits per weight, with and without data, against the best single format of as many bits.

    python examples/llama/train.py FOLDER && python benchmarks/budget.py --language-model FOLDER

Models: all-MiniLM-L6-v2 (see `examples/minilm.py`), the language model of `examples/llama`, and two small vision models
that it trains on scikit-learn's digits. The measure is the mean cosine between the outputs and the outputs of the float
model, on examples that no plan has seen: embeddings of sentences, logits of tokens and of images. `--smoke` takes one
small model.
"""

import argparse
import datetime
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from rich import box
from rich.console import Console
from rich.table import Table

import eqquant as eqq


sys.path[:0] = [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parents[1] / "examples" / "llama")]

BUDGETS = tuple(float(b) for b in np.arange(3, 6.1, 0.25))
HALF = {"scale_dtype": "float16"}
# Single formats, for all weights. A plan chooses from nine, of which some are here too.
SINGLE = (
    *(eqq.Int2(size, **HALF) for size in (64, 32)),
    *(eqq.Int3(size, **HALF) for size in (128, 64)),
    *(eqq.NF4(size, double_quant=True) for size in (128, 64, 32)),
    *(eqq.Int4(64, **HALF), eqq.NF4(None), eqq.NF4(), eqq.NF4(16), eqq.Int4(32), eqq.MXFP4(), eqq.NVFP4()),
    *(
        eqq.formats.Q2_K(),
        eqq.formats.Q3_K(),
        eqq.formats.Q4_0(),
        eqq.formats.Q4_1(),
        eqq.formats.Q4_K(),
        eqq.formats.IQ4_XS(),
        eqq.formats.IQ4_NL(),
    ),
    *(
        eqq.formats.Q5_0(),
        eqq.formats.Q5_1(),
        eqq.formats.Q5_K(),
        eqq.Int5(128, **HALF),
        eqq.Int5(64, **HALF),
        eqq.Int5(),
    ),
)
Rules = Mapping[str, eqq.extend.AbstractFormat | eqq.QuantConfig | None]


class BudgetCase(NamedTuple):
    """A model, the loss and the batch that sensitivities are measured with, and the cosine on other examples."""

    name: str
    model: PyTree
    loss: Callable[[PyTree, PyTree], Array]
    batch: PyTree
    score: Callable[[PyTree], float]


class Rounded:
    """A model with rounded weights. Rounds each weight to each format once."""

    def __init__(self, case: BudgetCase) -> None:
        self.case, self.values = case, {}
        self.paths = [leaf.path for leaf in eqq.plan_tree(case.model, "nf4").leaves if leaf.format is not None]

    def score(self, rules: Rules) -> float:
        model = self.case.model
        for path, format in rules.items():
            if format is None:
                continue
            if (path, format) not in self.values:
                q = eqq.quantize_tree(self.case.model, {path: format})
                self.values[path, format] = np.asarray(part_at(eqq.dequantize_tree(q), path))
            model = eqx.tree_at(lambda m, path=path: part_at(m, path), model, jnp.asarray(self.values[path, format]))
        return self.case.score(model)

    def bits(self, format: eqq.extend.AbstractFormat) -> float:
        leaves = [leaf for leaf in eqq.plan_tree(self.case.model, format).leaves if leaf.format is not None]
        return 8 * sum(leaf.nbytes for leaf in leaves) / sum(int(np.prod(leaf.shape)) for leaf in leaves)


def part_at(model: PyTree, path: str) -> Array:
    for key in path.split("."):
        model = model[int(key)] if key.isdigit() else getattr(model, key)
    return model


def mean_cosine(found: np.ndarray, wanted: np.ndarray) -> float:
    found, wanted = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (found, wanted))
    lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(wanted, axis=-1)
    return float(np.mean(np.sum(found * wanted, axis=-1) / lengths))


#
# Models
#


def sentence_embedder() -> BudgetCase:
    import minilm
    import quantize_minilm as sentences

    model, text = minilm.load_model(), sentences.english_sentences()
    ids, mask = minilm.tokenize(sentences.select_evenly(text[0::2], 48), 32)
    others = minilm.tokenize(sentences.select_evenly(text[1::2], 128), 48)
    wanted = sentences.embed_all(model, *others)
    loss = lambda model, batch: 1 - jnp.mean(jnp.sum(minilm.embed(model, *batch[:2]) * batch[2], axis=-1))
    batch = (ids, mask, minilm.embed(model, ids, mask))
    score = lambda model: mean_cosine(sentences.embed_all(model, *others), wanted)
    return BudgetCase("all-MiniLM-L6-v2", model, loss, batch, score)


def language_model(folder: Path) -> BudgetCase:
    from llama import Cache, Llama, load
    from tokenizers import Tokenizer
    from train import texts, windows

    model, tokenizer = load(eqq.io.open(folder)), Tokenizer.from_file(str(folder / "tokenizer.json"))
    seen, held_out = (windows(np.asarray(tokenizer.encode(text).ids, np.int32), 256)[:, :-1] for text in texts())

    def compute_logits(model: Llama, ids: Int[Array, "batch length"]) -> Float[Array, "batch length vocabulary"]:
        return jax.nn.log_softmax(model(ids, Cache.empty(model.config, len(ids), ids.shape[1]))[0])

    def loss(model: Llama, batch: tuple[Array, Array]) -> Float[Array, ""]:
        ids, wanted = batch
        return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - compute_logits(model, ids)), axis=-1))

    compute = eqx.filter_jit(compute_logits)
    centered = lambda x: np.asarray(x - x.mean(-1, keepdims=True))  # softmax ignores the mean
    ids, others = jnp.asarray(seen[:: len(seen) // 4][:4]), jnp.asarray(held_out[:12])
    wanted = centered(compute(model, others))
    score = lambda model: mean_cosine(centered(compute(model, others)), wanted)
    return BudgetCase("the language model", model, loss, (ids, compute(model, ids)), score)


class ConvNet(eqx.Module):
    layers: list

    def __init__(self, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 5)
        self.layers = [
            *(eqx.nn.Conv2d(1, 32, 3, padding=1, key=keys[0]), jax.nn.relu),
            *(eqx.nn.Conv2d(32, 64, 3, padding=1, key=keys[1]), jax.nn.relu, eqx.nn.MaxPool2d(2, 2)),
            *(eqx.nn.Conv2d(64, 64, 3, padding=1, key=keys[2]), jax.nn.relu, eqx.nn.MaxPool2d(2, 2)),
            *(jnp.ravel, eqx.nn.Linear(256, 128, key=keys[3]), jax.nn.relu, eqx.nn.Linear(128, 10, key=keys[4])),
        ]

    def __call__(self, x: Float[Array, "1 8 8"]) -> Float[Array, " 10"]:
        for layer in self.layers:
            x = layer(x)
        return x


class EncoderBlock(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attn: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, size: int, key: PRNGKeyArray) -> None:
        attn, up, down = jr.split(key, 3)
        self.norms = (eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size))
        self.attn = eqx.nn.MultiheadAttention(4, size, key=attn)
        self.up, self.down = eqx.nn.Linear(size, 4 * size, key=up), eqx.nn.Linear(4 * size, size, key=down)

    def __call__(self, x: Float[Array, "patches size"]) -> Float[Array, "patches size"]:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attn(y, y, y)
        return x + jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(self.norms[1](y)))))(x)


class VisionTransformer(eqx.Module):
    patch_embed: eqx.nn.Conv2d
    pos_embed: Float[Array, "patches size"]
    blocks: list[EncoderBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray, size: int = 64, depth: int = 4) -> None:
        patches, positions, head, *blocks = jr.split(key, 3 + depth)
        self.patch_embed = eqx.nn.Conv2d(1, size, 2, stride=2, key=patches)
        self.pos_embed = 0.02 * jr.normal(positions, (16, size))
        self.blocks, self.norm = [EncoderBlock(size, key) for key in blocks], eqx.nn.LayerNorm(size)
        self.head = eqx.nn.Linear(size, 10, key=head)

    def __call__(self, x: Float[Array, "1 8 8"]) -> Float[Array, " 10"]:
        x = self.patch_embed(x).reshape(len(self.pos_embed.T), -1).T + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(axis=0)))


def vision_model(name: str, make: Callable[[PRNGKeyArray], eqx.Module], steps: int = 900) -> BudgetCase:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images.reshape(-1, 1, 8, 8) / 16, jnp.float32), jnp.asarray(labels)
    order = np.random.default_rng(0).permutation(len(images))
    train, measure, compare = order[:1200], order[:64], order[1200:]
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, steps))

    @eqx.filter_jit
    def step(model: eqx.Module, state: PyTree, batch: Int[Array, " batch"]) -> tuple[eqx.Module, PyTree]:
        wrong = lambda m: optax.softmax_cross_entropy_with_integer_labels(jax.vmap(m)(images[batch]), labels[batch])
        gradients = eqx.filter_grad(lambda m: wrong(m).mean())(model)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state

    model = make(jr.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    for n in range(steps):
        model, state = step(model, state, jnp.asarray(np.random.default_rng(n).choice(train, 64)))
    compute = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    distance = lambda model, batch: jnp.mean(jnp.square(jax.vmap(model)(batch[0]) - batch[1]))
    wanted = np.asarray(compute(model, images[compare]))
    score = lambda model: mean_cosine(np.asarray(compute(model, images[compare])), wanted)
    return BudgetCase(name, model, distance, (images[measure], compute(model, images[measure])), score)


#
# The table
#


def make_table(case: BudgetCase, budgets: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """Yields the cells of each row. A star marks a plan that is worse than the best single format by more than .002."""
    rounded, analysis = Rounded(case), eqq.analysis
    single = [(rounded.bits(f), rounded.score(dict.fromkeys(rounded.paths, f)), repr(f)) for f in SINGLE]
    estimated = analysis.weight_sensitivity(case.model)
    measured = analysis.sensitivity(case.model, case.loss, case.batch)
    for budget in budgets:
        bits, cosine, name = max((row for row in single if row[0] <= budget), key=lambda row: row[1])
        compared = {"loss": case.loss, "batch": case.batch}
        plans = [analysis.plan_bits(case.model, estimated, budget)]
        plans += [analysis.plan_bits(case.model, measured, budget, **compared)]
        found = [rounded.score(plan) for plan in plans]
        cells = [f"{x:.4f}{'*' if x < cosine - 0.002 else ''}" for x in found]
        yield f"{budget:g}", f"`{name}`", f"{bits:.2f}", f"{cosine:.4f}", *cells


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    versions = f"JAX {jax.__version__}, Python {platform.python_version()}"
    return f"{named}; {versions}; {datetime.date.today()}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--language-model", type=Path, help="what examples/llama/train.py wrote")
    parser.add_argument("--smoke", action="store_true", help="one small model, and two budgets")
    options = parser.parse_args(arguments)
    cases: dict[str, Callable[[], BudgetCase]] = {
        "convolutions": lambda: vision_model("a convolutional network", ConvNet, 20 if options.smoke else 900),
        "vision": lambda: vision_model("a vision transformer", VisionTransformer),
        "sentences": sentence_embedder,
    }
    if options.language_model is not None:
        cases["language"] = lambda: language_model(options.language_model)
    console = Console(width=160)
    console.print(machine())
    for make in list(cases.values())[: 1 if options.smoke else None]:
        began, case = time.perf_counter(), make()
        table = Table(
            *("budget", "best single format", "bits", "its cosine", "plan without data", "plan with data"),
            box=box.MARKDOWN,
        )
        for row in make_table(case, BUDGETS[::8] if options.smoke else BUDGETS):
            table.add_row(*row)
        console.print(f"\n{case.name}, {eqq.tree_nbytes(case.model) // 4:,} parameters", table, sep="\n")
        console.print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
