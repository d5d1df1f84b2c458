"""Loads the shared library of `eqquant-cpu`, if installed, when a product first needs it.

A mismatch must never break JAX. XLA asks a foreign function for the version of the interface that it was built with. If
XLA does not support that version, and no backend has started yet, then no backend ever starts. So compare versions
first, and register functions only after the CPU backend has started: then a refusal by XLA is only an exception.
"""

import ctypes
import functools as ft
import importlib.metadata
import os
import pathlib
import re
import warnings

import jax


ABI = 1  # the major version of `eqquant-cpu` that `calls.py` is written for
MATMUL, MATMUL_INT8, DECODE = "eqquant_cpu_matmul", "eqquant_cpu_matmul_int8", "eqquant_cpu_decode"
ENCODE, ENCODE_TRELLIS, REDUCE = "eqquant_cpu_encode", "eqquant_cpu_encode_trellis", "eqquant_cpu_reduce"
ATTENTION = "eqquant_cpu_attention"

_INSTALL = 'run `pip install "eqquant[cpu]"`, or `pip install ./native` in a clone of the repository'
_OFF = "native kernels are off: EQQUANT_CPU_ISA is none"
MISSING = f"native kernels are not installed: {_INSTALL}"


@ft.cache
def refusal() -> str | None:
    """Returns why there are no native kernels, with the remedy, or `None` if there are.

    Warns if they are installed but do not load.
    """
    if os.environ.get("EQQUANT_CPU_ISA") == "none":
        return _OFF
    try:
        import eqquant_cpu  # pyright: ignore[reportMissingImports]

        why = _register(eqquant_cpu.LIBRARY)
    except Exception as error:  # after any failure, `xla` computes the product
        if isinstance(error, ModuleNotFoundError) and error.name == "eqquant_cpu":
            return MISSING
        why = f"`eqquant-cpu` does not load ({_line(error)}): {_INSTALL}"
    if why is not None:
        warnings.warn(f"{why}. Native kernels are off.", stacklevel=2)
    return why


@ft.cache
def warn_of_slow_products() -> None:
    """Warns, once in a process, that products are slow because kernels are missing."""
    off = "The environment variable EQQUANT_CPU_ISA=none turns this warning off."
    warnings.warn(f"Products with quantized weights are slow on this CPU: {MISSING}. {off}", stacklevel=2)


def describe() -> str:
    """Returns the version and the instruction set of the kernels, or why there are none."""
    return refusal() or f"eqquant-cpu {_library().eqquant_cpu_version().decode()}, {isa()}"


def isa() -> str | None:
    """Returns the instruction set of the kernels, such as `"avx512"`; `None` without kernels."""
    return None if refusal() is not None else _library().eqquant_cpu_isa().decode()


def instruction_sets() -> list[str]:
    """Returns the instruction sets of this machine that have kernels, worst first."""
    if refusal() is not None:
        return []
    names = (_library().eqquant_cpu_isa_at(i) for i in range(16))
    return [name.decode() for name in names if name is not None]


def _library() -> ctypes.CDLL:
    import eqquant_cpu  # pyright: ignore[reportMissingImports]

    return _open(pathlib.Path(eqquant_cpu.LIBRARY))


@ft.cache
def _open(path: pathlib.Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in ("version", "isa", "isa_refusal", "isa_at"):
        getattr(library, f"eqquant_cpu_{name}").restype = ctypes.c_char_p
    return library


def _register(path: pathlib.Path) -> str | None:
    library = _open(pathlib.Path(path))
    found = library.eqquant_cpu_version().decode()
    if found.partition(".")[0] != str(ABI):
        return f"`eqquant-cpu` must be of version {ABI}.*. Got {found}: {_INSTALL}"
    built, runs = library.eqquant_cpu_api_version(), _api_version()
    if runs is None or built // 1000 != runs // 1000 or built > runs:
        jaxlib = importlib.metadata.version("jaxlib")
        update = 'run `pip install --upgrade jax "eqquant[cpu]"`'
        return f"`eqquant-cpu` {found} was built for another jaxlib than {jaxlib}: {update}"
    if library.eqquant_cpu_isa() is None:
        return f"{library.eqquant_cpu_isa_refusal().decode()}: unset it, or set another"
    jax.local_devices(backend="cpu")  # starts the backend
    for name in (MATMUL, MATMUL_INT8, DECODE, ENCODE, ENCODE_TRELLIS, REDUCE, ATTENTION):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return None


def _api_version() -> int | None:
    """Returns the FFI version of this jaxlib, from its headers: major * 1000 + minor."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return None if None in found else sum(int(n[1]) * f for n, f in zip(found, (1000, 1), strict=True) if n)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
