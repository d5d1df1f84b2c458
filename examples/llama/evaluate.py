"""Measure perplexity, and divergence from another model, as llama.cpp's `llama-perplexity`.

python evaluate.py MODEL TEXT                           # perplexity, and bits per byte
python evaluate.py MODEL TEXT --reference FLOAT_MODEL   # also the divergence of the next token
python evaluate.py MODEL TEXT --format int4 --cache int8 --activations int8

The text is cut into chunks of `--context` tokens, each starting with BOS, if there is one. Only the second half of each
is measured, so that every token has at least half a chunk before it.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from command import add_formats, check_least, make_parser, run_program
from configuration import Config
from jaxtyping import Array, Float, Int
from llama import Cache, joined, layers_are_alike, Llama, load, with_activations
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenization import open_text, Text

import eqquant as eqq


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was measured for each token.

    - `losses`: its negative log-likelihood, in nats.
    - `nbytes`: the length of all tokens together, as text.
    - `divergences`: the Kullback-Leibler divergence of the model from the reference, in nats; `None` without one.
    - `same`: whether the likeliest token is the same in both.
    - `reference_losses`: the `losses` of the reference.
    """

    losses: np.ndarray
    nbytes: int
    divergences: np.ndarray | None = None
    same: np.ndarray | None = None
    reference_losses: np.ndarray | None = None

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))

    @property
    def bits_per_byte(self) -> float:
        return float(self.losses.sum() / np.log(2) / max(self.nbytes, 1))

    def to_dict(self) -> dict[str, float]:
        """The figures, each with the standard error of its mean as `..._error`."""
        loss_error = _error(self.losses)
        found = {
            "perplexity": self.perplexity,
            "perplexity_error": self.perplexity * loss_error,
            "bits_per_byte": self.bits_per_byte,
            "bits_per_byte_error": self.bits_per_byte * loss_error / float(self.losses.mean()),
        }
        if self.divergences is not None and self.same is not None and self.reference_losses is not None:
            difference = self.losses - self.reference_losses
            ratio = float(np.exp(difference.mean()))
            found |= {
                "perplexity_over_reference": ratio,
                "perplexity_over_reference_error": ratio * _error(difference),
                "divergence": float(self.divergences.mean()),
                "divergence_error": _error(self.divergences),
                "divergence_99.9": float(np.percentile(self.divergences, 99.9)),
                "same_token": float(self.same.mean()),
                "same_token_error": _error(self.same),
            }
        return found


def _error(x: np.ndarray) -> float:
    return float(x.std(ddof=1) / np.sqrt(x.size)) if x.size > 1 else float("nan")


def chunks_of(text: Text, written: str, context: int, limit: int | None = None) -> Int[np.ndarray, "chunks context"]:
    """The tokens of a text in whole chunks. BOS, if any, replaces the first of each."""
    ids = np.asarray(text.encode(written.removesuffix("\n"), special=False), np.int32)
    if len(ids) < 2 * context:  # as llama.cpp
        raise ValueError(
            f"The text must have at least two chunks of {context:,} tokens. Got {len(ids):,} tokens. Take a longer "
            "text, or a smaller `--context`."
        )
    chunks = ids[: len(ids) // context * context].reshape(-1, context)[:limit].copy()
    if (first := text.first) is not None:
        chunks[:, 0] = first
    return chunks


@jax.jit
def _measure(logits: Float[Array, "batch tokens vocabulary"], ids: Int[Array, "batch tokens"]) -> Float[Array, "..."]:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], axis=-1)[..., 0]


@jax.jit
def _compare(
    logits: Float[Array, "batch tokens vocabulary"], reference: Float[Array, "batch tokens vocabulary"]
) -> tuple[Float[Array, "batch tokens"], Array]:
    log_p, log_q = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits)
    divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    # The divergence is not negative, but rounding errors may make it so.
    return jnp.maximum(divergence, 0), jnp.argmax(reference, axis=-1) == jnp.argmax(logits, axis=-1)


