"""The chat's terminal: what is typed, with its history and completion, and where answers go."""

from __future__ import annotations

import atexit
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from .running import print_note

MARK = '"""'  # begins and ends a message of several lines


class Screen:
    """The terminal: answers go to standard output, all else, dimmed, to standard error."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, TextIOWrapper):
            # A stray byte then spoils its message alone.
            sys.stdin.reconfigure(errors="surrogateescape")

    def note(self, text: str) -> None:
        print_note(text)

    def reply(self, text: str) -> None:
        print(text, end="", flush=True)

    def think(self, text: str) -> None:
        print_note(text, end="")

    def read(self) -> str | None:
        """What the user types next: a line, or a message of several lines after `MARK`, which is
        its beginning then too; None at the end of input.

        Ctrl-C discards it, prints how to leave, and reads anew.
        """
        while True:
            try:
                line = self._read_line("> ")
                if line is None or not line.startswith(MARK):
                    return line
                return self._read_to_mark(line.removeprefix(MARK))
            except KeyboardInterrupt:
                print("^C  (/bye leaves)", file=sys.stderr)

    def _read_to_mark(self, line: str) -> str:
        """The lines up to one that ends in `MARK`, or to the end of input."""
        lines = [line]
        while not lines[-1].rstrip().endswith(MARK):
            more = self._read_line("... ")
            if more is None:
                break
            lines.append(more)
        else:
            lines[-1] = lines[-1].rstrip().removesuffix(MARK)
        return MARK + "\n".join(lines).strip("\n")

    def _read_line(self, prompt: str) -> str | None:
        try:
            # Python reads lines that end in CR and LF so on Windows alone.
            return input(prompt if self.interactive else "").removesuffix("\r")
        except EOFError:
            if self.interactive:
                print(file=sys.stderr)
            return None


def edit_lines(
    history: Path,  # a file, which need not exist
    complete: Callable[[str], list[str]],  # from what stands before the cursor, to its last words
) -> None:
    """Have Tab complete words and the arrow keys give earlier lines, of which the last 1,000 are
    kept; do nothing without readline."""
    try:
        import readline
    except ImportError:
        return

    def nth_completion(word: str, number: int) -> str | None:
        found = complete(readline.get_line_buffer()[: readline.get_endidx()])
        return found[number] if number < len(found) else None

    readline.set_completer(nth_completion)
    readline.set_completer_delims(" ")
    is_libedit = "libedit" in (readline.__doc__ or "")  # as on macOS
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    readline.set_history_length(1000)

    @atexit.register
    def write() -> None:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)

    with suppress(OSError):  # none yet, or another program's
        readline.read_history_file(history)


@contextmanager
def call_on_first_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Inside the block, call `stop` at the first Ctrl-C; a second one raises KeyboardInterrupt. On
    the main thread alone."""

    def on_interrupt(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
