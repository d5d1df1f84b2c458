"""Pages of the documentation whose code runs as it is printed."""

import re
from pathlib import Path

import jax
import numpy as np

import eqquant as eqq


DOCS = Path(__file__).parents[1] / "docs"


def run(page):
    """The names that the code of a page defines."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert blocks
    names = {}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    return names


def test_quick_start(capsys):
    names = run("quick_start.md")
    assert np.isfinite(names["loss"]) and eqq.is_quantized(names["small"].layers[0].weight)
    out = capsys.readouterr().out
    assert "cosine to the float outputs: 0.989" in out
    shown = re.search(r"^```text\n(.*?)^```", (DOCS / "quick_start.md").read_text(), re.M | re.S)
    lines = lambda text: [line.rstrip() for line in text.strip().splitlines()]
    assert shown and lines(shown[1]) == lines(out)[1:]


def test_quantize(capsys):
    assert eqq.is_quantized(run("quantize.md")["small"].layers[0].weight)
    assert "layers.0.weight" in capsys.readouterr().out


def test_concepts():
    q = run("concepts.md")["q"]
    table = {m[0]: m[1] for m in re.findall(r"^\| (code.*?) \| (.*) \|$", (DOCS / "concepts.md").read_text(), re.M)}
    assert [int(code) for code in table["code"].split("|")] == (np.asarray(eqq.unpack(q), int) - 8).tolist()
    shown = [float(value) for value in table["code × scale"].split("|")]
    np.testing.assert_allclose(np.asarray(q.dequantize()), shown, atol=1e-3)
