"""Timing variants against each other, in turns."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


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
