"""Makes the links of README.md absolute, so that they work on PyPI: `readme` of pyproject.toml, when hatchling builds.

Pages and pictures lead to the documentation of this version, other files to its tag in the repository.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


RELATIVE = re.compile(r"(\]\()(?![\w+.-]+:|#)([^)#\s]+)(#[\w-]+)?(?=\))")


def make_absolute(text: str, root: Path, version: str, urls: dict[str, str]) -> str:
    """Returns Markdown whose relative links are absolute. Raises if one of them leads to no file."""

    def replace(link: re.Match[str]) -> str:
        start, path, anchor = link[1], link[2], link[3] or ""
        if not (root / path).exists():
            raise ValueError(f"README.md links to {path}, which is not there. Correct the link.")
        if path.startswith("docs/"):
            page = re.sub(r"(^|/)index\.md$|\.md$", r"\1", path.removeprefix("docs/"))
            page += "/" * (path.endswith(".md") and page[-1:] not in ("", "/"))
            return f"{start}{urls['Documentation']}/{version}/{page}{anchor}"
        kind = "tree" if (root / path).is_dir() else "blob"
        return f"{start}{urls['Repository']}/{kind}/v{version}/{path}{anchor}"

    return RELATIVE.sub(replace, text)


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        if "readme" in metadata:  # of a source distribution, where it is done
            return
        root = Path(self.root)
        text = (root / "README.md").read_text("utf-8")
        text = make_absolute(text, root, metadata["version"], metadata["urls"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
