"""What formats, methods, quantized activations and caches do to a language model: bits per byte, divergence, speed.

    python examples/llama/train.py FOLDER && python benchmarks/language_model.py FOLDER
    python benchmarks/language_model.py --random 300m  # random weights, and the time per token alone
    python benchmarks/language_model.py model.gguf     # the same for a file's weights
    python benchmarks/language_model.py model.gguf --contexts 256 2048 8192    # by the format of the cache

The text is the part of Python's documentation that the model did not see. Divergence and agreement compare with the
float model: the Kullback-Leibler divergence of the next token in nats, and how often the likeliest token is the same.
`--smoke` takes little text; `--only` names formats, `--methods` methods, of which `"GPTQ, distilled"` trains scales for
one pass over the text that the model saw; `--llama-bench` is the program of llama.cpp to time beside.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int
from rich import box
from rich.console import Console
from rich.table import Table
from timing import time_in_turns
from tokenizers import models, Tokenizer

import eqquant as eqq


sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama"))
from export import write_gguf
from generate import Generator, RANDOM, random_model, Sampling, State
from llama import Cache, joined, Llama, load, with_activations
from train import texts, windows


FORMATS = {
    "int8": eqq.Int8(64),
    "fp8": eqq.FP8(),
    "int6": eqq.Int6(64),
    "q6_k": eqq.formats.Q6_K(),
    "int5": eqq.Int5(64),
    "q5_k": eqq.formats.Q5_K(),
    "nf4": eqq.NF4(),
    "int4": eqq.Int4(64),
    "int4 affine": eqq.Int4(64, symmetric=False),
    "q4_0": eqq.formats.Q4_0(),
    "q4_k": eqq.formats.Q4_K(),
    "mxfp4": eqq.MXFP4(),
    "int3": eqq.Int3(64),
    "q3_k": eqq.formats.Q3_K(),
    "int2": eqq.Int2(32),
    "q2_k": eqq.formats.Q2_K(),
    "trellis2": eqq.formats.Trellis(2),
}
AFFINE = eqq.Int4(32, symmetric=False)
CACHES: dict[str, dict[str, Any]] = {
    "float": {"format": None},
    "int8": {"format": "int8"},
    "fp8": {"format": "fp8"},
    "int4": {"format": "int4", "rotate": False},
    "int4, rotated": {"format": "int4", "rotate": True},
    "int3, rotated": {"format": "int3", "rotate": True},
    "int2, rotated": {"format": "int2", "rotate": True},
    "iq4_nl, rotated": {"format": "iq4_nl", "rotate": True},
    "int4, keys per channel": {"format": "int4", "per_channel": True},
    "nf4, keys per channel": {"format": "nf4", "per_channel": True},
    "int4 with zero points, keys per channel": {"format": AFFINE, "per_channel": True},
    "keys as before, values int8": {"format": AFFINE, "values": "int8", "per_channel": True},
}
# Formats of weights, and of activations, quantized dynamically.
ACTIVATIONS = {
    "int8": ("int8",),
    "fp8": ("fp8",),
    "mxfp8": ("mxfp8",),
    "int4": ("int8", "fp8", "int4"),
    "q4_0": ("int8",),
    "mxfp4": ("mxfp8",),
    "nvfp4": ("nvfp4",),
    "int2": ("int8",),
}
METHODS: dict[str, eqq.extend.AbstractMethod | None] = {
    "rounding": None,
    "MSE": eqq.MSE(),
    "HQQ": eqq.HQQ(),
    "GPTQ": eqq.GPTQ(),  # layer by layer
    "GPTQ at once": eqq.GPTQ(),
    "GPTQ, distilled": eqq.GPTQ(),
}
USUAL = ["rounding", "MSE", "HQQ", "GPTQ"]
CONTEXT = 256


class Measured(NamedTuple):
    """Of one model, on the text held out."""

    bits_per_token: float
    bits_per_byte: float
    divergence: float
    agreement: float


def compute_logits(
    model: Llama, ids: Int[Array, "batch length"], **cache: Any
) -> Float[Array, "batch length vocabulary"]:
    empty = Cache.empty(model.config, len(ids), ids.shape[1], **cache)
    return jax.nn.log_softmax(model(ids, empty)[0])


def compute_divergence(logits: Float[Array, "*shape"], expected: Float[Array, "*shape"]) -> Float[Array, ""]:
    return jnp.mean(jnp.sum(jnp.exp(expected) * (expected - logits), axis=-1))


class Bench:
    """The float model, the text, and the logits of the model."""

    def __init__(self, folder: Path, count: int) -> None:
        self.model = load(eqq.io.open(folder))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        seen, held_out = (np.asarray(self.tokenizer.encode(text).ids, np.int32) for text in texts())
        self.seen = [jnp.asarray(x[None, :-1]) for x in windows(seen, CONTEXT)]
        self.calibration = self.seen[:: max(1, 400 // count)][:count]
        inside = windows(held_out, CONTEXT)[:count]
        self.text = jnp.asarray(inside)
        self.nbytes = len(self.tokenizer.decode(inside[:, 1:].reshape(-1).tolist()).encode())
        self.expected = self._logits(self.model)

    def _logits(self, model: Llama, **cache: Any) -> Array:
        run = eqx.filter_jit(lambda model, ids: compute_logits(model, ids, **cache))
        return jnp.concatenate([run(model, row[None, :-1]) for row in self.text])

    def measure(self, model: Llama, **cache: Any) -> Measured:
        logits = self._logits(model, **cache)
        told = jnp.take_along_axis(logits, self.text[:, 1:, None], axis=-1)
        bits = -float(told.sum()) / np.log(2)
        divergence = compute_divergence(logits, self.expected)
        same = jnp.argmax(self.expected, -1) == jnp.argmax(logits, -1)
        return Measured(bits / told.size, bits / self.nbytes, float(divergence), float(same.mean()))

    def quantize(self, format: eqq.extend.AbstractFormat, method: str) -> Llama:
        """Models for a trellis are rotated first."""
        model = eqq.transforms.rotate(self.model) if isinstance(format, eqq.formats.Trellis) else self.model
        if method == "GPTQ at once":
            stats = eqq.calibrate.collect_stats(model, self.calibration, apply=compute_logits, gram=True)
            return eqq.quantize_tree(model, format, method=eqq.GPTQ(stats))
        if not method.startswith("GPTQ"):
            return eqq.quantize_tree(model, format, method=METHODS[method])
        q = eqq.quantize_sequentially(model, self.calibration, format, METHODS[method], apply=compute_logits)
        if method == "GPTQ":
            return q
        training = [x for n, x in enumerate(self.seen) if n % 16]
        return eqq.distill(
            q, model, training, held_out=self.seen[::16], apply=compute_logits, loss=compute_divergence, passes=1
        )


def make_row(found: Measured) -> tuple[str, ...]:
    return (
        f"{found.bits_per_byte:.4f}",
        f"{found.bits_per_token:.4f}",
        f"{found.divergence:.2e}",
        f"{found.agreement:.1%}",
    )


_COLUMNS = ("bits/byte", "bits/token", "KL", "same token")


def formats_table(bench: Bench, names: Sequence[str], methods: Sequence[str], console: Console) -> None:
    table = Table("format", "bits", "method", *_COLUMNS, box=box.MARKDOWN)
    table.add_row("float32", "32", "", *make_row(bench.measure(bench.model)))
    for name in names:
        for method in methods:
            began = time.perf_counter()
            try:
                model = bench.quantize(FORMATS[name], method)
            except ValueError as e:  # a method may not take a format, and says so
                print(f"{name}, {method}: {e}", file=sys.stderr)
                continue
            bits = 8 * eqq.tree_nbytes(model) / (eqq.tree_nbytes(bench.model) / 4)
            row = (name, f"{bits:.2f}", method, *make_row(bench.measure(model)))
            table.add_row(*row)
            print(*row, f"{time.perf_counter() - began:.0f} s", sep=" | ", file=sys.stderr, flush=True)
    console.print(table)


def activations_table(bench: Bench, pairs: Mapping[str, Sequence[str]], console: Console) -> None:
    """Quantized and float activations, each with a float and an int8 cache."""
    table = Table("weights", "activations", "cache", *_COLUMNS, box=box.MARKDOWN)
    for weights, kinds in pairs.items():
        for kind in (None, *kinds):
            model = eqq.quantize_tree(bench.model, weights, activations=kind)
            for cache in ("float", "int8"):
                row = (weights, kind or "float32", cache, *make_row(bench.measure(model, **CACHES[cache])))
                table.add_row(*row)
                print(*row, sep=" | ", file=sys.stderr, flush=True)
    console.print(table)


def caches_table(bench: Bench, console: Console) -> None:
    table = Table("weights", "cache", "bytes per token", *_COLUMNS, box=box.MARKDOWN)
    weights = {"float32": None, "int8": FORMATS["int8"], "int4": FORMATS["int4"]}
    for name, format in weights.items():
        model = bench.model if format is None else eqq.quantize_tree(bench.model, format)
        for kind, cache in CACHES.items():
            empty = eqx.filter_eval_shape(Cache.empty, model.config, 1, 4096, **cache)
            held = [x for layer in empty.layers for x in (layer.keys, layer.values)]
            per_token = sum(eqq.tree_nbytes(x) for x in held) / 4096
            row = (name, kind, f"{per_token:,.0f}", *make_row(bench.measure(model, **cache)))
            table.add_row(*row)
            print(*row, sep=" | ", file=sys.stderr, flush=True)
    console.print(table)


def time_tokens(generator: Generator, state: State, calls: int = 3) -> tuple[State, float]:
    """Returns the state after some calls, and the milliseconds per token.

    Each call but the first starts before the tokens of the last are read, as in `Generator.__call__`.
    """
    jax.block_until_ready(state.tokens)
    began = time.perf_counter()
    for _ in range(calls):
        new, state = state.tokens, generator.step(state)
        jax.block_until_ready(new)
    jax.block_until_ready(state.tokens)
    return state, 1e3 * (time.perf_counter() - began) / (calls * generator.steps)


def milliseconds(model: Llama, cache: str | None = None, turns: int = 8) -> float:
    """The median, over turns, of the milliseconds per token, one text."""
    generator = Generator(joined(model), CONTEXT, Sampling(), cache)
    state, times = generator.step(generator.start([[1, 2, 3]], 0)), []
    for _ in range(turns):
        state, ms = time_tokens(generator, state)
        times.append(ms)
    return float(np.median(times))


def speed_table(bench: Bench, llama_bench: str | None, console: Console) -> None:
    table = Table("weights", "cache", "MB", "ms per token", "llama.cpp", box=box.MARKDOWN)
    for name in ("float32", "q8_0", "q4_0", "q4_k", "nf4"):
        model = bench.model if name == "float32" else eqq.quantize_tree(bench.model, name)
        theirs = ""
        if llama_bench is not None and name != "nf4":
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.gguf"
                write_gguf(path, model, bench.tokenizer)
                theirs = f"{_llama_bench(llama_bench, path, 64):.3f}"
        size = f"{eqq.tree_nbytes(model) / 1e6:.2f}"
        table.add_row(name, "float", size, f"{milliseconds(model):.3f}", theirs)
        table.add_row(name, "int8", size, f"{milliseconds(model, 'int8'):.3f}", "")
    console.print(table)


def _llama_bench(program: str, path: Path, tokens: int, prompt: int = 0, *more: str) -> float:
    """Milliseconds of a token: of new ones, or of a prompt."""
    sizes = ["-p", str(prompt), "-n", str(tokens)]
    command = [program, "-m", str(path), *sizes, "-r", "3", "-t", "2", "-o", "csv", *more]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names, values = (line.replace('"', "").split(",") for line in lines[-2:])
    return 1e3 / float(values[names.index("avg_ts")])


_BY_CODES = " x int8"  # as llama.cpp multiplies: activations are quantized to eight bits
_OF_CODES = {f"{kind}{_BY_CODES}": "int8" for kind in ("int4", "q4_0", "int8")}


def random_models(name: str, path: Path | None) -> Iterator[tuple[str, Llama]]:
    """Random weights in several formats. Writes a file in Q4_0."""
    model = random_model(name)
    for kind in ("float32", "bfloat16", "nf4", "int4", "q4_0", "int8", *_OF_CODES):
        if kind in ("float32", "bfloat16"):
            used = model if kind == "float32" else random_model(name, "bfloat16")
        else:
            used = eqq.quantize_tree(model, kind.removesuffix(_BY_CODES), activations=_OF_CODES.get(kind))
        if kind == "q4_0" and path is not None:
            write_gguf(path, used, _tokenizer(model.config.vocabulary))
        yield kind, used


def models_of_file(path: Path) -> Iterator[tuple[str, Llama]]:
    """The weights of a file: in float32, packed as they are, and with quantized activations."""
    model = load(eqq.io.open(path))
    yield "float32", eqq.dequantize_tree(model)
    yield "packed", model
    yield f"packed{_BY_CODES}", with_activations(model, "int8")


def tokens_table(
    models: Iterable[tuple[str, Llama]],
    path: Path | None,
    context: int,
    llama_bench: str | None,
    rounds: int,
    console: Console,
) -> None:
    """The time of a token of some models, the first of them in float32, and of llama.cpp with a file.

    Models take turns of 16 tokens, of which the last 12 are timed, and llama.cpp in between.
    """
    generators, sizes = {}, {}
    for kind, model in models:
        used = joined(model)
        sizes[kind] = eqq.tree_nbytes(used)
        generators[kind] = Generator(used, context, Sampling())
        del model, used
    states = {kind: generator.start([[1, 2, 3]], 0) for kind, generator in generators.items()}
    times: dict[str, list[float]] = {kind: [] for kind in generators}
    theirs = []
    for n in range(rounds + 1):
        # In another order each round, so that no variant always follows the most demanding one.
        for kind in np.random.default_rng(n).permutation(list(generators)):
            states[kind] = generators[kind].step(states[kind])  # compiles, or finds a cold cache
            states[kind], ms = time_tokens(generators[kind], states[kind])
            if n > 0:
                times[kind].append(ms)
        if llama_bench is not None and path is not None and n % max(1, rounds // 3) == 0:
            theirs.append(_llama_bench(llama_bench, path, 16))
    table = Table("weights", "MB", "ms per token", "tokens per s", "beside float32", box=box.MARKDOWN)
    base = float(np.median(times["float32"]))
    for kind, each_ms in times.items():
        ms = float(np.median(each_ms))
        table.add_row(kind, f"{sizes[kind] / 1e6:.0f}", f"{ms:.2f}", f"{1e3 / ms:.1f}", f"{ms / base:.3f}")
    if theirs:
        ms = float(np.median(theirs))
        table.add_row("llama.cpp", "", f"{ms:.2f}", f"{1e3 / ms:.1f}", f"{ms / base:.3f}")
    console.print(f"{sizes['float32'] / 4e6:.0f}M parameters, one text, a cache of {context} tokens")
    console.print(table)


def _read(generator: Generator, prompt: list[list[int]]) -> Array:
    return generator.start(prompt, 0).tokens


def prompts_table(path: Path, length: int, llama_bench: str | None, rounds: int, console: Console) -> None:
    """The time of a prompt of some tokens with the weights of a file, until the next token is known."""
    generators = {kind: Generator(joined(model), length, Sampling()) for kind, model in models_of_file(path)}
    prompt = [np.arange(1, length + 1).tolist()]
    seconds = time_in_turns({kind: partial(_read, g, prompt) for kind, g in generators.items()}, rounds)
    times = {kind: 1e3 * float(np.median(each)) for kind, each in seconds.items()}
    if llama_bench is not None:
        times["llama.cpp"] = length * _llama_bench(llama_bench, path, 0, length)
    table = Table("weights", "ms", "tokens per s", "beside float32", box=box.MARKDOWN)
    for kind, ms in times.items():
        table.add_row(kind, f"{ms:.0f}", f"{1e3 * length / ms:.0f}", f"{ms / times['float32']:.3f}")
    console.print(f"a prompt of {length} tokens")
    console.print(table)


def _steps(model: Llama, context: int, steps: int, calls: int, options: Mapping[str, Any]) -> Callable[[], Array]:
    """Returns a function whose calls compute some more tokens, after those of a context in the cache."""
    config = model.config
    cache = Cache.empty(config, 1, context + steps * calls, **options)
    keys, values = jr.normal(jr.key(0), (2, 1, config.kv_heads, context, config.head_size))
    append = eqx.filter_jit(lambda cache: cache.append(keys, values))
    cache = dataclasses.replace(cache, layers=tuple(map(append, cache.layers)))

    @eqx.filter_jit(donate="all-except-first")
    def step(model: Llama, token: Array, cache: Cache) -> tuple[Array, Cache]:
        logits, cache = model(token, cache)
        return jnp.argmax(logits[:, -1:], axis=-1), cache

    state = [jnp.ones((1, 1), jnp.int32), cache]

    def run() -> Array:
        for _ in range(steps):
            state[:] = step(model, *state)
        return state[0]

    return run


def contexts_table(path: Path, contexts: Sequence[int], llama_bench: str | None, rounds: int, console: Console) -> None:
    """The time of a token after so many others, with caches of several formats. Weights are those of the file."""
    model, steps = joined(load(eqq.io.open(path))), 8
    table = Table("cache", *(f"{context:,}" for context in contexts), box=box.MARKDOWN)
    found: dict[str, list[float]] = {}
    for context in contexts:
        runs = {kind: _steps(model, context, steps, rounds + 1, options) for kind, options in CACHES.items()}
        for kind, seconds in time_in_turns(runs, rounds).items():
            found.setdefault(kind, []).append(1e3 * float(np.median(seconds)) / steps)
        for kind in ("f16", "q8_0", "q4_0") if llama_bench is not None else ():
            more = ("-d", str(context), "-ctk", kind, "-ctv", kind, "-fa", "1")
            found.setdefault(f"llama.cpp, {kind}", []).append(_llama_bench(str(llama_bench), path, 16, 0, *more))
    for kind, each in found.items():
        table.add_row(kind, *(f"{ms:.1f}" for ms in each))
    console.print("ms per token, by the tokens in the cache")
    console.print(table)


def _tokenizer(vocabulary: int) -> Tokenizer:
    """Any that has so many tokens: llama.cpp wants one in the file."""
    tokens = [*(f"t{n}" for n in range(vocabulary - 1)), "t0t1"]
    return Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=[("t0", "t1")]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="what examples/llama/train.py wrote, or a .gguf file")
    parser.add_argument("--random", choices=RANDOM, help="random weights instead, and the time per token alone")
    parser.add_argument("--rounds", type=int, default=12, help="of `--random`, and of a file")
    parser.add_argument("--context", type=int, default=CONTEXT, help="places in its cache: 16 for each round, 19 more")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt, of a file")
    parser.add_argument("--contexts", nargs="*", type=int, help="of a file: times a token after so many others instead")
    parser.add_argument("--tables", nargs="*", default=["formats", "activations", "caches", "speed"])
    parser.add_argument("--only", nargs="*", default=list(FORMATS), help="formats of the first table")
    parser.add_argument("--methods", nargs="*", default=USUAL, choices=METHODS, help="of the first table")
    parser.add_argument("--windows", type=int, default=32, help=f"how many windows of {CONTEXT} tokens to measure on")
    parser.add_argument("--llama-bench", help="the program llama-bench, to time llama.cpp on the same weights")
    parser.add_argument("--smoke", action="store_true", help="little text, and two formats")
    options = parser.parse_args(arguments)
    console = Console(width=160)
    if options.context < (needed := 16 * (options.rounds + 1) + 3):
        parser.error(f"`--context` must be at least {needed}, for {options.rounds} rounds. Got {options.context}.")
    timing = (options.context, options.llama_bench, options.rounds, console)
    if options.random is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = None if options.llama_bench is None else Path(folder) / "model.gguf"
            return tokens_table(random_models(options.random, path), path, *timing)
    if options.folder is None:
        parser.error("FOLDER must be given, or `--random`.")
    if options.folder.suffix == ".gguf":
        if options.contexts:
            return contexts_table(options.folder, options.contexts, *timing[1:])
        tokens_table(models_of_file(options.folder), options.folder, *timing)
        return prompts_table(options.folder, options.prompt, *timing[1:])
    bench = Bench(options.folder, 2 if options.smoke else options.windows)
    if "formats" in options.tables:
        formats_table(bench, ["int4", "int2"] if options.smoke else options.only, options.methods, console)
    if "activations" in options.tables:
        activations_table(bench, {"int8": ("int8",)} if options.smoke else ACTIVATIONS, console)
    if "caches" in options.tables:
        caches_table(bench, console)
    if "speed" in options.tables:
        speed_table(bench, options.llama_bench, console)


if __name__ == "__main__":
    main()
