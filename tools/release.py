"""Checks a release before anything of it is published; `nox -s release` and the workflow of that name run it.

python -m tools.release sync          # copies versions and addresses to the files that repeat them
python -m tools.release figures       # runs the long sessions, and writes what they count into the changelog
python -m tools.release tag v0.1.0    # whether this commit may have that tag
python -m tools.release dist FOLDER   # whether the distributions there are complete
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesParser
from pathlib import Path


ROOT = Path(__file__).parents[1]
UNSET = "OWNER"  # stands in the address until there is one
# The facts that files repeat: the file, a pattern whose group holds the copy, and the name of the fact.
COPIES = (
    ("CITATION.cff", r"^version: (.*)$", "version"),
    ("CITATION.cff", r"^repository-code: (.*)$", "Repository"),
    ("CITATION.cff", r"^url: (.*)$", "Documentation"),
    ("docs/compatibility.md", r"^  version = \{(.*)\},$", "version"),
    ("native/pyproject.toml", r'^Repository = "(.*)"$', "Repository"),
    ("native/pyproject.toml", r'^Documentation = "(.*)"$', "Documentation"),
    ("native/pyproject.toml", r'^version = "(\d+)\.', "ABI"),
    ("pyproject.toml", r"eqquant-cpu==(\d+)\.\*", "ABI"),
)
# What only a release runs whole: the sessions of nox, and the line that each ends with.
FIGURES = {"sweep": "sweep", "real_readers": "real_readers", "clients": "clients", "grid": "fuzz -- grid"}
CLOSING = re.compile(r"(\d+ passed.*?) in [\d.]+s|(\d+ cells of the grid on .*)")
# What the wheels of `eqquant-cpu` are made of.
KERNELS = ("native/CMakeLists.txt", "native/eqquant_cpu", "native/src")


def read_facts(root: Path = ROOT) -> dict[str, str]:
    """Returns the version and the addresses in pyproject.toml, and the number of the interface of the kernels."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    abi = re.search(r"^ABI = (\d+)", (root / "eqquant" / "_native" / "library.py").read_text(), re.M)
    if abi is None:
        raise ValueError("eqquant/_native/library.py must have a line `ABI = N`. Got none.")
    return {"version": project["version"], "ABI": abi[1], **project["urls"]}


def sync(root: Path = ROOT, *, write: bool = True) -> list[str]:
    """Returns the files whose copies of facts differ, and corrects them."""
    facts, stale = read_facts(root), []
    for name, pattern, fact in COPIES:
        text = (root / name).read_text()
        found = list(re.finditer(pattern, text, re.M))
        if len(found) != 1:
            raise ValueError(f"{name} must have one line like {pattern}. Got {len(found)}.")
        start, end = found[0].span(1)
        if text[start:end] != facts[fact]:
            stale.append(name)
            if write:
                (root / name).write_text(text[:start] + facts[fact] + text[end:])
    return sorted(set(stale))


def write_figures(names: list[str], root: Path = ROOT) -> None:
    """Runs long sessions, and writes what each counted below the version in the changelog. Raises where one fails."""
    for name in names:
        command = ["nox", "-s", *FIGURES[name].split()]
        done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        counts = [a or b for a, b in CLOSING.findall(done.stdout)]
        if done.returncode or not counts:
            sys.exit(f"{done.stdout[-4000:]}\n`nox -s {FIGURES[name]}` must pass, and say how much did.")
        path, version = root / "CHANGELOG.md", read_facts(root)["version"]
        line = f"- `nox -s {FIGURES[name]}`: {counts[-1]}."
        path.write_text(place_figure(path.read_text(), version, line))
        print(line, flush=True)


def place_figure(changelog: str, version: str, line: str) -> str:
    """Returns the changelog with a line, or another in place of an older one, in the section "Checked" of a version."""
    found = re.search(rf"^## \[{re.escape(version)}\].*?(?=^## |\Z)", changelog, re.M | re.S)
    if found is None:
        raise ValueError(f"CHANGELOG.md must have a section for {version}. Got none. Write what changed.")
    section, name = found[0].rstrip("\n"), line.partition(":")[0]
    if "### Checked" not in section:
        section += "\n\n### Checked\n"
    if not (older := re.compile(rf"^{re.escape(name)}:.*$", re.M)).search(section):
        section += f"\n{line}"
    section = older.sub(lambda _: line, section)
    return f"{changelog[: found.start()]}{section}\n{changelog[found.end() :] and chr(10)}{changelog[found.end() :]}"


