"""Reading tensors strictly, and writing folders and files whole or not at all."""

import fcntl
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from ..errors import (
    InputError,
    first_line,
    join_first,
    name_file_in_os_errors,
    require,
    unwritable_error,
)
from ..json_files import parse_json
from ..mlx_thread import claim_process_for_mlx

logger = logging.getLogger("ssmlx")
_UNFINISHED = ".unfinished"
_LOCKED_AFTER = 5  # seconds


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


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `target`, which takes its place when the block ends
    well.

    An older `target` is then deleted with all that it held; where it is a link, what it leads to is
    replaced. If the block fails or is interrupted, the temporary folder is removed and the older
    `target` stays. Folders above are made. The new folder's mode is 755.

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
    work = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with name_file_in_os_errors(target):
            work.write_bytes(content)
        if target.exists():
            shutil.copymode(target, work)
        work.replace(target)
    finally:
        work.unlink(missing_ok=True)


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
            with name_file_in_os_errors(target):
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


class PartFile:
    """A file with what a long run has made so far: a line of settings, then a JSON list a line.

    It is open and locked until `close`.

    Attributes:
        path: of the file.
        done: the lists in the file, in order.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, fresh: bool = False) -> None:
        """Open or make the file, lock it, and read the lists that it has into `done`.

        A last line that was cut off is removed. A new or empty file gets the line of settings.

        Args:
            path: of the file, in a folder that is there.
            settings: JSON values that must be those in the file.
            fresh: empty the file first.

        Raises:
            InputError: another process writes into it, it cannot be opened or read, or its settings
                differ.
        """
        self.path = path
        self.done: list[list[Any]] = []
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise unwritable_error(path, error) from error
        try:
            lock_without_waiting(self._file, path)
            if fresh:
                self._file.truncate(0)
            whole = self._read_lists_and_count_bytes(settings)
            self._file.truncate(whole)  # a line that a kill cut short
            self._file.seek(whole)
            if not whole:
                self._append_line(settings)
        except BaseException:
            self._file.close()
            raise

    def append(self, value: list[Any]) -> None:
        """Write a list to the disk as a line, and add it to `done`. Once this returns, a kill does
        not lose it.

        Raises:
            OSError: it cannot be written; `done` stays as it is, and the file may end with a part
                of the line.
        """
        self._append_line(value)
        self.done.append(value)

    def close(self) -> None:
        self._file.close()

    def _append_line(self, value: Any) -> None:
        """Append a value as a line of JSON, and wait until the disk has it.

        Raises:
            OSError: it cannot be written; the error names the file.
        """
        with name_file_in_os_errors(self.path):
            self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read_lists_and_count_bytes(self, settings: dict[str, Any]) -> int:
        """Read the file into `done`, and check its settings.

        Returns:
            How many bytes, from the beginning, are whole lines; 0 of a file without any, whose
            settings count as equal.

        Raises:
            InputError: a whole line is no JSON, or a line behind the first is no list; or the
                settings differ, which are named.
        """
        data = self.path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        try:
            found, *self.done = [parse_json(line) for line in lines] or [settings]
            if not all(isinstance(one, list) for one in self.done):
                raise TypeError
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{self.path} cannot be read",
                expected="the finished part of an earlier run",
                do="delete it to start again",
            ) from error
        old = found if isinstance(found, dict) else {}
        names = [name for name in settings if old.get(name) != settings[name]]
        require(
            found == settings,
            f"{self.path} was made with another {', '.join(names) or 'command'}",
            expected="the command that began it",
            do="repeat that command, choose another --out, or delete the file to start again",
        )
        return sum(len(line) + 1 for line in lines)


def json_digest(values: Any) -> str:
    """Return 16 hexadecimal digits of JSON values' SHA-256, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def weights_and_configs_digest(folder: Path | None) -> str:
    """Return the SHA-256, in hexadecimal, over names and contents of the files `*.safetensors` and
    `*config.json` in a folder.

    All bytes are read, each time. Other files and folders inside do not count. For None, and for a
    folder without such files, it is the digest of nothing.
    """
    digest = hashlib.sha256()
    if folder is not None:
        for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*config.json"))):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def write_finite_tensors_in_place(
    path: Path, tensors: Mapping[str, mx.array], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file, in place over an older one; it is not replaced as a whole.

    Args:
        path: of the file, in a folder that is there.
        tensors: by name; they are evaluated.
        metadata: texts for the file's header; None for none.

    Raises:
        InputError: a tensor has NaN or infinity, or its sum overflows float32, before anything is
            written; or the file cannot be written.
    """
    odd = next((name for name, tensor in tensors.items() if not _is_finite(tensor)), None)
    found = f"{odd} has NaN or infinity in {path.name}"
    do = "choose a wider --dtype, or train anew"
    require(odd is None, found, expected="finite weights", do=do)
    try:
        mx.save_safetensors(str(path), dict(tensors), metadata)
    except RuntimeError as error:  # MLX's of a full disk
        raise unwritable_error(path, error) from error


def read_tensors(path: Path, what: str, names_begin_with: str = "") -> dict[str, mx.array]:
    """Read the tensors of a safetensors file, or those whose names begin so, evaluated.

    Args:
        path: of the file.
        what: it should hold, for messages.
        names_begin_with: a prefix of the names, which keep it; empty for all tensors.

    Returns:
        The tensors by name; empty where no name begins so.

    Raises:
        InputError: there is no file, it cannot be read, or this process may not use MLX, see
            `claim_process_for_mlx`.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist", expected=what, do="check the path")
    claim_process_for_mlx()
    try:
        loaded = mx.load(str(path), format="safetensors")
        assert isinstance(loaded, dict)
        found = {name: array for name, array in loaded.items() if name.startswith(names_begin_with)}
        mx.eval(found)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(
            f"{path} cannot be read ({first_line(error)}; {path.stat().st_size} bytes)",
            expected=f"{what}, a whole safetensors file",
            do="copy it again, it may be truncated",
        ) from error
    return found


def _is_finite(tensor: mx.array) -> bool:
    """Whether a tensor has no NaN and no infinity. It is told by its sum in float32, so a sum that
    overflows makes it False too.
    """
    # The sum is no number where a value is none, and several times as fast as a look at each.
    total: Any = tensor.astype(mx.float32).sum().item()
    return math.isfinite(total)


def check_tensors(
    found: Mapping[str, mx.array],
    expected: Mapping[str, tuple[int, ...]],
    source: Path,
    of_any_dtype: Collection[str] = ("draft_vocab",),
) -> None:
    """Raise InputError unless `found` has exactly the `expected` names and shapes, of finite
    floats.

    Args:
        found: tensors by name.
        expected: shapes by name.
        source: named in the message, which lists the first few tensors of every fault.
        of_any_dtype: names of tensors that need not be floats.
    """
    missing = [name for name in expected if name not in found]
    spare = [name for name in found if name not in expected]
    misshapen = [
        f"{name} {found[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    # What is misshapen, and may be huge, is not read.
    fitting = [name for name in found if found[name].shape == expected.get(name)]
    kinds = {"missing": missing, "spare": spare, "misshapen": misshapen}
    kinds["with NaN or infinity"] = [name for name in fitting if not _is_finite(found[name])]
    kinds["that are no floats"] = [
        name
        for name in fitting
        if name not in of_any_dtype and not mx.issubdtype(found[name].dtype, mx.floating)
    ]

    problems = [f"{kind}: {join_first(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise InputError(
            f"{source} has tensors {'; '.join(problems)}",
            expected=f"{len(expected)} tensors that fit its settings and the base model",
            do="use the files that belong together, or make them again",
        )
