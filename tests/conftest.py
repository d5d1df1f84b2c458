import collections
import ctypes
import datetime
import gc
import itertools as it
import os
import random
import sys
import traceback
import zlib
from pathlib import Path

import jax
import jax.random as jr
import jaxlib.version
import jaxtyping
import pytest

from . import annotations  # noqa: F401, whose checks `--jaxtyping-packages` names


jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, for meshes
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # programs without lines compile sooner


# Other processes that tests start compile sooner too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# The older emitter of fusions compiles them in half the time. JAX 0.11.2 has none, and stops at an unknown flag.
if jaxlib.version.__version_info__ < (0, 11):
    flags = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])

COMPILED = pytest.StashKey[list]()
OPTIMIZED = pytest.StashKey[bool]()
TESTS = it.count()


def pytest_addoption(parser):
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="run one in N cases of each test, and of slow ones one in 2 N"
    )
    help = "which of each N cases to run; without it the date chooses, so that 2 N days in a row run all cases"
    parser.addoption("--offset", type=int, metavar="K", help=help)


def pytest_configure(config):
    if config.option.offset is None:  # processes of pytest-xdist get the option from the process that starts them
        config.option.offset = datetime.datetime.now(datetime.UTC).date().toordinal() % (2 * config.option.every)


def pytest_report_header(config):
    every, offset = config.option.every, config.option.offset
    return None if every == 1 else f"one in {every} cases of each test: --every {every} --offset {offset} repeats them"


def sample(name, cases, every, offset, runs=1):
    """One in `every` cases; of fewer cases, one in each run, or in so many runs. All offsets together choose each case.

    Tests start at different cases, so that no day tries one format or one setting alone.
    """
    period = min(every, max(len(cases), runs))
    return cases[(offset + zlib.crc32(name.encode())) % period :: every]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Collects without garbage collection, which would look through the many objects of tests again and again.

    And takes note of the lines that made JAX compile a program.
    """
    lines = session.config.stash[COMPILED] = []

    def record(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            lines.append([str(frame) for frame in traceback.extract_stack() if "tests" in frame.filename][-1:])

    jax.monitoring.register_event_duration_secs_listener(record)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        jax.monitoring.unregister_event_duration_listener(record)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Keeps a sample: before pytest and plugins order all items, which takes a second; or after `-k` and `-m`."""
    chosen = config.option.keyword or config.option.markexpr
    if not chosen:
        keep_sample(config, items)
    result = yield
    if chosen:
        keep_sample(config, items)
    return result


def keep_sample(config, items):
    """Keeps one in `--every` cases of each test; of slow cases one in twice as many.

    A test of fewer cases runs one each time, unless it is `long`: then one in `--every` runs; or `daily`: then all.
    """
    every, offset = config.option.every, config.option.offset
    tests, kept = collections.defaultdict(list), set()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if every > 1 and "nightly" in marks:
            continue
        if "daily" in marks and "slow" not in marks:
            kept.add(item)
            continue
        tests[item.nodeid.partition("[")[0], "slow" in marks, "long" in marks].append(item)
    for (name, slow, long), cases in tests.items():
        if every == 1:
            kept.update(cases if config.option.markexpr or not slow else [])
        elif slow:
            kept.update(sample(name, cases, 2 * every, offset, runs=2 * every))
        else:
            kept.update(sample(name, cases, every, offset, runs=every if long else 1))
    if left_out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


@pytest.fixture
def getkey():
    """A function that returns a fresh PRNG key at each call."""
    seeds = it.count(random.Random(0).randrange(2**31))
    return lambda: jr.key(next(seeds))


@pytest.fixture
def without_type_checks():
    """As users have it: the tests check types of arguments before the library can speak."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True, scope="module")
def _compilation(request):
    """Most modules do not optimize programs: these are small, and compiling them takes longest."""
    stash, optimize = request.config.stash, getattr(request.module, "OPTIMIZED", False)
    if stash.get(OPTIMIZED, None) is not optimize:
        clear_programs()
        stash[OPTIMIZED] = optimize
        jax.config.update("jax_disable_most_optimizations", not optimize)


@pytest.fixture(autouse=True)
def _room_for_programs():
    """Modules share their programs, as long as there is room for more. Looks at every twentieth test."""
    if next(TESTS) % 20 == 0 and not has_room():
        clear_programs()


def has_room():
    """Whether this process is far from the limits of its memory, where the system tells.

    Four processes share 16 GB. Linux allows each 65,530 mappings, of which a program needs several: JAX crashes when
    there is none left.
    """
    process = Path("/proc/self")
    if not process.joinpath("statm").exists():
        return False
    memory = int(process.joinpath("statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return memory < 3 * 2**30 and process.joinpath("maps").read_bytes().count(b"\n") < 40_000


def clear_programs():
    """Frees compiled programs, and returns their memory to the system, which the GNU C library would keep."""
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
