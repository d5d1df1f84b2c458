"""Adds a built site to those of other versions.

`python docs/tools/add_version.py site pages 0.1.0`. Every page then offers all versions, and the address without a
version leads to the newest release, or else to `dev`. The theme reads the versions from `versions.json`, as mike writes
it; mike itself does not run Zensical.
"""

import json
import re
import shutil
import sys
from pathlib import Path


def order(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))  # `dev` sorts before all releases


def main(site: Path, pages: Path, name: str) -> None:
    if not re.fullmatch(r"dev|\d+(\.\d+)*", name):
        sys.exit(f"A version must be `dev` or numbers, as 0.1.0. Got {name!r}.")
    shutil.rmtree(pages / name, ignore_errors=True)
    shutil.copytree(site, pages / name)
    names = sorted((path.parent.name for path in pages.glob("*/index.html")), key=order, reverse=True)
    versions = [{"version": name, "title": name, "aliases": ["latest"] * (name == names[0])} for name in names]
    (pages / "versions.json").write_text(json.dumps(versions, indent=1))
    (pages / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={names[0]}/">\n')
    (pages / ".nojekyll").touch()  # GitHub serves files as they are


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
