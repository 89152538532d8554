"""Writing folders and files whole or not at all, and locking out other processes meanwhile."""

import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from ..errors import (
    InputError,
    join_first,
    naming_file,
    require,
    unwritable_error,
)

logger = logging.getLogger("ssmlx")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable_error(folder, error) from error


def lock_file(file: int | BinaryIO, path: Path) -> None:
    """Lock an open file until it is closed or this process ends, if its file system has locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"another run is writing to {path}",
            expected="one run at a time",
            do="wait for it, or choose another --out",
        ) from error
    except OSError:
        logger.info("%s cannot be locked: make sure that no other run writes to it", path)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for the lock out of a folder, which is made if missing."""
    make_folder(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock_file(handle, folder)
        try:
            yield
        finally:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
    finally:
        os.close(handle)


def require_nothing_else_in(folder: Path, patterns: Sequence[str], do: str) -> None:
    """Refuse to replace a folder that holds more than files of these patterns (as of `fnmatch`)."""
    if not folder.is_dir():
        is_free = not os.path.lexists(folder)
        require(is_free, f"{folder} is a file", expected="a folder, or a new path", do=do)
        return
    names = sorted(one.name for one in folder.iterdir())
    others = [name for name in names if not any(fnmatchcase(name, one) for one in patterns)]
    found = f"{folder} also holds {join_first(others)}, which would be deleted"
    require(not others, found, expected="only files that are replaced", do=do)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `target` when the block ends well.

    If `target` is a link, what it leads to is replaced. If the block fails, nothing changes.
    """
    # mkdtemp makes folders that only their owner can read, hence the mode below.
    target = target.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise unwritable_error(target, error) from error
    try:
        yield work
        work.chmod(0o755)
        old = work.with_name(work.name + ".old")
        if target.exists():
            target.rename(old)
        try:
            work.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_whole(target: Path, content: bytes) -> None:
    """Write a file so that a crash of this process leaves the old one or the new one.

    If `target` is a link, what it leads to is replaced. An older file's mode is kept.
    """
    target = target.resolve()
    work = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with naming_file(target):
            work.write_bytes(content)
        if target.exists():
            shutil.copymode(target, work)
        work.replace(target)
    finally:
        work.unlink(missing_ok=True)
