"""How tests check what is refused: by the exception's type, what its line names, the exit code.

The wording is free: `reworded.py` changes all of it.
"""

import re

import pytest

from ssmlx.errors import InputError


def refusal(function, *args, kind=InputError, **kwargs) -> str:
    """Call a function that has to raise an `InputError`, check its form, and return its line."""
    with pytest.raises(kind) as caught:
        function(*args, **kwargs)
    return line_of(caught.value)


def line_of(error: InputError) -> str:
    """Check that an error says in one line what was found, what was expected, and what to do."""
    line = str(error)
    parts = (error.found, error.expected, error.do)
    assert all(part.strip() for part in parts) and line.isprintable(), (parts, line)
    return line


def exit_code(main, *argv) -> int:
    """The exit code of a command's `main`, also where its parser raises SystemExit."""
    try:
        return main([*map(str, argv)])
    except SystemExit as stop:
        return stop.code


def exits(capsys, main, *argv, prog: str = r"\S+") -> str:
    """Run a command that has to refuse its arguments and print no answer; return its one line."""
    capsys.readouterr()
    assert exit_code(main, *argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return one_line(err, prog)


def one_line(err: str, prog: str = r"\S+") -> str:
    """Check that a failed command printed exactly one line, and return it."""
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert re.match(rf"(python -m )?{prog}: error: ", err), err
    assert "Traceback" not in err
    return err.strip()


def mentions(line: str, *found: str) -> bool:
    """Whether a line names all of these, each as a word of its own: --tree is not --tree-size."""
    return all(re.search(rf"(?<![\w-]){re.escape(one)}(?![\w-])", line) for one in found)


def found_in(line: str) -> str:
    """The first part of an error's line: what was found, without what was expected."""
    return line.partition("; expected ")[0]


def as_shown(text: str) -> str:
    """A text that the package has made, as a message shows it."""
    return text  # which `reworded` changes
