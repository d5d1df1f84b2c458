"""Breaks Python files in small ways, one at a time, and reports changes that no test notices.

Each mutant is a copy of the package with one file changed, and runs the tests that concern the file.

    python -m tools.mutate_python build/mutants --sample 40 --seed 3 --only _numerics/packing.py
"""

import argparse
import ast
import collections
import copy
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path


ROOT = Path(__file__).parents[1]
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.txt"
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
# The tests that concern a file: the first pattern that its path contains.
TESTS = {
    "_numerics/hadamard": "test_mapped.py test_rotations.py --every 4",
    "_numerics/packing": "test_packing.py --every 2",
    "_numerics/minifloats": "test_formats.py test_extremes.py --every 8",
    "_numerics/hashing": "test_delayed.py test_moments.py test_formats.py --every 6",
    "_numerics": "test_packing.py test_formats.py test_extremes.py --every 6",
    "_formats/gguf": "test_formats.py test_golden_checkpoints.py --every 4",
    "_formats": "test_formats.py test_methods.py --every 6",
    "kernels/pallas_tpu": "test_pallas_tpu.py --every 10",
    "kernels/vpu": "test_pallas_tpu.py --every 10",
    "kernels/pallas_gpu": "test_pallas_gpu.py --every 10",
    "kernels/ptx": "test_pallas_gpu.py --every 10",
    "kernels/xla_cpu": "test_xla_cpu.py test_dispatch.py --every 4",
    "kernels/cpu_int8": "test_cpu_int8.py --every 20",
    "kernels/cpu": "test_cpu_matmul.py --every 30",
    "kernels": "test_matmul.py test_dispatch.py test_activations.py --every 8",
    "_matmul/dispatch": "test_dispatch.py test_explain.py",
    "_matmul/explain": "test_explain.py",
    "_matmul/partition": "test_partition.py test_sharding.py --every 3",
    "_matmul/quax": "test_quax_packed.py test_operators.py --every 2",
    "_matmul/rounded": "test_low_precision.py test_delayed.py --every 3",
    "_matmul/rows": "test_activations.py --every 6",
    "_matmul/selected": "test_select.py test_experts.py --every 2",
    "_matmul": "test_matmul.py test_gradients.py test_operators.py --every 5",
}


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


def tests_of(path: str) -> list[str]:
    """What pytest is asked to run for a file."""
    words = next(words for part, words in TESTS.items() if part in path).split()
    return [f"tests/{word}" if word.endswith(".py") else word for word in words]


def passes(copied: Path, path: str, seconds: int) -> bool:
    """Whether the tests of a file pass, in some seconds of one core."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(copied.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
    }
    if "cpu" not in path:  # XLA computes products
        cache["EQQUANT_CPU_ISA"] = "none"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "0", "--offset", "0"]
    command = [sys.executable, "-m", "pytest", *options, *tests_of(path)]
    environment = {**os.environ, **cache, "PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copied, env=environment, preexec_fn=limit, stdout=-3, stderr=-3)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="a folder for the copy and for compiled programs")
    parser.add_argument("rooms", nargs="*", default=["_numerics", "_matmul", "_formats"])
    parser.add_argument("--sample", type=int, default=0, help="how many mutants run; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the path of files")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further mutant runs")
    arguments = parser.parse_args()
    copied = arguments.build.resolve() / "python"
    shutil.rmtree(copied, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__", ".git", "native", "*.ipynb")
    shutil.copytree(ROOT, copied, ignore=ignore)
    files = [p for room in arguments.rooms for p in sorted((ROOT / "eqquant" / room).rglob("*.py"))]
    every = [(str(p.relative_to(ROOT)), *m) for p in files if arguments.only in str(p) for m in mutants_of(p)]
    rules = [line.split(" | ") for line in EQUIVALENT.read_text().splitlines() if line and line[0] != "#"]
    chosen = list(every)
    print(f"{len(every)} mutants", flush=True)
    random.Random(arguments.seed).shuffle(chosen)
    end, counts, healthy = time.time() + 60 * arguments.minutes, collections.Counter(), {}
    chosen = chosen[: arguments.sample or None]
    for done, (path, number, line, what) in enumerate(chosen):
        if time.time() > end:
            print(f"{len(chosen) - done} mutants did not run", flush=True)
            break
        tests = " ".join(tests_of(path))
        if tests not in healthy:
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            if not passes(copied, path, 600):
                print(f"{tests} fails without a mutant", flush=True)
                healthy[tests] = 0
                continue
            healthy[tests] = int(3 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)) + 30
            print(f"{tests}: {(healthy[tests] - 30) // 3} s", flush=True)
        if healthy[tests] == 0:
            continue
        (copied / path).write_text(mutate(ROOT / path, number))
        result = "survived" if passes(copied, path, healthy[tests]) else "killed"
        shutil.copy(ROOT / path, copied / path)
        if result == "survived" and any(path == rule[0] and rule[1] in what for rule in rules):
            result = "equivalent"
        counts[path.split("/")[1], result] += 1
        if result == "survived":
            print(f"survived: {path}:{line}: {what}", flush=True)
    for (room, result), count in sorted(counts.items()):
        print(f"{room:10} {result:10} {count}")


if __name__ == "__main__":
    main()
