"""Files that appear when they are whole, and what killed processes have left of such files."""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import naming_file

_UNFINISHED = ".unfinished"
_LOCKED_AFTER = 5  # seconds


@contextmanager
def atomic_file(
    target: Path,  # in a folder that is there; if it is a link, what it leads to is replaced
    mode: int,  # permissions of the new file
) -> Iterator[BinaryIO]:
    """Yield a new binary file, which takes the place of `target` when the block ends well."""
    target = target.resolve()
    work = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_UNFINISHED}")
    with os.fdopen(os.open(work, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
        try:
            # `delete_unfinished_files` of other processes leaves a locked file alone.
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            with naming_file(target):
                file.flush()
                os.fsync(file.fileno())
            work.replace(target)
        finally:
            work.unlink(missing_ok=True)


def delete_unfinished_files(
    folder: Path,
    target_prefix: str = "",  # of the names of targets; empty for all
) -> list[Path]:
    """Delete what killed processes have left of `atomic_file`; the paths that were deleted."""
    cleared = []
    for path in folder.glob(f".*{_UNFINISHED}"):
        with suppress(OSError), path.open("rb") as file:
            # A writer's file is not locked yet when it is made.
            is_new = time.time() - os.fstat(file.fileno()).st_mtime < _LOCKED_AFTER
            if path.name.startswith(f".{target_prefix}") and not is_new:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                cleared.append(path)
    return cleared
