"""The command lines that documents, help texts and messages name, and whether they parse.

Run as a script, it parses the commands of an installed wheel, outside of the checkout:
`python tests/named_commands.py`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "*.md",
    "docs/*.md",
    "ssmlx/**/*.md",
    "convert/**/*.md",
    "perf/*.md",
    "examples/**/*.md",
)
SOURCES = ("ssmlx/**/*.py", "convert/**/*.py", "perf/**/*.py", "examples/**/*.py")
OURS = ("ssmlx", "convert", "perf", "examples", "tests")
"""The packages whose commands are checked; others, such as mlx_lm, are other projects'."""
_PLACEHOLDER = "1"
"""Stands for what an f-string fills in; it is a number, a text and a path at once."""
_SEPARATORS = set("();<>|&\n")
_ASSIGNMENT = re.compile(r"""(?m)^(\w+)=('[^']*'|"[^"]*"|\S+)$""")
_LOOP = re.compile(r"\bfor (\w+) in (\S+)")


@dataclass(frozen=True)
class NamedCommand:
    """A command line as a document or a source file names it.

    Attributes:
        place: the file, relative to the checkout.
        module: what follows `python -m`.
        words: the words after it.
        is_whole: whether it is to be run as it stands. Of a command that prose mentions, required
            options, and the value of the last one, may be missing.
    """

    place: str
    module: str
    words: tuple[str, ...] = ()
    is_whole: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join([self.module, *self.words])}"


class _Parsed(BaseException):
    """Raised in the place of all that a command does once its options are parsed."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options


def commands_of_shell(text: str, variables: dict[str, str]) -> Iterator[list[str]]:
    """Yield the words of every command in lines of bash.

    Args:
        text: the lines. `$NAME` is replaced where NAME was assigned, in them or before; a loop
            runs once, with its first value.
        variables: values by name from earlier lines of the document; these lines' are added.
    """
    text = re.sub(r"(?m)(?<!\S)#.*$", "", text).replace("\\\n", " ")
    for name, value in _ASSIGNMENT.findall(text):
        variables[name] = value[1:-1] if value[0] in "'\"" else value
    text = _ASSIGNMENT.sub("", text)
    values = {**variables, **dict(_LOOP.findall(text))}
    for name, value in values.items():
        text = text.replace(f'"${name}"', shlex.quote(value))
        text = re.sub(rf"\${name}\b", lambda _, value=value: value.replace("\n", " "), text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in lexer:
        if set(word) <= _SEPARATORS:
            yield words
            words = []
        else:
            words.append(word)
    yield words


def named_command(
    words: list[str], place: str, scripts: dict[str, str], *, is_whole: bool
) -> NamedCommand | None:
    """The command that words of a shell name; None where it is none of this project's.

    Args:
        words: of one command. What stands before `python -m`, such as a launcher, is passed over.
        place: as `NamedCommand` has it.
        scripts: modules by the names of the scripts that run them.
        is_whole: as `NamedCommand` has it.
    """
    for position, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in scripts and position == 0:
            return NamedCommand(place, scripts[name], tuple(words[1:]), is_whole)
        is_python = re.fullmatch(r"python3?", name) and words[position + 1 : position + 2] == ["-m"]
        if is_python and len(words) > position + 2:
            module = words[position + 2]
            if module.partition(".")[0] not in OURS:
                return None
            return NamedCommand(place, module, tuple(words[position + 3 :]), is_whole)
    return None


def script_modules() -> dict[str, str]:
    """The module that `python -m` runs for each script of pyproject.toml, by the script's name."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.findall(r'(?m)^(ssmlx-[\w-]+) = "([\w.]+):main"$', text)
    return {
        name: target.replace(".commands", "").removesuffix(".__main__") for name, target in found
    }


def commands_of_document(path: Path) -> Iterator[NamedCommand]:
    """Yield the commands of a Markdown file: whole ones in blocks of code, parts in code spans."""
    place = str(path.relative_to(ROOT))
    scripts = script_modules()
    text = path.read_text()
    variables: dict[str, str] = {}
    blocks = r"(?ms)^```(\w*)\n(.*?)^```"
    for language, block in re.findall(blocks, text):
        if language == "bash" or re.match("python -m ", block):
            for words in commands_of_shell(block, variables):
                if (command := named_command(words, place, scripts, is_whole=True)) is not None:
                    yield command
    for span in re.findall(r"`([^`]+)`", re.sub(blocks, "", text)):
        yield from _commands_of_prose(span, place, scripts)


def options_of_source(path: Path) -> set[str]:
    """Return the options, such as `--adapter`, that the texts of a Python file name."""
    named = r"(?<![\w-])--[a-z][a-z0-9-]+"
    return {option for text in _texts_of(path) for option in re.findall(named, text)}


