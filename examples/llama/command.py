"""What the programs here share: arguments, errors in one sentence, and a check that memory suffices."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax


def check_memory(what: str, nbytes: int, remedy: str) -> None:
    """Raises a `ValueError` if the machine has less memory, where it says how much it has."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory:
        raise ValueError(f"{what} must fit in memory, {show_size(memory)}. Got {show_size(nbytes)}. {remedy}")


def peak_memory() -> str:
    """The most memory that the process took so far, if the system counts it."""
    try:
        import resource
    except ImportError:  # Windows
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f", at most {show_size(peak)}"


def show_size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:,.1f} KB"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of all programs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", help="a folder with config.json and safetensors, or a .gguf file")
    add("--tokenizer", type=Path, help="a tokenizer.json; by default the one in the GGUF file, or beside the model")
    add("--smoke", action="store_true", help="tries everything on a tiny random model")
    return parser


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Adds the formats and the dtype in which a model runs."""
    add = parser.add_argument
    add("--format", help="quantizes the weights that are float: nf4, int4, int8, ...")
    add("--activations", help="quantizes activations of packed weights, for integer products: int8, ...")
    add("--cache", help="the format of the cache: int8, iq4_nl, fp8, int4, ...; by default floats")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of floats and activations")


def run_program(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    run: Callable[[argparse.Namespace], object],
    smoke: Callable[[], None],
) -> None:
    """Runs a program, or tries everything with `--smoke`. Arguments may come in any order."""
    options = parser.parse_intermixed_args(arguments)
    if options.smoke:
        return smoke()
    with errors_as_sentences():
        run(options)


def check_least(options: argparse.Namespace, **least: int) -> None:
    """Raises a `ValueError` if an option is given and too small."""
    for name, bound in least.items():
        if (given := getattr(options, name)) is not None and given < bound:
            raise ValueError(f"`--{name}` must be at least {bound}. Got {given}.")


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Ends the program with one sentence and exit code 1 at wrong input or lack of memory."""
    try:
        yield
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"Error: {e}")
    except (MemoryError, jax.errors.JaxRuntimeError) as e:
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        said = next(iter(str(e).splitlines()), "no more memory")
        remedy = "Quantize it with `--format` or `--cache`, or set a smaller `--context`."
        sys.exit(f"Error: The model and its cache must fit in memory. Got: {said.rstrip('.')}. {remedy}")
