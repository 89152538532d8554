"""Words `key=value`, such as those of --drafter and --penalty: each key sets a field of a class."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

from .errors import InputError, require
from .settings import allowed_values, key_of, setting_types


@dataclass(frozen=True)
class Key:
    """A key: what help and messages show for its value, and how a value is parsed."""

    name: str
    shown: str
    expected: str
    parse: Callable[[str], Any]  # ValueError for a value of the wrong type

    def __str__(self) -> str:
        return f"{self.name}={self.shown}"

    @classmethod
    def of_field(cls, settings: type, one: Field[Any]) -> Key:
        """The key of a setting; its bounds are the settings class's to check."""
        allowed = allowed_values(settings, one)
        assert allowed is not None  # a number or a choice
        shown = "" if one.default is None else str(one.default)
        if allowed.choices:
            others = [word for word in allowed.choices if word != one.default]
            shown = "|".join([shown, *others] if shown else others)
            return cls(key_of(one), shown, f"one of {shown}", _one_of(allowed.choices))
        if setting_types(settings)[one.name].is_row:
            expected = "whole numbers with commas between"
            return cls(key_of(one), shown or "N,N,...", expected, _parse_int_list)
        if allowed.whole:
            return cls(key_of(one), shown or "N", "a whole number", int)
        return cls(key_of(one), shown or "X", "a number", float)

    @classmethod
    def of_path(cls, text: str) -> Key:
        """The key of a file, a folder or a name on the Hub, given as help shows it:
        "model=MODEL"."""
        name, _, shown = text.partition("=")
        return cls(name, shown, "a path or a name", _with_home_folder)


def split_words(option: str, text: str) -> list[str]:
    """Split an option's value into words as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"{option} {text!r} ({error})", expected="words", do="close the quotation mark"
        ) from error


def parse_pairs(option: str, words: Sequence[str], keys: Iterable[Key]) -> dict[str, Any]:
    """Parse `key=value` words into values by key; each key may stand once."""
    found: dict[str, Any] = {}
    known = {key.name: key for key in keys}
    for word in words:
        name, _, value = word.partition("=")
        require(
            name in known and value != "" and name not in found,
            f"{option} {word}",
            expected=f"keys of {option}, each once: {' '.join(map(str, known.values()))}",
            do="correct or omit it",
        )
        try:
            found[name] = known[name].parse(value)
        except ValueError:
            expected = known[name].expected
            raise InputError(f"{option} {word}", expected=expected, do="correct it") from None
    return found


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _parse_int_list(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def _with_home_folder(text: str) -> str:
    # In quotes, no shell does it.
    return str(Path(text).expanduser()) if text.startswith("~") else text
