"""Breaks the native kernels in thousands of small ways, one at a time, and reports changes that no test notices.

All mutants of a sample are compiled at once, and a variable of the environment chooses the one that runs
(`native/tests/mutants.h`). A mutant is killed if `unit`, `fuzz` or its grid fails, crashes or takes too long.

    nox -s mutation                                                 # a sample
    python -m tools.mutate_native build/mutants float int8 --sets generic avx2 --sample 200 --seed 3
"""

import argparse
import collections
import fnmatch
import hashlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path


NATIVE = Path(__file__).parents[1] / "native"
EQUIVALENT = NATIVE / "tests" / "equivalent_mutants.txt"
OPERATORS = {"+": "Add", "-": "Subtract", "*": "Multiply", "/": "Divide", "%": "Rest", "<": "Less", "<=": "LessEqual",
             ">": "Greater", ">=": "GreaterEqual", "==": "Equal", "!=": "Unequal", "&": "And", "|": "Or",
             "<<": "ShiftLeft", ">>": "ShiftRight"}  # fmt: skip
COMPILE_TIME = re.compile(r"constexpr|static_assert|template|\bcase\b|\busing\b|\benum\b|^\s*#|prefetch|\\$")
# Where an error is: in a line of the sources, in a template that it uses, or in an intrinsic that wants a constant.
PLACES = (
    r"SOURCE/(\S+?):(\d+):\d+: error",
    r"In function [^\n]*\n\s+inlined from [^\n]* at SOURCE/(\S+?):(\d+)",
)
# A mutant: its line with @ at its place, what changes there, and insertions: where, how many characters are replaced,
# and by what. `{}` is its number.
Mutant = collections.namedtuple("Mutant", "path line text what edits")


