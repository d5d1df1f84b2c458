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

from tools import changed_tests
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
