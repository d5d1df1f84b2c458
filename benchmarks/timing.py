"""The machine of a benchmark, and timing variants against each other, in turns."""

import datetime
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def machine() -> str:
    """The processor, the versions and the date, as one line."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            model = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), model)
    versions = f"JAX {jax.__version__}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores; {versions}; {datetime.date.today()}"


def time_in_turns(variants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each variant in each round; the first call of each is not counted."""
    for f in variants.values():
        jax.block_until_ready(f())
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, f in variants.items():
            start = time.perf_counter()
            jax.block_until_ready(f())
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(s) for name, s in seconds.items()}
