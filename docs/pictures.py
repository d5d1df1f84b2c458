"""Draws the pictures of `analysis.md`, from all-MiniLM-L6-v2, and those of `calibrate.md`, from results of
`benchmarks/accuracy.py`. `examples/minilm.py` says where the weights are.

Needs `pip install eqquant[plot]`. Pictures go to `docs/images/`. `--results` draws only those from results.
"""

import json
import pathlib
import sys
from typing import Any

import numpy as np
from matplotlib.figure import Figure


DOCS = pathlib.Path(__file__).parent
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#808080"


def new_axes(size: tuple[float, float], title: str, x: str, y: str) -> Any:
    """Axes on a transparent background, with grey text, which is readable on light and on dark pages."""
    axes = Figure(figsize=size, layout="constrained", facecolor="none").subplots()
    axes.set_facecolor("none")
    axes.set_title(title, fontsize=10, color=GREY)
    axes.set_xlabel(x, color=GREY)
    axes.set_ylabel(y, color=GREY)
    axes.tick_params(which="both", color=GREY, labelcolor=GREY)
    axes.grid(alpha=0.3)
    for side, spine in axes.spines.items():
        spine.set_color(GREY)
        spine.set_visible(side in ("left", "bottom"))
    return axes


def draw_front(results: dict[str, Any]) -> Any:
    """The distance of embeddings against bits per weight: one format for all weights, and the best at each size."""
    recipes: dict[str, list[dict[str, float]]] = results["recipes"]
    # Counted as here: codes, scales of 16 bits and zero points of all arrays of two and more dimensions.
    peers = sorted((float(key.split(",")[0]), 1 - y) for key, y in results["peers"].items() if key[0].isdigit())
    title = "Sentence embeddings of all-MiniLM-L6-v2, each model against float32"
    axes = new_axes((7, 4.2), title, "bits per weight", "1 - mean cosine")
    kinds = {"rounded": (GREY, "o"), "MSE": (ORANGE, "s"), "GPTQ": (BLUE, "^"), "learned": (GREEN, "D")}
    for kind, (colour, marker) in kinds.items():
        rows = sorted((r[-1]["bits"], 1 - r[-1]["cosine"]) for name, r in recipes.items() if f" {kind}, seed 0" in name)
        if rows:
            label = f"one format, {kind}"
            axes.plot(*zip(*rows, strict=True), marker=marker, linestyle=":", color=colour, label=label, markersize=5)
    mixes = {name: r[-1] for name, r in recipes.items() if name[0].isdigit() and name.endswith("seed 0")}
    for without, marker, label in ((False, "o", "a mix for each size"), (True, "s", "a mix without data")):
        rows = sorted((r["bits"], 1 - r["cosine"]) for name, r in mixes.items() if ("no data" in name) == without)
        if rows:
            axes.plot(*zip(*rows, strict=True), marker=marker, color=RED, label=label)
    label = "the best of other libraries"
    axes.plot(*zip(*peers, strict=True), marker="*", linestyle="", color=GREY, markersize=9, label=label)
    axes.set_yscale("log")
    axes.legend(fontsize=8, framealpha=0, labelcolor=GREY)
    return axes


def draw_layers(results: dict[str, Any]) -> Any:
    """The error of the outputs of each linear layer, by methods."""
    layers: dict[str, dict[str, Any]] = results["layers"]
    title = "Three bits in blocks of 64: the squared error of the outputs of each linear layer"
    axes = new_axes((7, 4.2), title, "linear layers, in the order of the model", "relative to their squares")
    styles = {"MSE": (ORANGE, "s"), "GPTQ": (BLUE, "^"), "LearnedRounding": (GREEN, "D")}
    for method, (colour, marker) in styles.items():
        errors = [errors[method] for errors in layers.values()]
        axes.plot(np.arange(len(errors)), errors, marker=marker, color=colour, label=method, markersize=4, linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks(range(0, len(layers), 6), [f"layer {n}" for n in range(len(range(0, len(layers), 6)))])
    axes.legend(fontsize=8, framealpha=0, labelcolor=GREY)
    return axes


def from_model() -> dict[str, Any]:
    sys.path.append(str(DOCS.parent / "examples"))
    import minilm

    import eqquant as eqq

    model = minilm.load_model()
    weight = model.layers[0].up.weight
    return {
        "layers": eqq.analysis.analyze_tree(model, "int4").plot(),
        "histogram": eqq.analysis.analyze_error(weight, eqq.quantize(weight, "nf4")).plot(),
        "front": eqq.analysis.compare_formats(weight).plot(),
    }


results = json.loads((DOCS.parent / "benchmarks" / "accuracy.json").read_text())
pictures = {} if "--results" in sys.argv else from_model()
drawn = {"recipes": ("accuracy", draw_front), "layers": ("accuracy_layers", draw_layers)}
pictures |= {name: draw(results) for part, (name, draw) in drawn.items() if results[part]}
(DOCS / "images").mkdir(exist_ok=True)
for name, axes in pictures.items():
    path = DOCS / "images" / f"{name}.png"
    # Without the version of Matplotlib in it, the file changes only when the picture does.
    axes.figure.savefig(path, dpi=110, metadata={"Software": None})
    print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1000:.0f} kB")
