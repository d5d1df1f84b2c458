"""Quantize a language model layer by layer, calibrated on a text, and maybe distill it.

python quantize.py MODEL TEXT small.gguf                              # GPTQ to Q4_K
python quantize.py MODEL TEXT small.gguf --format q3_k --embedding q6_k --distill 2
python quantize.py MODEL TEXT small.gguf --bits 3.5                   # a type for each weight, within a budget
python quantize.py MODEL small.gguf --imatrix imatrix.gguf            # llama.cpp's statistics instead of a text
python quantize.py MODEL TEXT small.safetensors --format int3 --saved half.safetensors    # resumes if it was stopped

MODEL is a folder with config.json and safetensors, or a .gguf file, packed or not. Write a .gguf file for llama.cpp,
which keeps all metadata of its source, or a .safetensors file for `eqq.load`. Measure a .gguf file with evaluate.py.
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from command import check_least, make_parser, run_program, show_size
from evaluate import chunks_of
from export import fit_to_gguf, fitting_types, metadata_of, name_of, write_gguf
from jaxtyping import Array, Float, Int
from llama import Cache, Llama, load
from rich.console import Console
from tokenization import open_text

import eqquant as eqq


METHODS = {"gptq": eqq.GPTQ(), "learned": eqq.LearnedRounding(), "mse": eqq.MSE()}
SECONDS = 60.0  # between two saves
RATE = 1e-3  # of distillation: a batch is one window of text


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


def choose_within(model: Llama, bits: float, *, gguf: bool) -> Mapping[str, Any]:
    """A format for each weight, of at most so many bits on average, by the errors of rounding."""
    offered = {"formats": [getattr(eqq.formats, name)() for name in fitting_types(model)]} if gguf else {}
    return eqq.analysis.plan_bits(model, eqq.analysis.weight_sensitivity(model, **offered), bits)


def rotate(model: Llama) -> Llama:
    """Rotates what costs nothing at run time: heads of values, and the residual stream if the head is not tied."""
    fold = eqq.transforms.llama_rotations(model.config.head_size, offset=model.config.offset)
    if model.head is None:
        fold = {key: value for key, value in fold.items() if not isinstance(value, eqq.transforms.ResidualStream)}
    return eqq.transforms.rotate(model, fold=fold, online=False)


def quantize_by_imatrix(model: Llama, imatrix: Mapping[str, Any], rules: Mapping[str, Any]) -> Llama:
    """Quantizes a float model with the least squared errors, each weighted by the mean square of its input."""
    formats = {row.path: row.format for row in eqq.plan_tree(model, rules).leaves if row.format is not None}
    squares = {path: imatrix.get(name_of(path, gguf=True)) for path in formats}
    if all(found is None for found in squares.values()):
        raise ValueError(f"`--imatrix` must be of this model. Got inputs of {next(iter(imatrix))} and others.")
    if missing := [path for path, found in squares.items() if found is None]:
        print(f"No statistics, so all inputs count alike: {', '.join(missing)}", file=sys.stderr)
    configs = {path: eqq.QuantConfig(format, eqq.MSE(squares[path])) for path, format in formats.items()}
    return eqq.quantize_tree(model, configs)


def quantize(
    model: Llama,
    windows: Int[np.ndarray, "windows length"],
    rules: Mapping[str, Any],
    method: str = "gptq",
    *,
    saved: Path | None = None,
) -> Llama:
    """Quantizes a float model layer by layer. `saved`: a file to resume from."""
    batches = [jnp.asarray(row[None]) for row in windows]
    q = model if saved is None or not saved.exists() else eqq.load(saved, model)
    wanted = {row.path: row.format for row in eqq.plan_tree(model, rules).leaves if row.format is not None}
    done = {row.path: row.format for row in eqq.summary(q).leaves if row.format is not None}
    for path, format in done.items():
        if format != wanted.get(path):
            raise ValueError(
                f"{saved} must hold the formats that are asked for. Got {format} for {path}, instead of "
                f"{wanted.get(path)}. Ask for the same, or delete it."
            )
    last = time.monotonic()

    def save(q: Llama) -> None:
        nonlocal last
        if saved is not None and time.monotonic() - last > SECONDS:
            eqq.save(saved, q)
            last = time.monotonic()

    if len(wanted) > len(done):
        q = eqq.quantize_sequentially(
            q,
            batches,
            rules,
            METHODS[method],
            apply=compute_logits,
            float_model=model,
            after_each=save,
            progress=True,
            keep_dtype="bfloat16",
        )
    if saved is not None:
        eqq.save(saved, q)
    return q


def distill(q: Llama, model: Llama, windows: Int[np.ndarray, "windows length"], passes: int) -> Llama:
    """Trains scales and norms, so that the next token is as likely as in the float model."""
    batches = [jnp.asarray(row[None]) for row in windows]
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, passes * len(batches)))
    return eqq.distill(
        q,
        model,
        batches,
        loss="kl",
        apply=compute_hidden,
        head=compute_head,
        optimizer=optimizer,
        passes=passes,
        progress=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("text", nargs="?", type=Path, help="a text file to calibrate on; not with --imatrix")
    add("out", nargs="?", type=Path, help="a .gguf file, or a .safetensors file")
    add("--format", help="of the weights (default q4_k)")
    add("--embedding", help="of the embedding and of the head (default q6_k)")
    add("--bits", type=float, help="instead of both: a format for each weight, of so many bits on average")
    add("--rotate", action="store_true", help="rotates the model first, as far as that costs no time")
    add("--imatrix", type=Path, help="an importance matrix of llama.cpp, instead of TEXT; for the method mse")
    add("--method", choices=METHODS, help="how codes are found (default gptq, with --imatrix mse)")
    add("--windows", type=int, help="how many windows of text (default 16)")
    add("--context", type=int, help="tokens of a window (default 512)")
    add("--distill", type=int, default=0, metavar="PASSES", help="trains scales and norms on the logits (default 0)")
    add("--saved", type=Path, help="a file to go on from after a stop, with the same options")
    run_program(parser, arguments, run, smoke)


def run(options: argparse.Namespace) -> None:
    if options.imatrix is not None:
        given = [
            f"`--{name}`" for name in ("windows", "context", "distill", "saved", "rotate") if getattr(options, name)
        ]
        given += ["a TEXT"] if options.out is not None else []
        given += ["`--method`"] if options.method not in (None, "mse") else []
        if given:
            raise ValueError(f"`--imatrix` takes the place of a text, for squared errors. Got {', '.join(given)} too.")
        options.text, options.out = None, options.text
    if options.model is None or options.out is None or (options.text is None and options.imatrix is None):
        raise ValueError("MODEL, TEXT and OUT must be a model, a text file and the file to write. Got fewer.")
    if options.out.suffix not in (".gguf", ".safetensors"):
        raise ValueError(f"OUT must end in .gguf or .safetensors. Got {options.out}.")
    if options.bits is not None and (options.format or options.embedding):
        raise ValueError("`--bits` chooses all formats. Got `--format` or `--embedding` too. Leave them out.")
    check_least(options, windows=1, context=1, distill=0)
    context, count = options.context or 512, options.windows or 16
    if options.distill and count < 2:
        raise ValueError("`--distill` needs two windows at least, since it chooses by some of them. Got 1.")
    console = Console(stderr=True, soft_wrap=True)
    checkpoint = eqq.io.open(options.model)
    model = eqq.dequantize_tree(load(checkpoint))
    if context > model.config.positions:
        raise ValueError(f"`--context` must be at most {model.config.positions:,}. Got {context:,}.")
    gguf = options.out.suffix == ".gguf"
    model = rotate(model) if options.rotate else model
    if options.bits is None:
        rules: Mapping[str, Any] = choose_rules(model, options.format or "q4_k", options.embedding or "q6_k")
    else:
        rules = choose_within(model, options.bits, gguf=gguf)
    if gguf:
        rules, changes = fit_to_gguf(model, rules)
        for change in changes:
            console.print(change)
    if options.imatrix is not None:
        q = quantize_by_imatrix(model, eqq.io.read_imatrix(options.imatrix), rules)
    else:
        text = open_text(checkpoint, model.config.vocabulary, options.tokenizer)
        windows = chunks_of(text, options.text.read_text(encoding="utf-8"), context, count)
        q = quantize(model, windows, rules, options.method or "gptq", saved=options.saved)
        q = distill(q, model, windows, options.distill) if options.distill else q
    if gguf:
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
        # A budget, of a rotated model, in the types that fit its rows.
        few = ["--windows", "2", "--context", "32"]
        main([*given, str(folder / "mixed.gguf"), "--bits", "4.6", "--rotate", *few])
        mixed = [row for row in eqq.io.open(folder / "mixed.gguf").rows if row.format is not None]
        assert 4.5 < 8 * sum(row.nbytes for row in mixed) / sum(math.prod(row.shape) for row in mixed) <= 4.6
        # It resumes from a model whose first layer is done, and from a finished one.
        float_model, half = load(eqq.io.open(model)), folder / "half.safetensors"
        rounded = eqq.quantize_tree(float_model, {"layers.0.*": "int3", "*": None})
        eqq.save(half, rounded)
        for out in ("small", "again"):
            main([*given, str(folder / f"{out}.safetensors"), "--format", "int3", "--saved", str(half), *few])
            q = eqq.load(folder / f"{out}.safetensors", float_model)
            first, second = (layer.mlp.down.weight for layer in q.layers[:2])
            assert (first.codes == rounded.layers[0].mlp.down.weight.codes).all() and eqq.is_quantized(q.head.weight)
            assert first.format == second.format == eqq.Int3()
        # The statistics of a text, as llama.cpp writes them.
        stats = eqq.calibrate.collect_stats(float_model, [jnp.arange(32)[None]], apply=compute_logits)
        eqq.io.write(folder / "imatrix.gguf", {name_of(p, gguf=True): s for p, s in stats.items()}, "imatrix")
        main([str(model), str(folder / "weighted.gguf"), "--imatrix", str(folder / "imatrix.gguf")])


if __name__ == "__main__":
    main()
