"""Writes a file or a new folder atomically.

That holds even if the process is killed, or if several write at the same time. Into a folder that exists, files move
one by one, the one that readers open first last, and an exception undoes the moves. A kill in between can leave new
files beside an old first one; shards have fresh names, so its index still reads.
"""

import contextlib
import errno
import glob
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


_END = ".eqquant.tmp"


@contextlib.contextmanager
def replace(path: Path, head: str | None = None, claim: Callable[[], Iterable[Path]] = tuple) -> Iterator[Path]:
    """Yields a temporary path. What is written there moves to `path` if the body succeeds.

    It is a file, or with `head` a folder. A folder that exists keeps its other files.

    - `head`: the file of a folder that a reader opens first. It moves last.
    - `claim`: raises if `path` must not be written, or returns the files that the new ones replace. It is called at the
        start, and again while no other process moves files there.
    """
    real = Path(os.path.realpath(path))  # a link stays a link
    exists = real.is_dir()
    if exists and head is None:
        raise IsADirectoryError(f"{path} must be a file. Got a folder, which only `shard_nbytes` writes into.")
    if real.exists() and not exists and not real.is_file():  # such as /dev/null, which must not be replaced
        raise OSError(f"{path} must be a file. Got a device, a pipe or a socket.")
    claim()
    with make_scratch(path) as scratch:
        new = scratch / real.name
        if head is not None:
            new.mkdir()
        yield new
        for file in [new] if head is None else new.iterdir():
            with file.open("r+b") as f:
                os.fsync(f.fileno())
        with _lock(scratch.parent) as handle:
            if real.is_dir() and not exists:
                message = "Another process made this folder meanwhile. Write again"
                raise FileExistsError(errno.EEXIST, message, str(path))
            old = claim()
            _move_all(new, real, head) if exists and head is not None else _move(new, real)
            for file in old:
                file.unlink(missing_ok=True)
            if handle is not None:
                os.fsync(handle)  # else the new names might not survive a loss of power


@contextlib.contextmanager
def make_scratch(path: Path) -> Iterator[Path]:
    """Makes a hidden folder, and removes it at the end.

    It lies in the folder `path`, or beside the file. A process that is killed leaves it, and the next one that writes
    `path` finds it unlocked, and removes it.
    """
    real = Path(os.path.realpath(path))
    where, start = real if real.is_dir() else real.parent, f".{real.name[:50]}."
    if not where.is_dir():
        raise FileNotFoundError(f"{path} must be in a folder that exists. Got {path.parent}, which does not.")
    with contextlib.ExitStack() as held:
        try:
            with _lock(where):
                for left in where.glob(f"{glob.escape(start)}????????{_END}"):
                    with contextlib.suppress(OSError), _lock(left, wait=False) as handle:
                        if handle is not None:  # the process that made it has ended
                            shutil.rmtree(left)
                scratch = Path(tempfile.mkdtemp(_END, start, where))
                held.callback(shutil.rmtree, scratch, ignore_errors=True)
                held.enter_context(_lock(scratch))
            yield scratch
        except OSError as e:
            # Of a write, such as to a full disk, which names no file or one that nobody knows.
            if e.filename is None or str(e.filename).startswith(str(where / start)):
                e.filename, e.filename2 = str(path), None
            raise


@contextlib.contextmanager
def _lock(folder: Path, wait: bool = True) -> Iterator[int | None]:
    """Locks a folder, and yields its handle.

    The operating system unlocks it when the process ends. Yields `None` if another process holds it, or where folders
    cannot be locked: Windows, some network file systems.
    """
    if sys.platform == "win32":
        yield None
        return
    import fcntl

    handle, locked = os.open(folder, os.O_RDONLY), False
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        yield handle if locked else None
    finally:
        if locked:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile has the handle too
        os.close(handle)


def _move(new: Path, path: Path) -> None:
    if path.exists():
        shutil.copymode(path, new)  # a user who could not read the old file cannot read the new one
    os.replace(new, path)


def _move_all(new: Path, folder: Path, head: str) -> None:
    """Moves all files of a folder into another, or none, `head` last."""
    names = sorted((p.name for p in new.iterdir()), key=lambda name: name == head)
    old = Path(tempfile.mkdtemp(dir=new.parent))
    try:
        for name in names:
            if name != head and (folder / name).exists():
                shutil.copy2(folder / name, old / name)
            _move(new / name, folder / name)
    except BaseException:
        moved = [name for name in names if not (new / name).exists()]
        for name in moved if head not in moved else ():
            os.replace(old / name, folder / name) if (old / name).exists() else (folder / name).unlink()
        raise
