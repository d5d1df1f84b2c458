"""Draws the pictures of `analysis.md`, from all-MiniLM-L6-v2. `examples/minilm.py` says where its weights are.

Needs `pip install eqquant[plot]`. Pictures go to `docs/images/`.
"""

import pathlib
import sys

import eqquant as eqq


DOCS = pathlib.Path(__file__).parent
sys.path.append(str(DOCS.parent / "examples"))

import minilm


model = minilm.load_model()
weight = model.layers[0].up.weight
pictures = {
    "layers": eqq.analysis.analyze_tree(model, "int4").plot(),
    "histogram": eqq.analysis.analyze_error(weight, eqq.quantize(weight, "nf4")).plot(),
    "front": eqq.analysis.compare_formats(weight).plot(),
}
(DOCS / "images").mkdir(exist_ok=True)
for name, axes in pictures.items():
    path = DOCS / "images" / f"{name}.png"
    # Without the version of Matplotlib in it, the file changes only when the picture does.
    axes.figure.savefig(path, dpi=110, metadata={"Software": None})
    print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1000:.0f} kB")
