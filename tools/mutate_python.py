"""Breaks Python files in small ways, one at a time, and reports changes that no test notices.

A process collects the tests that concern some files, and forks for each mutant. There a function that changed gets its
new code, and the tests run that call it. A mutant of what an import computes is written to a copy of the package, and
imported anew.

    python -m tools.mutate_python build/mutants --sample 40 --seed 3 _numerics/packing.py
"""

import argparse
import ast
import collections
import copy
import gc
import importlib
import inspect
import itertools as it
import json
import os
import random
import resource
import shlex
import shutil
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import hypothesis
import pytest

from .changed_tests import TESTS


ROOT = Path(__file__).parents[1]
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.txt"
PACKAGES = "beartype equinox hypothesis jax.numpy jaxtyping numpy optax plum quax rich safetensors".split()
OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
PAIRS = [
    ("minimum", "maximum"),
    ("min", "max"),
    ("floor", "ceil"),
    ("argmin", "argmax"),
    ("zeros", "ones"),
    ("any", "all"),
]
NAMES = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}


class Mutant(NamedTuple):
    """A file of the package with one change."""

    path: str
    name: str
    text: str


def swaps(node: ast.AST) -> list[tuple[str, ast.AST]]:
    """What a node may become, and in words."""
    new, found = copy.deepcopy(node), []
    match new:
        case ast.BinOp(op=op) if type(op) in OTHER:
            new.op = OTHER[type(op)]()
        case ast.Compare(ops=[op]):
            new.ops = [OTHER[type(op)]()]
        case ast.BoolOp(values=[first, *_]):
            new = first
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            new = new.operand
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value += 1
        case ast.Attribute(attr=name) if name in NAMES:
            new.attr = NAMES[name]
        case ast.Name(id=name) if name in NAMES:
            new.id = NAMES[name]
        case ast.IfExp() | ast.If():
            new.test = ast.UnaryOp(ast.Not(), new.test)
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            new = ast.Pass()
        case _:
            return found
    where = node.test if isinstance(node, ast.If) else node
    after = new.test if isinstance(new, ast.If) else new
    return [(f"{ast.unparse(where)} -> {ast.unparse(after)}", new)]


def places(tree: ast.AST) -> list[tuple[ast.AST, str, int | None]]:
    """The fields of nodes that may change: neither annotations nor texts of errors."""
    found = []
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params") or isinstance(
                node, ast.Raise | ast.JoinedStr
            ):
                continue
            items = value if isinstance(value, list) else [value]
            found += [
                (node, field, i if isinstance(value, list) else None)
                for i, x in enumerate(items)
                if isinstance(x, ast.AST)
            ]
    return found


def skipped(tree: ast.AST) -> set[int]:
    """Nodes within annotations, errors and assignments of types."""
    gone = set()
    for node in ast.walk(tree):
        parts = [node] if isinstance(node, ast.Raise | ast.JoinedStr | ast.ImportFrom) else []
        parts += [node.value] if isinstance(node, ast.keyword) and node.arg == "strict" else []  # as an assertion
        parts += [getattr(node, f) for f in ("annotation", "returns") if getattr(node, f, None) is not None]
        parts += getattr(node, "decorator_list", [])
        gone |= {id(x) for part in parts for x in ast.walk(part)}
    return gone


def mutants_of(path: Path) -> list[tuple[int, int, str]]:
    """The mutants of a file: the place and what happens there."""
    tree = ast.parse(path.read_text())
    gone, found = skipped(tree), []
    for number, (node, field, i) in enumerate(places(tree)):
        child = getattr(node, field) if i is None else getattr(node, field)[i]
        if id(child) not in gone and id(node) not in gone:
            found += [(number, child.lineno, what) for what, _ in swaps(child)]
    return found


def mutate(path: Path, number: int) -> str:
    """The text of a file with one change."""
    tree = ast.parse(path.read_text())
    node, field, i = places(tree)[number]
    if i is None:
        setattr(node, field, swaps(getattr(node, field))[0][1])
    else:
        getattr(node, field)[i] = swaps(getattr(node, field)[i])[0][1]
    return ast.unparse(ast.fix_missing_locations(tree))


def tests_of(path: str, instead: str = "") -> list[str]:
    """What pytest is asked to run for a file."""
    text = instead or next(words for part, words in TESTS.items() if part in path)
    words = shlex.split(" ".join(text.split()))
    return [f"tests/{word}" if ".py" in word else word for word in words]


def functions(code: types.CodeType) -> Iterator[types.CodeType]:
    """The functions of a module and of its classes, in order."""
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from [part] if part.co_flags & inspect.CO_NEWLOCALS else functions(part)


class Imported:
    """The functions of a file of the package, imported by now."""

    def __init__(self, path: str):
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        self.file, self.loader = module.__file__, module.__loader__
        text = Path(self.file).read_text()
        self.now, self.plain = self.compile(text), self.compile(ast.unparse(ast.parse(text)))

    def compile(self, text: str) -> list[types.CodeType]:
        return [*functions(self.loader.source_to_code(text.encode(), self.file))]

    def changes(self, text: str) -> dict[types.CodeType, types.CodeType]:
        """Functions and their code in a mutant. Empty where the module itself changes."""
        after = self.compile(text)
        same = len(after) == len(self.plain)
        return {c: new for c, old, new in zip(self.now, self.plain, after, strict=True) if old != new} if same else {}


