"""The figures of docs/benchmarks.md on native kernels, in parts, the most important first. Best on a quiet machine.

    python benchmarks/cpu_tables.py results.json --minutes 20 --llama-bench PROGRAM --peers /venv/bin/python
    python benchmarks/cpu_tables.py results.json --show

Results are saved after each piece. Stop it any time; the same command goes on with the pieces that are missing.
`--peers` is a Python that has JAX and the libraries to compare with; `--llama-bench` a program of llama.cpp.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from cpu_matmul import FORMATS, show_all
from rich.console import Console
from timing import machine

from eqquant._native import library as native


HERE = Path(__file__).parent
SIZES = ("4096x4096", "4096x14336")
FIRST = ("nf4", "int4", "int8", "fp8")


class Piece(NamedTuple):
    """A command that takes about so many seconds. `isa` is `None` if the printed output is kept."""

    name: str
    seconds: int
    isa: str | None
    command: tuple[str, ...]


def _products(isa: str, size: str, formats: tuple[str, ...], python: str = sys.executable, *more: str) -> Piece:
    wide, peers = size != SIZES[0], "--peers" in more
    each = (3 if isa != "generic" else 12) * (3 if wide else 1)
    command = (python, str(HERE / "cpu_matmul.py"), "--isa", isa, "--sizes", size, "--formats", *formats, *more)
    name = f"{isa}, {size}, {'other libraries' if peers else ' '.join(formats)}"
    return Piece(name, 10 + each * len(formats) + (100 if peers else 0), isa, command)


def pieces(peers: str | None, llama_bench: str | None, smoke: bool) -> list[Piece]:
    """All of them, the most important first."""
    sets = native.instruction_sets()
    best, rest = sets[-1], tuple(name for name in FORMATS if name not in FIRST)
    bytes_of, integers = ("nf4", "fp8", "mxfp8", "dynamic8"), tuple(name for name in FORMATS if " x " in name)
    theirs = () if llama_bench is None else ("--llama-bench", llama_bench)
    small = ("--rounds", "2") if smoke else ()
    model = lambda name, seconds: Piece(
        f"a model, {name}",
        seconds,
        None,
        (sys.executable, str(HERE / "language_model.py"), "--random", name, *theirs, *small),
    )
    found = [
        _products(best, SIZES[0], FIRST),
        model("tiny" if smoke else "300m", 100),
        _products(best, SIZES[0], rest),
        _products(best, SIZES[1], FIRST),
        *([] if peers is None else [_products(best, SIZES[0], ("nf4",), peers, "--peers")]),
        *([] if smoke else [model("1b", 320)]),
        _products("avx2", SIZES[0], FIRST) if "avx2" in sets else None,
        _products(best, SIZES[1], rest),
        _products("avx2", SIZES[0], rest) if "avx2" in sets else None,
        *([] if peers is None else [_products(best, SIZES[1], ("nf4",), peers, "--peers")]),
        # These two differ from the best in a few formats.
        _products("avx512vnni", SIZES[0], bytes_of) if "avx512vnni" in sets[:-1] else None,
        _products("avx512", SIZES[0], ("nf4", *integers)) if "avx512" in sets[:-1] else None,
        _products("generic", SIZES[0], (*FIRST, "int8 x int8")),
        _products("avx2", SIZES[1], FIRST) if "avx2" in sets else None,
    ]
    return [piece for piece in found if piece is not None]


def show(path: Path, console: Console) -> None:
    saved = json.loads(path.read_text())
    console.print(saved["machine"])
    for text in saved["texts"].values():
        console.print(text, markup=False, highlight=False)
    show_all(console, saved["results"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the results so far; made if it does not exist")
    parser.add_argument("--minutes", type=float, default=60, help="begin no piece that would end later than this")
    parser.add_argument("--peers", help="a Python with JAX, onnxruntime, bitsandbytes and torch")
    parser.add_argument("--llama-bench", help="the program llama-bench of llama.cpp")
    parser.add_argument("--show", action="store_true", help="print the results of the file, and measure nothing")
    parser.add_argument("--list", action="store_true", help="print the pieces, and about how many seconds each takes")
    parser.add_argument("--smoke", action="store_true", help="tries every piece in a small size")
    options = parser.parse_args()
    console = Console(width=150)
    if options.show:
        return show(options.file, console)
    if native.refusal() is not None:
        sys.exit(f"Error: {native.refusal()}")
    todo = pieces(options.peers, options.llama_bench, options.smoke)
    if options.list:
        return print("\n".join(f"{piece.seconds:>4} s  {piece.name}" for piece in todo))
    began = time.monotonic()
    saved = {"machine": machine(), "done": [], "results": [], "texts": {}}
    if options.file.exists():
        saved = json.loads(options.file.read_text())
    for piece in todo:
        if piece.name in saved["done"]:
            continue
        if time.monotonic() - began + piece.seconds > 60 * options.minutes:
            print(f"left for later: {piece.name} ({piece.seconds} s)", flush=True)
            continue
        started = time.monotonic()
        command = [*piece.command, *(("--smoke",) if options.smoke and piece.isa else ())]
        rows = options.file.with_suffix(".piece")
        rows.unlink(missing_ok=True)
        save = () if piece.isa is None else ("--save", str(rows))
        ran = subprocess.run([*command, *save], stdout=subprocess.PIPE, text=True, env=os.environ)
        print(f"{time.monotonic() - started:.0f} s: {piece.name}", flush=True)
        if ran.returncode != 0:
            print(f"failed: {' '.join(command)}\n{ran.stdout}", flush=True)
            continue
        if piece.isa is None:
            saved["texts"][piece.name] = ran.stdout
        else:
            found = json.loads(rows.read_text())["results"]
            # Beside other libraries, whose weights fill the cache too, ours are measured again: the first rows stay.
            others = "--peers" in command
            saved["results"] += [r for r in found if not others or r["name"] not in ("float32", *FORMATS)]
            rows.unlink()
        saved["done"].append(piece.name)
        new = options.file.with_suffix(".new")
        new.write_text(json.dumps(saved))
        new.replace(options.file)  # at once: a run that is stopped here keeps the old results
    show(options.file, console)


if __name__ == "__main__":
    main()
