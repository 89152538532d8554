"""Stores the finished part of a long run, so that a stopped one can continue."""

import json
import os
from pathlib import Path
from typing import Any

from ..errors import InputError, naming_file, require, unwritable_error
from ..json_files import parse_json
from ..loading.files import lock_file


class PartFile:
    """A file with what a long run has made so far: a line of settings, then a JSON list per line.

    It is open and locked until `close`. `done` has its lists, in order.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],  # JSON values that must be those in the file
        *,
        fresh: bool = False,  # empty the file first
    ) -> None:
        self.path = path
        self.done: list[list[Any]] = []
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise unwritable_error(path, error) from error
        try:
            lock_file(self._file, path)
            if fresh:
                self._file.truncate(0)
            whole = self._read_lists(settings)
            self._file.truncate(whole)  # a line that a kill cut short
            self._file.seek(whole)
            if not whole:
                self._append_line(settings)
        except BaseException:
            self._file.close()
            raise

    def append(self, value: list[Any]) -> None:
        """Append a list, which survives a kill once this returns."""
        self._append_line(value)
        self.done.append(value)

    def close(self) -> None:
        self._file.close()

    def _append_line(self, value: Any) -> None:
        """Append a line, and wait until it is on disk."""
        with naming_file(self.path):
            self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read_lists(self, settings: dict[str, Any]) -> int:
        """Fill `done`; return the length in bytes of the whole lines."""
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


def count_lists(path: Path) -> int:
    """Count the lists in a file, without locking it."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return max(0, lines - 1)  # the first has the settings
