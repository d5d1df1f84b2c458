"""What the programs here share: errors in one sentence, and a check that memory suffices."""

import contextlib
import os
import sys
from collections.abc import Iterator

import jax


_SMALLER = "Quantize it with `--format` or `--cache`, or set a smaller `--context`."


def check_memory(what: str, nbytes: int) -> None:
    """Raises a `ValueError` if the machine has less memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory:
        raise ValueError(f"{what} must fit in memory, {show_size(memory)}. Got {show_size(nbytes)}. {_SMALLER}")


def show_size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:,.1f} KB"


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
        sys.exit(f"Error: The model and its cache must fit in memory. Got: {said.rstrip('.')}. {_SMALLER}")
