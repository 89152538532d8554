"""Writing folders and files whole or not at all, and keeping others out of them meanwhile."""

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
    name_file_in_os_errors,
    require,
    unwritable_error,
)

logger = logging.getLogger("ssmlx")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; do nothing where it is there.

    Raises:
        InputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable_error(folder, error) from error


def lock_without_waiting(file: int | BinaryIO, path: Path) -> None:
    """Lock an open file or folder, without waiting, until it is closed or this process ends.

    Where the file system has no locks, that is logged, and nothing is locked.

    Args:
        file: open, or its descriptor.
        path: of it, for messages.

    Raises:
        InputError: another process has the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"another run writes into {path}",
            expected="one at a time",
            do="wait for it, or choose another --out",
        ) from error
    except OSError:
        logger.info("%s cannot be locked: see that no other run writes into it", path)


@contextmanager
def locked_folder_removed_if_empty(folder: Path) -> Iterator[None]:
    """Make a folder where there is none, and lock it inside the block, see `lock_without_waiting`.

    Only processes that ask for the lock are kept out. At the end of the block, also of one that
    fails, the folder is removed if it is empty.

    Raises:
        InputError: another process has the lock, or the folder cannot be made.
    """
    make_folder(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock_without_waiting(handle, folder)
        try:
            yield
        finally:
            with suppress(OSError):  # where it is empty
                folder.rmdir()
    finally:
        os.close(handle)


def require_nothing_else_in(folder: Path, patterns: Sequence[str], do: str) -> None:
    """Raise InputError where a folder that is to be replaced holds what was not written there.

    Args:
        folder: which need not exist; a file in its place is refused.
        patterns: of the names of files and folders that are written there, as `fnmatch` takes them.
        do: what a message says is to be done.

    Raises:
        InputError: something else is in it, which would be deleted; the first names are given.
    """
    if not folder.is_dir():
        is_free = not os.path.lexists(folder)
        require(is_free, f"{folder} is a file", expected="a folder, or a new one", do=do)
        return
    names = sorted(one.name for one in folder.iterdir())
    others = [name for name in names if not any(fnmatchcase(name, one) for one in patterns)]
    found = f"{folder} also holds {join_first(others)}, which would be deleted"
    require(not others, found, expected="nothing but what is replaced", do=do)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `target`, which takes its place when the block ends
    well.

    An older `target` is then deleted with all that it held, see `require_nothing_else_in`; where it
    is a link, what it leads to is replaced. If the block fails or is interrupted, the temporary
    folder is removed and the older `target` stays. Folders above are made. The new folder's mode is
    755.

    Raises:
        InputError: the temporary folder cannot be made.
    """
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
    """Write a file beside `target` and rename it there: after a crash of this process it is the old
    one or the new one.

    An older file's mode is kept; where `target` is a link, what it leads to is replaced. Its folder
    must be there.

    Raises:
        OSError: it cannot be written; the error names a file.
    """
    target = target.resolve()
    work = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with name_file_in_os_errors(target):
            work.write_bytes(content)
        if target.exists():
            shutil.copymode(target, work)
        work.replace(target)
    finally:
        work.unlink(missing_ok=True)
