"""Executes the notebooks of the examples: `python -m tools.notebooks`, and `--write` stores what they show.

Cells run as Jupyter runs them, by IPython, one notebook after the other in one process, so that JAX is imported once.
An error, a warning, or any output to stderr fails. `EQQUANT_SMOKE=1` makes the notebooks small, as CI runs them: the
metadata of a cell says which of its words stand for which others then, so that readers do not see it.
"""

import argparse
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output


FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
GRAY = "#808080"  # readable on light and on dark pages


class _Shell(InteractiveShell):
    def enable_gui(self, gui: Any = None) -> None:
        """There is no window to wait for. The base class would raise an error."""


def _set_figures() -> None:
    """Makes figures SVG that are the same in each run, without a background."""
    import matplotlib
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    matplotlib.use("module://matplotlib_inline.backend_inline")
    set_matplotlib_formats("svg", metadata={"Date": None, "Creator": None})
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GRAY)
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "eqquant", "figure.facecolor": "none", "axes.facecolor": "none"}
        | {"font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"], "figure.figsize": (5.2, 3.2)}
        | {"axes.spines.top": False, "axes.spines.right": False, "legend.framealpha": 0}
        | colors
    )


def _source(cell: dict[str, Any], *, smoke: bool) -> str:
    source = "".join(cell["source"])
    for whole, small in cell["metadata"].get("smoke", {}).items() if smoke else ():
        source = source.replace(whole, small)
    return source


def _outputs(captured: Any) -> Iterator[dict[str, Any]]:
    """What the cell has shown, in the form of a notebook."""
    if captured.stdout:
        yield {"name": "stdout", "output_type": "stream", "text": captured.stdout.splitlines(keepends=True)}
    for shown in captured.outputs:
        svg, text = shown.data.get("image/svg+xml"), shown.data.get("text/plain", "")
        data = {"text/plain": text.splitlines(keepends=True)} if svg is None else {"image/svg+xml": _lines(svg)}
        yield {"data": data, "metadata": {}, "output_type": "display_data"}


def _lines(svg: str) -> list[str]:
    return [line.strip() + "\n" for line in svg[svg.index("<svg") :].splitlines()]


def execute(path: Path, shell: _Shell, *, smoke: bool) -> dict[str, Any]:
    """Returns the notebook with the outputs of its cells."""
    notebook = json.loads(path.read_text())
    shell.reset(new_session=True)
    count = 0
    for n, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        count += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with capture_output() as captured:
                result = shell.run_cell(_source(cell, smoke=smoke), store_history=False)
        if not result.success or captured.stderr:
            print(captured.stdout, captured.stderr, sep="\n")
            sys.exit(f"{path.name}: cell {n} failed: {result.error_in_exec or result.error_before_exec or 'stderr'}")
        cell["outputs"] = list(_outputs(captured))
        cell["execution_count"] = count
    return notebook


def write(path: Path, notebook: dict[str, Any]) -> None:
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="such as tour; all by default")
    parser.add_argument("--write", action="store_true", help="store the outputs in the notebooks")
    given = parser.parse_args()
    smoke = "EQQUANT_SMOKE" in os.environ
    if smoke and given.write:
        parser.error("What is stored must be of the full size: unset EQQUANT_SMOKE.")
    # Small programs take longest to compile.
    jax.config.update("jax_disable_most_optimizations", smoke)
    os.environ["COLUMNS"] = "100"  # the width of tables, whatever terminal this runs in
    shell = _Shell.instance(colors="nocolor")
    _set_figures()
    os.chdir(FOLDER)
    paths = [FOLDER / f"{name}.ipynb" for name in given.names] or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        began = time.perf_counter()
        notebook = execute(path, shell, smoke=smoke)
        if given.write:
            write(path, notebook)
        print(f"{path.stem}: {time.perf_counter() - began:.0f} s", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