def name_of(code: types.CodeType) -> str:
    """The place of a function."""
    return f"{code.co_filename}:{code.co_qualname}:{next(line for *_, line in code.co_lines() if line)}"


def replace(codes: dict[types.CodeType, types.CodeType]) -> None:
    """Gives functions another code."""
    gc.unfreeze()  # `tests/conftest.py` hides what collection made
    for f in gc.get_objects():
        if isinstance(f, types.FunctionType) and f.__code__ in codes:
            f.__code__ = codes[f.__code__]


def fork(seconds: int) -> tuple[int, TextIO]:
    """A process that may take some seconds of a core, and a pipe from there to here."""
    sys.stdout.flush()
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        return pid, open(read)
    os.close(read)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(20 * seconds)  # where it waits forever
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    return 0, open(write, "w", buffering=1)


def ended(pid: int, pipe: TextIO) -> tuple[list[str], str]:
    """The lines that a process wrote, and what became of the mutant whose tests it ran."""
    with pipe:
        lines = pipe.read().splitlines()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    late = -status in (signal.SIGALRM, signal.SIGKILL, signal.SIGXCPU)
    return lines, "timeout" if late else "killed" if status else "survived"


class Runs:
    """A plugin of pytest: it collects tests once, and forks a process that runs them for each mutant.

    That runs the tests which call a function that changed. Another mutant needs a new import.
    """

    def __init__(self, mutants: list[Mutant], results: TextIO, budget: float):
        self.mutants, self.files = mutants, {str(Path(m.path).resolve()) for m in mutants}
        self.results, self.seconds, self.breadth = results, {}, {}
        self.calls: set[str] = set()  # by collection, and then by one test
        self.budget, self.pipe, self.began = budget, None, 0.0

    def note_call(self, frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename in self.files:
            self.calls.add(name_of(frame.f_code))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        took, self.began = time.process_time() - self.began, time.process_time()
        print(json.dumps([report.nodeid, report.outcome, took, [*self.calls]]), file=self.pipe)
        if report.failed:
            os._exit(1)
        if report.when == "teardown":
            self.calls.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        sys.settrace(None)
        by_import, callers = set(self.calls), collections.defaultdict(set)
        imported = {path: Imported(path) for path in dict.fromkeys(m.path for m in self.mutants)}
        kept, limit = session.items[:], 600
        for number, mutant in enumerate((None, *self.mutants), -1):
            changes = imported[mutant.path].changes(mutant.text) if mutant else {}
            changed = {name_of(code) for code in changes}
            if mutant and (not changed or changed & by_import):
                continue
            tests = {test for function in changed for test in callers[function]}
            pid, self.pipe = fork(limit)
            if pid == 0:
                self.calls.clear()
                replace(changes)
                if mutant:
                    calling = [i for i in kept if i.nodeid.partition("[")[0] in tests]
                    chosen = sorted(calling or kept, key=self.order)  # XLA calls some from threads of its own
                    ends = it.accumulate(self.seconds[item.nodeid] for item in chosen)
                    session.items[:] = [
                        i for i, end in zip(chosen, ends, strict=True) if end < self.budget or i is chosen[0]
                    ]
                sys.settrace(None if mutant else self.note_call)
                return None  # pytest goes on, and runs them
            lines, result = ended(pid, self.pipe)
            if not mutant and result != "survived":
                break
            for test, _, seconds, calls in [] if mutant else map(json.loads, lines):
                self.seconds[test] = self.seconds.get(test, 0) + seconds
                self.breadth[test] = max(self.breadth.get(test, 0), len(calls))
                for function in calls:
                    callers[function].add(test.partition("[")[0])  # other cases find compiled programs
            limit = int(3 * self.budget) + 10
            result = "never called" if result == "survived" and mutant and not tests else result
            print(json.dumps([number, result if mutant else 2 * sum(self.seconds.values())]), file=self.results)
        return True

    def order(self, item: pytest.Item) -> tuple[int, float]:
        """First tests that call the fewest functions, then the quickest."""
        return self.breadth.get(item.nodeid, 0), self.seconds.get(item.nodeid, 0)


def run(options: list[str], runs: Runs | None = None) -> int:
    """Runs pytest on the copy of the package."""
    hypothesis.settings.register_profile("mutants", phases=["explicit", "generate"], report_multiple_bugs=False)
    hypothesis.settings.load_profile("mutants")
    quiet = ["-q", "-x", "--tb", "no", "-p", "no:cacheprovider", "-n", "0", "--assert", "plain", "--seed", "0"]
    quiet += ["-o", "addopts=-m 'not slow'"]  # without checks of types, tests take half of the time
    return int(pytest.main([*quiet, *options], plugins=[runs] if runs else []))


def run_mutants(tests: list[str], mutants: list[Mutant], quick: bool, budget: float) -> Iterator[tuple[Mutant, str]]:
    """Mutants, and what became of them. None if a test fails without any."""
    native = any("test_cpu_" in word for word in tests)  # elsewhere XLA computes
    os.environ.pop("EQQUANT_CPU_ISA", None) if native else os.environ.update(EQQUANT_CPU_ISA="none")
    # XLA asks for shards while it compiles.
    importlib.import_module("jax").config.update("jax_enable_compilation_cache", "tests/test_partition.py" not in tests)
    pid, pipe = fork(100_000)
    if pid == 0 and native:  # JAX starts threads when it loads native kernels: so each mutant is imported
        status = run(tests)
        if status == 0:
            print("[-1, 600]", file=pipe)
        os._exit(status)
    if pid == 0:
        runs = Runs(mutants, pipe, budget)
        sys.settrace(runs.note_call)
        os._exit(run(tests, runs))
    found = set()
    with pipe:
        for line in pipe:
            number, result = json.loads(line)
            found.add(number)
            if number < 0:
                limit = int(result) + 10
            else:
                yield mutants[number], result
    os.waitpid(pid, 0)
    if not found:
        print("a test fails without a mutant")
    for number, mutant in enumerate(mutants if found and not quick else []):
        if number not in found:
            pid, pipe = fork(limit)
            if pid == 0:
                sys.dont_write_bytecode = True
                Path(mutant.path).write_text(mutant.text)
                os._exit(run(tests))
            yield mutant, ended(pid, pipe)[1]
            shutil.copy2(ROOT / mutant.path, mutant.path)


def copy_package(build: Path) -> None:
    """Copies the repository, so that tests run on the copy, and imports what they need."""
    copied = build.resolve() / "python"
    shutil.rmtree(copied, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__", ".git", "build", "native", "*.ipynb")
    shutil.copytree(ROOT, copied, ignore=ignore)
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(copied.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
        "OPENBLAS_NUM_THREADS": "1",  # processes with threads cannot fork
        "PYTHONPATH": os.pathsep.join([str(copied), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    os.chdir(copied)
    sys.path[0] = str(copied)
    for name in PACKAGES:
        importlib.import_module(name)


def choose_mutants(
    parts: list[str], match: str, tests: str, sample: int, chance: random.Random
) -> dict[tuple, list[Mutant]]:
    """Mutants of files by the tests that concern them."""
    files, groups = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("eqquant*/**/*.py")), {}
    for path in [f for part in parts for f in files if part in f]:
        every = [mutant for mutant in mutants_of(ROOT / path) if match in f"{path}:{mutant[1]}: {mutant[2]}"]
        chosen = chance.sample(every, min(sample or len(every), len(every)))
        mutants = [Mutant(path, f"{path}:{line}: {what}", mutate(ROOT / path, number)) for number, line, what in chosen]
        groups.setdefault(tuple(tests_of(path, tests)), []).extend(mutants)
    for mutants in groups.values():
        chance.shuffle(mutants)
    return dict(chance.sample([*groups.items()], len(groups)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="a folder for the copy and for compiled programs")
    rooms = ["_numerics", "_matmul", "_formats", "_methods", "calibrate", "_training", "analysis"]
    parser.add_argument("parts", nargs="*", default=rooms, help="of the paths of files")
    parser.add_argument("--sample", type=int, default=40, help="how many mutants of each file run; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    help = "that the tests of a mutant take without it; the quickest of them run"
    parser.add_argument("--seconds", type=float, default=20, help=help)
    parser.add_argument("--match", default="", help="a part of what is printed of mutants")
    parser.add_argument("--tests", default="", help="what pytest is asked to run, instead of the tests of a file")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further mutant runs")
    parser.add_argument("--quick", action="store_true", help="without mutants of what an import computes")
    arguments = parser.parse_intermixed_args()
    copy_package(arguments.build)
    rules = [line.split(" | ") for line in EQUIVALENT.read_text().splitlines() if line and line[0] != "#"]
    end, counts = time.time() + 60 * arguments.minutes, collections.defaultdict(collections.Counter)
    chance = random.Random(arguments.seed)
    groups = choose_mutants(arguments.parts, arguments.match, arguments.tests, arguments.sample, chance)
    for tests, mutants in groups.items():
        print(*tests, flush=True)
        late = time.time() > end or not mutants
        for mutant, result in [] if late else run_mutants(tests, mutants, arguments.quick, arguments.seconds):
            known = any(mutant.path == rule[0] and rule[1] in mutant.name for rule in rules)
            kind = "equivalent" if known and result in ("survived", "never called") else result
            counts[mutant.path][kind] += 1
            if kind not in ("killed", "equivalent"):
                print(f"{kind}: {mutant.name}", flush=True)
            if time.time() > end:
                break
    for path, kinds in [*counts.items(), ("all", sum(counts.values(), collections.Counter()))]:
        print(f"{path}:", ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))


if __name__ == "__main__":
    main()
