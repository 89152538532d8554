"""Words `key=value`, such as those of --drafter and --penalty."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import InputError, require


def split_words(option: str, text: str) -> list[str]:
    """Split an option's value into words as a shell does.

    Args:
        option: for the message.
        text: the value.

    Raises:
        InputError: a quotation mark is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"{option} {text!r} ({error})", expected="words", do="close the quotation mark"
        ) from error


def parse_pairs(option: str, words: Sequence[str], known_pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` words.

    Args:
        option: for messages.
        words: the words; each key may stand once.
        known_pairs: the known keys with what the help shows for their values, such as "file=FILE"
            or "tokens=4"; see `_parse_value`.

    Returns:
        Values by key, of the types that `known_pairs` says.

    Raises:
        InputError: a key is unknown, repeated or without a value, or a value is of the wrong type.
    """
    found: dict[str, Any] = {}
    known = dict(one.split("=") for one in known_pairs)
    for word in words:
        key, _, value = word.partition("=")
        require(
            key in known and value != "" and key not in found,
            f"{option} {word}",
            expected=f"keys of {option}, each once: {' '.join(known_pairs)}",
            do="correct or drop it",
        )
        found[key] = _parse_value(f"{option} {word}", known[key], value)
    return found


def _parse_value(option_and_word: str, placeholder: str, text: str) -> Any:
    """Parse one value.

    Args:
        option_and_word: for messages.
        placeholder: what the help shows for the value, which says its type: "a|b" one of these
            words, capitals such as "FILE" a text or a path, "N" or digits an int, "X", "P" or a
            decimal number a float, "N,N,..." a tuple of ints.
        text: the value. A leading `~` of a path becomes the home folder.

    Returns:
        The value, of that type; words and paths as str.

    Raises:
        InputError: it is of the wrong type.
        ValueError: `placeholder` says nothing that is known, which is a mistake in `DRAFTERS`.
    """
    if "|" in placeholder:
        words = placeholder.split("|")
        expected = f"one of {placeholder}"
        require(text in words, option_and_word, expected=expected, do="choose one of them")
        return text
    if len(placeholder) > 1 and placeholder.isalpha() and placeholder.isupper():
        # In quotes, no shell does it.
        return str(Path(text).expanduser()) if text.startswith("~") else text
    expected, parse = _number_parser(placeholder)
    try:
        return parse(text)
    except ValueError:
        raise InputError(option_and_word, expected=expected, do="correct it") from None


def _number_parser(placeholder: str) -> tuple[str, Callable[[str], Any]]:
    """Return what a message expects where the help shows a number, and the function that parses it.

    Args:
        placeholder: what the help shows for the value; see `_parse_value`.

    Raises:
        ValueError: `placeholder` stands for no number.
    """
    if placeholder == "N,N,...":
        return "whole numbers with commas between", _parse_int_list
    if placeholder == "N" or placeholder.isdigit():
        return "a whole number", int
    if placeholder not in ("X", "P"):
        float(placeholder)
    return "a number", float


def _parse_int_list(text: str) -> tuple[int, ...]:
    """Parse whole numbers with commas between, such as "4,3".

    Raises:
        ValueError: it is anything else.
    """
    return tuple(int(one) for one in text.split(","))
