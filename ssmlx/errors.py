"""The one exception that a user's mistake raises, and how another's text is shown.

Whatever reads what a user gives raises `InputError`, so docstrings inside the package do not
repeat it; those of `ssmlx.__all__` say when.
"""

import copyreg
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_MOST_NAMED = 3
_MOST_LETTERS = 80


class InputError(ValueError):
    """Bad input, described in one line: what was found, what was expected, what to do.

    The commands print the line and exit with code 2; nothing else in the package ends a run
    without a traceback.

    Args:
        found: what was found.
        expected: what was expected in its place.
        do: what to do about it.
    """

    def __init__(self, found: str, *, expected: str, do: str) -> None:
        """Make the one line of the three parts; characters that cannot be printed are written as
        escapes.
        """
        super().__init__(one_line(f"{found}; expected {expected}; {do}"))
        self.found = found
        self.expected = expected
        self.do = do

    def __reduce__(self) -> tuple[Any, ...]:
        """How it is pickled: with its line as it is and all attributes."""
        # By pickle's own rule it would be made anew of its line alone. A pool of processes that
        # cannot read what a worker raised waits for ever.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]

    def at(self, where: str) -> "InputError":
        """A new error with the same parts, whose line begins with `where`, a place among many."""
        return InputError(f"{where}: {self.found}", expected=self.expected, do=self.do)


class ContextLengthError(InputError):
    """A prompt leaves no room for an answer in the model's context.

    Attributes:
        num_tokens: tokens of the prompt.
        limit: tokens of the context.
        is_counted: whether the prompt has exactly `num_tokens`; else it has so many at least.
    """

    def __init__(self, num_tokens: int, limit: int, *, is_counted: bool = True) -> None:
        """Make the message for a prompt of `num_tokens`, or more unless `is_counted`, in a context
        of `limit` tokens.
        """
        found = f"the prompt has {'' if is_counted else 'at least '}{num_tokens} tokens"
        expected = f"less than the model's context of {limit}"
        super().__init__(found, expected=expected, do="shorten it")
        self.num_tokens = num_tokens
        self.limit = limit
        self.is_counted = is_counted


class NoRoomError(InputError):
    """An answer needs more memory than there is beside those that run; what is kept for later ones
    is gone by then. It may be asked for again when another one has ended.

    Attributes:
        wanted: bytes that it would hold.
        free: bytes that there are for it.
        limit: bytes that all answers may hold.
    """

    def __init__(self, wanted: int, free: int, limit: int) -> None:
        """Make the message, in GiB; it says to ask again where `wanted` is at most `limit`."""
        less = "make its prompt shorter, or give more memory (memory_gb, --memory)"
        if wanted <= limit:
            less = f"ask again when another one has ended, {less}"
        super().__init__(
            f"the answer needs {_gib(wanted)} of memory for its text",
            expected=f"{_gib(max(0, free))} at most, of the {_gib(limit)} for all answers",
            do=less,
        )
        self.wanted = wanted
        self.free = free
        self.limit = limit


def _gib(num_bytes: int) -> str:
    """Bytes as GiB, with three digits."""
    return f"{num_bytes / 2**30:.3g} GiB"


def one_line(text: str) -> str:
    """A text as one line that a terminal only shows: what cannot be printed, such as line ends and
    the codes that a terminal obeys, is written as escapes.
    """
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


_OBEYED = {
    number: None
    for number in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(number) not in "\n\t"
}


def without_controls(text: str) -> str:
    """A text without what a terminal obeys: control characters but line ends and tabs, and those
    that turn the direction of writing.

    Each goes by itself, so a sequence that is spread over several texts is broken all the same.
    """
    return text.translate(_OBEYED)


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; the name of its class where it says nothing.

    A first line that ends in a colon announces what stands below it: the first `_MOST_NAMED` of
    these lines are named, cut to 80 characters, and how many more there are. Not so of a TypeError,
    whose lines are signatures of functions.
    """
    first, *below = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    named = [line.rstrip(",.;")[:_MOST_LETTERS] for line in below if line]
    names_more = first.endswith(":") and named and not isinstance(error, TypeError)
    return f"{first} {join_first(named)}" if names_more else first


def join_first(names: Sequence[str]) -> str:
    """The first `_MOST_NAMED` names, joined by commas, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def quoted(value: object) -> str:
    """The `repr` of a value that was found, cut to 80 characters; its type if it has none."""
    try:
        return repr(value)[:_MOST_LETTERS]
    except Exception:  # of an object's own, or of a number of too many digits
        return f"a value of type {type(value).__name__}"


def require(ok: bool, found: str, *, expected: str, do: str) -> None:
    """Raise `InputError(found, expected=expected, do=do)` unless `ok`."""
    if not ok:
        raise InputError(found, expected=expected, do=do)


def unwritable_error(
    path: object, error: Exception, do: str = "choose another place"
) -> InputError:
    """An InputError that says why `path` cannot be written, to be raised by the caller."""
    found = f"cannot write {path} ({getattr(error, 'strerror', None) or first_line(error)})"
    return InputError(found, expected="a place that can be written", do=do)


@contextmanager
def name_file_in_os_errors(path: object) -> Iterator[None]:
    """Set `path` as the file name of an `OSError` from inside the block that has none; it goes on.

    That of a write to a full disk has none, for example.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def missing_package_error(what: str, error: Exception, extra: str) -> InputError:
    """An InputError that `what` cannot be imported, why, and which extra of ssmlx brings it.

    To be raised by the caller.

    Args:
        what: the package, as a message calls it.
        error: what importing it has raised.
        extra: the extra's name, as `pip install "ssmlx[...]"` takes it.
    """
    return InputError(
        f"{what} cannot be imported ({first_line(error)})",
        expected=f"what the extra {extra} brings",
        do=f'`pip install "ssmlx[{extra}]"`',
    )


def check_choice(flag: str, value: object, known: Sequence[str]) -> None:
    """Raise InputError where the `value` of the option `flag` is none of the `known` ones."""
    if value not in known:
        raise InputError(
            f"{flag} {value}", expected="one of " + ", ".join(known), do="choose one of them"
        )
