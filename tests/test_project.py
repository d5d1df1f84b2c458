"""What stands around the package: the sessions of nox, and the commands that the README gives."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from beartype.roar import BeartypeCallHintViolation, BeartypeDecorHintException

from .annotations import checked, CHECKS
from .conftest import COMPILED, sample


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
    assert re.search(r"^nox .*-s tests( |$)", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)


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


@pytest.mark.parametrize("runs", [1, 2, 10])
@pytest.mark.parametrize("cases", [1, 3, 10, 25])
def test_samples_of_all_offsets_are_all_cases(cases, runs):
    samples = [sample("test_x", range(cases), 10, offset, runs) for offset in range(10)]
    assert {case for chosen in samples for case in chosen} == set(range(cases))
    least = cases // 10 or (1 if cases >= runs else 0)
    assert {len(chosen) for chosen in samples} <= {least, -(-cases // 10)}
