"""The finished part of a long run, which a stopped one goes on behind."""

import json
import os
from pathlib import Path
from typing import Any

from ..errors import InputError, naming_file, require, unwritable_error
from ..json_files import parse_json
from ..loading.files import lock_file


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
            lock_file(self._file, path)
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
        with naming_file(self.path):
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


def count_lists_in_part_file(path: Path) -> int:
    """Count the lists in the file of a `PartFile`, by its whole lines alone; 0 without a file. The
    file is not locked.
    """
    if not path.exists():
        return 0
    with path.open("rb") as file:
        lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return max(0, lines - 1)  # the first has the settings