class Runner:
    """A model and its compiled function: from chunks to the logits of the second half."""

    def __init__(self, model: Llama, cache: str | None = None) -> None:
        self.config = config = model.config
        arrays, static = eqx.partition(model, eqx.is_array)
        # A list of arrays, because JAX would flatten a tree of hundreds of modules in Python at each call.
        self.arrays, treedef = jtu.tree_flatten(arrays)
        dtype = model.norm.weight.dtype

        def run(arrays: list[Array], ids: Array) -> Array:
            model = eqx.combine(jtu.tree_unflatten(treedef, arrays), static)
            batch, context = ids.shape
            empty = Cache.empty(config, batch, context, dtype, format=cache, stacked=not isinstance(model.layers, list))
            x, _ = model.hidden(ids, empty)
            return model.logits(x[:, context // 2 : -1])

        self._run = jax.jit(run)

    def __call__(self, ids: Int[np.ndarray, "batch context"]) -> Float[Array, "batch tokens vocabulary"]:
        return self._run(self.arrays, ids)


def evaluate(
    model: Llama,
    chunks: Int[np.ndarray, "chunks context"],
    text: Text,
    reference: Llama | Runner | None = None,
    *,
    cache: str | None = None,
    batch: int = 1,
    show: bool = False,
) -> Evaluation:
    """Measures how well a model predicts the second halves of chunks.

    `reference`: the model to compare with, of the same vocabulary, or its `Runner`. `cache`: the format of keys and
    values of `model`.
    """
    run = Runner(model, cache)
    run_reference = Runner(reference) if isinstance(reference, Llama) else reference
    for each in (run, run_reference):
        if each is not None:
            _check(each.config, chunks)
    if run_reference is not None and run_reference.config.vocabulary != model.config.vocabulary:
        raise ValueError(
            f"The reference must have the vocabulary of the model, {model.config.vocabulary:,} tokens. Got "
            f"{run_reference.config.vocabulary:,}."
        )
    first = chunks.shape[1] // 2
    losses, reference_losses, divergences, same, nbytes = [], [], [], [], 0
    # Whole batches, so that one program is compiled. The last one may repeat a chunk; `kept` drops it.
    starts = range(0, len(chunks), batch)
    console = Console(stderr=True)
    for start in track(starts, "chunks", console=console, disable=not show):
        rows = np.arange(start, start + batch).clip(max=len(chunks) - 1)
        kept, ids = min(batch, len(chunks) - start), chunks[rows]
        logits, following = run(ids), ids[:, first + 1 :]
        losses.append(np.asarray(_measure(logits, following))[:kept])
        if run_reference is not None:
            expected = run_reference(ids)
            reference_losses.append(np.asarray(_measure(expected, following))[:kept])
            divergence, equal = _compare(logits, expected)
            divergences.append(np.asarray(divergence)[:kept])
            same.append(np.asarray(equal)[:kept])
        nbytes += sum(_nbytes(text, row[first:]) - _nbytes(text, row[first : first + 1]) for row in ids[:kept].tolist())
    flat = lambda parts: np.concatenate(parts).reshape(-1).astype(np.float64)
    compared = () if reference is None else (flat(divergences), flat(same), flat(reference_losses))
    found = Evaluation(flat(losses), nbytes, *compared)
    if not np.isfinite(found.losses).all():
        raise ValueError("The logits must be finite. Got some that are not: the model overflows in its dtype.")
    return found


def _nbytes(text: Text, ids: Sequence[int]) -> int:
    return len(text.decode(ids).encode())


def _check(config: Config, chunks: Int[np.ndarray, "chunks context"]) -> None:
    context = chunks.shape[1]
    if not 2 < context <= config.positions:
        raise ValueError(
            f"`--context` must be from 3 to {config.positions:,} tokens, for which the model was made. Got {context:,}."
        )
    if (most := int(chunks.max(initial=0))) >= config.vocabulary:
        raise ValueError(f"Tokens must be below {config.vocabulary:,}, the vocabulary. Got {most:,}.")


def table_of(found: Evaluation) -> Table:
    figures = found.to_dict()
    table = Table("", "", "±")
    for name, value in figures.items():
        if not name.endswith("_error"):
            error = figures.get(f"{name}_error")
            table.add_row(name.replace("_", " "), f"{value:.5f}", "" if error is None else f"{error:.5f}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add_formats(parser)
    add("text", nargs="?", type=Path, help="a text file")
    add("--reference", help="another model, such as the one in float")
    add("--context", type=int, default=512, help="tokens of a chunk (default 512)")
    add("--chunks", type=int, help="how many at most")
    add("--batch", type=int, default=1, help="how many chunks at a time (default 1)")
    add("--json", action="store_true", help="prints JSON")
    run_program(parser, arguments, run, smoke)


def run(options: argparse.Namespace) -> Evaluation:
    if options.model is None or options.text is None:
        raise ValueError("MODEL and TEXT must be a model and a text file. Got fewer.")
    check_least(options, batch=1, chunks=1)
    checkpoint = eqq.io.open(options.model)
    alike = layers_are_alike(checkpoint, packed=options.format is None)
    model = load(checkpoint, options.dtype, stacked=alike)
    text = open_text(checkpoint, model.config.vocabulary, options.tokenizer)
    try:
        written = options.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{options.text} must be text in UTF-8. Got {e}.") from None
    if options.format:
        model = eqq.quantize_tree(model, options.format)
    if options.activations:
        model = with_activations(model, options.activations)
    reference = None if options.reference is None else joined(load(eqq.io.open(options.reference), options.dtype))
    chunks = chunks_of(text, written, max(options.context, 1), options.chunks)
    measures: dict[str, Any] = {"cache": options.cache, "batch": options.batch, "show": True}
    found = evaluate(joined(model), chunks, text, reference, **measures)
    console = Console()
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        console.print(table_of(found))
        console.print(
            f"{len(chunks)} chunks of {chunks.shape[1]} tokens; weights {eqq.tree_nbytes(model) / 1e6:,.1f} MB"
        )
    return found


def smoke() -> None:
    """Everything, on a tiny random model."""
    from generate import random_model

    model = random_model("tiny")
    chunks = np.arange(96, dtype=np.int32).reshape(3, 32)
    found = evaluate(model, chunks, Text(), eqq.quantize_tree(model, "int8"), cache="int8", batch=2)
    assert found.losses.size == 3 * 15 and 0 < found.to_dict()["divergence"] < 0.1
    Console().print(table_of(found))


if __name__ == "__main__":
    main()
