"""Files and folders that appear whole: a reader finds the old one or the new one.

That holds even if the process is killed.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def check_folder(path: Path) -> None:
    """Raises if there is no folder for `path` to be written in."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} must be in a folder that exists. Got {path.parent}, which does not.")


@contextlib.contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file, and moves it to `path` if the body raises nothing.

    A process that is killed may leave the temporary file, `.name.<random>.tmp`, which nothing reads.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    if path.is_dir():
        raise IsADirectoryError(f"{path} must be a file. Got a folder, which only `shard_nbytes` writes into.")
    if path.exists() and not path.is_file():  # such as /dev/null, which must not be replaced
        raise OSError(f"{path} must be a file. Got a device, a pipe or a socket.")
    check_folder(path)
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as f:
            if path.exists():
                shutil.copymode(path, temporary)  # a user who could not read the old file cannot read the new one
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.filename is None:  # of a write, such as to a full disk
            e.filename = str(path)
        raise
    sync_folder(path.parent)


def stage(whole: contextlib.ExitStack, path: Path, content: bytes) -> None:
    """Writes a file to the disk, which moves to `path` at the end of `whole` if nothing raises."""
    f = whole.enter_context(open_replacement(path))
    f.write(content)
    f.flush()
    os.fsync(f.fileno())


@contextlib.contextmanager
def make_folder(folder: Path) -> Iterator[Path]:
    """Yields the folder to write into.

    It is the folder that exists, or one beside it, which gets its name if nothing raises.
    """
    folder = Path(os.path.realpath(folder))  # a link stays a link
    if folder.exists():
        yield folder
        return
    check_folder(folder)
    temporary = folder.with_name(f".{folder.name[:200]}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        try:
            os.replace(temporary, folder)
        except OSError as e:
            if not folder.exists():
                raise
            message = "Another process made this folder meanwhile. Write again"
            raise FileExistsError(errno.EEXIST, message, str(folder)) from e
    except BaseException as e:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(e, OSError) and isinstance(e.filename, str):
            e.filename = e.filename.replace(temporary.name, folder.name)
        raise
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder survive a loss of power, where the system can do that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
