"""Files appear whole, whenever a process dies and whatever others do at the same time."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.io import _atomic, _safetensors, _save


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def save(where, value, shard_nbytes=8):
    eqq.save(where, {"w": jnp.full(2, value), "v": jnp.full(3, value)}, shard_nbytes=shard_nbytes)


def read_values(where):
    """The values in all arrays of a checkpoint, one unless they are of several saves."""
    loaded = eqq.load(where)
    return {*np.unique(loaded["w"]).tolist(), *np.unique(loaded["v"]).tolist()}


# Deaths


def test_an_error_while_writing_leaves_the_old_file(path):
    eqq.save(path, {"w": jnp.ones(2)})
    with pytest.raises(RuntimeError, match="no more"):
        with _atomic.open_replacement(path) as f:
            f.write(b"half")
            raise RuntimeError("no more")
    assert list(path.parent.iterdir()) == [path]
    assert eqq.load(path)["w"].shape == (2,)
    link = path.with_name("link.safetensors")
    link.symlink_to(path)
    eqq.save(link, {"w": jnp.ones(3)})
    assert link.is_symlink() and eqq.load(path)["w"].shape == (3,)


class Died(BaseException):
    """Stands for the end of the process: from then on nothing that changes files has any effect."""


def die_at(monkeypatch, call, error):
    """Makes the process die, or raise an error once, before the n-th call of the system that changes files.

    Returns the calls so far.
    """
    calls = []
    for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "open"), (Path, "mkdir")):
        original = getattr(owner, name)

        def counted(*args, _original=original, _name=name, **kwargs):
            if _name != "open" or "xb" in args:
                calls.append(_name)
                if len(calls) == call + 1 or (len(calls) > call and error is Died):
                    raise error
            return _original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("error", [Died, KeyboardInterrupt])
@pytest.mark.parametrize("shard_nbytes", [None, 8])
def test_a_crash_leaves_the_old_file_or_the_new_one(path, shard_nbytes, error):
    where = path.with_suffix("") if shard_nbytes else path
    for call in range(100):
        save(where, 0.0, shard_nbytes)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = die_at(monkeypatch, call, error)
            try:
                save(where, 1.0, shard_nbytes)
            except error:
                pass
        assert read_values(where) in ({0.0}, {1.0})
        if len(calls) <= call:
            assert read_values(where) == {1.0} and call >= (12 if shard_nbytes else 4)
            return
    raise AssertionError("the save did not end")


# Other processes


def run_during_next_call(monkeypatch, module, name, do):
    """Runs `do`, like another process would, before the next call of a function."""
    original = getattr(module, name)

    def called(*args):
        monkeypatch.setattr(module, name, original)
        do()
        return original(*args)

    monkeypatch.setattr(module, name, called)


def test_other_processes_read_and_write_at_the_same_time(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    save(folder, 0.0)
    run_during_next_call(
        monkeypatch, _safetensors, "read", lambda: save(folder, 1.0)
    )  # removes the shards that the index listed
    assert read_values(folder) == {1.0}
    run_during_next_call(monkeypatch, _save, "write", lambda: save(folder, 2.0))
    save(folder, 3.0)
    assert read_values(folder) == {3.0}
    save(folder, 4.0)
    assert read_values(folder) == {4.0} and len(list(folder.iterdir())) == 3
    run_during_next_call(
        monkeypatch, _save, "open_replacement", lambda: save(folder, 5.0)
    )  # between the shards and the index
    save(folder, 6.0)
    assert read_values(folder) == {6.0}


def test_another_process_makes_the_folder(tmp_path, monkeypatch):
    folder, message = tmp_path / "model", "Another process made this folder meanwhile"
    run_during_next_call(monkeypatch, _save, "open_replacement", lambda: save(folder, 2.0))
    with pytest.raises(FileExistsError, match=message):
        save(folder, 1.0)
    assert read_values(folder) == {2.0}
    save(folder, 3.0)
    assert read_values(folder) == {3.0}
    other = tmp_path / "other"
    with pytest.raises(FileExistsError, match=message), _atomic.make_folder(other):
        run_during_next_call(
            monkeypatch, os, "replace", lambda: save(other, 4.0)
        )  # between a look for the folder and its name
    assert read_values(other) == {4.0} and sorted(tmp_path.iterdir()) == [folder, other]
