import collections
import ctypes
import gc
import hashlib
import itertools as it
import os
import random
import sys
import traceback
from pathlib import Path

import jax
import jax.random as jr
import jaxlib.version
import jaxtyping
import pytest

from tools import changed_tests

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
NOTE = pytest.StashKey[str]()
TESTS = it.count()

# How many cases run of what changed; a long one counts as several.
ROOM, LONG = 2000, 10


def pytest_addoption(parser):
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="run one in N cases, and of slow ones one in 2 N"
    )
    parser.addoption("--seed", metavar="WORD", help="which of each N; without it the commit chooses")
    help = f"run all cases of these files, separated by commas, or one in so many that {ROOM} run; slow ones as others"
    parser.addoption("--whole", default="", metavar="NAMES", help=help)


def pytest_configure(config):
    if config.option.seed is None:  # processes of pytest-xdist get the option from the process that starts them
        config.option.seed = changed_tests.git("rev-parse", "--short=12", "HEAD").strip() or "0"


def pytest_report_header(config):
    whole = f" --whole {config.option.whole}" if config.option.whole else ""
    return f"the same cases again: --every {config.option.every} --seed {config.option.seed}{whole}"


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["note"] = session.config.stash.get(NOTE, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[NOTE] = getattr(node, "workeroutput", {}).get("note", "")


def pytest_terminal_summary(terminalreporter, config):
    if note := config.stash.get(NOTE, ""):
        terminalreporter.line(note)


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
    """Keeps the cases that `--every`, `--seed` and `--whole` choose. Without `--every`, all but slow ones."""
    every, seed, whole = config.option.every, config.option.seed, config.option.whole
    marks = {item.nodeid: {mark.name for mark in item.iter_markers()} & {"slow", "long"} for item in items}
    if every > 1:
        chosen, config.stash[NOTE] = sample(marks, every, seed, whole.split(","))
    else:
        chosen = {case for case, mark in marks.items() if config.option.markexpr or "slow" not in mark}
    if left_out := [item for item in items if item.nodeid not in chosen]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


def sample(marks, every, seed, whole=()):
    """The cases that run, of the keys of `marks`, and a note of the files of `whole` that do not run whole.

    A hash of seed and case is a fraction, and below `1 / every` the case runs: no number of cases can matter. Of each
    test with quick cases the lowest one runs always. No sample has what is slow and long.
    """
    parts = divide_room(marks, every, whole)
    periods = {c: 2 * every if "slow" in mark else parts.get(name_file(c), every) for c, mark in marks.items()}
    hashes = {case: hashlib.blake2b(f"{seed} {case}".encode(), digest_size=8).digest() for case in marks}
    chosen = {case for case in marks if int.from_bytes(hashes[case]) * periods[case] < 2**64 and len(marks[case]) < 2}
    quick = sorted((case for case in marks if not marks[case]), key=hashes.get, reverse=True)
    chosen.update({case.partition("[")[0]: case for case in quick}.values())
    reduced = [
        f"one in {n} of {', '.join(name for name, part in parts.items() if part == n)}"
        for n in range(2, every + 1)
        if n in parts.values()
    ]
    return chosen, f"Too much changed to run whole all that concerns it: {'; '.join(reduced)}." if reduced else ""


def divide_room(marks, every, whole):
    """Of how many cases of each file of `whole` one runs: of one, as long as there is room, in small files first."""
    costs = collections.Counter()
    for case, mark in marks.items():
        if "slow" not in mark and name_file(case) in whole:
            costs[name_file(case)] += LONG if mark else 1
    share = next(n for n in range(ROOM, 0, -1) if n == 1 or sum(min(cost, n) for cost in costs.values()) <= ROOM)
    return {name: min(every, -(-cost // share)) for name, cost in costs.items()}


def name_file(case):
    return Path(case.partition("::")[0]).stem


@pytest.fixture
def getkey():
    """A function that returns a fresh PRNG key at each call."""
    seeds = it.count(random.Random(0).randrange(2**31))
    return lambda: jr.key(next(seeds))


@pytest.fixture(scope="module")
def rank_promotion():
    """As users have it: the examples rely on it."""
    with jax.numpy_rank_promotion("allow"):
        yield


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
