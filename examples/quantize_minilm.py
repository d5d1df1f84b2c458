"""Prints the size and the accuracy of a sentence embedder in several formats, on sentences of Python's documentation.

Run `python examples/quantize_minilm.py`, with `--smoke` for a quick look and `--summary` for the mixed model in full.
"""

import argparse
import datetime
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import jax
import minilm
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from rich import box, print as print_table
from rich.table import Table

import eqquant as eqq


TOKENS = 64
BATCH = 32
NEIGHBORS = 10

# The loss of mean cosine, from 1, when only one group of weights is rounded to NF4:
#
#     up 0.0105   value 0.0078   down 0.0059   output 0.0033   token types 0.0013   words 0.0011   key 0.0010
#     query 0.0006   positions 0.0003
#
# The word table is half of the model and hardly matters. Value and output lose most per byte, then up, so these get
# eight bits. Token types are two rows, one of which is added to every token: in float they take only 3 kB.
MIXED = {
    "embeddings.token_type.*": None,
    "*.attention.value.*": eqq.Int8(),
    "*.attention.output.*": eqq.Int8(),
    "*.up.*": eqq.Int8(),
    "*": eqq.NF4(double_quant=True),
}
PLANS: Mapping[str, eqq.extend.AbstractFormat | Mapping[str, eqq.extend.AbstractFormat | None]] = {
    "int8 per channel": eqq.Int8(),
    "NF4": eqq.NF4(block_size=64),
    "NF4, double quant": eqq.NF4(block_size=64, double_quant=True),
    "int4": eqq.Int4(block_size=64),
    "ternary": eqq.Ternary(),
    "mixed plan": MIXED,
}
CAPTION = (
    "On CPU, a part of what float32 takes longer is no matter of quantization: under vmap, eqx.nn.Linear transposes "
    "its activations around each product, and the quantized matmul does not."
)


def english_sentences() -> list[str]:
    """The sentences of 5 to 40 words in the prose of Python's language reference, in a fixed order."""
    found = {}  # a set that keeps its order
    for _, text in sorted(topics.items()):
        for paragraph in re.split(r"\n\s*\n", text):
            lines = paragraph.strip("\n").split("\n")
            # Code and lists are indented; tables, bullets, grammar and underlined titles begin with punctuation.
            if not all(re.match(r'[A-Za-z0-9"(]', line) for line in lines):
                continue
            for sentence in re.split(r'(?<=[.!?]) (?=[A-Z"“])', " ".join(paragraph.split())):
                plain = re.fullmatch(r"[A-Z][A-Za-z0-9 ,;:'’“”\"().-]*\.", sentence)
                if plain and 5 <= len(sentence.split()) <= 40:
                    found[sentence] = None
    return list(found)


def select_evenly(sentences: Sequence[str], count: int) -> list[str]:
    return [sentences[len(sentences) * n // count] for n in range(count)]


def embed_all(
    model: minilm.Encoder, ids: Int[Array, "sentences length"], mask: Bool[Array, "sentences length"]
) -> Float[np.ndarray, "sentences hidden"]:
    batches = range(0, len(ids), BATCH)
    return np.concatenate([minilm.embed(model, ids[n : n + BATCH], mask[n : n + BATCH]) for n in batches])


def neighbors(embeddings: Float[np.ndarray, "sentences hidden"]) -> Int[np.ndarray, "sentences neighbors"]:
    """For each sentence, the others that are nearest to it by cosine."""
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -np.inf)
    return np.argsort(-similarity, axis=1)[:, :NEIGHBORS]


def agreement(a: Int[np.ndarray, "sentences neighbors"], b: Int[np.ndarray, "sentences neighbors"]) -> float:
    """The share of equal neighbors, in any order."""
    return float((a[:, :, None] == b[:, None, :]).any(axis=-1).mean())


def median_seconds(
    models: Mapping[str, minilm.Encoder],
    ids: Int[Array, "batch length"],
    mask: Bool[Array, "batch length"],
    repeats: int,
) -> dict[str, float]:
    """For each model, after compilation. Models take turns, so that other load on the machine affects all."""
    seconds = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            start = time.perf_counter()
            jax.block_until_ready(minilm.embed(model, ids, mask))
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(s)) for name, s in seconds.items()}


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    processor = platform.processor() if named is None else named[1]
    return (
        f"{processor}, {os.cpu_count()} cores, running on {jax.devices()[0].device_kind}; JAX {jax.__version__}, "
        f"Python {platform.python_version()}; {datetime.date.today()}"
    )


def main(plans: Sequence[str], *, count: int, repeats: int, summary: bool) -> None:
    print(machine())
    sentences = english_sentences()
    ids, mask = minilm.tokenize(select_evenly(sentences, count), TOKENS)
    print(
        f"{count} of {len(sentences)} sentences from Python's language reference, {mask.sum(1).mean():.1f} tokens long "
        f"on average, padded to {TOKENS}, in batches of {BATCH}"
    )

    float_model = minilm.load_model()
    models = {"float32": float_model}
    models |= {name: eqq.quantize_tree(float_model, PLANS[name]) for name in plans}
    embeddings = {name: embed_all(model, ids, mask) for name, model in models.items()}
    seconds = median_seconds(models, ids[:BATCH], mask[:BATCH], repeats)

    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, caption=CAPTION)
    table.add_column("model", no_wrap=True)
    headers = [
        "MB",
        "bits",
        "mean\ncosine",
        "worst\ncosine",
        f"same {NEIGHBORS}\nnearest",
        "ms per\nbatch",
        "beside\nfloat32",
    ]
    for header in headers:
        table.add_column(header, justify="right")
    nearest = neighbors(embeddings["float32"])
    for name, model in models.items():
        report = eqq.summary(model)
        cosine = np.sum(embeddings[name] * embeddings["float32"], axis=1)
        table.add_row(
            name,
            f"{report.nbytes / 1e6:.2f}",
            f"{report.bits:.2f}",
            f"{cosine.mean():.4f}",
            f"{cosine.min():.4f}",
            f"{agreement(neighbors(embeddings[name]), nearest):.3f}",
            f"{1e3 * seconds[name]:.0f}",
            f"{seconds[name] / seconds['float32']:.2f}x",
        )
    print_table(table)
    if summary:
        print(eqq.summary(models["mixed plan"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What quantization costs a sentence embedder.")
    parser.add_argument("--smoke", action="store_true", help="16 sentences, few repeats, and two plans")
    parser.add_argument("--summary", action="store_true", help="show every leaf of the mixed model")
    arguments = parser.parse_args()
    if arguments.smoke:
        main(["NF4", "mixed plan"], count=16, repeats=1, summary=arguments.summary)
    else:
        main(list(PLANS), count=256, repeats=15, summary=arguments.summary)
