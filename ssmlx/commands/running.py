"""How a command runs, ends and fails: exit codes, standard streams, log lines."""

from __future__ import annotations

import argparse
import codecs
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, cast

from ..bars import shown
from ..errors import InputError, one_line, quoted, require, without_controls
from ..loading.names import ADAPTER_LOG

_MOST_DIGITS = 6  # of the number of a process


def launched_rank() -> int:
    """Which of `mlx.launch`'s processes this is; the first one shows and writes for all."""
    rank = os.environ.get("MLX_RANK") or "0"
    found = f"MLX_RANK is {quoted(rank)}"
    is_number = rank.isascii() and rank.isdecimal() and len(rank) < _MOST_DIGITS
    expected = "the number of a process, as mlx.launch sets it"
    require(is_number, found, expected=expected, do="unset it")
    return int(rank)


@contextmanager
def silent_unless_first_rank() -> Iterator[None]:
    if launched_rank() == 0:
        yield
        return
    with Path(os.devnull).open("w") as sink, redirect_stdout(sink), redirect_stderr(sink):
        yield


class _PlainFormatter(logging.Formatter):
    """Formats log lines without what a terminal obeys: they may contain names from others'
    files."""

    def format(self, record: logging.LogRecord) -> str:
        return without_controls(super().format(record))


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Inside the block, log to standard error from INFO on, and show bars."""
    handler = logging.StreamHandler()
    logger = logging.getLogger("ssmlx")
    bars = shown.set(True)
    handler.setFormatter(_PlainFormatter("ssmlx: %(message)s"))
    handler.addFilter(lambda record: record.name != ADAPTER_LOG)
    level = logger.level
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a library's handler on the root would say each line again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
        shown.reset(bars)


def run_command(main: Callable[[], int | None], prog: str) -> int:
    """Run a command and return its exit code: 2 after one line for bad input or a file error, 130
    for Ctrl-C, 1 if another process of `mlx.launch` has ended, 0 for a closed pipe."""
    try:
        if rank := launched_rank():
            prog += f" (rank {rank})"
        with _usable_standard_streams(), silent_unless_first_rank(), logging_to_stderr():
            code = main() or 0
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        if "connection to a peer" not in str(error):
            raise
        print(f"{prog}: error: another process of the group has ended", file=sys.stderr)
        return 1
    except BrokenPipeError:
        _discard_output()
        return 0
    except (InputError, OSError) as error:  # a full disk, a name that is too long, ...
        shown_error = file_error(error) if isinstance(error, OSError) else error
        print(f"{prog}: error: {shown_error}", file=sys.stderr)
        if isinstance(error, OSError):
            _discard_output()
        return 2


def file_error(error: OSError) -> InputError:
    place = error.filename or "standard output"
    return InputError(
        f"{place}: {error.strerror or error}",
        expected="files that can be read and written, and room for them",
        do="choose another place",
    )


class Terminal:
    """A stream to a terminal that shows untrusted text and obeys nothing in it, see
    `without_controls`."""

    def __init__(self, stream: Any, *, has_bars: bool) -> None:
        self.unfiltered = stream
        self._has_bars = has_bars

    def write(self, text: str) -> int:
        first = "\r" if self._has_bars and text.startswith("\r") else ""
        self.unfiltered.write(first + without_controls(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def print_note(text: str, end: str = "\n") -> None:
    """Print on standard error, dimmed if that is a terminal."""
    before, after = ("\033[2m", "\033[0m") if isinstance(sys.stderr, Terminal) else ("", "")
    stream = getattr(sys.stderr, "unfiltered", sys.stderr)
    stream.write(before)
    sys.stderr.write(text)
    stream.write(after + end)
    sys.stderr.flush()


@contextmanager
def _usable_standard_streams() -> Iterator[None]:
    """Inside the block, replace a stream that a shell closed, which Python has as None, by the null
    device; a character that standard output cannot encode is written as an escape, such as
    \\u20ac."""
    with ExitStack() as restored:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                setattr(sys, name, restored.enter_context(Path(os.devnull).open(mode)))
                restored.callback(setattr, sys, name, None)
        out = sys.stdout
        if isinstance(out, TextIOWrapper) and out.errors in ("strict", "surrogateescape"):
            restored.callback(out.reconfigure, errors=out.errors)
            out.reconfigure(errors="backslashreplace")
        if out.isatty():
            plain = Terminal(out, has_bars=False)
            restored.enter_context(redirect_stdout(cast(TextIO, plain)))
        if sys.stderr.isatty():
            plain = Terminal(sys.stderr, has_bars=True)
            restored.enter_context(redirect_stderr(cast(TextIO, plain)))
        yield


def print_json(value: object) -> None:
    """Print JSON as one line at once; in ASCII if standard output is not UTF-8."""
    encoding = sys.stdout.encoding or "utf-8"  # text that stays in memory has none
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    print(json.dumps(value, ensure_ascii=not is_utf8), flush=True)


def _discard_output() -> None:
    """Send standard output to the null device, unwritten text too, so that Python's end does not
    fail."""
    with suppress(OSError, ValueError), Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def confirmed(
    act: str,  # what would be done, such as "delete FOLDER"
    args: argparse.Namespace,  # with `yes`
) -> bool:
    """Whether --yes or the user on the terminal agrees; InputError without both."""
    if args.yes:
        return True
    can_ask = sys.stdin.isatty() and sys.stderr.isatty()
    expected = "--yes, because there is no terminal to ask on"
    require(can_ask, act, expected=expected, do="add --yes")
    print(f"{one_line(act)}? [y/N] ", end="", file=sys.stderr, flush=True)
    is_wanted = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not is_wanted:
        print("nothing was deleted", file=sys.stderr)
    return is_wanted


def make_main(
    prog: str,
    parse: Callable[[list[str] | None], argparse.Namespace],
    act: Callable[[argparse.Namespace], int | None],
) -> Callable[..., int]:
    """The `main` of a command, which takes its words, or None for the process's own."""

    def main(argv: list[str] | None = None) -> int:
        return run_command(lambda: act(parse(argv)), prog)

    return main


def with_lock_on_out_folder(
    act: Callable[[argparse.Namespace], int | None],
) -> Callable[[argparse.Namespace], int | None]:
    """A command that runs with the folder `args.out` locked; it is made if there is none, and
    removed afterwards if empty."""

    def held(args: argparse.Namespace) -> int | None:
        from ..loading.files import locked_folder

        with locked_folder(args.out):
            return act(args)

    return held
