"""The parser that every command has, and the rows that its options are written as.

Light on purpose: `--help` must not wait for MLX.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError, quoted
from ..json_files import parse_json


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit code 2; a `Path` may not be empty."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", Path, _path_not_empty)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2]
        # Of other programs: --adapter-path is --adapter here.
        near = [one for one in self._option_string_actions if unknown.startswith(one)]
        hint = f"; did you mean {max(near, key=len)}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message}{hint}; see {self.prog} --help\n")


def _path_not_empty(text: str) -> Path:
    if not text:  # which pathlib takes for the working directory: a shell variable that is not set
        raise argparse.ArgumentTypeError("a path was expected, and it is empty")
    return Path(text)


def make_parser(
    module: str,  # such as "ssmlx.chat"
    paragraphs: str
    | None,  # the first stands before the options, the others are the epilog's default
    epilog: str | None = None,  # text after the options
    usage: str | None = None,  # what follows the command in the usage line; None: all options
) -> Parser:
    """The parser of `python -m <module>`, which has --help and no other option yet."""
    description, _, more = (paragraphs or "").partition("\n\n")
    parser = Parser(
        prog=f"python -m {module}",
        usage=f"python -m {module} {usage}" if usage else None,
        description=description,
        epilog=epilog or more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    return parser


def add_int_options(
    parser: argparse._ActionsContainer, *rows: tuple[str, int, str], metavar: str | None = None
) -> None:
    """Add options of whole numbers; rows are (name without dashes, default, help)."""
    for name, default, text in rows:
        add_options(parser, (f"--{name}", metavar, f"{text} (default: %(default)s)", default))


def parse_json_object(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(found := parse_json(text), dict):
            return found
    raise argparse.ArgumentTypeError(f"{quoted(text)} is not a JSON object")


def add_prompt_cache_option(group: argparse._ActionsContainer, what: str, more: str = "") -> None:
    text = f"keep in FILE how the model processed {what}: a later run that begins alike is faster"
    add_options(group, ("--prompt-cache", "FILE", text + more, Path))


def add_yes_option(parser: argparse.ArgumentParser) -> None:
    """Add --yes, which `running.confirmed` reads."""
    add_options(parser, ("--yes", None, "delete without asking", bool))


def unescape_newlines(text: str) -> str:
    """A text in which \\n is a line end, which is hard to type in a shell."""
    return text.replace("\\n", "\n")


def add_options(
    group: argparse._ActionsContainer,
    *rows: tuple[Any, ...],  # (flag, metavar or None, help, default or type, allowed values if few)
) -> None:
    """Add options, one a row. In place of a default, `bool` makes a flag without a value, `list` an
    option that may be repeated, and a list of values one that takes several; any other type has no
    default."""
    for flag, word, text, default, *choices in rows:
        more: dict[str, Any] = {"type": default, "choices": choices[0] if choices else None}
        if default is bool:
            more = {"action": "store_true"}
        elif default is list:
            more = {"action": "append"}
        elif isinstance(default, list):
            more |= {"type": type(default[0]), "default": default, "nargs": "+"}
        elif not callable(default):
            more |= {"type": type(default), "default": default}
        group.add_argument(flag, help=text, **more, **({"metavar": word} if word else {}))


def reject_given_options(args: argparse.Namespace, names: Iterable[str], needs: str) -> None:
    """Refuse options that do nothing without what they need, if one is given: neither None nor
    False."""
    for name in names:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            refuse_option("--" + name.replace("_", "-"), needs)


def refuse_option(option: str, needs: str) -> NoReturn:
    raise InputError(f"{option} would do nothing here", expected=needs, do=f"omit {option}")
