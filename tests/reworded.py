"""A plugin that rewords every message, for tests that must not depend on wording:

    PYTHONPATH=tests python -m pytest -p reworded

Words of prose in errors, log messages and what is printed on standard error become tildes. Names
(of options, fields, keys, files), values and the form of an error's line stay.
"""

import argparse
import ast
import builtins
import logging
import re
import sys
from functools import cache
from pathlib import Path

import refusals
from starlette.exceptions import HTTPException

from ssmlx.commands import running
from ssmlx.errors import InputError

_ROOT = Path(__file__).parents[1]
_ROOMS = ("ssmlx", "convert", "perf", "examples")
_WORD = re.compile(r"(?<![\w./=\"'`\-\[\]<{%$])[a-z]{2,}(?![\w/=\"'`\-\[\]>}]|\.\w)")
_QUOTED = re.compile(r"""((?<!\w)(?:'[^']*'|"[^"]*"|`[^`]*`))""")
_FIXED = {
    "error",  # as in `prog: error: ...`, the form of a command's failure
    "llguidance",  # a package
    "too", "long", "maximum",  # of what clients of the server look for in a message
}  # fmt: skip


@cache
def prose() -> frozenset[str]:
    """The words of the sources' texts that are not names in the sources too."""
    words: set[str] = set()
    names: set[str] = set()
    docstrings: set[ast.expr] = set()
    for path in (path for room in _ROOMS for path in (_ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Expr(value=ast.Constant()):
                    docstrings.add(node.value)
                case ast.Constant(value=str(text)) if " " in text and node not in docstrings:
                    words.update(_WORD.findall(text))
                case ast.Constant(value=str(name)):
                    names.add(name)
                case (
                    ast.keyword(arg=str(name))
                    | ast.arg(arg=name)
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    names.add(name)
    return frozenset(words - names - _FIXED)


def reword(text):
    """A text with tildes for its words of prose, but not in quotation marks; others as they are."""
    if not isinstance(text, str):
        return text
    parts = _QUOTED.split(text)
    parts[::2] = [_WORD.sub(_tildes_for_prose, part) for part in parts[::2]]
    return "".join(parts)


def _tildes_for_prose(word):
    return "~" * len(word[0]) if word[0] in prose() else word[0]


def _reword_records():
    make = logging.getLogRecordFactory()

    def made(*args, **kwargs):
        record = make(*args, **kwargs)
        if record.name == "ssmlx":
            record.msg = reword(record.msg)
            if isinstance(record.args, tuple):
                record.args = tuple(map(reword, record.args))
        return record

    logging.setLogRecordFactory(made)


def _reword_prints():
    show = builtins.print

    def shown(*values, file=None, **kwargs):
        show(*map(reword, values) if file is sys.stderr else values, file=file, **kwargs)

    builtins.print = shown
    note = running.print_note
    running.print_note = lambda text, *args, **kwargs: note(reword(text), *args, **kwargs)


def pytest_configure():
    refusals.as_shown = reword
    make = InputError.__init__
    InputError.__init__ = lambda self, found, *, expected, do: make(
        self, reword(found), expected=reword(expected), do=reword(do)
    )
    _reword_records()
    _reword_prints()
    fail = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = lambda self, message: fail(self, reword(message))
    refuse = HTTPException.__init__
    HTTPException.__init__ = lambda self, status_code, detail=None, *args, **more: refuse(
        self, status_code, reword(detail), *args, **more
    )
