"""The stored notebooks are whole, and the documentation shows them. `nox -s examples` executes them."""

import json
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
NAV = re.findall(r"notebooks/(\w+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.M)


def test_the_nav_lists_each_notebook():
    assert sorted(NAV) == [path.stem for path in NOTEBOOKS]
    for name in NAV:
        page = (ROOT / "docs" / "notebooks" / f"{name}.md").read_text()
        assert page == f"[notebook: examples/notebooks/{name}.ipynb]\n"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored(path):
    text = path.read_text()
    assert len(text.encode()) < 200_000
    assert not re.search(r"/(home|root|tmp|usr|var|opt|work|Users)/|[A-Z]:\\\\", text), "a path of a machine"
    cells = json.loads(text)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert len(outputs) >= len(code) // 2
    for cell in code:
        source = "".join(cell["source"])
        assert all(source.count(whole) == 1 for whole in cell["metadata"].get("smoke", ()))
        for output in cell["outputs"]:
            assert output["output_type"] == "display_data" or output["name"] == "stdout"
            assert "image/svg+xml" not in output.get("data", {}) or cell["metadata"]["alt"]
        # A cell that prints, or ends with a figure, has stored outputs.
        assert bool(cell["outputs"]) == bool(re.search(r"(print|score|show)\(", source))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links(path):
    cells = json.loads(path.read_text())["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose) if not link.startswith("https://")]
    assert links and all((path.parent / link).exists() for link in links)
    assert "## What to read next" in prose