def without_comments(text: str) -> str:
    """The text with spaces for comments, strings and characters, so that places stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)


def end_of(code: str, start: int, stops: str) -> int:
    """Where an expression ends: at one of some operators, or at the parenthesis around it."""
    depth = 0
    for i in range(start, len(code)):
        stops_here = code[i] in ")]};,?" or (code[i] == ":" and "::" not in code[i - 1 : i + 2])
        if depth == 0 and (stops_here or any(code.startswith(stop, i) for stop in stops.split())):
            return i
        depth += (code[i] in "([{") - (code[i] in ")]}")
    return len(code)


def mutants_of(path: str, text: str) -> list[Mutant]:
    """The mutants of a file: operators, constants, bounds, conditions, dropped statements and dropped loops."""
    code, found = without_comments(text), []

    def add(what: str, at: int, *edits: tuple[int, int, str]) -> None:
        line, begin = text.count("\n", 0, at) + 1, text.rfind("\n", 0, at) + 1
        whole = text[begin:at] + "@" + text[at : text.index("\n", at)]
        found.append(Mutant(path, line, whole.strip(), what, edits))

    starts = {m.start() for m in re.finditer(r"^.*$", code, re.M) if COMPILE_TIME.search(m[0])}
    line_start = lambda at: code.rfind("\n", 0, at) + 1
    for m in re.finditer(r"(?<=[\w)\]]) ([-+*/%<>&|]|[<>=!]=|<<|>>)(?= [\w(~!*&-])", code):
        add(m[1], m.start(1), (m.start(1), len(m[1]), f"{m[1]} ::mutant::{OPERATORS[m[1]]}<{{}}>() {m[1]}"))
    for m in re.finditer(r"(?<![\w.<])\d+(?:\.\d*f)?(?![\w.>])", code):
        add(f"{m[0]} + 1", m.start(), (m.start(), len(m[0]), f"::mutant::constant<{{}}>({m[0]})"))
    for m in re.finditer(r"\b(min64|max64|div_up|round_up)\(", code):
        add(f"other {m[1]}", m.start(), (m.start(), len(m[1]), f"::mutant::{m[1]}<{{}}>"))
    for m in re.finditer(r"\b(?:if|while) \(", code):
        end = end_of(code, m.end(), "")
        add("not", m.start(), (m.end(), 0, "::mutant::is({}) != static_cast<bool>("), (end, 0, ")"))
    for m in re.finditer(r" (&&|\|\|) ", code):
        end = end_of(code, m.end(), "||" if m[1] == "||" else "&& ||")
        inside = "::mutant::is({}) || (" if m[1] == "&&" else "::mutant::not_in({}) && ("
        add(f"drop {code[m.start(1) : end].strip()}", m.start(), (m.end(), 0, f"({inside}"), (end, 0, "))"))
    for m in re.finditer(r"\bfor \([^;()]*(?:\([^()]*\)[^;()]*)*; ", code):
        end = code.index(";", m.end())
        if "|=" not in code[m.end() : end]:
            add("drop loop", m.start(), (m.end(), 0, "::mutant::not_in({}) && ("), (end, 0, ")"))
    statement = r"^( *)((?!return|static|const|using|else|case|for|while|if|goto|do)[\w.\->:\[\] *+/<>%(),&?!=|-]+;)$"
    declaration = r"(\w+(<.*>)?|const \w+)[ *&]+(const )?\w+( =|;|\()"
    for m in re.finditer(statement, code, re.M):
        if re.match(r"\w[\w.\[\]>*+ -]*? [-+*|&^]?= |[\w:.>-]+(<[^<>]*>)?\(.*\);$|\+\+|--", m[2]):
            if not re.match(declaration, m[2]) or re.match(r"\w+ [-+*|&^]?= ", m[2]):
                add("drop statement", m.start(2), (m.start(2), 0, "if (::mutant::not_in({})) "))
    return [m for m in found if line_start(m.edits[0][0]) not in starts]


def write(source: Path, path: str, text: str, mutants: dict[int, Mutant]) -> None:
    """Writes a file with its mutants, all of which it can run as."""
    edits = []
    for number, mutant in mutants.items():
        first, last = mutant.edits[0], mutant.edits[-1]
        for at, length, new in mutant.edits:
            opens = (at, length, new) == first and first != last
            closes = (at, length, new) == last and first != last
            span = last[0] - first[0]
            # At one place what ends comes before what begins, the inner ends first, and the outer begins first.
            edits.append(
                (at, 0 if closes else 1 if opens else 2, span if closes else -span, length, new.format(number))
            )
    out, done = [], 0
    for at, _, _, length, new in sorted(edits):
        out += [text[done:at], new]
        done = at + length
    (source / path).write_text("".join(out) + text[done:])


class Build:
    """Objects of the kernels and of the tests, kept by what they are made of."""

    def __init__(self, folder: Path, sets: list[str], options: str, sanitize: bool):
        self.folder, self.sets, self.options = folder, sets, options
        self.sanitizer = " -fsanitize=address" if sanitize else ""
        self.source = folder / "source"
        shutil.rmtree(self.source, ignore_errors=True)
        shutil.copytree(NATIVE, self.source)
        self.originals = {str(p.relative_to(NATIVE)): p.read_text() for p in sorted(NATIVE.rglob("*.[ch]*"))}
        flags = [
            "-DEQQUANT_TESTS=ON",
            "-DEQQUANT_LIBRARY=OFF",
            "-DEQQUANT_EMULATE=ON",
            "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        ]
        subprocess.run(
            ["cmake", "-G", "Ninja", "-S", self.source, "-B", folder / "cmake", *flags], check=True, stdout=-3
        )
        commands = json.loads((folder / "cmake" / "compile_commands.json").read_text())
        self.commands = {c["output"].split("CMakeFiles/")[1]: c for c in commands if "/bench.dir/" not in c["output"]}
        (folder / "objects").mkdir(exist_ok=True)

    def set_of(self, name: str) -> str:
        """The instruction set of an object, or nothing."""
        if match := re.match(r"kernels.dir/(\w+)/\w+\.cpp\.o", name):
            return match[1]
        return "amx" if "/amx/" in name else "avx512vnni" if "vnni" in name else ""

    def object(self, name: str, extra: str = "") -> tuple[Path, str]:
        """Compiles one object unless it is there. Returns its place, and the errors."""
        command = self.commands[name]
        run = lambda line: subprocess.run(line, shell=True, cwd=command["directory"], capture_output=True, text=True)
        line = command["command"].replace("-O3", self.options + extra)
        source = run(line.replace(f"-o CMakeFiles/{name}", "-E -P -o -")).stdout
        key = hashlib.sha256((line + source).encode()).hexdigest()[:24]
        out = self.folder / "objects" / f"{key}.o"
        if not out.exists():
            result = run(line.replace(f"-o CMakeFiles/{name}", f"-fmax-errors=0 -o {out}.new"))
            if result.returncode != 0:
                return out, result.stderr
            if "-fsyntax-only" not in extra:
                Path(f"{out}.new").rename(out)
        return out, ""

    def culprits(self, name: str, errors: str, mutants: dict[int, Mutant]) -> list[int]:
        """The numbers of the mutants that make an object fail to compile."""
        places: set[tuple[str, str]] = set()
        for pattern in PLACES:
            places = places or set(re.findall(pattern.replace("SOURCE", str(self.source)), errors))
        numbers = set(re.findall(r"mutants.h: In instantiation of .*kId = (\d+)", errors))
        gone = [i for i, m in mutants.items() if str(i) in numbers or (m.path, str(m.line)) in places]
        print(f"{name}: {len(gone)} mutants do not compile", flush=True)
        if not gone:
            raise SystemExit(errors[:4000])
        return gone

    def programs(self, mutants: dict[int, Mutant]) -> None:
        """Builds `unit` and `fuzz`. Removes mutants that do not compile, a line at a time."""
        names = [name for name in self.commands if self.set_of(name) not in self.sets]
        plain = [n for n in names if n.startswith("kernels") and self.set_of(n)]
        objects = {name: self.object(name)[0] for name in plain}
        header = f" -include {NATIVE}/tests/mutants.h -w{self.sanitizer}"
        # Most errors are found without code, which takes longest to generate.
        for extra in (f"{header} -fsyntax-only", header):
            gone = [0]
            while gone:
                for path, text in self.originals.items():
                    write(self.source, path, text, {i: m for i, m in mutants.items() if m.path == path})
                gone = []
                for name in self.commands.keys() - set(plain):
                    objects[name], errors = self.object(name, extra)
                    gone += self.culprits(name, errors, mutants) if errors else []
                for i in set(gone):
                    del mutants[i]
        switch = self.folder / "switch.cpp"
        switch.write_text(SWITCH.replace("COUNT", str(max(mutants, default=0) + 1)))
        for program in ("unit", "fuzz"):
            own = [str(o) for n, o in objects.items() if n.startswith(("kernels", program))]
            subprocess.run(
                [
                    "c++",
                    *self.options.split(),
                    *self.sanitizer.split(),
                    "-o",
                    self.folder / program,
                    switch,
                    *own,
                    "-lpthread",
                ],
                check=True,
            )


SWITCH = """
#include <stdio.h>
#include <stdlib.h>
unsigned char reached_mutants[COUNT];
static int read_number() {
  const char* number = getenv("EQQUANT_MUTANT");
  return number == nullptr ? -1 : atoi(number);
}
int active_mutant = read_number();
static void write_reached() {
  const char* name = getenv("EQQUANT_REACHED");
  if (name == nullptr) return;
  FILE* file = fopen(name, "wb");
  fwrite(reached_mutants, 1, sizeof reached_mutants, file);
  fclose(file);
}
static int at_exit = atexit(write_reached);
"""


def runs(command: list[str], seconds: int, **env: str) -> bool:
    """Whether a program succeeds, in some seconds of one core."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    process = subprocess.Popen(command, env={**os.environ, **env}, preexec_fn=limit, stdout=subprocess.PIPE, stderr=-3)
    for line in process.stdout:
        if line.startswith((b"FAIL", b"CRASH")) or b": y[" in line or b" is decoded to " in line:
            process.kill()
            process.wait()
            return False
    return process.wait() == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="a folder for what is built")
    parser.add_argument(
        "rooms",
        nargs="*",
        default=["attention", "float", "int8", "encode", "slabs"],
        help="folders of native/src, or how files begin: float/slice",
    )
    parser.add_argument("--sets", nargs="*", default=["generic", "avx2"], help="instruction sets whose kernels break")
    parser.add_argument("--sample", type=int, default=0, help="how many mutants run; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--numbers", nargs="*", type=int, help="of the mutants to run, as printed before")
    parser.add_argument("--problems", default="800", help="of `fuzz`")
    parser.add_argument("--cells", default="600", help="of the grid of `fuzz`")
    parser.add_argument("--options", default="-O1", help="of the compiler")
    parser.add_argument("--sanitize", action="store_true", help="also kill what reads or writes beyond an array")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further mutant runs")
    arguments = parser.parse_args()
    folder = arguments.build.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    build = Build(folder, arguments.sets, arguments.options, arguments.sanitize)
    every = [m for path, text in build.originals.items() for m in mutants_of(path, text)]
    every = [m for m in every if m.path.startswith(tuple(f"src/{room}" for room in arguments.rooms))]
    # Only those that run are compiled, which takes a fraction of the time.
    chosen = random.Random(arguments.seed).sample(range(len(every)), min(arguments.sample or len(every), len(every)))
    chosen = arguments.numbers or chosen
    mutants = {i: every[i] for i in chosen}
    build.programs(mutants)
    print(f"{len(chosen)} of {len(every)} mutants, {len(chosen) - len(mutants)} of which do not compile", flush=True)

    rules = [line.split(" | ") for line in EQUIVALENT.read_text().splitlines() if line and line[0] != "#"]
    reasons = {i: reason for i, m in mutants.items() for path, what, text, reason in rules
               if fnmatch.fnmatch(m.path, path) and re.fullmatch(what, m.what) and re.search(text, m.text)}  # fmt: skip
    reached, seconds = collections.defaultdict(list), {}
    for name in arguments.sets:
        fuzz = str(folder / "fuzz")
        programs = [str(folder / "unit"), f"on {name}"], [fuzz, arguments.problems, "0", name]
        for program in (*programs, [fuzz, "grid", arguments.cells, "0", name]):
            begin = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            if not runs(program, 600, EQQUANT_REACHED=str(folder / "reached")):
                raise SystemExit(f"{program} fails without a mutant")
            used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin[1]
            for i, byte in enumerate((folder / "reached").read_bytes()):
                if byte and i in mutants:
                    reached[i].append((used, program))
            seconds[tuple(program)] = int(5 * used) + 5
            print(f"{' '.join(program[1:])}: {used:.1f} s", flush=True)

    chosen = [i for i in chosen if i in mutants]
    end, counts, room_of = time.time() + 60 * arguments.minutes, collections.Counter(), lambda m: m.path.split("/")[1]
    for done, i in enumerate(chosen):
        if time.time() > end:
            print(f"{len(chosen) - done} mutants did not run", flush=True)
            break
        mutant, result = mutants[i], "survived" if reached[i] else "not reached"
        for _, program in sorted(reached[i]):
            if not runs(program, seconds[tuple(program)], EQQUANT_MUTANT=str(i)):
                result = "killed"
                break
        if result == "survived" and i in reasons:
            result = "equivalent"
        counts[room_of(mutant), result] += 1
        if result not in ("killed", "equivalent"):
            print(f"{i} {result}: {mutant.path}:{mutant.line}: {mutant.what}: {mutant.text}", flush=True)
    for (room, result), count in sorted(counts.items()):
        print(f"{room:8} {result:12} {count}")


if __name__ == "__main__":
    main()
