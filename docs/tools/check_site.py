"""Checks the site that was built: `python docs/tools/check_site.py site`.

Each member that a page of the reference lists is there; each link within the site, and from the README to it, leads
somewhere; each picture and each script is there; no formula is raw; nothing is loaded from another server; the search
finds the words of other libraries, and not the changelog.
"""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import yaml


DOCS = Path(__file__).parents[1]
LISTED = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.M)

# A section of the page must hold the beginning of every word of the term.
SEARCHES = {
    "disable native kernels": "questions/",
    "ignore modules": "quick_start/",
    "skip layer": "quick_start/",
    "CUDA": "install/",
    "QuantizedTensor": "coming_from/",
    "nn.Linear4bit": "coming_from/",
    "load_in_4bit": "coming_from/",
    "observer": "coming_from/",
    "fake quant": "coming_from/",
    "QAT": "quick_start/",
    "GPTQ": "calibrate/",
    "KV cache": "cache/",
}


class _Page(HTMLParser):
    """Collects the anchors of a page, its text outside of code, and the addresses that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.text, self.loaded, self.links, self._code = set(), "", [], [], 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.add(given.get("id"))
        self._code += tag in ("code", "pre", "script", "style", "math")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") or (tag == "link" and given.get("rel") in ("stylesheet", "icon")):
            self.loaded.append(given.get("src") or given.get("href") or "")

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "pre", "script", "style", "math")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._code else data


def main(site: Path) -> None:
    pages = {path: _Page(path) for path in site.rglob("*.html")}
    by_path = {path.resolve(): page for path, page in pages.items()}
    anchors = set().union(*(page.anchors for page in pages.values()))
    listed = []
    for path in sorted((DOCS / "reference").glob("*.md")):
        for name, block in LISTED.findall(path.read_text() + "\n"):
            options = (yaml.safe_load(block) or {}).get("options", {})
            listed += [name, *(f"{name}.{member}" for member in options.get("members", ()))]
    wrong = [
        f"{name} is listed in docs/reference, and no page shows it. Does it have a docstring?"
        for name in listed
        if name not in anchors
    ]
    for path, page in pages.items():
        name = path.relative_to(site)
        wrong += [f"{name}: a raw formula, {raw}" for raw in re.findall(r"\$[^$\n]*[\\^_][^$\n]*\$", page.text)]
        wrong += [f"{name} loads {url} from another server" for url in page.loaded if re.match(r"(https?:)?//", url)]
    for path, page in pages.items():
        if path.name == "404.html":  # its addresses are those of the server's root
            continue
        for url in page.loaded:
            address = unquote(re.split("[?#]", url)[0])
            if address and not re.match(r"(\w+:|//)", url) and not (path.parent / address).is_file():
                wrong.append(f"{path.relative_to(site)} loads {url}, which is not there")
        for link in page.links:
            address, _, anchor = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            target = (path.parent / unquote(address)).resolve() if address else path.resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                wrong.append(f"{path.relative_to(site)} links to {link}, which is not there")
            elif anchor and target in by_path and unquote(anchor) not in by_path[target].anchors:
                wrong.append(f"{path.relative_to(site)} links to {link}: no such anchor")
    readme = (DOCS.parent / "README.md").read_text()
    for page, anchor in re.findall(r"\]\(docs/([^)#]+)\.md(?:#([^)]+))?\)", readme):
        target = (site / ("" if page == "index" else page) / "index.html").resolve()
        if target not in by_path or (anchor and anchor not in by_path[target].anchors):
            wrong.append(f"README.md links to docs/{page}.md#{anchor}: no such page or anchor")
    sections = json.loads((site / "search.json").read_text())["items"]
    for term, page in SEARCHES.items():
        texts = [f"{x['title']} {x['text']}".lower() for x in sections if x["location"].startswith(page)]
        if not any(all(word in text for word in term.lower().split()) for text in texts):
            wrong.append(f"a search for {term!r} does not find {page}")
    wrong += [f"the search finds {x['location']}" for x in sections if x["location"].startswith("changelog/")]
    if wrong:
        sys.exit("\n".join(wrong))
    print(
        f"{len(pages)} pages, {len(listed)} names of the reference: nothing is missing, raw, or loaded from elsewhere."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
