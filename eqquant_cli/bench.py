"""`eqquant bench`."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TYPE_CHECKING

import typer

from .arguments import parse_format


if TYPE_CHECKING:
    import jax
    import numpy as np


def bench(
    formats: Annotated[list[str] | None, typer.Option("--format", "-f", help="A format to time.")] = None,
    size: Annotated[int, typer.Option(min=64, help="Multiplies by weights of size x size.")] = 4096,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="How many rows are multiplied at once.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times each product so often, in turns.")] = 9,
) -> None:
    """Times products on this machine.

    Those with quantized weights against float32: below 1 is faster.

    Example: eqquant bench --format nf4 --format int8 --rows 1 --rows 128
    """
    import jax
    import numpy as np

    import eqquant as eqq

    dot = jax.jit(lambda w, x: w @ x)
    w = jax.random.normal(jax.random.key(0), (size, size))
    picked = [parse_format(f) for f in formats or ("nf4", "int4", "int8")]
    weights = {repr(f): eqq.quantize(w, f) for f in picked}
    speed = _measure_copy_speed()
    typer.echo(f"{_machine()}, JAX {jax.__version__}; copies {speed / 1e9:.1f} GB/s")
    width = max(map(len, ("float32", *weights)))
    typer.echo(f"{'rows':>5}  {'weight':<{width}} {'ms':>8} {'x float32':>10} {'of copy':>8}  computed by")
    for m in rows or (1, 16, 128):
        x = jax.random.normal(jax.random.key(1), (size,) if m == 1 else (size, m))
        variants: dict[str, jax.Array | eqq.QuantizedArray] = {"float32": w, **weights}
        seconds = _measure_interleaved({name: lambda q=q, x=x: dot(q, x) for name, q in variants.items()}, rounds)
        for name, q in variants.items():
            ratio = np.median(seconds[name] / seconds["float32"])
            share = q.nbytes / float(np.median(seconds[name])) / speed
            by = "xla" if name == "float32" else eqq.explain_matmul(q, x).implementation
            figures = f"{1e3 * np.median(seconds[name]):>8.3f} {ratio:>10.2f} {share:>8.0%}"
            typer.echo(f"{m:>5}  {name:<{width}} {figures}  {by}")


def _machine() -> str:
    """Returns the name of the device; of a CPU its model and cores."""
    import jax

    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else ()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model or platform.machine()}, {os.cpu_count()} cores"


def _measure_copy_speed() -> float:
    """Returns the read bandwidth of a copy in bytes per second, for arrays beyond the caches."""
    import numpy as np

    a = np.ones(1 << 27, np.uint8)
    b = np.empty_like(a)
    best = min(_seconds(lambda: np.copyto(b, a)) for _ in range(5))
    return a.nbytes / best


def _measure_interleaved(variants: dict[str, Callable[[], "jax.Array"]], rounds: int) -> "dict[str, np.ndarray]":
    import jax
    import numpy as np

    for f in variants.values():
        jax.block_until_ready(f())
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, f in variants.items():
            found[name].append(_seconds(lambda f=f: jax.block_until_ready(f())))
    return {name: np.array(seconds) for name, seconds in found.items()}


def _seconds(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start
