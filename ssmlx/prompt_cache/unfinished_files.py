"""Files that are seen when they are whole, and what killed processes have left of such."""

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
def atomic_file(target: Path, mode: int) -> Iterator[BinaryIO]:
    """Yield a new binary file to write, which takes the place of `target` when the block ends well.

    The file is written to disk before it is renamed. It is locked meanwhile, so that
    `delete_unfinished_files` of other processes leaves it alone. If the block fails, it is deleted
    and an older `target` stays. Where `target` is a link, what it leads to is replaced.

    Args:
        target: the path, in a folder that is there.
        mode: permissions of the new file.

    Raises:
        OSError: the file cannot be made, written or renamed.
    """
    target = target.resolve()
    work = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_UNFINISHED}")
    with os.fdopen(os.open(work, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            with naming_file(target):
                file.flush()
                os.fsync(file.fileno())
            work.replace(target)
        finally:
            work.unlink(missing_ok=True)


def delete_unfinished_files(folder: Path, target_prefix: str = "") -> list[Path]:
    """Delete the unfinished files of `atomic_file` that killed processes have left in a folder.

    Files that are locked, or were changed less than 5 seconds ago, stay; so do those that cannot be
    opened or deleted. Folders inside are not looked into.

    Args:
        folder: to look in.
        target_prefix: only unfinished files whose target's name begins with this; empty for all.

    Returns:
        The paths that were deleted.
    """
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
