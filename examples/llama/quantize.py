"""Quantize a language model layer by layer, calibrated on a text, and maybe distill it.

python quantize.py MODEL TEXT small.gguf                              # GPTQ to Q4_K
python quantize.py MODEL TEXT small.gguf --format q3_k --embedding q6_k --distill 2
python quantize.py MODEL TEXT small.safetensors --format int3 --saved half.safetensors    # resumes if it was stopped

MODEL is a folder with config.json and safetensors, or a .gguf file, packed or not. Write a .gguf file for llama.cpp,
which keeps all metadata of its source, or a .safetensors file for `eqq.load`. Measure a .gguf file with evaluate.py.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from command import check_least, make_parser, run_program, show_size
from evaluate import chunks_of
from export import fit_to_gguf, metadata_of, write_gguf
from jaxtyping import Array, Float, Int
from llama import Cache, Llama, load
from rich.console import Console
from tokenization import open_text

import eqquant as eqq


METHODS = {"gptq": eqq.GPTQ(), "learned": eqq.LearnedRounding(), "mse": eqq.MSE()}
SECONDS = 60.0  # between two saves


def compute_hidden(model: Llama, ids: Int[Array, "batch length"]) -> Float[Array, "batch length hidden"]:
    batch, length = ids.shape
    return model.hidden(ids, Cache.empty(model.config, batch, length, model.norm.weight.dtype))[0]


def compute_logits(model: Llama, ids: Int[Array, "batch length"]) -> Float[Array, "batch length vocabulary"]:
    return model.logits(compute_hidden(model, ids))


def compute_head(model: Llama, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens vocabulary"]:
    return model.logits(x[None])[0]


def choose_rules(model: Llama, format: str, embedding: str) -> dict[str, str]:
    """Formats of the embedding and of the head, and of all other weights."""
    heads = {} if model.head is None else {"head.*": embedding}
    return {"embedding.*": embedding, **heads, "*": format}


def quantize(
    model: Llama,
    windows: Int[np.ndarray, "windows length"],
    rules: Mapping[str, Any],
    method: str = "gptq",
    *,
    distill: int = 0,
    saved: Path | None = None,
    show: bool = True,
) -> Llama:
    """Quantizes a float model layer by layer.

    `distill`: passes over the windows. `saved`: a file to resume from.
    """
    batches = [jnp.asarray(row[None]) for row in windows]
    q = model if saved is None or not saved.exists() else eqq.load(saved, model)
    wanted = [row.path for row in eqq.plan_tree(model, rules).leaves if row.format is not None]
    last = time.monotonic()

    def save(q: Llama) -> None:
        nonlocal last
        if saved is not None and time.monotonic() - last > SECONDS:
            eqq.save(saved, q)
            last = time.monotonic()

    if len(wanted) > sum(row.format is not None for row in eqq.summary(q).leaves):
        q = eqq.quantize_sequentially(
            q,
            batches,
            rules,
            METHODS[method],
            apply=compute_logits,
            float_model=model,
            after_each=save,
            progress=show,
            keep_dtype="bfloat16",
        )
    if saved is not None:
        eqq.save(saved, q)
    if distill:
        q = eqq.distill(
            q, model, batches, loss="kl", apply=compute_hidden, head=compute_head, passes=distill, progress=show
        )
    return q


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("text", nargs="?", type=Path, help="a text file to calibrate on")
    add("out", nargs="?", type=Path, help="a .gguf file, or a .safetensors file")
    add("--format", default="q4_k", help="of the weights (default q4_k)")
    add("--embedding", default="q6_k", help="of the embedding and of the head (default q6_k)")
    add("--method", default="gptq", choices=METHODS, help="how codes are found (default gptq)")
    add("--windows", type=int, default=16, help="how many windows of text (default 16)")
    add("--context", type=int, default=512, help="tokens of a window (default 512)")
    add("--distill", type=int, default=0, metavar="PASSES", help="trains scales and norms on the logits (default 0)")
    add("--saved", type=Path, help="a file that holds the model while it is quantized, to go on from")
    run_program(parser, arguments, run, smoke)


def run(options: argparse.Namespace) -> None:
    if options.model is None or options.text is None or options.out is None:
        raise ValueError("MODEL, TEXT and OUT must be a model, a text file and the file to write. Got fewer.")
    if options.out.suffix not in (".gguf", ".safetensors"):
        raise ValueError(f"OUT must end in .gguf or .safetensors. Got {options.out}.")
    check_least(options, windows=1, context=1, distill=0)
    if options.distill and options.windows < 2:
        raise ValueError("`--distill` needs two windows at least, since it chooses by some of them. Got 1.")
    console = Console(stderr=True, soft_wrap=True)
    checkpoint = eqq.io.open(options.model)
    model = eqq.dequantize_tree(load(checkpoint))
    text = open_text(checkpoint, model.config.vocabulary, options.tokenizer)
    windows = chunks_of(text, options.text.read_text(encoding="utf-8"), options.context, options.windows)
    rules = choose_rules(model, options.format, options.embedding)
    if options.out.suffix == ".gguf":
        rules, changes = fit_to_gguf(model, rules)
        for change in changes:
            console.print(change)
    q = quantize(model, windows, rules, options.method, distill=options.distill, saved=options.saved)
    if options.out.suffix == ".gguf":
        write_gguf(options.out, q, metadata=metadata_of(checkpoint))
    else:
        eqq.save(options.out, q)
    report = eqq.summary(q)
    console.print(f"{options.out}: {show_size(report.nbytes)}, {report.bits:.2f} bits for each weight")


def smoke() -> None:
    """Everything, on a tiny random model."""
    import tempfile

    from export import write_tiny_gguf

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, text = write_tiny_gguf(folder / "model.gguf"), folder / "text.txt"
        text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
        given = [str(model), str(text)]
        main([*given, str(folder / "small.gguf"), "--windows", "3", "--context", "32", "--distill", "1"])
        small = eqq.io.open(folder / "small.gguf")
        source = eqq.io.open(model)
        assert {key for key in source.metadata} - {key for key in small.metadata} <= {"general.file_type"}
        # It resumes from a model whose first layer is done, and from a finished one.
        float_model, half = load(eqq.io.open(model)), folder / "half.safetensors"
        eqq.save(half, eqq.quantize_tree(float_model, {"layers.0.*": "int2", "*": None}))
        for out in ("small", "again"):
            saved = ["--format", "int3", "--saved", str(half), "--windows", "2", "--context", "32"]
            main([*given, str(folder / f"{out}.safetensors"), *saved])
            q = eqq.load(folder / f"{out}.safetensors", float_model)
            formats = [q.layers[n].mlp.down.weight.format for n in range(2)]
            assert formats == [eqq.Int2(), eqq.Int3()] and eqq.is_quantized(q.head.weight)


if __name__ == "__main__":
    main()
