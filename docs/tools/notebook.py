"""A Markdown extension: the line `[notebook: examples/notebooks/tour.ipynb]` becomes the cells of that notebook.

Text stays Markdown, code and output become blocks, figures pictures. The first cell is followed by a link that holds
the notebook itself, so a page needs no other file.
"""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor


ROOT = Path(__file__).parents[2]
LINE = re.compile(r"\[notebook: (\S+\.ipynb)\]")


class Notebooks(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # Before blocks of code are found (25), and after line ends are made alike (30).
        md.preprocessors.register(_Cells(md), "notebook", 29)


class _Cells(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        found = []
        for line in lines:
            named = LINE.fullmatch(line)
            found += [line] if named is None else "\n\n".join(_markdown(ROOT / named[1])).split("\n")
        return found


def _markdown(path: Path) -> Iterator[str]:
    """The parts of a page."""
    source = path.read_bytes()
    for n, cell in enumerate(json.loads(source)["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield _links(text)
        else:
            yield f"```python\n{text}\n```"
            for output in cell["outputs"]:
                yield _output(output, cell["metadata"])
        if n == 0:
            yield f'<a class="md-button" download="{path.name}" href="{_url(source, "x-ipynb+json")}">Download</a>'


def _links(text: str) -> str:
    """Links of a notebook in the repository, as links between pages."""
    text = re.sub(r"\]\(\.\./[\w/]+\.py\)", "](../examples.md)", text.replace("](../../docs/", "](../"))
    return re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", text)


def _output(output: dict[str, Any], metadata: dict[str, Any]) -> str:
    data = output.get("data", {})
    if svg := data.get("image/svg+xml"):
        return f'<img alt="{metadata["alt"]}" src="{_url("".join(svg).encode(), "svg+xml", "image")}">'
    text = "".join(output.get("text", ()) or data["text/plain"]).rstrip("\n")
    return f"```text\n{text}\n```"


def _url(content: bytes, kind: str, family: str = "application") -> str:
    return f"data:{family}/{kind};base64,{base64.b64encode(content).decode()}"


def makeExtension(**kwargs: Any) -> Notebooks:
    return Notebooks(**kwargs)
