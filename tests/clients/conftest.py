import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def _defaults_of_jax():
    """Other libraries rely on JAX's own promotion of dtypes and ranks, which our tests forbid."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
