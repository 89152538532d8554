"""`InputError`, the one exception for a user's mistake, and how untrusted text is shown in
messages.

All code that reads a user's input raises it, so docstrings inside the package do not repeat it;
those of `ssmlx.__all__` say when.
"""

import copyreg
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_MOST_NAMED = 3
_MOST_LETTERS = 80


class InputError(ValueError):
    """Bad input, described in one line: what was found, what was expected, what to do.

    The commands print the line and exit with code 2; nothing else in the package ends a run without
    a traceback.

    Args:
        found: what was found.
        expected: what was expected in its place.
        do: what to do about it.
    """

    def __init__(self, found: str, *, expected: str, do: str) -> None:
        super().__init__(one_line(f"{found}; expected {expected}; {do}"))
        self.found = found
        self.expected = expected
        self.do = do

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle would call the class with the line alone, which fails, and a pool of processes that
        # cannot read what a worker raised waits for ever.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]

    def at(self, where: str) -> "InputError":
        """The same error, with a line that begins with `where`, one place among many."""
        return InputError(f"{where}: {self.found}", expected=self.expected, do=self.do)


class ContextLengthError(InputError):
    """A prompt leaves no room for an answer in the model's context.

    Attributes:
        num_tokens: tokens of the prompt.
        limit: tokens of the context.
        is_counted: whether the prompt has exactly `num_tokens`; otherwise it has at least so many.
    """

    def __init__(self, num_tokens: int, limit: int, *, is_counted: bool = True) -> None:
        found = f"the prompt has {'' if is_counted else 'at least '}{num_tokens} tokens"
        expected = f"less than the model's context of {limit}"
        super().__init__(found, expected=expected, do="shorten it")
        self.num_tokens = num_tokens
        self.limit = limit
        self.is_counted = is_counted


class NoRoomError(InputError):
    """An answer needs more memory than running answers leave, with no cached prompts left.

    If `wanted` is at most `limit`, ask again when another answer has ended.

    Attributes:
        wanted: bytes that it would hold.
        free: bytes that there are for it.
        limit: bytes that all answers may hold.
    """

    def __init__(self, wanted: int, free: int, limit: int) -> None:
        less = "make its prompt shorter, or allow more memory (memory_gb, --memory)"
        if wanted <= limit:
            less = f"ask again when another one has ended, {less}"
        super().__init__(
            f"the answer needs {_gib(wanted)} of memory for its text",
            expected=f"at most {_gib(max(0, free))}, of the {_gib(limit)} for all answers",
            do=less,
        )
        self.wanted = wanted
        self.free = free
        self.limit = limit


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def one_line(text: str) -> str:
    """A text as one line that a terminal only shows: everything else is written as escapes."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


_OBEYED = {  # control characters, and those that change the direction of writing
    number: None
    for number in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(number) not in "\n\t"
}


def without_controls(text: str) -> str:
    """A text without what a terminal obeys; line ends and tabs stay."""
    # Each is removed by itself, so a sequence that is spread over several texts is broken too.
    return text.translate(_OBEYED)


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; the name of its class if it says nothing."""
    # A first line that ends in a colon announces the lines below, which are named too; those of a
    # TypeError are signatures of functions.
    first, *below = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    named = [line.rstrip(",.;")[:_MOST_LETTERS] for line in below if line]
    names_more = first.endswith(":") and named and not isinstance(error, TypeError)
    return f"{first} {join_first(named)}" if names_more else first


def join_first(names: Sequence[str]) -> str:
    """The first `_MOST_NAMED` names, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def quoted(value: object) -> str:
    """The `repr` of a value, cut to 80 characters; its type if it has none."""
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
    """The error for a `path` that cannot be written; the caller raises it."""
    found = f"cannot write {path} ({getattr(error, 'strerror', None) or first_line(error)})"
    return InputError(found, expected="a place that can be written", do=do)


@contextmanager
def naming_place(where: str) -> Iterator[None]:
    """Inside the block, begin the line of an InputError with `where`, one place among many."""
    try:
        yield
    except InputError as error:
        raise error.at(where) from error


@contextmanager
def naming_file(path: object) -> Iterator[None]:
    """Inside the block, give an OSError without a file name that of `path`: that of a full disk has
    none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def missing_package_error(what: str, error: Exception, extra: str) -> InputError:
    """The error for a package that cannot be imported, with the extra of ssmlx that installs it;
    the caller raises it."""
    return InputError(
        f"{what} cannot be imported ({first_line(error)})",
        expected=f"the packages of the extra {extra}",
        do=f'run `pip install "ssmlx[{extra}]"`',
    )


def check_choice(flag: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(
            f"{flag} {value}", expected="one of " + ", ".join(known), do="choose one of them"
        )
