"""`eqquant`: the program. One file for each command; this one handles errors."""

import functools as ft
import importlib
import os
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits.

    The code is 0 if it succeeded, 1 for an error, 2 for wrong arguments, 130 for Ctrl-C, and 143 for SIGTERM.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:  # without typer too
        print(describe_versions())
        sys.exit(0)
    try:
        importlib.import_module("typer")
    except ImportError:
        _stop('the command line needs typer. Run `pip install "eqquant[cli]"`.', 1)
    from .commands import app

    debug = "--debug" in given
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that unfinished files are removed
    unraisable = sys.unraisablehook
    sys.unraisablehook = ft.partial(_stop_again, otherwise=unraisable)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warner()
            code = app([a for a in given if a != "--debug"], prog_name="eqquant", standalone_mode=False)
    except Exception as e:
        _handle(e, debug)
    except SystemExit as e:
        code = e.code
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.unraisablehook = unraisable
    if code in (130, 143):  # of typer for Ctrl-C, and of SIGTERM
        _stop("stopped. No file was written.", code)
    sys.exit(code if isinstance(code, int) else 0)


def describe_versions() -> str:
    """Returns what is installed, as a report of a bug needs it."""
    from eqquant._native import library

    others = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "equinox"))
    machine = f"{others}, Python {platform.python_version()}, {platform.platform()}"
    return f"eqquant {version('eqquant')}\n{library.describe()}\n{machine}"


def _stop_again(unraisable: "sys.UnraisableHookArgs", otherwise: "Callable[[sys.UnraisableHookArgs], object]") -> None:
    """Sends SIGTERM once more if a callback, such as JAX's for garbage collection, discarded the exit."""
    if isinstance(unraisable.exc_value, SystemExit):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        otherwise(unraisable)


def _handle(e: Exception, debug: bool) -> NoReturn:
    """Prints an error as a sentence, without a traceback."""
    # Of click, which typer imports or vendors.
    if any(cls.__name__ == "UsageError" and "click" in cls.__module__ for cls in type(e).__mro__):
        usage: Any = e
        usage.show()
        sys.exit(usage.exit_code)
    if debug:
        raise e
    text = e.args[0] if isinstance(e, KeyError) and e.args else str(e) or type(e).__name__
    if isinstance(e, OSError) and e.strerror and e.filename:
        text = f"{e.strerror}: {e.filename}"
    from eqquant._errors import Message

    if e.args and isinstance(message := e.args[0], Message):
        text = f"{message.problem} {_REMEDIES[message.remedy]}"
    known = isinstance(e, ValueError | TypeError | KeyError | OSError | ImportError)
    _stop(str(text) if known else f"{text}\nThis is a mistake of eqquant: `--debug` shows where.", 1)


# Remedies for users of the command line.
_REMEDIES = {
    "not finite": "Replace them, or leave this array in float with --skip.",
    "does not fit": "Quantize the float array to a format that fits, or leave it in float with --skip.",
    "act-order": "Quantize it with `eqquant quantize --format`.",
    "llama.cpp": "Correct it.",
}


def _warner() -> Callable[..., None]:
    """Returns a function that prints each warning once, as a sentence."""
    said: set[str] = set()

    def say(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            print(f"eqquant: {message}", file=sys.stderr)

    return say


def _stop(message: str, code: int) -> NoReturn:
    print(f"eqquant: {message}", file=sys.stderr)
    sys.exit(code)