def check_tag(tag: str, root: Path = ROOT) -> Iterator[str]:
    """Yields why the commit may not have the tag, with remedies."""
    facts = read_facts(root)
    version = facts["version"]
    if tag != f"v{version}":
        yield f"The tag must be v{version}, as pyproject.toml says. Got {tag}. Raise the version, or tag v{version}."
    if any(UNSET in fact for fact in facts.values()):
        yield f"The address must be set. Got {UNSET}: replace it in `[project.urls]` of pyproject.toml."
    if stale := sync(root, write=False):
        yield f"{', '.join(stale)} must repeat pyproject.toml. Run `python -m tools.release sync`."
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    changes = re.search(rf"{heading}(.*?)(?=^## |\Z)", (root / "CHANGELOG.md").read_text(), re.M | re.S)
    if changes is None:
        yield f"CHANGELOG.md must have a line `## [{version}] - YYYY-MM-DD`. Write the date of the release."
    elif missing := [name for name, session in FIGURES.items() if f"- `nox -s {session}`: " not in changes[1]]:
        yield f"CHANGELOG.md must have figures of {', '.join(missing)}. Run `python -m tools.release figures`."
    pages = ("README.md", "docs/index.md", "docs/install.md")
    if early := [name for name in pages if re.search("not on PyPI", (root / name).read_text(), re.I)]:
        yield f"{', '.join(early)} must not say that it is not on PyPI. Remove the sentence."
    if not (root / "tests" / "golden" / "files" / version).is_dir():
        yield f"tests/golden/files/{version} must hold files of this version. Run `python -m tests.golden_files`."
    previous = _git(root, "describe", "--tags", "--abbrev=0", "--match", "v*", f"--exclude={tag}")
    if previous and (changed := _git(root, "diff", "--name-only", previous, "--", *KERNELS)):
        released = tomllib.loads(_git(root, "show", f"{previous}:native/pyproject.toml"))["project"]["version"]
        if released == tomllib.loads((root / "native" / "pyproject.toml").read_text())["project"]["version"]:
            names = ", ".join(changed.split()[:3])
            yield (
                f"eqquant-cpu must have another version than in {previous}, since {names} changed. Got {released}. "
                "Raise it in native/pyproject.toml, and `ABI` too if functions or arguments changed."
            )


def check_distributions(folder: Path) -> Iterator[str]:
    """Yields what the distributions in a folder lack, with remedies."""
    found = {}
    for name in ("eqquant", "eqquant_cpu"):
        for ending in (".tar.gz", ".whl"):
            paths = list(folder.glob(f"{name}-*{ending}"))
            if not paths:
                yield f"{folder} must hold {name}-*{ending}. Got none. Run `nox -s release`."
            for path in paths:
                names, metadata = (_read_wheel if ending == ".whl" else _read_source)(path)
                found[name] = metadata
                yield from _check_names(path.name, names, ("LICENSE", "py.typed"))
                yield from _check_readme(path.name, metadata.get_payload())
    if len(found) == 2:
        from packaging.requirements import Requirement

        needed = [Requirement(text) for text in found["eqquant"].get_all("Requires-Dist")]
        version = found["eqquant_cpu"]["Version"]
        if not any(r.name == "eqquant-cpu" and version in r.specifier for r in needed):
            yield f"eqquant[cpu] must take eqquant-cpu {version}. Run `python -m tools.release sync`, and build again."


def _read_wheel(path: Path) -> tuple[list[str], Message]:
    with zipfile.ZipFile(path) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return file.namelist(), BytesParser().parsebytes(file.read(name))


def _read_source(path: Path) -> tuple[list[str], Message]:
    with tarfile.open(path) as file:
        content = file.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        if content is None:
            raise ValueError(f"{path} must hold a file PKG-INFO. Got another thing of this name.")
        return file.getnames(), BytesParser().parsebytes(content.read())


def _check_names(wheel: str, names: list[str], wanted: tuple[str, ...]) -> Iterator[str]:
    for name in wanted:
        if not any(path.rpartition("/")[2] == name for path in names):
            yield f"{wheel} must hold {name}. Got none. Add it to what pyproject.toml lists."


def _check_readme(name: str, text: str) -> Iterator[str]:
    """Renders the README as PyPI does."""
    from readme_renderer import markdown

    html = markdown.render(text)
    if not html:
        yield f"The README of {name} must be Markdown that PyPI renders. Got none, or one that it cannot."
    for link in re.findall(r'(?:href|src)="([^"]*)"', html or ""):
        if not re.match(r"https?://", link) and f'id="{link.removeprefix("#")}"' not in html:
            yield f"The README of {name} links to {link}, which leads nowhere on PyPI. Make the link absolute."


def _git(root: Path, *arguments: str) -> str:
    """What git prints. Nothing, where it fails."""
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("sync")
    commands.add_parser("figures").add_argument("names", nargs="*", choices=list(FIGURES), default=list(FIGURES))
    commands.add_parser("tag").add_argument("tag")
    commands.add_parser("dist").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "sync":
        print("\n".join(f"{name}: corrected" for name in sync()) or "Nothing to correct.")
        return
    if given.command == "figures":
        write_figures(given.names)
        return
    problems = list(check_tag(given.tag) if given.command == "tag" else check_distributions(given.folder))
    if problems:
        sys.exit("\n".join(problems))
    print(f"{given.tag if given.command == 'tag' else given.folder}: ready")


if __name__ == "__main__":
    main()
