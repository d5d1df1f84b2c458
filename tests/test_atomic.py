"""Files appear whole, whenever a process dies and whatever others do at the same time."""

import errno
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.io import _atomic, _files, _safetensors, _save


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
        with _atomic.replace(path) as new:
            new.write_bytes(b"half")
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
    methods = ((Path, "unlink"), (Path, "open"), (Path, "mkdir"))
    for owner, name in ((os, "replace"), (os, "fsync"), (tempfile, "mkdtemp"), (shutil, "rmtree"), *methods):
        original = getattr(owner, name)

        def counted(*args, _original=original, _name=name, **kwargs):
            if _name != "open" or {"wb", "w"} & {*args, kwargs.get("mode")}:
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
            assert not [*path.parent.rglob(".*")]  # what the dead left is gone
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
    run_during_next_call(monkeypatch, os, "fsync", lambda: save(folder, 5.0))  # when all files are written
    save(folder, 6.0)
    assert read_values(folder) == {6.0} and len(list(folder.iterdir())) == 3
    run_during_next_call(monkeypatch, _files, "_list_files", lambda: save(folder, 7.0))  # its shards are no others
    save(folder, 8.0)
    assert read_values(folder) == {8.0} and len(list(folder.iterdir())) == 3


def test_another_process_makes_the_folder(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    run_during_next_call(monkeypatch, _save, "write", lambda: save(folder, 2.0))
    with pytest.raises(FileExistsError, match="Another process made this folder meanwhile"):
        save(folder, 1.0)
    assert read_values(folder) == {2.0}
    save(folder, 3.0)
    assert read_values(folder) == {3.0}


def write_mlx(folder, value, **options):
    eqq.io.write(folder, {"w": np.full(2, value, np.float32)}, "mlx", config={"value": value}, **options)


def read_mlx(folder):
    """The value of the configuration and that of the weights."""
    return json.loads((folder / "config.json").read_text())["value"], float(eqq.io.open(folder)["w"][0])


@pytest.mark.skipif(os.name != "posix", reason="locks of folders")
def test_one_of_two_processes_wins_whole(tmp_path, monkeypatch):
    write_mlx(tmp_path, 0.0)
    other = threading.Thread(target=write_mlx, args=(tmp_path, 2.0))

    original = _atomic._move

    def move(new, path):
        if path.name == "model.safetensors" and not other.ident:  # the configuration of the first is there already
            other.start()
            other.join(0.2)
        original(new, path)

    monkeypatch.setattr(_atomic, "_move", move)
    write_mlx(tmp_path, 1.0)
    other.join()
    assert read_mlx(tmp_path) == (2.0, 2.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_another_process_writes_another_layout_meanwhile(tmp_path, monkeypatch):
    run_during_next_call(monkeypatch, os, "fsync", lambda: save(tmp_path, 2.0))
    with pytest.raises(ValueError, match="must hold no other weights.*index.json"):
        write_mlx(tmp_path, 1.0)
    assert read_values(tmp_path) == {2.0} and not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, PermissionError])
def test_files_of_a_folder_move_together(tmp_path, monkeypatch, error):
    """Each move fails once, as on Windows where a reader has the file open."""
    original, old = _atomic._move, {"config.json": b"{}", "model.safetensors": b"old"}

    def fails(new, path):
        if path.name == stop:
            raise error
        original(new, path)

    monkeypatch.setattr(_atomic, "_move", fails)
    for stop in ("config.json", "new.json", "model.safetensors"):
        for name, content in old.items():
            (tmp_path / name).write_bytes(content)
        with pytest.raises(error), _atomic.replace(tmp_path, "model.safetensors") as new:
            for name in (*old, "new.json"):
                (new / name).write_bytes(b"new")
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == old


def test_errors_name_the_output(path, monkeypatch):
    """Not the hidden folder, which a disk without inodes has no room for."""

    def full(folder, *_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded", folder)

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match="Disk quota exceeded") as raised:
        eqq.save(path, {"w": jnp.ones(2)})
    assert raised.value.filename == str(path)
