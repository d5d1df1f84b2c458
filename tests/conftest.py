import collections
import gc
import itertools as it
import random

import jax
import jax.random as jr
import pytest


jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, for meshes
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--every", type=int, default=1, metavar="N", help="run one in N cases of each test")


@pytest.hookimpl(trylast=True)  # after those marked `slow` have left
def pytest_collection_modifyitems(config, items):
    every, seen = config.getoption("--every"), collections.Counter()
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left_out if seen[test] % every else kept).append(item)
        seen[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture
def getkey():
    """A function that returns a fresh PRNG key at each call."""
    seeds = it.count(random.Random(0).randrange(2**31))
    return lambda: jr.key(next(seeds))


@pytest.fixture(autouse=True, scope="module")
def _compilation(request):
    """Programs are small, and compiling them takes longest: so most are not optimized. A module may want it otherwise.

    And keeps memory bounded: one module's compiled programs are of no use to the next.
    """
    jax.config.update("jax_disable_most_optimizations", not getattr(request.module, "OPTIMIZED", False))
    yield
    jax.clear_caches()
    gc.collect()