def commands_of_source(path: Path) -> Iterator[NamedCommand]:
    """Yield the commands in the texts of a Python file: help, messages and docstrings.

    A line that begins with a command, as those of examples do, names a whole one.
    """
    place = str(path.relative_to(ROOT))
    scripts = script_modules()
    for text in _texts_of(path):
        text = text.replace("{{", "{").replace("\\\n", " ")
        for line in text.splitlines():
            if re.match(r"\s+(echo .*\| )?python -m ", line):
                for words in commands_of_shell(line, {}):
                    if (command := named_command(words, place, scripts, is_whole=True)) is not None:
                        yield command
            else:
                spans = re.findall(r"`([^`]+)`", line)
                bare = re.findall(r"python -m [^`,;()]*", re.sub(r"`[^`]+`", "", line))
                for span in (*spans, *bare):
                    yield from _commands_of_prose(span, place, scripts)


def _commands_of_prose(text: str, place: str, scripts: dict[str, str]) -> Iterator[NamedCommand]:
    """Yield the commands that a few words name; nothing where they are no command."""
    names_script = text.partition(" ")[0] in scripts
    if not names_script and not re.search(r"\bpython3? -m ", text):
        return
    for words in commands_of_shell(text.replace("\n", " ").rstrip(" .:"), {}):
        if (command := named_command(words, place, scripts, is_whole=False)) is not None:
            yield command


def _texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a Python file, those that are joined as one, with placeholders."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else _PLACEHOLDER
                for part in node.values
            )
            continue
        value = getattr(node, "value", None)
        if isinstance(node, ast.Constant) and isinstance(value, str) and id(node) not in parts:
            yield value


def all_commands() -> list[NamedCommand]:
    """Every command that the checkout's documents and sources name, each once a file."""
    found: dict[NamedCommand, None] = {}
    for patterns, read in ((DOCUMENTS, commands_of_document), (SOURCES, commands_of_source)):
        for pattern in patterns:
            for path in sorted(ROOT.glob(pattern)):
                if path.name != "CHANGELOG.md" and ".venv" not in path.parts:
                    found |= dict.fromkeys(read(path))
    return list(found)


def parse(
    command: NamedCommand, known_options: set[str] | None = None
) -> argparse.Namespace | None:
    """Parse a command's options with its own parser; nothing of it is run.

    Args:
        command: to parse.
        known_options: all options of the parser are added to it, also where they do not parse.

    Returns:
        The options; None where it asks for `--help`.

    Raises:
        ValueError: they do not parse, or the module has no `main` to run.
    """
    words = list(command.words)

    def parse_args(
        parser: argparse.ArgumentParser, args: object = None, namespace: object = None
    ) -> argparse.Namespace:
        if known_options is not None:
            known_options.update(one for action in parser._actions for one in action.option_strings)
        if not command.is_whole:
            _relax(parser, words)
        options, rest = parser.parse_known_args(words)
        unknown = [word for word in rest if command.is_whole or word.strip(_PLACEHOLDER)]
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        raise _Parsed(options)

    said = io.StringIO()
    try:
        with (
            patch.object(argparse.ArgumentParser, "parse_args", parse_args),
            patch.object(argparse.ArgumentParser, "parse_intermixed_args", parse_args),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(said),
        ):
            _main_of(command.module)(words)
    except _Parsed as parsed:
        return parsed.options
    except SystemExit as exit:
        if not exit.code:
            return None
    raise ValueError(f"{command} does not parse: {said.getvalue().strip()}")


def _main_of(module: str):
    package = f"{module}.__main__"
    try:
        found = import_module(package)
    except ModuleNotFoundError as error:
        if error.name not in (package, module):
            raise
        found = import_module(module)
    if not hasattr(found, "main"):
        raise ValueError(f"{module} has no main")
    return found.main


def _relax(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Let a parser accept a part of a command; a value is added for a last option without one."""
    for action in parser._actions:
        action.required = False
        if words and words[-1] in action.option_strings and action.nargs in (None, "+"):
            words.append(next(iter(action.choices or ()), _PLACEHOLDER))
    for group in parser._mutually_exclusive_groups:
        group.required = False


def main() -> None:
    """Parse every command that needs no checkout, with whatever `ssmlx` is installed."""
    for command in all_commands():
        module = command.module
        if module.partition(".")[0] == "convert":
            module = f"ssmlx.{module}"
        if module.startswith("ssmlx"):
            parse(NamedCommand(command.place, module, command.words, command.is_whole))
            print("parsed", command)


if __name__ == "__main__":
    sys.exit(main())
