"""Constants that are computed by JAX while a function is traced."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compute_now() -> Iterator[None]:
    """Lets JAX compute values at once, also inside a traced function.

    Whatever `jax.transfer_guard` forbids, and whatever `jax.debug_nans` stops at: some codes mean NaN or infinity.
    """
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False):
        yield
