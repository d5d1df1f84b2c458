"""What stands around the package: the sessions of nox, and the commands that the README gives."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from beartype.roar import BeartypeCallHintViolation, BeartypeDecorHintException

from tools import changed_tests, release
from tools.changed_tests import find_tests, TESTS

from .annotations import checked, CHECKS
from .conftest import COMPILED, LONG, ROOM, sample


if find_spec("nox") is None:
    pytest.skip("nox is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[1]
COMMANDS = re.findall(r"```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def nox(directory, *args):
    # Where CI is set, nox is stricter. And it must install nothing for itself.
    env = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("NOX")}
    env["NOX_SCRIPT_MODE"] = "none"
    command = [sys.executable, "-m", "nox", "-f", str(directory / "noxfile.py"), *args]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=120)


def test_a_missing_python_fails(tmp_path):
    noxfile = (ROOT / "noxfile.py").read_text()
    old = 'OLDEST_PYTHON = "3.11"'
    assert old in noxfile
    (tmp_path / "noxfile.py").write_text(noxfile.replace(old, 'OLDEST_PYTHON = "3.99"'))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = nox(tmp_path, "-s", "tests_oldest")
    assert done.returncode != 0 and "3.99 not found" in done.stderr


def test_commands_of_the_readme():
    """They accept any supported Python, and nox and continuous integration use the same."""
    sessions = json.loads(nox(ROOT, "-s", "demo", "tests", "-l", "--json").stdout)
    assert [session["name"] for session in sessions] == ["demo", "tests"]
    for command, session in zip(COMMANDS, sessions, strict=True):
        assert command == f"python3 -m venv .venv && .venv/bin/pip install nox uv && .venv/bin/nox -s {session['name']}"
        assert session["python"] is None
    assert re.search(r"^run tests( |$)", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)


def test_nothing_is_compiled_while_tests_are_collected(pytestconfig):
    """Every process of pytest collects every test. So arrays of a module belong in functions, or to NumPy."""
    assert pytestconfig.stash[COMPILED] == []


def test_annotations_are_checked_when_a_function_is_called():
    def function(x: int) -> str:
        return "" if x else x

    check = checked(function)
    assert check(1) == ""
    for x in (0, "1"):
        with pytest.raises(BeartypeCallHintViolation):
            check(x)


def test_a_wrong_annotation_is_an_error():
    def function(x: "3 + 4"): ...

    with pytest.raises(BeartypeDecorHintException):
        checked(function)(7)


@pytest.mark.long
def test_all_annotations_are_types(pytestconfig):
    """Those of functions that no test calls too."""
    import eqquant  # noqa: F401

    checks = list(CHECKS)
    assert bool(checks) == bool(pytestconfig.option.jaxtyping_packages)
    for make in checks:
        make()


# Releases


def copy_repository(folder):
    """The files that a release reads, with an address, a date and figures, under git."""
    for name in ("README.md", "CHANGELOG.md", "pyproject.toml", "eqquant/_native/library.py", "docs/index.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((ROOT / name).read_text())
    for name in {name for name, *_ in release.COPIES} | {"docs/install.md", "native/src/ffi/ffi.cpp"}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests/golden/files/0.1.0").mkdir(parents=True)
    change(folder, "pyproject.toml", release.UNSET, "someone")
    change(folder, "CHANGELOG.md", r"^## \[0.1.0\] - .*$", "## [0.1.0] - 2026-12-01")
    for name in ("README.md", "docs/index.md", "docs/install.md"):
        change(folder, name, "[Nn]ot on PyPI|not on PyPI yet", "here")
    release.sync(folder)
    for session in release.FIGURES.values():
        text = release.place_figure((folder / "CHANGELOG.md").read_text(), "0.1.0", f"- `nox -s {session}`: 7 passed.")
        (folder / "CHANGELOG.md").write_text(text)
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def change(folder, name, old, new):
    text, count = re.subn(old, new, (folder / name).read_text(), flags=re.MULTILINE)
    (folder / name).write_text(text)
    return count


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder, tag=None):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "A change")
    if tag:
        git(folder, "tag", tag)


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def test_copies_of_versions_and_addresses_agree():
    """`ABI`, the version and the address stand in one place each: `python -m tools.release sync` copies them."""
    assert release.sync(write=False) == []
    assert (ROOT / "native" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@needs_git
def test_what_a_tag_needs(tmp_path):
    folder = copy_repository(tmp_path)
    assert list(release.check_tag("v0.1.0", folder)) == []
    for name, old, new, problem in (
        ("pyproject.toml", '^version = "0.1.0"', 'version = "0.2.0"', "The tag must be v0.2.0"),
        ("pyproject.toml", "someone", "OWNER", "The address must be set. Got OWNER"),
        ("native/pyproject.toml", "someone", "another", "native/pyproject.toml must repeat pyproject.toml"),
        ("eqquant/_native/library.py", r"^ABI = \d+", "ABI = 77", "native/pyproject.toml, pyproject.toml must repeat"),
        ("CHANGELOG.md", "- 2026-12-01", "- Unreleased", "must have a line `## \\[0.1.0\\] - YYYY-MM-DD`"),
        ("CHANGELOG.md", "^- `nox -s clients`: .*", "", "must have figures of clients. Run `python -m tools.release"),
        ("README.md", "^# eqquant", "Not on PyPI yet.", "README.md must not say that it is not on PyPI"),
    ):
        before = (folder / name).read_text()
        assert change(folder, name, old, new)
        assert re.search(problem, "\n".join(release.check_tag("v0.1.0", folder))), problem
        (folder / name).write_text(before)
    (folder / "tests/golden/files/0.1.0").rmdir()
    assert "Run `python -m tests.golden_files`" in "\n".join(release.check_tag("v0.1.0", folder))


@needs_git
def test_kernels_that_changed_have_a_new_version(tmp_path):
    """Otherwise what is on PyPI would stay, and the change with it."""
    folder = copy_repository(tmp_path)
    git(folder, "tag", "v0.0.9")
    (folder / "native/README.md").write_text("Words.")
    commit(folder)
    assert list(release.check_tag("v0.1.0", folder)) == []
    assert change(folder, "native/src/ffi/ffi.cpp", "include", "include ")
    commit(folder, "v0.1.0")
    problem = "\n".join(release.check_tag("v0.1.0", folder))
    assert "another version than in v0.0.9, since native/src/ffi/ffi.cpp changed. Got " in problem
    assert change(folder, "native/pyproject.toml", r'^version = "(\d+)\.\d+"', r'version = "\1.99"')
    assert list(release.check_tag("v0.1.0", folder)) == []


def test_figures_have_their_place():
    text = "# Changelog\n\n## [0.2.0] - Unreleased\n\nWords.\n\n## [0.1.0] - 2026-12-01\n\nOld.\n"
    place = lambda text, line: release.place_figure(text, "0.2.0", line)
    two = place(place(text, "- `nox -s sweep`: 1 passed."), "- `nox -s clients`: 2 passed.")
    assert place(two, "- `nox -s sweep`: 3 passed.") == (
        "# Changelog\n\n## [0.2.0] - Unreleased\n\nWords.\n\n### Checked\n\n- `nox -s sweep`: 3 passed.\n"
        "- `nox -s clients`: 2 passed.\n\n## [0.1.0] - 2026-12-01\n\nOld.\n"
    )
    assert release.place_figure(text, "0.1.0", "- a: b").endswith("Old.\n\n### Checked\n\n- a: b\n")
    for line, count in (
        ("==== 12 passed, 3 skipped, 1 warning in 4.51s (0:00:04) ====", "12 passed, 3 skipped, 1 warning"),
        ("2400 cells of the grid on generic avx2: 0 wrong", "2400 cells of the grid on generic avx2: 0 wrong"),
    ):
        assert ["".join(found) for found in release.CLOSING.findall(f"before\n{line}\nafter")] == [count]


def test_figures_of_a_session_that_fails_are_not_written(tmp_path, monkeypatch):
    for name in ("CHANGELOG.md", "pyproject.toml", "eqquant/_native/library.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    before = (tmp_path / "CHANGELOG.md").read_text()
    line = "= 12 passed, 1 failed in 4.51s ="
    for code, output, written in ((1, line, False), (0, "nothing ran", False), (0, line, True)):
        done = subprocess.CompletedProcess([], code, stdout=output)
        monkeypatch.setattr(release.subprocess, "run", lambda *args, done=done, **options: done)
        with contextlib.nullcontext() if written else pytest.raises(SystemExit, match="clients` must pass"):
            release.write_figures(["clients"], tmp_path)
        text = (tmp_path / "CHANGELOG.md").read_text()
        assert ("- `nox -s clients`: 12 passed, 1 failed." in text) == written and (text == before) != written


def write_distributions(folder, *, readme="# Words", leave_out=(), version="1.0"):
    """What `check_distributions` reads of both, without code."""
    for name, number, extra in (("eqquant", "0.1.0", "eqquant-cpu==1.*"), ("eqquant_cpu", version, "jax")):
        head = f"Metadata-Version: 2.4\nName: {name}\nVersion: {number}\nRequires-Dist: {extra}\n\n{readme}"
        inside = f"{name}-{number}.dist-info"
        files = {f"{name}/py.typed": "", f"{inside}/licenses/LICENSE": "", f"{inside}/METADATA": head}
        with zipfile.ZipFile(folder / f"{name}-{number}-py3-none-any.whl", "w") as wheel:
            for path, text in files.items():
                if path.rpartition("/")[2] not in leave_out:
                    wheel.writestr(path, text)
        with tarfile.open(folder / f"{name}-{number}.tar.gz", "w:gz") as source:
            for path, text in {"PKG-INFO": head, "LICENSE": "", "py.typed": ""}.items():
                entry = tarfile.TarInfo(f"{name}-{number}/{path}")
                entry.size = len(text)
                source.addfile(entry, io.BytesIO(text.encode()))
    return folder


@pytest.mark.parametrize(
    "options, problem",
    [
        ({}, ""),
        ({"leave_out": ("LICENSE",)}, "-any.whl must hold LICENSE. Got none."),
        ({"leave_out": ("py.typed",)}, "-any.whl must hold py.typed. Got none."),
        ({"version": "2.0"}, "eqquant[cpu] must take eqquant-cpu 2.0."),
        ({"readme": "[page](docs/install.md)"}, "links to docs/install.md, which leads nowhere on PyPI"),
        ({"readme": "![picture](a.svg)"}, "links to a.svg, which leads nowhere on PyPI"),
        ({"readme": ""}, "must be Markdown that PyPI renders"),
    ],
)
def test_what_distributions_need(tmp_path, options, problem):
    pytest.importorskip("readme_renderer.markdown")
    found = "\n".join(release.check_distributions(write_distributions(tmp_path, **options)))
    assert problem in found and bool(problem) == bool(found)


def test_a_distribution_that_is_missing(tmp_path):
    found = "\n".join(release.check_distributions(tmp_path))
    assert "must hold eqquant_cpu-*.whl. Got none." in found and "must hold eqquant-*.tar.gz" in found


def test_links_of_the_readme_become_absolute(tmp_path):
    pytest.importorskip("hatchling")
    from hatch_build import make_absolute

    (tmp_path / "docs").mkdir()
    for name in ("docs/index.md", "docs/files.md", "docs/a.svg", "LICENSE"):
        (tmp_path / name).touch()
    urls = {"Documentation": "https://docs", "Repository": "https://code"}
    absolute = lambda text: make_absolute(text, tmp_path, "0.1.0", urls)
    for link, wanted in (
        ("docs/files.md#results", "https://docs/0.1.0/files/#results"),
        ("docs/index.md", "https://docs/0.1.0/"),
        ("docs/a.svg", "https://docs/0.1.0/a.svg"),
        ("LICENSE", "https://code/blob/v0.1.0/LICENSE"),
        ("docs/", "https://docs/0.1.0/"),
        ("https://elsewhere/docs/files.md", "https://elsewhere/docs/files.md"),
    ):
        assert absolute(f"![a]({link}), [b\nc]({link})") == f"![a]({wanted}), [b\nc]({wanted})"
    with pytest.raises(ValueError, match="links to docs/none.md, which is not there"):
        absolute("[a](docs/none.md)")


def test_statuses_agree():
    """The same word in the classifiers of both distributions, the README and the site."""
    for name in ("pyproject.toml", "native/pyproject.toml"):
        assert '"Development Status :: 3 - Alpha"' in (ROOT / name).read_text()
    for name in ("README.md", "docs/index.md"):
        assert "Status: alpha" in (ROOT / name).read_text()


def test_workflows_pin_actions():
    """By the hash of a commit, with its version beside it, which Dependabot raises together."""
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for used in re.findall(r"uses: (.*)", path.read_text()):
            pinned = re.fullmatch(r"\./\.github/workflows/\w+\.yml|[\w/-]+@[0-9a-f]{40} # v[\d.]+", used)
            assert pinned, f"{path.name} uses {used}"


def test_versions_of_the_documentation(tmp_path):
    site, pages = tmp_path / "site", tmp_path / "pages"
    site.mkdir()
    add = [sys.executable, str(ROOT / "docs/tools/add_version.py"), str(site), str(pages)]
    for name in ("dev", "0.9.0", "0.10.0", "0.9.1", "dev"):
        (site / "index.html").write_text(name)
        subprocess.run([*add, name], check=True)
    listed = json.loads((pages / "versions.json").read_text())
    assert [entry["version"] for entry in listed] == ["0.10.0", "0.9.1", "0.9.0", "dev"]
    assert listed[0]["aliases"] == ["latest"] and "url=0.10.0/" in (pages / "index.html").read_text()
    assert (pages / "0.9.0" / "index.html").read_text() == "0.9.0"
    done = subprocess.run([*add, "../elsewhere"], capture_output=True, text=True)
    assert done.returncode and "must be `dev` or numbers" in done.stderr


# Samples


# Tests of one quick case, of several, and of many; and others.
MARKS = {f"tests/test_a.py::test_{n}[{n}-{i}]": set() for n in (1, 2, 5, 25) for i in range(n)}
MARKS |= {f"tests/test_b.py::test_{mark}[{i}]": {mark} for mark in ("long", "slow") for i in range(200)}


def name_tests(cases):
    return {case.partition("[")[0] for case in cases if "test_a.py" in case}


def test_a_sample_repeats_and_has_a_case_of_each_quick_test():
    samples = [sample(MARKS, 5, str(seed))[0] for seed in range(200)]
    assert samples[:9] == [sample(dict(reversed(MARKS.items())), 5, str(seed))[0] for seed in range(9)]
    assert set.union(*samples) == MARKS.keys()
    assert all(name_tests(chosen) == name_tests(MARKS) for chosen in samples)
    for mark, least, most in (("long", 15, 75), ("slow", 3, 50)):
        assert all(least < sum(mark in case for case in chosen) < most for chosen in samples)


def test_what_changed_runs_whole_if_there_is_room():
    marks = dict(MARKS)
    a, b = ({case for case in marks if name in case and "slow" not in case} for name in ("test_a", "test_b"))
    chosen, note = sample(marks, 5, "x", ["test_a"])
    assert a <= chosen and not b <= chosen and note == ""
    marks |= {f"tests/test_b.py::test_long[{i}]": {"long"} for i in range(2 * ROOM // LONG)}
    chosen, note = sample(marks, 5, "x", ["test_a", "test_b"])
    assert a <= chosen and not b <= chosen and note.endswith("concerns it: one in 3 of test_b.")


def test_no_sample_has_what_is_slow_and_long():
    assert sample({"test_a.py::test": {"slow", "long"}}, 1, "x", ["test_a"])[0] == set()


def test_each_file_of_the_package_has_tests():
    paths = [
        path.relative_to(ROOT).as_posix()
        for room in ("eqquant", "eqquant_cli")
        for path in ROOT.glob(f"{room}/**/*.py")
    ]
    found = {path: find_tests(path) for path in paths}
    assert [path for path, names in found.items() if not names] == [], "add a row to tools/changed_tests.py"
    named = re.findall(r"test_\w+\.py", " ".join(TESTS.values()))
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []
    assert find_tests("tests/test_cache.py") == ["test_cache"] and find_tests("tests/helpers.py") == []


def test_what_changed_is_compared_with_a_commit(monkeypatch, capsys):
    """With none that git does not know."""
    monkeypatch.setenv("EQQUANT_BASE", "0" * 40)
    changed_tests.main()
    assert capsys.readouterr().out == ""
